"""A job of many processes, suspended and resumed as one.

All are locked at the same time with one time limit, since those that have to talk to
each other would wait for a locked one for ever. Then all are checkpointed at once.
Whatever fails, each gets the state back that it had.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuckpt import driver, gpu_map as maps, nvml, proc
from cuckpt.events import Watcher
from cuckpt.passage import Outcome, Passage, State
from cuckpt.process import Process
from cuckpt.process_errors import (
    MissingExtraError,
    NoRoomError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessStoppedError,
)
from cuckpt.uninterrupted import deadline_in, is_asked_to_end, uninterrupted

_PATIENCE_S = 2.0  # with one process, while many are asked for their state


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


class ProcessGroup:
    """Processes that are suspended and resumed together.

    Use `from_pids`, `from_tree` or `discover`.

    Parameters
    ----------
    find : callable
        Returns the pids that belong to it now; a mapping from them to the kernel's
        letters for their states saves to look again. Those without CUDA state are
        left out.
    on_event : callable, optional
        Called with each `cuckpt.events.Event`, in any thread.
    before_suspend, after_resume : callable, optional
        Called with the group, before the first lock and when all run again, also
        after a suspend that failed. If `before_suspend` raises, nothing is suspended.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[int]],
        on_event: Watcher | None = None,
        before_suspend: "Callable[[ProcessGroup], object] | None" = None,
        after_resume: "Callable[[ProcessGroup], object] | None" = None,
    ) -> None:
        self._find = find
        self._watcher = on_event
        self._before_suspend = before_suspend
        self._after_resume = after_resume
        self._members: dict[int, Process] = {}
        self._skipped: dict[int, str] = {}
        self._look_for_members()

    @classmethod
    def from_pids(cls, pids: Iterable[int], **options: Any) -> "ProcessGroup":
        """Make a group of these processes.

        Parameters
        ----------
        pids : iterable of int
        **options
            As for the class.

        Returns
        -------
        ProcessGroup

        Raises
        ------
        TypeError, ValueError
            If a pid is none.
        """
        wanted = list(dict.fromkeys(pids))
        for pid in wanted:
            if isinstance(pid, bool) or not isinstance(pid, int):
                raise TypeError("pid must be an int")
            if not 0 < pid < 1 << 31:
                raise ValueError("pid must be a positive int, below 2**31")
            found_now = proc.facts(pid)
            if found_now is not None and found_now.owner != pid:
                raise ValueError(f"{pid} is a thread of process {found_now.owner}")
        start: dict[int, int | None] = {}

        def find() -> dict[int, str | None]:
            found: dict[int, str | None] = {}
            for pid in wanted:
                now = proc.glance(pid)
                start_time = now.start_time if now else None
                if start.setdefault(pid, start_time) == start_time:
                    found[pid] = now.state if now else None
            return found  # without those whose pid is another's by now

        return cls(find, **options)

    @classmethod
    def from_tree(cls, pid: int, **options: Any) -> "ProcessGroup":
        """Make a group of a process and all its descendants, also later ones.

        Parameters
        ----------
        pid : int
        **options
            As for the class.

        Returns
        -------
        ProcessGroup

        Raises
        ------
        ProcessGoneError
            If there is no such process.
        TypeError, ValueError
            If `pid` is none, or that of a thread.
        """
        root = Process(pid)

        def find() -> dict[int, str]:
            return {} if root._has_ended() else proc.tree(pid)

        return cls(find, **options)

    @classmethod
    def discover(cls, **options: Any) -> "ProcessGroup":
        """Make a group of all CUDA processes that this one may ask, but itself.

        Parameters
        ----------
        **options
            As for the class.

        Returns
        -------
        ProcessGroup
        """
        return cls(lambda: list(proc.pids()), **options)

    @property
    def pids(self) -> list[int]:
        """The processes that have CUDA state."""
        return list(self._members)

    @property
    def skipped(self) -> dict[int, str]:
        """The others, and why they are left out."""
        return dict(self._skipped)

    def states(self) -> dict[int, str]:
        """Tell the state of each.

        Returns
        -------
        dict of int to str
            As `Process.state`; ``ended`` of one that has, or has no CUDA state any
            more; ``stopped`` of one that cannot be asked.
        """
        found = {}
        for pid, member in list(self._members.items()):
            try:
                found[pid] = member.state
            except (ProcessGoneError, driver.NotInitializedError):
                found[pid] = "ended"
            except ProcessStoppedError:
                found[pid] = "stopped"
        return found

    def suspend(self, timeout_s: float | None = 10) -> GroupReport:
        """Lock all, look for new ones until there are none, checkpoint all.

        They are checkpointed at once; one after the other if a job file is set
        (CUDA_CHECKPOINT_JOB_FILE in the environment of one).

        Parameters
        ----------
        timeout_s : float or None
            How long all together may take until their GPU work is done, in seconds;
            None: for ever.

        Returns
        -------
        GroupReport

        Raises
        ------
        GroupError
            If one could not be suspended. Each has the state that it had, or is named
            as lost or left.
        TypeError, ValueError
            If `timeout_s` is no time.
        """
        deadline = deadline_in(timeout_s)
        if self._before_suspend is not None:
            self._before_suspend(self)
        try:
            return uninterrupted(_Run(self, deadline).suspend)
        except BaseException:
            self._tell_if_all_run()
            raise

    def resume(self, gpu_map: "Mapping[Any, Any] | None" = None) -> GroupReport:
        """Restore all at once, then unlock all.

        Parameters
        ----------
        gpu_map : mapping, optional
            As for `Process.resume`.

        Returns
        -------
        GroupReport

        Raises
        ------
        GroupError
            As `suspend`.
        TypeError, ValueError
            If the map cannot be; nothing was tried.
        NoRoomError
            If a GPU has too little free memory for all; nothing was tried.
        """
        run = _Run(self)
        try:
            return uninterrupted(lambda cancelled: run.resume(cancelled, gpu_map))
        finally:
            self._tell_if_all_run()

    @contextlib.contextmanager
    def suspended(
        self, timeout_s: float | None = 10, gpu_map: "Mapping[Any, Any] | None" = None
    ) -> Iterator[GroupReport]:
        """Suspend all while the context manager is open.

        At the end each gets the state back that it had.

        Parameters
        ----------
        timeout_s : float or None
            As in `suspend`.
        gpu_map : mapping, optional
            As in `resume`.

        Yields
        ------
        GroupReport
            Of `suspend`.
        """
        run = _Run(self, deadline_in(timeout_s))
        if gpu_map is not None:
            maps.complete(gpu_map, nvml.gpus())
        if self._before_suspend is not None:
            self._before_suspend(self)
        try:
            yield uninterrupted(run.suspend)
        finally:
            try:
                self._end_suspension(run.initial, gpu_map)
            except (KeyboardInterrupt, SystemExit):
                # It may have come before anything was begun; twice is as good as once.
                self._end_suspension(run.initial, gpu_map)
                raise
            finally:
                self._tell_if_all_run()

    def _end_suspension(
        self, initial: Mapping[int, int], gpu_map: "Mapping[Any, Any] | None"
    ) -> None:
        if initial:
            run = _Run(self)
            uninterrupted(
                lambda cancelled: run.end_suspension(cancelled, initial, gpu_map)
            )

    def recover(self) -> GroupReport:
        """Bring each back to RUNNING, from whatever state it was left in.

        Returns
        -------
        GroupReport

        Raises
        ------
        GroupError
            If one is lost, or busy.
        """
        try:
            return uninterrupted(_Run(self).recover)
        finally:
            self._tell_if_all_run()

    def _tell_if_all_run(self) -> None:
        if self._after_resume is not None:
            states = {_state_of(member) for member in list(self._members.values())}
            if states <= {"running", "ended"}:
                self._after_resume(self)

    def _look_for_members(self) -> list[Process]:
        """Find who belongs to it by now; return those that are new."""
        skipped = {}
        # Who had no CUDA state may have some by now, and a pid be another's.
        found = self._find()
        letters = found if isinstance(found, Mapping) else {}
        unknown = {
            pid: letters.get(pid)
            for pid in found
            if pid not in self._members or self._members[pid]._has_ended()
        }
        new = []
        for pid, reason in _reasons_to_skip(unknown).items():
            if reason is not None:
                skipped[pid] = reason
                continue
            try:
                member = Process(pid, self._watcher)
            except (ProcessGoneError, ValueError) as error:
                skipped[pid] = str(error)
            else:
                self._members[pid] = member
                new.append(member)
        self._skipped = skipped
        return new


