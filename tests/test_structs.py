"""The struct classes: fields, construction, views, equality, copies."""

import copy
import ctypes
import pickle
import struct
import threading
import uuid

import numpy
import pytest

from cuckpt import driver, structs
from cuckpt.structs import (
    CheckpointCheckpointArgs,
    CheckpointCustomStorageInfo,
    CheckpointCustomStoragePerDeviceData,
    CheckpointGpuPair,
    CheckpointLockArgs,
    CheckpointRestoreArgs,
    Uuid,
)

CLASSES = [getattr(structs, name) for name in structs.__all__]
SIZES = {
    "Uuid": 16,
    "CheckpointGpuPair": 32,
    "CheckpointCustomStorageInfo": 24,
    "CheckpointCustomStoragePerDeviceData": 24,
}
OLD = "GPU-01234567-89ab-cdef-0123-456789abcdef"
NEW = "GPU-ffffffff-0000-1111-2222-333333333333"
OLD_BYTES = bytes.fromhex("0123456789abcdef0123456789abcdef")
NEW_BYTES = bytes.fromhex("ffffffff000011112222333333333333")

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def size_of(cls):
    return SIZES.get(cls.__name__, 64)


def aligned(size):
    """Return a writable buffer of this size, aligned to 8 bytes."""
    return numpy.zeros((size + 7) // 8, "u8").view("u1")[:size]


# What every class does


@every_class
def test_new_object_is_zero(cls):
    for made in cls(), cls.__new__(cls):
        assert bytes(made) == bytes(size_of(cls))
        assert repr(made)


@every_class
def test_buffer_protocol_gives_the_bytes(cls):
    view = memoryview(cls())
    assert (view.nbytes, view.format, view.shape) == (
        size_of(cls),
        "b",
        (size_of(cls),),
    )
    assert not view.readonly
    view.cast("B")[:] = bytes(range(size_of(cls)))
    assert bytes(view.obj) == bytes(range(size_of(cls)))


@every_class
def test_ptr_and_int_are_the_address(cls):
    made = cls()
    assert made.ptr == int(made) != 0
    assert not hasattr(made, "__index__")  # else bytes(made) would be zeros


@every_class
def test_from_ptr_without_owner_copies(cls):
    memory = aligned(size_of(cls))
    made = cls.from_ptr(memory.ctypes.data)
    assert type(made) is cls
    memory[:] = 1
    assert bytes(made) == bytes(size_of(cls))


@every_class
def test_from_ptr_with_owner_is_a_view(cls):
    memory = aligned(size_of(cls))
    made = cls.from_ptr(memory.ctypes.data, owner=memory)
    assert made.ptr == memory.ctypes.data
    memoryview(made).cast("B")[0] = 7
    assert memory[0] == 7


@every_class
def test_from_ptr_refuses_null_and_misaligned(cls):
    with pytest.raises(ValueError, match="null"):
        cls.from_ptr(0)
    memory = aligned(72)
    with pytest.raises(ValueError, match="aligned to 8 bytes"):
        cls.from_ptr(memory.ctypes.data + 1, owner=memory)
    assert cls.from_ptr(memory.ctypes.data + 1)  # to copy, it need not be


@every_class
def test_from_buffer_is_a_view(cls):
    memory = bytearray(size_of(cls))
    made = cls.from_buffer(memory)
    memory[0] = 5
    assert bytes(made)[0] == 5
    memoryview(made).cast("B")[1] = 6
    assert memory[1] == 6


@every_class
def test_from_buffer_of_constant_bytes_is_read_only(cls):
    made = cls.from_buffer(bytes(size_of(cls)))
    assert memoryview(made).readonly
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * size_of(cls)).from_buffer(made)


@every_class
def test_from_buffer_refuses_other_sizes_and_layouts(cls):
    size = size_of(cls)
    for wrong in size - 1, size + 1, 0:
        with pytest.raises(ValueError, match=f"must be {size} bytes, not {wrong}"):
            cls.from_buffer(bytearray(wrong))
    with pytest.raises(ValueError, match="contiguous"):
        cls.from_buffer(memoryview(bytearray(2 * size))[::2])
    with pytest.raises(ValueError, match="aligned"):
        cls.from_buffer(aligned(size + 8)[1 : size + 1])
    with pytest.raises(TypeError, match="bytes-like"):
        cls.from_buffer(5)


