"""Suspends and resumes a target without the GIL, through cuckpt's C functions."""

from libc.string cimport memset

from cuckpt.driver cimport (
    CU_PROCESS_STATE_RUNNING,
    CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_UNKNOWN,
    CUDA_SUCCESS,
    CUcheckpointCheckpointArgs,
    CUcheckpointCustomStorageInfo,
    CUcheckpointGpuPair,
    CUcheckpointLockArgs,
    CUcheckpointOperationHandle,
    CUcheckpointRestoreArgs,
    CUcheckpointUnlockArgs,
    CUcontext,
    CUdevice,
    CUprocessState,
    CUresult,
    CUuuid,
    cuCheckpointOperationComplete,
    cuCheckpointProcessCheckpoint,
    cuCheckpointProcessGetRestoreThreadId,
    cuCheckpointProcessGetState,
    cuCheckpointProcessLock,
    cuCheckpointProcessRestore,
    cuCheckpointProcessUnlock,
    cuDeviceGet,
    cuDeviceGetCount,
    cuDeviceGetUuid,
    cuDevicePrimaryCtxRelease,
    cuDevicePrimaryCtxRetain,
    cuDriverGetVersion,
    cuInit,
)
from cuckpt.structs cimport CheckpointGpuPair, CheckpointRestoreArgs


cdef CUresult cycle(int pid, CUuuid *uuid) except ?CUDA_ERROR_NOT_FOUND nogil:
    """Lock, checkpoint, restore onto the same GPU, unlock."""
    cdef CUcheckpointLockArgs lock
    cdef CUcheckpointCheckpointArgs checkpoint
    cdef CUcheckpointRestoreArgs restore
    cdef CUcheckpointUnlockArgs unlock
    cdef CUcheckpointGpuPair pair
    cdef CUprocessState state
    cdef CUresult result
    memset(&lock, 0, sizeof(lock))
    memset(&checkpoint, 0, sizeof(checkpoint))
    memset(&restore, 0, sizeof(restore))
    memset(&unlock, 0, sizeof(unlock))
    lock.timeoutMs = 10000
    pair.oldUuid = pair.newUuid = uuid[0]
    restore.gpuPairs = &pair
    restore.gpuPairsCount = 1
    result = cuCheckpointProcessGetState(pid, &state)
    if result != CUDA_SUCCESS:
        return result
    if state != CU_PROCESS_STATE_RUNNING:
        return CUDA_ERROR_UNKNOWN
    result = cuCheckpointProcessLock(pid, &lock)
    if result == CUDA_SUCCESS:
        result = cuCheckpointProcessCheckpoint(pid, &checkpoint)
    if result == CUDA_SUCCESS:
        result = cuCheckpointProcessRestore(pid, &restore)
    if result == CUDA_SUCCESS:
        result = cuCheckpointProcessUnlock(pid, &unlock)
    return result


def suspend_and_resume(int pid):
    """Run the whole cycle without the GIL; return the result."""
    cdef CUuuid uuid
    cdef CUdevice device = 0
    cdef CUresult result
    with nogil:
        result = cuInit(0)
        if result == CUDA_SUCCESS:
            result = cuDeviceGet(&device, 0)
        if result == CUDA_SUCCESS:
            result = cuDeviceGetUuid(&uuid, device)
        if result == CUDA_SUCCESS:
            result = cycle(pid, &uuid)
    return <int> result


def restore_with(int pid, CheckpointRestoreArgs args not None):
    """Restore with the struct of a Python object."""
    cdef CUresult result
    with nogil:
        result = cuCheckpointProcessRestore(pid, &args._ptr.restore)
    return <int> result


def old_uuid_of(CheckpointGpuPair pair not None):
    return pair._ptr.pair.oldUuid.bytes[:16]


def everything_else():
    """Call the functions that a cycle does not need; return what they say."""
    cdef int version = 0, count = 0, tid = 0
    cdef CUcontext context = NULL
    with nogil:
        cuDriverGetVersion(&version)
        cuDeviceGetCount(&count)
        cuDevicePrimaryCtxRetain(&context, 0)
        cuDevicePrimaryCtxRelease(0)
        cuCheckpointProcessGetRestoreThreadId(4711, &tid)
    return version, count, tid, context != NULL


def complete(size_t handle):
    return <int> cuCheckpointOperationComplete(
        <CUcheckpointOperationHandle> handle)


def checkpoint_into(int pid):
    """Ask for custom storage; return whether the driver answered."""
    cdef CUcheckpointCheckpointArgs args
    cdef CUcheckpointCustomStorageInfo *info = NULL
    memset(&args, 0, sizeof(args))
    args.customStorageInfo_out = &info
    cuCheckpointProcessCheckpoint(pid, &args)
    return info != NULL
