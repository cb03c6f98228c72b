/* The stand-in nvidia-smi: what changes a GPU, and mig. Texts: strings of nvidia-smi 535.261.03; tables as NVIDIA's MIG
 * user guide has them. */
#include "smi.h"

static int report(const gpu *one, const char *what, int status) {
    if (unsupported(status))
        printf("%s is not supported for GPU %s.\n", what, one->bus_id);
    else if (status)
        printf("%s failed for GPU %s: %s\n", what, one->bus_id, error_text(status));
    return status;
}

static int persistence(const gpu *one, const unsigned *on) {
    unsigned now = 2;
    if (!nvml("nvmlDeviceGetPersistenceMode")(one->handle, &now) && now == *on) {
        printf("Persistence mode is already %s for GPU %s.\n", now ? "Enabled" : "Disabled", one->bus_id);
        return OK;
    }
    int status = nvml("nvmlDeviceSetPersistenceMode")(one->handle, *on);
    if (unsupported(status))
        printf("Setting persistence mode is not supported for GPU %s on this platform.\n", one->bus_id);
    else if (status)
        printf("Unable to set persistence mode for GPU %s: %s\n", one->bus_id, error_text(status));
    else
        printf("%s persistence mode for GPU %s.\n", *on ? "Enabled" : "Disabled", one->bus_id);
    return status;
}

static int ecc(const gpu *one, const unsigned *on) {
    int status = report(one, "Setting ECC mode", nvml("nvmlDeviceSetEccMode")(one->handle, *on));
    if (!status)
        printf("%s Ecc support for GPU %s.\n", *on ? "Enabled" : "Disabled", one->bus_id);
    return status;
}

/* A warning is none without --error-on-warning: it ends with 0. */
static int partitioning(const gpu *one, const unsigned *on) {
    int activation = OK, status = nvml("nvmlDeviceSetMigMode")(one->handle, *on, &activation);
    const char *verb = *on ? "enable" : "disable";
    if (status)
        printf("Unable to %s MIG Mode for GPU %s: %s\n", verb, one->bus_id, error_text(status));
    else if (!activation)
        printf("%s MIG Mode for GPU %s\n", *on ? "Enabled" : "Disabled", one->bus_id);
    else
        printf("Warning: MIG mode is in pending %s state for GPU %s:%s\nReboot the system or try nvidia-smi "
               "--gpu-reset to make MIG mode effective on GPU %s\n",
               verb, one->bus_id, error_text(activation), one->bus_id);
    return status;
}

static int power_limit(const gpu *one, const unsigned *milliwatts) {
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
    if (unsupported(status))
        printf("Changing power management limit is not supported for GPU: %s.\n", one->bus_id);
    else if (status)
        printf("Failed to set power management limit for GPU %s: %s\n", one->bus_id, error_text(status));
    else
        printf("Power limit for GPU %s was set to %.2f W from %.2f W.\n", one->bus_id, *milliwatts / 1000.0,
               before / 1000.0);
    return status;
}

static int lock_clocks(const gpu *one, const unsigned *clocks) {
    int status = nvml("nvmlDeviceSetGpuLockedClocks")(one->handle, clocks[0], clocks[1]);
    if (!report(one, "Setting locked GPU clocks", status))
        printf("GPU clocks set to \"(gpuClkMin %u, gpuClkMax %u)\" for GPU %s.\n", clocks[0], clocks[1], one->bus_id);
    return status;
}

static int reset_clocks(const gpu *one, const unsigned *none) {
    (void)none;
    int status = report(one, "Setting locked GPU clocks", nvml("nvmlDeviceResetGpuLockedClocks")(one->handle));
    if (!status)
        printf("All clocks reset to default for GPU %s.\n", one->bus_id);
    return status;
}

static int reset(const gpu *one, const unsigned *none) {
    (void)none;
    int status = nvml("gpukilnReset")(one->handle);
    if (status == IN_USE)
        printf("GPU %s is currently in use by another process.\n", one->bus_id);
    else if (!report(one, "Resetting", status))
        printf("GPU %s was successfully reset.\n", one->bus_id);
    return status;
}

