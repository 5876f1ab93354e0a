"""Several who suspend and resume the same processes at the same time."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from cuckpt import driver
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process import Process
from cuckpt.process_errors import ProcessBusyError
from cuckpt.simulator import Fault
from cuckpt.turns import Turn

pytestmark = pytest.mark.thread_unsafe(reason="one machine")

MIB = 1 << 20
machine_with = pytest.mark.cuda_machine


@pytest.fixture
def targets(cuda_machine):
    return [cuda_machine.spawn({0: 64 << 10}) for _ in range(2)]


@pytest.fixture
def target(targets):
    return targets[0]


@contextlib.contextmanager
def in_a_thread(do):
    """Do something meanwhile; raise what it raises."""
    problems = []

    def run():
        try:
            do()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive()
    if problems:
        raise problems[0]


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# In one program


def test_operations_of_many_threads_wait_for_each_other(cuda_machine, targets):
    pids = [target.pid for target in targets]
    group = ProcessGroup.from_pids(pids)

    def work(seed):
        choose = random.Random(seed)
        for _ in range(20):
            subject = choose.choice([group, ProcessGroup.from_pids(pids[:1])])
            subject = choose.choice([subject, Process(choose.choice(pids))])
            getattr(subject, choose.choice(["suspend", "resume", "recover"]))()
            with subject.suspended():
                pass

    with contextlib.ExitStack() as stack:
        for seed in range(4):
            stack.enter_context(in_a_thread(lambda seed=seed: work(seed)))
    group.recover()
    for target in targets:
        target.check()
    # None was ever refused, as for want of a turn.
    assert cuda_machine.calls["lock"] == cuda_machine.calls["unlock"]


def states(targets):
    return [driver.checkpoint_process_get_state(t.pid).name.lower() for t in targets]


@machine_with(faults=[Fault("checkpoint", delay_s=1)])
def test_suspend_gives_up_when_another_thread_takes_too_long(cuda_machine, target):
    process, group = Process(target.pid), ProcessGroup.from_pids([target.pid])
    with in_a_thread(process.suspend):
        wait_for(lambda: cuda_machine.calls["checkpoint"])
        start = time.monotonic()
        with pytest.raises(ProcessBusyError, match="another thread of this program"):
            Process(target.pid).suspend(timeout_s=0.1)
        with pytest.raises(GroupError, match="another thread of this program") as e:
            group.suspend(timeout_s=0.1)
        assert isinstance(e.value.exceptions[0], ProcessBusyError)
        assert time.monotonic() - start < 0.9
    assert process.resume().after == "running"
    target.check()


@machine_with(faults=[Fault("checkpoint", delay_s=1.5)])
def test_interrupt_ends_the_wait_for_another_thread(cuda_machine, target):
    with in_a_thread(Process(target.pid).suspend):
        wait_for(lambda: cuda_machine.calls["checkpoint"])
        timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Process(target.pid).resume()
        assert time.monotonic() - start < 1.2
    assert states([target]) == ["checkpointed"]
    Process(target.pid).resume()
    target.check()


def test_turn_is_refused_when_two_wait_for_each_other():
    first, second = (1, 1), (2, 1)
    with Turn(threading.Event()) as low, Turn(threading.Event()) as high:
        low.take([first])
        high.take([second])
        with in_a_thread(lambda: low.take([second])):
            wait_for(lambda: high._waits_for(low) or low._waits_for(high))
            with pytest.raises(ProcessBusyError, match="waits for this one"):
                high.take([first])
            high.__exit__(None, None, None)


def test_turn_of_several_is_taken_in_one_order():
    done = []

    def work(keys):
        for _ in range(200):
            with Turn(threading.Event()) as turn:
                turn.take(keys)
        done.append(keys)

    keys = [(pid, None) for pid in range(4)]
    with in_a_thread(lambda: work(keys)), in_a_thread(lambda: work(keys[::-1])):
        pass
    assert len(done) == 2


def test_forked_child_waits_for_nobody(target):
    program = """
