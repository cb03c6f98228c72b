/* The stand-in nvidia-smi: mig. Texts: strings of nvidia-smi 535.261.03; tables as NVIDIA's MIG user guide has
 * them. */
#include "smi.h"

#include <ctype.h>

enum {
    GPU_PROFILES = 18,
    COMPUTE_PROFILES = 9,
    INSTANCES = 64
}; /* NVML_…_INSTANCE_PROFILE_COUNT of pynvml.py */

typedef struct {
    unsigned version, id, p2p, slices, instances, processors, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory;
    char name[96];
} gpu_profile;

typedef struct {
    unsigned version, id, slices, instances, processors, copy, decoders, encoders, jpeg, ofa;
    char name[96];
} compute_profile;

typedef struct {
    unsigned start, size;
} placement;

typedef struct {
    void *device;
    unsigned id, profile;
    placement at;
} gpu_instance;

typedef struct {
    void *device, *parent;
    unsigned id, profile;
    placement at;
} compute_instance;

static const char *gi_list, *ci_list;

static int is_listed(const char *list, unsigned id) {
    char number[16];
    sprintf(number, "%u", id);
    return !list || in_list(list, number);
}

static const char *named(const char *name) { return strncmp(name, "MIG ", 4) ? name : name + 4; }

static unsigned gpu_profiles(const gpu *one, gpu_profile *found) {
    unsigned count = 0;
    for (int kind = 0; kind < GPU_PROFILES; kind++) {
        found[count] = (gpu_profile){.version = 0x02000098};
        if (!nvml("nvmlDeviceGetGpuInstanceProfileInfoV")(one->handle, kind, &found[count]))
            count++;
    }
    for (unsigned i = 1; i < count; i++) /* the smallest first */
        for (unsigned j = i; j && found[j].slices < found[j - 1].slices; j--) {
            gpu_profile swapped = found[j];
            found[j] = found[j - 1];
            found[j - 1] = swapped;
        }
    return count;
}

static unsigned compute_profiles(void *instance, compute_profile *found) {
    unsigned count = 0;
    for (int kind = 0; kind < COMPUTE_PROFILES; kind++) {
        found[count] = (compute_profile){.version = 0x02000088};
        if (!nvml("nvmlGpuInstanceGetComputeInstanceProfileInfoV")(instance, kind, 0, &found[count]))
            count++;
    }
    return count;
}

/* All instances of a GPU by id, only those that -gi names. */
static unsigned gpu_instances(const gpu *one, void **handles, gpu_instance *infos) {
    gpu_profile profiles[GPU_PROFILES];
    unsigned count = gpu_profiles(one, profiles), found = 0;
    for (unsigned i = 0; i < count; i++) {
        void *some[INSTANCES];
        unsigned listed = 0;
        if (nvml("nvmlDeviceGetGpuInstances")(one->handle, profiles[i].id, some, &listed))
            continue;
        for (unsigned j = 0; j < listed && found < INSTANCES; j++)
            if (!nvml("nvmlGpuInstanceGetInfo")(some[j], &infos[found]) && is_listed(gi_list, infos[found].id))
                handles[found++] = some[j];
    }
    return found;
}

static unsigned compute_instances(void *instance, void **handles, compute_instance *infos) {
    compute_profile profiles[COMPUTE_PROFILES];
    unsigned count = compute_profiles(instance, profiles), found = 0;
    for (unsigned i = 0; i < count; i++) {
        void *some[INSTANCES];
        unsigned listed = 0;
        if (nvml("nvmlGpuInstanceGetComputeInstances")(instance, profiles[i].id, some, &listed))
            continue;
        for (unsigned j = 0; j < listed && found < INSTANCES; j++)
            if (!nvml("nvmlComputeInstanceGetInfo_v2")(some[j], &infos[found]) &&
                is_listed(ci_list, infos[found].id))
                handles[found++] = some[j];
    }
    return found;
}

static const char *gpu_profile_name(const gpu *one, unsigned id) {
    static gpu_profile of[GPU_PROFILES];
    for (unsigned i = 0, count = gpu_profiles(one, of); i < count; i++)
        if (of[i].id == id)
            return named(of[i].name);
    return "N/A";
}

