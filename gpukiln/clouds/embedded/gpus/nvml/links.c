/* The double of NVML: how GPUs are linked (NVLink, PCIe, fabric), and the fields that are asked by number. */
#include <time.h>
#include <unistd.h>

#include "double.h"

static int link_at(const char *function, void *device, unsigned link, const void *result, int *gpu, int *at) {
    char value[TEXT];
    int status = gpu_gate(function, device, result, gpu);
    if (!status && look(value, "gpus.%d.nvlinks.code", *gpu))
        status = atoi(value);
    if (status)
        return status;
    int listed = list_length(*gpu, "nvlinks");
    *at = (int)link;
    if (*at < listed && look(value, "gpus.%d.nvlinks.%d.link", *gpu, *at) && (unsigned)atoi(value) == link)
        return OK; /* nearly always */
    for (*at = 0; *at < listed; ++*at)
        if (look(value, "gpus.%d.nvlinks.%d.link", *gpu, *at) && (unsigned)atoi(value) == link)
            return OK;
    return listed < 0 ? UNSUPPORTED : INVALID;
}

static int of_link(const char *function, void *device, unsigned link, const char *name, const void *result,
                   char *value) {
    char key[KEY];
    int gpu = 0, at = 0, status = link_at(function, device, link, result, &gpu, &at);
    snprintf(key, sizeof key, "nvlinks.%d.%s", at, name);
    return status ? status : fetch(gpu, key, value);
}

static int number_of_link(const char *function, void *device, unsigned link, const char *name, unsigned *result) {
    char value[TEXT];
    int status = of_link(function, device, link, name, result, value);
    if (!status)
        *result = (unsigned)atoi(value);
    return status;
}

API int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *result) {
    return number_of_link(__func__, device, link, "state", result);
}

API int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *result) {
    return number_of_link(__func__, device, link, "version", result);
}

/* 0 GPU, 1 IBM NPU, 2 NVSwitch, 255 unknown (nvml.h, nvmlIntNvLinkDeviceType_t) */
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *result) {
    return number_of_link(__func__, device, link, "remote_type", result);
}

/* P2P, system memory, atomics of both, SLI, valid: a link that is up can all but SLI. */
API int nvmlDeviceGetNvLinkCapability(void *device, unsigned link, unsigned capability, unsigned *result) {
    unsigned up;
    int status = capability > 5 ? INVALID : number_of_link(__func__, device, link, "state", &up);
    if (!status && result)
        *result = up && capability != 4;
    return status ? status : result ? OK : INVALID;
}

static int remote(const char *function, void *device, unsigned link, pci_info *info) {
    char value[TEXT], its[TEXT];
    int status = of_link(function, device, link, "remote_bus_id", info, value);
    if (status)
        return status;
    int peer = -1;
    for (int gpu = 0; gpu < MAX_GPUS && peer < 0; gpu++)
        if (look(its, "gpus.%d.bus_id", gpu) && !strcasecmp(its, value))
            peer = gpu;
    fill_pci(info, peer, value);
    return OK;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_info *info) {
    return remote(__func__, device, link, info);
}

API int nvmlDeviceGetNvLinkRemotePciInfo(void *device, unsigned link, pci_info *info) {
    return remote(__func__, device, link, info);
}

/* NVLink 5 (Blackwell) has counters of its own, which are fields. */
static int has_own_counters(void *device, unsigned link) {
    unsigned version;
    return !number_of_link("", device, link, "version", &version) && version >= 7;
}

API int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, unsigned counter,
                                        unsigned long long *result) {
    static const char *const names[] = {"errors.replay", "errors.recovery", "errors.crc_flit", "errors.crc_data"};
    char value[TEXT];
    int status = counter < 4 ? of_link(__func__, device, link, names[counter], result, value) : UNSUPPORTED;
    if (!status && has_own_counters(device, link))
        return UNSUPPORTED;
    if (!status)
        *result = strtoull(value, NULL, 10);
    return status;
}

/* ---- fields */

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

