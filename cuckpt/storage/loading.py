"""A job is loaded from an image, or left suspended as it was.

What can be checked is checked before the driver is called. Then the driver hands out
memory for one after the other, all of it is filled at once, and each chunk is compared
with what was saved before it goes to the GPU. Nobody runs before all is well.
"""

import contextlib
import functools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cuckpt import driver, gpu_map as maps, proc, uuids
from cuckpt.group_run import Failed, GroupReport, Run
from cuckpt.passage import Passage, State, state_text
from cuckpt.process_errors import ProcessError, ProcessLeftError
from cuckpt.storage import cuda
from cuckpt.storage.copier import Copier, Region
from cuckpt.storage.errors import ImageError
from cuckpt.storage.folder import OldImage, Path
from cuckpt.storage.manifest import (
    Content,
    Image,
    SavedProcess,
    SavedRegion,
)
from cuckpt.storage.operation import Operation, hold_contexts
from cuckpt.storage.passage import StoragePassage, identity
from cuckpt.storage.reader import opened
from cuckpt.uninterrupted import is_asked_to_end

if TYPE_CHECKING:
    from cuckpt.group import ProcessGroup
    from cuckpt.process import Process


class NotLoadedError(ProcessError):
    """It could not be loaded, and is as before."""


class LoadRun(Run):
    """One load of all members.

    Parameters
    ----------
    group : ProcessGroup
    path : str or path
        The folder.
    same_process : bool
        Whether to take an image only of the process itself, and once only.
    remove : bool
        Whether to remove the image once all run.
    """

    def __init__(
        self, group: "ProcessGroup", path: Path, same_process: bool, remove: bool
    ) -> None:
        super().__init__(group)
        self._path = path
        self._same_process = same_process
        self._remove = remove

    def load(
        self, cancelled: threading.Event, gpu_map: "Mapping[Any, Any] | None"
    ) -> GroupReport:
        """Load all, or leave all suspended."""
        if gpu_map is not None:
            maps.check_type(gpu_map)
        with self._begun(cancelled), cuda.used(), OldImage(self._path) as old:
            image = opened(old)
            self._take(self._group._members.values())
            self._match(image, old.users(image.checksum))
            self.refuse_nobody()
            self._prepare(gpu_map, dict.fromkeys(self.initial, State.RUNNING))
            with self._brought_back():
                self._begin_all()
                self._copy_all(old)
                self._all(StoragePassage.complete)
                if self.cancelled.is_set() or is_asked_to_end():
                    raise KeyboardInterrupt
            # From here on there is no way back: those that run change their memory.
            self._use_up(old)
            self._each(lambda passage: passage.go_back(State.RUNNING), self._passages)
            self._raise_problems()
            self.refuse_nobody()
            if self._remove and (self._same_process or not self._report.skipped):
                self._remove_image(old)  # CRIU may make anew who has ended
        return self._finished()

    def _passage_of(self, member: "Process") -> Passage:
        return LoadPassage(member, self)

    @property
    def _loaders(self) -> "list[LoadPassage]":
        return [
            each for each in self._passages.values() if isinstance(each, LoadPassage)
        ]

    def _match(self, image: Image, users: set[str]) -> None:
        """Find for each member what was saved of it, one to one."""
        if image.cuda_version > driver.driver_get_version():
            raise ImageError(
                f"{image.path} was saved with CUDA {_version(image.cuda_version)}, and "
                f"this driver has {_version(driver.driver_get_version())}"
            )
        saved = {process.pid: process for process in image.processes}
        self._leave_out_the_dead(saved)
        self._leave_out_who_runs(saved, users)
        missing = sorted(saved.keys() - self._passages.keys())
        if missing:
            raise ImageError(
                f"{image.path} is also, or only, of processes that are not to be "
                f"loaded: {', '.join(map(str, missing))}; load all of a job together"
            )
        for loader in self._loaders:
            pid = loader.process.pid
            why = f"is not in {image.path}"
            if pid in saved:
                why = why_not(
                    loader.process,
                    loader.initial,
                    saved[pid],
                    users,
                    image,
                    self._same_process,
                )
            if not why:
                loader.saved, loader.checksum = saved[pid], image.checksum
                loader.outcome.image = image.path
                loader.outcome.used_bytes = {
                    region.gpu: region.size for region in saved[pid].regions
                }
            else:
                self._problems[pid] = NotLoadedError(pid, why)
        self._raise_problems()

    def _leave_out_the_dead(self, saved: dict[int, SavedProcess]) -> None:
        """Leave out whose process has ended: that one is not loaded any more."""
        for pid in saved.keys() - self._passages.keys():
            now = proc.glance(pid)
            if (
                now is None
                or now.state in "ZX"
                or (self._same_process and now.start_time != saved[pid].start_time)
            ):
                del saved[pid]
                self._report.skipped[pid] = "has ended since it was saved"

    def _leave_out_who_runs(
        self, saved: dict[int, SavedProcess], users: set[str]
    ) -> None:
        """Leave out who has run on without the others, unless that is everybody."""
        run_on = {
            pid
            for pid, process in saved.items()
            if process.identity in users
            and self.initial.get(pid, State.RUNNING) == State.RUNNING
        }
        if run_on == saved.keys():
            return
        for pid in run_on:
            del saved[pid]
            self._passages.pop(pid, None)
            self._report.skipped[pid] = "runs on, and not from this image"

    def _begin_all(self) -> None:
        for pid in list(self._passages):  # one after the other
            self._all(LoadPassage.begin, [pid])

    def _copy_all(self, old: OldImage) -> None:
        regions: list[Region] = []
        contents: list[Content] = []
        owners: list[LoadPassage] = []
        loaders = self._loaders
        for loader in loaders:
            for region, content in loader.filled():
                regions.append(region)
                contents.append(content)
                owners.append(loader)
        try:
            with contextlib.ExitStack() as stack:
                for loader in loaders:
                    stack.enter_context(loader.copying())
                Copier().load(
                    regions,
                    contents,
                    old,
                    lambda number, size: owners[number].count(size),
                )
        except Exception as error:
            for loader in loaders:
                pid = loader.process.pid
                why = f"{old.path}: {str(error) or type(error).__name__}"
                if isinstance(error, ImageError):
                    why += "; load() it from a whole copy of the image"
                problem = NotLoadedError(pid, f"was not loaded from {why}")
                problem.__cause__ = error
                self._problems[pid] = problem
            raise Failed from None

    def _remove_image(self, old: OldImage) -> None:
        try:
            old.remove()
        except (OSError, ImageError) as error:
            for loader in self._loaders:
                loader.note(f"the image could not be removed: {error}")

    def _use_up(self, old: OldImage) -> None:
        """Let nobody load these processes from it again: they run on from here."""
        for loader in self._loaders:
            loader.process._image = None
            own = identity(loader.process)
            use_up = functools.partial(old.add_user, own, loader.checksum)
            loader.noted("whether it is loaded from this image once only", use_up)


