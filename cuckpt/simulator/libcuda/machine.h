/* The simulated machine, which libcuda.so.1 and libnvidia-ml.so.1 share. */
#ifndef CUCKPT_MACHINE_H
#define CUCKPT_MACHINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* The real libraries have functions under several names. */
#define PLAIN(name, versioned)                                  \
    extern __typeof__(versioned) name                           \
        __attribute__((alias(#versioned), visibility("default")))

typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum { MAX_GPUS = 16, MAX_PROCESSES = 1024, MAX_FAULTS = 64 };

/* Those up to COMPLETE are calls that can fail by a fault. */
enum operation {
    GET_STATE,
    GET_RESTORE_THREAD_ID,
    LOCK,
    CHECKPOINT,
    RESTORE,
    UNLOCK,
    COMPLETE,
    CANCEL, /* of the caller itself, which could not map what it was offered */
};

enum { OPERATIONS = CANCEL + 1 };

enum gpu_flags { PERSISTENCE_MODE = 1, MIG_MODE = 2 };

/* Laid out also by cuckpt/simulator/file.py. */
struct machine {
    char magic[8];
    uint32_t driver_version;
    uint32_t gpu_count;
    struct gpu {
        CUuuid uuid;
        uint64_t memory_bytes;
        _Atomic uint32_t flags; /* enum gpu_flags */
        char name[60];
    } gpus[MAX_GPUS];
    _Atomic uint64_t fault_count; /* grows when one is added later */
    struct fault {
        uint32_t operation;
        uint32_t when;  /* enum moment */
        uint32_t at, count; /* which calls, from 1 */
        int32_t result; /* -1: what the call itself comes to */
        uint32_t kill;  /* enum victim */
        uint64_t delay_ns;
    } faults[MAX_FAULTS];
    _Atomic uint64_t calls[OPERATIONS];    /* that have been begun */
    _Atomic uint64_t finished[OPERATIONS]; /* of these */
    /* Whoever has called cuInit: process and restore thread, in one word. Once
     * that thread is gone, by death or exec, the slot is free. */
    struct slot {
        _Atomic uint64_t owner;
        _Atomic uint64_t contexts; /* a bit for each GPU on which it has some */
        _Atomic uint64_t checkpoints; /* how often it has lost its GPU memory */
        _Atomic uint64_t used_bytes[MAX_GPUS];
    } slots[MAX_PROCESSES];
};

struct process_facts {
    char state; /* as in /proc/PID/stat */
    bool is_exiting;
    int group;  /* the process that a thread belongs to */
    unsigned uid;
};

struct machine *the_machine(void); /* NULL if there is none */
bool change_machine(void);
unsigned long machine_number(void);
bool read_file(const char *path, char *buffer, size_t size);
bool look_up_process(int pid, struct process_facts *facts);
struct slot *take_slot(int restore_thread);
int find_restore_thread(int pid);
bool is_alive(uint64_t owner);
uint64_t used_on_gpu(unsigned gpu);
bool charge(struct slot *slot, unsigned gpu, uint64_t bytes);
int find_gpu(const CUuuid *uuid);

enum { UUID_TEXT = 41 };
void format_uuid(const CUuuid *uuid, char text[UUID_TEXT]);

#endif
