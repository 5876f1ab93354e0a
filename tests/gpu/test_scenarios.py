"""The driver functions on a real driver and GPU; expectations were measured.

Run with ``pytest --driver=real tests/gpu``.
"""

import ctypes
import os
import signal
import threading
import time
import uuid

import pytest

from cuckpt import driver, simulator
from cuckpt.structs import (
    CheckpointCheckpointArgs,
    CheckpointLockArgs,
    CheckpointRestoreArgs,
    CheckpointUnlockArgs,
)

State = driver.ProcessState
cuda = ctypes.CDLL(driver.library_path())
MIB = 1 << 20

get_state = driver.checkpoint_process_get_state
get_tid = driver.checkpoint_process_get_restore_thread_id
lock = driver.checkpoint_process_lock
checkpoint = driver.checkpoint_process_checkpoint
restore = driver.checkpoint_process_restore
unlock = driver.checkpoint_process_unlock


def test_whole_cycle_keeps_the_content(target, same_pairs):
    before = target.ask(f"fill {256 * MIB}")
    tid = get_tid(target.pid)
    assert os.path.exists(f"/proc/{target.pid}/task/{tid}")
    assert get_state(target.pid) is State.RUNNING
    lock(target.pid, CheckpointLockArgs(timeout_ms=10_000))
    assert get_state(target.pid) is State.LOCKED
    checkpoint(target.pid, CheckpointCheckpointArgs())
    assert get_state(target.pid) is State.CHECKPOINTED
    assert get_tid(target.pid) == tid
    restore(target.pid, CheckpointRestoreArgs(gpu_pairs=same_pairs))
    assert get_state(target.pid) is State.LOCKED
    unlock(target.pid, CheckpointUnlockArgs())
    assert get_state(target.pid) is State.RUNNING
    assert target.ask("check") == before


def test_calls_of_a_locked_target_wait_for_unlock(target):
    before = target.ask(f"fill {MIB}")
    lock(target.pid)
    target.send("check")
    assert target.is_silent(1)
    checkpoint(target.pid)
    restore(target.pid)
    assert target.is_silent(1)
    unlock(target.pid)
    assert target.answer() == before


def test_every_call_in_every_state(target):
    pid, tid = target.pid, get_tid(target.pid)
    calls = {
        "lock": lock,
        "checkpoint": checkpoint,
        "restore": restore,
        "unlock": unlock,
    }
    allowed = {
        State.RUNNING: {"lock"},
        State.LOCKED: {"checkpoint", "unlock"},
        State.CHECKPOINTED: {"restore"},
    }
    for state, step in (
        (State.RUNNING, "lock"),
        (State.LOCKED, "checkpoint"),
        (State.CHECKPOINTED, "restore"),
        (State.LOCKED, "unlock"),
    ):
        for name in calls.keys() - allowed[state]:
            with pytest.raises(driver.IllegalStateError) as caught:
                calls[name](pid)
            assert caught.value.status == 401
            assert f"{name} needs a" in str(caught.value)
        assert get_state(pid) is state
        assert get_tid(pid) == tid
        calls[step](pid)
    assert get_state(pid) is State.RUNNING


def test_wrong_pairs_are_refused_and_change_nothing(target, gpu_uuid, same_pairs):
    before = target.ask(f"fill {MIB}")
    lock(target.pid)
    checkpoint(target.pid)
    other = uuid.uuid4()
    for pairs in (
        [(other, gpu_uuid), *same_pairs[1:]],
        [(gpu_uuid, other), *same_pairs[1:]],
        [*same_pairs, same_pairs[0]],
    ):
        with pytest.raises(driver.InvalidValueError, match="gpu_pairs"):
            restore(target.pid, CheckpointRestoreArgs(gpu_pairs=pairs))
        assert get_state(target.pid) is State.CHECKPOINTED
    args = CheckpointRestoreArgs()
    args.gpu_pairs_count = 1
    with pytest.raises(ValueError, match="gpu_pairs is not set"):
        restore(target.pid, args)  # the driver would crash this process
    restore(target.pid, CheckpointRestoreArgs(gpu_pairs=same_pairs))
    unlock(target.pid)
    assert target.ask("check") == before


def test_pairs_with_a_count_of_zero_do_not_remap(target):
    lock(target.pid)
    checkpoint(target.pid)
    args = CheckpointRestoreArgs(gpu_pairs=[(uuid.uuid4(), uuid.uuid4())])
    args.gpu_pairs_count = 0
    restore(target.pid, args)
    unlock(target.pid)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (lock, CheckpointLockArgs),
        (checkpoint, CheckpointCheckpointArgs),
        (restore, CheckpointRestoreArgs),
        (unlock, CheckpointUnlockArgs),
    ],
    ids=["lock", "checkpoint", "restore", "unlock"],
)
def test_reserved_bytes_are_refused(target, call, args):
    wrong = args()
    memoryview(wrong).cast("B")[63] = 1
    steps = {lock: [], checkpoint: [lock], restore: [lock, checkpoint], unlock: [lock]}
    for step in steps[call]:
        step(target.pid)
    before = get_state(target.pid)
    with pytest.raises(driver.InvalidValueError, match="reserved field"):
        call(target.pid, wrong)
    assert get_state(target.pid) is before


