"""Work that no signal stops half way, and time limits."""

import _thread
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

# Those that ask a program to end. They wait until the work is done, or undone.
_REQUESTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_LISTEN_S = 0.02


def uninterrupted(do: "Callable[[threading.Event], _T]") -> _T:
    """Do something in a thread that no signal's handler runs in.

    Meanwhile SIGINT, SIGTERM and SIGHUP are kept waiting; they come to effect at the
    end. What other handlers raise is raised at the end as well.

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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        # This may raise, when it has blocked them, what a handler does.
        signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
        result = _in_a_thread(do)
    except BaseException as problem:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException as interrupt:
            _note(interrupt, problem)
            raise interrupt from None
        raise
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return result


def _in_a_thread(do: "Callable[[threading.Event], _T]") -> _T:
    # Of threading no more than a lock: what it has in Python is left in disorder by an
    # exception of a handler, so that a thread counts as ended, or waits for ever.
    cancelled, begun, end = threading.Event(), threading.Lock(), threading.Lock()
    end.acquire()
    result: list[_T] = []
    problem: list[BaseException] = []
    interrupts: list[BaseException] = []

    def begin() -> None:
        if not begun.acquire(blocking=False):  # a second start
            return
        try:
            threading.Thread(target=work, name="cuckpt", daemon=False).start()
        except BaseException as error:
            problem.append(error)
            end.release()

    def work() -> None:
        try:
            result.append(do(cancelled))
        except BaseException as error:
            problem.append(error)
        finally:
            end.release()

    started = False
    while not (result or problem):
        try:
            if not started:
                _thread.start_new_thread(begin, ())
                started = True
            if not end.acquire(timeout=_LISTEN_S) and is_asked_to_end():
                cancelled.set()
        except BaseException as error:  # of a handler, or there can be no thread
            cancelled.set()
            if not started and begun.acquire(blocking=False):
                if isinstance(error, RuntimeError):  # as when the program ends
                    return do(threading.Event())
                raise
            interrupts.append(error)
    if interrupts:
        for failed in problem:
            _note(interrupts[-1], failed)
        raise interrupts[-1]
    if problem:
        raise problem[0]
    return result[0]


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
