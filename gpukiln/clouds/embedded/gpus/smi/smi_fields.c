/* The stand-in nvidia-smi: its values, one line for each. Names, their order, headers, units and forms of the
 * values: --help-query-gpu and --query-gpu of 535.129.03 (a public log of an A100), and of 590.48.01, 595.80 and
 * 610.57.04 (captures of utkuozdemir/nvidia_gpu_exporter). Branches between those: the first whose captured `-q -x`
 * (570.148, 580.105: NVIDIA/k8s-test-infra) has the value, and 550 where 570 has it and nothing older is known. */
#include "smi.h"

#include <sys/time.h>
#include <time.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* of the tables: what is left out is 0 */

typedef struct field field;
struct field {
    const char *name, *alias, *unit;
    int since, until; /* a branch from which on it is gone; negative: from which on it is deprecated */
    int (*read)(const gpu *, const field *, char *);
    const char *function;
    unsigned a, b;      /* which of the function's values; what it is asked about */
    const char *format; /* words|by|number, or printf's: of thousandths with a point, of thousands after a slash */
};

#define INTERNAL 9999 /* since: a value that can't be queried; -q and the tables show it */
#define READ(name) static int name(const gpu *one, const field *of, char *text)
#define ASK(...) nvml(of->function)(one->handle, __VA_ARGS__)

static int show(int status, const char *format, long long value, char *text) {
    const char *at = format ? format : "%lld";
    if (strchr(at, '|')) {
        for (; value > 0 && strchr(at, '|'); value--)
            at = strchr(at, '|') + 1;
        snprintf(text, TEXT, "%.*s", value ? 7 : (int)strcspn(at, "|"), value ? "Unknown" : at);
    } else if (strchr(at, '.'))
        snprintf(text, TEXT, at, (double)value / 1000);
    else
        snprintf(text, TEXT, *at == '/' ? at + 1 : at, *at == '/' ? value / 1000 : value);
    return status;
}

READ(text_of) { return ASK(text, of->a); }

/* Number `a` of those that a function gives. Whether they are parameters or a structure is the same to it: none
 * has more than five, and surplus arguments of a call do no harm on the architectures that NVIDIA's driver has. */
READ(number_of) {
    unsigned values[16] = {0};
    int status = ASK(values, values + 1, values + 2, values + 3, values + 4);
    return show(status, of->format, values[of->a], text);
}

/* About `a`: a kind of clock, of throughput, of temperature. */
READ(number_about) {
    unsigned value = 0;
    int status = ASK(of->a, &value);
    return show(status, of->format, value, text);
}

/* Of a structure of long numbers, the first of which may be a version `b`; MiB without a format. */
READ(long_of) {
    unsigned long long values[16] = {of->b};
    int status = ASK(values);
    return show(status, of->format, (long long)(of->format ? values[of->a] : values[of->a] >> 20), text);
}

/* Of a structure that begins with its version `b`; from the 32nd on, of a second one. */
READ(versioned_of) {
    int values[64] = {(int)of->b};
    values[32] = values[0];
    int status = ASK(values, values + 32);
    return show(status, of->format, values[of->a], text);
}

/* NVML_FI_… number `a` of scope `b`. */
READ(nvml_field_of) {
    long long value = 0;
    int status = field_number(one->handle, of->a, of->b, &value);
    return show(status, of->format, value, text);
}

/* Drivers from 570 on round up: the parts of a T4 add up to one MiB more (captures); those of 535 to less. */
READ(memory_of) {
    struct {
        unsigned version;
        unsigned long long total, reserved, free, used;
    } info = {.version = 0x02000028};
    struct {
        unsigned long long total, free, used;
    } old;
    int status = nvml("nvmlDeviceGetMemoryInfo_v2")(one->handle, &info);
    if (unsupported(status) && of->a != 1 && !(status = nvml("nvmlDeviceGetMemoryInfo")(one->handle, &old))) {
        info.total = old.total;
        info.free = old.free;
        info.used = old.used;
    }
    unsigned long long values[] = {info.total, info.reserved, info.used, info.free};
    return show(status, NULL, (long long)((values[of->a] + (branch() < 570 ? 0 : (1 << 20) - 1)) >> 20), text);
}

READ(pci_of) {
    pci_info info = {0};
    int status = nvml("nvmlDeviceGetPciInfo_v3")(one->handle, &info);
    unsigned values[] = {info.domain, info.bus, info.device, info.pci_device, info.pci_subsystem};
    if (of->format)
        return show(status, of->format, values[of->a], text);
    strcpy(text, info.bus_id);
    return status;
}

/* "not currently supported" with MIG, says --help-query-gpu. */
READ(load_of) { return is_enabled(one, "mig.mode.current") ? UNSUPPORTED : number_of(one, of, text); }

/* At location `a`, or in all; b: 2 for uncorrected, 1 for aggregate. */
READ(ecc_of) {
    unsigned long long errors = 0;
    unsigned enabled = 0, pending, type = of->b >> 1, counter = of->b & 1;
    int status = nvml("nvmlDeviceGetEccMode")(one->handle, &enabled, &pending);
    if (!status && !enabled)
        return UNSUPPORTED;
    if (status && !unsupported(status))
        return status;
    if (of->a == ALL)
        status = nvml("nvmlDeviceGetTotalEccErrors")(one->handle, type, counter, &errors);
    else
        status = nvml("nvmlDeviceGetMemoryErrorCounter")(one->handle, type, counter, of->a, &errors);
    return show(status, NULL, (long long)errors, text);
}

READ(reasons_of) {
    unsigned long long mask = 0;
    char older[64];
    int status = ASK(&mask);
    if (unsupported(status)) { /* their name before 535 */
        snprintf(older, sizeof older, "%.*sThrottleReasons", (int)(strlen(of->function) - 12), of->function);
        status = nvml(older)(one->handle, &mask);
    }
    return of->a ? show(status, "Not Active|Active", !!(mask & of->a), text)
                 : show(status, "0x%016llX", (long long)mask, text);
}

/* From Ampere on, 550 knows SRAM's errors by kind and source (4080 Super and T4 under 595). */
READ(sram_of) {
    unsigned architecture = 0;
    int status = ASK(&architecture);
    (void)text;
    return status ? status : architecture > 6 && branch() >= 550 ? OK : UNSUPPORTED;
}

