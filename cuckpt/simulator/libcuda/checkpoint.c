/* The checkpoint calls, as a caller makes them: each asks the target's restore
 * thread and waits for its answer, however long that takes.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* As in the driver API. */

struct lock_args {
    unsigned timeout_ms, reserved0;
    uint64_t reserved1[7];
};

struct region {
    CUdeviceptr device_pointer;
    size_t size;
    CUstream stream;
};

struct custom_storage_info {
    uint64_t handle; /* in the API a pointer, to nothing one may look at */
    struct region *regions;
    unsigned device_count;
};

struct checkpoint_args {
    struct custom_storage_info **info_out;
    char reserved[56];
};

struct restore_args {
    const struct gpu_pair *pairs;
    unsigned pair_count, padding;
    struct custom_storage_info **info_out;
    char reserved[40];
};

struct unlock_args {
    uint64_t reserved[8];
};

/* What the caller sees of a custom-storage operation. */
struct offer {
    struct custom_storage_info info;
    struct region regions[MAX_GPUS];
};

/* A custom-storage operation that waits for completion. */
struct storage {
    uint64_t handle;
    int pid;
    uint32_t number; /* the target's */
    unsigned region_count;
    struct arena *arenas[MAX_GPUS];
    uint64_t streams[MAX_GPUS]; /* their ids: the caller may destroy them */
    struct offer *offer; /* NULL once it is withdrawn */
    struct storage *next;
};

enum { WITHDRAWN = 16 };

static struct storage *operations;
static uint64_t last_handle = 0x10000;
/* The last offers that were withdrawn are not freed yet: whoever still looks at one
 * is to see nonsense rather than what was put in its place. */
static struct offer *withdrawn[WITHDRAWN];
static unsigned withdrawn_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Ask the target. What the driver says of who cannot be asked was measured. */

static CUresult find_target(int pid, int *group)
{
    struct process_facts facts;

    if (!the_machine())
        return NOT_INITIALIZED;
    if (pid <= 0 || !look_up_process(pid, &facts))
        return OPERATING_SYSTEM;
    if (facts.state == 'Z')
        return NOT_INITIALIZED;
    if (geteuid() != 0 && geteuid() != facts.uid)
        return OPERATING_SYSTEM;
    *group = facts.group; /* a thread stands for its process */
    return SUCCESS;
}

static CUresult connect_to(int group, int *connection)
{
    struct sockaddr_un address;
    unsigned length = socket_address(group, &address);

    *connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (*connection < 0)
        return OPERATING_SYSTEM;
    while (connect(*connection, (struct sockaddr *)&address, length))
        if (errno != EINTR) {
            close(*connection);
            return errno == ECONNREFUSED ? NOT_INITIALIZED : OPERATING_SYSTEM;
        }
    return SUCCESS;
}

/* Whether the last thread of a process has ended: the first may have before. */
static bool listens_no_more(int group)
{
    int connection;

    if (connect_to(group, &connection) != SUCCESS)
        return true;
    close(connection);
    return false;
}

/* The target has closed the connection: it is about to die, unless it has left the
 * machine. Whoever looks at it next is to find it dead. */
static void wait_for_death(int group)
{
    const struct timespec a_moment = {0, 1000000};
    struct process_facts facts;

    for (int i = 0; look_up_process(group, &facts) && i < 10000; i++) {
        const bool is_dead = facts.state == 'Z' || facts.state == 'X';

        if (is_dead ? listens_no_more(group) : i >= 200 && !facts.is_exiting)
            return;
        nanosleep(&a_moment, NULL);
    }
}

/* Root need not look anybody up whose restore thread listens. */
static CUresult find_and_connect(int pid, int *group, int *connection)
{
    CUresult result;

    *group = pid;
    if (geteuid() == 0 && the_machine() && connect_to(pid, connection) == SUCCESS)
        return SUCCESS;
    result = find_target(pid, group);
    return result == SUCCESS ? connect_to(*group, connection) : result;
}

static CUresult ask(int pid, const struct request *request, struct answer *answer)
{
    int group, connection;
    ssize_t got;
    CUresult result = find_and_connect(pid, &group, &connection);

    if (result != SUCCESS)
        return result;
    if (send(connection, request, sizeof *request, MSG_NOSIGNAL) < 0) {
        close(connection);
        return OPERATING_SYSTEM;
    }
    do
        got = recv(connection, answer, sizeof *answer, 0);
    while (got < 0 && errno == EINTR);
    close(connection);
    if (got == sizeof *answer)
        return answer->result;
    wait_for_death(group);
    return OPERATING_SYSTEM;
}

