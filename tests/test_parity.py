"""cuckpt beside unmodified cuda.bindings, over the same driver in one process."""

import ctypes
import pickle
import re
import struct

import cuda.bindings._internal.utils as peer_utils
import cuda.bindings._v2.driver as v2
import cuda.bindings.driver as v1
import cuda.pathfinder
import numpy
import pytest

from cuckpt import driver, errors, structs

OLD, NEW = bytes(range(16)), bytes(range(16, 32))
VERBS = ["lock", "checkpoint", "restore", "unlock"]
SHARED_STRUCTS = [name for name in structs.__all__ if hasattr(v2, name)]

every_verb = pytest.mark.parametrize("verb", VERBS)
every_struct = pytest.mark.parametrize("name", SHARED_STRUCTS)


@pytest.fixture(autouse=True)
def _one_driver(hook):
    driver.init(0)  # loads the library whose soname cuda.bindings asks for
    v2.init(0)
    assert [call for call, _, _ in hook.calls][-2:] == ["cuInit", "cuInit"]


def both(verb):
    name = f"checkpoint_process_{verb}"
    return getattr(driver, name), getattr(v2, name)


# Names


FUNCTIONS = [
    name
    for name in driver.__all__
    if hasattr(v2, name) and not isinstance(getattr(v2, name), type)
]


def test_every_function_of_v2_is_here():
    expected = {name for name in dir(v2) if name.startswith("checkpoint_")}
    dtypes = {name for name in expected if name.endswith("_dtype")}
    assert len(FUNCTIONS) == 14
    assert expected - dtypes <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_same_parameters(name):
    import inspect

    text = re.match(rf"{name}\((.*?)\)", getattr(v2, name).__doc__)[1]
    theirs = [parameter.split()[-1] for parameter in text.split(", ") if parameter]
    assert list(inspect.signature(getattr(driver, name)).parameters) == theirs


@every_struct
def test_structs_have_the_same_attributes(name):
    theirs = {a for a in dir(getattr(v2, name)) if not a.startswith("_")}
    assert theirs <= set(dir(getattr(driver, name)))


def test_all_shared_structs_are_compared():
    assert {n for n in dir(v2) if re.match(r"Checkpoint\w+(Args|Pair)$", n)} | {
        "Uuid"
    } == set(SHARED_STRUCTS)


@pytest.mark.parametrize(
    "name", [n for n in dir(v2) if re.match(r"(checkpoint|uuid)\w*_dtype$", n)]
)
def test_dtypes_are_equal(name):
    assert getattr(driver, name) == getattr(v2, name)


@pytest.mark.parametrize("name", ["Result", "ProcessState"])
def test_enums_have_the_same_members(name):
    assert {m.name: int(m) for m in getattr(driver, name)} == {
        m.name: int(m) for m in getattr(v2, name)
    }


# Values


@every_struct
def test_struct_content_is_the_same(name):
    ours, theirs = getattr(driver, name)(), getattr(v2, name)()
    for one in ours, theirs:
        if name == "CheckpointLockArgs":
            one.timeout_ms = 1234567
        elif name == "CheckpointRestoreArgs":
            one.gpu_pairs, one.gpu_pairs_count = 4096, 3
            one.custom_storage_info_out = 8192
        elif name == "CheckpointCheckpointArgs":
            one.custom_storage_info_out = 8192
        elif name == "Uuid":
            one.bytes = OLD
        elif name == "CheckpointGpuPair":
            one.old_uuid.bytes, one.new_uuid.bytes = OLD, NEW
    assert bytes(memoryview(ours)) == bytes(memoryview(theirs))
    view = getattr(driver, name).from_ptr(int(theirs), owner=theirs)
    for attribute in dir(theirs):
        value = getattr(theirs, attribute)
        if isinstance(value, (int, bytes)) and not attribute.startswith("_"):
            assert getattr(view, attribute) == value
    assert getattr(v2, name).from_ptr(ours.ptr, owner=ours) == theirs


@every_struct
def test_struct_views_share_memory_both_ways(name):
    ours = getattr(driver, name)()
    theirs = getattr(v2, name).from_buffer(ours)
    numpy.frombuffer(ours, "u1")[0] = 9
    assert bytes(memoryview(theirs))[0] == 9
    again = getattr(driver, name).from_buffer(theirs)
    assert again.ptr == ours.ptr == theirs.ptr


def test_state_and_thread_id_are_the_same(hook):
    def answer(call, pid, out):
        ctypes.c_int.from_address(out).value = 5
        return 0

    hook.answer(answer)
    for name in "get_state", "get_restore_thread_id":
        ours, theirs = both(name)
        assert ours(7) == theirs(7) == 5


