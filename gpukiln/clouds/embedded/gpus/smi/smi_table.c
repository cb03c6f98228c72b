/* The stand-in nvidia-smi: -L and the summary. Layout: strings of nvidia-smi 535.261.03, and its output as
 * quoted in public (a T4 under 535.104.05, an A30 with MIG under 535); from 550 on it is wider, as captures of 590 to
 * 610 have it (utkuozdemir/nvidia_gpu_exporter). */
#include "smi.h"

#include <time.h>

/* Places of MIG devices on a GPU; one without a device is NULL. */
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

/* `1g.5gb` of "NVIDIA A100-SXM4-40GB MIG 1g.5gb". */
int mig_name(void *mig, char *text) {
    char name[TEXT];
    int status = nvml("nvmlDeviceGetName")(mig, name, 96);
    const char *at = status ? NULL : strstr(name, "MIG ");
    snprintf(text, TEXT, "%s", at ? at : "MIG");
    return status;
}

int show_list(void) {
    char name[TEXT], uuid[TEXT];
    void *migs[MAX_GPUS];
    int status = choose_gpus();
    for (unsigned at = 0; !status && at < gpu_count; at++) {
        unsigned count = 0;
        if ((status = nvml("nvmlDeviceGetName")(gpus[at].handle, name, 96))) {
            printf("Unable to determine the product name for gpu %s: %s\n", gpus[at].bus_id,
                   error_text(status));
            return status;
        }
        if ((status = nvml("nvmlDeviceGetUUID")(gpus[at].handle, uuid, 96)))
            strcpy(uuid, error_text(status));
        printf("GPU %u: %s (UUID: %s)\n", gpus[at].index, name, uuid);
        if (!status)
            count = mig_devices(gpus[at].handle, migs, &status);
        for (unsigned i = 0; !status && i < count; i++)
            if (migs[i] && !(status = mig_name(migs[i], name)) &&
                !(status = nvml("nvmlDeviceGetUUID")(migs[i], uuid, 96)))
                printf("  %-15s Device %2u: (UUID: %s)\n", name, i, uuid);
    }
    return status;
}

static int wide; /* how many columns more than 535 has */

/* A cell with its unit: N/A for what isn't supported, ERR! for what fails. */
static const char *cell(const gpu *one, const char *field, const char *unit, char *text) {
    if (!cell_of(one, field, text, "ERR!"))
        strcat(text, unit);
    return text;
}

static const char *on_off(const gpu *one, const char *field, char *text) {
    if (!cell_of(one, field, text, "ERR!"))
        strcpy(text, strcmp(text, "Enabled") ? "Off" : "On");
    return text;
}

static const char *watts(const gpu *one, const char *field, char *text) {
    if (!cell_of(one, field, text, "ERR!"))
        sprintf(text, "%3.0fW", strtod(text, NULL));
    return text;
}

/* "used / total", the numbers as wide as a column has them, or what stands for both. */
static void print_usage(const gpu *one, const char *used, const char *total, int left, int right) {
    char a[TEXT], b[TEXT];
    if (cell_of(one, used, a, "ERR!") || cell_of(one, total, b, "ERR!"))
        printf("%*s", left + 3 + right, strcmp(a, "ERR!") ? "N/A" : a);
    else
        printf("%*.12sMiB / %*.12sMiB", left - 3, a, right - 3, b);
}

static void rule(char edge, char fill) {
    const int widths[] = {41, 22 + wide, 22};
    for (int i = 0; i < 3; i++) {
        putchar(i ? '+' : edge);
        for (int n = 0; n < widths[i]; n++)
            putchar(fill);
    }
    puts(fill == '-' ? "+" : "|");
}

