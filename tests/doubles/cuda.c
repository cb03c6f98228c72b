/* A double of libcuda.so.1: the functions of the CUDA driver API that gpukiln/probe/cuda.py calls.
 *
 * It stands for the library alone. A device's memory is this process's memory, a context is a device, and
 * the two kernels are written again in C below and found by their names, so it proves the calls, their
 * order and what is made of their answers; it proves neither the PTX (it only looks for the kernel's name in
 * it) nor anything about a GPU or a driver.
 *
 * Environment:
 *   DOUBLE_GPUS    how many devices (1); DOUBLE_LOG: a file to which every call is added as a line
 *   DOUBLE_FAULT   what is broken, see `broken`; DOUBLE_BAD: the device that is (the last one)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 16, BLOCKED = 214 };
typedef struct device { int index, peers; struct device *peer[MOST]; } device;
static device devices[MOST];
static device *current;
static const char *loaded = "";

static int count(void) { const char *n = getenv("DOUBLE_GPUS"); return n ? atoi(n) : 1; }

static int bad(int index)
{
    const char *n = getenv("DOUBLE_BAD");
    return index == (n ? atoi(n) : count() - 1);
}

static int broken(const char *fault)
{
    const char *set = getenv("DOUBLE_FAULT");
    return set && strcmp(set, fault) == 0;
}

static int here(const char *fault) { return broken(fault) && current && bad(current->index); }

static void note(const char *text)
{
    const char *path = getenv("DOUBLE_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%d %s\n", current ? current->index : -1, text);
        fclose(file);
    }
}

static void hang(void) { for (;;) pause(); }

int cuGetErrorName(int code, const char **text)
{
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 214 ? "CUDA_ERROR_ECC_UNCORRECTABLE" : "CUDA_ERROR";
    return 0;
}

int cuGetErrorString(int code, const char **text) { (void)code; *text = "double"; return 0; }

int cuInit(unsigned flags)
{
    note("cuInit");
    if (broken("init-hang")) hang();
    if (broken("init-100")) return 100;
    if (broken("init-802")) return 802;
    if (broken("init-803")) return 803;
    if (broken("init-999")) return 999;
    return flags ? 1 : 0;
}

int cuDriverGetVersion(int *version) { *version = 12020; return 0; }
int cuDeviceGetCount(int *n) { *n = broken("no-device") ? 0 : count(); return 0; }
int cuDeviceGet(int *handle, int index) { *handle = index; return index < count() ? 0 : 101; }

int cuDeviceGetPCIBusId(char *text, int size, int handle)
{
    snprintf(text, size, "0000:%02X:00.0", 0x1A + handle);
    return 0;
}

int cuDeviceGetName(char *text, int size, int handle)
{
    (void)handle;
    snprintf(text, size, "Double%s", broken("slice") ? " MIG 1g.5gb" : "");
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int handle)
{
    (void)handle;
    *value = attribute == 75 ? 8 : attribute == 76 ? 6 : attribute == 20 && broken("exclusive") ? 3 : 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(device **context, int handle)
{
    devices[handle].index = handle;
    *context = &devices[handle];
    if ((broken("exclusive") || broken("prohibited")) && bad(handle)) return 46;
    return broken("full") && bad(handle) ? 2 : 0;
}

int cuDevicePrimaryCtxRelease_v2(int handle) { (void)handle; note("release"); return 0; }
int cuCtxSetCurrent(device *context) { current = context; return 0; }

int cuModuleLoadDataEx(const char **module, const char *ptx, unsigned n, int *options, void **values)
{
    if (here("ptx")) {
        for (unsigned i = 0; i < n; i++)
            if (options[i] == 5) strcpy(values[i], "ptxas fatal: no such thing");
        return 218;
    }
    *module = loaded = ptx;
    return 0;
}

int cuModuleUnload(const char *module) { (void)module; return 0; }

int cuModuleGetFunction(const char **kernel, const char *module, const char *name)
{
    char entry[100];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr(module, entry)) return 500;
    *kernel = strcmp(name, "gpukiln_hash") == 0 ? "hash" : "add";
    return 0;
}

int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *total = (size_t)16 << 30;
    *free = here("memory-odd") ? (size_t)8 << 30 : 1 << 20;
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size)
{
    note("alloc");
    if (here("memory") || here("memory-odd")) return 2;
    *address = (uint64_t)(uintptr_t)malloc(size);
    return *address ? 0 : 2;
}

int cuMemFree_v2(uint64_t address) { note("free"); free((void *)(uintptr_t)address); return 0; }

int cuMemAllocHost_v2(void **address, size_t size)
{
    if (here("host-memory")) return 2;
    if (broken("unpinned")) return 801; /* with confidential computing */
    *address = malloc(size);
    return *address ? 0 : 2;
}

