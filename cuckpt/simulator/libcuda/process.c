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
static bool forked;

uint64_t now_ns(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* The bell */

static void wait_while(atomic_int *word, int value, uint64_t until_ns)
{
    struct timespec until = {(time_t)(until_ns / 1000000000u),
                             (long)(until_ns % 1000000000u)};

    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, value,
            until_ns == UINT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void wake(atomic_int *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static atomic_int rings;

int bell(void)
{
    return rings;
}

void ring_bell(void)
{
    rings++;
    wake(&rings);
}

void wait_for_ring(int since, uint64_t until_ns)
{
    wait_while(&rings, since, until_ns);
}

/* The gate */

static int refuse(void)
{
    static atomic_bool told;

    if (self.machines && the_machine() && !atomic_exchange(&told, true))
        fputs("cuckpt simulator: this process has been on an earlier machine, and "
              "has not called cuInit on this one; CUDA libraries that keep what they "
              "found there cannot go on. See docs/simulator.md, \"CUDA in the test's "
              "own process\"\n", stderr);
    return NOT_INITIALIZED;
}

int enter(void)
{
    if (!self.initialized)
        return refuse();
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
    if (*entered == SUCCESS && atomic_fetch_sub(&self.calls, 1) == 1 &&
        self.state != RUNNING)
        ring_bell(); /* for the lock that waits */
}

void set_state(enum state state)
{
    self.state = state;
    wake(&self.state);
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
    if (fate == DECIDED && operation == RESTORE && answer->result == OUT_OF_MEMORY)
        lose_process(); /* as if it were true */
    if (fate == SPARED) {
        carry_out(request, answer);
        fate = suffer_faults(operation, number, AFTER, caller.pid, listener,
                             &answer->result);
    }
    the_machine()->finished[operation]++;
    return fate != ENDED;
}

static void serve_caller(void)
{
    struct request request;
    struct answer answer = {0};

    if (recv(connection, &request, sizeof request, 0) == sizeof request) {
        if (!self.ending && serve(&request, &answer))
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
    while (!self.initialized && !self.ending)
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

static void end_restore_thread(void)
{
    self.ending = true;
    ring_bell(); /* a lock may be waiting */
    wake(&self.initialized);
    shutdown(listener, SHUT_RDWR);
    pthread_join(restore_thread_handle, NULL);
    self.ending = false;
    restore_thread_id = 0;
}

static void stop_listening(void)
{
    close(listener);
    listener = -1;
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
        self.device_count = visible_gpus(self.gpu_of_device);
        reset_contexts();
        result = self.device_count ? make_arenas() : NO_DEVICE;
        if (result == SUCCESS)
            result = listen_to_callers();
        if (result == SUCCESS)
            result = start_restore_thread();
        if (result == SUCCESS) {
            self.slot = take_slot(restore_thread_id);
            if (!self.slot) {
                end_restore_thread();
                result = OPERATING_SYSTEM;
            }
        }
        if (result == SUCCESS && !handles_fork) {
            handles_fork = true;
            pthread_atfork(NULL, NULL, after_fork_in_child);
        }
        if (result == SUCCESS) {
            self.initialized = 1;
            wake(&self.initialized);
        } else if (listener >= 0) {
            stop_listening();
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
    end_restore_thread();
    stop_listening();
    forget_transitions();
    forget_streams();
    forget_events();
    forget_pools();
    forget_pinned();
    close_imports();
    drop_arenas();
    reset_contexts();
    self.slot->owner = 0;
    self.initialized = 0;
    self.managed = 0;
    self.exported = 0;
    self.machines++;
    set_state(RUNNING);
}

/* Move this process to the machine that CUCKPT_SIMULATOR names now: for a process
 * that uses one machine after the other. None of its threads may be in a call. */
EXPORT bool cuckpt_simulator_change_machine(void)
{
    end_process();
    return change_machine();
}
