"""Copies between GPU memory and files, as fast as bus, memory and disk are.

A region is cut into chunks that are spread over several files, since one file takes
what one core writes. A thread fills or empties each file by turns through two pinned
buffers: while one is copied from or to the GPU, the other is written or read.
Neither needs the GIL.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from cuckpt.storage import cuda
from cuckpt.storage.checksum import checksum_of
from cuckpt.storage.manifest import MAX_CHUNK_BYTES, Chunk, Stripe, Zeros
from cuckpt.storage.reader import read_chunk
from cuckpt.storage.stripes import BLOCK, StripeFile, padded

CHUNK_BYTES = 8 << 20
MAX_WORKERS = 16
_SLOTS = 2
Advance: TypeAlias = Callable[[int, int], object]
_T = TypeVar("_T")
_libc: Any = ctypes.CDLL(None)
_libc.memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Region(NamedTuple):
    """GPU memory.

    Attributes
    ----------
    device_pointer : int
        Its address.
    size : int
        Bytes.
    gpu : int
        CUDA's ordinal of the GPU.
    """

    device_pointer: int
    size: int
    gpu: int


class Content(NamedTuple):
    """What of a region is where.

    Attributes
    ----------
    stripes : list of Stripe
    zeros : list of Zeros
    """

    stripes: list[Stripe]
    zeros: list[Zeros]


class Target(Protocol):
    """Where files are made, such as `cuckpt.storage.folder.NewImage`."""

    def create(self, size: int) -> StripeFile:
        """Return a new file for at most so many bytes."""

    def sync(self, file: StripeFile) -> None:
        """Wait until a file is as durable as is wanted."""


class Source(Protocol):
    """Where files are, such as `cuckpt.storage.folder.OldImage`."""

    def file(self, name: str) -> StripeFile:
        """Return an open file."""


class Copier:
    """Copies regions to files and back.

    Parameters
    ----------
    chunk_bytes : int
        A multiple of 4096, up to 64 MiB.
    workers : int, optional
        How many threads; one for each CPU that this process may use, 16 at most, if
        left out. Host memory is needed for two chunks of each.
    checksums : bool
        Whether to make them.

    Raises
    ------
    ValueError
        If a parameter is wrong.
    MissingExtraError
        Without cuda-bindings or xxhash.
    """

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        workers: int | None = None,
        checksums: bool = True,
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % BLOCK:
            raise ValueError(
                f"chunk_bytes must be a multiple of {BLOCK}, up to {MAX_CHUNK_BYTES}"
            )
        if workers is None:
            workers = min(MAX_WORKERS, max(2, len(os.sched_getaffinity(0))))
        if workers < 1:
            raise ValueError("workers must be 1 or more")
        cuda.bindings()
        self.chunk_bytes = chunk_bytes
        self.workers = workers
        self._checksum = checksum_of() if checksums else lambda _: ""

    def file_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Tell the files that regions of these sizes will have at most.

        Parameters
        ----------
        sizes : sequence of int
            Bytes of each region.

        Returns
        -------
        list of int
            Bytes of each file.
        """
        return [
            sum(padded(size) for _, size in lane)
            for region in sizes
            for lane in self._lanes(self._cut(region), len(sizes))
        ]

    def save(
        self,
        regions: Sequence[Region],
        target: Target,
        advance: Advance | None = None,
    ) -> list[Content]:
        """Copy regions to new files.

        Parameters
        ----------
        regions : sequence of Region
            Nobody may change them meanwhile.
        target : Target
        advance : callable, optional
            Called in any thread with the number of a region and how many bytes of it
            have been copied, for each chunk. What it raises ends the copies.

        Returns
        -------
        list of Content
            Of each region.

        Raises
        ------
        OSError, DriverError
            If something cannot be written or copied. No copy is under way any more.
        """
        crew = _Crew(self.workers, advance)
        contents = [Content([], []) for _ in regions]

        def save(number: int, lane: Sequence[Zeros]) -> None:
            content = self._save_lane(crew, number, regions[number], lane, target)
            contents[number].stripes.extend(content.stripes)
            contents[number].zeros.extend(content.zeros)

        crew.do(
            [
                (region.gpu, functools.partial(save, number, lane))
                for number, region in enumerate(regions)
                for lane in self._lanes(self._cut(region.size), len(regions))
            ]
        )
        return [
            Content(
                sorted(stripes, key=lambda stripe: stripe.chunks[0].offset),
                _joined(zeros),
            )
            for stripes, zeros in contents
        ]

    def load(
        self,
        regions: Sequence[Region],
        contents: Sequence[Content],
        source: Source,
        advance: Advance | None = None,
    ) -> None:
        """Copy files to regions.

        Parameters
        ----------
        regions : sequence of Region
        contents : sequence of Content
            Of each region.
        source : Source
        advance : callable, optional
            As for `save`.

        Raises
        ------
        ImageError
            If a chunk is not what was saved, also when it is read again.
        OSError, DriverError
            If something cannot be read or copied. No copy is under way any more.
        """
        crew = _Crew(self.workers, advance)
        jobs: list[tuple[int, Callable[[], None]]] = []
        for number, (region, content) in enumerate(zip(regions, contents, strict=True)):
            chunks = [(each.file, c) for each in content.stripes for c in each.chunks]
            fills = [
                functools.partial(_load_lane, crew, number, region, lane, source)
                for lane in self._lanes(chunks, len(regions))
            ]
            if content.zeros:
                fills.append(
                    functools.partial(_clear, crew, number, region, content.zeros)
                )
            jobs += [(region.gpu, fill) for fill in fills]
        crew.do(jobs)

    def _save_lane(
        self,
        crew: "_Crew",
        number: int,
        region: Region,
        lane: Sequence[Zeros],
        target: Target,
    ) -> Content:
        file = target.create(sum(padded(size) for _, size in lane))
        chunks, zeros, end = [], [], 0
        with _slots(self.chunk_bytes) as slots:
            for piece, slot in zip(lane, _fetched(region, lane, slots), strict=True):
                if _is_zero(slot.address, piece.size):
                    zeros.append(piece)
                else:
                    place = padded(end)
                    checksum = self._checksum(slot.view[: piece.size])
                    file.write(place, slot.view, piece.size)
                    chunks.append(Chunk(*piece, place, checksum))
                    end = place + piece.size
                crew.advance(number, piece.size)
        file.finish(end)
        target.sync(file)
        return Content([Stripe(file.name, end, chunks)] if chunks else [], zeros)

    def _cut(self, size: int) -> list[Zeros]:
        return [
            Zeros(offset, min(self.chunk_bytes, size - offset))
            for offset in range(0, size, self.chunk_bytes)
        ]

    def _lanes(self, pieces: Sequence[_T], regions: int) -> list[Sequence[_T]]:
        """Deal pieces to as many threads as each region can have."""
        count = max(1, min(len(pieces), self.workers // regions))
        return [pieces[lane::count] for lane in range(count) if pieces]


class _Crew:
    """Threads that copy, all of which stop when one fails."""

    def __init__(self, workers: int, advance: Advance | None) -> None:
        self._workers = workers
        self._advance = advance or (lambda number, size: None)
        self._stop = threading.Event()

    def do(self, jobs: "Sequence[tuple[int, Callable[[], None]]]") -> None:
        """Do jobs, each with the context of a GPU; raise what was raised first."""
        problems: list[BaseException] = []

        def attempt(job: "tuple[int, Callable[[], None]]") -> None:
            try:
                cuda.enter(job[0])
                job[1]()
            except _Stopped:
                pass
            except BaseException as error:
                problems.append(error)
                self._stop.set()

        with cuda.used(), ThreadPoolExecutor(self._workers, "cuckpt copies") as threads:
            list(threads.map(attempt, jobs))
        if problems:
            raise problems[0]

    def advance(self, number: int, size: int) -> None:
        """Tell that something has been copied; stop if another has failed."""
        if self._stop.is_set():
            raise _Stopped
        self._advance(number, size)


class _Stopped(Exception):
    """Another thread has failed."""


def _fetched(
    region: Region, lane: Sequence[Zeros], slots: "list[cuda.Slot]"
) -> "Iterator[cuda.Slot]":
    """Yield for each piece the slot that holds it, while the next is fetched."""
    for piece, slot in zip(lane, slots, strict=False):
        slot.fetch(region.device_pointer + piece.offset, piece.size)
    for index, slot in zip(range(len(lane)), itertools.cycle(slots), strict=False):
        slot.wait()
        yield slot
        if index + _SLOTS < len(lane):
            piece = lane[index + _SLOTS]
            slot.fetch(region.device_pointer + piece.offset, piece.size)


def _load_lane(
    crew: _Crew,
    number: int,
    region: Region,
    lane: "Sequence[tuple[str, Chunk]]",
    source: Source,
) -> None:
    longest = max(chunk.size for _, chunk in lane)
    with _slots(padded(longest)) as slots:
        for (name, chunk), slot in zip(lane, itertools.cycle(slots), strict=False):
            slot.wait()
            read_chunk(source.file(name), chunk, slot.view)
            slot.put(region.device_pointer + chunk.offset, chunk.size)
            crew.advance(number, chunk.size)


def _clear(crew: _Crew, number: int, region: Region, zeros: Sequence[Zeros]) -> None:
    with _slots(BLOCK) as slots:
        for offset, size in zeros:
            slots[0].clear(region.device_pointer + offset, size)
            crew.advance(number, size)


@contextlib.contextmanager
def _slots(size: int) -> "Iterator[list[cuda.Slot]]":
    with contextlib.ExitStack() as stack:
        slots = []
        for _ in range(_SLOTS):
            slots.append(cuda.Slot(size))
            stack.callback(slots[-1].close)
        yield slots


def _is_zero(address: int, size: int) -> bool:
    first = ctypes.c_char.from_address(address).value
    return first == b"\0" and not _libc.memcmp(address, address + 1, size - 1)


def _joined(zeros: list[Zeros]) -> list[Zeros]:
    joined: list[Zeros] = []
    for offset, size in sorted(zeros):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = Zeros(joined[-1].offset, joined[-1].size + size)
        else:
            joined.append(Zeros(offset, size))
    return joined
