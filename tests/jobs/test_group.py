"""Groups of processes: who belongs to one, and that all get where one gets."""

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from cuckpt import driver, proc
from cuckpt.diagnosis import doctor
from cuckpt.events import ProgressBar, Trace
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process import Process
from cuckpt.process_errors import (
    NoMembersError,
    NoRoomError,
    ProcessError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
    ProcessStoppedError,
)
from cuckpt.simulator import Fault
from cuckpt.target import Program, Target

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")

MIB = 1 << 20
VERBS = "lock", "checkpoint", "restore", "unlock"


@pytest.fixture
def spawn(cuda_machine):
    """Start several targets."""

    def start(count, memory_bytes=64 << 10):
        return [cuda_machine.spawn({0: memory_bytes}) for _ in range(count)]

    return start


@pytest.fixture
def started():
    """Start processes that know nothing of CUDA; return their pids."""
    with contextlib.ExitStack() as stack:

        def start(*command):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            return process.pid

        yield start


def pids_of(targets):
    return [target.pid for target in targets]


def states_of(targets):
    """Tell the states without the group, in order."""
    return [
        driver.checkpoint_process_get_state(target.pid).name.lower()
        for target in targets
    ]


def check_all(targets):
    assert states_of(targets) == ["running"] * len(targets)
    for target in targets:
        target.check()


