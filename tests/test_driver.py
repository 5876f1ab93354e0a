"""Every function over the do-nothing driver: what is passed and what returns."""

import ctypes
import inspect
import struct
import tracemalloc

import pytest

from cuckpt import driver
from cuckpt.structs import (
    CheckpointCheckpointArgs,
    CheckpointGpuPair,
    CheckpointLockArgs,
    CheckpointRestoreArgs,
    CheckpointUnlockArgs,
    Uuid,
)

ARGS = {
    "lock": CheckpointLockArgs,
    "checkpoint": CheckpointCheckpointArgs,
    "restore": CheckpointRestoreArgs,
    "unlock": CheckpointUnlockArgs,
}
OLD, NEW = bytes(range(16)), bytes(range(16, 32))
INT32 = -(2**31), -1, 0, 1, 2**31 - 1

every_verb = pytest.mark.parametrize("verb", ARGS)


def call(verb, *arguments, **keywords):
    return getattr(driver, f"checkpoint_process_{verb}")(*arguments, **keywords)


class Index:
    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


def test_plain_functions_return_what_the_driver_says(hook):
    def answer(call, number, argument):
        if call in ("cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet"):
            ctypes.c_int.from_address(argument).value = 4711
        elif call == "cuDeviceGetUuid_v2":
            ctypes.memmove(argument, OLD, 16)
        elif call == "cuDevicePrimaryCtxRetain":
            ctypes.c_void_p.from_address(argument).value = 0x7FFF_FFFF_0000
        return 0

    hook.answer(answer)
    assert driver.init(0) is None
    assert driver.init() is None
    assert driver.driver_get_version() == 4711
    assert driver.device_get_count() == 4711
    assert driver.device_get(ordinal=3) == 4711
    assert driver.device_get_uuid_v2(dev=0) == Uuid(OLD)
    assert driver.device_primary_ctx_retain(dev=2) == 0x7FFF_FFFF_0000
    assert driver.device_primary_ctx_release_v2(dev=2) is None
    assert [pid for _, pid, _ in hook.calls] == [0, 0, 0, 0, 3, 0, 2, 2]


@pytest.mark.parametrize("number", [*range(6), 6, -1, 1000])
def test_get_state_returns_the_member_or_the_number(hook, number):
    def answer(call, pid, state):
        ctypes.c_int.from_address(state).value = number
        return 0

    hook.answer(answer)
    state = driver.checkpoint_process_get_state(1)
    assert state == number
    known = 0 <= number < 6
    assert type(state) is (driver.ProcessState if known else int)


def test_get_restore_thread_id_returns_the_number(hook):
    hook.remove()
    assert driver.checkpoint_process_get_restore_thread_id(pid=4711) == 4711


@every_verb
@pytest.mark.parametrize("pid", INT32)
def test_any_32_bit_pid_reaches_the_driver(hook, verb, pid):
    for form in pid, Index(pid):
        call(verb, form)
        assert hook.calls[-1][1:] == (pid, None)


@every_verb
def test_args_may_be_left_out(hook, verb):
    for arguments in (1,), (1, None), (1, 0):
        assert call(verb, *arguments) is None
        assert hook.calls[-1][2] is None
    call(verb, pid=1, args=None)
    assert len(hook.calls) == 4


@every_verb
def test_args_reach_the_driver_with_their_content(hook, verb):
    seen = []

    def answer(call, pid, address):
        seen.append(ctypes.string_at(address, 64))
        return 0

    hook.answer(answer)
    args = ARGS[verb]()
    memoryview(args).cast("B")[40:] = bytes(range(24))  # a reserved field
    subclass = type("Sub", (ARGS[verb],), {})
    for form in (
        args,
        args.ptr,
        Index(args.ptr),
        ARGS[verb].from_buffer(args),
        subclass.from_buffer(args),
    ):
        call(verb, 1, form)
    assert seen == [bytes(args)] * 5


@every_verb
def test_args_of_another_class_are_refused(hook, verb):
    for other in ARGS:
        if other != verb:
            with pytest.raises(TypeError, match=f"{ARGS[verb].__name__}.*not"):
                call(verb, 1, ARGS[other]())
    for number in 1, 1000, 4095:  # as if it were a timeout
        with pytest.raises(
            ValueError, match=rf"{number} is no address.*Args\(\.\.\.\)"
        ):
            call(verb, 1, number)
    for wrong in CheckpointGpuPair(), "12", 12.9, b"1", True, False, [], object():
        with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
            call(verb, 1, wrong)
    assert hook.calls == []


