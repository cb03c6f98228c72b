/* The double of NVML: what changes a GPU. Only root may, as with the driver. */
#include <unistd.h>

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

/* A value that the GPU reports can be set; others are not supported. */
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

API int nvmlDeviceSetAccountingMode(void *device, unsigned mode) {
    return mode > 1 ? INVALID : set_number(__func__, device, "accounting", mode);
}

/* There are none, see nvmlDeviceGetAccountingPids. */
API int nvmlDeviceClearAccountingPids(void *device) {
    unsigned mode;
    int gpu, status = gpu_gate(__func__, device, device, &gpu);
    if (!status)
        status = whole(gpu, "accounting", &mode);
    return status ? status : geteuid() ? NO_PERMISSION : OK;
}

/* 0 default, 1 exclusive thread (gone), 2 prohibited, 3 exclusive process */
API int nvmlDeviceSetComputeMode(void *device, unsigned mode) {
    return mode > 3         ? INVALID
           : mode == 1      ? UNSUPPORTED
                            : set_number(__func__, device, "compute_mode", mode);
}

/* Takes effect at the next reset. */
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

#if DRIVER >= 535

typedef struct {
    unsigned version, scope, milliwatts;
} power_value;

API int nvmlDeviceSetPowerManagementLimit_v2(void *device, power_value *limit) {
    if (!limit || limit->version != (sizeof *limit | 2 << 24))
        return limit ? VERSION_MISMATCH : INVALID;
    if (limit->scope) /* the module's, on Grace Hopper alone */
        return UNSUPPORTED;
    return nvmlDeviceSetPowerManagementLimit(device, limit->milliwatts);
}

#endif

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

/* Locked clocks: of the GPU from Volta on, of the memory from Ampere on (nvml.h). A request beyond the board's
 * limits is clamped to them, as `nvidia-smi -lgc 0,9999` is accepted. */
typedef struct {
    int gpu, memory, remove;
    unsigned least, most;
} lock;

static int set_lock(edits *changes, void *with) {
    const lock *asked = with;
    const char *name = asked->memory ? "clocks.locked_mem" : "clocks.locked";
    char text[32];
    if (asked->remove) {
        drop(changes, "gpus.%d.%s_min", asked->gpu, name);
        drop(changes, "gpus.%d.%s_max", asked->gpu, name);
        return OK;
    }
    snprintf(text, sizeof text, "%u", asked->least);
    put(changes, text, "gpus.%d.%s_min", asked->gpu, name);
    snprintf(text, sizeof text, "%u", asked->most);
    put(changes, text, "gpus.%d.%s_max", asked->gpu, name);
    return OK;
}

static int lock_clocks(const char *function, void *device, lock asked) {
    unsigned architecture, most;
    int status = gpu_gate(function, device, device, &asked.gpu);
    if (status || (status = whole(asked.gpu, "architecture", &architecture)) ||
        (status = whole(asked.gpu, asked.memory ? "clocks.max_mem" : "clocks.max_sm", &most)))
        return status;
    if (architecture < (asked.memory ? 7 : 5))
        return UNSUPPORTED;
    if (!asked.remove && asked.least > asked.most)
        return INVALID;
    asked.least = asked.least > most ? most : asked.least;
    asked.most = asked.most > most ? most : asked.most;
    return change(set_lock, &asked);
}

API int nvmlDeviceSetGpuLockedClocks(void *device, unsigned least, unsigned most) {
    return lock_clocks(__func__, device, (lock){.least = least, .most = most});
}

API int nvmlDeviceResetGpuLockedClocks(void *device) {
    return lock_clocks(__func__, device, (lock){.remove = 1});
}

API int nvmlDeviceSetMemoryLockedClocks(void *device, unsigned least, unsigned most) {
    return lock_clocks(__func__, device, (lock){.memory = 1, .least = least, .most = most});
}

