/* The stand-in nvidia-smi: dmon and pmon. Layout: dmon of 590 (a capture of utkuozdemir/nvidia_gpu_exporter) and of
 * 535.129.03 (a public log, with -s mutc and -o TD), pmon of 590 and 595; the other columns as in nvidia-smi(1). */
#include "smi.h"

#include <time.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* of the tables: what is left out is 0 */

typedef struct {
    char group; /* letter of -s */
    const char *name, *unit, *field;
} column;

static const column device_columns[] = {
    {'p', "pwr", "W", "power.draw"},
    {'p', "gtemp", "C", "temperature.gpu"},
    {'p', "mtemp", "C", "#f - 82"},
    {'u', "sm", "%", "utilization.gpu"},
    {'u', "mem", "%", "utilization.memory"},
    {'u', "enc", "%", "utilization.encoder"},
    {'u', "dec", "%", "utilization.decoder"},
    {'u', "jpg", "%", "utilization.jpeg"},
    {'u', "ofa", "%", "utilization.ofa"},
    {'c', "mclk", "MHz", "clocks.current.memory"},
    {'c', "pclk", "MHz", "clocks.current.graphics"},
    {'v', "pviol", "%", "@0"}, /* NVML_PERF_POLICY_POWER, _THERMAL */
    {'v', "tviol", "bool", "@1"},
    {'m', "fb", "MB", "memory.used"},
    {'m', "bar1", "MB", "#l BAR1MemoryInfo 2"},
    {'m', "ccpm", "MB", "protected_memory.used"},
    {'e', "sbecc", "errs", "ecc.errors.corrected.aggregate.total"},
    {'e', "dbecc", "errs", "ecc.errors.uncorrected.aggregate.total"},
    {'e', "pci", "errs", "#n PcieReplayCounter"},
    {'t', "rxpci", "MB/s", "#t PcieThroughput 1"},
    {'t', "txpci", "MB/s", "#t PcieThroughput 0"},
};

/* What is known of a process: numbers of its sample, memory after them. */
static const column process_columns[] = {
    {'u', "sm", "%"},  {'u', "mem", "%"}, {'u', "enc", "%"}, {'u', "dec", "%"},
    {'u', "jpg", "%"}, {'u', "ofa", "%"}, {'m', "fb", "MB"}, {'m', "ccpm", "MB"},
};

typedef struct {
    unsigned pid;
    unsigned long long time;
    unsigned load[4]; /* sm, memory, encoder, decoder */
} sample;

static const column *shown[64];
static unsigned shown_count;
static const char *stamps = ""; /* letters of -o */

static int choose_columns(const column *of, size_t count, const char *groups) {
    shown_count = 0;
    for (; *groups; groups++) {
        unsigned before = shown_count;
        for (size_t i = 0; i < count && shown_count < 64; i++)
            if (of[i].group == *groups)
                shown[shown_count++] = &of[i];
        if (shown_count == before)
            return 0;
    }
    return shown_count > 0;
}

static void print_head(int of_processes) {
    for (int second = 0; second < 2; second++) {
        const int stamped = *stamps != 0;
        if (strchr(stamps, 'D'))
            fputs(second ? "#YYYYMMDD" : "#Date    ", stdout);
        if (strchr(stamps, 'T'))
            fputs(strchr(stamps, 'D') ? second ? "   HH:MM:SS" : "   Time    " : second ? "#HH:MM:SS" : "#Time    ",
                  stdout);
        printf(stamped ? "%7s" : "# %s", second ? "Idx" : "gpu");
        if (of_processes)
            printf("%12s%7s", second ? "#" : "pid", second ? "C/G" : "type");
        for (unsigned i = 0; i < shown_count; i++)
            printf("%7s", second ? shown[i]->unit : shown[i]->name);
        puts(of_processes ? second ? "    name " : "    command " : " ");
    }
}

static void print_start(const gpu *one) {
    char text[32];
    time_t now = time(NULL);
    if (strchr(stamps, 'D'))
        printf(" %.*s", (int)strftime(text, sizeof text, "%Y%m%d", localtime(&now)), text);
    if (strchr(stamps, 'T'))
        printf(strchr(stamps, 'D') ? "   %.*s" : " %.*s",
               (int)strftime(text, sizeof text, "%H:%M:%S", localtime(&now)), text);
    printf(*stamps ? "%7u" : "%5u", one->index);
}

