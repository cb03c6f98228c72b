/* The stand-in nvidia-smi: the fields of --query-gpu, and --query-compute-apps. Names, headers and units:
 * strings of nvidia-smi 535.261.03 and `--help-query-gpu`. */
#include "smi.h"

#include <sys/time.h>
#include <time.h>

typedef struct field field;
struct field {
    const char *name, *header, *unit;
    int (*read)(const gpu *, const field *, char *);
    const char *function;
    unsigned argument;
    const char *format;
};

#define READ(name) static int name(const gpu *one, const field *of, char *text)

READ(text_of) { return nvml(of->function)(one->handle, text, of->argument); }

READ(number_of) {
    unsigned value = 0;
    int status = nvml(of->function)(one->handle, &value);
    sprintf(text, of->format ? of->format : "%u", value);
    return status;
}

READ(switch_of) {
    unsigned value = 0;
    int status = nvml(of->function)(one->handle, &value);
    strcpy(text, value ? "Enabled" : "Disabled");
    return status;
}

/* A pair, current and pending, of which `argument` is the one that counts. */
READ(pair_of) {
    unsigned values[2] = {0};
    int status = nvml(of->function)(one->handle, values, values + 1);
    strcpy(text, values[of->argument] ? "Enabled" : "Disabled");
    return status;
}

READ(yes_no_of) {
    unsigned value = 0;
    int status = nvml(of->function)(one->handle, &value);
    strcpy(text, value ? "Yes" : "No");
    return status;
}

READ(typed_number_of) {
    unsigned value = 0;
    int status = nvml(of->function)(one->handle, of->argument, &value);
    sprintf(text, "%u", value);
    return status;
}

READ(watts_of) {
    unsigned milliwatts = 0;
    int status = nvml(of->function)(one->handle, &milliwatts);
    sprintf(text, "%.2f", milliwatts / 1000.0);
    return status;
}

READ(power_range_of) {
    unsigned range[2] = {0};
    int status = nvml("nvmlDeviceGetPowerManagementLimitConstraints")(one->handle, range, range + 1);
    sprintf(text, "%.2f", range[of->argument] / 1000.0);
    return status;
}

/* A value that NVML knows by number. */
READ(nvml_field_of) {
    double value = 0;
    int status = field_number(one->handle, of->argument, 0, &value);
    if (of->format && !strcmp(of->format, "yes"))
        strcpy(text, value ? "Yes" : "No");
    else
        sprintf(text, of->format ? of->format : "%.0f", !strcmp(of->unit, "W") ? value / 1000 : value);
    return status;
}

READ(memory_of) {
    struct {
        unsigned version;
        unsigned long long total, reserved, free, used;
    } info = {.version = 0x02000028};
    struct {
        unsigned long long total, free, used;
    } old;
    int status = nvml("nvmlDeviceGetMemoryInfo_v2")(one->handle, &info);
    if (unsupported(status) && of->argument != 1 &&
        !(status = nvml("nvmlDeviceGetMemoryInfo")(one->handle, &old))) {
        info.total = old.total;
        info.free = old.free;
        info.used = old.used;
    }
    unsigned long long values[] = {info.total, info.reserved, info.used, info.free};
    sprintf(text, "%llu", values[of->argument] >> 20);
    return status;
}

READ(bar1_of) {
    unsigned long long info[3] = {0}; /* total, free, used */
    int status = nvml("nvmlDeviceGetBAR1MemoryInfo")(one->handle, info);
    sprintf(text, "%llu", info[of->argument] >> 20);
    return status;
}

READ(pci_of) {
    pci_info info = {0};
    int status = nvml("nvmlDeviceGetPciInfo_v3")(one->handle, &info);
    unsigned values[] = {info.domain, info.bus, info.device, info.pci_device, info.pci_subsystem};
    sprintf(text, of->format, values[of->argument]);
    return status;
}

READ(bus_id_of) {
    pci_info info = {0};
    (void)of;
    int status = nvml("nvmlDeviceGetPciInfo_v3")(one->handle, &info);
    strcpy(text, info.bus_id);
    return status;
}

