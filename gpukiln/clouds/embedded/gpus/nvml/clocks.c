/* The double of NVML: clocks, temperature, power, and their samples. */
#include <time.h>

#include "double.h"

static const char *clock_key(int kind, int most) {
    static const char *const names[2][4] = {{"clocks.graphics", "clocks.sm", "clocks.mem", "clocks.video"},
                                            {"clocks.max_graphics", "clocks.max_sm", "clocks.max_mem",
                                             "clocks.max_video"}};
    return kind < 0 || kind > 3 ? NULL : names[most][kind];
}

/* A clock that is locked stays between the two ends, idle or not. */
static unsigned locked(int gpu, int kind, unsigned mhz) {
    const char *least_key = kind == 2 ? "clocks.locked_mem_min" : "clocks.locked_min";
    const char *most_key = kind == 2 ? "clocks.locked_mem_max" : "clocks.locked_max";
    unsigned least, most;
    if (kind == 3 || whole(gpu, least_key, &least) || whole(gpu, most_key, &most))
        return mhz;
    return mhz < least ? least : mhz > most ? most : mhz;
}

static int clock_of(const char *function, void *device, int kind, int most, unsigned *result) {
    const char *key = clock_key(kind, most);
    int gpu, status = key ? gpu_gate(function, device, result, &gpu) : INVALID;
    if (status)
        return status;
    status = busy_whole(gpu, key, result);
    /* the graphics and SM clocks are equal on every board of this catalogue */
    if (status == UNSUPPORTED && !kind)
        status = busy_whole(gpu, clock_key(1, most), result);
    if (!status && !most)
        *result = locked(gpu, kind, *result);
    return status;
}

API int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *result) {
    return clock_of(__func__, device, kind, 0, result);
}

API int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *result) {
    return clock_of(__func__, device, kind, 1, result);
}

/* GeForce boards report no boost clock of a customer, and no application clocks ("N/A" in the captures of an RTX 2080
 * SUPER and an RTX 4080 SUPER). */
static int is_geforce(int gpu) {
    unsigned brand;
    return !whole(gpu, "brand", &brand) && brand == 5;
}

API int nvmlDeviceGetMaxCustomerBoostClock(void *device, int kind, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status && (kind > 1 || is_geforce(gpu)))
        return kind < 0 || kind > 3 ? INVALID : UNSUPPORTED;
    return status ? status : clock_of(__func__, device, kind, 1, result);
}

/* Application clocks are the board's defaults until they are set, mostly its highest ones. From branch 590 on
 * nvidia-smi has "Requested functionality has been deprecated" in their place (captures of 590.48.01 and 595). */
static int application_clock(const char *function, void *device, int kind, const char *sm, const char *memory,
                             unsigned *result) {
    int gpu, status = gpu_gate(function, device, result, &gpu);
    if (status)
        return status;
    if (DRIVER >= 590)
        return DEPRECATED;
    if (is_geforce(gpu))
        return UNSUPPORTED;
    if ((kind == 0 || kind == 2) && sm && !whole(gpu, kind ? memory : sm, result))
        return OK;
    if ((kind == 0 || kind == 1) && !whole(gpu, "clocks.default_app", result))
        return OK;
    return clock_of(function, device, kind, 1, result);
}

API int nvmlDeviceGetDefaultApplicationsClock(void *device, int kind, unsigned *result) {
    return application_clock(__func__, device, kind, NULL, NULL, result);
}

API int nvmlDeviceGetApplicationsClock(void *device, int kind, unsigned *result) {
    return application_clock(__func__, device, kind, "clocks.app_sm", "clocks.app_mem", result);
}

API int nvmlDeviceGetClock(void *device, int kind, int which, unsigned *result) {
    if (which < 0 || which > 3)
        return INVALID;
    return which == 0   ? nvmlDeviceGetClockInfo(device, kind, result)
           : which == 1 ? nvmlDeviceGetApplicationsClock(device, kind, result)
                        : nvmlDeviceGetMaxClockInfo(device, kind, result);
}

/* What is supported: rows `clocks.supported.N.{memory,max,min,step}`, as a board's tables have it; where there are
 * none, the highest clocks alone. */
static double supported_at(int gpu, int position, const char *name) {
    char key[KEY];
    double value = 0;
    snprintf(key, sizeof key, "clocks.supported.%d.%s", position, name);
    return number(gpu, key, &value) ? 0 : value;
}

static int list_clocks(unsigned listed, unsigned *count, const unsigned *clocks) {
    unsigned size = *count;
    *count = listed;
    return clocks && listed <= size ? OK : TOO_SMALL;
}

API int nvmlDeviceGetSupportedMemoryClocks(void *device, unsigned *count, unsigned *clocks) {
    unsigned most;
    int gpu, status = gpu_gate(__func__, device, count, &gpu);
    if (status || (status = clock_of(__func__, device, 2, 1, &most)))
        return status;
    int listed = list_length(gpu, "clocks.supported");
    for (int i = 0; clocks && i < listed && (unsigned)i < *count; i++)
        clocks[i] = (unsigned)supported_at(gpu, i, "memory");
    if (listed <= 0 && clocks && *count)
        clocks[0] = most;
    return list_clocks(listed > 0 ? (unsigned)listed : 1, count, clocks);
}

