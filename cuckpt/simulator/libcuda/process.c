/* This process as a target: a gate before every API call, and the restore thread.
 *
 * The thread listens on an abstract socket named after machine and pid, which is
 * gone when the process is. It serves one caller after the other, so a caller
 * waits while another's checkpoint is under way; and it carries on when its
 * caller dies.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

struct self self;

static int listener = -1;
static atomic_int connection = -1; /* to the caller that is being served */
static pthread_t restore_thread_handle;
static atomic_int restore_thread_id;
static atomic_bool ending; /* who still waits in the listener gets no answer */
static bool forked;
static bool lost; /* a restore ran out of memory: nothing helps any more */

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
static bool in_custom_storage;
static uint32_t operation_number; /* of the last operation */

uint64_t now_ns(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* The gate */

static void wait_while(atomic_int *word, int value, uint64_t at_most_ns)
{
    struct timespec limit = {(time_t)(at_most_ns / 1000000000u),
                             (long)(at_most_ns % 1000000000u)};

    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value,
            at_most_ns == UINT64_MAX ? NULL : &limit, NULL, 0);
}

static void wake(atomic_int *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

int enter(void)
{
    if (!self.initialized)
        return NOT_INITIALIZED;
    for (;;) {
        int state;

        atomic_fetch_add(&self.calls, 1);
        state = self.state;
        if (state == RUNNING)
            return SUCCESS;
        leave(&(int){SUCCESS});
        wait_while(&self.state, state, UINT64_MAX);
    }
}

void leave(const int *entered)
{
    if (*entered == SUCCESS && atomic_fetch_sub(&self.calls, 1) == 1)
        wake(&self.calls);
}

static void set_state(enum state state)
{
    self.state = state;
    wake(&self.state);
}

/* Transitions, each in the restore thread */

static CUresult lock_process(uint32_t timeout_ms)
{
    uint64_t deadline =
        timeout_ms ? now_ns() + timeout_ms * UINT64_C(1000000) : UINT64_MAX;

    if (self.state != RUNNING)
        return ILLEGAL_STATE;
    set_state(LOCKED);
    for (;;) {
        uint64_t now = now_ns(), busy_until = self.busy_until, until = deadline;
        int calls = self.calls;

        if (calls == 0 && busy_until <= now)
            return SUCCESS;
        if (deadline <= now) {
            set_state(RUNNING);
            return NOT_READY;
        }
        if (calls == 0 && busy_until < until)
            until = busy_until;
        wait_while(&self.calls, calls,
                   until == UINT64_MAX ? UINT64_MAX : until - now);
    }
}

static void release_device_memory(CUdevice device)
{
    struct arena *arena = own_arena(device);

    if (ftruncate(arena->file, 0) != 0)
        lost = true;
    self.slot->used_bytes[self.gpu_of_device[device]] = 0;
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
    for (CUdevice device = 0; own_arena(device); device++) {
        if (made)
            release_device_memory(device);
        else /* no room: the process stays as it was */
            drop_image(device);
    }
    return made ? SUCCESS : OUT_OF_MEMORY;
}

static void offer_regions(struct answer *answer)
{
    for (CUdevice device = 0; own_arena(device); device++) {
        const struct arena *arena = own_arena(device);

        if (!arena->extent)
            continue;
        answer->regions[answer->region_count].gpu = self.gpu_of_device[device];
        answer->regions[answer->region_count].file = arena->file;
        answer->regions[answer->region_count].size = arena->extent;
        answer->region_count++;
    }
}

static bool has_contexts(uint32_t retained, const unsigned gpu_of[])
{
    for (CUdevice device = 0; own_arena(device); device++)
        if (own_arena(device)->extent &&
            !(retained >> gpu_of[self.gpu_of_device[device]] & 1))
            return false;
    return true;
}

static CUresult checkpoint_process(const struct request *request,
                                   struct answer *answer)
{
    unsigned same[MAX_GPUS];
    CUresult result = SUCCESS;

    for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++)
        same[gpu] = gpu;
    if (self.state != LOCKED)
        return ILLEGAL_STATE;
    if (self.managed)
        return NOT_SUPPORTED;
    if (request->custom_storage && !has_contexts(request->retained, same))
        return INVALID_CONTEXT;
    if (request->custom_storage)
        offer_regions(answer);
    else
        result = checkpoint_to_host();
    if (result != SUCCESS)
        return result;
    in_custom_storage = request->custom_storage;
    answer->number = ++operation_number;
    set_state(request->custom_storage ? CHECKPOINTING : CHECKPOINTED);
    return SUCCESS;
}

