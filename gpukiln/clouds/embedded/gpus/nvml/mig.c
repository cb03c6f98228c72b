/* The double of NVML: MIG. A GPU's profiles are in `mig.profiles`, its instances in
 * `mig.gi.ID.{profile,start}` and `mig.gi.ID.ci.ID.{slices,start}`. */
#include "double.h"

static char instances[MAX_GPUS][MAX_GI], parts[MAX_GPUS][MAX_GI][MAX_CI]; /* handles */

static int instance_of(const void *handle, int *gpu, int *gi) {
    char value[TEXT];
    const char *at = handle, *first = &instances[0][0];
    if (at < first || at >= first + sizeof instances)
        return 0;
    *gpu = (int)(at - first) / MAX_GI;
    *gi = (int)(at - first) % MAX_GI;
    return look(value, "gpus.%d.mig.gi.%d.profile", *gpu, *gi);
}

static int part_of(const void *handle, int *gpu, int *gi, int *ci) {
    const char *at = handle, *first = &parts[0][0][0];
    if (at < first || at >= first + sizeof parts)
        return 0;
    int position = (int)(at - first);
    *gpu = position / (MAX_GI * MAX_CI);
    *gi = position / MAX_CI % MAX_GI;
    *ci = position % MAX_CI;
    return ci_exists(*gpu, *gi, *ci);
}

int ci_exists(int gpu, int gi, int ci) {
    char value[TEXT];
    return gi >= 0 && gi < MAX_GI && ci >= 0 && ci < MAX_CI && mig_is_on(gpu) &&
           look(value, "gpus.%d.mig.gi.%d.ci.%d.slices", gpu, gi, ci);
}

/* The same as long as the GPU and the numbers are. */
void mig_uuid(int gpu, int gi, int ci, char uuid[48]) {
    char value[TEXT] = "", seed[TEXT + 32];
    unsigned long long half[2];
    look(value, "gpus.%d.uuid", gpu);
    for (int i = 0; i < 2; i++) { /* FNV-1a, offset basis and prime of 64 bits */
        int length = snprintf(seed, sizeof seed, "%d/%s/%d/%d", i, value, gi, ci);
        half[i] = 0xcbf29ce484222325ULL;
        for (int n = 0; n < length; n++)
            half[i] = (half[i] ^ (unsigned char)seed[n]) * 0x100000001b3ULL;
    }
    snprintf(uuid, 48, "MIG-%08llx-%04llx-5%03llx-%04llx-%012llx", half[0] >> 32, half[0] >> 16 & 0xffff,
             half[0] & 0xfff, (half[1] >> 48 & 0x3fff) | 0x8000, half[1] & 0xffffffffffffULL);
}

/* ---- profiles */

static unsigned part(int gpu, int at, const char *name) {
    char value[TEXT];
    return look(value, "gpus.%d.mig.profiles.%d.%s", gpu, at, name) ? (unsigned)strtoul(value, NULL, 10) : 0;
}

static int read_profile(int gpu, int at, gi_profile *found) {
    char value[TEXT];
    if (!look(value, "gpus.%d.mig.profiles.%d.number", gpu, at))
        return 0;
    *found = (gi_profile){.number = (unsigned)atoi(value), .id = part(gpu, at, "id"),
                          .slices = part(gpu, at, "slices"), .memory_slices = part(gpu, at, "memory_slices"),
                          .multiprocessors = part(gpu, at, "multiprocessors"),
                          .instances = part(gpu, at, "instances"), .copy_engines = part(gpu, at, "copy_engines"),
                          .decoders = part(gpu, at, "decoders"), .encoders = part(gpu, at, "encoders"),
                          .jpegs = part(gpu, at, "jpegs"), .ofas = part(gpu, at, "ofas"),
                          .size = part(gpu, at, "size"), .memory = part(gpu, at, "memory")};
    if (look(value, "gpus.%d.mig.profiles.%d.name", gpu, at))
        snprintf(found->name, sizeof found->name, "%.63s", value);
    return 1;
}

/* A profile by NVML's number of its kind, or by its id; -1 where the GPU has none. */
static int profile_position(int gpu, int by_id, unsigned wanted, gi_profile *found) {
    for (int at = 0, listed = list_length(gpu, "mig.profiles"); at < listed; at++)
        if (read_profile(gpu, at, found) && (by_id ? found->id : found->number) == wanted)
            return at;
    return -1;
}

