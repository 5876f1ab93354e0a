"""A job of many processes, suspended and resumed as one."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cuckpt import gpu_map as maps, nvml, proc
from cuckpt.events import Watcher, watchers_of
from cuckpt.group_run import GroupError, GroupReport, Run, state_of
from cuckpt.members import reasons_to_skip
from cuckpt.process import Process
from cuckpt.process_errors import ProcessGoneError
from cuckpt.suspension import Suspension
from cuckpt.uninterrupted import deadline_in, uninterrupted

__all__ = ["GroupError", "GroupReport", "ProcessGroup"]


class ProcessGroup:
    """Processes that are suspended and resumed together.

    Use `from_pids`, `from_tree`, `from_image` or `discover`.

    Parameters
    ----------
    find : callable
        Returns the pids that belong to it now; a mapping from them to the kernel's
        letters for their states saves to look again. Those without CUDA state are
        left out.
    on_event : callable, or sequence of callables, optional
        Called with each `cuckpt.events.Event`, one after the other, in a thread.
    before_suspend, after_resume : callable, optional
        Called with the group, before the first lock and when all run again, also
        after a suspend that failed. If `before_suspend` raises, nothing is suspended.
    skip_refused : bool
        Leave out those that this process may not ask. If false, a suspend fails that
        finds one which may have CUDA state.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[int]],
        on_event: Watcher | Sequence[Watcher] | None = None,
        before_suspend: "Callable[[ProcessGroup], object] | None" = None,
        after_resume: "Callable[[ProcessGroup], object] | None" = None,
        skip_refused: bool = False,
    ) -> None:
        self._find = find
        self._watchers = watchers_of(on_event)
        self._before_suspend = before_suspend
        self._after_resume = after_resume
        self._skip_refused = skip_refused
        self._members: dict[int, Process] = {}
        self._skipped: dict[int, str] = {}
        self._look_for_members()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.pids}>"

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
    def from_image(
        cls, path: "str | os.PathLike[str]", **options: Any
    ) -> "ProcessGroup":
        """Make a group of those that have the pids of an image's processes, to load it.

        Parameters
        ----------
        path : str or path
            Its folder.
        **options
            As for the class.

        Returns
        -------
        ProcessGroup

        Raises
        ------
        ImageError, MissingExtraError, OSError
            As `cuckpt.storage.describe`.
        """
        from cuckpt.storage import describe

        pids = (saved.pid for saved in describe(path).processes)
        found = ((pid, proc.facts(pid)) for pid in pids)
        # A pid may be a thread's by now.
        return cls.from_pids(
            (pid for pid, now in found if now is None or now.owner == pid), **options
        )

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
        return cls(lambda: list(proc.pids()), **{"skip_refused": True, **options})

    @classmethod
    def _of(cls, process: Process) -> "ProcessGroup":
        """Make a group of one process that is there already."""
        group = cls(list, process._watchers)
        group._members[process.pid] = process
        return group

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
            more; ``stopped`` and ``refused`` of one that cannot, or may not, be asked;
            ``lost`` of one that was found to be.
        """
        return {pid: state_of(member) for pid, member in [*self._members.items()]}

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
        NoMembersError
            If there is nobody to suspend.
        TypeError, ValueError
            If `timeout_s` is no time.
        """
        return self._suspending(Run(self, deadline_in(timeout_s)).suspend)

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
        run = Run(self)
        with self._told():
            return uninterrupted(lambda cancelled: run.resume(cancelled, gpu_map))

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
        run = Run(self, deadline_in(timeout_s))
        if gpu_map is not None:
            maps.complete(gpu_map, nvml.gpus())
        suspension = Suspension(lambda: self._end(suspension), gpu_map)
        if self._before_suspend is not None:
            self._before_suspend(self)
        try:
            try:
                report = uninterrupted(lambda event: run.suspend(event, suspension))
            except BaseException as error:
                if not suspension.is_open:
                    self._tell_if_all_run(error)
                raise
            yield report
        finally:
            suspension.end()

    def _end(self, suspension: Suspension) -> None:
        run = Run(self)
        with self._told():
            uninterrupted(lambda cancelled: run.end_suspension(cancelled, suspension))

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
        with self._told():
            return uninterrupted(Run(self).recover)

    def save(
        self,
        path: "str | os.PathLike[str]",
        timeout_s: float | None = 10,
        *,
        fallback: "Sequence[str | os.PathLike[str]]" = (),
        replace: bool = False,
        durable: bool = True,
        dry_run: bool = False,
    ) -> GroupReport:
        """Lock all, and copy the GPU memory of all at once to one image.

        Parameters
        ----------
        path, timeout_s, fallback, replace, durable, dry_run
            As for `Process.save`.

        Returns
        -------
        GroupReport

        Raises
        ------
        FunctionNotFoundError, MissingExtraError, OSError, ImageError
            As `Process.save`; nothing was tried.
        NoMembersError
            If there is nobody to save, or all have ended meanwhile.
        GroupError
            If one could not be saved. Each has the state that it had, or is named as
            lost or left.
        """
        from cuckpt.storage import save_group

        return save_group(self, path, timeout_s, fallback, replace, durable, dry_run)

    def load(
        self,
        path: "str | os.PathLike[str]",
        gpu_map: "Mapping[Any, Any] | None" = None,
        *,
        same_process: bool = True,
        remove: bool = False,
    ) -> GroupReport:
        """Copy the GPU memory of all from one image, then let all run.

        Parameters
        ----------
        path, gpu_map, same_process, remove
            As for `Process.load`.

        Returns
        -------
        GroupReport

        Raises
        ------
        ImageError, FunctionNotFoundError, MissingExtraError, OSError
            As `Process.load`; nothing was tried.
        TypeError, ValueError, NoRoomError
            As `resume`; nothing was tried.
        NoMembersError
            If there is nobody to load, or all have ended.
        GroupError
            If one could not be loaded. All are CHECKPOINTED as before, or named as
            lost or left.
        """
        from cuckpt.storage import load_group

        return load_group(self, path, gpu_map, same_process, remove)

    def _suspending(self, do: Callable[[threading.Event], GroupReport]) -> GroupReport:
        if self._before_suspend is not None:
            self._before_suspend(self)
        try:
            return uninterrupted(do)
        except BaseException as error:
            self._tell_if_all_run(error)
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Call `after_resume` in the end, which hides no other error."""
        try:
            yield
        except BaseException as error:
            self._tell_if_all_run(error)
            raise
        self._tell_if_all_run()

    def _tell_if_all_run(self, error: BaseException | None = None) -> None:
        states = set(self.states().values()) if self._after_resume else set()
        if self._after_resume is None or not states <= {"running", "ended"}:
            return
        try:
            self._after_resume(self)
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"after_resume raised {problem!r}")
            problem.__context__, error.__context__ = None, problem

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
        for pid, reason in reasons_to_skip(unknown, self._skip_refused).items():
            if reason is not None:
                skipped[pid] = reason
                continue
            try:
                member = Process(pid, self._watchers)
            except (ProcessGoneError, ValueError) as error:
                skipped[pid] = str(error.args[-1])
            else:
                self._members[pid] = member
                new.append(member)
        self._skipped = skipped
        return new
