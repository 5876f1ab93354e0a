"""A CUDA process that is suspended and resumed, and never left half way.

Three things are taken care of: that it is still the process that was meant, that a
call about it can return, and that after a failure it is in the state it had before.
The last is done in a thread of its own: a KeyboardInterrupt, which comes to the main
thread only, cannot stop it half way.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from cuckpt import driver, gpu_map as maps, nvml, proc, remembered, uuids
from cuckpt.events import Teller, Watcher, watchers_of
from cuckpt.lookout import Lookout
from cuckpt.passage import Outcome, Passage, State, state_text
from cuckpt.process_errors import ProcessGoneError, ProcessStoppedError
from cuckpt.suspension import Suspension
from cuckpt.turns import Turn
from cuckpt.uninterrupted import deadline_in, in_time, uninterrupted

__all__ = ["Outcome", "Process", "State"]

_T = TypeVar("_T")

_TIME_TO_ANSWER_S = 0.1
_TIMES_TO_ASK = 4
# GPU memory of processes when they ran last, by pid and start time: whoever resumes
# one need not have suspended it with the same object.
_used_bytes_of: dict[tuple[int, int | None], dict[str, int]] = {}
_lost: set[tuple[int, int | None]] = set()
# Only where nothing can be kept for other programs, which may know better.
_images: dict[tuple[int, int | None], list[Any]] = {}


class Process:
    """A CUDA process that can be suspended and resumed.

    What `cuda.core.checkpoint.Process` has is here as well, with the same names and
    arguments. The process is held by its pidfd and its start time: if it ends and
    another gets its pid, calls say so.

    Parameters
    ----------
    pid : int
        Of a process, not of one of its threads.
    on_event : callable, or sequence of callables, optional
        Called with each `cuckpt.events.Event`, one after the other, in a thread.

    Raises
    ------
    TypeError
        If `pid` is no int, or `on_event` cannot be called.
    ValueError
        If it is not positive, or that of a thread.
    ProcessGoneError
        If there is no such process.
    """

    def __init__(
        self, pid: int, on_event: Watcher | Sequence[Watcher] | None = None
    ) -> None:
        self._pid = _checked_int("pid", pid)
        if pid <= 0:
            raise ValueError("pid must be a positive int")
        self._watchers = watchers_of(on_event)
        self._restore_thread: int | None = None
        self._pidfd: int | None = None
        found = proc.facts(pid)
        if found is None:
            raise ProcessGoneError(
                pid,
                "is not there: there is none with this pid in this pid namespace, or "
                "/proc hides it (hidepid)",
            )
        if found.owner != pid:
            raise ValueError(f"{pid} is a thread of process {found.owner}")
        self.name = found.name
        self._start_time = proc.start_time(pid)
        with contextlib.suppress(OSError):  # the start time alone will do
            self._pidfd = os.pidfd_open(pid)
        self._refuse_gone()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pid})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled: make one of its pid")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the program there may be no module `os` any more.
        pidfd = getattr(self, "_pidfd", None)
        if pidfd is not None:
            close(pidfd)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    # As cuda.core has it

    @property
    def state(self) -> str:
        """Its state, as text.

        ``running``, ``locked``, ``checkpointed``, ``failed``, ``checkpointing`` or
        ``restoring``. Waits while somebody checkpoints or restores it
        (cuCheckpointProcessGetState).

        Raises
        ------
        ProcessGoneError, ProcessStoppedError
            If it cannot be asked.
        NotInitializedError, OperatingSystemError
            If it has no CUDA state, or this process may not ask.
        """
        return state_text(self._read_state())

    @property
    def restore_thread_id(self) -> int:
        """The thread that the driver restores it with.

        See cuCheckpointProcessGetRestoreThreadId. Raises as `state`.
        """
        self._refuse()
        thread = driver.checkpoint_process_get_restore_thread_id(self._pid)
        self._restore_thread = thread
        return thread

    def lock(self, timeout_ms: int = 0) -> None:
        """Stop it at its next CUDA call, and wait for its GPU work.

        Requires RUNNING, leaves LOCKED (cuCheckpointProcessLock).

        Parameters
        ----------
        timeout_ms : int
            How long to wait, in milliseconds; 0: for ever.

        Raises
        ------
        TypeError, ValueError
            If `timeout_ms` is no int, or negative.
        OverflowError
            If it is above 2**32 - 1.
        NotReadyError
            If the time was over. It is RUNNING.
        IllegalStateError
            If it was not RUNNING.
        ProcessGoneError, ProcessStoppedError
            If it cannot be asked.
        """
        if _checked_int("timeout_ms", timeout_ms) < 0:
            raise ValueError("timeout_ms must be >= 0")
        args = driver.CheckpointLockArgs(timeout_ms=timeout_ms)
        self._refuse()
        driver.checkpoint_process_lock(self._pid, args)

    def checkpoint(self) -> None:
        """Copy its GPU memory to host memory, and free it.

        Requires LOCKED, leaves CHECKPOINTED (cuCheckpointProcessCheckpoint).

        Raises
        ------
        IllegalStateError
            If it was not LOCKED.
        NotSupportedError, OutOfMemoryError
            If it cannot be checkpointed. It is LOCKED as before.
        ProcessGoneError, ProcessStoppedError
            If it cannot be asked.
        """
        self._refuse()
        driver.checkpoint_process_checkpoint(self._pid)

    def restore(self, gpu_mapping: "Mapping[Any, Any] | None" = None) -> None:
        """Bring its GPU memory back.

        Requires CHECKPOINTED, leaves LOCKED (cuCheckpointProcessRestore). The map is
        given to the driver as it is; `resume` completes and checks it.

        Parameters
        ----------
        gpu_mapping : mapping, optional
            From old to new GPU UUIDs in any form, of all GPUs.

        Raises
        ------
        TypeError, ValueError
            If the map is none.
        IllegalStateError
            If it was not CHECKPOINTED.
        InvalidValueError
            If the driver does not know a GPU, or misses one.
        OutOfMemoryError
            If the GPU has no room. With driver 580 it is lost.
        ProcessGoneError, ProcessStoppedError
            If it cannot be asked.
        """
        pairs = []
        if gpu_mapping is not None:
            if not isinstance(gpu_mapping, Mapping):
                raise TypeError("gpu_mapping must be a mapping of GPU UUIDs")
            pairs = [
                (uuids.to_bytes(old), uuids.to_bytes(new))
                for old, new in gpu_mapping.items()
            ]
        self._refuse()
        self._restore(pairs)

    def unlock(self) -> None:
        """Let it go on.

        Requires LOCKED, leaves RUNNING (cuCheckpointProcessUnlock).

        Raises
        ------
        IllegalStateError
            If it was not LOCKED.
        ProcessGoneError, ProcessStoppedError
            If it cannot be asked.
        """
        self._refuse()
        driver.checkpoint_process_unlock(self._pid)

    # Beyond

    @property
    def is_cuda(self) -> bool:
        """Whether it has CUDA state. Raises as `state`, but for NotInitializedError."""
        try:
            self._read_state()
        except driver.NotInitializedError:
            return False
        return True

    def used_memory(self) -> dict[str, int]:
        """Tell its GPU memory, by the UUID of the GPU.

        Returns
        -------
        dict of str to int
            Bytes; nothing while it is checkpointed.

        Raises
        ------
        MissingExtraError
            Without nvidia-ml-py, which the extra ``jobs`` brings.
        OSError
            If NVML cannot be used.
        """
        return nvml.used_memory(self._pid)

    def suspend(self, timeout_s: float | None = 10) -> Outcome:
        """Lock and checkpoint it; one that is CHECKPOINTED stays as it is.

        Whatever goes wrong, it gets the state back that it had.

        Parameters
        ----------
        timeout_s : float or None
            How long to wait for its GPU work, in seconds; None: for ever, in attempts
            of 10 s and more. The checkpoint takes as long as it takes.

        Returns
        -------
        Outcome

        Raises
        ------
        NotReadyError
            If the GPU work was not done in time.
        DriverError
            If the driver refuses, as in `lock` and `checkpoint`.
        ProcessGoneError, ProcessStoppedError, ProcessBusyError
            If it cannot be suspended now.
        ProcessLostError, ProcessLeftError
            If it could not be brought back either.
        """
        return self._operate(Passage.suspend, deadline_in(timeout_s))

    def resume(self, gpu_map: "Mapping[Any, Any] | None" = None) -> Outcome:
        """Restore and unlock it: in the end it runs. One that does stays as it is.

        Parameters
        ----------
        gpu_map : mapping, optional
            From old to new GPUs: UUIDs in any form, or NVML's ordinals. It is
            completed and checked, see `cuckpt.gpu_map.complete`.

        Returns
        -------
        Outcome

        Raises
        ------
        TypeError, ValueError
            If the map cannot be; nothing was tried.
        MissingExtraError, OSError
            If there is a map, and NVML cannot be used to check it.
        NoRoomError
            If a GPU has too little free memory; nothing was tried.
        ProcessLostError
            If it can be restored no more.
        DriverError
            If the driver refuses. It has the state that it had.
        ProcessGoneError, ProcessStoppedError, ProcessBusyError, ProcessLeftError
            As `suspend`.
        """
        return self._operate(lambda passage: passage.resume(gpu_map))

    @contextlib.contextmanager
    def suspended(
        self, timeout_s: float | None = 10, gpu_map: "Mapping[Any, Any] | None" = None
    ) -> Iterator[Outcome]:
        """Suspend it while the context manager is open.

        At the end it gets the state back that it had.

        Parameters
        ----------
        timeout_s : float or None
            As in `suspend`.
        gpu_map : mapping, optional
            As in `resume`.

        Yields
        ------
        Outcome
            Of `suspend`, which raises here as well as `resume`. A map that cannot be is
            refused before anything is done.
        """
        if gpu_map is not None:
            maps.complete(gpu_map, nvml.gpus())
        suspension = Suspension(lambda: self._operate(end), gpu_map)

        def begin(passage: Passage) -> Outcome:
            outcome = passage.suspend()
            suspension.hold({self._key: passage.initial})
            return outcome

        def end(passage: Passage) -> None:
            for state, own_map in suspension.let_go().values():
                passage.end_suspension(state, own_map)

        try:
            yield self._operate(begin, deadline_in(timeout_s))
        finally:
            suspension.end()

    def recover(self) -> Outcome:
        """Bring it back to RUNNING, from whatever state somebody left it in.

        Returns
        -------
        Outcome

        Raises
        ------
        ProcessLostError
            If it can be restored no more.
        ProcessBusyError
            If somebody is checkpointing or restoring it through custom storage.
        """
        return self._operate(Passage.recover)

    def save(
        self,
        path: "str | os.PathLike[str]",
        timeout_s: float | None = 10,
        *,
        fallback: "Sequence[str | os.PathLike[str]]" = (),
        replace: bool = False,
        durable: bool = True,
        dry_run: bool = False,
    ) -> Outcome:
        """Lock it, and copy its GPU memory to an image.

        Requires RUNNING or LOCKED, leaves CHECKPOINTED, without a copy in host memory.
        `load` brings it back. Whatever goes wrong, it gets the state back that it had.
        Needs CUDA 13.4 and the extra ``storage``.

        Parameters
        ----------
        path : str or path
            The folder of the image, which is made.
        timeout_s : float or None
            As in `suspend`.
        fallback : sequence of str or path
            Folders for the image in case that the first fails.
        replace : bool
            Whether to replace an image that is there.
        durable : bool
            Whether to wait until it is on the disk. If not, the page cache takes it.
        dry_run : bool
            Only check what can be, and note what would be written.

        Returns
        -------
        Outcome
            Its `image` is the folder.

        Raises
        ------
        FunctionNotFoundError
            If the driver has no custom storage; nothing was tried.
        MissingExtraError
            Without cuda-bindings or xxhash; nothing was tried.
        OSError
            If the folder cannot take an image; nothing was tried. FileExistsError if
            it holds something else, or an image that is not to be replaced or that a
            suspended process still needs.
        ImageError
            If somebody reads or writes an image there; nothing was tried.
        TypeError, ValueError
            If `timeout_s` or a folder cannot be; nothing was tried.
        NotSavedError
            If it was not saved, or is suspended already. It is as before.
        ProcessLostError, ProcessLeftError
            If it could not be brought back either.
        DriverError, ProcessError
            As `suspend`.
        """
        from cuckpt.storage import save_process

        return save_process(self, path, timeout_s, fallback, replace, durable, dry_run)

    def load(
        self,
        path: "str | os.PathLike[str]",
        gpu_map: "Mapping[Any, Any] | None" = None,
        *,
        same_process: bool = True,
        remove: bool = False,
    ) -> Outcome:
        """Copy its GPU memory from an image, and let it run.

        Requires CHECKPOINTED by `save`, leaves RUNNING. Each piece is compared with
        what was saved before it goes to the GPU; if one is not the same, it stays
        CHECKPOINTED.

        Parameters
        ----------
        path : str or path
            The folder of the image.
        gpu_map : mapping, optional
            As in `resume`.
        same_process : bool
            Whether the image must be that of this very process, from its last save.
            Not so after CRIU, say, has made the process anew.
        remove : bool
            Whether to remove the image, and its folder, once all of it run.

        Returns
        -------
        Outcome

        Raises
        ------
        ImageError
            If the image is damaged, incomplete, of another version or of another
            process; nothing was tried.
        NotLoadedError
            If it was not loaded, or is not suspended. It is as before.
        FunctionNotFoundError, MissingExtraError, OSError
            As `save`.
        TypeError, ValueError, NoRoomError
            As `resume`.
        ProcessLostError, ProcessLeftError
            If it is neither loaded nor as before.
        """
        from cuckpt.storage import load_process

        return load_process(self, path, gpu_map, same_process, remove)

    def wait_for_state(self, state: str, timeout_s: float | None = None) -> None:
        """Wait until it has a state.

        Parameters
        ----------
        state : str
            As `state` tells it.
        timeout_s : float or None
            For how long, in seconds; None: for ever.

        Raises
        ------
        ValueError
            If there is no such state.
        TimeoutError
            If the time is over; with the last state seen.
        TypeError, ValueError
            If `timeout_s` is no time.
        ProcessGoneError, ProcessStoppedError, DriverError
            As `state`.
        """
        known = [state_text(each) for each in State]
        if state not in known:
            raise ValueError(f"state must be one of {', '.join(known)}, not {state!r}")
        deadline = deadline_in(timeout_s)
        seen = "not known: the driver did not answer"
        while True:
            left_s = deadline - time.monotonic()
            with contextlib.suppress(TimeoutError):
                seen = state_text(
                    in_time(self._read_state, max(left_s, _TIME_TO_ANSWER_S))
                )
            if seen == state:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"process {self._pid} is {seen}, not {state}")
            time.sleep(0.01)

    def _operate(self, do: Callable[[Passage], _T], deadline: float = math.inf) -> _T:
        """Do something in its turn that no signal stops half way."""

        def work(cancelled: threading.Event) -> _T:
            teller = Teller(self._watchers)
            passage = Passage(self, cancelled, deadline, teller)
            add_note: Callable[[str], None] = passage.note
            try:
                with (
                    Turn(cancelled, deadline) as turn,
                    Lookout(passage.look_whether_it_waits),
                ):
                    turn.take([self._key])
                    return do(passage)
            except BaseException as error:
                add_note = error.add_note
                raise
            finally:
                for _, problem in teller.finish():
                    add_note(problem)

        return uninterrupted(work)

    @property
    def _key(self) -> tuple[int, int | None]:
        return self._pid, self._start_time

    @property
    def _used_bytes(self) -> dict[str, int] | None:
        if self._key not in _used_bytes_of:
            return remembered.recall(self._key).get("used_bytes")
        return _used_bytes_of[self._key]

    @_used_bytes.setter
    def _used_bytes(self, used: dict[str, int] | None) -> None:
        if used is None:
            _used_bytes_of.pop(self._key, None)
        else:
            _used_bytes_of[self._key] = used

    @property
    def _image(self) -> list[Any] | None:
        """The image that it was saved to, and not loaded from.

        Its folder, its checksum, and the GPUs on which a load that failed has left
        the memory of others.
        """
        if self._key not in _images:
            return remembered.recall(self._key).get("image")
        return _images[self._key]

    @_image.setter
    def _image(self, image: list[Any] | None) -> None:
        _images.pop(self._key, None)
        if image is None:
            remembered.forget(self._key)
        elif not remembered.keep(self._key, image=image):
            _images[self._key] = image

    def _forget_image(self, image: list[Any] | None) -> None:
        """Forget an image, unless another program knows of a later one."""
        if image is not None and self._image == image:
            self._image = None

    @property
    def _is_lost(self) -> bool:
        """Whether this program has found that it can be restored no more."""
        return self._key in _lost or bool(remembered.recall(self._key).get("lost"))

    @_is_lost.setter
    def _is_lost(self, is_lost: bool) -> None:
        if is_lost:
            _lost.add(self._key)
            remembered.keep(self._key, lost=True)
        elif self._is_lost:
            _lost.discard(self._key)
            remembered.keep(self._key, lost=False)

    # Whether it can be asked

    def _refuse(self) -> None:
        """Raise if it is gone, or could not answer."""
        self._refuse_gone()
        why = self._why_silent()
        if why is not None:
            raise ProcessStoppedError(self._pid, why)

    def _why_silent(self) -> str | None:
        if proc.is_stopped(self._pid, self._restore_thread):
            return (
                "is stopped (SIGSTOP or a debugger): a call about it would wait until "
                "it continues; send it SIGCONT"
            )
        if proc.is_frozen(self._pid):
            return "is frozen by its cgroup: a call about it would wait for the thaw"
        return None

    def _refuse_gone(self) -> None:
        found = proc.facts(self._pid)
        if found is None:
            raise ProcessGoneError(self._pid, "has ended")
        if proc.start_time(self._pid) != self._start_time:
            raise ProcessGoneError(self._pid, "has ended: its pid is another's now")
        if found.state in "ZX":
            raise ProcessGoneError(self._pid, "has ended: it is a zombie")
        if self._has_ended():
            raise ProcessGoneError(self._pid, "has ended")

    def _has_ended(self) -> bool:
        if self._pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _read_state(self) -> int:
        self._refuse()
        try:
            state = self._ask_for_state()
        except (driver.OperatingSystemError, driver.NotInitializedError):
            self._refuse_gone()  # it may have ended meanwhile
            raise
        if self._restore_thread is None:
            with contextlib.suppress(driver.DriverError):  # only a help
                self._restore_thread = driver.checkpoint_process_get_restore_thread_id(
                    self._pid
                )
        return state

    def _ask_for_state(self) -> int:
        """Ask; that one has no CUDA state any more is not believed at once."""
        for _ in range(_TIMES_TO_ASK - 1):
            try:
                return driver.checkpoint_process_get_state(self._pid)
            except driver.NotInitializedError:
                if self._restore_thread is None:
                    raise
            time.sleep(0.02)
            self._refuse_gone()
        return driver.checkpoint_process_get_state(self._pid)

    def _restore(self, pairs: list[tuple[bytes, bytes]]) -> None:
        args = driver.CheckpointRestoreArgs(gpu_pairs=pairs) if pairs else None
        driver.checkpoint_process_restore(self._pid, args)


def _checked_int(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an int")
    return number
