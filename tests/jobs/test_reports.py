"""What people have reported about checkpoints of one process, each replayed.

The numbers are those of the list of such reports.
"""

import os
import signal
import subprocess
import time
import uuid as python_uuid

import pytest

from cuckpt import diagnosis, driver, hints, nvml, proc
from cuckpt.diagnosis import doctor
from cuckpt.process import Process
from cuckpt.process_errors import (
    NoRoomError,
    ProcessGoneError,
    ProcessLostError,
    ProcessStoppedError,
)
from cuckpt.simulator import Fault, Gpu
from cuckpt.target import Program

MIB = 1 << 20
machine_with = pytest.mark.cuda_machine


@pytest.fixture
def target(cuda_machine):
    return cuda_machine.spawn({0: MIB})


@pytest.fixture
def process(target):
    return Process(target.pid)


def has_no_cuda_state(pid):
    process = Process(pid)
    with pytest.raises(driver.NotInitializedError, match="no CUDA state"):
        process.suspend()
    return not process.is_cuda


@pytest.mark.usefixtures("cuda_machine")
def test_report_03_processes_without_cuda_are_told_apart():
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        assert has_no_cuda_state(sleeper.pid)
        sleeper.kill()
    watcher = "import pynvml; pynvml.nvmlInit(); print(1, flush=True); input()"
    with Program("-c", watcher) as program:
        assert program.answer() == "1"
        assert has_no_cuda_state(program.pid)
    forking = """
import os, time
from cuckpt import driver
driver.init()
child = os.fork() or time.sleep(60)
print(child, flush=True)
input()
"""
    with Program("-W", "ignore", "-c", forking) as program:
        child = int(program.answer())
        try:
            assert has_no_cuda_state(child)
            assert Process(program.pid).is_cuda
        finally:
            os.kill(child, signal.SIGKILL)


def test_report_04_no_such_process_is_named():
    with pytest.raises(ProcessGoneError, match=r"none with this pid .*hidepid"):
        Process(2**22 + 1)


@machine_with(faults=[Fault("lock", result=304)])
def test_report_04_dead_and_importing_targets_are_named(process):
    with pytest.raises(driver.OperatingSystemError, match="CUDA IPC memory") as caught:
        process.suspend()
    assert "ended during the call" in str(caught.value)
    assert "lost in an earlier failed restore" in str(caught.value)


@machine_with(faults=[Fault("lock", result=304)])
def test_report_04_ptrace_scope_is_named(process, monkeypatch):
    monkeypatch.setattr(hints, "_ptrace_scope", lambda: 1)
    monkeypatch.setattr(hints.os, "geteuid", lambda: proc.facts(process.pid).uid or 7)
    monkeypatch.setattr(
        hints, "read_status", lambda pid: {"Uid": str(os.geteuid()), "State": "S"}
    )
    with pytest.raises(driver.OperatingSystemError, match="ptrace_scope = 1"):
        process.suspend()


