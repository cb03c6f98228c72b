/* gpukiln simulated nvidia-smi: shows GPUs that don't exist, of an instance of gpukiln's embedded cloud.
 *
 * NVIDIA's own program works with its driver's NVML only. This one asks the public functions of whatever
 * libnvidia-ml.so.1 is found, by the names that pynvml.py has, and one of gpukiln's own: gpukilnReset(device).
 * What it doesn't answer it refuses, with exit code 2. Forms of output: the texts, tables and exit codes of
 * NVIDIA's 535.261.03 (Debian package nvidia-smi, its manual page, what it answers on a machine without a GPU),
 * and outputs of it that are quoted in public.
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
    "    -q,   --query               Display GPU info; -d, --display= only those sections.\n"
    "    --query-gpu=                Information about GPU.\n"
    "    --query-compute-apps=       List of currently active compute processes.\n"
    "    --format=                   csv (mandatory), noheader, nounits\n"
    "    -pm, -mig, -pl, -c, -r      Persistence, MIG, power limit, compute mode, reset.\n"
    "    topo -m | -p2p r|w|n|a|p    nvlink -s | -e\n"
    "    mig -lgip | -lgi | -lci | -cgi LIST [-C] | -cci [LIST] | -dgi | -dci [-gi LIST] [-ci LIST]\n";

static const struct {
    const char *shortest, *option;
    int has_value;
} options[] = {
    {"-L", "--list-gpus", 0},
    {"-q", "--query", 0},
    {"-i", "--id", 1},
    {"-d", "--display", 1},
    {"-pm", "--persistence-mode", 1},
    {"-mig", "--multi-instance-gpu", 1},
    {"-pl", "--power-limit", 1},
    {"-c", "--compute-mode", 1},
    {"-r", "--gpu-reset", 0},
    {"", "--query-gpu", 1},
    {"", "--query-compute-apps", 1},
    {"", "--format", 1},
};

/* What NVIDIA's has and this one hasn't. */
static const char unanswered[] =
    " -B --list-excluded-gpus -f --filename -l --loop -lms --loop-ms -u --unit -x --xml-format --dtd -e"
    " --ecc-config -p --reset-ecc-errors --gom -vm --virt-mode -lgc --lock-gpu-clocks -m --mode -rgc"
    " --reset-gpu-clocks -lmc --lock-memory-clocks -rmc --reset-memory-clocks -lmcd"
    " --lock-memory-clocks-deferred -rmcd --reset-memory-clocks-deferred -ac --applications-clocks -rac"
    " --reset-applications-clocks -sc --scope -cc --cuda-clocks -am --accounting-mode -caa"
    " --clear-accounted-apps --auto-boost-default --auto-boost-permission -gtt --gpu-target-temp -eow"
    " --error-on-warning -t --toggle-led --debug --query-supported-clocks --query-accounted-apps"
    " --query-retired-pages --query-remapped-rows --help-query-gpu --help-query-compute-apps dmon daemon"
    " replay pmon drain c2c clocks encodersessions fbcsessions vgpu compute-policy boost-slider power-hint"
    " base-clocks conf-compute gpm ";

static int print_help(void) {
    char text[TEXT];
    if (!open_library())
        nvml("nvmlInit_v2")();
    printf("NVIDIA System Management Interface -- v%s\n\n%s", driver_version(text) ? "unknown" : text, help);
    return OK;
}

/* The form of 550, as 535 has none. */
static int print_version(void) {
    char driver[TEXT], library[TEXT], cuda[TEXT];
    if (driver_version(driver))
        strcpy(driver, "unknown");
    if (nvml("nvmlSystemGetNVMLVersion")(library, 80))
        strcpy(library, driver);
    const char *number = strchr(library, '.');
    int status = cuda_version(cuda);
    printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version        "
           ": %s\n%s\n",
           driver, number && strlen(library) > strlen(driver) ? number + 1 : library, driver,
           status ? "Not Found" : cuda, SIMULATED);
    return OK;
}

enum { LIST, QUERY, ID, DISPLAY, FIRST_CHANGE, RESET = 8, QUERY_GPU, QUERY_APPS, FORMAT, OPTIONS };

static int unknown_option(const char *word) {
    char wanted[TEXT];
    snprintf(wanted, sizeof wanted, " %.*s ", (int)strcspn(word, "="), word);
    return strstr(unanswered, wanted) ? bad_arguments() : not_recognized(word);
}

static int find_option(const char *word) {
    size_t length = strcspn(word, "=");
    for (int i = 0; i < OPTIONS; i++)
        if (!strcmp(options[i].shortest, word) ||
            (strlen(options[i].option) == length && !strncmp(options[i].option, word, length)))
            return i;
    return -1;
}

static int parse(int count, char **words, const char *said[OPTIONS]) {
    for (int at = 1; at < count; at++) {
        int option = find_option(words[at]);
        if (option < 0)
            return unknown_option(words[at]);
        if (said[option])
            return bad_arguments();
        const char *value = strchr(words[at], '=');
        if (!options[option].has_value && value)
            return not_recognized(words[at]);
        if (options[option].has_value && !value && at + 1 < count)
            value = words[++at];
        else if (value)
            value++;
        if (options[option].has_value && (!value || !*value)) {
            printf("ERROR: Option %s is missing its value. Please run 'nvidia-smi -h' for help.\n\n",
                   words[at]);
            return INVALID;
        }
        said[option] = value ? value : "";
    }
    return OK;
}

static int run(const char *said[OPTIONS]) {
    int commands = 0, change = -1;
    for (int i = 0; i < OPTIONS; i++) {
        commands += said[i] && i != ID && i != DISPLAY && i != FORMAT;
        if (said[i] && i >= FIRST_CHANGE && i <= RESET)
            change = i;
    }
    if (commands > 1 || (said[DISPLAY] && !said[QUERY]))
        return bad_arguments();
    if ((said[QUERY_GPU] || said[QUERY_APPS]) && !said[FORMAT]) {
        puts("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n");
        return INVALID;
    }
    if (said[FORMAT] && !said[QUERY_GPU] && !said[QUERY_APPS])
        return bad_arguments();
    chosen = said[ID];
    if (said[QUERY_GPU])
        return query_gpus(said[QUERY_GPU], said[FORMAT]);
    if (said[QUERY_APPS])
        return query_processes(said[QUERY_APPS], said[FORMAT]);
    if (said[LIST])
        return show_list();
    if (said[QUERY])
        return show_report(said[DISPLAY]);
    return change >= 0 ? modify(options[change].option, said[change]) : show_table();
}

int main(int count, char **words) {
    const char *said[OPTIONS] = {0};
    const char *first = count > 1 ? words[1] : "";
    if (!strcmp(first, "-h") || !strcmp(first, "--help"))
        return print_help();
    int status = start(); /* before it looks at what is asked, as NVIDIA's does */
    if (!status) {
        if (!strcmp(first, "--version"))
            status = print_version();
        else if (!strcmp(first, "topo"))
            status = topology(count - 2, words + 2);
        else if (!strcmp(first, "nvlink"))
            status = nvlink(count - 2, words + 2);
        else if (!strcmp(first, "mig"))
            status = mig(count - 2, words + 2);
        else if (!(status = parse(count, words, said)))
            status = run(said);
        nvml("nvmlShutdown")();
    }
    return exit_code(status);
}
