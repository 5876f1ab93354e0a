"""Threads share structs, args and operations: on any Python, with a GIL or without.

Each test lets several threads do at once what must not be seen half done, and is
strict where no GIL makes them take turns.
"""

import copy
import ctypes
import gc
import itertools
import pickle
import struct
import sys
import threading
import time

import pytest

from cuckpt import driver
from cuckpt.structs import (
    CheckpointCheckpointArgs,
    CheckpointCustomStorageInfo,
    CheckpointGpuPair,
    CheckpointLockArgs,
    CheckpointRestoreArgs,
)

THREADS = 6
SECONDS = 0.3


HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


def let_others_run(phase, info):
    time.sleep(0)


@pytest.fixture(autouse=True)
def many_switches():
    """With a GIL, let threads take turns often, and in each garbage collection."""
    if not HAS_GIL:
        yield
        return
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    gc.callbacks.append(let_others_run)
    yield
    gc.callbacks.remove(let_others_run)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def at_once(*functions):
    """Call each in a thread of its own, together; return what they returned."""
    barrier = threading.Barrier(len(functions))
    results = [None] * len(functions)
    errors = []

    def run(place, function):
        try:
            barrier.wait(30)
            results[place] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def again_and_again(function):
    def repeat():
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            function()

    return repeat


def homogeneous(content, size):
    """Tell whether a number of records of a size hold one and the same byte."""
    return len(content) % size == 0 and len(set(content)) <= 1


def pairs_of(number):
    """Return as many pairs as the number, which each of their bytes says."""
    return [(bytes([number]) * 16, bytes([number]) * 16)] * number


def set_pairs_forever(args):
    numbers = itertools.cycle(range(1, 20))

    def change():
        args.gpu_pairs = pairs_of(next(numbers))

    return again_and_again(change)


def test_a_call_gets_pairs_that_belong_together(hook):
    args = CheckpointRestoreArgs(gpu_pairs=pairs_of(3))
    got = hook.keep_pairs()

    def restore():
        driver.checkpoint_process_restore(1, args)
        hook.calls.clear()

    changers = [set_pairs_forever(args)] * 2
    at_once(*changers, *[again_and_again(restore)] * 3)
    assert len(got) > 10
    for content in got:
        assert homogeneous(content, 32)
        assert len(content) == 32 * content[0]


def test_copies_have_pairs_that_belong_together():
    args = CheckpointRestoreArgs(gpu_pairs=pairs_of(3))

    def look():
        for copied in copy.copy(args), pickle.loads(pickle.dumps(args)):
            content = ctypes.string_at(copied.gpu_pairs, 32 * copied.gpu_pairs_count)
            assert homogeneous(content, 32)
            assert len(content) == 32 * content[0]
        assert repr(args).startswith("CheckpointRestoreArgs(gpu_pairs=[")

    at_once(*[set_pairs_forever(args)] * 2, *[again_and_again(look)] * 3)


def test_copies_own_what_they_point_to():
    args = CheckpointRestoreArgs()
    wrong = []

    def change():
        args.gpu_pairs = pairs_of(2)
        args.gpu_pairs = 0
        args.__init__(custom_storage=True)
        args.custom_storage_info_out = 0

    def look():
        copied = copy.copy(args)
        out = args.custom_storage_info_out
        if out and copied.custom_storage_info_out == out:
            wrong.append(copied)
        pickle.dumps(copied)  # refused if it holds an address of another

    at_once(again_and_again(change), *[again_and_again(look)] * 3)
    assert wrong == []


def test_collection_while_pairs_are_set_first_loses_none():
    # Up to Python 3.11 one can come in any creation of an object.
    for moment in range(1, 20):
        args = CheckpointRestoreArgs()

        def set_pairs(phase, info, args=args):
            gc.callbacks.remove(set_pairs)
            args.gpu_pairs = pairs_of(2)

        gc.collect()
        gc.set_threshold(gc.get_count()[0] + moment)
        gc.callbacks.append(set_pairs)
        args.__init__(custom_storage=True)
        gc.set_threshold(50)
        if set_pairs in gc.callbacks:
            gc.callbacks.remove(set_pairs)
        pickle.dumps(args)  # refused if it holds what it does not own


def test_pairs_set_for_the_first_time_by_many():
    for _ in range(200):
        args = CheckpointRestoreArgs()

        def own(args=args):
            args.gpu_pairs = pairs_of(2)

        at_once(*[own] * 3)
        assert ctypes.string_at(args.gpu_pairs, 64) == bytes([2]) * 64
        assert repr(args).count("('GPU-") == 2


def test_fields_hold_what_somebody_set():
    args = CheckpointLockArgs()
    pair = CheckpointGpuPair()
    values = [bytes([n]) * 16 for n in range(4)]

    def change(n):
        def do():
            args.timeout_ms = n * 0x01010101
            pair.new_uuid = values[n]

        return again_and_again(do)

    def look():
        assert homogeneous(struct.pack("<I", args.timeout_ms), 4)
        assert bytes(CheckpointLockArgs.from_buffer(memoryview(args)))[4:] == bytes(60)
        assert len(pair.new_uuid.bytes) == 16
        assert pair.old_uuid.bytes == bytes(16)

    at_once(*map(change, range(4)), *[again_and_again(look)] * 2)
    assert pair.new_uuid.bytes in values


