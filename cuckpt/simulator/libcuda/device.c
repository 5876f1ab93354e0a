/* Devices and contexts. */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct context {
    CUdevice device;
    int retained; /* of a primary context: how often; else 1 */
    bool primary;
    unsigned flags;
};

enum { DEPTH = 64 };

static struct context primaries[MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The current context of each thread is the last of these. It does not survive a
 * change of the machine. */
static _Thread_local CUcontext stack[DEPTH];
static _Thread_local int depth;
static _Thread_local unsigned of_machine;

static int *stack_depth(void)
{
    if (of_machine != self.machines) {
        of_machine = self.machines;
        depth = 0;
    }
    return &depth;
}

CUcontext primary_context(CUdevice device)
{
    return &primaries[device];
}

void reset_contexts(void)
{
    for (CUdevice device = 0; device < MAX_GPUS; device++)
        primaries[device] = (struct context){.device = device, .primary = true};
}

/* The GPUs, a bit each, whose primary context this process retains. */
uint32_t retained_gpus(void)
{
    uint32_t gpus = 0;

    pthread_mutex_lock(&lock);
    for (unsigned device = 0; device < MAX_GPUS; device++)
        if (primaries[device].retained)
            gpus |= UINT32_C(1) << self.gpu_of_device[device];
    pthread_mutex_unlock(&lock);
    return gpus;
}

CUdevice device_of(CUcontext context)
{
    return context->device;
}

CUcontext current_context(void)
{
    return *stack_depth() ? stack[depth - 1] : NULL;
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
    *count = (int)the_machine()->gpu_count;
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
    snprintf(name, (size_t)size, "cuckpt simulated GPU");
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
        {40, 3},     /* ASYNC_ENGINE_COUNT */
        {41, 1},     /* UNIFIED_ADDRESSING */
        {75, 9},     /* COMPUTE_CAPABILITY_MAJOR */
        {76, 0},     /* COMPUTE_CAPABILITY_MINOR */
        {78, 1},     /* STREAM_PRIORITIES_SUPPORTED */
        {83, 1},     /* MANAGED_MEMORY */
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

/* Primary contexts */

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER;
    if (!context)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    primaries[device].retained++;
    pthread_mutex_unlock(&lock);
    *context = &primaries[device];
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER;
    CUresult result = INVALID_CONTEXT;

    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (primaries[device].retained) {
        primaries[device].retained--;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags,
                                           int *active)
{
    ENTER;
    if (!flags || !active)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *flags = primaries[device].flags;
    *active = primaries[device].retained > 0;
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    ENTER;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    primaries[device].flags = flags;
    return SUCCESS;
}

/* Contexts and the current one of each thread */

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags,
                               CUdevice device)
{
    ENTER;
    if (!context || *stack_depth() == DEPTH)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *context = calloc(1, sizeof **context);
    if (!*context)
        return OUT_OF_MEMORY;
    (*context)->device = device;
    (*context)->flags = flags;
    (*context)->retained = 1;
    stack[depth++] = *context;
    return SUCCESS;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters,
                               unsigned flags, CUdevice device)
{
    return parameters ? NOT_SUPPORTED : cuCtxCreate_v2(context, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER;
    if (!context || context->primary)
        return INVALID_CONTEXT;
    if (current_context() == context)
        depth--;
    free(context);
    return SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER;
    if (*stack_depth())
        depth--;
    if (context)
        stack[depth++] = context;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER;
    if (!context)
        return INVALID_VALUE;
    *context = current_context();
    return SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER;
    if (!context || *stack_depth() == DEPTH)
        return INVALID_VALUE;
    stack[depth++] = context;
    return SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER;
    if (!*stack_depth())
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER;
    if (!current_context())
        return INVALID_CONTEXT;
    if (!device)
        return INVALID_VALUE;
    *device = current_context()->device;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    ENTER;
    if (!device)
        return INVALID_VALUE;
    if (!context)
        context = current_context();
    if (!context)
        return INVALID_CONTEXT;
    *device = context->device;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    ENTER;
    (void)context;
    if (!version)
        return INVALID_VALUE;
    *version = 3020;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    ENTER;
    if (!current_context())
        return INVALID_CONTEXT;
    if (!flags)
        return INVALID_VALUE;
    *flags = current_context()->flags;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}

PLAIN(cuDeviceGetUuid, cuDeviceGetUuid_v2);
PLAIN(cuDeviceTotalMem, cuDeviceTotalMem_v2);
PLAIN(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);
PLAIN(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2);
PLAIN(cuCtxCreate, cuCtxCreate_v2);
PLAIN(cuCtxDestroy, cuCtxDestroy_v2);
PLAIN(cuCtxPushCurrent, cuCtxPushCurrent_v2);
PLAIN(cuCtxPopCurrent, cuCtxPopCurrent_v2);