enum { NOTHING, SWITCH, WATTS, CLOCKS };
static const struct {
    const char *shortest, *option;
    int takes;
    int (*apply)(const gpu *, const unsigned *);
} changes[] = {
    {"-pm", "--persistence-mode", SWITCH, persistence},
    {"-e", "--ecc-config", SWITCH, ecc},
    {"-mig", "--multi-instance-gpu", SWITCH, partitioning},
    {"-pl", "--power-limit", WATTS, power_limit},
    {"-lgc", "--lock-gpu-clocks", CLOCKS, lock_clocks},
    {"-rgc", "--reset-gpu-clocks", NOTHING, reset_clocks},
    {"-r", "--gpu-reset", NOTHING, reset},
};

static int find(const char *word) {
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        if (!strcmp(word, changes[i].shortest) ||
            (strlen(changes[i].option) == strcspn(word, "=") && !strncmp(word, changes[i].option, strcspn(word, "="))))
            return (int)i;
    return -1;
}

int is_change(const char *word) {
    int at = find(word);
    return at < 0 ? 0 : changes[at].takes == NOTHING ? 1 : 2;
}

static int read_values(int takes, const char *text, unsigned *values) {
    char *end = NULL;
    if (takes == SWITCH) {
        *values = !strcmp(text, "1") || !strcasecmp(text, "ENABLED");
        return *values || !strcmp(text, "0") || !strcasecmp(text, "DISABLED");
    }
    double number = strtod(text, &end);
    *values = takes == WATTS ? (unsigned)(number * 1000 + 0.5) : (unsigned)number;
    values[1] = takes == CLOCKS && *end == ',' ? (unsigned)strtoul(end + 1, &end, 10) : *values;
    return takes == NOTHING || (number > 0 && !*end);
}

int change(const char *option, const char *text) {
    const int at = find(option);
    unsigned values[2] = {0};
    if (!read_values(changes[at].takes, text, values)) {
        printf("ERROR: Option %s is invalid for %s. Please run 'nvidia-smi -h' for help.\n\n", text,
               changes[at].option);
        return INVALID;
    }
    int status = choose_gpus();
    if (status)
        return status;
    for (unsigned i = 0; i < gpu_count && !status; i++)
        status = changes[at].apply(&gpus[i], values);
    puts(status ? "Terminating early due to previous errors." : "All done.");
    if (!status && changes[at].apply == ecc)
        puts("Reboot required.");
    return status;
}

/* ---- mig */

enum { PROFILES = 18, INSTANCES = 64 }; /* PROFILES: NVML_GPU_INSTANCE_PROFILE_COUNT of pynvml.py */

typedef struct {
    unsigned version, id, p2p, slices, instances, processors, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory;
    char name[96];
} profile;

typedef struct {
    unsigned version, id, slices, instances, processors, copy, decoders, encoders, jpeg, ofa;
    char name[96];
} compute_profile;

typedef struct {
    void *device;
    unsigned id, profile, start, size;
} instance;

typedef struct {
    void *device, *parent;
    unsigned id, profile, start, size;
} compute_instance;

static const char *named(const char *name) { return strncmp(name, "MIG ", 4) ? name : name + 4; }

static unsigned list_profiles(const gpu *one, profile *found) {
    unsigned count = 0;
    for (int kind = 0; kind < PROFILES; kind++) {
        found[count] = (profile){.version = 0x02000098};
        if (nvml("nvmlDeviceGetGpuInstanceProfileInfoV")(one->handle, kind, &found[count]))
            continue;
        for (unsigned j = count++; j && found[j].slices < found[j - 1].slices; j--) { /* the smallest first */
            profile swapped = found[j];
            found[j] = found[j - 1];
            found[j - 1] = swapped;
        }
    }
    return count;
}

