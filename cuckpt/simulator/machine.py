"""The machine: how it starts, and how processes come to run on it."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from cuckpt.simulator.fault import MAX_FAULTS, Fault
from cuckpt.simulator.file import MachineFile
from cuckpt.simulator.gpu import DEFAULT_MEMORY_BYTES, MAX_GPUS, Gpu
from cuckpt.target import Target

LIBRARY = Path(__file__).parent / "libcuda.so.1"
NVML_LIBRARY = LIBRARY.with_name("libnvidia-ml.so.1")
DEFAULT_DRIVER_VERSION = 13050

_FAULTS = "CUCKPT_FAULTS"


class SimulatorError(RuntimeError):
    """A simulated machine cannot be used, here or now."""


class Machine:
    """A simulated machine, which exists while the context manager is open.

    This process and the children that it starts meanwhile run on it. Nothing
    is left behind, however they end. One machine at a time in a process.

    `spawn`, `processes`, `inject` and `calls` are for a machine that has been
    started, by entering it or by `started`; else they raise SimulatorError.

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
        Those of its start, without the injected ones.

    Raises
    ------
    ValueError, TypeError
        If a parameter is wrong.
    SimulatorError
        On entering, if this process has a libcuda that is not the simulated
        one, or has used a simulated driver of another version; if the machine
        has been started; if files, memory or ``ulimit -f`` do not suffice.
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
            gpus = min(gpus, MAX_GPUS + 1)  # more are refused below
            gpus = [Gpu.numbered(n, memory_bytes) for n in range(gpus)]
        if not all(isinstance(gpu, Gpu) for gpu in gpus):
            raise TypeError("gpus must be a number of GPUs, or Gpu objects")
        self.gpus = tuple(gpus)
        self.driver_version = driver_version
        if faults is None:
            faults = _faults_of_environment()
        if isinstance(faults, Fault):
            raise TypeError("faults must be a sequence of Fault objects")
        self.faults = _checked(faults)
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
        self._file: MachineFile | None = None
        self._variables: dict[str, str] = {}
        self._targets: list[Target] = []

    def __enter__(self) -> "Machine":
        if Machine._current is not None:
            raise SimulatorError(
                "this process runs on a simulated machine already; for another one, of "
                "child processes only, use `with machine.started():`"
            )
        try:
            self._enter()
        except (OSError, MemoryError) as error:
            raise SimulatorError(
                f"the machine cannot be started: {error or 'no memory is left'}"
            ) from error
        Machine._current = self
        Machine._version_in_use = self.driver_version
        return self

    def _enter(self) -> None:
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
                raise SimulatorError(
                    "the machine cannot be started: this process is short of "
                    "descriptors or memory"
                )
            # First: a call about one of them may be waiting in a thread.
            exit_stack.callback(self._end_targets)
            self._exit = exit_stack.pop_all()

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

        Raises
        ------
        SimulatorError
            If it has been started; if files, memory or ``ulimit -f`` do not
            suffice.
        """
        if self._file is not None:
            raise SimulatorError("this machine has been started already")
        _refuse_low_limit(max(gpu.memory_bytes for gpu in self.gpus))
        try:
            file = MachineFile(self.driver_version, self.gpus, self.faults)
        except OSError as error:
            raise SimulatorError(
                f"the machine cannot be started: no file in memory: {error.strerror}"
            ) from error
        folders = [str(LIBRARY.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        self._variables = {
            "CUCKPT_SIMULATOR": f"/proc/{os.getpid()}/fd/{file.number}",
            "CUCKPT_LIBCUDA": str(LIBRARY),
            "LD_LIBRARY_PATH": ":".join(filter(None, folders)),
        }
        self._file = file
        try:
            yield dict(self._variables)
        finally:
            self._file = None
            self._end_targets()
            file.close()

    def spawn(
        self, memory_bytes: Mapping[int, int] | None = None, timeout_s: float = 60
    ) -> Target:
        """Start a target on the machine, which ends it when it is left.

        Parameters
        ----------
        memory_bytes : mapping of int to int, optional
            How much memory to fill with random bytes, by the GPU's ordinal. A
            context on GPU 0 if left out.
        timeout_s : float
            How long a command to the target may take, in seconds.

        Returns
        -------
        Target

        Raises
        ------
        TypeError, ValueError
            If a parameter is wrong.
        TargetError
            If it does not come so far, as for want of GPU memory.
        OSError
            If no process can be started.
        """
        file = self._started_file()
        environment = {**os.environ, **self._variables}
        target = Target(memory_bytes, environment, timeout_s)
        self._targets.append(target)
        if self._file is not file:
            target.end()
            raise SimulatorError("the machine was left, in another thread, meanwhile")
        return target

    def processes(self) -> dict[int, dict[int, int]]:
        """Tell which processes have called cuInit and live, and what they use.

        Returns
        -------
        dict of int to dict of int to int
            For each pid the used bytes, by the ordinal of each GPU.
        """
        return self._started_file().processes()

    def inject(self, *faults: Fault) -> None:
        """Add faults, until the machine is left.

        Parameters
        ----------
        *faults : Fault
            Their `at` counts calls from the machine's start; see `calls`.

        Raises
        ------
        TypeError
            If one is no Fault.
        ValueError
            If one is to happen to calls that have all been made, or more than 64 are
            still to happen then; none is added.
        """
        calls = self.calls
        for fault in _checked(faults):
            if fault.at + fault.count - 1 <= calls[fault.call]:
                raise ValueError(
                    f"{fault.call} has been called {calls[fault.call]} times: a fault "
                    f"at={fault.at} cannot happen any more; that of the next call is "
                    f"at={calls[fault.call] + 1}"
                )
        self._started_file().inject(faults)

    @property
    def calls(self) -> dict[str, int]:
        """How many calls of each kind have reached a process so far.

        The keys are what `Fault` takes as `call`. Calls that were made to wait or
        fail by a fault count; those about a process that is not there do not.
        """
        return self._started_file().calls()

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

    def _started_file(self) -> MachineFile:
        if self._file is None:
            raise SimulatorError(
                "the machine has not been started, or has ended: enter it, `with "
                "machine:`, or, for child processes only, `with machine.started():`"
            )
        return self._file

    def _end_targets(self) -> None:
        targets, self._targets = self._targets, []
        for target in targets:  # all at once, since each takes a while
            target.process.kill()
        for target in targets:
            target.end()


def _faults_of_environment() -> list[Fault]:
    try:
        return [Fault.parse(text) for text in os.environ.get(_FAULTS, "").split()]
    except ValueError as error:
        raise ValueError(f"environment variable {_FAULTS}: {error}") from None


def _checked(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    if not all(isinstance(fault, Fault) for fault in faults):
        raise TypeError("faults must be Fault objects, as Fault.parse(text) makes them")
    return tuple(faults)


def _refuse_low_limit(memory_bytes: int) -> None:
    """Raise if GPU memory, which is files, could not be written.

    A process that tried would be killed by SIGXFSZ, or, if it ignores that as
    Python does, find too little GPU memory.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < memory_bytes:
        raise SimulatorError(
            f"files may have {limit} bytes (ulimit -f), less than the memory of a "
            f"GPU, {memory_bytes} bytes: raise the limit, or give the GPUs less memory"
        )


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
