/* An NVML of one made-up A100 with MIG that can be set and partitioned, for tests of the stand-in nvidia-smi.
 * State lasts as long as the process; PARTITIONED=1 begins with one instance. Error FAIL answers every change.
 */
#include <stdlib.h>
#include <string.h>

static int gpu, mig_gpu, gi, ci, has_gi, has_ci, has_mig = 1;

static int failure(void) { return getenv("FAIL") ? atoi(getenv("FAIL")) : 0; }

static int text(char *to, const char *from) {
    strcpy(to, from);
    return 0;
}

int nvmlInit_v2(void) {
    has_gi = has_ci = getenv("PARTITIONED") != 0;
    return 0;
}
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    (void)size;
    return text(to, "535.309.01");
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **to) {
    *to = &gpu;
    return index ? 2 : 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, char *info) {
    (void)device;
    memset(info, 0, 68);
    return text(info + 36, "00000000:00:1E.0");
}
int nvmlDeviceGetName(void *device, char *to) {
    return text(to, device == &mig_gpu ? "NVIDIA A100-SXM4-40GB MIG 3g.20gb" : "NVIDIA A100-SXM4-40GB");
}
int nvmlDeviceGetUUID(void *device, char *to) { return text(to, device == &mig_gpu ? "MIG-1" : "GPU-1"); }
int nvmlDeviceGetPersistenceMode(void *device, unsigned *mode) {
    (void)device;
    *mode = 0;
    return 0;
}
int nvmlDeviceSetPersistenceMode(void *device, unsigned mode) {
    (void)device, (void)mode;
    return failure();
}
int nvmlDeviceGetComputeMode(void *device, unsigned *mode) {
    (void)device;
    *mode = 0;
    return 0;
}
int nvmlDeviceSetComputeMode(void *device, unsigned mode) {
    (void)device, (void)mode;
    return failure();
}
int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *limit) {
    (void)device;
    *limit = 400000;
    return 0;
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned *least, unsigned *most) {
    (void)device;
    *least = 100000;
    *most = 400000;
    return 0;
}
int nvmlDeviceSetPowerManagementLimit(void *device, unsigned limit) {
    (void)device, (void)limit;
    return failure();
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *next) {
    (void)device;
    *now = *next = has_mig && !getenv("WHOLE");
    return 0;
}
int nvmlDeviceSetMigMode(void *device, unsigned mode, int *activation) {
    (void)device, (void)mode;
    *activation = getenv("PENDING") ? atoi(getenv("PENDING")) : 0;
    return failure();
}
int gpukilnReset(void *device) {
    (void)device;
    return failure();
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    *count = 7;
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **to) {
    (void)device;
    *to = &mig_gpu;
    return has_ci && index == 0 ? 0 : 6;
}
int nvmlDeviceGetGpuInstanceId(void *device, unsigned *id) {
    (void)device;
    *id = 2;
    return 0;
}
int nvmlDeviceGetComputeInstanceId(void *device, unsigned *id) {
    (void)device;
    *id = 0;
    return 0;
}
int nvmlDeviceGetAttributes_v2(void *device, unsigned *has) {
    unsigned set[8] = {42, 3, 2, 0, 0, 0, 3, 3};
    (void)device;
    memcpy(has, set, sizeof set);
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *errors) {
    (void)device, (void)kind, (void)counter;
    *errors = 0;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, unsigned long long *info) {
    info[1] = (device == &mig_gpu ? 20096ull : 40960ull) << 20;
    info[2] = 0;
    info[4] = 37ull << 20;
    info[3] = info[1] - info[4];
    return 0;
}
int nvmlDeviceGetBAR1MemoryInfo(void *device, unsigned long long *info) {
    (void)device;
    info[0] = info[1] = 32767ull << 20;
    info[2] = 0;
    return 0;
}

int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, int kind, unsigned *info) {
    (void)device;
    unsigned big[] = {0, 9, 0, 3, 2, 42, 3, 2, 0, 0, 0}, small[] = {0, 19, 0, 1, 7, 14, 1, 0, 0, 0, 0};
    if (kind != 0 && kind != 2)
        return 3;
    memcpy(info + 1, (kind ? big : small) + 1, 40);
    *(unsigned long long *)(info + 12) = kind ? 20096 : 4864;
    return text((char *)(info + 14), kind ? "MIG 3g.20gb" : "MIG 1g.5gb");
}
int nvmlDeviceGetGpuInstanceRemainingCapacity(void *device, unsigned id, unsigned *left) {
    (void)device;
    *left = id == 9 ? 2 - has_gi : 7 - 4 * has_gi;
    return 0;
}
int nvmlDeviceGetGpuInstances(void *device, unsigned id, void **found, unsigned *count) {
    (void)device;
    *found = &gi;
    *count = has_gi && id == 9;
    return 0;
}
int nvmlGpuInstanceGetInfo(void *instance, void *info) {
    struct {
        void *device;
        unsigned id, profile, start, size;
    } made = {&gpu, 2, 9, 0, 4};
    (void)instance;
    memcpy(info, &made, sizeof made);
    return 0;
}
int nvmlDeviceCreateGpuInstance(void *device, unsigned id, void **made) {
    (void)device;
    *made = &gi;
    if (id != 9 || has_gi)
        return 23;
    has_gi = 1;
    return failure();
}
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, unsigned id, unsigned *places,
                                                  unsigned *count) {
    (void)device, (void)id;
    places[0] = 0;
    places[1] = 4;
    *count = 1;
    return 0;
}
int nvmlDeviceCreateGpuInstanceWithPlacement(void *device, unsigned id, unsigned *place, void **made) {
    (void)place;
    return nvmlDeviceCreateGpuInstance(device, id, made);
}
int nvmlGpuInstanceDestroy(void *instance) {
    (void)instance;
    if (has_ci)
        return 19;
    has_gi = 0;
    return failure();
}
int nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, int kind, int engine, unsigned *info) {
    unsigned whole[] = {0, 2, 3, 1, 42, 3, 2, 0, 0, 0};
    (void)instance, (void)engine;
    if (kind != 2)
        return 3;
    memcpy(info + 1, whole + 1, 36);
    return text((char *)(info + 10), "MIG 3g.20gb");
}
int nvmlGpuInstanceGetComputeInstances(void *instance, unsigned id, void **found, unsigned *count) {
    (void)instance;
    *found = &ci;
    *count = has_ci && id == 2;
    return 0;
}
int nvmlComputeInstanceGetInfo_v2(void *instance, void *info) {
    struct {
        void *device, *parent;
        unsigned id, profile, start, size;
    } made = {&gpu, &gi, 0, 2, 0, 3};
    (void)instance;
    memcpy(info, &made, sizeof made);
    return 0;
}
int nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned id, void **made) {
    (void)instance, (void)id;
    *made = &ci;
    has_ci = 1;
    return failure();
}
int nvmlComputeInstanceDestroy(void *instance) {
    (void)instance;
    has_ci = 0;
    return failure();
}
