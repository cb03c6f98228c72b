/* gpukiln simulated nvidia-smi: shows GPUs that don't exist, of an instance of gpukiln's embedded cloud.
 *
 * NVIDIA's own program works with its driver's NVML only. This one calls the public functions of whatever
 * libnvidia-ml.so.1 it finds, by the names that pynvml.py has, and two of gpukiln's own: gpukilnReset(device) and
 * gpukilnBusId(index, text, size). It has what gpukiln's code, documents and users of simulated machines read; the rest
 * it refuses with exit code 2. Texts and exit codes: NVIDIA's 535.261.03 (Debian package nvidia-smi, its manual page,
 * what it answers on a machine without a GPU) and outputs that are quoted in public.
 */
#include "smi.h"

#include <dlfcn.h>

static const char answered[] =
    "gpukiln simulated nvidia-smi: these GPUs do not exist. It answers:\n\n"
    "    -h, -L                      And without arguments: a summary of the GPUs.\n"
    "    -i, --id=                   Target specific GPUs: index, UUID or PCI bus ID.\n"
    "    -q [-x]                     GPU info, as XML.\n"
    "    --query-gpu=, --query-compute-apps=, with --format=csv[,noheader][,nounits]\n"
    "    -pm, -e, -r, -pl, -lgc, -rgc, -mig     topo -m\n"
    "    mig -lgip | -cgi LIST [-C] | -dci [-gi LIST] | -dgi [-gi LIST]\n";

gpu gpus[MAX_GPUS];
unsigned gpu_count;
const char *chosen;
int worst;
static void *library;

static int lacking(void) { return UNSUPPORTED; }

nvml_function *nvml(const char *name) {
    nvml_function *found = library ? (nvml_function *)dlsym(library, name) : NULL;
    return found ? found : (nvml_function *)lacking;
}

/* nvmlErrorString of libnvidia-ml.so.535.261.03, and of a lost GPU what nvidia-smi 535 prints. */
const char *error_text(int status) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "GPU access blocked by the operating system",
        "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
        "vGPU ECC not supported", "Insufficient Resources", "Invalid Frequency", "Argument version mismatch",
        "Requested functionality has been deprecated", "System is not in ready state"};
    return status >= 0 && status < (int)(sizeof texts / sizeof *texts) ? texts[status] : "Unknown Error";
}

/* nvidia-smi(1) of 535, RETURN VALUE; 18 is not listed there and is what a mismatch answers. */
static int exit_code(int status) {
    static const unsigned listed = 1 << OK | 1 << INVALID | 1 << UNSUPPORTED | 1 << 4 | 1 << NOT_FOUND | 1 << 8 |
                                   1 << NO_DRIVER | 1 << NO_LIBRARY | 1 << NO_FUNCTION | 1 << 14 | 1 << LOST |
                                   1 << MISMATCH;
    return status >= 0 && status < 32 && listed >> status & 1 ? status : status == 11 ? 10 : 255;
}

int unsupported(int status) {
    return status == UNSUPPORTED || status == INVALID || status == NO_FUNCTION || status == OTHER_VERSION;
}

int in_list(const char *list, const char *word) {
    size_t length = strlen(word);
    for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (!strncasecmp(list, word, length) && (!list[length] || list[length] == ','))
            return 1;
    return 0;
}

/* NVIDIA's sentence, then the supported options. */
int refuse(const char *problem, const char *option) {
    printf(problem, option);
    printf(" Please run 'nvidia-smi -h' for help.\n\n%s", answered);
    return INVALID;
}

/* `535.309.01` of `libnvidia-ml.so.535.309.01`: known where the driver can't be asked. Not by dlinfo: _GNU_SOURCE
 * makes strtoul one that glibc 2.34 lacks. */