def stop(pid):
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not proc.is_stopped(pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def bring(target, state):
    """Bring one to a state, by the driver."""
    steps = {"running": [], "locked": ["lock"], "checkpointed": ["lock", "checkpoint"]}
    for step in steps[state]:
        getattr(driver, f"checkpoint_process_{step}")(target.pid)


def next_call(machine, call, **fields):
    """Return a fault of the next calls of a kind."""
    return Fault(call, at=machine.calls[call] + 1, **fields)


class Events(list):
    """Keep events, from any thread."""

    def __call__(self, event):
        self.append(event)

    def spans(self, phase):
        """Return begin and end of a phase, by pid."""
        found = {}
        for event in self:
            if event.phase == phase:
                found.setdefault(event.pid, []).append(event.time_s)
        return found


# Who belongs to it


def test_from_pids_keeps_those_with_cuda_and_says_why_not_the_others(
    spawn, started, end_of
):
    (target,) = spawn(1)
    sleeping, stopped, dead = (started("sleep", "100") for _ in range(3))
    os.kill(stopped, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
    os.kill(dead, signal.SIGKILL)
    assert end_of(dead)  # it is a zombie: nobody has reaped it
    missing = 1 << 22
    group = ProcessGroup.from_pids(
        [target.pid, sleeping, stopped, dead, missing, os.getpid(), target.pid]
    )
    assert group.pids == [target.pid]
    assert group.skipped.keys() == {sleeping, stopped, dead, missing, os.getpid()}
    assert group.skipped[sleeping] == "no CUDA state"
    assert group.skipped[stopped] == "stopped: it cannot be asked"
    assert "zombie" in group.skipped[dead]
    assert "no process" in group.skipped[missing]
    assert group.skipped[os.getpid()] == "this process itself"
    assert group.suspend().skipped == group.skipped
    assert group.resume().skipped == group.skipped
    target.check()


def test_from_pids_refuses_a_thread_and_names_its_owner(spawn):
    (target,) = spawn(1)
    thread = max(map(int, os.listdir(f"/proc/{target.pid}/task")))
    assert thread != target.pid
    with pytest.raises(ValueError, match=f"is a thread of process {target.pid}"):
        ProcessGroup.from_pids([thread])


@pytest.mark.parametrize(
    ("pid", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), ("1", TypeError)],
)
def test_from_pids_refuses_what_is_no_pid(cuda_machine, pid, error):
    with pytest.raises(error, match="pid must be"):
        ProcessGroup.from_pids([pid])


def test_suspend_raises_when_there_are_no_members(cuda_machine, started):
    sleeping = started("sleep", "100")
    group = ProcessGroup.from_pids([sleeping])
    assert group.pids == []
    assert group.states() == {}
    for suspend in group.suspend, group.suspended().__enter__:
        with pytest.raises(NoMembersError, match=f"{sleeping}: no CUDA state") as e:
            suspend()
        assert e.value.skipped == {sleeping: "no CUDA state"}
    assert group.resume().outcomes == {}
    assert group.recover().outcomes == {}


def test_from_pids_never_takes_another_process_with_the_same_pid(spawn, monkeypatch):
    first, second = spawn(2)
    group = ProcessGroup.from_pids(pids_of([first, second]))
    second.end()
    # What /proc would tell of a new one with its pid.
    glance, new = proc.glance, proc.Glance("S", os.getpid(), 1)
    monkeypatch.setattr(
        proc, "glance", lambda pid: new if pid == second.pid else glance(pid)
    )
    report = group.suspend()
    assert list(report.outcomes) == [first.pid]
    assert "has ended" in report.skipped[second.pid]
    group.resume()
    first.check()


def test_stopped_cuda_process_fails_all_before_anybody_is_asked(spawn, cuda_machine):
    first, second = targets = spawn(2)
    stop(second.pid)
    group = ProcessGroup.from_pids(pids_of(targets))
    assert group.pids == pids_of(targets)
    assert group.states() == {first.pid: "running", second.pid: "stopped"}
    with pytest.raises(GroupError) as caught:
        group.suspend()
    (error,) = caught.value.exceptions
    assert isinstance(error, ProcessStoppedError)
    assert cuda_machine.calls["lock"] == 0
    second.process.send_signal(signal.SIGCONT)
    group.suspend()
    group.resume()
    check_all(targets)


def test_one_that_is_being_checkpointed_belongs_to_it_and_is_waited_for(
    spawn, cuda_machine
):
    busy, other = spawn(2)
    cuda_machine.inject(Fault("checkpoint", delay_s=3))
    driver.checkpoint_process_lock(busy.pid)
    thread = threading.Thread(
        target=driver.checkpoint_process_checkpoint, args=[busy.pid]
    )
    thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    group = ProcessGroup.from_pids(pids_of([busy, other]))
    assert time.monotonic() - start < 2.9
    assert group.pids == pids_of([busy, other])
    group.suspend()
    thread.join()
    assert states_of([busy, other]) == ["checkpointed"] * 2
    group.recover()
    check_all([busy, other])


PARENT = """
import subprocess, sys, time
from cuckpt.target import Target
with Target({0: 1 << 16}) as target:
    sleeping = subprocess.Popen(["sleep", "100"])
    print(target.pid, sleeping.pid, flush=True)
    sys.stdin.read()
    sleeping.kill()
"""


@pytest.fixture
def tree(cuda_machine):
    """Start a process without CUDA and two children, one with; return all pids."""
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        target, sleeping = map(int, parent.stdout.readline().split())
        yield parent.pid, target, sleeping
        parent.stdin.close()
        parent.wait(20)


def test_from_tree_finds_descendants(tree):
    parent, target, sleeping = tree
    group = ProcessGroup.from_tree(parent)
    assert group.pids == [target]
    assert group.skipped == dict.fromkeys([parent, sleeping], "no CUDA state")
    with group.suspended():
        assert group.states() == {target: "checkpointed"}
    assert group.states() == {target: "running"}


def test_from_tree_refuses_what_is_not_there_or_a_thread(cuda_machine, spawn):
    with pytest.raises(ProcessGoneError):
        ProcessGroup.from_tree(1 << 22)
    with pytest.raises(ValueError, match="positive"):
        ProcessGroup.from_tree(0)
    (target,) = spawn(1)
    thread = max(map(int, os.listdir(f"/proc/{target.pid}/task")))
    with pytest.raises(ValueError, match="thread of process"):
        ProcessGroup.from_tree(thread)


def test_from_tree_keeps_its_members_when_the_root_has_ended(spawn, started, end_of):
    (target,) = spawn(1)
    group = ProcessGroup.from_tree(os.getpid())
    assert group.pids == [target.pid]
    target.end()
    assert group.states() == {target.pid: "ended"}
    with pytest.raises(NoMembersError, match="has ended") as caught:
        group.suspend()
    assert "has ended" in caught.value.skipped[target.pid]
    assert group.recover().outcomes == {}


def test_discover_finds_all_but_itself(spawn):
    targets = spawn(3)
    group = ProcessGroup.discover()
    assert set(pids_of(targets)) <= set(group.pids)
    assert os.getpid() in group.skipped


def test_discover_finds_checkpointed_ones(spawn):
    (target,) = spawn(1)
    bring(target, "checkpointed")
    group = ProcessGroup.discover()
    assert group.states()[target.pid] == "checkpointed"


def test_find_may_be_any_function_and_grow(spawn):
    first, second = targets = spawn(2)
    found = [first.pid]
    group = ProcessGroup(lambda: iter(found))
    assert group.pids == [first.pid]
    found.append(second.pid)
    group.suspend()
    assert states_of(targets) == ["checkpointed"] * 2
    group.resume()
    check_all(targets)


def test_one_that_had_no_cuda_state_is_taken_once_it_has(cuda_machine):
    from cuckpt.target import Program

    with Program("-m", "cuckpt.target") as late:
        group = ProcessGroup.from_pids([late.pid])
        assert group.skipped == {late.pid: "no CUDA state"}
        late.ask("start")
        group.suspend()
        assert group.states() == {late.pid: "checkpointed"}
        assert group.skipped == {}
        group.resume()


# What it does


def test_all_are_suspended_and_resumed(spawn):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    assert group.states() == dict.fromkeys(pids_of(targets), "running")
    report = group.suspend()
    assert group.states() == dict.fromkeys(pids_of(targets), "checkpointed")
    assert report.outcomes.keys() == set(pids_of(targets))
    for outcome in report.outcomes.values():
        assert (outcome.before, outcome.after) == ("running", "checkpointed")
        assert outcome.seconds.keys() == {"lock", "checkpoint"}
        assert sum(outcome.used_bytes.values()) > 0
        assert outcome.notes == []
    assert 0 < report.seconds < 20
    report = group.resume()
    assert {o.after for o in report.outcomes.values()} == {"running"}
    check_all(targets)


def test_all_are_locked_before_one_is_checkpointed_and_restored_before_one_runs(spawn):
    targets, events = spawn(4), Events()
    group = ProcessGroup.from_pids(pids_of(targets), on_event=events)
    group.suspend()
    group.resume()
    phases = [event.phase for event in events]
    assert Counter(phases) == dict.fromkeys(VERBS, 8)
    assert sorted(phases, key=VERBS.index) == phases


def test_verbs_do_nothing_where_nothing_is_to_be_done(spawn, cuda_machine):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.resume()
    group.recover()
    assert not any(cuda_machine.calls[verb] for verb in VERBS)
    group.suspend()
    calls = cuda_machine.calls
    group.suspend()
    assert [cuda_machine.calls[v] for v in VERBS] == [calls[v] for v in VERBS]
    group.resume()
    check_all(targets)


MIXED = "running", "locked", "checkpointed"


def test_mixed_states_all_reach_the_goal(spawn):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    for verb, goal in (("suspend", "checkpointed"), ("resume", "running")):
        for target, state in zip(targets, MIXED, strict=True):
            bring(target, state)
        getattr(group, verb)()
        assert states_of(targets) == [goal] * 3
        group.recover()
    check_all(targets)


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("suspend", "lock"),
        ("suspend", "checkpoint"),
        ("resume", "restore"),
        ("resume", "unlock"),
    ],
)
def test_mixed_states_come_back_after_a_failure(spawn, cuda_machine, verb, call):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    for target, state in zip(targets, MIXED, strict=True):
        bring(target, state)
    # Two: a restore is tried again.
    cuda_machine.inject(next_call(cuda_machine, call, result=999, count=2))
    with pytest.raises(GroupError):
        getattr(group, verb)()
    assert states_of(targets) == list(MIXED)
    group.recover()
    check_all(targets)