static CUresult ask_simply(int pid, enum operation operation, int *value)
{
    struct request request = {.operation = operation};
    struct answer answer;
    CUresult result = ask(pid, &request, &answer);

    if (result == SUCCESS && value)
        *value = answer.value;
    return result;
}

static CUresult end(int pid, uint32_t number, enum operation how)
{
    struct request request = {.operation = how, .number = number};
    struct answer answer;

    return ask(pid, &request, &answer);
}

/* Custom storage */

static bool is_offered(void)
{
    return the_machine() && the_machine()->driver_version >= 13040;
}

static bool is_zero(const void *memory, size_t size)
{
    for (const char *byte = memory; size--; byte++)
        if (*byte)
            return false;
    return true;
}

static void withdraw(struct storage *storage)
{
    struct offer **place;

    if (!storage->offer)
        return;
    memset(storage->offer, 0xdb, sizeof *storage->offer);
    pthread_mutex_lock(&lock);
    place = &withdrawn[withdrawn_count++ % WITHDRAWN];
    free(*place);
    *place = storage->offer;
    pthread_mutex_unlock(&lock);
    storage->offer = NULL;
}

static void drop(struct storage *storage)
{
    for (unsigned i = 0; i < storage->region_count; i++) {
        if (storage->arenas[i])
            unmap_foreign(storage->arenas[i]);
        if (storage->streams[i])
            destroy_offered_stream(storage->streams[i]);
    }
    withdraw(storage);
    free(storage);
}

static CUresult map_regions(struct storage *storage, int group,
                            const struct answer *answer)
{
    struct offer *offer = storage->offer;

    offer->info.handle = storage->handle;
    offer->info.regions = offer->regions;
    offer->info.device_count = storage->region_count = answer->region_count;
    for (unsigned i = 0; i < answer->region_count; i++) {
        CUcontext context = primary_context(device_with(answer->regions[i].gpu));
        CUstream stream;
        char path[64];

        snprintf(path, sizeof path, "/proc/%d/fd/%d", group,
                 answer->regions[i].file);
        storage->arenas[i] = map_foreign(path, answer->regions[i].size);
        if (!storage->arenas[i] ||
            make_stream(context, NON_BLOCKING, 0, &stream) != SUCCESS)
            return OUT_OF_MEMORY;
        storage->streams[i] = stream->id;
        offer->regions[i].device_pointer = (uintptr_t)storage->arenas[i]->base;
        offer->regions[i].size = answer->regions[i].size;
        offer->regions[i].stream = stream;
    }
    return SUCCESS;
}

static void keep(struct storage *storage)
{
    pthread_mutex_lock(&lock);
    storage->next = operations;
    operations = storage;
    pthread_mutex_unlock(&lock);
}

static struct storage *make_storage(int pid)
{
    struct storage *storage = calloc(1, sizeof *storage);

    if (!storage)
        return NULL;
    storage->offer = calloc(1, sizeof *storage->offer);
    if (!storage->offer) {
        free(storage);
        return NULL;
    }
    storage->pid = pid;
    pthread_mutex_lock(&lock);
    storage->handle = last_handle += 16;
    pthread_mutex_unlock(&lock);
    return storage;
}

static CUresult begin(int pid, struct request *request,
                      struct custom_storage_info **info_out)
{
    struct storage *storage;
    struct answer answer;
    int group;
    CUresult result = find_target(pid, &group);

    if (result != SUCCESS)
        return result;
    if (!self.initialized)
        return NOT_INITIALIZED;
    if (group == getpid())
        return NOT_SUPPORTED;
    storage = make_storage(group);
    if (!storage)
        return OUT_OF_MEMORY;
    request->custom_storage = true;
    request->retained = retained_gpus();
    result = ask(group, request, &answer);
    if (result == SUCCESS) {
        result = map_regions(storage, group, &answer);
        if (result != SUCCESS)
            end(group, answer.number, CANCEL);
    }
    if (result != SUCCESS) {
        drop(storage);
        return result;
    }
    storage->number = answer.number;
    *info_out = &storage->offer->info;
    keep(storage);
    return SUCCESS;
}

/* In a forked child: they are the parent's. Nothing more can be done, for another
 * thread may have held a lock when the process forked. */
