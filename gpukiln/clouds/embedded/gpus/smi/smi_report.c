/* The stand-in nvidia-smi: -q. Sections and labels in the order of nvidia-smi(1) and of the strings of
 * 535.261.03; what only vGPU hosts, HICs, NPUs or Windows have is N/A there as on a machine without them. */
#include "smi.h"

#include <strings.h>
#include <time.h>

/* A row: how deep, its label, the field, and the section of -d that it belongs to; a heading has no field, a
 * fixed text begins with '='. */
typedef struct {
    const char *section;
    int depth;
    const char *label, *field;
} row;

static const row rows[] = {
    {"", 1, "Product Name", "name"},
    {"", 1, "Product Brand", "brand"},
    {"", 1, "Product Architecture", "architecture"},
    {"", 1, "Display Mode", "display_mode"},
    {"", 1, "Display Active", "display_active"},
    {"", 1, "Persistence Mode", "persistence_mode"},
    {"", 1, "Addressing Mode", "=None"},
    {"", 1, "MIG Mode", NULL},
    {"", 2, "Current", "mig.mode.current"},
    {"", 2, "Pending", "mig.mode.pending"},
    {"ACCOUNTING", 1, "Accounting Mode", "accounting.mode"},
    {"ACCOUNTING", 1, "Accounting Mode Buffer Size", "accounting.buffer_size"},
    {"", 1, "Driver Model", NULL},
    {"", 2, "Current", "=N/A"},
    {"", 2, "Pending", "=N/A"},
    {"", 1, "Serial Number", "serial"},
    {"", 1, "GPU UUID", "uuid"},
    {"", 1, "Minor Number", "minor"},
    {"", 1, "VBIOS Version", "vbios_version"},
    {"", 1, "MultiGPU Board", "multi_gpu_board"},
    {"", 1, "Board ID", "board_id"},
    {"", 1, "Board Part Number", "board_part_number"},
    {"", 1, "Module ID", "module_id"},
    {"", 1, "Inforom Version", NULL},
    {"", 2, "Image Version", "inforom.img"},
    {"", 1, "GPU Operation Mode", NULL},
    {"", 2, "Current", "=N/A"},
    {"", 2, "Pending", "=N/A"},
    {"", 1, "GSP Firmware Version", "gsp_version"},
    {"RESET_STATUS", 1, "GPU Reset Status", NULL},
    {"RESET_STATUS", 2, "Reset Required", "reset_status.reset_required"},
    {"RESET_STATUS", 2, "Drain and Reset Recommended", "reset_status.drain_and_reset_recommended"},
    {"", 1, "PCI", NULL},
    {"", 2, "Bus", "pci.bus"},
    {"", 2, "Device", "pci.device"},
    {"", 2, "Domain", "pci.domain"},
    {"", 2, "Device Id", "pci.device_id"},
    {"", 2, "Bus Id", "pci.bus_id"},
    {"", 2, "Sub System Id", "pci.sub_device_id"},
    {"", 2, "GPU Link Info", NULL},
    {"", 3, "PCIe Generation", NULL},
    {"", 4, "Max", "pcie.link.gen.max"},
    {"", 4, "Current", "pcie.link.gen.current"},
    {"", 4, "Device Current", "pcie.link.gen.gpucurrent"},
    {"", 4, "Device Max", "pcie.link.gen.gpumax"},
    {"", 4, "Host Max", "pcie.link.gen.hostmax"},
    {"", 3, "Link Width", NULL},
    {"", 4, "Max", "width.max"},
    {"", 4, "Current", "width.current"},
    {"", 2, "Replays Since Reset", "replays"},
    {"", 2, "Tx Throughput", "pcie.tx"},
    {"", 2, "Rx Throughput", "pcie.rx"},
    {"", 1, "Fan Speed", "fan.speed"},
    {"PERFORMANCE", 1, "Performance State", "pstate"},
    {"PERFORMANCE", 1, "Clocks Event Reasons", NULL},
    {"PERFORMANCE", 2, "Idle", "clocks_event_reasons.gpu_idle"},
    {"PERFORMANCE", 2, "Applications Clocks Setting", "clocks_event_reasons.applications_clocks_setting"},
    {"PERFORMANCE", 2, "SW Power Cap", "clocks_event_reasons.sw_power_cap"},
    {"PERFORMANCE", 2, "HW Slowdown", "clocks_event_reasons.hw_slowdown"},
    {"PERFORMANCE", 3, "HW Thermal Slowdown", "clocks_event_reasons.hw_thermal_slowdown"},
    {"PERFORMANCE", 3, "HW Power Brake Slowdown", "clocks_event_reasons.hw_power_brake_slowdown"},
    {"PERFORMANCE", 2, "Sync Boost", "clocks_event_reasons.sync_boost"},
    {"PERFORMANCE", 2, "SW Thermal Slowdown", "clocks_event_reasons.sw_thermal_slowdown"},
    {"PERFORMANCE", 2, "Display Clock Setting", "clocks_event_reasons.display_clocks_setting"},
    {"MEMORY", 1, "FB Memory Usage", NULL},
    {"MEMORY", 2, "Total", "memory.total"},
    {"MEMORY", 2, "Reserved", "memory.reserved"},
    {"MEMORY", 2, "Used", "memory.used"},
    {"MEMORY", 2, "Free", "memory.free"},
    {"MEMORY", 1, "BAR1 Memory Usage", NULL},
    {"MEMORY", 2, "Total", "bar1.total"},
    {"MEMORY", 2, "Used", "bar1.used"},
    {"MEMORY", 2, "Free", "bar1.free"},
    {"COMPUTE", 1, "Compute Mode", "compute_mode"},
    {"UTILIZATION", 1, "Utilization", NULL},
    {"UTILIZATION", 2, "Gpu", "utilization.gpu"},
    {"UTILIZATION", 2, "Memory", "utilization.memory"},
    {"UTILIZATION", 2, "Encoder", "utilization.encoder"},
    {"UTILIZATION", 2, "Decoder", "utilization.decoder"},
    {"UTILIZATION", 2, "JPEG", "utilization.jpeg"},
    {"UTILIZATION", 2, "OFA", "utilization.ofa"},
    {"ECC", 1, "ECC Mode", NULL},
    {"ECC", 2, "Current", "ecc.mode.current"},
    {"ECC", 2, "Pending", "ecc.mode.pending"},
    {"ECC", 1, "ECC Errors", NULL},
    {"ECC", 2, "Volatile", NULL},
    {"ECC", 3, "DRAM Correctable", "ecc.errors.corrected.volatile.total"},
    {"ECC", 3, "DRAM Uncorrectable", "ecc.errors.uncorrected.volatile.total"},
    {"ECC", 2, "Aggregate", NULL},
    {"ECC", 3, "DRAM Correctable", "ecc.errors.corrected.aggregate.total"},
    {"ECC", 3, "DRAM Uncorrectable", "ecc.errors.uncorrected.aggregate.total"},
    {"PAGE_RETIREMENT", 1, "Retired Pages", NULL},
    {"PAGE_RETIREMENT", 2, "Pending Page Blacklist", "retired_pages.pending"},
    {"ROW_REMAPPER", 1, "Remapped Rows", NULL},
    {"ROW_REMAPPER", 2, "Correctable Error", "remapped.correctable"},
    {"ROW_REMAPPER", 2, "Uncorrectable Error", "remapped.uncorrectable"},
    {"ROW_REMAPPER", 2, "Pending", "remapped.pending"},
    {"ROW_REMAPPER", 2, "Remapping Failure Occurred", "remapped.failed"},
    {"TEMPERATURE", 1, "Temperature", NULL},
    {"TEMPERATURE", 2, "GPU Current Temp", "gpu temperature"},
    {"TEMPERATURE", 2, "GPU Shutdown Temp", "shutdown temperature"},
    {"TEMPERATURE", 2, "GPU Slowdown Temp", "slowdown temperature"},
    {"TEMPERATURE", 2, "GPU Max Operating Temp", "most temperature"},
    {"TEMPERATURE", 2, "GPU Shutdown T.Limit Temp", "shutdown tlimit"},
    {"TEMPERATURE", 2, "GPU Slowdown T.Limit Temp", "slowdown tlimit"},
    {"TEMPERATURE", 2, "GPU Max Operating T.Limit Temp", "most tlimit"},
    {"TEMPERATURE", 2, "Memory Current Temp", "memory temperature"},
    {"TEMPERATURE", 2, "Memory Max Operating Temp", "most memory temperature"},
    {"TEMPERATURE", 2, "Memory Max Operating T.Limit Temp", "most memory tlimit"},
    {"POWER", 1, "GPU Power Readings", NULL},
    {"POWER", 2, "Power Draw", "power.draw"},
    {"POWER", 2, "Current Power Limit", "enforced.power.limit"},
    {"POWER", 2, "Requested Power Limit", "power.limit"},
    {"POWER", 2, "Default Power Limit", "power.default_limit"},
    {"POWER", 2, "Min Power Limit", "power.min_limit"},
    {"POWER", 2, "Max Power Limit", "power.max_limit"},
    {"CLOCK", 1, "Clocks", NULL},
    {"CLOCK", 2, "Graphics", "clocks.current.graphics"},
    {"CLOCK", 2, "SM", "clocks.current.sm"},
    {"CLOCK", 2, "Memory", "clocks.current.memory"},
    {"CLOCK", 2, "Video", "clocks.current.video"},
    {"CLOCK", 1, "Applications Clocks", NULL},
    {"CLOCK", 2, "Graphics", "clocks.applications.graphics"},
    {"CLOCK", 2, "Memory", "clocks.applications.memory"},
    {"CLOCK", 1, "Default Applications Clocks", NULL},
    {"CLOCK", 2, "Graphics", "clocks.default_applications.graphics"},
    {"CLOCK", 2, "Memory", "clocks.default_applications.memory"},
    {"CLOCK", 1, "Max Clocks", NULL},
    {"CLOCK", 2, "Graphics", "clocks.max.graphics"},
    {"CLOCK", 2, "SM", "clocks.max.sm"},
    {"CLOCK", 2, "Memory", "clocks.max.memory"},
    {"CLOCK", 2, "Video", "max video"},
    {"CLOCK", 1, "Max Customer Boost Clocks", NULL},
    {"CLOCK", 2, "Graphics", "customer boost"},
    {"", 1, "Fabric", NULL},
    {"", 2, "State", "fabric.state"},
    {"", 2, "Status", "fabric.status"},
};