int gi_profile_of(int gpu, int gi, gi_profile *found) {
    char value[TEXT];
    if (!look(value, "gpus.%d.mig.gi.%d.profile", gpu, gi))
        return NOT_FOUND;
    return profile_position(gpu, 1, (unsigned)atoi(value), found) < 0 ? NOT_FOUND : OK;
}

static unsigned ci_slices(int gpu, int gi, int ci) {
    char value[TEXT];
    return look(value, "gpus.%d.mig.gi.%d.ci.%d.slices", gpu, gi, ci) ? (unsigned)atoi(value) : 0;
}

/* Of a compute instance. One that is smaller than its GPU instance has as many as GPU instances of one slice have: an
 * H200 shows 16 for 1c.3g.71gb and 32 for 2c.3g.71gb, where 3g.71gb has 60 (utkuozdemir/nvidia_gpu_exporter,
 * internal/captures, nvidia-h200-mig). */
static unsigned multiprocessors_of(int gpu, const gi_profile *profile, unsigned slices) {
    gi_profile smallest;
    if (slices == profile->slices || profile_position(gpu, 0, 0, &smallest) < 0)
        return profile->multiprocessors;
    return smallest.multiprocessors * slices;
}

/* 1g.5gb, and 1c.3g.20gb where the instance has more slices than this part of it */
int ci_name(int gpu, int gi, int ci, char *name, unsigned size) {
    gi_profile profile;
    int status = gi_profile_of(gpu, gi, &profile);
    if (status)
        return status;
    unsigned slices = ci_slices(gpu, gi, ci);
    if (slices == profile.slices)
        snprintf(name, size, "%s", profile.name);
    else
        snprintf(name, size, "%uc.%s", slices, profile.name);
    return OK;
}

/* Whether a GPU has MIG: only then it reports profiles. */
static int mig_gate(const char *function, void *device, const void *result, int *gpu, int on) {
    unsigned current;
    int status = gpu_gate(function, device, result, gpu);
    if (!status && (status = whole(*gpu, "mig.current", &current)))
        return status;
    return status ? status : on && !current ? UNSUPPORTED : OK;
}

API int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    int gpu, status = pending ? gpu_gate(__func__, device, current, &gpu) : INVALID;
    if (!status && !(status = whole(gpu, "mig.current", current)))
        status = whole(gpu, "mig.pending", pending);
    return status;
}

/* 0 where it is off or impossible: what walks over them finds none (go-nvlib and nvidia-ctk give up otherwise). */
API int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *result) {
    unsigned most = 0;
    gi_profile profile;
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (status)
        return status;
    for (int at = 0, listed = mig_is_on(gpu) ? list_length(gpu, "mig.profiles") : 0; at < listed; at++)
        if (read_profile(gpu, at, &profile) && profile.instances > most)
            most = profile.instances;
    *result = most;
    return OK;
}

API int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *result) {
    target asked;
    int status = device_gate(__func__, device, result, &asked);
    if (!status)
        *result = asked.gi >= 0;
    return status;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **found) {
    unsigned at = 0;
    char value[TEXT];
    int gpu, status = mig_gate(__func__, device, found, &gpu, 1);
    for (int gi = 0; !status && gi < MAX_GI; gi++)
        for (int ci = 0; ci < MAX_CI && look(value, "gpus.%d.mig.gi.%d.profile", gpu, gi); ci++)
            if (ci_exists(gpu, gi, ci) && at++ == index) {
                *found = mig_handle(gpu, gi, ci);
                return OK;
            }
    return status ? status : NOT_FOUND;
}

static int mig_target(const char *function, void *device, const void *result, target *asked) {
    int status = device_gate(function, device, result, asked);
    return status ? status : asked->gi < 0 ? INVALID : OK;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **whole_gpu) {
    target asked;
    int status = mig_target(__func__, device, whole_gpu, &asked);
    if (!status)
        *whole_gpu = handle_of(asked.gpu);
    return status;
}

