"""What goes wrong in cuda.bindings._v2.driver 13.5, and must not here.

Each test replays one fault that was reproduced there.
"""

import copy
import pickle
import subprocess

import pytest

from cuckpt import driver, structs
from cuckpt.structs import (
    CheckpointCheckpointArgs,
    CheckpointGpuPair,
    CheckpointLockArgs,
    CheckpointRestoreArgs,
    CheckpointUnlockArgs,
    Uuid,
)

CLASSES = [getattr(structs, name) for name in structs.__all__]
OLD, NEW = bytes(range(16)), bytes(range(16, 32))

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def test_setting_a_uuid_to_none_segfaults():
    pair = CheckpointGpuPair(OLD, NEW)
    for attribute in "old_uuid", "new_uuid":
        with pytest.raises(TypeError, match="not NoneType"):
            setattr(pair, attribute, None)
    assert bytes(pair) == OLD + NEW


@every_class
def test_object_made_by_new_alone_segfaults(cls):
    made = cls.__new__(cls)
    for attribute in dir(made):
        try:
            getattr(made, attribute)
        except ValueError:
            assert attribute == "per_device_data"
    assert (repr(made), bytes(made)) == (repr(cls()), bytes(cls()))


@every_class
def test_object_made_by_new_alone_shows_foreign_memory(cls):
    for _ in range(1000):
        dirty = cls()
        memoryview(dirty).cast("B")[:] = b"\xaa" * len(bytes(dirty))
        del dirty
        assert not any(bytes(cls.__new__(cls)))


@every_class
def test_from_buffer_leaves_a_dangling_struct(cls):
    memory = bytearray(len(bytes(cls())))
    made = cls.from_buffer(memory)
    with pytest.raises(BufferError):
        memory.clear()
    assert bytes(made) == memory


def test_uuid_bytes_set_to_a_number_are_zeroed():
    made = Uuid(OLD)
    with pytest.raises(TypeError, match="not int"):
        made.bytes = 16
    assert made.bytes == OLD


@every_class
def test_item_assignment_makes_the_struct_read_only(cls):
    made = cls()
    with pytest.raises(TypeError, match="item assignment"):
        made[0] = bytes(len(bytes(made)))
    assert not memoryview(made).readonly


def test_args_of_the_wrong_class_are_accepted(hook):
    for wrong in (
        CheckpointLockArgs(),
        CheckpointUnlockArgs(),
        CheckpointCheckpointArgs(),
        "12",
        12.9,
    ):
        with pytest.raises(TypeError, match="args must be"):
            driver.checkpoint_process_restore(1, wrong)
    assert hook.calls == []


def test_fractions_are_cut(hook):
    with pytest.raises(TypeError, match="pid must be an integer, not float"):
        driver.checkpoint_process_get_state(1.9)
    with pytest.raises(TypeError, match="timeout_ms must be an integer, not float"):
        CheckpointLockArgs().timeout_ms = 1.5
    assert hook.calls == []


def test_gpu_pairs_have_no_keep_alive_and_no_count(hook):
    args = CheckpointRestoreArgs(gpu_pairs=[CheckpointGpuPair(OLD, NEW), (NEW, OLD)])
    assert args.gpu_pairs_count == 2
    [bytes(64) for _ in range(1000)]
    assert "'GPU-00010203" in repr(args)


def test_count_without_pairs_crashes_in_libcuda(hook):
    args = CheckpointRestoreArgs()
    args.gpu_pairs_count = 1
    with pytest.raises(ValueError, match="gpu_pairs is not set"):
        driver.checkpoint_process_restore(1, args)
    assert hook.calls == []


def test_repr_shows_an_address_only():
    assert repr(Uuid(OLD)) == "Uuid('GPU-00010203-0405-0607-0809-0a0b0c0d0e0f')"
    assert repr(CheckpointLockArgs(timeout_ms=7)) == "CheckpointLockArgs(timeout_ms=7)"


@every_class
def test_unhashable_without_saying_so(cls):
    assert cls.__hash__ is None
    assert "no hash" in structs.Struct.__doc__


@every_class
def test_no_pickle_and_no_copy(cls):
    assert pickle.loads(pickle.dumps(cls())) == copy.copy(cls()) == cls()


def test_needs_numpy(python):
    program = """
import sys
sys.modules["numpy"] = None  # importing it fails
from cuckpt import driver
args = driver.CheckpointRestoreArgs(gpu_pairs=[(bytes(16), bytes(16))])
driver.checkpoint_process_restore(1, args)
print(args == driver.CheckpointRestoreArgs.from_buffer(args))
"""
    assert python(program).stdout == "True\n"


def test_asks_for_complete_at_a_version_too_high(python):
    program = """
from cuckpt import driver
driver.checkpoint_operation_complete(8)
print("ran")
"""
    assert python(program, NULL_DRIVER_VERSION="13040").stdout == "ran\n"


def test_has_no_typing_information():
    from importlib.resources import files

    shipped = {path.name for path in files("cuckpt").iterdir()}
    assert {"py.typed", "driver.pyi", "structs.pyi", "errors.pyi"} <= shipped
    assert {"__init__.pxd", "_driver.pxd", "driver.pxd", "structs.pxd"} <= shipped


def test_custom_storage_cannot_be_read():
    for name in "CheckpointCustomStorageInfo", "CheckpointCustomStoragePerDeviceData":
        assert isinstance(getattr(driver, name), type)


# v1


def test_v1_number_as_gpu_pairs_segfaults():
    with pytest.raises(TypeError, match="not 5"):
        CheckpointRestoreArgs(gpu_pairs=[5])


def test_v1_unknown_state_or_result_raises_value_error(hook):
    def answer(call, pid, state):
        import ctypes

        ctypes.c_int.from_address(state).value = 99
        return 0

    hook.answer(answer)
    assert driver.checkpoint_process_get_state(1) == 99
    hook.answer(12345)
    with pytest.raises(driver.DriverError, match="12345"):
        driver.checkpoint_process_get_state(1)


def test_program_survives_the_faults_that_crash(python):
    # The same once more in a process of its own, whose death would be seen.
    program = """
from cuckpt import driver
for cls in (driver.Uuid, driver.CheckpointGpuPair, driver.CheckpointRestoreArgs):
    bytes(cls.__new__(cls))
try:
    driver.CheckpointGpuPair().new_uuid = None
except TypeError:
    print("alive")
"""
    result = python(program)
    assert isinstance(result, subprocess.CompletedProcess)
    assert result.stdout == "alive\n"
