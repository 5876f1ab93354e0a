"""The GIL is free during a call, and other threads may do what they like."""

import ctypes
import gc
import threading
import time

import pytest

from cuckpt import driver
from cuckpt.structs import CheckpointCheckpointArgs, CheckpointRestoreArgs

OLD, NEW = bytes(range(16)), bytes(range(16, 32))

CALLS = {
    "init": driver.init,
    "device_get": driver.device_get,
    "device_get_uuid": driver.device_get_uuid_v2,
    "retain": driver.device_primary_ctx_retain,
    "release": driver.device_primary_ctx_release_v2,
    "get_state": driver.checkpoint_process_get_state,
    "get_restore_thread_id": driver.checkpoint_process_get_restore_thread_id,
    "lock": driver.checkpoint_process_lock,
    "checkpoint": driver.checkpoint_process_checkpoint,
    "restore": driver.checkpoint_process_restore,
    "unlock": driver.checkpoint_process_unlock,
}


def with_args(verb):
    return lambda pid: CALLS[verb](
        pid, getattr(driver, f"Checkpoint{verb.capitalize()}Args")()
    )


@pytest.mark.parametrize(
    "call",
    [*CALLS.values()]
    + [with_args(v) for v in ("lock", "checkpoint", "restore", "unlock")],
    ids=[*CALLS, "lock-args", "checkpoint-args", "restore-args", "unlock-args"],
)
def test_other_threads_run_while_a_call_blocks(hook, call):
    hook.sleep()
    ran = []
    done = threading.Event()

    def count():
        while not done.is_set():
            ran.append(time.monotonic())
            time.sleep(0.005)

    counter = threading.Thread(target=count)
    counter.start()
    start = time.monotonic()
    call(200)
    end = time.monotonic()
    done.set()
    counter.join()
    assert end - start >= 0.2
    assert any(start + 0.05 < moment < end - 0.05 for moment in ran)


def in_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_args_changed_during_the_call_change_nothing_for_it(hook):
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)] * 10)
    seen = []

    def change():
        args.gpu_pairs = [(NEW, NEW)]
        args.gpu_pairs_count = 10
        memoryview(args).cast("B")[:] = b"\xff" * 64
        gc.collect()
        seen.append([b"\xee" * size for size in [320] * 500])  # takes freed memory

    def answer(call, pid, address):
        in_another_thread(change)
        seen.append(hook.pairs_at(address))
        return 0

    hook.answer(answer)
    driver.checkpoint_process_restore(1, args)
    assert seen[1] == (OLD + NEW) * 10
    assert bytes(args) == b"\xff" * 64


def test_args_dropped_during_the_call_stay_good_for_it(hook):
    held = [CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)], custom_storage=True)]
    seen = []

    def drop():
        held.clear()
        gc.collect()
        held.extend(CheckpointRestoreArgs(gpu_pairs=[(NEW, NEW)]) for _ in range(100))

    def answer(call, pid, address):
        in_another_thread(drop)
        seen.append(hook.pairs_at(address))
        out = ctypes.c_void_p.from_address(address + 16).value
        ctypes.c_void_p.from_address(out).value = ctypes.addressof(info)
        return 0

    info = ctypes.create_string_buffer(24)
    hook.answer(answer)
    driver.checkpoint_process_restore(1, held[0])
    assert seen == [OLD + NEW]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (driver.checkpoint_process_checkpoint, CheckpointCheckpointArgs),
        (driver.checkpoint_process_restore, CheckpointRestoreArgs),
    ],
)
def test_args_with_custom_storage_serve_one_call_at_a_time(hook, function, args):
    shared = args(custom_storage=True)
    caught = []

    def second():
        with pytest.raises(RuntimeError, match="serves another call") as error:
            function(2, shared)
        caught.append(error)

    def answer(call, pid, address):
        in_another_thread(second)
        return 0

    hook.answer(answer)
    function(1, shared)
    assert [pid for _, pid, _ in hook.calls] == [1]
    assert len(caught) == 1
    hook.answer(0)
    function(3, shared)


@pytest.mark.parametrize("failure", ["error", "missing"])
def test_args_with_custom_storage_are_free_after_a_failure(hook, python, failure):
    program = """
import sys
from cuckpt import driver
args = driver.CheckpointRestoreArgs(custom_storage=True)
for _ in range(2):
    try:
        driver.checkpoint_process_restore(1, args)
    except driver.FunctionNotFoundError as error:
        print("missing")
"""
    if failure == "missing":
        result = python(program, NULL_DRIVER_VERSION="12040")
        assert result.stdout == "missing\n" * 2
        return
    args = CheckpointRestoreArgs(custom_storage=True)
    hook.answer(401)
    for _ in range(2):
        with pytest.raises(driver.IllegalStateError):
            driver.checkpoint_process_restore(1, args)


def test_args_without_custom_storage_serve_many_calls(hook):
    shared = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    seen = []

    def answer(call, pid, address):
        if pid == 1:
            in_another_thread(lambda: driver.checkpoint_process_restore(2, shared))
        seen.append((pid, hook.pairs_at(address)))
        return 0

    hook.answer(answer)
    driver.checkpoint_process_restore(1, shared)
    assert seen == [(2, OLD + NEW), (1, OLD + NEW)]


def test_first_calls_from_many_threads(python):
    program = """
import threading
from cuckpt import driver
barrier = threading.Barrier(16)
calls = [
    lambda: driver.init(0),
    lambda: driver.checkpoint_process_get_state(1),
    lambda: driver.checkpoint_process_restore(1),
    lambda: driver.library_path(),
]
done = []
def first(call):
    barrier.wait()
    call()
    done.append(1)
threads = [threading.Thread(target=first, args=[calls[i % 4]]) for i in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done))
"""
    assert python(program).stdout == "16\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_others_load_the_driver(python):
    program = """
import os, threading, time
from cuckpt import driver
threads = [threading.Thread(target=driver.library_path) for _ in range(3)]
for thread in threads: thread.start()
time.sleep(0.05)
child = os.fork()
if child == 0:
    driver.checkpoint_process_get_state(1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(program, NULL_DRIVER_LOAD_MS="200").stdout == "7\n"


def test_fork_keeps_the_driver(python):
    program = """
import os
from cuckpt import driver
driver.checkpoint_process_get_state(1)
if os.fork() == 0:
    driver.checkpoint_process_get_state(1)
    driver.checkpoint_process_lock(1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert python(program).stdout == "7\n"