READ(capability_of) {
    int major = 0, minor = 0;
    int status = ASK(&major, &minor);
    sprintf(text, "%d.%d", major, minor);
    return status;
}

/* What the fabric has no value of is N/A without brackets in a query too. */
READ(fabric_of) {
    struct {
        unsigned version;
        unsigned char cluster[16];
        int status;
        unsigned clique;
        unsigned char state;
        unsigned health;
        unsigned char summary;
    } info = {.version = 0x03000028};
    int status = nvml("nvmlDeviceGetGpuFabricInfoV")(one->handle, &info);
    if (unsupported(status)) {
        info.version = 0x02000024;
        info.summary = 0;
        status = nvml("nvmlDeviceGetGpuFabricInfoV")(one->handle, &info);
    }
    if (unsupported(status))
        status = nvml("nvmlDeviceGetGpuFabricInfo")(one->handle, info.cluster);
    strcpy(text, "N/A");
    if (unsupported(status) || (!status && (!info.state || (of->a && info.state != 3))))
        return OK;
    switch (of->a) {
    case 0: return show(status, "N/A|Not Started|In Progress|Completed", info.state, text);
    case 1: strcpy(text, error_text(info.status)); return status;
    case 2: return show(status, NULL, info.clique, text);
    case 3:
        for (int i = 0, at = 0; i < 16; i++)
            at += sprintf(text + at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", info.cluster[i]);
        return status;
    case 4: return show(status, of->format, info.summary, text);
    default: return show(status, of->format, info.health >> (of->a - 8) & of->b, text);
    }
}

/* -q has N/A where no fabric is (H100, L40S) and for a slot that isn't known (B200); a query has the numbers. */
READ(platform_of) {
    unsigned char raw[44] = {0x2c, 0, 0, 2}, *guid = raw + 4;
    int status = nvml("nvmlDeviceGetPlatformInfo")(one->handle, raw), known = 0;
    for (int i = 0; i < 16; i++)
        known |= guid[i];
    if (!status && of->since == INTERNAL && (!known || (of->a >= 36 && of->a < 38 && (raw[of->a] + 1) % 256 < 2)))
        return UNSUPPORTED;
    if (of->a == 20)
        sprintf(text, "%.16s", (char *)raw + 20);
    else if (of->a == 4)
        for (int i = 0, at = sprintf(text, "0x"); i < 8; i++)
            at += sprintf(text + at, "%02x", guid[i]);
    else
        return show(status, of->format, raw[of->a], text);
    return status;
}

READ(inforom_of) { return nvml("nvmlDeviceGetInforomVersion")(one->handle, of->a, text, 16); }

READ(checksum_of) { return show(ASK(0), "valid|", 0, text); }

/* Before a driver has the call, no GPU of EC2 has a mode. */
READ(addressing_of) {
    int status = versioned_of(one, of, text);
    return unsupported(status) ? show(OK, of->format, 0, text) : status;
}

READ(retired_of) {
    unsigned count = 0;
    int status = nvml("nvmlDeviceGetRetiredPages")(one->handle, of->a, &count, NULL);
    return show(status == 7 ? OK : status, NULL, count, text); /* 7: there are some, and no space for them */
}

READ(flush_of) {
    unsigned long long when = 0;
    unsigned long length = 0;
    int status = nvml("nvmlDeviceGetLastBBXFlushTime")(one->handle, &when, &length);
    time_t seconds = (time_t)(when / 1000000);
    if (of->a)
        return show(status, NULL, (long long)length, text);
    size_t end = strftime(text, 32, "%Y/%m/%d %H:%M:%S", localtime(&seconds));
    sprintf(text + end, ".%03llu", when / 1000 % 1000);
    return status;
}

READ(atomics_of) {
    static const char *const names[] = {"FETCHADD_32", "FETCHADD_64", "SWAP_32", "SWAP_64",
                                        "CAS_32",      "CAS_64",      "CAS_128"};
    long long mask = 0;
    int status = field_number(one->handle, of->a, 0, &mask);
    *text = 0;
    for (int i = 0; i < 7; i++)
        if (mask >> i & 1)
            strcat(strcat(text, names[i]), " ");
    return status || *text ? status : UNSUPPORTED;
}

READ(index_of) { return show(OK, of->format, one->index, text); }

READ(count_of) {
    unsigned count = 0;
    (void)one;
    int status = nvml(of->function)(&count);
    return show(status, NULL, count, text);
}

READ(driver_of) {
    (void)of, (void)one;
    return driver_version(text);
}

READ(time_of) {
    struct timeval now;
    (void)of, (void)one;
    gettimeofday(&now, NULL);
    size_t length = strftime(text, 32, "%Y/%m/%d %H:%M:%S", localtime(&now.tv_sec));
    sprintf(text + length, ".%03ld", (long)now.tv_usec / 1000);
    return OK;
}

READ(nothing) {
    (void)of, (void)one;
    *text = 0;
    return UNSUPPORTED;
}

READ(memory_heat_of) {
    if (unsupported(nvml_field_of(one, of, text)))
        strcpy(text, "N/A"); /* without brackets */
    return OK;
}

#define ON "Disabled|Enabled"
#define YES "No|Yes"
#define HEALTH "N/A|True|False"
#define PEERS "Direct Connected|Switch Connected"
#define PCI_EXT versioned_of, "nvmlDeviceGetPciInfoExt"
#define REASON(what, mask)                                                                                            \
    {"clocks_event_reasons." what, "clocks_throttle_reasons." what, "", 0, 0, reasons_of,                              \
     "nvmlDeviceGetCurrentClocksEventReasons", mask}
#define COUNTER(what, number)                                                                                         \
    {"clocks_event_reasons_counters." what, 0, "us", 580, 0, nvml_field_of, 0, number, 0, "/%lld"}
#define ECC(what, bits)                                                                                               \
    {"ecc.errors." what ".device_memory", 0, "", 0, 0, ecc_of, 0, 2, bits},                                            \
        {"ecc.errors." what ".dram", 0, "", 0, 0, ecc_of, 0, 2, bits},                                                 \
        {"ecc.errors." what ".register_file", 0, "", 0, 0, ecc_of, 0, 3, bits},                                        \
        {"ecc.errors." what ".l1_cache", 0, "", 0, 0, ecc_of, 0, 0, bits},                                             \
        {"ecc.errors." what ".l2_cache", 0, "", 0, 0, ecc_of, 0, 1, bits},                                             \
        {"ecc.errors." what ".texture_memory", 0, "", 0, 0, ecc_of, 0, 4, bits},                                       \
        {"ecc.errors." what ".cbu", 0, "", 0, 0, ecc_of, 0, 6, bits},                                                  \
        {"ecc.errors." what ".sram", 0, "", 0, 0, ecc_of, 0, 7, bits},                                                 \
        {"ecc.errors." what ".total", 0, "", 0, 0, ecc_of, 0, ALL, bits}
#define SRAM(name, since, number, format)                                                                              \
    {name, 0, "", since, 0, long_of, "nvmlDeviceGetSramEccErrorStatus", number, 0x01000068, format}
#define HISTOGRAM(what, number)                                                                                       \
    {"remapped_rows.histogram." what, 0, "", 570, 0, number_of, "nvmlDeviceGetRowRemapperHistogram", number}
#define ROWS(what, alias, number, format)                                                                             \
    {"remapped_rows." what, alias, "", 570, 0, number_of, "nvmlDeviceGetRemappedRows", number, 0, format}
#define WATTS(name, alias, function, number)                                                                          \
    {name, alias, "W", 0, 0, number_of, "nvmlDeviceGet" function, number, 0, "%.2f"}
#define POWER(name, alias, since, number, scope)                                                                      \
    {name, alias, "W", since, 0, nvml_field_of, 0, number, scope, "%.2f"}
#define SMOOTHING(name, unit, since, number, format)                                                                  \
    {"power_smoothing." name, 0, unit, since, 0, nvml_field_of, 0, number, 0, format}
#define CLOCK(name, alias, until, function, type)                                                                     \
    {"clocks." name, "clocks." alias, "MHz", 0, until, number_about, "nvmlDeviceGet" function, type}
#define PLATFORM(name, offset, format)                                                                                \
    {"platform." name, 0, "", 570, 0, platform_of, 0, offset, 0, format},                                              \
        {"known.platform." name, 0, "", INTERNAL, 0, platform_of, 0, offset, 0, format}

static const field fields[] = {
    {"timestamp", 0, "", 0, 0, time_of},
    {"driver_version", 0, "", 0, 0, driver_of},
    {"kmd_version", 0, "", 595, 0, driver_of},
    {"vgpu_driver_capability.heterogenous_multivGPU", 0, "", 0, 0, nothing}, /* of vGPU hosts only, as below */
    {"count", 0, "", 0, 0, count_of, "nvmlDeviceGetCount_v2"},
    {"name", "gpu_name", "", 0, 0, text_of, "nvmlDeviceGetName", 96},
    {"serial", "gpu_serial", "", 0, 0, text_of, "nvmlDeviceGetSerial", 30},
    {"uuid", "gpu_uuid", "", 0, 0, text_of, "nvmlDeviceGetUUID", 96},
    {"pci.bus_id", "gpu_bus_id", "", 0, 0, pci_of},
    {"pci.domain", 0, "", 0, 0, pci_of, 0, 0, 0, "0x%04llX"},
    {"pci.bus", 0, "", 0, 0, pci_of, 0, 1, 0, "0x%02llX"},
    {"pci.device", 0, "", 0, 0, pci_of, 0, 2, 0, "0x%02llX"},
    {"pci.baseClass", 0, "", 550, 0, PCI_EXT, 6, 0x01000040, "0x%llX"},
    {"pci.subClass", 0, "", 550, 0, PCI_EXT, 7, 0x01000040, "0x%llX"},
    {"pci.device_id", 0, "", 0, 0, pci_of, 0, 3, 0, "0x%08llX"},
    {"pci.sub_device_id", 0, "", 0, 0, pci_of, 0, 4, 0, "0x%08llX"},
    {"vgpu_device_capability.fractional_multiVgpu", 0, "", 0, 0, nothing},
    {"vgpu_device_capability.heterogeneous_timeSlice_profile", 0, "", 0, 0, nothing},
    {"vgpu_device_capability.heterogeneous_timeSlice_sizes", 0, "", 0, 0, nothing},
    {"vgpu_device_capability.homogeneous_placements", 0, "", 550, 0, nothing},
    {"vgpu_device_capability.mig_timeSlicing", 0, "", 570, 0, nothing},
    {"vgpu_device_capability.mig_timeSlicing_mode", 0, "", 570, 0, nothing},
    {"pcie.link.gen.current", 0, "", 0, 0, number_of, "nvmlDeviceGetCurrPcieLinkGeneration"},
    {"pcie.link.gen.gpucurrent", 0, "", 0, 0, number_of, "nvmlDeviceGetCurrPcieLinkGeneration"},
    {"pcie.link.gen.max", 0, "", 0, 0, number_of, "nvmlDeviceGetMaxPcieLinkGeneration"},
    {"pcie.link.gen.gpumax", 0, "", 0, 0, number_of, "nvmlDeviceGetGpuMaxPcieLinkGeneration"},
    {"pcie.link.gen.hostmax", 0, "", 0, 0, nothing}, /* NVML has no function for it; N/A on EC2 (captures) */
    {"pcie.link.width.current", 0, "", 0, 0, number_of, "nvmlDeviceGetCurrPcieLinkWidth"},
    {"pcie.link.width.max", 0, "", 0, 0, number_of, "nvmlDeviceGetMaxPcieLinkWidth"},
    {"index", 0, "", 0, 0, index_of},
    {"display_mode", 0, "", 0, -580, number_of, "nvmlDeviceGetDisplayMode", 0, 0, ON},
    {"display_attached", 0, "", 580, 0, number_of, "nvmlDeviceGetDisplayMode", 0, 0, YES},
    {"display_active", 0, "", 0, 0, number_of, "nvmlDeviceGetDisplayActive", 0, 0, ON},
    {"persistence_mode", 0, "", 0, 0, number_of, "nvmlDeviceGetPersistenceMode", 0, 0, ON},
    {"addressing_mode", 0, "", 0, 0, addressing_of, "nvmlDeviceGetAddressingMode", 1, 0x01000008, "None|HMM|ATS"},
    {"accounting.mode", 0, "", 0, 0, number_of, "nvmlDeviceGetAccountingMode", 0, 0, ON},
    {"accounting.buffer_size", 0, "", 0, 0, number_of, "nvmlDeviceGetAccountingBufferSize"},
    {"driver_model.current", 0, "", 0, 0, nothing}, /* Windows only */
    {"driver_model.pending", 0, "", 0, 0, nothing},
    {"vbios_version", 0, "", 0, 0, text_of, "nvmlDeviceGetVbiosVersion", 32},
    {"inforom.img", "inforom.image", "", 0, 0, text_of, "nvmlDeviceGetInforomImageVersion", 16},
    {"inforom.oem", 0, "", 0, 0, inforom_of, 0, 0},
    {"inforom.ecc", 0, "", 0, 0, inforom_of, 0, 1},
    {"inforom.pwr", "inforom.power", "", 0, 0, inforom_of, 0, 2},
    {"inforom.checksum_validation", 0, "", 570, 0, checksum_of, "nvmlDeviceValidateInforom"},
    {"gpu_recovery_action", 0, "", 570, 0, nvml_field_of, 0, 230, 0,
     "None|Reset|Reboot|Drain P2P|Drain and Reset|Recover IMEX Domain"},
    {"reset_status.reset_required", 0, "", 0, 580, nvml_field_of, 0, 226, 0, YES},
    {"reset_status.drain_and_reset_recommended", 0, "", 0, 580, nvml_field_of, 0, 227, 0, YES},
    {"gom.current", "gpu_operation_mode.current", "", 0, 0, number_of, "nvmlDeviceGetGpuOperationMode", 0, 0,
     "All On|Compute|Low Double Precision"},
    {"gom.pending", "gpu_operation_mode.pending", "", 0, 0, number_of, "nvmlDeviceGetGpuOperationMode", 1, 0,
     "All On|Compute|Low Double Precision"},
    {"fan.speed", 0, "%", 0, 0, number_of, "nvmlDeviceGetFanSpeed"},
    {"pstate", 0, "", 0, 0, number_of, "nvmlDeviceGetPerformanceState", 0, 0, "P%lld"},
    {"clocks_event_reasons.supported", "clocks_throttle_reasons.supported", "", 0, 0, reasons_of,
     "nvmlDeviceGetSupportedClocksEventReasons"},
    REASON("active", 0),
    REASON("gpu_idle", 0x1),
    REASON("applications_clocks_setting", 0x2),
    REASON("sw_power_cap", 0x4),
    REASON("hw_slowdown", 0x8),
    REASON("hw_thermal_slowdown", 0x40),
    REASON("hw_power_brake_slowdown", 0x80),
    REASON("sw_thermal_slowdown", 0x20),
    REASON("sync_boost", 0x10),
    COUNTER("sw_power_cap", 74),
    COUNTER("sync_boost", 76),
    COUNTER("sw_thermal_slowdown", 269),
    COUNTER("hw_thermal_slowdown", 270),
    COUNTER("hw_power_brake_slowdown", 271),
    {"memory.total", 0, "MiB", 0, 0, memory_of, 0, 0},
    {"memory.reserved", 0, "MiB", 0, 0, memory_of, 0, 1},
    {"memory.used", 0, "MiB", 0, 0, memory_of, 0, 2},
    {"memory.free", 0, "MiB", 0, 0, memory_of, 0, 3},
    {"compute_mode", 0, "", 0, 0, number_of, "nvmlDeviceGetComputeMode", 0, 0,
     "Default|Exclusive_Thread|Prohibited|Exclusive_Process"},
    {"compute_cap", 0, "", 0, 0, capability_of, "nvmlDeviceGetCudaComputeCapability"},
    {"utilization.gpu", 0, "%", 0, 0, load_of, "nvmlDeviceGetUtilizationRates", 0},
    {"utilization.memory", 0, "%", 0, 0, load_of, "nvmlDeviceGetUtilizationRates", 1},
    {"utilization.encoder", 0, "%", 0, 0, load_of, "nvmlDeviceGetEncoderUtilization"},
    {"utilization.decoder", 0, "%", 0, 0, load_of, "nvmlDeviceGetDecoderUtilization"},
    {"utilization.jpeg", 0, "%", 0, 0, load_of, "nvmlDeviceGetJpgUtilization"},
    {"utilization.ofa", 0, "%", 0, 0, load_of, "nvmlDeviceGetOfaUtilization"},
    {"encoder.stats.sessionCount", 0, "", 0, 0, number_of, "nvmlDeviceGetEncoderStats", 0},
    {"encoder.stats.averageFps", 0, "", 0, 0, number_of, "nvmlDeviceGetEncoderStats", 1},
    {"encoder.stats.averageLatency", 0, "", 0, 0, number_of, "nvmlDeviceGetEncoderStats", 2},
    {"dramEncryption.mode.current", 0, "", 570, 0, versioned_of, "nvmlDeviceGetDramEncryptionMode", 1, 0x01000008, ON},
    {"dramEncryption.mode.pending", 0, "", 570, 0, versioned_of, "nvmlDeviceGetDramEncryptionMode", 33, 0x01000008, ON},
    {"ecc.mode.current", 0, "", 0, 0, number_of, "nvmlDeviceGetEccMode", 0, 0, ON},
    {"ecc.mode.pending", 0, "", 0, 0, number_of, "nvmlDeviceGetEccMode", 1, 0, ON},
    ECC("corrected.volatile", 0),
    ECC("corrected.aggregate", 1),
    ECC("uncorrected.volatile", 2),
    ECC("uncorrected.aggregate", 3),
    SRAM("ecc.errors.uncorrected.volatile.sram.parity", 550, 4, "%lld"),
    SRAM("ecc.errors.uncorrected.volatile.sram.secded", 550, 5, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.parity", 550, 1, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.secded", 550, 2, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.thresholdExceeded", 550, 12, YES),
    SRAM("ecc.errors.uncorrected.aggregate.sram.l2", 550, 7, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.sm", 550, 8, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.mcu", 550, 10, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.pcie", 550, 9, "%lld"),
    SRAM("ecc.errors.uncorrected.aggregate.sram.other", 550, 11, "%lld"),
    {"retired_pages.single_bit_ecc.count", "retired_pages.sbe", "", 0, 0, retired_of, 0, 0},
    {"retired_pages.double_bit.count", "retired_pages.dbe", "", 0, 0, retired_of, 0, 1},
    {"retired_pages.pending", 0, "", 0, 0, number_of, "nvmlDeviceGetRetiredPagesPendingStatus", 0, 0, YES},
    ROWS("correctable", "remapped_rows.sbe", 0, 0),
    {"remapped_rows.correctable_inactive", 0, "", 595, 0, nvml_field_of, 0, 301},
    ROWS("uncorrectable", "remapped_rows.dbe", 1, 0),
    {"remapped_rows.uncorrectable_inactive", 0, "", 595, 0, nvml_field_of, 0, 302},
    ROWS("pending", 0, 2, YES),
    ROWS("failure", 0, 3, YES),
    HISTOGRAM("max", 0),
    HISTOGRAM("high", 1),
    HISTOGRAM("partial", 2),
    HISTOGRAM("low", 3),
    HISTOGRAM("none", 4),
    {"temperature.gpu", 0, "", 0, 0, number_about, "nvmlDeviceGetTemperature"},
    {"temperature.gpu.tlimit", 0, "", 0, 0, versioned_of, "nvmlDeviceGetMarginTemperature", 1, 0x01000008},
    {"temperature.memory", 0, "", 0, 0, memory_heat_of, 0, 82},
    {"power.management", 0, "", 0, -580, nothing},
    WATTS("power.draw", 0, "PowerUsage", 0),
    POWER("power.draw.average", "gpu.power.draw.average", 0, 185, 0),
    POWER("power.draw.instant", "gpu.power.draw.instant", 0, 186, 0),
    WATTS("power.limit", "gpu.power.requested_limit", "PowerManagementLimit", 0),
    WATTS("enforced.power.limit", "gpu.power.current_limit", "EnforcedPowerLimit", 0),
    WATTS("power.default_limit", "gpu.power.default_limit", "PowerManagementDefaultLimit", 0),
    WATTS("power.min_limit", "gpu.power.min_limit", "PowerManagementLimitConstraints", 0),
    WATTS("power.max_limit", "gpu.power.max_limit", "PowerManagementLimitConstraints", 1),
    POWER("module.power.draw.average", 0, 550, 185, 1),
    POWER("module.power.draw.instant", 0, 550, 186, 1),
    POWER("module.power.limit", "module.power.requested_limit", 550, 192, 1),
    POWER("module.enforced.power.limit", "module.power.current_limit", 550, 190, 1),
    POWER("module.power.default_limit", 0, 550, 189, 1),
    POWER("module.power.min_limit", 0, 550, 187, 1),
    POWER("module.power.max_limit", 0, 550, 188, 1),
    POWER("gpu.base.current", 0, 610, 190, 3),
    POWER("gpu.base.requested", 0, 610, 192, 3),
    POWER("gpu.base.default", 0, 610, 189, 3),
    POWER("gpu.base.min", 0, 610, 187, 3),
    POWER("gpu.base.max", 0, 610, 188, 3),
    SMOOTHING("tmp_floor", "W", 610, 255, 0),
    SMOOTHING("tmp_ceil", "W", 610, 254, 0),
    SMOOTHING("hw_lifetime_remaining_percent", "%", 610, 258, 0),
    SMOOTHING("enabled", "", 610, 251, ON),
    SMOOTHING("delayed_power_smoothing_supported", "", 590, 280, YES),
    SMOOTHING("soc_power_smoothing_enabled", "", 610, 300, ON),
    SMOOTHING("priv_level", "", 610, 252, 0),
    SMOOTHING("imm_ramp_down", "", 610, 253, ON),
    SMOOTHING("max_percent_tmp_floor", "%", 610, 256, 0),
    SMOOTHING("min_percent_tmp_floor", "%", 610, 257, 0),
    SMOOTHING("primary_power_floor", "W", 590, 275, 0),
    SMOOTHING("secondary_power_floor", "W", 590, 276, 0),
    SMOOTHING("min_primary_floor_activation_offset", "W", 590, 277, 0),
    SMOOTHING("min_primary_floor_activation_point", "W", 590, 278, 0),
    SMOOTHING("window_multiplier", "ms", 590, 279, 0),
    SMOOTHING("num_preset_profiles", "", 610, 259, 0),
    SMOOTHING("curr_profile.percent_tmp_floor", "%", 610, 260, 0),
    SMOOTHING("curr_profile.ramp_up_rate", "W/s", 610, 261, "/%lld"),
    SMOOTHING("curr_profile.ramp_down_rate", "W/s", 610, 262, "/%lld"),
    SMOOTHING("curr_profile.ramp_down_hysteresis", "ms", 610, 263, 0),
    SMOOTHING("curr_profile.secondary_power_floor", "W", 590, 281, 0),
    SMOOTHING("curr_profile.primary_floor_act_window_multiplier", "", 590, 282, 0),
    SMOOTHING("curr_profile.primary_floor_tar_window_multiplier", "", 590, 283, 0),
    SMOOTHING("curr_profile.primary_floor_act_offset", "W", 590, 284, 0),
    SMOOTHING("active_profile", "", 610, 264, 0),
    SMOOTHING("admin_override.percent_tmp_floor", "%", 610, 265, 0),
    SMOOTHING("admin_override.ramp_up_rate", "W/s", 610, 266, "/%lld"),
    SMOOTHING("admin_override.ramp_down_rate", "W/s", 610, 267, "/%lld"),
    SMOOTHING("admin_override.ramp_down_hysteresis", "ms", 610, 268, 0),
    SMOOTHING("admin_override.secondary_power_floor", "W", 590, 285, 0),
    SMOOTHING("admin_override.primary_floor_act_window_multiplier", "", 590, 286, 0),
    SMOOTHING("admin_override.primary_floor_tar_window_multiplier", "", 590, 287, 0),
    SMOOTHING("admin_override.primary_floor_act_offset", "W", 590, 288, 0),
    {"edpp_multiplier", 0, "%", 590, 0, nvml_field_of, 0, 274, 0, "%lld.00"},
    CLOCK("current.graphics", "gr", 0, "ClockInfo", 0),
    CLOCK("current.sm", "sm", 0, "ClockInfo", 1),
    CLOCK("current.memory", "mem", 0, "ClockInfo", 2),
    CLOCK("current.video", "video", 0, "ClockInfo", 3),
    CLOCK("applications.graphics", "applications.gr", -590, "ApplicationsClock", 0),
    CLOCK("applications.memory", "applications.mem", -590, "ApplicationsClock", 2),
    CLOCK("default_applications.graphics", "default_applications.gr", -590, "DefaultApplicationsClock", 0),
    CLOCK("default_applications.memory", "default_applications.mem", -590, "DefaultApplicationsClock", 2),
    CLOCK("max.graphics", "max.gr", 0, "MaxClockInfo", 0),
    CLOCK("max.sm", "max.sm", 0, "MaxClockInfo", 1),
    CLOCK("max.memory", "max.mem", 0, "MaxClockInfo", 2),
    {"mig.mode.current", 0, "", 0, 0, number_of, "nvmlDeviceGetMigMode", 0, 0, ON},
    {"mig.mode.pending", 0, "", 0, 0, number_of, "nvmlDeviceGetMigMode", 1, 0, ON},
    {"gsp.mode.current", 0, "", 0, 0, number_of, "nvmlDeviceGetGspFirmwareMode", 0, 0, ON},
    {"gsp.mode.default", 0, "", 0, 0, number_of, "nvmlDeviceGetGspFirmwareMode", 1, 0, ON},
    {"c2c.mode", 0, "", 550, 0, number_of, "nvmlDeviceGetC2cModeInfoV", 0, 0, ON},
    {"protected_memory.total", 0, "MiB", 0, 0, long_of, "nvmlDeviceGetConfComputeProtectedMemoryUsage", 0},
    {"protected_memory.used", 0, "MiB", 0, 0, long_of, "nvmlDeviceGetConfComputeProtectedMemoryUsage", 2},
    {"protected_memory.free", 0, "MiB", 0, 0, long_of, "nvmlDeviceGetConfComputeProtectedMemoryUsage", 1},
    {"fabric.state", 0, "", 0, 0, fabric_of, 0, 0},
    {"fabric.status", 0, "", 0, 0, fabric_of, 0, 1},
    {"fabric.cliqueId", 0, "", 550, 0, fabric_of, 0, 2},
    {"fabric.clusterUuid", 0, "", 550, 0, fabric_of, 0, 3},
    {"fabric.health.summary", 0, "", 580, 0, fabric_of, 0, 4, 0, "N/A|Healthy|Unhealthy|Limited Capacity"},
    {"fabric.health.bandwidth", 0, "", 550, 0, fabric_of, 0, 8 + 0, 3, "N/A|Degraded|Full"},
    {"fabric.health.route_recovery_in_progress", 0, "", 550, 0, fabric_of, 0, 8 + 2, 3, HEALTH},
    {"fabric.health.route_unhealthy", 0, "", 550, 0, fabric_of, 0, 8 + 4, 3, HEALTH},
    {"fabric.health.access_timeout_recovery", 0, "", 550, 0, fabric_of, 0, 8 + 6, 3, HEALTH},
    {"fabric.health.incorrect_configuration", 0, "", 580, 0, fabric_of, 0, 8 + 8, 15,
     "N/A|None|Incorrect SysGUID|Incorrect Chassis SN|No Partition|Insufficient Nvlinks|Incompatible GPU FW|"
     "Invalid Location|GPU State Invalid"},
    {"fabric.health.partition_assigned", 0, "", 595, 0, fabric_of, 0, 8 + 12, 3, HEALTH},
    PLATFORM("chassis_serial_number", 20, 0),
    PLATFORM("slot_number", 36, 0),
    PLATFORM("tray_index", 37, 0),
    PLATFORM("host_id", 38, 0),
    PLATFORM("peer_type", 39, PEERS),
    {"platform.module_id", 0, "", 570, 0, number_of, "nvmlDeviceGetModuleId"},
    PLATFORM("gpu_fabric_guid", 4, 0),
    {"hostname", 0, "", 590, 0, text_of, "nvmlDeviceGetHostname_v1"},
    {"bbx.time_run", 0, "seconds", 610, 0, number_of, "nvmlDeviceGetBBXTimeData_v1"},
    /* What only -q and the tables show. */
    {"display_clocks", 0, "", INTERNAL, 0, reasons_of, "nvmlDeviceGetCurrentClocksEventReasons", 0x100},
    {"brand", 0, "", INTERNAL, 0, number_of, "nvmlDeviceGetBrand", 0, 0,
     "Unknown|Quadro|Tesla|NVS|GRID|GeForce|Titan|NVIDIA Virtual Applications|NVIDIA Virtual PC|"
     "NVIDIA Virtual Compute Server|NVIDIA RTX Virtual Workstation|NVIDIA Cloud Gaming|Quadro RTX|NVIDIA RTX|"
     "NVIDIA|GeForce RTX|Titan RTX"},
    {"architecture", 0, "", INTERNAL, 0, number_of, "nvmlDeviceGetArchitecture", 0, 0,
     "Unknown|Unknown|Kepler|Maxwell|Pascal|Volta|Turing|Ampere|Ada Lovelace|Hopper|Blackwell"},
    {"sram", 0, "", INTERNAL, 0, sram_of, "nvmlDeviceGetArchitecture"},
    {"flush.time", 0, "", INTERNAL, 0, flush_of, 0, 0},
    {"flush.duration", 0, "us", INTERNAL, 0, flush_of, 0, 1},
    {"virtualization", 0, "", INTERNAL, 0, number_of, "nvmlDeviceGetVirtualizationMode", 0, 0,
     "None|Pass-Through|VGPU|Host VGPU|Host VSGA"},
    {"host_vgpu", 0, "", INTERNAL, 0, number_of, "nvmlDeviceGetHostVgpuMode", 0, 0, "Non SR-IOV|SR-IOV"},
    {"atomics.outbound", 0, "", INTERNAL, 0, atomics_of, 0, 228},
    {"atomics.inbound", 0, "", INTERNAL, 0, atomics_of, 0, 229},
    {"power_state", 0, "", INTERNAL, -595, number_of, "nvmlDeviceGetPerformanceState", 0, 0, "P%lld"},
};
#define FIELDS (sizeof fields / sizeof *fields)

/* 535 has no aliases of power. */
static const char *alias_of(const field *of) {
    return branch() < 550 && of->alias && !strncmp(of->alias, "gpu.power", 9) ? NULL : of->alias;
}

static int is_named(const field *of, const char *name) {
    return !strcmp(of->name, name) || (alias_of(of) && !strcmp(of->alias, name));
}

/* 595 has none of power smoothing's fields, which 590 and 610 have (captures). */
static int is_queried(const field *of) {
    return of->since <= branch() && (of->until <= 0 || branch() < of->until) &&
           !(branch() == 595 && !strncmp(of->name, "power_smoothing.", 16));
}

static int read_field(const gpu *one, const field *of, char *text) {
    return of->until < 0 && branch() >= -of->until ? DEPRECATED : of->read(one, of, text);
}

/* A value that no query has, by its description: "#n Function a b format unit", '-' for what it lacks. */
static const field *described(const char *text) {
    static char function[96] = "nvmlDeviceGet", format[64], unit[16];
    static field of = {.function = function, .unit = unit};
    char kind;
    of.a = of.b = 0;
    strcpy(format, "-");
    strcpy(unit, "");
    sscanf(text, "#%c %80s %i %i %63s %15s", &kind, function + 13, (int *)&of.a, (int *)&of.b, format, unit);
    of.format = strcmp(format, "-") ? format : NULL;
    of.read = kind == 'n'   ? number_of
              : kind == 't' ? number_about
              : kind == 'f' ? nvml_field_of
              : kind == 'l' ? long_of
              : kind == 'v' ? versioned_of
                            : text_of;
    return &of;
}

int value_of(const gpu *one, const char *name, char *text, const char **unit) {
    const field *of = *name == '#' ? described(name) : fields;
    while (*name != '#' && of < fields + FIELDS && strcmp(of->name, name))
        of++;
    *unit = of == fields + FIELDS ? "" : of->unit;
    return of == fields + FIELDS ? UNSUPPORTED : read_field(one, of, text);
}

int cell_of(const gpu *one, const char *name, char *text, const char *error) {
    const char *unit;
    int status = value_of(one, name, text, &unit);
    if (status)
        strcpy(text, unsupported(status) ? "N/A" : error ? error : error_text(status));
    if (status == LOST)
        worst = LOST;
    return status;
}

int is_enabled(const gpu *one, const char *name) {
    char text[TEXT];
    const char *unit;
    return !value_of(one, name, text, &unit) && !strcmp(text, "Enabled");
}

/* ---- queries: their columns, and what makes rows of a GPU. A column without a reader is number `a` of the row. */

typedef struct {
    const char *option;
    const field *columns;
    size_t count;
    int (*list)(const gpu *, emit *);
} query_kind;

static const field *wanted[256];
static unsigned wanted_count;
static int with_units;

static void print_cell(int first, int status, const char *text, const char *unit) {
    printf("%s", first ? "" : ", ");
    if (status)
        printf("[%s]", unsupported(status) ? "N/A" : error_text(status));
    else
        printf("%s%s%s", text, *unit ? " " : "", unit);
}

/* A row; what it has no value of is NULL. A status is in every cell of what the GPU didn't answer. */
static void print_row(const gpu *one, const char *const *cells, int status) {
    char text[TEXT];
    for (unsigned i = 0; i < wanted_count; i++) {
        const field *of = wanted[i];
        int found = of->read ? read_field(one, of, text) : status ? status : cells[of->a] ? OK : UNSUPPORTED;
        print_cell(!i, found, of->read ? text : cells ? cells[of->a] : "", with_units ? of->unit : "");
        if (found == LOST)
            worst = LOST;
    }
    putchar('\n');
}

static int list_gpu(const gpu *one, emit *put) {
    put(one, NULL, OK);
    return OK;
}

static int list_apps(const gpu *one, emit *put) {
    static process found[MAX_PROCESSES];
    unsigned count = 0;
    int status = list_processes(one->handle, found, &count, 1);
    for (unsigned i = 0; i < count; i++) {
        char pid[16], memory[32];
        sprintf(pid, "%u", found[i].info.pid);
        sprintf(memory, "%llu", found[i].info.memory >> 20);
        put(one, (const char *[]){pid, found[i].name, found[i].info.memory == ~0ULL ? NULL : memory}, OK);
    }
    return status;
}

static int list_accounted(const gpu *one, emit *put) {
    unsigned pids[4096], count = 4096;
    int status = nvml("nvmlDeviceGetAccountingPids")(one->handle, &count, pids);
    for (unsigned i = 0; !status && i < count; i++) {
        struct {
            unsigned gpu, memory;
            unsigned long long most, time, start;
            unsigned running, reserved[5];
        } of = {0};
        char text[6][32];
        if (nvml("nvmlDeviceGetAccountingStats")(one->handle, pids[i], &of))
            continue;
        const unsigned long long values[] = {pids[i], of.gpu, of.memory, of.most >> 20, of.time, of.running};
        for (int k = 0; k < 6; k++)
            sprintf(text[k], "%llu", values[k]);
        put(one, (const char *[]){NULL, text[0], text[1], text[2], of.most == ~0ULL ? NULL : text[3], text[4], text[5]},
            OK);
    }
    return status;
}

/* Where pages aren't retired, there is a row for each cause (captures). */
static int list_retired(const gpu *one, emit *put) {
    static const char *const causes[] = {"Single Bit ECC", "Double Bit ECC"};
    for (int cause = 0; cause < 2; cause++) {
        unsigned long long pages[512] = {0}, times[512] = {0};
        unsigned count = 512;
        int status = nvml("nvmlDeviceGetRetiredPages_v2")(one->handle, cause, &count, pages, times);
        if (unsupported(status))
            put(one, (const char *[]){NULL, NULL, causes[cause]}, OK);
        else if (status)
            return status;
        for (unsigned i = 0; !status && i < count; i++) {
            char page[32], when[32];
            time_t seconds = (time_t)(times[i] / 1000000);
            sprintf(page, "0x%016llx", pages[i]);
            strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", localtime(&seconds));
            put(one, (const char *[]){page, when, causes[cause]}, OK);
        }
    }
    return OK;
}

static int list_clocks(const gpu *one, emit *put) {
    unsigned memory[64], graphics[1024], count = 64;
    int status = nvml("nvmlDeviceGetSupportedMemoryClocks")(one->handle, &count, memory);
    if (status)
        put(one, (const char *[]){NULL, NULL}, unsupported(status) ? OK : status);
    for (unsigned i = 0; !status && i < count; i++) {
        unsigned listed = 1024;
        if (nvml("nvmlDeviceGetSupportedGraphicsClocks")(one->handle, memory[i], &listed, graphics))
            continue;
        for (unsigned j = 0; j < listed; j++) {
            char a[16], b[16];
            sprintf(a, "%u", memory[i]);
            sprintf(b, "%u", graphics[j]);
            put(one, (const char *[]){a, b}, OK);
        }
    }
    return OK;
}

#define OF_THE_GPU                                                                                                    \
    {"timestamp", 0, "", 0, 0, time_of}, {"gpu_name", 0, "", 0, 0, text_of, "nvmlDeviceGetName", 96},                  \
        {"gpu_bus_id", 0, "", 0, 0, pci_of}, {"gpu_serial", 0, "", 0, 0, text_of, "nvmlDeviceGetSerial", 30},          \
        {"gpu_uuid", 0, "", 0, 0, text_of, "nvmlDeviceGetUUID", 96}

static const field of_apps[] = {
    OF_THE_GPU,
    {"pid", 0, "", 0, 0, 0, 0, 0},
    {"process_name", "name", "", 0, 0, 0, 0, 1},
    {"used_gpu_memory", "used_memory", "MiB", 0, 0, 0, 0, 2},
};
static const field of_accounted[] = {
    OF_THE_GPU,
    {"vgpu_instance", 0, "", 0, 0, 0, 0, 0},
    {"pid", 0, "", 0, 0, 0, 0, 1},
    {"gpu_utilization", "gpu_util", "%", 0, 0, 0, 0, 2},
    {"mem_utilization", "mem_util", "%", 0, 0, 0, 0, 3},
    {"max_memory_usage", 0, "MiB", 0, 0, 0, 0, 4},
    {"time", 0, "ms", 0, 0, 0, 0, 5},
};
static const field of_retired[] = {
    OF_THE_GPU,
    {"retired_pages.address", 0, "", 0, 0, 0, 0, 0},
    {"retired_pages.timestamp", 0, "", 0, 0, 0, 0, 1},
    {"retired_pages.cause", 0, "", 0, 0, 0, 0, 2},
};
static const field of_rows[] = {
    OF_THE_GPU,         ROWS("correctable", 0, 0, 0), ROWS("uncorrectable", 0, 1, 0), ROWS("pending", 0, 2, YES),
    ROWS("failure", 0, 3, YES), HISTOGRAM("max", 0),  HISTOGRAM("high", 1),           HISTOGRAM("partial", 2),
    HISTOGRAM("low", 3),        HISTOGRAM("none", 4),
};
static const field of_clocks[] = {
    OF_THE_GPU,
    {"memory", "mem", "MHz", 0, 0, 0, 0, 0},
    {"graphics", "gr", "MHz", 0, 0, 0, 0, 1},
};

#define KIND(name, columns, list) {"--query-" name, columns, sizeof columns / sizeof *columns, list}
static const query_kind kinds[] = {
    KIND("gpu", fields, list_gpu),
    KIND("compute-apps", of_apps, list_apps),
    KIND("accounted-apps", of_accounted, list_accounted),
    KIND("retired-pages", of_retired, list_retired),
    KIND("remapped-rows", of_rows, list_gpu),
    KIND("supported-clocks", of_clocks, list_clocks),
};

static const query_kind *find_kind(const char *option) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i].option, option))
            return &kinds[i];
    return NULL;
}

