/* Device memory: a file in memory for each GPU that this process uses.
 *
 * A device address stands for an offset in the file. Nothing is mapped there, so
 * that a program which takes it for an address in host memory crashes, as it
 * would with a real GPU; and whoever may look at this process can reach the file
 * through /proc, which is how custom storage is handed out.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct arena arenas[MAX_GPUS];
static unsigned arena_count;
static struct arena *foreign; /* memory of other processes */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct arena *own_arena(CUdevice device)
{
    return device >= 0 && (unsigned)device < arena_count ? &arenas[device] : NULL;
}

static void *reserve(uint64_t size)
{
    void *range = mmap(NULL, size, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return range == MAP_FAILED ? NULL : range;
}

static void close_arena(struct arena *arena)
{
    if (arena->base)
        munmap(arena->base, arena->size);
    if (arena->file >= 0)
        close(arena->file);
}

CUresult make_arenas(void)
{
    const struct machine *machine = the_machine();

    for (; arena_count < self.device_count; arena_count++) {
        struct arena *arena = &arenas[arena_count];

        memset(arena, 0, sizeof *arena);
        arena->size = machine->gpus[self.gpu_of_device[arena_count]].memory_bytes /
                      CHUNK * CHUNK;
        arena->base = reserve(arena->size);
        arena->of_chunk = calloc(arena->size / CHUNK, sizeof *arena->of_chunk);
        arena->file = memfd_create("simulated GPU memory", MFD_CLOEXEC);
        if (!arena->base || !arena->of_chunk || arena->file < 0) {
            free(arena->of_chunk);
            close_arena(arena);
            return OUT_OF_MEMORY;
        }
    }
    return SUCCESS;
}

static void free_allocations(struct arena *arena)
{
    for (uint64_t chunk = 0; chunk < arena->extent / CHUNK; chunk++)
        if (arena->of_chunk[chunk] && arena->of_chunk[chunk]->first == chunk)
            free(arena->of_chunk[chunk]);
}

void drop_arenas(void)
{
    for (; arena_count; arena_count--) {
        struct arena *arena = &arenas[arena_count - 1];

        free_allocations(arena);
        free(arena->of_chunk);
        close_arena(arena);
    }
}

/* Memory of other processes */

struct arena *map_foreign(const char *path, uint64_t size)
{
    struct arena *arena = calloc(1, sizeof *arena);

    if (!arena)
        return NULL;
    arena->size = arena->extent = size;
    arena->base = reserve(size);
    arena->file = open(path, O_RDWR | O_CLOEXEC);
    if (!arena->base || arena->file < 0) {
        close_arena(arena);
        free(arena);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    arena->next = foreign;
    foreign = arena;
    pthread_mutex_unlock(&lock);
    return arena;
}

void unmap_foreign(struct arena *arena)
{
    struct arena **link = &foreign;

    pthread_mutex_lock(&lock);
    while (*link != arena)
        link = &(*link)->next;
    *link = arena->next;
    pthread_mutex_unlock(&lock);
    /* Nobody finds it any more, but copies may still be under way. */
    for (int rung = bell(); arena->users; rung = bell())
        wait_for_ring(rung, UINT64_MAX);
    close_arena(arena);
    free(arena);
}

/* Allocation, in chunks; the lock is held. */

static bool find_room(const struct arena *arena, uint64_t wanted, uint64_t *first)
{
    const uint64_t chunks = arena->size / CHUNK;
    uint64_t end;

    *first = 0;
    for (end = 0; end < chunks && end - *first < wanted; end++)
        if (arena->of_chunk[end])
            *first = end + 1;
    return end - *first == wanted;
}

static CUresult grow(struct arena *arena, uint64_t extent)
{
    if (extent <= arena->extent)
        return SUCCESS;
    if (ftruncate(arena->file, (off_t)extent) != 0)
        return OUT_OF_MEMORY;
    arena->extent = extent;
    return SUCCESS;
}

static CUresult place(struct arena *arena, struct allocation *allocation)
{
    CUresult result = OUT_OF_MEMORY;

    if (find_room(arena, allocation->chunks, &allocation->first))
        result = grow(arena, (allocation->first + allocation->chunks) * CHUNK);
    if (result != SUCCESS)
        return result;
    for (uint64_t chunk = 0; chunk < allocation->chunks; chunk++)
        arena->of_chunk[allocation->first + chunk] = allocation;
    arena->allocated += allocation->chunks * CHUNK;
    if (allocation->managed)
        self.managed++;
    return SUCCESS;
}

/* Managed memory is there for the host as well, at the same address. */
static bool map_for_host(const struct arena *arena,
                         const struct allocation *allocation, bool map)
{
    const int is_file = map ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    const off_t start = (off_t)(allocation->first * CHUNK);

    return mmap(arena->base + start, allocation->chunks * CHUNK,
                map ? PROT_READ | PROT_WRITE : PROT_NONE, is_file | MAP_FIXED,
                map ? arena->file : -1, map ? start : 0) != MAP_FAILED;
}

static void take_away(struct arena *arena, struct allocation *allocation)
{
    const off_t start = (off_t)(allocation->first * CHUNK);
    const uint64_t bytes = allocation->chunks * CHUNK;

    for (uint64_t chunk = 0; chunk < allocation->chunks; chunk++)
        arena->of_chunk[allocation->first + chunk] = NULL;
    arena->allocated -= bytes;
    if (allocation->managed) {
        map_for_host(arena, allocation, false);
        self.managed--;
    }
    free(allocation);
    /* Of these only a hole is left even if they fail, which does no harm. */
    fallocate(arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start,
              (off_t)bytes);
    while (arena->extent && !arena->of_chunk[arena->extent / CHUNK - 1])
        arena->extent -= CHUNK;
    if (ftruncate(arena->file, (off_t)arena->extent) != 0)
        abort(); /* to shrink a file in memory cannot fail */
    atomic_fetch_sub(&self.slot->used_bytes[self.gpu_of_device[arena - arenas]],
                     bytes);
}

CUresult allocate(CUdevice device, CUcontext context, size_t size, bool managed,
                  CUdeviceptr *pointer)
{
    struct arena *arena = own_arena(device);
    const unsigned gpu = self.gpu_of_device[device];
    struct allocation *made;
    CUresult result = OUT_OF_MEMORY;

    if (size > arena->size)
        return OUT_OF_MEMORY;
    made = calloc(1, sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    made->chunks = (size + CHUNK - 1) / CHUNK;
    made->size = size;
    made->context = context;
    made->managed = managed;
    pthread_mutex_lock(&lock);
    if (charge(self.slot, gpu, made->chunks * CHUNK)) {
        result = place(arena, made);
        if (result != SUCCESS)
            atomic_fetch_sub(&self.slot->used_bytes[gpu], made->chunks * CHUNK);
    }
    if (result != SUCCESS) {
        free(made);
    } else if (managed && !map_for_host(arena, made, true)) {
        take_away(arena, made);
        result = OUT_OF_MEMORY;
    } else {
        *pointer = (uintptr_t)arena->base + made->first * CHUNK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The lock is held. */
static struct arena *arena_at(CUdeviceptr pointer)
{
    for (unsigned device = 0; device < arena_count; device++)
        if (pointer - (uintptr_t)arenas[device].base < arenas[device].size)
            return &arenas[device];
    for (struct arena *arena = foreign; arena; arena = arena->next)
        if (pointer - (uintptr_t)arena->base < arena->size)
            return arena;
    return NULL;
}

/* Find the allocation that holds an address; the lock is held. */
static struct allocation *allocation_at(const struct arena *arena,
                                        CUdeviceptr pointer)
{
    if (!arena || !arena->of_chunk)
        return NULL;
    return arena->of_chunk[(pointer - (uintptr_t)arena->base) / CHUNK];
}

/* Free what has been allocated, by a pool too. */
CUresult release(CUdeviceptr pointer)
{
    struct arena *arena;
    struct allocation *found;

    if (leave_pool(pointer))
        return SUCCESS;
    pthread_mutex_lock(&lock);
    arena = arena_at(pointer);
    found = allocation_at(arena, pointer);
    if (found && pointer != (uintptr_t)arena->base + found->first * CHUNK)
        found = NULL;
    if (found)
        take_away(arena, found);
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : INVALID_VALUE;
}

void release_all_of(CUcontext context)
{
    struct arena *arena = own_arena(device_of(context));

    pthread_mutex_lock(&lock);
    for (uint64_t chunk = 0; chunk < arena->extent / CHUNK; chunk++)
        if (arena->of_chunk[chunk] && arena->of_chunk[chunk]->context == context)
            take_away(arena, arena->of_chunk[chunk]);
    pthread_mutex_unlock(&lock);
}

bool describe_allocation(CUdeviceptr pointer, CUdeviceptr *base, CUdevice *device,
                         struct allocation *allocation)
{
    struct arena *arena;
    struct allocation *found;

    pthread_mutex_lock(&lock);
    arena = arena_at(pointer);
    found = allocation_at(arena, pointer);
    if (found) {
        *base = (uintptr_t)arena->base + found->first * CHUNK;
        *device = (CUdevice)(arena - arenas);
        *allocation = *found;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

/* As describe_allocation, of memory of another process. */
bool describe_foreign(CUdeviceptr pointer, CUdeviceptr *base, size_t *size,
                      unsigned *gpu)
{
    const struct arena *arena;
    bool found;

    pthread_mutex_lock(&lock);
    arena = arena_at(pointer);
    found = arena && !arena->of_chunk;
    if (found) {
        *base = (uintptr_t)arena->base;
        *size = arena->size;
        *gpu = arena->gpu;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Places of bytes */

/* Whether the bytes belong to one allocation, or to what another process shares. */
static bool are_there(const struct arena *arena, CUdeviceptr pointer, size_t size)
{
    const uint64_t offset = pointer - (uintptr_t)arena->base;
    const struct allocation *allocation = allocation_at(arena, pointer);
    uint64_t end;

    if (arena->of_chunk && !allocation)
        return false;
    end = allocation ? allocation->first * CHUNK + allocation->size : arena->extent;
    return offset <= end && size <= end - offset;
}

/* Tell where an address lies, and keep it there; false if less than `size` bytes
 * are. */
bool take_place(CUdeviceptr pointer, size_t size, struct place *place)
{
    bool there = true;

    place->host = (char *)(uintptr_t)pointer;
    pthread_mutex_lock(&lock);
    place->arena = arena_at(pointer);
    if (place->arena) {
        there = are_there(place->arena, pointer, size);
        place->offset = place->arena->file_offset +
                        (off_t)(pointer - (uintptr_t)place->arena->base);
        if (there)
            place->arena->users++;
        else
            place->arena = NULL;
    }
    pthread_mutex_unlock(&lock);
    return there;
}

void leave_place(const struct place *place)
{
    const bool is_foreign = place->arena && !place->arena->of_chunk;

    if (place->arena && atomic_fetch_sub(&place->arena->users, 1) == 1 && is_foreign)
        ring_bell(); /* to look at the arena now could be too late */
}

/* The calls */

static CUresult allocate_here(size_t size, bool managed, CUdeviceptr *pointer)
{
    CUcontext context;
    CUresult result = need_context(&context);

    if (result != SUCCESS)
        return result;
    if (!pointer || size == 0)
        return INVALID_VALUE;
    result = refuse_while_capturing(context, false);
    if (result != SUCCESS)
        return result;
    return allocate(device_of(context), context, size, managed, pointer);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
    ENTER;
    return allocate_here(size, false, pointer);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size,
                                  unsigned flags)
{
    ENTER;
    return flags ? allocate_here(size, true, pointer) : INVALID_VALUE;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    ENTER;
    CUcontext context;
    CUresult result;

    if (pointer == 0)
        return SUCCESS;
    result = need_context(&context);
    if (result == SUCCESS)
        result = refuse_while_capturing(context, false);
    if (result != SUCCESS)
        return result;
    wait_for_everything(); /* it may be in use until then, also by other contexts */
    result = check_context(context);
    return result == SUCCESS ? release(pointer) : result;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);
    unsigned gpu;
    uint64_t used;

    if (result != SUCCESS)
        return result;
    if (!free_bytes || !total)
        return INVALID_VALUE;
    gpu = self.gpu_of_device[device_of(context)];
    used = used_on_gpu(gpu);
    *total = the_machine()->gpus[gpu].memory_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    return SUCCESS;
}

PLAIN(cuMemAlloc, cuMemAlloc_v2);
PLAIN(cuMemFree, cuMemFree_v2);
PLAIN(cuMemGetInfo, cuMemGetInfo_v2);
