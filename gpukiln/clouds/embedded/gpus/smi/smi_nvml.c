/* The stand-in nvidia-smi: the library, its errors, the GPUs that a command is about. */
#include "smi.h"

#include <ctype.h>
#include <dlfcn.h>
#include <strings.h>
#include <unistd.h>

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

/* What nvmlErrorString of libnvidia-ml.so.535.261.03 says, and for a lost GPU what nvidia-smi 535 says in its
 * place. */
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
int exit_code(int status) {
    static const int listed[] = {OK, INVALID, UNSUPPORTED, NO_PERMISSION, NOT_FOUND, 8, NO_DRIVER, NO_LIBRARY,
                                 NO_FUNCTION, 14, LOST, MISMATCH};
    for (size_t i = 0; i < sizeof listed / sizeof *listed; i++)
        if (listed[i] == status)
            return status;
    return status == 11 ? 10 : 255;
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

int log_to(const char *file) {
    FILE *log = fopen(file, "w");
    if (!log) {
        printf("Failed to open %s for writing\n", file);
        return 0;
    }
    return dup2(fileno(log), fileno(stdout)) >= 0;
}

void pause_for(double seconds) {
    fflush(stdout);
    usleep((useconds_t)(seconds * 1e6));
}

int bad_arguments(void) {
    puts("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n");
    return INVALID;
}

int not_recognized(const char *option) {
    printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h'.\n\n", option);
    return INVALID;
}

int open_library(void) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? OK : NO_LIBRARY;
}

/* `535.309.01` of `libnvidia-ml.so.535.309.01`: what is known where the driver can't be asked. Not by dlinfo:
 * _GNU_SOURCE makes strtoul one that glibc 2.34 lacks. */
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
    int status = nvml("nvmlSystemGetDriverVersion")(text, 80);
    return status ? version_of_file(text) : OK;
}

int branch(void) {
    static int number;
    char text[TEXT];
    if (!number)
        number = driver_version(text) ? 610 : atoi(text);
    return number;
}

int cuda_version(char *text) {
    int version = 0, status = nvml("nvmlSystemGetCudaDriverVersion_v2")(&version);
    snprintf(text, TEXT, "%d.%d", version / 1000, version % 1000 / 10);
    return status;
}

/* "12.535.309.01" is printed as "535.309". */
static void print_library_version(void) {
    char text[TEXT];
    unsigned major, minor;
    if (!nvml("nvmlSystemGetNVMLVersion")(text, 80) && sscanf(text, "%*u.%u.%u", &major, &minor) == 2)
        printf("NVML library version: %u.%02u\n", major, minor);
    else if (!version_of_file(text) && sscanf(text, "%u.%u", &major, &minor) == 2)
        printf("NVML library version: %u.%02u\n", major, minor);
}

/* Texts and codes as nvidia-smi 535.261.03 gives them on a machine without a GPU (9) and without the library
 * (12). */
int start(void) {
    int status = open_library();
    if (status) {
        puts(
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
            "Display Driver is properly installed and present in your system.\nPlease also try adding "
            "directory "
            "that contains libnvidia-ml.so to your system PATH.");
        return status;
    }
    status = nvml("nvmlInit_v2")();
    if (status == NO_DRIVER)
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
             "latest NVIDIA driver is installed and running.\n");
    else if (status) {
        printf("Failed to initialize NVML: %s\n", error_text(status));
        if (status == MISMATCH)
            print_library_version();
    }
    return status;
}

static const char *without_domain(const char *bus_id) {
    return strlen(bus_id) > 12 ? bus_id + strlen(bus_id) - 12 : bus_id; /* 0000:00:1E.0 */
}

/* "…for GPU0000:19:00.0: Unknown Error" is how drivers from 525 on are quoted; a lost GPU has a text of its
 * own. */
static int unreachable(unsigned index, const char *bus_id, int status) {
    char text[32];
    snprintf(text, sizeof text, " %u", index);
    if (*bus_id)
        snprintf(text, sizeof text, "%s", without_domain(bus_id));
    printf("Unable to determine the device handle for GPU%s: %s\n\n", text,
           status == LOST ? "GPU is lost.  Reboot the system to recover this GPU" : error_text(status));
    return status;
}

/* The handle of a GPU and its address; a library may tell the address of a GPU that can't be opened as
 * gpukilnBusId(index, text, size). */
static int open_gpu(unsigned index, gpu *one) {
    pci_info info;
    one->index = index;
    *one->bus_id = 0;
    int status = nvml("nvmlDeviceGetHandleByIndex_v2")(index, &one->handle);
    if (!status && !(status = nvml("nvmlDeviceGetPciInfo_v3")(one->handle, &info)))
        snprintf(one->bus_id, sizeof one->bus_id, "%s", info.bus_id);
    if (!status)
        return OK;
    if (nvml("gpukilnBusId")(index, one->bus_id, (unsigned)sizeof one->bus_id))
        *one->bus_id = 0;
    return status;
}