int cuMemFreeHost(void *address) { free(address); return 0; }

int cuMemsetD32_v2(uint64_t address, unsigned value, size_t n)
{
    uint32_t *to = (uint32_t *)(uintptr_t)address;
    while (n--) *to++ = value;
    return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
    note("to device");
    if (here("slow") || here("slow-up") || here("slice")) usleep(400000);
    if (here("lost-copy") && size > (8 << 20)) return 0;
    memcpy((void *)(uintptr_t)to, from, size);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    note("to host");
    if (here("slow") || here("slow-down")) usleep(400000);
    memcpy(to, (void *)(uintptr_t)from, size);
    return 0;
}

static uint32_t hash_of(uint32_t h, uint32_t rounds)
{
    while (rounds--) {
        float a, b, g;
        uint32_t bits;
        h = h * 1664525u + 1013904223u;
        h ^= h >> 16;
        bits = 0x3f800000u | (h & 0x7fffffu);
        memcpy(&a, &bits, 4);
        bits = 0x3f800000u | (h >> 9);
        memcpy(&b, &bits, 4);
        g = __builtin_fmaf(a, b, a);
        memcpy(&bits, &g, 4);
        h ^= bits;
    }
    return h;
}

static void run_hash(uint32_t *out, uint32_t n, uint32_t rounds)
{
    uint32_t first[1024];
    for (uint32_t i = 0; i < 1024; i++) first[i] = hash_of(i, rounds);
    for (uint32_t i = 0; i < n; i++) out[i] = first[i & 1023] ^ i >> 10;
    if (here("element")) out[n - 12345] ^= 0x00400000;
    if (here("unwritten")) memset(out + n - 256, 0, 1024);
}

int cuLaunchKernel(const char *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra)
{
    char line[200];
    uint32_t n = *(uint32_t *)params[kernel[0] == 'h' ? 1 : 2];
    uint32_t threads = gx * bx < n ? gx * bx : n;
    snprintf(line, sizeof line, "launch %s grid %u %u %u block %u %u %u shared %u count %u", kernel, gx, gy, gz,
             bx, by, bz, shared, n);
    note(line);
    if (stream || extra || !gx || bx > 1024) return 1;
    if (here("launch")) return 209;
    if (kernel[0] == 'h') {
        run_hash(*(uint32_t **)params[0], threads, *(uint32_t *)params[2]);
    } else {
        uint32_t *into = *(uint32_t **)params[0], *from = *(uint32_t **)params[1];
        for (uint32_t i = 0; i < threads; i++) into[i] += from[i];
        if (here("sum")) into[4321] ^= 1;
    }
    return 0;
}

int cuCtxSynchronize(void)
{
    if (here("hang")) hang();
    if (here("crash")) abort();
    return here("ecc") ? BLOCKED : 0;
}

int cuEventCreate(int **event, unsigned flags) { (void)flags; *event = malloc(4); return 0; }
int cuEventRecord(int *event, void *stream) { (void)event; (void)stream; return 0; }
int cuEventElapsedTime(float *ms, int *begin, int *end) { (void)begin; (void)end; *ms = 1.5f; return 0; }
int cuEventDestroy_v2(int *event) { free(event); return 0; }

int cuDeviceCanAccessPeer(int *can, int from, int to)
{
    *can = !(broken("no-peer") && (from == 0 || to == 0)) && from != to;
    return 0;
}

int cuCtxEnablePeerAccess(device *peer, unsigned flags)
{
    if (flags) return 1;
    if (broken("peer-slow")) usleep(400000);
    if (broken("too-many-peers") && current->peers >= 1) return 711;
    current->peer[current->peers++] = peer;
    return 0;
}

int cuMemcpyPeer(uint64_t to, device *to_context, uint64_t from, device *from_context, size_t size)
{
    int reached = 0;
    for (int i = 0; i < to_context->peers; i++) reached |= to_context->peer[i] == from_context;
    note("peer copy");
    if (!reached) return 1;
    if (broken("peer-hang")) hang();
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    if (broken("peer-wrong") && bad(to_context->index)) ((char *)(uintptr_t)to)[4000] ^= 4;
    return 0;
}
