"""Random operations on groups with random faults: nobody is left half way.

`CUCKPT_STEPS=20000 pytest --driver=simulated tests/jobs/test_statemachine.py` runs
longer, and prints what it has done.
"""

import collections
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cuckpt import driver
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process import Process
from cuckpt.process_errors import (
    NoMembersError,
    ProcessError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
)
from cuckpt.simulator import Fault, Machine

STEPS = int(os.environ.get("CUCKPT_STEPS", "600"))
STEPS_OF_ONE = 30
KIB = 1 << 10

VERBS = "suspend", "resume", "recover", "suspended"
CALLER = """
import sys
from cuckpt.group import ProcessGroup
verb, *pids = sys.argv[1:]
group = ProcessGroup.from_pids(map(int, pids))
print("begins", flush=True)
getattr(group, verb)()
"""


faults = st.builds(
    Fault,
    call=st.sampled_from(["lock", "checkpoint", "restore", "unlock"]),
    # Not 401: that is of what somebody else did, and so is not undone.
    result=st.sampled_from([1, 2, 304, 600, 801, 999]),
    at=st.integers(1, 4),
    count=st.integers(1, 4),
    delay_s=st.sampled_from([0.0, 0.0, 0.0, 0.02]),
    when=st.sampled_from(["before", "after"]),
    kill=st.sampled_from([None, None, None, None, "target"]),
)
some_faults = st.lists(faults, min_size=1, max_size=3) | st.just([])
done = collections.Counter()


def step(do):
    """Keep the first failure: hypothesis runs again, with other timing, and hides it.

    What had been done before is told with it.
    """

    @functools.wraps(do)
    def wrapper(self, **drawn):
        if Jobs.failure is not None:
            raise Jobs.failure
        self.history.append(f"{do.__name__} {drawn}")
        try:
            do(self, **drawn)
        except BaseException as error:
            error.add_note("\n".join(["after", *self.history]))
            Jobs.failure = error
            raise
        done["steps"] += 1

    return wrapper


class Pool:
    """The machine, and targets that outlive an example."""

    def __init__(self):
        self.start()

    def start(self):
        self.machine = Machine(gpus=2, memory_bytes=1 << 30)
        self.machine.__enter__()
        self.free = []
        self.is_full = False  # of faults that are still to happen

    def take(self, count):
        # Those of a call that was killed are never over.
        if self.is_full:
            self.close()
            self.start()
        while len(self.free) < count:
            self.free.append(self.machine.spawn({0: 64 * KIB}))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, target):
        if target.process.poll() is None and state_of(target.pid) == "running":
            target.check()
            self.free.append(target)
        else:
            target.end()

    def close(self):
        self.machine.__exit__(None, None, None)


def state_of(pid):
    try:
        return driver.checkpoint_process_get_state(pid).name.lower()
    except driver.OperatingSystemError:
        return "ended"
    except driver.NotInitializedError:
        return "ended"