API int nvmlDeviceGetSupportedGraphicsClocks(void *device, unsigned memory_mhz, unsigned *count, unsigned *clocks) {
    unsigned memory, most, clock_count = 0;
    int gpu, status = gpu_gate(__func__, device, count, &gpu);
    if (status || (status = clock_of(__func__, device, 2, 1, &memory)) ||
        (status = clock_of(__func__, device, 0, 1, &most)))
        return status;
    int listed = list_length(gpu, "clocks.supported"), at = 0;
    while (at < listed && (unsigned)supported_at(gpu, at, "memory") != memory_mhz)
        at++;
    if (listed > 0 ? at == listed : memory != memory_mhz)
        return NOT_FOUND;
    double most_here = listed > 0 ? supported_at(gpu, at, "max") : most;
    double least = listed > 0 ? supported_at(gpu, at, "min") : most;
    double step = listed > 0 ? supported_at(gpu, at, "step") : 1;
    for (double clock = most_here; step > 0 && clock >= least; clock -= step, clock_count++)
        if (clocks && clock_count < *count)
            clocks[clock_count] = (unsigned)clock;
    return list_clocks(clock_count, count, clocks);
}

static int reasons(const char *function, void *device, unsigned long long *result) {
    double value;
    int gpu, status = gpu_gate(function, device, result, &gpu);
    if (!status && !(status = number(gpu, "throttle.mask", &value))) {
        *result = (unsigned long long)value;
        if (load_of(gpu, -1, -1).utilization)
            *result &= ~1ULL; /* not idle */
    }
    return status;
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *result) {
    return reasons(__func__, device, result);
}

static int every_reason(const char *function, void *device, unsigned long long *result) {
    int status = reasons(function, device, result);
    if (!status)
        *result = 0x1ff;
    return status;
}

API int nvmlDeviceGetSupportedClocksThrottleReasons(void *device, unsigned long long *result) {
    return every_reason(__func__, device, result);
}

API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *result) {
    int gpu, status = sensor ? INVALID : gpu_gate(__func__, device, result, &gpu);
    return status ? status : busy_whole(gpu, "temperature.gpu", result);
}

/* T.Limit supersedes it on Ada and later (nvml.h): there it answers, and means nothing. */
API int nvmlDeviceGetTemperatureThreshold(void *device, int kind, unsigned *result) {
    static const char *const names[] = {"temperature.shutdown", "temperature.slowdown", "temperature.memory_max",
                                        "temperature.gpu_max", "temperature.acoustic_min",
                                        "temperature.acoustic_target", "temperature.acoustic_max"};
    char value[TEXT];
    int gpu, status = kind < 0 || kind > 7 ? INVALID : gpu_gate(__func__, device, result, &gpu);
    if (status)
        return status;
    if (kind < 4 && !fetch(gpu, "temperature.tlimit.slowdown", value)) {
        *result = 0;
        return OK;
    }
    return kind < 7 ? whole(gpu, names[kind], result) : UNSUPPORTED;
}

static int milliwatts(const char *function, void *device, const char *key, unsigned *result) {
    double value;
    int gpu, status = gpu_gate(function, device, result, &gpu);
    if (!status && !(status = number(gpu, key, &value)))
        *result = (unsigned)(value * 1000 + 0.5);
    return status;
}

/* Between the idle power and the limit, in proportion to the utilisation by processes. */
static int power_drawn(int gpu, double *watts) {
    double most;
    int status = number(gpu, "power.draw", watts);
    unsigned used = status ? 0 : load_of(gpu, -1, -1).utilization;
    if (used && !number(gpu, "busy.power.draw", &most) && most > *watts)
        *watts += (most - *watts) * used / 100;
    return status;
}

API int nvmlDeviceGetPowerUsage(void *device, unsigned *result) {
    double watts;
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status && !(status = power_drawn(gpu, &watts)))
        *result = (unsigned)(watts * 1000 + 0.5);
    return status;
}

API int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *result) {
    return milliwatts(__func__, device, "power.limit", result);
}

API int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *result) {
    return milliwatts(__func__, device, "power.limit", result);
}

API int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned *result) {
    return milliwatts(__func__, device, "power.default_limit", result);
}

API int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned *least, unsigned *most) {
    int status = most ? milliwatts(__func__, device, "power.min_limit", least) : INVALID;
    return status ? status : milliwatts(__func__, device, "power.max_limit", most);
}

/* The energy at the last change of the state, plus the power since then: it never decreases. */
API int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    double counted, watts, since;
    int gpu, status = gpu_gate(__func__, device, millijoules, &gpu);
    if (status || (status = number(gpu, "energy.counted", &counted)) ||
        (status = number(gpu, "energy.watts", &watts)) || (status = number(gpu, "energy.since", &since)))
        return status;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    double passed = (double)at.tv_sec + (double)at.tv_nsec / 1e9 - since;
    *millijoules = (unsigned long long)(counted + (passed > 0 ? passed * watts * 1000 : 0));
    return OK;
}

