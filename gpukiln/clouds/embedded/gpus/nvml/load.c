/* The double of NVML: processes that use a GPU, and their memory and load. */
#include <time.h>
#include <unistd.h>

#include "double.h"

/* Whether the process with this id has this start time: ids are reused (proc(5), field 22 of stat). */
static int lives(unsigned pid, unsigned long long start) {
    char path[64], line[1024];
    unsigned long long began = 0;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    char *read = fgets(line, sizeof line, file);
    fclose(file);
    char *at = read ? strrchr(line, ')') : NULL, state = 0;
    if (!at || sscanf(at + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &state,
                      &began) != 2)
        return 0;
    return state != 'Z' && began == start;
}

/* Process ids are valid in one PID namespace. In others, such as a container's, the driver reports them
 * unchanged, and they match no process there (NVIDIA/nvidia-docker#1483). */
static int in_namespace(void) {
    char value[TEXT], here[64] = "";
    if (!look(value, "pid_namespace"))
        return 1;
    ssize_t length = readlink("/proc/self/ns/pid", here, sizeof here - 1);
    return length > 0 && !strcmp(here, value);
}

int process_at(int gpu, int position, process *found) {
    char value[TEXT];
    memset(found, 0, sizeof *found);
    found->gi = found->ci = -1;
    found->memory = ~0ULL;
    if (!look(value, "gpus.%d.processes.%d.pid", gpu, position))
        return 0;
    found->pid = (unsigned)strtoul(value, NULL, 10);
    if (look(value, "gpus.%d.processes.%d.memory", gpu, position))
        found->memory = strtoull(value, NULL, 10) << 20;
    if (look(value, "gpus.%d.processes.%d.kind", gpu, position))
        snprintf(found->kind, sizeof found->kind, "%.23s", value);
    look(found->name, "gpus.%d.processes.%d.name", gpu, position);
    if (look(value, "gpus.%d.processes.%d.utilization", gpu, position))
        found->utilization = (unsigned)atoi(value);
    if (look(value, "gpus.%d.processes.%d.memory_utilization", gpu, position))
        found->memory_utilization = (unsigned)atoi(value);
    if (look(value, "gpus.%d.processes.%d.gi", gpu, position))
        found->gi = atoi(value);
    if (look(value, "gpus.%d.processes.%d.ci", gpu, position))
        found->ci = atoi(value);
    if (!look(value, "gpus.%d.processes.%d.start", gpu, position))
        return 1; /* of a recording: its memory is in what the GPU says */
    if (!in_namespace()) {
        found->lives = 1;
        found->name[0] = 0;
        return 1;
    }
    found->lives = lives(found->pid, strtoull(value, NULL, 10));
    return found->lives;
}

/* The use of a GPU, or of one of its MIG instances, by living processes. */
load load_of(int gpu, int gi, int ci) {
    load sum = {0};
    process one;
    for (int i = 0, listed = list_length(gpu, "processes"); i < listed; i++) {
        if (!process_at(gpu, i, &one) || !one.lives || (gi >= 0 && one.gi != gi) || (ci >= 0 && one.ci != ci))
            continue;
        sum.processes++;
        sum.utilization += one.utilization;
        sum.memory_utilization += one.memory_utilization;
        sum.memory += one.memory == ~0ULL ? 0 : one.memory;
    }
    sum.utilization = sum.utilization > 100 ? 100 : sum.utilization;
    sum.memory_utilization = sum.memory_utilization > 100 ? 100 : sum.memory_utilization;
    return sum;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process_info;

typedef struct {
    unsigned pid;
    unsigned long long memory;
} process_info_v1;

static int running(const char *function, void *device, const char *kind, unsigned *count, void *infos, size_t each) {
    char value[TEXT];
    target asked;
    process one;
    unsigned found = 0, capacity = count ? *count : 0;
    int status = device_gate(function, device, count, &asked);
    if (!status && look(value, "gpus.%d.processes.code", asked.gpu))
        status = atoi(value);
    int listed = status ? 0 : list_length(asked.gpu, "processes");
    if (!status && listed < 0)
        status = UNSUPPORTED;
    for (int i = 0; !status && i < listed; i++) {
        if (!process_at(asked.gpu, i, &one) || !one.pid || !strstr(one.kind, kind))
            continue; /* compute+graphics (C+G) is in both lists */
        if (asked.gi >= 0 && (one.gi != asked.gi || one.ci != asked.ci))
            continue;
        if (infos && found < capacity) {
            process_info info = {one.pid, one.memory, (unsigned)one.gi, (unsigned)one.ci};
            memcpy((char *)infos + found * each, &info, each < sizeof info ? each : sizeof info);
        }
        found++;
    }
    if (!status) {
        *count = found;
        status = found > capacity || (found && !infos) ? TOO_SMALL : OK;
    }
    return status;
}

/* 470 made the second form, whose layout the third one has too */
#define RUNNING(name, kind) \
    API int name##_v2(void *device, unsigned *count, process_info *infos) { \
        return running(#name "_v2", device, kind, count, infos, sizeof *infos); \
    } \
    API int name(void *device, unsigned *count, process_info_v1 *infos) { \
        return running(#name, device, kind, count, infos, sizeof *infos); \
    }

RUNNING(nvmlDeviceGetComputeRunningProcesses, "compute")
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, "graphics")
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, "mps")

