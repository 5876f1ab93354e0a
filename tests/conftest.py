"""Which driver the tests run on, and how they make it answer.

By default the do-nothing driver of benchmarks/ is compiled and takes the place
of libcuda, for cuckpt and for cuda.bindings alike. With ``--driver=real`` only
tests/gpu runs, on the driver that is there: a real one with a GPU, or, under
``cuckpt simulate``, the simulated one.
"""

import ctypes
import os
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# `python -m pytest` puts the checkout before the installed package, and has loaded
# the plugin from there.
if not list((ROOT / "cuckpt").glob("_driver.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuckpt"]:
        del sys.modules[name]

HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)


def pytest_addoption(parser):
    parser.addoption(
        "--driver",
        choices=["null", "simulated", "real"],
        default="null",
        help="null: a driver that does nothing; simulated: tests/jobs, each test on a "
        "machine of its own; real: tests/gpu, on what is there",
    )

    parser.addoption(
        "--calls",
        type=int,
        default=1_000_000,
        help="how often each function is called while memory is watched",
    )


def pytest_configure(config):
    # Ignored by who runs in the background: programs that tests start heed them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_int = number == signal.SIGINT
            usual = signal.default_int_handler if is_int else signal.SIG_DFL
            signal.signal(number, usual)
    if config.getoption("driver") == "real":
        from cuckpt import driver

        try:
            driver.init(0)
        except (RuntimeError, driver.DriverError) as error:
            pytest.exit(f"--driver=real needs a driver and a GPU: {error}", 4)
    elif config.getoption("driver") == "null":
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ["CUCKPT_LIBCUDA"] = str(build_null_driver(Path(folder.name)))


FOLDERS = {"real": ROOT / "tests/gpu", "simulated": ROOT / "tests/jobs"}


def pytest_ignore_collect(collection_path, config):
    inside = [
        name
        for name, folder in FOLDERS.items()
        if folder in (collection_path, *collection_path.parents)
    ]
    if collection_path.is_file() and (inside or ["null"]) != [
        config.getoption("driver")
    ]:
        return True
    return None


def pytest_collection_modifyitems(items):
    shared = pytest.mark.thread_unsafe(reason="one driver, or other processes")
    for item in items:
        if {"hook", "python"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(shared)


def pytest_report_header():
    import cuckpt
    from cuckpt import driver

    try:
        found = f"{driver.library_path()}, version {driver.driver_get_version()}"
    except (RuntimeError, driver.DriverError) as error:
        found = str(error)
    return [f"cuckpt: {Path(cuckpt.__file__).parent}", f"driver: {found}"]


def build_null_driver(folder):
    library = folder / "libcuda.so.1"
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"),
            "-Wl,-soname,libcuda.so.1",
            *("-o", library, ROOT / "benchmarks/native/null_driver.c"),
        ],
        check=True,
    )
    return library


@pytest.fixture(scope="session")
def null_driver():
    """The do-nothing driver in this process, as a ctypes library."""
    return ctypes.CDLL(os.environ["CUCKPT_LIBCUDA"])


def pairs_at(address):
    """Return the bytes of the pairs that the restore args at an address point to."""
    pairs, count = struct.unpack("<QI", ctypes.string_at(address, 12))
    return ctypes.string_at(pairs, 32 * count)


class Hook:
    """Decides what the do-nothing driver answers, and keeps what it was asked."""

    pairs_at = staticmethod(pairs_at)

    def __init__(self, library):
        self._library = library
        self._slot = ctypes.c_void_p.in_dll(library, "null_driver_hook")
        self.calls = []

    def answer(self, result):
        """Answer every call with this result, or with what this returns.

        A function gets the C function's name, the pid (or other number) and the
        address of the argument.
        """

        def hook(call, pid, argument):
            asked = call.decode(), pid, argument
            self.calls.append(asked)
            return result(*asked) if callable(result) else result

        self._function = HOOK(hook)
        self._slot.value = ctypes.cast(self._function, ctypes.c_void_p).value

    def keep_pairs(self):
        """Succeed, and return a list that gets the pairs of each restore, as bytes."""
        kept = []
        self.answer(lambda call, pid, address: kept.append(pairs_at(address)) or 0)
        return kept

    def sleep(self):
        """Make every call take as many milliseconds as its number says, in C."""
        function = self._library.null_driver_sleeps
        self._slot.value = ctypes.cast(function, ctypes.c_void_p).value

    def remove(self):
        self._slot.value = None