PARAMETERS = [
    (name, parameter)
    for name in driver.__all__
    if inspect.isroutine(getattr(driver, name))
    for parameter in inspect.signature(getattr(driver, name)).parameters
    if parameter not in ("args", "handle")
]


@pytest.mark.parametrize(("function", "parameter"), PARAMETERS)
def test_wrong_numbers_are_refused_by_name(hook, function, parameter):
    for wrong in 1.9, "1", None, b"1", 1j:
        with pytest.raises(TypeError, match=f"{parameter} must be an integer, not"):
            getattr(driver, function)(wrong)
    for wrong in 2**32, -(2**31) - 1, 2**64, -(2**64):
        with pytest.raises(
            OverflowError, match=f"{parameter} must be between .*{wrong}"
        ):
            getattr(driver, function)(wrong)
    with pytest.raises(OverflowError, match=f"{parameter} must be .*so large"):
        getattr(driver, function)(10**5000)
    assert hook.calls == []


def test_wrong_number_of_arguments(hook):
    for arguments in (), (1, None, None):
        with pytest.raises(TypeError):
            driver.checkpoint_process_lock(*arguments)
    with pytest.raises(TypeError):
        driver.checkpoint_process_lock(1, arg=None)


# GPU pairs


def test_restore_passes_the_pairs(hook):
    seen = hook.keep_pairs()
    driver.checkpoint_process_restore(
        1, CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW), (NEW, OLD)])
    )
    assert seen == [OLD + NEW + NEW + OLD]


def test_restore_refuses_a_count_without_pairs(hook):
    args = CheckpointRestoreArgs()
    args.gpu_pairs_count = 2
    text = "gpu_pairs_count is 2, but gpu_pairs is not set"
    for form in args, args.ptr, CheckpointRestoreArgs.from_buffer(args):
        with pytest.raises(ValueError, match=text):
            driver.checkpoint_process_restore(1, form)
    assert hook.calls == []


def test_restore_refuses_a_count_above_the_pairs(hook):
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    args.gpu_pairs_count = 3
    with pytest.raises(ValueError, match="gpu_pairs_count is 3, but gpu_pairs has 1"):
        driver.checkpoint_process_restore(1, args)
    assert hook.calls == []
    for fine in 1, 0:
        args.gpu_pairs_count = fine
        driver.checkpoint_process_restore(1, args)


# Custom storage


class Storage:
    """What a driver with custom storage does, over memory that is not a GPU's."""

    HANDLE = 0xC0FFEE

    def __init__(self, hook, regions=((0x7000, 10, 5), (0x8000, 0, 0))):
        self.array = ctypes.create_string_buffer(
            b"".join(struct.pack("<QQQ", *region) for region in regions)
        )
        array = ctypes.addressof(self.array) if regions else 0
        self.info = ctypes.create_string_buffer(
            struct.pack("<QQQ", self.HANDLE, array, len(regions))
        )
        self.complete = 0
        hook.answer(self.answer)

    def answer(self, call, pid, argument):
        if call == "cuCheckpointOperationComplete":
            assert argument == self.HANDLE
            return self.complete
        offset = {"cuCheckpointProcessCheckpoint": 0, "cuCheckpointProcessRestore": 16}
        out = ctypes.c_void_p.from_address(argument + offset[call]).value
        cell = ctypes.c_void_p.from_address(out)
        assert cell.value is None
        cell.value = ctypes.addressof(self.info)
        return 0

    def free(self):
        """Do as the driver after Complete: the info is no more."""
        ctypes.memset(self.info, 0xFF, len(self.info))
        ctypes.memset(self.array, 0xFF, len(self.array))


custom_storage_calls = pytest.mark.parametrize("verb", ["checkpoint", "restore"])


@custom_storage_calls
def test_custom_storage_info_is_a_copy(hook, verb):
    storage = Storage(hook)
    args = ARGS[verb](custom_storage=True)
    assert call(verb, 1, args) is None
    storage.free()
    info = args.custom_storage_info
    assert info is args.custom_storage_info
    assert (info.handle, info.device_count, len(info)) == (storage.HANDLE, 2, 2)
    assert [(r.dev_ptr, r.size, r.stream) for r in info] == [
        (0x7000, 10, 5),
        (0x8000, 0, 0),
    ]
    for made in info, *info:
        assert memoryview(made).readonly


