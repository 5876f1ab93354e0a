"""One process: what suspends and resumes it, what fails, and what is left then."""

import contextlib
import copy
import ctypes
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuckpt import driver, nvml, proc
from cuckpt.events import Teller
from cuckpt.process import Outcome, Process, uninterrupted
from cuckpt.process_errors import (
    MissingExtraError,
    NoRoomError,
    ProcessBusyError,
    ProcessError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
    ProcessStoppedError,
)
from cuckpt.simulator import Fault
from cuckpt.target import Program, Target
from cuckpt.uninterrupted import _action

MIB = 1 << 20
STATES = ["running", "locked", "checkpointed"]
machine_with = pytest.mark.cuda_machine


@pytest.fixture
def target(cuda_machine):
    return cuda_machine.spawn({0: MIB})


@pytest.fixture
def process(target):
    return Process(target.pid)


@pytest.fixture
def no_nvml(monkeypatch):
    """As if nvidia-ml-py was not installed."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


def bring(process, state):
    """Bring a running process to a state."""
    if state != "running":
        process.lock()
    if state == "checkpointed":
        process.checkpoint()


# What it is


def test_process_tells_what_it_is(cuda_machine, target, process):
    assert process.pid == target.pid
    assert repr(process) == f"Process({target.pid})"
    assert process.name == proc.facts(target.pid).name
    assert process.state == "running"
    assert process.is_cuda
    assert process.restore_thread_id in proc.threads(target.pid)
    used = process.used_memory()
    assert list(used) == [str(cuda_machine.gpus[0])]
    assert used[str(cuda_machine.gpus[0])] >= MIB
    process.suspend()
    assert process.used_memory() == {}


@pytest.mark.parametrize(
    ("pid", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (0, ValueError),
        (-1, ValueError),
    ],
    ids=repr,
)
def test_process_refuses_what_is_no_pid(pid, error):
    with pytest.raises(error, match="pid must be"):
        Process(pid)


@pytest.mark.parametrize("pid", [2**22 + 1, 2**31, 2**70])
def test_process_is_gone_that_never_was(pid):
    with pytest.raises(ProcessGoneError, match="none with this pid") as caught:
        Process(pid)
    assert isinstance(caught.value, ProcessLookupError)
    assert caught.value.pid == pid


def test_process_names_the_owner_of_a_thread(process):
    thread = process.restore_thread_id
    with pytest.raises(ValueError, match=f"{thread} is a thread of process"):
        Process(thread)


@pytest.mark.usefixtures("cuda_machine")
def test_process_without_cuda_says_so():
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        process = Process(sleeper.pid)
        assert not process.is_cuda
        for ask in (lambda: process.state, process.suspend, process.recover):
            with pytest.raises(driver.NotInitializedError):
                ask()
        sleeper.kill()


@pytest.mark.usefixtures("cuda_machine")
def test_zombie_is_gone():
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        process = Process(sleeper.pid)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessGoneError, match="zombie"):
            process.suspend()
        with pytest.raises(ProcessGoneError, match="zombie"):
            Process(sleeper.pid)


ASK = {
    "state": lambda process: process.state,
    "restore_thread_id": lambda process: process.restore_thread_id,
    "is_cuda": lambda process: process.is_cuda,
    "lock": Process.lock,
    "checkpoint": Process.checkpoint,
    "restore": Process.restore,
    "unlock": Process.unlock,
    "suspend": Process.suspend,
    "resume": Process.resume,
    "suspended": lambda process: process.suspended().__enter__(),
    "recover": Process.recover,
    "wait_for_state": lambda process: process.wait_for_state("locked", 5),
}


def test_everything_says_that_it_is_gone(target, process):
    target.end()
    for name, ask in ASK.items():
        with pytest.raises(ProcessGoneError, match="has ended"):
            pytest.fail(f"{name} returned {ask(process)}")
    assert process.used_memory() == {}


def test_everything_says_that_the_pid_is_anothers(cuda_machine, process, monkeypatch):
    calls = cuda_machine.calls
    monkeypatch.setattr(proc, "start_time", lambda pid: 1)
    for name, ask in ASK.items():
        with pytest.raises(ProcessGoneError, match="another's now"):
            pytest.fail(f"{name} returned {ask(process)}")
    assert cuda_machine.calls == calls


# From state to state


def test_verbs_of_the_driver_go_round(target, process):
    for verb, state in (
        (process.lock, "locked"),
        (process.checkpoint, "checkpointed"),
        (process.restore, "locked"),
        (process.unlock, "running"),
    ):
        assert verb() is None
        assert process.state == state
    target.check()


@pytest.mark.parametrize("state", STATES)
def test_verbs_of_the_driver_are_refused_in_a_wrong_state(process, state):
    bring(process, state)
    right = {
        "running": {"lock"},
        "locked": {"checkpoint", "unlock"},
        "checkpointed": {"restore"},
    }
    for verb in {"lock", "checkpoint", "restore", "unlock"} - right[state]:
        with pytest.raises(driver.IllegalStateError):
            getattr(process, verb)()
        assert process.state == state


@pytest.mark.parametrize("state", STATES)
def test_suspend_checkpoints_in_any_state(cuda_machine, target, process, state):
    bring(process, state)
    outcome = process.suspend()
    assert (outcome.before, outcome.after) == (state, "checkpointed")
    assert process.state == "checkpointed"
    assert (outcome.pid, outcome.name) == (process.pid, process.name)
    expected = {"running": {"lock", "checkpoint"}, "locked": {"checkpoint"}}
    assert outcome.seconds.keys() == expected.get(state, set())
    assert all(seconds > 0 for seconds in outcome.seconds.values())
    assert outcome.notes == []
    if state == "running":
        assert outcome.used_bytes[str(cuda_machine.gpus[0])] >= MIB
    process.resume()
    target.check()


@pytest.mark.parametrize("state", STATES)
def test_resume_runs_in_any_state(target, process, state):
    bring(process, state)
    outcome = process.resume()
    assert (outcome.before, outcome.after) == (state, "running")
    assert process.state == "running"
    expected = {"locked": {"unlock"}, "checkpointed": {"restore", "unlock"}}
    assert outcome.seconds.keys() == expected.get(state, set())
    # Nobody knows what it used when it ran.
    assert ["not known" in note for note in outcome.notes] == [True] * (
        state == "checkpointed"
    )
    target.check()


def test_resume_calls_nothing_when_it_runs(cuda_machine, process):
    process.resume()
    process.resume()
    calls = cuda_machine.calls
    assert calls["restore"] == calls["unlock"] == calls["lock"] == 0


@pytest.mark.parametrize("state", STATES)
def test_recover_runs_from_any_state(target, process, state):
    bring(process, state)
    outcome = Process(process.pid).recover()
    assert (outcome.before, outcome.after) == (state, "running")
    target.check()


@pytest.mark.parametrize("state", STATES)
def test_suspended_gives_the_state_back(cuda_machine, target, process, state):
    bring(process, state)
    with process.suspended() as outcome:
        assert outcome.before == state
        assert process.state == "checkpointed"
    assert process.state == state
    if state == "checkpointed":
        assert cuda_machine.calls["restore"] == 0
    process.recover()
    target.check()


def test_suspended_gives_the_state_back_when_the_body_raises(target, process):
    with pytest.raises(ZeroDivisionError), process.suspended():
        raise ZeroDivisionError
    assert process.state == "running"
    target.check()


def test_suspended_lets_the_body_resume(target, process):
    with process.suspended():
        process.resume()
    assert process.state == "running"
    with process.suspended():
        process.restore()
    assert process.state == "running"
    target.check()


def test_suspended_says_that_it_ended_meanwhile(target, process):
    with pytest.raises(ProcessGoneError), process.suspended():
        target.end()


@machine_with(faults=[Fault("checkpoint", result=801)])
def test_suspended_raises_what_suspend_does(target, process):
    with pytest.raises(driver.NotSupportedError), process.suspended():
        pytest.fail("it is not suspended")
    assert process.state == "running"
    target.check()


@machine_with(faults=[Fault("restore", result=999, count=5)])
def test_suspended_tries_again_when_a_restore_fails(target, process):
    with process.suspended():
        pass
    assert process.state == "running"
    target.check()


@machine_with(memory_bytes=64 * MIB)
def test_suspended_needs_no_room_for_what_was_suspended_before(cuda_machine):
    target = cuda_machine.spawn({0: 48 * MIB})
    process = Process(target.pid)
    process.suspend()
    hog = cuda_machine.spawn({0: 48 * MIB})
    with process.suspended():
        pass
    assert process.state == "checkpointed"
    hog.end()
    process.resume()
    target.check()


# GPU maps


@machine_with(gpus=2)
def test_resume_moves_to_another_gpu(cuda_machine, target, process):
    first, second = map(str, cuda_machine.gpus)
    process.suspend()
    outcome = process.resume({first: second})
    assert outcome.used_bytes.keys() == {first}
    assert process.used_memory().keys() == {second}
    target.check()
    process.suspend()
    process.resume({second: 0})
    assert process.used_memory().keys() == {first}
    target.check()


@machine_with(gpus=2)
def test_suspended_moves_to_another_gpu(cuda_machine, target, process):
    first, second = map(str, cuda_machine.gpus)
    with process.suspended(gpu_map={first: second}):
        pass
    assert process.used_memory().keys() == {second}
    target.check()


@machine_with(gpus=2)
def test_restore_takes_pairs_of_all_gpus(cuda_machine, target, process):
    first, second = (gpu.uuid for gpu in cuda_machine.gpus)
    bring(process, "checkpointed")
    with pytest.raises(driver.InvalidValueError):
        process.restore({first: second})
    assert process.state == "checkpointed"
    process.restore({first: second, second: first})
    process.unlock()
    assert process.used_memory().keys() == {str(cuda_machine.gpus[1])}
    target.check()


@machine_with(gpus=2)
def test_resume_tells_where_memory_is_when_it_fails_after_the_move(
    cuda_machine, target, process
):
    first, second = map(str, cuda_machine.gpus)
    process.suspend()
    cuda_machine.inject(Fault("unlock", result=999))
    with pytest.raises(driver.UnknownError) as caught:
        process.resume({first: second})
    assert caught.value.__notes__ == [
        f"process {process.pid} is checkpointed, as before",
        f"its memory is now that of {second}: to resume it needs no map",
    ]
    assert process.state == "checkpointed"
    outcome = process.resume()
    assert outcome.used_bytes.keys() == {second}
    assert outcome.notes == []
    assert process.used_memory().keys() == {second}
    target.check()


@machine_with(gpus=2, memory_bytes=64 * MIB)
def test_room_is_looked_for_where_memory_was_moved_to(cuda_machine):
    target = cuda_machine.spawn({0: 40 * MIB})
    process = Process(target.pid)
    process.suspend()
    cuda_machine.inject(Fault("unlock", result=999))
    with pytest.raises(driver.UnknownError):
        process.resume({0: 1})
    with Target({0: 40 * MIB}):
        assert process.resume().after == "running"
    process.suspend()
    with Target({1: 40 * MIB}), pytest.raises(NoRoomError, match="GPU 1"):
        process.resume()
    process.resume()
    target.check()


UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("gpu_map", "error"),
    [
        ([], TypeError),
        ([(UUID, UUID)], TypeError),
        (UUID, TypeError),
        ({5.0: UUID}, TypeError),
        ({"GPU-0": UUID}, ValueError),
        ({bytes(5): UUID}, ValueError),
    ],
    ids=repr,
)
def test_restores_refuse_what_is_no_map(cuda_machine, process, gpu_map, error):
    bring(process, "checkpointed")
    for restore in process.restore, process.resume:
        with pytest.raises(error):
            restore(gpu_map)
    assert cuda_machine.calls["restore"] == 0
    assert process.state == "checkpointed"


def test_resume_refuses_an_unknown_gpu(cuda_machine, process):
    process.suspend()
    with pytest.raises(ValueError, match=f"{UUID} is none of this machine"):
        process.resume({UUID: 0})
    with pytest.raises(ValueError, match="there is no GPU 1"):
        process.resume({str(cuda_machine.gpus[0]): 1})
    assert cuda_machine.calls["restore"] == 0
    process.resume({})
    assert process.state == "running"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("gpu_map", [[], UUID], ids=repr)
def test_resume_refuses_what_is_no_map_in_any_state(process, state, gpu_map):
    bring(process, state)
    with pytest.raises(TypeError, match="gpu_map must be a mapping"):
        process.resume(gpu_map)
    assert process.state == state


@pytest.mark.parametrize("gpu_map", [[], {UUID: 0}, {"x": 0}], ids=repr)
def test_suspended_refuses_a_wrong_map_before_it_suspends(
    cuda_machine, process, gpu_map
):
    with (
        pytest.raises((TypeError, ValueError)),
        process.suspended(gpu_map=gpu_map),
    ):
        pytest.fail("it is not suspended")
    assert cuda_machine.calls["lock"] == 0
    assert process.state == "running"


# Time limits


@pytest.mark.parametrize(
    ("timeout_ms", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (2**32, OverflowError),
        (10**400, OverflowError),
    ],
    ids=lambda value: str(value)[:20],
)
def test_lock_refuses_what_is_no_time(cuda_machine, process, timeout_ms, error):
    with pytest.raises(error, match="timeout_ms"):
        process.lock(timeout_ms)
    assert cuda_machine.calls["lock"] == 0


@pytest.mark.parametrize(
    ("timeout_s", "error"),
    [
        (True, TypeError),
        ("1", TypeError),
        (1j, TypeError),
        (-1, ValueError),
        (-0.001, ValueError),
        (-math.inf, ValueError),
        (math.nan, ValueError),
    ],
    ids=repr,
)
def test_time_limit_is_refused_that_is_none(cuda_machine, process, timeout_s, error):
    for call in (
        process.suspend,
        lambda limit: process.suspended(limit).__enter__(),
        lambda limit: process.wait_for_state("running", limit),
    ):
        with pytest.raises(error, match="timeout_s must be"):
            call(timeout_s)
    assert cuda_machine.calls["lock"] == 0
    assert process.state == "running"


@pytest.mark.parametrize(
    "timeout_s",
    [0, 0.0, 1e-9, 0.25, 5, None, math.inf, 2**40, 1e300, 1e308, 10**400],
    ids=lambda value: str(value)[:20],
)
def test_time_limit_is_kept_that_is_one(target, process, timeout_s):
    process.wait_for_state("running", timeout_s)
    process.suspend(timeout_s)
    process.resume()
    target.check()


@pytest.mark.parametrize("timeout_s", [0, 0.2])
def test_suspend_gives_up_when_the_gpu_is_busy(target, process, timeout_s):
    target.ask("spin 3000000")
    start = time.monotonic()
    with pytest.raises(driver.NotReadyError) as caught:
        process.suspend(timeout_s)
    assert timeout_s <= time.monotonic() - start < timeout_s + 2
    assert caught.value.__notes__ == [f"process {process.pid} is running, as before"]
    assert process.state == "running"


def test_lock_gives_up_when_the_gpu_is_busy(target, process):
    target.ask("spin 3000000")
    with pytest.raises(driver.NotReadyError):
        process.lock(100)
    assert process.state == "running"


@pytest.mark.parametrize("timeout_s", [None, 60])
def test_suspend_waits_for_the_gpu(target, process, timeout_s):
    target.ask("spin 300")
    outcome = process.suspend(timeout_s)
    assert outcome.seconds["lock"] > 0.1
    process.resume()
    target.check()


@machine_with(faults=[Fault("lock", result=600, count=2)])
def test_endless_lock_is_tried_again(target, process):
    assert process.suspend(timeout_s=None).notes == []
    process.resume()
    target.check()


ENDLESS = """
import sys
from cuckpt import process
process._LONGEST_FIRST_LOCK_S = 0.1
target = process.Process(int(sys.argv[1]))
print("begins", flush=True)
target.suspend(timeout_s=None)
"""


def test_endless_lock_can_be_interrupted(target, process):
    target.ask("spin 3000000")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", ENDLESS, str(target.pid)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as caller:
        caller.stdout.readline()
        time.sleep(0.15)
        caller.send_signal(signal.SIGINT)
        assert caller.wait(10) == -signal.SIGINT
    assert process.state == "running"


# Waiting for a state


def test_wait_for_state_refuses_an_unknown_state(process):
    with pytest.raises(ValueError, match=r"one of running, locked, .* not 'RUNNING'"):
        process.wait_for_state("RUNNING")


def test_wait_for_state_returns_once_it_has_come(process):
    other = Process(process.pid)
    thread = threading.Timer(0.1, other.suspend)
    thread.start()
    process.wait_for_state("checkpointed", 10)
    thread.join()
    process.wait_for_state("checkpointed")


def test_wait_for_state_tells_the_state_when_time_is_over(process):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="is running, not failed"):
        process.wait_for_state("failed", 0.1)
    assert 0.1 <= time.monotonic() - start < 2


@machine_with(faults=[Fault("checkpoint", delay_s=math.inf)])
def test_wait_for_state_gives_up_when_nobody_answers(target, process):
    def suspend():
        with contextlib.suppress(ProcessGoneError):
            process.suspend()

    caller = threading.Thread(target=suspend)
    caller.start()
    other = Process(target.pid)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        other.wait_for_state("checkpointed", 0.5)
    assert 0.5 <= time.monotonic() - start < 3
    assert caller.is_alive()
    target.end()
    caller.join()


# What goes wrong, and the way back


@pytest.mark.parametrize("verb", ["lock", "checkpoint"])
def test_suspend_goes_back_when_a_call_fails(cuda_machine, target, process, verb):
    cuda_machine.inject(Fault(verb, result=999))
    with pytest.raises(driver.UnknownError) as caught:
        process.suspend()
    assert caught.value.__notes__ == [f"process {process.pid} is running, as before"]
    assert process.state == "running"
    target.check()


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
@pytest.mark.parametrize("result", [1, 304, 401, 600, 999])
def test_call_is_done_that_says_it_failed(cuda_machine, target, process, verb, result):
    cuda_machine.inject(Fault(verb, result=result, when="after"))
    notes = [*process.suspend().notes, *process.resume().notes]
    assert len(notes) == 1
    assert notes[0].startswith(f"{verb} is done, though the driver said ")
    assert f"({result})" in notes[0]
    assert cuda_machine.calls[verb] == 1
    target.check()


@pytest.mark.parametrize(
    ("state", "verb"),
    [("locked", "unlock"), ("checkpointed", "restore"), ("checkpointed", "unlock")],
)
def test_resume_goes_back_when_a_call_fails(cuda_machine, target, process, verb, state):
    bring(process, state)
    cuda_machine.inject(Fault(verb, result=999, count=2 if verb == "restore" else 1))
    with pytest.raises(driver.UnknownError) as caught:
        process.resume()
    assert caught.value.__notes__[0] == f"process {process.pid} is {state}, as before"
    assert process.state == state
    process.resume()
    target.check()


@machine_with(faults=[Fault("restore", result=999)])
def test_resume_notes_that_a_restore_had_to_be_repeated(target, process):
    process.suspend()
    notes = process.resume().notes
    assert len(notes) == 1
    assert notes[0].startswith("restore succeeded at the second attempt, after ")
    target.check()


def test_suspend_leaves_a_locked_one_locked_when_it_fails(cuda_machine, process):
    cuda_machine.inject(Fault("checkpoint", result=2))
    process.lock()
    with pytest.raises(driver.OutOfMemoryError):
        process.suspend()
    assert process.state == "locked"
    assert cuda_machine.calls["unlock"] == 0


@machine_with(
    faults=[
        Fault("restore", result=999),
        Fault("restore", result=304, at=2, when="after"),
    ]
)
def test_restore_is_done_that_says_it_failed_at_the_second_attempt(target, process):
    process.suspend()
    (note,) = process.resume().notes
    assert note.startswith("restore is done, though the driver said ")
    target.check()


def test_process_that_has_no_cuda_state_for_a_moment_is_asked_again(
    cuda_machine, target, process
):
    process.lock()
    assert process.state == "locked"
    at = cuda_machine.calls["get_state"] + 1
    cuda_machine.inject(Fault("get_state", result=3, at=at, count=3))
    assert process.state == "locked"
    at = cuda_machine.calls["get_state"] + 1
    cuda_machine.inject(Fault("get_state", result=3, at=at, count=4))
    with pytest.raises(driver.NotInitializedError):
        pytest.fail(process.state)
    process.unlock()
    target.check()


def test_process_comes_back_when_it_is_not_known_whether_it_was_locked(
    cuda_machine, target, process, monkeypatch
):
    cuda_machine.inject(Fault("lock", result=999, when="after"))
    refuse, refused = Process._refuse, []

    def refuse_once(self):
        if cuda_machine.calls["lock"] and not refused:
            refused.append(True)
            raise ProcessStoppedError(self.pid, "is stopped")
        refuse(self)

    monkeypatch.setattr(Process, "_refuse", refuse_once)
    with pytest.raises(ProcessStoppedError):
        process.suspend()
    assert process.state == "running"
    target.check()


@machine_with(
    faults=[Fault("checkpoint", result=801), Fault("unlock", result=999, count=2)]
)
def test_way_back_is_tried_again(target, process):
    with pytest.raises(driver.NotSupportedError):
        process.suspend()
    assert process.state == "running"
    target.check()


@machine_with(
    faults=[Fault("checkpoint", result=801), Fault("unlock", result=999, count=3)]
)
def test_process_is_left_when_there_is_no_way_back(target, process):
    with pytest.raises(ProcessLeftError) as caught:
        process.suspend()
    assert "is locked and could not be brought back to running" in str(caught.value)
    assert caught.value.pid == process.pid
    assert isinstance(caught.value.__cause__, driver.UnknownError)
    assert process.state == "locked"
    assert process.recover().after == "running"
    target.check()


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_process_is_gone_that_dies_in_a_call(cuda_machine, process, verb, when):
    cuda_machine.inject(Fault(verb, kill="target", when=when))
    start = time.monotonic()

    def go_round():
        process.suspend()
        process.resume()

    with pytest.raises(ProcessGoneError):
        go_round()
    assert time.monotonic() - start < 5


@machine_with(faults=[Fault("get_restore_thread_id", result=999)])
def test_state_is_told_when_the_restore_thread_is_not(process):
    assert process.state == "running"


def test_failed_process_is_lost(process, monkeypatch):
    monkeypatch.setattr(
        driver, "checkpoint_process_get_state", lambda pid: driver.ProcessState.FAILED
    )
    assert process.state == "failed"
    for call in process.suspend, process.resume, process.recover:
        with pytest.raises(ProcessLostError, match="FAILED"):
            call()


def test_unknown_state_is_told(process, monkeypatch):
    monkeypatch.setattr(driver, "checkpoint_process_get_state", lambda pid: 77)
    assert process.state == "in the unknown state 77"
    with pytest.raises(ProcessLostError, match="77"):
        process.resume()


def test_process_is_busy_while_somebody_moves_its_memory(target, process):
    driver.init(0)
    driver.device_primary_ctx_retain(0)
    process.lock()
    args = driver.CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(target.pid, args)
    assert process.state == "checkpointing"
    for call in process.suspend, process.resume, process.recover:
        with pytest.raises(ProcessBusyError, match="is CHECKPOINTING: somebody"):
            call()
        assert process.state == "checkpointing"
    process.wait_for_state("checkpointing", 1)
    driver.checkpoint_operation_complete(args)
    assert process.state == "checkpointed"


# Lost ones


@pytest.fixture
def crowded(cuda_machine):
    """A suspended process for which there is no room."""
    target = cuda_machine.spawn({0: 48 * MIB})
    process = Process(target.pid)
    process.suspend()
    return process, target, cuda_machine.spawn({0: 48 * MIB})


@machine_with(memory_bytes=64 * MIB)
def test_resume_waits_for_room(cuda_machine, crowded):
    process, target, hog = crowded
    text = "16 MiB free, and 48 MiB are needed; free memory on that GPU, or name"
    for call in process.resume, process.recover:
        with pytest.raises(NoRoomError, match=text) as e:
            call()
        assert e.value.pid == process.pid
        assert isinstance(e.value, MemoryError)
    assert cuda_machine.calls["restore"] == 0
    assert process.state == "checkpointed"
    hog.end()
    process.resume()
    target.check()


@pytest.mark.usefixtures("no_nvml")
@machine_with(memory_bytes=64 * MIB)
def test_process_is_lost_when_there_was_no_room(cuda_machine, crowded):
    process, _, hog = crowded
    with pytest.raises(
        ProcessLostError, match=r"OUT_OF_MEMORY.*Only its end"
    ) as caught:
        process.resume()
    assert caught.value.pid == process.pid
    assert cuda_machine.calls["restore"] == 2
    assert process.state == "checkpointed"
    hog.end()
    for call in process.resume, process.recover:
        with pytest.raises(ProcessLostError, match="is lost"):
            call()
    assert cuda_machine.calls["restore"] == 6


@pytest.mark.usefixtures("no_nvml")
@machine_with(memory_bytes=64 * MIB)
def test_suspended_says_that_it_is_lost(cuda_machine):
    target = cuda_machine.spawn({0: 48 * MIB})
    process = Process(target.pid)
    with pytest.raises(ProcessLostError), process.suspended():
        cuda_machine.spawn({0: 48 * MIB})
    assert cuda_machine.calls["restore"] == 2


# A process that calls the driver as each line says.
CALLS = """
import ctypes, sys
from cuckpt import driver
cuda = ctypes.CDLL(driver.library_path())
address, size, by = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
memory, handle = address(), Handle()
driver.init()
cuda.cuCtxSetCurrent(ctypes.c_void_p(driver.device_primary_ctx_retain(0)))
for line in sys.stdin:
    print(eval(line), flush=True)
