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
static struct arena *foreign; /* custom storage of other processes */
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

CUresult make_arenas(void)
{
    const struct machine *machine = the_machine();

    for (; arena_count < machine->gpu_count; arena_count++) {
        struct arena *arena = &arenas[arena_count];

        arena->size = machine->gpus[arena_count].memory_bytes / CHUNK * CHUNK;
        arena->base = arena->size ? reserve(arena->size) : NULL;
        arena->used = calloc(arena->size / CHUNK + 1, 1);
        arena->file = memfd_create("simulated GPU memory", MFD_CLOEXEC);
        if ((arena->size && !arena->base) || !arena->used || arena->file < 0)
            return OUT_OF_MEMORY;
    }
    return SUCCESS;
}

void drop_arenas(void)
{
    for (; arena_count; arena_count--) {
        struct arena *arena = &arenas[arena_count - 1];

        if (arena->base)
            munmap(arena->base, arena->size);
        free(arena->used);
        close(arena->file);
        memset(arena, 0, sizeof *arena);
    }
}

struct arena *map_foreign(const char *path, uint64_t size)
{
    struct arena *arena = calloc(1, sizeof *arena);

    if (!arena)
        return NULL;
    arena->size = arena->extent = size;
    arena->base = reserve(size);
    arena->file = open(path, O_RDWR | O_CLOEXEC);
    if (!arena->base || arena->file < 0) {
        if (arena->base)
            munmap(arena->base, size);
        if (arena->file >= 0)
            close(arena->file);
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
    munmap(arena->base, arena->size);
    close(arena->file);
    free(arena);
}

/* Allocation, in chunks. What each is: */
enum { FREE, FIRST, MORE, FIRST_MANAGED };

static CUresult allocate(struct arena *arena, size_t size, unsigned char first_is,
                         CUdeviceptr *pointer)
{
    uint64_t wanted = (size + CHUNK - 1) / CHUNK, chunks = arena->size / CHUNK;
    uint64_t first = 0, end;

    if (wanted > chunks)
        return OUT_OF_MEMORY;
    for (end = 0; end < chunks && end - first < wanted; end++)
        if (arena->used[end])
            first = end + 1;
    if (end - first < wanted)
        return OUT_OF_MEMORY;
    if (arena->extent < end * CHUNK &&
        ftruncate(arena->file, (off_t)(end * CHUNK)) != 0)
        return OUT_OF_MEMORY;
    if (arena->extent < end * CHUNK)
        arena->extent = end * CHUNK;
    memset(arena->used + first, MORE, wanted);
    arena->used[first] = first_is;
    arena->allocated += wanted * CHUNK;
    if (first_is == FIRST_MANAGED)
        self.managed++;
    *pointer = (uintptr_t)arena->base + first * CHUNK;
    return SUCCESS;
}

static CUresult allocate_here(size_t size, unsigned char first_is,
                              CUdeviceptr *pointer)
{
    CUcontext context = current_context();
    uint64_t bytes;
    CUdevice device;
    unsigned gpu;
    CUresult result;

    if (!context)
        return INVALID_CONTEXT;
    if (!pointer || size == 0)
        return INVALID_VALUE;
    device = device_of(context);
    gpu = self.gpu_of_device[device];
    if (size > own_arena(device)->size)
        return OUT_OF_MEMORY;
    bytes = (size + CHUNK - 1) / CHUNK * CHUNK;
    pthread_mutex_lock(&lock);
    result = charge(self.slot, gpu, bytes) ? SUCCESS : OUT_OF_MEMORY;
    if (result == SUCCESS) {
        result = allocate(own_arena(device), size, first_is, pointer);
        if (result != SUCCESS)
            atomic_fetch_sub(&self.slot->used_bytes[gpu], bytes);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

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

/* Return the chunks of the allocation that holds an address; 0 if none does. */
static uint64_t find_allocation(const struct arena *arena, CUdeviceptr pointer,
                                uint64_t *first)
{
    uint64_t chunks = arena->size / CHUNK, end;

    *first = (pointer - (uintptr_t)arena->base) / CHUNK;
    while (*first && arena->used[*first] == MORE)
        --*first;
    if (arena->used[*first] == FREE)
        return 0;
    for (end = *first + 1; end < chunks && arena->used[end] == MORE; end++)
        ;
    return end - *first;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
    ENTER;
    return allocate_here(size, FIRST, pointer);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size,
                                  unsigned flags)
{
    ENTER;
    return flags ? allocate_here(size, FIRST_MANAGED, pointer) : INVALID_VALUE;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    ENTER;
    struct arena *arena;
    uint64_t first, chunks;

    if (pointer == 0)
        return SUCCESS;
    pthread_mutex_lock(&lock);
    arena = arena_at(pointer);
    chunks = arena && arena->used ? find_allocation(arena, pointer, &first) : 0;
    if (chunks && pointer == (uintptr_t)arena->base + first * CHUNK) {
        unsigned gpu = self.gpu_of_device[arena - arenas];

        if (arena->used[first] == FIRST_MANAGED)
            self.managed--;
        memset(arena->used + first, FREE, chunks);
        arena->allocated -= chunks * CHUNK;
        fallocate(arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)(first * CHUNK), (off_t)(chunks * CHUNK));
        while (arena->extent && arena->used[arena->extent / CHUNK - 1] == FREE)
            arena->extent -= CHUNK;
        atomic_fetch_sub(&self.slot->used_bytes[gpu], chunks * CHUNK);
        if (ftruncate(arena->file, (off_t)arena->extent) != 0)
            chunks = 0;
    } else {
        chunks = 0;
    }
    pthread_mutex_unlock(&lock);
    return chunks ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER;
    CUcontext context = current_context();
    struct machine *machine = the_machine();
    unsigned gpu;
    uint64_t used;

    if (!context)
        return INVALID_CONTEXT;
    if (!free_bytes || !total)
        return INVALID_VALUE;
    gpu = self.gpu_of_device[device_of(context)];
    used = used_on_gpu(gpu);
    *total = machine->gpus[gpu].memory_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    return SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size,
                                        CUdeviceptr pointer)
{
    ENTER;
    struct arena *arena;
    uint64_t first = 0, chunks = 0;

    pthread_mutex_lock(&lock);
    arena = arena_at(pointer);
    if (arena && arena->used)
        chunks = find_allocation(arena, pointer, &first);
    pthread_mutex_unlock(&lock);
    if (!chunks)
        return NOT_FOUND;
    if (base)
        *base = (uintptr_t)arena->base + first * CHUNK;
    if (size)
        *size = chunks * CHUNK;
    return SUCCESS;
}

/* Pinned memory is ordinary memory here. */

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags)
{
    ENTER;
    (void)flags;
    if (!current_context())
        return INVALID_CONTEXT;
    if (!pointer || size == 0)
        return INVALID_VALUE;
    return posix_memalign(pointer, 4096, size) ? OUT_OF_MEMORY : SUCCESS;
}

EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t size)
{
    return cuMemHostAlloc(pointer, size, 0);
}

