/* The stand-in nvidia-smi: -L, the summary, -q and -q -x. Layout of the summary: 550 to 580, as captures have it
 * (utkuozdemir/nvidia_gpu_exporter). Labels and elements: -q of 535.129.03 (a public log), -q -x of 570.148 and 580.105
 * (captures of NVIDIA/k8s-test-infra). */
#include "smi.h"

#include <time.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* of the table: what is left out is 0 */

unsigned mig_devices(void *device, void **found, int *status) {
    unsigned enabled = 0, pending = 0, count = 0;
    *status = nvml("nvmlDeviceGetMigMode")(device, &enabled, &pending);
    if (!*status && enabled)
        *status = nvml("nvmlDeviceGetMaxMigDeviceCount")(device, &count);
    if (unsupported(*status))
        *status = OK;
    if (*status)
        return 0;
    for (unsigned i = 0; i < count; i++)
        if (nvml("nvmlDeviceGetMigDeviceHandleByIndex")(device, i, &found[i]))
            found[i] = NULL;
    return count;
}

static int add_processes(void *device, const char *function, char kind, process *found, unsigned *count) {
    static typeof(found->info) infos[MAX_PROCESSES];
    unsigned listed = MAX_PROCESSES;
    int status = nvml(function)(device, &listed, infos);
    for (unsigned i = 0; !status && i < listed; i++) {
        unsigned at = 0;
        while (at < *count &&
               (found[at].info.pid != infos[i].pid || found[at].info.gpu_instance != infos[i].gpu_instance))
            at++;
        if (at < *count)
            snprintf(found[at].kind, sizeof found[at].kind, "C+%c", kind);
        else if (at < MAX_PROCESSES) {
            found[at].info = infos[i];
            snprintf(found[at].kind, sizeof found[at].kind, "%c", kind);
            if (nvml("nvmlSystemGetProcessName")(infos[i].pid, found[at].name, (unsigned)TEXT))
                strcpy(found[at].name, "[Not Found]");
            ++*count;
        }
    }
    return status;
}

int list_processes(void *device, process *found, unsigned *count, int only_compute) {
    *count = 0;
    int status = add_processes(device, "nvmlDeviceGetComputeRunningProcesses_v3", 'C', found, count);
    if (!status && !only_compute)
        add_processes(device, "nvmlDeviceGetGraphicsRunningProcesses_v3", 'G', found, count);
    return status;
}

int show_list(void) {
    char name[TEXT], uuid[TEXT];
    void *migs[MAX_GPUS];
    int status = choose_gpus();
    for (unsigned at = 0; !status && at < gpu_count; at++) {
        cell_of(&gpus[at], "name", name, NULL, 0);
        if ((status = cell_of(&gpus[at], "uuid", uuid, NULL, 0)))
            return status;
        printf("GPU %u: %s (UUID: %s)\n", gpus[at].index, name, uuid);
        unsigned count = mig_devices(gpus[at].handle, migs, &status);
        for (unsigned i = 0; !status && i < count; i++) {
            const gpu part = {.handle = migs[i]};
            if (!migs[i] || (status = cell_of(&part, "name", name, NULL, 0)))
                continue;
            cell_of(&part, "uuid", uuid, NULL, 0);
            const char *profile = strstr(name, "MIG "); /* of "NVIDIA A100-SXM4-40GB MIG 1g.5gb" */
            printf("  %-15s Device %2u: (UUID: %s)\n", profile ? profile : "MIG", i, uuid);
        }
    }
    return status;
}

/* ---- the summary */

static const char dashes[] = "-----------------------------------------------------------------------------------------";
static const char equals[] = "=========================================================================================";

static const char *cell(const gpu *one, const char *field, const char *unit, char *text) {
    if (!cell_of(one, field, text, "ERR!", 0))
        strcat(text, unit);
    return text;
}

static const char *watts(const gpu *one, const char *field, char *text) {
    if (!cell_of(one, field, text, "ERR!", 0))
        sprintf(text, "%3.0fW", strtod(text, NULL));
    return text;
}

