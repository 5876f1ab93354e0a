"""Looks meanwhile whether those that are called are stopped: their calls wait then."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType

_EVERY_S = 0.5


class Lookout:
    """A thread that looks now and then, while the context manager is open.

    Parameters
    ----------
    look : callable
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="cuckpt looks", daemon=True
        )

    def __enter__(self) -> "Lookout":
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            self._look()
