"""The command line of NVIDIA's cuda-checkpoint, which CRIU and others call.

One driver call for each action, 0 or 1 as exit status, and the messages that callers
look for. It must work without environment, home and standard input, so nothing is
printed that was not asked for, and little is imported.
"""

import os
import signal
import sys

from cuckpt import driver, uuids
from cuckpt.cli.getopt_long import Misuse, parse

# Whether an option takes an argument.
_OPTIONS = {
    "get-state": False,
    "get-restore-tid": False,
    "action": True,
    "toggle": False,
    "pid": True,
    "timeout": True,
    "device-map": True,
    "help": False,
}
_LETTERS = {"p": "pid", "t": "timeout", "d": "device-map", "h": "help"}
_ACTIONS = ("lock", "checkpoint", "restore", "unlock")

_USAGE = """\
Usage: {program} OPERATION --pid PID [OPTION]...

Suspends and resumes the CUDA state of a process. OPERATION is one of

  --get-state        print running, locked, checkpointed, failed, checkpointing
                     or restoring
  --get-restore-tid  print the thread id that the driver restores it with
  --action ACTION    lock, checkpoint, restore or unlock
  --toggle           lock and checkpoint it if it is running, restore and unlock
                     it if it is checkpointed
  -h, --help         print this

and OPTION of

  -p, --pid PID
  -t, --timeout MS   of a lock: give up after so many milliseconds; 0: never
  -d, --device-map OLD=NEW[,OLD=NEW]...
                     of a restore: UUIDs of all GPUs, and of those to restore onto

Exits 0 on success, else 1.
"""

_FAILURES = {
    "get-state": 'Error getting process state for process ID {pid}: "{why}"',
    "get-restore-tid": "Could not find restore thread for process ID {pid}",
    "toggle": 'Error toggling CUDA in process ID {pid}: "{why}"',
    **{
        action: f'Could not {action} on process ID {{pid}}: "{{why}}"'
        for action in _ACTIONS
    },
}


class _Request:
    """What the arguments ask for."""

    operation = ""
    pid: int | None = None
    timeout_ms = 0
    pairs: "list[tuple[bytes, bytes]] | None" = None


class _Failure(Exception):
    """It was not done; the text says why."""


def main(arguments: "list[str]", program: str) -> int:
    """Run cuda-checkpoint's command line.

    Parameters
    ----------
    arguments : list of str
    program : str
        The name that messages begin with.

    Returns
    -------
    int
        0, or 1 if it was not done, or what it printed did not arrive.
    """
    _hold_standard_descriptors()
    if sys.warnoptions:
        import warnings

        warnings.simplefilter("ignore")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also while the driver waits
    usage = _USAGE.format(program=program)
    try:
        request = _read(arguments, program)
        text = usage if request.operation == "help" else _perform(request)
    except Misuse as error:
        _write(2, f"{error}\n{usage}")
        return 1
    except _Failure as error:
        _write(2, f"{error}\n")
        return 1
    except Exception as error:  # such as no memory
        _write(2, f"{program}: {type(error).__name__}: {error}\n")
        return 1
    return 0 if _write(1, text) else 1


def _read(arguments: "list[str]", program: str) -> _Request:
    request = _Request()
    for option, argument in parse(program, arguments, _OPTIONS, _LETTERS):
        if option == "pid":
            request.pid = _number(option, argument, (1 << 31) - 1)
        elif option == "timeout":
            request.timeout_ms = _number(option, argument, (1 << 32) - 1)
        elif option == "device-map":
            request.pairs = _pairs(argument)
        elif option == "action":
            if argument not in _ACTIONS:
                raise Misuse("Invalid process state")
            request.operation = argument
        else:
            request.operation = option
        if option == "help":
            return request
    if not request.operation:
        raise Misuse("No operation selected")
    if request.pid is None:
        raise Misuse("Missing pid to perform operation on")
    return request