READ(load_of) {
    unsigned values[2] = {0}, enabled = 0, pending;
    if (!nvml("nvmlDeviceGetMigMode")(one->handle, &enabled, &pending) && enabled)
        return UNSUPPORTED; /* "not currently supported" there, says --help-query-gpu */
    int status = nvml("nvmlDeviceGetUtilizationRates")(one->handle, values);
    sprintf(text, "%u", values[of->argument]);
    return status;
}

READ(coder_of) {
    unsigned load = 0, period;
    int status = nvml(of->function)(one->handle, &load, &period);
    sprintf(text, "%u", load);
    return status;
}

/* argument: 2 for uncorrected, 1 for aggregate. */
READ(ecc_of) {
    unsigned long long errors = 0;
    unsigned enabled = 0, pending;
    int status = nvml("nvmlDeviceGetEccMode")(one->handle, &enabled, &pending);
    if (!status && !enabled)
        return UNSUPPORTED;
    if (!status || unsupported(status))
        status = nvml("nvmlDeviceGetTotalEccErrors")(one->handle, (int)of->argument >> 1, (int)of->argument & 1,
                                                     &errors);
    sprintf(text, "%llu", errors);
    return status;
}

READ(reasons_of) {
    unsigned long long mask = 0;
    int status = nvml("nvmlDeviceGetCurrentClocksEventReasons")(one->handle, &mask);
    if (unsupported(status))
        status = nvml("nvmlDeviceGetCurrentClocksThrottleReasons")(one->handle, &mask);
    if (of->argument)
        strcpy(text, mask & of->argument ? "Active" : "Not Active");
    else
        sprintf(text, "0x%016llX", mask);
    return status;
}

READ(compute_mode_of) {
    static const char *const modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    unsigned mode = 0;
    (void)of;
    int status = nvml("nvmlDeviceGetComputeMode")(one->handle, &mode);
    strcpy(text, mode < 4 ? modes[mode] : "Unknown");
    return status;
}

READ(capability_of) {
    int major = 0, minor = 0;
    (void)of;
    int status = nvml("nvmlDeviceGetCudaComputeCapability")(one->handle, &major, &minor);
    sprintf(text, "%d.%d", major, minor);
    return status;
}

READ(gsp_of) {
    unsigned values[2] = {0}; /* in use, by default */
    int status = nvml("nvmlDeviceGetGspFirmwareMode")(one->handle, values, values + 1);
    strcpy(text, values[of->argument] ? "Enabled" : "Disabled");
    return status;
}

READ(fabric_of) {
    static const char *const states[] = {"N/A", "Not Started", "In Progress", "Completed"};
    struct {
        unsigned char cluster[16];
        int status;
        unsigned clique, state;
    } info = {0};
    int status = nvml("nvmlDeviceGetGpuFabricInfo")(one->handle, &info);
    if (!status && !info.state)
        return UNSUPPORTED;
    strcpy(text, !of->argument     ? info.state < 4 ? states[info.state] : "Unknown"
                 : info.state == 3 ? error_text(info.status)
                                   : "N/A");
    return status;
}

READ(remapped_of) {
    unsigned rows[4] = {0}; /* correctable, uncorrectable, pending, failed */
    int status = nvml("nvmlDeviceGetRemappedRows")(one->handle, rows, rows + 1, rows + 2, rows + 3);
    if (of->argument < 2)
        sprintf(text, "%u", rows[of->argument]);
    else
        strcpy(text, rows[of->argument] ? "Yes" : "No");
    return status;
}

READ(brand_of) {
    static const char *const brands[] = {"Unknown",
                                         "Quadro",
                                         "Tesla",
                                         "NVS",
                                         "GRID",
                                         "GeForce",
                                         "Titan",
                                         "NVIDIA Virtual Applications",
                                         "NVIDIA Virtual PC",
                                         "NVIDIA Virtual Compute Server",
                                         "NVIDIA RTX Virtual Workstation",
                                         "NVIDIA Cloud Gaming",
                                         "Quadro RTX",
                                         "NVIDIA RTX",
                                         "NVIDIA",
                                         "GeForce RTX",
                                         "Titan RTX"};
    unsigned brand = 0;
    (void)of;
    int status = nvml("nvmlDeviceGetBrand")(one->handle, &brand);
    strcpy(text, brand < sizeof brands / sizeof *brands ? brands[brand] : "Unknown");
    return status;
}

