"""One operation on all members of a group.

All are locked at the same time with one time limit, since those that have to talk to
each other would wait for a locked one for ever. Then all are checkpointed at once.
Whatever fails, each gets the state back that it had.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuckpt import driver, gpu_map as maps, nvml, proc
from cuckpt.events import Teller
from cuckpt.lookout import Lookout
from cuckpt.passage import WHAT_MAKES_ROOM, Outcome, Passage, State
from cuckpt.process_errors import (
    NoMembersError,
    NoRoomError,
    ProcessBusyError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessStoppedError,
    skipped_lines,
)
from cuckpt.suspension import Suspension
from cuckpt.turns import Key, Turn
from cuckpt.uninterrupted import is_asked_to_end

if TYPE_CHECKING:
    from cuckpt.group import ProcessGroup
    from cuckpt.process import Process


@dataclass
class GroupReport:
    """What came of it for all.

    Attributes
    ----------
    outcomes : dict of int to Outcome
        By pid.
    skipped : dict of int to str
        Processes that were left out, and why: without CUDA state, or ended.
    seconds : float
        How long it took in all.
    """

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def image(self) -> str | None:
        """The folder of the image that the memory of all is in, or came from."""
        images = {outcome.image for outcome in self.outcomes.values()}
        return images.pop() if len(images) == 1 else None

    def __str__(self) -> str:
        count = len(self.outcomes)
        what = "process" if count == 1 else "processes"
        return "\n".join(
            [
                f"{count} {what} in {self.seconds:.2f} s",
                *map(str, self.outcomes.values()),
                *skipped_lines(self.skipped),
            ]
        )


class GroupError(ExceptionGroup):
    """One process or more failed; the text tells what happened to each.

    Attributes
    ----------
    report : GroupReport
    """

    report: GroupReport

    def derive(self, excs: Any) -> "GroupError":  # type: ignore[override]
        """Return one of the same kind with other exceptions."""
        error = GroupError(self.message, excs)
        error.report = self.report
        return error


class Run:
    """One operation on all members.

    Parameters
    ----------
    group : ProcessGroup
    deadline : float
        Until when locks may wait, and others for this, as `time.monotonic` tells.
    """

    def __init__(self, group: "ProcessGroup", deadline: float = math.inf) -> None:
        self._group = group
        self.deadline = deadline
        self._one_by_one = False
        self._alone = threading.Lock()
        self._passages: dict[int, Passage] = {}
        self.initial: dict[int, int] = {}
        self._problems: dict[int, BaseException] = {}
        self._report = GroupReport()
        self._start = time.monotonic()

    def suspend(
        self, cancelled: threading.Event, suspension: Suspension | None = None
    ) -> GroupReport:
        """Suspend all, or bring all back."""
        with self._begun(cancelled):
            with self._brought_back():
                self._take(self._group._members.values())
                self._all(Passage.refuse_lost)
                self._all(to(State.LOCKED), self._not(State.CHECKPOINTED))
                while new := self._group._look_for_members():
                    self._all(to(State.LOCKED), self._take(new))
                self.refuse_nobody()
                self._compare_with_host_memory()
                self._all(to(State.CHECKPOINTED))
                self._all(Passage.check_that_nothing_is_left)
                self._all(expect(State.CHECKPOINTED))
                self.refuse_nobody()
                # In time for this: what was asked for meanwhile is undone as well.
                if self.cancelled.is_set() or is_asked_to_end():
                    raise KeyboardInterrupt
            if suspension is not None:
                suspension.hold(self._initial_by_key())
            return self._finished()

    def _initial_by_key(self) -> dict[Key, int]:
        return {
            passage.process._key: self.initial[pid]
            for pid, passage in self._passages.items()
        }

    def resume(
        self, cancelled: threading.Event, gpu_map: "Mapping[Any, Any] | None"
    ) -> GroupReport:
        """Resume all, or bring all back: restore all before anybody is unlocked."""
        if gpu_map is not None:
            maps.check_type(gpu_map)
        with self._begun(cancelled):
            self._take(self._group._members.values())
            self._prepare(gpu_map, dict.fromkeys(self.initial, State.RUNNING))
            with self._brought_back():
                self._all(to(State.LOCKED), self._not(State.RUNNING))
                self._all(to(State.RUNNING))
                self._all(expect(State.RUNNING))
            return self._finished()

    def end_suspension(
        self, cancelled: threading.Event, suspension: Suspension
    ) -> GroupReport:
        """Give each back that nobody else holds; what fails is tried again."""
        with self._begun(cancelled):
            held = set(suspension.keys())
            members = self._group._members.values()
            self._take([each for each in members if each._key in held], raising=False)
            given = suspension.let_go()
            back = {
                pid: given[key]
                for pid in self.initial
                if (key := self._passages[pid].process._key) in given
            }
            for gpu_map in {id(own): own for _, own in back.values()}.values():
                same = {
                    pid: goal for pid, (goal, own) in back.items() if own is gpu_map
                }
                self._prepare_what_can_be(gpu_map, same)
            self._go_back({pid: goal for pid, (goal, _) in back.items()})
            self._raise_problems()
            return self._finished()

    def recover(self, cancelled: threading.Event) -> GroupReport:
        """Bring all to RUNNING, each by itself."""
        with self._begun(cancelled):
            self._take(self._group._members.values(), raising=False)
            goals = dict.fromkeys(self.initial, State.RUNNING)
            self._prepare_what_can_be(None, goals)
            self._go_back(goals)
            self._raise_problems()
            return self._finished()

    def _take(self, members: "Iterable[Process]", raising: bool = True) -> list[int]:
        """Look at the members; return those that are there."""
        made = {member.pid: self._passage_of(member) for member in members}
        self._wait_for_turn(made)
        self._one_by_one |= any(
            "CUDA_CHECKPOINT_JOB_FILE" in proc.environment(pid) for pid in made
        )
        states: dict[int, int] = {}

        def look(passage: Passage) -> None:
            states[passage.process.pid] = passage.look()

        self._each(look, made)
        self.initial.update(states)
        if raising:
            self._raise_problems()
        return [pid for pid in states if pid in self._passages]

    def _passage_of(self, member: "Process") -> Passage:
        return MembersPassage(member, self)

    def _wait_for_turn(self, made: Mapping[int, Passage]) -> None:
        self._passages.update(made)
        try:
            self.turn.take([passage.process._key for passage in made.values()])
        except ProcessBusyError as error:
            self._problems[error.pid] = error
            raise Failed from None

    def _compare_with_host_memory(self) -> None:
        """Note if there is less of it than all checkpoints need."""
        needed = sum(
            passage.total_bytes()
            for pid, passage in self._passages.items()
            if self.initial[pid] != State.CHECKPOINTED
        )
        left = proc.memory_left()
        if left is not None and left[0] < needed:
            for passage in self._passages.values():
                passage.note(
                    f"the {maps.mib(needed)} of GPU memory of all need host memory, of "
                    f"which {maps.mib(left[0])} are left"
                )

    def _prepare(
        self, gpu_map: "Mapping[Any, Any] | None", goals: Mapping[int, int]
    ) -> None:
        """Check the map, and the room for all together that are to be restored."""
        if gpu_map:
            for pid in goals:
                if self.initial[pid] != State.CHECKPOINTED and pid in self._passages:
                    self._passages[pid].note_unused_map()
        suspended = [
            self._passages[pid]
            for pid, goal in goals.items()
            if self.initial[pid] == State.CHECKPOINTED != goal and pid in self._passages
        ]
        if not suspended:
            return
        needed: dict[bytes, int] = {}
        for passage in suspended:
            passage.prepare(gpu_map)
            for uuid, size in passage.needed_bytes().items():
                needed[uuid] = needed.get(uuid, 0) + size
        gpus = suspended[0].noted("free memory", nvml.gpus) if needed else None
        if gpus is not None:
            try:
                maps.complete(gpu_map or {}, gpus, needed)
            except MemoryError as error:
                raise NoRoomError(
                    suspended[0].process.pid,
                    f"and {len(suspended) - 1} more cannot be restored: {error}; "
                    + WHAT_MAKES_ROOM,
                ) from None

    def _prepare_what_can_be(
        self, gpu_map: "Mapping[Any, Any] | None", goals: Mapping[int, int]
    ) -> None:
        """As `_prepare`; who cannot be restored is left as it is, and named."""
        suspended = [
            pid
            for pid, goal in goals.items()
            if self.initial[pid] == State.CHECKPOINTED != goal
        ]
        self._each(Passage.refuse_saved, suspended)
        left = {pid: goals[pid] for pid in goals if pid not in self._problems}
        try:
            self._prepare(gpu_map, left)
        except NoRoomError as error:
            for pid in suspended:
                self._problems.setdefault(pid, NoRoomError(pid, str(error.args[1])))

    def refuse_nobody(self) -> None:
        """Raise if all have been left out, as when they have ended."""
        if not self._passages:
            raise NoMembersError(self._finished().skipped)

    def _not(self, state: int) -> list[int]:
        return [pid for pid, initial in self.initial.items() if initial != state]

    def _all(
        self,
        do: Callable[[Any], object],  # gets the passage of each
        pids: Iterable[int] | None = None,
    ) -> None:
        """Do something with each; raise if one fails."""
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        self._each(do, self._passages if pids is None else pids)
        self._raise_problems()

    def _each(self, do: Callable[[Any], object], pids: Iterable[int]) -> None:
        """Do something with each; keep what fails. One that has ended is left out."""
        passages = [self._passages[pid] for pid in pids if pid in self._passages]
        if not passages:
            return
        errors: dict[Passage, BaseException] = {}

        def attempt(passage: Passage) -> None:
            try:
                do(passage)
            except BaseException as error:
                errors[passage] = error

        _at_once(attempt, passages)
        for passage, error in errors.items():
            pid = passage.process.pid
            if isinstance(error, ProcessGoneError):
                self._leave_out(pid, str(error.args[1]))
            elif _tells_of_no_state(error) and not passage.has_moved:
                self._leave_out(pid, "no CUDA state any more")
            else:
                self._problems[pid] = error

    def _leave_out(self, pid: int, why: str) -> None:
        self._report.skipped[pid] = why
        del self._passages[pid]

    def _raise_problems(self) -> None:
        if any(isinstance(e, KeyboardInterrupt) for e in self._problems.values()):
            raise KeyboardInterrupt
        if self._problems:
            raise Failed

    def _go_back(self, goals: Mapping[int, int]) -> None:
        """Bring each to a state whatever happens; restore all before one is unlocked.

        What fails is kept.
        """

        def restore(passage: Passage) -> None:
            if goals[passage.process.pid] == State.CHECKPOINTED:
                return
            # That its state cannot be told comes up again on the way to the goal.
            state = None
            with contextlib.suppress(Exception):
                state = passage.read_state()
            if state == State.CHECKPOINTED:
                passage.go_back(State.LOCKED)

        def go_back(passage: Passage) -> None:
            passage.go_back(goals[passage.process.pid])

        for do in restore, go_back:
            self._each(do, [pid for pid in goals if pid not in self._problems])

    def alone(self) -> "contextlib.AbstractContextManager[object]":
        """Return what a member holds while its memory is moved."""
        return self._alone if self._one_by_one else contextlib.nullcontext()

    @contextlib.contextmanager
    def _brought_back(self) -> Iterator[None]:
        """Bring each to the state it had if one fails."""
        try:
            yield
        except BaseException:
            failed, self._problems = self._problems, {}
            self._go_back(
                {
                    pid: self.initial[pid]
                    for pid, passage in self._passages.items()
                    if pid in self.initial and not passage.is_left_alone
                }
            )
            for pid, passage in self._passages.items():
                if pid in self.initial and pid not in self._problems:
                    passage.note_how_it_is(self.initial[pid])
            # That one cannot be brought back counts for more than why it had to be.
            self._problems = {**failed, **self._problems}
            for pid in failed.keys() - self._passages.keys():  # ended meanwhile
                why = self._report.skipped.get(pid, "has ended")
                self._problems[pid] = ProcessGoneError(pid, why)
                self._problems[pid].__cause__ = failed[pid]
            raise

    @contextlib.contextmanager
    def _begun(self, cancelled: threading.Event) -> Iterator[None]:
        """Raise one error about all if some have failed."""
        self.cancelled = cancelled
        try:
            with (
                self._watched(),
                Turn(cancelled, self.deadline) as self.turn,
                Lookout(self._look_whether_one_waits),
                contextlib.ExitStack() as stack,
            ):
                with contextlib.suppress(ImportError, OSError):
                    # To begin one takes long, but for within another.
                    stack.enter_context(nvml.session())
                yield
        except (Failed, KeyboardInterrupt):
            problems = {
                pid: problem
                for pid, problem in self._problems.items()
                if isinstance(problem, Exception)
            }
            if not problems:
                raise
            raise self._error(problems) from None

    def _look_whether_one_waits(self) -> None:
        for passage in list(self._passages.values()):
            passage.look_whether_it_waits()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self.tell = Teller(self._group._watchers)
        try:
            yield
        finally:
            for pid, text in self.tell.finish():
                if pid in self._passages:
                    self._passages[pid].note(text)

    def _error(self, problems: Mapping[int, Exception]) -> GroupError:
        self._finished()
        lines = []
        # Those that failed first.
        for pid in sorted(self._passages, key=lambda pid: pid not in problems):
            outcome = self._passages[pid].outcome
            states = f"was {outcome.before}, is {outcome.after}"
            line = f"process {pid} ({outcome.name}): "
            line += states if outcome.before else "not asked"
            lines.append(line + (f"; {problems[pid]}" if pid in problems else ""))
            lines += [f"  {note}" for note in outcome.notes]
        lines += skipped_lines(self._report.skipped)
        count = problems.keys() | self._passages.keys()
        error = GroupError(
            "\n  ".join([f"{len(problems)} of {len(count)} processes failed", *lines]),
            list(problems.values()),
        )
        error.report = self._report
        return error

    def _finished(self) -> GroupReport:
        for pid, passage in self._passages.items():
            if passage.outcome.before is not None:
                passage.outcome.after = state_of(passage.process)
            self._report.outcomes[pid] = passage.outcome
        self._report.skipped = {**self._group._skipped, **self._report.skipped}
        self._report.seconds = time.monotonic() - self._start
        return self._report


class MembersPassage(Passage):
    """The way of one of many, which may have to wait for its turn."""

    def __init__(self, member: "Process", run: Run) -> None:
        super().__init__(member, run.cancelled, run.deadline, run.tell)
        self._run = run

    def step(self, verb: str) -> None:
        """Do one thing; with a job file only one checkpoints or restores."""
        if verb not in ("checkpoint", "restore"):
            super().step(verb)
            return
        with self._run.alone():
            if self._cancelled.is_set():
                raise KeyboardInterrupt
            super().step(verb)


def _at_once(do: Callable[[Passage], object], passages: Sequence[Passage]) -> None:
    """Do something with each at the same time, as far as there can be threads."""
    threads, left = [], [passages[0]]
    for passage in passages[1:]:
        thread = threading.Thread(target=do, args=(passage,), name="cuckpt")
        try:
            if sys.is_finalizing():  # it would not get a turn any more
                raise RuntimeError
            thread.start()
        except RuntimeError:
            left.append(passage)
        else:
            threads.append(thread)
    for passage in left:
        do(passage)
    for thread in threads:
        thread.join()


def to(state: int) -> Callable[[Passage], None]:
    """Return what brings a passage to a state."""
    return lambda passage: passage.advance(state)


def expect(state: int) -> Callable[[Passage], None]:
    """Return what raises unless a passage is in a state."""
    return lambda passage: passage.expect(state)


def _tells_of_no_state(error: BaseException | None) -> bool:
    """Tell whether a process has no CUDA state any more, as after an exec."""
    if isinstance(error, ProcessLeftError):
        error = error.__cause__
    return (
        isinstance(error, driver.NotInitializedError)
        and error.call == "cuCheckpointProcessGetState"
    )


class Failed(Exception):
    """Some members have failed; which ones the run keeps."""


def state_of(process: "Process") -> str:
    """Return the state of a process, or why there is none.

    Parameters
    ----------
    process : Process

    Returns
    -------
    str
    """
    try:
        return "lost" if process._is_lost and process.state else process.state
    except (ProcessGoneError, driver.NotInitializedError):
        return "ended"
    except ProcessStoppedError:
        return "stopped"
    except driver.OperatingSystemError:
        return "refused"
    except Exception as error:
        return f"not known ({error})"
