/* The stand-in nvidia-smi; smi.c says what it is. Layouts of NVML are those of nvml.h and pynvml.py. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define TEXT 512
#define MAX_GPUS 64
#define MAX_PROCESSES 256
#define ALL (~0U)

enum {
    OK = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, NO_DRIVER = 9, NO_LIBRARY = 12, NO_FUNCTION = 13, LOST = 15,
    MISMATCH = 18, IN_USE = 19, OTHER_VERSION = 25
};

typedef int nvml_function(); /* callers know the arguments */

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} pci_info;

typedef struct {
    struct {
        unsigned pid;
        unsigned long long memory;
        unsigned gpu_instance, compute_instance;
    } info;
    char kind[4], name[TEXT]; /* C, G or C+G */
} process;

typedef struct {
    unsigned index;
    void *handle;
    char bus_id[32];
} gpu;

extern gpu gpus[MAX_GPUS]; /* those that -i chose, or all */
extern unsigned gpu_count;
extern const char *chosen; /* the argument of -i, or NULL */
extern int worst;          /* the exit status of a command that went on after an error */

nvml_function *nvml(const char *name); /* "not supported" where the library lacks it */
const char *error_text(int status);
int unsupported(int status);
int refuse(const char *problem, const char *option);
int choose_gpus(void);
int driver_version(char *text);
void cuda_version(char *text);
int list_processes(void *device, process *found, unsigned *count, int only_compute);
unsigned mig_devices(void *device, void **found, int *status); /* a place without one is NULL */

/* A field of --query-gpu by name: its text, with its unit where `with_unit`; N/A where it isn't supported, and `error`
 * or the error's text where it fails. */
int cell_of(const gpu *one, const char *field, char *text, const char *error, int with_unit);
int is_enabled(const gpu *one, const char *field);
int in_list(const char *list, const char *word); /* separated by commas, in any case */

int query(const char *fields, const char *format, int of_processes);
int show_list(void);
int show_table(void);
int show_report(int as_xml);
int topology(int count, char **words);
int mig(int count, char **words);
int is_change(const char *option);
int change(const char *option, const char *value);