class Storage:
    """A driver that hands out operations and minds that each ends once."""

    def __init__(self, hook):
        self.handles = itertools.count(0x1000, 0x10)
        self.open = {}
        self.wrong = []
        hook.answer(self.answer)

    def answer(self, call, pid, argument):
        if call == "cuCheckpointOperationComplete":
            info = self.open.pop(argument, None)
            if info is None:
                self.wrong.append(argument)
                return 1
            ctypes.memset(info, 0xFF, len(info))
            return 0
        handle = next(self.handles)
        content = struct.pack("<QQQ", handle, 0, 0)
        self.open[handle] = info = ctypes.create_string_buffer(content)
        out = ctypes.c_void_p.from_address(argument).value
        ctypes.c_void_p.from_address(out).value = ctypes.addressof(info)
        return 0


def test_shared_args_lose_no_operation_and_end_none_twice(hook):
    storage = Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    begun, ended = [], []

    def begin():
        try:
            driver.checkpoint_process_checkpoint(1, args)
            begun.append(1)
        except RuntimeError:  # it serves another call, or has an open operation
            pass
        hook.calls.clear()

    def complete():
        try:
            driver.checkpoint_operation_complete(args)
            ended.append(1)
        except (RuntimeError, ValueError):  # somebody else does, or has; or none
            pass

    at_once(*[again_and_again(begin)] * 3, *[again_and_again(complete)] * 3)
    assert storage.wrong == []
    assert len(ended) > 10
    assert len(begun) - len(ended) == len(storage.open) <= 1
    if storage.open:
        driver.checkpoint_operation_complete(args)
    assert storage.open == {}


class ForeignAnswer:
    """What a driver answers to a call that cuckpt has not made."""

    def __init__(self, handle):
        self.handle = handle
        self.region = ctypes.create_string_buffer(struct.pack("<QQQ", 0x7000, 10, 5))
        content = struct.pack("<QQQ", handle, ctypes.addressof(self.region), 1)
        self.memory = ctypes.create_string_buffer(content)

    def args(self):
        made = CheckpointCheckpointArgs(custom_storage=True)
        out = ctypes.c_void_p.from_address(made.custom_storage_info_out)
        out.value = ctypes.addressof(self.memory)
        return made

    def info(self):
        address = ctypes.addressof(self.memory)
        return CheckpointCustomStorageInfo.from_ptr(address)

    def assert_end(self, infos):
        driver.checkpoint_operation_complete(self.handle)
        for info in infos:
            with pytest.raises(ValueError, match="not mapped"):
                info.per_device_data[0].__cuda_array_interface__  # noqa: B018


ANSWERS = 1000


def test_many_who_look_first_at_an_answer_see_the_same(hook):
    hook.remove()
    answers = [ForeignAnswer(0x1000 + n) for n in range(ANSWERS)]
    all_args = [answer.args() for answer in answers]
    look = [lambda: [args.custom_storage_info for args in all_args]] * THREADS
    for answer, infos in zip(answers, zip(*at_once(*look), strict=True), strict=True):
        assert all(info is infos[0] for info in infos)
        answer.assert_end(infos)


def test_answer_is_not_read_after_another_thread_has_completed(hook):
    answers = {0x1000 + n: ForeignAnswer(0x1000 + n) for n in range(ANSWERS)}

    def free(call, pid, handle):
        ctypes.memset(answers[handle].memory, 0xEE, 16)
        ctypes.memset(answers[handle].region, 0xEE, 24)
        return 0

    hook.answer(free)
    all_args = [answer.args() for answer in answers.values()]

    def look():
        return [args.custom_storage_info.per_device_data[0].size for args in all_args]

    def complete():
        for args in all_args:
            driver.checkpoint_operation_complete(args)

    sizes, others, _ = at_once(look, look, complete)
    assert set(sizes + others) == {10}


def test_infos_made_of_one_handle_at_once_end_together(hook):
    hook.remove()
    answers = [ForeignAnswer(0x1000 + n) for n in range(ANSWERS)]
    make = [lambda: [answer.info() for answer in answers]] * THREADS
    for answer, infos in zip(answers, zip(*at_once(*make), strict=True), strict=True):
        answer.assert_end(infos)


def test_one_of_many_completes_an_operation(hook):
    storage = Storage(hook)
    all_args = [CheckpointCheckpointArgs(custom_storage=True) for _ in range(3000)]
    for args in all_args:
        driver.checkpoint_process_checkpoint(1, args)
    completed = []

    def complete_all():
        for args in all_args:
            try:
                driver.checkpoint_operation_complete(args)
                completed.append(args)
            except (RuntimeError, ValueError):  # somebody else does, or has
                pass

    at_once(*[complete_all] * THREADS)
    assert storage.wrong == []
    assert len(completed) == len(all_args)


def test_subclass_makes_objects_while_others_look_at_all_there_are():
    class Sub(CheckpointLockArgs):
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls)

    address = CheckpointLockArgs(timeout_ms=5)
    make = again_and_again(lambda: Sub.from_ptr(address.ptr))
    at_once(make, make, again_and_again(gc.get_objects))


def test_many_who_raise_first_raise_the_same_class(python):
    program = """
import sys, threading, types
from cuckpt import errors

class Peer(Exception):
    pass

sys.setswitchinterval(1e-6)
peer = types.ModuleType("cuda.bindings._v2.driver")
for name in errors.__all__:
    setattr(peer, name, type(name, (Peer,), {}))
sys.modules[peer.__name__] = peer
for code in errors.Result:
    if code:
        barrier = threading.Barrier(6)
        made = []
        def make():
            barrier.wait()
            made.append(type(errors.driver_error(code)))
        threads = [threading.Thread(target=make) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(made) == 6 and len(set(made)) == 1, made
        assert issubclass(made[0], Peer)
print("same")
"""
    assert python(program).stdout == "same\n"
