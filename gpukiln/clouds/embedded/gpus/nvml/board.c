/* The double of NVML: what a board is and carries (addresses, inforom, fans, engines), and older forms of answers
 * that other files give. Layouts: nvml.h. */
#include "double.h"

#define VERSION(type, number) ((unsigned)sizeof(type) | (number) << 24)

/* A structure that names its version; the gate decides first where there is no such device. */
#define VERSIONED(result, type, number) \
    if (!(result) || (result)->version != VERSION(type, number)) \
    return (result) ? VERSION_MISMATCH : INVALID

/* ---- who it is and where */

/* The first forms of the address: 16 bytes of text, four numbers, and in the second form the subsystem. */
typedef struct {
    char bus_id[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
} pci_info_v2;

static int old_pci(const char *function, void *device, pci_info_v2 *info, size_t size) {
    pci_info whole_info;
    int status = info ? pci_of(function, device, &whole_info) : INVALID;
    if (!status)
        memcpy(info, &whole_info, size); /* the newest form begins with them */
    return status;
}

API int nvmlDeviceGetPciInfo(void *device, pci_info_v2 *info) {
    return old_pci(__func__, device, info, offsetof(pci_info_v2, pci_subsystem));
}

API int nvmlDeviceGetPciInfo_v2(void *device, pci_info_v2 *info) {
    return old_pci(__func__, device, info, sizeof *info);
}

/* domain:bus:device in one number, as "Board ID" of `nvidia-smi -q` has it; GPUs of one board share it. */
API int nvmlDeviceGetBoardId(void *device, unsigned *result) {
    pci_info info;
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status && whole(gpu, "board_id", result) && !(status = pci_of(__func__, device, &info)))
        *result = info.domain << 16 | info.bus << 8 | info.device;
    return status;
}

API int nvmlDeviceGetInforomVersion(void *device, int object, char *result, unsigned size) {
    static const char *const names[] = {"inforom_objects.oem", "inforom_objects.ecc", "inforom_objects.power"};
    return object < 0 || object > 2 ? INVALID : asked_text(__func__, device, names[object], result, size);
}

API int nvmlDeviceValidateInforom(void *device) {
    char value[TEXT];
    int gpu, status = gpu_gate(__func__, device, device, &gpu);
    return status ? status : fetch(gpu, "inforom", value);
}

/* ---- fans: all turn alike */

static int of_fan(const char *function, void *device, unsigned fan, const char *key, unsigned *result) {
    unsigned fans;
    int gpu, status = gpu_gate(function, device, result, &gpu);
    if (!status && !(status = whole(gpu, "fans", &fans)))
        status = fan < fans ? whole(gpu, key, result) : INVALID;
    return status;
}

API int nvmlDeviceGetFanSpeed_v2(void *device, unsigned fan, unsigned *result) {
    return of_fan(__func__, device, fan, "fan", result);
}

/* ---- engines */

/* Nothing here encodes, decodes or captures frames: no session, and so no frames of one. */
API int nvmlDeviceGetEncoderStats(void *device, unsigned *sessions, unsigned *fps, unsigned *latency_us) {
    unsigned percent;
    int status = fps && latency_us ? asked_number(__func__, device, "utilization.encoder", &percent) : INVALID;
    if (!status && !sessions)
        return INVALID;
    if (!status)
        *sessions = *fps = *latency_us = 0;
    return status;
}

static int no_sessions(const char *function, void *device, unsigned *count) {
    unsigned percent;
    int status = count ? asked_number(function, device, "utilization.encoder", &percent) : INVALID;
    if (!status)
        *count = 0;
    return status;
}

API int nvmlDeviceGetEncoderSessions(void *device, unsigned *count, void *sessions) {
    (void)sessions;
    return no_sessions(__func__, device, count);
}

API int nvmlDeviceGetFBCSessions(void *device, unsigned *count, void *sessions) {
    (void)sessions;
    return no_sessions(__func__, device, count);
}

API int nvmlDeviceGetFBCStats(void *device, unsigned *sessions_fps_latency) {
    int status = no_sessions(__func__, device, sessions_fps_latency);
    if (!status)
        sessions_fps_latency[1] = sessions_fps_latency[2] = 0;
    return status;
}

/* ---- accounting: it can be on, and no process that has ended is remembered */

API int nvmlDeviceGetAccountingMode(void *device, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status && whole(gpu, "accounting", result))
        *result = 0;
    return status;
}

API int nvmlDeviceGetAccountingBufferSize(void *device, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status)
        *result = 4000; /* every capture of gpu_boards.yaml's sources */
    return status;
}

