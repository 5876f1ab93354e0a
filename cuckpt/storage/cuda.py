"""What copies need of CUDA, by cuda.bindings: contexts, pinned memory, streams."""

import collections
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Generic, TypeVar

from cuckpt import driver as checkpoint
from cuckpt.errors import DriverError, InvalidHandleError, driver_error
from cuckpt.process_errors import MissingExtraError

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_SLEEPS = 1 | 2  # CU_EVENT_BLOCKING_SYNC, _DISABLE_TIMING: to wait takes no CPU

_LEAST_BITS = 23  # 8 MiB: for all chunks that cuckpt makes, large and small

_T = TypeVar("_T")
_lock = threading.Lock()
_contexts: dict[int, int] = {}
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


class Stream:
    """A stream of the current GPU, and an event for what is done in it.

    Attributes
    ----------
    stream, event : int
        Their addresses.
    """

    def __init__(self) -> None:
        self.stream = int(call("cuStreamCreate", _NON_BLOCKING))
        try:
            self.event = int(call("cuEventCreate", _SLEEPS))
        except DriverError:
            call("cuStreamDestroy", self.stream)
            raise

    def wait(self) -> None:
        """Wait for all that was begun."""
        call("cuStreamSynchronize", self.stream)

    def destroy(self) -> None:
        """Give it back; nobody may use it any more."""
        call("cuEventDestroy", self.event)
        call("cuStreamDestroy", self.stream)


