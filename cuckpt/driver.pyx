"""The checkpoint part of the CUDA driver API, one function per driver call.

Names, arguments and errors are those of ``cuda.bindings._v2.driver``, so that
the import can be swapped. Every call runs without the GIL. An argument object
of cuckpt is copied before the call: other threads may change or drop it
meanwhile. What a view, an address or an object of another binding points to
must stay as it is until the call returns.

Notes
-----
A process id is passed to the driver as it is, any 32-bit integer: for no such
process the driver answers OperatingSystemError, for one without CUDA
NotInitializedError, and a thread id acts on the process that owns the thread.
A call about a process that is stopped (SIGSTOP) waits until it continues.

Any function raises FunctionNotFoundError if the driver is too old to have it,
and DynamicLibNotFoundError if no driver can be loaded.
"""

import sys

cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.number cimport PyIndex_Check
from libc.string cimport memcpy

from cuckpt._convert cimport as_address, as_int32, as_uint32
from cuckpt._driver cimport (
    CUDA_ERROR_NOT_FOUND,
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
)
from cuckpt._driver cimport has_function, path_of_library
from cuckpt.structs cimport (
    CheckpointCheckpointArgs,
    CheckpointCustomStorageInfo,
    CheckpointLockArgs,
    CheckpointRestoreArgs,
    CheckpointUnlockArgs,
    CustomStorageArgs,
    Operation,
    Pointees,
    Struct,
    Uuid,
    forget_operation,
    keep_answer,
    known_operation,
)

from cuckpt import errors, structs
from cuckpt.errors import ProcessState, driver_error


cdef extern from "Python.h":
    bint PyObject_TypeCheck(object instance, type cls)


__all__ = errors.__all__ + structs.__all__ + [
    "checkpoint_operation_complete",
    "checkpoint_process_checkpoint",
    "checkpoint_process_get_restore_thread_id",
    "checkpoint_process_get_state",
    "checkpoint_process_lock",
    "checkpoint_process_restore",
    "checkpoint_process_unlock",
    "device_get",
    "device_get_count",
    "device_get_uuid_v2",
    "device_primary_ctx_release_v2",
    "device_primary_ctx_retain",
    "driver_get_version",
    "has_checkpoint",
    "has_custom_storage",
    "init",
    "library_path",
]

for name in errors.__all__:
    globals()[name] = getattr(errors, name)
for name in structs.__all__:
    globals()[name] = getattr(structs, name)
del name

cdef tuple STATES = tuple(ProcessState)


def init(flags=0):
    """Initialize the driver API in this process; again has no effect.

    Lock, checkpoint, restore and unlock of other processes do without it,
    except that restore needs it where persistence mode is off, and custom
    storage always.

    Parameters
    ----------
    flags : int
        Must be 0.

    Raises
    ------
    DriverError
        Such as NoDeviceError.

    See Also
    --------
    cuInit : the C function.
    """
    cdef unsigned int c_flags = as_uint32(flags, "flags")
    cdef CUresult result
    with nogil:
        result = cuInit(c_flags)
    check(result, "cuInit")


def driver_get_version():
    """Return the CUDA version that the driver supports.

    Needs no `init`.

    Returns
    -------
    int
        1000 x major + 10 x minor: 13040 is CUDA 13.4.

    See Also
    --------
    cuDriverGetVersion : the C function.
    """
    cdef int version = 0
    cdef CUresult result
    with nogil:
        result = cuDriverGetVersion(&version)
    check(result, "cuDriverGetVersion")
    return version


def device_get_count():
    """Return the number of GPUs that this process can use; needs `init`.

    Returns
    -------
    int
        0 or more.

    Raises
    ------
    NotInitializedError
        If `init` has not been called.

    See Also
    --------
    cuDeviceGetCount : the C function.
    """
    cdef int count = 0
    cdef CUresult result
    with nogil:
        result = cuDeviceGetCount(&count)
    check(result, "cuDeviceGetCount")
    return count


