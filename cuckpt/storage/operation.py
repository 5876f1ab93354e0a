"""One operation of the driver with custom storage, from its begin to its completion.

There is no way back from its begin but through its completion, and the memory of the
process is nowhere but in the regions until they have been copied.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from cuckpt import driver, uuids
from cuckpt.storage import cuda
from cuckpt.storage.copier import Region

_ATTEMPTS_TO_COMPLETE = 3
_T = TypeVar("_T")


class Operation:
    """A checkpoint or restore that hands the memory out.

    Parameters
    ----------
    args : CheckpointCheckpointArgs or CheckpointRestoreArgs
        After the call.

    Attributes
    ----------
    regions : dict of str to Region
        By the UUID of the GPU.
    """

    def __init__(
        self, args: driver.CheckpointCheckpointArgs | driver.CheckpointRestoreArgs
    ) -> None:
        self._args = args
        # What the driver says is gone after the completion.
        self.regions: dict[str, Region] = {}
        for found in args.custom_storage_info or ():
            gpu = cuda.gpu_of(found.stream)
            self.regions[gpu_uuid(gpu)] = Region(found.dev_ptr, found.size, gpu)

    @classmethod
    def checkpoint(cls, pid: int, gpus: Iterable[str] | None) -> "Operation":
        """Begin a checkpoint.

        Requires LOCKED, leaves CHECKPOINTING (cuCheckpointProcessCheckpoint).

        Parameters
        ----------
        pid : int
        gpus : iterable of str or None
            UUIDs of those that the process uses; None: any.

        Raises
        ------
        DriverError
        OSError
            If a GPU is hidden from this process.
        """

        def begin() -> driver.CheckpointCheckpointArgs:
            args = driver.CheckpointCheckpointArgs(custom_storage=True)
            driver.checkpoint_process_checkpoint(pid, args)
            return args

        return cls(_with_contexts(begin, pid, gpus))

    @classmethod
    def restore(
        cls,
        pid: int,
        gpus: Iterable[str] | None,
        pairs: "list[tuple[bytes, bytes]]",
    ) -> "Operation":
        """Begin a restore.

        Requires CHECKPOINTED, leaves RESTORING (cuCheckpointProcessRestore).

        Parameters
        ----------
        pid, gpus
            As for `checkpoint`.
        pairs : list of tuple of bytes and bytes
            Old and new UUIDs of all GPUs, or nothing.

        Raises
        ------
        DriverError, OSError
            As `checkpoint`.
        """

        def begin() -> driver.CheckpointRestoreArgs:
            args = driver.CheckpointRestoreArgs(
                gpu_pairs=pairs or None, custom_storage=True
            )
            driver.checkpoint_process_restore(pid, args)
            return args

        return cls(_with_contexts(begin, pid, gpus))

    def complete(self) -> None:
        """Give the memory back to the driver (cuCheckpointOperationComplete).

        Leaves CHECKPOINTED, or LOCKED after a restore.

        Raises
        ------
        DriverError
            If that fails several times.
        """
        for attempt in range(1, _ATTEMPTS_TO_COMPLETE + 1):
            try:
                driver.checkpoint_operation_complete(self._args)
            except driver.DriverError:
                if attempt == _ATTEMPTS_TO_COMPLETE:
                    raise
                time.sleep(0.02 * attempt)
            else:
                return


def hold_contexts(gpus: Iterable[str] | None) -> None:
    """Retain the primary contexts of GPUs; an operation needs those of all it is on.

    Parameters
    ----------
    gpus : iterable of str or None
        UUIDs; None: all that this process sees.

    Raises
    ------
    OSError
        If one is hidden from this process.
    DriverError
    """
    seen = _ordinals()
    for uuid in seen if gpus is None else gpus:
        if uuid not in seen:
            raise OSError(
                f"GPU {uuid} is not to be seen here: this program needs all GPUs that "
                "the process uses; look at CUDA_VISIBLE_DEVICES"
            )
        cuda.retain(seen[uuid])


def gpu_uuid(gpu: int) -> str:
    """Return the UUID of a GPU.

    Parameters
    ----------
    gpu : int
        CUDA's ordinal.

    Returns
    -------
    str
    """
    device = driver.device_get(gpu)
    return uuids.to_text(uuids.to_bytes(driver.device_get_uuid_v2(device)))


def gpu_name(gpu: int) -> str:
    """Return the name of a GPU, as ``NVIDIA H200``.

    Parameters
    ----------
    gpu : int
        CUDA's ordinal.

    Returns
    -------
    str
    """
    name: bytes = cuda.call("cuDeviceGetName", 128, driver.device_get(gpu))
    return name.partition(b"\0")[0].decode(errors="replace")


def _ordinals() -> Mapping[str, int]:
    driver.init(0)
    return {gpu_uuid(gpu): gpu for gpu in range(driver.device_get_count())}


def _with_contexts(
    begin: "Callable[[], _T]", pid: int, gpus: Iterable[str] | None
) -> "_T":
    """Begin with the contexts of these GPUs, and of all if that is not enough."""
    hold_contexts(gpus)
    state = driver.checkpoint_process_get_state(pid)
    try:
        return begin()
    except driver.InvalidContextError:
        if driver.checkpoint_process_get_state(pid) != state:
            raise  # it was begun
        hold_contexts(None)
        return begin()
