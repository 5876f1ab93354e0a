"""Custom storage on a simulated machine, and what it does to those who err.

No driver of version 13.4 has been measured: all this follows its documentation.
"""

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

# What the programs below have besides: a target, and an own context on each GPU.
STORAGE = """
cuda = ctypes.CDLL(driver.library_path())
u64, size, by = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
driver.init()
for gpu in range(driver.device_get_count()):
    context = ctypes.c_void_p(driver.device_primary_ctx_retain(gpu))
    cuda.cuCtxSetCurrent(context)

def pinned(length):
    memory = ctypes.c_void_p()
    assert cuda.cuMemHostAlloc(by(memory), size(length), 0) == 0
    return memory

def stream():
    made = ctypes.c_void_p()
    assert cuda.cuStreamCreate(by(made), 1) == 0
    return made

def to_host(region, memory, stream):
    return cuda.cuMemcpyDtoHAsync_v2(memory, u64(region.dev_ptr), size(region.size),
                                     stream)

def to_device(region, memory, stream):
    return cuda.cuMemcpyHtoDAsync_v2(u64(region.dev_ptr), memory, size(region.size),
                                     stream)

def save(pid):
    args = driver.CheckpointCheckpointArgs(custom_storage=True)
    driver.checkpoint_process_lock(pid)
    driver.checkpoint_process_checkpoint(pid, args)
    return args

def load(pid, **pairs):
    args = driver.CheckpointRestoreArgs(custom_storage=True, **pairs)
    driver.checkpoint_process_restore(pid, args)
    return args

def complete(args):
    driver.checkpoint_operation_complete(args)

def state(pid):
    return driver.checkpoint_process_get_state(pid).name

def error(call, *arguments):
    try:
        call(*arguments)
    except driver.DriverError as error:
        return int(error.status)
"""


@pytest.fixture
def storage(program):
    return lambda text, **options: program(STORAGE + text, **options)


@pytest.mark.parametrize("waits", [True, False])
def test_copy_that_nobody_waits_for_is_lost(storage, waits):
    printed = storage(
        f"""
with Target({{0: 5 * MIB}}) as target:
    args = save(target.pid)
    (region,) = args.custom_storage_info
    memory, own = pinned(region.size), stream()
    assert to_host(region, memory, own) == 0
    if {waits}:
        assert cuda.cuStreamSynchronize(own) == 0
    complete(args)
    print(cuda.cuStreamSynchronize(own))
    context = ctypes.c_void_p(driver.device_primary_ctx_retain(0))
    print(cuda.cuMemGetInfo_v2(by(size()), by(size())))
    print(ctypes.string_at(memory, region.size).count(0) < region.size / 2)
"""
    )
    # As a kernel that strays: the context is of no use any more.
    assert printed == ("0\n0\nTrue\n" if waits else "700\n700\nFalse\n")


def test_copy_in_the_streams_handed_out_is_waited_for(storage):
    printed = storage(
        """
with Target({0: 5 * MIB}) as target:
    args = save(target.pid)
    (region,) = args.custom_storage_info
    length, memory = region.size, pinned(region.size)
    assert to_host(region, memory, ctypes.c_void_p(region.stream)) == 0
    complete(args)
    args = load(target.pid)
    (region,) = args.custom_storage_info
    assert to_device(region, memory, ctypes.c_void_p(region.stream)) == 0
    complete(args)
    driver.checkpoint_process_unlock(target.pid)
    target.check()
    print("right")
"""
    )
    assert printed == "right\n"


def test_restore_completed_too_early_loses_the_content(storage):
    printed = storage(
        """
with Target({0: 5 * MIB}) as target:
    args = save(target.pid)
    (region,) = args.custom_storage_info
    memory, own = pinned(region.size), stream()
    to_host(region, memory, own)
    cuda.cuStreamSynchronize(own)
    complete(args)
    args = load(target.pid)
    (region,) = args.custom_storage_info
    to_device(region, memory, own)
    complete(args)
    driver.checkpoint_process_unlock(target.pid)
    try:
        target.check()
    except RuntimeError as problem:
        print(problem)
"""
    )
    assert "another content" in printed


def test_info_is_overwritten_by_a_completion(storage):
    printed = storage(
        """
import struct
with Target({0: MIB}) as target:
    cell = ctypes.c_void_p()
    args = driver.CheckpointCheckpointArgs()
    args.custom_storage_info_out = ctypes.addressof(cell)
    driver.checkpoint_process_lock(target.pid)
    driver.checkpoint_process_checkpoint(target.pid, args)
    handle, regions, count = struct.unpack("<QQI", ctypes.string_at(cell.value, 20))
    print(count, ctypes.string_at(regions, 24) != bytes([0xdb]) * 24)
    driver.checkpoint_operation_complete(handle)
    print(ctypes.string_at(cell.value, 20) == bytes([0xdb]) * 20,
          ctypes.string_at(regions, 24) == bytes([0xdb]) * 24)
    print(error(driver.checkpoint_operation_complete, handle))
"""
    )
    assert printed == "1 True\nTrue True\n1\n"