def test_suspended_gives_back_mixed_states(spawn):
    targets = spawn(3)
    for target, state in zip(targets, MIXED, strict=True):
        bring(target, state)
    group = ProcessGroup.from_pids(pids_of(targets))
    with group.suspended() as report:
        assert states_of(targets) == ["checkpointed"] * 3
        assert set(report.outcomes) == set(pids_of(targets))
    assert states_of(targets) == list(MIXED)
    group.recover()
    check_all(targets)


def test_suspended_gives_back_all_when_the_body_raises(spawn):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    with pytest.raises(ZeroDivisionError), group.suspended():
        raise ZeroDivisionError
    check_all(targets)


def test_suspended_gives_back_the_others_when_one_cannot_be_asked(spawn):
    first, second = targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    with pytest.raises(GroupError) as caught, group.suspended():
        stop(first.pid)
    assert [error.pid for error in caught.value.exceptions] == [first.pid]
    assert states_of([second]) == ["running"]
    first.process.send_signal(signal.SIGCONT)
    group.recover()
    check_all(targets)


def test_suspended_raises_once_when_it_cannot_begin(spawn, cuda_machine):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    cuda_machine.inject(Fault("checkpoint", result=801))
    with pytest.raises(GroupError) as caught, group.suspended():
        raise AssertionError("not reached")
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    check_all(targets)


def test_suspended_refuses_a_wrong_map_before_anything_is_done(spawn, cuda_machine):
    targets = spawn(1)
    group = ProcessGroup.from_pids(pids_of(targets))
    with pytest.raises(ValueError, match="GPU"), group.suspended(gpu_map={"x": 0}):
        raise AssertionError("not reached")
    assert cuda_machine.calls["lock"] == 0


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1", True])
def test_wrong_time_limit_is_refused_before_anything_is_done(
    spawn, cuda_machine, timeout_s
):
    called = []
    group = ProcessGroup.from_pids(pids_of(spawn(1)), before_suspend=called.append)
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        group.suspend(timeout_s)
    held = group.suspended(timeout_s)
    with pytest.raises((TypeError, ValueError), match="timeout_s"), held:
        raise AssertionError("not reached")
    assert called == []
    assert cuda_machine.calls["lock"] == 0


def test_recover_brings_all_back_from_any_state(spawn):
    targets = spawn(3)
    for target, state in zip(targets, MIXED, strict=True):
        bring(target, state)
    report = ProcessGroup.from_pids(pids_of(targets)).recover()
    assert [o.before for o in report.outcomes.values()] == list(MIXED)
    check_all(targets)


def test_recover_inits_the_driver_for_gpus_without_persistence_mode(python):
    program = """
import uuid
from cuckpt.group import ProcessGroup
from cuckpt import driver
from cuckpt.simulator import Gpu, Machine
with Machine([Gpu(uuid.uuid4().bytes, persistence_mode=False)]) as machine:
    target = machine.spawn({0: 1 << 16})
    driver.checkpoint_process_lock(target.pid)
    driver.checkpoint_process_checkpoint(target.pid)
    ProcessGroup.from_pids([target.pid]).recover()
    target.check()
"""
    none = {"CUCKPT_LIBCUDA": None, "CUCKPT_SIMULATOR": None}
    python(program, **none)


def test_recover_tells_of_lost_ones_and_brings_back_the_others(spawn, cuda_machine):
    lost, other = spawn(2)
    bring(lost, "checkpointed")
    cuda_machine.inject(Fault("restore", result=2))
    with pytest.raises(driver.OutOfMemoryError):
        driver.checkpoint_process_restore(lost.pid)
    bring(other, "checkpointed")
    group = ProcessGroup.from_pids(pids_of([lost, other]))
    with pytest.raises(GroupError) as caught:
        group.recover()
    (error,) = caught.value.exceptions
    assert isinstance(error, ProcessLostError)
    assert error.pid == lost.pid
    other.check()


