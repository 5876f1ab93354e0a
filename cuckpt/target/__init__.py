"""Processes to checkpoint: CUDA processes that know what their GPU memory holds.

`Target` starts one and talks to it, on a real GPU or a simulated one; what it runs
is ``python -m cuckpt.target``.
"""

from __future__ import annotations

import operator
import os
import select
import sys
import time

# The target imports this module too: what takes long to import comes later.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

__all__ = ["Program", "Target", "TargetError"]


class TargetError(RuntimeError):
    """A target has ended, does not answer, or its GPU memory is not as it was."""


class Program:
    """A Python program that answers each line with a line.

    Leaving the context manager ends it.

    Parameters
    ----------
    *arguments : str
        Arguments of the Python interpreter.
    environment : mapping of str to str, optional
        All its environment variables; those of this process if left out.
    timeout_s : float
        How long it may take for an answer, in seconds, if a call does not say.

    Attributes
    ----------
    pid : int
    process : subprocess.Popen
        The process, whose input and output are not to be used.
    timeout_s : float

    Raises
    ------
    OSError
        If no process can be started.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> None:
        import subprocess

        self.timeout_s = timeout_s
        self._sent: list[str] = []
        self._received = b""
        # Not a pipe, which the program could fill while nobody reads.
        errors = os.memfd_create("errors of a target", os.MFD_CLOEXEC)
        self._errors = os.fdopen(errors, "rb", buffering=0)
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
            )
        except BaseException:
            self._errors.close()
            raise
        self.pid = self.process.pid
        assert self.process.stdin is not None
        # One that is stopped reads nothing: to send must not wait for it.
        os.set_blocking(self.process.stdin.fileno(), False)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, command: str, timeout_s: float | None = None) -> str:
        """Send a line and wait for the answer.

        Parameters
        ----------
        command : str
            The line, without its end.
        timeout_s : float, optional
            As for `answer`.

        Returns
        -------
        str

        Raises
        ------
        TargetError
            If there is none. One that comes later is that of the next `answer`.
        """
        self.send(command)
        return self.answer(timeout_s)

    def send(self, command: str) -> None:
        """Send a line and do not wait.

        Parameters
        ----------
        command : str
            The line, without its end.

        Raises
        ------
        TargetError
            If the program has ended, or has left much unread.
        """
        if self._errors.closed:
            raise TargetError(f"target {self.pid} has been ended")
        if "\n" in command:
            raise ValueError("a command is one line")
        assert self.process.stdin is not None
        line = (command + "\n").encode()
        try:
            written = self.process.stdin.write(line)
        except BrokenPipeError:
            raise self._ended(command) from None
        if written != len(line):
            raise TargetError(f"target {self.pid} does not read, at {command!r}")
        self._sent.append(command)

    def answer(self, timeout_s: float | None = None) -> str:
        """Wait for the answer to what was sent first, of what has none yet.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait, in seconds; the attribute `timeout_s` if left out.

        Returns
        -------
        str
            The line, without its end.

        Raises
        ------
        TargetError
            If the program has ended, or gives no answer in time.
        """
        if timeout_s is None:
            timeout_s = self.timeout_s
        at = f", at {self._sent[0]!r}" if self._sent else ""
        if not self._receive(timeout_s):
            raise TargetError(
                f"target {self.pid} gave no answer in {timeout_s:g} s{at}; one that is "
                "LOCKED or CHECKPOINTED gives none before it is unlocked"
                f"{self._error_text()}"
            )
        line, end, rest = self._received.partition(b"\n")
        if not end:
            raise self._ended(self._sent[0] if self._sent else "")
        self._received = rest
        if self._sent:
            del self._sent[0]
        return line.decode()

    def is_silent(self, seconds: float) -> bool:
        """Wait so long for an answer; leave it to `answer`.

        Parameters
        ----------
        seconds : float

        Returns
        -------
        bool
            Whether there was none; False also if the program has ended.
        """
        return not self._receive(seconds)

    def end(self) -> None:
        """Kill the program, whatever state it is in. What has ended may be ended."""
        self.process.kill()
        self.process.wait()
        for pipe in self.process.stdin, self.process.stdout, self._errors:
            assert pipe is not None
            pipe.close()

    def _receive(self, timeout_s: float) -> bool:
        """Wait for a whole line, or the end of the output."""
        if self._errors.closed:
            raise TargetError(f"target {self.pid} has been ended")
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            # poll takes no more; and who waits longer asks again.
            left_ms = min(max(0.0, left_s) * 1000, 1e6)
            if not poll.poll(left_ms):
                if left_s <= 0:
                    return False
                continue
            part = os.read(output, 1 << 16)
            if not part:
                return True
            self._received += part
        return True

    def _ended(self, command: str) -> TargetError:
        from subprocess import TimeoutExpired

        at = f", at {command!r}" if command else ""
        try:
            status = self.process.wait(10)
        except TimeoutExpired:
            return TargetError(f"target {self.pid} closed its output{at}")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return TargetError(f"target {self.pid} ended {how}{at}{self._error_text()}")

    def _error_text(self) -> str:
        """Return the end of what it has written to its error output."""
        file = self._errors.fileno()
        size = os.fstat(file).st_size
        text = os.pread(file, 4000, max(0, size - 4000)).decode(errors="replace")
        return f": {text.strip()}" if text.strip() else ""


class Target(Program):
    """A CUDA process with GPU memory whose content is known.

    It may be started in any thread. It ends when the context manager is left, or when
    this process ends, however that comes; if it is stopped then, once it continues.
    ``python -m cuckpt.target --help`` lists the commands that it can be asked.

    Parameters
    ----------
    memory_bytes : mapping of int to int, optional
        How much memory to fill with random bytes, by the GPU's ordinal; of 0 bytes
        comes a context only. A context on GPU 0 if left out.
    environment : mapping of str to str, optional
        All its environment variables; those of this process if left out.
    timeout_s : float
        How long a command may take, in seconds, if a call does not say.

    Attributes
    ----------
    pid : int
    process : subprocess.Popen
        The process, whose input and output are not to be used.
    timeout_s : float

    Raises
    ------
    TypeError, ValueError
        If a parameter is wrong.
    TargetError
        If the process ends or a command takes too long, with what it wrote to its
        error output. No process is left.
    OSError
        If no process can be started.

    Examples
    --------
    >>> from cuckpt.target import Target
    >>> with Target({0: 64 << 20}) as target:
    ...     # suspend target.pid, and resume it
    ...     target.check()
    """

    def __init__(
        self,
        memory_bytes: Mapping[int, int] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> None:
        sizes = _sizes({0: 0} if memory_bytes is None else memory_bytes)
        super().__init__(
            "-m", "cuckpt.target", environment=environment, timeout_s=timeout_s
        )
        self._filled: list[str] = []
        try:
            for gpu, size in sizes.items():
                self.ask(f"fill {size} {gpu}" if size else f"start {gpu}")
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Target:
        return self

    def answer(self, timeout_s: float | None = None) -> str:  # noqa: D102
        fills = self._sent[:1] and self._sent[0].split()[:1] == ["fill"]
        answer = super().answer(timeout_s)
        if fills:
            self._filled.append(answer)
        return answer

    def check(self) -> None:
        """Compare all memory that was filled, by a command also, with what it was.

        Raises
        ------
        TargetError
            If memory is not at its address, or holds something else; with the
            ordinal of the GPU. Or if there is no answer.
        """
        answer = self.ask("check")
        found = answer.split(", ") if self._filled else []
        problems = [
            _difference(before, now)
            for before, now in zip(self._filled, found, strict=True)
            if before != now
        ]
        if problems:
            raise TargetError(f"target {self.pid}: {'; '.join(problems)}")


def _sizes(memory_bytes: Mapping[int, int]) -> dict[int, int]:
    if not hasattr(memory_bytes, "items"):
        raise TypeError(
            "memory_bytes must be a mapping, as {0: n} for n bytes on GPU 0, not "
            f"{type(memory_bytes).__name__}"
        )
    sizes = {operator.index(gpu): operator.index(n) for gpu, n in memory_bytes.items()}
    for number in (*sizes, *sizes.values()):
        if number < 0:
            raise ValueError(f"memory_bytes must not be negative, as {number} is")
    return sizes


def _difference(before: str, now: str) -> str:
    gpu, address, _ = before.split(" ")
    _, address_now, content = now.split(" ", 2)
    if address != address_now:
        return f"GPU {gpu}: the memory at {address} is at {address_now} now"
    if " " in content:
        return f"GPU {gpu}: the memory at {address} cannot be read: {content}"
    return f"GPU {gpu}: the memory at {address} has another content"