@pytest.fixture
def hook(null_driver):
    hook = Hook(null_driver)
    hook.answer(0)
    yield hook
    hook.remove()


@pytest.fixture
def python(tmp_path):
    """Run a program in a new Python; a hang fails, it does not skip."""

    def run(program, *arguments, timeout=60, check=True, **environment):
        variables = {**os.environ, **environment}
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
        )

    return run


@pytest.fixture
def no_driver(tmp_path):
    """Environment in which libcuda.so.1 does not load, on any machine."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    return {"CUCKPT_LIBCUDA": None, "LD_LIBRARY_PATH": str(tmp_path)}


# What the programs begin with that run on a simulated machine.
ON_A_MACHINE = """
import ctypes, os, subprocess, sys, time
from cuckpt import driver
from cuckpt.simulator import Machine, SimulatorError
from cuckpt.target import Program, Target, TargetError

def used(gpu=0):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda = ctypes.CDLL(driver.library_path())
    context = ctypes.c_void_p(driver.device_primary_ctx_retain(gpu))
    cuda.cuCtxSetCurrent(context)
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value

def suspend(pid):
    driver.checkpoint_process_lock(pid, driver.CheckpointLockArgs(timeout_ms=10_000))
    driver.checkpoint_process_checkpoint(pid)

def resume(pid, args=None):
    driver.checkpoint_process_restore(pid, args)
    driver.checkpoint_process_unlock(pid)

MIB = 1 << 20
"""


@pytest.fixture
def simulate():
    """Run a command by `cuckpt simulate`, with its options."""
    script = str(Path(sysconfig.get_path("scripts")) / "cuckpt")

    def run(*command, timeout=120, **options):
        arguments = [script, "simulate"]
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        return subprocess.run(
            [*arguments, "--", *command],
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def program(simulate):
    """Run a program by `cuckpt simulate`; return what it printed."""

    def run(text, status=0, **options):
        code = ON_A_MACHINE + textwrap.dedent(text)
        result = simulate(sys.executable, "-P", "-W", "error", "-c", code, **options)
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout

    return run


@pytest.fixture
def machine_program(python):
    """Run a program that makes its own machine; return what it printed."""

    def run(text, **options):
        code = ON_A_MACHINE + textwrap.dedent(text)
        none = {"CUCKPT_LIBCUDA": None, "CUCKPT_SIMULATOR": None}
        return python(code, **none, **options).stdout

    run.prelude = ON_A_MACHINE
    return run


@pytest.fixture
def nothing_is_left(monkeypatch, processes_with):
    """What the test starts has ended after it.

    Simulated memory and sockets are those of processes: who has none left has
    left nothing. They are known by a variable, since others may simulate too.
    """
    mark = f"CUCKPT_TEST={os.getpid()}.{time.monotonic_ns()}"
    monkeypatch.setenv(*mark.split("="))
    yield
    deadline = time.monotonic() + 20
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.fixture
def processes_with():
    """Tell the pids of processes whose environment has a variable, as NAME=VALUE."""

    def find(variable):
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if variable.encode() in file.read_bytes().split(b"\0"):
                    found.append(file.parent.name)
            except OSError:
                pass
        return found

    return find


@pytest.fixture
def end_of():
    """Wait until processes have ended; whether anybody reaps them is not asked."""

    def lives(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def wait(*pids):
        deadline = time.monotonic() + 20
        while any(map(lives, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not any(map(lives, pids))

    return wait
