"""Faults of a simulated machine: errors, delays and deaths at chosen calls."""

import math
import os
import subprocess
import sys
import textwrap

import pytest

from cuckpt.errors import Result
from cuckpt.simulator import Fault, Machine

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

PRELUDE = """
import math, os, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from cuckpt import driver
from cuckpt.simulator import Fault, Machine
from cuckpt.target import Target

def end(*targets):
    for target in targets:
        target.end()

def state(target):
    return driver.checkpoint_process_get_state(target.pid).name

def outcome(call, target):
    start = time.monotonic()
    try:
        getattr(driver, f"checkpoint_process_{call}")(target.pid)
        result = "done"
    except driver.DriverError as error:
        result = type(error).__name__
    return result, time.monotonic() - start
"""


@pytest.fixture
def program(python):
    """Run a program that may use what stands in PRELUDE; return what it printed."""

    def run(text, **options):
        code = PRELUDE + textwrap.dedent(text)
        return python(code, CUCKPT_LIBCUDA=None, **options)

    return run


def test_error_before_leaves_the_state_and_happens_as_often_as_said(program):
    text = """
    with Machine(faults=[Fault("checkpoint", result=2, at=2, count=2)]):
        one, two = Target(), Target()
        print(outcome("lock", one)[0], outcome("lock", two)[0])
        print(outcome("checkpoint", one)[0])
        print(outcome("checkpoint", two)[0], state(two))
        print(outcome("checkpoint", two)[0], state(two))
        print(outcome("checkpoint", two)[0], state(two))
        end(one, two)
    """
    assert program(text).stdout.splitlines() == [
        "done done",
        "done",
        "OutOfMemoryError LOCKED",
        "OutOfMemoryError LOCKED",
        "done CHECKPOINTED",
    ]


def test_error_after_comes_although_the_thing_was_done(program):
    text = """
    with Machine(faults=[Fault("restore", result=999, when="after")]):
        target = Target()
        for call in "lock", "checkpoint", "restore":
            print(outcome(call, target)[0], state(target))
        end(target)
    """
    assert program(text).stdout.splitlines() == [
        "done LOCKED",
        "done CHECKPOINTED",
        "UnknownError LOCKED",
    ]


def test_eight_checkpoints_with_a_delay_run_at_once(program):
    text = """
    with Machine(faults=[Fault("checkpoint", delay_s=0.5, count=8)]):
        targets = [Target() for _ in range(8)]
        for target in targets:
            outcome("lock", target)
        begin = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda t: outcome("checkpoint", t), targets))
        took = time.monotonic() - begin
        print(all(result == "done" and alone >= 0.5 for result, alone in results))
        print("at once" if took < 1.5 else f"one by one: {took}")
        print({state(target) for target in targets})
        end(*targets)
    """
    assert program(text).stdout.splitlines() == ["True", "at once", "{'CHECKPOINTED'}"]


def test_others_wait_for_a_delayed_checkpoint(program):
    text = """
    with Machine(faults=[Fault("checkpoint", delay_s=0.5)]):
        target = Target()
        outcome("lock", target)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(outcome, "checkpoint", target)
            time.sleep(0.1)
            begin = time.monotonic()
            print(state(target), time.monotonic() - begin > 0.3)
        end(target)
    """
    assert program(text).stdout == "CHECKPOINTED True\n"


def test_hang_lasts_until_the_target_is_killed(program):
    text = """
    with Machine(faults=[Fault("checkpoint", delay_s=math.inf)]):
        target = Target()
        outcome("lock", target)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(outcome, "checkpoint", target)
            time.sleep(0.5)
            print(call.done())
            end(target)
            print(call.result()[0])
    """
    assert program(text).stdout == "False\nOperatingSystemError\n"


