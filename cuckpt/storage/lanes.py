"""Lanes: what one thread copies; and the crew of threads that does it."""

import contextlib
import ctypes
import errno
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cuckpt import driver
from cuckpt.errors import DriverError, driver_error
from cuckpt.storage import _lanes, cuda
from cuckpt.storage._lanes import CHUNK, SLOT, Kind, Outcome
from cuckpt.storage.checksum import addresses_of_xxhash, from_numbers, to_numbers
from cuckpt.storage.errors import ImageError
from cuckpt.storage.manifest import Chunk, Zeros
from cuckpt.storage.stripes import StripeFile, padded
from cuckpt.storage.threads import at_once

if TYPE_CHECKING:
    from cuckpt.storage.copier import Advance, Region

SLOTS = 2  # of a lane


@functools.cache
def functions() -> _lanes.Functions:
    """Return what lanes call.

    Raises
    ------
    MissingExtraError
        Without cuda-bindings or xxhash.
    """
    cuda.bindings()
    library = ctypes.CDLL(driver.library_path())
    return _lanes.Functions(
        [_address(library, name) for name in _lanes.NAMES["cuda"]],
        addresses_of_xxhash(_lanes.NAMES["xxhash"]),
    )


class SaveLane:
    """Chunks of a region that go to one file.

    Parameters
    ----------
    region : Region
    pieces : sequence of Zeros
        Which part of the region each is.
    file : StripeFile
    checksums : bool
        Whether to make them.
    """

    def __init__(
        self,
        region: "Region",
        pieces: Sequence[Zeros],
        file: StripeFile,
        checksums: bool,
    ) -> None:
        self._region = region
        self._pieces = pieces
        self._file = file
        self._checksums = checksums

    def run(
        self, control: bytearray, counter: int
    ) -> "tuple[list[Chunk], list[Zeros]]":
        """Copy all.

        Parameters
        ----------
        control : bytearray
            As for `cuckpt.storage._lanes.save`.
        counter : int

        Returns
        -------
        tuple of list of Chunk and list of Zeros
            What is in the file, and what is zeros.

        Raises
        ------
        OSError, DriverError
        Stopped
        """
        records = self._records()
        number = 0
        longest = max(size for _, size in self._pieces)
        with _slots(longest, self._region.gpu) as slots:
            while True:
                outcome, number, code = _lanes.save(
                    functions(),
                    records,
                    number,
                    slots,
                    control,
                    counter,
                    self._region.device_pointer,
                    self._checksums,
                )
                if outcome == Outcome.DONE:
                    return self._what_is_where(records)
                if (outcome, code) == (Outcome.WRITE_FAILED, errno.EINVAL) and (
                    self._file.give_up_direct()
                ):
                    # O_DIRECT: opened so, but not to be written so; or a short write.
                    records[:] = self._records(records)
                    continue
                _raise(outcome, code, self._file.name)

    def _records(self, before: "bytes | bytearray" = b"") -> bytearray:
        """Return the records of the chunks, with what is known from before."""
        known = list(struct.iter_unpack(CHUNK, before)) or [(0,) * 8] * len(
            self._pieces
        )
        return bytearray().join(
            struct.pack(CHUNK, *piece, *facts[2:6], *self._file.descriptors())
            for piece, facts in zip(self._pieces, known, strict=True)
        )

    def _what_is_where(self, records: bytearray) -> "tuple[list[Chunk], list[Zeros]]":
        chunks, zeros = [], []
        for offset, size, place, *numbers, kind, _, _ in struct.iter_unpack(
            CHUNK, records
        ):
            if kind == Kind.ZEROS:
                zeros.append(Zeros(offset, size))
            else:
                text = from_numbers(*numbers) if kind == Kind.STORED else ""
                chunks.append(Chunk(offset, size, place, text))
        return chunks, zeros


