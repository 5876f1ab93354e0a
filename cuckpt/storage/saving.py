"""A job is saved to an image, and brought back if that fails.

All are locked, then the driver hands out the memory of one after the other, then all
of it is copied at once. The image is published before the driver takes the memory
back. From the moment it is handed out there is no way back but through a copy of it:
if no folder takes it, host memory does for the way back.
"""

import contextlib
import datetime
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import cuckpt
from cuckpt import driver, gpu_map as maps, proc
from cuckpt.group_run import Failed, GroupReport, Run, expect, to
from cuckpt.passage import Passage, State
from cuckpt.process_errors import (
    NoMembersError,
    ProcessError,
    ProcessLeftError,
    ProcessLostError,
)
from cuckpt.storage.copier import Content, Copier, Region, Source, Target
from cuckpt.storage.folder import InMemory, NewImage, Path
from cuckpt.storage.manifest import Image, SavedProcess, SavedRegion
from cuckpt.storage.operation import Operation, gpu_name, hold_contexts
from cuckpt.storage.passage import StoragePassage
from cuckpt.uninterrupted import is_asked_to_end

if TYPE_CHECKING:
    from cuckpt.group import ProcessGroup
    from cuckpt.process import Process


class NotSavedError(ProcessError):
    """It could not be saved, and is as before."""