API int nvmlDeviceGetGpuInstanceId(void *device, unsigned *id) {
    target asked;
    int status = mig_target(__func__, device, id, &asked);
    if (!status)
        *id = (unsigned)asked.gi;
    return status;
}

API int nvmlDeviceGetComputeInstanceId(void *device, unsigned *id) {
    target asked;
    int status = mig_target(__func__, device, id, &asked);
    if (!status)
        *id = (unsigned)asked.ci;
    return status;
}

typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gi_slices, ci_slices;
    unsigned long long memory;
} attributes;

static int attributes_of(const char *function, void *device, attributes *found) {
    target asked;
    gi_profile profile;
    int status = mig_target(function, device, found, &asked);
    if (status || (status = gi_profile_of(asked.gpu, asked.gi, &profile)))
        return status;
    unsigned slices = ci_slices(asked.gpu, asked.gi, asked.ci);
    *found = (attributes){multiprocessors_of(asked.gpu, &profile, slices), profile.copy_engines, profile.decoders,
                          profile.encoders, profile.jpegs, profile.ofas, profile.slices, slices, profile.memory};
    return OK;
}

API int nvmlDeviceGetAttributes_v2(void *device, attributes *found) { return attributes_of(__func__, device, found); }

API int nvmlDeviceGetAttributes(void *device, attributes *found) { return attributes_of(__func__, device, found); }

typedef struct {
    unsigned id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
    unsigned long long memory;
} gi_info_v1;

typedef struct {
    unsigned version, id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
    unsigned long long memory;
    char name[96];
} gi_info_v2;

API int nvmlDeviceGetGpuInstanceProfileInfo(void *device, unsigned kind, gi_info_v1 *info) {
    gi_profile p;
    int gpu, status = mig_gate(__func__, device, info, &gpu, 0);
    if (status)
        return status;
    if (kind > 0x11)
        return INVALID;
    if (profile_position(gpu, 0, kind, &p) < 0)
        return UNSUPPORTED;
    *info = (gi_info_v1){p.id, 0, p.slices, p.instances, p.multiprocessors, p.copy_engines, p.decoders, p.encoders,
                         p.jpegs, p.ofas, p.memory};
    return OK;
}

API int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned kind, gi_info_v2 *info) {
    gi_info_v1 plain;
    gi_profile p;
    target asked;
    if (!info || info->version != 0x02000098)
        return info ? VERSION_MISMATCH : INVALID;
    int status = nvmlDeviceGetGpuInstanceProfileInfo(device, kind, &plain);
    if (status)
        return status;
    memcpy(&info->id, &plain.id, 10 * sizeof(unsigned));
    info->memory = plain.memory;
    if (target_of(device, &asked) && profile_position(asked.gpu, 0, kind, &p) >= 0)
        snprintf(info->name, sizeof info->name, "MIG %s", p.name);
    return OK;
}

/* ---- GPU instances */

typedef struct {
    unsigned start, size;
} placement;

static unsigned occupied(int gpu) { /* memory slices, a bit each */
    char value[TEXT];
    gi_profile profile;
    unsigned mask = 0;
    for (int gi = 0; gi < MAX_GI; gi++)
        if (!gi_profile_of(gpu, gi, &profile) && look(value, "gpus.%d.mig.gi.%d.start", gpu, gi))
            mask |= ((1u << profile.size) - 1) << atoi(value);
    return mask;
}

static unsigned used_slices(int gpu) {
    gi_profile profile;
    unsigned used = 0;
    for (int gi = 0; gi < MAX_GI; gi++)
        used += gi_profile_of(gpu, gi, &profile) ? 0 : profile.slices;
    return used;
}

static unsigned of_profile(int gpu, unsigned id) {
    gi_profile profile;
    unsigned found = 0;
    for (int gi = 0; gi < MAX_GI; gi++)
        found += !gi_profile_of(gpu, gi, &profile) && profile.id == id;
    return found;
}

/* Whether the GPU's media engines are enough for one more instance. An RTX PRO 6000 has 4 decoders, and so has its
 * 1g.24gb+me.all: only profiles without any (-me) fit with that (NVIDIA, MIG User Guide, "Supported MIG Profiles"). */