@every_class
def test_from_data_is_a_view_of_an_array(cls):
    dtype = getattr(driver, cls._dtype_name)
    array = numpy.zeros(1, dtype)
    made = cls.from_data(array)
    memoryview(made).cast("B")[3] = 9
    assert array.tobytes()[3] == 9
    assert bytes(cls.from_data(array)) == array.tobytes()


@every_class
def test_from_data_refuses_other_arrays(cls):
    dtype = getattr(structs, cls._dtype_name)
    with pytest.raises(ValueError, match="size of 1"):
        cls.from_data(numpy.zeros(2, dtype))
    with pytest.raises(ValueError, match=f"dtype {cls._dtype_name}"):
        cls.from_data(numpy.zeros(1, "u8"))
    with pytest.raises(TypeError, match="ndarray"):
        cls.from_data(bytes(size_of(cls)))


def test_dtype_that_somebody_changes_is_not_that_of_others():
    structs.uuid_dtype.names = ("changed",)
    assert structs.uuid_dtype.names == ("bytes",)
    made = structs.Uuid.from_data(numpy.zeros(1, structs.uuid_dtype))
    assert made.bytes == bytes(16)


def test_pairs_of_a_subclass_are_what_it_says():
    class Pair(CheckpointGpuPair):
        old_uuid = NEW

    args = CheckpointRestoreArgs(gpu_pairs=[Pair(OLD, OLD)])
    assert ctypes.string_at(args.gpu_pairs, 32) == NEW_BYTES + OLD_BYTES


@every_class
def test_dtype_has_the_size_of_the_struct(cls):
    assert getattr(structs, cls._dtype_name).itemsize == size_of(cls)


@every_class
def test_equality_is_by_content(cls):
    one, two = cls(), cls()
    assert one == two
    memoryview(two).cast("B")[size_of(cls) - 1] = 1
    assert one != two
    assert one == type("Sub", (cls,), {})()
    assert one != bytes(one)
    for other in CLASSES:
        assert (one == other()) == (other is cls)


@every_class
def test_objects_have_no_hash(cls):
    assert cls.__hash__ is None
    with pytest.raises(TypeError, match="unhashable"):
        hash(cls())


@every_class
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_equal_and_apart(cls, duplicate):
    memory = bytearray(size_of(cls))
    for original in cls(), cls.from_buffer(memory):
        twin = duplicate(original)
        assert type(twin) is cls
        assert twin == original
        assert twin.ptr != original.ptr
        memoryview(twin).cast("B")[-1] = 1
        assert twin != original


@every_class
def test_objects_refuse_unknown_attributes_and_items(cls):
    with pytest.raises(AttributeError):
        cls().nonsense = 1
    with pytest.raises(TypeError, match="item assignment"):
        cls()[0] = bytes(size_of(cls))
    with pytest.raises(AttributeError):
        cls().ptr = 1


@every_class
def test_reinitialising_a_read_only_object_changes_nothing(cls):
    content = bytes(range(1, size_of(cls) + 1))
    made = cls.from_buffer(content)
    for attempt in (
        lambda: made.__init__(),
        lambda: made.__init__(timeout_ms=1),
        lambda: made.__init__(OLD),
        lambda: made.__init__(OLD, NEW),
        lambda: made.__init__(gpu_pairs=[(OLD, NEW)]),
        lambda: made.__init__(custom_storage=True),
    ):
        try:
            attempt()
        except (TypeError, ValueError):
            pass
        assert bytes(made) == content


@every_class
def test_reading_a_constant_never_writes_it(cls):
    content = bytes(size_of(cls))
    made = cls.from_buffer(content)
    for name, value in (
        ("bytes", OLD),
        ("old_uuid", OLD),
        ("new_uuid", OLD),
        ("timeout_ms", 1),
        ("gpu_pairs", 4096),
        ("gpu_pairs", [(OLD, NEW)]),
        ("gpu_pairs_count", 1),
        ("custom_storage_info_out", 4096),
    ):
        if hasattr(made, name):
            with pytest.raises(ValueError, match="is read-only"):
                setattr(made, name, value)
    if isinstance(made, structs.CustomStorageArgs):
        with pytest.raises(ValueError, match="is read-only"):
            made.__init__(custom_storage=True)
    assert content == bytes(size_of(cls))


