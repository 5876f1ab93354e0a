"""How much GPU memory suspended processes need, kept for other programs.

Who resumes a process need not be who has suspended it, and NVML does not tell any more.
A file for each, in a folder of this user's that a boot clears: a help, without which
all works as well.
"""

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping

from cuckpt import proc

Key = tuple[int, int | None]  # pid and start time


def keep(key: Key, used_bytes: Mapping[str, int]) -> None:
    """Keep what a process has used.

    Parameters
    ----------
    key : tuple of int
        Its pid and start time.
    used_bytes : mapping of str to int
        By the UUID of the GPU.
    """
    with contextlib.suppress(OSError), _opened() as folder:
        _forget_the_dead(folder)
        new = f"new-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "w") as file:
            json.dump(dict(used_bytes), file)
        os.replace(new, _name(key), src_dir_fd=folder, dst_dir_fd=folder)


def recall(key: Key) -> dict[str, int] | None:
    """Return what a process has used; None if nobody has kept it.

    Parameters
    ----------
    key : tuple of int
        As for `keep`.

    Returns
    -------
    dict of str to int or None
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError, ValueError), _opened() as folder:
        with os.fdopen(os.open(_name(key), flags, dir_fd=folder)) as file:
            found = json.load(file)
        if isinstance(found, dict) and all(type(n) is int for n in found.values()):
            return found
    return None


def forget(key: Key) -> None:
    """Forget what a process has used.

    Parameters
    ----------
    key : tuple of int
        As for `keep`.
    """
    with contextlib.suppress(OSError), _opened() as folder:
        os.unlink(_name(key), dir_fd=folder)


def _name(key: Key) -> str:
    return f"{key[0]}-{key[1]}"


@contextlib.contextmanager
def _opened():  # type: ignore[no-untyped-def]
    """Yield a descriptor of the folder, which is this user's only."""
    path = _path()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path, flags)
    try:
        facts = os.fstat(folder)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise PermissionError(f"{path} is not this user's only")
        yield folder
    finally:
        os.close(folder)


def _path() -> str:
    if os.geteuid() == 0:
        return "/run/cuckpt"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/cuckpt" if runtime else f"/tmp/cuckpt-{os.geteuid()}"


def _forget_the_dead(folder: int) -> None:
    for name in os.listdir(folder):
        pid, _, start_time = name.partition("-")
        if pid.isdecimal() and str(proc.start_time(int(pid))) != start_time:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