static int engines_left(int gpu, const gi_profile *more) {
    gi_profile one;
    unsigned there[4] = {0}, used[4] = {more->decoders, more->encoders, more->jpegs, more->ofas};
    for (int at = 0, listed = list_length(gpu, "mig.profiles"); at < listed; at++)
        if (read_profile(gpu, at, &one)) {
            unsigned engines[4] = {one.decoders, one.encoders, one.jpegs, one.ofas};
            for (int kind = 0; kind < 4; kind++)
                there[kind] = engines[kind] > there[kind] ? engines[kind] : there[kind];
        }
    for (int gi = 0; gi < MAX_GI; gi++)
        if (!gi_profile_of(gpu, gi, &one)) {
            unsigned engines[4] = {one.decoders, one.encoders, one.jpegs, one.ofas};
            for (int kind = 0; kind < 4; kind++)
                used[kind] += engines[kind];
        }
    for (int kind = 0; kind < 4; kind++)
        if (used[kind] > there[kind])
            return 0;
    return 1;
}

/* The starts where an instance of a profile fits; returns their number. */
static unsigned places(int gpu, int at, const gi_profile *profile, int free_only, placement *found, unsigned capacity) {
    char value[TEXT], key[KEY];
    unsigned count = 0, mask = free_only ? occupied(gpu) : 0, slices = 7;
    whole(gpu, "mig.slices", &slices);
    if (free_only && (used_slices(gpu) + profile->slices > slices ||
                      of_profile(gpu, profile->id) >= profile->instances || !engines_left(gpu, profile)))
        return 0;
    snprintf(key, sizeof key, "mig.profiles.%d.placements", at);
    for (int i = 0, listed = list_length(gpu, key); i < listed; i++) {
        if (!look(value, "gpus.%d.%s.%d", gpu, key, i))
            continue;
        unsigned start = (unsigned)atoi(value);
        if (mask & (((1u << profile->size) - 1) << start))
            continue;
        if (found && count < capacity)
            found[count] = (placement){start, profile->size};
        count++;
    }
    return count;
}

API int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, unsigned id, placement *found, unsigned *count) {
    gi_profile profile;
    int gpu, status = mig_gate(__func__, device, count, &gpu, 1);
    if (status)
        return status;
    int at = profile_position(gpu, 1, id, &profile);
    if (at < 0)
        return UNSUPPORTED;
    unsigned capacity = found ? *count : 0;
    *count = places(gpu, at, &profile, 0, found, capacity);
    return found && *count > capacity ? TOO_SMALL : OK;
}

API int nvmlDeviceGetGpuInstanceRemainingCapacity(void *device, unsigned id, unsigned *count) {
    gi_profile profile;
    int gpu, status = mig_gate(__func__, device, count, &gpu, 1);
    if (status)
        return status;
    int at = profile_position(gpu, 1, id, &profile);
    if (at < 0)
        return UNSUPPORTED;
    placement free_ones[16];
    unsigned slices = 7, free_places = places(gpu, at, &profile, 1, free_ones, 16);
    whole(gpu, "mig.slices", &slices);
    unsigned by_slices = profile.slices ? (slices - used_slices(gpu)) / profile.slices : 0;
    unsigned by_place = 0, end = 0; /* how many fit without an overlap */
    for (unsigned i = 0; i < free_places && i < 16; i++)
        if (free_ones[i].start >= end) {
            by_place++;
            end = free_ones[i].start + free_ones[i].size;
        }
    unsigned left = profile.instances - of_profile(gpu, profile.id);
    *count = by_place < by_slices ? by_place : by_slices;
    *count = *count < left ? *count : left;
    return OK;
}

/* An instance's id, as the driver gives it: a node of the tree of halves. The whole GPU is 0, its halves are 1 and
 * 2, quarters 3 to 6, eighths from 7 (NVIDIA, MIG User Guide, "Creating GPU Instances"). */
static unsigned instance_id(unsigned start, unsigned size, unsigned memory_slices) {
    return memory_slices / size - 1 + start / size;
}

