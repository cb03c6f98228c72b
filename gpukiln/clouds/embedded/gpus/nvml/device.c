/* The double of NVML: the library itself, handles, and calls that answer one number or text of a GPU. */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "double.h"

static char gpus[MAX_GPUS], migs[MAX_GPUS][MAX_GI][MAX_CI]; /* a handle is an address in one of them */
static int users;

/* ---- handles and whether a function may answer */

int target_of(const void *device, target *found) {
    const char *at = device;
    if (at >= gpus && at < gpus + MAX_GPUS) {
        *found = (target){(int)(at - gpus), -1, -1};
        return 1;
    }
    if (at >= &migs[0][0][0] && at < &migs[0][0][0] + sizeof migs) {
        int position = (int)(at - &migs[0][0][0]);
        *found = (target){position / (MAX_GI * MAX_CI), position / MAX_CI % MAX_GI, position % MAX_CI};
        return ci_exists(found->gpu, found->gi, found->ci);
    }
    return 0;
}

void *handle_of(int gpu) { return &gpus[gpu]; }

void *mig_handle(int gpu, int gi, int ci) { return &migs[gpu][gi][ci]; }

static int count_gpus(void) {
    char value[TEXT];
    int count = look(value, "gpus.count") ? atoi(value) : 0;
    return count < 0 ? 0 : count > MAX_GPUS ? MAX_GPUS : count;
}

/* A container has the GPUs whose device nodes it was given: the driver can't open the others. Where the state is a
 * separate file there are no nodes, and where no driver made nodes, a missing one says nothing. */
static int visible(int gpu) {
    char node[32];
    const char *named = getenv("GPUKILN_SIMULATED_GPUS");
    if ((named && *named) || access("/dev/nvidiactl", F_OK))
        return 1;
    snprintf(node, sizeof node, "/dev/nvidia%d", gpu);
    return !access(node, F_OK);
}

/* How many of the first GPUs are visible. */
static int count_visible(int gpus) {
    int count = 0;
    for (int gpu = 0; gpu < gpus; gpu++)
        count += visible(gpu);
    return count;
}

static int hangs(const char *function, int gpu) {
    char value[TEXT];
    return look(value, "gpus.%d.hung", gpu) || look(value, "gpus.%d.hangs.%s", gpu, function);
}

/* Waits while the GPU hangs, like a call into a driver whose GPU does not answer: in state D, without progress,
 * until it is killed. A parent waits like this for its child after vfork(2). */
static void hang(const char *function, int gpu) {
    pid_t caller = getpid(), child = vfork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (getppid() == caller && hangs(function, gpu))
            nanosleep(&(struct timespec){0, 50000000}, NULL);
        _exit(0);
    }
    if (child > 0)
        waitpid(child, NULL, 0);
}

static int of_gpu(const char *function, int gpu) {
    char value[TEXT];
    if (hangs(function, gpu))
        hang(function, gpu);
    if (look(value, "gpus.%d.error.code", gpu) || look(value, "gpus.%d.fail.%s", gpu, function))
        return atoi(value);
    return OK;
}

int system_gate(const char *function) {
    char value[TEXT];
    if (!__atomic_load_n(&users, __ATOMIC_ACQUIRE))
        return UNINITIALIZED;
    return look(value, "error.%s", function) ? atoi(value) : OK;
}

int device_gate(const char *function, const void *device, const void *result, target *found) {
    int status = system_gate(function);
    if (status)
        return status;
    if (!result || !target_of(device, found) || found->gpu >= count_gpus())
        return INVALID;
    return of_gpu(function, found->gpu);
}

/* As device_gate, for calls that only a whole GPU answers. */
int gpu_gate(const char *function, const void *device, const void *result, int *gpu) {
    target asked = {0, -1, -1};
    int status = device_gate(function, device, result, &asked);
    *gpu = asked.gpu;
    return status || asked.gi < 0 ? status : INVALID;
}

/* ---- values of the state */

int fetch(int gpu, const char *key, char *value) {
    if (look(value, "gpus.%d.%s", gpu, key))
        return OK;
    return look(value, "gpus.%d.%s.code", gpu, key) ? atoi(value) : UNSUPPORTED;
}

int number(int gpu, const char *key, double *result) {
    char value[TEXT];
    int status = fetch(gpu, key, value);
    if (!status)
        *result = strtod(value, NULL);
    return status;
}

int whole(int gpu, const char *key, unsigned *result) {
    double value;
    int status = number(gpu, key, &value);
    if (!status)
        *result = (unsigned)(value + 0.5);
    return status;
}

