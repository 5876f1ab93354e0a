"""Who may be asked, who waits for whom, and what a death leaves behind."""

import os
import signal
import subprocess
import threading
import time

import pytest

from cuckpt import driver
from cuckpt.structs import CheckpointLockArgs
from cuckpt.target import Target

State = driver.ProcessState
GIB = 1 << 30

get_state = driver.checkpoint_process_get_state
get_tid = driver.checkpoint_process_get_restore_thread_id
lock = driver.checkpoint_process_lock
checkpoint = driver.checkpoint_process_checkpoint
restore = driver.checkpoint_process_restore
unlock = driver.checkpoint_process_unlock

# Calls a function of the driver and prints what it comes to.
CALLER = """
import sys
from cuckpt import driver
{init}
name, pid = sys.argv[1], int(sys.argv[2])
try:
    result = getattr(driver, f"checkpoint_process_{{name}}")(pid or {self})
    print(result if result is None else int(result), flush=True)
except driver.DriverError as error:
    print("error", int(error.status), flush=True)
"""
WITHOUT_INIT = CALLER.format(init="", self="__import__('os').getpid()")
WITH_INIT = CALLER.format(init="driver.init()", self="__import__('os').getpid()")


@pytest.mark.parametrize("call", [get_state, get_tid, lock])
def test_who_cannot_be_asked_about(call):
    for pid in -1, 0, 2**22 + 1:
        with pytest.raises(driver.OperatingSystemError):
            call(pid)
    with pytest.raises(driver.NotInitializedError, match="no CUDA state"):
        call(1)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        with pytest.raises(driver.NotInitializedError, match="no CUDA state"):
            call(sleeper.pid)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(driver.NotInitializedError, match="zombie"):
            call(sleeper.pid)
    with pytest.raises(driver.OperatingSystemError, match="there is no process"):
        call(sleeper.pid)


def test_own_process_before_and_after_init(spawn):
    assert spawn("-c", WITHOUT_INIT, "get_state", "0").answer() == "error 3"
    assert spawn("-c", WITH_INIT, "get_state", "0").answer() == "0"


def test_own_process_can_be_suspended():
    driver.init()
    pid = os.getpid()
    for call, state in (
        (lock, State.LOCKED),
        (checkpoint, State.CHECKPOINTED),
        (restore, State.LOCKED),
        (unlock, State.RUNNING),
    ):
        call(pid)
        assert get_state(pid) is state


def test_process_without_a_context_can_be_suspended(spawn):
    program = "from cuckpt import driver; driver.init(); print(1, flush=True); input()"
    bare = spawn("-c", program)
    assert bare.answer() == "1"
    for call in lock, checkpoint, restore, unlock:
        call(bare.pid)
    assert get_state(bare.pid) is State.RUNNING


def test_forked_child_is_no_cuda_process(spawn):
    program = """
import os, time
from cuckpt import driver
driver.init()
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
input()
"""
    parent = spawn("-W", "ignore", "-c", program)
    child = int(parent.answer())
    try:
        with pytest.raises(driver.NotInitializedError):
            get_state(child)
        with pytest.raises(driver.NotInitializedError):
            lock(child)
        assert get_state(parent.pid) is State.RUNNING
    finally:
        os.kill(child, signal.SIGKILL)


