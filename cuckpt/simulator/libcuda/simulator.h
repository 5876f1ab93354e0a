/* A simulated CUDA driver: what its files share.
 *
 * machine.c, machine.h  the machine that several processes share: GPUs, their users
 * process.c   this process as a target: its gate and its restore thread
 * transition.c  what the restore thread does to the process
 * checkpoint.c  the checkpoint calls, as a caller makes them
 * fault.c     what is to go wrong, and at which of these calls
 * device.c    devices
 * context.c   contexts, and the current one of each thread
 * memory.c    device memory: addresses and allocation
 * pool.c      memory pools: allocation in the order of a stream
 * host.c      pinned host memory
 * pointer.c   what an address is
 * copy.c      copies and fills
 * ipc.c       device memory of other processes
 * queue.c     streams as queues of work
 * stream.c    streams, as an API
 * capture.c   stream capture
 * event.c     events
 * kernel.c    the one kernel there is
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
#include <sys/types.h>

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
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
};

enum state { RUNNING, LOCKED, CHECKPOINTED, FAILED, CHECKPOINTING, RESTORING };

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct pool *CUmemoryPool;

/* process.c */

struct self {
    atomic_int initialized;
    atomic_bool ending;           /* it leaves the machine; nobody gets an answer */
    atomic_int state;
    atomic_int calls;             /* API calls under way */
    atomic_int pending;           /* pieces of work in streams */
    atomic_int managed;           /* allocations of managed memory */
    atomic_int imported;          /* allocations of other processes */
    atomic_int exported;          /* handles to its own, for others */
    atomic_int contexts[MAX_GPUS]; /* how many on each device */
    atomic_uint machines;         /* how many this process has left */
    struct slot *slot;
    unsigned device_count;        /* as far as CUDA_VISIBLE_DEVICES shows them */
    unsigned gpu_of_device[MAX_GPUS];
};

extern struct self self;

CUresult start_process(void);
void end_process(void);
void leave(const int *entered);
int enter(void);
void set_state(enum state state);

/* At the head of an API call: wait while this process is locked. */
#define ENTER                                                            \
    __attribute__((cleanup(leave))) const int entered = enter();         \
    if (entered != SUCCESS)                                              \
        return entered

/* Waiting, without a lock: whoever changes what others wait for rings the bell.
 * Read it, look whether to wait, and then wait for the next ring. */
int bell(void);
void ring_bell(void);
void wait_for_ring(int since, uint64_t until_ns); /* UINT64_MAX: for ever */
uint64_t now_ns(void);

/* transition.c */

struct request;
struct answer;

void carry_out(const struct request *request, struct answer *answer);
void lose_process(void);
void forget_transitions(void);

/* memory.c */

struct allocation {
    uint64_t first, chunks;
    size_t size; /* as it was asked for */
    CUcontext context; /* NULL: of a pool, which belongs to none */
    bool managed;
};

/* Device memory of one GPU: a file, and addresses that stand for it. */
struct arena {
    char *base;
    uint64_t size;   /* of the range of addresses */
    uint64_t extent; /* of the file, up to the last allocation's end */
    uint64_t allocated; /* bytes of it that are */
    int file;
    struct allocation **of_chunk; /* NULL: of another process, in one piece */
    atomic_int users; /* copies under way */
    off_t file_offset;
    unsigned gpu;
    struct arena *next;
};

/* What an address stands for; of ordinary host memory, `arena` is NULL. */
struct place {
    struct arena *arena;
    char *host;
    off_t offset;
};

enum { CHUNK = 2 << 20 };

struct arena *own_arena(CUdevice device);
CUresult make_arenas(void);
void drop_arenas(void);
struct arena *map_foreign(const char *path, uint64_t size);
void unmap_foreign(struct arena *arena);
CUresult allocate(CUdevice device, CUcontext context, size_t size, bool managed,
                  CUdeviceptr *pointer);
CUresult release(CUdeviceptr pointer);
void release_all_of(CUcontext context);
bool describe_allocation(CUdeviceptr pointer, CUdeviceptr *base, CUdevice *device,
                         struct allocation *allocation);
bool describe_foreign(CUdeviceptr pointer, CUdeviceptr *base, size_t *size,
                      unsigned *gpu);
