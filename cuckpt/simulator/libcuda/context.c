/* Contexts, and the current one of each thread.
 *
 * One that has been destroyed is kept, so that whoever still has its handle is
 * told so; it is freed when this process leaves the machine.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdlib.h>

struct context {
    CUdevice device;
    bool active;  /* neither destroyed nor reset */
    bool primary;
    int retained; /* of a primary one: how often; a reset leaves that as it is */
    unsigned flags;
    atomic_int failed; /* the error that every later call returns, or 0 */
    struct context *next;
};

enum { DEPTH = 64 };

static struct context primaries[MAX_GPUS];
static struct context *others;
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
    for (CUdevice device = 0; device < MAX_GPUS; device++) {
        primaries[device] = (struct context){.device = device, .primary = true};
        self.contexts[device] = 0;
    }
    while (others) {
        CUcontext first = others;

        others = first->next;
        free(first);
    }
}

/* The GPUs, a bit each, whose primary context this process retains. */
uint32_t retained_gpus(void)
{
    uint32_t gpus = 0;

    pthread_mutex_lock(&lock);
    for (unsigned device = 0; device < MAX_GPUS; device++)
        if (primaries[device].active)
            gpus |= UINT32_C(1) << self.gpu_of_device[device];
    pthread_mutex_unlock(&lock);
    return gpus;
}

CUdevice device_of(CUcontext context)
{
    return context->device;
}

/* The lock is held. */
static bool is_known(CUcontext context)
{
    for (CUdevice device = 0; device < MAX_GPUS; device++)
        if (context == &primaries[device])
            return true;
    for (CUcontext other = others; other; other = other->next)
        if (other == context)
            return true;
    return false;
}

/* Tell whether a context can be used: 0, or why not. */
CUresult check_context(CUcontext context)
{
    CUresult result = INVALID_CONTEXT;

    pthread_mutex_lock(&lock);
    if (context && is_known(context))
        result = context->active ? context->failed : CONTEXT_IS_DESTROYED;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Get the current context. */
CUresult need_context(CUcontext *context)
{
    *context = *stack_depth() ? stack[depth - 1] : NULL;
    return check_context(*context);
}

/* After this, as with a real GPU, nothing helps but another process. */
CUresult fail_context(CUcontext context, CUresult result)
{
    context->failed = result;
    return result;
}

/* The count of contexts on a device changes; the lock is held. */
static void count_contexts(CUdevice device, int change)
{
    const uint64_t bit = UINT64_C(1) << self.gpu_of_device[device];

    if (atomic_fetch_add(&self.contexts[device], change) + change)
        atomic_fetch_or(&self.slot->contexts, bit);
    else
        atomic_fetch_and(&self.slot->contexts, ~bit);
}

static void empty(CUcontext context)
{
    destroy_streams_of(context);
    release_all_of(context);
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
    if (!primaries[device].active)
        count_contexts(device, 1);
    primaries[device].active = true;
    pthread_mutex_unlock(&lock);
    *context = primary_context(device);
    return SUCCESS;
}

/* The lock is held; it is left. */
static void end_primary(struct context *context)
{
    const bool was_active = context->active;

    context->active = false;
    if (was_active)
        count_contexts(context->device, -1);
    pthread_mutex_unlock(&lock);
    if (was_active)
        empty(context);
    context->failed = SUCCESS; /* also of what was still to be done */
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER;
    CUresult result = SUCCESS;

    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (primaries[device].retained == 0)
        result = INVALID_CONTEXT;
    else if (--primaries[device].retained == 0) {
        end_primary(&primaries[device]);
        return SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    primaries[device].flags = 0;
    end_primary(&primaries[device]);
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags,
                                           int *active)
{
    ENTER;
    if (!flags || !active)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    *flags = primaries[device].flags;
    *active = primaries[device].active;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    ENTER;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    primaries[device].flags = flags;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* Other contexts */

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags,
                               CUdevice device)
{
    ENTER;
    struct context *made;

    if (!context || *stack_depth() == DEPTH)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    made = calloc(1, sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    made->device = device;
    made->flags = flags;
    made->active = true;
    pthread_mutex_lock(&lock);
    made->next = others;
    others = made;
    count_contexts(device, 1);
    pthread_mutex_unlock(&lock);
    stack[depth++] = *context = made;
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
    CUresult result = INVALID_CONTEXT;

    pthread_mutex_lock(&lock);
    if (context && is_known(context) && !context->primary)
        result = context->active ? SUCCESS : CONTEXT_IS_DESTROYED;
    if (result == SUCCESS) {
        context->active = false;
        count_contexts(context->device, -1);
    }
    pthread_mutex_unlock(&lock);
    if (result != SUCCESS)
        return result;
    if (*stack_depth() && stack[depth - 1] == context)
        depth--;
    empty(context);
    return SUCCESS;
}

/* The current context */

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER;
    const CUresult result = context ? check_context(context) : SUCCESS;

    if (result != SUCCESS && result != CONTEXT_IS_DESTROYED)
        return result;
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
    *context = *stack_depth() ? stack[depth - 1] : NULL;
    return SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER;
    const CUresult result = check_context(context);

    if (*stack_depth() == DEPTH)
        return INVALID_VALUE;
    if (result != SUCCESS && result != CONTEXT_IS_DESTROYED)
        return result;
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

/* Get a context, or the current one instead of NULL. */
static CUresult context_or_current(CUcontext *context)
{
    return *context ? check_context(*context) : need_context(context);
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    ENTER;
    const CUresult result = context_or_current(&context);

    if (!device)
        return INVALID_VALUE;
    if (result == SUCCESS)
        *device = context->device;
    return result;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    return cuCtxGetDevice_v2(device, NULL);
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    ENTER;
    const CUresult result = context_or_current(&context);

    if (!version)
        return INVALID_VALUE;
    if (result == SUCCESS)
        *version = 3020;
    return result;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);

    if (!flags)
        return INVALID_VALUE;
    if (result == SUCCESS)
        *flags = context->flags;
    return result;
}

/* Peers: every device finds the memory of every other in any case. */

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    ENTER;
    if (!can)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS || valid_device(peer) != SUCCESS)
        return INVALID_DEVICE;
    *can = device != peer;
    return SUCCESS;
}

static CUresult check_peer(CUcontext peer)
{
    CUcontext context;
    const CUresult result = need_context(&context);

    if (result != SUCCESS)
        return result;
    return peer == context ? INVALID_CONTEXT : check_context(peer);
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    ENTER;
    return flags ? INVALID_VALUE : check_peer(peer);
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    ENTER;
    return check_peer(peer);
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

PLAIN(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);
PLAIN(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2);
PLAIN(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2);
PLAIN(cuCtxCreate, cuCtxCreate_v2);
PLAIN(cuCtxDestroy, cuCtxDestroy_v2);
PLAIN(cuCtxPushCurrent, cuCtxPushCurrent_v2);
PLAIN(cuCtxPopCurrent, cuCtxPopCurrent_v2);