static int version_of_file(char *text) {
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "r");
    int status = NOT_FOUND;
    while (maps && status && fgets(line, sizeof line, maps)) {
        const char *at = strstr(line, "/libnvidia-ml.so.");
        if (at && sscanf(at, "/libnvidia-ml.so.%31[0-9.]", text) == 1 && strchr(text, '.'))
            status = OK;
    }
    if (maps)
        fclose(maps);
    return status;
}

int driver_version(char *text) {
    int status = nvml("nvmlSystemGetDriverVersion")(text, 80) ? version_of_file(text) : OK;
    if (status)
        strcpy(text, "N/A");
    return status;
}

void cuda_version(char *text) {
    int version = 0, status = nvml("nvmlSystemGetCudaDriverVersion_v2")(&version);
    snprintf(text, TEXT, status ? "N/A" : "%d.%d", version / 1000, version % 1000 / 10);
}

/* As nvidia-smi 535.261.03 on a machine without a GPU (9) and without the library (12). */
static int start(void) {
    char text[TEXT];
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    int status = library ? nvml("nvmlInit_v2")() : NO_LIBRARY;
    if (status == NO_LIBRARY)
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
             "Display Driver is properly installed and present in your system.\nPlease also try adding directory "
             "that contains libnvidia-ml.so to your system PATH.");
    else if (status == NO_DRIVER)
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
             "latest NVIDIA driver is installed and running.\n");
    else if (status)
        printf("Failed to initialize NVML: %s\n", error_text(status));
    if (status == MISMATCH && !version_of_file(text)) /* "535.309.01" is printed as "535.309" */
        printf("NVML library version: %.*s\n", (int)(strrchr(text, '.') - text), text);
    return status;
}

/* "…for GPU0000:19:00.0: Unknown Error": how drivers from 525 on are quoted; a lost GPU has a text of its own. */
static int unreachable(const gpu *one, int status) {
    char text[32];
    size_t length = strlen(one->bus_id);
    snprintf(text, sizeof text, " %u", one->index);
    if (length)
        snprintf(text, sizeof text, "%s", one->bus_id + (length > 12 ? length - 12 : 0)); /* 0000:00:1E.0 */
    printf("Unable to determine the device handle for GPU%s: %s\n\n", text,
           status == LOST ? "GPU is lost.  Reboot the system to recover this GPU" : error_text(status));
    return status;
}

static int open_gpu(unsigned index, gpu *one) {
    pci_info info;
    *one = (gpu){.index = index};
    int status = nvml("nvmlDeviceGetHandleByIndex_v2")(index, &one->handle);
    if (!status && !(status = nvml("nvmlDeviceGetPciInfo_v3")(one->handle, &info)))
        snprintf(one->bus_id, sizeof one->bus_id, "%s", info.bus_id);
    else if (nvml("gpukilnBusId")(index, one->bus_id, (unsigned)sizeof one->bus_id))
        *one->bus_id = 0;
    return status;
}

/* "0000:00:1e.0", "00000000:00:1E.0" and "00:1e.0" are one address. */
static int same_address(const char *asked, const char *bus_id) {
    unsigned a[4] = {0}, b[4] = {0};
    if (sscanf(asked, "%x:%x:%x.%x", a, a + 1, a + 2, a + 3) != 4) {
        a[0] = 0;
        if (sscanf(asked, "%x:%x.%x", a + 1, a + 2, a + 3) != 3)
            return 0;
    }
    return sscanf(bus_id, "%x:%x:%x.%x", b, b + 1, b + 2, b + 3) == 4 && !memcmp(a, b, sizeof a);
}

static int is_chosen(const char *asked, const gpu *one) {
    char uuid[TEXT], *end;
    unsigned long index = strtoul(asked, &end, 10);
    if (*asked && !*end)
        return index == one->index;
    return same_address(asked, one->bus_id) ||
           (one->handle && !nvml("nvmlDeviceGetUUID")(one->handle, uuid, 96) && !strcasecmp(uuid, asked));
}

