"""What will stand in the way of a checkpoint: of this machine, of these processes."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cuckpt import driver, nvml, proc
from cuckpt.gpu_map import mib
from cuckpt.nvml import GpuFacts
from cuckpt.process_errors import (
    MissingExtraError,
    ProcessError,
    ProcessGoneError,
    ProcessStoppedError,
)

_CAP_SYS_PTRACE = 19


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes
    ----------
    level : str
        ``ok``, ``problem`` (it will fail), ``warning`` (it may) or ``skipped``.
    subject : str
        What it is about: ``driver``, ``permissions``, ``GPU 0``, ``process 4711`` ...
    what : str
        What was found.
    why : str
        Why that matters; empty if all is well.
    do : str
        What to do about it; empty if all is well.
    """

    level: str
    subject: str
    what: str
    why: str = ""
    do: str = ""

    def __str__(self) -> str:
        text = f"{self.level}: {self.subject}: {self.what}"
        return text + (f". {self.why}. {self.do}." if self.why else "")


def doctor(pids: Iterable[int] | None = None) -> list[Finding]:
    """Look for what keeps processes from being suspended and resumed.

    Changes nothing, and asks only the driver and the system.

    Parameters
    ----------
    pids : iterable of int, optional
        Processes to look at as well.

    Returns
    -------
    list of Finding
        In the order in which they were looked at.
    """
    found = list(_driver())
    usable = all(finding.level != "problem" for finding in found)
    found += _permissions()
    gpus = None
    try:
        gpus = nvml.gpus()
    except (ImportError, OSError) as error:
        found.append(Finding("skipped", "GPUs", str(error)))
    if gpus is not None:
        found += [finding for gpu in gpus for finding in _gpu(gpu)]
    targets = list(pids or ())
    found += _host_memory(gpus, targets)
    for pid in targets:
        found += _process(pid, usable)
    return found


def _driver() -> Iterator[Finding]:
    try:
        path, version = driver.library_path(), driver.driver_get_version()
    except (RuntimeError, driver.DriverError) as error:
        yield Finding(
            "problem",
            "driver",
            str(error),
            "nothing can be checkpointed without one",
            "install the NVIDIA driver, or set CUCKPT_LIBCUDA",
        )
        return
    text = f"{path}, CUDA {version // 1000}.{version % 1000 // 10}"
    if not driver.has_checkpoint():
        yield Finding(
            "problem",
            "driver",
            text,
            "the checkpoint calls came with CUDA 12.8 (driver 570)",
            "update the NVIDIA driver",
        )
        return
    yield Finding("ok", "driver", text)
    if driver.has_custom_storage():
        yield Finding("ok", "custom storage", "available")
        yield from _packages()
    else:
        yield Finding(
            "warning",
            "custom storage",
            "not available",
            "it came with CUDA 13.4 (driver 615); until then GPU memory goes through "
            "host memory",
            "update the NVIDIA driver if you want to save images",
        )


def _packages() -> Iterator[Finding]:
    from cuckpt.storage.checksum import checksum_of
    from cuckpt.storage.cuda import bindings

    for needed in bindings, checksum_of:
        try:
            needed()
        except ImportError as error:
            yield Finding(
                "warning",
                "images",
                f"{error.name or error} cannot be imported",
                "without it no image can be saved or loaded",
                "pip install 'cuckpt[storage]'",
            )


def _permissions() -> Iterator[Finding]:
    status = proc.read_status(os.getpid()) or {}
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1
    if capable:
        yield Finding("ok", "permissions", "CAP_SYS_PTRACE: all processes may be asked")
    else:
        yield Finding(
            "warning",
            "permissions",
            f"uid {os.geteuid()} without CAP_SYS_PTRACE",
            "the driver refuses other users' processes with OPERATING_SYSTEM (304)",
            "run as root, or give the program CAP_SYS_PTRACE",
        )
        scope = proc.number("/proc/sys/kernel/yama/ptrace_scope")
        if scope:
            yield Finding(
                "warning",
                "permissions",
                f"kernel.yama.ptrace_scope is {scope}",
                "it also refuses processes that are no descendants",
                "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE",
            )
    for line in _lines("/proc/mounts"):
        _, place, kind, options, *_ = line.split()
        hides = "hidepid=" in options.replace("hidepid=0", "").replace(
            "hidepid=off", ""
        )
        if (place, kind) == ("/proc", "proc") and hides:
            yield Finding(
                "warning",
                "permissions",
                "/proc is mounted with hidepid",
                "other users' processes cannot be found",
                "mount -o remount,hidepid=0 /proc, or run as root",
            )


def _gpu(gpu: GpuFacts) -> Iterator[Finding]:
    subject = f"GPU {gpu.ordinal}"
    yield Finding(
        "ok",
        subject,
        f"{gpu.name}, {mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free",
    )
    if not gpu.persistence_mode:
        yield Finding(
            "warning",
            subject,
            "persistence mode is off",
            "a restore by a program that has not called cuInit fails",
            "nvidia-smi -pm 1; cuckpt calls cuInit itself",
        )
    if gpu.mig_mode:
        yield Finding(
            "problem",
            subject,
            "MIG is on",
            "a checkpoint of what runs there ends with OUT_OF_MEMORY (2)",
            "turn MIG off: nvidia-smi -mig 0",
        )


