/* The double of NVML, part of nvml.c: what programs ask beside the facts, what a GPU has several of (processes,
 * links, peers), and newer calls. */

API int nvmlSystemGetCudaDriverVersion(int *result) { return nvmlSystemGetCudaDriverVersion_v2(result); }

/* What no GPU of the machine can do is not supported. */
static int confidential(const char *function, const char *key, unsigned *result) {
    char value[TEXT];
    int status = result ? system_text(function, key, value, sizeof value) : INVALID;
    if (!status)
        *result = (unsigned)atoi(value);
    return status;
}

API int nvmlSystemGetConfComputeGpusReadyState(unsigned *result) {
    return confidential(__func__, "confidential.ready", result);
}

typedef struct {
    unsigned environment, feature, dev_tools;
} confidential_state;

API int nvmlSystemGetConfComputeState(confidential_state *state) {
    unsigned feature;
    int status = state ? confidential(__func__, "confidential.on", &feature) : INVALID;
    if (!status)
        *state = (confidential_state){feature ? 2 : 0, feature, 0};
    return status;
}

static int coder(const char *function, void *device, const char *key, unsigned *load, unsigned *period_us) {
    if (period_us)
        *period_us = 100000;
    return whole(function, device, key, load);
}

API int nvmlDeviceGetEncoderUtilization(void *device, unsigned *load, unsigned *period_us) {
    return coder(__func__, device, "utilization.encoder", load, period_us);
}

API int nvmlDeviceGetDecoderUtilization(void *device, unsigned *load, unsigned *period_us) {
    return coder(__func__, device, "utilization.decoder", load, period_us);
}

/* Only Windows has driver models. */
API int nvmlDeviceGetDriverModel(void *device, unsigned *current, unsigned *pending) {
    (void)pending;
    int status = device_gate(__func__, device, current);
    return status ? status : UNSUPPORTED;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process_info;

static int processes(const char *function, void *device, const char *kind, unsigned *count, process_info *infos) {
    char value[TEXT];
    unsigned found = 0, room = count ? *count : 0;
    int gpu = index_of(device), status = device_gate(function, device, count);
    if (!status && look(value, "gpus.%d.processes.code", gpu))
        status = atoi(value);
    int listed = count_of("gpus.%d.%s", gpu, "processes");
    if (!status && listed < 0)
        status = UNSUPPORTED;
    for (int i = 0; !status && i < listed; i++) {
        if (!look(value, "gpus.%d.processes.%d.kind", gpu, i) || strcmp(value, kind))
            continue;
        if (infos && found < room) {
            memset(&infos[found], 0, sizeof *infos);
            infos[found].pid = look(value, "gpus.%d.processes.%d.pid", gpu, i) ? (unsigned)atoi(value) : 0;
            infos[found].memory = ~0ULL;
            if (look(value, "gpus.%d.processes.%d.memory", gpu, i))
                infos[found].memory = strtoull(value, NULL, 10) << 20;
            infos[found].gpu_instance = infos[found].compute_instance = ~0U;
        }
        found++;
    }
    if (!status) {
        *count = found;
        status = found > room || (found && !infos) ? TOO_SMALL : OK;
    }
    return status;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
    return processes(__func__, device, "compute", count, infos);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
    return processes(__func__, device, "graphics", count, infos);
}

API int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
    return processes(__func__, device, "mps", count, infos);
}

static int link_at(const char *function, void *device, unsigned link, const void *result, int *at) {
    char value[TEXT];
    int gpu = index_of(device), status = device_gate(function, device, result);
    if (!status && look(value, "gpus.%d.nvlinks.code", gpu))
        status = atoi(value);
    if (status)
        return status;
    int listed = count_of("gpus.%d.%s", gpu, "nvlinks");
    *at = (int)link;
    if (*at < listed && look(value, "gpus.%d.nvlinks.%d.link", gpu, *at) && (unsigned)atoi(value) == link)
        return OK; /* nearly always */
    for (*at = 0; *at < listed; ++*at)
        if (look(value, "gpus.%d.nvlinks.%d.link", gpu, *at) && (unsigned)atoi(value) == link)
            return OK;
    return listed < 0 ? UNSUPPORTED : INVALID;
}

static int of_link(const char *function, void *device, unsigned link, const char *name, const void *result,
                   char *value) {
    char key[TEXT];
    int at = 0, status = link_at(function, device, link, result, &at);
    snprintf(key, sizeof key, "nvlinks.%d.%s", at, name);
    return status ? status : fetch(index_of(device), key, value);
}

API int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *result) {
    char value[TEXT];
    int status = of_link(__func__, device, link, "state", result, value);
    if (!status)
        *result = (unsigned)atoi(value);
    return status;
}

API int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *result) {
    char value[TEXT];
    int status = of_link(__func__, device, link, "version", result, value);
    if (!status)
        *result = (unsigned)atoi(value);
    return status;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_info *info) {
    char value[TEXT];
    int status = of_link(__func__, device, link, "remote_bus_id", info, value);
    if (!status)
        fill_pci(info, value);
    return status;
}

/* NVLink 5 (Blackwell) has counters of its own, which are fields. */
static int has_own_counters(void *device, unsigned link) {
    char value[TEXT];
    int at = 0;
    return !link_at("", device, link, value, &at) &&
           look(value, "gpus.%d.nvlinks.%d.version", index_of(device), at) && atoi(value) >= 7;
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

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type;
    int status;
    union {
        int whole;
        unsigned long long count;
    } value;
} field_value;

