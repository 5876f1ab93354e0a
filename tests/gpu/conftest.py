import contextlib
import ctypes
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from cuckpt import driver
from cuckpt.target import Program, Target


@pytest.fixture
def spawn():
    """Start Python programs, and end them whatever happens."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Program(*arguments))


@pytest.fixture
def target():
    """A target with a context on GPU 0."""
    with Target() as target:
        yield target


@pytest.fixture(scope="session")
def same_pairs():
    """A pair for every GPU: each onto itself."""
    driver.init(0)
    gpus = range(driver.device_get_count())
    uuids = [driver.device_get_uuid_v2(driver.device_get(gpu)) for gpu in gpus]
    return [(uuid, uuid) for uuid in uuids]


@pytest.fixture(scope="session")
def gpu_uuid():
    """UUID of GPU 0."""
    driver.init(0)
    return driver.device_get_uuid_v2(driver.device_get(0))


PTRACE_CONT, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 17, 0x4206, 0x4207
WALL = 0x40000000


class Tracer:
    """Holds threads by ptrace, as a debugger or CRIU does."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._held = []

    def stop(self, *tids):
        for tid in tids:
            self._ask(PTRACE_SEIZE, tid)
            self._held.append(tid)
            self.interrupt(tid)

    def stop_all_but(self, pid, thread):
        """Stop the others; return how many these are."""
        others = [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
        others.remove(thread)
        self.stop(*others)
        return len(others)

    def interrupt(self, tid):
        self._ask(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WALL)

    def go_on(self, tid):
        self._ask(PTRACE_CONT, tid)

    def let_go(self):
        for tid in self._held:
            self._ask(PTRACE_DETACH, tid)
        self._held = []

    def _ask(self, request, tid):
        null = ctypes.c_void_p()
        number, thread = ctypes.c_long(request), ctypes.c_long(tid)
        if self._libc.ptrace(number, thread, null, null) != 0:
            raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of {tid}")


@pytest.fixture
def tracer():
    tracer = Tracer()
    yield tracer
    tracer.let_go()


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """A program named cuda-checkpoint."""
    folder = tmp_path_factory.mktemp("bin")
    cuckpt = Path(sysconfig.get_path("scripts")) / "cuckpt"
    subprocess.run([cuckpt, "install-shim", folder], check=True, capture_output=True)
    return str(folder / "cuda-checkpoint")