READ(architecture_of) {
    static const char *const names[] = {"Unknown", "Unknown", "Kepler",       "Maxwell", "Pascal",   "Volta",
                                        "Turing",  "Ampere",  "Ada Lovelace", "Hopper",  "Blackwell"};
    unsigned number = 0;
    (void)of;
    int status = nvml("nvmlDeviceGetArchitecture")(one->handle, &number);
    strcpy(text, number < sizeof names / sizeof *names ? names[number] : "Unknown");
    return status;
}

READ(index_of) {
    (void)of;
    sprintf(text, "%u", one->index);
    return OK;
}

READ(count_of) {
    unsigned count = 0;
    (void)of, (void)one;
    int status = nvml("nvmlDeviceGetCount_v2")(&count);
    sprintf(text, "%u", count);
    return status;
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

#define SAME(name, ...) {name, name, __VA_ARGS__}
#define REASON(what, mask)                                                                                     \
    SAME("clocks_event_reasons." what, "", reasons_of, NULL, mask, NULL),                                      \
        SAME("clocks_throttle_reasons." what, "", reasons_of, NULL, mask, NULL)
#define CLOCK(name, alias, function, type)                                                                     \
    SAME(name, "MHz", typed_number_of, function, type, NULL), {                                                \
        alias, name, "MHz", typed_number_of, function, type, NULL                                              \
    }
#define NOW "nvmlDeviceGetClockInfo"
#define MOST "nvmlDeviceGetMaxClockInfo"
#define APPLICATION "nvmlDeviceGetApplicationsClock"
#define DEFAULT_APPLICATION "nvmlDeviceGetDefaultApplicationsClock"

static const field fields[] = {
    SAME("timestamp", "", time_of, NULL, 0, NULL),
    SAME("driver_version", "", driver_of, NULL, 0, NULL),
    SAME("count", "", count_of, NULL, 0, NULL),
    SAME("name", "", text_of, "nvmlDeviceGetName", 96, NULL),
    {"gpu_name", "name", "", text_of, "nvmlDeviceGetName", 96, NULL},
    SAME("serial", "", text_of, "nvmlDeviceGetSerial", 30, NULL),
    {"gpu_serial", "serial", "", text_of, "nvmlDeviceGetSerial", 30, NULL},
    SAME("uuid", "", text_of, "nvmlDeviceGetUUID", 96, NULL),
    {"gpu_uuid", "uuid", "", text_of, "nvmlDeviceGetUUID", 96, NULL},
    SAME("pci.bus_id", "", bus_id_of, NULL, 0, NULL),
    {"gpu_bus_id", "pci.bus_id", "", bus_id_of, NULL, 0, NULL},
    SAME("pci.domain", "", pci_of, NULL, 0, "0x%04X"),
    SAME("pci.bus", "", pci_of, NULL, 1, "0x%02X"),
    SAME("pci.device", "", pci_of, NULL, 2, "0x%02X"),
    SAME("pci.device_id", "", pci_of, NULL, 3, "0x%08X"),
    SAME("pci.sub_device_id", "", pci_of, NULL, 4, "0x%08X"),
    SAME("pcie.link.gen.current", "", number_of, "nvmlDeviceGetCurrPcieLinkGeneration", 0, NULL),
    SAME("pcie.link.gen.gpucurrent", "", number_of, "nvmlDeviceGetCurrPcieLinkGeneration", 0, NULL),
    SAME("pcie.link.gen.max", "", number_of, "nvmlDeviceGetMaxPcieLinkGeneration", 0, NULL),
    SAME("pcie.link.gen.gpumax", "", number_of, "nvmlDeviceGetGpuMaxPcieLinkGeneration", 0, NULL),
    SAME("pcie.link.gen.hostmax", "", nothing, NULL, 0, NULL),
    SAME("pcie.link.width.current", "", number_of, "nvmlDeviceGetCurrPcieLinkWidth", 0, NULL),
    SAME("pcie.link.width.max", "", number_of, "nvmlDeviceGetMaxPcieLinkWidth", 0, NULL),
    SAME("index", "", index_of, NULL, 0, NULL),
    SAME("display_mode", "", switch_of, "nvmlDeviceGetDisplayMode", 0, NULL),
    SAME("display_active", "", switch_of, "nvmlDeviceGetDisplayActive", 0, NULL),
    SAME("persistence_mode", "", switch_of, "nvmlDeviceGetPersistenceMode", 0, NULL),
    SAME("accounting.mode", "", switch_of, "nvmlDeviceGetAccountingMode", 0, NULL),
    SAME("accounting.buffer_size", "", number_of, "nvmlDeviceGetAccountingBufferSize", 0, NULL),
    SAME("driver_model.current", "", nothing, NULL, 0, NULL), /* Windows only */
    SAME("driver_model.pending", "", nothing, NULL, 0, NULL),
    SAME("vbios_version", "", text_of, "nvmlDeviceGetVbiosVersion", 32, NULL),
    SAME("inforom.img", "", text_of, "nvmlDeviceGetInforomImageVersion", 16, NULL),
    SAME("fan.speed", "%", number_of, "nvmlDeviceGetFanSpeed", 0, NULL),
    SAME("pstate", "", number_of, "nvmlDeviceGetPerformanceState", 0, "P%u"),
    REASON("active", 0),
    REASON("gpu_idle", 0x1),
    REASON("applications_clocks_setting", 0x2),
    REASON("sw_power_cap", 0x4),
    REASON("hw_slowdown", 0x8),
    REASON("sync_boost", 0x10),
    REASON("sw_thermal_slowdown", 0x20),
    REASON("hw_thermal_slowdown", 0x40),
    REASON("hw_power_brake_slowdown", 0x80),
    REASON("display_clocks_setting", 0x100),
    SAME("memory.total", "MiB", memory_of, NULL, 0, NULL),
    SAME("memory.reserved", "MiB", memory_of, NULL, 1, NULL),
    SAME("memory.used", "MiB", memory_of, NULL, 2, NULL),
    SAME("memory.free", "MiB", memory_of, NULL, 3, NULL),
    SAME("compute_mode", "", compute_mode_of, NULL, 0, NULL),
    SAME("compute_cap", "", capability_of, NULL, 0, NULL),
    SAME("utilization.gpu", "%", load_of, NULL, 0, NULL),
    SAME("utilization.memory", "%", load_of, NULL, 1, NULL),
    SAME("utilization.encoder", "%", coder_of, "nvmlDeviceGetEncoderUtilization", 0, NULL),
    SAME("utilization.decoder", "%", coder_of, "nvmlDeviceGetDecoderUtilization", 0, NULL),
    SAME("utilization.jpeg", "%", coder_of, "nvmlDeviceGetJpgUtilization", 0, NULL),
    SAME("utilization.ofa", "%", coder_of, "nvmlDeviceGetOfaUtilization", 0, NULL),
    SAME("ecc.mode.current", "", pair_of, "nvmlDeviceGetEccMode", 0, NULL),
    SAME("ecc.mode.pending", "", pair_of, "nvmlDeviceGetEccMode", 1, NULL),
    SAME("ecc.errors.corrected.volatile.total", "", ecc_of, NULL, 0, NULL),
    SAME("ecc.errors.corrected.aggregate.total", "", ecc_of, NULL, 1, NULL),
    SAME("ecc.errors.uncorrected.volatile.total", "", ecc_of, NULL, 2, NULL),
    SAME("ecc.errors.uncorrected.aggregate.total", "", ecc_of, NULL, 3, NULL),
    SAME("retired_pages.pending", "", yes_no_of, "nvmlDeviceGetRetiredPagesPendingStatus", 0, NULL),
    SAME("temperature.gpu", "", typed_number_of, "nvmlDeviceGetTemperature", 0, NULL),
    SAME("temperature.gpu.tlimit", "", nvml_field_of, NULL, 196, NULL), /* NVML_FI_DEV_… of pynvml.py */
    SAME("temperature.memory", "", nvml_field_of, NULL, 82, NULL),
    SAME("power.management", "", nothing, NULL, 0, NULL),
    SAME("power.draw", "W", watts_of, "nvmlDeviceGetPowerUsage", 0, NULL),
    SAME("power.draw.average", "W", nvml_field_of, NULL, 185, "%.2f"),
    SAME("power.draw.instant", "W", nvml_field_of, NULL, 186, "%.2f"),
    SAME("power.limit", "W", watts_of, "nvmlDeviceGetPowerManagementLimit", 0, NULL),
    SAME("enforced.power.limit", "W", watts_of, "nvmlDeviceGetEnforcedPowerLimit", 0, NULL),
    SAME("power.default_limit", "W", watts_of, "nvmlDeviceGetPowerManagementDefaultLimit", 0, NULL),
    SAME("power.min_limit", "W", power_range_of, NULL, 0, NULL),
    SAME("power.max_limit", "W", power_range_of, NULL, 1, NULL),
    CLOCK("clocks.current.graphics", "clocks.gr", NOW, 0),
    CLOCK("clocks.current.sm", "clocks.sm", NOW, 1),
    CLOCK("clocks.current.memory", "clocks.mem", NOW, 2),
    CLOCK("clocks.current.video", "clocks.video", NOW, 3),
    CLOCK("clocks.applications.graphics", "clocks.applications.gr", APPLICATION, 0),
    CLOCK("clocks.applications.memory", "clocks.applications.mem", APPLICATION, 2),
    CLOCK("clocks.default_applications.graphics", "clocks.default_applications.gr", DEFAULT_APPLICATION, 0),
    CLOCK("clocks.default_applications.memory", "clocks.default_applications.mem", DEFAULT_APPLICATION, 2),
    CLOCK("clocks.max.graphics", "clocks.max.gr", MOST, 0),
    SAME("clocks.max.sm", "MHz", typed_number_of, MOST, 1, NULL),
    CLOCK("clocks.max.memory", "clocks.max.mem", MOST, 2),
    SAME("mig.mode.current", "", pair_of, "nvmlDeviceGetMigMode", 0, NULL),
    SAME("mig.mode.pending", "", pair_of, "nvmlDeviceGetMigMode", 1, NULL),
    SAME("gsp.mode.current", "", gsp_of, NULL, 0, NULL),
    SAME("gsp.mode.default", "", gsp_of, NULL, 1, NULL),
    SAME("fabric.state", "", fabric_of, NULL, 0, NULL),
    SAME("fabric.status", "", fabric_of, NULL, 1, NULL),
    SAME("reset_status.reset_required", "", nvml_field_of, NULL, 226, "yes"),
    SAME("reset_status.drain_and_reset_recommended", "", nvml_field_of, NULL, 227, "yes"),
};

/* What only -q shows. */
static const field shown[] = {
    SAME("brand", "", brand_of, NULL, 0, NULL),
    SAME("architecture", "", architecture_of, NULL, 0, NULL),
    SAME("minor", "", number_of, "nvmlDeviceGetMinorNumber", 0, NULL),
    SAME("multi_gpu_board", "", yes_no_of, "nvmlDeviceGetMultiGpuBoard", 0, NULL),
    SAME("board_id", "", number_of, "nvmlDeviceGetBoardId", 0, "0x%x"),
    SAME("board_part_number", "", text_of, "nvmlDeviceGetBoardPartNumber", 80, NULL),
    SAME("module_id", "", number_of, "nvmlDeviceGetModuleId", 0, NULL),
    SAME("gsp_version", "", text_of, "nvmlDeviceGetGspFirmwareVersion", 64, NULL),
    SAME("bar1.total", "MiB", bar1_of, NULL, 0, NULL),
    SAME("bar1.used", "MiB", bar1_of, NULL, 2, NULL),
    SAME("bar1.free", "MiB", bar1_of, NULL, 1, NULL),
    SAME("replays", "", number_of, "nvmlDeviceGetPcieReplayCounter", 0, NULL),
    SAME("pcie.tx", "KB/s", typed_number_of, "nvmlDeviceGetPcieThroughput", 0, NULL),
    SAME("pcie.rx", "KB/s", typed_number_of, "nvmlDeviceGetPcieThroughput", 1, NULL),
    SAME("width.current", "", number_of, "nvmlDeviceGetCurrPcieLinkWidth", 0, "%ux"),
    SAME("width.max", "", number_of, "nvmlDeviceGetMaxPcieLinkWidth", 0, "%ux"),
    SAME("remapped.correctable", "", remapped_of, NULL, 0, NULL),
    SAME("remapped.uncorrectable", "", remapped_of, NULL, 1, NULL),
    SAME("remapped.pending", "", remapped_of, NULL, 2, NULL),
    SAME("remapped.failed", "", remapped_of, NULL, 3, NULL),
    SAME("gpu temperature", "C", typed_number_of, "nvmlDeviceGetTemperature", 0, NULL),
    SAME("shutdown temperature", "C", typed_number_of, "nvmlDeviceGetTemperatureThreshold", 0, NULL),
    SAME("slowdown temperature", "C", typed_number_of, "nvmlDeviceGetTemperatureThreshold", 1, NULL),
    SAME("memory temperature", "C", nvml_field_of, NULL, 82, NULL),
    SAME("most memory temperature", "C", typed_number_of, "nvmlDeviceGetTemperatureThreshold", 2, NULL),
    SAME("most temperature", "C", typed_number_of, "nvmlDeviceGetTemperatureThreshold", 3, NULL),
    SAME("shutdown tlimit", "C", nvml_field_of, NULL, 193, NULL),
    SAME("slowdown tlimit", "C", nvml_field_of, NULL, 194, NULL),
    SAME("most memory tlimit", "C", nvml_field_of, NULL, 195, NULL),
    SAME("most tlimit", "C", nvml_field_of, NULL, 196, NULL),
    SAME("max video", "MHz", typed_number_of, MOST, 3, NULL),
    SAME("customer boost", "MHz", typed_number_of, "nvmlDeviceGetMaxCustomerBoostClock", 0, NULL),
};

static const field *find(const field *list, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(list[i].name, name))
            return &list[i];
    return NULL;
}

