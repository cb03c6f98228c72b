/* gpukiln-gpu-load GPU PID MEMORY_MIB [UTILIZATION_PERCENT]: gives a process that runs a part of a simulated GPU.
 *
 * GPU is an index or a UUID, a MIG device's too. It ends with the process, or with 0 of both.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;

static void *of(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libnvidia-ml.so.1 is no double: it has no %s\n", name);
        exit(4);
    }
    return found;
}

static void must(int status, const char *what) {
    const char *(*text)(int) = of("nvmlErrorString");
    if (!status)
        return;
    fprintf(stderr, "%s: %s\n", what, text(status));
    exit(1);
}

int main(int argc, char **argv) {
    void *device;
    char *end;
    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: %s GPU PID MEMORY_MIB [UTILIZATION_PERCENT]\n", argv[0]);
        return 2;
    }
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 4;
    }
    int (*init)(void) = of("nvmlInit_v2");
    int (*by_index)(unsigned, void **) = of("nvmlDeviceGetHandleByIndex_v2");
    int (*by_uuid)(const char *, void **) = of("nvmlDeviceGetHandleByUUID");
    int (*use)(void *, unsigned, unsigned long long, unsigned) = of("gpukilnUse");
    must(init(), "nvmlInit");
    long index = strtol(argv[1], &end, 10);
    must(*argv[1] && !*end ? by_index((unsigned)index, &device) : by_uuid(argv[1], &device), argv[1]);
    unsigned pid = (unsigned)strtoul(argv[2], &end, 10);
    if (*end || !pid) {
        fprintf(stderr, "%s is no process id\n", argv[2]);
        return 2;
    }
    must(use(device, pid, strtoull(argv[3], NULL, 10), argc == 5 ? (unsigned)strtoul(argv[4], NULL, 10) : 0), argv[2]);
    return 0;
}
