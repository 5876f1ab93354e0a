"""The file in memory that all processes of a machine map."""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence

from cuckpt.simulator.fault import CALLS, MAX_FAULTS, Fault
from cuckpt.simulator.gpu import MAX_GPUS, Gpu

# As in libcuda/machine.h.
_OPERATIONS = 8
_PROCESSES = 1024
_HEAD = struct.Struct("=8sII")
_GPU = struct.Struct("=16sQI60s")
_FAULT = struct.Struct("=IIIIiIQ")
_TIMES = 12  # offset of how often it happens
_FAULT_COUNT = _HEAD.size + MAX_GPUS * _GPU.size
_FAULTS = _FAULT_COUNT + 8
_CALLS = _FAULTS + MAX_FAULTS * _FAULT.size
_FINISHED = _CALLS + 8 * _OPERATIONS
_SLOTS = _FINISHED + 8 * _OPERATIONS
_SLOT_WORDS = 3 + MAX_GPUS
_SIZE = _SLOTS + 8 * _SLOT_WORDS * _PROCESSES


class MachineFile:
    """The file, which exists until it is closed here and its processes have ended.

    Parameters
    ----------
    driver_version : int
    gpus : sequence of Gpu
    faults : sequence of Fault

    Attributes
    ----------
    number : int
        The descriptor.

    Raises
    ------
    OSError
        If there is no room for it.
    """

    def __init__(
        self, driver_version: int, gpus: Sequence[Gpu], faults: Sequence[Fault]
    ) -> None:
        self._gpu_count = len(gpus)
        self._injecting = threading.Lock()
        with contextlib.ExitStack() as undo:
            self.number = _free_number(
                os.memfd_create("simulated machine", os.MFD_CLOEXEC)
            )
            undo.callback(os.close, self.number)
            os.truncate(self.number, _SIZE)
            self._map = mmap.mmap(self.number, _SIZE)
            undo.pop_all()
        # Whole words are read and written at once, as the other processes do.
        self._words = memoryview(self._map).cast("Q")
        _HEAD.pack_into(self._map, 0, b"cuckpt 1", driver_version, len(gpus))
        for index, gpu in enumerate(gpus):
            _GPU.pack_into(self._map, _HEAD.size + index * _GPU.size, *gpu.fields())
        self.inject(faults)

    def close(self) -> None:
        """Close it."""
        self._words.release()
        self._map.close()
        os.close(self.number)

    def inject(self, faults: Sequence[Fault]) -> None:
        """Add faults; ValueError if they are too many."""
        with self._injecting:
            count = self._words[_FAULT_COUNT // 8]
            places = [*range(count, MAX_FAULTS), *self._spent(count)]
            if len(faults) > len(places):
                raise ValueError(
                    f"a machine has at most {MAX_FAULTS} faults that are still to "
                    f"happen; this one has {MAX_FAULTS - len(places)}"
                )
            for index, fault in zip(places, faults, strict=False):
                place = _FAULTS + index * _FAULT.size
                operation, when, at, times, *more = fault.fields()
                # One that happens no times is left alone until it is complete.
                _FAULT.pack_into(self._map, place, operation, when, at, 0, *more)
                struct.pack_into("=I", self._map, place + _TIMES, times)
                count = max(count, index + 1)
            # Last: whoever reads the number finds so many.
            self._words[_FAULT_COUNT // 8] = count

    def _spent(self, count: int) -> list[int]:
        """Return which of the faults have happened as often as they should."""
        calls = self._counts(_CALLS)
        under_way = [
            begun != done
            for begun, done in zip(calls, self._counts(_FINISHED), strict=True)
        ]
        spent = []
        for index in range(count):
            place = _FAULTS + index * _FAULT.size
            operation, _, at, times, *_ = _FAULT.unpack_from(self._map, place)
            if calls[operation] >= at + times - 1 and not under_way[operation]:
                spent.append(index)
        return spent

    def calls(self) -> dict[str, int]:
        """Return how many calls of each kind have reached a process."""
        return dict(zip(CALLS, self._counts(_CALLS), strict=True))

    def _counts(self, place: int) -> list[int]:
        return self._words[place // 8 : place // 8 + len(CALLS)].tolist()

    def processes(self) -> dict[int, dict[int, int]]:
        """Return what each living process uses of each GPU."""
        found = {}
        for index in range(_PROCESSES):
            first = _SLOTS // 8 + index * _SLOT_WORDS
            words = self._words[first : first + _SLOT_WORDS].tolist()
            owner, _contexts, _checkpoints, *used = words
            if _is_alive(owner) and self._words[first] == owner:
                found[owner >> 32] = dict(enumerate(used[: self._gpu_count]))
        return found


def _free_number(low: int) -> int:
    """Move a descriptor to where shell scripts and the like have none, if possible."""
    try:
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 200)
    except OSError:  # beyond a limit
        return low
    os.close(low)
    return high


def _is_alive(owner: int) -> bool:
    """Tell whether the owner of a slot lives, as libcuda/machine.c does."""
    if owner == 0:
        return False
    pid, restore_thread = owner >> 32, owner & 0xFFFFFFFF
    try:
        with open(f"/proc/{restore_thread}/status", errors="replace") as file:
            facts = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(facts["Tgid"]) == pid and facts["State"][0] not in "ZX"
