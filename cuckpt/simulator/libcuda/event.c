/* Events: each remembers a piece of work of the stream it was recorded in. */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdlib.h>

struct event {
    CUcontext context;
    bool recorded;
    uint64_t captured;       /* in which capture it was recorded last, or 0 */
    uint64_t stream, number; /* the work that it waits for */
    uint64_t at;             /* when that was done, ns */
    int holders;             /* its owner, and each work that has it */
    bool destroyed;
    struct event *next;
};

static struct event *events;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Free an event when the last who has it lets it go. The lock is held. */
static void let_go(CUevent event)
{
    struct event **link = &events;

    if (--event->holders)
        return;
    while (*link != event)
        link = &(*link)->next;
    *link = event->next;
    free(event);
}

/* Find an event; the lock is held. */
static CUevent find(CUevent event)
{
    CUevent found = events;

    while (found && (found != event || found->destroyed))
        found = found->next;
    return found;
}

static CUresult no_event(CUevent event)
{
    return event ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
}

/* Get a copy of an event whose context is of use. */
static CUresult look_up(CUevent event, struct event *copy)
{
    CUevent found;

    pthread_mutex_lock(&lock);
    found = find(event);
    if (found)
        *copy = *found;
    pthread_mutex_unlock(&lock);
    return found ? check_context(copy->context) : no_event(event);
}

/* When the machine is left, after its streams. */
void forget_events(void)
{
    while (events) {
        CUevent first = events;

        events = first->next;
        free(first);
    }
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);
    struct event *made;

    (void)flags;
    if (!event)
        return INVALID_VALUE;
    if (result != SUCCESS)
        return result;
    made = calloc(1, sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    made->holders = 1;
    made->context = context;
    pthread_mutex_lock(&lock);
    made->next = events;
    events = made;
    pthread_mutex_unlock(&lock);
    *event = made;
    return SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER;
    CUevent found;

    pthread_mutex_lock(&lock);
    found = find(event);
    if (found) {
        found->destroyed = true;
        let_go(found);
    }
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : no_event(event);
}

/* A stream has come to a record of this event. */
void happen(CUevent event)
{
    pthread_mutex_lock(&lock);
    event->at = now_ns();
    let_go(event);
    pthread_mutex_unlock(&lock);
}

/* Both locks are held. */
static CUresult record(CUevent event, CUstream stream)
{
    const struct work work = {.event = event};
    CUresult result;

    event->captured = stream->capture == NO_CAPTURE ? 0 : stream->capture_origin;
    if (event->captured)
        return SUCCESS;
    event->holders++;
    result = add_to(stream, &work);
    if (result != SUCCESS) {
        let_go(event);
        return result;
    }
    event->recorded = true;
    event->stream = stream->id;
    event->number = stream->added;
    return SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream handle)
{
    ENTER;
    CUresult result;
    CUstream stream = lock_usable_stream(handle, &result);
    CUevent found;

    pthread_mutex_lock(&lock);
    found = find(event);
    if (!found)
        result = no_event(event);
    else if (stream)
        result = record(found, stream);
    pthread_mutex_unlock(&lock);
    unlock_streams();
    return result;
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags)
{
    return flags > 1 ? INVALID_VALUE : cuEventRecord(event, stream);
}

/* Get a copy of an event that may be waited for now. */
static CUresult may_be_waited_for(CUevent event, CUresult if_captured,
                                  struct event *copy)
{
    const CUresult result = look_up(event, copy);

    if (result != SUCCESS)
        return result;
    if (copy->captured) {
        spoil_capture(copy->captured);
        return if_captured;
    }
    return refuse_while_capturing(copy->context, false);
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    ENTER;
    struct event copy;
    const CUresult result = may_be_waited_for(event, CAPTURED_EVENT, &copy);

    if (result != SUCCESS)
        return result;
    if (copy.recorded)
        wait_for_work(copy.stream, copy.number);
    return check_context(copy.context);
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    ENTER;
    struct event copy;
    const CUresult result = may_be_waited_for(event, INVALID_VALUE, &copy);

    if (result != SUCCESS)
        return result;
    return copy.recorded && !is_done(copy.stream, copy.number) ? NOT_READY : SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start,
                                      CUevent end)
{
    ENTER;
    struct event from, to;
    CUresult result = look_up(start, &from);

    if (result == SUCCESS)
        result = look_up(end, &to);
    if (!milliseconds)
        return INVALID_VALUE;
    if (result != SUCCESS)
        return result;
    if (!from.recorded || !to.recorded || from.captured || to.captured)
        return INVALID_HANDLE;
    if (!is_done(from.stream, from.number) || !is_done(to.stream, to.number))
        return NOT_READY;
    look_up(start, &from);
    look_up(end, &to);
    *milliseconds = (float)((double)to.at - (double)from.at) / 1e6f;
    return SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    ENTER;
    struct event copy;
    struct work wait = {0};
    CUresult result = look_up(event, &copy);
    CUstream other;

    if (result != SUCCESS)
        return result;
    if (flags > 1)
        return INVALID_VALUE;
    if (copy.captured) {
        other = lock_usable_stream(stream, &result);
        if (other)
            join_capture(all_streams(), other, copy.captured);
        unlock_streams();
        return result;
    }
    wait.after = copy.stream;
    wait.after_number = copy.number;
    return copy.recorded ? add_work(stream, &wait) : SUCCESS;
}

PLAIN(cuEventDestroy, cuEventDestroy_v2);
PLAIN(cuEventElapsedTime, cuEventElapsedTime_v2);
