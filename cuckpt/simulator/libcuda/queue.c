/* Streams as queues of work.
 *
 * A stream that has work has a thread, which does one piece after the other. What
 * a real GPU does in microseconds lingers here for a tenth of a second unless
 * somebody waits for it, so that a program which forgets to wait is found out. A
 * kernel takes its time and nothing else.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

enum { LINGER_NS = 100000000 };

static struct stream *streams;
static uint64_t last_id;
static atomic_bool stopping; /* the machine is left: drop the work */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Finding streams; the lock is held. */

static CUstream stream_with(uint64_t id)
{
    CUstream stream = streams;

    while (stream && stream->id != id)
        stream = stream->next;
    return stream;
}

static CUstream add_stream(CUcontext context, unsigned flags, int priority)
{
    CUstream stream = calloc(1, sizeof *stream);

    if (!stream)
        return NULL;
    stream->id = ++last_id;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->next = streams;
    streams = stream;
    return stream;
}

static CUstream default_stream(CUcontext context)
{
    CUstream stream = streams;

    while (stream && !(stream->is_default && stream->context == context))
        stream = stream->next;
    if (!stream && (stream = add_stream(context, 0, 0)))
        stream->is_default = true;
    return stream;
}

/* Its thread frees a stream that has been destroyed with work left. */
static void free_stream(CUstream stream)
{
    struct stream **link = &streams;

    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    free(stream);
}

CUstream all_streams(void)
{
    return streams;
}

CUstream lock_streams(void)
{
    pthread_mutex_lock(&lock);
    return streams;
}

CUstream lock_stream(CUstream handle, CUresult *problem)
{
    CUstream found;
    CUcontext context = NULL;

    *problem = SUCCESS;
    /* The default ones: NULL, legacy and per thread, which are one here. */
    if ((uintptr_t)handle <= 2)
        *problem = need_context(&context);
    pthread_mutex_lock(&lock);
    if (*problem != SUCCESS)
        return NULL;
    if (context) {
        *problem = refuse_implicit_capture(streams, context);
        if (*problem != SUCCESS)
            return NULL;
        found = default_stream(context);
        if (!found)
            *problem = OUT_OF_MEMORY;
        return found;
    }
    found = streams;
    while (found && (found != handle || found->is_destroyed || found->is_default))
        found = found->next;
    if (!found)
        *problem = INVALID_HANDLE;
    return found;
}

CUstream lock_usable_stream(CUstream handle, CUresult *problem)
{
    CUstream stream = lock_stream(handle, problem);

    if (stream)
        *problem = check_context(stream->context);
    return *problem == SUCCESS ? stream : NULL;
}

void unlock_streams(void)
{
    pthread_mutex_unlock(&lock);
}

CUresult device_of_stream(CUstream handle, CUdevice *device)
{
    CUresult problem;
    const CUstream stream = lock_usable_stream(handle, &problem);

    if (stream)
        *device = device_of(stream->context);
    unlock_streams();
    return problem;
}

CUresult make_stream(CUcontext context, unsigned flags, int priority,
                     CUstream *stream)
{
    pthread_mutex_lock(&lock);
    *stream = add_stream(context, flags, priority);
    pthread_mutex_unlock(&lock);
    return *stream ? SUCCESS : OUT_OF_MEMORY;
}

/* The lock is held. */
static void destroy(CUstream stream)
{
    stream->is_destroyed = true;
    if (!stream->has_thread)
        free_stream(stream);
}

CUresult destroy_stream(CUstream handle)
{
    CUresult problem;
    CUstream stream = lock_stream(handle, &problem);

    if (stream && stream->is_default)
        problem = INVALID_HANDLE;
    else if (stream)
        destroy(stream);
    unlock_streams();
    return problem;
}

/* One that custom storage handed out, if it is still there. */
void destroy_offered_stream(uint64_t id)
{
    CUstream stream;

    pthread_mutex_lock(&lock);
    stream = stream_with(id);
    if (stream && !stream->is_destroyed)
        destroy(stream);
    pthread_mutex_unlock(&lock);
}

void destroy_streams_of(CUcontext context)
{
    wait_for_context(context);
    pthread_mutex_lock(&lock);
    for (CUstream stream = streams, next; stream; stream = next) {
        next = stream->next;
        if (stream->context == context && !stream->is_destroyed)
            destroy(stream);
    }
    pthread_mutex_unlock(&lock);
}