def subclasses_that_confuse():
    class TwoStructs(Uuid, CheckpointRestoreArgs):
        pass

    class SameSize(CheckpointLockArgs, CheckpointRestoreArgs):
        pass

    class Hidden(Uuid):
        def __init_subclass__(cls):
            pass

    class TwoBehind(Hidden, CheckpointGpuPair):
        pass

    class NoStruct(structs.Struct):
        pass

    class NoArgs(structs.CustomStorageArgs):
        pass

    return [TwoStructs, SameSize, TwoBehind, NoStruct, NoArgs]


@pytest.mark.parametrize(
    "cls",
    [structs.Struct, structs.CustomStorageArgs, *subclasses_that_confuse()],
    ids=lambda cls: cls.__name__,
)
def test_class_that_is_no_struct_or_two_makes_no_object(cls):
    for make in (
        cls,
        lambda: cls.__new__(cls),
        lambda: cls.from_buffer(bytearray(64)),
        lambda: cls.from_ptr(Uuid().ptr),
        lambda: structs._rebuild(cls, bytes(64), None, False),
    ):
        with pytest.raises(TypeError, match="is no struct class"):
            make()


def makers_that_cheat():
    class ReturnsNone(CheckpointLockArgs):
        def __new__(cls):
            return None

    class ReturnsAnother(CheckpointCustomStoragePerDeviceData):
        def __new__(cls):
            return CheckpointCustomStorageInfo()

    class ReturnsTheSame(CheckpointGpuPair):
        made = None

        def __new__(cls):
            cls.made = cls.made or super().__new__(cls)
            return cls.made

    class ReturnsView(CheckpointLockArgs):
        nested = threading.local()

        def __new__(cls):
            if hasattr(cls.nested, "now"):
                return super().__new__(cls)
            cls.nested.now = True
            try:
                return cls.from_buffer(bytearray(64))
            finally:
                del cls.nested.now

    return [ReturnsNone, ReturnsAnother, ReturnsTheSame, ReturnsView]


@pytest.mark.parametrize("cls", makers_that_cheat(), ids=lambda cls: cls.__name__)
def test_new_that_makes_no_new_object_is_refused(cls):
    cls()
    base = cls.__bases__[0]
    size = size_of(base)
    for make in (
        lambda: cls.from_buffer(bytearray(size)),
        lambda: cls.from_ptr(base().ptr),
        lambda: copy.copy(base.__new__(cls)),
        lambda: structs._rebuild(cls, bytes(size), None, False),
    ):
        with pytest.raises(TypeError, match=r"must return a new|Cannot convert"):
            make()


@every_class
def test_subclass_keeps_its_own_attributes(cls):
    made = type("Named", (cls,), {})()
    made.name = "mine"
    assert copy.copy(made).name == copy.deepcopy(made).name == "mine"


def test_subclass_pickles_with_its_own_attributes():
    made = NamedArgs(timeout_ms=5)
    made.name = "mine"
    twin = pickle.loads(pickle.dumps(made))
    assert (type(twin), twin.timeout_ms, twin.name) == (NamedArgs, 5, "mine")


class NamedArgs(CheckpointLockArgs):
    pass


def test_equality_is_not_fooled_by_a_false_class():
    class Pretender(Uuid):
        __class__ = property(lambda self: CheckpointLockArgs)

    assert CheckpointLockArgs() != Pretender()
    assert Pretender() == Uuid()


@every_class
def test_content_of_another_size_is_refused(cls):
    for size in 0, size_of(cls) - 1, size_of(cls) + 1:
        with pytest.raises(ValueError, match="bytes, not"):
            structs._rebuild(cls, bytes(size), None, False)


def test_layout_of_an_array_is_compared_not_its_size_alone():
    with pytest.raises(ValueError, match="dtype uuid_dtype"):
        Uuid.from_data(numpy.zeros(1, [("bytes", "u1", (16,))]))
    fortran = numpy.zeros((8, 8), "u1", order="F")
    assert fortran.nbytes == 64
    with pytest.raises(ValueError, match="contiguous"):
        CheckpointLockArgs.from_buffer(fortran[:, ::-1])
    with pytest.raises(ValueError, match="contiguous"):
        CheckpointLockArgs.from_buffer(fortran)


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (
            CheckpointCustomStoragePerDeviceData,
            {"dev_ptr": 0x7000, "size": 10, "stream": 5},
        ),
        (CheckpointCustomStorageInfo, {"handle": 0xC0FFEE, "device_count": 3}),
        (CheckpointLockArgs, {"timeout_ms": 7}),
        (
            CheckpointRestoreArgs,
            {"gpu_pairs": 4096, "gpu_pairs_count": 3, "custom_storage_info_out": 8192},
        ),
        (CheckpointCheckpointArgs, {"custom_storage_info_out": 8192}),
    ],
)
def test_fields_of_the_dtype_are_those_of_the_struct(cls, values):
    array = numpy.zeros(1, getattr(structs, cls._dtype_name))
    for name, value in values.items():
        array[0][name] = value
    made = cls.from_data(array)
    assert {name: getattr(made, name) for name in values} == values