class SaveRun(Run):
    """One save of all members.

    Parameters
    ----------
    group : ProcessGroup
    path : str or path
        The folder.
    deadline : float
        As for `Run`.
    fallback : sequence of str or path
        Folders to take in the place of one that fails.
    replace, durable : bool
        As for `NewImage`.
    """

    def __init__(
        self,
        group: "ProcessGroup",
        path: Path,
        deadline: float,
        fallback: Sequence[Path],
        replace: bool,
        durable: bool,
    ) -> None:
        super().__init__(group, deadline)
        self._paths = [path, *fallback]
        self._replace = replace
        self._durable = durable
        self._image: NewImage | None = None
        self.copier = Copier()

    def save(self, cancelled: threading.Event, dry_run: bool) -> GroupReport:
        """Save all, or bring all back."""
        with self._begun(cancelled), contextlib.ExitStack() as self._open:
            self._take(self._group._members.values())
            self._refuse_suspended()
            first = self._opened(self._paths[0])
            if dry_run:
                self._tell_what_would_be(first)
                return self._finished()
            self._reserve(first)
            try:
                with self._brought_back():
                    self._lock_all()
                    self._begin_all()
                    self._copy_all(first)
                    self._all(StoragePassage.complete)
                    self._all(Passage.check_that_nothing_is_left)
                    self._all(expect(State.CHECKPOINTED))
                    if self.cancelled.is_set() or is_asked_to_end():
                        raise KeyboardInterrupt
                for saver in self._savers:
                    saver.process._image = saver.outcome.image
            except BaseException:
                self._withdraw()
                raise
        return self._finished()

    def _passage_of(self, member: "Process") -> Passage:
        return SavePassage(member, self)

    @property
    def _savers(self) -> "list[SavePassage]":
        return [
            each for each in self._passages.values() if isinstance(each, SavePassage)
        ]

    def _refuse_suspended(self) -> None:
        for saver in self._savers:
            why = self._why_not(saver)
            if why is not None:
                pid = saver.process.pid
                self._problems[pid] = NotSavedError(pid, why)
        self._raise_problems()

    def _why_not(self, saver: "SavePassage") -> str | None:
        if saver.initial == State.CHECKPOINTED:
            return "is suspended already: resume it first"
        if self._one_by_one:
            return (
                "belongs to a job with CUDA_CHECKPOINT_JOB_FILE, which custom storage "
                "does not know: suspend it instead"
            )
        try:
            hold_contexts(saver.gpus())
        except OSError as error:
            return f"cannot be saved: {error}"
        return None

    def _opened(self, path: Path) -> NewImage:
        return self._open.enter_context(NewImage(path, self._replace, self._durable))

    def _sizes(self) -> list[int]:
        return [
            size
            for passage in self._passages.values()
            for size in (passage.process._used_bytes or {}).values()
        ]

    def _tell_what_would_be(self, image: NewImage) -> None:
        sizes = self._sizes()
        files = len(self.copier.file_sizes(sizes))
        image.check_room(sum(sizes))
        for passage in self._passages.values():
            passage.note(
                f"it would go to {image.path}, with all others at most "
                f"{maps.mib(sum(sizes))} in {files} files"
                if sizes
                else f"it would go to {image.path}; how much it is is not known"
            )

    def _reserve(self, image: NewImage) -> None:
        """Take space, and the buffers, before anybody is locked."""
        sizes = self._sizes()
        image.reserve(self.copier.file_sizes(sizes))
        if not sizes:
            for passage in self._passages.values():
                passage.note("not checked: space, since its GPU memory is not known")

    def _lock_all(self) -> None:
        self._all(to(State.LOCKED))
        while new := self._group._look_for_members():
            self._all(to(State.LOCKED), self._take(new))
            self._refuse_suspended()
        if not self._passages:
            raise NoMembersError(self._finished().skipped)

    def _begin_all(self) -> None:
        for pid in list(self._passages):  # one after the other
            self._all(SavePassage.begin, [pid])

    def _copy_all(self, first: NewImage) -> None:
        """Copy all to one folder and publish; try the others if one fails."""
        failures: list[str] = []
        for image in self._places(first, failures):
            try:
                self._copy_to(image)
                return
            except (OSError, driver.DriverError) as error:
                image.withdraw()
                failures.append(f"{image.path}: {error}")
        for pid in self._passages:
            self._problems[pid] = NotSavedError(
                pid, f"was not saved: {'; '.join(failures)}"
            )
        raise Failed

    def _places(self, first: NewImage, failures: list[str]) -> Iterator[NewImage]:
        yield first
        for path in self._paths[1:]:
            try:
                image = self._opened(path)
            except (OSError, RuntimeError) as error:
                failures.append(f"{os.fspath(path)}: {error}")
                continue
            for passage in self._passages.values():
                passage.note(f"saved to {image.path}, since {'; '.join(failures)}")
            yield image

    def _copy_to(self, image: NewImage) -> None:
        savers = self._savers
        with contextlib.ExitStack() as stack:
            for saver in savers:
                stack.enter_context(saver.copying())
            contents = copied(self.copier, savers, image)
        saved = [
            saver.described(content)
            for saver, content in zip(savers, contents, strict=True)
        ]
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        version = driver.driver_get_version()
        whole = Image(image.path, now, str(cuckpt.__version__), version, saved)
        image.publish(whole.to_json(), {stripe.file for stripe in whole.stripes})
        self._image = image
        for saver, content in zip(savers, contents, strict=True):
            saver.stored = Stored(content, image)
            saver.outcome.image = image.path

    def keep(self, passage: "SavePassage") -> None:
        """Copy the memory of one to where it can be brought back from.

        Raises
        ------
        ProcessLostError
            If no place takes it.
        """
        failures: list[str] = []
        for place in self._places_for_the_way_back(passage, failures):
            try:
                with passage.copying():
                    (content,) = copied(Copier(), [passage], place)
            except (OSError, driver.DriverError) as error:
                failures.append(f"{place.path}: {error}")
            else:
                passage.stored = Stored(content, place)
                return
        raise passage.lost(
            "its GPU memory could be copied nowhere and is in the hands of the driver: "
            + "; ".join(failures)
        )

    def _places_for_the_way_back(
        self, passage: "SavePassage", failures: list[str]
    ) -> "Iterator[InMemory | NewImage]":
        try:
            yield self._open.enter_context(InMemory(passage.total_bytes()))
        except MemoryError as error:
            failures.append(str(error))
        for path in self._paths:
            # A folder of its own, since the one of the image may be at fault.
            try:
                yield self._opened(f"{os.fspath(path)}.{passage.process.pid}")
            except (OSError, RuntimeError) as error:
                failures.append(f"{os.fspath(path)}: {error}")

    def _withdraw(self) -> None:
        """Take the image away again, unless somebody needs it."""
        if self._image is None:
            return
        if any(
            isinstance(problem, ProcessLostError | ProcessLeftError)
            for problem in self._problems.values()
        ):
            for passage in self._passages.values():
                passage.note(f"its GPU memory is in {self._image.path}")
        else:
            self._image.withdraw()
            for passage in self._passages.values():
                passage.outcome.image = None