def test_process_whose_own_call_hangs_can_leave_the_machine(program):
    text = """
    with Machine(faults=[Fault("lock", delay_s=math.inf)]):
        driver.init()
        call = [driver.checkpoint_process_lock, os.getpid()]
        thread = threading.Thread(target=lambda: call[0](call[1]), daemon=True)
        thread.start()
        time.sleep(0.2)
    print("left")
    """
    assert program(text).stdout == "left\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_target_is_killed(program, when):
    text = f"""
    with Machine(faults=[Fault("checkpoint", kill="target", when={when!r})]):
        target = Target()
        outcome("lock", target)
        print(outcome("checkpoint", target)[0])
        try:
            state(target)
        except driver.NotInitializedError as error:
            print("is a zombie" in str(error))
        print(target.process.wait() == -signal.SIGKILL)
        end(target)
    """
    assert program(text).stdout == "OperatingSystemError\nTrue\nTrue\n"


def test_process_that_leaves_the_machine_meanwhile_answers_and_kills_nobody(program):
    text = """
    import types
    machine = Machine(faults=[Fault("lock", delay_s=60, kill="caller")])
    machine.__enter__()
    driver.init()
    own = types.SimpleNamespace(pid=os.getpid())
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(outcome, "lock", own) for _ in range(3)]
        time.sleep(0.3)
        machine.__exit__(None, None, None)
        print(*{call.result()[0] for call in calls})
    """
    assert program(text).stdout == "OperatingSystemError\n"


def test_restore_that_runs_out_of_memory_loses_the_process(program):
    text = """
    with Machine(faults=[Fault("restore", result=driver.Result.ERROR_OUT_OF_MEMORY)]):
        target = Target()
        for call in "lock", "checkpoint", "restore", "restore", "unlock":
            print(outcome(call, target)[0])
        end(target)
    """
    assert program(text).stdout.split() == [
        "done",
        "done",
        "OutOfMemoryError",
        "OperatingSystemError",
        "IllegalStateError",
    ]


def test_delays_add_up_and_the_last_result_counts(program):
    text = """
    first = Fault("lock", result=2, delay_s=0.2)
    with Machine(faults=[first, Fault("lock", result=3, delay_s=0.2)]):
        target = Target()
        result, took = outcome("lock", target)
        print(result, took >= 0.4)
        end(target)
    """
    assert program(text).stdout == "NotInitializedError True\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_caller_is_killed_and_the_target_carries_on(program, when):
    text = f"""
    with Machine(faults=[Fault("checkpoint", kill="caller", when={when!r})]):
        target = Target()
        outcome("lock", target)
        call = ("import sys; from cuckpt import driver; "
                "driver.checkpoint_process_checkpoint(int(sys.argv[1]))")
        command = [sys.executable, "-P", "-c", call, str(target.pid)]
        print(subprocess.run(command).returncode == -signal.SIGKILL, state(target))
        end(target)
    """
    assert program(text).stdout == "True CHECKPOINTED\n"


def test_completion_can_fail_and_be_repeated(program):
    text = """
    with Machine(faults=[Fault("complete", result=900)]):
        target = Target()
        driver.init()
        driver.device_primary_ctx_retain(0)
        args = driver.CheckpointCheckpointArgs(custom_storage=True)
        outcome("lock", target)
        driver.checkpoint_process_checkpoint(target.pid, args)
        for _ in range(2):
            try:
                driver.checkpoint_operation_complete(args)
                print("done", state(target))
            except driver.StreamCaptureUnsupportedError:
                print("failed", state(target))
        end(target)
    """
    assert program(text).stdout == "failed CHECKPOINTING\ndone CHECKPOINTED\n"


