"""The machine: how it starts, and how processes come to run on it."""

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from cuckpt.simulator.fault import MAX_FAULTS, Fault
from cuckpt.simulator.gpu import DEFAULT_MEMORY_BYTES, MAX_GPUS, Gpu

LIBRARY = Path(__file__).parent / "libcuda.so.1"
NVML_LIBRARY = LIBRARY.with_name("libnvidia-ml.so.1")
DEFAULT_DRIVER_VERSION = 13050

# As in libcuda/machine.h: what is known at the start, and what is counted.
_HEADER = struct.Struct("=8sII" + "16sQI60s" * MAX_GPUS + "Q" + "IIIIiIQ" * MAX_FAULTS)
_COUNTS_BYTES = 8 * 8 + 1024 * (8 + 8 + 8 + 8 * MAX_GPUS)


class SimulatorError(RuntimeError):
    """A simulated machine cannot be used in this process."""


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
            gpus = [Gpu.numbered(n, memory_bytes) for n in range(gpus)]
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
        if len(self.faults) > MAX_FAULTS:
            raise ValueError(f"a machine has at most {MAX_FAULTS} faults")
        if not 1 <= len(self.gpus) <= MAX_GPUS:
            raise ValueError(f"a machine has 1 to {MAX_GPUS} GPUs")
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
            # From now on this process finds NVML by its name, unless it has another
            # already, which then stays the one.
            ctypes.CDLL(str(NVML_LIBRARY))
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
            fields += gpu.fields()
        fields += [bytes(16), 0, 0, b""] * (MAX_GPUS - len(self.gpus))
        fields.append(len(self.faults))
        for fault in self.faults:
            fields += fault.fields()
        fields += [0] * 7 * (MAX_FAULTS - len(self.faults))
        return _HEADER.pack(*fields)


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