/* Every GPU of the machine must be named, once on each side. */
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

        if (old < 0 || new < 0 || old_seen >> old & 1 || new_seen >> new & 1)
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
    if (result == SUCCESS && request->custom_storage != in_custom_storage)
        result = INVALID_VALUE;
    if (result == SUCCESS && request->custom_storage &&
        !has_contexts(request->retained, new_gpu))
        result = INVALID_CONTEXT;
    if (result != SUCCESS)
        return result;
    if (charge_all(new_gpu) != SUCCESS) {
        lost = true;
        return OUT_OF_MEMORY;
    }
    for (CUdevice device = 0; own_arena(device); device++) {
        self.gpu_of_device[device] = new_gpu[self.gpu_of_device[device]];
        lost = !bring_back(device) || lost;
    }
    if (lost)
        return OUT_OF_MEMORY;
    if (request->custom_storage)
        offer_regions(answer);
    answer->number = ++operation_number;
    set_state(request->custom_storage ? RESTORING : LOCKED);
    return SUCCESS;
}

/* To complete an operation leads on, to cancel it leads back. One of the two states
 * keeps the memory in place and becomes LOCKED; the other gives it up. */
static CUresult end_operation(uint32_t number, enum state keeping_memory)
{
    if (number != operation_number ||
        (self.state != CHECKPOINTING && self.state != RESTORING))
        return ILLEGAL_STATE;
    if (self.state == (int)keeping_memory) {
        set_state(LOCKED);
        return SUCCESS;
    }
    for (CUdevice device = 0; own_arena(device); device++)
        release_device_memory(device);
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

static void carry_out(const struct request *request, struct answer *answer)
{
    switch (request->operation) {
    case GET_STATE:
        answer->value = self.state;
        break;
    case GET_RESTORE_THREAD_ID:
        answer->value = restore_thread_id;
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
        answer->result = end_operation(request->number, RESTORING);
        break;
    case CANCEL:
        answer->result = end_operation(request->number, CHECKPOINTING);
        break;
    }
}

/* False if this process has ended meanwhile and answers nobody any more. */
static bool serve(const struct request *request, struct answer *answer)
{
    const enum operation operation = request->operation;
    const uint64_t number = count_call(operation);
    struct ucred caller = {0};
    socklen_t length = sizeof caller;
    enum fate fate;

    getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &caller, &length);
    fate = suffer_faults(operation, number, BEFORE, caller.pid, listener,
                         &answer->result);
    if (fate == DECIDED && operation == RESTORE && self.state == CHECKPOINTED)
        lost = lost || answer->result == OUT_OF_MEMORY; /* as if it were true */
    if (fate == SPARED) {
        carry_out(request, answer);
        fate = suffer_faults(operation, number, AFTER, caller.pid, listener,
                             &answer->result);
    }
    return fate != ENDED;
}

static void serve_caller(void)
{
    struct request request;
    struct answer answer = {0};

    if (recv(connection, &request, sizeof request, 0) == sizeof request) {
        if (!ending && serve(&request, &answer))
            send(connection, &answer, sizeof answer, MSG_NOSIGNAL);
    }
    close(connection);
    connection = -1;
}