bool take_place(CUdeviceptr pointer, size_t size, struct place *place);
void leave_place(const struct place *place);

/* pool.c */

CUmemoryPool pool_of(CUdeviceptr pointer);
bool leave_pool(CUdeviceptr pointer); /* true: that was all, it was on the host */
void forget_pools(void);

/* host.c */

CUresult allocate_pinned(void **pointer, size_t size, unsigned flags);
bool free_pinned(void *pointer);
bool is_pinned(CUdeviceptr pointer, size_t size);
bool describe_pinned(CUdeviceptr pointer, CUdeviceptr *base, size_t *size,
                     unsigned *flags);
void forget_pinned(void);

/* ipc.c */

void close_imports(void);

/* context.c */

CUresult need_context(CUcontext *context);
CUresult check_context(CUcontext context);
CUresult fail_context(CUcontext context, CUresult result);
CUcontext primary_context(CUdevice device);
void reset_contexts(void);
uint32_t retained_gpus(void);
CUdevice device_of(CUcontext context);
/* device.c */

CUresult valid_device(CUdevice device);
CUdevice device_with(unsigned gpu);
unsigned visible_gpus(unsigned gpus[MAX_GPUS]);

/* queue.c */

/* A piece of work in a stream. */
struct work {
    CUresult (*run)(const struct work *work); /* NULL: it only takes time */
    uint64_t duration_ns;
    bool lingers;      /* it is not done before somebody waits for it */
    uint64_t after, after_number; /* not before that one of another stream */
    CUevent event;     /* it is a record of this one */
    CUdeviceptr to, from;
    bool to_device, from_device;
    size_t size;
    unsigned char pattern[4]; /* of a fill */
    size_t width;             /* of the pattern */
    void *staged;             /* copied from here rather, and freed */
    uint64_t number, added_at, started_at; /* kept by the queue */
    struct work *next;
};

enum capture_mode { CAPTURE_GLOBAL, CAPTURE_OF_THREAD, CAPTURE_RELAXED };
enum capture { NO_CAPTURE, CAPTURING, INVALIDATED };

struct stream {
    uint64_t id;
    CUcontext context;
    unsigned flags;
    int priority;
    enum capture capture;
    enum capture_mode capture_mode;
    int capturing_thread;
    uint64_t capture_origin; /* the stream with which the capture began */
    bool is_default, is_destroyed, has_thread;
    uint64_t added, done, wanted; /* pieces of work: how many; 1 to `wanted` hurry */
    struct work *first, *last;
    struct stream *next;
};

enum { NON_BLOCKING = 1 };

CUstream all_streams(void); /* locked; each leads to the next */
CUstream lock_streams(void);
CUresult make_stream(CUcontext context, unsigned flags, int priority,
                     CUstream *stream);
CUresult destroy_stream(CUstream stream);
void destroy_streams_of(CUcontext context);
void forget_streams(void);
CUresult add_work(CUstream handle, const struct work *work);
CUresult add_to(CUstream stream, const struct work *work); /* locked */
CUresult wait_for_stream(CUstream handle);
CUresult wait_for_context(CUcontext context);
void wait_for_everything(void);
CUresult wait_for_blocking_streams(CUcontext context);
CUresult wait_for_offered_stream(uint64_t id);
void destroy_offered_stream(uint64_t id);
void wait_for_work(uint64_t stream, uint64_t number);
bool is_done(uint64_t stream, uint64_t number);
CUresult device_of_stream(CUstream handle, CUdevice *device);
/* With the streams locked: the stream of a handle, or NULL. That of a context that
 * has failed is no usable one. */
CUstream lock_stream(CUstream handle, CUresult *problem);
CUstream lock_usable_stream(CUstream handle, CUresult *problem);
void unlock_streams(void);

/* capture.c */

CUresult refuse_capture(CUstream streams, CUstream stream);
CUresult refuse_implicit_capture(CUstream streams, CUcontext context);
CUresult refuse_while_capturing(CUcontext context, bool relaxed_too);
bool is_capturing(CUstream handle);
void join_capture(CUstream streams, CUstream stream, uint64_t origin);
void spoil_capture(uint64_t origin);

/* event.c */

void forget_events(void);
void happen(CUevent event);

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
    bool initialized;        /* RESTORE: the caller has called cuInit */
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