static int show_profiles(const gpu *one, unsigned *rows) {
    static const char line[] = "+-----------------------------------------------------------------------------+";
    profile found[PROFILES];
    unsigned count = list_profiles(one, found);
    for (unsigned i = 0; i < count; i++, ++*rows) {
        unsigned left = 0;
        char memory[32];
        if (!*rows)
            printf("%s\n| GPU instance profiles:                                                      |\n"
                   "| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |\n"
                   "|                              Free/Total   GiB              CE    JPEG  OFA  |\n"
                   "|=============================================================================|\n",
                   line);
        nvml("nvmlDeviceGetGpuInstanceRemainingCapacity")(one->handle, found[i].id, &left);
        sprintf(memory, "%0.2f", (double)found[i].memory / 1024);
        printf("|%4u  MIG %-12s%4u    %2u/%-2u       %-11s%-3s%6u%6u%6u   |\n|%62u%6u%6u   |\n%s\n", one->index,
               named(found[i].name), found[i].id, left, found[i].instances, memory, found[i].p2p ? "Yes" : "No",
               found[i].processors, found[i].decoders, found[i].encoders, found[i].copy, found[i].jpeg, found[i].ofa,
               line);
    }
    return OK;
}

static int destroy(const gpu *one, const char *kind, unsigned id, int parent, int status) {
    printf("%s %s instance ID %2u from GPU %2u", status ? "Unable to destroy" : "Successfully destroyed", kind, id,
           one->index);
    if (parent >= 0)
        printf(" GPU instance ID %2d", parent);
    printf(status ? ": %s\n" : "\n", error_text(status));
    return status;
}

/* The compute instances of a GPU instance. */
static int destroy_parts(const gpu *one, void *handle, const instance *of, unsigned *rows) {
    int status = OK;
    for (int kind = 0; kind < 9; kind++) { /* NVML_COMPUTE_INSTANCE_PROFILE_COUNT */
        compute_profile size = {.version = 0x02000088};
        void *parts[INSTANCES];
        unsigned count = 0;
        if (nvml("nvmlGpuInstanceGetComputeInstanceProfileInfoV")(handle, kind, 0, &size) ||
            nvml("nvmlGpuInstanceGetComputeInstances")(handle, size.id, parts, &count))
            continue;
        for (unsigned i = 0; i < count; i++, ++*rows) {
            compute_instance part = {0};
            nvml("nvmlComputeInstanceGetInfo_v2")(parts[i], &part);
            int ended = destroy(one, "compute", part.id, (int)of->id, nvml("nvmlComputeInstanceDestroy")(parts[i]));
            status = ended ? ended : status;
        }
    }
    return status;
}

/* The one that takes the whole GPU instance. */
static int create_part(const gpu *one, void *handle, unsigned parent, unsigned slices) {
    compute_profile size;
    compute_instance part = {0};
    void *made = NULL;
    int status = NOT_FOUND;
    for (int kind = 0; kind < 9 && status == NOT_FOUND; kind++) {
        size = (compute_profile){.version = 0x02000088};
        if (!nvml("nvmlGpuInstanceGetComputeInstanceProfileInfoV")(handle, kind, 0, &size) && size.slices == slices)
            status = nvml("nvmlGpuInstanceCreateComputeInstance")(handle, size.id, &made);
    }
    if (!status)
        status = nvml("nvmlComputeInstanceGetInfo_v2")(made, &part);
    if (status)
        printf("Unable to create a default compute instance on GPU %2u GPU instance ID %2u: %s\n", one->index, parent,
               error_text(status));
    else
        printf("Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile MIG %s (ID "
               "%2u)\n",
               part.id, one->index, parent, named(size.name), size.id);
    return status;
}

