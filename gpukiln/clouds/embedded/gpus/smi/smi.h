/* The stand-in nvidia-smi; smi.c says what it is. Layouts of NVML are those of nvml.h and pynvml.py. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT 512
#define MAX_GPUS 64
#define MAX_PROCESSES 256
#define ALL (~0U)

enum {
    OK = 0,
    INVALID = 2,
    UNSUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    NO_DRIVER = 9,
    NO_LIBRARY = 12,
    NO_FUNCTION = 13,
    LOST = 15,
    MISMATCH = 18,
    IN_USE = 19,
    OTHER_VERSION = 25,
    DEPRECATED = 26,
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
    process_info info;
    char kind[4], name[TEXT]; /* C, G or C+G */
} process;

typedef struct {
    unsigned index;
    void *handle;
    char bus_id[32];
} gpu;

/* Of a row that a query lists: its own cells, NULL for what has no value; or what went wrong. */
typedef void emit(const gpu *one, const char *const *cells, int status);

extern gpu gpus[MAX_GPUS]; /* those that -i chose, or all */
extern unsigned gpu_count;
extern const char *chosen; /* what -i said, or NULL */
extern int worst;          /* what the command ends with where it went on after an error */

/* A function of the library by name; one that answers "not supported" where the library lacks it. */
nvml_function *nvml(const char *name);
const char *error_text(int status);
int exit_code(int status);
int open_library(void);
int start(void);
int choose_gpus(void);
int driver_version(char *text);
int cuda_version(char *text);
int branch(void); /* 535 of "535.309.01"; the newest known where the version isn't known */
int field_number(void *device, unsigned field, unsigned scope, long long *result);
int unsupported(int status);
int bad_arguments(void);
int not_recognized(const char *option);
int list_processes(void *device, process *found, unsigned *count, int only_compute);

/* A value of a GPU by the name of its field in smi_fields.c, or described as there, without its unit, which is "" where
 * it has none.
 * `cell_of` gives N/A for what isn't supported, and the error's text, and notes a lost GPU in `worst`. */
int value_of(const gpu *one, const char *field, char *text, const char **unit);
int cell_of(const gpu *one, const char *field, char *text, const char *error);
int is_enabled(const gpu *one, const char *field);

int in_list(const char *list, const char *word); /* separated by commas, in any case */

unsigned mig_devices(void *device, void **found, int *status); /* a place without one is NULL */
int mig_name(void *mig, char *text);

int is_query(const char *option);
int query(const char *option, const char *fields, const char *format, int first);
int list_rows(const char *option, const gpu *one, emit *put);
int help_query(const char *option);
int show_list(void);
int show_table(void);
int show_report(const char *sections, int as_xml);
int topology(int count, char **words);
int nvlink(int count, char **words);
int mig(int count, char **words);
int monitor(int of_processes, int count, char **words);
int modify(const char *option, const char *value);
int log_to(const char *file);
void pause_for(double seconds);
