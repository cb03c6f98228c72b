/* The stand-in nvidia-smi: topo and nvlink. Forms: strings of nvidia-smi 535.261.03, and `topo -m` of hosts
 * with A10 and H100 as quoted in public. Of NICs nothing is known here. */
#include "smi.h"

static const char matrix_legend[] =
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA "
    "node\n"
    "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
    "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
    "  PIX  = Connection traversing at most a single PCIe bridge\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n";
static const char peer_legend[] =
    "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
    "  GNS  = GPU not supported\n  TNS  = Topology not supported\n  NS   = Not supported\n  U    = Unknown\n";

enum { LINKS = 36 };

/* Active links of a GPU to a peer; NULL: to what is no GPU, an NVSwitch. */
static unsigned links_to(const gpu *one, const gpu *peer) {
    unsigned found = 0;
    for (unsigned link = 0; link < LINKS; link++) {
        unsigned active = 0, is_gpu = 0;
        pci_info remote;
        if (nvml("nvmlDeviceGetNvLinkState")(one->handle, link, &active) || !active ||
            nvml("nvmlDeviceGetNvLinkRemotePciInfo_v2")(one->handle, link, &remote))
            continue;
        for (unsigned i = 0; i < gpu_count; i++)
            is_gpu |= !strcmp(gpus[i].bus_id, remote.bus_id);
        found += peer ? !strcmp(peer->bus_id, remote.bus_id) : !is_gpu;
    }
    return found;
}

static int connection(const gpu *one, const gpu *peer, char *text) {
    unsigned level = 0, reachable = 1, links = links_to(one, peer);
    if (!links && !nvml("nvmlDeviceGetP2PStatus")(one->handle, peer->handle, 2, &reachable) && !reachable)
        links = links_to(one, NULL);
    if (links) {
        sprintf(text, "NV%u", links);
        return OK;
    }
    int status = nvml("nvmlDeviceGetTopologyCommonAncestor")(one->handle, peer->handle, &level);
    strcpy(text, status        ? unsupported(status) ? "N/A" : "ERR!"
                 : level <= 10 ? "PIX"
                 : level == 20 ? "PXB"
                 : level == 30 ? "PHB"
                 : level == 40 ? "NODE"
                               : "SYS");
    return unsupported(status) ? OK : status;
}

/* "0-23,48-71" of a mask. */
static void ranges(const unsigned long *mask, unsigned bits, char *text) {
    size_t used = 0;
    *text = 0;
    for (unsigned at = 0; at < bits; at++) {
        unsigned first = at;
        while (at < bits && mask[at / 64] >> at % 64 & 1)
            at++;
        if (at == first || used > TEXT - 32)
            continue;
        used +=
            (size_t)sprintf(text + used, at - first > 1 ? "%s%u-%u" : "%s%u", used ? "," : "", first, at - 1);
    }
}

static void affinity(const gpu *one, char *processors, char *nodes) {
    unsigned long mask[16] = {0}, memory[16] = {0};
    strcpy(processors, "N/A");
    strcpy(nodes, "N/A");
    if (!nvml("nvmlDeviceGetCpuAffinity")(one->handle, 16, mask))
        ranges(mask, 1024, processors);
    if (!nvml("nvmlDeviceGetMemoryAffinity")(one->handle, 16, memory, 0))
        ranges(memory, 1024, nodes);
}

static int print_matrix(void) {
    char text[TEXT], nodes[TEXT];
    int worst = OK;
    const int underlined = branch() >= 590; /* into a pipe too (captures) */
    for (unsigned i = 0; i < gpu_count; i++)
        printf(!i && underlined ? "\t\033[4mGPU%u" : "\tGPU%u", gpus[i].index);
    printf("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID%s\n", underlined ? "\033[0m" : "");
    for (unsigned i = 0; i < gpu_count; i++) {
        printf("GPU%u\t", gpus[i].index);
        for (unsigned j = 0; j < gpu_count; j++) {
            int status = i == j ? OK : connection(&gpus[i], &gpus[j], text);
            printf("%s\t", i == j ? " X " : text);
            worst = status ? status : worst;
        }
        affinity(&gpus[i], text, nodes);
        printf("%s\t%s\t\tN/A\n", text, nodes);
    }
    fputs(matrix_legend, stdout);
    return worst;
}

static int print_peers(unsigned kind) {
    static const char *const states[] = {"OK", "CNS", "GNS", "TNS", "NS", "NS", "U"};
    for (unsigned i = 0; i < gpu_count; i++)
        printf("%s\tGPU%u", i ? "" : " ", gpus[i].index);
    puts("\t");
    for (unsigned i = 0; i < gpu_count; i++) {
        printf(" GPU%u\t", gpus[i].index);
        for (unsigned j = 0; j < gpu_count; j++) {
            unsigned state = 6;
            if (i != j && nvml("nvmlDeviceGetP2PStatus")(gpus[i].handle, gpus[j].handle, kind, &state))
                state = 6;
            printf("%s\t", i == j ? "X" : states[state > 6 ? 6 : state]);
        }
        putchar('\n');
    }
    fputs(peer_legend, stdout);
    return OK;
}