"""


def test_process_is_lost_that_has_imported_memory(cuda_machine):
    with Program("-c", CALLS) as exporter, Program("-c", CALLS) as importer:
        assert exporter.ask("cuda.cuMemAlloc_v2(by(memory), size(4 << 20))") == "0"
        assert exporter.ask("cuda.cuIpcGetMemHandle(by(handle), memory)") == "0"
        text = exporter.ask("bytes(handle.bytes).hex()")
        handle = f"Handle.from_buffer_copy(bytes.fromhex('{text}'))"
        call = f"cuda.cuIpcOpenMemHandle_v2(by(memory), {handle}, 1)"
        assert importer.ask(call) == "0"
        process = Process(importer.pid)
        process.suspend()
        with pytest.raises(ProcessLostError, match="INVALID_VALUE") as caught:
            process.resume()
        assert isinstance(caught.value.__cause__, driver.InvalidValueError)
        assert cuda_machine.calls["restore"] == 2


# Without the extras


@pytest.mark.usefixtures("no_nvml")
def test_process_does_without_nvml(cuda_machine, target, process):
    with pytest.raises(MissingExtraError, match=r"pip install 'cuckpt\[jobs\]'"):
        process.used_memory()
    outcome = process.suspend()
    assert outcome.used_bytes is None
    assert [note.split(": ")[:2] for note in outcome.notes] == [
        ["not checked", "used memory"],
        ["not checked", "that GPU memory is free"],
    ]
    with pytest.raises(MissingExtraError):
        process.resume({str(cuda_machine.gpus[0]): 0})
    assert process.state == "checkpointed"
    process.resume()
    target.check()


def test_process_does_with_a_broken_nvidia_ml_py(process, monkeypatch, tmp_path):
    (tmp_path / "pynvml.py").write_text("import is_not_there")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="'is_not_there'") as caught:
        process.used_memory()
    assert not isinstance(caught.value, MissingExtraError)
    assert "No module named 'is_not_there'" in process.suspend().notes[0]
    process.resume()


def test_process_does_with_a_broken_nvml(target, process, monkeypatch):
    def fail():
        raise OSError("NVML cannot be used: no driver")

    monkeypatch.setattr(nvml, "gpus", fail)
    assert "not checked: used memory: NVML cannot" in process.suspend().notes[0]
    process.resume()
    target.check()


def test_suspend_notes_what_is_left(process, monkeypatch):
    monkeypatch.setattr(nvml, "used_memory", lambda pid: {UUID: 5 * MIB})
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        proc, "open_files", lambda pid, prefix: ["/dev/nvidia0", "/dev/nvidia0"]
    )
    assert process.suspend().notes == [
        "it still has /dev/nvidia0 open",
        "it still uses 5 MiB of GPU memory",
    ]


# Those who cannot answer


def test_stopped_process_is_refused_at_once(cuda_machine, target, process):
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    calls = cuda_machine.calls
    start = time.monotonic()
    for subject in process, Process(target.pid):
        for name, ask in ASK.items():
            with pytest.raises(ProcessStoppedError, match="SIGSTOP"):
                pytest.fail(f"{name} returned {ask(subject)}")
    assert time.monotonic() - start < 1
    assert cuda_machine.calls == calls
    target.process.send_signal(signal.SIGCONT)
    process.suspend()
    process.resume()
    target.check()


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="no freezer to be used")
def test_frozen_process_is_refused_at_once(cuda_machine, target, process):
    group = FREEZER / f"cuckpt-test-{os.getpid()}"
    group.mkdir()
    state = group / "freezer.state"
    try:
        (group / "cgroup.procs").write_text(str(target.pid))
        state.write_text("FROZEN")
        calls = cuda_machine.calls
        for name, ask in ASK.items():
            with pytest.raises(ProcessStoppedError, match="frozen by its cgroup"):
                pytest.fail(f"{name} returned {ask(process)}")
        assert cuda_machine.calls == calls
        state.write_text("THAWED")
        process.suspend()
        process.resume()
        target.check()
    finally:
        state.write_text("THAWED")
        target.end()
        group.rmdir()


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        ("0::/box", "/sys/fs/cgroup/box/cgroup.events", "populated 1\nfrozen 1\n"),
        ("0::/a:b", "/sys/fs/cgroup/unified/a:b/cgroup.events", "frozen 1\n"),
        ("6:freezer:/box", "/sys/fs/cgroup/freezer/box/freezer.state", "FROZEN\n"),
        (
            "6:cpu,freezer:/box",
            "/sys/fs/cgroup/cpu,freezer/box/freezer.state",
            "FREEZING\n",
        ),
    ],
)
def test_frozen_process_is_known_by_its_cgroup(
    process, monkeypatch, cgroup, file, content
):
    files = {f"/proc/{process.pid}/cgroup": f"1:cpuset:/box\n{cgroup}\n"}
    monkeypatch.setattr(
        proc, "_lines", lambda path: files.get(path, "").splitlines(keepends=True)
    )
    assert process.state == "running"
    files[file] = content
    with pytest.raises(ProcessStoppedError, match="frozen"):
        process.suspend()


PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x40000000


def ptrace(request, tid):
    libc = ctypes.CDLL(None, use_errno=True)
    null = ctypes.c_void_p()
    if libc.ptrace(ctypes.c_long(request), ctypes.c_long(tid), null, null) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of {tid}")


@contextlib.contextmanager
def held_by_a_debugger(tids):
    for tid in tids:
        ptrace(PTRACE_SEIZE, tid)
        ptrace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WALL)
    try:
        yield
    finally:
        for tid in tids:
            ptrace(PTRACE_DETACH, tid)


@pytest.mark.parametrize("known", [True, False])
def test_process_under_a_debugger_gets_on(target, process, known):
    process.lock()
    thread = driver.checkpoint_process_get_restore_thread_id(target.pid)
    tids = [tid for tid in proc.threads(target.pid) if tid != thread]
    assert target.pid in tids
    if not known:
        process = Process(target.pid)
    with held_by_a_debugger(tids):
        assert process.suspend().after == "checkpointed"
        process.restore()
        assert process.state == "locked"
    process.unlock()
    target.check()


def test_process_is_refused_when_a_debugger_holds_its_restore_thread(process):
    thread = process.restore_thread_id
    with (
        held_by_a_debugger([thread]),
        pytest.raises(ProcessStoppedError, match="debugger"),
    ):
        process.suspend()
    assert process.state == "running"


# Who watches


def test_watcher_is_told_of_each_phase(target):
    events = []
    process = Process(target.pid, on_event=events.append)
    process.suspend()
    process.resume()
    phases = ["lock", "checkpoint", "restore", "unlock"]
    assert [(event.phase, event.moment) for event in events] == [
        (phase, moment) for phase in phases for moment in ("start", "end")
    ]
    assert {event.pid for event in events} == {target.pid}
    assert all(event.bytes >= MIB for event in events)
    assert all(event.error is None for event in events)


@machine_with(faults=[Fault("checkpoint", result=801)])
def test_watcher_is_told_of_a_failure_and_the_way_back(target):
    events = []
    with pytest.raises(driver.NotSupportedError):
        Process(target.pid, on_event=events.append).suspend()
    ends = [event for event in events if event.moment == "end"]
    assert [event.phase for event in ends] == ["lock", "checkpoint", "unlock"]
    assert ends[1].error.startswith("ERROR_NOT_SUPPORTED (801)")


@pytest.mark.parametrize("moment", ["start", "end"])
def test_watcher_that_raises_changes_nothing(target, moment):
    def watch(event):
        if event.moment == moment:
            raise OSError("disk full")

    process = Process(target.pid, on_event=watch)
    assert process.suspend().notes == ["on_event raised OSError('disk full')"]
    assert process.resume().after == "running"
    target.check()


def test_all_who_watch_are_told(target):
    first, second = [], []
    process = Process(target.pid, on_event=[first.append, second.append])
    process.suspend()
    assert first == second
    assert [event.name for event in first] == [process.name] * 4
    process.resume()


@pytest.mark.parametrize("call", [None, "checkpoint"], ids=["succeeds", "fails"])
def test_watcher_that_never_returns_is_not_waited_for(
    cuda_machine, target, monkeypatch, call
):
    monkeypatch.setattr(Teller, "_PATIENCE_S", 0.05)
    is_over = threading.Event()
    process = Process(target.pid, on_event=lambda event: is_over.wait(60))
    if call:
        cuda_machine.inject(Fault(call, result=999))
        with pytest.raises(driver.UnknownError) as caught:
            process.suspend()
        notes = caught.value.__notes__
    else:
        notes = process.suspend().notes
    assert notes[-1] == "on_event has not returned"
    is_over.set()
    process.recover()
    target.check()


# As text


def test_outcome_is_a_line_and_its_notes():
    outcome = Outcome(
        4711,
        "python",
        "running",
        "checkpointed",
        {"lock": 0.0123, "checkpoint": 1.3249},
        {"GPU-0": 4096 * MIB},
    )
    line = (
        "4711 python: running -> checkpointed, lock 0.01 s, checkpoint 1.32 s, 4096 MiB"
    )
    assert str(outcome) == line
    outcome.notes += ["short", "long " * 30]
    first, short, *long = str(outcome).splitlines()
    assert (first, short) == (line, "  - short")
    assert long[0].startswith("  - long")
    assert all(each.startswith("    long") for each in long[1:])
    assert max(map(len, long)) <= 80
    assert str(Outcome(5, "x")) == "5 x: not asked"


# Interrupted

INTERRUPTED = """
import random, signal, sys, time
from cuckpt.process import Process
verb, pid, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
process = Process(pid)
process.state
print("begins", flush=True)
if verb == "suspended":
    with process.suspended():
        pass