static const char *compute_profile_name(void *instance, unsigned id) {
    static compute_profile of[COMPUTE_PROFILES];
    for (unsigned i = 0, count = compute_profiles(instance, of); i < count; i++)
        if (of[i].id == id)
            return named(of[i].name);
    return "N/A";
}

static int list_profiles(const gpu *one, unsigned *rows) {
    static const char line[] =
        "+-----------------------------------------------------------------------------+";
    gpu_profile found[GPU_PROFILES];
    unsigned count = gpu_profiles(one, found);
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
        printf("|%4u  MIG %-12s%4u    %2u/%-2u       %-11s%-3s%6u%6u%6u   |\n", one->index,
               named(found[i].name), found[i].id, left, found[i].instances, memory, found[i].p2p ? "Yes" : "No",
               found[i].processors, found[i].decoders, found[i].encoders);
        printf("|%62u%6u%6u   |\n%s\n", found[i].copy, found[i].jpeg, found[i].ofa, line);
    }
    return OK;
}

/* What is done to an instance; `inner` is NULL where GPU instances are meant. */
typedef int visit(const gpu *one, void *handle, const gpu_instance *of, void *inner, const compute_instance *part,
                  unsigned row);

/* The last error of a visit to each of a GPU's instances, or to each compute instance in them. */
static int each(const gpu *one, int compute, visit *to, unsigned *rows) {
    void *handles[INSTANCES], *inner[INSTANCES];
    gpu_instance of[INSTANCES];
    compute_instance parts[INSTANCES];
    int last = OK;
    for (unsigned i = 0, count = gpu_instances(one, handles, of); i < count; i++)
        for (unsigned j = 0, listed = compute ? compute_instances(handles[i], inner, parts) : 1; j < listed; j++) {
            int status = to(one, handles[i], &of[i], compute ? inner[j] : NULL, compute ? &parts[j] : NULL, (*rows)++);
            last = status ? status : last;
        }
    return last;
}

static int show_gpu_instance(const gpu *one, void *handle, const gpu_instance *of, void *inner,
                             const compute_instance *part, unsigned row) {
    static const char line[] = "+-------------------------------------------------------+";
    (void)handle, (void)inner, (void)part;
    if (!row)
        printf("%s\n| GPU instances:                                        |\n"
               "| GPU   Name             Profile  Instance   Placement  |\n"
               "|                          ID       ID       Start:Size |\n"
               "|=======================================================|\n",
               line);
    printf("|%4u  MIG %-12s%6u%9u%11u:%-6u|\n%s\n", one->index, gpu_profile_name(one, of->profile), of->profile,
           of->id, of->at.start, of->at.size, line);
    return OK;
}

static int show_compute_instance(const gpu *one, void *handle, const gpu_instance *of, void *inner,
                                 const compute_instance *part, unsigned row) {
    static const char line[] = "+--------------------------------------------------------------------+";
    (void)inner;
    if (!row)
        printf("%s\n| Compute instances:                                                 |\n"
               "| GPU     GPU       Name             Profile   Instance   Placement  |\n"
               "|       Instance                       ID        ID       Start:Size |\n"
               "|         ID                                                         |\n"
               "|====================================================================|\n",
               line);
    printf("|%4u%7u       MIG %-12s%6u%10u%11u:%-6u|\n%s\n", one->index, of->id,
           compute_profile_name(handle, part->profile), part->profile, part->id, part->at.start, part->at.size, line);
    return OK;
}

/* "Successfully destroyed" or why not, of either. */
static int destroy(const gpu *one, void *handle, const gpu_instance *of, void *inner, const compute_instance *part,
                   unsigned row) {
    int status = inner ? nvml("nvmlComputeInstanceDestroy")(inner) : nvml("nvmlGpuInstanceDestroy")(handle);
    char parent[64] = "";
    (void)row;
    if (inner)
        sprintf(parent, " GPU instance ID %2u", of->id);
    printf("%s %s instance ID %2u from GPU %2u%s", status ? "Unable to destroy" : "Successfully destroyed",
           inner ? "compute" : "GPU", inner ? part->id : of->id, one->index, parent);
    printf(status ? ": %s\n" : "\n", error_text(status));
    return status;
}