def device_get(ordinal):
    """Return the handle of a GPU; needs `init`.

    Parameters
    ----------
    ordinal : int
        From 0 to ``device_get_count() - 1``.

    Returns
    -------
    int
        What the other device functions take as `dev`.

    Raises
    ------
    InvalidDeviceError
        If there is no such GPU.

    See Also
    --------
    cuDeviceGet : the C function.
    """
    cdef int c_ordinal = as_int32(ordinal, "ordinal")
    cdef CUdevice device = 0
    cdef CUresult result
    with nogil:
        result = cuDeviceGet(&device, c_ordinal)
    check(result, "cuDeviceGet")
    return device


def device_get_uuid_v2(dev):
    """Return the UUID of a GPU; needs `init`.

    Parameters
    ----------
    dev : int
        From `device_get`.

    Returns
    -------
    cuckpt.structs.Uuid
        Of the MIG instance if the GPU is in MIG mode.

    See Also
    --------
    cuDeviceGetUuid_v2 : the C function.
    """
    cdef CUdevice device = as_int32(dev, "dev")
    cdef Uuid uuid = Uuid.__new__(Uuid)
    cdef CUresult result
    with nogil:
        result = cuDeviceGetUuid(&uuid._value.uuid, device)
    check(result, "cuDeviceGetUuid_v2")
    return uuid


def device_primary_ctx_retain(dev):
    """Retain the primary context of a GPU and return it; needs `init`.

    A custom-storage call needs the primary context of every GPU that the
    target uses to be retained. Release each with
    `device_primary_ctx_release_v2`.

    Parameters
    ----------
    dev : int
        From `device_get`.

    Returns
    -------
    int
        The ``CUcontext``.

    Raises
    ------
    OutOfMemoryError
        If the GPU has no memory for a context.

    See Also
    --------
    cuDevicePrimaryCtxRetain : the C function.
    """
    cdef CUdevice device = as_int32(dev, "dev")
    cdef CUcontext context = NULL
    cdef CUresult result
    with nogil:
        result = cuDevicePrimaryCtxRetain(&context, device)
    check(result, "cuDevicePrimaryCtxRetain")
    return <size_t> context


def device_primary_ctx_release_v2(dev):
    """Release the primary context of a GPU; the last release destroys it.

    Parameters
    ----------
    dev : int
        From `device_get`.

    Raises
    ------
    InvalidContextError
        If it has not been retained.

    See Also
    --------
    cuDevicePrimaryCtxRelease_v2 : the C function.
    """
    cdef CUdevice device = as_int32(dev, "dev")
    cdef CUresult result
    with nogil:
        result = cuDevicePrimaryCtxRelease(device)
    check(result, "cuDevicePrimaryCtxRelease_v2")


def checkpoint_process_get_state(pid):
    """Return the state of a CUDA process.

    Waits while somebody checkpoints or restores the process.

    Parameters
    ----------
    pid : int
        The process.

    Returns
    -------
    ProcessState
        An int; a number that this version does not know is a plain int.

    Raises
    ------
    NotInitializedError
        If the process has no CUDA state.
    OperatingSystemError
        If there is no such process, or it may not be asked about.

    See Also
    --------
    cuCheckpointProcessGetState : the C function.
    """
    cdef int c_pid = as_int32(pid, "pid")
    cdef CUprocessState state = <CUprocessState> 0
    cdef CUresult result
    with nogil:
        result = cuCheckpointProcessGetState(c_pid, &state)
    check_process(result, "cuCheckpointProcessGetState", c_pid)
    return STATES[<int> state] if 0 <= <int> state < 6 else <int> state


def checkpoint_process_get_restore_thread_id(pid):
    """Return the thread of a CUDA process that carries out its restore.

    Whoever stops the threads of a process (CRIU) must let this one run during
    checkpoint and restore. Works in every state.

    Parameters
    ----------
    pid : int
        The process.

    Returns
    -------
    int
        Thread id.

    Raises
    ------
    NotInitializedError
        If the process has no CUDA state.
    OperatingSystemError
        If there is no such process, or it may not be asked about.

    See Also
    --------
    cuCheckpointProcessGetRestoreThreadId : the C function.
    """
    cdef int c_pid = as_int32(pid, "pid")
    cdef int tid = 0
    cdef CUresult result
    with nogil:
        result = cuCheckpointProcessGetRestoreThreadId(c_pid, &tid)
    check_process(result, "cuCheckpointProcessGetRestoreThreadId", c_pid)
    return tid