/* "used / total", the numbers as wide as a column has them, or what stands for both. */
static void print_usage(const gpu *one, int left, int right) {
    char a[TEXT], b[TEXT];
    if (cell_of(one, "memory.used", a, "ERR!", 0) || cell_of(one, "memory.total", b, "ERR!", 0))
        printf("%*s", left + 3 + right, strcmp(a, "ERR!") ? "N/A" : a);
    else
        printf("%*.12sMiB / %*.12sMiB", left - 3, a, right - 3, b);
}

static void print_gpu(const gpu *one) {
    char a[TEXT], b[TEXT], c[TEXT], d[TEXT];
    cell(one, "name", "", a);
    if (strlen(a) > 27)
        strcpy(a + 24, "...");
    strcpy(d, is_enabled(one, "ecc.mode.current") ? "On" : "Off");
    if (cell_of(one, "ecc.mode.current", b, "ERR!", 0))
        strcpy(d, b);
    else if (*(d + 1) == 'n' && !is_enabled(one, "mig.mode.current")) /* with MIG, its devices have the errors */
        cell(one, "ecc.errors.uncorrected.volatile.total", "", d);
    printf("| %3u  %-27s    %-3.3s | %*s%-16s%4s | %20s |\n", one->index, a,
           is_enabled(one, "persistence_mode") ? "On" : "Off", 2, "", one->bus_id,
           is_enabled(one, "display_active") ? "On" : "Off", d);
    printf("|%4.4s  %4.4s %5.5s ", cell(one, "fan.speed", "%", a), cell(one, "temperature.gpu", "C", b),
           cell(one, "pstate", "", c));
    printf("%15.6s / %5.5s |", watts(one, "power.draw", a), watts(one, "power.limit", b));
    print_usage(one, 11, 9);
    cell(one, "compute_mode", "", d);
    if (!strncmp(d, "Exclusive", 9))
        strcpy(d, strstr(d, "Thread") ? "E. Thread" : "E. Process");
    printf(" |    %4.4s   %10.10s |\n", cell(one, "utilization.gpu", "%", a), d);
    printf("|%41s|%24s|%21.10s |\n+%.41s+%.24s+%.22s+\n", "", "", cell(one, "mig.mode.current", "", a), dashes, dashes,
           dashes);
}

static unsigned print_processes(const gpu *one) {
    static process found[MAX_PROCESSES];
    unsigned count = 0;
    if (list_processes(one->handle, found, &count, 0) == LOST)
        worst = LOST;
    for (unsigned i = 0; i < count; i++) {
        char gi[16] = "N/A", ci[16] = "N/A", memory[32] = "N/A", *name = found[i].name;
        size_t length = strlen(name);
        if (length > 34)
            memcpy(name += length - 34, "...", 3);
        if (found[i].info.gpu_instance != ALL)
            sprintf(gi, "%u", found[i].info.gpu_instance);
        if (found[i].info.compute_instance != ALL)
            sprintf(ci, "%u", found[i].info.compute_instance);
        if (found[i].info.memory != ~0ULL)
            sprintf(memory, "%lluMiB", found[i].info.memory >> 20);
        printf("|%5u%6s%5s%16u%7s   %-34s%12s |\n", one->index, gi, ci, found[i].info.pid, found[i].kind, name, memory);
    }
    return count;
}

int show_table(void) {
    char driver[TEXT], cuda[TEXT], when[64];
    time_t now = time(NULL);
    unsigned running = 0;
    int status = choose_gpus();
    if (status)
        return status;
    driver_version(driver);
    cuda_version(cuda);
    strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", localtime(&now));
    printf("%-31s\n+%.89s+\n", when, dashes);
    printf("| NVIDIA-SMI %-22.22s Driver Version: %-14.12s CUDA Version: %-9.9s|\n+%.41s+%.24s+%.22s+\n", driver, driver,
           cuda, dashes, dashes, dashes);
    printf("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
           "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
           "|%41s|%24s|               MIG M. |\n|%.41s+%.24s+%.22s|\n",
           "", "", equals, equals, equals);
    for (unsigned at = 0; at < gpu_count; at++)
        print_gpu(&gpus[at]);
    printf("\n+%.89s+\n| Processes:%78s|\n|  GPU   GI   CI%6s        PID   Type   Process name%4s                    GPU "
           "Memory |\n|        ID   ID%63sUsage      |\n|%.89s|\n",
           dashes, "", "", "", "", equals);
    for (unsigned at = 0; at < gpu_count; at++)
        running += print_processes(&gpus[at]);
    if (!running)
        printf("|  No running processes found%61s|\n", "");
    printf("+%.89s+\n", dashes);
    return worst;
}