OTHER_USER = """
import os, sys
from cuckpt import driver, hints, nvml
from cuckpt.process import Process
driver.has_checkpoint()
os.setgroups([])
os.setresuid(65534, 65534, 65534)
try:
    Process(int(sys.argv[1])).suspend()
except driver.OperatingSystemError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_report_04_other_user_is_named(process):
    with Program("-c", OTHER_USER, str(process.pid)) as other:
        assert "belongs to uid 0 and this one runs as uid 65534" in other.answer()
    assert process.state == "running"


def test_report_05_thread_is_refused(process):
    thread = process.restore_thread_id
    with pytest.raises(ValueError, match=f"is a thread of process {process.pid}"):
        Process(thread)
    assert process.state == "running"


def test_report_06_managed_memory_leaves_it_running(target, process):
    target.ask("manage")
    with pytest.raises(driver.NotSupportedError, match="managed") as caught:
        process.suspend()
    assert caught.value.__notes__ == [f"process {process.pid} is running, as before"]
    assert process.state == "running"
    target.check()


@machine_with(memory_bytes=64 * MIB)
def test_report_07_restore_without_room_is_refused_with_numbers(cuda_machine):
    target = cuda_machine.spawn({0: 40 * MIB})
    process = Process(target.pid)
    process.suspend()
    hog = cuda_machine.spawn({0: 40 * MIB})
    for _ in range(3):
        with pytest.raises(NoRoomError, match="24 MiB free, and 40 MiB are needed"):
            process.resume()
    assert cuda_machine.calls["restore"] == 0
    hog.end()
    process.resume()
    target.check()


@machine_with(faults=[Fault("restore", result=2)])
def test_report_07_lost_process_is_called_lost(cuda_machine, process):
    process.suspend()
    for attempts in 2, 4:
        with pytest.raises(ProcessLostError, match="Only its end"):
            process.resume()
        assert cuda_machine.calls["restore"] == attempts


def test_report_08_resume_lets_the_target_go_on(target, process):
    process.suspend()
    process.restore()
    target.send("check")
    assert target.is_silent(0.2)
    process.resume()
    assert target.answer()
    with process.suspended():
        pass
    target.check()


def test_report_09_second_resume_is_no_error(cuda_machine, target, process):
    process.suspend()
    process.suspend()
    process.resume()
    outcome = process.resume()
    assert (outcome.before, outcome.after) == ("running", "running")
    assert cuda_machine.calls["restore"] == cuda_machine.calls["unlock"] == 1
    target.check()


@machine_with(gpus=3)
@pytest.mark.parametrize(
    "form",
    [
        str,
        lambda gpu: str(gpu).removeprefix("GPU-"),
        lambda gpu: gpu.uuid,
        lambda gpu: python_uuid.UUID(bytes=gpu.uuid),
    ],
    ids=["GPU-", "digits", "bytes", "uuid.UUID"],
)
def test_report_10_map_needs_no_gpus_that_stay(
    cuda_machine, target, process, form, monkeypatch
):
    first, _, third = map(form, cuda_machine.gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    process.suspend()
    process.resume({first: third})
    assert process.used_memory().keys() == {str(cuda_machine.gpus[2])}
    target.check()


def test_report_10_wrong_map_is_refused_before_the_call(cuda_machine, process):
    process.suspend()
    with pytest.raises(ValueError, match="none of this machine, which has GPU-"):
        process.resume({"00" * 16: 0})
    assert cuda_machine.calls["restore"] == 0


@machine_with(gpus=[Gpu(bytes(16), mig_mode=True)])
def test_report_12_mig_is_detected_and_explained(process):
    assert any(f.what == "MIG is on" and f.level == "problem" for f in doctor())
    with pytest.raises(driver.OutOfMemoryError, match="the GPU is in MIG mode"):
        process.suspend()
    assert process.state == "running"


@machine_with(gpus=[Gpu(bytes(16), persistence_mode=False)])
def test_report_13_restore_works_without_persistence_mode(target, process):
    assert any(f.what == "persistence mode is off" for f in doctor())
    process.suspend()
    with pytest.raises(driver.NotInitializedError, match=r"must have called init\(0\)"):
        process.restore()
    process.resume()
    target.check()


def test_report_14_stopped_target_is_refused_at_once(target, process):
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    start = time.monotonic()
    with pytest.raises(ProcessStoppedError, match=r"is stopped .* send it SIGCONT"):
        process.suspend()
    assert time.monotonic() - start < 1
    target.process.send_signal(signal.SIGCONT)
    target.check()


CALLER = """
import sys
from cuckpt.process import Process
process = Process(int(sys.argv[2]))
print("begins", flush=True)
getattr(process, sys.argv[1])()
"""


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
def test_report_15_killed_tool_leaves_what_can_be_recovered(
    cuda_machine, target, process, verb
):
    cuda_machine.inject(Fault(verb, delay_s=0.15))
    doing = "suspend" if verb in ("lock", "checkpoint") else "resume"
    if doing == "resume":
        process.suspend()
    with Program("-c", CALLER, doing, str(target.pid)) as caller:
        assert caller.answer() == "begins"
        while not cuda_machine.calls[verb]:
            time.sleep(0.005)
        caller.end()
    assert process.recover().after == "running"
    target.check()


@machine_with(faults=[Fault("checkpoint", delay_s=0.3)])
def test_report_15_checkpoint_has_no_time_limit(target, process):
    assert process.suspend(timeout_s=0.1).seconds["checkpoint"] >= 0.3
    process.resume()
    target.check()


def test_report_19_pid_that_was_used_again_is_refused(
    cuda_machine, process, monkeypatch
):
    started = proc.start_time(process.pid)
    monkeypatch.setattr(proc, "start_time", lambda pid: started + 1)
    for call in process.suspend, process.resume, process.recover, process.lock:
        with pytest.raises(ProcessGoneError, match="its pid is another's now"):
            call()
    assert cuda_machine.calls["lock"] == 0


def test_report_20_pid_of_a_container_is_shown(process, monkeypatch):
    truly = proc.facts
    monkeypatch.setattr(
        proc, "facts", lambda pid: truly(pid)._replace(namespace_pids=(pid, 12))
    )
    assert any("pid 12 in its container" in f.what for f in doctor([process.pid]))


def test_report_20_pid_of_another_namespace_is_explained():
    with pytest.raises(ProcessGoneError, match="in this pid namespace"):
        Process(2**22 + 1)


def test_report_24_all_states_are_told(target, process):
    driver.init(0)
    driver.device_primary_ctx_retain(0)
    process.lock()
    args = driver.CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(target.pid, args)
    assert process.state == "checkpointing"
    driver.checkpoint_operation_complete(args)
    args = driver.CheckpointRestoreArgs(custom_storage=True)
    driver.checkpoint_process_restore(target.pid, args)
    assert process.state == "restoring"
    driver.checkpoint_operation_complete(args)
    assert process.recover().before == "locked"


def test_report_26_what_remains_is_told(process, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(nvml, "used_memory", lambda pid: {"GPU-0": 5 * MIB})
    monkeypatch.setattr(proc, "open_files", lambda pid, prefix: [f"{prefix}ctl"])
    assert process.suspend().notes == [
        "it still has /dev/nvidiactl open",
        "it still uses 5 MiB of GPU memory",
    ]


def test_report_27_host_memory_is_compared(process, monkeypatch):
    monkeypatch.setattr(proc, "memory_left", lambda: (MIB, True))
    (finding,) = [f for f in doctor([process.pid]) if f.subject == "host memory"]
    assert finding.level == "problem"
    assert finding.what == "1 MiB left in the cgroup, 2 MiB of GPU memory in use"
    assert process.suspend().notes == [
        "its 2 MiB of GPU memory need host memory, of which 1 MiB are left"
    ]


@machine_with(faults=[Fault("checkpoint", result=2)])
def test_report_27_host_memory_is_named_when_there_was_too_little(process, monkeypatch):
    monkeypatch.setattr(proc, "memory_left", lambda: (0, False))
    with pytest.raises(
        driver.OutOfMemoryError, match="too little host memory"
    ) as caught:
        process.suspend()
    assert "of which 0 MiB are left" in caught.value.__notes__[-1]


def test_report_28_nccl_and_cupti_are_warned_of(process, monkeypatch):
    truly = diagnosis._lines
    maps = ["7f00-7f01 r-xp 0 08:01 5 /usr/lib/libnccl.so.2", "7f02 /x/libcupti.so.13"]
    monkeypatch.setattr(
        diagnosis,
        "_lines",
        lambda path: maps if path == f"/proc/{process.pid}/maps" else truly(path),
    )
    monkeypatch.setattr(proc, "environment", lambda pid: {"NCCL_P2P_DISABLE": "1"})
    warnings = [f for f in doctor([process.pid]) if f.level == "warning"]
    about = [f for f in warnings if f.subject == f"process {process.pid}"]
    assert [f.what for f in about] == [
        "CUPTI is loaded",
        "NCCL is loaded without NCCL_NVLS_ENABLE=0 NCCL_SHM_DISABLE=1",
    ]


def test_report_30_calls_start_no_process(process, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a process is started")

    for name in "fork", "posix_spawn", "execve":
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    start = time.monotonic()
    for _ in range(100):
        assert process.state == "running"
    assert (time.monotonic() - start) / 100 < 0.015
    process.suspend()
    process.resume()