# Uuid and pairs


def test_uuid_takes_and_shows_every_form():
    assert Uuid().bytes == bytes(16)
    made = Uuid(OLD)
    assert made.bytes == OLD_BYTES
    assert str(made) == OLD
    assert repr(made) == f"Uuid('{OLD}')"
    made.bytes = uuid.UUID(bytes=NEW_BYTES)
    assert made == Uuid(NEW_BYTES)


def test_pair_views_write_through():
    pair = CheckpointGpuPair(OLD, NEW)
    assert bytes(pair) == OLD_BYTES + NEW_BYTES
    pair.old_uuid.bytes = NEW
    pair.new_uuid = Uuid(OLD)
    assert bytes(pair) == NEW_BYTES + OLD_BYTES
    pair.old_uuid = pair.old_uuid
    assert bytes(pair) == NEW_BYTES + OLD_BYTES
    assert repr(pair) == f"CheckpointGpuPair('{NEW}', '{OLD}')"


def test_pair_view_outlives_the_pair():
    view = CheckpointGpuPair(OLD, NEW).new_uuid
    [CheckpointGpuPair() for _ in range(100)]
    assert str(view) == NEW


def test_pair_of_constant_bytes_has_read_only_views():
    pair = CheckpointGpuPair.from_buffer(bytes(32))
    with pytest.raises(ValueError, match="Uuid instance is read-only"):
        pair.old_uuid.bytes = OLD
    with pytest.raises(ValueError, match="CheckpointGpuPair instance is read-only"):
        pair.old_uuid = OLD


def test_pair_with_one_bad_uuid_changes_nothing():
    pair = CheckpointGpuPair(OLD, NEW)
    with pytest.raises(ValueError, match="not a GPU UUID"):
        pair.__init__(NEW, "bad")
    assert bytes(pair) == OLD_BYTES + NEW_BYTES


def test_restore_args_with_one_bad_argument_change_nothing():
    args = CheckpointRestoreArgs()
    with pytest.raises(TypeError, match="custom_storage"):
        args.__init__(gpu_pairs=[(OLD, NEW)], custom_storage=1)
    assert args == CheckpointRestoreArgs()


def test_uuid_whose_module_was_replaced_is_checked(monkeypatch):
    from cuckpt import uuids

    for content in b"", bytes(17):
        monkeypatch.setattr(uuids, "to_bytes", lambda uuid, content=content: content)
        with pytest.raises(ValueError, match="16 bytes"):
            Uuid("x")


def test_pair_needs_both_or_none():
    for arguments in {"old": OLD}, {"new": NEW}:
        with pytest.raises(TypeError, match="both old and new"):
            CheckpointGpuPair(**arguments)


def test_failed_uuid_changes_nothing():
    pair = CheckpointGpuPair(OLD, NEW)
    for wrong, error in (("GPU-1", ValueError), (None, TypeError), (b"x", ValueError)):
        with pytest.raises(error):
            pair.old_uuid = wrong
    assert bytes(pair) == OLD_BYTES + NEW_BYTES


# Arguments


def test_lock_args():
    args = CheckpointLockArgs(timeout_ms=500)
    assert args.timeout_ms == 500
    assert repr(args) == "CheckpointLockArgs(timeout_ms=500)"
    assert bytes(args) == struct.pack("<I60x", 500)
    args.timeout_ms = 2**32 - 1
    for wrong in -1, 2**32, 2**70:
        with pytest.raises(OverflowError, match=f"timeout_ms .*, not {wrong}"):
            args.timeout_ms = wrong
    assert args.timeout_ms == 2**32 - 1


def test_lock_args_take_keywords_only():
    with pytest.raises(TypeError):
        CheckpointLockArgs(500)


def pairs_in_memory(args):
    """Return what a C reader finds at gpu_pairs."""
    return ctypes.string_at(args.gpu_pairs, 32 * args.gpu_pairs_count)