EXPORT CUresult cuMemFreeHost(void *pointer)
{
    ENTER;
    if (!pointer)
        return INVALID_VALUE;
    free(pointer);
    return SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags)
{
    ENTER;
    (void)flags;
    return pointer && size ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemHostUnregister(void *pointer)
{
    ENTER;
    return pointer ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host,
                                             unsigned flags)
{
    ENTER;
    (void)device, (void)host, (void)flags;
    return NOT_SUPPORTED;
}

/* Copies */

struct place {
    const struct arena *arena; /* NULL: host memory */
    char *host;
    off_t offset;
};

/* Whether the bytes belong to one allocation, or lie in a mapped region. */
static bool is_allocated(const struct arena *arena, uint64_t offset, size_t size)
{
    if (size > arena->extent || offset > arena->extent - size)
        return false;
    if (!arena->used || size == 0)
        return true;
    if (arena->used[offset / CHUNK] == FREE)
        return false;
    for (uint64_t chunk = offset / CHUNK + 1; chunk * CHUNK < offset + size; chunk++)
        if (arena->used[chunk] != MORE)
            return false;
    return true;
}

/* Tell where an address lies; false if less than `size` bytes are there. */
static bool find_place(CUdeviceptr pointer, size_t size, struct place *place)
{
    bool there = true;

    place->host = (char *)(uintptr_t)pointer;
    pthread_mutex_lock(&lock);
    place->arena = arena_at(pointer);
    if (place->arena) {
        place->offset = (off_t)(pointer - (uintptr_t)place->arena->base);
        there = is_allocated(place->arena, (uint64_t)place->offset, size);
    }
    pthread_mutex_unlock(&lock);
    return there;
}

static bool write_all(struct place to, const char *from, size_t size)
{
    while (size) {
        ssize_t done = pwrite(to.arena->file, from, size, to.offset);

        if (done <= 0)
            return false;
        from += done;
        to.offset += done;
        size -= (size_t)done;
    }
    return true;
}

static bool read_all(struct place from, char *to, size_t size)
{
    while (size) {
        ssize_t done = pread(from.arena->file, to, size, from.offset);

        if (done <= 0)
            return false;
        to += done;
        from.offset += done;
        size -= (size_t)done;
    }
    return true;
}

static bool copy_on_device(struct place to, struct place from, size_t size)
{
    char buffer[65536];

    while (size) {
        size_t part = size < sizeof buffer ? size : sizeof buffer;

        if (!read_all(from, buffer, part) || !write_all(to, buffer, part))
            return false;
        from.offset += (off_t)part;
        to.offset += (off_t)part;
        size -= part;
    }
    return true;
}

static CUresult copy(CUdeviceptr to, bool to_device, CUdeviceptr from,
                     bool from_device, size_t size)
{
    struct place target, source;
    bool done = true;

    if (!current_context())
        return INVALID_CONTEXT;
    if (!find_place(to, size, &target) || !find_place(from, size, &source) ||
        (to_device && !target.arena) || (from_device && !source.arena))
        return INVALID_VALUE;
    if (target.arena && source.arena)
        done = copy_on_device(target, source, size);
    else if (target.arena)
        done = write_all(target, source.host, size);
    else if (source.arena)
        done = read_all(source, target.host, size);
    else
        memmove(target.host, source.host, size);
    return done ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    ENTER;
    return copy(to, true, (uintptr_t)from, false, size);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    ENTER;
    return copy((uintptr_t)to, false, from, true, size);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    ENTER;
    return copy(to, true, from, true, size);
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    ENTER;
    return copy(to, false, from, false, size);
}

/* The same in a stream. Nothing that the one kernel does can be told from copies
 * that are done at once. */

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from,
                                     size_t size, CUstream stream)
{
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, size);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size,
                                     CUstream stream)
{
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, size);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from,
                                     size_t size, CUstream stream)
{
    (void)stream;
    return cuMemcpyDtoD_v2(to, from, size);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
                              CUstream stream)
{
    (void)stream;
    return cuMemcpy(to, from, size);
}

