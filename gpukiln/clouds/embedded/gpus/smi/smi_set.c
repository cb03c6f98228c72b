/* The stand-in nvidia-smi: what changes a GPU. Texts: strings of nvidia-smi 535.261.03; of clocks and accounting, its
 * output as quoted in public. */
#include "smi.h"

#include <strings.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* of the table: what is left out is 0 */

typedef struct change change;
struct change {
    const char *option, *choices; /* what its value is one of, by number or by word */
    int numbers;                  /* else how many numbers it takes; of -2, one may stand for both */
    int (*apply)(const gpu *, const change *, const unsigned *);
    const char *function, *done, *refused, *failed; /* of a GPU; `done` begins with the numbers, or the word */
    const char *invalid;                            /* numbers that the GPU can't have, then the GPU */
};

static int report(const gpu *one, const change *of, int status) {
    if (unsupported(status)) {
        printf(of->refused, one->bus_id);
        puts(".");
    } else if (status) {
        printf(of->failed, one->bus_id);
        printf(": %s\n", error_text(status));
    }
    return status;
}

static int call(const gpu *one, const change *of, const unsigned *values) {
    int status = nvml(of->function)(one->handle, values[0], values[1]);
    if (status == INVALID && of->invalid) {
        printf(of->invalid, values[0], values[1], one->bus_id);
        return status;
    }
    if (report(one, of, status))
        return status;
    if (of->numbers)
        printf(of->done, values[0], values[1], one->bus_id);
    else if (of->choices)
        printf(of->done, values[0] ? "Enabled" : "Disabled", one->bus_id);
    else
        printf(of->done, one->bus_id);
    puts(".");
    return OK;
}

static int persistence(const gpu *one, const change *of, const unsigned *values) {
    unsigned now;
    if (nvml("nvmlDeviceGetPersistenceMode")(one->handle, &now) || now != *values)
        return call(one, of, values);
    printf("Persistence mode is already %s for GPU %s.\n", now ? "Enabled" : "Disabled", one->bus_id);
    return OK;
}

static int error_counts(const gpu *one, const change *of, const unsigned *values) {
    int status = report(one, of, nvml("nvmlDeviceClearEccErrorCounts")(one->handle, *values));
    if (!status)
        printf("Reset %s ECC errors to zero for GPU %s.\n", *values ? "aggregate" : "volatile", one->bus_id);
    return status;
}

static int partitioning(const gpu *one, const change *of, const unsigned *values) {
    int activation = OK, status = nvml("nvmlDeviceSetMigMode")(one->handle, *values, &activation);
    const char *verb = *values ? "enable" : "disable";
    (void)of;
    if (status) {
        printf("Unable to %s MIG Mode for GPU %s: %s\n", verb, one->bus_id, error_text(status));
        return status;
    }
    if (!activation) {
        printf("%s MIG Mode for GPU %s\n", *values ? "Enabled" : "Disabled", one->bus_id);
        return OK;
    }
    printf("Warning: MIG mode is in pending %s state for GPU %s:%s\n", verb, one->bus_id, error_text(activation));
    if (activation == IN_USE)
        printf(
            "%s is currently being used by one or more other processes (e.g. CUDA application or a monitoring "
            "application such as another instance of nvidia-smi). Please first kill all processes using the device "
            "and retry the command or reboot the system to make MIG mode effective.\n",
            one->bus_id);
    else
        printf("Reboot the system or try nvidia-smi --gpu-reset to make MIG mode effective on GPU %s\n", one->bus_id);
    return OK; /* a warning is none without --error-on-warning */
}

static const char modes[] = "DEFAULT|EXCLUSIVE_THREAD|PROHIBITED|EXCLUSIVE_PROCESS";
static const char *const mode_names[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};

static int compute_mode(const gpu *one, const change *of, const unsigned *values) {
    unsigned now;
    if (*values == 1) {
        puts("Exclusive_Thread was deprecated! Use value 3:Exclusive_Process instead.");
        return INVALID;
    }
    int same = !nvml("nvmlDeviceGetComputeMode")(one->handle, &now) && now == *values;
    int status = same ? OK : report(one, of, nvml("nvmlDeviceSetComputeMode")(one->handle, *values));
    if (!status)
        printf(same ? "Compute mode is already set to %s for GPU %s.\n" : "Set compute mode to %s for GPU %s.\n",
               mode_names[*values], one->bus_id);
    return status;
}

static int power_limit(const gpu *one, const change *of, const unsigned *milliwatts) {
    unsigned before = 0, least = 0, most = 0;
    int ranged = !nvml("nvmlDeviceGetPowerManagementLimitConstraints")(one->handle, &least, &most);
    int status = nvml("nvmlDeviceGetPowerManagementLimit")(one->handle, &before);
    if (!status && ranged && (*milliwatts < least || *milliwatts > most)) {
        printf("Provided power limit %.2f W is not a valid power limit which should be between %.2f W and %.2f W for "
               "GPU %s\n",
               *milliwatts / 1000.0, least / 1000.0, most / 1000.0, one->bus_id);
        return INVALID;
    }
    if (!status)
        status = nvml("nvmlDeviceSetPowerManagementLimit")(one->handle, *milliwatts);
    if (!report(one, of, status))
        printf("Power limit for GPU %s was set to %.2f W from %.2f W.\n", one->bus_id, *milliwatts / 1000.0,
               before / 1000.0);
    return status;
}

