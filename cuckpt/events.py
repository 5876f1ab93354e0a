"""What happens while processes are suspended and resumed, for those who watch."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from cuckpt.process_errors import MissingExtraError


@dataclass(frozen=True)
class Event:
    """A phase of one process begins or ends.

    Attributes
    ----------
    pid : int
    phase : str
        ``lock``, ``checkpoint``, ``restore`` or ``unlock``.
    moment : str
        ``start`` or ``end``.
    time_s : float
        When, as `time.monotonic` tells.
    seconds : float or None
        How long the phase took, at its end.
    bytes : int or None
        How much GPU memory the process has, if that is known.
    error : str or None
        Why it failed, at its end.
    """

    pid: int
    phase: str
    moment: str
    time_s: float
    seconds: float | None = None
    bytes: int | None = None
    error: str | None = None


Watcher: TypeAlias = Callable[[Event], object]


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

    def __call__(self, event: Event) -> None:
        """Write an event; one that comes after `close` is left out."""
        entry: dict[str, Any] = {
            "name": event.phase,
            "ph": "B" if event.moment == "start" else "E",
            "ts": round(event.time_s * 1e6, 1),
            "pid": event.pid,
            "tid": event.pid,
        }
        extra = {"bytes": event.bytes, "error": event.error}
        extra = {name: value for name, value in extra.items() if value is not None}
        if extra:
            entry["args"] = extra
        with self._lock:
            if self._file.closed:
                return
            self._file.write(self._separator + json.dumps(entry))
            self._separator = ",\n"
            self._file.flush()

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
        except ImportError:
            raise MissingExtraError("rich", "jobs") from None
        self._tasks: dict[int, Any] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.fields[process]:>10}"),
            TextColumn("{task.description:12}"),
            TextColumn("{task.fields[memory]:>10}"),
            TimeElapsedColumn(),
        )

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if event.pid not in self._tasks:
            self._tasks[event.pid] = self._progress.add_task(
                event.phase, total=1, process=event.pid, memory=""
            )
        memory = "" if event.bytes is None else f"{event.bytes / (1 << 20):.0f} MiB"
        done = event.moment == "end"
        text = f"{event.phase} failed" if event.error else event.phase
        self._progress.update(
            self._tasks[event.pid],
            description=text + (" done" if done and not event.error else ""),
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

    If that one raises, the phase goes on; the attribute `problem` keeps it.

    Parameters
    ----------
    watcher : callable or None
    pid : int
    phase : str
    bytes_of_gpu : int or None
    """

    def __init__(
        self, watcher: Watcher | None, pid: int, phase: str, bytes_of_gpu: int | None
    ) -> None:
        self._watcher = watcher
        self._facts = pid, phase
        self._bytes = bytes_of_gpu
        self.seconds = 0.0
        self.problem: BaseException | None = None

    def __enter__(self) -> "Phase":
        self._start = time.monotonic()
        self._tell("start", self._start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.monotonic()
        self.seconds = end - self._start
        self._tell("end", end, self.seconds, None if error is None else str(error))

    def _tell(
        self,
        moment: str,
        time_s: float,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        if self._watcher is not None:
            event = Event(*self._facts, moment, time_s, seconds, self._bytes, error)
            try:
                self._watcher(event)
            except BaseException as problem:  # who watches must not stand in the way
                self.problem = problem
