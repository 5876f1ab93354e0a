/* Stream capture.
 *
 * What is captured is not kept: there is nothing that could launch a graph here. But
 * a stream that captures refuses what a real one was seen to refuse, and is spoilt
 * by the attempt; so are those that have joined its capture through events.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

struct graph {
    struct graph *next;
};

static struct graph *graphs;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int mode_of_thread = CAPTURE_GLOBAL;

static int this_thread(void)
{
    return (int)syscall(SYS_gettid);
}

/* With the streams locked. */

static void change_capture(CUstream streams, uint64_t origin, enum capture to)
{
    for (CUstream stream = streams; stream; stream = stream->next)
        if (stream->capture != NO_CAPTURE && stream->capture_origin == origin)
            stream->capture = to;
}

/* A stream that captures has nothing to wait for. */
CUresult refuse_capture(CUstream streams, CUstream stream)
{
    if (stream->capture == NO_CAPTURE)
        return SUCCESS;
    if (stream->capture == INVALIDATED)
        return STREAM_CAPTURE_INVALIDATED;
    change_capture(streams, stream->capture_origin, INVALIDATED);
    return STREAM_CAPTURE_UNSUPPORTED;
}

/* The default stream would have to wait for a blocking one, and be captured too. */
CUresult refuse_implicit_capture(CUstream streams, CUcontext context)
{
    CUresult result = SUCCESS;

    for (CUstream stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream->capture == CAPTURING &&
            !(stream->flags & NON_BLOCKING)) {
            change_capture(streams, stream->capture_origin, INVALIDATED);
            result = STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

static bool forbids(const struct stream *stream)
{
    if (stream->capture_mode == CAPTURE_RELAXED || mode_of_thread == CAPTURE_RELAXED)
        return false;
    return stream->capturing_thread == this_thread() ||
           (stream->capture_mode == CAPTURE_GLOBAL && mode_of_thread == CAPTURE_GLOBAL);
}

/* An event that was recorded in a capture makes a stream part of it. */
void join_capture(CUstream streams, CUstream stream, uint64_t origin)
{
    CUstream first = streams;

    while (first && (first->id != origin || first->capture == NO_CAPTURE))
        first = first->next;
    if (!first || stream->capture != NO_CAPTURE || stream->is_default)
        return;
    stream->capture = first->capture;
    stream->capture_origin = origin;
    stream->capture_mode = first->capture_mode;
    stream->capturing_thread = first->capturing_thread;
}

/* Without. */

/* Calls that are unsafe during a capture, such as an allocation, spoil it. */
CUresult refuse_while_capturing(CUcontext context, bool relaxed_too)
{
    CUresult result = SUCCESS;
    CUstream streams = lock_streams();

    for (CUstream stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream->capture == CAPTURING &&
            (relaxed_too || forbids(stream)))
            result = refuse_capture(streams, stream);
    unlock_streams();
    return result;
}

void spoil_capture(uint64_t origin)
{
    change_capture(lock_streams(), origin, INVALIDATED);
    unlock_streams();
}

bool is_capturing(CUstream handle)
{
    CUresult problem;
    CUstream stream;
    bool is;

    if ((uintptr_t)handle <= 2) /* which cannot; and to look for it would spoil */
        return false;
    stream = lock_stream(handle, &problem);
    is = stream && stream->capture != NO_CAPTURE;
    unlock_streams();
    return is;
}

/* The calls */

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode)
{
    ENTER;
    CUresult result;
    CUstream stream = lock_usable_stream(handle, &result);

    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED)
        result = INVALID_VALUE;
    else if (stream && stream->is_default)
        result = STREAM_CAPTURE_UNSUPPORTED;
    else if (stream && stream->capture != NO_CAPTURE)
        result = ILLEGAL_STATE;
    if (result == SUCCESS) {
        stream->capture = CAPTURING;
        stream->capture_mode = (enum capture_mode)mode;
        stream->capturing_thread = this_thread();
        stream->capture_origin = stream->id;
    }
    unlock_streams();
    return result;
}

static CUresult make_graph(void **graph)
{
    struct graph *made = malloc(sizeof *made);

    if (!made)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    made->next = graphs;
    graphs = made;
    pthread_mutex_unlock(&lock);
    *graph = made;
    return SUCCESS;
}

/* Tell what the end of a capture comes to, with the streams locked. */
static CUresult look_at_end(const struct stream *stream)
{
    const enum capture was = stream->capture;

    if (was == NO_CAPTURE)
        return ILLEGAL_STATE;
    if (stream->capture_origin != stream->id)
        return STREAM_CAPTURE_UNMATCHED;
    if (stream->capture_mode != CAPTURE_RELAXED &&
        stream->capturing_thread != this_thread())
        return STREAM_CAPTURE_WRONG_THREAD;
    return was == INVALIDATED ? STREAM_CAPTURE_INVALIDATED : SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, void **graph)
{
    ENTER;
    CUresult result;
    CUstream stream;
    uint64_t origin = 0;

    if (!graph)
        return INVALID_VALUE;
    *graph = NULL;
    stream = lock_stream(handle, &result);
    if (stream) {
        origin = stream->capture_origin;
        result = look_at_end(stream);
    }
    unlock_streams();
    if (!stream || result == ILLEGAL_STATE)
        return result;
    change_capture(lock_streams(), origin,
                   result == STREAM_CAPTURE_UNMATCHED ? INVALIDATED : NO_CAPTURE);
    unlock_streams();
    return result == SUCCESS ? make_graph(graph) : result;
}

EXPORT CUresult cuGraphDestroy(void *graph)
{
    ENTER;
    struct graph **link, *found;

    pthread_mutex_lock(&lock);
    link = &graphs;
    while (*link && *link != graph)
        link = &(*link)->next;
    found = *link;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&lock);
    free(found);
    return found ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    const int before = mode_of_thread;

    if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED)
        return INVALID_VALUE;
    mode_of_thread = *mode;
    *mode = before;
    return SUCCESS;
}

PLAIN(cuStreamBeginCapture, cuStreamBeginCapture_v2);