static void print_gpu(const gpu *one) {
    char a[TEXT], b[TEXT], c[TEXT], d[TEXT];
    cell(one, "name", "", a);
    if (strlen(a) > 27)
        strcpy(a + 24, "...");
    on_off(one, "ecc.mode.current", d);
    if (!strcmp(d, "On") && !is_enabled(one, "mig.mode.current")) /* with MIG, its devices have the errors */
        cell(one, "ecc.errors.uncorrected.volatile.total", "", d);
    on_off(one, "persistence_mode", b);
    printf(wide ? "| %3u  %-27s    %-3.3s |" : "| %3u  %-27s   %4s |", one->index, a, b);
    printf("%*s%-16s%4s | %20s |\n", wide + 1, "", one->bus_id, is_enabled(one, "display_active") ? "On" : "Off", d);
    printf("|%4.4s  %4.4s %5.5s ", cell(one, "fan.speed", "%", a), cell(one, "temperature.gpu", "C", b),
           cell(one, "pstate", "", c));
    printf(wide ? "%15.6s / %5.5s |" : "%16.4s / %4.4s |", watts(one, "power.draw", a), watts(one, "power.limit", b));
    print_usage(one, "memory.used", "memory.total", 10 + wide / 2, 8 + wide / 2);
    cell(one, "compute_mode", "", d);
    if (!strncmp(d, "Exclusive", 9))
        strcpy(d, strstr(d, "Thread") ? "E. Thread" : "E. Process");
    printf(" |    %4.4s   %10.10s |\n", cell(one, "utilization.gpu", "%", a), d);
    printf("|%41s|%*s|%21.10s |\n", "", 22 + wide, "", cell(one, "mig.mode.current", "", a));
    rule('+', '-');
}

static void line(void) {
    printf("+%.*s+\n", 87 + wide,
           "-----------------------------------------------------------------------------------------");
}

static void print_mig(const gpu *one, void *handle, unsigned position) {
    static const char *const fields[] = {
        "#n GpuInstanceId",   "#n ComputeInstanceId", "#n Attributes_v2 0", "ecc.errors.uncorrected.volatile.total",
        "#n Attributes_v2 1", "#n Attributes_v2 3",   "#n Attributes_v2 2", "#n Attributes_v2 5",
        "#n Attributes_v2 4"};
    const gpu mig = {.index = one->index, .handle = handle};
    char of[9][TEXT];
    for (int i = 0; i < 9; i++)
        cell(&mig, fields[i], "", of[i]);
    printf("|%3u %4s%4s %3u  |", one->index, of[0], of[1], position);
    print_usage(&mig, "memory.used", "memory.total", 19, 8);
    printf("%*s|%3s   %4.4s |%3s %3s  %3s  %3s  %3s |\n|%18s|", 2 + wide, "", of[2], of[3], of[4], of[5], of[6], of[7],
           of[8], "");
    print_usage(&mig, "#l BAR1MemoryInfo 2", "#l BAR1MemoryInfo 0", 19, 8);
    printf("%*s|           |                       |\n", 2 + wide, "");
    printf("+------------------+%.*s+-----------+-----------------------+\n", 32 + wide,
           "----------------------------------");
}

static void print_migs(void) {
    unsigned partitioned = 0, shown = 0;
    void *migs[MAX_GPUS];
    for (unsigned at = 0; at < gpu_count; at++)
        partitioned += (unsigned)is_enabled(&gpus[at], "mig.mode.current");
    if (!partitioned)
        return;
    printf("%*s\n", wide ? 0 : 89, "");
    line();
    printf("| MIG devices:%*s|\n+------------------+%.*s+-----------+-----------------------+\n", 74 + wide, "",
           32 + wide, "----------------------------------");
    printf("| GPU  GI  CI  MIG |%*s |        Vol|%s|\n|      ID  ID  Dev |%*s | SM     Unc|%s|\n", 31 + wide,
           wide ? "Shared Memory-Usage" : "Memory-Usage", wide ? "        Shared         " : "      Shared           ",
           31 + wide, wide ? "Shared BAR1-Usage" : "BAR1-Usage",
           wide ? " CE ENC  DEC  OFA  JPG " : " CE ENC DEC OFA JPG    ");
    printf("|%18s|%*s|        ECC|%23s|\n|==================+%.*s+===========+=======================|\n", "",
           32 + wide, "", "", 32 + wide, "==================================");
    for (unsigned at = 0; at < gpu_count; at++) {
        int status;
        unsigned count = mig_devices(gpus[at].handle, migs, &status);
        for (unsigned i = 0; i < count; i++)
            if (migs[i] && ++shown)
                print_mig(&gpus[at], migs[i], i);
    }
    if (!shown) {
        printf("|  No MIG devices found%*s|\n", 65 + wide, "");
        line();
    }
}