void disown_operations(void)
{
    operations = NULL;
}

/* When their machine is left. */
void forget_operations(void)
{
    while (operations) {
        struct storage *first = operations;

        operations = first->next;
        drop(first);
    }
    for (unsigned i = 0; i < WITHDRAWN; i++) {
        free(withdrawn[i]);
        withdrawn[i] = NULL;
    }
}

/* Take the operation with a handle off the list; NULL if there is none. */
static struct storage *take(uint64_t handle)
{
    struct storage **link = &operations, *found;

    pthread_mutex_lock(&lock);
    while (*link && (*link)->handle != handle)
        link = &(*link)->next;
    found = *link;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Wait for the streams that were handed out; whoever used others had to. */
static CUresult wait_for_streams(const struct storage *storage)
{
    for (unsigned i = 0; i < storage->region_count; i++) {
        const CUresult result = wait_for_offered_stream(storage->streams[i]);

        if (result == STREAM_CAPTURE_UNSUPPORTED ||
            result == STREAM_CAPTURE_INVALIDATED)
            return STREAM_CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

EXPORT CUresult cuCheckpointOperationComplete(uint64_t handle)
{
    struct storage *storage = take(handle);
    CUresult result;

    if (!storage)
        return INVALID_VALUE;
    withdraw(storage);
    result = wait_for_streams(storage);
    if (result == SUCCESS)
        result = end(storage->pid, storage->number, COMPLETE);
    /* After an error one may try again, as long as the process is there. */
    if (result == SUCCESS || kill(storage->pid, 0))
        drop(storage);
    else
        keep(storage);
    return result;
}

/* The process calls */

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    return state ? ask_simply(pid, GET_STATE, state) : INVALID_VALUE;
}

/* The restore thread of a process if it is stopped, which cannot answer then; else 0.
 * CRIU asks for it when it has stopped all threads of the process. */
static int stopped_restore_thread(int pid)
{
    struct process_facts facts;
    int group, thread;

    if (find_target(pid, &group) != SUCCESS)
        return 0;
    thread = find_restore_thread(group);
    return look_up_process(thread, &facts) && strchr("Tt", facts.state) ? thread : 0;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    int thread;

    if (!tid)
        return INVALID_VALUE;
    thread = stopped_restore_thread(pid);
    if (thread == 0)
        return ask_simply(pid, GET_RESTORE_THREAD_ID, tid);
    *tid = thread;
    return SUCCESS;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, const struct lock_args *args)
{
    struct request request = {.operation = LOCK};
    struct answer answer;

    if (args) {
        if (args->reserved0 || !is_zero(args->reserved1, sizeof args->reserved1))
            return INVALID_VALUE;
        request.timeout_ms = args->timeout_ms;
    }
    return ask(pid, &request, &answer);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid,
                                              const struct checkpoint_args *args)
{
    struct request request = {.operation = CHECKPOINT};
    struct answer answer;

    if (args && !is_zero(args->reserved, sizeof args->reserved))
        return INVALID_VALUE;
    if (!args || !args->info_out)
        return ask(pid, &request, &answer);
    return is_offered() ? begin(pid, &request, args->info_out) : INVALID_VALUE;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid,
                                           const struct restore_args *args)
{
    struct request request = {.operation = RESTORE, .initialized = self.initialized};
    struct answer answer;

    if (!args)
        return ask(pid, &request, &answer);
    if (args->padding || !is_zero(args->reserved, sizeof args->reserved))
        return INVALID_VALUE;
    if (args->pair_count) {
        /* The real driver reads from address 0 here. */
        if (!args->pairs) {
            fputs("cuckpt simulator: gpuPairsCount without gpuPairs; the real "
                  "driver crashes here\n", stderr);
            return INVALID_VALUE;
        }
        if (args->pair_count > MAX_GPUS)
            return INVALID_VALUE;
        request.pair_count = args->pair_count;
        memcpy(request.pairs, args->pairs,
               args->pair_count * sizeof *args->pairs);
    }
    if (!args->info_out)
        return ask(pid, &request, &answer);
    return is_offered() ? begin(pid, &request, args->info_out) : INVALID_VALUE;
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, const struct unlock_args *args)
{
    if (args && !is_zero(args->reserved, sizeof args->reserved))
        return INVALID_VALUE;
    return ask_simply(pid, UNLOCK, NULL);
}