else:
    getattr(process, verb)()
time.sleep(60)
"""


@pytest.mark.parametrize("verb", ["suspend", "resume", "suspended"])
def test_interrupted_program_leaves_nothing_half_way(cuda_machine, verb):
    target = cuda_machine.spawn({0: MIB})
    process = Process(target.pid)
    initial, goal = {
        "suspend": ("running", "checkpointed"),
        "resume": ("checkpointed", "running"),
        "suspended": ("running", "running"),
    }[verb]
    for call in "lock", "checkpoint", "restore", "unlock":
        cuda_machine.inject(Fault(call, delay_s=0.01, count=1000))
    seen = set()
    for number in range(12):
        if process.state != initial:
            {"running": process.suspend, "checkpointed": process.resume}[
                process.state
            ]()
        with subprocess.Popen(
            [sys.executable, "-P", "-c", INTERRUPTED, verb, str(target.pid), "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as caller:
            caller.stdout.readline()
            time.sleep(number * 0.005)
            caller.send_signal(signal.SIGINT)
            _, errors = caller.communicate(timeout=30)
        assert caller.returncode == -signal.SIGINT, errors
        assert "\nKeyboardInterrupt" in errors  # and notes, of what was undone
        seen.add(process.state)
        assert seen <= {initial, goal}
    process.recover()
    target.check()


# At hundreds of moments, also those between two lines of Python.
AT_ANY_MOMENT = """
import random, signal, sys, time
from cuckpt.process import Process
process = Process(int(sys.argv[1]))
process.state
interrupted = 0