/* NVML_FI_DEV_*: numbers and kinds from nvml.h; `since` is the branch that brought them. */
static const struct field {
    unsigned number, type, since;
    const char *key;
    double unit; /* what the state's value is multiplied by */
} fields[] = {
    {1, PLAIN_TYPE, 0, "ecc.current", 1},        {2, PLAIN_TYPE, 0, "ecc.pending", 1},
    {3, COUNT_TYPE, 0, "ecc.volatile_corrected", 1}, {4, COUNT_TYPE, 0, "ecc.volatile_uncorrected", 1},
    {5, COUNT_TYPE, 0, "ecc.aggregate_corrected", 1}, {6, COUNT_TYPE, 0, "ecc.aggregate_uncorrected", 1},
    {31, PLAIN_TYPE, 0, "retired_pages_pending", 1},
    {82, PLAIN_TYPE, 0, "temperature.memory", 1}, {94, PLAIN_TYPE, 0, "pcie.replays", 1},
    {142, PLAIN_TYPE, 0, "remapped_rows.correctable", 1}, {143, PLAIN_TYPE, 0, "remapped_rows.uncorrectable", 1},
    {144, PLAIN_TYPE, 0, "remapped_rows.pending", 1}, {145, PLAIN_TYPE, 0, "remapped_rows.failed", 1},
    {187, PLAIN_TYPE, 535, "power.min_limit", 1000}, {188, PLAIN_TYPE, 535, "power.max_limit", 1000},
    {189, PLAIN_TYPE, 535, "power.default_limit", 1000}, {190, PLAIN_TYPE, 535, "power.limit", 1000},
    {192, PLAIN_TYPE, 535, "power.limit", 1000}, {193, WHOLE_TYPE, 545, "temperature.tlimit.shutdown", 1},
    {194, WHOLE_TYPE, 545, "temperature.tlimit.slowdown", 1}, {195, WHOLE_TYPE, 545, "temperature.tlimit.memory", 1},
    {196, WHOLE_TYPE, 545, "temperature.tlimit.gpu", 1}, {226, PLAIN_TYPE, 550, "reset_required", 1},
    {227, PLAIN_TYPE, 550, "drain_required", 1},
    {230, PLAIN_TYPE, 565, "recovery_action", 1},
};

enum { ENERGY = 83, LINK_SPEED = 90, LINK_COUNT = 91, POWER_AVERAGE = 185, POWER_INSTANT = 186, RECOVERIES = 215 };

static int special(void *device, int gpu, field_value *field) {
    char value[TEXT];
    unsigned drawn;
    int status;
    switch (field->field) {
    case ENERGY: {
        extern int nvmlDeviceGetTotalEnergyConsumption(void *, unsigned long long *);
        field->type = COUNT_TYPE;
        return nvmlDeviceGetTotalEnergyConsumption(device, &field->value.count);
    }
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
    case POWER_AVERAGE:
    case POWER_INSTANT: {
        extern int nvmlDeviceGetPowerUsage(void *, unsigned *);
        field->type = PLAIN_TYPE;
        if (!(status = nvmlDeviceGetPowerUsage(device, &drawn)))
            field->value.plain = drawn;
        return status;
    }
    case RECOVERIES:
        field->type = COUNT_TYPE;
        status = of_link("nvmlDeviceGetFieldValues", device, field->scope, "errors.recovery", field, value);
        if (!status && !has_own_counters(device, field->scope))
            return UNSUPPORTED;
        if (!status)
            field->value.count = strtoull(value, NULL, 10);
        return status;
    default:
        return INVALID; /* a number that a driver doesn't know is no valid argument */
    }
}

static int is_special(unsigned number) {
    return number == ENERGY || number == LINK_SPEED || number == LINK_COUNT ||
           (number == RECOVERIES && DRIVER >= 550) || ((number == POWER_AVERAGE || number == POWER_INSTANT) && DRIVER >= 535);
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
    if (is_special(field->field)) {
        field->status = special(device, gpu, field);
        return;
    }
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

/* ---- fabric: clusterUuid, status, cliqueId, state; the newer structure has a version before and a mask behind */

typedef struct {
    uint8_t cluster[16];
    int status;
    uint32_t clique;
    uint32_t state;
} fabric_info;

static int fabric(const char *function, void *device, fabric_info *info) {
    char value[TEXT];
    double state, status;
    unsigned byte;
    int gpu, answer = gpu_gate(function, device, info, &gpu);
    if (answer || (answer = number(gpu, "fabric.state", &state)) || (answer = number(gpu, "fabric.status", &status)))
        return answer;
    memset(info, 0, sizeof *info);
    info->state = (uint32_t)state;
    info->status = (int)status;
    if (!fetch(gpu, "fabric.cluster", value))
        for (int i = 0; i < 16 && sscanf(value + 2 * i, "%2x", &byte) == 1; i++)
            info->cluster[i] = (uint8_t)byte;
    if (!fetch(gpu, "fabric.clique", value))
        info->clique = (uint32_t)strtoul(value, NULL, 10);
    return OK;
}

API int nvmlDeviceGetGpuFabricInfo(void *device, fabric_info *info) { return fabric(__func__, device, info); }

#if DRIVER >= 550

typedef struct {
    unsigned version;
    fabric_info info;
    uint32_t health;
} fabric_info_v2;

API int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_info_v2 *versioned) {
    char value[TEXT];
    int gpu;
    if (!versioned || versioned->version != 0x02000024)
        return versioned ? VERSION_MISMATCH : INVALID;
    int status = fabric(__func__, device, &versioned->info);
    if (!status && !(status = gpu_gate(__func__, device, versioned, &gpu)))
        versioned->health = fetch(gpu, "fabric.health", value) ? 0 : (uint32_t)atoi(value);
    return status;
}