def test_plain_functions_return_the_same(hook):
    hook.remove()
    assert driver.driver_get_version() == v2.driver_get_version()
    assert driver.device_get_count() == v2.device_get_count()
    assert driver.device_get(3) == v2.device_get(3)
    ours, theirs = driver.device_get_uuid_v2(3), v2.device_get_uuid_v2(3)
    assert bytes(ours) == bytes(memoryview(theirs))


# Each other's structs


def arguments_seen(hook):
    seen = []

    def answer(call, pid, address):
        seen.append(address and ctypes.string_at(address, 64))
        return 0

    hook.answer(answer)
    return seen


@every_verb
def test_structs_of_cuckpt_go_into_v2_and_v2s_into_cuckpt(hook, verb):
    seen = arguments_seen(hook)
    ours, theirs = both(verb)
    for module in driver, v2:
        args = getattr(module, f"Checkpoint{verb.capitalize()}Args")()
        numpy.frombuffer(args, "u1")[63] = 7
        for form in args, int(args), args.ptr:
            ours(1, form)
            theirs(1, form)
    assert seen == [bytes(63) + b"\x07"] * 12


@every_verb
def test_structs_of_v1_go_into_cuckpt(hook, verb):
    seen = arguments_seen(hook)
    args = getattr(v1, f"CUcheckpoint{verb.capitalize()}Args")()
    if verb == "lock":
        args.timeoutMs = 77
    both(verb)[0](1, args)
    assert seen == [struct.pack("<I60x", 77 if verb == "lock" else 0)]


@every_verb
def test_structs_of_the_peers_are_told_apart(verb):
    for other in VERBS:
        if other != verb:
            title = other.capitalize()
            for wrong in (
                getattr(v2, f"Checkpoint{title}Args")(),
                getattr(v1, f"CUcheckpoint{title}Args")(),
            ):
                with pytest.raises(TypeError, match="args must be"):
                    both(verb)[0](1, wrong)


def test_pairs_of_cuckpt_reach_the_driver_through_v2(hook):
    seen = hook.keep_pairs()
    args = driver.CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    v2.checkpoint_process_restore(1, args)
    driver.checkpoint_process_restore(1, args)
    assert seen == [OLD + NEW] * 2


def test_pairs_and_uuids_of_the_peers_are_taken():
    v2_pair = v2.CheckpointGpuPair()
    v2_pair.old_uuid.bytes, v2_pair.new_uuid.bytes = OLD, NEW
    v1_pair = v1.CUcheckpointGpuPair()
    ctypes.memmove(v1_pair.getPtr(), OLD + NEW, 32)
    expected = driver.CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)] * 4)
    assert expected == driver.CheckpointRestoreArgs(
        gpu_pairs=[
            v2_pair,
            v1_pair,
            (v2_pair.old_uuid, v2_pair.new_uuid),
            (v1_pair.oldUuid, v1_pair.newUuid),
        ]
    )


def test_count_without_pairs_is_refused_in_the_peers_structs(hook):
    calls = len(hook.calls)
    args = v2.CheckpointRestoreArgs()
    args.gpu_pairs_count = 1
    with pytest.raises(ValueError, match="gpu_pairs is not set"):
        driver.checkpoint_process_restore(1, args)
    assert len(hook.calls) == calls


def test_custom_storage_of_cuckpt_works_through_v2(hook):
    array = ctypes.create_string_buffer(struct.pack("<QQQ", 0x7000, 10, 5))
    info = ctypes.create_string_buffer(
        struct.pack("<QQQ", 0xC0FFEE, ctypes.addressof(array), 1)
    )

    def answer(call, pid, argument):
        if call == "cuCheckpointProcessCheckpoint":
            out = ctypes.c_void_p.from_address(argument).value
            ctypes.c_void_p.from_address(out).value = ctypes.addressof(info)
        return 0

    hook.answer(answer)
    args = driver.CheckpointCheckpointArgs(custom_storage=True)
    v2.checkpoint_process_checkpoint(1, args)
    region = args.custom_storage_info.per_device_data[0]
    assert (region.dev_ptr, region.size, region.stream) == (0x7000, 10, 5)
    v2.checkpoint_operation_complete(args.custom_storage_info.handle)
    assert hook.calls[-1] == ("cuCheckpointOperationComplete", 0, 0xC0FFEE)


# Errors


@pytest.mark.parametrize(
    "result", [r for r in errors.Result if r], ids=lambda r: r.name
)
def test_error_is_an_instance_of_the_peers_class(hook, result):
    hook.answer(int(result))
    ours, theirs = both("lock")
    with pytest.raises(v2.DriverError) as expected:
        theirs(1, None)
    with pytest.raises(type(expected.value)) as caught:
        ours(1, None)
    assert type(caught.value).__name__ == type(expected.value).__name__
    assert isinstance(caught.value, getattr(driver, type(expected.value).__name__))
    assert caught.value.status == expected.value.status
    assert caught.value.args == expected.value.args
    assert str(caught.value).startswith(str(expected.value))