#define FIND(list, name) find(list, sizeof(list) / sizeof *(list), name)

int value_of(const gpu *one, const char *name, char *text, const char **unit) {
    const field *of = FIND(fields, name);
    if (!of)
        of = FIND(shown, name);
    *unit = of ? of->unit : "";
    return of ? of->read(one, of, text) : UNSUPPORTED;
}

typedef struct {
    int header, units;
} style;

static int read_format(const char *format, style *to) {
    char list[TEXT], *rest = NULL;
    int csv = 0;
    *to = (style){1, 1};
    snprintf(list, sizeof list, "%s", format);
    for (char *word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (!strcmp(word, "csv"))
            csv = 1;
        else if (!strcmp(word, "noheader"))
            to->header = 0;
        else if (!strcmp(word, "nounits"))
            to->units = 0;
        else {
            puts("Format modifier is not recognized.");
            return INVALID;
        }
    }
    if (!csv)
        puts("Format modifier --format=csv is mandatory.");
    return csv ? OK : INVALID;
}

/* "a, b" and "a,b" are one list. */
static unsigned split(char *list, char **words, unsigned room) {
    unsigned count = 0;
    char *rest = NULL;
    for (char *word = strtok_r(list, ", ", &rest); word && count < room; word = strtok_r(NULL, ", ", &rest))
        words[count++] = word;
    return count;
}