#endif

/* ---- other GPUs */

static int of_peer(const char *function, void *one, void *other, const char *name, unsigned *result) {
    char key[KEY], value[TEXT];
    int gpu, peer, status = gpu_gate(function, one, result, &gpu);
    if (!status)
        status = gpu_gate(function, other, result, &peer);
    for (int i = 0; !status && i < list_length(gpu, "peers"); i++)
        if (look(value, "gpus.%d.peers.%d.index", gpu, i) && atoi(value) == peer) {
            snprintf(key, sizeof key, "peers.%d.%s", i, name);
            if (!(status = fetch(gpu, key, value)))
                *result = (unsigned)atoi(value);
            return status;
        }
    return status ? status : UNSUPPORTED;
}

API int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *result) {
    if (one == other && result) { /* itself */
        *result = 0;
        return OK;
    }
    return of_peer(__func__, one, other, "ancestor", result);
}

API int nvmlDeviceGetP2PStatus(void *one, void *other, unsigned kind, unsigned *result) {
    static const char *const names[] = {"p2p.read", "p2p.write", "p2p.nvlink", "p2p.atomics", "p2p.pci"};
    return kind < 5 ? of_peer(__func__, one, other, names[kind], result) : INVALID;
}

API int nvmlDeviceOnSameBoard(void *one, void *other, int *result) {
    int gpu, peer, status = gpu_gate(__func__, one, result, &gpu);
    if (!status && !(status = gpu_gate(__func__, other, result, &peer)))
        *result = gpu == peer;
    return status;
}

/* The GPUs no farther than a level, the device itself left out. */
API int nvmlDeviceGetTopologyNearestGpus(void *device, unsigned level, unsigned *count, void **nearest) {
    unsigned found = 0, room = count ? *count : 0, far;
    int gpu, status = gpu_gate(__func__, device, count, &gpu);
    for (int peer = 0; !status && peer < MAX_GPUS; peer++) {
        char value[TEXT];
        if (peer == gpu || !look(value, "gpus.%d.index", peer) ||
            of_peer(__func__, device, handle_of(peer), "ancestor", &far) || far > level)
            continue;
        if (nearest && found < room)
            nearest[found] = handle_of(peer);
        found++;
    }
    if (!status)
        *count = nearest && found > room ? room : found;
    return status;
}

/* ---- processors near it: those of `cpus`, for example 0-23,48-71; all where nothing is said */

static int cpu_mask(int gpu, unsigned size, unsigned long *mask) {
    char value[TEXT];
    long last = sysconf(_SC_NPROCESSORS_CONF) - 1;
    if (!look(value, "gpus.%d.cpus", gpu))
        snprintf(value, sizeof value, "0-%ld", last < 0 ? 0 : last);
    memset(mask, 0, size * sizeof *mask);
    char *rest = value, *word;
    while ((word = strsep(&rest, ","))) {
        unsigned from = 0, to = 0;
        int read = sscanf(word, "%u-%u", &from, &to);
        for (unsigned cpu = from; read >= 1 && cpu <= (read == 2 ? to : from); cpu++)
            if (cpu / (8 * sizeof *mask) < size)
                mask[cpu / (8 * sizeof *mask)] |= 1UL << (cpu % (8 * sizeof *mask));
    }
    return OK;
}

API int nvmlDeviceGetCpuAffinity(void *device, unsigned size, unsigned long *mask) {
    int gpu, status = gpu_gate(__func__, device, mask, &gpu);
    return status ? status : cpu_mask(gpu, size, mask);
}

API int nvmlDeviceGetCpuAffinityWithinScope(void *device, unsigned size, unsigned long *mask, unsigned scope) {
    int gpu, status = scope > 1 ? INVALID : gpu_gate(__func__, device, mask, &gpu);
    return status ? status : cpu_mask(gpu, size, mask);
}

API int nvmlDeviceGetMemoryAffinity(void *device, unsigned size, unsigned long *mask, unsigned scope) {
    unsigned node = 0;
    int gpu, status = scope > 1 ? INVALID : gpu_gate(__func__, device, mask, &gpu);
    if (!status) {
        whole(gpu, "numa_node", &node);
        memset(mask, 0, size * sizeof *mask);
        if (size)
            mask[0] = 1UL << (node % (8 * sizeof *mask));
    }
    return status;
}