import os, sys, threading
from cuckpt.turns import Turn
with Turn(threading.Event()) as turn:
    turn.take([(1, 1)])
    child = os.fork()
    if not child:
        with Turn(threading.Event()) as turn:
            turn.take([(1, 1)])
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(program).stdout == "7\n"


# Overlapping suspensions


@pytest.mark.parametrize("of", [Process, lambda pid: ProcessGroup.from_pids([pid])])
@pytest.mark.parametrize("last", [0, 1], ids=["first_last", "first_first"])
def test_overlapping_suspensions_end_with_the_last(target, of, last):
    opened = [of(target.pid).suspended(), Process(target.pid).suspended()]
    for each in opened:
        each.__enter__()
    opened.pop(1 - last).__exit__(None, None, None)
    assert states([target]) == ["checkpointed"]
    opened.pop().__exit__(None, None, None)
    assert states([target]) == ["running"]
    target.check()


@pytest.mark.parametrize("state", ["locked", "checkpointed"])
def test_overlapping_suspensions_give_back_the_first_state(target, state):
    process = Process(target.pid)
    process.lock()
    if state == "checkpointed":
        process.checkpoint()
    with process.suspended(), process.suspended():
        pass
    assert process.state == state
    process.recover()
    target.check()


@machine_with(gpus=2)
def test_overlapping_suspensions_keep_the_map_of_any(cuda_machine, target):
    first, second = map(str, cuda_machine.gpus)
    mapped = Process(target.pid).suspended(gpu_map={first: second})
    with Process(target.pid).suspended():
        mapped.__enter__()
        mapped.__exit__(None, None, None)
    assert Process(target.pid).used_memory().keys() == {second}
    target.check()


def test_group_gives_back_those_that_nobody_else_holds(targets):
    group = ProcessGroup.from_pids([target.pid for target in targets])
    with Process(targets[1].pid).suspended():
        with group.suspended():
            assert states(targets) == ["checkpointed"] * 2
        assert states(targets) == ["running", "checkpointed"]
    assert states(targets) == ["running"] * 2


@machine_with(gpus=2)
def test_group_moves_those_that_another_suspension_had_a_map_for(targets):
    group = ProcessGroup.from_pids([target.pid for target in targets])
    mapped = Process(targets[0].pid).suspended(gpu_map={0: 1})
    with group.suspended():
        mapped.__enter__()
        mapped.__exit__(None, None, None)
    first, second = (Process(target.pid).used_memory().keys() for target in targets)
    assert first != second
    for target in targets:
        target.check()


def test_suspension_that_could_not_begin_holds_nothing(cuda_machine, target):
    process = Process(target.pid)
    with process.suspended():
        process.resume()
        cuda_machine.inject(
            Fault("checkpoint", result=801, at=cuda_machine.calls["checkpoint"] + 1)
        )
        with pytest.raises(driver.NotSupportedError), process.suspended():
            raise AssertionError("not reached")
    with process.suspended():
        pass
    assert process.state == "running"


# Another program, which calls the driver


def at_the_end_of(verb, do, monkeypatch):
    """Let somebody else do something when a verb is done, once."""
    name = f"checkpoint_process_{verb}"
    call = getattr(driver, name)

    def call_and_do(pid, *arguments):
        monkeypatch.setattr(driver, name, call)
        call(pid, *arguments)
        do(pid)

    monkeypatch.setattr(driver, name, call_and_do)


def before(verb, do, monkeypatch):
    """Let somebody else do something before a verb, once."""
    name = f"checkpoint_process_{verb}"
    call = getattr(driver, name)

    def do_and_call(pid, *arguments):
        monkeypatch.setattr(driver, name, call)
        do(pid)
        call(pid, *arguments)

    monkeypatch.setattr(driver, name, do_and_call)


SUBJECTS = {
    "process": lambda pid: Process(pid),
    "group": lambda pid: ProcessGroup.from_pids([pid]),
}


@pytest.fixture(params=SUBJECTS)
def subject(request, target):
    return SUBJECTS[request.param](target.pid)


def busy(error):
    """Return the busy one, of a group or alone."""
    return error.exceptions[0] if isinstance(error, GroupError) else error


