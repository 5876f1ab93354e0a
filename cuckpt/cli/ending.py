"""Signals that ask to end, as an exception: what is begun is undone first."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from cuckpt import uninterrupted

_REQUESTS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


_come: list[int] = []


class Ended(BaseException):
    """A signal asks this program to end.

    Attributes
    ----------
    number : int
    name : str
        Such as ``SIGTERM``.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"ended by {self.name}"

    @property
    def status(self) -> int:
        """The exit status that tells of it."""
        return 128 + self.number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise `Ended`, but for those that are ignored."""
    _come.clear()
    before = {
        number: signal.signal(number, _raise)
        for number in _REQUESTS
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def let_signals_kill() -> None:
    """Let the next one end this program at once: it has been asked before."""
    for number in _REQUESTS:
        if signal.getsignal(number) is _raise:
            signal.signal(number, signal.SIG_DFL)


def is_asked_to_end() -> bool:
    """Tell whether such a signal has come, or waits.

    Returns
    -------
    bool
    """
    return bool(_come) or uninterrupted.is_asked_to_end()


def _raise(number: int, _: FrameType | None) -> None:
    _come.append(number)
    if len(_come) == 1:  # another would hide what is told of the first
        raise Ended(number)
