/* The stand-in nvidia-smi: the fields of --query-gpu, one line for each, and both queries. Names, headers, units and
 * forms of the values: --help-query-gpu and --query-gpu of 535.129.03 (a public log of an A100) and of 590.48.01
 * (captures of utkuozdemir/nvidia_gpu_exporter). */
#include "smi.h"

#include <sys/time.h>
#include <time.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* of the tables: what is left out is 0 */

typedef struct field field;
struct field {
    const char *name, *alias, *unit;
    int (*read)(const gpu *, const field *, char *);
    const char *function;
    unsigned a, b;      /* which of the function's values; what it is asked about */
    const char *format; /* words|by|number, or printf's: of thousandths with a point */
};

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
        snprintf(text, TEXT, at, value);
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

/* About `a`: a kind of clock, of temperature. */
READ(number_about) {
    unsigned value = 0;
    int status = ASK(of->a, &value);
    return show(status, of->format, value, text);
}

/* NVML_FI_… number `a`. */
READ(nvml_field_of) {
    struct {
        unsigned field, scope;
        long long timestamp, latency_us;
        unsigned type;
        int status;
        union {
            double real;
            unsigned whole;
            unsigned long long count;
        } value;
    } asked = {.field = of->a};
    int status = nvml("nvmlDeviceGetFieldValues")(one->handle, 1, &asked);
    long long value = asked.type == 0   ? (long long)asked.value.real /* NVML_VALUE_TYPE_* */
                      : asked.type == 1 ? asked.value.whole
                                        : (long long)asked.value.count;
    return show(status ? status : asked.status, of->format, value, text);
}

READ(memory_of) {
    struct {
        unsigned version;
        unsigned long long total, reserved, free, used;
    } info = {.version = 0x02000028};
    int status = nvml("nvmlDeviceGetMemoryInfo_v2")(one->handle, &info);
    unsigned long long values[] = {info.total, info.reserved, info.used, info.free};
    return show(status, NULL, (long long)(values[of->a] >> 20), text);
}

READ(pci_of) {
    pci_info info = {0};
    int status = nvml("nvmlDeviceGetPciInfo_v3")(one->handle, &info);
    if (of->format)
        return show(status, of->format, info.pci_device, text);
    strcpy(text, info.bus_id);
    return status;
}

/* "not currently supported" with MIG, says --help-query-gpu. */
READ(load_of) { return is_enabled(one, "mig.mode.current") ? UNSUPPORTED : number_of(one, of, text); }

/* a: uncorrected; b: aggregate. */
READ(ecc_of) {
    unsigned long long errors = 0;
    unsigned enabled = 0, pending;
    int status = nvml("nvmlDeviceGetEccMode")(one->handle, &enabled, &pending);
    if (!status)
        status = enabled ? nvml("nvmlDeviceGetTotalEccErrors")(one->handle, of->a, of->b, &errors) : UNSUPPORTED;
    return show(status, NULL, (long long)errors, text);
}

READ(reasons_of) {
    unsigned long long mask = 0;
    int status = nvml("nvmlDeviceGetCurrentClocksEventReasons")(one->handle, &mask);
    if (unsupported(status)) /* its name before 535 */
        status = nvml("nvmlDeviceGetCurrentClocksThrottleReasons")(one->handle, &mask);
    return of->a ? show(status, "Not Active|Active", !!(mask & of->a), text)
                 : show(status, "0x%016llX", (long long)mask, text);
}