class _Kept(Generic[_T]):
    """Things that are kept for the next who needs one of the same kind.

    To make them takes as long as to copy some GiB; and once GPU memory is in the hands
    of this program, it must not fail for want of them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free: dict[int, list[_T]] = {}
        self._used: collections.Counter[int] = collections.Counter()

    def take(self, kind: int, make: Callable[[], _T], wait: bool) -> _T:
        """Return one that nobody uses, or a new one.

        Parameters
        ----------
        kind : int
        make : callable
        wait : bool
            Whether to wait for one in use if no other can be made.

        Raises
        ------
        DriverError
            If none can be made, or be waited for.
        """
        while True:
            with self._changed:
                if self._free.get(kind):
                    self._used[kind] += 1
                    return self._free[kind].pop()
            try:
                made = make()
            except DriverError:
                with self._changed:
                    if self._free.get(kind):
                        continue
                    if not wait or not self._used[kind]:
                        raise
                    self._changed.wait()
            else:
                with self._changed:
                    self._used[kind] += 1
                return made

    def give(self, kind: int, thing: _T | None) -> None:
        """Keep one for the next; None if it is not fit to be used again."""
        with self._changed:
            self._used[kind] -= 1
            if thing is not None:
                self._free.setdefault(kind, []).append(thing)
            self._changed.notify_all()

    def forget(
        self,
        only: int | None = None,
        is_meant: Callable[[_T], bool] = lambda thing: True,
    ) -> list[_T]:
        """Keep some no longer, of one kind or all; return them."""
        meant: list[_T] = []
        with self._changed:
            for kind in [*self._free] if only is None else [only]:
                things = self._free.pop(kind, [])
                meant += filter(is_meant, things)
                self._free[kind] = [each for each in things if each not in meant]
        return meant


_streams: _Kept[Stream] = _Kept()  # by the ordinal of the GPU
_buffers: _Kept[Buffer] = _Kept()  # by their size


class Slot:
    """A pinned buffer, and a stream for the copies between it and a GPU.

    Parameters
    ----------
    size : int
        Of the buffer, in bytes, at least.
    gpu : int
        CUDA's ordinal; its context is current.
    wait : bool
        Whether to wait for one in use if no other can be made.

    Attributes
    ----------
    view : memoryview
        Of the buffer.
    address : int

    Raises
    ------
    DriverError
        If none can be made, or be waited for.
    """

    def __init__(self, size: int, gpu: int = 0, wait: bool = False) -> None:
        self._gpu = gpu
        self._size = 1 << max(_LEAST_BITS, (size - 1).bit_length())  # few kinds
        self._stream = _streams.take(gpu, Stream, wait)
        try:
            self._buffer = _buffers.take(self._size, self._new_buffer, wait)
        except BaseException:
            _streams.give(gpu, self._stream)
            raise
        self.view, self.address = self._buffer.view, self._buffer.address

    def _new_buffer(self) -> Buffer:
        try:
            return Buffer(self._size)
        except DriverError:
            others = _buffers.forget()  # of other sizes, which nobody uses
            if not others:
                raise
            for buffer in others:
                buffer.free()
            return Buffer(self._size)

    def fetch(self, device_pointer: int, size: int) -> None:
        """Begin to copy from the GPU to the buffer."""
        stream = self._stream.stream
        call("cuMemcpyDtoHAsync", self.address, device_pointer, size, stream)

    def put(self, device_pointer: int, size: int) -> None:
        """Begin to copy from the buffer to the GPU."""
        stream = self._stream.stream
        call("cuMemcpyHtoDAsync", device_pointer, self.address, size, stream)

    def record(self) -> tuple[int, int, int]:
        """Return the addresses of buffer, stream and event."""
        return self.address, self._stream.stream, self._stream.event

    def wait(self) -> None:
        """Wait for what was begun."""
        self._stream.wait()

    def close(self) -> None:
        """Wait, and let others have it."""
        is_fit = False
        try:
            self.wait()
            is_fit = True
        except DriverError:
            _streams.forget(self._gpu)  # what is wrong with one is so with all
            raise
        finally:
            _streams.give(self._gpu, self._stream if is_fit else None)
            _buffers.give(self._size, self._buffer if is_fit else None)


def clear(parts: Iterable[tuple[int, int]], gpu: int) -> None:
    """Fill parts of GPU memory with zeros, and wait until that is done.

    Parameters
    ----------
    parts : iterable of tuple of int and int
        Address and size of each.
    gpu : int
        CUDA's ordinal; its context is current.

    Raises
    ------
    DriverError
    """
    stream = _streams.take(gpu, Stream, wait=True)
    kept = None
    try:
        for device_pointer, size in parts:
            call("cuMemsetD8Async", device_pointer, 0, size, stream.stream)
        stream.wait()
        kept = stream
    finally:
        _streams.give(gpu, kept)


def warm_up(size: int, count: int) -> None:
    """Make slots for all GPUs whose contexts are held, to be kept.

    Parameters
    ----------
    size : int
        Of a buffer, in bytes.
    count : int
        How many can be in use at once. One is made, or an error raised; of more there
        are as many as can be.

    Raises
    ------
    DriverError
    """
    for gpu, context in [*_contexts.items()]:
        with _current(context), contextlib.ExitStack() as stack:
            with contextlib.suppress(InvalidHandleError):  # since a reset
                Slot(size, gpu, wait=True).close()
            stack.callback(Slot(size, gpu, wait=True).close)
            with contextlib.suppress(DriverError):
                for _ in range(1, count):
                    stack.callback(Slot(size, gpu).close)


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
        if not _users:
            _forget_what_is_gone()
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


def _forget() -> None:
    """Begin anew in a forked child, which cannot use CUDA."""
    global _lock, _users, _streams, _buffers
    _lock = threading.Lock()
    _users = 0
    _contexts.clear()
    _streams, _buffers = _Kept(), _Kept()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def _current(context: int) -> Iterator[None]:
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def _forget_what_is_gone() -> None:
    """Forget what others have destroyed, as by cudaDeviceReset or a machine's end."""
    gone = [gpu for gpu in _contexts if not _is_active(gpu)]
    for gpu in gone:
        del _contexts[gpu]
    with contextlib.ExitStack() as stack:
        for context in [*_contexts.values()][:1]:
            stack.enter_context(_current(context))
        lost = _buffers.forget(is_meant=lambda buffer: not buffer.is_there())
    if gone or lost:
        _streams.forget()  # none may be asked whether it is there


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
    """Free the pinned buffers, streams and contexts that are kept for the next time.

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
        contexts = dict(_contexts)
        _contexts.clear()
        buffers = _buffers.forget()
        for gpu, context in contexts.items():
            with _current(context):
                for stream in _streams.forget(gpu):
                    stream.destroy()
                for buffer in buffers:
                    buffer.free()
                buffers = []
    for gpu in contexts:
        checkpoint.device_primary_ctx_release_v2(checkpoint.device_get(gpu))
