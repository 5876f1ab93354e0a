"""`cuckpt ps`: the CUDA processes of this machine."""

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cuckpt import nvml, proc, remembered
from cuckpt.cli import screens
from cuckpt.group import ProcessGroup
from cuckpt.group_run import state_of
from cuckpt.process import Process
from cuckpt.process_errors import ProcessGoneError
from cuckpt.uninterrupted import in_time
from cuckpt.uuids import to_text

_PATIENCE_S = 1.0  # with a process that somebody checkpoints or restores


@dataclass
class Listed:
    """A process, as `cuckpt ps` shows it.

    Attributes
    ----------
    pid : int
    name : str
    state : str
        Also ``stopped`` and ``busy``, of one that does not answer, and ``unknown``.
    gpu_bytes : dict of str to int or None
        By the UUID of the GPU; None if NVML cannot be used.
    host_bytes : int or None
    namespace_pid : int or None
        In its own pid namespace, if that is another.
    age_s : float or None
    image : str or None
        The folder of the image that its GPU memory is in.
    """

    pid: int
    name: str
    state: str
    gpu_bytes: dict[str, int] | None
    host_bytes: int | None
    namespace_pid: int | None
    age_s: float | None
    image: str | None


def ps(arguments: argparse.Namespace) -> int:
    """List CUDA processes.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    if arguments.tree is None:
        group = ProcessGroup.discover()
    else:
        group = ProcessGroup.from_tree(arguments.tree)
    gpus, note = _gpus()
    found = list(_listed(group.pids, gpus))
    if arguments.json:
        processes = [vars(process) for process in found]
        screens.print_json({"processes": processes, "note": note})
        return 0
    if found:
        print(_table(found, gpus), end="")
        for process in found:
            if process.image is not None:
                print(f"{process.pid} is in the image {process.image}")
    else:
        print("There are no CUDA processes that this user may ask about.")
    if note and found:
        screens.say(screens.wrapped(f"GPU memory is not known: {note}"))
    return 0


def _gpus() -> tuple[list[nvml.GpuFacts] | None, str | None]:
    try:
        return nvml.gpus(), None
    except (ImportError, OSError) as error:
        return None, str(error)


def _listed(pids: list[int], gpus: list[nvml.GpuFacts] | None) -> Iterator[Listed]:
    up_s = _up_s()
    for pid in pids:
        status = proc.read_status(pid)
        started = proc.start_time(pid)
        if status is None or started is None or (state := _state(pid)) is None:
            continue
        yield Listed(
            pid,
            status["Name"],
            state,
            None if gpus is None else _used(pid, gpus),
            int(status["VmRSS"].split()[0]) << 10 if "VmRSS" in status else None,
            _namespace_pid(status),
            None if up_s is None else up_s - started / os.sysconf("SC_CLK_TCK"),
            _image((pid, started)) if state == "checkpointed" else None,
        )


def _image(key: tuple[int, int]) -> str | None:
    found = remembered.recall(key).get("image")
    return found[0] if found else None


def _state(pid: int) -> str | None:
    """Return its state; None if it has ended, or is no CUDA process after all."""
    try:
        state = in_time(lambda: state_of(Process(pid)), _PATIENCE_S)
    except TimeoutError:
        return "busy"
    except (ProcessGoneError, ValueError):
        return None
    if state == "ended":
        return None
    return state if " " not in state and state != "refused" else "unknown"


def _used(pid: int, gpus: list[nvml.GpuFacts]) -> dict[str, int]:
    return {
        to_text(gpu.uuid): gpu.used_bytes[pid] for gpu in gpus if pid in gpu.used_bytes
    }


def _namespace_pid(status: Mapping[str, str]) -> int | None:
    inside = status.get("NSpid", "").split()[1:]
    return int(inside[-1]) if inside else None


def _up_s() -> float | None:
    try:
        with open("/proc/uptime") as file:
            return float(file.read().split()[0])
    except (OSError, ValueError):
        return None


def _table(found: list[Listed], gpus: list[nvml.GpuFacts] | None) -> str:
    numbers = {to_text(gpu.uuid): gpu.ordinal for gpu in gpus or ()}
    columns = ["PID", "NAME", "STATE", "GPU MEMORY", "HOST", "AGE"]
    has_inner_pids = any(process.namespace_pid is not None for process in found)
    if has_inner_pids:
        columns.insert(1, "NSPID")
    rows = []
    for process in found:
        first, *more = _memory_lines(process, numbers)
        row = [
            str(process.pid),
            screens.printable(process.name),
            process.state,
            first,
            "-" if process.host_bytes is None else screens.size(process.host_bytes),
            "-" if process.age_s is None else screens.duration(process.age_s),
        ]
        if has_inner_pids:
            inner = process.namespace_pid
            row.insert(1, "-" if inner is None else str(inner))
        rows.append(row)
        at = columns.index("GPU MEMORY")
        for line in more:
            rows.append([line if n == at else "" for n in range(len(columns))])
    return screens.table(columns, rows, left=["NAME", "STATE"])


def _memory_lines(process: Listed, numbers: Mapping[str, int]) -> list[str]:
    if process.gpu_bytes is None:
        return ["-"]
    return [
        f"{numbers[uuid]}: {screens.size(used)}"
        for uuid, used in process.gpu_bytes.items()
    ] or ["0 MiB"]