API int nvmlDeviceGetAccountingPids(void *device, unsigned *count, unsigned *pids) {
    int gpu, status = gpu_gate(__func__, device, count, &gpu);
    (void)pids;
    if (!status)
        *count = 0;
    return status;
}

API int nvmlDeviceGetAccountingStats(void *device, unsigned pid, void *stats) {
    unsigned mode;
    int status = stats ? nvmlDeviceGetAccountingMode(device, &mode) : INVALID;
    (void)pid;
    return status ? status : mode ? NOT_FOUND : UNSUPPORTED;
}

/* ---- protected memory of confidential computing, which is off: none */

typedef struct {
    unsigned long long total, free, used;
} plain_memory;

/* ---- parts of the library that answer for the whole machine */

API int nvmlSystemGetHicVersion(unsigned *count, void *entries) {
    int status = count ? system_gate(__func__) : INVALID;
    (void)entries;
    if (!status)
        *count = 0; /* host interface cards belong to S-class units */
    return status;
}

API int nvmlDeviceGetGpuInstancePossiblePlacements(void *device, unsigned id, void *answer, unsigned *count) {
    extern int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *, unsigned, void *, unsigned *);
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, answer, count);
}

typedef struct {
    void *device, *instance;
    unsigned id, kind, start, size; /* the last two: since the second form */
} compute_instance_info;

API int nvmlComputeInstanceGetInfo(void *handle, compute_instance_info *info) {
    extern int nvmlComputeInstanceGetInfo_v2(void *, compute_instance_info *);
    compute_instance_info answer;
    int status = info ? nvmlComputeInstanceGetInfo_v2(handle, &answer) : INVALID;
    if (!status)
        memcpy(info, &answer, offsetof(compute_instance_info, start));
    return status;
}

#if DRIVER >= 495

API int nvmlDeviceGetBusType(void *device, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status)
        *result = 2; /* NVML_BUS_TYPE_PCIE */
    return status;
}

#endif
#if DRIVER >= 510

/* A number of NVML_PCIE_LINK_MAX_SPEED_*, which is the generation. */
API int nvmlDeviceGetPcieLinkMaxSpeed(void *device, unsigned *result) {
    return asked_number(__func__, device, "pcie.max_gen", result);
}

/* Mains: machines with a battery are none of those that the double stands for. */
API int nvmlDeviceGetPowerSource(void *device, unsigned *result) {
    int gpu, status = gpu_gate(__func__, device, result, &gpu);
    if (!status)
        *result = 0;
    return status;
}

#endif
#if DRIVER >= 515

