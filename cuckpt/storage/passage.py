"""What a save and a load of one process have in common."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cuckpt import driver, proc
from cuckpt.events import Event, Phase
from cuckpt.group_run import MembersPassage
from cuckpt.passage import State
from cuckpt.process_errors import ProcessLostError
from cuckpt.storage.operation import Operation

if TYPE_CHECKING:
    from cuckpt.group_run import Run
    from cuckpt.process import Process

_BETWEEN_EVENTS_S = 0.1


def identity(process: "Process") -> str:
    """Return what `SavedProcess.identity` is of this one.

    Parameters
    ----------
    process : Process

    Returns
    -------
    str
    """
    pid, start_time = process._key
    return f"{pid} {start_time or 0} {proc.boot_id()}"


class StoragePassage(MembersPassage):
    """The way of a member whose memory is copied to or from an image.

    Attributes
    ----------
    operation : Operation or None
        The one that is not completed yet.
    holds_memory : bool
        Whether it is not as before, and nobody else can bring it back.
    """

    takes_images = True

    def __init__(self, member: "Process", run: "Run") -> None:
        super().__init__(member, run)
        self.operation: Operation | None = None
        self.holds_memory = False
        self._loss: ProcessLostError | None = None
        self._copied_bytes = 0
        self._told_s = 0.0
        self._counting = threading.Lock()

    def begin(self) -> None:
        """Have its memory handed out."""
        self.step("prepare")
        self.holds_memory = True

    def begun(self, begin: "Callable[[], Operation]") -> Operation:
        """Begin an operation; one that is under way without its memory is a loss.

        Parameters
        ----------
        begin : callable

        Returns
        -------
        Operation

        Raises
        ------
        DriverError
            If it was not begun.
        ProcessLostError
        """
        try:
            return begin()
        except driver.IllegalStateError:
            raise  # another program was faster
        except driver.DriverError as error:
            if self.process._read_state() in (State.CHECKPOINTING, State.RESTORING):
                raise self.lost(
                    "the driver has begun what it reports as failed, and did not hand "
                    f"out the memory: {error}"
                ) from error
            raise

    @property
    def is_left_alone(self) -> bool:
        """Whether nothing is undone; what is in these hands is, whoever moved it."""
        return self.is_moved_by_others and not self.holds_memory

    def _accept(self, verb: str, error: driver.DriverError) -> None:
        if verb == "prepare" and self.operation is None:
            state = self.process._read_state()
            if state != self._state:
                self.is_moved_by_others = True
                raise self._busy(state) from error
            raise error
        moved = self.is_moved_by_others
        super()._accept(verb, error)
        if verb == "complete":  # which nobody else can do
            self.is_moved_by_others = moved

    def lost(self, why: str) -> ProcessLostError:
        """Return the error that says so, from now on also to who would bring it back.

        Parameters
        ----------
        why : str
        """
        self.process._is_lost = True
        self._loss = ProcessLostError(self.process.pid, f"is lost: {why}")
        return self._loss

    def go_back(self, initial: int) -> None:
        """Bring it to a state, unless it is lost."""
        if self._loss is not None:
            raise self._loss
        super().go_back(initial)

    def complete(self) -> None:
        """Complete the operation; an error after which it is done is none."""
        self.step("complete")
        self.operation = None

    def _call(self, verb: str) -> None:
        if verb == "complete":
            assert self.operation is not None
            self.operation.complete()
        else:
            super()._call(verb)

    def total_bytes(self) -> int:
        """Return the GPU memory that is copied, or that it had when it ran."""
        if self.operation is None:
            return super().total_bytes()
        return sum(region.size for region in self.operation.regions.values())

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Tell of the copies as of a phase."""
        process = self.process
        phase = Phase(self._tell, process.pid, "copy", self.total_bytes(), process.name)
        self._copied_bytes = 0
        try:
            with phase:
                yield
        finally:
            before = self.outcome.seconds.get("copy", 0.0)
            self.outcome.seconds["copy"] = before + phase.seconds

    def count(self, size: int) -> None:
        """Tell, now and then, how much has been copied; stop if that is wanted.

        Parameters
        ----------
        size : int
            How many bytes more.

        Raises
        ------
        KeyboardInterrupt
            If it was cancelled.
        """
        if self._cancelled.is_set():
            raise KeyboardInterrupt
        with self._counting:
            self._copied_bytes += size
            now = time.monotonic()
            if now < self._told_s + _BETWEEN_EVENTS_S:
                return
            self._told_s = now
            done = self._copied_bytes
        self._tell(
            Event(
                self.process.pid,
                "copy",
                "progress",
                now,
                bytes=self.total_bytes(),
                name=self.process.name,
                done_bytes=done,
            )
        )
