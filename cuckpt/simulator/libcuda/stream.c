/* Streams, and the capture of their work, as an API.
 *
 * What is captured is not kept: there is nothing that could launch a graph here.
 * But a stream that captures refuses what a real one refuses.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags,
                                           int priority)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);

    if (!stream || flags > NON_BLOCKING)
        return INVALID_VALUE;
    return result == SUCCESS ? make_stream(context, flags, priority, stream) : result;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER;
    return destroy_stream(stream);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER;
    return wait_for_stream(stream);
}

EXPORT CUresult cuStreamQuery(CUstream handle)
{
    ENTER;
    CUresult result;
    CUstream stream = lock_stream(handle, &result);
    const uint64_t id = stream ? stream->id : 0, number = stream ? stream->added : 0;

    if (stream)
        result = refuse_capture(stream);
    unlock_streams();
    if (result == SUCCESS && !is_done(id, number))
        result = NOT_READY;
    return result;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER;
    CUcontext context;
    CUresult result = need_context(&context);

    if (result == SUCCESS)
        result = refuse_while_capturing(context, true);
    return result == SUCCESS ? wait_for_context(context) : result;
}

/* What a stream is */

struct description {
    CUcontext context;
    uint64_t id;
    unsigned flags;
    int priority, capture;
};

static CUresult describe(CUstream handle, struct description *description)
{
    CUresult result;
    const CUstream stream = lock_stream(handle, &result);

    if (stream)
        *description = (struct description){stream->context, stream->id,
                                            stream->flags, stream->priority,
                                            stream->capture};
    unlock_streams();
    return result;
}

#define DESCRIPTION_FUNCTION(name, type, expression)              \
    EXPORT CUresult name(CUstream handle, type *value)            \
    {                                                             \
        ENTER;                                                    \
        struct description stream = {0};                          \
        const CUresult result = describe(handle, &stream);        \
                                                                  \
        if (!value)                                               \
            return INVALID_VALUE;                                 \
        if (result == SUCCESS)                                    \
            *value = expression;                                  \
        return result;                                            \
    }

DESCRIPTION_FUNCTION(cuStreamGetCtx, CUcontext, stream.context)
DESCRIPTION_FUNCTION(cuStreamGetDevice, CUdevice, device_of(stream.context))
DESCRIPTION_FUNCTION(cuStreamGetFlags, unsigned, stream.flags)
DESCRIPTION_FUNCTION(cuStreamGetPriority, int, stream.priority)
DESCRIPTION_FUNCTION(cuStreamGetId, uint64_t, stream.id)
DESCRIPTION_FUNCTION(cuStreamIsCapturing, int, stream.capture)

EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context,
                                  void **green_context)
{
    if (green_context)
        *green_context = NULL;
    return cuStreamGetCtx(stream, context);
}

/* Capture */

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode)
{
    ENTER;
    CUresult result;
    CUstream stream = lock_stream(handle, &result);

    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED)
        result = INVALID_VALUE;
    else if (stream && stream->is_default)
        result = STREAM_CAPTURE_UNSUPPORTED;
    else if (stream && stream->capture != NO_CAPTURE)
        result = ILLEGAL_STATE;
    if (result == SUCCESS) {
        stream->capture = CAPTURING;
        stream->capture_mode = (enum capture_mode)mode;
        stream->capturing_thread = (int)syscall(SYS_gettid);
    }
    unlock_streams();
    return result;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, void **graph)
{
    ENTER;
    CUresult result;
    CUstream stream;

    if (!graph)
        return INVALID_VALUE;
    *graph = NULL;
    stream = lock_stream(handle, &result);
    if (stream && stream->capture == NO_CAPTURE)
        result = ILLEGAL_STATE;
    else if (stream && stream->capture == INVALIDATED)
        result = STREAM_CAPTURE_INVALIDATED;
    if (stream)
        stream->capture = NO_CAPTURE;
    unlock_streams();
    if (result == SUCCESS && !(*graph = malloc(1)))
        result = OUT_OF_MEMORY;
    return result;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    static _Thread_local int current = CAPTURE_GLOBAL;
    const int before = current;

    if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED)
        return INVALID_VALUE;
    current = *mode;
    *mode = before;
    return SUCCESS;
}

EXPORT CUresult cuGraphDestroy(void *graph)
{
    ENTER;
    free(graph);
    return graph ? SUCCESS : INVALID_VALUE;
}

PLAIN(cuStreamDestroy, cuStreamDestroy_v2);
PLAIN(cuStreamBeginCapture, cuStreamBeginCapture_v2);