READ(capability_of) {
    int major = 0, minor = 0, status = ASK(&major, &minor);
    sprintf(text, "%d.%d", major, minor);
    return status;
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

#define ON "Disabled|Enabled"
#define NUMBER(name, alias, unit, function, ...) {name, alias, unit, number_of, "nvmlDeviceGet" function, __VA_ARGS__}
#define STRING(name, alias, function, size) {name, alias, "", text_of, "nvmlDeviceGet" function, size}
#define WATTS(name, function, number) NUMBER(name, 0, "W", function, number, 0, "%.2f")
#define CLOCK(name, alias, function, type)                                                                            \
    {"clocks." name, "clocks." alias, "MHz", number_about, "nvmlDeviceGet" function, type}
#define REASON(what, mask)                                                                                            \
    {"clocks_event_reasons." what, "clocks_throttle_reasons." what, "", reasons_of, 0, mask}

static const field fields[] = {
    {"timestamp", 0, "", time_of},
    {"driver_version", 0, "", driver_of},
    {"count", 0, "", count_of, "nvmlDeviceGetCount_v2"},
    {"index", 0, "", index_of},
    STRING("name", "gpu_name", "Name", 96),
    STRING("serial", "gpu_serial", "Serial", 30),
    STRING("uuid", "gpu_uuid", "UUID", 96),
    {"pci.bus_id", "gpu_bus_id", "", pci_of},
    {"pci.device_id", 0, "", pci_of, 0, 0, 0, "0x%08llX"},
    NUMBER("pcie.link.gen.current", 0, "", "CurrPcieLinkGeneration"),
    NUMBER("pcie.link.gen.max", 0, "", "MaxPcieLinkGeneration"),
    NUMBER("pcie.link.width.current", 0, "", "CurrPcieLinkWidth"),
    NUMBER("pcie.link.width.max", 0, "", "MaxPcieLinkWidth"),
    NUMBER("display_active", 0, "", "DisplayActive", 0, 0, ON),
    NUMBER("persistence_mode", 0, "", "PersistenceMode", 0, 0, ON),
    STRING("vbios_version", 0, "VbiosVersion", 32),
    {"reset_status.reset_required", 0, "", nvml_field_of, 0, 226, 0, "No|Yes"},
    {"gpu_recovery_action", 0, "", nvml_field_of, 0, 230, 0, "None|Reset|Reboot|Drain P2P|Drain and Reset"},
    NUMBER("fan.speed", 0, "%", "FanSpeed"),
    NUMBER("pstate", 0, "", "PerformanceState", 0, 0, "P%lld"),
    REASON("active", 0),
    REASON("gpu_idle", 0x1),
    REASON("applications_clocks_setting", 0x2),
    REASON("sw_power_cap", 0x4),
    REASON("hw_slowdown", 0x8),
    REASON("hw_thermal_slowdown", 0x40),
    REASON("hw_power_brake_slowdown", 0x80),
    REASON("sw_thermal_slowdown", 0x20),
    REASON("sync_boost", 0x10),
    {"memory.total", 0, "MiB", memory_of, 0, 0},
    {"memory.reserved", 0, "MiB", memory_of, 0, 1},
    {"memory.used", 0, "MiB", memory_of, 0, 2},
    {"memory.free", 0, "MiB", memory_of, 0, 3},
    NUMBER("compute_mode", 0, "", "ComputeMode", 0, 0, "Default|Exclusive_Thread|Prohibited|Exclusive_Process"),
    {"compute_cap", 0, "", capability_of, "nvmlDeviceGetCudaComputeCapability"},
    {"utilization.gpu", 0, "%", load_of, "nvmlDeviceGetUtilizationRates", 0},
    {"utilization.memory", 0, "%", load_of, "nvmlDeviceGetUtilizationRates", 1},
    NUMBER("ecc.mode.current", 0, "", "EccMode", 0, 0, ON),
    NUMBER("ecc.mode.pending", 0, "", "EccMode", 1, 0, ON),
    {"ecc.errors.corrected.volatile.total", 0, "", ecc_of, 0, 0, 0},
    {"ecc.errors.corrected.aggregate.total", 0, "", ecc_of, 0, 0, 1},
    {"ecc.errors.uncorrected.volatile.total", 0, "", ecc_of, 0, 1, 0},
    {"ecc.errors.uncorrected.aggregate.total", 0, "", ecc_of, 0, 1, 1},
    NUMBER("retired_pages.pending", 0, "", "RetiredPagesPendingStatus", 0, 0, "No|Yes"),
    NUMBER("remapped_rows.correctable", 0, "", "RemappedRows", 0),
    NUMBER("remapped_rows.uncorrectable", 0, "", "RemappedRows", 1),
    NUMBER("remapped_rows.pending", 0, "", "RemappedRows", 2, 0, "No|Yes"),
    NUMBER("remapped_rows.failure", 0, "", "RemappedRows", 3, 0, "No|Yes"),
    {"temperature.gpu", 0, "", number_about, "nvmlDeviceGetTemperature"},
    {"temperature.memory", 0, "", nvml_field_of, 0, 82},
    WATTS("power.draw", "PowerUsage", 0),
    {"power.draw.instant", 0, "W", nvml_field_of, 0, 186, 0, "%.2f"},
    WATTS("power.limit", "PowerManagementLimit", 0),
    WATTS("enforced.power.limit", "EnforcedPowerLimit", 0),
    WATTS("power.default_limit", "PowerManagementDefaultLimit", 0),
    WATTS("power.min_limit", "PowerManagementLimitConstraints", 0),
    WATTS("power.max_limit", "PowerManagementLimitConstraints", 1),
    CLOCK("current.graphics", "gr", "ClockInfo", 0),
    CLOCK("current.sm", "sm", "ClockInfo", 1),
    CLOCK("current.memory", "mem", "ClockInfo", 2),
    CLOCK("max.graphics", "max.gr", "MaxClockInfo", 0),
    CLOCK("max.sm", "max.sm", "MaxClockInfo", 1),
    CLOCK("max.memory", "max.mem", "MaxClockInfo", 2),
    NUMBER("mig.mode.current", 0, "", "MigMode", 0, 0, ON),
    NUMBER("mig.mode.pending", 0, "", "MigMode", 1, 0, ON),
    /* Not for queries: what -q has of a MIG device, without a column's name in NVIDIA's. */
    NUMBER("#gpu instance", 0, "", "GpuInstanceId"),
    NUMBER("#compute instance", 0, "", "ComputeInstanceId"),
    NUMBER("#multiprocessors", 0, "", "Attributes_v2"),
};

/* A column without a reader is number `a` of a process. */
static const field of_processes[] = {
    {"timestamp", 0, "", time_of},
    STRING("gpu_name", 0, "Name", 96),
    {"gpu_bus_id", 0, "", pci_of},
    STRING("gpu_serial", 0, "Serial", 30),
    STRING("gpu_uuid", 0, "UUID", 96),
    {"pid", 0, "", 0, 0, 0},
    {"process_name", "name", "", 0, 0, 1},
    {"used_gpu_memory", "used_memory", "MiB", 0, 0, 2},
};
#define COUNT(rows) (sizeof(rows) / sizeof *(rows))

static const field *find(const field *columns, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(columns[i].name, name) || (columns[i].alias && !strcmp(columns[i].alias, name)))
            return &columns[i];
    return NULL;
}

