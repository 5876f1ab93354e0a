"""Work that no signal stops half way, and time limits."""

import ctypes
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

# Those that ask a program to end. They wait until the work is done, or undone.
_REQUESTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_LISTEN_S = 0.02
_SIZE_OF_ACTION = 1024  # more than any system's struct sigaction has


def uninterrupted(do: "Callable[[threading.Event], _T]") -> _T:
    """Do something in a thread that no signal's handler runs in.

    Meanwhile SIGINT, SIGTERM and SIGHUP are kept waiting; they come to effect at the
    end. Other handlers run, and what they raise is raised at the end as well.

    Parameters
    ----------
    do : callable
        Gets an event that is set when it is to come to an end.

    Returns
    -------
    object
        What it returns. What it raises is raised.
    """
    if sys.is_finalizing():  # other threads get no turn any more
        return do(threading.Event())
    cancelled = threading.Event()
    handlers = _Handlers(cancelled)
    results: list[_T] = []
    problems: list[BaseException] = []
    _guarding.add(handlers)
    try:
        handlers.guard()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
        try:
            results.append(_in_a_thread(do, cancelled))
        except BaseException as problem:
            problems.append(problem)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        _guarding.discard(handlers)
        handlers.give_back()
    if handlers.raised:
        for failed in problems:
            _note(handlers.raised[-1], failed)
        raise handlers.raised[-1]
    if problems:
        raise problems[0]
    return results[0]


class _Handlers:
    """The handlers of signals, kept from raising where that would leave disorder.

    An exception of one can come anywhere in the main thread; where several signals have
    come at once, also where that of another is caught. A signal that would end the
    program ends it afterwards: any thread that does not keep it waiting may get it.

    Parameters
    ----------
    cancelled : threading.Event
        Set when one has raised, or is to end the program.

    Attributes
    ----------
    raised : list of BaseException
        What they have raised.
    """

    def __init__(self, cancelled: threading.Event) -> None:
        self.raised: list[BaseException] = []
        self._cancelled = cancelled
        self._guards: dict[int, tuple[Any, Any, Any]] = {}
        self._ending: list[int] = []
        self._is_over = False

    def guard(self) -> None:
        """Keep what they raise; they run in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if handler is signal.SIG_DFL and number in _REQUESTS:
                handler = self._end
            elif not callable(handler):
                continue
            guard = self._guard(handler)
            # With what Python does not tell of it, such as SA_RESTART.
            self._guards[number] = handler, guard, _action(number)
            signal.signal(number, guard)

    def _guard(self, handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
        def guard(number: int, frame: Any) -> None:
            if self._is_over:  # somebody has kept it
                handler(number, frame)
                return
            try:
                handler(number, frame)
            except BaseException as error:
                self.raised.append(error)
                self._cancelled.set()

        return guard

    def _end(self, number: int, frame: Any) -> None:
        """Do what a signal without a handler does, when that can be."""
        if self._is_over:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._ending.append(number)
        self._cancelled.set()

    def give_back(self) -> None:
        """Let them raise again, but for those that were replaced meanwhile."""
        try:
            for number, (handler, guard, action) in [*self._guards.items()]:
                if signal.getsignal(number) is guard:
                    own = signal.SIG_DFL if handler == self._end else handler
                    signal.signal(number, own)
                    _act(number, action)
                del self._guards[number]
            self._is_over = True
        finally:
            if self._guards:  # one of them has raised
                self.give_back()
        while self._ending:
            signal.raise_signal(self._ending.pop())

    def be_over(self) -> None:
        """Keep nothing any more, in a forked child."""
        self._is_over = True


_guarding: set[_Handlers] = set()


def _end_guards() -> None:
    for handlers in _guarding:
        handlers.be_over()


os.register_at_fork(after_in_child=_end_guards)


def _action(number: int) -> "ctypes.Array[ctypes.c_char]":
    """Return what the system does at a signal."""
    action = ctypes.create_string_buffer(_SIZE_OF_ACTION)
    _libc().sigaction(number, None, action)
    return action


def _act(number: int, action: "ctypes.Array[ctypes.c_char]") -> None:
    _libc().sigaction(number, action, None)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _in_a_thread(
    do: "Callable[[threading.Event], _T]", cancelled: threading.Event
) -> _T:
    end = threading.Lock()
    end.acquire()
    results: list[_T] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            results.append(do(cancelled))
        except BaseException as error:
            problems.append(error)
        finally:
            end.release()

    try:
        threading.Thread(target=work, name="cuckpt", daemon=False).start()
    except RuntimeError:  # there can be no more, as when the program ends
        return do(cancelled)
    while not end.acquire(timeout=_LISTEN_S):
        if is_asked_to_end():
            cancelled.set()
    if problems:
        raise problems[0]
    return results[0]


def _note(interrupt: BaseException, problem: BaseException) -> None:
    """Add what failed to the exception that takes its place."""
    if interrupt is problem:
        return
    if not isinstance(problem, KeyboardInterrupt):
        interrupt.add_note(str(problem))
    for note in getattr(problem, "__notes__", ()):
        interrupt.add_note(note)


def is_asked_to_end() -> bool:
    """Tell whether a signal waits that asks this program to end, and is heeded.

    Returns
    -------
    bool
    """
    return any(
        signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
        for number in signal.sigpending() & _REQUESTS
    )


def in_time(ask: "Callable[[], _T]", timeout_s: float) -> _T:
    """Ask something that changes nothing, and give up after some time.

    Parameters
    ----------
    ask : callable
    timeout_s : float

    Returns
    -------
    object
        What it returns. What it raises is raised.

    Raises
    ------
    TimeoutError
        If there is no answer in time. It is still waited for, in a thread.
    """
    answers: list[_T] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work, name="cuckpt asks", daemon=True)
    thread.start()
    thread.join(min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
    if problems:
        raise problems[0]
    if not answers:
        raise TimeoutError("the driver did not answer in time")
    return answers[0]


def deadline_in(timeout_s: float | None) -> float:
    """Return when a time limit is over, as `time.monotonic` tells.

    Parameters
    ----------
    timeout_s : float or None
        In seconds; None: never.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        If it is no number, or negative.
    """
    if timeout_s is None:
        return math.inf
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s must be a number, not {type(timeout_s).__name__}")
    if not timeout_s >= 0:
        raise ValueError("timeout_s must be >= 0")
    return time.monotonic() + float(min(timeout_s, threading.TIMEOUT_MAX))