/* ---- the report; a row without a field is a heading */

typedef struct {
    int depth;
    const char *label, *element, *field;
} row;

static const row layout[] = {
    {1, "Product Name", "product_name", "name"},
    {1, "Persistence Mode", "persistence_mode", "persistence_mode"},
    {1, "MIG Mode", "mig_mode"},
    {2, "Current", "current_mig", "mig.mode.current"},
    {2, "Pending", "pending_mig", "mig.mode.pending"},
    {1, "", "mig_devices", "@"},
    {1, "Serial Number", "serial", "serial"},
    {1, "GPU UUID", "uuid", "uuid"},
    {1, "GPU Recovery Action", "gpu_recovery_action", "gpu_recovery_action"},
    {1, "PCI", "pci"},
    {2, "Device Id", "pci_device_id", "pci.device_id"},
    {2, "Bus Id", "pci_bus_id", "pci.bus_id"},
    {1, "FB Memory Usage", "fb_memory_usage"},
    {2, "Total", "total", "memory.total"},
    {2, "Reserved", "reserved", "memory.reserved"},
    {2, "Used", "used", "memory.used"},
    {2, "Free", "free", "memory.free"},
    {1, "Compute Mode", "compute_mode", "compute_mode"},
    {1, "Utilization", "utilization"},
    {2, "Gpu", "gpu_util", "utilization.gpu"},
    {2, "Memory", "memory_util", "utilization.memory"},
    {1, "ECC Mode", "ecc_mode"},
    {2, "Current", "current_ecc", "ecc.mode.current"},
    {2, "Pending", "pending_ecc", "ecc.mode.pending"},
    {1, "Temperature", "temperature"},
    {2, "GPU Current Temp", "gpu_temp", "temperature.gpu"},
    {2, "Memory Current Temp", "memory_temp", "temperature.memory"},
    {1, "GPU Power Readings", "gpu_power_readings"},
    {2, "Power Draw", "power_draw", "power.draw"},
    {2, "Current Power Limit", "current_power_limit", "enforced.power.limit"},
    {2, "Max Power Limit", "max_power_limit", "power.max_limit"},
    {1, "Clocks", "clocks"},
    {2, "Graphics", "graphics_clock", "clocks.gr"},
    {2, "SM", "sm_clock", "clocks.sm"},
    {2, "Memory", "mem_clock", "clocks.mem"},
    {1, "", "processes", "@"},
};
static const row of_mig[] = {
    {2, "GPU Instance ID", "gpu_instance_id", "#gpu instance"},
    {2, "Compute Instance ID", "compute_instance_id", "#compute instance"},
    {2, "Device Attributes", "device_attributes"},
    {3, "Shared", "shared"},
    {4, "Multiprocessor count", "multiprocessor_count", "#multiprocessors"},
    {2, "FB Memory Usage", "fb_memory_usage"},
    {3, "Total", "total", "memory.total"},
    {3, "Used", "used", "memory.used"},
    {3, "Free", "free", "memory.free"},
};
#define COUNT(rows) (sizeof(rows) / sizeof *(rows))

static int xml;

static void indent(int depth) { printf("%.*s", depth + 1, "\t\t\t\t\t\t\t\t"); }

static void open_row(int depth, const char *label, const char *element) {
    if (xml)
        indent(depth), printf("<%s>\n", element);
    else
        printf("%*s%s\n", depth * 4, "", label);
}

static void close_row(int depth, const char *element) {
    if (xml)
        indent(depth), printf("</%s>\n", element);
}

static void leaf(int depth, const char *label, const char *element, const char *text) {
    if (!xml) {
        printf("%*s%-*s: %s\n", depth * 4, "", 42 - depth * 4, label, text);
        return;
    }
    indent(depth);
    printf("<%s>", element);
    for (text += !strcmp(element, "pci_device_id") && *text == '0' ? 2 : 0; *text; text++) /* 0x is in text only */
        if (strchr("<>&", *text))
            fputs(*text == '<' ? "&lt;" : *text == '>' ? "&gt;" : "&amp;", stdout);
        else
            putchar(*text);
    printf("</%s>\n", element);
}

