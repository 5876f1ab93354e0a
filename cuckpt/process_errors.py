"""Why a process was not suspended or resumed, beyond what the driver says."""

from collections.abc import Mapping

_MOST_SKIPPED = 5


class ProcessError(RuntimeError):
    """A process cannot be brought to the state that was asked for.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, pid: int, text: str) -> None:
        super().__init__(pid, text)
        self.pid = pid

    def __str__(self) -> str:
        return f"process {self.pid} {self.args[1]}"


class ProcessGoneError(ProcessError, ProcessLookupError):
    """It has ended, or its pid is that of another process now."""


class ProcessStoppedError(ProcessError):
    """It is stopped or frozen: a call about it would wait until it continues."""


class ProcessBusyError(ProcessError):
    """Somebody else moves it: another program, or another thread of this one."""


class ProcessLostError(ProcessError):
    """It can be restored no more; only its end is left."""


class ProcessLeftError(ProcessError):
    """It could not be brought back to the state it had; `recover` may later."""


class ProcessSavedError(ProcessError):
    """Its GPU memory is in an image: `load` brings it back, and nothing else."""


class NoRoomError(ProcessError, MemoryError):
    """The GPU has too little free memory to restore it; nothing was tried."""


class NoMembersError(ProcessLookupError):
    """There is nobody to suspend in a group.

    Attributes
    ----------
    skipped : dict of int to str
        Who was left out, and why.
    """

    def __init__(self, skipped: Mapping[int, str]) -> None:
        super().__init__(skipped)
        self.skipped = dict(skipped)

    def __str__(self) -> str:
        return "\n  ".join(
            ["there is no process with CUDA state", *skipped_lines(self.skipped)]
        )


def skipped_lines(skipped: Mapping[int, str]) -> list[str]:
    """Return a line for each process that was left out, as far as they are few.

    Parameters
    ----------
    skipped : mapping of int to str
        Why, by pid.

    Returns
    -------
    list of str
    """
    lines = [f"process {pid}: {why}" for pid, why in skipped.items()]
    more = len(lines) - _MOST_SKIPPED
    return lines[:_MOST_SKIPPED] + ([f"and {more} more skipped"] if more > 0 else [])


class MissingExtraError(ImportError):
    """A package is missing that an extra of cuckpt brings."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs {package}: pip install 'cuckpt[{extra}]'", name=package
        )
        self._extra = extra

    def __reduce__(self) -> "tuple[type[MissingExtraError], tuple[str | None, str]]":
        return type(self), (self.name, self._extra)
