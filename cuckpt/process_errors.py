"""Why a process was not suspended or resumed, beyond what the driver says."""


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
    """Somebody else is checkpointing or restoring it through custom storage."""


class ProcessLostError(ProcessError):
    """It can be restored no more; only its end is left."""


class ProcessLeftError(ProcessError):
    """It could not be brought back to the state it had; `recover` may later."""


class NoRoomError(ProcessError, MemoryError):
    """The GPU has too little free memory to restore it; nothing was tried."""


class MissingExtraError(ImportError):
    """A package is missing that an extra of cuckpt brings."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs {package}: pip install 'cuckpt[{extra}]'", name=package
        )
        self._extra = extra

    def __reduce__(self) -> "tuple[type[MissingExtraError], tuple[str | None, str]]":
        return type(self), (self.name, self._extra)
