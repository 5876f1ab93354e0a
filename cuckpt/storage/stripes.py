"""Files of an image: written and read past the page cache where that is faster.

With O_DIRECT a disk is as fast as it can be, and the page cache stays as it was.
What is in the page cache already is read from there.
"""

import ctypes
import errno
import os
from typing import Any

# Of file offsets, lengths and addresses, so that any disk takes them with O_DIRECT.
BLOCK = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


class StripeFile:
    """An open file that holds chunks, one after the other, each padded to a block.

    Parameters
    ----------
    name : str
    file : int
        Its descriptor, which belongs to this.
    """

    def __init__(self, name: str, file: int) -> None:
        self.name = name
        self.reserved_bytes = 0
        self._file = file
        self._direct: int | None = None

    def reserve(self, size: int) -> None:
        """Take space for so many bytes.

        Raises
        ------
        OSError
            If there is too little. A file system that cannot reserve is none.
        """
        if size <= self.reserved_bytes:
            return
        while _libc.fallocate(self._file, 0, 0, size):
            error = ctypes.get_errno()
            if error in (errno.EOPNOTSUPP, errno.ENOSYS):
                break
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error), self.name)
        self.reserved_bytes = size

    def open_direct(self, flags: int, folder: int) -> None:
        """Open it a second time, with O_DIRECT, if its file system has that.

        Parameters
        ----------
        flags : int
            As for `os.open`.
        folder : int
            Descriptor of the folder that it is in.
        """
        try:
            self._direct = os.open(self.name, flags | _O_DIRECT, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def descriptors(self) -> tuple[int, int]:
        """Return its descriptor, and the one with O_DIRECT or -1."""
        return self._file, -1 if self._direct is None else self._direct

    def give_up_direct(self) -> bool:
        """Do without O_DIRECT; tell whether it was there."""
        if self._direct is None:
            return False
        os.close(self._direct)
        self._direct = None
        return True

    def forget(self, offset: int, size: int) -> None:
        """Take a part out of the page cache."""
        os.posix_fadvise(self._file, offset, padded(size), os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, view: memoryview) -> int:
        """Read into a buffer, and return how many bytes there were."""
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def copy_from(self, other: "StripeFile", size: int) -> None:
        """Write what the first bytes of another file are."""
        done = 0
        while done < size:
            count = os.sendfile(self._file, other._file, done, size - done)
            if not count:
                raise OSError(errno.EIO, "nothing was written", self.name)
            done += count

    def finish(self, size: int) -> None:
        """Give back what was reserved beyond so many bytes."""
        os.ftruncate(self._file, size)

    def sync(self) -> None:
        """Wait until all is on the disk."""
        os.fsync(self._file)

    def size(self) -> int:
        """Tell its size in bytes."""
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Close it."""
        self.give_up_direct()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def padded(size: int) -> int:
    """Round up to whole blocks."""
    return -(-size // BLOCK) * BLOCK
