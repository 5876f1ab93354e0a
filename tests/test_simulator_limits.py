"""Machines where files, memory or room are scarce."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

WHOLE = """
with Machine(gpus=2, memory_bytes=64 * MIB) as machine:
    target = machine.spawn({0: 5 * MIB, 1: 5 * MIB})
    suspend(target.pid)
    resume(target.pid)
    target.check()
print("whole")
"""

REFUSED = """
try:
    with machine:
        pass
except SimulatorError as error:
    print(error)
limits()
with machine:
    machine.spawn().check()
print("CUCKPT_SIMULATOR" in os.environ)
"""


def with_limit(name, low, program):
    """Return a program under a limit, which it lifts by `limits()`."""
    before = f"""
import resource
machine = Machine(memory_bytes=8 * MIB)
before = resource.getrlimit(resource.{name})
def limits():
    resource.setrlimit(resource.{name}, before)
resource.setrlimit(resource.{name}, ({low}, before[1]))
"""
    return before + program


def test_few_descriptors_suffice(machine_program):
    assert machine_program(with_limit("RLIMIT_NOFILE", 64, WHOLE)) == "whole\n"


def test_command_runs_with_few_descriptors():
    call = "from cuckpt import driver; driver.init(); print(7)"
    script = f"ulimit -n 100; exec cuckpt simulate -- {sys.executable} -P -c '{call}'"
    environment = {**os.environ, "PATH": os.path.dirname(sys.executable)}
    shell = shutil.which("sh")
    printed = subprocess.check_output([shell, "-c", script], env=environment)
    assert printed == b"7\n"


# Each step finds none in its turn.
@pytest.mark.parametrize("free", range(5))
def test_no_descriptor_is_an_error_that_says_so(machine_program, free):
    few = f"max(map(int, os.listdir('/proc/self/fd'))) + {free}"
    program = with_limit("RLIMIT_NOFILE", few, REFUSED)
    *problem, left = machine_program(program).splitlines()
    assert left == "False"
    if free == 0:
        assert problem
    if problem:
        assert problem[0].startswith("the machine cannot be started: ")
        assert "Too many open files" in problem[0] or "short of descr" in problem[0]


def test_no_memory_is_an_error_that_says_so(machine_program):
    size = "int(open('/proc/self/statm').read().split()[0]) * 4096"
    program = with_limit("RLIMIT_AS", size, REFUSED)
    problem, left = machine_program(program).splitlines()
    assert problem.startswith("the machine cannot be started: ")
    assert left == "False"


def test_low_limit_of_files_is_an_error_that_says_so(machine_program):
    limited = with_limit("RLIMIT_FSIZE", "8 * MIB - 1", REFUSED)
    problem, left = machine_program(limited).splitlines()
    assert problem.startswith("files may have 8388607 bytes (ulimit -f), less than")
    assert left == "False"
    exact = WHOLE.replace("64 * MIB", "8 * MIB")
    assert machine_program(with_limit("RLIMIT_FSIZE", "8 * MIB", exact)) == "whole\n"


def test_command_says_why_no_machine_can_be_started():
    command = [sys.executable, "-P", "-m", "cuckpt", "simulate", "--", "true"]
    script = f"ulimit -f 1000; exec {' '.join(command)}"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("cuckpt simulate: files may have ")


def test_unwritable_folders_and_little_shared_memory_suffice(machine_program):
    inside = ["unshare", "-m", "sh", "-e", "-c"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"]).returncode:
        pytest.skip("needs the right to mount")
    script = """
    mount -t tmpfs -o size=64k tmpfs /dev/shm
    mkdir /dev/shm/here
    mount -t tmpfs -o ro tmpfs /dev/shm/here
    cd /dev/shm/here
    export TMPDIR=/dev/shm/here HOME=/dev/shm/here
    if touch file 2>/dev/null; then exit 3; fi
    "$@"
    """
    code = "print('inside')\n" + textwrap.dedent(WHOLE)
    prelude = machine_program.prelude
    variables = {**os.environ}
    del variables["CUCKPT_LIBCUDA"]
    result = subprocess.run(
        [*inside, script, "sh", sys.executable, "-P", "-B", "-c", prelude + code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "inside\nwhole\n", result.stderr
