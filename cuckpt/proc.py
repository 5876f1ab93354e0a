"""What /proc tells of a process: whether it is the one that is meant, and can answer.

Nothing here calls the driver or waits for anybody.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Facts(NamedTuple):
    """What is known of a process, or of a thread.

    Attributes
    ----------
    state : str
        The kernel's letter: ``R`` running, ``S`` sleeping, ``T`` stopped, ``t``
        stopped by a debugger, ``Z`` zombie ...
    owner : int
        The process that a thread belongs to; of a process itself.
    uid : int
    name : str
    namespace_pids : tuple of int
        Its number in each pid namespace, this one's first.
    """

    state: str
    owner: int
    uid: int
    name: str
    namespace_pids: tuple[int, ...]


class Glance(NamedTuple):
    """What is known of a process at once.

    Attributes
    ----------
    state : str
        As in `Facts`.
    parent : int
    start_time : int
        In clock ticks since boot.
    """

    state: str
    parent: int
    start_time: int


def read_status(pid: int) -> dict[str, str] | None:
    """Return the lines of /proc/PID/status; None if there is no such process.

    Parameters
    ----------
    pid : int

    Returns
    -------
    dict or None
    """
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            return {
                name: value.strip()
                for name, _, value in (line.partition(":") for line in file)
            }
    except OSError as error:
        _raise_if_it_is_here(error)
        return None


def facts(pid: int) -> Facts | None:
    """Return what is known of a process or thread; None if there is none.

    Parameters
    ----------
    pid : int

    Returns
    -------
    Facts or None
    """
    status = read_status(pid)
    if status is None:
        return None
    return Facts(
        state=status["State"][0],
        owner=int(status["Tgid"]),
        uid=int(status["Uid"].split()[0]),
        name=status["Name"],
        namespace_pids=tuple(map(int, status.get("NSpid", str(pid)).split())),
    )


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None without one.

    Together with the pid it identifies a process, since pids are used again.

    Parameters
    ----------
    pid : int

    Returns
    -------
    int or None
    """
    found = glance(pid)
    return found.start_time if found else None


def boot_id() -> str:
    """Return what identifies the boot of this machine; nothing if nothing tells.

    Returns
    -------
    str
    """
    return "".join(_lines("/proc/sys/kernel/random/boot_id")).strip()


def pid_namespace() -> int:
    """Return what identifies the namespace that pids are of here; 0 if nothing tells.

    Returns
    -------
    int
    """
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def glance(pid: int) -> Glance | None:
    """Return what can be told fast of a process; None if there is none.

    Parameters
    ----------
    pid : int

    Returns
    -------
    Glance or None
    """
    fields = _stat(f"/proc/{pid}/stat")
    return Glance(fields[0], int(fields[1]), int(fields[19])) if fields else None


def is_stopped(pid: int, thread: int | None = None) -> bool:
    """Tell whether nothing of a process runs that could answer.

    Parameters
    ----------
    pid : int
    thread : int, optional
        The thread that would; any, if it is not known.

    Returns
    -------
    bool
    """
    if thread is not None and os.path.exists(f"/proc/{pid}/task/{thread}"):
        return _stat(f"/proc/{pid}/task/{thread}/stat")[:1] in (["T"], ["t"])
    first = glance(pid)
    if first is None or first.state not in "TtZ":
        return False
    states = [_stat(f"/proc/{pid}/task/{tid}/stat")[:1] for tid in threads(pid)]
    living = [state for state in states if state not in ([], ["Z"])]
    return bool(living) and all(state in (["T"], ["t"]) for state in living)


