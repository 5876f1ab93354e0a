"""Whether an image is still of use to somebody."""

from cuckpt import driver, proc
from cuckpt.passage import State
from cuckpt.process import Process
from cuckpt.process_errors import ProcessGoneError, ProcessStoppedError
from cuckpt.storage.errors import ImageError
from cuckpt.storage.folder import OldImage, Path
from cuckpt.storage.loading import why_not
from cuckpt.storage.reader import opened
from cuckpt.uninterrupted import in_time

_TIME_TO_ANSWER_S = 2


def needed_by(path: Path) -> list[int]:
    """Tell for which processes an image is; without any it can be removed.

    Those are suspended, their GPU memory is in it, and they have not been saved to
    another one since, as far as this user's programs know. One that cannot be asked
    counts. Pids are those of the pid namespace that it was saved in.

    Parameters
    ----------
    path : str or path
        Its folder.

    Returns
    -------
    list of int
        Their pids.

    Raises
    ------
    ImageError, OSError
        As `describe`; and if it is of another machine, or of before a boot.
    """
    needed = []
    with OldImage(path) as old:
        image, users = opened(old), old.users()
        if any(saved.boot_id != proc.boot_id() for saved in image.processes):
            raise ImageError(
                f"{image.path} is of another machine, or of before a boot: its "
                "processes are not to be seen here"
            )
        for saved in image.processes:
            try:
                process = Process(saved.pid)
                state = in_time(process._read_state, _TIME_TO_ANSWER_S)
            except (ProcessGoneError, ValueError, driver.NotInitializedError):
                continue  # it is another's pid by now, if anybody's
            except (ProcessStoppedError, TimeoutError, driver.DriverError):
                state = State.CHECKPOINTED
            if not why_not(process, state, saved, users, image):
                needed.append(saved.pid)
    return needed


def refuse_needed(path: Path) -> None:
    """Raise if an image is there that somebody needs.

    Parameters
    ----------
    path : str or path
        Its folder, if it is one.

    Raises
    ------
    FileExistsError
    """
    try:
        pids = needed_by(path)
    except (ImageError, OSError):
        return  # there is none that could be loaded
    if pids:
        raise FileExistsError(
            f"{path} holds all that is left of the GPU memory of process "
            f"{', '.join(map(str, pids))}: load() it, or name another folder"
        )
