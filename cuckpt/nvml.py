"""What NVML tells of GPUs and who uses them; needs nvidia-ml-py, of the extra jobs.

NVML sees all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says, and lags behind
the driver by up to a second.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from cuckpt import uuids
from cuckpt.process_errors import MissingExtraError


class GpuFacts(NamedTuple):
    """A GPU of the machine.

    Attributes
    ----------
    ordinal : int
        NVML's, which is that of nvidia-smi.
    uuid : bytes
        16 bytes.
    name : str
    free_bytes, total_bytes : int
    persistence_mode, mig_mode : bool
    used_bytes : dict of int to int
        GPU memory by pid, of the processes that NVML sees.
    """

    ordinal: int
    uuid: bytes
    name: str
    free_bytes: int
    total_bytes: int
    persistence_mode: bool
    mig_mode: bool
    used_bytes: dict[int, int]


def gpus() -> list[GpuFacts]:
    """Return all GPUs of the machine.

    Returns
    -------
    list of GpuFacts

    Raises
    ------
    MissingExtraError
        Without nvidia-ml-py.
    OSError
        If NVML cannot be used.
    """
    with session() as nvml:
        return [_facts(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]


def used_memory(pid: int) -> dict[str, int]:
    """Return the GPU memory of a process by the UUID of the GPU, as text.

    Parameters
    ----------
    pid : int

    Returns
    -------
    dict of str to int
        Bytes; nothing of a process that is checkpointed.

    Raises
    ------
    MissingExtraError, OSError
        As `gpus`.
    """
    return {
        uuids.to_text(gpu.uuid): gpu.used_bytes[pid]
        for gpu in gpus()
        if pid in gpu.used_bytes
    }


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Begin to use NVML, and end that.

    Yields
    ------
    module
        pynvml.

    Raises
    ------
    MissingExtraError, OSError
        As `gpus`.
    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        if error.name != "pynvml":
            raise
        raise MissingExtraError("nvidia-ml-py", "jobs") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(f"NVML cannot be used: {error}") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise OSError(f"NVML failed: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _facts(nvml: Any, number: int) -> GpuFacts:
    gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    try:
        mig_mode = nvml.nvmlDeviceGetMigMode(gpu)[0] == 1
    except nvml.NVMLError:  # not on this GPU
        mig_mode = False
    return GpuFacts(
        number,
        uuids.to_bytes(nvml.nvmlDeviceGetUUID(gpu)),
        nvml.nvmlDeviceGetName(gpu),
        memory.free,
        memory.total,
        nvml.nvmlDeviceGetPersistenceMode(gpu) == 1,
        mig_mode,
        {process.pid: process.usedGpuMemory or 0 for process in processes},
    )
