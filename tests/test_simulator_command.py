"""`cuckpt simulate`: what it does with the command, and what it refuses."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
GPU = Path(__file__).parent / "gpu"
COMMAND_LINE = [GPU / "test_cli_contract.py", GPU / "test_criu.py"]
SCENARIOS = sorted(
    {*GPU.glob("test_*.py")} - {*COMMAND_LINE, GPU / "test_frameworks.py"}
)


# The measured driver is of version 13.0; what a newer one adds is documented.
@pytest.mark.parametrize(
    ("version", "scenarios"),
    [
        ("13.0", SCENARIOS),
        ("13.0", COMMAND_LINE),
        ("13.5", [GPU / "test_scenarios.py"]),
    ],
    ids=["13.0", "13.0-command-line", "13.5"],
)
def test_scenarios_of_the_real_driver_pass(simulate, version, scenarios):
    result = simulate(
        *(sys.executable, "-m", "pytest", "--driver=real", "-q", *scenarios),
        driver_version=version,
        gpus=2,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    assert "skipped" not in result.stdout


def test_simulate_ends_as_the_command_does(simulate):
    assert simulate("sh", "-c", "exit 7").returncode == 7
    assert simulate("sh", "-c", "kill -9 $$").returncode == -9
    missing = simulate("no-such-command")
    assert missing.returncode == 127
    assert missing.stderr.startswith("cuckpt simulate: no-such-command: ")
    assert simulate(os.devnull).returncode == 126


def test_simulate_passes_input_and_signals():
    with subprocess.Popen(
        [COMMAND, "simulate", "--", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as cat:
        cat.stdin.write(b"through\n")
        cat.stdin.flush()
        assert cat.stdout.readline() == b"through\n"
        cat.send_signal(signal.SIGTERM)
        assert cat.wait(30) == -signal.SIGTERM


def test_simulate_is_configured_by_its_variables_alone():
    before = {**os.environ}
    command = [COMMAND, "simulate", "--", "env", "-0"]
    lines = subprocess.check_output(command, env=before, text=True).split("\0")
    after = dict(line.split("=", 1) for line in lines if line)
    changed = {name for name, value in after.items() if before.get(name) != value}
    assert changed - {"_"} == {"LD_LIBRARY_PATH", "CUCKPT_SIMULATOR", "CUCKPT_LIBCUDA"}


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("memory", "5X", "as 512MiB or 4GiB, not '5X'"),
        ("memory", "4GB", "as 512MiB or 4GiB, not '4GB'"),
        ("memory", "0", "not '0'"),
        ("memory", "2TiB", "2 MiB to 1 TiB"),
        ("gpus", "0", "1 to 16 GPUs"),
        ("gpus", "17", "1 to 16 GPUs"),
        ("gpus", "x", "invalid int value"),
        ("driver_version", "new", "as 13.5 or 13050, not 'new'"),
        ("driver_version", "13.45", "as 13.5 or 13050, not '13.45'"),
        ("driver_version", "14", "not 14.0"),
        ("driver_version", "11.8", "12.0 or later"),
        ("memory", "-1", "argument --memory"),
    ],
)
def test_simulate_refuses_nonsense(simulate, option, value, problem):
    result = simulate("true", **{option: value})
    assert result.returncode == 2
    assert problem in result.stderr


def test_simulate_needs_no_dashes_but_a_command():
    command = [COMMAND, "simulate", "--gpus", "2", sys.executable, "-c", "print(7)"]
    assert subprocess.check_output(command, text=True) == "7\n"
    for empty in [], ["--"]:
        result = subprocess.run([COMMAND, "simulate", *empty], capture_output=True)
        assert result.returncode == 2
        assert b"no command" in result.stderr


def test_simulate_takes_its_options(program):
    printed = program(
        """
        driver.init()
        size = ctypes.c_size_t()
        ctypes.CDLL(driver.library_path()).cuDeviceTotalMem_v2(ctypes.byref(size), 1)
        print(driver.device_get_count(), size.value, driver.driver_get_version())
        """,
        gpus=2,
        memory="512MiB",
        driver_version="13.4",
    )
    assert printed == f"2 {512 << 20} 13040\n"


def test_command_may_use_low_descriptors_itself(simulate):
    call = "from cuckpt import driver; driver.init(); print(7)"
    script = f"exec 3>/dev/null 9>/dev/null; {sys.executable} -P -c '{call}'"
    assert simulate("sh", "-c", script).stdout == "7\n"