def checkpoint_process_lock(pid, args=None):
    """Wait for a process's GPU work to finish and block its CUDA calls.

    Requires a RUNNING process and leaves it LOCKED: its CUDA calls wait until
    it is unlocked.

    Parameters
    ----------
    pid : int
        The process.
    args : CheckpointLockArgs or int, optional
        Its `timeout_ms` limits the wait; without one, or with 0, the call
        waits as long as GPU work runs. An int is the address of a C struct;
        the struct objects of cuda.bindings are taken as well.

    Raises
    ------
    IllegalStateError
        If the process is not RUNNING.
    NotReadyError
        If the time is over; the process is RUNNING as before.
    NotInitializedError, OperatingSystemError
        As in `checkpoint_process_get_state`.

    See Also
    --------
    cuCheckpointProcessLock : the C function.
    """
    cdef int c_pid = as_int32(pid, "pid")
    cdef CUcheckpointLockArgs c_args
    cdef CUcheckpointLockArgs *p_args = NULL
    cdef CUresult result
    if snapshot(args, CheckpointLockArgs, &c_args):
        p_args = &c_args
    with nogil:
        result = cuCheckpointProcessLock(c_pid, p_args)
    check_process(result, "cuCheckpointProcessLock", c_pid)


def checkpoint_process_checkpoint(pid, args=None):
    """Take the GPU memory of a process off its GPUs and release them.

    Requires a LOCKED process and leaves it CHECKPOINTED, its GPU memory in
    host memory of its own. With ``custom_storage=True`` it leaves it
    CHECKPOINTING: copy what `args.custom_storage_info` names, then call
    `checkpoint_operation_complete`. There is no way back other than that.

    Parameters
    ----------
    pid : int
        The process; with custom storage not the caller.
    args : CheckpointCheckpointArgs or int, optional
        Whether to use custom storage. An int is the address of a C struct;
        the struct objects of cuda.bindings are taken as well.

    Raises
    ------
    IllegalStateError
        If the process is not LOCKED.
    NotSupportedError
        If it uses what cannot be checkpointed, such as managed memory; it is
        still LOCKED.
    InvalidContextError
        With custom storage, if a primary context is not retained.
    InvalidValueError
        With custom storage, if the driver is older than CUDA 13.4.
    RuntimeError
        If `args` with custom storage serves another call at the moment.
    NotInitializedError, OperatingSystemError
        As in `checkpoint_process_get_state`.

    See Also
    --------
    cuCheckpointProcessCheckpoint : the C function.
    """
    cdef int c_pid = as_int32(pid, "pid")
    cdef CUresult result
    if args is not None:
        return checkpoint_with(args, c_pid)
    with nogil:
        result = cuCheckpointProcessCheckpoint(c_pid, NULL)
    check_process(result, "cuCheckpointProcessCheckpoint", c_pid)


def checkpoint_process_restore(pid, args=None):
    """Bring the GPU memory of a checkpointed process back onto GPUs.

    Requires a CHECKPOINTED process and leaves it LOCKED: unlock it. With
    ``custom_storage=True`` it leaves it RESTORING: fill what
    `args.custom_storage_info` names, then call
    `checkpoint_operation_complete`. Needs `init` where persistence mode is
    off.

    Parameters
    ----------
    pid : int
        The process; with custom storage not the caller.
    args : CheckpointRestoreArgs or int, optional
        Which GPUs to restore onto, and whether to use custom storage. An int
        is the address of a C struct; the struct objects of cuda.bindings are
        taken as well.

    Raises
    ------
    ValueError
        If `args` counts more pairs than it has.
    IllegalStateError
        If the process is not CHECKPOINTED.
    InvalidValueError
        If a GPU pair is wrong; the process is still CHECKPOINTED. With custom
        storage, if the driver is older than CUDA 13.4.
    OutOfMemoryError
        If a GPU has too little free memory. On driver 580 the process is lost
        then: make sure of the memory before.
    InvalidContextError
        With custom storage, if a primary context is not retained.
    RuntimeError
        If `args` with custom storage serves another call at the moment.
    NotInitializedError, OperatingSystemError
        As in `checkpoint_process_get_state`.

    See Also
    --------
    cuCheckpointProcessRestore : the C function.
    """
    cdef int c_pid = as_int32(pid, "pid")
    cdef CUresult result
    if args is not None:
        return restore_with(args, c_pid)
    with nogil:
        result = cuCheckpointProcessRestore(c_pid, NULL)
    check_process(result, "cuCheckpointProcessRestore", c_pid)