@pytest.mark.parametrize(
    "pairs",
    [
        [(OLD, NEW), (NEW, OLD)],
        ((OLD_BYTES, NEW_BYTES), [NEW, OLD]),
        {OLD: NEW, NEW: OLD}.items(),
        [(OLD, NEW), (uuid.UUID(bytes=NEW_BYTES), OLD)].__iter__,
    ],
    ids=["list", "tuple", "items", "iterator"],
)
def test_restore_args_own_their_pairs(pairs):
    args = CheckpointRestoreArgs(gpu_pairs=pairs() if callable(pairs) else pairs)
    assert args.gpu_pairs_count == 2
    assert pairs_in_memory(args) == OLD_BYTES + NEW_BYTES + NEW_BYTES + OLD_BYTES


def test_restore_args_copy_the_pairs():
    pair = CheckpointGpuPair(OLD, NEW)
    args = CheckpointRestoreArgs(gpu_pairs=[pair])
    pair.old_uuid = NEW
    assert pairs_in_memory(args) == OLD_BYTES + NEW_BYTES


def test_restore_args_can_be_set_again():
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    args.gpu_pairs = []
    assert (args.gpu_pairs, args.gpu_pairs_count) == (0, 0)
    assert args == CheckpointRestoreArgs()
    args.gpu_pairs = [(NEW, NEW)] * 3
    assert args.gpu_pairs_count == 3
    args.gpu_pairs = 4096
    assert (args.gpu_pairs, args.gpu_pairs_count) == (4096, 3)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (None, TypeError, "NoneType"),
        (OLD, TypeError, "not str"),
        (bytes(32), TypeError, "not bytes"),
        (bytearray(32), TypeError, "not bytearray"),
        ({OLD: NEW}, TypeError, r"items\(\)"),
        ([OLD], TypeError, r"\(old, new\)"),
        ([(OLD,)], TypeError, r"\(old, new\)"),
        ([(OLD, NEW, NEW)], TypeError, r"\(old, new\)"),
        ([(OLD, 5)], TypeError, "not int"),
        ([(OLD, "x")], ValueError, "not a GPU UUID"),
        (5.0, TypeError, "float"),
        (-1, OverflowError, "gpu_pairs"),
    ],
    ids=repr,
)
def test_wrong_pairs_change_nothing(wrong, error, text):
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    before = bytes(args)
    with pytest.raises(error, match=text):
        args.gpu_pairs = wrong
    assert bytes(args) == before


def test_view_takes_an_address_but_no_pairs():
    for view in (
        CheckpointRestoreArgs.from_buffer(bytearray(64)),
        CheckpointRestoreArgs.from_ptr(
            (original := CheckpointRestoreArgs()).ptr, owner=original
        ),
    ):
        with pytest.raises(ValueError, match="a view and cannot own"):
            view.gpu_pairs = [(OLD, NEW)]
        with pytest.raises(ValueError, match="a view and cannot own"):
            view.__init__(custom_storage=True)
        assert bytes(view) == bytes(64)
        view.gpu_pairs = 4096
        assert view.gpu_pairs == 4096


def test_restore_args_show_their_fields():
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)], custom_storage=True)
    assert repr(args) == (
        f"CheckpointRestoreArgs(gpu_pairs=[('{OLD}', '{NEW}')], custom_storage=True)"
    )
    args.gpu_pairs_count = 0
    assert "gpu_pairs_count=0" in repr(args)
    args = CheckpointRestoreArgs()
    assert repr(args) == "CheckpointRestoreArgs()"
    args.gpu_pairs = 0x1000
    args.custom_storage_info_out = 0x2000
    assert repr(args) == (
        "CheckpointRestoreArgs(gpu_pairs=0x1000, gpu_pairs_count=0, "
        "custom_storage_info_out=0x2000)"
    )


def test_copies_of_restore_args_own_their_pairs():
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)], custom_storage=True)
    for twin in copy.copy(args), pickle.loads(pickle.dumps(args)):
        assert twin == args
        assert pairs_in_memory(twin) == OLD_BYTES + NEW_BYTES
        assert twin.custom_storage_info_out not in (0, args.custom_storage_info_out)
        assert twin.custom_storage_info is None
        twin.gpu_pairs = []
        assert twin != args
    assert pairs_in_memory(args) == OLD_BYTES + NEW_BYTES


def test_copies_of_restore_args_keep_the_count():
    args = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)] * 2)
    for count in 1, 0, 5:
        args.gpu_pairs_count = count
        for twin in copy.copy(args), pickle.loads(pickle.dumps(args)):
            assert twin.gpu_pairs_count == count
            assert twin == args