static void number(int depth, const char *label, const char *element, const char *format, unsigned long long value) {
    char text[64];
    sprintf(text, value == ~0ULL || value == ALL ? "N/A" : format, value);
    leaf(depth, label, element, text);
}

static void write_rows(const gpu *one, const row *rows, size_t count);

static void write_migs(const gpu *one) {
    void *devices[MAX_GPUS];
    int status;
    unsigned count = mig_devices(one->handle, devices, &status);
    for (unsigned i = 0; i < count; i++) {
        const gpu part = {.handle = devices[i]};
        if (!devices[i])
            continue;
        open_row(1 + xml, "MIG Device", "mig_device");
        number(2 + xml, "Index", "index", "%llu", i);
        write_rows(&part, of_mig, COUNT(of_mig));
        close_row(1 + xml, "mig_device");
    }
}

static void write_processes(const gpu *one) {
    static process found[MAX_PROCESSES];
    unsigned count = 0;
    int status = list_processes(one->handle, found, &count, 0);
    if (!xml)
        printf(count ? "    Processes\n" : "    Processes                             : %s\n",
               !status ? "None" : unsupported(status) ? "N/A" : error_text(status));
    worst = status == LOST ? LOST : worst;
    for (unsigned i = 0; i < count; i++) {
        if (xml)
            open_row(2, "", "process_info");
        number(2 + xml, "GPU instance ID", "gpu_instance_id", "%llu", found[i].info.gpu_instance);
        number(2 + xml, "Compute instance ID", "compute_instance_id", "%llu", found[i].info.compute_instance);
        number(2 + xml, "Process ID", "pid", "%llu", found[i].info.pid);
        leaf(3, "Type", "type", found[i].kind);
        leaf(3, "Name", "process_name", found[i].name);
        unsigned long long memory = found[i].info.memory;
        number(3, "Used GPU Memory", "used_memory", "%llu MiB", memory == ~0ULL ? memory : memory >> 20);
        close_row(2, "process_info");
    }
}

/* Rows of a MIG device are in XML one deeper than in text, where no line stands for all of them. */
static void write_rows(const gpu *one, const row *rows, size_t count) {
    const row *opened[8];
    int open = 0;
    const int more = xml && rows == of_mig;
    char text[TEXT];
    for (size_t i = 0; i <= count; i++) {
        const row *of = i < count ? &rows[i] : &(const row){0};
        for (; open && of->depth <= opened[open - 1]->depth; open--)
            close_row(opened[open - 1]->depth + more, opened[open - 1]->element);
        if (i == count)
            break;
        if (!of->field || *of->field == '@') {
            if (xml || *of->label)
                open_row(of->depth + more, of->label, of->element);
            opened[open++] = of;
        }
        if (of->field && *of->field == '@')
            strcmp(of->element, "processes") ? write_migs(one) : write_processes(one);
        else if (of->field) {
            cell_of(one, of->field, text, NULL, 1);
            if (!strncmp(of->field, "temperature.", 12) && strcmp(text, "N/A") && strspn(text, "0123456789"))
                strcat(text, " C"); /* a query has no unit of it */
            leaf(of->depth + more, of->label, of->element, text);
        }
    }
}

int show_report(int as_xml) {
    char text[TEXT];
    int status = choose_gpus();
    if (status)
        return status;
    xml = as_xml;
    time_t now = time(NULL);
    puts(xml ? "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>"
             : "\n==============NVSMI LOG==============\n");
    strftime(text, sizeof text, "%a %b %e %H:%M:%S %Y", localtime(&now));
    leaf(0, "Timestamp", "timestamp", text);
    driver_version(text);
    leaf(0, "Driver Version", "driver_version", text);
    cuda_version(text);
    leaf(0, "CUDA Version", "cuda_version", text);
    cell_of(&gpus[0], "count", text, NULL, 0);
    leaf(0, "Attached GPUs", "attached_gpus", text);
    for (unsigned at = 0; at < gpu_count; at++) {
        printf(xml ? "\t<gpu id=\"%s\">\n" : "GPU %s\n", gpus[at].bus_id);
        write_rows(&gpus[at], layout, COUNT(layout));
        puts(xml ? "\t</gpu>" : "");
    }
    if (xml)
        puts("</nvidia_smi_log>");
    return worst;
}
