/* Memory pools: allocation in the order of a stream.
 *
 * An allocation of a pool is an allocation like any other, and is given back as soon
 * as its stream has come so far: a pool keeps no memory in reserve. What a pool adds is its limit,
 * what it counts, and that its memory belongs to no context: it survives a reset.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum location { ON_DEVICE = 1, ON_HOST = 2, ON_HOST_NODE = 3 };

struct location_of_memory {
    int type; /* enum location */
    int id;
};

struct pool_properties {
    int allocation_type; /* 1: pinned; 2: managed */
    int handle_types;
    struct location_of_memory location;
    void *security;
    size_t max_size; /* 0: no limit but the memory */
    unsigned char more[56];
};

struct access {
    struct location_of_memory location;
    int flags;
};

enum { NO_ACCESS = 0, READ_ONLY = 1, READ_WRITE = 3 };

enum {
    REUSE_FIRST = 1,
    REUSE_LAST = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_CURRENT = 5,
    RESERVED_HIGH = 6,
    USED_CURRENT = 7,
    USED_HIGH = 8,
};

struct pool {
    CUdevice device; /* -1: the host */
    bool is_default;
    bool destroyed;  /* it goes when the last of its blocks does */
    uint64_t max_size, threshold;
    int reuse[REUSE_LAST];
    uint64_t used, used_high, reserved, reserved_high;
    uint32_t accessible; /* from which devices, a bit each */
    struct pool *next;
};

struct block {
    CUdeviceptr pointer;
    size_t size;
    struct pool *pool;
    struct block *next;
};

static struct pool defaults[MAX_GPUS + 1]; /* the last one is the host's */
static CUmemoryPool current[MAX_GPUS + 1];
static struct pool *pools; /* those that have been created */
static struct block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void set_up(struct pool *pool, CUdevice device)
{
    *pool = (struct pool){.device = device, .reuse = {1, 1, 1}};
    pool->accessible = device < 0 ? 0 : UINT32_C(1) << device;
}

/* The default pool of a device, or of the host: -1. */
static CUmemoryPool default_pool(CUdevice device)
{
    struct pool *pool = &defaults[device < 0 ? MAX_GPUS : device];

    pthread_mutex_lock(&lock);
    if (!pool->is_default) {
        set_up(pool, device);
        pool->is_default = true;
    }
    pthread_mutex_unlock(&lock);
    return pool;
}

static CUmemoryPool current_pool(CUdevice device)
{
    CUmemoryPool pool;

    pthread_mutex_lock(&lock);
    pool = current[device < 0 ? MAX_GPUS : device];
    pthread_mutex_unlock(&lock);
    return pool ? pool : default_pool(device);
}

void forget_pools(void)
{
    while (blocks) {
        struct block *block = blocks;

        blocks = block->next;
        if (block->pool->device < 0)
            free_pinned((void *)(uintptr_t)block->pointer);
        free(block);
    }
    while (pools) {
        struct pool *pool = pools;

        pools = pool->next;
        free(pool);
    }
    memset(defaults, 0, sizeof defaults);
    memset(current, 0, sizeof current);
}

static uint64_t in_reserve(size_t size)
{
    return (size + CHUNK - 1) / CHUNK * CHUNK;
}

static void count(struct pool *pool, size_t size)
{
    pool->used += size;
    pool->reserved += in_reserve(size);
    if (pool->used_high < pool->used)
        pool->used_high = pool->used;
    if (pool->reserved_high < pool->reserved)
        pool->reserved_high = pool->reserved;
}

static void drop_if_unused(struct pool *pool)
{
    struct pool **link = &pools;

    if (!pool->destroyed || pool->used)
        return;
    while (*link != pool)
        link = &(*link)->next;
    *link = pool->next;
    free(pool);
}

/* The link to the block that begins at an address, or to NULL. */
static struct block **find_block(CUdeviceptr pointer)
{
    struct block **link = &blocks;

    while (*link && (*link)->pointer != pointer)
        link = &(*link)->next;
    return link;
}

/* An allocation goes, whichever call frees it. */
bool leave_pool(CUdeviceptr pointer)
{
    struct block **link, *block;
    bool was_on_host = false;

    pthread_mutex_lock(&lock);
    link = find_block(pointer);
    block = *link;
    if (block) {
        *link = block->next;
        was_on_host = block->pool->device < 0;
        block->pool->used -= block->size;
        block->pool->reserved -= in_reserve(block->size);
        drop_if_unused(block->pool);
        free(block);
    }
    pthread_mutex_unlock(&lock);
    if (was_on_host)
        free_pinned((void *)(uintptr_t)pointer);
    return was_on_host;
}

CUmemoryPool pool_of(CUdeviceptr pointer)
{
    CUmemoryPool pool = NULL;

    pthread_mutex_lock(&lock);
    for (struct block *block = blocks; block && !pool; block = block->next)
        if (pointer - block->pointer < block->size)
            pool = block->pool;
    pthread_mutex_unlock(&lock);
    return pool;
}