class _Run:
    """One operation on all members."""

    def __init__(self, group: ProcessGroup, deadline: float = math.inf) -> None:
        self._group = group
        self.deadline = deadline
        self._in_turn = False
        self._turn = threading.Lock()
        self._passages: dict[int, Passage] = {}
        self.initial: dict[int, int] = {}  # until it has been given back
        self._problems: dict[int, BaseException] = {}
        self._report = GroupReport()
        self._start = time.monotonic()

    def suspend(self, cancelled: threading.Event) -> GroupReport:
        """Suspend all, or bring all back."""
        self.cancelled = cancelled
        with self._told(), self._brought_back():
            self._take(self._group._members.values())
            self._all(_to(State.LOCKED), self._not(State.CHECKPOINTED))
            while new := self._group._look_for_members():
                self._all(_to(State.LOCKED), self._take(new))
            self._compare_with_host_memory()
            self._all(_to(State.CHECKPOINTED))
            self._all(Passage.check_that_nothing_is_left)
            # In time for this: what was asked for meanwhile is undone as well.
            if self.cancelled.is_set() or is_asked_to_end():
                raise KeyboardInterrupt
        return self._finished()

    def resume(
        self, cancelled: threading.Event, gpu_map: "Mapping[Any, Any] | None"
    ) -> GroupReport:
        """Resume all, or bring all back: restore all before anybody is unlocked."""
        self.cancelled = cancelled
        if gpu_map is not None:
            maps.check_type(gpu_map)
        with self._told():
            self._take(self._group._members.values())
            self._prepare(gpu_map, dict.fromkeys(self.initial, State.RUNNING))
            with self._brought_back():
                self._all(_to(State.LOCKED), self._not(State.RUNNING))
                self._all(_to(State.RUNNING))
        return self._finished()

    def end_suspension(
        self,
        cancelled: threading.Event,
        goals: Mapping[int, int],
        gpu_map: "Mapping[Any, Any] | None",
    ) -> GroupReport:
        """Give each the state back that it had; what fails is tried again."""
        self.cancelled = cancelled
        with self._told():
            self._take(self._group._members.values(), raising=False)
            goals = {pid: goals[pid] for pid in self.initial if pid in goals}
            self._prepare_what_can_be(gpu_map, goals)
            self._go_back(goals)
            self._raise_problems()
        return self._finished()

    def recover(self, cancelled: threading.Event) -> GroupReport:
        """Bring all to RUNNING, each by itself."""
        self.cancelled = cancelled
        with self._told():
            self._take(self._group._members.values(), raising=False)
            goals = dict.fromkeys(self.initial, State.RUNNING)
            self._prepare_what_can_be(None, goals)
            self._go_back(goals)
            self._raise_problems()
        return self._finished()

    def _take(self, members: Iterable[Process], raising: bool = True) -> list[int]:
        """Look at the members; return those that are there."""
        made = {member.pid: _MembersPassage(member, self) for member in members}
        self._in_turn |= any(
            "CUDA_CHECKPOINT_JOB_FILE" in proc.environment(pid) for pid in made
        )
        states: dict[int, int] = {}

        def look(passage: Passage) -> None:
            states[passage.process.pid] = passage.look()

        self._passages.update(made)
        self._each(look, made)
        self.initial.update(states)
        if raising:
            self._raise_problems()
        return [pid for pid in states if pid in self._passages]

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
                    f"and {len(suspended) - 1} more cannot be restored: {error}",
                ) from None

    def _prepare_what_can_be(
        self, gpu_map: "Mapping[Any, Any] | None", goals: Mapping[int, int]
    ) -> None:
        """As `_prepare`; for whom there is no room is left as it is, and named."""
        try:
            self._prepare(gpu_map, goals)
        except NoRoomError as error:
            for pid, goal in goals.items():
                if self.initial[pid] == State.CHECKPOINTED != goal:
                    self._problems[pid] = NoRoomError(pid, str(error.args[1]))

    def _not(self, state: int) -> list[int]:
        return [pid for pid, initial in self.initial.items() if initial != state]

    def _all(
        self,
        do: Callable[[Passage], object],
        pids: Iterable[int] | None = None,
    ) -> None:
        """Do something with each; raise if one fails."""
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        self._each(do, self._passages if pids is None else pids)
        self._raise_problems()

    def _each(self, do: Callable[[Passage], object], pids: Iterable[int]) -> None:
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
            if isinstance(error, ProcessGoneError) or _tells_of_no_state(error):
                self._report.skipped[pid] = str(error)
                del self._passages[pid]
            else:
                self._problems[pid] = error

    def _raise_problems(self) -> None:
        if any(isinstance(e, KeyboardInterrupt) for e in self._problems.values()):
            raise KeyboardInterrupt
        if self._problems:
            raise _Failed

    def _go_back(self, goals: Mapping[int, int]) -> None:
        """Bring each to a state whatever happens; restore all before one is unlocked.

        What fails is kept.
        """

        def restore(passage: Passage) -> None:
            if goals[passage.process.pid] == State.CHECKPOINTED:
                return
            # That its state cannot be told comes up again on the way to the goal.
            with contextlib.suppress(driver.DriverError):
                if passage.process._read_state() == State.CHECKPOINTED:
                    passage.go_back(State.LOCKED)

        def go_back(passage: Passage) -> None:
            passage.go_back(goals[passage.process.pid])

        for do in restore, go_back:
            self._each(do, [pid for pid in goals if pid not in self._problems])

    def turn(self) -> "contextlib.AbstractContextManager[object]":
        """Return what a member holds while its memory is moved."""
        return self._turn if self._in_turn else contextlib.nullcontext()

    @contextlib.contextmanager
    def _brought_back(self) -> Iterator[None]:
        """Bring each to the state it had if one fails."""
        try:
            yield
        except BaseException:
            failed, self._problems = self._problems, {}
            self._go_back(self.initial)
            # That one cannot be brought back counts for more than why it had to be.
            self._problems = {**failed, **self._problems}
            self.initial = {}
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raise one error about all if some have failed."""
        try:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(MissingExtraError, OSError):
                    # To begin one takes long, but for within another.
                    stack.enter_context(nvml.session())
                yield
        except (_Failed, KeyboardInterrupt):
            problems = {
                pid: problem
                for pid, problem in self._problems.items()
                if isinstance(problem, Exception)
            }
            if not problems:
                raise
            raise self._error(problems) from None

    def _error(self, problems: Mapping[int, Exception]) -> GroupError:
        self._finished()
        lines = [
            f"process {pid} ({passage.outcome.name}): was {passage.outcome.before}, is "
            f"{passage.outcome.after}"
            + (f"; {problems[pid]}" if pid in problems else "")
            for pid, passage in self._passages.items()
        ]
        lines += [f"process {pid}: {why}" for pid, why in self._report.skipped.items()]
        error = GroupError(
            "\n  ".join(
                [f"{len(problems)} of {len(self._passages)} processes failed", *lines]
            ),
            list(problems.values()),
        )
        error.report = self._report
        return error

    def _finished(self) -> GroupReport:
        for pid, passage in self._passages.items():
            passage.outcome.after = _state_of(passage.process)
            self._report.outcomes[pid] = passage.outcome
        self._report.skipped = {**self._group._skipped, **self._report.skipped}
        self._report.seconds = time.monotonic() - self._start
        return self._report


class _MembersPassage(Passage):
    """The way of one of many, which may have to wait for its turn."""

    def __init__(self, member: Process, run: _Run) -> None:
        super().__init__(member, run.cancelled, run.deadline)
        self._run = run

    def step(self, verb: str) -> None:
        """Do one thing; with a job file only one checkpoints or restores."""
        if verb not in ("checkpoint", "restore"):
            super().step(verb)
            return
        with self._run.turn():
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


def _to(state: int) -> Callable[[Passage], None]:
    return lambda passage: passage.advance(state)


def _tells_of_no_state(error: BaseException | None) -> bool:
    """Tell whether a process has no CUDA state any more, as after an exec."""
    if isinstance(error, ProcessLeftError):
        error = error.__cause__
    return (
        isinstance(error, driver.NotInitializedError)
        and error.call == "cuCheckpointProcessGetState"
    )


class _Failed(Exception):
    """Some members have failed; which ones is kept elsewhere."""


def _state_of(process: Process) -> str:
    try:
        return process.state
    except ProcessGoneError:
        return "ended"
    except Exception as error:
        return f"not known ({error})"


def _reasons_to_skip(pids: Mapping[int, str | None]) -> dict[int, str | None]:
    """Tell of each process None, or the reason to leave it out.

    They are asked one after the other in a thread. Who does not answer is being
    checkpointed, so has CUDA state, and the thread is left to wait for that.
    """
    reasons: dict[int, str | None] = {}
    patience_s = _PATIENCE_S
    while waiting := {pid: pids[pid] for pid in pids if pid not in reasons}:
        answers: dict[int, str | None] = {}
        problems: list[BaseException] = []
        thread = threading.Thread(
            target=_ask_all, args=(waiting, answers, problems), daemon=True
        )
        thread.start()
        seen = -1
        while thread.is_alive() and len(answers) > seen:  # as long as it gets on
            seen = len(answers)
            thread.join(patience_s)
        if problems:
            raise problems[0]
        reasons.update(answers.copy())
        for pid in waiting:
            if pid not in reasons:
                reasons[pid] = None
                patience_s = _PATIENCE_S / 10  # there may be many such
                break
    return reasons


def _ask_all(
    pids: Mapping[int, str | None],
    answers: dict[int, str | None],
    problems: list[BaseException],
) -> None:
    try:
        for pid, letter in pids.items():
            answers[pid] = _reason_to_skip(pid, letter)
    except BaseException as error:  # as without a driver
        problems.append(error)


def _reason_to_skip(pid: int, letter: str | None) -> str | None:
    if pid == os.getpid():
        return "this process itself"
    if letter is None:
        found = proc.glance(pid)
        letter = found.state if found else None
    if letter == "Z":
        return "has ended: it is a zombie"
    if letter in ("T", "t") and proc.is_stopped(pid):
        # One that may have CUDA state is not left out: the others may need it.
        loaded = proc.has_loaded(pid, "libcuda.so")
        return None if loaded else "stopped: it cannot be asked"
    try:
        driver.checkpoint_process_get_state(pid)
    except driver.NotInitializedError:
        return "no CUDA state"
    except driver.OperatingSystemError as error:
        return str(error)
    except driver.DriverError:
        return None  # one that has CUDA state; what fails will show
    return None