def is_frozen(pid: int) -> bool:
    """Tell whether the cgroup of a process is frozen.

    Parameters
    ----------
    pid : int

    Returns
    -------
    bool
    """
    for line in _lines(f"/proc/{pid}/cgroup"):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if not controllers:  # cgroup v2
            for root in "/sys/fs/cgroup", "/sys/fs/cgroup/unified":
                if "frozen 1\n" in _lines(f"{root}{path}/cgroup.events"):
                    return True
        elif "freezer" in controllers.split(","):
            folder = f"/sys/fs/cgroup/{controllers}{path}"
            if _lines(f"{folder}/freezer.state")[:1] in (["FROZEN\n"], ["FREEZING\n"]):
                return True
    return False


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process; none if there is no such process.

    Parameters
    ----------
    pid : int

    Returns
    -------
    list of int
    """
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def pids() -> Iterator[int]:
    """Yield the pids that are to be seen.

    Yields
    ------
    int
    """
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def tree(pid: int) -> dict[int, str]:
    """Return a process, its children, their children, and so on.

    Parameters
    ----------
    pid : int

    Returns
    -------
    dict of int to str
        The kernel's letter for the state of each, by its pid.
    """
    states, children = {}, dict[int, list[int]]()
    for each in pids():
        glanced = glance(each)
        if glanced:
            states[each] = glanced.state
            children.setdefault(glanced.parent, []).append(each)
    found = [pid]
    for each in found:  # which grows meanwhile
        found += children.pop(each, [])
    return {each: states[each] for each in found if each in states}


def has_loaded(pid: int, library: str) -> bool | None:
    """Tell whether a process has mapped a library; None if that may not be known.

    Parameters
    ----------
    pid : int
    library : str
        How the name of its file begins.

    Returns
    -------
    bool or None
    """
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            return any(f"/{library}" in line for line in file)
    except PermissionError:
        return None
    except OSError:
        return False


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with, as far as it shows.

    Parameters
    ----------
    pid : int

    Returns
    -------
    dict of str to str
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def open_files(pid: int, prefix: str) -> list[str]:
    """Return the files that a process has open whose names begin so.

    Parameters
    ----------
    pid : int
    prefix : str

    Returns
    -------
    list of str
    """
    folder, found = f"/proc/{pid}/fd", []
    try:
        for name in os.listdir(folder):
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if target.startswith(prefix):
                found.append(target)
    except OSError:
        pass
    return sorted(found)


def memory_left() -> tuple[int, bool] | None:
    """Return how much host memory there is for this process; None if nothing tells.

    Returns
    -------
    tuple of int and bool
        Bytes, and whether a cgroup limits it to that.
    """
    limits = list(_cgroup_left())
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            return min([available, *limits]), any(n < available for n in limits)
    return (min(limits), True) if limits else None


def number(path: "str | Path") -> int | None:
    """Return the number that a file begins with; None if there is none.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    int or None
    """
    with contextlib.suppress(ValueError):
        for line in _lines(path):
            return int(line)
    return None


def _cgroup_left() -> Iterator[int]:
    """Yield what each cgroup of this process leaves it, of those that limit it."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if not controllers:
            root, limit, used = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = Path(root + path)
        for place in (folder, *folder.parents):
            most, now = number(place / limit), number(place / used)
            if most is not None and now is not None:
                yield max(0, most - now + _cached(place))
            if str(place) == root:
                break


def _cached(cgroup: Path) -> int:
    """Return what counts as used in a cgroup and is free when it is needed."""
    fields = dict(line.split() for line in _lines(cgroup / "memory.stat"))
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def _stat(path: str) -> list[str]:
    """Return the fields of a stat file after the name, which may hold anything.

    There is one for each process, and many processes: so not by a file object.
    """
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            content = os.read(file, 4096)
        finally:
            os.close(file)
    except OSError as error:
        _raise_if_it_is_here(error)
        return []
    return content.rpartition(b")")[2].decode().split()


def _raise_if_it_is_here(error: OSError) -> None:
    """Raise an error that tells of this program: without descriptors, say."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error


def _lines(path: "str | Path") -> list[str]:
    try:
        with open(path, errors="replace") as file:
            return list(file)
    except OSError:
        return []
