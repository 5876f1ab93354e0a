"""The `suspended()` that are open: what they give back, and that they do."""

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuckpt.turns import Key


class Suspension:
    """One `suspended()`, of a process or of many.

    Of several that overlap, the last that ends gives a process back, in the state from
    before the first. One that is open when the program ends is ended then.

    Parameters
    ----------
    end : callable
        Gives back what `let_go` returns, in an operation that has its turn.
    gpu_map : mapping, optional
        As in `Process.resume`.

    Attributes
    ----------
    is_open : bool
        Whether it is to be ended.
    """

    def __init__(
        self, end: Callable[[], object], gpu_map: "Mapping[Any, Any] | None"
    ) -> None:
        self._end = end
        self._gpu_map = gpu_map
        self.is_open = False

    def hold(self, initial: Mapping[Key, int]) -> None:
        """Begin; to be called in the turn of the processes.

        Parameters
        ----------
        initial : mapping of tuple to int
            The state that each had, by pid and start time.
        """
        for key, state in initial.items():
            _held.setdefault(key, _Hold(state)).by.append(self)
        self.is_open = True
        _open.append(self)

    def let_go(self) -> "dict[Key, tuple[int, Mapping[Any, Any] | None]]":
        """Stop to hold processes; to be called in their turn.

        Returns
        -------
        dict of tuple to tuple
            State and GPU map to give back to each that nobody else holds.
        """
        self.is_open = False
        if self in _open:
            _open.remove(self)
        given = {}
        for key, hold in list(_held.items()):
            if self not in hold.by:
                continue
            hold.by.remove(self)
            hold.gpu_map = self._gpu_map or hold.gpu_map
            if not hold.by:
                del _held[key]
                given[key] = hold.initial, hold.gpu_map
        return given

    def keys(self) -> list[Key]:
        """Return the processes that it holds."""
        return [key for key, hold in list(_held.items()) if self in hold.by]

    def end(self) -> None:
        """End it if it is open."""
        if not self.is_open:
            return
        try:
            self._end()
        except (KeyboardInterrupt, SystemExit):
            if self.is_open:  # it came before anything was begun
                self._end()
            raise


@dataclass
class _Hold:
    initial: int
    gpu_map: "Mapping[Any, Any] | None" = None
    by: list[Suspension] = field(default_factory=list)


_held: dict[Key, _Hold] = {}
_open: list[Suspension] = []


@atexit.register
def _end_all() -> None:
    problems = []
    for suspension in reversed(list(_open)):
        try:
            suspension.end()
        except BaseException as error:
            problems.append(error)
    if problems:
        told = "; ".join(map(str, problems))
        raise BaseExceptionGroup(f"processes may be left suspended: {told}", problems)


def _forget() -> None:
    """Give nothing back in a forked child: its parent does."""
    for suspension in _open:
        suspension.is_open = False
    _held.clear()
    _open.clear()


os.register_at_fork(after_in_child=_forget)
