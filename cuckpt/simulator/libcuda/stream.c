/* Streams, as an API. */
#define _GNU_SOURCE
#include "simulator.h"

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
    CUstream stream = lock_usable_stream(handle, &result);
    const uint64_t id = stream ? stream->id : 0, number = stream ? stream->added : 0;
    CUcontext context = stream ? stream->context : NULL;
    const bool captures = stream && stream->capture != NO_CAPTURE;

    unlock_streams();
    if (captures)
        return wait_for_stream(handle); /* which says how it refuses */
    if (result == SUCCESS)
        result = refuse_while_capturing(context, false);
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

PLAIN(cuStreamDestroy, cuStreamDestroy_v2);
