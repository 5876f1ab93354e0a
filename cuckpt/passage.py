"""The way of one process from state to state, and back if something goes wrong."""

import contextlib
import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from cuckpt import driver, gpu_map as maps, nvml, proc, remembered, uuids
from cuckpt.events import Event, Phase, Watcher
from cuckpt.process_errors import (
    NoRoomError,
    ProcessBusyError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
    ProcessSavedError,
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
WHAT_MAKES_ROOM = "free memory on that GPU, or name another in gpu_map"
WHAT_MAY_HELP = "; recover() may once that has changed"
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
    image : str or None
        The folder of the image that its memory is in, or came from.
    """

    pid: int
    name: str
    before: str | None = None
    after: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    used_bytes: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    image: str | None = None

    def __str__(self) -> str:
        states = [state for state in (self.before, self.after) if state is not None]
        facts = [" -> ".join(states) or "not asked"]
        facts += [f"{verb} {taken:.2f} s" for verb, taken in self.seconds.items()]
        if self.used_bytes:
            facts.append(maps.mib(sum(self.used_bytes.values())))
        if self.image is not None:
            facts.append(f"image {self.image}")
        lines = _wrapped(f"{self.pid} {self.name}: {', '.join(facts)}", "", "    ")
        for note in self.notes:
            lines += _wrapped(note, "  - ", "    ")
        return "\n".join(lines)


class Passage:
    """The way of one process from state to state, and back if need be.

    Parameters
    ----------
    process : Process
    cancelled : threading.Event
        Once it is set, nothing new is begun but the way back.
    deadline : float
        Until when a lock may wait, as `time.monotonic` tells.
    tell : callable, optional
        Called with each event.

    Attributes
    ----------
    initial : State
        In which it was when it was looked at.
    after : dict of str to State
        In which state it is after a step.
    takes_images : bool
        Whether this brings one back whose memory is in an image.
    has_moved : bool
        Whether this has brought it to another state, or may have.
    is_moved_by_others : bool
        Whether somebody else has, meanwhile: then it is not brought back.
    """

    after: Mapping[str, State] = _AFTER
    takes_images = False

    def __init__(
        self,
        process: "Process",
        cancelled: threading.Event,
        deadline: float = math.inf,
        tell: Watcher | None = None,
    ) -> None:
        self.process = process
        self.outcome = Outcome(process.pid, process.name)
        self.has_moved = False
        self.is_moved_by_others = False
        self._cancelled = cancelled
        self._deadline = deadline
        self._tell = tell or (lambda event: None)
        self._pairs: list[tuple[bytes, bytes]] = []
        self._new_gpus: list[bytes] = []
        self.initial = self._state = State.RUNNING
        self._begun: str | None = None  # a step of which the end is not known
        self._phase: str | None = None  # of the call that is under way

    def suspend(self) -> Outcome:
        """Suspend it, or bring it back."""
        initial = self.look()
        self.refuse_lost()
        with self.brought_back(initial):
            self.compare_with_host_memory()
            self.advance(State.CHECKPOINTED)
            self.check_that_nothing_is_left()
            self.expect(State.CHECKPOINTED)
            # In time for this: what was asked for meanwhile is undone as well.
            if self._cancelled.is_set() or is_asked_to_end():
                raise KeyboardInterrupt
        return self.outcome

    def resume(self, gpu_map: "Mapping[Any, Any] | None") -> Outcome:
        """Resume it, or bring it back."""
        if gpu_map is not None:
            maps.check_type(gpu_map)
        initial = self.look()
        self.prepare(gpu_map)
        with self.brought_back(initial):
            self.advance(State.RUNNING)
            self.expect(State.RUNNING)
        return self.outcome

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
        image = self.process._image
        state = self.read_state()
        self.outcome.before = state_text(state)
        if state in (State.CHECKPOINTING, State.RESTORING):
            raise ProcessBusyError(
                self.process.pid,
                f"is {state_text(state).upper()}: somebody moves its memory through "
                "custom storage and has to complete that; if that program has ended, "
                "only the end of this process is left",
            )
        if state not in (State.RUNNING, State.LOCKED, State.CHECKPOINTED):
            raise ProcessLostError(
                self.process.pid,
                f"is {state_text(state).upper()}: nothing helps any more",
            )
        self.initial = self._state = State(state)
        if state != State.CHECKPOINTED:
            self.process._forget_image(image)  # another program has loaded it
        if state == State.RUNNING:
            self.process._used_bytes = self.noted(
                "used memory", self.process.used_memory
            )
        self.outcome.used_bytes = self.process._used_bytes
        return state

    def prepare(self, gpu_map: "Mapping[Any, Any] | None") -> None:
        """Check before a restore what can be, and keep the map for it."""
        if self.outcome.before != state_text(State.CHECKPOINTED):
            if gpu_map:
                self.note_unused_map()
            return
        self.refuse_saved()
        # Without persistence mode a restore needs it.
        driver.init(0)
        needed = self.needed_bytes()
        if not needed:
            self.note(
                "not checked: free memory: how much it needs is not known, since "
                "something else suspended it, or without NVML"
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

    def note_unused_map(self) -> None:
        """Note that it is not suspended, so that a map moves nothing."""
        self.note("the GPU map is not used, since it was not suspended")

    def refuse_lost(self) -> None:
        """Raise if it was found to be lost: that it is suspended is of no use."""
        if self.process._is_lost:
            raise ProcessLostError(
                self.process.pid, "is lost: it can be restored no more; end it"
            )

    def refuse_saved(self) -> None:
        """Raise if its memory is in an image, which this does not take."""
        image = self.process._image
        if image is not None and not self.takes_images:
            raise ProcessSavedError(
                self.process.pid,
                f"has its GPU memory in {image[0]}: load() brings it back",
            )

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
                self.process.pid, f"cannot be restored: {error}; {WHAT_MAKES_ROOM}"
            ) from None

    def advance(self, goal: int) -> None:
        """Go step by step to a state."""
        while (state := self._state_on_the_way_to(goal)) != goal:
            if self._cancelled.is_set():
                raise KeyboardInterrupt
            self.step(_NEXT[state, State(goal)])

    def _state_on_the_way_to(self, goal: int) -> State:
        """Return its state; raise if somebody else leads it elsewhere."""
        state = self.read_state()
        # How a step ended may not have been told, as when it was stopped then.
        if self._begun and state == self.after[self._begun]:
            self._arrive(self._begun)
        self._begun = None
        if state != self._state:
            self.is_moved_by_others = True
            verb = _NEXT.get((self._state, State(goal)))
            if verb is None or state != self.after[verb]:
                raise self._busy(state)
            self._state = State(state)
        return self._state

    def step(self, verb: str) -> None:
        """Do one thing; an error after which it is done is none."""
        size = self.total_bytes() or None
        process = self.process
        phase = Phase(self._tell, process.pid, verb, size, process.name)
        self._begun, self.has_moved = verb, True
        try:
            with phase, self._under_way(verb):
                self._call(verb)
        except driver.DriverError as error:
            self._accept(verb, error)
        finally:
            before = self.outcome.seconds.get(verb, 0.0)
            self.outcome.seconds[verb] = before + phase.seconds
        self._arrive(verb)

    def _arrive(self, verb: str) -> None:
        self._state, self._begun = self.after[verb], None
        used = self.process._used_bytes
        if verb == "checkpoint" and used:
            remembered.keep(self.process._key, used_bytes=used)
        elif verb == "restore":
            self._keep_where_it_is()
            remembered.forget(self.process._key)

    def _accept(self, verb: str, error: driver.DriverError) -> None:
        """Raise an error again, unless what was to be done is."""
        state = self.read_state()
        if state == self.after[verb]:
            # So says the driver if somebody else was faster.
            self.is_moved_by_others |= isinstance(error, driver.IllegalStateError)
            self.note(f"{verb} is done, though the driver said {error}")
        elif state == self._state:
            raise error
        else:
            self.is_moved_by_others = True
            raise self._busy(state) from error

    def expect(self, goal: int) -> None:
        """Raise unless it is in a state now."""
        state = self.read_state()
        self.outcome.after = state_text(state)
        if state != goal:
            self.is_moved_by_others = True
            raise self._busy(state)

    def _busy(self, state: int) -> ProcessBusyError:
        return ProcessBusyError(
            self.process.pid,
            f"has become {state_text(state)} meanwhile: another program moves it",
        )

    def read_state(self) -> int:
        """Return its state now."""
        with self._under_way("state"):
            return self.process._read_state()

    @contextlib.contextmanager
    def _under_way(self, phase: str) -> Iterator[None]:
        self._phase = phase
        try:
            yield
        finally:
            self._phase = None

    def look_whether_it_waits(self) -> None:
        """Tell, once, if a call waits since the process is stopped."""
        phase = self._phase
        why = self.process._why_silent() if phase else None
        if not phase or not why or self._phase != phase:
            return
        note = f"{phase} had to wait: the process {why}"
        if note not in self.outcome.notes:
            self.note(note)
            self._tell(
                Event(
                    self.process.pid,
                    phase,
                    "waiting",
                    time.monotonic(),
                    error=f"process {self.process.pid} {why}",
                    name=self.process.name,
                )
            )

    def _keep_where_it_is(self) -> None:
        """After a restore with a map its memory is that of other GPUs."""
        moved = {old: new for old, new in self._pairs if old != new}
        self._pairs = []
        used = self.needed_bytes()
        self._new_gpus = [moved[gpu] for gpu in used or moved if gpu in moved]
        if used and moved:
            self.process._used_bytes = {
                uuids.to_text(moved.get(gpu, gpu)): size for gpu, size in used.items()
            }

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
        self._restore_by(lambda: self.process._restore(self._pairs))

    def _restore_by(self, restore: Callable[[], None]) -> None:
        """Restore; a second failure tells whether it is lost.

        With driver 580 a process whose restore ran out of memory, or that has
        imported IPC memory, answers OPERATING_SYSTEM from then on.
        """
        try:
            self.process._refuse()
            restore()
            self.process._is_lost = False
        except driver.DriverError as first:
            if self.process._read_state() != State.CHECKPOINTED:
                raise
            try:
                restore()
                self.process._is_lost = False
                self.note(f"restore succeeded at the second attempt, after {first}")
            except driver.OperatingSystemError:
                if self.process._read_state() != State.CHECKPOINTED:
                    raise
                self.process._is_lost = True
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
            self.bring_back(initial)
            if not self.is_moved_by_others:
                error.add_note(
                    f"process {self.process.pid} is {state_text(initial)}, as before"
                )
            for note in self.outcome.notes:
                error.add_note(note)
            raise

    def bring_back(self, initial: int) -> None:
        """Undo what was done, unless somebody else has gone on from there."""
        if not self.is_left_alone:
            self.go_back(initial)
        self.note_how_it_is(initial)

    @property
    def is_left_alone(self) -> bool:
        """Whether nothing is undone, since somebody else has gone on from there."""
        return self.is_moved_by_others

    def note_how_it_is(self, initial: int) -> None:
        """Note what is not as before, though it should have been brought back."""
        if self.is_left_alone:
            self.note("it is left as it is, since another program moves it")
        elif self._new_gpus and initial == State.CHECKPOINTED:
            gpus = ", ".join(map(uuids.to_text, self._new_gpus))
            self.note(f"its memory is now that of {gpus}: to resume it needs no map")

    def go_back(self, initial: int) -> None:
        """Bring it to a state whatever happens; one failure is no reason to stop."""
        self._cancelled = threading.Event()
        self._deadline = time.monotonic() + 10
        for attempt in range(1, _ATTEMPTS_TO_GO_BACK + 1):
            try:
                if initial != State.CHECKPOINTED:
                    self.refuse_without_room()
                self.advance(initial)
            except (ProcessLostError, ProcessGoneError, ProcessBusyError):
                raise
            except Exception as error:
                if attempt == _ATTEMPTS_TO_GO_BACK:
                    raise self._left(initial, error) from error
                time.sleep(0.02 * attempt)
            else:
                return

    def _left(self, initial: int, error: Exception) -> ProcessLeftError:
        try:
            state = state_text(self.read_state())
        except Exception:
            state = "in an unknown state"
        return ProcessLeftError(
            self.process.pid,
            f"is {state} and could not be brought back to {state_text(initial)}: "
            f"{error}{WHAT_MAY_HELP}",
        )

    def refuse_without_room(self) -> None:
        """Raise if what this has checkpointed would be lost by a restore."""
        if not self.needed_bytes() or self.read_state() != State.CHECKPOINTED:
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
        except (ImportError, OSError) as error:
            self.note(f"not checked: {what}: {error}")
            return None

    def note(self, text: str) -> None:
        """Note something, once."""
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def finished(self) -> Outcome:
        """Return what came of it."""
        self.outcome.after = state_text(self.read_state())
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


def _wrapped(text: str, first: str, more: str) -> list[str]:
    return textwrap.wrap(
        text,
        80,
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )
