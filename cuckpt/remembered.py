"""What is known of suspended processes, kept for other programs.

Who resumes a process need not be who has suspended it, and NVML does not tell any more
how much GPU memory it needs, nor anybody which image holds that.
A file for each, in a folder of this user's that a boot clears: a help, without which
all works as well.
"""

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

from cuckpt import proc

_OLD_S = 60
Key = tuple[int, int | None]  # pid and start time


def keep(key: Key, **facts: Any) -> bool:
    """Keep something of a process, besides what is kept; tell whether that worked.

    Parameters
    ----------
    key : tuple of int
        Its pid and start time.
    **facts
        `used_bytes`, by the UUID of the GPU; `image`, its folder and checksum, and
        where a load that failed left memory of which GPU; `lost`, whether it can be
        restored no more.

    Returns
    -------
    bool
    """
    facts = {**recall(key), **facts}
    with contextlib.suppress(OSError):  # it is there, or what follows fails
        os.mkdir(_path(), 0o700)
    with contextlib.suppress(OSError), _opened() as folder:
        _forget_the_dead(folder)
        new = f"new-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "w") as file:
            json.dump(facts, file)
        os.replace(new, _name(key), src_dir_fd=folder, dst_dir_fd=folder)
        return True
    return False


def recall(key: Key) -> dict[str, Any]:
    """Return what is kept of a process.

    Parameters
    ----------
    key : tuple of int
        As for `keep`.

    Returns
    -------
    dict
        Those facts of `keep` that are kept.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    found = None
    with (
        contextlib.suppress(OSError, ValueError),
        _opened() as folder,
        os.fdopen(os.open(_name(key), flags, dir_fd=folder)) as file,
    ):
        found = json.load(file)
    facts = found if isinstance(found, dict) else {}
    return {
        name: value
        for name, value in facts.items()
        if name in _KINDS and _KINDS[name](value)
    }


def _is_memory(value: Any) -> bool:
    return isinstance(value, dict) and all(type(n) is int for n in value.values())


def _is_image(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(text, str) for text in value[:2])
        and isinstance(value[2], dict)
        and all(isinstance(gpu, str) for pair in value[2].items() for gpu in pair)
    )


_KINDS: dict[str, Callable[[Any], bool]] = {
    "used_bytes": _is_memory,
    "image": _is_image,
    "lost": lambda value: isinstance(value, bool),
}


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
def _opened() -> Iterator[int]:
    """Yield a descriptor of the folder, which is this user's only."""
    path = _path()
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
        is_dead = pid.isdecimal() and str(proc.start_time(int(pid))) != start_time
        if is_dead or _is_left_over(folder, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


def _is_left_over(folder: int, name: str) -> bool:
    """Tell whether a file is of who was killed while writing it."""
    if not name.startswith("new-"):
        return False
    with contextlib.suppress(FileNotFoundError):
        age_s = time.time() - os.stat(name, dir_fd=folder).st_mtime
        return age_s > _OLD_S
    return False