enum { COUNT_TYPE = 3, WHOLE_TYPE = 5, TLIMIT = 193, RECOVERIES = 215 };

/* A number that a driver doesn't know is no valid argument; only the field's own status says so. */
static void answer_field(void *device, field_value *field) {
    memset(&field->value, 0xaa, sizeof field->value);
    field->status = INVALID;
#ifndef OLD
    static const char *const limits[] = {"shutdown", "slowdown", "memory", "gpu"};
    char key[TEXT], value[TEXT];
    if (field->field >= TLIMIT && field->field < TLIMIT + 4) {
        snprintf(key, sizeof key, "temperature.tlimit.%s", limits[field->field - TLIMIT]);
        field->type = WHOLE_TYPE;
        if (!(field->status = fetch(index_of(device), key, value)))
            field->value.whole = atoi(value);
    } else if (field->field == RECOVERIES) {
        field->type = COUNT_TYPE;
        field->status = of_link(__func__, device, field->scope, "errors.recovery", field, value);
        if (!field->status && !has_own_counters(device, field->scope))
            field->status = UNSUPPORTED;
        if (!field->status)
            field->value.count = strtoull(value, NULL, 10);
    }
#else
    (void)device;
#endif
}

API int nvmlDeviceGetFieldValues(void *device, int count, field_value *fields) {
    int status = device_gate(__func__, device, fields);
    for (int i = 0; !status && i < count; i++)
        answer_field(device, &fields[i]);
    return status;
}

/* clusterUuid, status, cliqueId, state; the newer structure has a version before and a health mask behind. */
typedef struct {
    uint8_t cluster[16];
    int status;
    uint32_t clique;
    uint32_t state;
} fabric_info;

static int fabric(const char *function, void *device, fabric_info *info) {
    double state, status;
    int answer = number(function, device, "fabric.state", &state);
    if (!answer)
        answer = number(function, device, "fabric.status", &status);
    if (!answer) {
        memset(info, 0, sizeof *info);
        info->state = (uint32_t)state;
        info->status = (int)status;
        char value[TEXT];
        unsigned byte;
        if (!fetch(index_of(device), "fabric.cluster", value))
            for (int i = 0; i < 16 && sscanf(value + 2 * i, "%2x", &byte) == 1; i++)
                info->cluster[i] = (uint8_t)byte;
        if (!fetch(index_of(device), "fabric.clique", value))
            info->clique = (uint32_t)strtoul(value, NULL, 10);
    }
    return answer;
}

API int nvmlDeviceGetGpuFabricInfo(void *device, fabric_info *info) { return fabric(__func__, device, info); }

static int of_peer(const char *function, void *one, void *other, const char *name, unsigned *result) {
    char key[TEXT], value[TEXT];
    int gpu = index_of(one), status = device_gate(function, one, result);
    if (!status)
        status = device_gate(function, other, result);
    for (int i = 0; !status && i < count_of("gpus.%d.%s", gpu, "peers"); i++)
        if (look(value, "gpus.%d.peers.%d.index", gpu, i) && atoi(value) == index_of(other)) {
            snprintf(key, sizeof key, "peers.%d.%s", i, name);
            if (!(status = fetch(gpu, key, value)))
                *result = (unsigned)atoi(value);
            return status;
        }
    return status ? status : UNSUPPORTED;
}

API int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *result) {
    return of_peer(__func__, one, other, "ancestor", result);
}

API int nvmlDeviceGetP2PStatus(void *one, void *other, unsigned kind, unsigned *result) {
    static const char *const names[] = {"p2p.read", "p2p.write", "p2p.nvlink", "p2p.atomics", "p2p.pci"};
    return kind < 5 ? of_peer(__func__, one, other, names[kind], result) : INVALID;
}

#ifndef OLD /* what came with later drivers */

API int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *result) {
    return reasons(__func__, device, result);
}

typedef struct {
    unsigned version;
    int sensor, temperature;
} temperature_info;

typedef struct {
    unsigned version;
    fabric_info info;
    uint32_t health;
} fabric_info_v2;

API int nvmlDeviceGetTemperatureV(void *device, temperature_info *info) {
    unsigned value = 0;
    int status = info->version == 0x100000C ? whole(__func__, device, "temperature.gpu", &value)
                                            : VERSION_MISMATCH;
    if (!status)
        info->temperature = (int)value;
    return status;
}

API int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_info_v2 *versioned) {
    int status = versioned->version == 0x02000024 ? fabric(__func__, device, &versioned->info) : VERSION_MISMATCH;
    char value[TEXT];
    if (!status)
        versioned->health = fetch(index_of(device), "fabric.health", value) ? 0 : (uint32_t)atoi(value);
    return status;
}

typedef struct {
    unsigned version;
    int margin;
} margin_info;

API int nvmlDeviceGetMarginTemperature(void *device, margin_info *info) {
    double value;
    if (!info || info->version != 0x1000008)
        return info ? VERSION_MISMATCH : INVALID;
    int status = number(__func__, device, "temperature.margin", &value);
    if (!status)
        info->margin = (int)value;
    return status;
}

#endif
