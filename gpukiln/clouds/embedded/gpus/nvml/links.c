/* The double of NVML: how GPUs are linked (NVLink, PCIe, fabric). */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "double.h"

int link_at(const char *function, void *device, unsigned link, const void *result, int *gpu, int *at) {
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

int of_link(const char *function, void *device, unsigned link, const char *name, const void *result,
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
    for (int gpu = 0; gpu < MAX_GPUS && peer < 0 && look(its, "gpus.%d.bus_id", gpu); gpu++)
        if (!strcasecmp(its, value))
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
int has_own_counters(void *device, unsigned link) {
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

#if DRIVER >= 525

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

#endif

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
    unsigned found = 0, capacity = count ? *count : 0, far;
    int gpu, status = gpu_gate(__func__, device, count, &gpu);
    for (int peer = 0; !status && peer < MAX_GPUS; peer++) {
        char value[TEXT];
        if (peer == gpu || !look(value, "gpus.%d.index", peer) ||
            of_peer(__func__, device, handle_of(peer), "ancestor", &far) || far > level)
            continue;
        if (nearest && found < capacity)
            nearest[found] = handle_of(peer);
        found++;
    }
    if (!status)
        *count = nearest && found > capacity ? capacity : found;
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

/* For the calling thread. */
static int bind_to(const unsigned long *mask) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (unsigned cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (mask[cpu / (8 * sizeof *mask)] >> cpu % (8 * sizeof *mask) & 1)
            CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) ? UNKNOWN : OK;
}

API int nvmlDeviceSetCpuAffinity(void *device) {
    unsigned long mask[CPU_SETSIZE / (8 * sizeof(unsigned long))];
    int gpu, status = gpu_gate(__func__, device, device, &gpu);
    return status || (status = cpu_mask(gpu, sizeof mask / sizeof *mask, mask)) ? status : bind_to(mask);
}

API int nvmlDeviceClearCpuAffinity(void *device) {
    unsigned long mask[CPU_SETSIZE / (8 * sizeof(unsigned long))];
    int gpu, status = gpu_gate(__func__, device, device, &gpu);
    memset(mask, 0xff, sizeof mask);
    return status ? status : bind_to(mask);
}

/* The GPUs that a processor is near to. */
API int nvmlSystemGetTopologyGpuSet(unsigned cpu, unsigned *count, void **devices) {
    unsigned long mask[CPU_SETSIZE / (8 * sizeof(unsigned long))];
    char value[TEXT];
    unsigned near = 0, size = count ? *count : 0;
    int status = count && cpu < CPU_SETSIZE ? system_gate(__func__) : INVALID;
    for (int gpu = 0; !status && gpu < MAX_GPUS; gpu++) {
        if (!look(value, "gpus.%d.index", gpu) || cpu_mask(gpu, sizeof mask / sizeof *mask, mask) ||
            !(mask[cpu / (8 * sizeof *mask)] >> cpu % (8 * sizeof *mask) & 1))
            continue;
        if (devices && near < size)
            devices[near] = handle_of(gpu);
        near++;
    }
    if (!status)
        *count = devices && near > size ? size : near;
    return status;
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
        if (whole(gpu, "memory_node", &node))
            whole(gpu, "numa_node", &node); /* a machine whose GPUs are NUMA nodes themselves */
        memset(mask, 0, size * sizeof *mask);
        if (size)
            mask[0] = 1UL << (node % (8 * sizeof *mask));
    }
    return status;
}