def _host_memory(gpus: list[GpuFacts] | None, pids: list[int]) -> Iterator[Finding]:
    left = proc.memory_left()
    if left is None:
        yield Finding("skipped", "host memory", "/proc/meminfo cannot be read")
        return
    available, limited = left
    text = f"{mib(available)} " + ("left in the cgroup" if limited else "available")
    used = [
        size
        for gpu in gpus or ()
        for pid, size in gpu.used_bytes.items()
        if not pids or pid in pids
    ]
    needed = sum(used)
    if needed > available:
        yield Finding(
            "problem",
            "host memory",
            f"{text}, {mib(needed)} of GPU memory in use",
            "a checkpoint keeps the GPU memory in host memory",
            "free memory, raise the limit, or suspend fewer processes at a time",
        )
    else:
        yield Finding("ok", "host memory", text)


_WHAT_TO_DO: dict[type[Exception], str] = {
    ProcessGoneError: "look for its pid: cuckpt.ProcessGroup.discover().pids",
    ProcessStoppedError: "let it continue: kill -CONT, or thaw its cgroup",
    ValueError: "give the pid of its process",
    TypeError: "give a number",
    driver.NotInitializedError: "leave it out: it uses no GPU memory",
    driver.OperatingSystemError: "run as its user, as root, or with CAP_SYS_PTRACE",
    Exception: "look at the kernel's log: dmesg",
}


def _process(pid: int, usable: bool) -> Iterator[Finding]:
    from cuckpt.process import Process

    subject = f"process {pid}"
    try:
        process = Process(pid)
        state = process.state if usable else "not asked"
    except (ProcessError, ValueError, TypeError, driver.DriverError) as error:
        do = next(do for kind, do in _WHAT_TO_DO.items() if isinstance(error, kind))
        yield Finding("problem", subject, str(error), "it cannot be suspended", do)
        return
    if process._is_lost:
        yield Finding(
            "problem", subject, "is lost", "it can be restored no more", "end it"
        )
        return
    if state in ("checkpointing", "restoring"):
        yield Finding(
            "problem",
            subject,
            f"{process.name}, {state}",
            "somebody moves its memory to or from an image, and only that program can "
            "end this",
            "wait for it; if it has ended, end this process: its GPU memory is lost",
        )
        return
    image = process._image if state == "checkpointed" else None
    if image is not None:
        folder, checksum, _ = image
        wrong = _what_is_wrong(folder, checksum)
        if wrong:
            yield Finding(
                "problem",
                subject,
                f"{process.name}, {state}, cannot be loaded from {folder}: {wrong}",
                "its GPU memory is in the image of its last save, and nowhere else",
                "load it from where the image is now; if there is no copy, end this "
                "process: its GPU memory is lost",
            )
            return
        state += f", its GPU memory is in {folder}"
    numbers = proc.facts(pid)
    inside = numbers.namespace_pids[1:] if numbers else ()
    also = f", pid {inside[-1]} in its container" if inside else ""
    yield Finding("ok", subject, f"{process.name}, {state}{also}")
    environment = proc.environment(pid)
    yield from _job_file(subject, environment)
    yield from _libraries(subject, pid, environment)


def _what_is_wrong(folder: str, checksum: str) -> str:
    """Return why an image cannot be loaded; nothing if it is there and the same."""
    from cuckpt.storage import ImageError, ImageInUseError, describe

    try:
        image = describe(folder)
    except MissingExtraError:
        return ""  # which is told of the machine
    except ImageInUseError:
        return ""  # somebody loads it
    except OSError as error:
        return error.strerror or str(error)
    except ImageError as error:
        return str(error)
    return "" if image.checksum == checksum else "it holds another image"


def _job_file(subject: str, environment: dict[str, str]) -> Iterator[Finding]:
    if "CUDA_CHECKPOINT_JOB_FILE" in environment:
        yield Finding(
            "warning",
            subject,
            f"CUDA_CHECKPOINT_JOB_FILE={environment['CUDA_CHECKPOINT_JOB_FILE']}",
            "the processes of a job file are checkpointed one after the other, once, "
            "and without custom storage",
            "a group does that by itself",
        )


# What NCCL needs, as reported by users.
_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_SHM_DISABLE": "1"}


def _libraries(
    subject: str, pid: int, environment: dict[str, str]
) -> Iterator[Finding]:
    maps = "".join(_lines(f"/proc/{pid}/maps"))
    if "libcupti" in maps:
        yield Finding(
            "warning",
            subject,
            "CUPTI is loaded",
            "a restore fails while a profiler is attached",
            "end the profiler before it is suspended",
        )
    missing = [
        f"{name}={value}"
        for name, value in _NCCL.items()
        if environment.get(name) != value
    ]
    if "libnccl" in maps and missing:
        yield Finding(
            "warning",
            subject,
            f"NCCL is loaded without {' '.join(missing)}",
            "memory that ranks share by CUDA IPC keeps it from being restored",
            "set that, or destroy the communicators in before_suspend",
        )


def _lines(path: str) -> list[str]:
    try:
        with open(path, errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