static CUresult fill(CUdeviceptr to, const void *pattern, size_t width,
                     size_t count)
{
    char buffer[65536];
    struct place place;
    size_t size = width * count;

    if (!current_context())
        return INVALID_CONTEXT;
    if (count > SIZE_MAX / width)
        return INVALID_VALUE;
    if (!find_place(to, size, &place) || !place.arena || to % width)
        return INVALID_VALUE;
    for (size_t at = 0; at < sizeof buffer; at += width)
        memcpy(buffer + at, pattern, width);
    while (size) {
        size_t part = size < sizeof buffer ? size : sizeof buffer;

        if (!write_all(place, buffer, part))
            return OUT_OF_MEMORY;
        place.offset += (off_t)part;
        size -= part;
    }
    return SUCCESS;
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    ENTER;
    return fill(to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count)
{
    ENTER;
    return fill(to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    ENTER;
    return fill(to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                CUstream stream)
{
    (void)stream;
    return cuMemsetD8_v2(to, value, count);
}

EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value,
                                 size_t count, CUstream stream)
{
    (void)stream;
    return cuMemsetD16_v2(to, value, count);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                 CUstream stream)
{
    (void)stream;
    return cuMemsetD32_v2(to, value, count);
}

/* What an address is: of memory types, only device memory is known. */

enum {
    ATTRIBUTE_CONTEXT = 1,
    ATTRIBUTE_MEMORY_TYPE = 2,
    ATTRIBUTE_DEVICE_POINTER = 3,
    ATTRIBUTE_IS_MANAGED = 8,
    ATTRIBUTE_DEVICE_ORDINAL = 9,
};

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute,
                                      CUdeviceptr pointer)
{
    ENTER;
    struct arena *arena;
    CUdevice device;
    uint64_t first = 0, chunks = 0;

    pthread_mutex_lock(&lock);
    arena = arena_at(pointer);
    if (arena && arena->used)
        chunks = find_allocation(arena, pointer, &first);
    pthread_mutex_unlock(&lock);
    if (!chunks || !data)
        return INVALID_VALUE;
    device = (CUdevice)(arena - arenas);
    switch (attribute) {
    case ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = primary_context(device);
        return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = 2; /* CU_MEMORYTYPE_DEVICE */
        return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        return SUCCESS;
    case ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = arena->used[first] == FIRST_MANAGED;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = device;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

PLAIN(cuMemAlloc, cuMemAlloc_v2);
PLAIN(cuMemFree, cuMemFree_v2);
PLAIN(cuMemGetInfo, cuMemGetInfo_v2);
PLAIN(cuMemGetAddressRange, cuMemGetAddressRange_v2);
PLAIN(cuMemAllocHost, cuMemAllocHost_v2);
PLAIN(cuMemHostRegister, cuMemHostRegister_v2);
PLAIN(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2);
PLAIN(cuMemcpyHtoD, cuMemcpyHtoD_v2);
PLAIN(cuMemcpyDtoH, cuMemcpyDtoH_v2);
PLAIN(cuMemcpyDtoD, cuMemcpyDtoD_v2);
PLAIN(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2);
PLAIN(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2);
PLAIN(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2);
PLAIN(cuMemsetD8, cuMemsetD8_v2);
PLAIN(cuMemsetD16, cuMemsetD16_v2);
PLAIN(cuMemsetD32, cuMemsetD32_v2);
