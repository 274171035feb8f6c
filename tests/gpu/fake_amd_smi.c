/* AMD's management library for tests, behind AMD's own Python binding: four devices, two and two joined by XGMI.
 *
 * The runtime counts the devices in the opposite order (hip_id). Device 3 does not tell its memory; the load of none is
 * known. Device 1 runs the process $FAKE_AMD_PID. Every function of the binding that is not here is made by the test
 * that builds this, and answers "not supported". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 1, NOT_SUPPORTED = 2, NUM_DEVICES = 4, PCIE = 1, XGMI = 2 };

static int socket_, devices[NUM_DEVICES];

static uint32_t index_of(const void *device) { return (uint32_t)((const int *)device - devices); }

int amdsmi_init(uint64_t flags) { (void)flags; return SUCCESS; }
int amdsmi_shut_down(void) { return SUCCESS; }

int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    if (sockets) sockets[0] = &socket_;
    *count = 1;
    return SUCCESS;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **processors) {
    if (socket != &socket_) return INVALID;
    for (int index = 0; processors && index < NUM_DEVICES; index++) processors[index] = &devices[index];
    *count = NUM_DEVICES;
    return SUCCESS;
}

int amdsmi_get_gpu_device_uuid(void *device, uint32_t *length, char *uuid) {
    snprintf(uuid, *length, "%02xff74a1-0000-1000-8000-000000000000", index_of(device));
    return SUCCESS;
}

struct enumeration { uint32_t drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; };

int amdsmi_get_gpu_enumeration_info(void *device, struct enumeration *info) {
    memset(info, 0, sizeof *info);
    info->hip_id = NUM_DEVICES - 1 - index_of(device);
    return SUCCESS;
}

#pragma pack(push, 1)
struct asic {
    char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id;
    uint32_t rev_id; char asic_serial[256]; uint32_t rest[4 + 2 + 21];
};
struct process {
    char name[256]; uint32_t pid, padding; uint64_t mem, gfx, enc; uint32_t reserved[12]; uint64_t gtt, cpu, vram;
    uint32_t reserved_too[10]; char container[256]; uint32_t occupancy, rest[11];
};
#pragma pack(pop)

int amdsmi_get_gpu_asic_info(void *device, struct asic *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->market_name, sizeof info->market_name, "Fake MI300X");
    snprintf(info->asic_serial, sizeof info->asic_serial, "0x%016X", 0xABC0 + index_of(device));
    return SUCCESS;
}

int amdsmi_get_gpu_vram_usage(void *device, uint32_t *usage) {
    if (index_of(device) == 3) return NOT_SUPPORTED;
    usage[0] = 1000;
    usage[1] = 100 * index_of(device);
    return SUCCESS;
}

int amdsmi_get_gpu_activity(void *device, uint32_t *activity) {
    (void)device;
    activity[0] = activity[1] = activity[2] = 0xFFFF;
    return SUCCESS;
}

int amdsmi_get_gpu_device_bdf(void *device, uint64_t *bdf) { *bdf = (index_of(device) + 1ULL) << 8; return SUCCESS; }

int amdsmi_get_temp_metric(void *device, int sensor, int metric, int64_t *celsius) {
    *celsius = 40 + index_of(device);
    return sensor == 1 && metric == 0 ? SUCCESS : NOT_SUPPORTED;
}

int amdsmi_topo_get_link_type(void *first, void *second, uint64_t *hops, uint32_t *type) {
    *hops = 1;
    *type = index_of(first) / 2 == index_of(second) / 2 ? XGMI : PCIE;
    return SUCCESS;
}

int amdsmi_get_gpu_process_list(void *device, uint32_t *count, struct process *processes) {
    const char *pid = getenv("FAKE_AMD_PID");
    *count = pid && index_of(device) == 1 ? 1 : 0;
    if (*count) {
        memset(processes, 0, sizeof *processes);
        processes->pid = (uint32_t)atoi(pid);
        processes->mem = 55;
    }
    return SUCCESS;
}