API int nvmlDeviceGetPcieThroughput(void *device, int counter, unsigned *kib_s) {
    if (counter != 0 && counter != 1)
        return INVALID;
    return asked_number(__func__, device, counter ? "pcie.rx" : "pcie.tx", kib_s);
}

/* ---- samples, and times of reduced clocks */

typedef struct {
    unsigned long long at;
    union {
        double real;
        unsigned plain;
        unsigned long long count;
    } value;
} sample;

enum { SAMPLES = 120, SAMPLE_US = 166667 }; /* a choice of this project: 20 seconds, six a second */

static int sampled(void *device, int gpu, int kind, unsigned *value) {
    extern int nvmlDeviceGetUtilizationRates(void *, unsigned *);
    static const char *const engines[] = {[3] = "utilization.encoder", [4] = "utilization.decoder",
                                          [8] = "utilization.jpeg", [9] = "utilization.ofa"};
    unsigned both[2];
    double watts;
    int status = UNSUPPORTED;
    switch (kind) {
    case 0: return nvmlDeviceGetPowerUsage(device, value);
    case 1:
    case 2:
        if (!(status = nvmlDeviceGetUtilizationRates(device, both)))
            *value = both[kind - 1];
        return status;
    case 5: return nvmlDeviceGetClockInfo(device, 1, value);
    case 6: return nvmlDeviceGetClockInfo(device, 2, value);
    case 7:
        if (!(status = number(gpu, "power.module.draw", &watts)))
            *value = (unsigned)(watts * 1000 + 0.5);
        return status;
    default: return mig_is_on(gpu) ? UNSUPPORTED : whole(gpu, engines[kind], value);
    }
}

/* All samples are the present value: the double has no history. */
API int nvmlDeviceGetSamples(void *device, int kind, unsigned long long since_us, unsigned *value_type,
                             unsigned *count, sample *samples) {
    struct timespec at;
    unsigned value, filled = 0;
    int gpu, status = value_type && kind >= 0 && kind <= 9 ? gpu_gate(__func__, device, count, &gpu) : INVALID;
    if (status || (samples && !*count))
        return status ? status : INVALID;
    if ((status = sampled(device, gpu, kind, &value)))
        return status;
    *value_type = 1; /* unsigned */
    if (!samples) {
        *count = SAMPLES;
        return OK;
    }
    clock_gettime(CLOCK_REALTIME, &at);
    unsigned long long now = (unsigned long long)at.tv_sec * 1000000 + (unsigned long long)at.tv_nsec / 1000;
    now -= now % SAMPLE_US; /* every caller gets the same samples */
    for (int back = SAMPLES - 1; back >= 0 && filled < *count; back--)
        if (now - (unsigned long long)back * SAMPLE_US > since_us) {
            memset(&samples[filled], 0, sizeof *samples);
            samples[filled].at = now - (unsigned long long)back * SAMPLE_US;
            samples[filled++].value.plain = value;
        }
    *count = filled;
    return filled ? OK : NOT_FOUND;
}

/* No violation since the driver was loaded. */
API int nvmlDeviceGetViolationStatus(void *device, int policy, unsigned long long *reference_and_time) {
    struct timespec at;
    int known = (policy >= 0 && policy <= 5) || policy == 10 || policy == 11;
    int gpu, status = known ? gpu_gate(__func__, device, reference_and_time, &gpu) : INVALID;
    if (status || (status = number(gpu, "throttle.mask", &(double){0})))
        return status;
    clock_gettime(CLOCK_REALTIME, &at);
    reference_and_time[0] = (unsigned long long)at.tv_sec * 1000000 + (unsigned long long)at.tv_nsec / 1000;
    reference_and_time[1] = 0;
    return OK;
}

#if DRIVER >= 535 /* their names since then */

API int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *result) {
    return reasons(__func__, device, result);
}

API int nvmlDeviceGetSupportedClocksEventReasons(void *device, unsigned long long *result) {
    return every_reason(__func__, device, result);
}

#endif
#if DRIVER >= 570

typedef struct {
    unsigned version;
    int sensor, temperature;
} temperature_info;

API int nvmlDeviceGetTemperatureV(void *device, temperature_info *info) {
    unsigned value = 0;
    if (!info || info->version != 0x100000C)
        return info ? VERSION_MISMATCH : INVALID;
    int status = info->sensor ? INVALID : nvmlDeviceGetTemperature(device, 0, &value);
    if (!status)
        info->temperature = (int)value;
    return status;
}

typedef struct {
    unsigned version;
    int margin;
} margin_info;

API int nvmlDeviceGetMarginTemperature(void *device, margin_info *info) {
    double value;
    int gpu;
    if (!info || info->version != 0x1000008)
        return info ? VERSION_MISMATCH : INVALID;
    int status = gpu_gate(__func__, device, info, &gpu);
    if (!status && !(status = number(gpu, "temperature.margin", &value)))
        info->margin = (int)value;
    return status;
}

#endif
