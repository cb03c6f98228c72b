/* The stand-in nvidia-smi: topo -m. Forms: strings of nvidia-smi 535.261.03, and outputs of hosts with A10 and H100 as
 * quoted in public. It knows nothing of NICs. */
#include "smi.h"

static const char legend[] =
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node\n"
    "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
    "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
    "  PIX  = Connection traversing at most a single PCIe bridge\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n";

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

static void connection(const gpu *one, const gpu *peer, char *text) {
    unsigned level = 0, reachable = 1, links = links_to(one, peer);
    if (!links && !nvml("nvmlDeviceGetP2PStatus")(one->handle, peer->handle, 2, &reachable) && !reachable)
        links = links_to(one, NULL);
    int status = links ? OK : nvml("nvmlDeviceGetTopologyCommonAncestor")(one->handle, peer->handle, &level);
    if (links)
        sprintf(text, "NV%u", links);
    else
        strcpy(text, status        ? unsupported(status) ? "N/A" : "ERR!"
                     : level <= 10 ? "PIX"
                     : level == 20 ? "PXB"
                     : level == 30 ? "PHB"
                     : level == 40 ? "NODE"
                                   : "SYS");
    worst = unsupported(status) || !status ? worst : status;
}

/* "0-23,48-71" of a mask. */
static void ranges(const unsigned long *mask, unsigned bits, char *text) {
    size_t used = 0;
    *text = 0;
    for (unsigned at = 0; at < bits; at++) {
        unsigned first = at;
        while (at < bits && mask[at / 64] >> at % 64 & 1)
            at++;
        if (at > first && used < TEXT - 32)
            used +=
                (size_t)sprintf(text + used, at - first > 1 ? "%s%u-%u" : "%s%u", used ? "," : "", first, at - 1);
    }
}

int topology(int count, char **words) {
    if (count != 1 || strcmp(words[0], "-m"))
        return refuse("Invalid combination of input arguments.%s", "");
    char text[TEXT];
    int status = choose_gpus();
    for (unsigned i = 0; !status && i < gpu_count; i++)
        printf("\tGPU%u%s", gpus[i].index, i + 1 < gpu_count ? "" : "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n");
    for (unsigned i = 0; !status && i < gpu_count; i++) {
        unsigned long processors[16] = {0}, nodes[16] = {0};
        printf("GPU%u\t", gpus[i].index);
        for (unsigned j = 0; j < gpu_count; j++) {
            strcpy(text, " X ");
            if (i != j)
                connection(&gpus[i], &gpus[j], text);
            printf("%s\t", text);
        }
        strcpy(text, "N/A");
        if (!nvml("nvmlDeviceGetCpuAffinity")(gpus[i].handle, 16, processors))
            ranges(processors, 1024, text);
        printf("%s\t", text);
        strcpy(text, "N/A");
        if (!nvml("nvmlDeviceGetMemoryAffinity")(gpus[i].handle, 16, nodes, 0))
            ranges(nodes, 1024, text);
        printf("%s\t\tN/A\n", text);
    }
    if (!status)
        fputs(legend, stdout);
    return status ? status : worst;
}
