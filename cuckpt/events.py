"""What happens while processes are suspended and resumed, for those who watch."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

from cuckpt.process_errors import MissingExtraError


@dataclass(frozen=True)
class Event:
    """A phase of one process begins or ends, or waits for a process that is stopped.

    Attributes
    ----------
    pid : int
    phase : str
        ``lock``, ``checkpoint``, ``restore`` or ``unlock``; of images also ``prepare``,
        ``copy`` and ``complete``; ``state`` of one that waits while it is asked for its
        state.
    moment : str
        ``start``, ``end``, ``waiting``, or ``progress`` of a copy.
    time_s : float
        When, as `time.monotonic` tells.
    seconds : float or None
        How long the phase took, at its end.
    bytes : int or None
        How much GPU memory the process has, if that is known.
    error : str or None
        Why it failed, at its end; what it waits for.
    name : str
        Of the process.
    done_bytes : int or None
        How much has been copied, while a copy is under way.
    """

    pid: int
    phase: str
    moment: str
    time_s: float
    seconds: float | None = None
    bytes: int | None = None
    error: str | None = None
    name: str = ""
    done_bytes: int | None = None


Watcher: TypeAlias = Callable[[Event], object]


def watchers_of(on_event: Watcher | Sequence[Watcher] | None) -> tuple[Watcher, ...]:
    """Return who watches, as `on_event` says.

    Parameters
    ----------
    on_event : callable, sequence of callables, or None

    Returns
    -------
    tuple of callable

    Raises
    ------
    TypeError
        If one cannot be called.
    """
    if on_event is None:
        return ()
    if callable(on_event):
        return (on_event,)
    if isinstance(on_event, Iterable) and all(map(callable, on_event)):
        return tuple(on_event)
    raise TypeError("on_event must be a callable, or a sequence of callables")


class Teller:
    """Tells events to who watches, in order, in a thread that nobody waits for long.

    Parameters
    ----------
    watchers : sequence of callable
    """

    _PATIENCE_S = 2.0

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._problems: list[tuple[int, str]] = []
        self._pids: set[int] = set()
        self._thread: threading.Thread | None = None
        if watchers:
            thread = threading.Thread(
                target=self._run, name="cuckpt tells", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # there can be no more threads
                return
            self._thread = thread

    def __call__(self, event: Event) -> None:
        """Tell an event soon."""
        self._pids.add(event.pid)
        if self._thread is None:
            self._tell(event)
        else:
            self._events.put(event)

    def finish(self) -> list[tuple[int, str]]:
        """Wait, but not for ever, until all is told.

        Returns
        -------
        list of tuple of int and str
            What went wrong, each with the pid that it was about.
        """
        problems = self._problems
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(self._PATIENCE_S)
            if self._thread.is_alive():
                late = "on_event has not returned"
                problems = [*problems, *((pid, late) for pid in sorted(self._pids))]
        return list(dict.fromkeys(problems))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        for watch in self._watchers:
            try:
                watch(event)
            except BaseException as problem:  # who watches must not stand in the way
                self._problems.append((event.pid, f"on_event raised {problem!r}"))


class Trace:
    """A file in the Chrome trace format, which Perfetto and chrome://tracing open.

    Give it as `on_event`. It is complete when the context manager is left; both
    programs open it before as well.

    Parameters
    ----------
    path : str or path
        The file, which is replaced.

    Raises
    ------
    OSError
        If it cannot be written.
    """

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        self._lock = threading.Lock()
        self._file = open(path, "w")  # noqa: SIM115
        self._file.write("[")
        self._separator = "\n"
        self._named: set[int] = set()

    def __call__(self, event: Event) -> None:
        """Write an event; one that comes after `close` is left out."""
        with self._lock:
            if self._file.closed:
                return
            if event.name and event.pid not in self._named:
                self._named.add(event.pid)
                for what in "process_name", "thread_name":
                    self._write(event, what, "M", {"name": event.name})
            if event.moment == "progress":
                self._write(event, "copied", "C", {"bytes": event.done_bytes})
                return
            extra = {"bytes": event.bytes, "error": event.error}
            extra = {name: value for name, value in extra.items() if value is not None}
            letter = {"start": "B", "end": "E", "waiting": "i"}[event.moment]
            name = "waiting" if letter == "i" else event.phase
            self._write(event, name, letter, extra)
            self._file.flush()

    def _write(
        self, event: Event, name: str, letter: str, extra: dict[str, Any]
    ) -> None:
        entry: dict[str, Any] = {
            "name": name,
            "ph": letter,
            "ts": round(event.time_s * 1e6, 1),
            "pid": event.pid,
            "tid": event.pid,
        }
        if extra:
            entry["args"] = extra
        self._file.write(self._separator + json.dumps(entry))
        self._separator = ",\n"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Complete the file."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()


class ProgressBar:
    """A line for each process on the terminal: phase, GPU memory, time.

    Give it as `on_event`, inside of its context manager. Needs rich, which the
    extra ``jobs`` brings.

    Raises
    ------
    MissingExtraError
        Without rich.
    """

    def __init__(self) -> None:
        try:
            from rich.progress import (
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
            )
        except ModuleNotFoundError as error:
            if error.name != "rich":
                raise
            raise MissingExtraError("rich", "jobs") from None
        self._tasks: dict[int, Any] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.fields[process]:>10}"),
            TextColumn("{task.description:18}"),
            TextColumn("{task.fields[memory]:>10}"),
            TimeElapsedColumn(),
        )

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if event.pid not in self._tasks:
            self._tasks[event.pid] = self._progress.add_task(
                event.phase, total=1, process=event.pid, memory=""
            )
        task = self._tasks[event.pid]
        if event.moment == "progress":
            done, total = event.done_bytes or 0, event.bytes or 1
            self._progress.update(task, completed=min(done / total, 1))
            return
        memory = "" if event.bytes is None else f"{event.bytes / (1 << 20):.0f} MiB"
        done = event.moment == "end"
        how = {"start": "", "waiting": " waiting", "end": " done"}[event.moment]
        if done and event.error:
            how = " failed"
            del self._tasks[event.pid]  # what follows has a line of its own
        self._progress.update(
            task,
            description=event.phase + how,
            completed=int(done),
            memory=memory,
        )

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class Phase:
    """One phase of one process, told to who watches.

    Parameters
    ----------
    tell : callable
    pid : int
    phase : str
    bytes_of_gpu : int or None
    name : str
        Of the process.
    """

    def __init__(
        self,
        tell: Watcher,
        pid: int,
        phase: str,
        bytes_of_gpu: int | None,
        name: str = "",
    ) -> None:
        self._tell = tell
        self._event = Event(pid, phase, "start", 0.0, bytes=bytes_of_gpu, name=name)
        self.seconds = 0.0

    def __enter__(self) -> "Phase":
        self._start = time.monotonic()
        self._tell(replace(self._event, time_s=self._start))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.monotonic()
        self.seconds = end - self._start
        text = None if error is None else str(error)
        self._tell(
            replace(
                self._event,
                moment="end",
                time_s=end,
                seconds=self.seconds,
                error=text,
            )
        )
