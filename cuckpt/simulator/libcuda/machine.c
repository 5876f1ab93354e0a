/* The simulated machine: a file in memory that all its processes map.
 *
 * CUCKPT_SIMULATOR names it, as /proc/PID/fd/N of the process that made it. What
 * a process uses stands in its own slot, so nothing needs to be undone when one
 * is killed: the slots of dead processes do not count.
 */
#define _GNU_SOURCE
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct machine *machine;
static unsigned long number;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static struct machine *map_machine(int file)
{
    struct stat status;
    struct machine *memory;

    if (fstat(file, &status) || (size_t)status.st_size != sizeof *memory)
        return NULL;
    memory = mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return NULL;
    if (memcmp(memory->magic, "cuckpt 1", 8) != 0 ||
        memory->gpu_count > MAX_GPUS || memory->fault_count > MAX_FAULTS) {
        munmap(memory, sizeof *memory);
        return NULL;
    }
    number = status.st_ino;
    return memory;
}

/* NULL, or why there is none. */
static const char *enter_machine(void)
{
    const char *path = getenv("CUCKPT_SIMULATOR");
    int file;

    if (!path)
        return "is not set";
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return "names a machine that has ended, or none";
    machine = map_machine(file);
    close(file);
    return machine ? NULL : "names no machine of this version of cuckpt";
}

/* The libraries can only answer that there is no GPU, or no driver. */
static void open_first_machine(void)
{
    const char *reason = enter_machine();

    if (reason)
        fprintf(stderr, "cuckpt simulator: CUCKPT_SIMULATOR %s; start the program "
                        "by `cuckpt simulate -- CMD...`\n", reason);
}

struct machine *the_machine(void)
{
    pthread_once(&opened, open_first_machine);
    return machine;
}

/* To the one that CUCKPT_SIMULATOR names now. False if it names none, of which
 * only the first time a word is said: later the program did it itself. */
bool change_machine(void)
{
    the_machine();
    if (machine)
        munmap(machine, sizeof *machine);
    machine = NULL;
    return enter_machine() == NULL;
}

unsigned long machine_number(void)
{
    return number;
}

bool read_file(const char *path, char *buffer, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length;

    if (file < 0)
        return false;
    length = read(file, buffer, size - 1);
    close(file);
    buffer[length < 0 ? 0 : length] = '\0';
    return length > 0;
}

bool look_up_process(int pid, struct process_facts *facts)
{
    char path[64], text[2048];
    const char *found;
    unsigned flags;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (pid <= 0 || !read_file(path, text, sizeof text))
        return false;
    /* The name before the state is in parentheses, and may hold some. */
    found = strrchr(text, ')');
    if (!found || sscanf(found + 1, " %c %*d %*d %*d %*d %*d %u", &facts->state,
                         &flags) != 2)
        return false;
    facts->is_exiting = flags & 4; /* PF_EXITING of the kernel */
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    if (!read_file(path, text, sizeof text))
        return false;
    found = strstr(text, "\nTgid:");
    if (!found || sscanf(found, "\nTgid: %d", &facts->group) != 1)
        return false;
    found = strstr(text, "\nUid:");
    return found && sscanf(found, "\nUid: %*u %u", &facts->uid) == 1;
}

/* A thread that is none of its process's first is gone as soon as it has ended. To
 * ask so needs no descriptor, of which there may be none left. */
bool is_alive(uint64_t owner)
{
    return owner != 0 && (syscall(SYS_tgkill, (int)(owner >> 32),
                                  (int)(uint32_t)owner, 0) == 0 ||
                          errno != ESRCH);
}

struct slot *take_slot(int restore_thread)
{
    uint64_t self = (uint64_t)getpid() << 32 | (uint32_t)restore_thread;

    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct slot *slot = &machine->slots[i];
        uint64_t owner = slot->owner;

        if (is_alive(owner) ||
            !atomic_compare_exchange_strong(&slot->owner, &owner, self))
            continue;
        slot->contexts = 0;
        slot->checkpoints = 0;
        for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++)
            slot->used_bytes[gpu] = 0;
        return slot;
    }
    return NULL;
}

/* 0 if the process is not on this machine. */
int find_restore_thread(int pid)
{
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const uint64_t owner = machine->slots[i].owner;

        if (owner >> 32 == (uint32_t)pid && is_alive(owner))
            return (int)(uint32_t)owner;
    }
    return 0;
}

uint64_t used_on_gpu(unsigned gpu)
{
    uint64_t used = 0;

    for (int i = 0; i < MAX_PROCESSES; i++) {
        const struct slot *slot = &machine->slots[i];
        uint64_t bytes = slot->used_bytes[gpu];

        if (bytes && is_alive(slot->owner))
            used += bytes;
    }
    return used;
}

/* Without a lock, which a stopped process could hold: look, count, look again.
 * Of two who race for the last bytes none gets more than there is, and who steps
 * back tries again, for the other may have done so too. */
bool charge(struct slot *slot, unsigned gpu, uint64_t bytes)
{
    const uint64_t size = machine->gpus[gpu].memory_bytes;

    for (int attempt = 0; attempt < 5; attempt++) {
        if (bytes > size || used_on_gpu(gpu) > size - bytes)
            return false;
        atomic_fetch_add(&slot->used_bytes[gpu], bytes);
        if (used_on_gpu(gpu) <= size)
            return true;
        atomic_fetch_sub(&slot->used_bytes[gpu], bytes);
        usleep((useconds_t)(getpid() % 7 + 1) * 100);
    }
    return false;
}

int find_gpu(const CUuuid *uuid)
{
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++)
        if (!memcmp(uuid, &machine->gpus[gpu].uuid, sizeof *uuid))
            return (int)gpu;
    return -1;
}

void format_uuid(const CUuuid *uuid, char text[UUID_TEXT])
{
    char *end = text + sprintf(text, "GPU");

    for (unsigned i = 0; i < sizeof uuid->bytes; i++) {
        if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10)
            *end++ = '-';
        end += sprintf(end, "%02x", uuid->bytes[i]);
    }
}