/* When the machine is left. */
void forget_streams(void)
{
    stopping = true;
    ring_bell();
    for (int rung = bell(); self.pending; rung = bell())
        wait_for_ring(rung, UINT64_MAX);
    pthread_mutex_lock(&lock);
    for (CUstream stream = streams, next; stream; stream = next) {
        next = stream->next;
        destroy(stream);
    }
    pthread_mutex_unlock(&lock);
    stopping = false;
}

/* Doing the work */

static bool hurries(CUstream stream)
{
    return stopping || self.state != RUNNING ||
           stream->wanted >= stream->first->number;
}

/* Until when the first piece of work must wait; 0: it need not, UINT64_MAX: for
 * another stream's. The lock is held. */
static uint64_t waits_until(CUstream stream)
{
    struct work *work = stream->first;
    CUstream other = work->after ? stream_with(work->after) : NULL;
    uint64_t until;

    if (stopping)
        return 0;
    if (other && other->done < work->after_number) {
        if (other->wanted < work->after_number && hurries(stream)) {
            other->wanted = work->after_number;
            ring_bell();
        }
        return UINT64_MAX;
    }
    if (!work->started_at)
        work->started_at = now_ns();
    until = work->duration_ns > UINT64_MAX - 1 - work->started_at
                ? UINT64_MAX - 1 : work->started_at + work->duration_ns;
    if (work->lingers && !hurries(stream) && until < work->added_at + LINGER_NS)
        until = work->added_at + LINGER_NS;
    return until <= now_ns() ? 0 : until;
}

static void finish_first(CUstream stream, CUresult result)
{
    struct work *work = stream->first;

    if (result != SUCCESS)
        fail_context(stream->context, result);
    if (work->event)
        happen(work->event);
    stream->done = work->number;
    stream->first = work->next;
    if (!stream->first)
        stream->last = NULL;
    free(work->staged);
    free(work);
    atomic_fetch_sub(&self.pending, 1);
    ring_bell();
}

static void *do_work(void *argument)
{
    CUstream stream = argument;

    pthread_mutex_lock(&lock);
    while (stream->first) {
        const int rung = bell();
        const uint64_t until = waits_until(stream);
        const struct work *work = stream->first;
        CUresult result = SUCCESS;

        pthread_mutex_unlock(&lock);
        if (until)
            wait_for_ring(rung, until);
        else if (work->run && !stopping)
            result = work->run(work);
        pthread_mutex_lock(&lock);
        if (!until)
            finish_first(stream, result);
    }
    stream->has_thread = false;
    if (stream->is_destroyed)
        free_stream(stream);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static CUresult start_thread(CUstream stream)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_t thread;
    int failed;

    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&thread, &attributes, do_work, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    stream->has_thread = !failed;
    return failed ? OPERATING_SYSTEM : SUCCESS;
}

/* Adding work; the lock is held. */

static CUresult append(CUstream stream, const struct work *work)
{
    struct work *added = malloc(sizeof *added);

    if (!added)
        return OUT_OF_MEMORY;
    *added = *work;
    added->next = NULL;
    added->number = stream->added + 1;
    added->added_at = now_ns();
    if (stream->last)
        stream->last->next = added;
    else
        stream->first = added;
    atomic_fetch_add(&self.pending, 1);
    if (!stream->has_thread && start_thread(stream) != SUCCESS) {
        atomic_fetch_sub(&self.pending, 1);
        stream->first = NULL; /* a stream without a thread has no work */
        free(added);
        return OPERATING_SYSTEM;
    }
    stream->last = added;
    stream->added++;
    if (work->duration_ns) /* a kernel starts at once, and so what is before it */
        stream->wanted = stream->added;
    return SUCCESS;
}

static CUresult append_wait(CUstream stream, CUstream other)
{
    const struct work wait = {.after = other->id, .after_number = other->added};

    return other->done < other->added ? append(stream, &wait) : SUCCESS;
}

/* The default stream waits for the others of its context, and they for it, unless
 * they are non-blocking. */
