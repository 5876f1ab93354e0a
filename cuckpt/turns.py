"""Turns: of all that this program does, one operation at a time on a process."""

import math
import os
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TypeAlias

from cuckpt.process_errors import ProcessBusyError

Key: TypeAlias = tuple[int, int | None]  # pid and start time
_LISTEN_S = 0.02


class Turn:
    """The processes that an operation has for itself, until it is left.

    Parameters
    ----------
    cancelled : threading.Event
        Once it is set, nothing is waited for.
    deadline : float
        Until when others are waited for, as `time.monotonic` tells.
    """

    def __init__(self, cancelled: threading.Event, deadline: float = math.inf) -> None:
        self._cancelled = cancelled
        self._deadline = deadline

    def __enter__(self) -> "Turn":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _changed:
            for key in [key for key, turn in _holders.items() if turn is self]:
                del _holders[key]
            _changed.notify_all()

    def take(self, keys: Iterable[Key]) -> None:
        """Wait until nobody else has these, and have them.

        Parameters
        ----------
        keys : iterable of tuple
            Pid and start time of each process.

        Raises
        ------
        ProcessBusyError
            If the time is over, or those who have one wait for this turn to end.
        KeyboardInterrupt
            If it was cancelled.
        """
        with _changed:
            # In order: who has one then waits only for those that come after it.
            for key in sorted(keys, key=lambda key: key[0]):
                self._wait_for(key)
                _holders[key] = self

    def _wait_for(self, key: Key) -> None:
        while (holder := _holders.get(key, self)) is not self:
            left_s = self._deadline - time.monotonic()
            if self._cancelled.is_set():
                raise KeyboardInterrupt
            if left_s <= 0:
                raise ProcessBusyError(
                    key[0], "is moved by another thread of this program all the time"
                )
            if holder._waits_for(self):
                raise ProcessBusyError(
                    key[0],
                    "is moved by another thread of this program, which waits for this "
                    "one",
                )
            _awaited[self] = key
            try:
                _changed.wait(min(left_s, _LISTEN_S))
            finally:
                del _awaited[self]

    def _waits_for(self, other: "Turn") -> bool:
        turn: Turn | None = self
        while turn in _awaited:
            turn = _holders.get(_awaited[turn])
            if turn is other:
                return True
        return False


_changed = threading.Condition()
_holders: dict[Key, Turn] = {}
_awaited: dict[Turn, Key] = {}


def _forget() -> None:
    """Begin anew in a forked child, which has none of the threads that had one."""
    global _changed
    _changed = threading.Condition()
    _holders.clear()
    _awaited.clear()


os.register_at_fork(after_in_child=_forget)
