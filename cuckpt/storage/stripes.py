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
_CACHESTAT = 451  # the number of that system call, on all kinds of machines
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
    direct : int or None
        A second descriptor of it, with O_DIRECT.
    """

    def __init__(self, name: str, file: int, direct: int | None = None) -> None:
        self.name = name
        self.reserved_bytes = 0
        self._file = file
        self._direct = direct

    def reserve(self, size: int) -> None:
        """Take space for so many bytes.

        Raises
        ------
        OSError
            If there is too little. A file system that cannot reserve is none.
        """
        if size <= self.reserved_bytes:
            return
        if _libc.fallocate(self._file, 0, 0, size):
            error = ctypes.get_errno()
            if error not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(error, os.strerror(error), self.name)
        self.reserved_bytes = size

    def write(self, offset: int, view: memoryview, size: int) -> None:
        """Write the first bytes of a buffer, and zeros up to the end of the block.

        Parameters
        ----------
        offset : int
            In the file, a multiple of `BLOCK`.
        view : memoryview
            Of bytes, so many that the last block is whole.
        size : int

        Raises
        ------
        OSError
        """
        end = padded(size)
        view[size:end] = bytes(end - size)
        done = 0
        while done < end:
            part = view[done:end]
            try:
                done += self._write_some(part, offset + done)
            except InterruptedError:
                continue

    def _write_some(self, part: memoryview, offset: int) -> int:
        if self._direct is not None:
            try:
                return self._positive(os.pwrite(self._direct, part, offset))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Opened so, but not to be written so; or a short write before.
                os.close(self._direct)
                self._direct = None
        return self._positive(os.pwrite(self._file, part, offset))

    def _positive(self, written: int) -> int:
        if not written:
            raise OSError(errno.EIO, "nothing was written", self.name)
        return written

    def read(
        self, offset: int, view: memoryview, size: int, fresh: bool = False
    ) -> int:
        """Read into the first bytes of a buffer.

        Parameters
        ----------
        offset, view, size
            As for `write`.
        fresh : bool
            Not from the page cache.

        Returns
        -------
        int
            How many bytes there were; fewer than `size` at the end of the file.

        Raises
        ------
        OSError
        """
        if fresh:
            os.posix_fadvise(self._file, offset, padded(size), os.POSIX_FADV_DONTNEED)
        if self._direct is None or _is_cached(self._file, offset, size):
            return self._read_all(self._file, offset, view[:size])
        found = self._read_all(self._direct, offset, view[: padded(size)])
        return min(found, size)

    def _read_all(self, file: int, offset: int, view: memoryview) -> int:
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], offset + done)
            if not count:
                break
            done += count
            if file == self._direct and done % BLOCK:  # the end of the file
                break
        return done

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
        for file in self._direct, self._file:
            if file is not None:
                os.close(file)
        self._direct = None


def without_cache(name: str, flags: int, folder: int) -> int | None:
    """Open a file a second time, with O_DIRECT; None if its file system has not that.

    Parameters
    ----------
    name : str
    flags : int
        As for `os.open`.
    folder : int
        Descriptor of the folder that it is in.
    """
    try:
        return os.open(name, flags | _O_DIRECT, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _is_cached(file: int, offset: int, size: int) -> bool:
    """Tell whether all of a part of a file is in the page cache."""
    part, found = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    # On a kernel before 6.5 it is not known.
    failed = _libc.syscall(_CACHESTAT, file, part, found, 0)
    pages = -(-size // os.sysconf("SC_PAGE_SIZE"))
    return not failed and found[0] >= pages


def padded(size: int) -> int:
    """Round up to whole blocks."""
    return -(-size // BLOCK) * BLOCK