def test_suspend_says_that_another_program_unlocked(target, subject, monkeypatch):
    at_the_end_of("lock", driver.checkpoint_process_unlock, monkeypatch)
    with pytest.raises((ProcessBusyError, GroupError)) as caught:
        subject.suspend()
    assert isinstance(busy(caught.value), ProcessBusyError)
    assert "has become running meanwhile: another program" in str(caught.value)
    assert states([target]) == ["running"]
    target.check()


def test_suspend_says_that_another_program_unlocked_before_a_call(
    target, subject, monkeypatch
):
    before("checkpoint", driver.checkpoint_process_unlock, monkeypatch)
    with pytest.raises((ProcessBusyError, GroupError)) as caught:
        subject.suspend()
    assert isinstance(busy(caught.value), ProcessBusyError)
    assert isinstance(busy(caught.value).__cause__, driver.IllegalStateError)
    assert states([target]) == ["running"]


def test_suspend_raises_when_another_program_resumes_at_its_end(
    target, subject, monkeypatch
):
    def resume(pid):
        driver.checkpoint_process_restore(pid)
        driver.checkpoint_process_unlock(pid)

    at_the_end_of("checkpoint", resume, monkeypatch)
    with pytest.raises((ProcessBusyError, GroupError)) as caught:
        subject.suspend()
    assert isinstance(busy(caught.value), ProcessBusyError)
    assert states([target]) == ["running"]
    target.check()


def test_resume_raises_when_another_program_locks_at_its_end(
    target, subject, monkeypatch
):
    subject.suspend()
    at_the_end_of("unlock", driver.checkpoint_process_lock, monkeypatch)
    with pytest.raises((ProcessBusyError, GroupError)) as caught:
        subject.resume()
    assert isinstance(busy(caught.value), ProcessBusyError)
    assert states([target]) == ["locked"]
    driver.checkpoint_process_unlock(target.pid)
    target.check()


def test_resume_leaves_what_another_program_has_checkpointed(
    target, subject, monkeypatch
):
    subject.suspend()
    before("unlock", driver.checkpoint_process_checkpoint, monkeypatch)
    with pytest.raises((ProcessBusyError, GroupError)):
        subject.resume()
    assert states([target]) == ["checkpointed"]
    subject.resume()
    target.check()


@pytest.mark.parametrize("verb", ["lock", "checkpoint"])
def test_suspend_succeeds_when_another_program_was_faster(
    target, subject, monkeypatch, verb
):
    before(verb, getattr(driver, f"checkpoint_process_{verb}"), monkeypatch)
    subject.suspend()
    assert states([target]) == ["checkpointed"]
    subject.resume()
    target.check()


def test_suspend_that_fails_does_not_undo_what_another_program_did(
    cuda_machine, target, subject, monkeypatch
):
    before("lock", driver.checkpoint_process_lock, monkeypatch)
    cuda_machine.inject(Fault("checkpoint", result=801))
    with pytest.raises((driver.NotSupportedError, GroupError)) as caught:
        subject.suspend()
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "it is left as it is, since another program moves it" in told
    assert states([target]) == ["locked"]
    driver.checkpoint_process_unlock(target.pid)
    target.check()


TWO = """
import contextlib, random, sys, time
from cuckpt import driver
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process_errors import ProcessError
group = ProcessGroup.from_pids(map(int, sys.argv[2:]))
choose = random.Random(sys.argv[1])
for _ in range(60):
    with contextlib.suppress(GroupError, driver.DriverError, ProcessError):
        getattr(group, choose.choice(["suspend", "resume"]))()
"""


def test_two_programs_end_and_leave_what_can_be_recovered(targets):
    pids = [str(target.pid) for target in targets]
    callers = [
        subprocess.Popen([sys.executable, "-P", "-c", TWO, str(seed), *pids])
        for seed in range(2)
    ]
    assert [caller.wait(60) for caller in callers] == [0, 0]
    ProcessGroup.from_pids(map(int, pids)).recover()
    for target in targets:
        target.check()


# The end of a program


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