/* Whether a handle is one of a pool; the lock is held. */
static bool is_pool(CUmemoryPool handle)
{
    struct pool *pool = pools;

    for (unsigned i = 0; i <= MAX_GPUS; i++)
        if (handle == &defaults[i])
            return handle->is_default;
    while (pool && pool != handle)
        pool = pool->next;
    return pool && !pool->destroyed;
}

/* The lock is held. */
static CUresult allocate_from(struct pool *pool, size_t size, CUdeviceptr *pointer)
{
    struct block *block = malloc(sizeof *block);
    void *host = NULL;
    CUresult result;

    if (!block)
        return OUT_OF_MEMORY;
    if (pool->max_size && size > pool->max_size - pool->used) {
        result = OUT_OF_MEMORY;
    } else if (pool->device < 0) {
        result = allocate_pinned(&host, size, 0);
        *pointer = (uintptr_t)host;
    } else {
        result = allocate(pool->device, NULL, size, false, pointer);
    }
    if (result != SUCCESS) {
        free(block);
        return result;
    }
    *block = (struct block){*pointer, size, pool, blocks};
    blocks = block;
    count(pool, size);
    return SUCCESS;
}

static CUresult try_to_allocate(CUmemoryPool pool, size_t size, CUdeviceptr *pointer)
{
    CUresult result = INVALID_VALUE;

    pthread_mutex_lock(&lock);
    if (is_pool(pool))
        result = size ? allocate_from(pool, size, pointer) : SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

/* What is freed in the stream before gives room. */
static CUresult allocate_for(CUmemoryPool pool, size_t size, CUstream stream,
                             CUdeviceptr *pointer)
{
    CUresult result;

    if (!pointer)
        return INVALID_VALUE;
    *pointer = 0;
    result = try_to_allocate(pool, size, pointer);
    if (result != OUT_OF_MEMORY)
        return result;
    result = wait_for_stream(stream);
    return result == SUCCESS ? try_to_allocate(pool, size, pointer) : result;
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t size,
                                        CUmemoryPool pool, CUstream stream)
{
    ENTER;
    CUdevice device;
    const CUresult result = device_of_stream(stream, &device);

    return result == SUCCESS ? allocate_for(pool, size, stream, pointer) : result;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream)
{
    ENTER;
    CUdevice device;
    const CUresult result = device_of_stream(stream, &device);

    if (result != SUCCESS)
        return result;
    return allocate_for(current_pool(device), size, stream, pointer);
}

static bool is_block(CUdeviceptr pointer)
{
    bool is;

    pthread_mutex_lock(&lock);
    is = *find_block(pointer) != NULL;
    pthread_mutex_unlock(&lock);
    return is;
}

static CUresult do_free(const struct work *work)
{
    return release(work->from) == SUCCESS ? SUCCESS : ILLEGAL_ADDRESS;
}

/* Frees what cuMemAlloc gave as well. */
EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    ENTER;
    const struct work work = {.run = do_free, .from = pointer};
    CUdeviceptr base = 0;
    CUdevice device;
    struct allocation allocation;

    if (pointer && !is_block(pointer) &&
        (!describe_allocation(pointer, &base, &device, &allocation) ||
         pointer != base))
        return INVALID_VALUE;
    return pointer ? add_work(stream, &work) : SUCCESS;
}

/* Which pool is whose */

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    ENTER;
    if (!pool)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *pool = default_pool(device);
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    ENTER;
    if (!pool)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    *pool = current_pool(device);
    return SUCCESS;
}

static CUresult make_current(CUdevice device, CUmemoryPool pool)
{
    bool fits;

    pthread_mutex_lock(&lock);
    fits = is_pool(pool) && pool->device == device;
    if (fits)
        current[device < 0 ? MAX_GPUS : device] = pool;
    pthread_mutex_unlock(&lock);
    return fits ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    ENTER;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    return make_current(device, pool);
}

/* Tell which device a place is, or -1 for the host; there is no managed pool. */
static CUresult read_location(const struct location_of_memory *location,
                              int allocation_type, CUdevice *device)
{
    if (!location)
        return INVALID_VALUE;
    if (allocation_type == 2)
        return NOT_SUPPORTED;
    *device = location->type == ON_DEVICE ? location->id : -1;
    if (allocation_type != 1 || location->type < ON_DEVICE ||
        location->type > ON_HOST_NODE ||
        (location->type == ON_DEVICE && valid_device(*device) != SUCCESS))
        return INVALID_VALUE;
    return SUCCESS;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool,
                                       const struct location_of_memory *location,
                                       int allocation_type)
{
    ENTER;
    CUdevice device;
    CUresult result = read_location(location, allocation_type, &device);

    if (result == SUCCESS && pool)
        *pool = default_pool(device);
    return pool ? result : INVALID_VALUE;
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool,
                                const struct location_of_memory *location,
                                int allocation_type)
{
    ENTER;
    CUdevice device;
    CUresult result = read_location(location, allocation_type, &device);

    if (result == SUCCESS && pool)
        *pool = current_pool(device);
    return pool ? result : INVALID_VALUE;
}

