/* What the restore thread does to its process: lock, checkpoint, restore, unlock.
 *
 * Nothing here takes a lock or allocates memory by malloc: another thread may have
 * been stopped while it held one.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool lost; /* a restore went wrong: nothing helps any more */

/* Where the driver keeps the content while the process is CHECKPOINTED: that of
 * the arena, and then a byte for each chunk, which tells whether any was written. */
static struct {
    char *memory; /* NULL: with custom storage, or there is none */
    uint64_t size;
} images[MAX_GPUS];

static char *written(const struct arena *arena, char *image)
{
    return image + arena->extent;
}

static bool in_custom_storage; /* where the content is, while CHECKPOINTED */
static uint32_t operation_number; /* of the last operation */
static unsigned gpu_before[MAX_GPUS]; /* `self.gpu_of_device` before a restore */
static const unsigned in_place[MAX_GPUS] = {0, 1, 2,  3,  4,  5,  6,  7,
                                            8, 9, 10, 11, 12, 13, 14, 15};

static CUresult lock_process(uint32_t timeout_ms)
{
    uint64_t deadline =
        timeout_ms ? now_ns() + timeout_ms * UINT64_C(1000000) : UINT64_MAX;

    if (self.state != RUNNING)
        return ILLEGAL_STATE;
    set_state(LOCKED);
    ring_bell(); /* work that lingers in the streams is to be done */
    for (;;) {
        int rung = bell();

        if (self.calls == 0 && self.pending == 0)
            return SUCCESS;
        if (deadline <= now_ns() || self.ending) {
            set_state(RUNNING);
            return NOT_READY;
        }
        wait_for_ring(rung, deadline);
    }
}

/* What other processes share stays theirs, and this one gets a new file. */
static bool empty_file(int file)
{
    int fresh;

    if (!self.exported)
        return ftruncate(file, 0) == 0;
    fresh = memfd_create("simulated GPU memory", MFD_CLOEXEC);
    if (fresh < 0)
        return ftruncate(file, 0) == 0;
    if (dup3(fresh, file, O_CLOEXEC) < 0)
        lost = true;
    close(fresh);
    return true;
}

static void release_device_memory(void)
{
    for (CUdevice device = 0; own_arena(device); device++) {
        if (!empty_file(own_arena(device)->file))
            lost = true;
        self.slot->used_bytes[self.gpu_of_device[device]] = 0;
    }
    self.exported = 0;
    self.slot->contexts = 0;
    self.slot->checkpoints++;
}

static bool copy_out(const struct arena *arena, char *image)
{
    off_t at = 0, end;

    /* Only what has been written: the rest of the file is a hole. */
    while (at < (off_t)arena->extent &&
           (at = lseek(arena->file, at, SEEK_DATA)) >= 0) {
        end = lseek(arena->file, at, SEEK_HOLE);
        if (end > (off_t)arena->extent)
            end = (off_t)arena->extent;
        while (at < end) {
            ssize_t got = pread(arena->file, image + at, (size_t)(end - at), at);

            if (got <= 0)
                return false;
            memset(written(arena, image) + at / CHUNK, 1,
                   (size_t)((at + got - 1) / CHUNK - at / CHUNK + 1));
            at += got;
        }
    }
    return at >= 0 || errno == ENXIO;
}

static bool copy_back(const struct arena *arena, char *image)
{
    for (uint64_t at = 0; at < arena->extent; at += CHUNK)
        for (size_t done = 0; written(arena, image)[at / CHUNK] && done < CHUNK;) {
            ssize_t put = pwrite(arena->file, image + at + done, CHUNK - done,
                                 (off_t)(at + done));

            if (put <= 0)
                return false;
            done += (size_t)put;
        }
    return true;
}

