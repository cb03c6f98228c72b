/* gpukiln simulated nvidia-smi: shows GPUs that don't exist, of an instance of gpukiln's embedded cloud.
 *
 * NVIDIA's own program works with its driver's NVML only. This one asks the public functions of whatever
 * libnvidia-ml.so.1 is found, by the names that pynvml.py has, and one of gpukiln's own: gpukilnReset(device).
 * What it doesn't answer it refuses, with exit code 2. Forms of output: the texts, tables and exit codes of
 * NVIDIA's 535.261.03 (Debian package nvidia-smi, its manual page, what it answers on a machine without a GPU),
 * outputs that are quoted in public, and captures of newer ones; each file names its own.
 */
#include "smi.h"

#include <unistd.h>

#define SIMULATED "gpukiln simulated nvidia-smi: these GPUs do not exist"

static const char help[] =
    "NVSMI provides monitoring information for Tesla and select Quadro devices.\n\n" SIMULATED ".\n\n"
    "nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...\n\n"
    "    -h,   --help                Print usage information and exit.\n"
    "    --version                   Print version information and exit.\n"
    "    -L,   --list-gpus           Display a list of GPUs connected to the system.\n"
    "    <no arguments>              Show a summary of GPUs connected to the system.\n"
    "    -i,   --id=                 Target specific GPUs: index, UUID or PCI bus ID.\n"
    "    -f,   --filename=           Log to a file, rather than to stdout.\n"
    "    -l,   --loop=               Probe until Ctrl+C at this interval in seconds.\n"
    "    -lms, --loop-ms=            The same in milliseconds.\n"
    "    -q,   --query               Display GPU info; -d, --display= only those sections.\n"
    "    -x,   --xml-format          Produce XML output, with -q.\n"
    "    --query-gpu=                Information about GPU.\n"
    "    --query-supported-clocks=   List of supported clocks.\n"
    "    --query-compute-apps=       List of currently active compute processes.\n"
    "    --query-accounted-apps=     List of accounted compute processes.\n"
    "    --query-retired-pages=      List of retired pages.\n"
    "    --query-remapped-rows=      Information about remapped rows.\n"
    "    --help-query-...            What each of these can be asked for.\n"
    "    --format=                   csv (mandatory), noheader, nounits\n"
    "    -pm, -e, -p, -c, -r, -pl, -ac, -rac, -lgc, -rgc, -lmc, -rmc, -am, -caa, -mig\n"
    "                                Modify the device.\n"
    "    dmon | pmon                 Device and process statistics: -i -s -d -c -o -f\n"
    "    topo -m | -p2p r|w|n|a|p    nvlink -s | -e | -c\n"
    "    mig -lgip | -lgi | -lci | -cgi LIST [-C] | -cci [LIST] | -dgi | -dci [-gi LIST] [-ci LIST]\n";

enum { LIST, QUERY, XML, ID, DISPLAY, FORMAT, FILENAME, LOOP, LOOP_MS, FIRST_CHANGE };

static const struct {
    const char *shortest, *option;
    int has_value; /* 2: may have one */
} options[] = {
    [LIST] = {"-L", "--list-gpus", 0},
    [QUERY] = {"-q", "--query", 0},
    [XML] = {"-x", "--xml-format", 0},
    [ID] = {"-i", "--id", 1},
    [DISPLAY] = {"-d", "--display", 1},
    [FORMAT] = {"", "--format", 1},
    [FILENAME] = {"-f", "--filename", 1},
    [LOOP] = {"-l", "--loop", 2},
    [LOOP_MS] = {"-lms", "--loop-ms", 2},
    {"-pm", "--persistence-mode", 1},
    {"-e", "--ecc-config", 1},
    {"-p", "--reset-ecc-errors", 1},
    {"-c", "--compute-mode", 1},
    {"-r", "--gpu-reset", 0},
    {"-lgc", "--lock-gpu-clocks", 1},
    {"-rgc", "--reset-gpu-clocks", 0},
    {"-lmc", "--lock-memory-clocks", 1},
    {"-rmc", "--reset-memory-clocks", 0},
    {"-ac", "--applications-clocks", 1},
    {"-rac", "--reset-applications-clocks", 0},
    {"-pl", "--power-limit", 1},
    {"-am", "--accounting-mode", 1},
    {"-caa", "--clear-accounted-apps", 0},
    {"-mig", "--multi-instance-gpu", 1},
    {"", "--query-gpu", 1},
    {"", "--query-compute-apps", 1},
    {"", "--query-accounted-apps", 1},
    {"", "--query-retired-pages", 1},
    {"", "--query-remapped-rows", 1},
    {"", "--query-supported-clocks", 1},
};
#define OPTIONS (int)(sizeof options / sizeof *options)

/* What NVIDIA's has and this one hasn't. */
static const char unanswered[] =
    " -B --list-excluded-gpus -col --columns -u --unit --dtd --gom -vm --virt-mode -m --mode -lmcd"
    " --lock-memory-clocks-deferred -rmcd --reset-memory-clocks-deferred -sc --scope -cc --cuda-clocks"
    " --auto-boost-default --auto-boost-permission -gtt --gpu-target-temp -den --dram-encryption --set-hostname"
    " --get-hostname -eow --error-on-warning -t --toggle-led --debug daemon replay drain c2c clocks"
    " encodersessions fbcsessions vgpu compute-policy boost-slider power-hint base-clocks conf-compute gpm pci"
    " power-smoothing power-profiles rusd prm soc ";

static int print_help(void) {
    char text[TEXT];
    if (!open_library())
        nvml("nvmlInit_v2")();
    printf("NVIDIA System Management Interface -- v%s\n\n%s", driver_version(text) ? "unknown" : text, help);
    return OK;
}