/* A GPU that -i leaves out may be broken (nvidia-smi(1): -i can query healthy GPUs next to a broken one). */
int choose_gpus(void) {
    unsigned total = 0;
    int status = nvml("nvmlDeviceGetCount_v2")(&total);
    if (status) {
        printf("Unable to determine the number of available GPUs: %s\n", error_text(status));
        return status;
    }
    char list[TEXT], *rest = NULL;
    snprintf(list, sizeof list, "%s", chosen ? chosen : "*");
    for (char *word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        unsigned before = gpu_count;
        for (unsigned index = 0; index < total && gpu_count < MAX_GPUS; index++) {
            gpu one;
            status = open_gpu(index, &one);
            if (chosen && !is_chosen(word, &one))
                continue;
            if (status)
                return unreachable(&one, status);
            gpus[gpu_count++] = one;
        }
        if (gpu_count == before) {
            puts("No devices were found");
            return NOT_FOUND;
        }
    }
    return OK;
}

enum { LIST, QUERY, XML, ID, FORMAT, QUERY_GPU, QUERY_APPS, CHANGE, OPTIONS };
static const char *const options[CHANGE][2] = {
    {"-L", "--list-gpus"}, {"-q", "--query"}, {"-x", "--xml-format"}, {"-i", "--id"},
    {"", "--format"}, {"", "--query-gpu"}, {"", "--query-compute-apps"}};

static int find_option(const char *word) {
    size_t length = strcspn(word, "=");
    for (int i = 0; i < CHANGE; i++)
        if (!strcmp(options[i][0], word) || (strlen(options[i][1]) == length && !strncmp(options[i][1], word, length)))
            return i;
    return is_change(word) ? CHANGE : -1;
}

static int run(int count, char **words) {
    static const char combination[] = "Invalid combination of input arguments.%s";
    const char *given[OPTIONS] = {0}, *changed = NULL;
    for (int at = 1; at < count; at++) {
        const char *word = words[at], *value = strchr(word, '=');
        int option = find_option(word);
        if (option < 0 || (option < ID && value))
            return refuse("ERROR: Option %s is not recognized.", word);
        if (given[option])
            return refuse(combination, "");
        int has_value = option == CHANGE ? is_change(word) > 1 : option >= ID;
        value = value ? value + 1 : !has_value ? "" : at + 1 < count ? words[++at] : "";
        if (has_value && !*value)
            return refuse("ERROR: Option %s is missing its value.", word);
        given[option] = value;
        changed = option == CHANGE ? word : changed;
    }
    int queries = !!given[QUERY_GPU] + !!given[QUERY_APPS];
    if (queries && !given[FORMAT])
        return refuse("\"--format=\" switch is missing.%s", "");
    if (queries + !!given[LIST] + !!given[QUERY] + !!changed > 1 || (given[XML] && !given[QUERY]) ||
        (given[FORMAT] && !queries))
        return refuse(combination, "");
    chosen = given[ID];
    if (queries)
        return query(given[QUERY_GPU] ? given[QUERY_GPU] : given[QUERY_APPS], given[FORMAT], !given[QUERY_GPU]);
    if (given[QUERY])
        return show_report(given[XML] != NULL);
    return changed ? change(changed, given[CHANGE]) : given[LIST] ? show_list() : show_table();
}

int main(int count, char **words) {
    const char *first = count > 1 ? words[1] : "";
    if (!strcmp(first, "-h") || !strcmp(first, "--help")) {
        char driver[TEXT];
        if ((library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)))
            nvml("nvmlInit_v2")();
        driver_version(driver);
        printf("NVIDIA System Management Interface -- v%s\n\n%s", driver, answered);
        return OK;
    }
    int status = start(); /* before it reads its arguments, as NVIDIA's does */
    if (!status) {
        status = !strcmp(first, "topo")  ? topology(count - 2, words + 2)
                 : !strcmp(first, "mig") ? mig(count - 2, words + 2)
                                         : run(count, words);
        nvml("nvmlShutdown")();
    }
    return exit_code(status);
}