#define ROWS (sizeof rows / sizeof *rows)

static int is_section(const char *word) {
    for (size_t i = 0; i < ROWS; i++)
        if (*rows[i].section && !strcasecmp(rows[i].section, word))
            return 1;
    return !strcasecmp(word, "PIDS");
}

static int wanted(const char *section, const char *sections) {
    char list[TEXT], *rest = NULL;
    if (!sections)
        return 1;
    snprintf(list, sizeof list, "%s", sections);
    for (char *word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
        if (!strcasecmp(word, section))
            return 1;
    return 0;
}

static void print_row(int depth, const char *label, const char *value) {
    printf("%*s%-*s: %s\n", depth * 4, "", 42 - depth * 4, label, value);
}

static int print_field(const gpu *one, const row *of) {
    char text[TEXT];
    const char *unit = "";
    int status = OK;
    if (*of->field == '=')
        strcpy(text, of->field + 1);
    else if ((status = value_of(one, of->field, text, &unit)))
        strcpy(text, unsupported(status) ? "N/A" : error_text(status));
    else if (*unit)
        sprintf(text + strlen(text), " %s", unit);
    print_row(of->depth, of->label, text);
    return status;
}

static int print_processes(const gpu *one) {
    static process found[256];
    unsigned count = 0;
    char text[TEXT];
    int status = list_processes(one->handle, found, 256, &count, 0);
    if (status || !count) {
        print_row(1, "Processes", !status ? "None" : unsupported(status) ? "N/A" : error_text(status));
        return status;
    }
    puts("    Processes");
    for (unsigned i = 0; i < count; i++) {
        for (int compute = 0; compute < 2; compute++) {
            unsigned number = compute ? found[i].info.compute_instance : found[i].info.gpu_instance;
            sprintf(text, number == ALL ? "N/A" : "%u", number);
            print_row(2, compute ? "Compute instance ID" : "GPU instance ID", text);
        }
        sprintf(text, "%u", found[i].info.pid);
        print_row(2, "Process ID", text);
        print_row(3, "Type", found[i].kind);
        print_row(3, "Name", found[i].name);
        sprintf(text, found[i].info.memory == ~0ULL ? "N/A" : "%llu MiB", found[i].info.memory >> 20);
        print_row(3, "Used GPU Memory", text);
    }
    return OK;
}

int show_report(const char *sections) {
    char list[TEXT], text[TEXT], *rest = NULL;
    int worst = OK, status;
    snprintf(list, sizeof list, "%s", sections ? sections : "");
    for (char *word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
        if (!is_section(word)) {
            puts("Failed to parse --display/-d flags");
            return INVALID;
        }
    if ((status = choose_gpus()))
        return status;
    time_t now = time(NULL);
    puts("\n==============NVSMI LOG==============\n");
    strftime(text, sizeof text, "%a %b %e %H:%M:%S %Y", localtime(&now));
    print_row(0, "Timestamp", text);
    print_row(0, "Driver Version", driver_version(text) ? "N/A" : text);
    print_row(0, "CUDA Version", cuda_version(text) ? "Not Found" : text);
    unsigned total = 0;
    nvml("nvmlDeviceGetCount_v2")(&total);
    sprintf(text, "%u", total);
    putchar('\n');
    print_row(0, "Attached GPUs", text);
    for (unsigned at = 0; at < gpu_count; at++) {
        printf("GPU %s\n", gpus[at].bus_id);
        for (size_t i = 0; i < ROWS; i++) {
            if (!wanted(rows[i].section, sections))
                continue;
            if (!rows[i].field)
                printf("%*s%s\n", rows[i].depth * 4, "", rows[i].label);
            else if (print_field(&gpus[at], &rows[i]) == LOST)
                worst = LOST;
        }
        if (wanted("PIDS", sections) && print_processes(&gpus[at]) == LOST)
            worst = LOST;
        putchar('\n');
    }
    return worst;
}