class Jobs(RuleBasedStateMachine):
    pool = None
    failure = None
    history = ()

    @initialize(count=st.integers(1, 8))
    def start(self, count):
        self.history = [f"{count} targets"]
        self.callers_killed = 0
        self.targets = {t.pid: t for t in self.pool.take(count)}
        self.state = dict.fromkeys(self.targets, "running")
        self.group = ProcessGroup.from_pids(self.targets)
        self.given_up = set()

    def living(self):
        return [pid for pid in self.state if pid not in self.given_up]

    def expect(self, goals, do, subject):
        """Do something: all reach their goal, or all are where they were."""
        done[subject] += 1
        start = time.monotonic()
        try:
            do()
        except GroupError as error:
            done["failed"] += 1
            self.history.append(str(error))
            excused = pids_excused_by(error)
            for each in error.exceptions:
                assert isinstance(each, driver.DriverError | ProcessError), repr(each)
            self.compare(self.state, excused)
        except (driver.DriverError, ProcessError, NoMembersError) as error:
            done["failed"] += 1
            self.history.append(str(error))
            self.compare(self.state, pids_excused_by(error))
        else:
            self.state.update(goals)
            self.compare(self.state, set())
        assert time.monotonic() - start < 20

    def compare(self, expected, excused):
        for pid in self.living():
            state = state_of(pid)
            if state == "ended" or pid in excused:
                done["ended" if state == "ended" else "lost or left"] += 1
                self.given_up.add(pid)
            else:
                assert state == expected[pid], (pid, state, expected[pid])

    # What can go wrong

    @rule(fault=faults)
    @step
    def inject_one(self, fault):
        self.inject(fault)

    @rule(several=st.lists(faults, min_size=2, max_size=4))
    @step
    def inject_several(self, several):
        self.inject_all(several)

    def inject_all(self, several):
        for fault in several:
            self.inject(fault)

    def inject(self, fault):
        calls = self.pool.machine.calls[fault.call]
        fields = {name: getattr(fault, name) for name in ("result", "count", "delay_s")}
        try:
            self.pool.machine.inject(
                Fault(
                    fault.call,
                    at=calls + fault.at,
                    when=fault.when,
                    kill=fault.kill,
                    **fields,
                )
            )
        except ValueError:  # as many are still to happen as there can be
            self.pool.is_full = True
            return
        done["faults"] += 1

    @rule(index=st.integers(0, 7))
    @step
    def kill_a_target(self, index):
        living = self.living()
        if len(living) < 2:
            return
        pid = living[index % len(living)]
        self.targets[pid].process.kill()
        self.targets[pid].process.wait()
        self.given_up.add(pid)
        done["killed"] += 1

    # What is done

    @rule(several=some_faults)
    @step
    def suspend_all(self, several):
        self.inject_all(several)
        goals = dict.fromkeys(self.living(), "checkpointed")
        self.expect(goals, self.group.suspend, "suspend")

    @rule(to=st.sampled_from([None, 1]), several=some_faults)
    @step
    def resume_all(self, to, several):
        self.inject_all(several)
        gpu_map = None if to is None else {0: to}
        goals = dict.fromkeys(self.living(), "running")
        self.expect(goals, lambda: self.group.resume(gpu_map), "resume")

    @rule(to=st.sampled_from([None, 1]), several=some_faults)
    @step
    def hold_all(self, to, several):
        self.inject_all(several)
        gpu_map = None if to is None else {0: to}

        def hold():
            with self.group.suspended(gpu_map=gpu_map):
                done["held"] += 1

        self.expect({}, hold, "suspended")

    @rule(index=st.integers(0, 7), verb=st.sampled_from(["suspend", "resume"]))
    @step
    def do_to_one(self, index, verb):
        living = self.living()
        if not living:
            return
        pid = living[index % len(living)]
        goal = {"suspend": "checkpointed", "resume": "running"}[verb]
        try:
            process = Process(pid)
        except ProcessGoneError:
            self.compare(self.state, set())
            return
        self.expect({pid: goal}, getattr(process, verb), verb)

    @rule(several=some_faults)
    @step
    def recover_all(self, several):
        self.inject_all(several)
        self.recover()

    def recover(self):
        done["recover"] += 1
        excused = set()
        try:
            self.group.recover()
        except GroupError as error:
            excused = pids_excused_by(error)
            assert len(excused) == len(error.exceptions)
        for pid in self.living():
            self.state[pid] = "running"
        self.compare(self.state, excused)

    @rule(
        verbs=st.lists(st.sampled_from(VERBS), min_size=2, max_size=3),
        several=some_faults,
    )
    @step
    def do_several_at_once(self, verbs, several):
        """By threads, each with the group or one of its members."""
        self.inject_all(several)
        living, excused = self.living(), set()
        if not living:
            return

        def do(number, verb):
            subject = self.group if number else Process(living[0])
            try:
                if verb == "suspended":
                    with subject.suspended():
                        pass
                else:
                    getattr(subject, verb)()
            except (GroupError, driver.DriverError, ProcessError, OSError) as error:
                excused.update(pids_excused_by(error))

        threads = [threading.Thread(target=do, args=each) for each in enumerate(verbs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done["several at once"] += 1
        self.take_over(excused)

    def take_over(self, excused):
        """Whatever each has come to, it is half way nowhere."""
        for pid in self.living():
            state = state_of(pid)
            if pid not in excused and state != "ended":
                assert state in ("running", "checkpointed"), (pid, state)
                self.state[pid] = state
        self.compare(self.state, excused)

    @rule(verb=st.sampled_from(["suspend", "resume"]), own=st.sampled_from(VERBS))
    @step
    def do_beside_another_program(self, verb, own):
        pids = [str(pid) for pid in self.living()]
        if not pids:
            return
        done["beside another program"] += 1
        with subprocess.Popen(
            [sys.executable, "-P", "-c", CALLER, verb, *pids],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as caller:
            caller.stdout.readline()
            with contextlib.suppress(
                GroupError, driver.DriverError, ProcessError, NoMembersError
            ):
                if own == "suspended":
                    with self.group.suspended():
                        pass
                else:
                    getattr(self.group, own)()
        self.recover()

    @rule(
        index=st.integers(0, 7),
        verb=st.sampled_from(["suspend", "resume"]),
        after_ms=st.integers(0, 20),
    )
    @step
    def stop_one_in_the_middle(self, index, verb, after_ms):
        living = self.living()
        if not living:
            return
        pid = living[index % len(living)]

        def stop():
            time.sleep(after_ms / 1000)
            for number in signal.SIGSTOP, signal.SIGCONT:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                time.sleep(0.03)

        thread = threading.Thread(target=stop)
        thread.start()
        goal = {"suspend": "checkpointed", "resume": "running"}[verb]
        self.expect(dict.fromkeys(living, goal), getattr(self.group, verb), "stopped")
        thread.join()

    @precondition(lambda self: self.callers_killed < 2)
    @rule(verb=st.sampled_from(["suspend", "resume"]), after_ms=st.integers(0, 30))
    @step
    def kill_the_caller(self, verb, after_ms):
        done["callers killed"] += 1
        self.callers_killed += 1
        pids = [str(pid) for pid in self.living()]
        with subprocess.Popen(
            [sys.executable, "-P", "-c", CALLER, verb, *pids],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as caller:
            caller.stdout.readline()
            time.sleep(after_ms / 1000)
            caller.send_signal(signal.SIGKILL)
        self.recover()

    def teardown(self):
        with contextlib.suppress(GroupError):
            self.group.recover()
        for target in self.targets.values():
            with contextlib.suppress(Exception):
                self.pool.give(target)


EXCUSES = ProcessLostError, ProcessLeftError, ProcessGoneError


def pids_excused_by(error):
    """Tell who is named as lost, left or gone."""
    errors = error.exceptions if isinstance(error, GroupError) else [error]
    return {each.pid for each in errors if isinstance(each, EXCUSES)}


@pytest.mark.thread_unsafe(reason="one machine")
def test_nobody_is_left_half_way(capsys):
    Jobs.pool, Jobs.failure = Pool(), None
    try:
        run_state_machine_as_test(
            Jobs,
            settings=settings(
                max_examples=STEPS // STEPS_OF_ONE,
                stateful_step_count=STEPS_OF_ONE,
                deadline=None,
                database=None,
                # What a step comes to depends on more than what was drawn: a second
                # run with the same draws, as to shrink them, need not fail as well.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    except BaseException:
        if Jobs.failure is None:
            raise
    finally:
        Jobs.pool.close()
        with capsys.disabled():
            print(f"\n  {dict(done)}")
    if Jobs.failure is not None:
        raise Jobs.failure