/* "0000:00:1e.0", "00000000:00:1E.0" and "00:1e.0" are one address. */
static int same_address(const char *said, const char *bus_id) {
    unsigned a[4] = {0}, b[4] = {0};
    if (sscanf(said, "%x:%x:%x.%x", a, a + 1, a + 2, a + 3) != 4) {
        a[0] = 0;
        if (sscanf(said, "%x:%x.%x", a + 1, a + 2, a + 3) != 3)
            return 0;
    }
    return sscanf(bus_id, "%x:%x:%x.%x", b, b + 1, b + 2, b + 3) == 4 && !memcmp(a, b, sizeof a);
}

static int is_chosen(const char *said, const gpu *one) {
    char uuid[TEXT], *end;
    unsigned long index = strtoul(said, &end, 10);
    if (*said && !*end)
        return index == one->index;
    if (same_address(said, one->bus_id))
        return 1;
    return one->handle && !nvml("nvmlDeviceGetUUID")(one->handle, uuid, 96) && !strcasecmp(uuid, said);
}

/* A GPU that isn't asked for does no harm (nvidia-smi(1): -i can query healthy GPUs beside a broken one). */
int choose_gpus(void) {
    unsigned total = 0, wanted = 0;
    int status = nvml("nvmlDeviceGetCount_v2")(&total);
    if (status) {
        printf("Unable to determine the number of available GPUs: %s\n", error_text(status));
        return status;
    }
    char list[TEXT], *rest = NULL;
    snprintf(list, sizeof list, "%s", chosen ? chosen : "");
    for (char *said = strtok_r(list, ",", &rest); chosen && said; said = strtok_r(NULL, ",", &rest)) {
        unsigned before = wanted;
        for (unsigned index = 0; index < total && wanted < MAX_GPUS; index++) {
            gpu one = {0};
            status = open_gpu(index, &one);
            if (!is_chosen(said, &one))
                continue;
            if (status)
                return unreachable(index, one.bus_id, status);
            gpus[wanted++] = one;
        }
        if (wanted == before) {
            puts("No devices were found");
            return NOT_FOUND;
        }
    }
    for (unsigned index = 0; !chosen && index < total && wanted < MAX_GPUS; index++, wanted++)
        if ((status = open_gpu(index, &gpus[wanted])))
            return unreachable(index, gpus[wanted].bus_id, status);
    gpu_count = wanted;
    if (!wanted)
        puts("No devices were found");
    return wanted ? OK : NOT_FOUND;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type;
    int status;
    union {
        double real;
        unsigned whole;
        int number;
        unsigned long long count;
    } value;
} field_value;

int field_number(void *device, unsigned field, unsigned scope, long long *result) {
    field_value asked = {.field = field, .scope = scope};
    int status = nvml("nvmlDeviceGetFieldValues")(device, 1, &asked);
    if (!status)
        status = asked.status;
    if (status)
        return status;
    switch (asked.type) { /* NVML_VALUE_TYPE_* */
    case 0: *result = (long long)asked.value.real; return OK;
    case 1: *result = asked.value.whole; return OK;
    case 5: *result = asked.value.number; return OK;
    default: *result = (long long)asked.value.count; return OK;
    }
}

static int add_processes(void *device, const char *function, char kind, process *found, unsigned *count) {
    process_info infos[MAX_PROCESSES];
    unsigned listed = MAX_PROCESSES;
    int status = nvml(function)(device, &listed, infos);
    for (unsigned i = 0; !status && i < listed; i++) {
        unsigned at = 0;
        while (at < *count &&
               (found[at].info.pid != infos[i].pid || found[at].info.gpu_instance != infos[i].gpu_instance))
            at++;
        if (at < *count) {
            snprintf(found[at].kind, sizeof found[at].kind, "C+%c", kind);
        } else if (at < MAX_PROCESSES) {
            found[at].info = infos[i];
            snprintf(found[at].kind, sizeof found[at].kind, "%c", kind);
            if (nvml("nvmlSystemGetProcessName")(infos[i].pid, found[at].name, (unsigned)TEXT))
                strcpy(found[at].name, "[Not Found]");
            ++*count;
        }
    }
    return status;
}

int list_processes(void *device, process *found, unsigned *count, int only_compute) {
    *count = 0;
    int status = add_processes(device, "nvmlDeviceGetComputeRunningProcesses_v3", 'C', found, count);
    if (!status && !only_compute)
        add_processes(device, "nvmlDeviceGetGraphicsRunningProcesses_v3", 'G', found, count);
    return status;
}
