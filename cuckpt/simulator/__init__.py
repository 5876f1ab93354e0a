"""A simulated machine with GPUs, whose driver can checkpoint and restore.

The driver is a ``libcuda.so.1`` of its own. Programs find it by
``LD_LIBRARY_PATH``; which machine they run on stands in ``CUCKPT_SIMULATOR``.
Every process of a machine shares its GPUs: one can checkpoint another.
"""

import contextlib
import ctypes
import fcntl
import math
import os
import re
import struct
import uuid as uuids_of_python
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from cuckpt import uuids
from cuckpt.errors import Result

LIBRARY = Path(__file__).parent / "libcuda.so.1"
DEFAULT_MEMORY_BYTES = 8 << 30
DEFAULT_DRIVER_VERSION = 13050

_CHUNK = 2 << 20
_MAX_GPUS = 16
_MAX_FAULTS = 64
_MAX_INT = (1 << 31) - 1
# As in libcuda/simulator.h: what is known at the start, and what is counted.
_HEADER = struct.Struct("=8sII" + "16sQ" * _MAX_GPUS + "Q" + "IIIIiIQ" * _MAX_FAULTS)
_COUNTS_BYTES = 8 * 8 + 1024 * (8 + 8 * _MAX_GPUS)
_CALLS = (
    "get_state",
    "get_restore_thread_id",
    "lock",
    "checkpoint",
    "restore",
    "unlock",
    "complete",
)
_MOMENTS = ("before", "after")
_VICTIMS = (None, "target", "caller")
_NAMESPACE = uuids_of_python.UUID("63756b70-7420-7369-6d75-6c617465642e")


class SimulatorError(RuntimeError):
    """A simulated machine cannot be used in this process."""


@dataclass(frozen=True)
class Gpu:
    """A simulated GPU.

    Parameters
    ----------
    uuid : bytes
        16 bytes.
    memory_bytes : int
        Size of its memory.
    """

    uuid: bytes
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        if len(self.uuid) != 16:
            raise ValueError(f"a GPU UUID is 16 bytes, got {len(self.uuid)}")
        if not _CHUNK <= self.memory_bytes <= 1 << 40:
            raise ValueError(
                f"the memory of a GPU is 2 MiB to 1 TiB, not {self.memory_bytes} bytes"
            )

    def __str__(self) -> str:
        return uuids.to_text(self.uuid)