int list_length(int gpu, const char *list) {
    char value[TEXT];
    return look(value, "gpus.%d.%s.count", gpu, list) ? atoi(value) : -1;
}

int copy(char *result, unsigned size, const char *value) {
    if (!result || strlen(value) >= size)
        return result ? TOO_SMALL : INVALID;
    strcpy(result, value);
    return OK;
}

int mig_is_on(int gpu) {
    char value[TEXT];
    return look(value, "gpus.%d.mig.current", gpu) && atoi(value);
}

/* The value for a busy GPU, `busy.KEY`, while a process computes and where the key exists. */
int busy_whole(int gpu, const char *key, unsigned *result) {
    char busy[KEY];
    snprintf(busy, sizeof busy, "busy.%s", key);
    return load_of(gpu, -1, -1).utilization && !whole(gpu, busy, result) ? OK : whole(gpu, key, result);
}

static int system_text(const char *function, const char *key, char *result, unsigned size) {
    char value[TEXT];
    int status = system_gate(function);
    if (status)
        return status;
    if (look(value, "%s", key))
        return copy(result, size, value);
    return look(value, "%s.code", key) ? atoi(value) : UNSUPPORTED;
}

/* ---- the library */

API int nvmlInitWithFlags(unsigned flags) {
    char value[TEXT];
    (void)flags;
    if (!state_number())
        return NO_DRIVER;
    if (look(value, "error.nvmlInit") || look(value, "error.code"))
        return atoi(value);
    if (look(value, "start_ms")) /* without persistence mode the driver starts every GPU first */
        for (int left = atoi(value); left > 0; left -= 50)
            nanosleep(&(struct timespec){0, 50000000}, NULL);
    __atomic_add_fetch(&users, 1, __ATOMIC_ACQ_REL);
    return OK;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) {
    int status = system_gate("nvmlShutdown");
    if (!status)
        __atomic_sub_fetch(&users, 1, __ATOMIC_ACQ_REL);
    return status;
}

/* Texts: pynvml.py, NVMLError._errcode_to_string */
API const char *nvmlErrorString(int status) {
    static const struct {
        int status;
        const char *text;
    } known[] = {{OK, "Success"}, {UNINITIALIZED, "Uninitialized"}, {INVALID, "Invalid Argument"},
                 {UNSUPPORTED, "Not Supported"}, {NO_PERMISSION, "Insufficient Permissions"},
                 {5, "Already Initialized"}, {NOT_FOUND, "Not Found"}, {TOO_SMALL, "Insufficient Size"},
                 {8, "Insufficient External Power"}, {NO_DRIVER, "Driver Not Loaded"}, {TIMEOUT, "Timeout"},
                 {11, "Interrupt Request Issue"}, {12, "NVML Shared Library Not Found"},
                 {13, "Function Not Found"}, {14, "Corrupted infoROM"}, {LOST, "GPU is lost"},
                 {RESET_REQUIRED, "GPU requires restart"},
                 {17, "The operating system has blocked the request."},
                 {18, "RM has detected an NVML/RM version mismatch."}, {IN_USE, "In use by another client"},
                 {20, "Insufficient Memory"}, {NO_DATA, "No data"},
                 {INSUFFICIENT_RESOURCES, "Insufficient resources"},
                 {VERSION_MISMATCH, "Argument version mismatch"},
                 {DEPRECATED, "Requested functionality has been deprecated"}, {UNKNOWN, "Unknown Error"}};
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].status == status)
            return known[i].text;
    return "Unknown Error code";
}

API int nvmlSystemGetDriverVersion(char *result, unsigned size) {
    return system_text(__func__, "driver", result, size);
}

API int nvmlSystemGetNVMLVersion(char *result, unsigned size) {
    return system_text(__func__, "nvml", result, size);
}

static int cuda_version(const char *function, int *result) {
    char value[TEXT];
    int major = 0, minor = 0, status = result ? system_text(function, "cuda_driver", value, sizeof value) : INVALID;
    if (!status && sscanf(value, "%d.%d", &major, &minor) > 0)
        *result = major * 1000 + minor * 10;
    return status;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *result) { return cuda_version(__func__, result); }

API int nvmlSystemGetCudaDriverVersion(int *result) { return cuda_version(__func__, result); }

#if DRIVER >= 535