@custom_storage_calls
def test_custom_storage_info_is_none_after_a_failure(hook, verb):
    Storage(hook)
    args = ARGS[verb](custom_storage=True)
    call(verb, 1, args)
    driver.checkpoint_operation_complete(args)
    hook.answer(401)
    with pytest.raises(driver.IllegalStateError):
        call(verb, 1, args)
    assert args.custom_storage_info is None


@custom_storage_calls
def test_args_with_an_open_operation_are_not_overwritten(hook, verb):
    storage = Storage(hook)
    args = ARGS[verb](custom_storage=True)
    call(verb, 1, args)
    calls = len(hook.calls)
    with pytest.raises(RuntimeError, match="waits for completion"):
        call(verb, 2, args)
    assert len(hook.calls) == calls
    storage.complete = 900
    with pytest.raises(driver.StreamCaptureUnsupportedError):
        driver.checkpoint_operation_complete(args)
    call(verb, 2, args)  # an attempt was made: the caller knows


def test_custom_storage_without_devices(hook):
    Storage(hook, regions=())
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    assert list(args.custom_storage_info) == []
    assert args.custom_storage_info


def test_answer_at_an_address_of_ones_own(hook):
    storage = Storage(hook)
    cell = ctypes.c_void_p()
    args = CheckpointCheckpointArgs()
    args.custom_storage_info_out = ctypes.addressof(cell)
    driver.checkpoint_process_checkpoint(1, args)
    assert cell.value == ctypes.addressof(storage.info)
    assert args.custom_storage_info is None


def test_answer_to_a_call_of_another_binding_is_found(hook):
    # cuda.bindings calls the driver with the address of cuckpt's object.
    storage = Storage(hook)
    args = CheckpointRestoreArgs(custom_storage=True)
    assert storage.answer("cuCheckpointProcessRestore", 1, args.ptr) == 0
    assert args.custom_storage_info.handle == storage.HANDLE


@pytest.mark.parametrize(
    "name",
    [
        lambda args: args,
        lambda args: args.custom_storage_info,
        lambda args: args.custom_storage_info.handle,
        lambda args: Index(args.custom_storage_info.handle),
    ],
    ids=["args", "info", "handle", "index"],
)
def test_complete_ends_the_regions_by_any_name(hook, name):
    Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    region = args.custom_storage_info.per_device_data[0]
    assert region.__cuda_array_interface__["data"] == (0x7000, False)
    assert driver.checkpoint_operation_complete(name(args)) is None
    with pytest.raises(ValueError, match="not mapped any more"):
        region.__cuda_array_interface__  # noqa: B018
    assert region.dev_ptr == 0x7000


def test_complete_may_be_repeated_after_an_error_only(hook):
    storage = Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    info = args.custom_storage_info
    storage.complete = 900
    with pytest.raises(driver.StreamCaptureUnsupportedError):
        driver.checkpoint_operation_complete(info)
    with pytest.raises(ValueError, match="not mapped any more"):
        info.per_device_data[1].__cuda_array_interface__  # noqa: B018
    storage.complete = 0
    driver.checkpoint_operation_complete(info)
    calls = len(hook.calls)
    for used_up in info, args:
        with pytest.raises(ValueError, match="has been completed"):
            driver.checkpoint_operation_complete(used_up)
    assert len(hook.calls) == calls


def test_regions_end_before_the_driver_unmaps_them(hook):
    storage = Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    region = args.custom_storage_info.per_device_data[0]

    def answer(call, pid, argument):
        with pytest.raises(ValueError, match="not mapped any more"):
            region.__cuda_array_interface__  # noqa: B018
        with pytest.raises(RuntimeError, match="another thread is completing"):
            driver.checkpoint_operation_complete(args)
        return storage.answer(call, pid, argument)

    hook.answer(answer)
    driver.checkpoint_operation_complete(args)
    assert [call for call, _, _ in hook.calls].count(
        "cuCheckpointOperationComplete"
    ) == 1


def test_info_of_a_known_operation_shares_its_end(hook):
    from cuckpt.structs import CheckpointCustomStorageInfo

    storage = Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    storage.complete = 900
    with pytest.raises(driver.StreamCaptureUnsupportedError):
        driver.checkpoint_operation_complete(args)
    again = CheckpointCustomStorageInfo.from_ptr(args.custom_storage_info.ptr)
    with pytest.raises(ValueError, match="not mapped any more"):
        again.per_device_data[0].__cuda_array_interface__  # noqa: B018


