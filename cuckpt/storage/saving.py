"""A job is saved to an image, and brought back if that fails.

All are locked, then the driver hands out the memory of one after the other, then all
of it is copied at once. The image is published before the driver takes the memory
back. From the moment it is handed out there is no way back but through a copy of it:
if no folder takes it, host memory does for the way back.
"""

import contextlib
import datetime
import errno
import itertools
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import cuckpt
from cuckpt import driver, gpu_map as maps, proc
from cuckpt.group_run import Failed, GroupReport, Run, expect, to
from cuckpt.passage import WHAT_MAY_HELP, Passage, State
from cuckpt.process_errors import ProcessError, ProcessLeftError
from cuckpt.storage import cuda
from cuckpt.storage.copier import Copier, Region, Source, Target
from cuckpt.storage.errors import ImageError
from cuckpt.storage.folder import InMemory, NewImage, Path, absolute
from cuckpt.storage.manifest import Content, Image, SavedProcess, SavedRegion
from cuckpt.storage.need import refuse_needed
from cuckpt.storage.operation import Operation, gpu_name, hold_contexts
from cuckpt.storage.passage import StoragePassage, identity
from cuckpt.uninterrupted import is_asked_to_end

if TYPE_CHECKING:
    from cuckpt.group import ProcessGroup
    from cuckpt.process import Process