def test_thread_id_acts_on_its_process(target):
    tid = get_tid(target.pid)
    lock(tid)
    assert get_state(target.pid) is get_state(tid) is State.LOCKED
    unlock(target.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_user_may_not_ask(spawn, target):
    # The libraries are loaded before, from where only root may read.
    program = """
import os
from cuckpt import driver, errors
driver.has_checkpoint()
os.setgroups([])
os.setresuid(65534, 65534, 65534)
"""
    for call in "get_state", "lock":
        other = spawn("-c", program + WITHOUT_INIT, call, str(target.pid))
        assert other.answer() == "error 304"
    assert get_state(target.pid) is State.RUNNING


def test_restore_needs_no_init_in_persistence_mode(spawn, target):
    lock(target.pid)
    checkpoint(target.pid)
    pid = str(target.pid)
    assert spawn("-c", WITHOUT_INIT, "restore", pid).answer() == "None"
    assert spawn("-c", WITHOUT_INIT, "unlock", pid).answer() == "None"


# Waiting


def in_thread(call, *arguments):
    """Start a call; return its thread and what it comes to, with the seconds."""
    outcome = []

    def run():
        start = time.monotonic()
        try:
            result = call(*arguments)
        except driver.DriverError as error:
            result = int(error.status)
        outcome.append((result, time.monotonic() - start))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_two_locks_one_wins_and_others_wait(target):
    assert target.ask("spin 1500") == "spinning"
    first, first_outcome = in_thread(lock, target.pid)
    time.sleep(0.3)
    second, second_outcome = in_thread(lock, target.pid)
    asker, asked = in_thread(get_state, target.pid)
    for thread in first, second, asker:
        thread.join()
    assert first_outcome[0][0] is None
    assert second_outcome[0][0] == 401
    assert asked[0][0] is State.LOCKED
    assert second_outcome[0][1] > 0.8
    assert asked[0][1] > 0.8
    unlock(target.pid)


def test_two_checkpoints_one_wins_and_others_wait():
    with Target({0: GIB}) as target:
        lock(target.pid)
        callers = [in_thread(checkpoint, target.pid) for _ in range(2)]
        time.sleep(0.05)
        state = get_state(target.pid)
        for thread, _ in callers:
            thread.join()
        outcomes = [outcome[0] for _, outcome in callers]
        assert sorted(str(result) for result, _ in outcomes) == ["401", "None"]
        # Not before the winner has finished.
        assert max(seconds for _, seconds in outcomes) < 2 * min(
            seconds for _, seconds in outcomes
        )
        assert state is State.CHECKPOINTED
        restore(target.pid)
        unlock(target.pid)
        target.check()


def test_call_about_a_stopped_target_waits(target):
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    asker, asked = in_thread(get_state, target.pid)
    asker.join(1)
    assert asker.is_alive()
    target.process.send_signal(signal.SIGCONT)
    asker.join(30)
    assert asked[0][0] is State.RUNNING


# Deaths


def test_target_killed_while_a_lock_waits(target):
    assert target.ask("spin 5000") == "spinning"
    killer = threading.Timer(0.5, target.process.kill)
    killer.start()
    with pytest.raises(driver.OperatingSystemError):
        lock(target.pid)
    killer.join()


def test_target_killed_during_its_checkpoint():
    with Target({0: GIB}) as target:
        lock(target.pid)
        caller, outcome = in_thread(checkpoint, target.pid)
        time.sleep(0.1)
        target.process.kill()
        killed = time.monotonic()
        caller.join(30)
        assert outcome[0][0] == 304
        assert time.monotonic() - killed < 2


@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
def test_caller_killed_and_the_target_finishes(spawn, verb):
    with Target({0: GIB}) as target:
        lock(target.pid)
        if verb == "restore":
            checkpoint(target.pid)
        program = "print('now', flush=True)\n" + WITH_INIT
        caller = spawn("-c", program, verb, str(target.pid))
        assert caller.answer() == "now"
        time.sleep(0.3)
        caller.end()
        state = get_state(target.pid)  # waits until it has finished
        if state is State.LOCKED and verb == "checkpoint":
            checkpoint(target.pid)  # it was killed before it had asked
        elif verb == "checkpoint":
            assert state is State.CHECKPOINTED
        if get_state(target.pid) is State.CHECKPOINTED:
            restore(target.pid)
        unlock(target.pid)
        target.check()


def test_checkpointed_target_can_be_asked_to_exit(target):
    lock(target.pid)
    checkpoint(target.pid)
    target.process.terminate()
    assert target.process.wait(30) == -signal.SIGTERM
    with pytest.raises(driver.OperatingSystemError):
        get_state(target.pid)


def test_lock_with_a_limit_leaves_a_never_ending_target_running(target):
    assert target.ask(f"spin {10**9}") == "spinning"
    with pytest.raises(driver.NotReadyError):
        lock(target.pid, CheckpointLockArgs(timeout_ms=200))
    assert get_state(target.pid) is State.RUNNING


# Under a debugger, as CRIU is one


def test_target_gets_on_while_all_its_other_threads_are_stopped(tracer):
    with Target({0: 16 << 20}) as target:
        lock(target.pid)
        restore_thread = get_tid(target.pid)
        assert tracer.stop_all_but(target.pid, restore_thread) >= 1
        checkpoint(target.pid)
        assert get_state(restore_thread) is State.CHECKPOINTED
        restore(target.pid)
        assert get_state(target.pid) is State.LOCKED
        tracer.let_go()
        unlock(target.pid)
        target.check()
