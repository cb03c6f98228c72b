/* The double of NVML: events. The state has the last ones, `events.N.{sequence,gpu,type,data}`. */
#include <time.h>

#include "double.h"

typedef struct {
    unsigned long long types[MAX_GPUS], seen;
} event_set;

typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} event_data;

static unsigned long long event_number(const char *name, int at) {
    char value[TEXT];
    return look(value, "events.%d.%s", at, name) ? strtoull(value, NULL, 10) : 0;
}

static int event_count(void) {
    char value[TEXT];
    return look(value, "events.count") ? atoi(value) : 0;
}

static unsigned long long last_event(void) {
    unsigned long long last = 0;
    for (int at = 0, listed = event_count(); at < listed; at++)
        if (event_number("sequence", at) > last)
            last = event_number("sequence", at);
    return last;
}

API int nvmlEventSetCreate(event_set **set) {
    int status = set ? system_gate(__func__) : INVALID;
    if (status)
        return status;
    *set = calloc(1, sizeof **set);
    if (!*set)
        return 20;
    (*set)->seen = last_event();
    return OK;
}

API int nvmlEventSetFree(event_set *set) {
    int status = set ? system_gate(__func__) : INVALID;
    if (!status)
        free(set);
    return status;
}

/* ECC errors, performance state, Xid, clocks; GeForce and vGPU report fewer. */
API int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    unsigned ecc;
    int gpu, status = gpu_gate(__func__, device, types, &gpu);
    if (!status)
        *types = whole(gpu, "ecc.current", &ecc) ? 0x8 : 0x1f;
    return status;
}

API int nvmlDeviceRegisterEvents(void *device, unsigned long long types, event_set *set) {
    unsigned long long known = 0;
    int gpu, status = gpu_gate(__func__, device, set, &gpu);
    if (!status && !(status = nvmlDeviceGetSupportedEventTypes(device, &known)))
        status = types & ~known ? UNSUPPORTED : OK;
    if (!status)
        set->types[gpu] |= types;
    return status;
}

static int next_event(event_set *set, event_data *found) {
    unsigned long long first = ~0ULL;
    for (int at = 0, listed = event_count(); at < listed; at++) {
        unsigned long long sequence = event_number("sequence", at), type = event_number("type", at);
        int gpu = (int)event_number("gpu", at);
        if (sequence <= set->seen || sequence >= first || gpu < 0 || gpu >= MAX_GPUS || !(set->types[gpu] & type))
            continue;
        first = sequence;
        *found = (event_data){handle_of(gpu), type, event_number("data", at), ~0U, ~0U};
    }
    if (first == ~0ULL)
        return 0;
    set->seen = first;
    return 1;
}

static int wait_for(const char *function, event_set *set, event_data *found, unsigned timeout_ms) {
    struct timespec at;
    int status = set && found ? system_gate(function) : INVALID;
    clock_gettime(CLOCK_MONOTONIC, &at);
    long long end = at.tv_sec * 1000LL + at.tv_nsec / 1000000 + timeout_ms;
    while (!status) {
        if (next_event(set, found))
            return OK;
        clock_gettime(CLOCK_MONOTONIC, &at);
        if (at.tv_sec * 1000LL + at.tv_nsec / 1000000 >= end)
            return TIMEOUT;
        nanosleep(&(struct timespec){0, 20000000}, NULL);
        status = system_gate(function);
    }
    return status;
}

API int nvmlEventSetWait_v2(event_set *set, event_data *found, unsigned timeout_ms) {
    return wait_for(__func__, set, found, timeout_ms);
}

API int nvmlEventSetWait(event_set *set, event_data *found, unsigned timeout_ms) {
    return wait_for(__func__, set, found, timeout_ms);
}