static int reset(const gpu *one, const change *of, const unsigned *values) {
    int status = nvml("gpukilnReset")(one->handle);
    (void)values;
    if (status == IN_USE)
        printf("GPU %s is currently in use by another process.\n", one->bus_id);
    else if (!report(one, of, status))
        printf("GPU %s was successfully reset.\n", one->bus_id);
    return status;
}

#define SWITCH "DISABLED|ENABLED"
#define TEXTS(what) "Setting " what " is not supported for GPU %s", "Unable to set " what " for GPU %s"
static const change changes[] = {
    {"--persistence-mode", SWITCH, 0, persistence, "nvmlDeviceSetPersistenceMode", "%s persistence mode for GPU %s",
     "Setting persistence mode is not supported for GPU %s on this platform",
     "Unable to set persistence mode for GPU %s"},
    {"--ecc-config", SWITCH, 0, call, "nvmlDeviceSetEccMode", "%s Ecc support for GPU %s", TEXTS("ECC mode")},
    {"--reset-ecc-errors", "VOLATILE|AGGREGATE", 0, error_counts, 0, 0, TEXTS("ECC error counts")},
    {"--compute-mode", modes, 0, compute_mode, 0, 0, "Compute mode is not supported for GPU %s",
     "Unable to set the compute mode for GPU %s"},
    {"--gpu-reset", 0, 0, reset, 0, 0, "Resetting GPU %s is not supported", "Unable to reset GPU %s"},
    {"--lock-gpu-clocks", 0, -2, call, "nvmlDeviceSetGpuLockedClocks",
     "GPU clocks set to \"(gpuClkMin %u, gpuClkMax %u)\" for GPU %s", TEXTS("locked GPU clocks")},
    {"--reset-gpu-clocks", 0, 0, call, "nvmlDeviceResetGpuLockedClocks", "All clocks reset to default for GPU %s",
     TEXTS("locked GPU clocks")},
    {"--lock-memory-clocks", 0, -2, call, "nvmlDeviceSetMemoryLockedClocks",
     "Memory clocks set to \"(memClkMin %u, memClkMax %u)\" for GPU %s", TEXTS("locked memory clocks")},
    {"--reset-memory-clocks", 0, 0, call, "nvmlDeviceResetMemoryLockedClocks",
     "Memory clocks reset to default for GPU %s", TEXTS("locked memory clocks")},
    {"--applications-clocks", 0, 2, call, "nvmlDeviceSetApplicationsClocks",
     "Applications clocks set to \"(MEM %u, SM %u)\" for GPU %s", TEXTS("applications clocks"),
     "Specified clock combination \"(MEM %u, SM %u)\" is not supported for GPU %s. Run 'nvidia-smi -q -d "
     "SUPPORTED_CLOCKS' to see list of supported clock combinations\n"},
    {"--reset-applications-clocks", 0, 0, call, "nvmlDeviceResetApplicationsClocks",
     "Applications clocks reset to default for GPU %s", TEXTS("applications clocks")},
    {"--power-limit", 0, 1, power_limit, 0, 0, "Changing power management limit is not supported for GPU: %s",
     "Failed to set power management limit for GPU %s"},
    {"--accounting-mode", SWITCH, 0, call, "nvmlDeviceSetAccountingMode", "%s Accounting Mode for GPU %s",
     TEXTS("accounting mode")},
    {"--clear-accounted-apps", 0, 0, call, "nvmlDeviceClearAccountingPids", "Cleared Accounted PIDs for GPU %s",
     TEXTS("accounted PIDs")},
    {"--multi-instance-gpu", SWITCH, 0, partitioning},
};

/* A position in the choices, by number or by word, or numbers; whether the value is that. */
static int read_values(const change *of, const char *value, unsigned *values) {
    char *end;
    if (of->choices) {
        unsigned count = 0, found = ALL, number = (unsigned)strtoul(value, &end, 10);
        for (const char *at = of->choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL, count++)
            if (strlen(value) == strcspn(at, "|") && !strncasecmp(at, value, strlen(value)))
                found = count;
        *values = found == ALL && *value && !*end ? number : found;
        return *values < count;
    }
    if (of->numbers == 1) {
        double watts = strtod(value, &end);
        *values = watts > 0 ? (unsigned)(watts * 1000 + 0.5) : 0;
        return end != value && !*end && watts > 0;
    }
    const char *second = strchr(value, ',');
    if (!of->numbers)
        return 1;
    values[0] = (unsigned)strtoul(value, &end, 10);
    if (end == value || (*end && end != second) || (!second && of->numbers > 0))
        return 0;
    value = second ? second + 1 : value;
    values[1] = (unsigned)strtoul(value, &end, 10);
    return end != value && !*end;
}

int modify(const char *option, const char *value) {
    const change *of = changes;
    unsigned values[2] = {0};
    while (strcmp(of->option, option))
        of++;
    if (!read_values(of, value, values)) {
        printf("ERROR: Option %s is invalid for %s. Please run 'nvidia-smi -h' for help.\n\n", value, option);
        return INVALID;
    }
    int status = choose_gpus();
    if (status)
        return status;
    for (unsigned at = 0; at < gpu_count && !status; at++)
        status = of->apply(&gpus[at], of, values);
    puts(status ? "Terminating early due to previous errors." : "All done.");
    if (!status && !strcmp(option, "--ecc-config"))
        puts("Reboot required.");
    return status;
}
