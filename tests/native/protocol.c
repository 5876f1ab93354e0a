/* The protocol of the simulated driver, with caller and target in one process.
 *
 * Built together with the driver's own files under ThreadSanitizer: no Python and
 * no lock of an interpreter makes the threads take turns. Some threads use the GPU,
 * as a target does; others suspend and resume this very process meanwhile. With a
 * pid it is the caller of custom storage instead, and with `serve` only a target.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size);
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags);
CUresult cuMemFreeHost(void *pointer);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                         CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size,
                              CUstream stream);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuCheckpointProcessGetState(int pid, int *state);
CUresult cuCheckpointProcessLock(int pid, const void *args);
CUresult cuCheckpointProcessCheckpoint(int pid, const void *args);
CUresult cuCheckpointProcessRestore(int pid, const void *args);
CUresult cuCheckpointProcessUnlock(int pid, const void *args);
CUresult cuCheckpointOperationComplete(uint64_t handle);

enum { ROUNDS = 150, SIZE = 3 << 20 };

static atomic_bool stop;

/* `call` must succeed. */
#define MUST(call)                                                       \
    do {                                                                 \
        CUresult result_of_call = (call);                                \
        if (result_of_call != SUCCESS) {                                 \
            printf("%s returned %d\n", #call, result_of_call);           \
            exit(1);                                                     \
        }                                                                \
    } while (0)

static CUcontext use_gpu(void)
{
    CUcontext context;

    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
    return context;
}

/* A target's thread */

static void check(const unsigned char *bytes, unsigned char expected)
{
    for (size_t i = 0; i < SIZE; i += 4097)
        if (bytes[i] != expected) {
            printf("found %d for %d at %zu\n", bytes[i], expected, i);
            exit(1);
        }
}

static void use_streams(unsigned char value, void *pinned)
{
    CUdeviceptr memory;
    CUstream stream, other;
    CUevent event;

    MUST(cuStreamCreate(&stream, 1));
    MUST(cuStreamCreate(&other, 0));
    MUST(cuEventCreate(&event, 0));
    MUST(cuMemAllocAsync(&memory, SIZE, stream));
    MUST(cuMemsetD8Async(memory, value, SIZE, stream));
    MUST(cuEventRecord(event, stream));
    MUST(cuStreamWaitEvent(other, event, 0));
    MUST(cuMemcpyDtoHAsync_v2(pinned, memory, SIZE, other));
    MUST(cuStreamSynchronize(other));
    check(pinned, value);
    MUST(cuEventDestroy_v2(event));
    MUST(cuStreamDestroy_v2(other));
    MUST(cuMemFreeAsync(memory, stream));
    MUST(cuStreamDestroy_v2(stream));
}

static void use_a_context(CUcontext primary)
{
    CUcontext context;
    CUdeviceptr memory;

    MUST(cuCtxCreate_v2(&context, 0, 0));
    MUST(cuMemAlloc_v2(&memory, SIZE));
    MUST(cuCtxDestroy_v2(context));
    MUST(cuCtxSetCurrent(primary));
}

static void *be_target(void *argument)
{
    CUcontext context = use_gpu();
    unsigned char value = (unsigned char)(uintptr_t)argument;
    CUdeviceptr kept;
    size_t free_bytes, total;
    void *pinned;

    MUST(cuMemHostAlloc(&pinned, SIZE, 0));
    MUST(cuMemAlloc_v2(&kept, SIZE));
    memset(pinned, value, SIZE);
    MUST(cuMemcpyHtoD_v2(kept, pinned, SIZE));
    while (!stop) {
        use_streams((unsigned char)(value + 100), pinned);
        use_a_context(context);
        MUST(cuMemGetInfo_v2(&free_bytes, &total));
        MUST(cuMemcpyDtoH_v2(pinned, kept, SIZE));
        check(pinned, value);
    }
    MUST(cuMemFree_v2(kept));
    MUST(cuMemFreeHost(pinned));
    return NULL;
}

/* Callers' threads */

static void *be_caller(void *argument)
{
    const int pid = *(int *)argument;
    unsigned done = 0;

    for (unsigned round = 0; round < ROUNDS; round++) {
        const uint64_t limit[8] = {2000};
        CUresult locked = cuCheckpointProcessLock(pid, limit);

        if (locked == ILLEGAL_STATE || locked == NOT_READY)
            continue;
        MUST(locked);
        MUST(cuCheckpointProcessCheckpoint(pid, NULL));
        MUST(cuCheckpointProcessRestore(pid, NULL));
        MUST(cuCheckpointProcessUnlock(pid, NULL));
        done++;
    }
    printf("%u suspended\n", done);
    return NULL;
}

static void *ask(void *argument)
{
    int state;

    while (!stop)
        MUST(cuCheckpointProcessGetState(*(int *)argument, &state));
    return NULL;
}

static int suspend_this_process(void)
{
    pthread_t targets[3], callers[2], asker;
    int pid = getpid();

    use_gpu();
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&targets[i], NULL, be_target, (void *)(i + 1));
    for (unsigned i = 0; i < 2; i++)
        pthread_create(&callers[i], NULL, be_caller, &pid);
    pthread_create(&asker, NULL, ask, &pid);
    for (unsigned i = 0; i < 2; i++)
        pthread_join(callers[i], NULL);
    stop = true;
    for (unsigned i = 0; i < 3; i++)
        pthread_join(targets[i], NULL);
    pthread_join(asker, NULL);
    return 0;
}