int cell_of(const gpu *one, const char *name, char *text, const char *error, int with_unit) {
    const field *of = find(fields, COUNT(fields), name);
    int status = of->read(one, of, text);
    if (status)
        strcpy(text, unsupported(status) ? "N/A" : error ? error : error_text(status));
    else if (with_unit && *of->unit)
        strcat(strcat(text, " "), of->unit);
    if (status == LOST)
        worst = LOST;
    return status;
}

int is_enabled(const gpu *one, const char *name) {
    char text[TEXT];
    return !cell_of(one, name, text, NULL, 0) && !strcmp(text, "Enabled");
}

static const field *wanted[COUNT(fields)];
static unsigned wanted_count;
static int with_units = 1;

/* `cells`: what a process has, NULL for what it lacks. */
static void print_row(const gpu *one, const char *const *cells, int status) {
    char text[TEXT];
    for (unsigned i = 0; i < wanted_count; i++) {
        const field *of = wanted[i];
        int found = of->read ? of->read(one, of, text) : status ? status : cells[of->a] ? OK : UNSUPPORTED;
        const char *unit = with_units ? of->unit : "", *value = of->read || found ? text : cells[of->a];
        printf("%s", i ? ", " : "");
        if (found)
            printf("[%s]", unsupported(found) ? "N/A" : error_text(found));
        else
            printf("%s%s%s", value, *unit ? " " : "", unit);
        worst = found == LOST ? LOST : worst;
    }
    putchar('\n');
}

static void print_processes(const gpu *one) {
    static process found[MAX_PROCESSES];
    unsigned count = 0;
    int status = list_processes(one->handle, found, &count, 1);
    for (unsigned i = 0; i < count; i++) {
        char pid[16], memory[32];
        sprintf(pid, "%u", found[i].info.pid);
        sprintf(memory, "%llu", found[i].info.memory >> 20);
        print_row(one, (const char *[]){pid, found[i].name, found[i].info.memory == ~0ULL ? NULL : memory}, OK);
    }
    if (status && !unsupported(status))
        print_row(one, NULL, status);
}

int query(const char *asked, const char *format, int processes) {
    const field *columns = processes ? of_processes : fields;
    const size_t count = processes ? COUNT(of_processes) : COUNT(fields);
    char list[16384], *rest = NULL;
    int csv = 0, header = 1;
    snprintf(list, sizeof list, "%s", format);
    for (char *word = strtok_r(list, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest)) {
        if (!in_list("csv,noheader,nounits", word)) {
            puts("Format modifier is not recognized.");
            return INVALID;
        }
        csv |= *word == 'c';
        header &= strcmp(word, "noheader") != 0;
        with_units &= strcmp(word, "nounits") != 0;
    }
    if (!csv) {
        puts("Format modifier --format=csv is mandatory.");
        return INVALID;
    }
    snprintf(list, sizeof list, "%s", asked);
    for (char *word = strtok_r(list, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest)) {
        const field *of = *word == '#' ? NULL : find(columns, count, word);
        if (!of || wanted_count == COUNT(wanted)) {
            printf("Field \"%s\" is not a valid field to query.\n\nThe simulated nvidia-smi has:", word);
            for (size_t i = 0; i < count && *columns[i].name != '#'; i++)
                printf(" %s", columns[i].name);
            putchar('\n');
            return INVALID;
        }
        wanted[wanted_count++] = of;
    }
    int status = choose_gpus();
    for (unsigned i = 0; !status && header && i < wanted_count; i++)
        printf(*wanted[i]->unit ? "%s%s [%s]%s" : "%s%s%s%s", i ? ", " : "", wanted[i]->name, wanted[i]->unit,
               i + 1 == wanted_count ? "\n" : "");
    for (unsigned at = 0; !status && at < gpu_count; at++)
        if (processes)
            print_processes(&gpus[at]);
        else
            print_row(&gpus[at], NULL, OK);
    return status ? status : worst;
}
