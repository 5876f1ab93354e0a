"""The way of one process from state to state, and back if something goes wrong."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from cuckpt import driver, gpu_map as maps, nvml, proc, uuids
from cuckpt.events import Phase
from cuckpt.process_errors import (
    MissingExtraError,
    NoRoomError,
    ProcessBusyError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
)
from cuckpt.uninterrupted import is_asked_to_end

if TYPE_CHECKING:
    from cuckpt.process import Process

State = driver.ProcessState
_T = TypeVar("_T")

# From which state to which the next step is what.
_NEXT = {
    (State.RUNNING, State.LOCKED): "lock",
    (State.RUNNING, State.CHECKPOINTED): "lock",
    (State.LOCKED, State.CHECKPOINTED): "checkpoint",
    (State.LOCKED, State.RUNNING): "unlock",
    (State.CHECKPOINTED, State.LOCKED): "restore",
    (State.CHECKPOINTED, State.RUNNING): "restore",
}
_AFTER = {
    "lock": State.LOCKED,
    "checkpoint": State.CHECKPOINTED,
    "restore": State.LOCKED,
    "unlock": State.RUNNING,
}
_MAX_TIMEOUT_MS = (1 << 32) - 1
_ATTEMPTS_TO_GO_BACK = 3
_LONGEST_FIRST_LOCK_S = 10.0


@dataclass
class Outcome:
    """What came of it for one process.

    Attributes
    ----------
    pid : int
    name : str
    before, after : str
        Its states; None if it was not there to be asked.
    seconds : dict of str to float
        How long each phase took.
    used_bytes : dict of str to int or None
        Its GPU memory before, by the UUID of the GPU; None if that is not known.
    notes : list of str
        What else there is to know, such as a check that was skipped.
    """

    pid: int
    name: str
    before: str | None = None
    after: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    used_bytes: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)


class Passage:
    """The way of one process from state to state, and back if need be.

    Parameters
    ----------
    process : Process
    cancelled : threading.Event
        Once it is set, nothing new is begun but the way back.
    deadline : float
        Until when a lock may wait, as `time.monotonic` tells.
    """

    def __init__(
        self,
        process: "Process",
        cancelled: threading.Event,
        deadline: float = math.inf,
    ) -> None:
        self.process = process
        self.outcome = Outcome(process.pid, process.name)
        self._cancelled = cancelled
        self._deadline = deadline
        self._pairs: list[tuple[bytes, bytes]] = []

    def suspend(self) -> Outcome:
        """Suspend it, or bring it back."""
        initial = self.look()
        with self.brought_back(initial):
            self.compare_with_host_memory()
            self.advance(State.CHECKPOINTED)
            self.check_that_nothing_is_left()
            # In time for this: what was asked for meanwhile is undone as well.
            if self._cancelled.is_set() or is_asked_to_end():
                raise KeyboardInterrupt
        return self.finished()

    def resume(self, gpu_map: "Mapping[Any, Any] | None") -> Outcome:
        """Resume it, or bring it back."""
        if gpu_map is not None:
            maps.check_type(gpu_map)
        initial = self.look()
        self.prepare(gpu_map)
        with self.brought_back(initial):
            self.advance(State.RUNNING)
        return self.finished()

    def end_suspension(
        self, initial: int, gpu_map: "Mapping[Any, Any] | None"
    ) -> Outcome:
        """Give it the state back that it had; what fails is tried again."""
        self.look()
        if initial != State.CHECKPOINTED:
            self.prepare(gpu_map)
        self.go_back(initial)
        return self.finished()

    def recover(self) -> Outcome:
        """Bring it to RUNNING."""
        self.look()
        self.prepare(None)
        self.go_back(State.RUNNING)
        return self.finished()

    def look(self) -> int:
        """Return its state, unless nothing can be done in that."""
        state = self.process._read_state()
        self.outcome.before = state_text(state)
        if state in (State.CHECKPOINTING, State.RESTORING):
            raise ProcessBusyError(
                self.process.pid,
                f"is {state_text(state).upper()}: somebody moves its memory through "
                "custom storage and has to complete that",
            )
        if state not in (State.RUNNING, State.LOCKED, State.CHECKPOINTED):
            raise ProcessLostError(
                self.process.pid,
                f"is {state_text(state).upper()}: nothing helps any more",
            )
        if state == State.RUNNING:
            self.process._used_bytes = self.noted(
                "used memory", self.process.used_memory
            )
        self.outcome.used_bytes = self.process._used_bytes
        return state

    def prepare(self, gpu_map: "Mapping[Any, Any] | None") -> None:
        """Check before a restore what can be, and keep the map for it."""
        if self.outcome.before != state_text(State.CHECKPOINTED):
            return
        # Without persistence mode a restore needs it.
        driver.init(0)
        needed = self.needed_bytes()
        if not needed:
            self.note(
                "not checked: free memory: how much it needs is not known, since "
                "another program suspended it, or without NVML"
            )
        if gpu_map is None:
            gpus = self.noted("free memory", nvml.gpus) if needed else None
        else:
            gpus = nvml.gpus()
        if gpus is None:
            return
        pairs = self._complete(gpu_map or {}, gpus)
        if gpu_map:
            self._pairs = pairs

    def total_bytes(self) -> int:
        """Return the GPU memory that it had when it ran; 0 if that is not known."""
        return sum((self.process._used_bytes or {}).values())

    def needed_bytes(self) -> dict[bytes, int]:
        """Return the same by the UUID of the GPU."""
        used = self.process._used_bytes or {}
        return {uuids.to_bytes(gpu): size for gpu, size in used.items()}

    def _complete(
        self, gpu_map: "Mapping[Any, Any]", gpus: list[nvml.GpuFacts]
    ) -> list[tuple[bytes, bytes]]:
        try:
            return maps.complete(gpu_map, gpus, self.needed_bytes())
        except MemoryError as error:
            raise NoRoomError(
                self.process.pid, f"cannot be restored: {error}"
            ) from None

    def advance(self, goal: int) -> None:
        """Go step by step to a state."""
        while (state := self.process._read_state()) != goal:
            if self._cancelled.is_set():
                raise KeyboardInterrupt
            verb = _NEXT.get((State(state), State(goal)))
            if verb is None:
                raise ProcessBusyError(
                    self.process.pid,
                    f"has become {state_text(state).upper()} meanwhile",
                )
            self.step(verb)

    def step(self, verb: str) -> None:
        """Do one thing; an error after which it is done is none."""
        size = self.total_bytes() or None
        phase = Phase(self.process._watcher, self.process.pid, verb, size)
        try:
            with phase:
                self._call(verb)
        except driver.DriverError as error:
            if self.process._read_state() != _AFTER[verb]:
                raise
            self.outcome.notes.append(f"{verb} is done, though the driver said {error}")
        finally:
            before = self.outcome.seconds.get(verb, 0.0)
            self.outcome.seconds[verb] = before + phase.seconds
            if phase.problem is not None:
                self.note(f"on_event raised {phase.problem!r}")

    def _call(self, verb: str) -> None:
        if verb == "lock":
            self._lock()
        elif verb == "restore":
            self._restore()
        else:
            getattr(self.process, verb)()

    def _lock(self) -> None:
        """Lock, in ever longer attempts: between them a KeyboardInterrupt is heard."""
        longest_s = _LONGEST_FIRST_LOCK_S
        while True:
            end = min(self._deadline, time.monotonic() + longest_s)
            try:
                return self.process.lock(_timeout_ms(end))
            except driver.NotReadyError:
                if end == self._deadline:
                    raise
                if self._cancelled.is_set():
                    raise KeyboardInterrupt from None
            longest_s *= 2

    def _restore(self) -> None:
        """Restore; a second failure tells whether it is lost.

        With driver 580 a process whose restore ran out of memory, or that has
        imported IPC memory, answers OPERATING_SYSTEM from then on.
        """
        try:
            self.process._refuse()
            self.process._restore(self._pairs)
        except driver.DriverError as first:
            if self.process._read_state() != State.CHECKPOINTED:
                raise
            try:
                self.process._restore(self._pairs)
                self.outcome.notes.append(
                    f"restore succeeded at the second attempt, after {first}"
                )
            except driver.OperatingSystemError:
                self.process._refuse_gone()
                raise ProcessLostError(
                    self.process.pid,
                    f"is lost: it can be restored no more, since {first}. Only its "
                    "end is left",
                ) from first

    @contextlib.contextmanager
    def brought_back(self, initial: int) -> Iterator[None]:
        """Bring it back to a state if anything is raised."""
        try:
            yield
        except ProcessLostError:
            raise
        except BaseException as error:
            self.go_back(initial)
            error.add_note(
                f"process {self.process.pid} is {state_text(initial)}, as before"
            )
            for note in self.outcome.notes:
                error.add_note(note)
            raise

    def go_back(self, initial: int) -> None:
        """Bring it to a state whatever happens; one failure is no reason to stop."""
        self._cancelled = threading.Event()
        self._deadline = time.monotonic() + 10
        for attempt in range(1, _ATTEMPTS_TO_GO_BACK + 1):
            try:
                if initial != State.CHECKPOINTED:
                    self.refuse_without_room()
                self.advance(initial)
            except ProcessLostError:
                raise
            except ProcessGoneError:
                raise
            except Exception as error:
                if attempt == _ATTEMPTS_TO_GO_BACK:
                    raise self._left(initial, error) from error
                time.sleep(0.02 * attempt)
            else:
                return

    def _left(self, initial: int, error: Exception) -> ProcessLeftError:
        try:
            state = state_text(self.process._read_state())
        except Exception:
            state = "in an unknown state"
        return ProcessLeftError(
            self.process.pid,
            f"is {state} and could not be brought back to {state_text(initial)}: "
            f"{error}; recover() may once that has changed",
        )

    def refuse_without_room(self) -> None:
        """Raise if what this has checkpointed would be lost by a restore."""
        if not self.needed_bytes() or self.process._read_state() != State.CHECKPOINTED:
            return
        gpus = self.noted("free memory", nvml.gpus)
        if gpus is not None:
            self._complete(dict(self._pairs), gpus)

    def compare_with_host_memory(self) -> None:
        """Note if there is less of it than the checkpoint needs."""
        needed = self.total_bytes()
        left = proc.memory_left()
        if left is not None and left[0] < needed:
            self.note(
                f"its {maps.mib(needed)} of GPU memory need host memory, of which "
                f"{maps.mib(left[0])} are left"
            )

    def check_that_nothing_is_left(self) -> None:
        """Look whether its GPU memory and devices are free; note what is not."""
        devices = proc.open_files(self.process.pid, "/dev/nvidia")
        if devices:
            self.outcome.notes.append(
                f"it still has {', '.join(sorted(set(devices)))} open"
            )
        # NVML lags behind.
        for _ in range(20):
            used = self.noted("that GPU memory is free", self.process.used_memory)
            if not used:
                return
            time.sleep(0.1)
        still = maps.mib(sum((used or {}).values()))
        self.outcome.notes.append(f"it still uses {still} of GPU memory")

    def noted(self, what: str, look: "Callable[[], _T]") -> "_T | None":
        """Look something up that can be done without; note if it is."""
        try:
            return look()
        except (MissingExtraError, OSError) as error:
            self.note(f"not checked: {what}: {error}")
            return None

    def note(self, text: str) -> None:
        """Note something, once."""
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def finished(self) -> Outcome:
        """Return what came of it."""
        self.outcome.after = state_text(self.process._read_state())
        return self.outcome


def _timeout_ms(deadline: float) -> int:
    """Return what is left, as the driver takes it: 0 is for ever."""
    if deadline == math.inf:
        return 0
    left_ms = (deadline - time.monotonic()) * 1000
    return math.ceil(min(max(left_ms, 1), _MAX_TIMEOUT_MS))


def state_text(state: int) -> str:
    """Return a state as text, such as ``running``.

    Parameters
    ----------
    state : int

    Returns
    -------
    str
    """
    try:
        return State(state).name.lower()
    except ValueError:
        return f"in the unknown state {int(state)}"
