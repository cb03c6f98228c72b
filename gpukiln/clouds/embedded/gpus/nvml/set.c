/* The double of NVML: what changes a GPU. Only root may, as with the driver. */
#include "double.h"

typedef struct {
    int gpu;
    const char *key;
    char value[32];
} setting;

static int set_one(edits *changes, void *with) {
    const setting *asked = with;
    put(changes, asked->value, "gpus.%d.%s", asked->gpu, asked->key);
    return OK;
}

/* A value that the GPU tells can be set; others are not supported. */
static int set_number(const char *function, void *device, const char *key, double value) {
    double before;
    setting asked = {.key = key};
    int status = gpu_gate(function, device, key, &asked.gpu);
    if (!status)
        status = number(asked.gpu, key, &before);
    snprintf(asked.value, sizeof asked.value, "%.10g", value);
    return status ? status : change(set_one, &asked);
}

API int nvmlDeviceSetPersistenceMode(void *device, unsigned mode) {
    return mode > 1 ? INVALID : set_number(__func__, device, "persistence", mode);
}

/* 0 default, 1 exclusive thread (gone), 2 prohibited, 3 exclusive process */
API int nvmlDeviceSetComputeMode(void *device, unsigned mode) {
    return mode > 3         ? INVALID
           : mode == 1      ? UNSUPPORTED
                            : set_number(__func__, device, "compute_mode", mode);
}

/* Holds after the next reset. */
API int nvmlDeviceSetEccMode(void *device, unsigned mode) {
    return mode > 1 ? INVALID : set_number(__func__, device, "ecc.pending", mode);
}

API int nvmlDeviceSetPowerManagementLimit(void *device, unsigned milliwatts) {
    double least = 0, most = 0;
    int gpu, status = gpu_gate(__func__, device, &least, &gpu);
    if (status || (status = number(gpu, "power.min_limit", &least)) || (status = number(gpu, "power.max_limit", &most)))
        return status;
    double watts = milliwatts / 1000.0;
    return watts < least || watts > most ? INVALID : set_number(__func__, device, "power.limit", watts);
}

typedef struct {
    int gpu;
    unsigned memory, sm;
    int remove;
} clocks;

static int set_clocks(edits *changes, void *with) {
    const clocks *asked = with;
    char text[32];
    if (asked->remove) {
        drop(changes, "gpus.%d.clocks.app_mem", asked->gpu);
        drop(changes, "gpus.%d.clocks.app_sm", asked->gpu);
        return OK;
    }
    snprintf(text, sizeof text, "%u", asked->memory);
    put(changes, text, "gpus.%d.clocks.app_mem", asked->gpu);
    snprintf(text, sizeof text, "%u", asked->sm);
    put(changes, text, "gpus.%d.clocks.app_sm", asked->gpu);
    return OK;
}

API int nvmlDeviceSetApplicationsClocks(void *device, unsigned memory, unsigned graphics) {
    clocks asked = {.memory = memory, .sm = graphics};
    unsigned most_memory, most_sm;
    int status = gpu_gate(__func__, device, &asked, &asked.gpu);
    if (status || (status = whole(asked.gpu, "clocks.max_mem", &most_memory)) ||
        (status = whole(asked.gpu, "clocks.max_sm", &most_sm)))
        return status;
    return memory != most_memory || graphics > most_sm ? INVALID : change(set_clocks, &asked);
}

API int nvmlDeviceResetApplicationsClocks(void *device) {
    clocks asked = {.remove = 1};
    int status = gpu_gate(__func__, device, &asked, &asked.gpu);
    return status ? status : change(set_clocks, &asked);
}

typedef struct {
    int gpu, counter;
} counters;

static int clear_counters(edits *changes, void *with) {
    const counters *asked = with;
    const char *which = asked->counter ? "aggregate" : "volatile";
    put(changes, "0", "gpus.%d.ecc.%s_corrected", asked->gpu, which);
    put(changes, "0", "gpus.%d.ecc.%s_uncorrected", asked->gpu, which);
    return OK;
}

API int nvmlDeviceClearEccErrorCounts(void *device, int counter) {
    unsigned current;
    counters asked = {.counter = counter};
    int status = counter < 0 || counter > 1 ? INVALID : gpu_gate(__func__, device, &asked, &asked.gpu);
    if (!status)
        status = whole(asked.gpu, "ecc.current", &current);
    return status ? status : change(clear_counters, &asked);
}

/* ---- a reset: NVML has no call for it that is public; nvidia-smi's goes to the driver */

static int copy_pending(edits *changes, int gpu, const char *mode) {
    char value[TEXT];
    if (look(value, "gpus.%d.%s.pending", gpu, mode))
        put(changes, value, "gpus.%d.%s.current", gpu, mode);
    return OK;
}

/* What waited for it holds now, what happened since the last one is forgotten, what the board keeps stays.
 * A GPU that fell off the bus is not reached by it. */
static int reset(edits *changes, void *with) {
    const setting *asked = with;
    char value[TEXT];
    int gpu = asked->gpu;
    if (load_of(gpu, -1, -1).processes)
        return IN_USE;
    copy_pending(changes, gpu, "ecc");
    copy_pending(changes, gpu, "mig");
    drop(changes, "gpus.%d.mig.gi", gpu);
    if (look(value, "gpus.%d.ecc.volatile_corrected", gpu))
        put(changes, "0", "gpus.%d.ecc.volatile_corrected", gpu);
    if (look(value, "gpus.%d.ecc.volatile_uncorrected", gpu))
        put(changes, "0", "gpus.%d.ecc.volatile_uncorrected", gpu);
    if (look(value, "gpus.%d.remapped_rows.pending", gpu))
        put(changes, "0", "gpus.%d.remapped_rows.pending", gpu);
    if (look(value, "gpus.%d.retired_pages_pending", gpu))
        put(changes, "0", "gpus.%d.retired_pages_pending", gpu);
    if (look(value, "gpus.%d.recovery_action", gpu))
        put(changes, "0", "gpus.%d.recovery_action", gpu);
    drop(changes, "gpus.%d.clocks.app_mem", gpu);
    drop(changes, "gpus.%d.clocks.app_sm", gpu);
    for (int link = 0, listed = list_length(gpu, "nvlinks"); link < listed; link++)
        if (look(value, "gpus.%d.nvlinks.%d.errors.replay", gpu, link)) {
            put(changes, "0", "gpus.%d.nvlinks.%d.errors.replay", gpu, link);
            put(changes, "0", "gpus.%d.nvlinks.%d.errors.recovery", gpu, link);
            put(changes, "0", "gpus.%d.nvlinks.%d.errors.crc_flit", gpu, link);
            put(changes, "0", "gpus.%d.nvlinks.%d.errors.crc_data", gpu, link);
        }
    return OK;
}

API int gpukilnReset(void *device) {
    setting asked = {0};
    int status = gpu_gate(__func__, device, &asked, &asked.gpu);
    return status ? status : change(reset, &asked);
}