API int nvmlDeviceResetMemoryLockedClocks(void *device) {
    return lock_clocks(__func__, device, (lock){.memory = 1, .remove = 1});
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

static void clear_link(edits *changes, int gpu, int at) {
    static const char *const names[] = {"replay", "recovery", "crc_flit", "crc_data"};
    char value[TEXT];
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (look(value, "gpus.%d.nvlinks.%d.errors.%s", gpu, at, names[i]))
            put(changes, "0", "gpus.%d.nvlinks.%d.errors.%s", gpu, at, names[i]);
}

typedef struct {
    int gpu, at;
} one_link;

static int clear_one_link(edits *changes, void *with) {
    const one_link *asked = with;
    clear_link(changes, asked->gpu, asked->at);
    return OK;
}

API int nvmlDeviceResetNvLinkErrorCounters(void *device, unsigned link) {
    one_link asked = {0};
    int status = link_at(__func__, device, link, device, &asked.gpu, &asked.at);
    return status ? status : change(clear_one_link, &asked);
}

/* ---- a reset: NVML has no call for it that is public; nvidia-smi's goes to the driver */

static int copy_pending(edits *changes, int gpu, const char *mode) {
    char value[TEXT];
    if (look(value, "gpus.%d.%s.pending", gpu, mode))
        put(changes, value, "gpus.%d.%s.current", gpu, mode);
    return OK;
}

/* Pending settings take effect, volatile counters are cleared, aggregate ones stay.
 * A reset does not reach a GPU that fell off the bus. */
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
    drop(changes, "gpus.%d.clocks.locked_min", gpu);
    drop(changes, "gpus.%d.clocks.locked_max", gpu);
    drop(changes, "gpus.%d.clocks.locked_mem_min", gpu);
    drop(changes, "gpus.%d.clocks.locked_mem_max", gpu);
    for (int link = 0, listed = list_length(gpu, "nvlinks"); link < listed; link++)
        clear_link(changes, gpu, link);
    return OK;
}

API int gpukilnReset(void *device) {
    setting asked = {0};
    int status = gpu_gate(__func__, device, &asked, &asked.gpu);
    return status ? status : change(reset, &asked);
}

/* ---- gives a running process a part of a GPU: the double's own call, because no program computes on it */

typedef struct {
    int gpu, gi, ci;
    unsigned pid, utilization;
    unsigned long long start, memory;
    char name[TEXT];
} use;

static int began(unsigned pid, unsigned long long *start, char *name) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    char *read = file ? fgets(line, sizeof line, file) : NULL, *at = read ? strrchr(line, ')') : NULL;
    if (file)
        fclose(file);
    if (!at || sscanf(at + 1, " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                      start) != 1)
        return 0;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    file = fopen(path, "r");
    size_t length = file ? fread(name, 1, TEXT - 1, file) : 0;
    if (file)
        fclose(file);
    name[length] = 0;
    name[strcspn(name, "\n")] = 0; /* the first word, as the driver has it */
    return 1;
}

static int take(edits *changes, void *with) {
    const use *asked = with;
    char text[64];
    process one;
    int listed = list_length(asked->gpu, "processes"), at = 0;
    for (; at < listed; at++) /* its own place, or that of one that has ended */
        if (!process_at(asked->gpu, at, &one) || one.pid == asked->pid)
            break;
    drop(changes, "gpus.%d.processes.%d", asked->gpu, at);
    if (!asked->memory && !asked->utilization)
        return OK;
#define ROW(name, format, value) \
    snprintf(text, sizeof text, format, value); \
    put(changes, text, "gpus.%d.processes.%d." name, asked->gpu, at)
    if (at >= listed) {
        snprintf(text, sizeof text, "%d", at + 1);
        put(changes, text, "gpus.%d.processes.count", asked->gpu);
    }
    put(changes, asked->name, "gpus.%d.processes.%d.name", asked->gpu, at);
    ROW("pid", "%u", asked->pid);
    ROW("start", "%llu", asked->start);
    ROW("memory", "%llu", asked->memory);
    ROW("utilization", "%u", asked->utilization);
    ROW("kind", "%s", "compute");
    if (asked->gi >= 0) {
        ROW("gi", "%d", asked->gi);
        ROW("ci", "%d", asked->ci);
    }
#undef ROW
    return OK;
}

/* Memory in MiB; with neither memory nor utilisation the process releases what it had. */
API int gpukilnUse(void *device, unsigned pid, unsigned long long memory, unsigned utilization) {
    use asked = {.pid = pid, .memory = memory, .utilization = utilization};
    unsigned long long info[3];
    target whose;
    extern int nvmlDeviceGetMemoryInfo(void *, unsigned long long *);
    int status = utilization > 100 ? INVALID : device_gate(__func__, device, device, &whose);
    if (status)
        return status;
    if (whose.gi < 0 && mig_is_on(whose.gpu))
        return UNSUPPORTED; /* with MIG on, work is on one of its devices */
    if (!began(pid, &asked.start, asked.name))
        return NOT_FOUND;
    if ((status = nvmlDeviceGetMemoryInfo(device, info)))
        return status;
    if (memory > info[1] >> 20)
        return 20; /* NVML_ERROR_MEMORY */
    asked.gpu = whose.gpu;
    asked.gi = whose.gi;
    asked.ci = whose.ci;
    return change(take, &asked);
}