def checkpoint_process_unlock(pid, args=None):
    """Let a locked process make CUDA calls again.

    Requires a LOCKED process and leaves it RUNNING.

    Parameters
    ----------
    pid : int
        The process.
    args : CheckpointUnlockArgs or int, optional
        Holds nothing yet. An int is the address of a C struct; the struct
        objects of cuda.bindings are taken as well.

    Raises
    ------
    IllegalStateError
        If the process is not LOCKED.
    NotInitializedError, OperatingSystemError
        As in `checkpoint_process_get_state`.

    See Also
    --------
    cuCheckpointProcessUnlock : the C function.
    """
    cdef int c_pid = as_int32(pid, "pid")
    cdef CUcheckpointUnlockArgs c_args
    cdef CUcheckpointUnlockArgs *p_args = NULL
    cdef CUresult result
    if snapshot(args, CheckpointUnlockArgs, &c_args):
        p_args = &c_args
    with nogil:
        result = cuCheckpointProcessUnlock(c_pid, p_args)
    check_process(result, "cuCheckpointProcessUnlock", c_pid)


def checkpoint_operation_complete(handle):
    """Complete a custom-storage checkpoint or restore.

    Waits for the driver's streams and unmaps the GPU memory. Requires a
    CHECKPOINTING process and leaves it CHECKPOINTED, or a RESTORING one and
    leaves it LOCKED. Any attempt ends the regions of the operation; after an
    error the call may be repeated.

    Parameters
    ----------
    handle : int, CheckpointCustomStorageInfo or custom-storage args
        The operation: its handle, the info that holds it, or the args object
        that the call was made with.

    Raises
    ------
    ValueError
        If `handle` is null, or info or args hold no operation, or one that has
        been completed.
    RuntimeError
        If another thread is completing the operation.
    IllegalStateError
        If the operation cannot be completed.
    StreamCaptureUnsupportedError
        If a stream of the operation is capturing.
    FunctionNotFoundError
        If the driver is older than CUDA 13.4.

    See Also
    --------
    cuCheckpointOperationComplete : the C function.
    """
    cdef CUcheckpointOperationHandle c_handle = NULL
    cdef CUresult result
    cdef Operation operation = find_operation(handle, &c_handle)
    if operation is not None:
        return complete_known(operation, c_handle)
    with nogil:
        result = cuCheckpointOperationComplete(c_handle)
    check(result, "cuCheckpointOperationComplete")


def library_path():
    """Return the file of the driver in use; loads the driver if need be.

    Returns
    -------
    str
        What ``CUCKPT_LIBCUDA`` names, or where the system's ``libcuda.so.1``
        was found.

    Raises
    ------
    DynamicLibNotFoundError
        If no driver can be loaded.
    """
    return path_of_library()


def has_checkpoint():
    """Tell whether the driver can checkpoint processes (CUDA 12.8 or later).

    Returns
    -------
    bool
        Whether it has the process functions.

    Raises
    ------
    DynamicLibNotFoundError
        If no driver can be loaded.

    See Also
    --------
    cuCheckpointProcessGetState : the function whose presence decides.
    """
    return has_function(b"cuCheckpointProcessGetState", 12080)


def has_custom_storage():
    """Tell whether the driver offers custom storage (CUDA 13.4 or later).

    Returns
    -------
    bool
        False also when the driver is older than the checkpoint API.

    Raises
    ------
    DynamicLibNotFoundError
        If no driver can be loaded.

    See Also
    --------
    cuCheckpointOperationComplete : the function whose presence decides.
    """
    return has_function(b"cuCheckpointOperationComplete", 13040)


def __getattr__(name):
    if name in structs._DTYPES:
        return getattr(structs, name)  # made when asked for
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *structs._DTYPES])