static void *restore_thread(void *unused)
{
    const struct timespec while_short_of_files = {0, 10000000};

    restore_thread_id = (int)syscall(SYS_gettid);
    wake(&restore_thread_id);
    while (!self.initialized)
        wait_while(&self.initialized, 0, UINT64_MAX);
    for (;;) {
        connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection >= 0)
            serve_caller();
        else if (errno == EINVAL || errno == EBADF) /* shut down: the end */
            return unused;
        else if (errno != EINTR && errno != ECONNABORTED)
            nanosleep(&while_short_of_files, NULL);
    }
}

/* Start and fork */

unsigned socket_address(int pid, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    /* After a NUL: the abstract name space. */
    return (unsigned)offsetof(struct sockaddr_un, sun_path) + 1 +
           (unsigned)snprintf(address->sun_path + 1,
                              sizeof address->sun_path - 1, "cuckpt/%lu/%d",
                              machine_number(), pid);
}

/* A forked child is no CUDA process, and cannot become one: it must not answer
 * for its parent. */
static void after_fork_in_child(void)
{
    if (!self.initialized)
        return;
    close(listener);
    if (connection >= 0)
        close(connection);
    disown_operations();
    for (CUdevice device = 0; own_arena(device); device++)
        close(own_arena(device)->file);
    listener = -1;
    self.initialized = 0;
    forked = true;
}

static CUresult listen_to_callers(void)
{
    struct sockaddr_un address;
    unsigned length = socket_address(getpid(), &address);

    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) ||
        listen(listener, SOMAXCONN))
        return OPERATING_SYSTEM;
    return SUCCESS;
}

static CUresult start_restore_thread(void)
{
    sigset_t all, before;
    pthread_t thread;
    int failed;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&thread, NULL, restore_thread, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return OPERATING_SYSTEM;
    restore_thread_handle = thread;
    while (restore_thread_id == 0)
        wait_while(&restore_thread_id, 0, UINT64_MAX);
    return SUCCESS;
}

CUresult start_process(void)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static bool handles_fork;
    struct machine *machine = the_machine();
    CUresult result = SUCCESS;

    if (forked)
        return NOT_INITIALIZED;
    if (!machine || machine->gpu_count == 0)
        return NO_DEVICE;
    pthread_mutex_lock(&once);
    if (!self.initialized) {
        for (unsigned device = 0; device < machine->gpu_count; device++)
            self.gpu_of_device[device] = device;
        reset_contexts();
        result = make_arenas();
        if (result == SUCCESS)
            result = listen_to_callers();
        if (result == SUCCESS)
            result = start_restore_thread();
        if (result == SUCCESS) {
            self.slot = take_slot(restore_thread_id);
            result = self.slot ? SUCCESS : OPERATING_SYSTEM;
        }
        if (result == SUCCESS && !handles_fork) {
            handles_fork = true;
            pthread_atfork(NULL, NULL, after_fork_in_child);
        }
        if (result == SUCCESS) {
            self.initialized = 1;
            wake(&self.initialized);
        } else if (listener >= 0) {
            close(listener);
            listener = -1;
        }
    }
    pthread_mutex_unlock(&once);
    return result;
}

/* Stop being a CUDA process. */
void end_process(void)
{
    forget_operations();
    if (!self.initialized)
        return;
    ending = true;
    shutdown(listener, SHUT_RDWR); /* which ends the restore thread */
    pthread_join(restore_thread_handle, NULL);
    ending = false;
    close(listener);
    listener = -1;
    restore_thread_id = 0;
    for (CUdevice device = 0; own_arena(device); device++)
        drop_image(device);
    drop_arenas();
    forget_streams();
    self.slot->owner = 0;
    self.initialized = 0;
    self.managed = 0;
    self.busy_until = 0;
    self.machines++;
    lost = false;
    set_state(RUNNING);
}

/* Move this process to the machine that CUCKPT_SIMULATOR names now: for a process
 * that uses one machine after the other. None of its threads may be in a call. */
EXPORT bool cuckpt_simulator_change_machine(void)
{
    the_machine();
    end_process();
    leave_machine();
    return enter_machine() == NULL;
}