AT_EXIT = """
import sys, threading, time
from cuckpt import driver
from cuckpt.group import ProcessGroup
from cuckpt.process import Process
pid, kind, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
told = lambda group: print("after_resume", flush=True)
if kind == "Process":
    subject = Process(pid)
else:
    subject = ProcessGroup.from_pids([pid], after_resume=told)
kept = subject.suspended()

def state():
    return driver.checkpoint_process_get_state(pid).name.lower()

def open_it():
    kept.__enter__()
    print(state(), flush=True)

def hold():
    with subject.suspended():
        time.sleep(0.5)
        print(state(), flush=True)

if how == "thread":
    threading.Thread(target=hold).start()
elif how == "daemon":
    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join()
else:
    open_it()
    if how == "exit":
        sys.exit(3)
    if how == "error":
        raise ZeroDivisionError
    if how == "inside":
        with subject.suspended():
            sys.exit(3)
"""


@pytest.mark.parametrize("kind", ["Process", "ProcessGroup"])
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("end", 0),
        ("exit", 3),
        ("error", 1),
        ("inside", 3),
        ("thread", 0),
        ("daemon", 0),
    ],
)
def test_open_suspension_is_ended_when_the_program_ends(target, kind, how, status):
    result = run(AT_EXIT, target.pid, kind, how)
    assert result.returncode == status, result.stderr
    expected = ["checkpointed"] + ["after_resume"] * (kind == "ProcessGroup")
    assert result.stdout.split() == expected
    assert ("ZeroDivisionError" in result.stderr) is (how == "error")
    assert result.stderr.count("Traceback") == (how == "error")
    assert states([target]) == ["running"]
    target.check()


FORKED = """
import os, sys
from cuckpt.process import Process
with Process(int(sys.argv[1])).suspended():
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(Process(int(sys.argv[1])).state)
    else:
        sys.exit(7)
"""


def test_forked_child_gives_nothing_back(target):
    result = run(FORKED, target.pid)
    assert result.stdout.split() == ["7", "checkpointed"], result.stderr
    assert states([target]) == ["running"]


def test_failure_at_the_end_of_the_program_is_told(target):
    program = """
import os, signal, sys
from cuckpt.process import Process
kept = Process(int(sys.argv[1])).suspended()
kept.__enter__()
os.kill(int(sys.argv[1]), signal.SIGKILL)
"""
    result = run(program, target.pid)
    assert "processes may be left suspended" in result.stderr
    assert f"process {target.pid} has ended" in result.stderr


# Those that are stopped in the middle


@pytest.fixture
def stopped_meanwhile(cuda_machine, target, monkeypatch):
    """Stop the target when its checkpoint has begun, for more than a second."""
    call = driver.checkpoint_process_checkpoint

    def stop_and_call(pid, *arguments):
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        timer = threading.Timer(1.2, os.kill, [pid, signal.SIGCONT])
        timer.start()
        call(pid, *arguments)

    monkeypatch.setattr(driver, "checkpoint_process_checkpoint", stop_and_call)


@pytest.mark.usefixtures("stopped_meanwhile")
@pytest.mark.parametrize("kind", SUBJECTS)
def test_wait_for_a_stopped_process_is_told(target, kind):
    events = []
    subject = Process(target.pid, events.append)
    if kind == "group":
        subject = ProcessGroup.from_pids([target.pid], on_event=events.append)
    report = subject.suspend()
    outcome = report if kind == "process" else report.outcomes[target.pid]
    (event,) = [event for event in events if event.moment == "waiting"]
    assert (event.pid, event.phase) == (target.pid, "checkpoint")
    assert event.error.startswith(f"process {target.pid} is stopped (SIGSTOP")
    (note,) = outcome.notes
    assert note.startswith("checkpoint had to wait: the process is stopped (SIGSTOP")
    subject.resume()
    target.check()


@pytest.mark.usefixtures("stopped_meanwhile")
def test_interrupt_tells_that_it_waited_for_a_stopped_process(target):
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        Process(target.pid).suspend()
    as_before, waited = caught.value.__notes__
    assert as_before == f"process {target.pid} is running, as before"
    assert waited.startswith("checkpoint had to wait: the process is stopped")
    assert states([target]) == ["running"]
    target.check()