def raise_it(number, frame):
    raise KeyboardInterrupt

def suspended():
    with process.suspended():
        pass

signal.signal(signal.SIGALRM, raise_it)
for verb, before, goals in [
    (process.suspend, process.resume, {"running", "checkpointed"}),
    (process.resume, process.suspend, {"running", "checkpointed"}),
    (suspended, process.resume, {"running"}),
] * 100:
    before()
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.006))
        try:
            verb()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    assert process.state in goals, (verb, process.state)
process.resume()
print(interrupted)
"""


def test_interrupts_at_any_moment_leave_nothing_half_way(cuda_machine):
    target = cuda_machine.spawn({0: MIB})
    result = subprocess.run(
        [sys.executable, "-P", "-c", AT_ANY_MOMENT, str(target.pid)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30
    target.check()


def test_errors_can_be_pickled():
    error = ProcessError(5, "is here")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.pid) == ("process 5 is here", 5)
    missing = pickle.loads(pickle.dumps(MissingExtraError("rich", "jobs")))
    assert "pip install 'cuckpt[jobs]'" in str(missing)


def test_import_needs_no_third_party_package():
    program = """
import sys
for name in "pynvml", "rich", "psutil", "numpy", "cuda":
    sys.modules[name] = None
from cuckpt import Process, doctor
print(Process.__name__, doctor.__name__)
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["Process", "doctor"]