def test_new_answer_with_an_old_handle_is_a_new_operation(hook):
    # The first was completed by somebody else, whom cuckpt did not see.
    Storage(hook)
    first, second = (CheckpointCheckpointArgs(custom_storage=True) for _ in range(2))
    driver.checkpoint_process_checkpoint(1, first)
    driver.checkpoint_process_checkpoint(1, second)
    driver.checkpoint_operation_complete(second)
    assert first.custom_storage_info.per_device_data[0].__cuda_array_interface__
    with pytest.raises(ValueError, match="has been completed"):
        driver.checkpoint_operation_complete(second)


def test_later_answer_to_another_binding_replaces_the_first(hook):
    storage = Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    driver.checkpoint_operation_complete(args)
    other = Storage(hook, regions=[(0x9000, 1, 0)])
    assert other.answer("cuCheckpointProcessCheckpoint", 2, args.ptr) == 0
    assert storage is not other
    assert [r.dev_ptr for r in args.custom_storage_info] == [0x9000]
    driver.checkpoint_operation_complete(args)


def test_missing_complete_ends_nothing(python):
    program = """
import ctypes, struct
from cuckpt import driver
regions = ctypes.create_string_buffer(struct.pack("<QQQ", 4096, 1, 0))
memory = struct.pack("<QQQ", 1, ctypes.addressof(regions), 1)
source = driver.CheckpointCustomStorageInfo.from_buffer(memory)
info = driver.CheckpointCustomStorageInfo.from_ptr(source.ptr)
try:
    driver.checkpoint_operation_complete(info)
except driver.FunctionNotFoundError:
    print(info.per_device_data[0].__cuda_array_interface__["shape"])
"""
    assert python(program, NULL_DRIVER_VERSION="13000").stdout == "(1,)\n"


def test_handle_used_again_by_the_driver_is_a_new_operation(hook):
    Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    for _ in range(2):
        driver.checkpoint_process_checkpoint(1, args)
        region = args.custom_storage_info.per_device_data[0]
        assert region.__cuda_array_interface__["stream"] == 5
        driver.checkpoint_operation_complete(args)


def test_copy_of_a_region_ends_with_it(hook):
    import copy

    Storage(hook)
    args = CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(1, args)
    info = copy.deepcopy(args.custom_storage_info)
    region = copy.copy(info.per_device_data[0])
    assert memoryview(info).readonly
    assert memoryview(region).readonly
    driver.checkpoint_operation_complete(args)
    with pytest.raises(ValueError, match="not mapped any more"):
        region.__cuda_array_interface__  # noqa: B018
    with pytest.raises(ValueError, match="has been completed"):
        driver.checkpoint_operation_complete(info)


def test_complete_refuses_what_names_no_operation(hook):
    from cuckpt.structs import CheckpointCustomStorageInfo

    for wrong, text in (
        (CheckpointCheckpointArgs(), "hold no custom-storage operation"),
        (
            CheckpointRestoreArgs(custom_storage=True),
            "hold no custom-storage operation",
        ),
        (CheckpointCustomStorageInfo(), "null"),
        (0, "null"),
    ):
        with pytest.raises(ValueError, match=text):
            driver.checkpoint_operation_complete(wrong)
    for wrong in None, True, 1.5, "1", CheckpointLockArgs():
        with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
            driver.checkpoint_operation_complete(wrong)
    with pytest.raises(OverflowError):
        driver.checkpoint_operation_complete(-1)
    assert hook.calls == []


def bytes_allocated_by(function, arguments):
    for _ in range(3):
        function(*arguments)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    function(*arguments)
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.thread_unsafe(reason="counts what all threads allocate")
def test_successful_calls_make_no_object_but_the_result(hook):
    hook.remove()
    restore_args = CheckpointRestoreArgs(gpu_pairs=[(bytes(16), bytes(16))])
    calls = [(driver.checkpoint_operation_complete, (1,))]
    for verb in ARGS:
        function = getattr(driver, f"checkpoint_process_{verb}")
        args = restore_args if verb == "restore" else ARGS[verb]()
        calls += [(function, (1,)), (function, (1, None)), (function, (1, args))]
    calls += [(driver.init, (0,)), (driver.checkpoint_process_get_state, (1,))]
    tracemalloc.start()
    try:
        for function, arguments in calls:
            assert bytes_allocated_by(function, arguments) == 0, function
        # As a control: this one makes an int.
        assert 0 < bytes_allocated_by(driver.driver_get_version, ()) < 64
    finally:
        tracemalloc.stop()