/* The share of the time since the last row in which power or heat slowed the GPU down; of heat, whether it did. */
static int violation(const gpu *one, int policy, char *text) {
    static unsigned long long before[MAX_GPUS][2][2];
    unsigned long long now[2] = {0}, *last = before[one->index % MAX_GPUS][policy]; /* us, ns */
    int status = nvml("nvmlDeviceGetViolationStatus")(one->handle, policy, now);
    unsigned long long slowed = last[0] ? now[1] - last[1] : 0, passed = now[0] - last[0];
    sprintf(text, "%llu", policy ? slowed > 0 : passed ? slowed / 10 / passed : 0);
    memcpy(last, now, sizeof now);
    return status;
}

static void print_device(const gpu *one) {
    print_start(one);
    for (unsigned i = 0; i < shown_count; i++) {
        char text[TEXT];
        const char *field = shown[i]->field;
        int missing = (*field == '@' ? violation(one, field[1] - '0', text) : cell_of(one, field, text, NULL)) ||
                      !strcmp(text, "N/A");
        if (!missing && shown[i]->group == 't')
            sprintf(text, "%lu", strtoul(text, NULL, 10) / 1024);
        text[strcspn(text, ".")] = 0; /* watts are whole */
        printf("%7s", missing ? "-" : text);
    }
    puts(" ");
}

static void print_cell(long long value) {
    if (value < 0)
        printf("%7s", "-");
    else
        printf("%7lld", value);
}

static void print_processes(const gpu *one) {
    static process found[MAX_PROCESSES];
    sample samples[MAX_PROCESSES];
    unsigned count = 0, sampled = MAX_PROCESSES;
    if (list_processes(one->handle, found, &count, 0) == LOST)
        worst = LOST;
    if (nvml("nvmlDeviceGetProcessUtilization")(one->handle, samples, &sampled, 0ULL))
        sampled = 0;
    for (unsigned i = 0; i < count || i == 0; i++) {
        const process *app = count ? &found[i] : NULL;
        const sample *of = NULL;
        for (unsigned j = 0; app && j < sampled; j++)
            if (samples[j].pid == app->info.pid)
                of = &samples[j];
        print_start(one);
        if (app)
            printf("%11u%6s", app->info.pid, app->kind);
        else
            printf("%11s%6s", "-", "-");
        for (unsigned k = 0; k < shown_count; k++) {
            long at = shown[k] - process_columns;
            print_cell(at == 6 && app ? (long long)(app->info.memory >> 20)
                       : at < 4 && of ? (long long)of->load[at]
                                      : -1);
        }
        const char *slash = app ? strrchr(app->name, '/') : NULL;
        printf("    %-15.15s\n", !app ? "-" : slash ? slash + 1 : app->name);
    }
}

/* A number after an option, at least `least`. */
static int number(const char *text, long least, long *value) {
    char *end;
    *value = strtol(text, &end, 10);
    return *text && !*end && *value >= least;
}

int monitor(int of_processes, int count, char **words) {
    const char *groups = of_processes ? "u" : "puc";
    long times = 0, seconds = 1;
    for (int at = 0; at < count; at++) {
        const char *option = words[at], *value = at + 1 < count ? words[++at] : "";
        int right = 1;
        if (!strcmp(option, "-i") || !strcmp(option, "--id"))
            right = *(chosen = value) != 0;
        else if (!strcmp(option, "-s") || !strcmp(option, "--select"))
            groups = value;
        else if (!strcmp(option, "-c") || !strcmp(option, "--count"))
            right = number(value, 1, &times);
        else if (!strcmp(option, "-d") || !strcmp(option, "--delay"))
            right = number(value, 1, &seconds) && seconds <= 10;
        else if (!strcmp(option, "-o") || !strcmp(option, "--options"))
            right = *value && value[strspn(value, "DT")] == 0 && (stamps = value);
        else if (!strcmp(option, "-f") || !strcmp(option, "--filename"))
            right = *value && log_to(value);
        else
            return not_recognized(option);
        if (!right) {
            printf("ERROR: Option %s is invalid for %s. Please run 'nvidia-smi -h' for help.\n\n", value, option);
            return INVALID;
        }
    }
    if (!(of_processes ? choose_columns(process_columns, sizeof process_columns / sizeof *process_columns, groups)
                       : choose_columns(device_columns, sizeof device_columns / sizeof *device_columns, groups)))
        return bad_arguments();
    int status = choose_gpus();
    for (long time = 0; !status && (!times || time < times); time++) {
        if (time)
            pause_for((double)seconds);
        if (time % 20 == 0)
            print_head(of_processes);
        for (unsigned at = 0; at < gpu_count; at++)
            (of_processes ? print_processes : print_device)(&gpus[at]);
    }
    return status ? status : worst;
}