@dataclass(frozen=True)
class Fault:
    """What is to go wrong on a machine, and at which calls.

    If several happen to one call, it takes all their delays, and of their results
    the last counts. A restore that is given ERROR_OUT_OF_MEMORY before it is done
    loses the process, as a true one does on driver 580. Others who ask about the
    process wait meanwhile.

    Parameters
    ----------
    call : str
        ``get_state``, ``get_restore_thread_id``, ``lock``, ``checkpoint``,
        ``restore``, ``unlock`` or ``complete``.
    result : int, optional
        What the call returns, such as ``cuckpt.driver.Result.ERROR_UNKNOWN``;
        what it comes to by itself if left out.
    at : int
        The first call that it happens to. Those that reach a process are
        counted, from 1, all of the machine together.
    count : int
        How many calls it happens to.
    delay_s : float
        How long the call takes besides, in seconds, whatever its time limit;
        ``math.inf``: until the process is killed.
    when : str
        When all this happens: ``before`` the thing is done, which it is not if
        there is a `result`, or ``after``.
    kill : str, optional
        ``target`` or ``caller``: that process is killed, after the delay. Without
        the target the call returns ERROR_OPERATING_SYSTEM in any case.

    Raises
    ------
    ValueError, TypeError
        If a parameter is wrong.
    """

    call: str
    result: int | None = None
    at: int = 1
    count: int = 1
    delay_s: float = 0.0
    when: str = "before"
    kill: str | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("call", self.call, _CALLS),
            ("when", self.when, _MOMENTS),
            ("kill", self.kill, _VICTIMS),
        ):
            if value not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {known}, not {value!r}")
        for name, number, low in (
            ("result", 0 if self.result is None else self.result, 0),
            ("at", self.at, 1),
            ("count", self.count, 1),
        ):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an int, not {type(number).__name__}")
            if not low <= number <= _MAX_INT:
                raise ValueError(f"{name} must be {low} to {_MAX_INT}, not {number}")
        if not isinstance(self.delay_s, int | float):
            raise TypeError(
                f"delay_s must be a number, not {type(self.delay_s).__name__}"
            )
        if not (0 <= self.delay_s <= 1e9 or self.delay_s == math.inf):
            raise ValueError(
                f"delay_s must be 0 to 1e9, or math.inf, not {self.delay_s}"
            )
        if self.result is None and not self.delay_s and self.kill is None:
            raise ValueError("a fault needs a result, delay_s or kill")

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Make a fault from text, as ``cuckpt simulate --fault`` takes it.

        Parameters
        ----------
        text : str
            ``CALL``, then what of ``=RESULT``, ``@AT``, ``,count=COUNT``,
            ``,delay=SECONDS``, ``,when=after`` and ``,kill=target`` there is to
            say. A result is a number or a name without ``ERROR_``.

        Returns
        -------
        Fault

        Raises
        ------
        ValueError
            If it is no such text.

        Examples
        --------
        >>> Fault.parse("restore=OUT_OF_MEMORY@2").at
        2
        >>> Fault.parse("checkpoint,delay=0.5,kill=target").kill
        'target'
        """
        head, *options = text.split(",")
        match = re.fullmatch(r"(\w+)(?:=(\w+))?(?:@(\d+))?", head)
        read = {"count": int, "delay": float, "when": str, "kill": str}
        found: dict[str, Any] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in read or name in found or not value:
                match = None
                break
            found[name] = _read(read[name], value)
        if not match:
            raise ValueError(
                f"{text!r} is no fault: expected as restore=OUT_OF_MEMORY@2 or "
                "checkpoint@1,count=3,delay=0.5,when=after,kill=target"
            )
        found["delay_s"] = found.pop("delay", 0.0)
        if match[2]:
            found["result"] = _result(match[2])
        return cls(match[1], at=int(match[3] or 1), **found)

    def _fields(self) -> list[int]:
        hangs = self.delay_s == math.inf
        return [
            _CALLS.index(self.call),
            _MOMENTS.index(self.when),
            self.at,
            self.count,
            -1 if self.result is None else self.result,
            _VICTIMS.index(self.kill),
            (1 << 64) - 1 if hangs else int(self.delay_s * 1e9),
        ]


def _read(kind: type, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _result(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return int(Result["ERROR_" + name.removeprefix("ERROR_")])
    except KeyError:
        raise ValueError(
            f"there is no result {name}; there is OUT_OF_MEMORY, say"
        ) from None


class Machine:
    """A simulated machine, which exists while the context manager is open.

    This process and the children that it starts meanwhile run on it. Nothing
    is left behind, however they end. One machine at a time in a process.

    Parameters
    ----------
    gpus : int or sequence of Gpu
        How many GPUs, or which. The UUIDs of a number of GPUs are always the
        same.
    memory_bytes : int
        Memory of each GPU, if `gpus` is a number.
    driver_version : int
        1000 x major + 10 x minor, such as 13050 for CUDA 13.5. Decides which
        functions there are, and whether there is custom storage.
    faults : sequence of Fault, optional
        What is to go wrong. If left out: what the environment variable
        ``CUCKPT_FAULTS`` says, texts for `Fault.parse` with spaces between.

    Attributes
    ----------
    gpus : tuple of Gpu
    driver_version : int
    faults : tuple of Fault

    Raises
    ------
    ValueError, TypeError
        If a parameter is wrong.
    SimulatorError
        On entering, if this process has a libcuda that is not the simulated
        one, or has used a simulated driver of another version.
    """

    _current: "Machine | None" = None
    _version_in_use: int | None = None

    def __init__(
        self,
        gpus: int | Sequence[Gpu] = 1,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        driver_version: int = DEFAULT_DRIVER_VERSION,
        faults: Sequence[Fault] | None = None,
    ) -> None:
        for name, number in (
            ("memory_bytes", memory_bytes),
            ("driver_version", driver_version),
        ):
            if not isinstance(number, int):
                raise TypeError(f"{name} must be an int, not {type(number).__name__}")
        if isinstance(gpus, int):
            gpus = [Gpu(_uuid_of(n), memory_bytes) for n in range(gpus)]
        if not all(isinstance(gpu, Gpu) for gpu in gpus):
            raise TypeError("gpus must be a number of GPUs, or Gpu objects")
        self.gpus = tuple(gpus)
        self.driver_version = driver_version
        if faults is None:
            texts = os.environ.get("CUCKPT_FAULTS", "").split()
            faults = [Fault.parse(text) for text in texts]
        if isinstance(faults, Fault):
            raise TypeError("faults must be a sequence of Fault objects")
        self.faults = tuple(faults)
        if not all(isinstance(fault, Fault) for fault in self.faults):
            raise TypeError("faults must be Fault objects")
        if len(self.faults) > _MAX_FAULTS:
            raise ValueError(f"a machine has at most {_MAX_FAULTS} faults")
        if not 1 <= len(self.gpus) <= _MAX_GPUS:
            raise ValueError(f"a machine has 1 to {_MAX_GPUS} GPUs")
        if len({gpu.uuid for gpu in self.gpus}) != len(self.gpus):
            raise ValueError("two GPUs have the same UUID")
        if not 12000 <= driver_version < 14000:
            raise ValueError(
                f"the simulated driver is of version 12.0 or later, up to 13.9, not "
                f"{driver_version // 1000}.{driver_version % 1000 // 10}"
            )
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "Machine":
        if Machine._current is not None:
            raise SimulatorError("this process runs on a simulated machine already")
        _refuse_other_driver(self.driver_version)
        with contextlib.ExitStack() as exit_stack:
            variables = exit_stack.enter_context(self.started())
            library = ctypes.CDLL(str(LIBRARY))
            library.cuckpt_simulator_change_machine.restype = ctypes.c_bool
            # Once the environment is as before, this process leaves the machine.
            exit_stack.callback(library.cuckpt_simulator_change_machine)
            exit_stack.enter_context(_environment(variables))
            if not library.cuckpt_simulator_change_machine():
                raise SimulatorError("the simulated driver refuses its machine")
            self._exit = exit_stack.pop_all()
        Machine._current = self
        Machine._version_in_use = self.driver_version
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        Machine._current = None
        self._exit.close()

    @contextlib.contextmanager
    def started(self) -> Iterator[dict[str, str]]:
        """Start the machine for child processes only.

        Yields
        ------
        dict
            The variables that a child's environment needs.
        """
        low = os.memfd_create("simulated machine", os.MFD_CLOEXEC)
        # A number that shell scripts and the like do not use for themselves.
        file = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 200)
        os.close(low)
        try:
            os.truncate(file, _HEADER.size + _COUNTS_BYTES)
            os.pwrite(file, self._header(), 0)
            folders = [str(LIBRARY.parent), os.environ.get("LD_LIBRARY_PATH", "")]
            yield {
                "CUCKPT_SIMULATOR": f"/proc/{os.getpid()}/fd/{file}",
                "CUCKPT_LIBCUDA": str(LIBRARY),
                "LD_LIBRARY_PATH": ":".join(filter(None, folders)),
            }
        finally:
            os.close(file)

    def execute(self, command: Sequence[str]) -> NoReturn:
        """Replace this process by a command that runs on the machine.

        Its process keeps the machine, which ends with it.

        Parameters
        ----------
        command : sequence of str
            The program and its arguments.

        Raises
        ------
        OSError
            If the program cannot be run.
        """
        with self.started() as variables:
            file = int(variables["CUCKPT_SIMULATOR"].rpartition("/")[2])
            os.set_inheritable(file, True)
            os.execvpe(command[0], list(command), {**os.environ, **variables})

    def _header(self) -> bytes:
        fields: list[bytes | int] = [b"cuckpt 1", self.driver_version, len(self.gpus)]
        for gpu in self.gpus:
            fields += [gpu.uuid, gpu.memory_bytes]
        fields += [bytes(16), 0] * (_MAX_GPUS - len(self.gpus))
        fields.append(len(self.faults))
        for fault in self.faults:
            fields += fault._fields()
        fields += [0] * 7 * (_MAX_FAULTS - len(self.faults))
        return _HEADER.pack(*fields)


def _uuid_of(ordinal: int) -> bytes:
    return uuids_of_python.uuid5(_NAMESPACE, f"GPU {ordinal}").bytes


def _refuse_other_driver(version: int) -> None:
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        loaded = {
            line.split(maxsplit=5)[5].strip() for line in maps if "libcuda.so" in line
        }
    if others := loaded - {str(LIBRARY), os.path.realpath(LIBRARY)}:
        raise SimulatorError(
            f"this process has loaded {min(others)} already; run the program by "
            "`cuckpt simulate -- CMD...`"
        )
    if Machine._version_in_use not in (None, version):
        raise SimulatorError(
            f"this process has used a simulated driver of version "
            f"{Machine._version_in_use}; for version {version} run it by "
            f"`cuckpt simulate --driver-version {version} -- CMD...`"
        )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
