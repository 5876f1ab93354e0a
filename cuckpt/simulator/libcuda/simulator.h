/* A simulated CUDA driver: what its files share.
 *
 * machine.c, machine.h  the machine that several processes share: GPUs, their users
 * process.c   this process as a target: its gate and its restore thread
 * memory.c    device memory: allocation, addresses, copies
 * device.c    devices and contexts
 * stream.c    streams, events, and the one kernel there is
 * checkpoint.c  the checkpoint calls, as a caller makes them
 * fault.c     what is to go wrong, and at which of these calls
 * symbols.c   names of results and functions
 *
 * A transition (checkpoint, restore ...) runs in the target's restore thread,
 * which takes no lock and allocates no memory that other threads could hold: it
 * must get on while all of them are stopped.
 */
#ifndef CUCKPT_SIMULATOR_H
#define CUCKPT_SIMULATOR_H

#include "machine.h"

#include <stddef.h>

/* The real library has each function under its plain name as well. */
#define PLAIN(name, versioned)                                  \
    extern __typeof__(versioned) name                           \
        __attribute__((alias(#versioned), visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

enum state { RUNNING, LOCKED, CHECKPOINTED, FAILED, CHECKPOINTING, RESTORING };

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

/* process.c */

struct self {
    atomic_int initialized;
    atomic_int state;
    atomic_int calls;             /* API calls under way */
    _Atomic uint64_t busy_until;  /* when the last kernel ends, ns */
    atomic_int managed;           /* allocations of managed memory */
    atomic_uint machines;         /* how many this process has left */
    struct slot *slot;
    unsigned gpu_of_device[MAX_GPUS];
};

extern struct self self;

CUresult start_process(void);
void end_process(void);
void leave(const int *entered);
int enter(void);
uint64_t now_ns(void);

/* At the head of an API call: wait while this process is locked. */
#define ENTER                                                            \
    __attribute__((cleanup(leave))) const int entered = enter();         \
    if (entered != SUCCESS)                                              \
        return entered

/* memory.c */

/* Device memory of one GPU: a file, and addresses that stand for it. */
struct arena {
    char *base;
    uint64_t size;   /* of the range of addresses */
    uint64_t extent; /* of the file, up to the last allocation's end */
    uint64_t allocated; /* bytes of it that are */
    int file;
    unsigned char *used; /* one for each chunk; see memory.c */
    struct arena *next;
};

enum { CHUNK = 2 << 20 };

struct arena *own_arena(CUdevice device);
CUresult make_arenas(void);
void drop_arenas(void);
struct arena *map_foreign(const char *path, uint64_t size);
void unmap_foreign(struct arena *arena);

/* device.c */

CUcontext primary_context(CUdevice device);
void reset_contexts(void);
uint32_t retained_gpus(void);
CUdevice device_of(CUcontext context);
CUcontext current_context(void);
CUresult valid_device(CUdevice device);

/* stream.c */

CUresult make_stream(CUcontext context, CUstream *stream);
void free_stream(CUstream stream);
void forget_streams(void);
CUresult wait_for_stream(CUstream stream);

/* fault.c */

enum moment { BEFORE, AFTER };
enum victim { NOBODY, TARGET, CALLER };

/* What faults come to: nothing, a result, or the end of the process meanwhile. */
enum fate { SPARED, DECIDED, ENDED };

uint64_t count_call(enum operation operation);
enum fate suffer_faults(enum operation operation, uint64_t number,
                        enum moment when, int caller, int listener,
                        CUresult *result);

/* checkpoint.c */

void forget_operations(void);
void disown_operations(void);

/* It speaks to process.c of the target through a socket. */

struct gpu_pair {
    CUuuid old_uuid, new_uuid;
};

struct request {
    enum operation operation;
    uint32_t timeout_ms;     /* LOCK */
    bool custom_storage;     /* CHECKPOINT, RESTORE */
    uint32_t retained;       /* GPUs of which the caller has the context */
    uint32_t pair_count;     /* RESTORE */
    struct gpu_pair pairs[MAX_GPUS];
    uint32_t number;         /* COMPLETE, CANCEL: of which operation */
};

struct answer {
    CUresult result;
    int value;
    uint32_t number;         /* of the operation that has begun */
    uint32_t region_count;
    struct {
        unsigned gpu;
        int file;
        uint64_t size;
    } regions[MAX_GPUS];
};

struct sockaddr_un;
unsigned socket_address(int pid, struct sockaddr_un *address);

#endif