def test_equal_pairs_at_different_places_are_equal():
    one = CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    assert one == CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])
    assert one != CheckpointRestoreArgs(gpu_pairs=[(NEW, OLD)])
    assert CheckpointCheckpointArgs(custom_storage=True) == CheckpointCheckpointArgs(
        custom_storage=True
    )
    assert CheckpointCheckpointArgs() != CheckpointCheckpointArgs(custom_storage=True)


def holding_addresses():
    restore = CheckpointRestoreArgs()
    restore.gpu_pairs = 4096
    yield restore
    for cls in CheckpointRestoreArgs, CheckpointCheckpointArgs:
        args = cls()
        args.custom_storage_info_out = 4096
        yield args
    for content in struct.pack("<QQQ", 1, 0, 0), struct.pack("<QQQ", 0, 1, 0):
        yield CheckpointCustomStorageInfo.from_buffer(content)
    for content in struct.pack("<QQQ", 1, 0, 0), struct.pack("<QQQ", 0, 0, 1):
        yield CheckpointCustomStoragePerDeviceData.from_buffer(content)


@pytest.mark.parametrize(
    "made", list(holding_addresses()), ids=lambda m: type(m).__name__
)
def test_bare_address_can_be_copied_but_not_pickled(made):
    assert copy.copy(made) == made
    with pytest.raises(TypeError, match=f"cannot pickle a {type(made).__name__}"):
        pickle.dumps(made)


@pytest.mark.parametrize("cls", [CheckpointCheckpointArgs, CheckpointRestoreArgs])
@pytest.mark.parametrize("wrong", [None, 1, 0, "yes"], ids=repr)
def test_custom_storage_is_a_bool(cls, wrong):
    with pytest.raises(TypeError, match="custom_storage must be a bool"):
        cls(custom_storage=wrong)


@pytest.mark.parametrize("cls", [CheckpointCheckpointArgs, CheckpointRestoreArgs])
def test_custom_storage_points_into_the_args(cls):
    assert cls().custom_storage_info_out == 0
    args = cls(custom_storage=True)
    assert args.custom_storage_info_out != 0
    assert args.custom_storage_info is None
    args.custom_storage_info_out = 0
    assert args == cls()
    assert cls().custom_storage_info is None


# Infos and regions that come from no call


def test_info_of_its_own_has_no_regions():
    zero = CheckpointCustomStorageInfo()
    for info in (
        zero,
        CheckpointCustomStorageInfo.from_buffer(struct.pack("<QQQ", 1, 4096, 1)),
        CheckpointCustomStorageInfo.from_ptr(zero.ptr),
    ):
        with pytest.raises(ValueError, match="no per-device data"):
            info.per_device_data  # noqa: B018
        with pytest.raises(ValueError, match="no per-device data"):
            list(info)


def test_info_from_ptr_reads_the_regions():
    regions = numpy.array([[0x7000, 10, 5], [0x8000, 0, 0]], "u8")
    memory = struct.pack("<QQQ", 0xABC, regions.ctypes.data, 2)
    source = CheckpointCustomStorageInfo.from_buffer(memory)
    for owner in None, source:
        info = CheckpointCustomStorageInfo.from_ptr(source.ptr, True, owner)
        assert (info.handle, info.device_count, len(info)) == (0xABC, 2, 2)
        assert [(r.dev_ptr, r.size, r.stream) for r in info] == [
            (0x7000, 10, 5),
            (0x8000, 0, 0),
        ]
        assert repr(info) == "<CheckpointCustomStorageInfo handle=0xabc device_count=2>"
        with pytest.raises(AttributeError):
            info.handle = 1


def test_region_has_the_cuda_array_interface():
    region = CheckpointCustomStoragePerDeviceData.from_buffer(
        struct.pack("<QQQ", 0x7000, 10, 5)
    )
    assert region.__cuda_array_interface__ == {
        "version": 3,
        "shape": (10,),
        "typestr": "|u1",
        "data": (0x7000, False),
        "strides": None,
        "stream": 5,
    }
    assert repr(region) == (
        "<CheckpointCustomStoragePerDeviceData dev_ptr=0x7000 size=10 stream=0x5>"
    )
    without_stream = CheckpointCustomStoragePerDeviceData()
    assert without_stream.__cuda_array_interface__["stream"] is None
