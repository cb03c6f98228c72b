/* A double of NVIDIA's NVML (libnvidia-ml.so.1): declarations of all its parts.
 *
 * The machine's GPUs are a state, rows of `key value` as gpukiln/clouds/embedded/gpus/state.py writes them. It is
 * at the end of a file: the library's own, or the one in GPUKILN_SIMULATED_GPUS. It may change at any time; every
 * call reads the present state. A missing key is NVML_ERROR_NOT_SUPPORTED, `KEY.code N` is NVML's error N,
 * `error.FUNCTION N` and `gpus.I.fail.FUNCTION N` make one function answer N, `gpus.I.error.code N` makes all calls
 * of one GPU answer N, `gpus.I.hung 1` and `gpus.I.hangs.FUNCTION 1` let all calls of one GPU, or one function,
 * wait until the key is removed, `start_ms N` makes the library's start take N ms. A function that is not written
 * here does not exist in the library, as in an older driver; DRIVER is the branch of the driver whose functions it
 * has. Names, arguments, layouts: as pynvml.py (nvidia-ml-py) declares them. Behaviour: nvml.h's documentation,
 * except where a comment says otherwise.
 *
 * Every function of the branch is here; absent.c has those of which nothing is simulated.
 */
#ifndef DOUBLE_H
#define DOUBLE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#ifndef DRIVER
#define DRIVER 580
#endif
#define API __attribute__((visibility("default")))
#define MAX_GPUS 64
#define MAX_GI 16
#define MAX_CI 8
#define TEXT 512
#define KEY 192

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7,
       NO_DRIVER = 9, TIMEOUT = 10, LOST = 15, RESET_REQUIRED = 16, IN_USE = 19, NO_DATA = 21,
       INSUFFICIENT_RESOURCES = 23, VERSION_MISMATCH = 25, DEPRECATED = 26, UNKNOWN = 999 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} pci_info;

/* state.c */
int look(char *value, const char *format, ...) __attribute__((format(printf, 2, 3)));
typedef struct edit {
    char key[KEY], value[TEXT];
    int remove; /* the key, and whatever begins with it and a dot */
} edit;
typedef struct edits {
    unsigned count;
    edit rows[128];
} edits;
void put(edits *changes, const char *value, const char *format, ...) __attribute__((format(printf, 3, 4)));
void drop(edits *changes, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* decide is called with the state locked, so that its decision and the change are one atomic step. */
int change(int (*decide)(edits *changes, void *with), void *with);
unsigned long long state_number(void);

/* device.c */
typedef struct {
    int gpu, gi, ci; /* gi, ci: -1 where the handle is a whole GPU's */
} target;
int target_of(const void *device, target *found);
void *handle_of(int gpu);
void *mig_handle(int gpu, int gi, int ci);
int system_gate(const char *function);
int device_gate(const char *function, const void *device, const void *result, target *found);
int gpu_gate(const char *function, const void *device, const void *result, int *gpu);
int fetch(int gpu, const char *key, char *value);
int number(int gpu, const char *key, double *result);
int whole(int gpu, const char *key, unsigned *result);
int busy_whole(int gpu, const char *key, unsigned *result);
int pair(const char *function, void *device, const char *first, unsigned *a, const char *second, unsigned *b);
int asked_number(const char *function, void *device, const char *key, unsigned *result);
int asked_text(const char *function, void *device, const char *key, char *result, unsigned size);
int pci_of(const char *function, void *device, pci_info *info);
int copy(char *result, unsigned size, const char *value);
int list_length(int gpu, const char *list);
void fill_pci(pci_info *info, int gpu, const char *bus_id);
int mig_is_on(int gpu);

/* links.c */
int link_at(const char *function, void *device, unsigned link, const void *result, int *gpu, int *at);
int of_link(const char *function, void *device, unsigned link, const char *name, const void *result, char *value);
int has_own_counters(void *device, unsigned link);

/* load.c */
typedef struct {
    unsigned pid, utilization, memory_utilization;
    int gi, ci;
    unsigned long long memory; /* bytes, ~0 where it is unknown */
    char kind[24], name[TEXT];
    int lives; /* 1: it is alive; 0: its start time is unknown, so it may have ended */
} process;
int process_at(int gpu, int position, process *found);
typedef struct {
    unsigned utilization, memory_utilization, processes;
    unsigned long long memory;
} load;
load load_of(int gpu, int gi, int ci);

/* mig.c */
typedef struct {
    unsigned number, id, slices, memory_slices, multiprocessors, instances, copy_engines, decoders, encoders, jpegs,
        ofas, size;
    unsigned long long memory; /* MiB */
    char name[64];
} gi_profile;
int gi_profile_of(int gpu, int gi, gi_profile *found);
int ci_exists(int gpu, int gi, int ci);
int ci_name(int gpu, int gi, int ci, char *name, unsigned size);
void mig_uuid(int gpu, int gi, int ci, char uuid[48]);

#endif