static void print_cell(int first, int status, const char *text, const char *unit) {
    printf("%s", first ? "" : ", ");
    if (status)
        printf("[%s]", unsupported(status) ? "N/A" : error_text(status));
    else
        printf("%s%s%s", text, *unit ? " " : "", unit);
}

static void print_header(unsigned count, const char *const *names, const char *const *units) {
    for (unsigned i = 0; i < count; i++) {
        printf("%s%s", i ? ", " : "", names[i]);
        if (*units[i])
            printf(" [%s]", units[i]);
    }
    putchar('\n');
}

#define MOST_FIELDS 128

int query_gpus(const char *asked, const char *format) {
    char list[8192], text[TEXT], *words[MOST_FIELDS];
    const field *wanted[MOST_FIELDS];
    const char *names[MOST_FIELDS], *units[MOST_FIELDS];
    style how;
    snprintf(list, sizeof list, "%s", asked);
    unsigned count = split(list, words, MOST_FIELDS);
    int status = read_format(format, &how), worst = OK;
    for (unsigned i = 0; !status && i < count; i++) {
        if (!(wanted[i] = FIND(fields, words[i]))) {
            printf("Field \"%s\" is not a valid field to query.\n\n", words[i]);
            return INVALID;
        }
        names[i] = wanted[i]->header;
        units[i] = wanted[i]->unit;
    }
    if (status || (status = choose_gpus()))
        return status;
    if (how.header)
        print_header(count, names, units);
    for (unsigned at = 0; at < gpu_count; at++) {
        for (unsigned i = 0; i < count; i++) {
            status = wanted[i]->read(&gpus[at], wanted[i], text);
            print_cell(!i, status, text, how.units ? units[i] : "");
            if (status == LOST)
                worst = LOST;
        }
        putchar('\n');
    }
    return worst;
}