int list_rows(const char *option, const gpu *one, emit *put) { return find_kind(option)->list(one, put); }

int is_query(const char *option) { return find_kind(option) != NULL; }

/* The rows of remapped rows are columns of 535 too; their fields of --query-gpu came later. */
static int has(const query_kind *kind, const field *of) { return kind->columns != fields || is_queried(of); }

static int read_format(const char *format, int *header) {
    char list[TEXT], *rest = NULL;
    int csv = 0;
    *header = with_units = 1;
    snprintf(list, sizeof list, "%s", format);
    for (char *word = strtok_r(list, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest)) {
        if (!strcmp(word, "csv"))
            csv = 1;
        else if (!strcmp(word, "noheader"))
            *header = 0;
        else if (!strcmp(word, "nounits"))
            with_units = 0;
        else {
            puts("Format modifier is not recognized.");
            return INVALID;
        }
    }
    if (!csv)
        puts("Format modifier --format=csv is mandatory.");
    return csv ? OK : INVALID;
}

static int read_columns(const query_kind *kind, const char *asked) {
    char list[16384], *rest = NULL;
    wanted_count = 0;
    snprintf(list, sizeof list, "%s", asked);
    for (char *word = strtok_r(list, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest)) {
        size_t i = 0;
        while (i < kind->count && !(has(kind, &kind->columns[i]) && is_named(&kind->columns[i], word)))
            i++;
        if (i == kind->count || wanted_count == sizeof wanted / sizeof *wanted) {
            printf("Field \"%s\" is not a valid field to query.\n\n", word);
            return INVALID;
        }
        wanted[wanted_count++] = &kind->columns[i];
    }
    return OK;
}