static bool make_image(CUdevice device)
{
    const struct arena *arena = own_arena(device);
    void *memory;

    images[device].memory = NULL;
    images[device].size = arena->extent + arena->extent / CHUNK;
    if (!arena->extent)
        return true;
    memory = mmap(NULL, images[device].size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    images[device].memory = memory;
    return copy_out(arena, memory);
}

static void drop_image(CUdevice device)
{
    if (images[device].memory)
        munmap(images[device].memory, images[device].size);
    images[device].memory = NULL;
}

static CUresult checkpoint_to_host(void)
{
    bool made = true;

    for (CUdevice device = 0; made && own_arena(device); device++)
        made = make_image(device);
    if (made)
        release_device_memory();
    else /* no room: the process stays as it was */
        for (CUdevice device = 0; own_arena(device); device++)
            drop_image(device);
    return made ? SUCCESS : OUT_OF_MEMORY;
}

/* In an order that is neither that of the devices nor that of last time. */
static void offer_regions(struct answer *answer)
{
    CUdevice with_memory[MAX_GPUS];
    uint32_t count = 0;

    for (CUdevice device = 0; own_arena(device); device++)
        if (own_arena(device)->extent)
            with_memory[count++] = device;
    for (uint32_t i = 0; i < count; i++) {
        const CUdevice device = with_memory[(i + answer->number) % count];

        answer->regions[i].gpu = self.gpu_of_device[device];
        answer->regions[i].file = own_arena(device)->file;
        answer->regions[i].size = own_arena(device)->extent;
    }
    answer->region_count = count;
}

/* The GPUs, a bit each, that this process uses, moved by a table of new ones. */
static uint32_t used_gpus(const unsigned new_gpu[])
{
    uint32_t gpus = 0;

    for (CUdevice device = 0; own_arena(device); device++)
        if (self.contexts[device])
            gpus |= UINT32_C(1) << new_gpu[self.gpu_of_device[device]];
    return gpus;
}

static bool any_has(uint32_t gpus, enum gpu_flags flag, bool set)
{
    for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++)
        if (gpus >> gpu & 1 && !(the_machine()->gpus[gpu].flags & flag) != set)
            return true;
    return false;
}

static CUresult checkpoint_process(const struct request *request,
                                   struct answer *answer)
{
    const uint32_t gpus = used_gpus(in_place);
    CUresult result = SUCCESS;

    if (self.state != LOCKED)
        return ILLEGAL_STATE;
    if (self.managed)
        return NOT_SUPPORTED;
    if (any_has(gpus, MIG_MODE, true))
        return OUT_OF_MEMORY;
    if (request->custom_storage && gpus & ~request->retained)
        return INVALID_CONTEXT;
    answer->number = ++operation_number;
    if (request->custom_storage)
        offer_regions(answer);
    else
        result = checkpoint_to_host();
    if (result != SUCCESS)
        return result;
    in_custom_storage = request->custom_storage;
    set_state(request->custom_storage ? CHECKPOINTING : CHECKPOINTED);
    return SUCCESS;
}

/* Every GPU of the machine must be named, once on each side, and be replaced by
 * one of its kind. */
static CUresult read_pairs(const struct request *request, unsigned new_gpu[])
{
    const struct machine *machine = the_machine();
    uint32_t old_seen = 0, new_seen = 0;

    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++)
        new_gpu[gpu] = gpu;
    if (request->pair_count == 0)
        return SUCCESS;
    for (uint32_t i = 0; i < request->pair_count; i++) {
        int old = find_gpu(&request->pairs[i].old_uuid);
        int new = find_gpu(&request->pairs[i].new_uuid);

        if (old < 0 || new < 0 || old_seen >> old & 1 || new_seen >> new & 1 ||
            strcmp(machine->gpus[old].name, machine->gpus[new].name) != 0)
            return INVALID_VALUE;
        old_seen |= UINT32_C(1) << old;
        new_seen |= UINT32_C(1) << new;
        new_gpu[old] = (unsigned)new;
    }
    return request->pair_count == machine->gpu_count ? SUCCESS : INVALID_VALUE;
}

static CUresult charge_all(const unsigned new_gpu[])
{
    CUdevice device;

    for (device = 0; own_arena(device); device++) {
        unsigned gpu = new_gpu[self.gpu_of_device[device]];

        if (!charge(self.slot, gpu, own_arena(device)->allocated))
            break;
    }
    if (!own_arena(device))
        return SUCCESS;
    while (device-- > 0)
        self.slot->used_bytes[new_gpu[self.gpu_of_device[device]]] = 0;
    return OUT_OF_MEMORY;
}

