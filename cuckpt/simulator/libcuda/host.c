/* Pinned host memory: ordinary memory, of which it is known that it is pinned.
 *
 * It counts, for asynchronous copies return at once only from and to such memory.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdlib.h>

static struct pinned {
    char *start;
    size_t size;
    bool is_registered; /* the program's own, not to be freed */
    unsigned flags;
    struct pinned *next;
} *all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Find what holds these bytes; the lock is held. */
static struct pinned **find(const char *start, size_t size)
{
    struct pinned **link = &all;

    while (*link && !(start >= (*link)->start &&
                      (size_t)(start - (*link)->start) < (*link)->size &&
                      size <= (*link)->size - (size_t)(start - (*link)->start)))
        link = &(*link)->next;
    return link;
}

/* Whether some of these bytes are pinned; the lock is held. */
static bool overlaps(const char *start, size_t size)
{
    for (const struct pinned *pinned = all; pinned; pinned = pinned->next)
        if (start < pinned->start + pinned->size && pinned->start < start + size)
            return true;
    return false;
}

bool describe_pinned(CUdeviceptr pointer, CUdeviceptr *base, size_t *size,
                     unsigned *flags)
{
    const struct pinned *found;

    pthread_mutex_lock(&lock);
    found = *find((char *)(uintptr_t)pointer, 1);
    if (found) {
        *base = (uintptr_t)found->start;
        *size = found->size;
        *flags = found->flags;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

bool is_pinned(CUdeviceptr pointer, size_t size)
{
    bool found;

    pthread_mutex_lock(&lock);
    found = *find((char *)(uintptr_t)pointer, size) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

/* The lock is held. */
static CUresult keep(void *start, size_t size, bool is_registered, unsigned flags)
{
    struct pinned *pinned = malloc(sizeof *pinned);

    if (!pinned)
        return OUT_OF_MEMORY;
    *pinned = (struct pinned){start, size, is_registered, flags, all};
    all = pinned;
    return SUCCESS;
}

static bool forget(char *start, bool is_registered)
{
    struct pinned **link, *found;

    pthread_mutex_lock(&lock);
    link = &all;
    while (*link && ((*link)->start != start ||
                     (*link)->is_registered != is_registered))
        link = &(*link)->next;
    found = *link;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&lock);
    free(found);
    return found != NULL;
}

/* When the machine is left. What was allocated stays the program's. */
void forget_pinned(void)
{
    while (all)
        forget(all->start, all->is_registered);
}

CUresult allocate_pinned(void **pointer, size_t size, unsigned flags)
{
    CUresult result;

    if (posix_memalign(pointer, 4096, size))
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    result = keep(*pointer, size, false, flags);
    pthread_mutex_unlock(&lock);
    if (result != SUCCESS)
        free(*pointer);
    return result;
}

bool free_pinned(void *pointer)
{
    if (!forget(pointer, false))
        return false;
    free(pointer);
    return true;
}

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags)
{
    ENTER;
    CUcontext context;
    CUresult result = need_context(&context);

    if (result != SUCCESS)
        return result;
    if (!pointer || size == 0 || flags > 7)
        return INVALID_VALUE;
    result = refuse_while_capturing(context, false);
    if (result != SUCCESS)
        return result;
    return allocate_pinned(pointer, size, flags);
}

EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t size)
{
    return cuMemHostAlloc(pointer, size, 0);
}

EXPORT CUresult cuMemFreeHost(void *pointer)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);

    if (result != SUCCESS)
        return result;
    if (is_pinned((uintptr_t)pointer, 1)) {
        const CUresult refused = refuse_while_capturing(context, false);

        if (refused != SUCCESS)
            return refused;
        wait_for_everything(); /* a copy may be on its way */
    }
    return free_pinned(pointer) ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags)
{
    ENTER;
    CUcontext context;
    CUresult result;

    if (!pointer || !size || flags > 15 || size > SIZE_MAX - (uintptr_t)pointer)
        return INVALID_VALUE;
    result = need_context(&context);
    if (result == SUCCESS)
        result = refuse_while_capturing(context, false);
    if (result != SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    if (overlaps(pointer, size))
        result = HOST_MEMORY_ALREADY_REGISTERED;
    else
        result = keep(pointer, size, true, flags);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *pointer)
{
    ENTER;
    if (!pointer)
        return INVALID_VALUE;
    wait_for_everything();
    return forget(pointer, true) ? SUCCESS : HOST_MEMORY_NOT_REGISTERED;
}

/* Host and device share their addresses. */
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host,
                                             unsigned flags)
{
    ENTER;
    if (!device || flags || !is_pinned((uintptr_t)host, 1))
        return INVALID_VALUE;
    *device = (uintptr_t)host;
    return SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *host)
{
    ENTER;
    CUdeviceptr base;
    size_t size;

    return flags && describe_pinned((uintptr_t)host, &base, &size, flags)
               ? SUCCESS : INVALID_VALUE;
}

PLAIN(cuMemAllocHost, cuMemAllocHost_v2);
PLAIN(cuMemHostRegister, cuMemHostRegister_v2);
PLAIN(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2);