/* NOT_SUPPORTED where no GPU of the machine has the feature. */
static int confidential(const char *function, const char *key, unsigned *result) {
    char value[TEXT];
    int status = result ? system_text(function, key, value, sizeof value) : INVALID;
    if (!status)
        *result = (unsigned)atoi(value);
    return status;
}

API int nvmlSystemGetConfComputeGpusReadyState(unsigned *result) {
    return confidential(__func__, "confidential.ready", result);
}

typedef struct {
    unsigned environment, feature, dev_tools;
} confidential_state;

API int nvmlSystemGetConfComputeState(confidential_state *state) {
    unsigned feature;
    int status = state ? confidential(__func__, "confidential.on", &feature) : INVALID;
    if (!status)
        *state = (confidential_state){feature ? 2 : 0, feature, 0};
    return status;
}

#endif

/* The double has no excluded GPUs, and its machines have no S-class units. */
#define NONE_OF(function) \
    API int function(unsigned *result) { \
        int status = result ? system_gate(#function) : INVALID; \
        if (!status) \
            *result = 0; \
        return status; \
    }
NONE_OF(nvmlUnitGetCount)
NONE_OF(nvmlGetExcludedDeviceCount)
NONE_OF(nvmlGetBlacklistDeviceCount) /* its name before 11.0 */

/* ---- the GPUs */

static int count_devices(const char *function, unsigned *result) {
    int status = result ? system_gate(function) : INVALID;
    if (!status)
        *result = (unsigned)count_visible(count_gpus());
    return status;
}

API int nvmlDeviceGetCount_v2(unsigned *result) { return count_devices(__func__, result); }

API int nvmlDeviceGetCount(unsigned *result) { return count_devices(__func__, result); }

static int give(const char *function, int gpu, void **device) {
    int status = of_gpu(function, gpu);
    if (!status)
        *device = &gpus[gpu];
    return status;
}

static int by_index(const char *function, unsigned index, void **device) {
    int status = device ? system_gate(function) : INVALID;
    for (int gpu = 0; !status && gpu < count_gpus(); gpu++)
        if (visible(gpu) && !index--)
            return give(function, gpu, device);
    return status ? status : INVALID;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return by_index(__func__, index, device); }

API int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return by_index(__func__, index, device); }

static int find(const char *function, const char *key, const char *wanted, void **device) {
    char value[TEXT];
    int status = device && wanted ? system_gate(function) : INVALID;
    for (int gpu = 0; !status && gpu < count_gpus(); gpu++)
        if (visible(gpu) && look(value, "gpus.%d.%s", gpu, key) && !strcasecmp(value, wanted))
            return give(function, gpu, device);
    return status ? status : NOT_FOUND;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    char found[48];
    int status = find(__func__, "uuid", uuid, device);
    for (int gpu = 0; status == NOT_FOUND && gpu < count_gpus(); gpu++)
        for (int at = 0; at < MAX_GI * MAX_CI; at++)
            if (visible(gpu) && ci_exists(gpu, at / MAX_CI, at % MAX_CI)) {
                mig_uuid(gpu, at / MAX_CI, at % MAX_CI, found);
                if (!strcasecmp(found, uuid)) {
                    *device = mig_handle(gpu, at / MAX_CI, at % MAX_CI);
                    return of_gpu(__func__, gpu);
                }
            }
    return status;
}

API int nvmlDeviceGetHandleBySerial(const char *serial, void **device) {
    return find(__func__, "serial", serial, device);
}

static int by_bus_id(const char *function, const char *bus_id, void **device) {
    char full[32];
    unsigned domain = 0, bus = 0, slot = 0;
    int colons = 0;
    for (const char *at = bus_id ? bus_id : ""; *at; at++)
        colons += *at == ':';
    if (colons == 2 ? sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3
                    : sscanf(bus_id ? bus_id : "", "%x:%x", &bus, &slot) != 2)
        return INVALID;
    snprintf(full, sizeof full, "%08X:%02X:%02X.0", domain, bus, slot);
    return find(function, "bus_id", full, device);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) {
    return by_bus_id(__func__, bus_id, device);
}

API int nvmlDeviceGetHandleByPciBusId(const char *bus_id, void **device) {
    return by_bus_id(__func__, bus_id, device);
}

/* ---- one GPU: what is a number or a text and nothing else */

int asked_number(const char *function, void *device, const char *key, unsigned *result) {
    int gpu, status = gpu_gate(function, device, result, &gpu);
    return status ? status : whole(gpu, key, result);
}

