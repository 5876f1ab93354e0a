"""What is pointed to is kept alive, and let go again."""

import ctypes
import gc
import itertools
import struct
import sys

import pytest

from cuckpt import driver, structs
from cuckpt.structs import CheckpointGpuPair, CheckpointRestoreArgs, Uuid

CLASSES = [getattr(structs, name) for name in structs.__all__]
OLD, NEW = bytes(range(16)), bytes(range(16, 32))

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


@every_class
def test_from_buffer_holds_the_export(cls):
    memory = bytearray(len(bytes(cls())))
    made = cls.from_buffer(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del made
    memory.extend(b"more")


@every_class
def test_from_ptr_holds_the_owner(cls):
    owner = ctypes.create_string_buffer(64)
    count = sys.getrefcount(owner)
    made = cls.from_ptr(ctypes.addressof(owner), owner=owner)
    assert sys.getrefcount(owner) == count + 1
    del made
    assert sys.getrefcount(owner) == count


@every_class
def test_cycle_with_the_owner_is_collected(cls):
    class Owner:
        alive = 0

        def __init__(self):
            Owner.alive += 1
            self.memory = ctypes.create_string_buffer(64)
            self.view = cls.from_ptr(ctypes.addressof(self.memory), owner=self)

        def __del__(self):
            Owner.alive -= 1

    Owner()
    gc.collect()
    assert Owner.alive == 0


def test_export_cannot_be_released_by_others():
    memory = bytearray(b"A" * 64)
    made = structs.CheckpointLockArgs.from_buffer(memory)
    for found in gc.get_referents(made):
        assert not hasattr(found, "release")
    with pytest.raises(BufferError):
        memory.clear()


@pytest.mark.parametrize("kind", ["from_buffer", "from_ptr"])
def test_long_chain_of_views_is_freed(python, kind):
    program = """
from cuckpt.structs import CheckpointLockArgs as Args
made = Args()
for _ in range(1_000_000):
    made = Args.{}
del made
print("freed")
"""
    view = {
        "from_buffer": "from_buffer(made)",
        "from_ptr": "from_ptr(made.ptr, owner=made)",
    }
    assert python(program.format(view[kind])).stdout == "freed\n"


def test_cycle_through_a_buffer_is_collected():
    class Memory(bytearray):
        alive = 0

        def __init__(self, size):
            super().__init__(size)
            Memory.alive += 1
            self.view = structs.CheckpointLockArgs.from_buffer(self)

        def __del__(self):
            Memory.alive -= 1

    Memory(64)
    gc.collect()
    assert Memory.alive == 0


def test_views_of_a_pair_hold_it():
    memory = bytearray(32)
    view = CheckpointGpuPair.from_buffer(memory).old_uuid
    with pytest.raises(BufferError):
        memory.clear()
    view.bytes = OLD
    assert memory[:16] == OLD
    del view
    memory.clear()


def test_buffer_of_a_struct_holds_it():
    view = memoryview(Uuid(OLD))
    [Uuid(NEW) for _ in range(100)]
    assert bytes(view) == OLD


def test_struct_in_a_struct():
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    address = args.gpu_pairs
    view = CheckpointRestoreArgs.from_buffer(args)
    del args
    gc.collect()
    [bytes(64) for _ in range(1000)]
    assert view.gpu_pairs == address
    assert ctypes.string_at(address, 32) == OLD + NEW


def test_info_outlives_the_args_and_the_drivers_memory(hook):
    array = ctypes.create_string_buffer(struct.pack("<QQQ", 0x7000, 10, 5))
    info = ctypes.create_string_buffer(
        struct.pack("<QQQ", 0xC0FFEE, ctypes.addressof(array), 1)
    )

    def answer(call, pid, argument):
        out = ctypes.c_void_p.from_address(argument).value
        ctypes.c_void_p.from_address(out).value = ctypes.addressof(info)
        return 0

    hook.answer(answer)
    args = structs.CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    region = next(iter(args.custom_storage_info))
    ctypes.memset(info, 0xFF, 24)
    ctypes.memset(array, 0xFF, 24)
    del args
    gc.collect()
    assert (region.dev_ptr, region.size, region.stream) == (0x7000, 10, 5)


def resident_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4


FUNCTIONS = {
    "init": lambda: driver.init(0),
    "driver_get_version": driver.driver_get_version,
    "device_get_count": driver.device_get_count,
    "device_get": lambda: driver.device_get(0),
    "device_get_uuid_v2": lambda: driver.device_get_uuid_v2(0),
    "retain": lambda: driver.device_primary_ctx_retain(0),
    "release": lambda: driver.device_primary_ctx_release_v2(0),
    "get_state": lambda: driver.checkpoint_process_get_state(1),
    "get_restore_thread_id": lambda: driver.checkpoint_process_get_restore_thread_id(1),
    "lock": lambda: driver.checkpoint_process_lock(1),
    "lock-args": lambda: driver.checkpoint_process_lock(1, SHARED[0]),
    "checkpoint": lambda: driver.checkpoint_process_checkpoint(1),
    "checkpoint-args": lambda: driver.checkpoint_process_checkpoint(1, SHARED[1]),
    "restore": lambda: driver.checkpoint_process_restore(1),
    "restore-args": lambda: driver.checkpoint_process_restore(1, SHARED[2]),
    "unlock": lambda: driver.checkpoint_process_unlock(1),
    "unlock-args": lambda: driver.checkpoint_process_unlock(1, SHARED[3]),
    "complete": lambda: driver.checkpoint_operation_complete(1),
    "library_path": driver.library_path,
    "has_checkpoint": driver.has_checkpoint,
    "has_custom_storage": driver.has_custom_storage,
}
SHARED = (
    structs.CheckpointLockArgs(),
    structs.CheckpointCheckpointArgs(custom_storage=True),
    CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)]),
    structs.CheckpointUnlockArgs(),
)
CONSTRUCTORS = {
    **{name: getattr(structs, name) for name in structs.__all__},
    "lock-timeout": lambda: structs.CheckpointLockArgs(timeout_ms=5),
    "pair-uuids": lambda: CheckpointGpuPair(OLD, NEW),
    "restore-pairs": lambda: CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)]),
    "restore-custom": lambda: CheckpointRestoreArgs(custom_storage=True),
}