/* Where the driver places an instance that comes without a placement: the first free start of a fixed order. On a
 * GPU of 7 compute slices the half of three is filled before the half of four. Sources: NVIDIA, MIG User Guide,
 * "Creating GPU Instances" (-cgi 9,19,14,19 is placed at 4:4 0:1 2:2 1:1; 14,19,19,19,19,19 at 4:2 6:1 0:1 1:1 2:1
 * 3:1; 19,19,14,9 at 6:1 4:1 0:2, and then Insufficient Resources); public captures of nvidia-smi on an H100
 * (15,15,15 has the ids 5, 3, 4; 19 seven times has 13, 11, 12, 7, 8, ...). Other GPUs are filled from the start:
 * captures on an A30 and an RTX PRO 6000. Where a fourth of two memory slices goes is not shown: 6 is left. */
static const char *placing_order(unsigned size, unsigned slices) {
    if (slices != 7)
        return "";
    return size == 1 ? "6450123" : size == 2 ? "4026" : size == 4 ? "40" : "";
}

static unsigned preferred(const placement *free_ones, unsigned count, unsigned slices) {
    for (const char *start = placing_order(free_ones[0].size, slices); *start; start++)
        for (unsigned i = 0; i < count; i++)
            if (free_ones[i].start == (unsigned)(*start - '0'))
                return i;
    return 0;
}

typedef struct {
    int gpu, gi, ci, forced;
    unsigned profile, start, slices;
} request;

static int make_instance(edits *changes, void *with) {
    request *asked = with;
    char text[TEXT];
    placement free_ones[16];
    gi_profile profile;
    int at = profile_position(asked->gpu, 1, asked->profile, &profile);
    if (at < 0)
        return UNSUPPORTED;
    unsigned slices = 7, memory_slices = 8, i = 0, count = places(asked->gpu, at, &profile, 1, free_ones, 16);
    whole(asked->gpu, "mig.slices", &slices);
    whole(asked->gpu, "mig.memory_slices", &memory_slices);
    count = count < 16 ? count : 16;
    if (asked->forced)
        while (i < count && free_ones[i].start != asked->start)
            i++;
    else if (count)
        i = preferred(free_ones, count, slices);
    if (i >= count)
        return INSUFFICIENT_RESOURCES;
    asked->gi = (int)instance_id(free_ones[i].start, profile.size, memory_slices);
    snprintf(text, sizeof text, "%u", profile.id);
    put(changes, text, "gpus.%d.mig.gi.%d.profile", asked->gpu, asked->gi);
    snprintf(text, sizeof text, "%u", free_ones[i].start);
    put(changes, text, "gpus.%d.mig.gi.%d.start", asked->gpu, asked->gi);
    return OK;
}

static int create_instance(const char *function, void *device, request asked, void **made) {
    int status = mig_gate(function, device, made, &asked.gpu, 1);
    if (!status && !(status = change(make_instance, &asked)))
        *made = &instances[asked.gpu][asked.gi];
    return status;
}

API int nvmlDeviceCreateGpuInstance(void *device, unsigned profile, void **made) {
    return create_instance(__func__, device, (request){.profile = profile}, made);
}

API int nvmlDeviceCreateGpuInstanceWithPlacement(void *device, unsigned profile, const placement *where,
                                                 void **made) {
    return where ? create_instance(__func__, device,
                                   (request){.profile = profile, .forced = 1, .start = where->start}, made)
                 : INVALID;
}

static int has_parts(int gpu, int gi) {
    for (int ci = 0; ci < MAX_CI; ci++)
        if (ci_exists(gpu, gi, ci))
            return 1;
    return 0;
}

static int end_instance(edits *changes, void *with) {
    const request *asked = with;
    if (has_parts(asked->gpu, asked->gi))
        return IN_USE;
    drop(changes, "gpus.%d.mig.gi.%d", asked->gpu, asked->gi);
    return OK;
}

/* Handles of instances carry their GPU, and can fail with it. */
static int instance_gate(const char *function, const void *handle, int *gpu, int *gi) {
    target ignored;
    int status = system_gate(function);
    if (status)
        return status;
    if (!instance_of(handle, gpu, gi))
        return INVALID;
    return device_gate(function, handle_of(*gpu), handle, &ignored);
}

API int nvmlGpuInstanceDestroy(void *instance) {
    request asked = {0};
    int status = instance_gate(__func__, instance, &asked.gpu, &asked.gi);
    return status ? status : change(end_instance, &asked);
}

