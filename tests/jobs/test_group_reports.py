"""What users of other tools report about jobs of many processes, each as a test."""

import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from cuckpt import driver, nvml
from cuckpt.events import ProgressBar, Trace
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.simulator import Fault
from cuckpt.target import Target

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")


@pytest.fixture
def ranks(cuda_machine):
    """Start four processes that use a GPU."""
    return [cuda_machine.spawn({0: 64 << 10}) for _ in range(4)]


def states_of(targets):
    return [
        driver.checkpoint_process_get_state(target.pid).name.lower()
        for target in targets
    ]


def check_all(targets):
    assert states_of(targets) == ["running"] * len(targets)
    for target in targets:
        target.check()


def test_report_01_wrong_order_leaves_half_of_a_job_frozen(ranks, cuda_machine):
    phases = []
    group = ProcessGroup.from_pids(
        [rank.pid for rank in ranks],
        on_event=lambda event: phases.append((event.phase, event.moment)),
    )
    cuda_machine.inject(Fault("checkpoint", result=801, at=3))
    with pytest.raises(GroupError):
        group.suspend()
    check_all(ranks)
    del phases[:]
    group.suspend()
    group.resume()
    # All have been locked before one is checkpointed, and so on.
    for earlier, later in (
        ("lock", "checkpoint"),
        ("checkpoint", "restore"),
        ("restore", "unlock"),
    ):
        first = phases.index((later, "start"))
        assert phases[:first].count((earlier, "end")) == len(ranks)
    check_all(ranks)


def test_report_02_lock_waits_for_ever_for_a_rank_that_spins(ranks):
    # Longer than anybody waits here: it spins on one that is locked.
    ranks[2].ask("spin 600000")
    group = ProcessGroup.from_pids([rank.pid for rank in ranks])
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        group.suspend(timeout_s=0.5)
    assert time.monotonic() - start < 5
    (error,) = caught.value.exceptions
    assert isinstance(error, driver.NotReadyError)
    assert error.pid == ranks[2].pid
    assert states_of(ranks) == ["running"] * 4
    for rank in ranks[:2] + ranks[3:]:
        rank.check()


FORKED = """
import os, sys, time
from cuckpt.target import __main__ as target
target.start()
child = os.fork()
if child == 0:
    time.sleep(100)
print(child, flush=True)
sys.stdin.read()
os.kill(child, 9)
"""


def test_report_03_one_without_cuda_fails_the_whole_group(ranks):
    with (
        subprocess.Popen(["sleep", "100"]) as sleeping,
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", FORKED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as parent,
    ):
        child = int(parent.stdout.readline())
        group = ProcessGroup.from_pids(
            [sleeping.pid, parent.pid, child, *(rank.pid for rank in ranks)]
        )
        assert group.pids == [parent.pid, *(rank.pid for rank in ranks)]
        report = group.suspend()
        assert report.skipped == dict.fromkeys([sleeping.pid, child], "no CUDA state")
        group.resume()
        parent.stdin.close()
        sleeping.kill()
    check_all(ranks)


def test_report_11_job_file_wants_one_after_the_other(cuda_machine, ranks, tmp_path):
    variables = {**os.environ, "CUDA_CHECKPOINT_JOB_FILE": str(tmp_path / "job")}
    at_once, most, lock = 0, 0, threading.Lock()

    def watch(event):
        nonlocal at_once, most
        if event.phase in ("checkpoint", "restore"):
            with lock:
                at_once += 1 if event.moment == "start" else -1
                most = max(most, at_once)

    cuda_machine.inject(
        Fault("checkpoint", delay_s=0.03, count=5),
        Fault("restore", delay_s=0.03, count=5),
    )
    with Target({0: 64 << 10}, variables) as one:
        every = [*ranks, one]
        group = ProcessGroup.from_pids([each.pid for each in every], on_event=watch)
        group.suspend()
        group.resume()
        assert most == 1
        check_all(every)


def test_report_16_one_with_cuda_is_found_among_a_hundred_others(cuda_machine, ranks):
    others = [subprocess.Popen(["sleep", "100"]) for _ in range(100)]
    try:
        group = ProcessGroup.from_tree(os.getpid())
        assert sorted(group.pids) == sorted(rank.pid for rank in ranks)
        for other in others:
            assert group.skipped[other.pid] == "no CUDA state"
        threads = threading.active_count()
        group.suspend()
        group.resume()
        assert threading.active_count() == threads
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()
    check_all(ranks)


def test_report_17_checkpointed_ones_are_found_though_nvml_has_forgotten_them(ranks):
    pids = {rank.pid for rank in ranks}
    ProcessGroup.from_pids(pids).suspend()
    assert not any(pids & set(gpu.used_bytes) for gpu in nvml.gpus())
    for found in ProcessGroup.discover(), ProcessGroup.from_tree(os.getpid()):
        states = found.states()
        assert {pid: states.get(pid) for pid in pids} == dict.fromkeys(
            pids, "checkpointed"
        )
    found.recover()
    check_all(ranks)


def test_report_18_checkpoints_of_a_job_are_made_at_the_same_time(ranks, monkeypatch):
    # No one begins before all do: that needs no clock.
    for verb in "lock", "checkpoint", "restore", "unlock":
        all_begin, call = (
            threading.Barrier(len(ranks)),
            getattr(driver, f"checkpoint_process_{verb}"),
        )

        def wait(*arguments, all_begin=all_begin, call=call):
            all_begin.wait(20)
            call(*arguments)

        monkeypatch.setattr(driver, f"checkpoint_process_{verb}", wait)
    group = ProcessGroup.from_pids([rank.pid for rank in ranks])
    group.suspend()
    group.resume()
    check_all(ranks)


def test_report_31_phases_times_and_progress_can_be_seen(ranks, tmp_path, capsys):
    pids = [rank.pid for rank in ranks]
    with Trace(tmp_path / "trace.json") as trace, ProgressBar() as bar:
        group = ProcessGroup.from_pids(pids, on_event=[trace, bar])
        suspended, resumed = group.suspend(), group.resume()
    for report, phases in (
        (suspended, {"lock", "checkpoint"}),
        (resumed, {"restore", "unlock"}),
    ):
        assert report.seconds > 0
        for outcome in report.outcomes.values():
            assert outcome.seconds.keys() == phases
            assert all(0 < s < math.inf for s in outcome.seconds.values())
    entries = json.loads((tmp_path / "trace.json").read_text())
    assert sum(entry["ph"] in "BE" for entry in entries) == 4 * 4 * 2
    out = capsys.readouterr().out
    assert all(str(pid) in out for pid in pids)
    check_all(ranks)
