"""What is shown while processes are moved: a bar on a terminal, else lines."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from cuckpt import proc
from cuckpt.cli import screens
from cuckpt.cli.ending import is_asked_to_end
from cuckpt.events import Event


def display() -> "Bar | Lines":
    """Return what fits the standard error.

    Returns
    -------
    Bar or Lines
    """
    if screens.is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(ImportError):
            return Bar()
    return Lines()


class Lines:
    """A line on the standard error for each phase that ends."""

    def __init__(self) -> None:
        self._names = Names()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if event.moment == "start":
            return
        how = how_it_went(event)
        screens.say(f"{self._names(event.pid)}: {event.phase}{how}")


class Bar:
    """A line of rich for each process, which is gone at the end.

    Raises
    ------
    ImportError
        Without rich.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._names = Names()
        self._tasks: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._progress = Progress(
            TextColumn("{task.fields[process]}", markup=False),
            TextColumn("{task.fields[phase]:10}", markup=False),
            BarColumn(bar_width=12),
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
            memory = "" if event.bytes is None else screens.size(event.bytes)
            # The time begins anew, and the bar moves until there is a total.
            self._progress.reset(task, total=None)
            self._progress.update(task, phase=event.phase, result=memory)
            return
        self._progress.update(task, result=how_it_went(event).lstrip())
        if event.moment == "end":
            self._progress.update(task, total=1, completed=1)

    def _task(self, event: Event) -> Any:
        with self._lock:
            if event.pid not in self._tasks:
                self._tasks[event.pid] = self._progress.add_task(
                    "", total=None, process=self._names(event.pid), phase="", result=""
                )
            return self._tasks[event.pid]


def _stop_column() -> Any:
    """Return a column that tells that a signal has come, and has to wait."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Stop(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("stops after this" if is_asked_to_end() else "")

    return Stop()


class Names:
    """Processes as they are shown; one that has ended keeps its name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def __call__(self, pid: int) -> str:
        """Return pid and name."""
        if pid not in self._names:
            facts = proc.facts(pid)
            name = f" {screens.printable(facts.name)}" if facts else ""
            self._names[pid] = f"{pid}{name}"
        return self._names[pid]


def how_it_went(event: Event) -> str:
    """Return what there is to say at the end of a phase, after its name.

    Parameters
    ----------
    event : Event

    Returns
    -------
    str
    """
    if event.moment != "end":
        return f" waits: {event.error}"
    seconds = event.seconds or 0.0
    took = f" {screens.duration(seconds)}"
    if event.error is not None:
        return f" failed after{took}"
    if event.bytes is None or event.phase not in ("checkpoint", "restore"):
        return took
    text = f"{took}, {screens.size(event.bytes)}"
    if seconds > 0:
        text += f", {screens.size(int(event.bytes / seconds))}/s"
    return text


def all_of(*watchers: Callable[[Event], object]) -> Callable[[Event], None]:
    """Return one watcher for several; one that fails does not stand in the way.

    Parameters
    ----------
    *watchers : callable

    Returns
    -------
    callable
    """

    def watch(event: Event) -> None:
        problems = []
        for each in watchers:
            try:
                each(event)
            except Exception as error:
                problems.append(error)
        if problems:
            raise problems[0]

    return watch
