/* The stand-in nvidia-smi: -L and the summary. Layout: strings of nvidia-smi 535.261.03, and its output as
 * quoted in public (a T4 under 535.104.05, an A30 with MIG under 535). */
#include "smi.h"

#include <time.h>

int mig_count(void *device, unsigned *count) {
    unsigned enabled = 0, pending = 0;
    *count = 0;
    int status = nvml("nvmlDeviceGetMigMode")(device, &enabled, &pending);
    if (status || !enabled)
        return status && !unsupported(status) ? status : OK;
    status = nvml("nvmlDeviceGetMaxMigDeviceCount")(device, count);
    return unsupported(status) ? OK : status;
}

int mig_device(void *device, unsigned position, void **mig) {
    return nvml("nvmlDeviceGetMigDeviceHandleByIndex")(device, position, mig);
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
            status = mig_count(gpus[at].handle, &count);
        for (unsigned i = 0; !status && i < count; i++) {
            void *mig;
            if (mig_device(gpus[at].handle, i, &mig))
                continue;
            if ((status = mig_name(mig, name)) || (status = nvml("nvmlDeviceGetUUID")(mig, uuid, 96)))
                return status;
            printf("  %-15s Device %2u: (UUID: %s)\n", name, i, uuid);
        }
    }
    return status;
}

static int worst;

/* A cell: N/A for what isn't supported, ERR! for what fails. */
static int cell(const gpu *one, const char *field, char *text) {
    const char *unit;
    int status = value_of(one, field, text, &unit);
    if (status)
        strcpy(text, unsupported(status) ? "N/A" : "ERR!");
    if (status == LOST)
        worst = LOST;
    return status;
}

static void shortened(char *text, size_t width) {
    if (strlen(text) > width)
        strcpy(text + width - 3, "...");
}

static void print_usage(const gpu *one, const char *used, const char *total, char *text) {
    char a[TEXT], b[TEXT];
    if (cell(one, used, a) || cell(one, total, b))
        sprintf(text, "%20s", strcmp(a, "ERR!") ? "N/A" : a);
    else
        snprintf(text, 64, " %5.12sMiB / %5.12sMiB", a, b);
}

static void whole_watts(const gpu *one, const char *field, char *text) {
    if (!cell(one, field, text))
        sprintf(text, "%3.0fW", strtod(text, NULL));
}

static void print_gpu(const gpu *one) {
    char name[TEXT], fan[TEXT], heat[TEXT], state[TEXT], draw[TEXT], limit[TEXT], usage[TEXT], load[TEXT],
        mode[TEXT], persistence[TEXT], display[TEXT], ecc[TEXT], mig[TEXT];
    cell(one, "name", name);
    shortened(name, 27);
    if (!cell(one, "persistence_mode", persistence))
        strcpy(persistence, strcmp(persistence, "Enabled") ? "Off" : "On");
    if (cell(one, "display_active", display))
        strcpy(display, "Off");
    else
        strcpy(display, strcmp(display, "Enabled") ? "Off" : "On");
    int status = cell(one, "mig.mode.current", mig);
    int partitioned = !status && !strcmp(mig, "Enabled");
    if (!cell(one, "ecc.mode.current", ecc)) {
        if (strcmp(ecc, "Enabled"))
            strcpy(ecc, "Off");
        else if (partitioned)
            strcpy(ecc, "On"); /* the errors are in the table of MIG devices */
        else
            cell(one, "ecc.errors.uncorrected.volatile.total", ecc);
    }
    printf("| %3u  %-27s   %4s | %-16s%4s | %20s |\n", one->index, name, persistence, one->bus_id, display,
           ecc);
    if (!cell(one, "fan.speed", fan))
        strcat(fan, "%");
    if (!cell(one, "temperature.gpu", heat))
        strcat(heat, "C");
    cell(one, "pstate", state);
    whole_watts(one, "power.draw", draw);
    whole_watts(one, "power.limit", limit);
    print_usage(one, "memory.used", "memory.total", usage);
    if (!cell(one, "utilization.gpu", load))
        strcat(load, "%");
    cell(one, "compute_mode", mode);
    if (!strncmp(mode, "Exclusive", 9))
        sprintf(mode, "E. %s", strstr(mode, "Thread") ? "Thread" : "Process");
    printf("|%4.4s  %4.4s %5.5s             %4.4s / %4.4s | %20.20s |    %4.4s   %10.10s |\n", fan, heat, state,
           draw, limit, usage, load, mode);
    printf("|                                         |                      |           %10.10s |\n"
           "+-----------------------------------------+----------------------+----------------------+\n",
           mig);
}

static const char blank[] =
    "                                                                                         \n";
static const char line[] =
    "+---------------------------------------------------------------------------------------+\n";

