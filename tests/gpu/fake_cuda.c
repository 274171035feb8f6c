/* A CUDA driver for tests of the device probe: computes in host memory.
 *
 * The file $FAKE_NVML_DIR/cuda-MASK, where MASK is what CUDA_VISIBLE_DEVICES shows, says how a device misbehaves: crash
 * (when memory is set), hang (there too), wrong (a byte comes back changed), fail (no memory can be had). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char mode[16];

int cuInit(unsigned flags) {
    char path[4096];
    const char *folder = getenv("FAKE_NVML_DIR"), *mask = getenv("CUDA_VISIBLE_DEVICES");
    (void)flags;
    snprintf(path, sizeof path, "%s/cuda-%s", folder ? folder : "/nonexistent", mask ? mask : "all");
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%15s", mode) != 1) mode[0] = 0;
        fclose(file);
    }
    return 0;
}

int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = mode; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 1; }
int cuCtxSynchronize(void) { return 0; }

int cuMemAlloc_v2(unsigned long long *pointer, size_t size) {
    if (!strcmp(mode, "fail")) return 2;
    *pointer = (unsigned long long)malloc(size);
    return 0;
}

int cuMemFree_v2(unsigned long long pointer) { free((void *)pointer); return 0; }

int cuMemsetD32_v2(unsigned long long pointer, unsigned value, size_t count) {
    if (!strcmp(mode, "crash")) abort();
    while (!strcmp(mode, "hang")) pause();
    for (size_t place = 0; place < count; place++) ((unsigned *)pointer)[place] = value;
    return 0;
}

int cuMemcpyDtoD_v2(unsigned long long to, unsigned long long from, size_t size) {
    memcpy((void *)to, (void *)from, size);
    if (!strcmp(mode, "wrong")) *(char *)to = 0;
    return 0;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) { memcpy(to, (void *)from, size); return 0; }
