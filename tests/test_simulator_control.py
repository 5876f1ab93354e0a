"""What `Machine` starts, tells and lets go wrong while it runs."""

import os
from pathlib import Path

import pytest

from cuckpt.simulator import (
    Fault,
    Machine,
    SimulatorError,
    machine as machine_module,
)
from cuckpt.target import Target, TargetError

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

MIB = 1 << 20


def test_machine_ends_what_it_spawned():
    machine = Machine(gpus=2)
    for _ in range(2):
        with machine.started():
            target = machine.spawn({1: MIB})
            other = machine.spawn()
            target.check()
            other.end()
            assert set(machine.processes()) == {target.pid}
        assert not Path(f"/proc/{target.pid}").exists()


def test_machine_of_this_process_spawns(machine_program):
    printed = machine_program(
        """
        with Machine() as machine:
            target = machine.spawn({0: 3 * MIB})
            print(os.getpid() in machine.processes())
            driver.init()
            found = machine.processes()
            print(found == {target.pid: {0: 4 * MIB}, os.getpid(): {0: 0}})
            suspend(target.pid)
            print(machine.processes()[target.pid])
            resume(target.pid)
            target.check()
        print(os.path.exists(f"/proc/{target.pid}"))
        """
    )
    assert printed == "False\nTrue\n{0: 0}\nFalse\n"


def test_machine_that_is_left_waits_for_no_call(machine_program):
    printed = machine_program(
        """
        import math, threading
        from cuckpt.simulator import Fault
        results = []
        with Machine(faults=[Fault("lock", delay_s=math.inf)]) as machine:
            target = machine.spawn()
            def lock():
                try:
                    driver.checkpoint_process_lock(target.pid)
                except driver.OperatingSystemError as error:
                    results.append(error.status)
            caller = threading.Thread(target=lock)
            caller.start()
            time.sleep(0.3)
        caller.join(20)
        print(results)
        """
    )
    assert printed == "[304]\n"


def test_failing_target_is_not_kept():
    machine = Machine(memory_bytes=64 * MIB)
    with machine.started():
        with pytest.raises(TargetError, match="OUT_OF_MEMORY"):
            machine.spawn({0: 65 * MIB})
        with pytest.raises(TypeError, match=r"\{0: n\}"):
            machine.spawn(5)
        assert machine.processes() == {}


@pytest.mark.parametrize(
    "use",
    [
        Machine.spawn,
        Machine.processes,
        Machine.inject,
        lambda machine: machine.calls,
    ],
)
def test_machine_must_have_been_started(use):
    machine = Machine()
    with pytest.raises(SimulatorError, match=r"with machine\.started\(\):"):
        use(machine)
    with machine.started():
        use(machine)
    with pytest.raises(SimulatorError, match="has not been started"):
        use(machine)


def test_machine_is_started_once_at_a_time():
    machine = Machine()
    with machine.started(), pytest.raises(SimulatorError, match="started already"):
        machine.started().__enter__()
    with machine.started(), Machine().started():
        pass


def test_killed_processes_and_zombies_do_not_count():
    machine = Machine()
    with machine.started():
        targets = [machine.spawn({0: MIB}) for _ in range(3)]
        targets[0].end()
        targets[1].process.kill()
        os.waitid(os.P_PID, targets[1].pid, os.WEXITED | os.WNOWAIT)
        assert machine.processes() == {targets[2].pid: {0: 2 * MIB}}


def test_calls_are_counted_and_faults_added(machine_program):
    printed = machine_program(
        """
        from cuckpt.simulator import Fault
        with Machine(faults=[Fault("unlock", 999, at=3)]) as machine:
            target = machine.spawn()
            print(machine.calls["lock"])
            for _ in range(2):
                driver.checkpoint_process_lock(target.pid)
                driver.checkpoint_process_unlock(target.pid)
            machine.inject(Fault("lock", 600, at=machine.calls["lock"] + 1))
            for call in "lock", "lock", "unlock", "unlock", "get_state":
                try:
                    getattr(driver, f"checkpoint_process_{call}")(target.pid)
                    print(call)
                except driver.DriverError as error:
                    print(call, error.status)
            print(machine.calls)
            print(len(machine.faults))
        """
    )
    counts = {
        "get_state": 1,
        "get_restore_thread_id": 0,
        "lock": 4,
        "checkpoint": 0,
        "restore": 0,
        "unlock": 4,
        "complete": 0,
    }
    assert printed.splitlines() == [
        *("0", "lock 600", "lock", "unlock 999", "unlock", "get_state"),
        *(str(counts), "1"),
    ]


def test_too_many_or_wrong_faults_are_not_added():
    machine = Machine(faults=[Fault("lock", 1)] * 60)
    with machine.started():
        for _ in range(2):
            with pytest.raises(ValueError, match=r"at most 64 faults .* has 60"):
                machine.inject(*[Fault("lock", 1)] * 5)
        with pytest.raises(TypeError, match="Fault objects"):
            machine.inject("lock=1")
        machine.inject(*[Fault("lock", 1)] * 4)


def test_fault_that_can_never_happen_is_refused(machine_program):
    printed = machine_program(
        """
        from cuckpt.simulator import Fault
        with Machine() as machine:
            target = machine.spawn()
            driver.checkpoint_process_lock(target.pid)
            for fault in Fault("lock", 1), Fault("lock", 1, count=2):
                try:
                    machine.inject(fault)
                    print("added")
                except ValueError as error:
                    print(error)
        """
    )
    refused, added = printed.splitlines()
    assert refused.endswith("cannot happen any more; that of the next call is at=2")
    assert added == "added"


def test_faults_that_have_happened_make_room(machine_program):
    printed = machine_program(
        """
        from cuckpt.simulator import Fault
        get_state = driver.checkpoint_process_get_state
        with Machine() as machine:
            target, seen = machine.spawn(), []
            for number in range(1, 201):
                after = machine.calls["get_state"]
                machine.inject(Fault("get_state", number, at=after + 1))
                try:
                    get_state(target.pid)
                except driver.DriverError as error:
                    seen.append(int(error.status))
                get_state(target.pid)
            print(seen == list(range(1, 201)))
        """
    )
    assert printed == "True\n"


def test_threads_spawn_targets_that_outlive_them(machine_program):
    printed = machine_program(
        """
        from concurrent.futures import ThreadPoolExecutor
        with Machine() as machine:
            with ThreadPoolExecutor(4) as pool:
                targets = list(pool.map(lambda _: machine.spawn({0: MIB}), range(8)))
            time.sleep(0.2)
            for target in targets:
                target.check()
            print(len(machine.processes()))
        """
    )
    assert printed == "8\n"


def test_target_that_comes_too_late_is_ended(monkeypatch):
    machine = Machine()
    started = machine.started()
    started.__enter__()
    made = []

    class Slow(Target):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)
            started.__exit__(None, None, None)

    monkeypatch.setattr(machine_module, "Target", Slow)
    with pytest.raises(SimulatorError, match="was left, in another thread"):
        machine.spawn()
    assert not Path(f"/proc/{made[0].pid}").exists()