#if DRIVER >= 510

#define RUNNING_V3(name, kind) \
    API int name##_v3(void *device, unsigned *count, process_info *infos) { \
        return running(#name "_v3", device, kind, count, infos, sizeof *infos); \
    }
RUNNING_V3(nvmlDeviceGetComputeRunningProcesses, "compute")
RUNNING_V3(nvmlDeviceGetGraphicsRunningProcesses, "graphics")
RUNNING_V3(nvmlDeviceGetMPSComputeRunningProcesses, "mps")

#endif
#if DRIVER >= 535

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
    unsigned long long protected_memory;
} process_detail;

typedef struct {
    unsigned version, mode, count;
    process_detail *processes;
} process_details;

API int nvmlDeviceGetRunningProcessDetailList(void *device, process_details *list) {
    static const char *const kinds[] = {"compute", "graphics", "mps"};
    if (!list || list->version != (sizeof *list | 1 << 24))
        return list ? VERSION_MISMATCH : INVALID;
    if (list->mode > 2)
        return INVALID;
    if (list->processes) /* no protected memory where confidential computing is off */
        memset(list->processes, 0, list->count * sizeof *list->processes);
    return running(__func__, device, kinds[list->mode], &list->count, list->processes, sizeof *list->processes);
}

#endif

API int nvmlSystemGetProcessName(unsigned pid, char *result, unsigned size) {
    process one;
    int status = system_gate(__func__);
    for (int gpu = 0; !status && gpu < MAX_GPUS; gpu++)
        for (int i = 0, listed = list_length(gpu, "processes"); i < listed; i++)
            if (process_at(gpu, i, &one) && one.pid == pid && one.name[0]) {
                snprintf(result, size, "%s", one.name); /* the driver cuts what is too long */
                return OK;
            }
    return status ? status : NOT_FOUND;
}

typedef struct {
    unsigned pid;
    unsigned long long at;
    unsigned sm, memory, encoder, decoder;
} utilization_sample;

/* One sample for each active process; NOT_FOUND where none was active since the given time (nvml.h). */
API int nvmlDeviceGetProcessUtilization(void *device, utilization_sample *samples, unsigned *count,
                                        unsigned long long since_us) {
    struct timespec at;
    process one;
    int gpu, status = gpu_gate(__func__, device, count, &gpu);
    if (status)
        return status;
    if (mig_is_on(gpu) || list_length(gpu, "processes") < 0)
        return UNSUPPORTED;
    clock_gettime(CLOCK_REALTIME, &at);
    unsigned long long us = (unsigned long long)at.tv_sec * 1000000 + (unsigned long long)at.tv_nsec / 1000;
    unsigned found = 0, capacity = *count;
    for (int i = 0, listed = list_length(gpu, "processes"); i < listed; i++) {
        if (!process_at(gpu, i, &one) || !one.pid || !one.lives || us <= since_us)
            continue;
        if (samples && found < capacity)
            samples[found] = (utilization_sample){one.pid, us, one.utilization, one.memory_utilization, 0, 0};
        found++;
    }
    *count = found;
    if (!found)
        return NOT_FOUND;
    return !samples || found > capacity ? TOO_SMALL : OK;
}

#if DRIVER >= 550

typedef struct {
    unsigned long long at;
    unsigned pid, sm, memory, encoder, decoder, jpeg, ofa;
} utilization_info;

typedef struct {
    unsigned version, count;
    unsigned long long since_us;
    utilization_info *processes;
} utilization_infos;

API int nvmlDeviceGetProcessesUtilizationInfo(void *device, utilization_infos *list) {
    utilization_sample samples[64];
    if (!list || list->version != (sizeof *list | 1 << 24))
        return list ? VERSION_MISMATCH : INVALID;
    unsigned sampled = sizeof samples / sizeof *samples, size = list->processes ? list->count : 0;
    int status = nvmlDeviceGetProcessUtilization(device, samples, &sampled, list->since_us);
    if (status)
        return status;
    for (unsigned i = 0; i < sampled && i < size; i++)
        list->processes[i] = (utilization_info){samples[i].at, samples[i].pid, samples[i].sm, samples[i].memory, 0, 0,
                                                0, 0};
    list->count = sampled;
    return sampled > size ? TOO_SMALL : OK;
}

#endif