cdef inline int check(CUresult result, str call) except -1:
    if result != CUDA_SUCCESS:
        raise driver_error(<int> result, call)
    return 0


cdef inline int check_process(CUresult result, str call, int pid) except -1:
    if result != CUDA_SUCCESS:
        raise driver_error(<int> result, call, pid)
    return 0


cdef inline bint snapshot(object args, type cls, void *copy) except -1:
    """Copy the 64 bytes of an argument struct; tell whether there is one."""
    cdef void *address
    if args is None:
        return False
    if PyObject_TypeCheck(args, cls):
        address = (<Struct> args)._ptr
    else:
        address = foreign_address(args, cls)
        if address == NULL:
            return False
    memcpy(copy, address, 64)
    return True


cdef void *foreign_address(object args, type cls) except? NULL:
    """Return the address that an int or an object of cuda.bindings stands for."""
    v2 = sys.modules.get("cuda.bindings._v2.driver")
    v1 = sys.modules.get("cuda.bindings.driver")
    name = cls.__name__
    if isinstance(args, getattr(v2, name, ())):
        return as_address(int(args), "args")
    if isinstance(args, getattr(v1, f"CUc{name[1:]}", ())):
        return as_address(int(args.getPtr()), "args")
    if PyIndex_Check(args) and type(args) is not bool:
        return plausible_address(args, name)
    raise TypeError(
        f"args must be None, {name} (of cuckpt or cuda.bindings) or the "
        f"address of one, not {type(args).__name__}")


cdef void *plausible_address(object args, str name) except? NULL:
    cdef size_t address = <size_t> as_address(args, "args")
    if 0 < address < 4096:  # where Linux maps nothing: a timeout, say
        raise ValueError(
            f"args = {address} is no address of a struct; pass {name}(...)")
    return <void *> address


# A custom-storage call answers into the caller's stack frame, not into the args
# object: another thread may use the object meanwhile, and the call may fail.

cdef object checkpoint_with(object args, int pid):
    cdef CUcheckpointCheckpointArgs c_args
    cdef CUcheckpointCheckpointArgs *p_args = NULL
    cdef CUcheckpointCustomStorageInfo *cell = NULL
    cdef Pointees asker = None
    cdef CUresult result
    if snapshot(args, CheckpointCheckpointArgs, &c_args):
        p_args = &c_args
        if c_args.customStorageInfo_out != NULL:
            asker = redirect(args, &c_args.customStorageInfo_out, &cell)
    try:
        with nogil:
            result = cuCheckpointProcessCheckpoint(pid, p_args)
        check_process(result, "cuCheckpointProcessCheckpoint", pid)
        take_answer(asker, cell)
    finally:
        end_call(asker)


cdef object restore_with(object args, int pid):
    cdef CUcheckpointRestoreArgs c_args
    cdef CUcheckpointRestoreArgs *p_args = NULL
    cdef CUcheckpointCustomStorageInfo *cell = NULL
    cdef Pointees asker = None
    cdef bytes pairs = None
    cdef CUresult result
    with cython.critical_section(args):  # the pairs and where they are, together
        if snapshot(args, CheckpointRestoreArgs, &c_args):
            p_args = &c_args
            if c_args.gpuPairs != NULL and isinstance(args, CheckpointRestoreArgs):
                pairs = (<CheckpointRestoreArgs> args)._pairs_at(c_args.gpuPairs)
    if p_args != NULL:
        check_pairs(pairs, p_args)
        if c_args.customStorageInfo_out != NULL:
            asker = redirect(args, &c_args.customStorageInfo_out, &cell)
    try:
        result = restore_keeping(pairs, pid, p_args)
        check_process(result, "cuCheckpointProcessRestore", pid)
        take_answer(asker, cell)
    finally:
        end_call(asker)


cdef inline CUresult restore_keeping(
        bytes pairs, int pid, CUcheckpointRestoreArgs *args
        ) except ?CUDA_ERROR_NOT_FOUND:
    """Restore; `pairs`, the array that `args` points to, lives meanwhile."""
    with nogil:
        return cuCheckpointProcessRestore(pid, args)