_WORKERS_FOR_THE_WAY_BACK = 4  # of each process: each takes a file descriptor


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
        self._paths = [absolute(each) for each in (path, *fallback)]
        if len({os.path.realpath(each) for each in self._paths}) < len(self._paths):
            raise ValueError("a folder is named twice")
        self._all_paths = list(self._paths)
        self._replace = replace
        self._durable = durable
        self._image: NewImage | None = None
        self._keeping = threading.Lock()
        self.copier = Copier()

    def save(self, cancelled: threading.Event, dry_run: bool) -> GroupReport:
        """Save all, or bring all back."""
        with (
            self._begun(cancelled),
            cuda.used(),
            contextlib.ExitStack() as self._open,
        ):
            self._take(self._group._members.values())
            self._refuse_suspended()
            first = self._first_that_can(
                self._tell_what_would_be if dry_run else self._reserve
            )
            if dry_run:
                return self._finished()
            self.copier.warm_up(self._sizes())
            try:
                with self._brought_back():
                    self._lock_all()
                    self._begin_all()
                    self._copy_all(first)
                    self._all(StoragePassage.complete)
                    self._all(Passage.check_that_nothing_is_left)
                    self._all(expect(State.CHECKPOINTED))
                    self.refuse_nobody()  # to whom else the image would be of use
                    if self.cancelled.is_set() or is_asked_to_end():
                        raise KeyboardInterrupt
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
        if saver.process.pid == os.getpid():
            return "is this program: a copy of its own would wait for its unlock"
        if saver.initial == State.CHECKPOINTED:
            image = saver.process._image
            if image is not None:
                return f"is in the image {image[0]} already: load() brings it back"
            return "is suspended already: resume it first"
        if self._one_by_one:
            return (
                "belongs to a job with CUDA_CHECKPOINT_JOB_FILE, which custom storage "
                "does not know: suspend it instead"
            )
        try:
            hold_contexts(saver.gpus())
        except (OSError, driver.DriverError) as error:
            return f"cannot be saved: {error}"
        return None

    def _first_that_can(self, do: Callable[[NewImage], None]) -> NewImage:
        """Return the first folder that can do something, before anybody is locked."""
        errors: list[Exception] = []
        while self._paths:
            path = self._paths.pop(0)
            try:
                image = self._opened(path)
                do(image)
            except (OSError, ImageError) as error:
                errors.append(error)
                continue
            for earlier in errors:
                self._note(f"another folder could not take it: {earlier}")
            return image
        for later in errors[1:]:
            errors[0].add_note(str(later))
        raise errors[0]

    def _note(self, text: str) -> None:
        for passage in self._passages.values():
            passage.note(text)

    def _opened(self, path: Path) -> NewImage:
        image = NewImage(path, self._replace, self._durable)
        self._open.enter_context(image)
        if self._replace:
            refuse_needed(path)
        return image

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
        self._note(
            f"it would go to {image.path}; all of the image has at most "
            f"{maps.mib(sum(sizes))}, in {files} {'file' if files == 1 else 'files'}"
            if sizes
            else f"it would go to {image.path}; how much it is is not known"
        )

    def _reserve(self, image: NewImage) -> None:
        sizes = self._sizes()
        files = self.copier.file_sizes(sizes)
        driver.init(0)
        # Of each process on each GPU one at least; and as many for the way back.
        count = len(self._passages)
        regions = count * driver.device_get_count()
        _require_descriptors(
            3 * max(len(files), self.copier.workers, regions)
            + count * _WORKERS_FOR_THE_WAY_BACK
        )
        try:
            image.reserve(files)
        except OSError:
            image.withdraw()
            raise
        if not sizes:
            self._note("not checked: space, since its GPU memory is not known")

    def _lock_all(self) -> None:
        self._all(to(State.LOCKED))
        while new := self._group._look_for_members():
            taken = self._take(new)
            self._refuse_suspended()
            self._all(to(State.LOCKED), taken)
        self.refuse_nobody()

    def _begin_all(self) -> None:
        for pid in list(self._passages):  # one after the other
            self._all(SavePassage.begin, [pid])
        self.refuse_nobody()

    def _copy_all(self, first: NewImage) -> None:
        """Copy all to one folder and publish; try the others if one fails."""
        failures: list[str] = []
        for image in self._places(first, failures):
            try:
                self._copy_to(image)
            except Exception as error:
                for saver in self._savers:
                    saver.stored = None
                image.withdraw()
                failures.append(f"{image.path}: {str(error) or type(error).__name__}")
            else:
                for failure in failures:
                    self._note(f"saved to {image.path}, since {failure}")
                return
        for pid in self._passages:
            self._problems[pid] = NotSavedError(
                pid, f"was not saved: {'; '.join(failures)}"
            )
        raise Failed

    def _places(self, first: NewImage, failures: list[str]) -> Iterator[NewImage]:
        yield first
        for path in self._paths:
            try:
                image = self._opened(path)
            except (OSError, RuntimeError) as error:
                failures.append(f"{path}: {error}")
                continue
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
        whole = self._described(image, saved)
        image.publish(whole.to_json(), {stripe.file for stripe in whole.stripes})
        self._image, self._checksum = image, whole.checksum
        for saver, content in zip(savers, contents, strict=True):
            saver.outcome.image = image.path
            saver.process._image = [image.path, whole.checksum, {}]
            saver.stored = Stored(content, image)

    def _described(self, image: NewImage, saved: list[SavedProcess]) -> Image:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        version = driver.driver_get_version()
        return Image(image.path, now, str(cuckpt.__version__), version, saved)

    def keep(self, passage: "SavePassage") -> None:
        """Copy the memory of one to where it can be brought back from.

        Raises
        ------
        ProcessLostError
            If no place takes it.
        """
        failures: list[str] = []
        with self._keeping:  # one after the other: memory is counted, buffers are few
            for place in self._places_for_the_way_back(passage, failures):
                try:
                    copier = Copier(workers=_WORKERS_FOR_THE_WAY_BACK)
                    with passage.copying():
                        (content,) = copied(copier, [passage], place)
                except Exception as error:
                    failures.append(
                        f"{place.path}: {str(error) or type(error).__name__}"
                    )
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
        yield from self._folders_of_its_own(passage, failures)

    def _folders_of_its_own(
        self, passage: "SavePassage", failures: list[str]
    ) -> Iterator[NewImage]:
        """Yield folders for one process, since the one of the image may be at fault."""
        for path in self._all_paths:
            own = f"{path}.{passage.process.pid}"
            names = itertools.chain([own], (f"{own}.{n}" for n in itertools.count(2)))
            try:
                yield self._opened(next(n for n in names if not os.path.lexists(n)))
            except (OSError, RuntimeError) as error:
                failures.append(f"{path}: {error}")

    def rescue(self, passage: "SavePassage", error: ProcessLeftError) -> ProcessError:
        """Keep the copy of one that cannot be brought back as an image.

        Parameters
        ----------
        passage : SavePassage
        error : ProcessLeftError
            Why it could not.

        Returns
        -------
        ProcessError
            What is to be raised instead.
        """
        failures: list[str] = []
        assert passage.stored is not None
        contents, place = passage.stored
        if place is self._image:
            return passage.left_in(self._image.path, error)
        places = (
            [place]
            if isinstance(place, NewImage)
            else self._folders_of_its_own(passage, failures)
        )
        for image in places:
            try:
                there = contents
                if isinstance(place, InMemory):
                    there = {
                        uuid: place.move(content, image)
                        for uuid, content in contents.items()
                    }
                whole = self._described(image, [passage.described(there)])
                names = {stripe.file for stripe in whole.stripes}
                image.publish(whole.to_json(), names)
            except Exception as problem:
                failures.append(f"{image.path}: {problem}")
            else:
                passage.process._image = [image.path, whole.checksum, {}]
                passage.outcome.image = image.path
                return passage.left_in(image.path, error)
        return passage.lost(f"{error.args[1]}; {'; '.join(failures)}")

    def _withdraw(self) -> None:
        """Take the image away again, unless somebody needs it."""
        if self._image is None:
            return
        needed = [saver for saver in self._savers if saver.holds_memory]
        if not needed:
            self._image.withdraw()
        for saver in self._savers:
            if saver in needed:
                saver.note(f"its GPU memory is in {saver.outcome.image}")
                continue
            saver.process._forget_image([self._image.path, self._checksum, {}])
            saver.outcome.image = None
            if needed:  # it runs on from here, and the image does not fit any more
                with contextlib.suppress(OSError):
                    self._image.add_user(identity(saver.process), self._checksum)