int query(const char *option, const char *asked, const char *format, int first) {
    const query_kind *kind = find_kind(option);
    int header, status = read_format(format, &header);
    if (status || (status = read_columns(kind, asked)) || (status = choose_gpus()))
        return status;
    for (unsigned i = 0; header && first && i < wanted_count; i++) {
        printf("%s%s", i ? ", " : "", wanted[i]->name);
        if (*wanted[i]->unit)
            printf(" [%s]", wanted[i]->unit);
        if (i + 1 == wanted_count)
            putchar('\n');
    }
    for (unsigned at = 0; at < gpu_count; at++) {
        status = kind->list(&gpus[at], print_row);
        if (status && !unsupported(status))
            print_row(&gpus[at], NULL, status);
    }
    return worst;
}

/* NVIDIA's own explanations are left out; a name is found where parsers look for it, after an empty line. */
int help_query(const char *option) {
    const query_kind *kind = find_kind(option);
    printf("List of valid properties to query for the switch \"%s\":\n", option);
    for (size_t i = 0; i < kind->count; i++) {
        const field *of = &kind->columns[i];
        if (!has(kind, of))
            continue;
        printf("\n\"%s\"", of->name);
        if (alias_of(of))
            printf(" or \"%s\"", of->alias);
        printf("\n%s%s.\n", *of->unit ? "In " : "Without a unit", of->unit);
    }
    putchar('\n');
    return OK;
}
