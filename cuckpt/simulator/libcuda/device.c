/* Devices. */
#define _GNU_SOURCE
#include "simulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Find the GPU that an entry of CUDA_VISIBLE_DEVICES names: an ordinal, or the
 * beginning of a UUID that no other has. Return -1 if there is none. */
static int find_visible(const char *entry, size_t length)
{
    const struct machine *machine = the_machine();
    char name[64], *end;
    long ordinal;
    int found = -1;

    snprintf(name, sizeof name, "%.*s", (int)length, entry);
    ordinal = strtol(name, &end, 10);
    if (end != name && !*end)
        return ordinal >= 0 && ordinal < (long)machine->gpu_count ? (int)ordinal : -1;
    for (unsigned gpu = 0; gpu < machine->gpu_count && strlen(name) > 4; gpu++) {
        char text[UUID_TEXT];

        format_uuid(&machine->gpus[gpu].uuid, text);
        if (strncmp(text, name, strlen(name)) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = (int)gpu;
    }
    return found;
}

/* List the GPUs that this process may see, in its order, and return how many. As
 * with the real driver, what follows a wrong entry does not count, and a GPU that is
 * named twice hides them all. */
unsigned visible_gpus(unsigned gpus[MAX_GPUS])
{
    const char *entry = getenv("CUDA_VISIBLE_DEVICES");
    unsigned count = 0;
    uint32_t seen = 0;

    if (!entry) {
        for (; count < the_machine()->gpu_count; count++)
            gpus[count] = count;
        return count;
    }
    while (*entry) {
        const size_t length = strcspn(entry, ",");
        const int gpu = find_visible(entry, length);

        if (gpu < 0)
            break;
        if (seen >> gpu & 1)
            return 0;
        seen |= UINT32_C(1) << gpu;
        gpus[count++] = (unsigned)gpu;
        entry += length + (entry[length] == ',');
    }
    return count;
}

/* The device that a GPU is to this process; the first if it does not see it. */
CUdevice device_with(unsigned gpu)
{
    for (CUdevice device = 0; own_arena(device); device++)
        if (self.gpu_of_device[device] == gpu)
            return device;
    return 0;
}

CUresult valid_device(CUdevice device)
{
    return own_arena(device) ? SUCCESS : INVALID_DEVICE;
}

static const struct gpu *gpu_of(CUdevice device)
{
    return &the_machine()->gpus[self.gpu_of_device[device]];
}

EXPORT CUresult cuInit(unsigned flags)
{
    return flags ? INVALID_VALUE : start_process();
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    const struct machine *machine = the_machine();

    if (!version)
        return INVALID_VALUE;
    *version = machine ? (int)machine->driver_version : 13050;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER;
    if (!count)
        return INVALID_VALUE;
    *count = (int)self.device_count;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER;
    if (!device)
        return INVALID_VALUE;
    *device = ordinal;
    return valid_device(ordinal);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER;
    if (!uuid)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *uuid = gpu_of(device)->uuid;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    ENTER;
    if (!name || size <= 0)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s", gpu_of(device)->name);
    return SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER;
    if (!bytes)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *bytes = gpu_of(device)->memory_bytes;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
    ENTER;
    if (!text || size <= 0)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    snprintf(text, (size_t)size, "0000:%02x:00.0",
             self.gpu_of_device[device] + 1);
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    ENTER;
    unsigned bus;

    if (!device || !text || sscanf(text, "%*x:%x:", &bus) != 1)
        return INVALID_VALUE;
    for (*device = 0; own_arena(*device); ++*device)
        if (self.gpu_of_device[*device] + 1 == bus)
            return SUCCESS;
    return INVALID_DEVICE;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    ENTER;
    if (!major || !minor)
        return INVALID_VALUE;
    *major = 9;
    *minor = 0;
    return valid_device(device);
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    /* Of an H200, as far as a simulation can have them; the others are 0. */
    static const int known[][2] = {
        {1, 1024},   /* MAX_THREADS_PER_BLOCK */
        {2, 1024},   /* MAX_BLOCK_DIM_X */
        {3, 1024},   /* MAX_BLOCK_DIM_Y */
        {4, 64},     /* MAX_BLOCK_DIM_Z */
        {5, 2147483647}, /* MAX_GRID_DIM_X */
        {6, 65535},  /* MAX_GRID_DIM_Y */
        {7, 65535},  /* MAX_GRID_DIM_Z */
        {8, 49152},  /* MAX_SHARED_MEMORY_PER_BLOCK */
        {10, 32},    /* WARP_SIZE */
        {13, 1980000}, /* CLOCK_RATE, kHz */
        {16, 132},   /* MULTIPROCESSOR_COUNT */
        {19, 1},     /* CAN_MAP_HOST_MEMORY */
        {31, 1},     /* CONCURRENT_KERNELS */
        {40, 3},     /* ASYNC_ENGINE_COUNT */
        {41, 1},     /* UNIFIED_ADDRESSING */
        {75, 9},     /* COMPUTE_CAPABILITY_MAJOR */
        {76, 0},     /* COMPUTE_CAPABILITY_MINOR */
        {78, 1},     /* STREAM_PRIORITIES_SUPPORTED */
        {83, 1},     /* MANAGED_MEMORY */
        {89, 1},     /* CONCURRENT_MANAGED_ACCESS */
        {91, 1},     /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
        {99, 1},     /* HOST_REGISTER_SUPPORTED */
        {115, 1},    /* MEMORY_POOLS_SUPPORTED */
        {142, 1},    /* HOST_NUMA_MEMORY_POOLS_SUPPORTED */
        {144, 1},    /* HOST_MEMORY_POOLS_SUPPORTED */
    };

    ENTER;
    if (!value)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *value = 0;
    if (attribute == 33) /* PCI_BUS_ID */
        *value = (int)self.gpu_of_device[device] + 1;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute)
            *value = known[i][1];
    return SUCCESS;
}

PLAIN(cuDeviceGetUuid, cuDeviceGetUuid_v2);
PLAIN(cuDeviceTotalMem, cuDeviceTotalMem_v2);
