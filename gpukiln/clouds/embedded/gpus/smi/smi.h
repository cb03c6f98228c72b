/* The stand-in nvidia-smi; smi.c says what it is. Layouts of NVML are those that pynvml.py (nvidia-ml-py)
 * declares. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT 512
#define MAX_GPUS 64
#define ALL (~0U)

enum {
    OK = 0,
    INVALID = 2,
    UNSUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    TOO_SMALL = 7,
    NO_DRIVER = 9,
    NO_LIBRARY = 12,
    NO_FUNCTION = 13,
    LOST = 15,
    MISMATCH = 18,
    UNKNOWN = 999
};

typedef int nvml_function(); /* the arguments are the caller's to know */

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} pci_info;

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process_info;

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type;
    int status;
    union {
        double real;
        unsigned whole;
        int number;
        unsigned long long count;
    } value;
} field_value;

typedef struct {
    unsigned index;
    void *handle;
    char bus_id[32];
} gpu;

extern gpu gpus[MAX_GPUS]; /* those that -i chose, or all */
extern unsigned gpu_count;
extern const char *chosen; /* what -i said, or NULL */

/* A function of the library by name; one that answers "not supported" where the library lacks it. */
nvml_function *nvml(const char *name);
const char *error_text(int status);
int exit_code(int status);
int open_library(void);
int start(void);
int choose_gpus(void);
int driver_version(char *text);
int cuda_version(char *text);
int field_number(void *device, unsigned field, unsigned scope, double *result);
int unsupported(int status);
int bad_arguments(void);
int not_recognized(const char *option);

/* The process list of a GPU: how many, at most `room`; kind is a row's letters. */
typedef struct {
    process_info info;
    char kind[4], name[TEXT];
} process;
int list_processes(void *device, process *found, unsigned room, unsigned *count, int only_compute);

/* One value of a GPU as --query-gpu shows it, without its unit; the unit is "" where it has none. */
int value_of(const gpu *one, const char *field, char *text, const char **unit);

int mig_count(void *device, unsigned *count);
int mig_device(void *device, unsigned position, void **mig);
int mig_name(void *mig, char *text);

int query_gpus(const char *fields, const char *format);
int query_processes(const char *fields, const char *format);
int show_list(void);
int show_table(void);
int show_report(const char *sections);
int topology(int count, char **words);
int nvlink(int count, char **words);
int mig(int count, char **words);
int modify(const char *option, const char *value);
