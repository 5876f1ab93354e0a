"""Images: GPU memory in a folder, at the speed of bus, memory and disk.

`Process.save` and `Process.load` make and take them, as do those of a `ProcessGroup`;
here is what can be known of one. docs/images.md tells more, docs/image-format.md what
is in the folder. Needs the extra ``storage``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuckpt import driver
from cuckpt.errors import catchable
from cuckpt.group_run import GroupError, GroupReport
from cuckpt.passage import Outcome
from cuckpt.process_errors import NoMembersError, ProcessGoneError
from cuckpt.storage.copier import MAX_WORKERS
from cuckpt.storage.cuda import release
from cuckpt.storage.errors import ImageError, ImageInUseError
from cuckpt.storage.folder import OldImage, Path
from cuckpt.storage.loading import LoadRun, NotLoadedError
from cuckpt.storage.manifest import Image, SavedProcess, SavedRegion
from cuckpt.storage.need import needed_by
from cuckpt.storage.reader import damages, opened
from cuckpt.storage.saving import NotSavedError, SaveRun
from cuckpt.uninterrupted import deadline_in, uninterrupted

if TYPE_CHECKING:
    from cuckpt.group import ProcessGroup
    from cuckpt.process import Process

__all__ = [
    "Image",
    "ImageError",
    "ImageInUseError",
    "NotLoadedError",
    "NotSavedError",
    "SavedProcess",
    "SavedRegion",
    "describe",
    "needed_by",
    "release",
    "verify",
]


def describe(path: Path) -> Image:
    """Tell what is in an image; its files are not read.

    Parameters
    ----------
    path : str or path
        Its folder.

    Returns
    -------
    Image

    Raises
    ------
    ImageError
        If there is none, or it is damaged, incomplete or of another version.
    OSError
        If it cannot be read.
    """
    with OldImage(path) as old:
        return opened(old)


def verify(path: Path) -> Image:
    """Read an image, and compare all of it with its checksums.

    Parameters
    ----------
    path : str or path
        Its folder.

    Returns
    -------
    Image

    Raises
    ------
    ImageError
        As `describe`, and if a file is not what was saved; with all such files.
    OSError
        If it cannot be read.
    """
    with OldImage(path) as old:
        image = opened(old)
        workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        wrong = damages(old, image.stripes, workers)
    if wrong:
        raise ImageError("\n  ".join([f"{image.path} is not what was saved:", *wrong]))
    return image


def save_group(
    group: "ProcessGroup",
    path: Path,
    timeout_s: float | None,
    fallback: Sequence[Path],
    replace: bool,
    durable: bool,
    dry_run: bool,
) -> GroupReport:
    """Save all members; see `ProcessGroup.save`."""
    if isinstance(fallback, str | bytes | os.PathLike):
        raise TypeError("fallback must be a sequence of folders, not one")
    deadline = deadline_in(timeout_s)
    _require_custom_storage()
    run = SaveRun(group, path, deadline, fallback, replace, durable)
    if dry_run:
        return uninterrupted(lambda cancelled: run.save(cancelled, dry_run))
    return group._suspending(lambda cancelled: run.save(cancelled, dry_run))


def load_group(
    group: "ProcessGroup",
    path: Path,
    gpu_map: "Mapping[Any, Any] | None",
    same_process: bool,
    remove: bool,
) -> GroupReport:
    """Load all members; see `ProcessGroup.load`."""
    _require_custom_storage()
    run = LoadRun(group, path, same_process, remove)
    with group._told():
        return uninterrupted(lambda cancelled: run.load(cancelled, gpu_map))


def save_process(process: "Process", *options: Any) -> Outcome:
    """Save one process; see `Process.save`."""
    return _alone(process, lambda group: save_group(group, *options))


def load_process(process: "Process", *options: Any) -> Outcome:
    """Load one process; see `Process.load`."""
    return _alone(process, lambda group: load_group(group, *options))


def _alone(process: "Process", do: "Callable[[ProcessGroup], GroupReport]") -> Outcome:
    """Do with a process what is done with groups; its error is raised itself."""
    from cuckpt.group import ProcessGroup

    process._read_state()  # which raises if it cannot be asked
    try:
        report = do(ProcessGroup._of(process))
    except NoMembersError as error:
        why = error.skipped.get(process.pid, "has ended")
        raise ProcessGoneError(
            process.pid, f"cannot be saved or loaded: {why}"
        ) from None
    except GroupError as error:
        (problem,) = error.exceptions
        if process.pid in error.report.outcomes:  # it has not ended
            for note in error.report.outcomes[process.pid].notes:
                problem.add_note(note)
        raise problem from problem.__cause__
    if process.pid not in report.outcomes:
        raise ProcessGoneError(process.pid, report.skipped[process.pid])
    return report.outcomes[process.pid]


def _require_custom_storage() -> None:
    """Raise unless the driver hands GPU memory out."""
    if not driver.has_custom_storage():
        driver.init(0)
        number = driver.driver_get_version()
        raise catchable(driver.FunctionNotFoundError)(
            f"the driver in use ({driver.library_path()}, CUDA {number // 1000}."
            f"{number % 1000 // 10}) has no custom storage, which images need: that "
            "comes with CUDA 13.4 (driver 615). suspend() does without it, and keeps "
            "GPU memory in the host memory of the process"
        )