/* Profile NULL is the one that takes the whole GPU instance. */
static int create_compute(const gpu *one, void *instance, unsigned parent, const char *profile) {
    compute_profile found[COMPUTE_PROFILES];
    compute_instance info = {0};
    gpu_instance holder = {0};
    gpu_profile sizes[GPU_PROFILES];
    unsigned count = compute_profiles(instance, found), at = 0, slices = 0;
    void *made = NULL;
    nvml("nvmlGpuInstanceGetInfo")(instance, &holder);
    for (unsigned i = 0, known = gpu_profiles(one, sizes); i < known; i++)
        if (sizes[i].id == holder.profile)
            slices = sizes[i].slices;
    while (at < count && (profile ? strcmp(named(found[at].name), named(profile)) &&
                                        !(isdigit((unsigned char)*profile) && !strpbrk(profile, "gc") &&
                                          strtoul(profile, NULL, 10) == found[at].id)
                                  : found[at].slices != slices))
        at++;
    int status =
        at < count ? nvml("nvmlGpuInstanceCreateComputeInstance")(instance, found[at].id, &made) : NOT_FOUND;
    if (!status)
        status = nvml("nvmlComputeInstanceGetInfo_v2")(made, &info);
    if (status && !profile)
        printf("Unable to create a default compute instance on GPU %2u GPU instance ID %2u: %s\n", one->index,
               parent, error_text(status));
    else if (status)
        printf("Unable to create a compute instance on GPU %2u GPU instance ID %2u using profile %s: %s\n",
               one->index, parent, profile, error_text(status));
    else
        printf("Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile MIG "
               "%s (ID "
               "%2u)\n",
               info.id, one->index, parent, named(found[at].name), found[at].id);
    return status;
}

static int create_gpu(const gpu *one, char *tuple, int with_compute) {
    gpu_profile found[GPU_PROFILES];
    gpu_instance info = {0};
    unsigned count = gpu_profiles(one, found), at = 0;
    void *made = NULL;
    char *colon = strchr(tuple, ':'), *end = NULL;
    unsigned long start = 0;
    if (colon) {
        *colon = 0;
        start = strtoul(colon + 1, &end, 10);
        if (end == colon + 1 || *end) {
            printf("Unable to create a GPU instace on GPU %2u using profile %s: invalid placement syntax\n",
                   one->index, tuple);
            return INVALID;
        }
    }
    while (at < count && strcmp(named(found[at].name), named(tuple)) &&
           !(strspn(tuple, "0123456789") == strlen(tuple) && strtoul(tuple, NULL, 10) == found[at].id))
        at++;
    int status = at < count ? OK : NOT_FOUND;
    if (!status && colon) {
        placement possible[INSTANCES], wanted = {(unsigned)start, 0};
        unsigned places = INSTANCES;
        status =
            nvml("nvmlDeviceGetGpuInstancePossiblePlacements_v2")(one->handle, found[at].id, possible, &places);
        for (unsigned i = 0; !status && i < places; i++)
            if (possible[i].start == start)
                wanted = possible[i];
        if (!status)
            status = wanted.size ? nvml("nvmlDeviceCreateGpuInstanceWithPlacement")(one->handle, found[at].id,
                                                                                    &wanted, &made)
                                 : INVALID;
    } else if (!status)
        status = nvml("nvmlDeviceCreateGpuInstance")(one->handle, found[at].id, &made);
    if (!status)
        status = nvml("nvmlGpuInstanceGetInfo")(made, &info);
    if (status) {
        printf("Unable to create a GPU instance on GPU %2u using profile %s: %s\n", one->index, tuple,
               error_text(status));
        return status;
    }
    printf("Successfully created GPU instance ID %2u on GPU %2u using profile MIG %s (ID %2u)\n", info.id,
           one->index, named(found[at].name), found[at].id);
    return with_compute ? create_compute(one, made, info.id, NULL) : OK;
}

static int create_gpus(const gpu *one, const char *asked, int with_compute) {
    char list[TEXT], *rest = NULL;
    int status = OK;
    snprintf(list, sizeof list, "%s", asked);
    for (char *word = strtok_r(list, ",", &rest); word && !status; word = strtok_r(NULL, ",", &rest))
        status = create_gpu(one, word, with_compute);
    return status;
}

static const char *profiles = ""; /* what is to be created */