int topology(int count, char **words) {
    int matrix = count == 1 && (!strcmp(words[0], "-m") || !strcmp(words[0], "--matrix"));
    int peers = count == 2 && (!strcmp(words[0], "-p2p") || !strcmp(words[0], "--p2pstatus"));
    const char *kind = peers && strlen(words[1]) == 1 ? strchr("rwnap", *words[1]) : NULL;
    if (!matrix && !kind)
        return bad_arguments();
    int status = choose_gpus();
    return status ? status : matrix ? print_matrix() : print_peers((unsigned)(kind - "rwnap"));
}

/* GB/s of a link in one direction: what NVML says, or what its version has. */
static double speed(void *device, unsigned link) {
    static const double by_version[] = {0, 20, 25.781, 25.781, 25, 25, 26.562, 50};
    long long megabytes = 0;
    unsigned version = 0;
    if (!field_number(device, 164, link, &megabytes) && megabytes > 0) /* NVML_FI_DEV_NVLINK_GET_SPEED */
        return (double)megabytes / 1000;
    if (nvml("nvmlDeviceGetNvLinkVersion")(device, link, &version) || version > 7)
        return 0;
    return by_version[version];
}

/* What is printed of an active link: a letter of the options -s, -e and -c. */
static int print_link(const gpu *one, unsigned link, char what) {
    static const char *const counters[] = {"Replay", "Recovery", "CRC"};
    static const char *const abilities[] = {"P2P is supported",      "Access to system memory supported",
                                            "P2P atomics supported", "System memory atomics supported",
                                            "SLI is supported",      "Link is supported"};
    unsigned active = 0;
    int status = nvml("nvmlDeviceGetNvLinkState")(one->handle, link, &active);
    if (status)
        return status;
    if (!active)
        printf("\t Link %u: <inactive>\n", link);
    else if (what == 's')
        printf("\t Link %u: %g GB/s\n", link, speed(one->handle, link));
    for (int i = 0; active && i < (what == 'e' ? 3 : what == 'c' ? 6 : 0); i++) {
        unsigned long long value = 0;
        const char *asked = what == 'e' ? "nvmlDeviceGetNvLinkErrorCounter" : "nvmlDeviceGetNvLinkCapability";
        status = nvml(asked)(one->handle, link, i, &value);
        if (what == 'c' && !status)
            printf("\t Link %u, %s: %s\n", link, abilities[i], value ? "true" : "false");
        else if (what == 'e')
            printf(status ? "\t Link %u: %s Errors: N/A\n" : "\t Link %u: %s Errors: %llu\n", link, counters[i], value);
    }
    return unsupported(status) ? OK : status;
}

/* The text where no link is active is that of an RTX 2080 Super under 595 (a capture). */
static void print_links(const gpu *one, char what) {
    char name[TEXT], uuid[TEXT];
    unsigned links = 0, active = 0, state;
    while (links < LINKS && !unsupported(nvml("nvmlDeviceGetNvLinkState")(one->handle, links, &state))) {
        active += state;
        links++;
    }
    cell_of(one, "name", name, NULL);
    cell_of(one, "uuid", uuid, NULL);
    printf("GPU %u: %s (UUID: %s)\n", one->index, name, uuid);
    if (!active)
        puts("NVML: Unable to retrieve Nvlink information as all links are inActive");
    for (unsigned link = 0; active && link < links; link++) {
        int status = print_link(one, link, what);
        worst = status ? status : worst;
    }
}

int nvlink(int count, char **words) {
    static const char *const commands[][2] = {
        {"-s", "--status"}, {"-e", "--errorcounters"}, {"-c", "--capabilities"}};
    char command = 0;
    for (int at = 0; at < count; at++) {
        int i = 0;
        while (i < 3 && strcmp(words[at], commands[i][0]) && strcmp(words[at], commands[i][1]))
            i++;
        if ((!strcmp(words[at], "-i") || !strcmp(words[at], "--id")) && at + 1 < count)
            chosen = words[++at];
        else if (command || i == 3)
            return bad_arguments();
        else
            command = commands[i][0][1];
    }
    if (!command)
        return bad_arguments();
    int status = choose_gpus();
    unsigned linked = 0, state;
    for (unsigned at = 0; !status && at < gpu_count; at++)
        if (!unsupported(nvml("nvmlDeviceGetNvLinkState")(gpus[at].handle, 0, &state)) && ++linked)
            print_links(&gpus[at], command);
    if (!status && !linked)
        puts("No NVLink devices found.");
    return status ? status : worst;
}