enum { PID, NAME, USED, UUID, GPU_NAME, BUS, SERIAL, TIME };

static const struct {
    const char *name, *header, *unit, *gpu_field;
} app_fields[] = {
    {"pid", "pid", "", NULL},
    {"process_name", "process_name", "", NULL},
    {"used_gpu_memory", "used_gpu_memory", "MiB", NULL},
    {"gpu_uuid", "gpu_uuid", "", "uuid"},
    {"gpu_name", "gpu_name", "", "name"},
    {"gpu_bus_id", "gpu_bus_id", "", "pci.bus_id"},
    {"gpu_serial", "gpu_serial", "", "serial"},
    {"timestamp", "timestamp", "", "timestamp"},
};

static int find_app_field(const char *name) {
    if (!strcmp(name, "used_memory") || !strcmp(name, "name"))
        return *name == 'u' ? USED : NAME;
    for (int i = PID; i <= TIME; i++)
        if (!strcmp(app_fields[i].name, name))
            return i;
    return -1;
}

static void print_app_cell(const gpu *one, const process *app, int which, int first, int units) {
    char text[TEXT];
    const char *unit = units ? app_fields[which].unit : "";
    int status = OK;
    if (app_fields[which].gpu_field)
        status = value_of(one, app_fields[which].gpu_field, text, &unit);
    else if (which == PID)
        sprintf(text, "%u", app->info.pid);
    else if (which == NAME)
        snprintf(text, sizeof text, "%s", app->name);
    else if (app->info.memory == ~0ULL)
        status = UNSUPPORTED;
    else
        sprintf(text, "%llu", app->info.memory >> 20);
    print_cell(first, status, text, unit);
}