static unsigned print_processes(const gpu *one) {
    static process found[MAX_PROCESSES];
    unsigned count = 0;
    const int columns = wide ? 34 : 38;
    if (list_processes(one->handle, found, &count, 0) == LOST)
        worst = LOST;
    for (unsigned i = 0; i < count; i++) {
        char gi[16] = "N/A", ci[16] = "N/A", memory[32] = "N/A", *name = found[i].name;
        size_t length = strlen(name);
        if (length > (size_t)columns)
            memcpy(name += length - (size_t)columns, "...", 3);
        if (found[i].info.gpu_instance != ALL)
            sprintf(gi, "%u", found[i].info.gpu_instance);
        if (found[i].info.compute_instance != ALL)
            sprintf(ci, "%u", found[i].info.compute_instance);
        if (found[i].info.memory != ~0ULL)
            sprintf(memory, "%lluMiB", found[i].info.memory >> 20);
        printf("|%5u%6s%5s%*u%7s   %-*s%12s |\n", one->index, gi, ci, wide ? 16 : 10, found[i].info.pid, found[i].kind,
               columns, name, memory);
    }
    return count;
}

int show_table(void) {
    char driver[TEXT], cuda[TEXT], when[64];
    time_t now = time(NULL);
    int status = choose_gpus();
    if (status)
        return status;
    if (driver_version(driver))
        strcpy(driver, "N/A");
    if (cuda_version(cuda))
        strcpy(cuda, "N/A");
    wide = branch() < 550 ? 0 : 2;
    strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", localtime(&now));
    printf("%-31s\n", when);
    line();
    printf(branch() < 610 ? "| NVIDIA-SMI %-22.22s Driver Version: %-*.12s CUDA Version: %-9.9s|\n"
                          : "| NVIDIA-SMI %-22.22s KMD Version: %-*.12s CUDA UMD Version: %-9.9s|\n",
           driver, branch() < 610 ? 12 + wide : 13, driver, cuda);
    rule(branch() < 580 ? '|' : '+', '-');
    printf("| GPU  Name                 Persistence-M | Bus-Id%*s        Disp.A | Volatile Uncorr. ECC |\n"
           "| Fan  Temp   Perf          Pwr:Usage/Cap |%*s         Memory-Usage | GPU-Util  Compute M. |\n"
           "|%41s|%*s|               MIG M. |\n",
           wide, "", wide, "", "", 22 + wide, "");
    rule('|', '=');
    for (unsigned at = 0; at < gpu_count; at++)
        print_gpu(&gpus[at]);
    print_migs();
    printf("%*s\n", wide ? 0 : 89, "");
    line();
    printf("| Processes:%*s|\n|  GPU   GI   CI%*s        PID   Type   Process name%*s                    GPU Memory |\n"
           "|        ID   ID%*sUsage      |\n|%.*s|\n",
           76 + wide, "", wide * 3, "", wide ? 4 : 8, "", 61 + wide, "", 87 + wide,
           "=========================================================================================");
    unsigned running = 0;
    for (unsigned at = 0; at < gpu_count; at++)
        running += print_processes(&gpus[at]);
    if (!running)
        printf("|  No running processes found%*s|\n", 59 + wide, "");
    line();
    return worst;
}