API int nvmlDeviceGetGpuInstances(void *device, unsigned id, void **found, unsigned *count) {
    gi_profile profile;
    int gpu, status = mig_gate(__func__, device, count, &gpu, 1);
    if (status)
        return status;
    if (!found)
        return INVALID;
    *count = 0; /* the caller's array has the size of the profile's maximum (nvml.h) */
    for (int gi = 0; gi < MAX_GI; gi++)
        if (!gi_profile_of(gpu, gi, &profile) && profile.id == id)
            found[(*count)++] = &instances[gpu][gi];
    return profile_position(gpu, 1, id, &profile) < 0 ? UNSUPPORTED : OK;
}

API int nvmlDeviceGetGpuInstanceById(void *device, unsigned id, void **found) {
    char value[TEXT];
    int gpu, status = mig_gate(__func__, device, found, &gpu, 1);
    if (status)
        return status;
    if (id >= MAX_GI || !look(value, "gpus.%d.mig.gi.%u.profile", gpu, id))
        return NOT_FOUND;
    *found = &instances[gpu][id];
    return OK;
}

typedef struct {
    void *device;
    unsigned id, profile;
    placement where;
} gi_info;

API int nvmlGpuInstanceGetInfo(void *instance, gi_info *info) {
    char value[TEXT];
    gi_profile profile;
    int gpu, gi, status = info ? instance_gate(__func__, instance, &gpu, &gi) : INVALID;
    if (status || (status = gi_profile_of(gpu, gi, &profile)))
        return status;
    unsigned start = look(value, "gpus.%d.mig.gi.%d.start", gpu, gi) ? (unsigned)atoi(value) : 0;
    *info = (gi_info){handle_of(gpu), (unsigned)gi, profile.id, {start, profile.size}};
    return OK;
}

/* ---- compute instances: NVML's kinds are 1, 2, 3, 4, 7, 8, 6 slices, and 1 slice of a second form */

static const unsigned kinds[] = {1, 2, 3, 4, 7, 8, 6};
enum { KINDS = sizeof kinds / sizeof *kinds };

static int kind_fits(int gpu, int gi, unsigned kind, gi_profile *profile) {
    int status = gi_profile_of(gpu, gi, profile);
    if (status)
        return status;
    if (kind >= 9)
        return INVALID;
    return kind < KINDS && kinds[kind] <= profile->slices ? OK : UNSUPPORTED;
}

static unsigned free_slices(int gpu, int gi) { /* a bit each */
    char value[TEXT];
    gi_profile profile;
    if (gi_profile_of(gpu, gi, &profile))
        return 0;
    unsigned mask = (1u << profile.slices) - 1;
    for (int ci = 0; ci < MAX_CI; ci++)
        if (look(value, "gpus.%d.mig.gi.%d.ci.%d.start", gpu, gi, ci))
            mask &= ~(((1u << ci_slices(gpu, gi, ci)) - 1) << atoi(value));
    return mask;
}

/* The first place for as many slices, -1 where there is none. */
static int free_place(int gpu, int gi, unsigned slices, unsigned total) {
    unsigned mask = free_slices(gpu, gi);
    for (unsigned start = 0; start + slices <= total; start++) {
        unsigned wanted = ((1u << slices) - 1) << start;
        if ((mask & wanted) == wanted)
            return (int)start;
    }
    return -1;
}

typedef struct {
    unsigned id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
} ci_info_v1;

typedef struct {
    unsigned version, id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
    char name[96];
} ci_info_v2;

API int nvmlGpuInstanceGetComputeInstanceProfileInfo(void *instance, unsigned kind, unsigned engines,
                                                     ci_info_v1 *info) {
    gi_profile p;
    int gpu, gi, status = info ? instance_gate(__func__, instance, &gpu, &gi) : INVALID;
    if (!status)
        status = engines ? INVALID : kind_fits(gpu, gi, kind, &p);
    if (status)
        return status;
    *info = (ci_info_v1){kind, kinds[kind], p.slices / kinds[kind], multiprocessors_of(gpu, &p, kinds[kind]),
                         p.copy_engines, p.decoders, p.encoders, p.jpegs, p.ofas};
    return OK;
}

