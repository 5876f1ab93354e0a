"""GPU memory: what cannot be checkpointed or restored, and what becomes free."""

import ctypes

import pytest

from cuckpt import driver
from cuckpt.target import Target

State = driver.ProcessState
MIB = 1 << 20
GIB = 1 << 30

get_state = driver.checkpoint_process_get_state
lock = driver.checkpoint_process_lock
checkpoint = driver.checkpoint_process_checkpoint
restore = driver.checkpoint_process_restore
unlock = driver.checkpoint_process_unlock


def suspend(pid):
    lock(pid)
    checkpoint(pid)


def resume(pid):
    restore(pid)
    unlock(pid)


def is_lost(pid):
    """Whether nothing helps a process any more, as a failed restore leaves it."""
    with pytest.raises(driver.OperatingSystemError):
        restore(pid)
    with pytest.raises(driver.IllegalStateError):
        unlock(pid)
    return get_state(pid) is State.CHECKPOINTED


# A process that calls the driver as each line says, as `cuMemAlloc_v2(&p, 8)` would.
CALLS = """
import ctypes, sys
from cuckpt import driver
cuda = ctypes.CDLL(driver.library_path())
address, size, by = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
    def __repr__(self):
        return bytes(self.bytes).hex()
cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
memory, handle, event = address(), Handle(), ctypes.c_void_p()
stream, word = ctypes.c_void_p(), ctypes.create_string_buffer(4)
driver.init()
cuda.cuCtxSetCurrent(ctypes.c_void_p(driver.device_primary_ctx_retain(0)))
for line in sys.stdin:
    print(eval(line), flush=True)
"""
ALLOCATE = "cuda.cuMemAlloc_v2(by(memory), size(4 << 20))"
FILL = "cuda.cuMemsetD8_v2(memory, 7, size(4 << 20))"
EXPORT = "cuda.cuIpcGetMemHandle(by(handle), memory)"
READ = "cuda.cuMemcpyDtoH_v2(word, memory, size(4)), word.raw.hex()"
CLOSE = "cuda.cuIpcCloseMemHandle(memory)"
RIGHT = "(0, '07070707')"


def open_handle(text):
    handle = f"Handle.from_buffer_copy(bytes.fromhex('{text}'))"
    return f"cuda.cuIpcOpenMemHandle_v2(by(memory), {handle}, 1)"


def exporting(spawn):
    exporter = spawn("-c", CALLS)
    assert [exporter.ask(call) for call in (ALLOCATE, FILL, EXPORT)] == ["0"] * 3
    return exporter, exporter.ask("handle")


def importing(spawn, handle):
    importer = spawn("-c", CALLS)
    assert importer.ask(open_handle(handle)) == "0"
    assert importer.ask(READ) == RIGHT
    return importer


def test_memory_is_shared_until_its_exporter_is_checkpointed(spawn):
    exporter, handle = exporting(spawn)
    importer = importing(spawn, handle)
    suspend(exporter.pid)
    assert importer.ask(READ) == RIGHT
    assert importer.ask("cuda.cuMemsetD8_v2(memory, 9, size(4))") == "0"
    resume(exporter.pid)
    assert exporter.ask(READ) == RIGHT
    assert importer.ask(READ) == "(0, '09090909')"
    # Its old handle is none any more, and a new one lets nobody in.
    assert exporter.ask(EXPORT) == "0"
    other = spawn("-c", CALLS)
    assert other.ask(open_handle(handle)) == "400"
    assert other.ask(open_handle(exporter.ask("handle"))) == "800"


def test_process_with_imported_memory_is_lost_by_a_restore(spawn):
    _, handle = exporting(spawn)
    importer = importing(spawn, handle)
    suspend(importer.pid)
    with pytest.raises(driver.InvalidValueError):
        restore(importer.pid)
    assert is_lost(importer.pid)


def test_process_that_closed_its_import_comes_back(spawn):
    _, handle = exporting(spawn)
    importer = importing(spawn, handle)
    assert importer.ask(CLOSE) == "0"
    assert importer.ask(CLOSE) == "1"
    suspend(importer.pid)
    resume(importer.pid)
    assert get_state(importer.pid) is State.RUNNING


def test_imported_memory_outlives_its_exporter(spawn):
    exporter, handle = exporting(spawn)
    importer = importing(spawn, handle)
    exporter.end()
    assert importer.ask(READ) == RIGHT


def test_handles_are_checked(spawn):
    exporter, handle = exporting(spawn)
    assert exporter.ask(open_handle(handle)) == "201"  # its own
    other = importing(spawn, handle)
    assert other.ask(open_handle(handle)) == "0"  # once more
    for garbage in "00" * 64, "ab" * 64:
        assert other.ask(open_handle(garbage)) == "1"


@pytest.mark.parametrize(
    ("make", "read"),
    [
        ("cuda.cuMemAllocAsync(by(memory), size(4 << 20), None)", READ),
        (
            "cuda.cuMemHostAlloc(by(memory), size(4 << 20), 2)",
            "0, ctypes.string_at(memory.value, 4).hex()",
        ),
    ],
    ids=["from a pool", "pinned"],
)
def test_other_kinds_of_memory_come_back(spawn, make, read):
    process = spawn("-c", CALLS)
    assert process.ask(make) == "0"
    assert process.ask(FILL) == "0"
    assert process.ask("cuda.cuCtxSynchronize()") == "0"
    suspend(process.pid)
    resume(process.pid)
    assert process.ask(read) == RIGHT


def test_process_comes_back_whose_stream_captures(spawn):
    process = spawn("-c", CALLS)
    for call in (
        "cuda.cuStreamCreate(by(stream), 1)",
        "cuda.cuStreamBeginCapture_v2(stream, 2)",
    ):
        assert process.ask(call) == "0"
    suspend(process.pid)
    resume(process.pid)
    assert process.ask("cuda.cuStreamEndCapture(stream, by(event))") == "0"


# Managed memory


def test_managed_memory_cannot_be_checkpointed(target):
    assert target.ask("manage") == "managed"
    lock(target.pid)
    with pytest.raises(
        driver.NotSupportedError, match=r"managed memory.*has changed nothing"
    ):
        checkpoint(target.pid)
    assert get_state(target.pid) is State.LOCKED
    unlock(target.pid)


def test_managed_memory_that_was_freed_is_no_problem(spawn):
    process = spawn("-c", CALLS)
    for call in (
        "cuda.cuMemAllocManaged(by(memory), size(1 << 20), 1)",
        "cuda.cuMemFree_v2(memory)",
    ):
        assert process.ask(call) == "0"
    suspend(process.pid)
    resume(process.pid)


# How much there is


def test_restore_without_room_loses_the_target():
    with Target({0: GIB}) as target, Target() as hog:
        suspend(target.pid)
        take_all_memory(hog)
        with pytest.raises(driver.OutOfMemoryError):
            restore(target.pid)
        assert get_state(target.pid) is State.CHECKPOINTED
        hog.end()
        assert is_lost(target.pid)


def take_all_memory(hog):
    """Take what there is, in pieces that become smaller."""
    driver.init()
    cuda = ctypes.CDLL(driver.library_path())
    context = driver.device_primary_ctx_retain(0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuCtxSetCurrent(ctypes.c_void_p(context))
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    driver.device_primary_ctx_release_v2(0)
    piece = free.value // 2 // (2 * MIB) * (2 * MIB)
    left = free.value
    while piece >= 128 * MIB:
        if piece < left - 128 * MIB:
            hog.ask(f"take {piece}")
            left -= piece
        else:
            piece = piece // 2 // (2 * MIB) * (2 * MIB)