/* The forms of 550, as 535 has none, and of 610 (a capture). */
static int print_version(void) {
    char driver[TEXT], library[TEXT], cuda[TEXT];
    if (driver_version(driver))
        strcpy(driver, "unknown");
    if (nvml("nvmlSystemGetNVMLVersion")(library, 80))
        strcpy(library, driver);
    const char *at = strchr(library, '.') && strlen(library) > strlen(driver) ? strchr(library, '.') + 1 : library;
    if (cuda_version(cuda))
        strcpy(cuda, "Not Found");
    printf("NVIDIA-SMI version  : %s\nNVML version        : %.*s\n", driver,
           (int)(strcspn(at, ".") + 1 + strcspn(at + strcspn(at, ".") + 1, ".")), at);
    printf(branch() < 610 ? "DRIVER version      : %s\nCUDA Version        : %s\n"
                          : "DRIVER version      : Deprecated, see \"KMD version\" instead\n"
                            "CUDA version        : Deprecated, see \"CUDA UMD version\" instead\n"
                            "KMD version         : %s\nCUDA UMD version    : %s\n",
           driver, cuda);
    puts(SIMULATED);
    return OK;
}

static int unknown_option(const char *word) {
    char name[TEXT];
    snprintf(name, sizeof name, " %.*s ", (int)strcspn(word, "="), word);
    return strstr(unanswered, name) ? bad_arguments() : not_recognized(word);
}

static int find_option(const char *word) {
    size_t length = strcspn(word, "=");
    for (int i = 0; i < OPTIONS; i++)
        if (!strcmp(options[i].shortest, word) ||
            (strlen(options[i].option) == length && !strncmp(options[i].option, word, length)))
            return i;
    return -1;
}

static int parse(int count, char **words, const char *said[]) {
    for (int at = 1; at < count; at++) {
        const char *word = words[at], *value = strchr(word, '=');
        int option = find_option(word);
        if (option < 0)
            return unknown_option(word);
        if (said[option])
            return bad_arguments();
        int has_value = options[option].has_value;
        if (!has_value && value)
            return not_recognized(word);
        if (value)
            value++;
        else if (has_value == 1 || (has_value && at + 1 < count && *words[at + 1] != '-'))
            value = at + 1 < count ? words[++at] : "";
        if (has_value == 1 && !*value) {
            printf("ERROR: Option %s is missing its value. Please run 'nvidia-smi -h' for help.\n\n", word);
            return INVALID;
        }
        said[option] = value ? value : "";
    }
    return OK;
}

static int once(const char *said[], int first) {
    int change = -1, commands = (said[LIST] != NULL) + (said[QUERY] != NULL);
    for (int i = FIRST_CHANGE; i < OPTIONS; i++)
        if (said[i]) {
            change = i;
            commands++;
        }
    int is_queried = change >= 0 && is_query(options[change].option);
    if (commands > 1 || (said[DISPLAY] && (!said[QUERY] || said[XML])) || (said[XML] && !said[QUERY]))
        return bad_arguments();
    if (is_queried && !said[FORMAT]) {
        puts("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n");
        return INVALID;
    }
    if (said[FORMAT] && !is_queried)
        return bad_arguments();
    if (is_queried)
        return query(options[change].option, said[change], said[FORMAT], first);
    if (said[LIST])
        return show_list();
    if (said[QUERY])
        return show_report(said[DISPLAY], said[XML] != NULL);
    return change >= 0 ? modify(options[change].option, said[change]) : show_table();
}

/* The interval in seconds; 0 without one, -1 for what is none. Without a number -l waits 5 s, -lms not at all (a
 * public log of 535.129.03 has 4 ms between its rows). */
static double interval(const char *said[]) {
    const char *value = said[LOOP] ? said[LOOP] : said[LOOP_MS];
    char *end;
    if (!value)
        return 0;
    if (!*value)
        return said[LOOP] ? 5 : 0.001;
    long number = strtol(value, &end, 10);
    return *end || number < 1 ? -1 : said[LOOP] ? (double)number : (double)number / 1000;
}

static int run(const char *said[]) {
    double wait = interval(said);
    if (wait < 0) {
        printf("ERROR: Option %s is invalid for %s. Please run 'nvidia-smi -h' for help.\n\n",
               said[LOOP] ? said[LOOP] : said[LOOP_MS], said[LOOP] ? "--loop" : "--loop-ms");
        return INVALID;
    }
    if (said[FILENAME] && !log_to(said[FILENAME]))
        return INVALID;
    chosen = said[ID];
    int status = once(said, 1);
    while (wait > 0 && !status) {
        pause_for(wait);
        status = once(said, 0);
    }
    return status;
}

int main(int count, char **words) {
    const char *said[OPTIONS] = {0};
    const char *first = count > 1 ? words[1] : "";
    if (!strcmp(first, "-h") || !strcmp(first, "--help"))
        return print_help();
    int status = start(); /* before it looks at what is asked, as NVIDIA's does */
    if (!status) {
        char name[TEXT];
        snprintf(name, sizeof name, "--%s", strncmp(first, "--help-", 7) ? "" : first + 7);
        if (!strcmp(first, "--version"))
            status = print_version();
        else if (is_query(name))
            status = help_query(name);
        else if (!strcmp(first, "topo"))
            status = topology(count - 2, words + 2);
        else if (!strcmp(first, "nvlink"))
            status = nvlink(count - 2, words + 2);
        else if (!strcmp(first, "mig"))
            status = mig(count - 2, words + 2);
        else if (!strcmp(first, "dmon") || !strcmp(first, "pmon"))
            status = monitor(*first == 'p', count - 2, words + 2);
        else if (!(status = parse(count, words, said)))
            status = run(said);
        nvml("nvmlShutdown")();
    }
    return exit_code(status);
}
