"""Which steps were done, to tell after a signal what has been undone."""

import threading

from cuckpt.cli.screens import counted, process_text
from cuckpt.events import Event
from cuckpt.process import Process

_BEFORE = {
    "lock": "running",
    "checkpoint": "locked",
    "restore": "checkpointed",
    "unlock": "locked",
}


class Phases:
    """The steps of each process that were done; give it as `on_event`.

    Parameters
    ----------
    verb : str
        Which moves the processes.
    """

    def __init__(self, verb: str) -> None:
        prepare = "locked" if verb == "save" else "checkpointed"
        self._before = {**_BEFORE, "prepare": prepare}
        self._done: dict[int, list[str]] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Keep an event."""
        if event.phase in self._before and event.moment == "end" and not event.error:
            with self._lock:
                self._done.setdefault(event.pid, []).append(event.phase)
                self._names[event.pid] = process_text(event.pid, event.name)

    def story(self) -> str:
        """Tell what was done, and in which state each process is now.

        Returns
        -------
        str
            Lines.
        """
        if not self._done:
            return "nothing had been changed"
        states = {pid: _state(pid) for pid in self._done}
        undone = [
            pid
            for pid, done in self._done.items()
            if states[pid] == self._before[done[0]]
        ]
        lines = [
            f"  process {self._names[pid]}: {', '.join(done)}; is {states[pid]}"
            for pid, done in self._done.items()
        ]
        if len(undone) == len(states):
            first = f"undone: {counted(len(undone), 'process', 'es')} as before"
        else:
            first = f"{len(undone)} of {len(states)} processes are as before"
        return "\n".join([first, *lines])


def _state(pid: int) -> str:
    try:
        return Process(pid).state
    except Exception as error:  # whatever it is, the others are to be told of as well
        return f"not known: {error}"