API int nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, unsigned kind, unsigned engines,
                                                      ci_info_v2 *info) {
    ci_info_v1 plain;
    gi_profile p;
    int gpu, gi;
    if (!info || info->version != 0x02000088)
        return info ? VERSION_MISMATCH : INVALID;
    int status = nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, kind, engines, &plain);
    if (status)
        return status;
    memcpy(&info->id, &plain, sizeof plain);
    if (instance_of(instance, &gpu, &gi) && !kind_fits(gpu, gi, kind, &p)) {
        if (kinds[kind] == p.slices)
            snprintf(info->name, sizeof info->name, "MIG %s", p.name);
        else
            snprintf(info->name, sizeof info->name, "MIG %uc.%s", kinds[kind], p.name);
    }
    return OK;
}

API int nvmlGpuInstanceGetComputeInstanceRemainingCapacity(void *instance, unsigned kind, unsigned *count) {
    gi_profile profile;
    int gpu, gi, status = count ? instance_gate(__func__, instance, &gpu, &gi) : INVALID;
    if (!status)
        status = kind_fits(gpu, gi, kind, &profile);
    if (!status)
        *count = (unsigned)__builtin_popcount(free_slices(gpu, gi)) / kinds[kind];
    return status;
}

API int nvmlGpuInstanceGetComputeInstancePossiblePlacements(void *instance, unsigned kind, placement *found,
                                                            unsigned *count) {
    gi_profile profile;
    int gpu, gi, status = count ? instance_gate(__func__, instance, &gpu, &gi) : INVALID;
    if (!status)
        status = kind_fits(gpu, gi, kind, &profile);
    if (status)
        return status;
    unsigned capacity = found ? *count : 0, there = 0;
    for (unsigned start = 0; start + kinds[kind] <= profile.slices; start += kinds[kind], there++)
        if (found && there < capacity)
            found[there] = (placement){start, kinds[kind]};
    *count = there;
    return found && there > capacity ? TOO_SMALL : OK;
}

static int make_part(edits *changes, void *with) {
    request *asked = with;
    char text[32], value[TEXT];
    gi_profile profile;
    int status = gi_profile_of(asked->gpu, asked->gi, &profile);
    if (status)
        return status;
    int start = free_place(asked->gpu, asked->gi, asked->slices, profile.slices);
    if (asked->forced && start >= 0) {
        unsigned wanted = ((1u << asked->slices) - 1) << asked->start;
        start = (free_slices(asked->gpu, asked->gi) & wanted) == wanted ? (int)asked->start : -1;
    }
    for (asked->ci = 0; asked->ci < MAX_CI; asked->ci++)
        if (!look(value, "gpus.%d.mig.gi.%d.ci.%d.slices", asked->gpu, asked->gi, asked->ci))
            break;
    if (start < 0 || asked->ci == MAX_CI)
        return INSUFFICIENT_RESOURCES;
    snprintf(text, sizeof text, "%u", asked->slices);
    put(changes, text, "gpus.%d.mig.gi.%d.ci.%d.slices", asked->gpu, asked->gi, asked->ci);
    snprintf(text, sizeof text, "%d", start);
    put(changes, text, "gpus.%d.mig.gi.%d.ci.%d.start", asked->gpu, asked->gi, asked->ci);
    return OK;
}

static int create_part(const char *function, void *instance, unsigned kind, request asked, void **made) {
    gi_profile profile;
    int status = made ? instance_gate(function, instance, &asked.gpu, &asked.gi) : INVALID;
    if (!status)
        status = kind_fits(asked.gpu, asked.gi, kind, &profile);
    if (status)
        return status;
    asked.slices = kinds[kind];
    if (!(status = change(make_part, &asked)))
        *made = &parts[asked.gpu][asked.gi][asked.ci];
    return status;
}

API int nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned kind, void **made) {
    return create_part(__func__, instance, kind, (request){0}, made);
}

API int nvmlGpuInstanceCreateComputeInstanceWithPlacement(void *instance, unsigned kind, const placement *where,
                                                          void **made) {
    return where ? create_part(__func__, instance, kind, (request){.forced = 1, .start = where->start}, made) : INVALID;
}

static int end_part(edits *changes, void *with) {
    const request *asked = with;
    if (load_of(asked->gpu, asked->gi, asked->ci).processes)
        return IN_USE;
    drop(changes, "gpus.%d.mig.gi.%d.ci.%d", asked->gpu, asked->gi, asked->ci);
    return OK;
}

