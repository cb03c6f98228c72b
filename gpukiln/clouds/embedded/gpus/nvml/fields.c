/* The double of NVML: the fields that are asked by number (nvml.h, NVML_FI_DEV_*). */
#include <time.h>

#include "double.h"

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type;
    int status;
    union {
        double real;
        unsigned plain;
        int whole;
        unsigned long long count;
    } value;
} field_value;

enum { PLAIN_TYPE = 1, COUNT_TYPE = 3, WHOLE_TYPE = 5 };

static int links_of(int gpu) {
    int listed = list_length(gpu, "nvlinks");
    return listed < 0 ? 0 : listed;
}

/* One more than the last number that a branch knows: NVML_FI_MAX in the nvml.h of each CUDA release. */
static unsigned end_of_fields(void) {
    static const unsigned ends[][2] = {{595, 303}, {590, 289}, {575, 274}, {570, 269}, {565, 231}, {560, 230},
                                       {555, 223}, {550, 200}, {535, 197}, {530, 173}, {525, 170}, {520, 167},
                                       {0, 161}};
    unsigned at = 0;
    while (ends[at][0] > DRIVER)
        at++;
    return ends[at][1];
}

/* Numbers and kinds from nvml.h; `since` is the branch that brought them. */
static const struct field {
    unsigned number, type, since;
    const char *key;
    double unit; /* what the state's value is multiplied by */
} fields[] = {
    {1, PLAIN_TYPE, 0, "ecc.current", 1},
    {2, PLAIN_TYPE, 0, "ecc.pending", 1},
    {3, COUNT_TYPE, 0, "ecc.volatile_corrected", 1},
    {4, COUNT_TYPE, 0, "ecc.volatile_uncorrected", 1},
    {5, COUNT_TYPE, 0, "ecc.aggregate_corrected", 1},
    {6, COUNT_TYPE, 0, "ecc.aggregate_uncorrected", 1},
    {31, PLAIN_TYPE, 0, "retired_pages_pending", 1},
    {82, PLAIN_TYPE, 0, "temperature.memory", 1},
    {92, PLAIN_TYPE, 0, "retired_pages_pending", 1},
    {93, PLAIN_TYPE, 0, "retired_pages_pending", 1},
    {94, PLAIN_TYPE, 0, "pcie.replays", 1},
    {95, PLAIN_TYPE, 0, "pcie.rollovers", 1},
    {142, PLAIN_TYPE, 0, "remapped_rows.correctable", 1},
    {143, PLAIN_TYPE, 0, "remapped_rows.uncorrectable", 1},
    {144, PLAIN_TYPE, 0, "remapped_rows.pending", 1},
    {145, PLAIN_TYPE, 0, "remapped_rows.failed", 1},
    {193, WHOLE_TYPE, 535, "temperature.tlimit.shutdown", 1},
    {194, WHOLE_TYPE, 535, "temperature.tlimit.slowdown", 1},
    {195, WHOLE_TYPE, 535, "temperature.tlimit.memory", 1},
    {196, WHOLE_TYPE, 535, "temperature.tlimit.gpu", 1},
    {226, PLAIN_TYPE, 560, "reset_required", 1},
    {227, PLAIN_TYPE, 560, "drain_required", 1},
    {228, PLAIN_TYPE, 565, "pcie.atomics_out", 1},
    {229, PLAIN_TYPE, 565, "pcie.atomics_in", 1},
    {230, PLAIN_TYPE, 565, "recovery_action", 1},
    {274, PLAIN_TYPE, 590, "edpp_multiplier", 1},
    {301, PLAIN_TYPE, 595, "remapped_rows.inactive", 1},
    {302, PLAIN_TYPE, 595, "remapped_rows.inactive", 1},
};

/* Of power, by what it is about: the GPU, the module that it is on, its memory (nvml.h, NVML_POWER_SCOPE_*). */
static int power_field(void *device, int gpu, field_value *field) {
    static const char *const scopes[] = {"power", "power.module", "power.memory"};
    static const char *const names[] = {[0] = "draw", [1] = "draw", [2] = "min_limit", [3] = "max_limit",
                                        [4] = "default_limit", [5] = "limit", [7] = "limit"};
    extern int nvmlDeviceGetPowerUsage(void *, unsigned *);
    char key[KEY];
    double watts;
    unsigned at = field->field - 185, averaged;
    if (field->scope > 2)
        return INVALID;
    field->type = PLAIN_TYPE;
    /* nvml.h: averages since Ampere, but not on GA100; the memory's is an average and nothing else */
    if (at == 0 && !field->scope && !whole(gpu, "power.averaged", &averaged) && !averaged)
        return UNSUPPORTED;
    if (at == 1 && field->scope == 2)
        return UNSUPPORTED;
    if (at < 2 && !field->scope)
        return nvmlDeviceGetPowerUsage(device, &field->value.plain);
    snprintf(key, sizeof key, "%s.%s", scopes[field->scope], names[at]);
    int status = number(gpu, key, &watts);
    if (!status)
        field->value.plain = (unsigned)(watts * 1000 + 0.5);
    return status;
}

/* Errors of memory by location: 7 to 16 volatile, corrected and uncorrected by turns, 17 the CBU's; then those that
 * are kept. */
