"""The fixtures that cuckpt brings, in test runs of their own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")


@pytest.fixture
def run(tmp_path):
    """Run pytest on a test file; return its process and what it printed."""

    def run(text, timeout=120, **environment):
        file = tmp_path / "test_it.py"
        file.write_text(textwrap.dedent(text))
        variables = {**os.environ, "PIDS": str(tmp_path / "pids"), **environment}
        if "CUCKPT_LIBCUDA" not in environment:
            del variables["CUCKPT_LIBCUDA"]
        command = [sys.executable, "-P", "-m", "pytest", "-q", "--strict-markers"]
        command += ["-p", "no:hypothesispytest"]  # which takes long to import
        return subprocess.run(
            [*command, file],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


def passed(result, count):
    assert f"{count} passed in" in result.stdout, result.stdout + result.stderr
    return result.returncode == 0


ROUND_TRIP = """
    from cuckpt import driver

    def test_it(cuda_machine, cuda_target):
        driver.checkpoint_process_lock(cuda_target.pid)
        driver.checkpoint_process_checkpoint(cuda_target.pid)
        assert cuda_machine.processes() == {cuda_target.pid: {0: 0}}
        driver.checkpoint_process_restore(cuda_target.pid)
        driver.checkpoint_process_unlock(cuda_target.pid)
        assert cuda_machine.processes() == {cuda_target.pid: {0: 64 << 20}}
        cuda_target.check()
        assert cuda_machine.calls["restore"] == 1
"""


def test_target_makes_a_round_trip(run):
    assert passed(run(ROUND_TRIP), 1)


def test_marker_says_what_machine(run):
    text = """
    import os
    import pytest
    from cuckpt import driver
    from cuckpt.simulator import Fault

    pytestmark = pytest.mark.cuda_machine(driver_version=13000)

    @pytest.mark.cuda_machine(
        gpus=2, memory_bytes=128 << 20, driver_version=13000, faults=[Fault("lock", 2)])
    def test_one(cuda_machine, cuda_target):
        driver.init()
        assert driver.device_get_count() == len(cuda_machine.gpus) == 2
        assert driver.driver_get_version() == 13000
        assert cuda_machine.gpus[1].memory_bytes == 128 << 20
        with pytest.raises(driver.OutOfMemoryError):
            driver.checkpoint_process_lock(cuda_target.pid)

    @pytest.mark.parametrize("pid", range(2))
    def test_other(cuda_machine, pid):
        driver.init()
        assert len(cuda_machine.gpus) == driver.device_get_count() == 1
        assert list(cuda_machine.processes()) == [os.getpid()]

    def test_without():
        assert "CUCKPT_SIMULATOR" not in os.environ
        with pytest.raises(driver.NoDeviceError):
            driver.init()
    """
    assert passed(run(text), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpus=0", "ValueError: a machine has 1 to 16 GPUs"),
        ("gpu=1", "unexpected keyword argument 'gpu'"),
        ("memory_bytes=2 << 20", "OUT_OF_MEMORY"),
    ],
)
def test_wrong_marker_is_an_error(run, arguments, message):
    result = run(
        f"""
        import pytest

        @pytest.mark.cuda_machine({arguments})
        def test_it(cuda_target):
            pass
        """
    )
    assert message in result.stdout
    assert "1 error in" in result.stdout


def test_other_libcuda_is_an_error_that_says_so(run):
    result = run(
        """
        import ctypes, os
        ctypes.CDLL(os.environ["CUCKPT_LIBCUDA"])

        def test_it(cuda_machine):
            pass
        """,
        CUCKPT_LIBCUDA=os.environ["CUCKPT_LIBCUDA"],
    )
    assert "SimulatorError: this process has loaded" in result.stdout
    assert "1 error in" in result.stdout


def test_plugin_imports_little_before_a_fixture_is_used(run):
    result = run(
        """
        import sys

        def test_it():
            loaded = {name for name in sys.modules if name.startswith("cuckpt")}
            assert loaded == {"cuckpt", "cuckpt.pytest_plugin"}
        """
    )
    assert passed(result, 1)


TARGETS = """
    import os, signal
    import pytest
    from cuckpt import driver

    def test_it(cuda_machine, cuda_target):
        others = [cuda_machine.spawn() for _ in range(3)]
        driver.checkpoint_process_lock(others[0].pid)
        driver.checkpoint_process_lock(others[1].pid)
        driver.checkpoint_process_checkpoint(others[1].pid)
        others[1].send("wait")
        others[1].is_silent(0.1)
        with open(os.environ["PIDS"], "w") as file:
            print(*[target.pid for target in [cuda_target, *others]], file=file)
        {end}
"""


def who_listens():
    sockets = Path("/proc/net/unix").read_text().split()
    names = [name.split("/") for name in sockets if name.startswith("@cuckpt/")]
    return {pid for _, _, pid in names}


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("assert False", 1),
        ("raise KeyboardInterrupt", 2),
        ("os._exit(9)", 9),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["failure", "interrupt", "_exit", "kill"],
)
def test_nothing_is_left_however_a_test_ends(run, end_of, tmp_path, end, status):
    assert run(TARGETS.format(end=end)).returncode == status
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 4
    assert end_of(*pids)
    # A process may be a zombie before the last of its threads has ended.
    deadline = time.monotonic() + 20
    while left := {*pids} & who_listens():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert passed(run(ROUND_TRIP), 1)
