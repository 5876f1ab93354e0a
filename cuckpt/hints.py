"""What a driver error most likely means: a table and a look at /proc.

Never calls the driver: an explanation must not change or wait for a target.
"""

import os

from cuckpt.proc import read_status


def explain(
    text: str, status: int, call: str | None = None, pid: int | None = None
) -> str:
    """Return the text of an error with its call, process and likely cause.

    Parameters
    ----------
    text : str
        Name and number of the result, with which the explanation begins.
    status : int
        The ``CUresult``.
    call : str, optional
        Name of the C function.
    pid : int, optional
        The process that the call was about.

    Returns
    -------
    str
        One line.
    """
    if call is None:
        return text
    where = f"{call} for pid {pid}" if pid is not None else call
    cause = _cause(status, call, pid)
    return f"{text} from {where}" + (f": {cause}" if cause else "")


def _cause(status: int, call: str, pid: int | None) -> str | None:
    if pid is not None and status in _ABOUT_THE_PROCESS:
        return _ABOUT_THE_PROCESS[status](call, pid)
    return _TABLE.get((status, call)) or _TABLE.get((status, None))


def _not_initialized(call: str, pid: int) -> str:
    if pid == os.getpid():
        return "this process has not called cuInit; call init(0) first"
    status = read_status(pid)
    if status is None:
        return _unseen(pid)
    if status["State"].startswith("Z"):
        return f"process {pid} is a zombie: it has ended"
    return (
        f"process {pid} has no CUDA state: it has not called cuInit, or uses the "
        "GPU for graphics or NVML only" + _init_note(call)
    )


def _init_note(call: str) -> str:
    if call == _CHECKPOINT:
        return "; with custom storage, this process must have called init(0), too"
    if call == _RESTORE:
        return (
            "; with custom storage, or if the GPU is not in persistence mode, this "
            "process must have called init(0), too"
        )
    return ""


def _operating_system(call: str, pid: int) -> str:
    if pid <= 0:
        return "a process id is a positive number"
    status = read_status(pid)
    if status is None:
        return _unseen(pid)
    owner = int(status["Uid"].split()[0])
    if os.geteuid() not in (0, owner):
        return (
            f"process {pid} belongs to uid {owner} and this one runs as uid "
            f"{os.geteuid()}: run as that user or with CAP_SYS_PTRACE"
        )
    if os.geteuid() != 0 and _ptrace_scope() > 0:
        return (
            f"access to process {pid} may be refused by kernel.yama.ptrace_scope = "
            f"{_ptrace_scope()}: run with CAP_SYS_PTRACE or set it to 0"
        )
    return (
        f"process {pid} ended during the call, has imported CUDA IPC memory "
        "(cuIpcOpenMemHandle), or was lost in an earlier failed restore"
        + _thread_note(pid, status)
        + _stopped_note(status)
    )


def _unseen(pid: int) -> str:
    return (
        f"there is no process {pid} to be seen: it has ended, lives in another pid "
        "namespace, or is hidden (mount option hidepid of /proc)"
    )


def _thread_note(pid: int, status: dict[str, str]) -> str:
    owner = status["Tgid"]
    return f"; {pid} is a thread of process {owner}" if owner != str(pid) else ""


def _stopped_note(status: dict[str, str]) -> str:
    stopped = status["State"].startswith(("T", "t"))
    return "; it is stopped now, and calls wait until it continues" if stopped else ""


def _ptrace_scope() -> int:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


_ABOUT_THE_PROCESS = {3: _not_initialized, 304: _operating_system}

_LOCK = "cuCheckpointProcessLock"
_CHECKPOINT = "cuCheckpointProcessCheckpoint"
_RESTORE = "cuCheckpointProcessRestore"
_UNLOCK = "cuCheckpointProcessUnlock"
_COMPLETE = "cuCheckpointOperationComplete"

_ASK = "checkpoint_process_get_state tells its state"
_RESERVED = "a reserved field of the arguments is not zero"

# (status, call): cause; call None stands for every call.
_TABLE: dict[tuple[int, str | None], str] = {
    (1, _LOCK): _RESERVED,
    (1, _UNLOCK): _RESERVED,
    (1, _CHECKPOINT): (
        f"{_RESERVED}, or custom storage was asked of a driver older than CUDA 13.4"
    ),
    (1, _RESTORE): (
        "a UUID in gpu_pairs names no GPU or one of another kind, stands there twice, "
        "or a GPU is missing; or custom storage was asked of a driver older than CUDA "
        "13.4; or checkpoint used custom storage and restore does not; or "
        f"{_RESERVED}; or the process has imported CUDA IPC memory, which cannot be "
        "restored"
    ),
    (1, _COMPLETE): "no operation with this handle waits for completion",
    (2, _RESTORE): (
        "too little free memory on the GPU to restore onto; with driver 580 the "
        "process cannot be restored any more after this"
    ),
    (2, _CHECKPOINT): "too little host memory, or the GPU is in MIG mode",
    (3, None): "cuInit has not been called in this process; call init(0) first",
    (34, None): (
        "this libcuda is the stub that programs are linked against; use the one that "
        "the NVIDIA driver installs"
    ),
    (46, None): "the GPU is in use by another process or in exclusive mode",
    (36, None): "the NVIDIA kernel module is older than this libcuda",
    (100, None): (
        "no GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
        "`cuckpt simulate`"
    ),
    (201, _CHECKPOINT): (
        "custom storage needs init(0) and a retained primary context of every GPU "
        "that the process uses, or is to use (device_primary_ctx_retain)"
    ),
    (401, _LOCK): f"lock needs a RUNNING process; {_ASK}",
    (401, _CHECKPOINT): (
        "checkpoint needs a LOCKED process, and somebody else may have "
        f"checkpointed this one; {_ASK}"
    ),
    (401, _RESTORE): (
        "restore needs a CHECKPOINTED process: complete the operation of a "
        f"CHECKPOINTING one; {_ASK}"
    ),
    (401, _UNLOCK): (
        "unlock needs a LOCKED process: restore a CHECKPOINTED one, complete the "
        f"operation of a RESTORING one; {_ASK}"
    ),
    (401, _COMPLETE): "the operation is already complete",
    (600, _LOCK): (
        "the process still had GPU work running or queued when the time was over; "
        "it is RUNNING as before"
    ),
    (801, _CHECKPOINT): (
        "the process uses something that cannot be checkpointed, such as managed "
        "memory, or the platform is not supported; the call has changed nothing"
    ),
    (802, None): "the system is not ready for CUDA yet; is nvidia-fabricmanager up?",
    (803, None): "libcuda and the NVIDIA kernel module are of different versions",
    (999, None): "the driver gives no reason; the kernel's log (dmesg) may",
    (900, _COMPLETE): "a stream of the operation is capturing a graph",
}
_TABLE[201, _RESTORE] = _TABLE[201, _CHECKPOINT]
