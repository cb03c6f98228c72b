/* A double of NVIDIA's NVML (libnvidia-ml.so.1), driven by the text file that NVML_DOUBLE_SPEC names.
 *
 * The file has one `key value` a line and is read again at every call, so a test can change the machine while
 * a program runs. tests/doubles/nvml.py writes it from the same document that gpukiln/probe/nvml.py
 * makes. A key that is missing is NVML_ERROR_NOT_SUPPORTED, `KEY.code N` is NVML's error N,
 * `error.FUNCTION N` and `gpus.I.fail.FUNCTION N` make one function answer N, `gpus.I.error.code N` makes all
 * calls of one GPU answer N. What is not written here does not exist in the library, as in an older driver.
 * Names, arguments, layouts: as pynvml.py (nvidia-ml-py) declares them.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 64
#define TEXT 512

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
       NO_DRIVER = 9, VERSION_MISMATCH = 25 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} pci_info;

typedef struct {
    unsigned long long total, free, used;
} memory_info;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_info_v2;

static char handles[MAX_GPUS];
static int users;

static int index_of(const void *device) {
    const char *at = device;
    return at >= handles && at < handles + MAX_GPUS ? (int)(at - handles) : -1;
}

/* The value of a key: 1 when it is there. No state is kept, so that threads need no lock. */
static int look(char *value, const char *format, ...) {
    char key[TEXT], line[TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    const char *path = getenv("NVML_DOUBLE_SPEC");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        found = !strncmp(line, key, length) && line[length] == ' ';
        if (found) {
            line[strcspn(line, "\n")] = 0;
            strcpy(value, line + length + 1);
        }
    }
    if (file)
        fclose(file);
    return found;
}

static int count_of(const char *format, int gpu, const char *list) {
    char key[TEXT], value[TEXT];
    snprintf(key, sizeof key, format, gpu, list);
    return look(value, "%s.count", key) ? atoi(value) : -1;
}

/* Whether a function may answer at all; gpu -1 is none. */
static int gate(const char *function, int gpu) {
    char value[TEXT];
    if (!users)
        return UNINITIALIZED;
    if (look(value, "error.%s", function))
        return atoi(value);
    if (gpu >= 0 && look(value, "gpus.%d.error.code", gpu))
        return atoi(value);
    if (gpu >= 0 && look(value, "gpus.%d.fail.%s", gpu, function))
        return atoi(value);
    return OK;
}

static int device_gate(const char *function, const void *device, const void *result) {
    int gpu = index_of(device);
    return gpu < 0 || !result ? INVALID : gate(function, gpu);
}

static int fetch(int gpu, const char *key, char *value) {
    if (look(value, "gpus.%d.%s", gpu, key))
        return OK;
    return look(value, "gpus.%d.%s.code", gpu, key) ? atoi(value) : UNSUPPORTED;
}

static int number(const char *function, const void *device, const char *key, double *result) {
    char value[TEXT];
    int status = device_gate(function, device, result);
    if (!status && !(status = fetch(index_of(device), key, value)))
        *result = strtod(value, NULL);
    return status;
}

static int whole(const char *function, const void *device, const char *key, unsigned *result) {
    double value;
    int status = result ? number(function, device, key, &value) : INVALID;
    if (!status)
        *result = (unsigned)(value + 0.5);
    return status;
}

static int copy(char *result, unsigned size, const char *value) {
    if (!result || strlen(value) >= size)
        return result ? TOO_SMALL : INVALID;
    strcpy(result, value);
    return OK;
}

static int system_text(const char *function, const char *key, char *result, unsigned size) {
    char value[TEXT];
    int status = gate(function, -1);
    if (status)
        return status;
    if (look(value, "%s", key))
        return copy(result, size, value);
    return look(value, "%s.code", key) ? atoi(value) : UNSUPPORTED;
}

static int device_text(const char *function, const void *device, const char *key, char *result, unsigned size) {
    char value[TEXT];
    int status = device_gate(function, device, result);
    if (!status && !(status = fetch(index_of(device), key, value)))
        status = copy(result, size, value);
    return status;
}

static void fill_pci(pci_info *info, const char *bus_id) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "%s", bus_id);
    sscanf(bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", info->domain & 0xffff,
             info->bus & 0xff, info->device & 0xff);
    info->pci_device = 0x10de;
}