def _require_descriptors(count: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = limit - len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and left < count:
        raise OSError(
            errno.EMFILE,
            f"{count} file descriptors are needed, and {left} are left (ulimit -n)",
        )


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

    def begin(self) -> None:
        """Have its memory handed out."""
        super().begin()
        assert self.operation is not None
        self._gpus = {
            uuid: (gpu_name(region.gpu), region.size)
            for uuid, region in self.operation.regions.items()
        }

    def described(self, contents: dict[str, Content]) -> SavedProcess:
        """Return what the manifest tells of it."""
        pid, start_time = self.process._key
        regions = [
            SavedRegion(uuid, *facts, *contents[uuid])
            for uuid, facts in self._gpus.items()
        ]
        return SavedProcess(
            pid,
            self.process.name,
            start_time or 0,
            proc.boot_id(),
            proc.pid_namespace(),
            regions,
        )

    def left_in(self, path: str, error: ProcessLeftError) -> ProcessLeftError:
        """Return the error that names the image that has its memory.

        Parameters
        ----------
        path : str
        error : ProcessLeftError
            Why it could not be brought back.
        """
        return ProcessLeftError(
            self.process.pid,
            f"has its GPU memory in {path}, and load() brings it back: "
            f"{error.args[1].removesuffix(WHAT_MAY_HELP)}",
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
                why = f"its checkpoint cannot be completed: {error}"
                raise self.lost(why) from error
        try:
            super().go_back(initial)
        except ProcessLeftError as error:
            if self.stored is None or self.holds_memory is False:
                raise
            raise self._save_run.rescue(self, error) from error
        self.holds_memory = False

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
        self.holds_memory = False


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