class LoadLane:
    """Chunks that go to one region.

    Parameters
    ----------
    region : Region
    chunks : sequence of tuple of StripeFile and Chunk
    """

    def __init__(
        self, region: "Region", chunks: "Sequence[tuple[StripeFile, Chunk]]"
    ) -> None:
        self._region = region
        self._chunks = chunks

    def run(self, control: bytearray, counter: int) -> None:
        """Copy all.

        Parameters
        ----------
        control, counter
            As for `SaveLane.run`.

        Raises
        ------
        ImageError
            If a chunk is not what was saved, also when it is read again.
        OSError, DriverError
        Stopped
        """
        records = self._records(direct=True)
        number = 0
        again = -1
        is_direct = True
        longest = max(chunk.size for _, chunk in self._chunks)
        with _slots(longest, self._region.gpu) as slots:
            while True:
                outcome, number, code = _lanes.load(
                    functions(),
                    records,
                    number,
                    slots,
                    control,
                    counter,
                    self._region.device_pointer,
                )
                if outcome == Outcome.DONE:
                    return
                file, chunk = self._chunks[number]
                if outcome in (Outcome.SHORT, Outcome.DIFFERENT) and again != number:
                    again = number  # it may be the page cache that is at fault
                    file.forget(chunk.place, chunk.size)
                    length = struct.calcsize(CHUNK)
                    records[number * length : (number + 1) * length] = self._record(
                        file, chunk, Kind.FRESH, is_direct
                    )
                    continue
                if is_direct and (outcome, code) == (Outcome.READ_FAILED, errno.EINVAL):
                    is_direct = False  # opened so, but not to be read so
                    records = self._records(direct=False)
                    continue
                _raise(outcome, code, file.name, chunk.place)

    def _records(self, direct: bool) -> bytearray:
        return bytearray().join(
            self._record(*each, direct=direct) for each in self._chunks
        )

    def _record(
        self, file: StripeFile, chunk: Chunk, kind: int = 0, direct: bool = True
    ) -> bytes:
        if not chunk.checksum:
            kind |= Kind.UNCHECKED
        plain, past_the_cache = file.descriptors()
        return struct.pack(
            CHUNK,
            *chunk[:3],
            *to_numbers(chunk.checksum),
            kind,
            plain,
            past_the_cache if direct else -1,
        )


class Crew:
    """Threads that copy, all of which stop when one fails.

    Parameters
    ----------
    workers : int
    regions : int
        How many there are.
    advance : callable, optional
        As for `Copier.save`.

    Attributes
    ----------
    control : bytearray
        As for `cuckpt.storage._lanes.save`; region 0 has counter 1.
    """

    def __init__(self, workers: int, regions: int, advance: "Advance | None") -> None:
        self._workers = workers
        self._advance = advance or (lambda number, size: None)
        self._told = [0] * regions
        self._cleared = [0] * regions
        self.control = bytearray(8 * (1 + regions))

    def do(self, jobs: "Sequence[tuple[int, Callable[[], None]]]") -> None:
        """Do jobs, each with the context of a GPU current; raise what is raised first.

        Parameters
        ----------
        jobs : sequence of tuple of int and callable
            CUDA's ordinal of the GPU, and what to do.
        """

        def attempt(job: "tuple[int, Callable[[], None]]") -> None:
            gpu, do = job
            # What stopped the others is raised by who has failed.
            with contextlib.suppress(Stopped):
                cuda.enter(gpu)
                do()

        with cuda.used():
            at_once(attempt, jobs, self._workers, self._tell, self._stop)
        self._tell()

    def _stop(self) -> None:
        self.control[0] = 1

    def clear(self, number: int, region: "Region", zeros: Sequence[Zeros]) -> None:
        """Fill parts of a region with zeros.

        Parameters
        ----------
        number : int
            Of the region.
        region : Region
        zeros : sequence of Zeros
        """
        start = region.device_pointer
        cuda.clear([(start + offset, size) for offset, size in zeros], region.gpu)
        self._cleared[number] = sum(size for _, size in zeros)

    def _tell(self) -> None:
        counters = struct.unpack_from(f"={len(self._told)}Q", self.control, 8)
        for number, copied in enumerate(counters):
            more = copied + self._cleared[number] - self._told[number]
            if more:
                self._told[number] += more
                self._advance(number, more)


class Stopped(Exception):
    """Another lane has failed."""


def _raise(outcome: int, code: int, name: str, place: int = 0) -> None:
    if outcome == Outcome.STOPPED:
        raise Stopped
    if outcome == Outcome.CUDA_FAILED:
        raise driver_error(code, "a copy between GPU and host memory")
    if outcome in (Outcome.WRITE_FAILED, Outcome.READ_FAILED):
        raise OSError(code, os.strerror(code), name)
    raise ImageError(
        f"{name} is damaged: it ends at {place + code}"
        if outcome == Outcome.SHORT
        else f"{name} is damaged: what is at {place} is not what was saved"
    )


@contextlib.contextmanager
def _slots(size: int, gpu: int) -> Iterator[bytearray]:
    """Yield the records of slots whose buffers hold so many bytes."""
    with contextlib.ExitStack() as stack:
        slots = [cuda.Slot(padded(size), gpu, wait=True)]
        stack.callback(slots[0].close)
        with contextlib.suppress(DriverError):  # one will do
            for _ in range(1, SLOTS):
                slots.append(cuda.Slot(padded(size), gpu))
                stack.callback(slots[-1].close)
        yield bytearray().join(struct.pack(SLOT, *slot.record()) for slot in slots)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