static int part_gate(const char *function, const void *handle, int *gpu, int *gi, int *ci) {
    target ignored;
    int status = system_gate(function);
    if (status)
        return status;
    return part_of(handle, gpu, gi, ci) ? device_gate(function, handle_of(*gpu), handle, &ignored) : INVALID;
}

API int nvmlComputeInstanceDestroy(void *handle) {
    request asked = {0};
    int status = part_gate(__func__, handle, &asked.gpu, &asked.gi, &asked.ci);
    return status ? status : change(end_part, &asked);
}

static unsigned kind_of(unsigned slices) {
    for (unsigned kind = 0; kind < KINDS; kind++)
        if (kinds[kind] == slices)
            return kind;
    return 0;
}

API int nvmlGpuInstanceGetComputeInstances(void *instance, unsigned kind, void **found, unsigned *count) {
    gi_profile profile;
    int gpu, gi, status = found && count ? instance_gate(__func__, instance, &gpu, &gi) : INVALID;
    if (!status)
        status = kind_fits(gpu, gi, kind, &profile);
    if (status)
        return status;
    *count = 0;
    for (int ci = 0; ci < MAX_CI; ci++)
        if (ci_exists(gpu, gi, ci) && kind_of(ci_slices(gpu, gi, ci)) == kind)
            found[(*count)++] = &parts[gpu][gi][ci];
    return OK;
}

API int nvmlGpuInstanceGetComputeInstanceById(void *instance, unsigned id, void **found) {
    int gpu, gi, status = found ? instance_gate(__func__, instance, &gpu, &gi) : INVALID;
    if (status)
        return status;
    if (!ci_exists(gpu, gi, (int)id))
        return NOT_FOUND;
    *found = &parts[gpu][gi][id];
    return OK;
}

typedef struct {
    void *device, *instance;
    unsigned id, kind;
    placement where;
} ci_info;

API int nvmlComputeInstanceGetInfo_v2(void *handle, ci_info *info) {
    char value[TEXT];
    int gpu, gi, ci, status = info ? part_gate(__func__, handle, &gpu, &gi, &ci) : INVALID;
    if (status)
        return status;
    unsigned slices = ci_slices(gpu, gi, ci);
    unsigned start = look(value, "gpus.%d.mig.gi.%d.ci.%d.start", gpu, gi, ci) ? (unsigned)atoi(value) : 0;
    *info = (ci_info){handle_of(gpu), &instances[gpu][gi], (unsigned)ci, kind_of(slices), {start, slices}};
    return OK;
}

/* ---- the mode itself */

typedef struct {
    int gpu, activation;
    unsigned mode;
} switching;

static int has_instances(int gpu) {
    gi_profile profile;
    for (int gi = 0; gi < MAX_GI; gi++)
        if (!gi_profile_of(gpu, gi, &profile))
            return 1;
    return 0;
}

/* Ampere needs a reset, which a GPU that is passed through does not do by itself; Hopper and later need none
 * (NVIDIA, MIG User Guide, "Enable MIG Mode"). */
static int switch_mode(edits *changes, void *with) {
    switching *asked = with;
    unsigned architecture = 0, current;
    int status = whole(asked->gpu, "mig.current", &current);
    if (status)
        return status;
    whole(asked->gpu, "architecture", &architecture);
    put(changes, asked->mode ? "1" : "0", "gpus.%d.mig.pending", asked->gpu);
    asked->activation = OK;
    if (current == asked->mode)
        return OK;
    if (load_of(asked->gpu, -1, -1).processes || has_instances(asked->gpu))
        asked->activation = IN_USE;
    else if (architecture < 9)
        asked->activation = RESET_REQUIRED;
    else
        put(changes, asked->mode ? "1" : "0", "gpus.%d.mig.current", asked->gpu);
    return OK;
}

API int nvmlDeviceSetMigMode(void *device, unsigned mode, int *activation) {
    switching asked = {.mode = mode};
    int status = mode > 1 ? INVALID : mig_gate(__func__, device, activation, &asked.gpu, 0);
    if (!status && !(status = change(switch_mode, &asked)))
        *activation = asked.activation;
    return status;
}