static int create(const gpu *one, const char *asked, int with_part) {
    profile found[PROFILES];
    char list[TEXT], *rest = NULL, number[16];
    unsigned count = list_profiles(one, found);
    int status = OK;
    snprintf(list, sizeof list, "%s", asked);
    for (char *word = strtok_r(list, ",", &rest); word && !status; word = strtok_r(NULL, ",", &rest)) {
        unsigned at = 0;
        void *made = NULL;
        instance of = {0};
        for (; at < count && strcmp(named(found[at].name), named(word)); at++) {
            sprintf(number, "%u", found[at].id);
            if (!strcmp(number, word))
                break;
        }
        status = at < count ? nvml("nvmlDeviceCreateGpuInstance")(one->handle, found[at].id, &made) : NOT_FOUND;
        if (!status)
            status = nvml("nvmlGpuInstanceGetInfo")(made, &of);
        if (status)
            printf("Unable to create a GPU instance on GPU %2u using profile %s: %s\n", one->index, word,
                   error_text(status));
        else
            printf("Successfully created GPU instance ID %2u on GPU %2u using profile MIG %s (ID %2u)\n", of.id,
                   one->index, named(found[at].name), found[at].id);
        if (!status && with_part)
            status = create_part(one, made, of.id, found[at].slices);
    }
    return status;
}

/* The GPU instances that -gi names, or the compute instances in them. */
static int destroy_all(const gpu *one, int parts, const char *ids, unsigned *rows) {
    profile sizes[PROFILES];
    int last = OK;
    for (unsigned i = 0, count = list_profiles(one, sizes); i < count; i++) {
        void *handles[INSTANCES];
        unsigned listed = 0;
        if (nvml("nvmlDeviceGetGpuInstances")(one->handle, sizes[i].id, handles, &listed))
            continue;
        for (unsigned j = 0; j < listed; j++) {
            instance of = {0};
            char id[16];
            nvml("nvmlGpuInstanceGetInfo")(handles[j], &of);
            sprintf(id, "%u", of.id);
            if (ids && !in_list(ids, id))
                continue;
            int status;
            if (parts)
                status = destroy_parts(one, handles[j], &of, rows);
            else {
                status = destroy(one, "GPU", of.id, -1, nvml("nvmlGpuInstanceDestroy")(handles[j]));
                ++*rows;
            }
            last = status ? status : last;
        }
    }
    return last;
}

int mig(int count, char **words) {
    const char *command = count ? words[0] : "", *profiles = NULL, *ids = NULL;
    int at = 1, with_part = 0;
    if (!strcmp(command, "-cgi") && at < count)
        profiles = words[at++];
    for (; at < count; at++)
        if (profiles && !strcmp(words[at], "-C"))
            with_part = 1;
        else if (!strcmp(words[at], "-i") && at + 1 < count)
            chosen = words[++at];
        else if (!strcmp(words[at], "-gi") && at + 1 < count && *command == '-' && !profiles)
            ids = words[++at];
        else
            return refuse("Invalid combination of input arguments.%s", "");
    if (!*command || !in_list(profiles ? "-cgi" : "-lgip,-dgi,-dci", command))
        return refuse("Invalid combination of input arguments.%s", "");
    unsigned rows = 0, partitioned = 0;
    int status = choose_gpus();
    if (status)
        return status;
    for (unsigned i = 0; i < gpu_count; i++) {
        if (!is_enabled(&gpus[i], "mig.mode.current"))
            continue;
        partitioned++;
        rows += profiles != NULL;
        status = profiles                    ? create(&gpus[i], profiles, with_part)
                 : !strcmp(command, "-lgip") ? show_profiles(&gpus[i], &rows)
                                             : destroy_all(&gpus[i], command[2] == 'c', ids, &rows);
        if (status)
            printf("Failed to %s %s instances: %s\n", profiles ? "create" : "destroy",
                   command[2] == 'c' ? "compute" : "GPU", error_text(status));
        worst = status ? status : worst;
    }
    if (!partitioned)
        puts("No MIG-enabled devices found.");
    else if (!rows)
        printf("No %s instances found: Not Found\n", command[2] == 'c' ? "compute" : "GPU");
    return partitioned && rows ? worst : NOT_FOUND;
}
