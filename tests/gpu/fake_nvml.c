/* A driver library for tests: eight devices in two NVLink islands of four, behind NVIDIA's own Python binding.
 *
 * nvmlDeviceGetTemperature is missing on purpose; -DWITHOUT_P2P leaves out the peer status too.
 * Device 5 reports no memory (as unified memory does). Device 2 runs the process $FAKE_NVML_PID.
 * Every NVLink is active also across the islands: only the peer status tells them apart. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
enum { NUM_DEVICES = 8, ISLAND = 4, NUM_LINKS = 18 };

static int devices[NUM_DEVICES];

static unsigned index_of(const void *device) { return (unsigned)((const int *)device - devices); }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == NOT_SUPPORTED ? "Not Supported" : "Fake Error"; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = NUM_DEVICES; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= NUM_DEVICES) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012u", index_of(device));
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    (void)device;
    snprintf(name, length, "Fake H200");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    unsigned index = index_of(device);
    if (index == 5) return NOT_SUPPORTED;
    memory[0] = 1000;
    memory[1] = 1000 - 100 * index;
    memory[2] = 100 * index;
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
    unsigned room = *count;
    *count = pid && index_of(device) == 2 ? 1 : 0;
    if (*count > room) return INSUFFICIENT_SIZE;
    if (*count) {
        memset(processes, 0, sizeof *processes);
        processes->pid = (unsigned)atoi(pid);
        processes->used_memory = 77;
    }
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, struct process_info *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}