class LoadPassage(StoragePassage):
    """The way of a member from an image.

    Attributes
    ----------
    saved : SavedProcess or None
    checksum : str
        Of the image's manifest.
    """

    after: Mapping[str, State] = {
        **Passage.after,
        "prepare": State.RESTORING,
        "complete": State.LOCKED,
    }
    saved: SavedProcess | None = None
    checksum = ""

    def needed_bytes(self) -> dict[bytes, int]:
        """Return how much it needs by the UUID of the GPU that it was on."""
        return {uuids.to_bytes(each.gpu): each.size for each in self._regions()}

    def begin(self) -> None:
        """Have memory handed out."""
        hold_contexts(self._new_gpu(region.gpu) for region in self._regions())
        super().begin()
        assert self.operation is not None
        found = {uuid: each.size for uuid, each in self.operation.regions.items()}
        wanted = {self._new_gpu(each.gpu): each.size for each in self._regions()}
        if found != wanted:
            raise NotLoadedError(
                self.process.pid, f"needs memory of {found}, and the image has {wanted}"
            )

    def filled(self) -> list[tuple[Region, Content]]:
        """Return its memory on each GPU, and what is to go there."""
        assert self.operation is not None
        return [
            (
                self.operation.regions[self._new_gpu(each.gpu)],
                Content(each.stripes, each.zeros),
            )
            for each in self._regions()
        ]

    def _regions(self) -> list[SavedRegion]:
        return self.saved.regions if self.saved else []

    def _new_gpu(self, old: str) -> str:
        new = dict(self._pairs).get(uuids.to_bytes(old))
        return old if new is None else uuids.to_text(new)

    def _call(self, verb: str) -> None:
        if verb == "prepare":
            self._restore_by(self._begin_restore)
        elif verb == "checkpoint":
            # On the way back: nobody needs what is there, the image has it.
            self._throw_away()
        else:
            super()._call(verb)

    def _throw_away(self) -> None:
        """Checkpoint it without a copy, and keep in mind on which GPUs it is now."""
        operation = self.begun(lambda: Operation.checkpoint(self.process.pid, None))
        try:
            operation.complete()
        except driver.DriverError as error:
            raise self.lost(f"its checkpoint cannot be completed: {error}") from error
        if self._pairs or self._moved():
            moved = {uuids.to_text(old): uuids.to_text(new) for old, new in self._pairs}
            image = self.process._image or [self.outcome.image, self.checksum]
            self.process._image = [*image[:2], moved]

    def _moved(self) -> dict[bytes, bytes]:
        """Return where the memory of which GPU is, since a load that failed."""
        image = self.process._image
        return {
            uuids.to_bytes(old): uuids.to_bytes(new)
            for old, new in (image[2] if image else {}).items()
        }

    def _begin_restore(self) -> None:
        gpus = [self._new_gpu(region.gpu) for region in self._regions()]
        pairs, moved = self._pairs, self._moved()
        if moved:
            pairs = [
                (moved.get(old, old), new)
                for old, new in pairs or [(gpu, gpu) for gpu in moved]
            ]
        self.operation = self.begun(
            lambda: Operation.restore(self.process.pid, gpus, pairs)
        )

    def go_back(self, initial: int) -> None:
        """Bring it to a state; what is half filled is thrown away, and never runs."""
        self._cancelled = threading.Event()
        if self.operation is not None:
            try:
                self.complete()
            except driver.DriverError as error:
                raise self.lost(f"its restore cannot be completed: {error}") from error
        try:
            super().go_back(initial)
        except ProcessLeftError as error:
            if initial == State.RUNNING:
                raise
            raise self.lost(
                f"it is half filled and must not run, and {error.args[1]}"
            ) from error


def why_not(
    process: "Process",
    state: int,
    saved: SavedProcess,
    users: set[str],
    image: Image,
    same_process: bool = True,
) -> str:
    """Tell why a process cannot be loaded from an image; nothing if it can.

    Parameters
    ----------
    process : Process
    state : int
    saved : SavedProcess
        What the image has of its pid.
    users : set of str
        As `OldImage.users` has them.
    image : Image
    same_process : bool
        As for `LoadRun`.

    Returns
    -------
    str
    """
    if state != State.CHECKPOINTED:
        return f"is {state_text(state)}: there is nothing to load"
    if identity(process) != saved.identity:
        if not same_process:
            return ""
        return (
            f"is another process than the one in {image.path}, though it has its "
            "pid; same_process=False loads it nevertheless"
        )
    latest = process._image
    if latest is not None and latest[1] != image.checksum:
        return f"has been saved since, to {latest[0]}: this image does not fit"
    if saved.identity in users:
        return (
            f"has been loaded from {image.path} before, and has run since: this image "
            "does not fit any more, and resume() brings it back"
        )
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
