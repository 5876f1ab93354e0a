"""Copies between GPU memory and files, as fast as bus, memory and disk are.

A region is cut into chunks that are dealt to lanes, since one file takes what one core
writes: each lane of a save has a file of its own. A chunk that is all zeros is not
stored.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from cuckpt.storage import cuda
from cuckpt.storage.lanes import SLOTS, Crew, LoadLane, SaveLane, functions
from cuckpt.storage.manifest import (
    MAX_CHUNK_BYTES,
    Chunk,
    Content,
    Stripe,
    Zeros,
)
from cuckpt.storage.stripes import BLOCK, StripeFile, padded

# Fewer and longer copies would wait for each other, more would wait for the driver.
CHUNK_BYTES = 8 << 20
MAX_WORKERS = 16
Advance: TypeAlias = Callable[[int, int], object]
_T = TypeVar("_T")


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
        A multiple of 4096, up to 16 MiB.
    workers : int, optional
        How many threads; one for each CPU that this process may use, 16 at most, if
        left out. Each needs host memory for a few chunks.
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
        functions()
        self.chunk_bytes = chunk_bytes
        self.workers = workers
        self._checksums = checksums

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Make what copies of such regions need, for the GPUs whose contexts are held.

        Then no save fails for want of pinned memory, nor is slow at first.

        Parameters
        ----------
        sizes : sequence of int
            Bytes of each region.

        Raises
        ------
        DriverError
            If not even one can be copied.
        """
        lanes = min(self.workers, max(1, len(self.file_sizes(sizes))))
        cuda.warm_up(self.chunk_bytes, SLOTS * lanes)

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
            _file_size(lane)
            for size in sizes
            for lane in self._dealt(self._cut(size), len(sizes))
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
            Called now and then with the number of a region and how many bytes more of
            it have been copied. What it raises ends the copies.

        Returns
        -------
        list of Content
            Of each region.

        Raises
        ------
        OSError, DriverError
            If something cannot be written or copied. No copy is under way any more.
        """
        contents = [Content([], []) for _ in regions]
        crew = Crew(self.workers, len(regions), advance)

        def save(number: int, pieces: Sequence[Zeros]) -> None:
            file = target.create(_file_size(pieces))
            lane = SaveLane(regions[number], pieces, file, self._checksums)
            chunks, zeros = lane.run(crew.control, 1 + number)
            contents[number].zeros.extend(zeros)
            end = chunks[-1].place + chunks[-1].size if chunks else 0
            if chunks:
                contents[number].stripes.append(Stripe(file.name, end, chunks))
            file.finish(end)
            target.sync(file)

        crew.do(
            [
                (region.gpu, functools.partial(save, number, pieces))
                for number, region in enumerate(regions)
                for pieces in self._dealt(self._cut(region.size), len(regions))
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
        crew = Crew(self.workers, len(regions), advance)

        def load(number: int, chunks: Sequence[tuple[StripeFile, Chunk]]) -> None:
            LoadLane(regions[number], chunks).run(crew.control, 1 + number)

        jobs: list[tuple[int, Callable[[], None]]] = []
        for number, (region, content) in enumerate(zip(regions, contents, strict=True)):
            chunks = [
                (source.file(stripe.file), chunk)
                for stripe in content.stripes
                for chunk in stripe.chunks
            ]
            for dealt in self._dealt(chunks, len(regions)):
                jobs.append((region.gpu, functools.partial(load, number, dealt)))
            if content.zeros:
                fill = functools.partial(crew.clear, number, region, content.zeros)
                jobs.append((region.gpu, fill))
        crew.do(jobs)

    def _cut(self, size: int) -> list[Zeros]:
        return [
            Zeros(offset, min(self.chunk_bytes, size - offset))
            for offset in range(0, size, self.chunk_bytes)
        ]

    def _dealt(self, pieces: Sequence[_T], regions: int) -> list[Sequence[_T]]:
        """Deal pieces to as many lanes as each region can have."""
        count = max(1, min(len(pieces), self.workers // regions))
        return [pieces[lane::count] for lane in range(count) if pieces]


def _file_size(pieces: Sequence[Zeros]) -> int:
    return sum(padded(size) for _, size in pieces)


def _joined(zeros: list[Zeros]) -> list[Zeros]:
    joined: list[Zeros] = []
    for offset, size in sorted(zeros):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = Zeros(joined[-1].offset, joined[-1].size + size)
        else:
            joined.append(Zeros(offset, size))
    return joined