int asked_text(const char *function, void *device, const char *key, char *result, unsigned size) {
    char value[TEXT];
    int gpu, status = gpu_gate(function, device, result, &gpu);
    if (!status && !(status = fetch(gpu, key, value)))
        status = copy(result, size, value);
    return status;
}

#define NUMBER(function, key) \
    API int function(void *device, unsigned *result) { return asked_number(#function, device, key, result); }
#define NAMED(function, key) \
    API int function(void *device, char *result, unsigned size) { \
        return asked_text(#function, device, key, result, size); \
    }

NAMED(nvmlDeviceGetSerial, "serial")
NAMED(nvmlDeviceGetVbiosVersion, "vbios")
NAMED(nvmlDeviceGetBoardPartNumber, "board_part_number")
NAMED(nvmlDeviceGetInforomImageVersion, "inforom")
NUMBER(nvmlDeviceGetInforomConfigurationChecksum, "inforom_checksum")
/* counted anew in a container */
API int nvmlDeviceGetIndex(void *device, unsigned *result) {
    target found;
    int status = asked_number(__func__, device, "index", result);
    if (!status && target_of(device, &found))
        *result -= (unsigned)(found.gpu - count_visible(found.gpu));
    return status;
}
NUMBER(nvmlDeviceGetBrand, "brand")
NUMBER(nvmlDeviceGetArchitecture, "architecture")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.max_gen")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie.max_width")
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie.replays")
NUMBER(nvmlDeviceGetFanSpeed, "fan")
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER(nvmlDeviceGetDisplayMode, "display_mode")
NUMBER(nvmlDeviceGetDisplayActive, "display_active")
NUMBER(nvmlDeviceGetMultiGpuBoard, "multi_gpu_board")

#if DRIVER >= 510
NUMBER(nvmlDeviceGetNumGpuCores, "cores")
NUMBER(nvmlDeviceGetMemoryBusWidth, "memory_bus_width")
NUMBER(nvmlDeviceGetNumFans, "fans")
#endif
#if DRIVER >= 515

/* The only text without a size argument: NVML_GSP_FIRMWARE_VERSION_BUF_SIZE. */
API int nvmlDeviceGetGspFirmwareVersion(void *device, char *result) {
    return asked_text(__func__, device, "gsp_firmware", result, 64);
}

NUMBER(nvmlDeviceGetDefaultEccMode, "ecc.default")
#endif
#if DRIVER >= 550
NUMBER(nvmlDeviceGetNumaNodeId, "numa_node")
#endif

#define BUSY(function, key) \
    API int function(void *device, unsigned *result) { \
        int gpu, status = gpu_gate(#function, device, result, &gpu); \
        return status ? status : busy_whole(gpu, key, result); \
    }
BUSY(nvmlDeviceGetPerformanceState, "pstate")
BUSY(nvmlDeviceGetPowerState, "pstate")
BUSY(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.gen")

#if DRIVER >= 525

/* The board's own maximum; the machine may allow less (GB200: 6 and 5). */
API int nvmlDeviceGetGpuMaxPcieLinkGeneration(void *device, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    return status || !whole(gpu, "pcie.board_max_gen", result) ? status : whole(gpu, "pcie.max_gen", result);
}

#endif

/* The minor number of its device node; by default the index. */
API int nvmlDeviceGetMinorNumber(void *device, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    return status ? status : whole(gpu, "minor", result) ? whole(gpu, "index", result) : OK;
}

API int nvmlDeviceGetName(void *device, char *result, unsigned size) {
    char value[TEXT], instance[64];
    target asked;
    int status = device_gate(__func__, device, result, &asked);
    if (!status && !(status = fetch(asked.gpu, "name", value))) {
        if (asked.gi >= 0 && !(status = ci_name(asked.gpu, asked.gi, asked.ci, instance, sizeof instance)))
            snprintf(value + strlen(value), sizeof value - strlen(value), " MIG %s", instance);
        status = status ? status : copy(result, size, value);
    }
    return status;
}

API int nvmlDeviceGetUUID(void *device, char *result, unsigned size) {
    char value[TEXT];
    target asked;
    int status = device_gate(__func__, device, result, &asked);
    if (!status && asked.gi >= 0)
        mig_uuid(asked.gpu, asked.gi, asked.ci, value);
    else if (!status)
        status = fetch(asked.gpu, "uuid", value);
    return status ? status : copy(result, size, value);
}

void fill_pci(pci_info *info, int gpu, const char *bus_id) {
    char value[TEXT];
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "%.31s", bus_id);
    sscanf(bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", info->domain & 0xffff,
             info->bus & 0xff, info->device & 0xff);
    info->pci_device = gpu >= 0 && !fetch(gpu, "pci_device_id", value) ? (unsigned)strtoul(value, NULL, 0) : 0x10de;
    if (gpu >= 0 && !fetch(gpu, "pci_subsystem_id", value))
        info->pci_subsystem = (unsigned)strtoul(value, NULL, 0);
}

int pci_of(const char *function, void *device, pci_info *info) {
    char value[TEXT];
    int gpu, status = gpu_gate(function, device, info, &gpu);
    if (!status && !(status = fetch(gpu, "bus_id", value)))
        fill_pci(info, gpu, value);
    return status;
}

/* The double's own function: the address of a GPU that gives no handle. */
API int gpukilnBusId(unsigned index, char *text, unsigned size) {
    char value[TEXT];
    int status = system_gate(__func__);
    if (!status && !(status = fetch((int)index, "bus_id", value)))
        status = copy(text, size, value);
    return status;
}

API int nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) { return pci_of(__func__, device, info); }

int pair(const char *function, void *device, const char *first, unsigned *a, const char *second,
                unsigned *b) {
    int status = b ? asked_number(function, device, first, a) : INVALID;
    return status ? status : asked_number(function, device, second, b);
}

API int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending) {
    return pair(__func__, device, "ecc.current", current, "ecc.pending", pending);
}

#if DRIVER >= 515

API int nvmlDeviceGetGspFirmwareMode(void *device, unsigned *enabled, unsigned *by_default) {
    return pair(__func__, device, "gsp_enabled", enabled, "gsp_default", by_default);
}

#endif

API int nvmlDeviceGetPowerManagementMode(void *device, unsigned *result) {
    unsigned limit;
    int status = result ? asked_number(__func__, device, "power.limit", &limit) : INVALID;
    if (!status)
        *result = 1;
    return status;
}

/* With MIG on a GPU reports none: its instances have the work (nvml.h). */
API int nvmlDeviceGetUtilizationRates(void *device, unsigned *gpu_and_memory) {
    target asked;
    int status = device_gate(__func__, device, gpu_and_memory, &asked);
    if (status)
        return status;
    if (asked.gi >= 0 || mig_is_on(asked.gpu))
        return UNSUPPORTED;
    load work = load_of(asked.gpu, -1, -1);
    unsigned gpu, memory;
    if ((status = whole(asked.gpu, "utilization.gpu", &gpu)))
        return status;
    if ((status = whole(asked.gpu, "utilization.memory", &memory)))
        return status;
    gpu_and_memory[0] = gpu + work.utilization > 100 ? 100 : gpu + work.utilization;
    gpu_and_memory[1] = memory + work.memory_utilization > 100 ? 100 : memory + work.memory_utilization;
    return OK;
}

static int coder(const char *function, void *device, const char *key, unsigned *load_of_it, unsigned *period_us) {
    int gpu, status = gpu_gate(function, device, load_of_it, &gpu);
    if (period_us)
        *period_us = 100000;
    return status ? status : mig_is_on(gpu) ? UNSUPPORTED : whole(gpu, key, load_of_it);
}

API int nvmlDeviceGetEncoderUtilization(void *device, unsigned *percent, unsigned *period_us) {
    return coder(__func__, device, "utilization.encoder", percent, period_us);
}

API int nvmlDeviceGetDecoderUtilization(void *device, unsigned *percent, unsigned *period_us) {
    return coder(__func__, device, "utilization.decoder", percent, period_us);
}

#if DRIVER >= 535

API int nvmlDeviceGetJpgUtilization(void *device, unsigned *percent, unsigned *period_us) {
    return coder(__func__, device, "utilization.jpeg", percent, period_us);
}

API int nvmlDeviceGetOfaUtilization(void *device, unsigned *percent, unsigned *period_us) {
    return coder(__func__, device, "utilization.ofa", percent, period_us);
}

#endif

/* Only Windows has driver models. */
#define WINDOWS(function) \
    API int function(void *device, unsigned *current, unsigned *pending) { \
        int gpu, status = gpu_gate(#function, device, current, &gpu); \
        (void)pending; \
        return status ? status : UNSUPPORTED; \
    }
WINDOWS(nvmlDeviceGetDriverModel)
#if DRIVER >= 555
WINDOWS(nvmlDeviceGetDriverModel_v2)
#endif

API int nvmlDeviceGetVirtualizationMode(void *device, unsigned *result) {
    unsigned mode = 1; /* passed through, as EC2's whole GPUs are to a guest */
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status) {
        whole(gpu, "virtualization", &mode);
        *result = mode;
    }
    return status;
}

/* ---- memory */

static int memory_of(const char *function, void *device, const void *result, double *total, double *reserved,
                     double *used) {
    target asked;
    gi_profile profile;
    int status = device_gate(function, device, result, &asked);
    if (status)
        return status;
    if (asked.gi >= 0) {
        if ((status = gi_profile_of(asked.gpu, asked.gi, &profile)))
            return status;
        *total = (double)profile.memory * (1 << 20);
        *reserved = 0;
        *used = (double)load_of(asked.gpu, asked.gi, -1).memory;
        return OK;
    }
    if ((status = number(asked.gpu, "memory.total", total)) || (status = number(asked.gpu, "memory.used", used)))
        return status;
    if (number(asked.gpu, "memory.reserved", reserved))
        *reserved = 0;
    *total *= 1 << 20;
    *reserved *= 1 << 20;
    *used = *used * (1 << 20) + (double)load_of(asked.gpu, -1, -1).memory;
    if (*used > *total - *reserved)
        *used = *total - *reserved;
    return OK;
}

API int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
    double total = 0, used = 0, reserved = 0;
    int status = memory_of(__func__, device, total_free_used, &total, &reserved, &used);
    if (!status) { /* this version counts reserved memory as used */
        total_free_used[0] = (unsigned long long)total;
        total_free_used[2] = (unsigned long long)(used + reserved);
        total_free_used[1] = total_free_used[0] - total_free_used[2];
    }
    return status;
}