def _number(name: str, text: str, most: int) -> int:
    plausible = text.isascii() and text.isdigit() and len(text) < 20
    if not plausible or int(text) > most:
        raise Misuse(f"{name} must be a non-negative integer")
    return int(text)


def _pairs(text: str) -> "list[tuple[bytes, bytes]]":
    pairs = []
    for pair in text.split(","):
        old, _, new = pair.partition("=")
        try:
            pairs.append((uuids.to_bytes(old), uuids.to_bytes(new)))
        except ValueError:
            raise Misuse("Invalid device remap") from None
    return pairs


def _perform(request: _Request) -> str:
    """Do what is asked, and return what is to be printed."""
    _initialize()
    assert request.pid is not None
    do = _PERFORMERS.get(request.operation, _act)
    try:
        return do(request.pid, request)
    except (driver.DriverError, _UnknownState) as error:
        failure = _FAILURES[request.operation]
        raise _Failure(failure.format(pid=request.pid, why=_why(error))) from None


def _initialize() -> None:
    try:
        driver.init()
        if driver.has_checkpoint():
            return
    except (driver.DriverError, driver.DynamicLibNotFoundError) as error:
        why = _why(error)
    else:
        why = "this driver has no checkpoint calls, which came with CUDA 12.8 (570)"
    raise _Failure(f'Error initializing CUDA: "{why}"')


class _UnknownState(Exception):
    """A state that came with a later driver."""


def _get_state(pid: int, _: _Request) -> str:
    state = driver.checkpoint_process_get_state(pid)
    if not isinstance(state, driver.ProcessState):
        raise _UnknownState(f"it is in state {state}, which this version does not know")
    return f"{state.name.lower()}\n"


def _get_restore_tid(pid: int, _: _Request) -> str:
    return f"{driver.checkpoint_process_get_restore_thread_id(pid)}\n"


def _act(pid: int, request: _Request) -> str:
    _call(request.operation, pid, request)
    return ""


def _toggle(pid: int, request: _Request) -> str:
    if driver.checkpoint_process_get_state(pid) == driver.ProcessState.CHECKPOINTED:
        _call("restore", pid, request)
        _call("unlock", pid, request)
        return ""
    _call("lock", pid, request)
    try:
        _call("checkpoint", pid, request)
    except driver.DriverError:
        _unlock_again(pid)
        raise
    return ""


def _unlock_again(pid: int) -> None:
    """Let it run that cannot be checkpointed: a LOCKED one is toggled no more."""
    import contextlib

    with contextlib.suppress(driver.DriverError):  # the first failure tells more
        driver.checkpoint_process_unlock(pid)


def _call(action: str, pid: int, request: _Request) -> None:
    if action == "lock":
        lock = driver.CheckpointLockArgs(timeout_ms=request.timeout_ms)
        driver.checkpoint_process_lock(pid, lock)
    elif action == "restore" and request.pairs is not None:
        restore = driver.CheckpointRestoreArgs(gpu_pairs=request.pairs)
        driver.checkpoint_process_restore(pid, restore)
    else:
        getattr(driver, f"checkpoint_process_{action}")(pid)


_PERFORMERS = {
    "get-state": _get_state,
    "get-restore-tid": _get_restore_tid,
    "toggle": _toggle,
}


def _why(error: Exception) -> str:
    """Return the driver's own text, which callers know."""
    if not isinstance(error, driver.DriverError):
        return str(error)
    import ctypes

    text = ctypes.c_char_p()
    library = ctypes.CDLL(driver.library_path())
    library.cuGetErrorString(error.status, ctypes.byref(text))
    return text.value.decode() if text.value else f"unknown error {error.status}"


def _hold_standard_descriptors() -> None:
    """Let nothing that is opened later take the place of a closed one of these.

    It is not open for what it stands for: what is written there fails as before.
    """
    for descriptor, flags in (0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # which takes the lowest that is free


def _write(descriptor: int, text: str) -> bool:
    """Write it all, or tell that this was not possible."""
    rest = text.encode(errors="surrogateescape")
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        return False
    return True
