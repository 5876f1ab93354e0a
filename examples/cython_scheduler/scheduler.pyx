"""Suspends and resumes many targets at once, without the GIL."""

from cython.parallel cimport prange
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from cuckpt.driver cimport (
    CUDA_ERROR_NOT_FOUND,
    CUDA_SUCCESS,
    CUcheckpointLockArgs,
    CUresult,
    cuCheckpointProcessCheckpoint,
    cuCheckpointProcessLock,
    cuCheckpointProcessRestore,
    cuCheckpointProcessUnlock,
)

from cuckpt.errors import driver_error


# What is to be done to one target, and how that went. Each thread has its own.
cdef struct Job:
    int pid
    const char *call  # the last one, which gave the result
    CUresult result


cdef CUresult suspend_one(
    Job *job, unsigned int timeout_ms
) except ?CUDA_ERROR_NOT_FOUND nogil:
    cdef CUcheckpointLockArgs args
    memset(&args, 0, sizeof(args))
    args.timeoutMs = timeout_ms
    job.call = "cuCheckpointProcessLock"
    job.result = cuCheckpointProcessLock(job.pid, &args)
    if job.result == CUDA_SUCCESS:
        job.call = "cuCheckpointProcessCheckpoint"
        job.result = cuCheckpointProcessCheckpoint(job.pid, NULL)
        if job.result != CUDA_SUCCESS:
            # Else it would wait for the GPU for ever. Why it could not be
            # suspended is what the caller wants to know, not how this goes.
            cuCheckpointProcessUnlock(job.pid, NULL)
    return job.result


cdef CUresult resume_one(Job *job) except ?CUDA_ERROR_NOT_FOUND nogil:
    job.call = "cuCheckpointProcessRestore"
    job.result = cuCheckpointProcessRestore(job.pid, NULL)
    if job.result == CUDA_SUCCESS:
        job.call = "cuCheckpointProcessUnlock"
        job.result = cuCheckpointProcessUnlock(job.pid, NULL)
    return job.result


cdef int at_once(tuple pids, bint suspends, unsigned int timeout_ms) except -1:
    cdef int count = len(pids), i
    cdef list errors = []
    cdef Job *jobs = <Job *> calloc(count, sizeof(Job))
    if jobs == NULL and count:
        raise MemoryError
    try:
        for i in range(count):
            jobs[i].pid = pids[i]
        # A thread for each target: they do not compute, they wait for the driver.
        for i in prange(count, nogil=True, num_threads=count):
            if suspends:
                suspend_one(&jobs[i], timeout_ms)
            else:
                resume_one(&jobs[i])
        for i in range(count):
            if jobs[i].result != CUDA_SUCCESS:
                errors.append(driver_error(
                    <int> jobs[i].result, jobs[i].call.decode(), jobs[i].pid))
    finally:
        free(jobs)
    if errors:
        verb = "suspended" if suspends else "resumed"
        raise ExceptionGroup(f"not all targets were {verb}", errors)
    return 0


def suspend(*pids, unsigned int timeout_ms=10_000):
    """Take targets off the GPU, all at once.

    Parameters
    ----------
    *pids : int
        The targets.
    timeout_ms : int
        How long to wait for the GPU work of each; 0 for as long as it takes.

    Raises
    ------
    ExceptionGroup
        Of a DriverError for each target that could not be suspended and goes
        on running. The others are suspended.
    """
    at_once(pids, True, timeout_ms)


def resume(*pids):
    """Bring suspended targets back onto the GPU, all at once.

    Parameters
    ----------
    *pids : int
        The targets.

    Raises
    ------
    ExceptionGroup
        Of a DriverError for each target that could not be resumed. The others
        run.
    """
    at_once(pids, False, 0)
