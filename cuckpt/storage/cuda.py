"""What copies need of CUDA, by cuda.bindings: contexts, pinned memory, streams."""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cuckpt import driver as checkpoint
from cuckpt.errors import DriverError, driver_error
from cuckpt.process_errors import MissingExtraError

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_SLEEPS = 1 | 2  # CU_EVENT_BLOCKING_SYNC, _DISABLE_TIMING: to wait takes no CPU

_lock = threading.Lock()
_contexts: dict[int, int] = {}
_pool: dict[int, "list[Buffer]"] = {}
_users = 0


class Buffer:
    """Pinned host memory.

    Parameters
    ----------
    size : int
        Bytes.

    Attributes
    ----------
    address, size : int
    view : memoryview
        Of bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(call("cuMemHostAlloc", size, _PORTABLE))
        memory = (ctypes.c_char * size).from_address(self.address)
        self.view = memoryview(memory).cast("B")

    def is_there(self) -> bool:
        """Tell whether it is still pinned: a context that is reset takes it along."""
        try:
            call("cuMemHostGetFlags", self.address)
        except DriverError:
            return False
        return True

    def free(self) -> None:
        """Give the memory back; nobody may use it any more."""
        call("cuMemFreeHost", self.address)


class Slot:
    """A pinned buffer, and a stream for the copies between it and the current GPU.

    Parameters
    ----------
    size : int
        Of the buffer, in bytes.

    Attributes
    ----------
    view : memoryview
        Of the buffer.
    address : int
    """

    def __init__(self, size: int) -> None:
        self._stream = call("cuStreamCreate", _NON_BLOCKING)
        self._event = call("cuEventCreate", _SLEEPS)
        self._buffer = take_buffer(size)
        self.view, self.address = self._buffer.view, self._buffer.address

    def fetch(self, device_pointer: int, size: int) -> None:
        """Begin to copy from the GPU to the buffer."""
        call("cuMemcpyDtoHAsync", self.address, device_pointer, size, self._stream)
        call("cuEventRecord", self._event, self._stream)

    def put(self, device_pointer: int, size: int) -> None:
        """Begin to copy from the buffer to the GPU."""
        call("cuMemcpyHtoDAsync", device_pointer, self.address, size, self._stream)
        call("cuEventRecord", self._event, self._stream)

    def clear(self, device_pointer: int, size: int) -> None:
        """Begin to fill GPU memory with zeros."""
        call("cuMemsetD8Async", device_pointer, 0, size, self._stream)
        call("cuEventRecord", self._event, self._stream)

    def record(self) -> tuple[int, int, int]:
        """Return the addresses of buffer, stream and event."""
        return self.address, int(self._stream), int(self._event)

    def wait(self) -> None:
        """Wait for what was begun."""
        call("cuEventSynchronize", self._event)

    def close(self) -> None:
        """Wait, and let go of stream and buffer."""
        try:
            call("cuStreamSynchronize", self._stream)
        finally:
            give_buffer(self._buffer)
            call("cuEventDestroy", self._event)
            call("cuStreamDestroy", self._stream)


@functools.cache
def bindings() -> ModuleType:
    """Return cuda.bindings.driver, which uses the driver that cuckpt does.

    Raises
    ------
    MissingExtraError
        Without cuda-bindings.
    """
    checkpoint.library_path()  # loads it; who asks for the name gets the same
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cuda":
            raise
        raise MissingExtraError("cuda-bindings", "storage") from None
    return driver  # type: ignore[no-any-return]


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver, and return what it returns beside the result.

    Parameters
    ----------
    name : str
        Of the C function.
    *arguments
        As cuda.bindings takes them.

    Raises
    ------
    DriverError
    """
    result, *rest = getattr(bindings(), name)(*arguments)
    if result:
        raise driver_error(int(result), name)
    return rest[0] if rest else None


def enter(gpu: int) -> None:
    """Make the primary context of a GPU current in this thread.

    Parameters
    ----------
    gpu : int
        CUDA's ordinal.
    """
    call("cuCtxSetCurrent", retain(gpu))


def retain(gpu: int) -> int:
    """Return the primary context of a GPU, which lasts until `release`.

    Parameters
    ----------
    gpu : int
        CUDA's ordinal.

    Returns
    -------
    int
        Its address.
    """
    with _lock:
        if gpu not in _contexts:
            checkpoint.init(0)
            device = checkpoint.device_get(gpu)
            _contexts[gpu] = checkpoint.device_primary_ctx_retain(device)
        return _contexts[gpu]


def gpu_of(stream: int) -> int:
    """Return the ordinal of the GPU that a stream belongs to.

    Parameters
    ----------
    stream : int
        Its address.

    Returns
    -------
    int
    """
    return int(call("cuStreamGetDevice", stream))


def take_buffer(size: int) -> Buffer:
    """Return a buffer of at least this size that nobody uses; or a new one."""
    size = 1 << max(16, (size - 1).bit_length())  # so that there are few sizes
    with _lock:
        free = _pool.get(size)
        if free:
            return free.pop()
    return Buffer(size)


def give_buffer(buffer: Buffer) -> None:
    """Keep a buffer for the next who takes one of its size."""
    with _lock:
        _pool.setdefault(buffer.size, []).append(buffer)


def _forget() -> None:
    """Begin anew in a forked child, which cannot use CUDA."""
    global _lock, _users
    _lock = threading.Lock()
    _users = 0
    _contexts.clear()
    _pool.clear()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def _current(contexts: dict[int, int]) -> Iterator[None]:
    """Make one of these contexts current for a while."""
    for context in contexts.values():
        call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")
        return
    yield


def _forget_what_is_gone() -> None:
    """Forget what others have destroyed, as by cudaDeviceReset or a machine's end."""
    for gpu in [*_contexts]:
        if not _is_active(gpu):
            del _contexts[gpu]
    with _current(_contexts):
        for size, buffers in _pool.items():
            _pool[size] = [buffer for buffer in buffers if buffer.is_there()]


def _is_active(gpu: int) -> bool:
    try:
        checkpoint.init(0)
        device = checkpoint.device_get(gpu)
        _, is_active = bindings().cuDevicePrimaryCtxGetState(device)[1:]
    except DriverError:
        return False
    return bool(is_active)


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Keep others from the release of what is in use."""
    global _users
    with _lock:
        if not _users:
            _forget_what_is_gone()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1


def release() -> None:
    """Free the pinned buffers and the contexts that are kept for the next time.

    To make them takes as long as to copy some GiB, and a context takes half a GiB of
    the GPU.

    Raises
    ------
    RuntimeError
        If a save or load is under way.
    """
    with _lock:
        if _users:
            raise RuntimeError("a save or load is under way: release after it")
        _forget_what_is_gone()
        buffers = [buffer for free in _pool.values() for buffer in free]
        contexts = dict(_contexts)
        _pool.clear()
        _contexts.clear()
    with _current(contexts):
        for buffer in buffers:
            buffer.free()
    for gpu in contexts:
        checkpoint.device_primary_ctx_release_v2(checkpoint.device_get(gpu))
