/* Device memory of other processes: the file that it is, through /proc.
 *
 * As measured, a process that has some mapped can be checkpointed but never be
 * restored. When the owner has been checkpointed, the two have each their own: what
 * was shared stays with those who have it, and the owner gets a copy.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The 64 bytes that one process gets and gives to another. */
struct ipc_handle {
    char magic[8];
    uint64_t machine, owner, checkpoints, offset, size;
    uint32_t slot;
    int32_t file;
    uint32_t gpu;
    char reserved[4];
};

struct import {
    struct ipc_handle handle;
    struct arena *arena;
    int opened; /* how often */
    struct import *next;
};

static struct import *imports;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char magic[8] = "cuckptIP";

EXPORT CUresult cuIpcGetMemHandle(struct ipc_handle *handle, CUdeviceptr pointer)
{
    ENTER;
    CUdeviceptr base;
    CUdevice device;
    struct allocation allocation;

    if (!handle || !describe_allocation(pointer, &base, &device, &allocation) ||
        allocation.managed)
        return INVALID_VALUE;
    *handle = (struct ipc_handle){
        .machine = machine_number(),
        .owner = self.slot->owner,
        .checkpoints = self.slot->checkpoints,
        .offset = allocation.first * CHUNK,
        .size = allocation.size,
        .slot = (uint32_t)(self.slot - the_machine()->slots),
        .file = own_arena(device)->file,
        .gpu = self.gpu_of_device[device],
    };
    memcpy(handle->magic, magic, sizeof magic);
    self.exported++;
    return SUCCESS;
}

static CUresult may_be_opened(const struct ipc_handle *handle)
{
    const struct slot *slot;

    if (memcmp(handle->magic, magic, sizeof magic) != 0 ||
        handle->machine != machine_number() || handle->slot >= MAX_PROCESSES)
        return INVALID_VALUE;
    slot = &the_machine()->slots[handle->slot];
    if (slot == self.slot)
        return INVALID_CONTEXT; /* of all things, but measured */
    if (slot->owner != handle->owner || !is_alive(handle->owner))
        return INVALID_VALUE;
    if (slot->checkpoints != handle->checkpoints)
        return INVALID_HANDLE;
    /* A process that has been restored shares no more. */
    return handle->checkpoints ? NOT_PERMITTED : SUCCESS;
}

/* The lock is held. */
static CUresult import_memory(const struct ipc_handle *handle, struct import **made)
{
    struct import *import = calloc(1, sizeof *import);
    char path[64];

    if (!import)
        return OUT_OF_MEMORY;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", (unsigned)(handle->owner >> 32),
             handle->file);
    import->arena = map_foreign(path, handle->size);
    if (!import->arena) {
        free(import);
        return INVALID_VALUE;
    }
    import->arena->file_offset = (off_t)handle->offset;
    import->arena->gpu = handle->gpu;
    import->handle = *handle;
    import->next = imports;
    imports = *made = import;
    self.imported++;
    return SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, struct ipc_handle handle,
                                      unsigned flags)
{
    ENTER;
    CUcontext context;
    struct import *import;
    CUresult result = need_context(&context);

    if (result != SUCCESS)
        return result;
    if (!pointer || flags > 1)
        return INVALID_VALUE;
    result = may_be_opened(&handle);
    if (result != SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    import = imports;
    while (import && memcmp(&import->handle, &handle, sizeof handle) != 0)
        import = import->next;
    if (!import)
        result = import_memory(&handle, &import);
    if (result == SUCCESS) {
        import->opened++;
        *pointer = (uintptr_t)import->arena->base;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static void close_import(struct import *import)
{
    unmap_foreign(import->arena);
    free(import);
    self.imported--;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    ENTER;
    CUcontext context;
    CUresult result = need_context(&context);
    struct import **link, *closed = NULL;

    if (result != SUCCESS)
        return result;
    wait_for_everything();
    pthread_mutex_lock(&lock);
    link = &imports;
    while (*link && (uintptr_t)(*link)->arena->base != pointer)
        link = &(*link)->next;
    if (!*link)
        result = INVALID_VALUE;
    else if (--(*link)->opened == 0) {
        closed = *link;
        *link = closed->next;
    }
    pthread_mutex_unlock(&lock);
    if (closed)
        close_import(closed);
    return result;
}

/* When the machine is left. */
void close_imports(void)
{
    while (imports) {
        struct import *first = imports;

        imports = first->next;
        close_import(first);
    }
}

PLAIN(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2);
