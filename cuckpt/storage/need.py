"""Whether an image is still of use to somebody."""

from cuckpt import driver, proc
from cuckpt.passage import State
from cuckpt.process import Process
from cuckpt.process_errors import ProcessGoneError, ProcessStoppedError
from cuckpt.storage.errors import ImageError
from cuckpt.storage.folder import OldImage, Path
from cuckpt.storage.loading import why_not
from cuckpt.storage.manifest import Image
from cuckpt.storage.reader import opened
from cuckpt.uninterrupted import in_time

_TIME_TO_ANSWER_S = 2


def needed_by(path: Path) -> list[int]:
    """Tell for which processes an image is; without any it can be removed.

    Those are suspended, their GPU memory is in it, and they have not been saved to
    another one since, as far as this user's programs know. One that cannot be asked
    counts; one that CRIU is to make anew does not.

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
        As `describe`; and if it is of another machine, of before a boot, or of another
        pid namespace.
    RuntimeError
        Without a driver.
    """
    with OldImage(path) as old:
        image = opened(old)
        if _is_of_another_boot(image):
            raise ImageError(
                f"{image.path} is of another machine, or of before a boot: its "
                "processes are not to be seen here"
            )
        return _needed_by(image, old.users(image.checksum))


def _is_of_another_boot(image: Image) -> bool:
    return any(saved.boot_id != proc.boot_id() for saved in image.processes)


def _needed_by(image: Image, users: set[str]) -> list[int]:
    own = proc.pid_namespace()
    if any(saved.pid_namespace != own for saved in image.processes):
        raise ImageError(
            f"{image.path} was saved in another pid namespace, such as a container: "
            "its processes are not to be seen here"
        )
    needed = []
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
    """Raise if an image is there that somebody on this machine needs, or may need.

    Parameters
    ----------
    path : str or path
        Its folder, which this program has locked.

    Raises
    ------
    FileExistsError
        If somebody does.
    ImageError
        If it was saved in another pid namespace.
    """
    try:
        with OldImage(path, lock=False) as old:
            image = opened(old)
            users = old.users(image.checksum)
    except (ImageError, OSError):
        return  # there is none that could be loaded
    if _is_of_another_boot(image):
        return
    pids = _needed_by(image, users)
    if pids:
        raise FileExistsError(
            f"{path} holds all that is left of the GPU memory of process "
            f"{', '.join(map(str, pids))}: load() it, or name another folder"
        )
