/* A driver library for tests: eight devices in two NVLink islands of four, behind NVIDIA's own Python binding.
 *
 * nvmlDeviceGetTemperature is missing on purpose; -DWITHOUT_P2P leaves out the peer status too.
 * Device 5 reports no memory (as unified memory does). Device 2 runs the process $FAKE_NVML_PID.
 * Every NVLink is active also across the islands: only the peer status tells them apart.
 * -DWITH_MIG: device 6 is cut into two instances (slots 1 and 4 of seven), device 7 into none.
 * Files in $FAKE_NVML_DIR say what changes while a test runs: used-INDEX (bytes in use), processes-INDEX (numbers, one a
 * line), lost-INDEX (the device has fallen off the bus). Instances have the indices 8 and 9. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { NUM_DEVICES = 8, ISLAND = 4, NUM_LINKS = 18, NUM_INSTANCES = 2 };

static int devices[NUM_DEVICES + NUM_INSTANCES];

static unsigned index_of(const void *device) { return (unsigned)((const int *)device - devices); }

static FILE *state(const char *what, unsigned index) {
    char path[4096];
    const char *folder = getenv("FAKE_NVML_DIR");
    if (!folder) return NULL;
    snprintf(path, sizeof path, "%s/%s-%u", folder, what, index);
    return fopen(path, "r");
}

static int is_lost(unsigned index) {
    FILE *file = state("lost", index);
    if (file) fclose(file);
    return file != NULL;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == NOT_SUPPORTED ? "Not Supported" : "Fake Error"; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = NUM_DEVICES; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= NUM_DEVICES) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    unsigned index = index_of(device);
    snprintf(uuid, length, "%s-00000000-0000-0000-0000-%012u", index < NUM_DEVICES ? "GPU" : "MIG", index);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned index = strlen(uuid) > 12 ? (unsigned)atoi(uuid + strlen(uuid) - 12) : NUM_DEVICES + NUM_INSTANCES;
    if (index >= NUM_DEVICES + NUM_INSTANCES) return NOT_FOUND;
    if (is_lost(index)) return GPU_IS_LOST;
    *device = &devices[index];
    return SUCCESS;
}

#ifdef WITH_MIG
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    unsigned index = index_of(device);
    if (index >= NUM_DEVICES) return INVALID_ARGUMENT;
    *current = *pending = index >= 6;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { (void)device; *count = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned slot, void **instance) {
    if (index_of(device) != 6 || (slot != 1 && slot != 4)) return NOT_FOUND;
    *instance = &devices[NUM_DEVICES + (slot == 4)];
    return SUCCESS;
}
#endif

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, index_of(device) < NUM_DEVICES ? "Fake H200" : "Fake H200 MIG 3g.71gb");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    unsigned index = index_of(device);
    unsigned long long used = 100 * (index % NUM_DEVICES);
    FILE *file = state("used", index);
    if (file) {
        if (fscanf(file, "%llu", &used) != 1) used = 0;
        fclose(file);
    }
    if (index == 5) return NOT_SUPPORTED;
    if (is_lost(index)) return GPU_IS_LOST;
    memory[0] = index < NUM_DEVICES ? 1000 : 500;
    memory[1] = memory[0] - used;
    memory[2] = used;
    return SUCCESS;
}

/* Device 3 is held down by heat (0x40) and power (0x4). */
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *clock) {
    if (type != 1) return INVALID_ARGUMENT;
    *clock = index_of(device) == 3 ? 900 : 1980;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *clock) {
    (void)device;
    if (type != 1) return INVALID_ARGUMENT;
    *clock = 1980;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = index_of(device) == 3 ? 0x44 : 0;
    return SUCCESS;
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", index_of(device) + 1);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    rates[0] = index_of(device);
    rates[1] = 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    (void)device;
    *active = 1;
    return link < NUM_LINKS ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *version) {
    (void)device, (void)link;
    *version = 4;
    return SUCCESS;
}

#ifndef WITHOUT_P2P
int nvmlDeviceGetP2PStatus(void *first, void *second, int capability, int *status) {
    *status = capability == 2 && index_of(first) / ISLAND == index_of(second) / ISLAND ? 0 : 5;
    return SUCCESS;
}
#endif

struct process_info {
    unsigned pid;
    unsigned long long used_memory;
    unsigned gpu_instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process_info *processes) {
    const char *pid = getenv("FAKE_NVML_PID");
    unsigned room = *count, found[64], number = 0;
    FILE *file = state("processes", index_of(device));
    if (pid && index_of(device) == 2) found[number++] = (unsigned)atoi(pid);
    if (file) {
        while (number < 64 && fscanf(file, "%u", &found[number]) == 1) number++;
        fclose(file);
    }
    *count = number;
    if (number > room) return INSUFFICIENT_SIZE;
    for (unsigned place = 0; place < number; place++) {
        memset(&processes[place], 0, sizeof *processes);
        processes[place].pid = found[place];
        processes[place].used_memory = 77;
    }
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, struct process_info *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}