class Stored(NamedTuple):
    """Where the memory of a process is, by the UUIDs of its GPUs."""

    contents: dict[str, Content]
    place: Source


class SavePassage(StoragePassage):
    """The way of a member to an image, and back if need be.

    Attributes
    ----------
    stored : Stored or None
        Where its memory is besides.
    """

    after: Mapping[str, State] = {
        **Passage.after,
        "prepare": State.CHECKPOINTING,
        "complete": State.CHECKPOINTED,
    }

    def __init__(self, member: "Process", run: SaveRun) -> None:
        super().__init__(member, run)
        self._save_run = run
        self.stored: Stored | None = None

    def gpus(self) -> list[str] | None:
        """Return the UUIDs of its GPUs; None if they are not known."""
        used = self.process._used_bytes
        return None if used is None else list(used)

    def _call(self, verb: str) -> None:
        if verb == "prepare":
            self.process._refuse()
            self.operation = self.begun(
                lambda: Operation.checkpoint(self.process.pid, self.gpus())
            )
        else:
            super()._call(verb)

    def described(self, contents: dict[str, Content]) -> SavedProcess:
        """Return what the manifest tells of it."""
        assert self.operation is not None
        pid, start_time = self.process._key
        regions = [
            SavedRegion(uuid, gpu_name(region.gpu), region.size, *contents[uuid])
            for uuid, region in self.operation.regions.items()
        ]
        return SavedProcess(
            pid, self.process.name, start_time or 0, proc.boot_id(), regions
        )

    def go_back(self, initial: int) -> None:
        """Bring it to a state; once its memory is handed out, through a copy of it."""
        self._cancelled = threading.Event()
        if self.operation is not None:
            if self.stored is None:
                self._save_run.keep(self)
            try:
                self.complete()
            except driver.DriverError as error:
                raise self._left(initial, error) from error
        super().go_back(initial)

    def _restore(self) -> None:
        """Restore it from where its memory is, on the way back."""
        if self.stored is None:
            raise AssertionError("nothing of it was saved")
        self.process._refuse()
        operation = self.begun(
            lambda: Operation.restore(self.process.pid, self.gpus(), [])
        )
        try:
            load_to(operation.regions, self.stored)
            operation.complete()
        except Exception as error:
            raise self.lost(f"its memory could not be brought back: {error}") from error


def copied(
    copier: Copier, passages: "Sequence[SavePassage]", target: Target
) -> list[dict[str, Content]]:
    """Copy the memory of processes, and return for each what of which GPU is where.

    Parameters
    ----------
    copier : Copier
    passages : sequence of SavePassage
        Whose operations are under way.
    target : Target

    Returns
    -------
    list of dict of str to Content
    """
    regions: list[Region] = []
    owners: list[SavePassage] = []
    for passage in passages:
        assert passage.operation is not None
        regions += passage.operation.regions.values()
        owners += [passage] * len(passage.operation.regions)
    contents = iter(
        copier.save(regions, target, lambda number, size: owners[number].count(size))
    )
    return [
        {uuid: next(contents) for uuid in passage.operation.regions}
        for passage in passages
        if passage.operation is not None
    ]


def load_to(regions: dict[str, Region], stored: Stored) -> None:
    """Copy what is stored back to where it came from.

    Raises
    ------
    ImageError, OSError, DriverError
    """
    Copier().load(
        [regions[uuid] for uuid in stored.contents],
        list(stored.contents.values()),
        stored.place,
    )
