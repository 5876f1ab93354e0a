"""Work that is done at once, as far as there can be threads."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from cuckpt.uninterrupted import uninterrupted

_T = TypeVar("_T")
_BETWEEN_LOOKS_S = 0.05


def at_once(
    do: Callable[[_T], object],
    items: Iterable[_T],
    workers: int,
    look: Callable[[], None] = lambda: None,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Do something with each item, in several threads; raise what is raised first.

    None of them goes on after that, also if it is an interrupt.

    Parameters
    ----------
    do : callable
        Gets an item. Once it has raised, no other item is begun.
    items : iterable
    workers : int
        How many threads at most; without any it is done in this one.
    look : callable
        Called now and then meanwhile. What it raises counts as well.
    stop : callable
        Called once something has been raised, to bring the others to an end.
    """

    def work(cancelled: threading.Event) -> None:
        _at_once(do, items, workers, look, stop, cancelled)

    if threading.current_thread() is threading.main_thread():
        uninterrupted(work)  # where interrupts come
    else:
        work(threading.Event())


def _at_once(
    do: Callable[[_T], object],
    items: Iterable[_T],
    workers: int,
    look: Callable[[], None],
    stop: Callable[[], None],
    cancelled: threading.Event,
) -> None:
    left = deque(items)
    problems: list[BaseException] = []

    def work() -> None:
        while left and not problems:
            try:
                item = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                do(item)
            except BaseException as error:
                problems.append(error)
                stop()

    threads = _started(work, min(workers, len(left)))
    if not threads:
        work()
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join(_BETWEEN_LOOKS_S)
                if not problems:
                    look()
                    if cancelled.is_set():
                        raise KeyboardInterrupt
            except BaseException as error:
                problems.append(error)
                stop()
    if problems:
        raise problems[0]


def _started(work: Callable[[], None], count: int) -> list[threading.Thread]:
    threads: list[threading.Thread] = []
    # At the end of the program a new thread would not get a turn any more.
    for _ in range(0 if sys.is_finalizing() else count):
        thread = threading.Thread(target=work, name="cuckpt copies", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there can be no more
            break
        threads.append(thread)
    return threads