cdef inline int check_pairs(
        bytes pairs, CUcheckpointRestoreArgs *args) except -1:
    """Refuse more pairs than there are: libcuda would read what is not there."""
    cdef unsigned int count = args.gpuPairsCount
    if count != 0 and args.gpuPairs == NULL:
        raise ValueError(f"gpu_pairs_count is {count}, but gpu_pairs is not set")
    if pairs is None:  # or they belong to somebody else
        return 0
    cdef Py_ssize_t owned = PyBytes_GET_SIZE(pairs) // sizeof(CUcheckpointGpuPair)
    if count > owned:
        raise ValueError(
            f"gpu_pairs_count is {count}, but gpu_pairs has {owned}")
    return 0


cdef Pointees redirect(
        object args, CUcheckpointCustomStorageInfo ***out,
        CUcheckpointCustomStorageInfo **cell):
    """Let the driver answer into `cell`, and return who will keep the answer.

    None if `args` does not keep it.
    """
    if not isinstance(args, CustomStorageArgs):
        return None
    cdef Pointees asker = (<CustomStorageArgs> args)._asker(out[0])
    if asker is not None:
        begin_call(asker)
        out[0] = cell
    return asker


cdef int begin_call(Pointees asker) except -1:
    """Let one call at a time answer here."""
    cdef CheckpointCustomStorageInfo info
    with cython.critical_section(asker):
        info = asker.info
        if asker.in_call:
            raise RuntimeError(
                "this args object serves another call at the moment; with custom "
                "storage, give each call its own")
        if info is not None and not info._operation.ended:
            raise RuntimeError(
                "these args hold an operation that waits for completion; complete "
                "it, or give this call args of its own")
        asker.in_call = True
        asker.cell = NULL
        asker.info = None
    return 0


cdef inline void end_call(Pointees asker) noexcept:
    if asker is not None:
        with cython.critical_section(asker):
            asker.in_call = False


cdef inline int take_answer(
        Pointees asker, CUcheckpointCustomStorageInfo *answer) except -1:
    if asker is not None and answer != NULL:
        keep_answer(asker, answer)
    return 0


cdef Operation find_operation(
        object handle, CUcheckpointOperationHandle *c_handle):
    """Return the operation that `handle` names; None if nobody holds its info."""
    cdef CheckpointCustomStorageInfo info = None
    cdef Operation operation
    if PyLong_CheckExact(handle):
        pass
    elif isinstance(handle, CustomStorageArgs):
        info = handle.custom_storage_info
        if info is None:
            raise ValueError(
                "these args hold no custom-storage operation: make the call with "
                "custom_storage=True first")
    elif isinstance(handle, CheckpointCustomStorageInfo):
        info = handle
    if info is not None:
        c_handle[0], operation = info._ptr.info.handle, info._operation
    elif type(handle) is bool:
        raise TypeError("handle must be an integer or an info, not bool")
    else:
        c_handle[0], operation = as_address(handle, "handle"), None
    if c_handle[0] == NULL:
        raise ValueError("handle is null: it names no operation")
    return known_operation(<size_t> c_handle[0]) if operation is None else operation


cdef object complete_known(
        Operation operation, CUcheckpointOperationHandle handle):
    cdef CUresult result
    cdef bint ended = begin_completion(operation)
    cdef bint completed = False
    try:
        with nogil:
            result = cuCheckpointOperationComplete(handle)
        ended = True
        check(result, "cuCheckpointOperationComplete")
        completed = True
        forget_operation(<size_t> handle, operation)
    finally:
        end_completion(operation, ended, completed)


cdef bint begin_completion(Operation operation) except -1:
    """Let the regions end before the driver unmaps them; tell if they had."""
    cdef bint ended
    with cython.critical_section(operation):
        if operation.completed:
            raise ValueError("this operation has been completed")
        if operation.in_call:
            raise RuntimeError("another thread is completing this operation")
        ended = operation.ended
        operation.in_call = operation.ended = True
    return ended


cdef void end_completion(
        Operation operation, bint ended, bint completed) noexcept:
    with cython.critical_section(operation):
        operation.in_call = False
        operation.ended = ended
        operation.completed = completed
