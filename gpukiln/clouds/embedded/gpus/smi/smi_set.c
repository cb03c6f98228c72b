/* The stand-in nvidia-smi: what changes a GPU. Texts: strings of nvidia-smi 535.261.03. */
#include "smi.h"

#include <strings.h>

/* A number, or the position of a word in a list; -1 is neither. */
static int choice(const char *value, const char *const *words, int count) {
    char *end;
    long number = strtol(value, &end, 10);
    if (*value && !*end)
        return number >= 0 && number < count ? (int)number : -1;
    for (int i = 0; i < count; i++)
        if (!strcasecmp(words[i], value))
            return i;
    return -1;
}

static int persistence(const gpu *one, unsigned wanted) {
    unsigned now;
    int status = nvml("nvmlDeviceGetPersistenceMode")(one->handle, &now);
    if (!status && now == wanted) {
        printf("Persistence mode is already %s for GPU %s.\n", wanted ? "Enabled" : "Disabled", one->bus_id);
        return OK;
    }
    status = nvml("nvmlDeviceSetPersistenceMode")(one->handle, wanted);
    if (unsupported(status))
        printf("Setting persistence mode is not supported for GPU %s on this platform.\n", one->bus_id);
    else if (status)
        printf("Unable to set persistence mode for GPU %s: %s\n", one->bus_id, error_text(status));
    else
        printf("%s persistence mode for GPU %s.\n", wanted ? "Enabled" : "Disabled", one->bus_id);
    return status;
}

static int partitioning(const gpu *one, unsigned wanted) {
    int activation = OK, status = nvml("nvmlDeviceSetMigMode")(one->handle, wanted, &activation);
    const char *verb = wanted ? "enable" : "disable";
    if (status) {
        printf("Unable to %s MIG Mode for GPU %s: %s\n", verb, one->bus_id, error_text(status));
        return status;
    }
    if (activation == 19)
        printf(
            "Warning: MIG mode is in pending %s state for GPU %s:%s\n%s is currently being used by one or more "
            "other processes (e.g. CUDA application or a monitoring application such as another instance of "
            "nvidia-smi). Please first kill all processes using the device and retry the command or reboot the "
            "system to make MIG mode effective.\n",
            verb, one->bus_id, error_text(activation), one->bus_id);
    else if (activation)
        printf("Warning: MIG mode is in pending %s state for GPU %s:%s\nReboot the system or try nvidia-smi "
               "--gpu-reset to make MIG mode effective on GPU %s\n",
               verb, one->bus_id, error_text(activation), one->bus_id);
    else
        printf("%s MIG Mode for GPU %s\n", wanted ? "Enabled" : "Disabled", one->bus_id);
    return OK; /* a warning is none without --error-on-warning */
}

static int compute_mode(const gpu *one, unsigned wanted) {
    static const char *const names[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
    unsigned now;
    if (wanted == 1) {
        puts("Exclusive_Thread was deprecated! Use value 3:Exclusive_Process instead.");
        return INVALID;
    }
    if (!nvml("nvmlDeviceGetComputeMode")(one->handle, &now) && now == wanted) {
        printf("Compute mode is already set to %s for GPU %s.\n", names[wanted], one->bus_id);
        return OK;
    }
    int status = nvml("nvmlDeviceSetComputeMode")(one->handle, wanted);
    if (unsupported(status))
        printf("Compute mode is not supported for GPU %s.\n", one->bus_id);
    else if (status)
        printf("Unable to set the compute mode for GPU %s: %s\n", one->bus_id, error_text(status));
    else
        printf("Set compute mode to %s for GPU %s.\n", names[wanted], one->bus_id);
    return status;
}

static int power_limit(const gpu *one, double watts) {
    unsigned before = 0, least = 0, most = 0;
    int ranged = !nvml("nvmlDeviceGetPowerManagementLimitConstraints")(one->handle, &least, &most);
    int status = nvml("nvmlDeviceGetPowerManagementLimit")(one->handle, &before);
    unsigned wanted = (unsigned)(watts * 1000 + 0.5);
    if (!status && ranged && (wanted < least || wanted > most)) {
        printf("Provided power limit %.2f W is not a valid power limit which should be between %.2f W and %.2f "
               "W for "
               "GPU %s\n",
               watts, least / 1000.0, most / 1000.0, one->bus_id);
        return INVALID;
    }
    if (!status)
        status = nvml("nvmlDeviceSetPowerManagementLimit")(one->handle, wanted);
    if (unsupported(status))
        printf("Changing power management limit is not supported for GPU: %s.\n", one->bus_id);
    else if (status)
        printf("Failed to set power management limit for GPU %s: %s\n", one->bus_id, error_text(status));
    else
        printf("Power limit for GPU %s was set to %.2f W from %.2f W.\n", one->bus_id, watts, before / 1000.0);
    return status;
}

static int reset(const gpu *one) {
    int status = nvml("gpukilnReset")(one->handle);
    if (unsupported(status))
        printf("Resetting GPU %s is not supported.\n", one->bus_id);
    else if (status == 19)
        printf("GPU %s is currently in use by another process.\n", one->bus_id);
    else if (status)
        printf("Unable to reset GPU %s: %s\n", one->bus_id, error_text(status));
    else
        printf("GPU %s was successfully reset.\n", one->bus_id);
    return status;
}

static const char *const switches[] = {"DISABLED", "ENABLED"};
static const char *const modes[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};

int modify(const char *option, const char *value) {
    char *end = NULL;
    double watts = strtod(value, &end);
    int is_power = !strcmp(option, "--power-limit"), is_mode = !strcmp(option, "--compute-mode");
    int is_reset = !strcmp(option, "--gpu-reset");
    int wanted = is_mode ? choice(value, modes, 4) : choice(value, switches, 2);
    if (is_power ? end == value || *end || watts <= 0 : !is_reset && wanted < 0) {
        printf("ERROR: Option %s is invalid for %s. Please run 'nvidia-smi -h' for help.\n\n", value, option);
        return INVALID;
    }
    int status = choose_gpus();
    if (status)
        return status;
    for (unsigned at = 0; at < gpu_count && !status; at++)
        status = is_power                                ? power_limit(&gpus[at], watts)
                 : is_reset                              ? reset(&gpus[at])
                 : is_mode                               ? compute_mode(&gpus[at], (unsigned)wanted)
                 : !strcmp(option, "--persistence-mode") ? persistence(&gpus[at], (unsigned)wanted)
                                                         : partitioning(&gpus[at], (unsigned)wanted);
    puts(status ? "Terminating early due to previous errors." : "All done.");
    return status;
}