static int create_computes(const gpu *one, void *handle, const gpu_instance *of, void *inner,
                           const compute_instance *part, unsigned row) {
    char list[TEXT], *rest = NULL;
    int status = *profiles ? OK : create_compute(one, handle, of->id, NULL);
    (void)inner, (void)part, (void)row;
    snprintf(list, sizeof list, "%s", profiles);
    for (char *word = strtok_r(list, ",", &rest); word && !status; word = strtok_r(NULL, ",", &rest))
        status = create_compute(one, handle, of->id, word);
    return status;
}

enum { PROFILES, GIS, CIS, CREATE_GIS, CREATE_CIS, DESTROY_GIS, DESTROY_CIS, COMMANDS };

static const char *const commands[COMMANDS][2] = {
    {"-lgip", "--list-gpu-instance-profiles"}, {"-lgi", "--list-gpu-instances"},
    {"-lci", "--list-compute-instances"},      {"-cgi", "--create-gpu-instance"},
    {"-cci", "--create-compute-instance"},     {"-dgi", "--destroy-gpu-instance"},
    {"-dci", "--destroy-compute-instance"},
};

static int is(const char *word, const char *shortest, const char *longest) {
    return !strcmp(word, shortest) || !strcmp(word, longest);
}

static int parse(int count, char **words, int *command, int *with_compute) {
    for (int at = 0; at < count; at++) {
        const char *value = at + 1 < count && *words[at + 1] != '-' ? words[at + 1] : NULL;
        int found = 0;
        while (found < COMMANDS && !is(words[at], commands[found][0], commands[found][1]))
            found++;
        if (found < COMMANDS) {
            if (*command >= 0)
                return bad_arguments();
            *command = found;
            if ((found == CREATE_GIS || found == CREATE_CIS) && value)
                profiles = words[++at];
        } else if (is(words[at], "-C", "--default-compute-instance"))
            *with_compute = 1;
        else if (is(words[at], "-i", "--id") && value)
            chosen = words[++at];
        else if (is(words[at], "-gi", "--gpu-instance-id") && value)
            gi_list = words[++at];
        else if (is(words[at], "-ci", "--compute-instance-id") && value)
            ci_list = words[++at];
        else
            return bad_arguments();
    }
    const char *numbers = "0123456789,";
    if ((gi_list && gi_list[strspn(gi_list, numbers)]) || (ci_list && ci_list[strspn(ci_list, numbers)]))
        return bad_arguments();
    return *command < 0 || (*command == CREATE_GIS && !*profiles) || (*with_compute && *command != CREATE_GIS)
               ? bad_arguments()
               : OK;
}

int mig(int count, char **words) {
    static visit *const visits[COMMANDS] = {
        [GIS] = show_gpu_instance, [CIS] = show_compute_instance, [CREATE_CIS] = create_computes,
        [DESTROY_GIS] = destroy,   [DESTROY_CIS] = destroy};
    static const char *const verbs[COMMANDS] = {[CREATE_GIS] = "create GPU", [CREATE_CIS] = "create compute",
                                                [DESTROY_GIS] = "destroy GPU", [DESTROY_CIS] = "destroy compute"};
    int command = -1, with_compute = 0;
    unsigned rows = 0, partitioned = 0;
    int status = parse(count, words, &command, &with_compute);
    if (status || (status = choose_gpus()))
        return status;
    for (unsigned at = 0; at < gpu_count; at++) {
        if (!is_enabled(&gpus[at], "mig.mode.current"))
            continue;
        partitioned++;
        if (command == PROFILES)
            status = list_profiles(&gpus[at], &rows);
        else if (command == CREATE_GIS) {
            status = create_gpus(&gpus[at], profiles, with_compute);
            rows++;
        } else
            status = each(&gpus[at], command == CIS || command == DESTROY_CIS, visits[command], &rows);
        if (status && verbs[command])
            printf("Failed to %s instances: %s\n", verbs[command], error_text(status));
        worst = status ? status : worst;
    }
    if (!partitioned)
        puts("No MIG-enabled devices found.");
    else if (!rows)
        printf("No %s found: Not Found\n", command == CIS || command == DESTROY_CIS ? "compute instances"
                                           : command == PROFILES                    ? "GPU instance profiles"
                                                                                    : "GPU instances");
    return partitioned && rows ? worst : NOT_FOUND;
}
