/* The double of NVML: memory errors, and their repair. */
#include "double.h"

static int long_number(const char *function, void *device, const char *key, unsigned long long *result) {
    char value[TEXT];
    int gpu, status = gpu_gate(function, device, result, &gpu);
    if (!status && !(status = fetch(gpu, key, value)))
        *result = (unsigned long long)strtod(value, NULL);
    return status;
}

API int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *result) {
    char key[KEY];
    snprintf(key, sizeof key, "ecc.%s_%s", counter ? "aggregate" : "volatile", type ? "uncorrected" : "corrected");
    return type < 0 || type > 1 || counter < 0 || counter > 1 ? INVALID
                                                              : long_number(__func__, device, key, result);
}

/* Which locations a board counts by stands in `ecc.locations`, as nvmlMemoryLocation_t's numbers; where nothing
 * is said, all of them. Every error of the double is one of the board's memory. */
static int counts_at(int gpu, int location, int type) {
    char value[TEXT];
    unsigned listed;
    if (location == 6 && !type) /* the CBU has parity, which detects but can't correct */
        return 0;
    if (fetch(gpu, "ecc.locations", value))
        return 1;
    char *rest = value, *word;
    while ((word = strsep(&rest, " ")))
        if (sscanf(word, "%u", &listed) == 1 && listed == (unsigned)location)
            return 1;
    return 0;
}

API int nvmlDeviceGetMemoryErrorCounter(void *device, int type, int counter, int location,
                                        unsigned long long *result) {
    int gpu, status = location < 0 || location > 7 ? INVALID : gpu_gate(__func__, device, result, &gpu);
    if (!status && !(status = nvmlDeviceGetTotalEccErrors(device, type, counter, result)))
        status = counts_at(gpu, location, type) ? OK : UNSUPPORTED;
    if (!status && location != 2)
        *result = 0;
    return status;
}

/* L1 cache, L2 cache, device memory, register file. */
API int nvmlDeviceGetDetailedEccErrors(void *device, int type, int counter, unsigned long long *counts) {
    unsigned long long total;
    int status = counts ? nvmlDeviceGetTotalEccErrors(device, type, counter, &total) : INVALID;
    if (!status) {
        counts[0] = counts[1] = counts[3] = 0;
        counts[2] = total;
    }
    return status;
}

/* With MIG on a GPU reports none from Hopper on ("N/A" in captures of an H100 and an H200, driver 590.48.01). */
static int rows_gate(const char *function, void *device, const void *result, int *gpu) {
    unsigned architecture;
    int status = gpu_gate(function, device, result, gpu);
    if (!status && mig_is_on(*gpu) && !whole(*gpu, "architecture", &architecture) && architecture >= 9)
        status = UNSUPPORTED;
    return status;
}

API int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                  unsigned *failed) {
    int gpu, status = rows_gate(__func__, device, corrected, &gpu);
    if (!status)
        status = pair(__func__, device, "remapped_rows.correctable", corrected, "remapped_rows.uncorrectable",
                      uncorrected);
    return status ? status
                  : pair(__func__, device, "remapped_rows.pending", pending, "remapped_rows.failed", failed);
}

/* Banks by how many of their spare rows are left: all, most, some, few, none. */
API int nvmlDeviceGetRowRemapperHistogram(void *device, unsigned *max_high_partial_low_none) {
    int gpu, status = rows_gate(__func__, device, max_high_partial_low_none, &gpu);
    if (!status && !(status = whole(gpu, "remapped_rows.banks", max_high_partial_low_none)))
        memset(max_high_partial_low_none + 1, 0, 4 * sizeof *max_high_partial_low_none);
    return status;
}

/* No page is retired; boards that remap rows retire none (nvml.h). */
static int retired(const char *function, void *device, int cause, unsigned *count) {
    unsigned pending;
    int status = cause < 0 || cause > 1 || !count
                     ? INVALID
                     : asked_number(function, device, "retired_pages_pending", &pending);
    if (!status)
        *count = 0;
    return status;
}

API int nvmlDeviceGetRetiredPages(void *device, int cause, unsigned *count, unsigned long long *addresses) {
    (void)addresses;
    return retired(__func__, device, cause, count);
}

API int nvmlDeviceGetRetiredPages_v2(void *device, int cause, unsigned *count, unsigned long long *addresses,
                                     unsigned long long *times) {
    (void)addresses;
    (void)times;
    return retired(__func__, device, cause, count);
}

#if DRIVER >= 550

typedef struct {
    unsigned version;
    unsigned long long counts[11]; /* aggregate and volatile, then where the aggregate ones were */
    unsigned threshold_exceeded;
} sram_errors;

API int nvmlDeviceGetSramEccErrorStatus(void *device, sram_errors *errors) {
    unsigned there;
    int gpu, status = gpu_gate(__func__, device, errors, &gpu);
    if (status)
        return status;
    if (errors->version != (sizeof *errors | 1 << 24))
        return VERSION_MISMATCH;
    if ((status = whole(gpu, "ecc.sram", &there)))
        return status;
    memset(errors->counts, 0, sizeof errors->counts);
    errors->threshold_exceeded = 0;
    return OK;
}

#endif
#if DRIVER >= 595

/* Correctable ones that are active and that are not, uncorrectable ones alike, pending, failed. */
API int nvmlDeviceGetRemappedRows_v2(void *device, unsigned *rows) {
    unsigned counts[4];
    int status = rows ? nvmlDeviceGetRemappedRows(device, &counts[0], &counts[1], &counts[2], &counts[3]) : INVALID;
    if (!status)
        memcpy(rows, (unsigned[]){counts[0], 0, counts[1], 0, counts[2], counts[3]}, 6 * sizeof *rows);
    return status;
}

#endif
