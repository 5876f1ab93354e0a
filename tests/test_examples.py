"""The examples do what they say: one is built, and run on a simulated GPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cuckpt import driver

SOURCE = Path(__file__).parent.parent / "examples/cython_scheduler"

# What the programs below begin with: the scheduler, and targets on a simulated GPU.
START = """
import atexit, contextlib, subprocess, sys
sys.path.insert(0, sys.argv[1])
import scheduler
from cuckpt import driver
from cuckpt.simulator import Machine
from cuckpt.target import Target

stack = contextlib.ExitStack()
atexit.register(stack.close)
stack.enter_context(Machine())

def started():
    return stack.enter_context(Target({0: 1 << 20}))

def failures(function, *pids, **options):
    try:
        function(*pids, **options)
    except ExceptionGroup as group:
        return [(type(e).__name__, e.call, e.pid) for e in group.exceptions]

def state(target):
    return driver.checkpoint_process_get_state(target.pid).name
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "cython_scheduler"
    # As a user has it: without what was built there.
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("*.so", "build"))
    result = subprocess.run(
        [sys.executable, "-P", "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={
            **os.environ,
            "CFLAGS": "-O1 -Wall -Wextra -Werror -Wno-unused-parameter",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def scheduler(built):
    (path,) = built.glob("scheduler.*.so")
    spec = importlib.util.spec_from_file_location("scheduler", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_targets_take_turns_and_keep_their_content(built):
    simulate = [sys.executable, "-P", "-m", "cuckpt", "simulate", "--"]
    result = subprocess.run(
        [*simulate, sys.executable, "run.py", "--rounds", "2", "--mib", "4"],
        cwd=built,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if line.endswith("  right")]
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] * 3
    assert len({row[1] for row in rows}) == 3
    assert lines[-1] == "every content was right"
    assert max(map(len, lines)) <= 80


def test_targets_are_suspended_and_resumed_at_the_same_time(hook, scheduler):
    everybody = threading.Barrier(3, timeout=20)

    def wait_for_the_others(call, pid, argument):
        try:
            everybody.wait()
        except threading.BrokenBarrierError:
            return 999
        return 0

    hook.answer(wait_for_the_others)
    scheduler.suspend(1, 2, 3)
    scheduler.resume(1, 2, 3)
    assert [call for call, pid, _ in hook.calls if pid == 2] == [
        "cuCheckpointProcessLock",
        "cuCheckpointProcessCheckpoint",
        "cuCheckpointProcessRestore",
        "cuCheckpointProcessUnlock",
    ]


def test_a_driver_that_answers_not_found_is_believed(hook, scheduler):
    hook.answer(500)
    with pytest.raises(ExceptionGroup) as caught:
        scheduler.resume(1, 2)
    assert [error.pid for error in caught.value.exceptions] == [1, 2]
    assert caught.group_contains(driver.NotFoundError)


def test_suspend_of_no_cuda_process_raises_and_the_others_are_suspended(python, built):
    program = """
target = started()
other = stack.enter_context(subprocess.Popen(["sleep", "60"]))
stack.callback(other.kill)
print(failures(scheduler.suspend, target.pid, other.pid) == [
    ("NotInitializedError", "cuCheckpointProcessLock", other.pid)])
print(state(target))
scheduler.resume(target.pid)
target.check()
print(state(target))
"""
    printed = python(START + program, str(built), CUCKPT_LIBCUDA=None).stdout
    assert printed.splitlines() == ["True", "CHECKPOINTED", "RUNNING"]


def test_target_that_cannot_be_suspended_goes_on(python, built):
    program = """
busy = started()
managed = started()
busy.ask("spin 3000")
managed.ask("manage")
print(failures(scheduler.suspend, busy.pid, managed.pid, timeout_ms=100) == [
    ("NotReadyError", "cuCheckpointProcessLock", busy.pid),
    ("NotSupportedError", "cuCheckpointProcessCheckpoint", managed.pid)])
print(state(busy), state(managed))
managed.check()
"""
    printed = python(START + program, str(built), CUCKPT_LIBCUDA=None).stdout
    assert printed.splitlines() == ["True", "RUNNING RUNNING"]


def test_resume_of_a_running_target_raises_and_changes_nothing(python, built):
    program = """
target = started()
print(failures(scheduler.resume, target.pid) == [
    ("IllegalStateError", "cuCheckpointProcessRestore", target.pid)])
print(state(target))
target.check()
"""
    printed = python(START + program, str(built), CUCKPT_LIBCUDA=None).stdout
    assert printed.splitlines() == ["True", "RUNNING"]


def test_missing_function_raises_from_the_threads(python, built):
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import scheduler
try:
    scheduler.suspend(1, 2, 3)
except RuntimeError as error:
    print(type(error).__name__)
"""
    result = python(program, str(built), NULL_DRIVER_VERSION="12000")
    assert result.stdout == "FunctionNotFoundError\n"