/* ---- the library */

API int nvmlInitWithFlags(unsigned flags) {
    char value[TEXT];
    (void)flags;
    if (!getenv("NVML_DOUBLE_SPEC"))
        return NO_DRIVER;
    if (look(value, "error.nvmlInit") || look(value, "error.code"))
        return atoi(value);
    users++;
    return OK;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) {
    int status = gate("nvmlShutdown", -1);
    if (!status)
        users--;
    return status;
}

API const char *nvmlErrorString(int status) { return status ? "an error of the double" : "Success"; }

API int nvmlSystemGetDriverVersion(char *result, unsigned size) {
    return system_text(__func__, "driver", result, size);
}

API int nvmlSystemGetNVMLVersion(char *result, unsigned size) {
    return system_text(__func__, "nvml", result, size);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *result) {
    char value[TEXT];
    int major = 0, minor = 0, status = system_text(__func__, "cuda_driver", value, sizeof value);
    if (!status && sscanf(value, "%d.%d", &major, &minor) > 0)
        *result = major * 1000 + minor * 10;
    return status;
}

API int nvmlSystemGetProcessName(unsigned pid, char *result, unsigned size) {
    char value[TEXT];
    int status = gate(__func__, -1);
    for (int gpu = 0; !status && gpu < MAX_GPUS; gpu++)
        for (int i = 0; i < count_of("gpus.%d.%s", gpu, "processes"); i++)
            if (look(value, "gpus.%d.processes.%d.pid", gpu, i) && (unsigned)atoi(value) == pid &&
                look(value, "gpus.%d.processes.%d.name", gpu, i))
                return copy(result, size, value);
    return status ? status : NOT_FOUND;
}

API int nvmlDeviceGetCount_v2(unsigned *result) {
    char value[TEXT];
    int status = gate(__func__, -1);
    if (!status)
        *result = look(value, "gpus.count") ? (unsigned)atoi(value) : 0;
    return status;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    unsigned count = 0;
    int status = nvmlDeviceGetCount_v2(&count);
    if (!status && (index >= count || index >= MAX_GPUS))
        status = INVALID;
    if (!status && !(status = gate(__func__, (int)index)))
        *device = &handles[index];
    return status;
}

static int find(const char *function, const char *key, const char *wanted, void **device) {
    char value[TEXT];
    int status = gate(function, -1);
    for (int gpu = 0; !status && gpu < MAX_GPUS; gpu++)
        if (look(value, "gpus.%d.%s", gpu, key) && !strcasecmp(value, wanted))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)gpu, device);
    return status ? status : NOT_FOUND;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return find(__func__, "uuid", uuid, device); }

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) {
    return find(__func__, "bus_id", bus_id, device);
}

/* ---- one GPU: what is a number or a text and nothing else */

#define NUMBER(function, key) \
    API int function(void *device, unsigned *result) { return whole(__func__, device, key, result); }
#define NAMED(function, key) \
    API int function(void *device, char *result, unsigned size) { \
        return device_text(__func__, device, key, result, size); \
    }

NAMED(nvmlDeviceGetName, "name")
NAMED(nvmlDeviceGetUUID, "uuid")
NAMED(nvmlDeviceGetSerial, "serial")
NUMBER(nvmlDeviceGetIndex, "index")
NUMBER(nvmlDeviceGetMinorNumber, "index")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.gen")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.max_gen")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie.max_width")
NUMBER(nvmlDeviceGetFanSpeed, "fan")
NUMBER(nvmlDeviceGetPerformanceState, "pstate")
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER(nvmlDeviceGetDisplayMode, "display_mode")
NUMBER(nvmlDeviceGetDisplayActive, "display_active")
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "mig.devices")

API int nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
    char value[TEXT];
    int status = device_gate(__func__, device, info);
    if (!status && !(status = fetch(index_of(device), "bus_id", value)))
        fill_pci(info, value);
    return status;
}

API int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *result) {
    int status = device_gate(__func__, device, result);
    if (!status)
        *result = 0;
    return status;
}

static int pair(const char *function, void *device, const char *first, unsigned *a, const char *second,
                unsigned *b) {
    int status = whole(function, device, first, a);
    return status ? status : whole(function, device, second, b);
}

