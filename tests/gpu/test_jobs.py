"""Process and ProcessGroup on a real driver, or a simulated one."""

import time

import pytest

from cuckpt import Process, ProcessGroup, driver
from cuckpt.process_errors import NoRoomError
from cuckpt.target import Target

pytest.importorskip("pynvml")

MIB = 1 << 20
GIB = 1 << 30


def test_process_is_suspended_and_resumed():
    with Target({0: 256 * MIB}) as target:
        process = Process(target.pid)
        (used,) = process.used_memory().values()
        assert used >= 256 * MIB
        outcome = process.suspend()
        assert (outcome.before, outcome.after) == ("running", "checkpointed")
        assert [*outcome.seconds] == ["lock", "checkpoint"]
        assert [*outcome.used_bytes.values()] == [used]
        assert outcome.notes == []
        assert process.used_memory() == {}
        outcome = process.resume()
        assert (outcome.before, outcome.after) == ("checkpointed", "running")
        target.check()


def test_process_with_a_long_kernel_is_left_running(target):
    assert target.ask("spin 3000") == "spinning"
    process = Process(target.pid)
    start = time.monotonic()
    with pytest.raises(driver.NotReadyError):
        process.suspend(timeout_s=0.3)
    assert time.monotonic() - start < 2.5
    assert process.state == "running"
    assert target.ask("wait") == "waited"
    process.suspend()
    process.resume()


def test_restore_without_room_is_refused_and_works_later():
    with Target({0: GIB}) as target, Target() as hog:
        process = Process(target.pid)
        process.suspend()
        take_all_memory(hog)
        with pytest.raises(NoRoomError, match=r"MiB free, and \d+ MiB are needed"):
            process.resume()
        assert process.state == "checkpointed"
        hog.end()
        for _ in range(50):  # its memory is given back a moment later
            try:
                process.resume()
                break
            except NoRoomError:
                time.sleep(0.1)
        assert process.state == "running"
        target.check()


def take_all_memory(hog):
    """Take what NVML says is free, in pieces that become smaller."""
    from cuckpt import nvml

    left = nvml.gpus()[0].free_bytes
    piece = left // 2 // (2 * MIB) * (2 * MIB)
    while piece >= 128 * MIB:
        if piece < left - 128 * MIB:
            hog.ask(f"take {piece}")
            left -= piece
        else:
            piece = piece // 2 // (2 * MIB) * (2 * MIB)


def test_group_moves_together_and_skips_who_has_no_cuda():
    with Target({0: 64 * MIB}) as first, Target({0: 32 * MIB}) as second:
        group = ProcessGroup.from_pids([first.pid, 1, second.pid])
        assert group.pids == [first.pid, second.pid]
        assert group.skipped == {1: "no CUDA state"}
        with group.suspended() as report:
            assert {o.after for o in report.outcomes.values()} == {"checkpointed"}
        assert {*group.states().values()} == {"running"}
        first.check()
        second.check()


def test_group_with_a_long_kernel_is_left_running(target):
    with Target({0: MIB}) as other:
        assert target.ask("spin 3000") == "spinning"
        group = ProcessGroup.from_pids([other.pid, target.pid])
        with pytest.raises(ExceptionGroup, match="1 of 2 processes failed") as caught:
            group.suspend(timeout_s=0.3)
        assert caught.group_contains(driver.NotReadyError)
        assert {*group.states().values()} == {"running"}
        other.check()
