"""Folders that hold an image, and nothing else.

An image is there once its manifest is: that gets its name when all else is on the
disk. Files have names of their own each time, so an image is replaced by the next one
at once or not at all.

Who can read an image has all that was in GPU memory: the folder is its owner's only,
and no link is followed.
"""

import contextlib
import errno
import fcntl
import os
import re
import resource
import secrets
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from cuckpt import proc
from cuckpt.gpu_map import mib
from cuckpt.storage.errors import ImageError, ImageInUseError
from cuckpt.storage.manifest import Content, Stripe
from cuckpt.storage.stripes import StripeFile, padded
from cuckpt.storage.threads import at_once

MANIFEST = "manifest.json"
_NEW, _OLD = f"{MANIFEST}.new", f"{MANIFEST}.old"
_USERS = "loaded"
_PART = re.compile(
    r"[0-9a-f]{8}-[0-9]{1,6}\.stripe|manifest\.json(\.new|\.old)?|loaded"
)
_RESERVING = 16
_MAX_MANIFEST_BYTES = 1 << 28  # enough for 30 TiB
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

Path: TypeAlias = "str | os.PathLike[str]"


class NewImage:
    """A folder in which an image comes to be.

    Leaving the context manager removes what was not published.

    Parameters
    ----------
    path : str or path
        The folder, which is made if it is not there; the one that it is in must be.
    replace : bool
        Whether to replace an image that is there.
    durable : bool
        Whether all is on the disk before the image is published. Then the page cache
        is passed by.

    Raises
    ------
    FileExistsError
        If an image is there, or something else.
    PermissionError
        If others may look into the folder.
    ImageError
        If somebody reads or writes an image there.
    OSError
        If it cannot be made.
    """

    def __init__(self, path: Path, replace: bool = False, durable: bool = True) -> None:
        self.path = absolute(path)
        self._durable = durable
        self._token = secrets.token_hex(4)
        self._reserved: list[StripeFile] = []
        self._files: list[StripeFile] = []
        self._count = 0
        self._lock = threading.Lock()
        self._published = False
        self._names: set[str] = set()
        with _friendly(self.path):
            self._is_new = _make(self.path)
            self._folder = os.open(self.path, _FOLDER)
        try:
            self._refuse(replace)
        except BaseException:
            os.close(self._folder)
            raise

    def _refuse(self, replace: bool) -> None:
        names = os.listdir(self._folder)
        others = sorted(name for name in names if not _PART.fullmatch(name))
        if others:
            raise FileExistsError(
                f"{self.path} holds something else, such as {others[0]}: name a folder "
                "of the image's own, as one in it that is not there yet"
            )
        facts = os.fstat(self._folder)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise PermissionError(
                f"{self.path} is not this user's alone, and an image holds all that "
                "was in GPU memory: chmod 700 it, or name a folder that is not there "
                "yet"
            )
        _lock(self._folder, self.path, fcntl.LOCK_EX)
        if MANIFEST in names and not replace:
            raise FileExistsError(
                f"{self.path} holds an image already: remove it, or have it replaced "
                "(replace=True)"
            )

    def _remove_what_was_left(self) -> None:
        """Remove the files of who was killed in the middle."""
        names = os.listdir(self._folder)
        if MANIFEST not in names:
            for name in names:
                os.unlink(name, dir_fd=self._folder)

    def _check_limit(self, size: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and size > limit:
            raise OSError(
                errno.EFBIG,
                f"files need {mib(size)} each, and may have {mib(limit)} (ulimit -f)",
                self.path,
            )

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take space for files of these sizes.

        Raises
        ------
        OSError
            If there is too little; with the sizes.
        """
        wanted = [padded(size) for size in sizes]
        self._remove_what_was_left()
        self.check_room(sum(wanted))
        self._check_limit(max(wanted, default=0))
        with _friendly(self.path):
            for _ in wanted:
                self._reserved.append(self._new())
            # In memory it takes as long as to write, by one thread.
            pairs = zip(self._reserved, wanted, strict=True)
            at_once(lambda pair: pair[0].reserve(pair[1]), pairs, _RESERVING)

    def check_room(self, size: int) -> None:
        """Raise if less is free than so many bytes."""
        left = os.fstatvfs(self._folder)
        free = left.f_bavail * left.f_frsize
        if size > free:
            raise OSError(
                errno.ENOSPC,
                f"{mib(size)} are needed and {mib(free)} are free",
                self.path,
            )

    def create(self, size: int) -> StripeFile:
        """Return a file for at most so many bytes, for which there is space then.

        Raises
        ------
        OSError
        """
        with self._lock, _friendly(self.path):
            enough = [file for file in self._reserved if file.reserved_bytes >= size]
            if enough:
                file = min(enough, key=lambda each: each.reserved_bytes)
                self._reserved.remove(file)
            else:
                file = self._reserved.pop() if self._reserved else self._new()
            self._files.append(file)
            if not enough:
                # A reservation that fails in the middle has filled the disk.
                self.check_room(padded(size) - file.reserved_bytes)
                file.reserve(padded(size))
            return file

    def _new(self) -> StripeFile:
        name = f"{self._token}-{self._count}.stripe"
        self._count += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
        file = StripeFile(name, os.open(name, flags, 0o600, dir_fd=self._folder))
        if self._durable:
            try:
                file.open_direct(os.O_RDWR | _FILE, self._folder)
            except BaseException:
                file.close()
                raise
        return file

    def file(self, name: str) -> StripeFile:
        """Return a file that was created."""
        return next(file for file in self._files if file.name == name)

    def sync(self, file: StripeFile) -> None:
        """Wait until a file is on the disk, if that is wanted."""
        if self._durable:
            file.sync()

    def publish(self, manifest: bytes, names: Collection[str]) -> None:
        """Make it an image, in the place of one that is there.

        That one is kept until `commit`, so that `withdraw` brings it back.

        Parameters
        ----------
        manifest : bytes
        names : collection of str
            The files that belong to it.

        Raises
        ------
        OSError
            If that cannot be. There is no image then, or the one of before.
        """
        self._names = {*names, MANIFEST}
        with _friendly(self.path):
            for file in self._reserved:
                file.close()
            self._reserved.clear()
            self._write_manifest(manifest)
            if self._durable:
                os.fsync(self._folder)  # the names of the stripes
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_OLD, dir_fd=self._folder)
            with contextlib.suppress(FileNotFoundError):
                os.link(
                    MANIFEST, _OLD, src_dir_fd=self._folder, dst_dir_fd=self._folder
                )
            self._rename(_NEW, MANIFEST)
            self._published = True
            if self._durable:
                os.fsync(self._folder)
                _sync_folder(os.path.dirname(self.path))

    def _write_manifest(self, manifest: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NEW, dir_fd=self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        new = os.open(_NEW, flags, 0o600, dir_fd=self._folder)
        with os.fdopen(new, "wb") as file:
            file.write(manifest)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())

    def _rename(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def withdraw(self) -> None:
        """Undo `publish`, and give up what was written: nobody needs it."""
        if self._published:
            try:
                self._take_away()
            except OSError:
                return  # then it stays, and is whole
            self._published = False
        self._give_up()

    def _take_away(self) -> None:
        try:
            self._rename(_OLD, MANIFEST)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MANIFEST, dir_fd=self._folder)

    def commit(self) -> None:
        """Remove what is left of the image of before."""
        self._remove_if_possible(lambda name: name not in self._names)

    def add_user(self, identity: str, checksum: str) -> None:
        """As `OldImage.add_user`."""
        self._names.add(_USERS)
        _add_user(self._folder, identity, checksum)

    def _give_up(self) -> None:
        for file in *self._files, *self._reserved:
            file.close()
        self._files.clear()
        self._reserved.clear()
        self._remove_if_possible(
            lambda name: name.startswith(self._token) or name == _NEW
        )

    def _remove_if_possible(self, is_meant: Callable[[str], bool]) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(self._folder)
        for name in filter(is_meant, names):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)

    def __enter__(self) -> "NewImage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; remove what was not published."""
        if self._folder < 0:
            return
        if self._published:
            self.commit()
            for file in self._files:
                file.close()
        else:
            self._give_up()
            if self._is_new:
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
        _close(self._folder)
        self._folder = -1


class OldImage:
    """A folder with an image, which nobody changes meanwhile.

    Parameters
    ----------
    path : str or path
    lock : bool
        Whether to keep others from changing it; not if this program does that anyhow.

    Attributes
    ----------
    manifest : bytes

    Raises
    ------
    ImageError
        If there is none, or somebody writes one.
    OSError
        If it cannot be read.
    """

    def __init__(self, path: Path, lock: bool = True) -> None:
        self.path = absolute(path)
        with _friendly(self.path):
            self._folder = os.open(self.path, _FOLDER)
        self._files: dict[str, StripeFile] = {}
        try:
            if lock:
                _lock(self._folder, self.path, fcntl.LOCK_SH)
            self.manifest = self._read_manifest()
        except BaseException:
            os.close(self._folder)
            raise

    def _read_manifest(self) -> bytes:
        try:
            file = self._open(MANIFEST)
        except FileNotFoundError:
            raise ImageError(
                f"{self.path} holds no image: there is no {MANIFEST}; a save that does "
                "not come to its end leaves none"
            ) from None
        with os.fdopen(file, "rb") as manifest:
            content = manifest.read(_MAX_MANIFEST_BYTES + 1)
        if len(content) > _MAX_MANIFEST_BYTES:
            raise ImageError(f"{self.path}: {MANIFEST} is too long to be one")
        return content

    def open_all(self, sizes: Mapping[str, int]) -> None:
        """Open files of the image.

        Parameters
        ----------
        sizes : mapping of str to int
            What each must have, in bytes, by name.

        Raises
        ------
        ImageError
            If one is not there, or has another size.
        """
        for name, size in sizes.items():
            try:
                with _friendly(self.path):
                    file = self._open(name)
            except FileNotFoundError:
                raise ImageError(
                    f"{self.path} is incomplete: {name} is missing"
                ) from None
            self._files[name] = StripeFile(name, file)
            self._files[name].open_direct(os.O_RDONLY | _FILE, self._folder)
            found = self._files[name].size()
            if found != size:
                raise ImageError(
                    f"{self.path} is damaged: {name} has {found} bytes, not {size}"
                )

    def file(self, name: str) -> StripeFile:
        """Return a file that is open."""
        return self._files[name]

    def users(self, checksum: str) -> set[str]:
        """Return who has been loaded from it.

        Parameters
        ----------
        checksum : str
            Of its manifest: there may be lines of one before.

        Returns
        -------
        set of str
            Pid, start time and boot of each.
        """
        try:
            with _friendly(self.path):
                file = self._open(_USERS)
        except FileNotFoundError:
            return set()
        with os.fdopen(file, "r", errors="replace") as lines:
            found = lines.read(_MAX_MANIFEST_BYTES).splitlines()
        end = f" {checksum}"
        return {line.removesuffix(end) for line in found if line.endswith(end)}

    def add_user(self, identity: str, checksum: str) -> None:
        """Keep in mind that somebody has been loaded from it.

        Parameters
        ----------
        identity : str
            Pid, start time and boot of the process.
        checksum : str
            Of the manifest.

        Raises
        ------
        OSError
            If that cannot be written.
        """
        _add_user(self._folder, identity, checksum)

    def remove(self) -> None:
        """Remove the image, and its folder.

        Raises
        ------
        ImageError
            If somebody else reads it.
        OSError
            If that cannot be.
        """
        _lock(self._folder, self.path, fcntl.LOCK_EX)
        for name in sorted(os.listdir(self._folder), key=lambda name: name != MANIFEST):
            if _PART.fullmatch(name):
                os.unlink(name, dir_fd=self._folder)
        os.rmdir(self.path)

    def _open(self, name: str) -> int:
        try:
            file = os.open(name, os.O_RDONLY | _FILE, dir_fd=self._folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ImageError(f"{self.path} is no image: {name} is a link") from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ImageError(f"{self.path} is no image: {name} is no file")
        return file

    def __enter__(self) -> "OldImage":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        _close(self._folder)


class InMemory:
    """Host memory in the place of a folder, when no folder takes an image.

    Parameters
    ----------
    size : int
        How much will be needed, in bytes.

    Raises
    ------
    MemoryError
        If there is too little of it.
    """

    path = "host memory"

    def __init__(self, size: int) -> None:
        left = proc.memory_left()
        if left is not None and left[0] < size:
            raise MemoryError(
                f"host memory: {mib(size)} are needed and {mib(left[0])} are left"
            )
        self._files: dict[str, StripeFile] = {}
        self._lock = threading.Lock()

    def create(self, size: int) -> StripeFile:
        """Return a file in memory."""
        with self._lock:
            name = str(len(self._files))
            self._files[name] = StripeFile(name, os.memfd_create("cuckpt"))
            return self._files[name]

    def sync(self, file: StripeFile) -> None:
        """Do nothing: there is no disk."""

    def file(self, name: str) -> StripeFile:
        """Return a file that was created."""
        return self._files[name]

    def move(self, content: Content, image: NewImage) -> Content:
        """Copy what is in memory to a folder.

        Parameters
        ----------
        content : Content
        image : NewImage

        Returns
        -------
        Content
            With the names that the files have there.

        Raises
        ------
        OSError
        """
        stripes = []
        for stripe in content.stripes:
            file = image.create(stripe.size)
            file.copy_from(self.file(stripe.file), stripe.size)
            file.finish(stripe.size)
            image.sync(file)
            stripes.append(Stripe(file.name, stripe.size, stripe.chunks))
        return Content(stripes, content.zeros)

    def __enter__(self) -> "InMemory":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def absolute(path: Path) -> str:
    """Return the whole path of a folder.

    Parameters
    ----------
    path : str or path

    Raises
    ------
    ValueError
        If it is empty, as of a variable that is not set.
    """
    if not os.fspath(path):
        raise ValueError("path is empty: name a folder")
    return os.path.abspath(os.fsdecode(path))


def _make(path: str) -> bool:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def _lock(folder: int, path: str, how: int) -> None:
    try:
        fcntl.flock(folder, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ImageInUseError(
            f"{path} is in use: another program writes or reads an image there"
        ) from None


def _close(folder: int) -> None:
    """Close a folder; a forked child that has it as well must not keep it locked."""
    with contextlib.suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_UN)
    os.close(folder)


def _add_user(folder: int, identity: str, checksum: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FILE
    file = os.open(_USERS, flags, 0o600, dir_fd=folder)
    try:
        os.write(file, f"{identity} {checksum}\n".encode())
    finally:
        os.close(file)


def _sync_folder(path: str) -> None:
    with contextlib.suppress(PermissionError):  # of somebody else, not to be opened
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _friendly(path: str) -> Iterator[None]:
    """Say which folder it is, where an error does not."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(path)):
            raise OSError(
                error.errno, "the folder that it is to be in is not there", path
            ) from None
        if error.filename and not os.path.isabs(error.filename):
            error.filename = os.path.join(path, error.filename)
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise OSError(
                error.errno, "is a link, which is not followed", path
            ) from None
        raise
