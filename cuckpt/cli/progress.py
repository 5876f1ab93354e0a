"""What is shown while processes are moved: a bar on a terminal, else lines."""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from cuckpt.cli import screens
from cuckpt.cli.ending import is_asked_to_end
from cuckpt.events import Event

_OTHERS = 68  # how long a line of the bar may be without the process


def display(verb: str) -> "Bar | Lines":
    """Return what fits the standard error.

    Parameters
    ----------
    verb : str
        Which moves the processes.

    Returns
    -------
    Bar or Lines
    """
    moving = ("copy",) if verb in ("save", "load") else ("checkpoint", "restore")
    if screens.is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(ImportError):
            return Bar(moving)
    return Lines(moving)


class Lines:
    """A line on the standard error for each phase that ends.

    Parameters
    ----------
    moving : sequence of str
        The phases that move memory.
    """

    def __init__(self, moving: Sequence[str]) -> None:
        self._moving = moving

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if event.moment in ("end", "waiting"):
            process = screens.process_text(event.pid, event.name)
            how = how_it_goes(event, self._moving)
            screens.say(f"{process}: {event.phase} {how}")


class Bar:
    """A line of rich for each process, which is gone at the end.

    Parameters
    ----------
    moving : sequence of str
        The phases that move memory.

    Raises
    ------
    ImportError
        Without rich.
    """

    def __init__(self, moving: Sequence[str]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._moving = moving
        self._tasks: dict[int, Any] = {}
        self._starts: dict[int, float] = {}
        self._progress = Progress(
            TextColumn("{task.fields[process]}", markup=False),
            TextColumn("{task.fields[phase]:10}", markup=False),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[result]}", markup=False),
            TimeElapsedColumn(),
            _stop_column(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        task = self._task(event)
        if event.moment == "start":
            # The time begins anew, and the bar moves until there is a total.
            self._starts[event.pid] = event.time_s
            self._progress.reset(task, total=None)
            memory = "" if event.bytes is None else screens.size(event.bytes)
            self._progress.update(task, phase=event.phase, result=memory)
        elif event.moment == "progress":
            seconds = event.time_s - self._starts[event.pid]
            done, total = event.done_bytes or 0, event.bytes or 1
            result = f"{100 * done // total}% of {moved(total, done, seconds)}"
            self._progress.update(task, total=total, completed=done, result=result)
        else:
            result = how_it_goes(event, self._moving)
            self._progress.update(task, result=result)
            if event.moment == "end":
                self._progress.update(task, total=1, completed=1)

    def _task(self, event: Event) -> Any:
        if event.pid not in self._tasks:
            room = max(8, self._progress.console.width - _OTHERS)
            process = screens.process_text(event.pid, event.name)[:room]
            self._tasks[event.pid] = self._progress.add_task(
                "", total=None, process=process, phase="", result=""
            )
        return self._tasks[event.pid]


def _stop_column() -> Any:
    """Return a column that tells that a signal has come, and has to wait."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Stop(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("stopping" if is_asked_to_end() else "")

    return Stop()


def how_it_goes(event: Event, moving: Sequence[str]) -> str:
    """Return what there is to say of a phase that ends or waits, after its name.

    Parameters
    ----------
    event : Event
    moving : sequence of str
        The phases that move memory.

    Returns
    -------
    str
    """
    if event.moment == "waiting":
        return f"waits: {event.error}"
    seconds = event.seconds or 0.0
    took = screens.duration(seconds)
    if event.error is not None:
        return f"failed after {took}"
    if event.bytes is None or event.phase not in moving:
        return took
    return f"{took}, {moved(event.bytes, event.bytes, seconds)}"


def moved(size: int, done: int, seconds: float) -> str:
    """Return how much memory there is, and how fast it moves.

    Parameters
    ----------
    size : int
        Bytes in all.
    done : int
        Of which so many have been moved.
    seconds : float
        In this time.

    Returns
    -------
    str
    """
    rate = f", {screens.size(int(done / seconds))}/s" if seconds > 0 else ""
    return screens.size(size) + rate