#if DRIVER >= 510

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_info_v2;

API int nvmlDeviceGetMemoryInfo_v2(void *device, memory_info_v2 *info) {
    double total = 0, used = 0, reserved = 0;
    if (!info || info->version != 0x02000028)
        return info ? VERSION_MISMATCH : INVALID;
    int status = memory_of(__func__, device, info, &total, &reserved, &used);
    if (!status) {
        info->total = (unsigned long long)total;
        info->reserved = (unsigned long long)reserved;
        info->used = (unsigned long long)used;
        info->free = info->total - info->used - info->reserved;
    }
    return status;
}

#endif

/* A MIG device's part of the bus's window is its part of the memory slices. From Hopper on the whole memory is
 * mapped while MIG is on, which takes 513 MiB more, and what is left is divided (captures of H100 and H200 with
 * MIG); on an A100 3g.20gb has 32767 MiB (XuehaiPan/nvitop#8). */
static double window_of(int gpu, const gi_profile *profile, double total, double mapped) {
    unsigned slices = 8;
    whole(gpu, "mig.memory_slices", &slices);
    double part = slices ? (double)profile->memory_slices / slices : 1;
    return mapped > 0 && total > mapped + 513 ? (total - mapped - 513) * part : total * part - 1;
}

API int nvmlDeviceGetBAR1MemoryInfo(void *device, unsigned long long *total_free_used) {
    double total, memory, reserved = 0, mapped = 0;
    unsigned architecture;
    gi_profile profile;
    target asked;
    int status = device_gate(__func__, device, total_free_used, &asked);
    if (status || (status = number(asked.gpu, "bar1", &total)))
        return status;
    number(asked.gpu, "memory.reserved", &reserved);
    if (mig_is_on(asked.gpu) && !whole(asked.gpu, "architecture", &architecture) && architecture >= 9 &&
        !number(asked.gpu, "memory.total", &memory))
        mapped = memory - reserved;
    if (asked.gi >= 0) {
        if ((status = gi_profile_of(asked.gpu, asked.gi, &profile)))
            return status;
        total_free_used[0] = (unsigned long long)window_of(asked.gpu, &profile, total, mapped) << 20;
        total_free_used[2] = 0;
    } else {
        total_free_used[0] = (unsigned long long)total << 20;
        total_free_used[2] = (unsigned long long)(mapped > 0 ? mapped : 1) << 20; /* 1: the driver's own */
    }
    total_free_used[1] = total_free_used[0] - total_free_used[2];
    return OK;
}

API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    char value[TEXT];
    target asked;
    int status = minor ? device_gate(__func__, device, major, &asked) : INVALID;
    if (!status && !(status = fetch(asked.gpu, "compute_capability", value)))
        status = sscanf(value, "%d.%d", major, minor) == 2 ? OK : UNSUPPORTED;
    return status;
}