# Members that come and go


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_one_that_ends_during_a_suspend_is_left_out_and_told(spawn, cuda_machine, call):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    cuda_machine.inject(Fault(call, at=2, kill="target"))
    report = group.suspend()
    (ended,) = set(pids_of(targets)) & set(report.skipped)
    assert "has ended" in report.skipped[ended]
    left = [target for target in targets if target.pid != ended]
    assert list(report.outcomes) == pids_of(left)
    assert states_of(left) == ["checkpointed"] * 2
    assert group.states()[ended] == "ended"
    assert ended in group.resume().skipped
    check_all(left)


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_one_that_ends_during_a_resume_is_left_out_and_told(spawn, cuda_machine, call):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    cuda_machine.inject(Fault(call, at=2, kill="target"))
    report = group.resume()
    (ended,) = report.skipped
    assert "has ended" in report.skipped[ended]
    check_all([target for target in targets if target.pid != ended])


def test_one_that_ends_while_suspended_is_left_out(spawn):
    first, second = targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    with group.suspended():
        first.end()
    check_all([second])


def test_one_that_becomes_another_program_is_left_out(cuda_machine, spawn):
    (other,) = spawn(1)
    program = """
import ctypes, os, sys
from cuckpt.target import __main__ as target
target.start()
print("started", flush=True)
sys.stdin.readline()
os.execlp("sleep", "sleep", "100")
"""
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        group = ProcessGroup.from_pids([process.pid, other.pid])
        assert group.pids == [process.pid, other.pid]
        process.stdin.write(b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
        assert group.states() == {process.pid: "ended", other.pid: "running"}
        report = group.suspend()
        assert list(report.outcomes) == [other.pid]
        assert process.pid in report.skipped
        group.resume()
        other.check()
        process.kill()


def test_one_that_is_found_while_the_others_are_locked_is_locked_too(
    spawn, cuda_machine
):
    targets, events = spawn(3), Events()

    def find():
        return pids_of(targets)[: 1 + cuda_machine.calls["lock"]]

    group = ProcessGroup(find, on_event=events)
    report = group.suspend()
    assert list(report.outcomes) == pids_of(targets)
    assert states_of(targets) == ["checkpointed"] * 3
    first_checkpoint = min(times[0] for times in events.spans("checkpoint").values())
    assert max(times[1] for times in events.spans("lock").values()) <= first_checkpoint
    group.resume()
    check_all(targets)


def test_process_that_is_started_during_a_suspend_is_locked_too(
    spawn, cuda_machine, monkeypatch
):
    (target,) = spawn(1)
    started, tree = [], proc.tree

    def grow(pid):
        if cuda_machine.calls["lock"] and not started:
            started.append(cuda_machine.spawn({0: 64 << 10}))
        return tree(pid)

    monkeypatch.setattr(proc, "tree", grow)
    group = ProcessGroup.from_tree(os.getpid())
    assert group.pids == [target.pid]
    group.suspend()
    targets = [target, *started]
    assert group.pids == pids_of(targets)
    assert states_of(targets) == ["checkpointed"] * 2
    group.resume()
    check_all(targets)


def test_one_that_came_late_runs_again_after_a_failure_and_after_suspended(
    spawn, cuda_machine
):
    first, _ = targets = spawn(2)
    for succeeds in False, True:
        calls = cuda_machine.calls["lock"]

        def find(calls=calls):
            is_begun = cuda_machine.calls["lock"] > calls
            return pids_of(targets) if is_begun else [first.pid]

        group = ProcessGroup(find)
        if not succeeds:
            cuda_machine.inject(next_call(cuda_machine, "checkpoint", result=801))
            with pytest.raises(GroupError):
                group.suspend()
        else:
            with group.suspended():
                assert states_of(targets) == ["checkpointed"] * 2
        check_all(targets)


# Time


def test_one_time_limit_is_for_all(spawn):
    targets = spawn(4)
    for target in targets[:2]:
        target.ask("spin 3000")
    group = ProcessGroup.from_pids(pids_of(targets))
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        group.suspend(timeout_s=0.5)
    assert 0.4 < time.monotonic() - start < 2
    assert states_of(targets) == ["running"] * 4
    assert {type(e) for e in caught.value.exceptions} == {driver.NotReadyError}
    assert {e.pid for e in caught.value.exceptions} == set(pids_of(targets[:2]))


def test_time_limit_is_also_for_those_that_come_late(spawn, cuda_machine):
    first, second = targets = spawn(2)
    second.ask("spin 3000")

    def find():
        return pids_of(targets) if cuda_machine.calls["lock"] else [first.pid]

    group = ProcessGroup(find)
    start = time.monotonic()
    with pytest.raises(GroupError):
        group.suspend(timeout_s=0.5)
    assert time.monotonic() - start < 2
    assert states_of(targets) == ["running"] * 2


def test_none_waits_for_as_long_as_it_takes(spawn):
    targets = spawn(2)
    targets[0].ask("spin 700")
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend(timeout_s=None)
    group.resume()
    check_all(targets)


# Failures


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("call", VERBS)
def test_failure_of_one_leaves_all_where_they_were(spawn, cuda_machine, call, at, when):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    verb = "suspend" if call in ("lock", "checkpoint") else "resume"
    before = "running" if verb == "suspend" else "checkpointed"
    if verb == "resume":
        group.suspend()
    # A restore that fails is tried once more, and an error after success is none.
    count = 2 if call == "restore" else 1
    cuda_machine.inject(Fault(call, result=999, at=at, count=count, when=when))
    if when == "after":
        report = getattr(group, verb)()
        (noted,) = [o for o in report.outcomes.values() if o.notes][:1]
        assert f"{call} is done, though" in noted.notes[0]
    else:
        with contextlib.suppress(GroupError):
            getattr(group, verb)()
            assert call == "restore"  # two that failed once each
            group.suspend()
        assert states_of(targets) == [before] * 3
    group.resume()
    check_all(targets)


@pytest.fixture
def failed(spawn, cuda_machine):
    """Return the error of a suspension where two of three fail, and the targets."""
    targets = spawn(3)
    cuda_machine.inject(
        Fault("checkpoint", result=801), Fault("checkpoint", result=2, at=2)
    )
    with pytest.raises(GroupError) as caught:
        ProcessGroup.from_pids([*pids_of(targets), os.getpid()]).suspend()
    return caught.value, targets


def test_error_tells_of_each(failed):
    error, targets = failed
    lines = str(error).splitlines()
    assert lines[0] == "2 of 3 processes failed"
    told = {line.split()[1] for line in lines[1:4]}
    assert told == {str(target.pid) for target in targets}
    assert all("was running, is running" in line for line in lines[1:4])
    assert ["ERROR_" in line for line in lines] == [False, True, True, False, False]
    assert f"process {os.getpid()}: this process itself" in lines[-1]


def test_error_has_the_report_and_the_exceptions(failed):
    error, targets = failed
    assert {type(e) for e in error.exceptions} == {
        driver.NotSupportedError,
        driver.OutOfMemoryError,
    }
    assert {e.pid for e in error.exceptions} < set(pids_of(targets))
    assert error.report.outcomes.keys() == set(pids_of(targets))
    assert error.report.skipped == {os.getpid(): "this process itself"}
    assert error.report.seconds > 0


def test_error_can_be_taken_apart(failed):
    error, _ = failed
    caught = []
    try:
        raise error
    except* driver.OutOfMemoryError as part:
        caught.append(part)
    except* driver.NotSupportedError as part:
        caught.append(part)
    assert [type(part) for part in caught] == [GroupError, GroupError]
    assert all(part.report is error.report for part in caught)
    match, rest = error.split(driver.OutOfMemoryError)
    assert (type(match), type(rest)) == (GroupError, GroupError)
    assert error.subgroup(ProcessError) is None
    assert error.derive(error.exceptions[:1]).report is error.report


def test_lost_one_is_named_and_the_others_are_where_they_were(spawn, cuda_machine):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    cuda_machine.inject(Fault("restore", result=2, at=2))
    with pytest.raises(GroupError) as caught:
        group.resume()
    (error,) = caught.value.exceptions
    assert isinstance(error, ProcessLostError)
    assert states_of(targets) == ["checkpointed"] * 3
    next(target for target in targets if target.pid == error.pid).end()
    group.resume()
    check_all([target for target in targets if target.pid != error.pid])


def test_failure_of_the_way_back_is_tried_again(spawn, cuda_machine):
    targets = spawn(2)
    cuda_machine.inject(
        Fault("checkpoint", result=801), Fault("unlock", result=999, count=2)
    )
    with pytest.raises(GroupError):
        ProcessGroup.from_pids(pids_of(targets)).suspend()
    check_all(targets)


def test_one_that_cannot_be_brought_back_is_named(spawn, cuda_machine):
    targets = spawn(1)
    group = ProcessGroup.from_pids(pids_of(targets))
    cuda_machine.inject(
        Fault("checkpoint", result=801), Fault("unlock", result=999, count=3)
    )
    with pytest.raises(GroupError, match=r"is locked and could not be brought back"):
        group.suspend()
    group.recover()
    check_all(targets)


def test_lost_one_is_told_from_then_on(spawn, cuda_machine):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    cuda_machine.inject(Fault("restore", result=2, at=1))
    with pytest.raises(GroupError, match="was checkpointed, is lost") as caught:
        group.resume()
    (error,) = caught.value.exceptions
    assert group.states()[error.pid] == "lost"
    assert ProcessGroup.from_pids([error.pid]).states() == {error.pid: "lost"}
    (finding,) = [f for f in doctor([error.pid]) if f.subject.startswith("process")]
    assert (finding.level, finding.what) == ("problem", "is lost")
    assert Process(error.pid).state == "checkpointed"


def test_error_lists_failures_first_and_few_that_were_skipped(spawn, started):
    targets = spawn(3)
    others = [started("sleep", "100") for _ in range(7)]
    group = ProcessGroup.from_pids([*others, *pids_of(targets)])
    stop(targets[2].pid)
    with pytest.raises(GroupError) as caught:
        group.suspend()
    lines = str(caught.value).splitlines()
    assert lines[1].startswith(f"  process {targets[2].pid} (")
    assert "): not asked; process" in lines[1]
    assert [line.split()[1] for line in lines[2:4]] == list(
        map(str, pids_of(targets[:2]))
    )
    assert sum("no CUDA state" in line for line in lines) == 5
    assert lines[-1].startswith("  and 2 more skipped")
    targets[2].process.send_signal(signal.SIGCONT)
    check_all(targets)


def test_report_has_a_line_for_each(spawn, started):
    targets, other = spawn(2), started("sleep", "100")
    group = ProcessGroup.from_pids([other, *pids_of(targets)])
    first, *lines, last = str(group.suspend()).splitlines()
    assert first.startswith("2 processes in ")
    for target, line in zip(targets, lines, strict=True):
        assert line.startswith(f"{target.pid} ")
        assert "running -> checkpointed, lock 0." in line
        assert len(line) <= 80
    assert last == f"process {other}: no CUDA state"
    group.resume()


OTHER_USER = """
import os, sys
from cuckpt import driver, hints, nvml
from cuckpt.group import GroupError, ProcessGroup
driver.has_checkpoint()
pid = int(sys.argv[1])
os.setgroups([])
os.setresuid(65534, 65534, 65534)
group = ProcessGroup.from_pids([pid])
print(group.states() == {pid: "refused"})
try:
    group.suspend()
except GroupError as error:
    print([type(each).__name__ for each in error.exceptions])
print(pid in ProcessGroup.discover().skipped)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_suspend_fails_when_one_may_not_be_asked(spawn):
    (target,) = spawn(1)
    with Program("-c", OTHER_USER, str(target.pid)) as other:
        answers = [other.answer() for _ in range(3)]
    assert answers == ["True", "['OperatingSystemError']", "True"]
    check_all([target])


# Job files


@pytest.fixture
def with_job_file(cuda_machine, tmp_path):
    environment = {**os.environ, "CUDA_CHECKPOINT_JOB_FILE": str(tmp_path / "job")}
    with Target({0: 64 << 10}, environment) as target:
        yield target


def overlap(spans):
    """Tell whether two of these times are the same at any moment."""
    times = itertools.pairwise(sorted(spans.values()))
    return any(start < end for (_, end), (start, _) in times)


@pytest.mark.parametrize("has_file", [True, False])
def test_job_file_makes_checkpoints_and_restores_one_by_one(
    spawn, cuda_machine, with_job_file, has_file
):
    targets, events = spawn(3), Events()
    if has_file:
        targets.insert(1, with_job_file)
    cuda_machine.inject(
        Fault("checkpoint", delay_s=0.1, count=9),
        Fault("restore", delay_s=0.1, count=9),
        Fault("lock", delay_s=0.1, count=9),
    )
    group = ProcessGroup.from_pids(pids_of(targets), on_event=events)
    group.suspend()
    group.resume()
    assert overlap(events.spans("lock"))
    assert overlap(events.spans("checkpoint")) is not has_file
    assert overlap(events.spans("restore")) is not has_file
    check_all(targets)


def test_job_file_makes_the_way_back_one_by_one(spawn, cuda_machine, with_job_file):
    targets, events = [*spawn(2), with_job_file], Events()
    group = ProcessGroup.from_pids(pids_of(targets), on_event=events)
    cuda_machine.inject(
        Fault("checkpoint", result=801, at=3), Fault("restore", delay_s=0.1, count=2)
    )
    with pytest.raises(GroupError):
        group.suspend()
    assert len(events.spans("restore")) == 2
    assert not overlap(events.spans("restore"))
    check_all(targets)


def test_one_that_was_stopped_on_the_way_back_is_tried_again(spawn, monkeypatch):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    checkpoint, begun = driver.checkpoint_process_checkpoint, threading.Barrier(2)

    def stop_and_fail(pid):
        if begun.wait(20) == 0:
            stop(pid)
            threading.Timer(0.02, os.kill, [pid, signal.SIGCONT]).start()
        raise driver.UnknownError(999)

    monkeypatch.setattr(driver, "checkpoint_process_checkpoint", stop_and_fail)
    with pytest.raises(GroupError):
        group.suspend()
    check_all(targets)
    monkeypatch.setattr(driver, "checkpoint_process_checkpoint", checkpoint)


def test_one_that_is_locked_is_never_left_out_as_if_it_had_no_cuda_state(
    spawn, cuda_machine, monkeypatch
):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.states()
    get_state, tells_lies = driver.checkpoint_process_get_state, []

    def say_that_there_is_none(pid):
        if pid == targets[0].pid and cuda_machine.calls["lock"] == 2 and not tells_lies:
            error = driver.NotInitializedError(3)
            error.call = "cuCheckpointProcessGetState"
            raise error
        return get_state(pid)

    monkeypatch.setattr(driver, "checkpoint_process_get_state", say_that_there_is_none)
    with pytest.raises(GroupError, match="could not be brought back") as caught:
        group.suspend()
    assert targets[0].pid not in caught.value.report.skipped
    assert isinstance(caught.value.exceptions[0], ProcessLeftError)
    tells_lies.append(False)
    group.recover()
    check_all(targets)


# Hooks


def test_hooks_are_called_around_all(spawn):
    targets, told = spawn(2), []
    group = ProcessGroup.from_pids(
        pids_of(targets),
        on_event=lambda event: told.append(event.phase),
        before_suspend=lambda group: told.append(("before", group)),
        after_resume=lambda group: told.append(("after", group)),
    )
    group.suspend()
    assert told.pop(0) == ("before", group)
    assert ("after", group) not in told
    group.resume()
    assert told[-1] == ("after", group)
    assert len(told) == 17
    del told[:]
    with group.suspended():
        assert told[0] == ("before", group)
        assert ("after", group) not in told
    assert told[-1] == ("after", group)
    assert len(told) == 18


def test_hook_that_raises_before_changes_nothing(spawn, cuda_machine):
    after = []

    def refuse(group):
        raise ZeroDivisionError

    group = ProcessGroup.from_pids(
        pids_of(spawn(1)), before_suspend=refuse, after_resume=after.append
    )
    with pytest.raises(ZeroDivisionError):
        group.suspend()
    with pytest.raises(ZeroDivisionError), group.suspended():
        raise AssertionError("not reached")
    assert cuda_machine.calls["lock"] == 0
    assert after == []


def test_hook_that_raises_after_leaves_all_running(spawn):
    targets = spawn(2)

    def fail(group):
        raise ZeroDivisionError

    group = ProcessGroup.from_pids(pids_of(targets), after_resume=fail)
    group.suspend()
    with pytest.raises(ZeroDivisionError):
        group.resume()
    check_all(targets)
    with pytest.raises(ZeroDivisionError), group.suspended():
        pass
    check_all(targets)


def test_hook_that_raises_after_a_failure_does_not_hide_it(spawn, cuda_machine):
    targets = spawn(2)

    def fail(group):
        raise ZeroDivisionError("so")

    group = ProcessGroup.from_pids(pids_of(targets), after_resume=fail)
    for suspend in group.suspend, lambda: group.suspended().__enter__():
        cuda_machine.inject(next_call(cuda_machine, "checkpoint", result=801))
        with pytest.raises(GroupError) as caught:
            suspend()
        assert caught.value.__notes__ == ["after_resume raised ZeroDivisionError('so')"]
        assert isinstance(caught.value.__context__, ZeroDivisionError)
    check_all(targets)


def test_hook_is_called_when_all_run_again_after_a_failure(spawn, cuda_machine):
    targets, called = spawn(2), []
    group = ProcessGroup.from_pids(pids_of(targets), after_resume=called.append)
    cuda_machine.inject(Fault("checkpoint", result=801))
    with pytest.raises(GroupError):
        group.suspend()
    assert called == [group]
    group.suspend()
    group.recover()
    assert called == [group, group]


# GPU maps


@pytest.mark.cuda_machine(gpus=2, memory_bytes=1 << 30)
def test_map_moves_all(spawn, cuda_machine):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    group.resume({cuda_machine.gpus[0].uuid: 1})
    check_all(targets)
    for target in targets:
        used = cuda_machine.processes()[target.pid]
        assert used.get(0, 0) == 0
        assert used[1] > 0
    first, second = (gpu.uuid for gpu in cuda_machine.gpus)
    with group.suspended(gpu_map={second: first}):
        pass
    check_all(targets)
    assert all(cuda_machine.processes()[pid].get(1, 0) == 0 for pid in group.pids)


@pytest.mark.cuda_machine(gpus=2, memory_bytes=64 * MIB)
def test_map_is_refused_before_the_driver_is_called_when_all_have_no_room(
    spawn, cuda_machine
):
    targets = spawn(3, memory_bytes=16 * MIB)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    # Two would have room.
    text = "and 2 more cannot be restored: GPU 1"
    with Target({1: 24 * MIB}), pytest.raises(NoRoomError, match=text):
        group.resume({cuda_machine.gpus[0].uuid: 1})
    assert cuda_machine.calls["restore"] == 0
    assert states_of(targets) == ["checkpointed"] * 3
    group.resume({cuda_machine.gpus[0].uuid: 1})
    check_all(targets)


@pytest.mark.cuda_machine(gpus=2, memory_bytes=64 * MIB)
def test_all_are_refused_when_the_memory_was_taken(spawn, cuda_machine):
    targets = spawn(2, memory_bytes=24 * MIB)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    with Target({0: 24 * MIB}):
        with pytest.raises(NoRoomError, match="and 48 MiB are"):
            group.resume()
        with pytest.raises(GroupError, match="and 48 MiB are") as caught:
            group.recover()
        assert [type(error) for error in caught.value.exceptions] == [NoRoomError] * 2
    assert cuda_machine.calls["restore"] == 0
    group.recover()
    check_all(targets)


def test_recover_brings_back_those_for_which_there_is_room(spawn, cuda_machine):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    first, second = (Process(target.pid) for target in targets)
    first.suspend()
    second.lock()
    with Target() as hog:
        used = sum(sum(used.values()) for used in cuda_machine.processes().values())
        hog.ask(f"take {cuda_machine.gpus[0].memory_bytes - used}")
        with pytest.raises(GroupError) as caught:
            group.recover()
        assert [error.pid for error in caught.value.exceptions] == [first.pid]
        assert states_of(targets) == ["checkpointed", "running"]
    group.recover()
    check_all(targets)


@pytest.mark.parametrize("gpu_map", [{"x": 0}, {bytes(16): 0}, 3, {0: 9}])
def test_wrong_map_changes_nothing(spawn, cuda_machine, gpu_map):
    targets = spawn(2)
    group = ProcessGroup.from_pids(pids_of(targets))
    group.suspend()
    with pytest.raises((TypeError, ValueError)):
        group.resume(gpu_map)
    assert cuda_machine.calls["restore"] == 0
    group.resume()
    check_all(targets)


# Callers that are interrupted or killed


CALLER = """
import sys
from cuckpt.group import ProcessGroup
verb, *pids = sys.argv[1:]
group = ProcessGroup.from_pids(map(int, pids))
try:
    print("begins", flush=True)
    if verb == "suspended":
        with group.suspended():
            pass
    else:
        getattr(group, verb)()
    print("done", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def call_and_signal(number, verb, targets, after_s):
    """Begin an operation in another process, and send a signal; return the output."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CALLER, verb, *map(str, pids_of(targets))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as caller:
        caller.stdout.readline()
        time.sleep(after_s)
        caller.send_signal(number)
        return caller.communicate(timeout=20)


def test_interrupt_leaves_all_in_the_first_or_the_last_state(spawn, cuda_machine):
    targets = spawn(3)
    ways = {
        "suspend": {"running", "checkpointed"},
        "resume": {"running", "checkpointed"},
        "suspended": {"running"},
    }
    seen = Counter()
    group = ProcessGroup.from_pids(pids_of(targets))
    for turn in range(36):
        verb = list(ways)[turn % 3]
        if verb == "resume":
            group.suspend()
        calls = cuda_machine.calls
        cuda_machine.inject(
            *(Fault(call, delay_s=0.005, at=calls[call] + 1, count=3) for call in VERBS)
        )
        out, _ = call_and_signal(signal.SIGINT, verb, targets, turn // 3 * 0.003)
        seen[out.strip()] += 1
        found = set(states_of(targets))
        assert len(found) == 1, (verb, found)
        assert found <= ways[verb], (verb, found, out)
        group.recover()
    check_all(targets)
    assert seen["interrupted"] > 3, seen


AT_ANY_MOMENT = """
import random, signal, sys, threading, time
from cuckpt.group import ProcessGroup
group = ProcessGroup.from_pids(map(int, sys.argv[1:]))
interrupted = 0

def suspended():
    with group.suspended():
        pass

for verb, before, goals in [
    (group.suspend, group.resume, {"running", "checkpointed"}),
    (group.resume, group.suspend, {"running", "checkpointed"}),
    (suspended, group.resume, {"running"}),
] * 40:
    before()
    timer = threading.Timer(
        random.uniform(0, 0.03), signal.raise_signal, [signal.SIGINT]
    )
    try:
        timer.start()
        verb()
        timer.join()
    except KeyboardInterrupt:
        interrupted += 1
    states = set(group.states().values())
    assert len(states) == 1 and states <= goals, (verb, states)
group.resume()
print(interrupted)
"""


def test_interrupts_at_any_moment_leave_no_one_behind(spawn):
    targets = spawn(3)
    result = subprocess.run(
        [sys.executable, "-P", "-c", AT_ANY_MOMENT, *map(str, pids_of(targets))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 20
    check_all(targets)


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_recover_brings_all_back_when_the_caller_was_killed(spawn, cuda_machine, verb):
    targets = spawn(3)
    group = ProcessGroup.from_pids(pids_of(targets))
    for turn in range(8):
        if verb == "resume":
            group.suspend()
        calls = cuda_machine.calls
        cuda_machine.inject(
            *(
                Fault(call, delay_s=0.02, at=calls[call] + turn % 3 + 1)
                for call in VERBS
            )
        )
        call_and_signal(signal.SIGKILL, verb, targets, 0.006 * turn)
        ProcessGroup.from_pids(pids_of(targets)).recover()
        check_all(targets)


# Those who watch


def test_watcher_that_raises_is_noted_and_nothing_else(spawn):
    targets = spawn(2)

    def fail(event):
        raise ZeroDivisionError("so")

    group = ProcessGroup.from_pids(pids_of(targets), on_event=fail)
    report = group.suspend()
    for outcome in report.outcomes.values():
        assert outcome.after == "checkpointed"
        assert outcome.notes == ["on_event raised ZeroDivisionError('so')"]
    group.resume()
    check_all(targets)


def test_trace_has_all_phases_of_all(spawn, tmp_path):
    targets = spawn(3)
    with Trace(tmp_path / "trace.json") as trace:
        group = ProcessGroup.from_pids(pids_of(targets), on_event=trace)
        group.suspend()
        group.resume()
    entries = json.loads((tmp_path / "trace.json").read_text())
    names = {
        e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"
    }
    assert names == {each.pid: proc.facts(each.pid).name for each in targets}
    entries = [entry for entry in entries if entry["ph"] != "M"]
    assert Counter((entry["pid"], entry["name"]) for entry in entries) == {
        (target.pid, verb): 2 for target in targets for verb in VERBS
    }
    assert all(entry["args"]["bytes"] for entry in entries)


def test_progress_bar_shows_all(spawn, capsys):
    targets = spawn(3)
    with ProgressBar() as bar:
        group = ProcessGroup.from_pids(pids_of(targets), on_event=bar)
        group.suspend()
        group.resume()
    out = capsys.readouterr().out
    for target in targets:
        assert str(target.pid) in out
    assert out.count("unlock done") >= 3


# Many


def test_fifty_are_suspended_and_resumed(spawn):
    targets = spawn(50, memory_bytes=4 << 10)
    group = ProcessGroup.from_tree(os.getpid())
    assert set(group.pids) == set(pids_of(targets))
    for _ in range(2):
        group.suspend()
        assert set(group.states().values()) == {"checkpointed"}
        group.resume()
    check_all(targets)


def test_nothing_is_left_behind(spawn, cuda_machine):
    targets = spawn(3)

    def run():
        group = ProcessGroup.from_pids(pids_of(targets))
        group.suspend()
        group.resume()
        with group.suspended():
            pass
        group.recover()
        cuda_machine.inject(next_call(cuda_machine, "checkpoint", result=801))
        with contextlib.suppress(GroupError):
            group.suspend()

    def used():
        gc.collect()  # errors and their frames hold each other
        return len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    run()
    before = used()
    for _ in range(30):
        run()
    assert used() == before
    check_all(targets)