def test_unknown_error_is_the_peers_base_class(hook):
    hook.answer(4711)
    texts = []
    for function in both("lock"):
        with pytest.raises(v2.DriverError) as caught:
            function(1, None)
        texts.append(str(caught.value))
    assert texts[0].startswith(texts[1])


def test_error_with_both_bases_pickles_as_the_plain_class(hook):
    hook.answer(401)
    with pytest.raises(v2.IllegalStateError) as caught:
        driver.checkpoint_process_unlock(1)
    pickled = pickle.dumps(caught.value, protocol=0)
    assert b"cuda.bindings" not in pickled
    twin = pickle.loads(pickled)
    assert type(twin) is driver.IllegalStateError
    assert (str(twin), twin.status) == (str(caught.value), 401)


def test_subclass_of_a_combined_class_pickles_as_itself(hook):
    hook.answer(401)
    with pytest.raises(v2.IllegalStateError) as caught:
        driver.checkpoint_process_unlock(1)
    cls = type("OwnError", (type(caught.value),), {"__module__": __name__})
    assert errors._plain(cls(401)) is cls


def test_plain_class_stays_plain_and_combined_class_is_made_once(hook):
    hook.answer(401)
    made = set()
    for _ in range(3):
        with pytest.raises(driver.IllegalStateError) as caught:
            driver.checkpoint_process_unlock(1)
        made.add(type(caught.value))
    assert len(made) == 1
    assert driver.IllegalStateError.__bases__ == (driver.DriverError,)


def test_errors_are_plain_until_the_peer_is_loaded(python):
    program = """
import ctypes, os
from cuckpt import driver
name = "OperatingSystemError"
hook = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)(
    lambda *_: 304)
library = ctypes.CDLL(os.environ["CUCKPT_LIBCUDA"])
slot = ctypes.c_void_p.in_dll(library, "null_driver_hook")
slot.value = ctypes.cast(hook, ctypes.c_void_p).value
def bases():
    try:
        driver.checkpoint_process_get_state(1)
    except driver.OperatingSystemError as error:
        return [c.__module__ for c in type(error).__mro__ if c.__name__ == name]
print(bases())
import cuda.bindings._v2.driver
print(bases())
"""
    first, second = map(eval, python(program).stdout.splitlines())
    assert first == ["cuckpt.errors"]
    assert second == ["cuckpt.errors", "cuckpt.errors", "cuda.bindings._v2.driver"]


def test_missing_function_and_library_are_the_peers_classes():
    for plain, peer in (
        (driver.FunctionNotFoundError, peer_utils.FunctionNotFoundError),
        (driver.DynamicLibNotFoundError, cuda.pathfinder.DynamicLibNotFoundError),
    ):
        error = errors.catchable(plain)("text")
        assert isinstance(error, plain)
        assert isinstance(error, peer)
        assert type(pickle.loads(pickle.dumps(error))) is plain


# A whole program


PROGRAM = """
import os, sys
{imports}

def suspend_and_resume(pid):
    assert driver.checkpoint_process_get_state(pid) == driver.ProcessState.RUNNING
    args = driver.CheckpointLockArgs()
    args.timeout_ms = 10_000
    driver.checkpoint_process_lock(pid, args)
    driver.checkpoint_process_checkpoint(pid, None)
    pair = driver.CheckpointGpuPair()
    uuid = driver.device_get_uuid_v2(driver.device_get(0))
    pair.old_uuid.bytes = uuid.bytes
    pair.new_uuid = pair.old_uuid
    restore = driver.CheckpointRestoreArgs()
    restore.gpu_pairs = pair.ptr
    restore.gpu_pairs_count = 1
    driver.checkpoint_process_restore(pid, restore)
    driver.checkpoint_process_unlock(pid=pid, args=0)
    print(driver.checkpoint_process_get_restore_thread_id(pid), restore.gpu_pairs_count)
    print(driver.CheckpointLockArgs.from_buffer(args) == args, int(args) == args.ptr)

driver.init(0)
suspend_and_resume(4711)
try:
    driver.checkpoint_process_get_state("1")
except TypeError:
    print("TypeError")
"""


PRELOAD = "import ctypes; ctypes.CDLL(os.environ['CUCKPT_LIBCUDA'])\n"


def test_program_for_v2_runs_with_the_import_replaced(python):
    outputs = [
        python(PROGRAM.format(imports=imports)).stdout
        for imports in (
            PRELOAD + "from cuda.bindings._v2 import driver",
            "from cuckpt import driver",
        )
    ]
    assert outputs[0] == outputs[1] == "4711 1\nTrue True\nTypeError\n"