static CUresult wait_for_its_turn(CUstream stream)
{
    CUresult result = SUCCESS;

    if (stream->flags & NON_BLOCKING)
        return SUCCESS;
    for (CUstream other = streams; other && result == SUCCESS; other = other->next)
        if (other->context == stream->context && other != stream &&
            (stream->is_default || other->is_default) &&
            !(other->flags & NON_BLOCKING))
            result = append_wait(stream, other);
    return result;
}

CUresult add_to(CUstream stream, const struct work *work)
{
    CUresult result = wait_for_its_turn(stream);

    if (result == SUCCESS)
        result = append(stream, work);
    ring_bell();
    return result;
}

CUresult add_work(CUstream handle, const struct work *work)
{
    CUresult result;
    CUstream stream = lock_usable_stream(handle, &result);
    bool is_added = false;

    if (stream && stream->capture == NO_CAPTURE) {
        result = add_to(stream, work);
        is_added = result == SUCCESS;
    }
    unlock_streams();
    if (!is_added)
        free(work->staged);
    return result;
}

/* Waiting for it */

bool is_done(uint64_t id, uint64_t number)
{
    CUstream stream;
    bool done;

    pthread_mutex_lock(&lock);
    stream = stream_with(id);
    done = !stream || stream->done >= number;
    if (!done && stream->wanted < number) {
        stream->wanted = number;
        ring_bell();
    }
    pthread_mutex_unlock(&lock);
    return done;
}

void wait_for_work(uint64_t id, uint64_t number)
{
    for (;;) {
        const int rung = bell();

        if (is_done(id, number))
            return;
        wait_for_ring(rung, UINT64_MAX);
    }
}

CUresult wait_for_stream(CUstream handle)
{
    CUresult problem;
    CUstream stream = lock_usable_stream(handle, &problem);
    const uint64_t id = stream ? stream->id : 0, number = stream ? stream->added : 0;
    CUcontext context = stream ? stream->context : NULL;

    if (stream)
        problem = refuse_capture(streams, stream);
    unlock_streams();
    if (problem == SUCCESS)
        problem = refuse_while_capturing(context, false);
    if (problem == SUCCESS && (uintptr_t)handle <= 2)
        problem = wait_for_blocking_streams(context);
    if (problem != SUCCESS)
        return problem;
    wait_for_work(id, number);
    return check_context(context);
}

/* One that custom storage handed out, if it is still there. */
CUresult wait_for_offered_stream(uint64_t id)
{
    CUresult problem = SUCCESS;
    CUstream stream;
    uint64_t number = 0;

    pthread_mutex_lock(&lock);
    stream = stream_with(id);
    if (stream) {
        number = stream->added;
        problem = refuse_capture(streams, stream);
    }
    pthread_mutex_unlock(&lock);
    if (problem == SUCCESS)
        wait_for_work(id, number);
    return problem;
}

/* The next stream of a context, or of any, by number, that has work left. */
static CUstream next_busy(CUcontext context, uint64_t after, unsigned but)
{
    CUstream next = NULL;

    for (CUstream stream = streams; stream; stream = stream->next)
        if ((!context || stream->context == context) && stream->id > after &&
            stream->done < stream->added && !(stream->flags & but) &&
            (!next || stream->id < next->id))
            next = stream;
    return next;
}

static void wait_for_all(CUcontext context, unsigned but)
{
    uint64_t id = 0;

    for (;;) {
        CUstream stream;
        uint64_t number;

        pthread_mutex_lock(&lock);
        stream = next_busy(context, id, but);
        id = stream ? stream->id : 0;
        number = stream ? stream->added : 0;
        pthread_mutex_unlock(&lock);
        if (!id)
            return;
        wait_for_work(id, number);
    }
}

CUresult wait_for_context(CUcontext context)
{
    wait_for_all(context, 0);
    return check_context(context);
}

void wait_for_everything(void)
{
    wait_for_all(NULL, 0);
}

CUresult wait_for_blocking_streams(CUcontext context)
{
    CUresult problem;

    pthread_mutex_lock(&lock);
    problem = refuse_implicit_capture(streams, context);
    pthread_mutex_unlock(&lock);
    if (problem != SUCCESS)
        return problem;
    wait_for_all(context, NON_BLOCKING);
    return check_context(context);
}