@pytest.mark.thread_unsafe(reason="the memory is that of all threads")
@pytest.mark.parametrize("name", [*FUNCTIONS, *CONSTRUCTORS])
def test_memory_is_the_same_after_many_calls(hook, pytestconfig, name):
    hook.remove()
    call, times = FUNCTIONS.get(name), pytestconfig.getoption("calls")
    if not call:
        call, times = CONSTRUCTORS[name], times // 10

    def repeat(times):
        for _ in itertools.repeat(None, times):
            call()
        gc.collect()
        return resident_kib()

    repeat(times // 100)
    before = repeat(times // 100)
    assert repeat(times) - before < 128


def test_nothing_leaks(hook):
    hook.remove()
    memory = bytearray(64)

    def everything():
        args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)], custom_storage=True)
        driver.checkpoint_process_restore(1, args)
        driver.checkpoint_process_get_state(1)
        driver.device_get_uuid_v2(0)
        CheckpointGpuPair(OLD, NEW).old_uuid.bytes  # noqa: B018
        CheckpointRestoreArgs.from_buffer(memory)
        for wrong in "x", None, 2**40:
            try:
                driver.checkpoint_process_lock(wrong)
            except (TypeError, OverflowError):
                pass
        hook.answer(401)
        try:
            driver.checkpoint_process_checkpoint(1, args.ptr)
        except driver.IllegalStateError:
            pass
        hook.remove()

    def many():
        for _ in range(3000):
            everything()
        hook.calls.clear()
        gc.collect()
        return resident_kib()

    many()
    before = many()
    assert many() - before < 256
