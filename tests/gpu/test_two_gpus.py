"""Moving between GPUs, where there are at least two."""

import os

import pytest

from cuckpt import driver
from cuckpt.structs import CheckpointRestoreArgs
from cuckpt.target import Target

nvml = pytest.importorskip("pynvml")

State = driver.ProcessState
MIB = 1 << 20


def gpus():
    driver.init()
    count = driver.device_get_count()
    return [driver.device_get_uuid_v2(driver.device_get(gpu)) for gpu in range(count)]


pytestmark = pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")


def used_bytes(pid):
    """Return what a process uses of each of the first two GPUs."""
    nvml.nvmlInit()
    found = []
    for uuid in gpus()[:2]:
        digits = bytes(uuid.bytes).hex()
        ends = 8, 12, 16, 20, 32
        parts = [digits[a:b] for a, b in zip((0, *ends), ends, strict=False)]
        gpu = nvml.nvmlDeviceGetHandleByUUID("GPU-" + "-".join(parts))
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        found.append(sum(p.usedGpuMemory for p in processes if p.pid == pid))
    nvml.nvmlShutdown()
    return found


def suspend(pid):
    driver.checkpoint_process_lock(pid)
    driver.checkpoint_process_checkpoint(pid)


def resume(pid, pairs=()):
    args = CheckpointRestoreArgs(gpu_pairs=pairs) if pairs else None
    driver.checkpoint_process_restore(pid, args)
    driver.checkpoint_process_unlock(pid)


def swapped():
    first, second, *others = gpus()
    return [(first, second), (second, first), *((other, other) for other in others)]


def test_pairs_swap_two_gpus_and_back():
    with Target({0: 64 * MIB}) as target:
        before = used_bytes(target.pid)
        assert before[0] >= 64 * MIB
        assert before[1] == 0
        for expected in before[::-1], before:
            suspend(target.pid)
            resume(target.pid, swapped())
            assert used_bytes(target.pid) == expected
            target.check()


def test_memory_of_two_gpus_changes_places():
    with Target({0: 64 * MIB, 1: 160 * MIB}) as target:
        before = used_bytes(target.pid)
        suspend(target.pid)
        assert used_bytes(target.pid) == [0, 0]
        resume(target.pid, swapped())
        assert used_bytes(target.pid) == before[::-1]
        target.check()


def test_incomplete_pairs_are_refused():
    with Target({0: MIB}) as target:
        suspend(target.pid)
        first, second, *_ = gpus()
        for pairs in [(first, second)], [(first, first)], [(second, second)]:
            with pytest.raises(driver.InvalidValueError):
                driver.checkpoint_process_restore(
                    target.pid, CheckpointRestoreArgs(gpu_pairs=pairs)
                )
            assert driver.checkpoint_process_get_state(target.pid) is State.CHECKPOINTED
        resume(target.pid)
        target.check()


def test_process_that_sees_one_gpu_needs_pairs_of_all():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    with Target({0: 64 * MIB}, environment) as target:
        before = used_bytes(target.pid)
        assert before[1] >= 64 * MIB
        suspend(target.pid)
        _, second, *_ = gpus()
        with pytest.raises(driver.InvalidValueError):
            resume(target.pid, [(second, second)])
        resume(target.pid, swapped())
        assert used_bytes(target.pid) == before[::-1]
        target.check()