int query_processes(const char *asked, const char *format) {
    char list[8192], *words[MOST_FIELDS];
    const char *names[MOST_FIELDS], *units[MOST_FIELDS];
    int wanted[MOST_FIELDS];
    style how;
    snprintf(list, sizeof list, "%s", asked);
    unsigned count = split(list, words, MOST_FIELDS);
    int status = read_format(format, &how), worst = OK;
    for (unsigned i = 0; !status && i < count; i++) {
        if ((wanted[i] = find_app_field(words[i])) < 0) {
            printf("Field \"%s\" is not a valid field to query.\n\n", words[i]);
            return INVALID;
        }
        names[i] = app_fields[wanted[i]].header;
        units[i] = app_fields[wanted[i]].unit;
    }
    if (status || (status = choose_gpus()))
        return status;
    if (how.header)
        print_header(count, names, units);
    for (unsigned at = 0; at < gpu_count; at++) {
        static process found[256];
        unsigned apps = 0;
        status = list_processes(gpus[at].handle, found, 256, &apps, 1);
        if (status && !unsupported(status)) {
            for (unsigned i = 0; i < count; i++)
                print_cell(!i, status, "", "");
            putchar('\n');
            worst = status == LOST ? LOST : worst;
        }
        for (unsigned app = 0; app < apps; app++) {
            for (unsigned i = 0; i < count; i++)
                print_app_cell(&gpus[at], &found[app], wanted[i], !i, how.units);
            putchar('\n');
        }
    }
    return worst;
}