def test_capture_stops_the_completion_until_it_has_ended(storage):
    printed = storage(
        """
with Target({0: MIB}) as target:
    args = save(target.pid)
    (region,) = args.custom_storage_info
    handle, handed_out = args.custom_storage_info.handle, region.stream
    assert cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(handed_out), 2) == 0
    print(error(complete, args), state(target.pid))
    graph = ctypes.c_void_p()
    print(cuda.cuStreamEndCapture(ctypes.c_void_p(handed_out), by(graph)))
    driver.checkpoint_operation_complete(handle)
    print(state(target.pid))
"""
    )
    assert printed == "900 CHECKPOINTING\n901\nCHECKPOINTED\n"


def test_contexts_of_all_gpus_are_needed_and_the_order_changes(storage):
    printed = storage(
        """
def order(args):
    found = []
    for region in args.custom_storage_info:
        device = ctypes.c_int()
        cuda.cuStreamGetDevice(ctypes.c_void_p(region.stream), by(device))
        found.append((device.value, region.size // MIB))
    return found

sizes = {gpu: (2 + 2 * gpu) * MIB for gpu in range(3)}
with Target(sizes) as target:
    driver.checkpoint_process_lock(target.pid)
    for gpu in range(3):
        driver.device_primary_ctx_release_v2(gpu)
        args = driver.CheckpointCheckpointArgs(custom_storage=True)
        print(error(driver.checkpoint_process_checkpoint, target.pid, args), end=" ")
        driver.device_primary_ctx_retain(gpu)
    driver.checkpoint_process_unlock(target.pid)
    cuda.cuCtxSetCurrent(ctypes.c_void_p(driver.device_primary_ctx_retain(0)))
    args, kept = save(target.pid), {}
    saved = order(args)
    for region, (gpu, _) in zip(args.custom_storage_info, saved):
        kept[gpu] = pinned(region.size)
        to_host(region, kept[gpu], ctypes.c_void_p(region.stream))
    complete(args)
    args = load(target.pid)
    loaded = order(args)
    for region, (gpu, _) in zip(args.custom_storage_info, loaded):
        to_device(region, kept[gpu], ctypes.c_void_p(region.stream))
    complete(args)
    driver.checkpoint_process_unlock(target.pid)
    target.check()
    in_order = [(0, 2), (1, 4), (2, 6)]
    print(sorted(saved) == sorted(loaded) == in_order,
          saved != in_order, saved != loaded)
""",
        gpus=4,
    )
    assert printed == "201 201 201 True True True\n"


def test_own_process_has_no_custom_storage(storage):
    printed = storage(
        """
driver.checkpoint_process_lock(os.getpid())
args = driver.CheckpointCheckpointArgs(custom_storage=True)
print(error(driver.checkpoint_process_checkpoint, os.getpid(), args))
driver.checkpoint_process_unlock(os.getpid())
"""
    )
    assert printed == "801\n"


def test_others_see_what_is_under_way(storage):
    printed = storage(
        """
OTHER = (
    "from cuckpt import driver; import sys; "
    "print(driver.checkpoint_process_get_state(int(sys.argv[1])).name)"
)
def seen(pid):
    command = [sys.executable, "-P", "-c", OTHER, str(pid)]
    return subprocess.check_output(command, text=True).strip()
with Target({0: MIB}) as target:
    args = save(target.pid)
    print(seen(target.pid))
    complete(args)
    args = load(target.pid)
    print(seen(target.pid))
    complete(args)
    print(seen(target.pid))
"""
    )
    assert printed == "CHECKPOINTING\nRESTORING\nLOCKED\n"


def test_restore_that_is_cancelled_moves_nothing(storage):
    printed = storage(
        """
import resource
with Target({0: 4 * MIB}) as target:
    args = save(target.pid)
    (region,) = args.custom_storage_info
    memory = pinned(region.size)
    to_host(region, memory, ctypes.c_void_p(region.stream))
    complete(args)
    uuids = [driver.device_get_uuid_v2(gpu) for gpu in range(2)]
    swap = [(uuids[0], uuids[1]), (uuids[1], uuids[0])]
    # No address space is left to which the offered memory could be mapped.
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MIB, limits[1]))
    failed = error(lambda: load(target.pid, gpu_pairs=swap))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    print(failed, state(target.pid))
    args = load(target.pid)  # to where it was
    (region,) = args.custom_storage_info
    device = ctypes.c_int()
    cuda.cuStreamGetDevice(ctypes.c_void_p(region.stream), by(device))
    to_device(region, memory, ctypes.c_void_p(region.stream))
    complete(args)
    driver.checkpoint_process_unlock(target.pid)
    target.check()
    print(device.value)
""",
        gpus=2,
    )
    assert printed == "2 CHECKPOINTED\n0\n"


def test_drivers_before_it_take_the_field_for_a_reserved_one(storage):
    printed = storage(
        """
with Target({0: MIB}) as target:
    driver.checkpoint_process_lock(target.pid)
    args = driver.CheckpointCheckpointArgs(custom_storage=True)
    print(error(driver.checkpoint_process_checkpoint, target.pid, args))
    try:
        driver.checkpoint_operation_complete(8)
    except driver.FunctionNotFoundError:
        print("not there")
""",
        driver_version="13.0",
    )
    assert printed == "1\nnot there\n"