EXPORT CUresult cuMemSetMemPool(const struct location_of_memory *location,
                                int allocation_type, CUmemoryPool pool)
{
    ENTER;
    CUdevice device;
    CUresult result = read_location(location, allocation_type, &device);

    if (result != SUCCESS)
        return result;
    return make_current(device, pool);
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool,
                                const struct pool_properties *properties)
{
    ENTER;
    CUdevice device;
    CUresult result;

    if (!pool || !properties)
        return INVALID_VALUE;
    result = read_location(&properties->location, properties->allocation_type,
                           &device);
    if (result != SUCCESS)
        return result;
    if (properties->handle_types) /* to share it with other processes */
        return NOT_SUPPORTED;
    *pool = malloc(sizeof **pool);
    if (!*pool)
        return OUT_OF_MEMORY;
    set_up(*pool, device);
    (*pool)->max_size = properties->max_size;
    pthread_mutex_lock(&lock);
    (*pool)->next = pools;
    pools = *pool;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER;
    CUresult result = INVALID_VALUE;

    pthread_mutex_lock(&lock);
    if (is_pool(pool) && !pool->is_default) {
        for (unsigned i = 0; i <= MAX_GPUS; i++)
            if (current[i] == pool)
                current[i] = NULL;
        pool->destroyed = true;
        drop_if_unused(pool);
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER;
    bool is;

    (void)keep; /* nothing is in reserve */
    pthread_mutex_lock(&lock);
    is = is_pool(pool);
    pthread_mutex_unlock(&lock);
    return is ? SUCCESS : INVALID_VALUE;
}

/* Attributes: the first ones are of type int, the others uint64_t. */

static uint64_t *counter(CUmemoryPool pool, int attribute)
{
    switch (attribute) {
    case RELEASE_THRESHOLD:
        return &pool->threshold;
    case RESERVED_CURRENT:
        return &pool->reserved;
    case RESERVED_HIGH:
        return &pool->reserved_high;
    case USED_CURRENT:
        return &pool->used;
    case USED_HIGH:
        return &pool->used_high;
    default:
        return NULL;
    }
}

static CUresult get_attribute(CUmemoryPool pool, int attribute, void *value)
{
    if (attribute >= REUSE_FIRST && attribute <= REUSE_LAST)
        *(int *)value = pool->reuse[attribute - REUSE_FIRST];
    else if (counter(pool, attribute))
        *(uint64_t *)value = *counter(pool, attribute);
    else
        return INVALID_VALUE;
    return SUCCESS;
}

/* A high mark can be set to 0 only, and starts again from what there is. */
static CUresult set_attribute(CUmemoryPool pool, int attribute, void *value)
{
    if (attribute >= REUSE_FIRST && attribute <= REUSE_LAST) {
        pool->reuse[attribute - REUSE_FIRST] = *(int *)value;
    } else if (attribute == RELEASE_THRESHOLD) {
        pool->threshold = *(uint64_t *)value;
    } else if ((attribute == RESERVED_HIGH || attribute == USED_HIGH) &&
               *(uint64_t *)value == 0) {
        *counter(pool, attribute) = *counter(pool, attribute - 1);
    } else {
        return INVALID_VALUE;
    }
    return SUCCESS;
}

static CUresult with_attribute(CUresult (*what)(CUmemoryPool, int, void *),
                               CUmemoryPool pool, int attribute, void *value)
{
    CUresult result = INVALID_VALUE;

    pthread_mutex_lock(&lock);
    if (is_pool(pool) && value)
        result = what(pool, attribute, value);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER;
    return with_attribute(get_attribute, pool, attribute, value);
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER;
    return with_attribute(set_attribute, pool, attribute, value);
}

/* Access: kept, and told again. Every copy finds every address in any case. */

static CUresult set_access(CUmemoryPool pool, const struct access *access)
{
    const CUdevice device = access->location.id;

    if (access->location.type != ON_DEVICE)
        return INVALID_VALUE;
    if (valid_device(device) != SUCCESS)
        return INVALID_DEVICE;
    if (access->flags == READ_ONLY)
        return NOT_SUPPORTED;
    if (access->flags == NO_ACCESS && device == pool->device)
        return INVALID_DEVICE; /* a pool's own device keeps its access */
    if (access->flags == READ_WRITE)
        pool->accessible |= UINT32_C(1) << device;
    else
        pool->accessible &= ~(UINT32_C(1) << device);
    return SUCCESS;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const struct access *accesses,
                                   size_t number)
{
    ENTER;
    CUresult result = SUCCESS;

    if (!accesses && number)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!is_pool(pool))
        result = INVALID_VALUE;
    for (size_t i = 0; i < number && result == SUCCESS; i++)
        result = set_access(pool, &accesses[i]);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool pool,
                                   const struct location_of_memory *location)
{
    ENTER;
    CUresult result = SUCCESS;
    bool can = false;

    if (!flags || !location)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!is_pool(pool))
        result = INVALID_VALUE;
    else if (location->type != ON_DEVICE)
        can = pool->device < 0;
    else if (valid_device(location->id) != SUCCESS)
        result = INVALID_DEVICE;
    else
        can = pool->accessible >> location->id & 1;
    pthread_mutex_unlock(&lock);
    *flags = can ? READ_WRITE : NO_ACCESS;
    return result;
}