static bool bring_back(CUdevice device)
{
    const struct arena *arena = own_arena(device);
    bool back = ftruncate(arena->file, (off_t)arena->extent) == 0;

    if (images[device].memory)
        back = back && copy_back(arena, images[device].memory);
    drop_image(device);
    return back;
}

static CUresult may_be_restored(const struct request *request,
                                const unsigned new_gpu[])
{
    const uint32_t gpus = used_gpus(new_gpu);

    if (request->custom_storage != in_custom_storage)
        return INVALID_VALUE;
    if (!request->initialized && any_has(gpus, PERSISTENCE_MODE, false))
        return NOT_INITIALIZED;
    if (request->custom_storage && gpus & ~request->retained)
        return INVALID_CONTEXT;
    return SUCCESS;
}

/* Bring the content back, to where it belongs now. */
static CUresult refill(const unsigned new_gpu[])
{
    if (self.imported) {
        lost = true;
        return INVALID_VALUE;
    }
    if (charge_all(new_gpu) != SUCCESS) {
        lost = true;
        return OUT_OF_MEMORY;
    }
    for (CUdevice device = 0; own_arena(device); device++) {
        gpu_before[device] = self.gpu_of_device[device];
        self.gpu_of_device[device] = new_gpu[gpu_before[device]];
        lost = !bring_back(device) || lost;
    }
    self.slot->contexts = used_gpus(in_place);
    return lost ? OUT_OF_MEMORY : SUCCESS;
}

static CUresult restore_process(const struct request *request,
                                struct answer *answer)
{
    unsigned new_gpu[MAX_GPUS];
    CUresult result;

    if (self.state != CHECKPOINTED)
        return ILLEGAL_STATE;
    if (lost)
        return OPERATING_SYSTEM;
    result = read_pairs(request, new_gpu);
    if (result == SUCCESS)
        result = may_be_restored(request, new_gpu);
    if (result == SUCCESS)
        result = refill(new_gpu);
    if (result != SUCCESS)
        return result;
    answer->number = ++operation_number;
    if (request->custom_storage)
        offer_regions(answer);
    set_state(request->custom_storage ? RESTORING : LOCKED);
    return SUCCESS;
}

static CUresult complete(uint32_t number)
{
    if (number != operation_number)
        return ILLEGAL_STATE;
    if (self.state == RESTORING) {
        set_state(LOCKED);
        return SUCCESS;
    }
    if (self.state != CHECKPOINTING)
        return ILLEGAL_STATE;
    release_device_memory();
    set_state(CHECKPOINTED);
    return SUCCESS;
}

/* Lead an operation back to where it began. */
static CUresult cancel(uint32_t number)
{
    if (number != operation_number)
        return ILLEGAL_STATE;
    if (self.state == CHECKPOINTING) {
        set_state(LOCKED);
        return SUCCESS;
    }
    if (self.state != RESTORING)
        return ILLEGAL_STATE;
    release_device_memory();
    memcpy(self.gpu_of_device, gpu_before, sizeof gpu_before);
    set_state(CHECKPOINTED);
    return SUCCESS;
}

static CUresult unlock_process(void)
{
    if (self.state != LOCKED)
        return ILLEGAL_STATE;
    set_state(RUNNING);
    return SUCCESS;
}

void carry_out(const struct request *request, struct answer *answer)
{
    switch (request->operation) {
    case GET_STATE:
        answer->value = self.state;
        break;
    case GET_RESTORE_THREAD_ID: /* that of this very thread */
        answer->value = (int)syscall(SYS_gettid);
        break;
    case LOCK:
        answer->result = lock_process(request->timeout_ms);
        break;
    case CHECKPOINT:
        answer->result = checkpoint_process(request, answer);
        break;
    case RESTORE:
        answer->result = restore_process(request, answer);
        break;
    case UNLOCK:
        answer->result = unlock_process();
        break;
    case COMPLETE:
        answer->result = complete(request->number);
        break;
    case CANCEL:
        answer->result = cancel(request->number);
        break;
    }
}

/* As a restore does that runs out of memory. */
void lose_process(void)
{
    if (self.state == CHECKPOINTED)
        lost = true;
}

/* When this process leaves its machine. */
void forget_transitions(void)
{
    for (CUdevice device = 0; own_arena(device); device++)
        drop_image(device);
    lost = false;
}