API int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending) {
    return pair(__func__, device, "ecc.current", current, "ecc.pending", pending);
}

API int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    return pair(__func__, device, "mig.current", current, "mig.pending", pending);
}

API int nvmlDeviceGetUtilizationRates(void *device, unsigned *gpu_and_memory) {
    return pair(__func__, device, "utilization.gpu", gpu_and_memory, "utilization.memory", gpu_and_memory + 1);
}

API int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *result) {
    char key[TEXT];
    double value;
    snprintf(key, sizeof key, "ecc.%s_%s", counter ? "aggregate" : "volatile", type ? "uncorrected" : "corrected");
    int status = result ? number(__func__, device, key, &value) : INVALID;
    if (!status)
        *result = (unsigned long long)value;
    return status;
}

API int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                  unsigned *failed) {
    int status = pair(__func__, device, "remapped_rows.correctable", corrected, "remapped_rows.uncorrectable",
                      uncorrected);
    return status ? status
                  : pair(__func__, device, "remapped_rows.pending", pending, "remapped_rows.failed", failed);
}

API int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *result) {
    return whole(__func__, device, kind == 3 ? "clocks.video" : kind == 2 ? "clocks.mem" : "clocks.sm", result);
}

API int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *result) {
    const char *key = kind == 3 ? "clocks.max_video" : kind == 2 ? "clocks.max_mem" : "clocks.max_sm";
    return whole(__func__, device, key, result);
}

static int reasons(const char *function, void *device, unsigned long long *result) {
    double value;
    int status = result ? number(function, device, "throttle.mask", &value) : INVALID;
    if (!status)
        *result = (unsigned long long)value;
    return status;
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *result) {
    return reasons(__func__, device, result);
}

API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *result) {
    return sensor ? INVALID : whole(__func__, device, "temperature.gpu", result);
}

/* T.Limit supersedes it on Ada and later (nvml.h): there it answers, and means nothing. */
API int nvmlDeviceGetTemperatureThreshold(void *device, int kind, unsigned *result) {
    char value[TEXT];
    int status = device_gate(__func__, device, result);
    if (!status && !fetch(index_of(device), "temperature.tlimit.slowdown", value)) {
        *result = 0;
        return OK;
    }
    return status ? status
                  : whole(__func__, device, kind == 1 ? "temperature.slowdown" : "temperature.other", result);
}

static int milliwatts(const char *function, void *device, const char *key, unsigned *result) {
    double value;
    int status = result ? number(function, device, key, &value) : INVALID;
    if (!status)
        *result = (unsigned)(value * 1000 + 0.5);
    return status;
}

API int nvmlDeviceGetPowerUsage(void *device, unsigned *result) {
    return milliwatts(__func__, device, "power.draw", result);
}

API int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *result) {
    return milliwatts(__func__, device, "power.limit", result);
}

API int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *result) {
    return milliwatts(__func__, device, "power.limit", result);
}

API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    char value[TEXT];
    int status = device_text(__func__, device, "compute_capability", value, sizeof value);
    return status ? status : sscanf(value, "%d.%d", major, minor) == 2 ? OK : UNSUPPORTED;
}

static int memory(const char *function, void *device, double *total, double *used) {
    int status = number(function, device, "memory.total", total);
    if (!status)
        status = number(function, device, "memory.used", used);
    *total *= 1 << 20;
    *used *= 1 << 20;
    return status;
}

API int nvmlDeviceGetMemoryInfo(void *device, memory_info *info) {
    double total = 0, used = 0;
    int status = memory(__func__, device, &total, &used);
    if (!status) {
        info->total = (unsigned long long)total;
        info->used = (unsigned long long)used;
        info->free = info->total - info->used;
    }
    return status;
}

API int nvmlDeviceGetMemoryInfo_v2(void *device, memory_info_v2 *info) {
    double total = 0, used = 0;
    int status = info->version == 0x02000028 ? memory(__func__, device, &total, &used) : VERSION_MISMATCH;
    if (!status) {
        info->total = (unsigned long long)total;
        info->used = (unsigned long long)used;
        info->reserved = 0;
        info->free = info->total - info->used;
    }
    return status;
}

#include "nvml_lists.c"