def test_lock_times_out_while_a_kernel_runs(target):
    assert target.ask("spin 3000") == "spinning"
    start = time.monotonic()
    with pytest.raises(driver.NotReadyError, match="the time was over"):
        lock(target.pid, CheckpointLockArgs(timeout_ms=300))
    assert 0.25 < time.monotonic() - start < 2.5
    assert get_state(target.pid) is State.RUNNING
    lock(target.pid)  # waits for the kernel
    assert time.monotonic() - start > 2.5
    unlock(target.pid)
    assert target.ask("wait") == "waited"


def test_other_threads_run_while_lock_waits(target):
    assert target.ask("spin 1500") == "spinning"
    waiter = threading.Thread(target=lock, args=[target.pid])
    waiter.start()
    ran = 0
    while waiter.is_alive():
        ran += 1
        time.sleep(0.01)
    assert ran > 50
    unlock(target.pid)


def copy_out(region):
    content = ctypes.create_string_buffer(region.size)
    pointer, size = ctypes.c_uint64(region.dev_ptr), ctypes.c_size_t(region.size)
    assert cuda.cuMemcpyDtoH_v2(content, pointer, size) == 0
    return content


def copy_in(region, content):
    pointer, size = ctypes.c_uint64(region.dev_ptr), ctypes.c_size_t(region.size)
    assert cuda.cuMemcpyHtoD_v2(pointer, content, size) == 0


def test_custom_storage_hands_out_the_memory(target, same_pairs):
    if not driver.has_custom_storage():
        refuses_custom_storage(target)
        return
    pid, before = target.pid, target.ask(f"fill {10 * MIB + 1}")
    save = CheckpointCheckpointArgs(custom_storage=True)
    load = CheckpointRestoreArgs(gpu_pairs=same_pairs, custom_storage=True)
    lock(pid)
    with pytest.raises(driver.InvalidContextError, match="device_primary_ctx_retain"):
        checkpoint(pid, save)
    assert get_state(pid) is State.LOCKED
    context = driver.device_primary_ctx_retain(0)
    assert cuda.cuCtxSetCurrent(ctypes.c_void_p(context)) == 0
    checkpoint(pid, save)
    assert get_state(pid) is State.CHECKPOINTING
    images = [copy_out(region) for region in save.custom_storage_info]
    assert sum(map(len, images)) >= 10 * MIB + 1
    driver.checkpoint_operation_complete(save)
    assert get_state(pid) is State.CHECKPOINTED
    restore(pid, load)
    assert get_state(pid) is State.RESTORING
    for region, image in zip(load.custom_storage_info, images, strict=True):
        copy_in(region, image)
    driver.checkpoint_operation_complete(load.custom_storage_info.handle)
    assert get_state(pid) is State.LOCKED
    unlock(pid)
    assert target.ask("check") == before
    driver.device_primary_ctx_release_v2(0)


def refuses_custom_storage(target):
    """Check what a driver older than CUDA 13.4 does."""
    lock(target.pid)
    args = CheckpointCheckpointArgs(custom_storage=True)
    with pytest.raises(driver.InvalidValueError, match=r"older than CUDA 13\.4"):
        checkpoint(target.pid, args)
    assert args.custom_storage_info is None
    assert get_state(target.pid) is State.LOCKED
    with pytest.raises(
        driver.FunctionNotFoundError, match=r"needs CUDA 13\.4 or later"
    ):
        driver.checkpoint_operation_complete(8)
    unlock(target.pid)


def test_symbols_appear_with_their_version():
    resolve, own = cuda.cuGetProcAddress_v2, driver.driver_get_version()
    pointer, status = ctypes.c_void_p(1), ctypes.c_int(-1)

    def found(name, version):
        arguments = ctypes.byref(pointer), version, ctypes.c_uint64(0)
        result = resolve(name, *arguments, ctypes.byref(status))
        return result, bool(pointer.value), status.value

    assert found(b"cuCheckpointProcessLock", 12080) == (0, True, 0)
    assert found(b"cuCheckpointOperationComplete", 13000) == (0, False, 1)
    assert found(b"cuCheckpointProcessLock", own + 10)[:2] == (1, False)


def test_count_without_pairs_is_reported_or_crashes_the_caller(spawn, target):
    lock(target.pid)
    checkpoint(target.pid)
    program = """
import ctypes, sys
from cuckpt import driver
args = (ctypes.c_uint64 * 8)(0, 1)
cuda = ctypes.CDLL(driver.library_path())
print(cuda.cuCheckpointProcessRestore(int(sys.argv[1]), args), flush=True)
"""
    caller = spawn("-c", program, str(target.pid))
    if driver.library_path() == str(simulator.LIBRARY):
        assert caller.answer() == "1"
    else:
        assert caller.process.wait(30) == -signal.SIGSEGV
    assert get_state(target.pid) is State.CHECKPOINTED
    restore(target.pid)
    unlock(target.pid)


def test_info_names_the_driver():
    from cuckpt import cli

    assert driver.driver_get_version() >= 12080
    assert os.path.exists(driver.library_path())
    assert cli.main(["info"]) == 0