static int error_field(void *device, field_value *field) {
    extern int nvmlDeviceGetMemoryErrorCounter(void *, int, int, int, unsigned long long *);
    static const int locations[] = {0, 1, 2, 3, 4}; /* L1, L2, device memory, register file, texture memory */
    unsigned kept = field->field >= 18, at = field->field - (kept ? 18 : 7);
    field->type = COUNT_TYPE;
    if (at == 10)
        return nvmlDeviceGetMemoryErrorCounter(device, 1, (int)kept, 6, &field->value.count);
    return nvmlDeviceGetMemoryErrorCounter(device, at % 2, (int)kept, locations[at / 2], &field->value.count);
}

/* How long clocks were held down, in ns. */
static int held_field(void *device, field_value *field) {
    extern int nvmlDeviceGetViolationStatus(void *, int, unsigned long long *);
    static const int policies[] = {0, 1, 2, 3, 4, 5, 10, 11};
    unsigned long long both[2];
    int status = nvmlDeviceGetViolationStatus(device, field->field > 81 ? 1 : policies[field->field - 74], both);
    field->type = COUNT_TYPE;
    if (!status)
        field->value.count = both[1];
    return status;
}

/* Of one link, which the scope names. */
static int link_field(void *device, field_value *field, const char *name) {
    char value[TEXT];
    int status = of_link("nvmlDeviceGetFieldValues", device, field->scope, name, field, value);
    field->type = PLAIN_TYPE;
    if (!status)
        field->value.plain = (unsigned)atoi(value);
    return status;
}

enum { RETIRED_CORRECTED = 29, RETIRED_UNCORRECTED = 30, ENERGY = 83, LINK_SPEED = 90, LINK_COUNT = 91,
       SPEED_OF_LINK = 164, STATE_OF_LINK = 165, VERSION_OF_LINK = 166, ENERGY_BY_SCOPE = 191, RECOVERIES = 215 };

static int special(void *device, int gpu, field_value *field) {
    char value[TEXT];
    unsigned pages;
    int status;
    switch (field->field) {
    case 7 ... 28: return error_field(device, field);
    case 74 ... 81:
    case 269 ... 271: return held_field(device, field);
    case 185 ... 190:
    case 192: return power_field(device, gpu, field);
    case STATE_OF_LINK: return link_field(device, field, "state");
    case VERSION_OF_LINK: return link_field(device, field, "version");
    case RETIRED_CORRECTED:
    case RETIRED_UNCORRECTED:
        field->type = COUNT_TYPE;
        field->value.count = 0; /* none is, where they can be */
        return whole(gpu, "retired_pages_pending", &pages);
    case ENERGY:
    case ENERGY_BY_SCOPE: {
        extern int nvmlDeviceGetTotalEnergyConsumption(void *, unsigned long long *);
        field->type = COUNT_TYPE;
        return nvmlDeviceGetTotalEnergyConsumption(device, &field->value.count);
    }
    case SPEED_OF_LINK:
        if ((status = link_field(device, field, "state")))
            return status;
        /* fall through */
    case LINK_SPEED:
        field->type = PLAIN_TYPE;
        if ((status = links_of(gpu) ? fetch(gpu, "nvlink_mbps", value) : UNSUPPORTED))
            return status;
        field->value.plain = (unsigned)atoi(value);
        return OK;
    case LINK_COUNT:
        field->type = PLAIN_TYPE;
        field->value.plain = (unsigned)links_of(gpu);
        return links_of(gpu) ? OK : UNSUPPORTED;
    case RECOVERIES:
        field->type = COUNT_TYPE;
        status = of_link("nvmlDeviceGetFieldValues", device, field->scope, "errors.recovery", field, value);
        if (!status && !has_own_counters(device, field->scope))
            return UNSUPPORTED;
        if (!status)
            field->value.count = strtoull(value, NULL, 10);
        return status;
    default: return UNSUPPORTED; /* of what is not simulated */
    }
}

/* Only the field's own status says that it is not there. */
static void answer_field(void *device, int gpu, field_value *field) {
    struct timespec at;
    double value;
    clock_gettime(CLOCK_REALTIME, &at);
    memset(&field->value, 0xaa, sizeof field->value);
    field->timestamp = (long long)at.tv_sec * 1000000 + at.tv_nsec / 1000;
    field->latency_us = 0;
    field->status = INVALID;
    if (!field->field || field->field >= end_of_fields())
        return; /* a number that a driver doesn't know is no valid argument */
    field->status = special(device, gpu, field);
    for (unsigned i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].number != field->field || fields[i].since > DRIVER)
            continue;
        field->type = fields[i].type;
        if (!(field->status = number(gpu, fields[i].key, &value))) {
            value *= fields[i].unit;
            if (field->type == WHOLE_TYPE)
                field->value.whole = (int)value;
            else if (field->type == COUNT_TYPE)
                field->value.count = (unsigned long long)value;
            else
                field->value.plain = (unsigned)(value + 0.5);
        }
    }
}

API int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
    int gpu, status = gpu_gate(__func__, device, values, &gpu);
    for (int i = 0; !status && i < count; i++)
        answer_field(device, gpu, &values[i]);
    return status;
}

