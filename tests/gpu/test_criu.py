"""The calls that CRIU makes of cuda-checkpoint, in its order, with its ptrace stops."""

import os
import re
import subprocess

import pytest

from cuckpt import Process, driver
from cuckpt.target import Target

State = driver.ProcessState
MIB = 1 << 20


class Criu:
    """What its CUDA plugin does at a dump, of one process after the other."""

    def __init__(self, shim, tracer):
        self._path = {**os.environ, "PATH": f"{os.path.dirname(shim)}:/usr/bin:/bin"}
        self._tracer = tracer
        self.initial = {}
        self.checkpointed = set()
        self.timeout_ms = 10_000

    def launch(self, *arguments, most=127):
        """Run it with one pipe for both outputs, which is read to its end."""
        reader, writer = os.pipe()
        child = subprocess.Popen(
            ["cuda-checkpoint", *arguments],
            env=self._path,
            stdout=writer,
            stderr=writer,
            close_fds=True,
        )
        os.close(writer)
        with open(reader) as pipe:
            text = pipe.read()
        return child.wait(60), text[:most]

    def supports(self, flag):
        status, text = self.launch("-h", most=2047)
        return status == 0 and flag in text

    def restore_tid(self, pid):
        """Ask for the restore thread; None means that the process has no CUDA."""
        status, text = self.launch("--get-restore-tid", "--pid", str(pid))
        if status:
            return None
        assert re.fullmatch(r"\d+\n", text)
        return int(text)

    def state(self, thread):
        status, text = self.launch("--get-state", "--pid", str(thread))
        assert status == 0, text
        return re.match("running|locked|checkpointed", text)[0]

    def act(self, action, pid, *more):
        status, text = self.launch("--action", action, "--pid", str(pid), *more)
        return status == 0, text

    def pause_devices(self, pid):
        """Lock it before it is frozen; False means that the dump fails."""
        thread = self.restore_tid(pid)
        if thread is None:
            return True
        state = self.state(thread)
        if state == "running":
            done, _ = self.act("lock", pid, "--timeout", str(self.timeout_ms))
            if not done:
                return False
        self.initial[pid] = state
        return True

    def freeze(self, pid):
        self._tracer.stop(*(int(tid) for tid in os.listdir(f"/proc/{pid}/task")))

    def checkpoint_devices(self, pid):
        """Checkpoint it while it is frozen, but for its restore thread."""
        thread = self.restore_tid(pid)
        if thread is None or self.initial[pid] == "checkpointed":
            return True
        self._tracer.go_on(thread)
        self.checkpointed.add(pid)
        done, _ = self.act("checkpoint", pid)
        self._tracer.interrupt(thread)
        return done

    def resume_devices(self):
        """At the end of a dump that failed, or after which it is to go on."""
        for pid, state in self.initial.items():
            thread = self.restore_tid(pid)
            assert thread is not None
            self._tracer.go_on(thread)
            done = True
            if pid in self.checkpointed and state != "checkpointed":
                done, _ = self.act("restore", pid)
            if done and state == "running":
                self.act("unlock", pid)
            self._tracer.interrupt(thread)

    def let_go(self):
        self._tracer.let_go()


@pytest.fixture
def criu(shim, tracer):
    criu = Criu(shim, tracer)
    assert criu.supports("--action")
    return criu


def state_of(target):
    return driver.checkpoint_process_get_state(target.pid)


def test_dump_leaves_them_running(criu):
    with Target({0: 16 * MIB}) as first, Target({0: MIB}) as second:
        for target in first, second:
            assert criu.pause_devices(target.pid)
            assert state_of(target) is State.LOCKED
        assert criu.pause_devices(1)
        assert criu.initial == {first.pid: "running", second.pid: "running"}
        for target in first, second:
            criu.freeze(target.pid)
        for target in first, second:
            assert criu.checkpoint_devices(target.pid)
        criu.resume_devices()
        criu.let_go()
        for target in first, second:
            assert state_of(target) is State.RUNNING
            target.check()


def test_dump_gives_back_the_states_that_there_were(criu):
    with Target({0: MIB}) as locked, Target({0: MIB}) as checkpointed:
        driver.checkpoint_process_lock(locked.pid)
        driver.checkpoint_process_lock(checkpointed.pid)
        driver.checkpoint_process_checkpoint(checkpointed.pid)
        for target in locked, checkpointed:
            assert criu.pause_devices(target.pid)
            criu.freeze(target.pid)
            assert criu.checkpoint_devices(target.pid)
        criu.resume_devices()
        criu.let_go()
        assert state_of(locked) is State.LOCKED
        assert state_of(checkpointed) is State.CHECKPOINTED
        driver.checkpoint_process_restore(checkpointed.pid)
        for target in locked, checkpointed:
            driver.checkpoint_process_unlock(target.pid)
            target.check()


def test_dump_that_fails_is_undone_but_for_who_failed(criu, target):
    with Target({0: MIB}) as first:
        target.ask("manage")
        for each in first, target:
            assert criu.pause_devices(each.pid)
            criu.freeze(each.pid)
        assert criu.checkpoint_devices(first.pid)
        assert not criu.checkpoint_devices(target.pid)
        criu.resume_devices()
        criu.let_go()
        assert state_of(first) is State.RUNNING
        first.check()
        # CRIU gives up when the restore of what is not checkpointed fails.
        assert state_of(target) is State.LOCKED
        Process(target.pid).recover()
        assert state_of(target) is State.RUNNING


def test_dump_ends_when_work_goes_on(criu, target):
    with Target({0: MIB}) as first:
        assert target.ask("spin 3000") == "spinning"
        criu.timeout_ms = 100
        assert criu.pause_devices(first.pid)
        assert not criu.pause_devices(target.pid)
        criu.freeze(first.pid)
        criu.resume_devices()
        criu.let_go()
        assert state_of(first) is state_of(target) is State.RUNNING
        assert target.ask("wait") == "waited"
        first.check()