/* Custom storage, of another process */

struct region {
    CUdeviceptr pointer;
    size_t size;
    CUstream stream;
};

struct info {
    uint64_t handle;
    const struct region *regions;
    unsigned count;
};

static void move_region(const struct region *region, void *pinned)
{
    CUstream own;

    MUST(cuStreamCreate(&own, 1));
    MUST(cuMemcpyDtoHAsync_v2(pinned, region->pointer, region->size, own));
    MUST(cuStreamSynchronize(own));
    MUST(cuStreamDestroy_v2(own));
}

static int store(int pid)
{
    void *pinned;
    pthread_t asker;

    use_gpu();
    MUST(cuMemHostAlloc(&pinned, 256 << 20, 0));
    pthread_create(&asker, NULL, ask, &pid);
    for (unsigned round = 0; round < ROUNDS / 5; round++) {
        struct info *info;
        void *checkpoint_args[8] = {&info}, *restore_args[8] = {0, 0, &info};

        MUST(cuCheckpointProcessLock(pid, NULL));
        MUST(cuCheckpointProcessCheckpoint(pid, checkpoint_args));
        move_region(&info->regions[0], pinned);
        MUST(cuCheckpointOperationComplete(info->handle));
        MUST(cuCheckpointProcessRestore(pid, restore_args));
        MUST(cuMemcpyHtoD_v2(info->regions[0].pointer, pinned,
                             info->regions[0].size));
        MUST(cuCheckpointOperationComplete(info->handle));
        MUST(cuCheckpointProcessUnlock(pid, NULL));
    }
    stop = true;
    pthread_join(asker, NULL);
    MUST(cuMemFreeHost(pinned));
    return 0;
}

static void *until_input_ends(void *unused)
{
    while (getchar() != EOF)
        ;
    stop = true;
    return unused;
}

static int serve(void)
{
    pthread_t threads[2];

    pthread_create(&threads[0], NULL, until_input_ends, NULL);
    pthread_create(&threads[1], NULL, be_target, (void *)7);
    use_gpu();
    sleep(1); /* it has allocated by then */
    puts("ready");
    fflush(stdout);
    pthread_join(threads[1], NULL);
    pthread_join(threads[0], NULL);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return suspend_this_process();
    return strcmp(argv[1], "serve") ? store(atoi(argv[1])) : serve();
}