def test_completion_ends_its_own_operation_only(program):
    text = """
    with Machine(faults=[Fault("complete", result=900, when="after")]):
        target = Target()
        driver.init()
        driver.device_primary_ctx_retain(0)
        save = driver.CheckpointCheckpointArgs(custom_storage=True)
        load = driver.CheckpointRestoreArgs(custom_storage=True)
        outcome("lock", target)
        driver.checkpoint_process_checkpoint(target.pid, save)
        for args in save, None, save, load:
            try:
                if args is None:
                    driver.checkpoint_process_restore(target.pid, load)
                else:
                    driver.checkpoint_operation_complete(args)
                print("done", state(target))
            except driver.DriverError as error:
                print(type(error).__name__, state(target))
        end(target)
    """
    assert program(text).stdout.splitlines() == [
        "StreamCaptureUnsupportedError CHECKPOINTED",
        "done RESTORING",
        "IllegalStateError RESTORING",
        "done LOCKED",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"call": "cuCheckpointProcessLock"}, "call must be one of"),
        ({"when": "later"}, "when must be one of"),
        ({"kill": "me"}, "kill must be one of"),
        ({"at": 0}, "at must be 1"),
        ({"count": 0}, "count must be 1"),
        ({"result": -1}, "result must be 0"),
        ({"delay_s": -1}, "delay_s must be 0"),
        ({"delay_s": 10**400}, "delay_s must be 0"),
        ({"result": None}, "needs a result, delay_s or kill"),
        ({"delay_s": math.nan}, "delay_s must be 0"),
    ],
)
def test_wrong_fault_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Fault(**{"call": "lock", "result": 1} | wrong)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("restore=OUT_OF_MEMORY@2", Fault("restore", 2, at=2)),
        ("lock=ERROR_NOT_READY", Fault("lock", 600)),
        ("lock=12345,count=3", Fault("lock", 12345, count=3)),
        (
            "checkpoint,delay=0.5,when=after",
            Fault("checkpoint", delay_s=0.5, when="after"),
        ),
        ("unlock@7,delay=inf", Fault("unlock", at=7, delay_s=math.inf)),
        ("complete,kill=caller", Fault("complete", kill="caller")),
    ],
)
def test_text_is_a_fault(text, fault):
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no fault"),
        ("restore=", "is no fault"),
        ("restore@", "is no fault"),
        ("restore=2@-1", "is no fault"),
        ("restore=2,at=2", "is no fault"),
        ("restore=2,count=1,count=2", "is no fault"),
        ("restore=2,count=many", "'many' is not a number"),
        ("restore=2,delay=", "is no fault"),
        ("restore=NO_SUCH_THING", "there is no result NO_SUCH_THING"),
        ("restore", "needs a result"),
        ("start=2", "call must be one of"),
        ("restore=2@0", "at must be 1"),
        ("restore=2,when=later", "when must be one of"),
    ],
)
def test_text_that_is_no_fault_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Fault.parse(text)


LOCK = """
import os
from cuckpt import driver
driver.init()
for _ in range(3):
    try:
        driver.checkpoint_process_lock(os.getpid())
        driver.checkpoint_process_unlock(os.getpid())
        print("done")
    except driver.DriverError as error:
        print(error.status)
"""


def simulate(*options, **environment):
    command = [sys.executable, "-P", "-m", "cuckpt", "simulate", *options, "--"]
    return subprocess.run(
        [*command, sys.executable, "-P", "-c", LOCK],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command_line_takes_faults():
    result = simulate("--fault", "lock=NOT_READY@2", "--fault", "lock=801@3")
    assert result.stdout.split() == ["done", "600", "801"]
    refused = simulate("--fault", "lock=NOTHING")
    assert refused.returncode == 2
    assert "there is no result NOTHING" in refused.stderr


def test_environment_has_faults():
    faults = {"CUCKPT_FAULTS": "lock=NOT_READY@2 lock=801@3"}
    assert simulate(**faults).stdout.split() == ["done", "600", "801"]
    result = simulate("--fault", "lock=999", **faults)
    assert result.stdout.split() == ["999", "done", "done"]
    assert simulate(CUCKPT_FAULTS="nonsense=1").returncode == 2


def test_wrong_types_are_refused():
    for wrong in 1.5, True:
        with pytest.raises(TypeError, match="at must be an int"):
            Fault("lock", at=wrong)
    with pytest.raises(TypeError, match="delay_s must be a number"):
        Fault("lock", delay_s="1")
    for wrong in ["lock"], Fault("lock", 1):
        with pytest.raises(TypeError, match="Fault objects"):
            Machine(faults=wrong)
    with pytest.raises(ValueError, match="at most 64"):
        Machine(faults=[Fault("lock", 1)] * 65)
    assert Machine(faults=[Fault("lock", Result.ERROR_UNKNOWN)]).faults[0].at == 1