static unsigned lane_speed(unsigned generation) { /* MB/s as nvml.h's NVML_PCIE_LINK_MAX_SPEED_* name them */
    static const unsigned speeds[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
    return generation < sizeof speeds / sizeof *speeds ? speeds[generation] : 0;
}

API int nvmlDeviceGetPcieSpeed(void *device, unsigned *result) {
    extern int nvmlDeviceGetCurrPcieLinkGeneration(void *, unsigned *);
    unsigned generation;
    int status = result ? nvmlDeviceGetCurrPcieLinkGeneration(device, &generation) : INVALID;
    if (!status)
        *result = lane_speed(generation);
    return status;
}

typedef struct {
    unsigned flags;
    struct {
        unsigned present, percent, upper, lower;
    } domain[8]; /* GPU, frame buffer, video, bus (NVML_GPU_UTILIZATION_DOMAIN_*) */
} dynamic_pstates;

API int nvmlDeviceGetDynamicPstatesInfo(void *device, dynamic_pstates *info) {
    extern int nvmlDeviceGetUtilizationRates(void *, unsigned *);
    unsigned gpu_and_memory[2];
    int status = info ? nvmlDeviceGetUtilizationRates(device, gpu_and_memory) : INVALID;
    if (status)
        return status;
    memset(info, 0, sizeof *info);
    for (int i = 0; i < 2; i++) {
        info->domain[i].present = 1;
        info->domain[i].percent = gpu_and_memory[i];
    }
    return OK;
}

#endif
#if DRIVER >= 520

API int nvmlDeviceGetTargetFanSpeed(void *device, unsigned fan, unsigned *result) {
    return of_fan(__func__, device, fan, "fan", result);
}

#endif
#if DRIVER >= 525

API int nvmlDeviceGetFanControlPolicy_v2(void *device, unsigned fan, unsigned *result) {
    int status = of_fan(__func__, device, fan, "fan", result);
    if (!status)
        *result = 0; /* by temperature: nobody set it */
    return status;
}

#endif
#if DRIVER >= 535

API int nvmlDeviceGetModuleId(void *device, unsigned *result) {
    return asked_number(__func__, device, "module_id", result);
}

API int nvmlDeviceGetConfComputeProtectedMemoryUsage(void *device, plain_memory *info) {
    int gpu, status = gpu_gate(__func__, device, info, &gpu);
    if (!status)
        *info = (plain_memory){0, 0, 0};
    return status;
}

typedef struct {
    unsigned processor, gpus;
} confidential_capabilities;

API int nvmlSystemGetConfComputeCapabilities(confidential_capabilities *answer) {
    char value[TEXT];
    int status = answer ? system_gate(__func__) : INVALID;
    if (!status && !look(value, "confidential.on"))
        status = look(value, "confidential.on.code") ? atoi(value) : UNSUPPORTED;
    if (!status)
        *answer = (confidential_capabilities){atoi(value) != 0, atoi(value) != 0};
    return status;
}

#endif
#if DRIVER >= 545

API int nvmlDeviceGetC2cModeInfoV(void *device, unsigned *enabled) {
    return asked_number(__func__, device, "c2c", enabled);
}

#endif
#if DRIVER >= 550

typedef struct {
    unsigned version, domain, bus, device, pci_device, pci_subsystem, base_class, sub_class;
    char bus_id[32];
} pci_info_ext;

API int nvmlDeviceGetPciInfoExt(void *device, pci_info_ext *info) {
    pci_info plain;
    unsigned class = 0x302;
    int gpu, status = gpu_gate(__func__, device, info, &gpu);
    if (status)
        return status;
    VERSIONED(info, pci_info_ext, 1);
    if ((status = pci_of(__func__, device, &plain)))
        return status;
    whole(gpu, "pci_class", &class);
    *info = (pci_info_ext){info->version,        plain.domain, plain.bus,   plain.device,
                           plain.pci_device, plain.pci_subsystem, class >> 8, class & 0xff, ""};
    memcpy(info->bus_id, plain.bus_id, sizeof info->bus_id);
    return OK;
}

typedef struct {
    unsigned version, environment, feature, dev_tools, multi_gpu;
} confidential_settings;

API int nvmlSystemGetConfComputeSettings(confidential_settings *answer) {
    extern int nvmlSystemGetConfComputeState(unsigned *);
    unsigned state[3];
    VERSIONED(answer, confidential_settings, 1);
    int status = nvmlSystemGetConfComputeState(state);
    if (!status)
        *answer = (confidential_settings){answer->version, state[0], state[1], state[2], 0};
    return status;
}

#endif
#if DRIVER >= 555

typedef struct {
    unsigned version, mask;
} capabilities;

/* Its one bit is extended GPU memory; "EGM: disabled" in every capture, GB200's too. */
API int nvmlDeviceGetCapabilities(void *device, capabilities *answer) {
    int gpu, status = gpu_gate(__func__, device, answer, &gpu);
    if (status)
        return status;
    VERSIONED(answer, capabilities, 1);
    answer->mask = 0;
    return OK;
}

#endif
#if DRIVER >= 560

typedef struct {
    unsigned version;
    char branch[80];
} driver_branch;

/* As the driver's own sources name their branch (open-gpu-kernel-modules: nvBldVer.h, NV_BUILD_BRANCH): r580_00. */
API int nvmlSystemGetDriverBranch(driver_branch *answer, unsigned size) {
    char value[TEXT], text[80];
    int status = answer ? system_gate(__func__) : INVALID;
    if (status)
        return status;
    VERSIONED(answer, driver_branch, 1);
    if (!look(value, "driver"))
        return look(value, "driver.code") ? atoi(value) : UNSUPPORTED;
    snprintf(text, sizeof text, "r%d_00", atoi(value));
    return copy(answer->branch, size < sizeof answer->branch ? size : (unsigned)sizeof answer->branch, text);
}

#endif
#if DRIVER >= 570

/* Both versions are as long; the first calls its serial a rack's and has no more than this one. */
typedef struct {
    unsigned version;
    unsigned char guid[16], chassis[16], slot, tray, host, peer_type, module;
} platform_info;

/* Where it is in a rack: only boards of such machines are asked it with success. */
API int nvmlDeviceGetPlatformInfo(void *device, platform_info *info) {
    char value[TEXT];
    unsigned slot, tray, host = 0, peer = 0, module = 0, byte;
    int gpu, status = gpu_gate(__func__, device, info, &gpu);
    if (status)
        return status;
    if (info->version != VERSION(platform_info, 1) && info->version != VERSION(platform_info, 2))
        return VERSION_MISMATCH;
    if ((status = whole(gpu, "platform.slot", &slot)) || (status = whole(gpu, "platform.tray", &tray)))
        return status;
    whole(gpu, "platform.host", &host);
    whole(gpu, "platform.peer_type", &peer);
    whole(gpu, "module_id", &module);
    memset(info->guid, 0, sizeof info->guid);
    memset(info->chassis, 0, sizeof info->chassis);
    if (!fetch(gpu, "platform.guid", value))
        for (int i = 0; i < 16 && sscanf(value + 2 * i, "%2x", &byte) == 1; i++)
            info->guid[i] = (unsigned char)byte;
    if (!fetch(gpu, "platform.chassis", value))
        memcpy(info->chassis, value, strlen(value) < 16 ? strlen(value) : 16);
    info->slot = (unsigned char)slot;
    info->tray = (unsigned char)tray;
    info->host = (unsigned char)host;
    info->peer_type = (unsigned char)peer;
    info->module = (unsigned char)module;
    return OK;
}

#endif
#if DRIVER >= 575

typedef struct {
    unsigned version, kind; /* 1 text, 2 bytes */
    union {
        char text[41];
        unsigned char bytes[16];
    } value;
} uuid_value;

API int nvmlDeviceGetHandleByUUIDV(const uuid_value *uuid, void **device) {
    extern int nvmlDeviceGetHandleByUUID(const char *, void **);
    char text[64] = "GPU-";
    int status = uuid && device ? system_gate(__func__) : INVALID;
    if (status)
        return status;
    VERSIONED(uuid, uuid_value, 1);
    if (uuid->kind == 1)
        snprintf(text, sizeof text, "%.41s", uuid->value.text);
    else if (uuid->kind == 2)
        for (int i = 0; i < 16; i++)
            sprintf(text + strlen(text), "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                    uuid->value.bytes[i]);
    else
        return INVALID;
    return nvmlDeviceGetHandleByUUID(text, device);
}

#endif
#if DRIVER >= 580

typedef struct {
    unsigned version, value;
} versioned_number;

/* 0 none, 1 heterogeneous memory management, 2 address translation services. */
API int nvmlDeviceGetAddressingMode(void *device, versioned_number *mode) {
    int gpu, status = gpu_gate(__func__, device, mode, &gpu);
    if (status)
        return status;
    VERSIONED(mode, versioned_number, 1);
    return whole(gpu, "addressing_mode", &mode->value);
}

typedef struct {
    unsigned version;
    unsigned long long value;
} pdi;

API int nvmlDeviceGetPdi(void *device, pdi *answer) {
    char value[TEXT];
    int gpu, status = gpu_gate(__func__, device, answer, &gpu);
    if (status)
        return status;
    VERSIONED(answer, pdi, 1);
    if (!(status = fetch(gpu, "pdi", value)))
        answer->value = strtoull(value, NULL, 0);
    return status;
}

typedef struct {
    unsigned version, channel_pending, tpc_pending;
} repair_status;

API int nvmlDeviceGetRepairStatus(void *device, repair_status *answer) {
    int gpu, status = gpu_gate(__func__, device, answer, &gpu);
    if (status)
        return status;
    VERSIONED(answer, repair_status, 1);
    if (!(status = whole(gpu, "repair.channel", &answer->channel_pending)))
        status = whole(gpu, "repair.tpc", &answer->tpc_pending);
    return status;
}

/* As nvmlDeviceGetGpuInstanceProfileInfoV, by the number that `nvidia-smi mig -lgip` shows. */
API int nvmlDeviceGetGpuInstanceProfileInfoByIdV(void *device, unsigned id, void *info) {
    extern int nvmlDeviceGetGpuInstanceProfileInfoV(void *, unsigned, void *);
    char key[KEY];
    unsigned answer, kind;
    int gpu, status = gpu_gate(__func__, device, info, &gpu);
    for (int at = 0, listed = status ? 0 : list_length(gpu, "mig.profiles"); at < listed; at++) {
        snprintf(key, sizeof key, "mig.profiles.%d.id", at);
        if (whole(gpu, key, &answer) || answer != id)
            continue;
        snprintf(key, sizeof key, "mig.profiles.%d.number", at);
        return whole(gpu, key, &kind) ? UNSUPPORTED : nvmlDeviceGetGpuInstanceProfileInfoV(device, kind, info);
    }
    return status ? status : UNSUPPORTED;
}

#endif
#if DRIVER >= 590

API int nvmlDeviceGetUnrepairableMemoryFlag_v1(void *device, unsigned *result) {
    return asked_number(__func__, device, "unrepairable_memory", result);
}

#endif