def test_interrupt_waits_for_the_end_and_tells_what_failed():
    ended = []

    def do(cancelled):
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled.wait(10)
        ended.append(True)
        raise ValueError("it is lost")

    with pytest.raises(KeyboardInterrupt) as caught:
        uninterrupted(do)
    assert ended == [True]
    assert caught.value.__notes__ == ["it is lost"]


def test_handlers_are_given_back_after_an_interrupt_at_the_begin(monkeypatch):
    truly, calls = signal.signal, []

    def interrupted(number, handler):
        former = truly(number, handler)
        calls.append(number)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return former

    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda cancelled: pytest.fail("it was begun"))
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


def test_many_signals_at_once_end_no_work_before_it_is_done():
    class Stop(BaseException):
        pass

    def stop(number, frame):
        raise Stop(number)

    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM]
    before = {number: signal.signal(number, stop) for number in numbers}
    masks = [signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    try:
        for _ in range(20):
            done = []

            def work(cancelled, done=done):
                for _ in range(50):
                    for number in numbers:
                        os.kill(os.getpid(), number)
                assert cancelled.wait(10)
                time.sleep(0.01)
                done.append(True)

            with pytest.raises(Stop):
                uninterrupted(work)
            assert done
            assert {signal.getsignal(number) for number in numbers} == {stop}
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert masks[0] == masks[1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_signal_without_a_handler_ends_the_program_when_its_work_is_done(name):
    program = f"""
import os, signal, sys, threading, time
from cuckpt.uninterrupted import uninterrupted
signal.signal(signal.{name}, signal.SIG_DFL)
threading.Thread(target=time.sleep, args=[60], daemon=True).start()  # may get it
def do(cancelled):
    os.kill(os.getpid(), signal.{name})
    cancelled.wait(10)
    time.sleep(0.1)
    print("done", flush=True)
uninterrupted(do)
print("not ended")
"""
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("done\n", "")
    assert result.returncode == -getattr(signal, name)


def test_what_python_does_not_tell_of_a_handler_is_kept():
    def flags():
        return _action(signal.SIGUSR1).raw[136:140]  # after handler and mask

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        signal.siginterrupt(signal.SIGUSR1, False)
        own = flags()
        signal.siginterrupt(signal.SIGUSR1, True)
        assert flags() != own
        signal.siginterrupt(signal.SIGUSR1, False)
        uninterrupted(lambda cancelled: None)
        assert flags() == own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_guard_that_somebody_keeps_does_what_the_handler_does():
    def stop(number, frame):
        raise ZeroDivisionError

    guards = []
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        uninterrupted(lambda cancelled: guards.append(signal.getsignal(signal.SIGUSR1)))
        with pytest.raises(ZeroDivisionError):
            guards[0](signal.SIGUSR1, None)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_forked_child_heeds_signals_as_before():
    program = """
import os, signal
from cuckpt.uninterrupted import uninterrupted
def do(cancelled):
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(5)
    return os.wait()[1]
print(os.waitstatus_to_exitcode(uninterrupted(do)))
"""
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == (f"{-signal.SIGTERM}\n", "")


def test_handler_that_is_replaced_meanwhile_stays_so():
    def first(number, frame):
        signal.signal(number, signal.SIG_IGN)

    before = signal.signal(signal.SIGUSR1, first)
    try:
        uninterrupted(lambda cancelled: os.kill(os.getpid(), signal.SIGUSR1))
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_uninterrupted_does_it_itself_when_there_can_be_no_thread(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert uninterrupted(lambda cancelled: threading.get_ident()) == (
        threading.get_ident()
    )
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda cancelled: 1 / 0)


def test_process_is_closed_when_its_module_is_gone(target):
    program = """
import os, sys
from cuckpt import process
kept = process.Process(int(sys.argv[1]))
process.os = None
del kept
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, str(target.pid)],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_uninterrupted_returns_and_raises_in_any_thread():
    def run():
        assert uninterrupted(lambda cancelled: None) is None
        with pytest.raises(ZeroDivisionError):
            uninterrupted(lambda cancelled: 1 / 0)
        done.append(True)

    done = []
    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True, True]


def test_process_keeps_no_descriptor(target):
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert Process(target.pid).state == "running"
    assert len(os.listdir("/proc/self/fd")) == count


def test_need_is_known_to_whoever_resumes(cuda_machine, target):
    Process(target.pid).suspend()
    gpu = cuda_machine.gpus[0]
    with Target() as hog:
        hog.ask(f"take {gpu.memory_bytes}")
        with pytest.raises(NoRoomError):
            Process(target.pid).resume()
    assert Process(target.pid).resume().notes == []
    target.check()


def test_process_cannot_be_copied(process):
    for copied in copy.copy, copy.deepcopy, pickle.dumps:
        with pytest.raises(TypeError, match="make one of its pid"):
            copied(process)


@pytest.mark.parametrize("moment", ["start", "end"])
def test_watcher_that_ends_the_program_does_not(target, moment):
    def watch(event):
        if event.moment == moment:
            raise SystemExit(3)

    process = Process(target.pid, watch)
    assert "SystemExit" in process.suspend().notes[0]
    process.resume()
    target.check()