static int print_mig(const gpu *one, unsigned position) {
    struct {
        unsigned processors, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
        unsigned long long memory;
    } has = {0};
    gpu mig = {.index = one->index};
    unsigned gi = 0, ci = 0;
    unsigned long long errors = 0;
    char usage[TEXT], bar[TEXT], wrong[TEXT];
    if (mig_device(one->handle, position, &mig.handle))
        return 0;
    nvml("nvmlDeviceGetGpuInstanceId")(mig.handle, &gi);
    nvml("nvmlDeviceGetComputeInstanceId")(mig.handle, &ci);
    nvml("nvmlDeviceGetAttributes_v2")(mig.handle, &has);
    print_usage(&mig, "memory.used", "memory.total", usage);
    print_usage(&mig, "bar1.used", "bar1.total", bar);
    sprintf(wrong, nvml("nvmlDeviceGetTotalEccErrors")(mig.handle, 1, 0, &errors) ? "N/A" : "%llu", errors);
    printf("|%3u %4u%4u %3u  |          %-21.21s |%3u   %4.4s |%3u %3u  %3u  %3u  %3u |\n", one->index, gi, ci,
           position, usage, has.processors, wrong, has.copy, has.encoders, has.decoders, has.ofa, has.jpeg);
    printf("|                  |          %-21.21s |           |                       |\n"
           "+------------------+--------------------------------+-----------+-----------------------+\n",
           bar);
    return 1;
}

static void print_migs(void) {
    unsigned partitioned = 0, shown = 0, count;
    for (unsigned at = 0; at < gpu_count; at++) {
        char mode[TEXT];
        partitioned += !cell(&gpus[at], "mig.mode.current", mode) && !strcmp(mode, "Enabled");
    }
    if (!partitioned)
        return;
    fputs(blank, stdout);
    fputs(line, stdout);
    puts("| MIG devices:                                                                          |\n"
         "+------------------+--------------------------------+-----------+-----------------------+\n"
         "| GPU  GI  CI  MIG |                   Memory-Usage |        Vol|      Shared           |\n"
         "|      ID  ID  Dev |                     BAR1-Usage | SM     Unc| CE ENC DEC OFA JPG    |\n"
         "|                  |                                |        ECC|                       |\n"
         "|==================+================================+===========+=======================|");
    for (unsigned at = 0; at < gpu_count; at++) {
        mig_count(gpus[at].handle, &count);
        for (unsigned i = 0; i < count; i++)
            shown += print_mig(&gpus[at], i);
    }
    if (!shown) {
        puts("|  No MIG devices found                                                                 |");
        fputs(line, stdout);
    }
}

static void instance(unsigned number, char *text) {
    if (number == ALL)
        strcpy(text, "N/A");
    else
        sprintf(text, "%u", number);
}

static unsigned print_processes(const gpu *one) {
    static process found[256];
    unsigned count = 0;
    int status = list_processes(one->handle, found, 256, &count, 0);
    if (status == LOST)
        worst = LOST;
    for (unsigned i = 0; i < count; i++) {
        char gi[16], ci[16], memory[32], *name = found[i].name;
        size_t length = strlen(name);
        if (length > 38)
            memcpy(name += length - 38, "...", 3);
        instance(found[i].info.gpu_instance, gi);
        instance(found[i].info.compute_instance, ci);
        strcpy(memory, "N/A");
        if (found[i].info.memory != ~0ULL)
            sprintf(memory, "%lluMiB", found[i].info.memory >> 20);
        printf("|%5u%6s%5s%10u%7s   %-38s%12s |\n", one->index, gi, ci, found[i].info.pid, found[i].kind, name,
               memory);
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
    strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", localtime(&now));
    printf("%-31s\n%s", when, line);
    printf("| NVIDIA-SMI %-22.22s Driver Version: %-12.12s CUDA Version: %-9.9s|\n", driver, driver, cuda);
    puts("|-----------------------------------------+----------------------+----------------------+\n"
         "| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |\n"
         "| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |\n"
         "|                                         |                      |               MIG M. |\n"
         "|=========================================+======================+======================|");
    for (unsigned at = 0; at < gpu_count; at++)
        print_gpu(&gpus[at]);
    print_migs();
    fputs(blank, stdout);
    fputs(line, stdout);
    puts("| Processes:                                                                            |\n"
         "|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |\n"
         "|        ID   ID                                                             Usage      |\n"
         "|=======================================================================================|");
    unsigned running = 0;
    for (unsigned at = 0; at < gpu_count; at++)
        running += print_processes(&gpus[at]);
    if (!running)
        puts("|  No running processes found                                                           |");
    fputs(line, stdout);
    return worst;
}
