/* Streams, events, and the one kernel there is: cuckpt_spin(ns).
 *
 * A kernel does nothing but take time, so a stream is the moment until which it
 * is busy. Waiting for it is sleeping.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct stream {
    CUcontext context;
    unsigned flags;
    int priority;
    _Atomic uint64_t busy_until;
};

struct event {
    bool recorded;
    uint64_t at;
};

static struct stream default_streams[MAX_GPUS];

/* The default streams have no handle: NULL, 1 (legacy) or 2 (per thread). */
static CUstream resolve(CUstream stream)
{
    CUcontext context;

    if ((uintptr_t)stream > 2)
        return stream;
    context = current_context();
    if (!context)
        return NULL;
    default_streams[device_of(context)].context = context;
    return &default_streams[device_of(context)];
}

static void sleep_until(uint64_t moment)
{
    struct timespec time = {(time_t)(moment / 1000000000u),
                            (long)(moment % 1000000000u)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL))
        ;
}

static void raise_to(_Atomic uint64_t *word, uint64_t value)
{
    uint64_t before = *word;

    while (before < value &&
           !atomic_compare_exchange_weak(word, &before, value))
        ;
}

void forget_streams(void)
{
    for (int device = 0; device < MAX_GPUS; device++)
        default_streams[device].busy_until = 0;
}

CUresult make_stream(CUcontext context, CUstream *stream)
{
    *stream = calloc(1, sizeof **stream);
    if (!*stream)
        return OUT_OF_MEMORY;
    (*stream)->context = context;
    return SUCCESS;
}

void free_stream(CUstream stream)
{
    free(stream);
}

CUresult wait_for_stream(CUstream stream)
{
    sleep_until(stream->busy_until);
    return SUCCESS;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags,
                                           int priority)
{
    ENTER;
    CUresult result;

    if (!current_context())
        return INVALID_CONTEXT;
    if (!stream)
        return INVALID_VALUE;
    result = make_stream(current_context(), stream);
    if (result == SUCCESS) {
        (*stream)->flags = flags;
        (*stream)->priority = priority;
    }
    return result;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER;
    if ((uintptr_t)stream <= 2)
        return INVALID_HANDLE;
    free_stream(stream);
    return SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER;
    stream = resolve(stream);
    return stream ? wait_for_stream(stream) : INVALID_CONTEXT;
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
    ENTER;
    stream = resolve(stream);
    if (!stream)
        return INVALID_CONTEXT;
    return stream->busy_until > now_ns() ? NOT_READY : SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    ENTER;
    stream = resolve(stream);
    if (!stream)
        return INVALID_CONTEXT;
    if (!context)
        return INVALID_VALUE;
    *context = stream->context;
    return SUCCESS;
}

EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context,
                                  void **green_context)
{
    if (green_context)
        *green_context = NULL;
    return cuStreamGetCtx(stream, context);
}

EXPORT CUresult cuStreamGetDevice(CUstream stream, CUdevice *device)
{
    CUcontext context;
    CUresult result = cuStreamGetCtx(stream, &context);

    if (result == SUCCESS && device)
        *device = device_of(context);
    return device ? result : INVALID_VALUE;
}

EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned *flags)
{
    ENTER;
    stream = resolve(stream);
    if (!stream || !flags)
        return stream ? INVALID_VALUE : INVALID_CONTEXT;
    *flags = stream->flags;
    return SUCCESS;
}

EXPORT CUresult cuStreamGetPriority(CUstream stream, int *priority)
{
    ENTER;
    stream = resolve(stream);
    if (!stream || !priority)
        return stream ? INVALID_VALUE : INVALID_CONTEXT;
    *priority = stream->priority;
    return SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER;
    if (!current_context())
        return INVALID_CONTEXT;
    sleep_until(self.busy_until);
    return SUCCESS;
}

/* Events: the moment at which their stream will have come so far. */

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    ENTER;
    (void)flags;
    if (!current_context())
        return INVALID_CONTEXT;
    if (!event)
        return INVALID_VALUE;
    *event = calloc(1, sizeof **event);
    return *event ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER;
    if (!event)
        return INVALID_HANDLE;
    free(event);
    return SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER;
    uint64_t now = now_ns();

    stream = resolve(stream);
    if (!event || !stream)
        return INVALID_HANDLE;
    event->recorded = true;
    event->at = stream->busy_until > now ? stream->busy_until : now;
    return SUCCESS;
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    ENTER;
    if (!event)
        return INVALID_HANDLE;
    sleep_until(event->at);
    return SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    ENTER;
    if (!event)
        return INVALID_HANDLE;
    return event->at > now_ns() ? NOT_READY : SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start,
                                      CUevent end)
{
    ENTER;
    if (!milliseconds)
        return INVALID_VALUE;
    if (!start || !end || !start->recorded || !end->recorded)
        return INVALID_HANDLE;
    if (start->at > now_ns() || end->at > now_ns())
        return NOT_READY;
    *milliseconds = (float)((double)end->at - (double)start->at) / 1e6f;
    return SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    ENTER;
    (void)flags;
    stream = resolve(stream);
    if (!event || !stream)
        return INVALID_HANDLE;
    raise_to(&stream->busy_until, event->at);
    return SUCCESS;
}

/* Modules: any PTX that has an entry cuckpt_spin is taken for the kernel. */

static char module, function;

EXPORT CUresult cuModuleLoadData(void **handle, const void *image)
{
    ENTER;
    if (!current_context())
        return INVALID_CONTEXT;
    if (!handle || !image)
        return INVALID_VALUE;
    if (!strstr(image, ".entry cuckpt_spin"))
        return INVALID_IMAGE;
    *handle = &module;
    return SUCCESS;
}

EXPORT CUresult cuModuleUnload(void *handle)
{
    ENTER;
    return handle == &module ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuModuleGetFunction(void **handle, void *of, const char *name)
{
    ENTER;
    if (of != &module)
        return INVALID_HANDLE;
    if (!handle || !name)
        return INVALID_VALUE;
    if (strcmp(name, "cuckpt_spin") != 0)
        return NOT_FOUND;
    *handle = &function;
    return SUCCESS;
}

EXPORT CUresult cuLaunchKernel(void *kernel, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, CUstream stream,
                               void **parameters, void **extra)
{
    ENTER;
    uint64_t start = now_ns();

    (void)shared_bytes, (void)extra;
    stream = resolve(stream);
    if (!stream)
        return INVALID_CONTEXT;
    if (kernel != &function)
        return INVALID_HANDLE;
    if (!parameters || !parameters[0] || !grid_x || !grid_y || !grid_z ||
        !block_x || !block_y || !block_z)
        return INVALID_VALUE;
    if (start < stream->busy_until)
        start = stream->busy_until;
    raise_to(&stream->busy_until, start + *(uint64_t *)parameters[0]);
    raise_to(&self.busy_until, stream->busy_until);
    return SUCCESS;
}

PLAIN(cuStreamDestroy, cuStreamDestroy_v2);
PLAIN(cuEventDestroy, cuEventDestroy_v2);
PLAIN(cuEventElapsedTime, cuEventElapsedTime_v2);
