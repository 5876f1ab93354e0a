"""The memory of simulated GPUs: who has how much, and what becomes of it."""

import pytest

from cuckpt import simulator

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

UUIDS = [gpu.uuid for gpu in simulator.Machine(2).gpus]


def test_memory_is_shared_and_freed_by_a_checkpoint(program):
    printed = program(
        """
        driver.init()
        target = Target({0: 10 * MIB})
        filled = used()
        suspend(target.pid)
        print(filled, used())
        resume(target.pid)
        target.check()
        print(used() == filled)
        target.end()
        print(used())
        """
    )
    assert printed == f"{10 << 20} 0\nTrue\n0\n"


def test_memory_runs_out(program):
    printed = program(
        """
        driver.init()
        first, second = Target({0: 40 * MIB}), Target()
        try:
            second.ask(f"fill {40 * MIB}")
        except TargetError as error:
            print("OUT_OF_MEMORY" in str(error))
        second.end()
        first.end()
        Target({0: 40 * MIB}).check()
        """,
        memory="64MiB",
    )
    assert printed == "True\n"


def test_restore_without_memory_loses_the_target(program):
    printed = program(
        """
        driver.init()
        first = Target({0: 40 * MIB})
        suspend(first.pid)
        second = Target({0: 40 * MIB})
        for attempt in "restore", "restore", "unlock":
            try:
                getattr(driver, f"checkpoint_process_{attempt}")(first.pid)
            except driver.DriverError as error:
                print(error.status)
            second.end()
        print(driver.checkpoint_process_get_state(first.pid).name)
        """,
        memory="64MiB",
    )
    assert printed == "2\n304\n401\nCHECKPOINTED\n"


def test_pairs_move_the_memory_to_another_gpu(program):
    printed = program(
        f"""
        a, b = {UUIDS}
        driver.init()
        target = Target({{0: 10 * MIB}})
        print(used(0), used(1))
        suspend(target.pid)
        wrongs = [(a, b)], [(a, b), (b, b)], [(a, a), (a, b)], [(a, b), (b, bytes(16))]
        for wrong in wrongs:
            try:
                resume(target.pid, driver.CheckpointRestoreArgs(gpu_pairs=wrong))
            except driver.InvalidValueError:
                print("refused")
        resume(target.pid, driver.CheckpointRestoreArgs(gpu_pairs=[(a, b), (b, a)]))
        print(used(0), used(1))
        target.check()
        """,
        gpus=2,
    )
    assert printed == f"{10 << 20} 0\n" + "refused\n" * 4 + f"0 {10 << 20}\n"


def test_device_addresses_are_no_host_addresses(program):
    printed = program(
        """
        driver.init()
        cuda = ctypes.CDLL(driver.library_path())
        used()
        pointer = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64)) == 0
        libc = ctypes.CDLL(None, use_errno=True)
        written = libc.write(1, ctypes.c_void_p(pointer.value), ctypes.c_size_t(1))
        print(written, os.strerror(ctypes.get_errno()))
        """
    )
    assert printed == "-1 Bad address\n"


def test_memory_calls_check_their_addresses(program):
    printed = program(
        """
        driver.init()
        cuda = ctypes.CDLL(driver.library_path())
        used()
        u64, size = ctypes.c_uint64, ctypes.c_size_t
        first, second = u64(), u64()
        host = ctypes.create_string_buffer(100)
        results = [
            cuda.cuMemAlloc_v2(ctypes.byref(first), size(0)),
            cuda.cuMemAlloc_v2(ctypes.byref(first), size(1 << 62)),
            cuda.cuMemAlloc_v2(ctypes.byref(first), size(3 * MIB)),
            cuda.cuMemAlloc_v2(ctypes.byref(second), size(100)),
            cuda.cuMemsetD8_v2(first, 7, size(100)),
            cuda.cuMemcpyDtoD_v2(second, first, size(100)),
            cuda.cuMemcpyDtoH_v2(host, second, size(100)),
            cuda.cuMemcpyDtoH_v2(host, u64(second.value + (1 << 40)), size(1)),
            cuda.cuMemcpyHtoD_v2(u64(4096), host, size(1)),
            cuda.cuMemcpyDtoH_v2(host, u64(first.value + 4 * MIB - 50), size(100)),
            cuda.cuMemsetD32_v2(first, 1, size((1 << 62) + 1)),
            cuda.cuMemFree_v2(u64(first.value + 1)),
            cuda.cuMemFree_v2(first),
            cuda.cuMemFree_v2(first),
            cuda.cuMemsetD8_v2(first, 7, size(100)),
            cuda.cuMemFree_v2(u64(0)),
        ]
        print(results, host.raw == b"\\7" * 100, used() // MIB)
        """
    )
    assert printed == ("[1, 2, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0] True 2\n")


# A target that allocates as it is told, and custom storage through host memory.
ALLOCATING = '''
CODE = """
import ctypes, sys
from cuckpt.target import __main__ as target
target.start()
cuda, u64, size = target._driver(), ctypes.c_uint64, ctypes.c_size_t
held = {}
for line in sys.stdin:
    what, name, number = line.split()
    pointer, number = held.setdefault(name, u64()), int(number)
    if what == "allocate":
        result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), size(number))
    elif what == "manage":
        result = cuda.cuMemAllocManaged(ctypes.byref(pointer), size(number), 1)
    elif what == "free":
        result = cuda.cuMemFree_v2(pointer)
    elif what == "write":
        result = cuda.cuMemsetD8_v2(pointer, number, size(1 << 20))
    elif what == "read":
        content = ctypes.create_string_buffer(1 << 20)
        result = cuda.cuMemcpyDtoH_v2(content, pointer, size(1 << 20))
        result = result or (0 if content.raw == bytes([number]) * (1 << 20) else -1)
    print(result, flush=True)
"""

def start(code):
    return Program("-c", code)

def allocating():
    process = start(CODE)
    def ask(what, name, number=0):
        return int(process.ask(f"{what} {name} {number}"))
    return process, ask

def copy(function, region, image):
    pointer, size = ctypes.c_uint64(region.dev_ptr), ctypes.c_size_t(region.size)
    into_gpu = "HtoD" in function.__name__
    arguments = (pointer, image) if into_gpu else (image, pointer)
    assert function(*arguments, size) == 0

def through_storage(pid):
    cuda = ctypes.CDLL(driver.library_path())
    driver.checkpoint_process_lock(pid)
    save = driver.CheckpointCheckpointArgs(custom_storage=True)
    load = driver.CheckpointRestoreArgs(custom_storage=True)
    driver.checkpoint_process_checkpoint(pid, save)
    images = []
    for region in save.custom_storage_info:
        images.append(ctypes.create_string_buffer(region.size))
        copy(cuda.cuMemcpyDtoH_v2, region, images[-1])
    driver.checkpoint_operation_complete(save)
    driver.checkpoint_process_restore(pid, load)
    for region, image in zip(load.custom_storage_info, images):
        copy(cuda.cuMemcpyHtoD_v2, region, image)
    driver.checkpoint_operation_complete(load)
    driver.checkpoint_process_unlock(pid)

driver.init()
used()
'''


def test_freed_memory_between_allocations_stays_out_of_the_way(program):
    printed = program(
        ALLOCATING
        + """
target, ask = allocating()
for name, number in ("a", 1), ("b", 2), ("c", 3), ("d", 4):
    assert ask("allocate", name, 2 * MIB) == ask("write", name, number) == 0
assert ask("free", "b") == 0
through_storage(target.pid)  # which writes the hole at b as well
assert ask("free", "d") == ask("free", "c") == 0
suspend(target.pid)
resume(target.pid)
print(ask("read", "a", 1), used() // MIB)
assert ask("allocate", "e", 4 * MIB) == 0
print(ask("read", "e", 0), used() // MIB)
"""
    )
    assert printed == "0 2\n0 6\n"


def test_restore_needs_room_for_what_is_allocated_only(program):
    printed = program(
        ALLOCATING
        + """
target, ask = allocating()
assert ask("allocate", "big", 40 * MIB) == ask("allocate", "small", 2 * MIB) == 0
assert ask("write", "small", 7) == ask("free", "big") == 0
suspend(target.pid)
other, ask_other = allocating()
assert ask_other("allocate", "x", 60 * MIB) == 0
resume(target.pid)
print(ask("read", "small", 7), used() // MIB)
assert ask("free", "small") == ask_other("free", "x") == 0
print(used())
""",
        memory="64MiB",
    )
    assert printed == "0 62\n0\n"


def test_managed_memory_that_was_freed_is_forgotten(program):
    printed = program(
        ALLOCATING
        + """
target, ask = allocating()
assert ask("manage", "m", MIB) == 0
driver.checkpoint_process_lock(target.pid)
try:
    driver.checkpoint_process_checkpoint(target.pid)
except driver.NotSupportedError:
    driver.checkpoint_process_unlock(target.pid)
assert ask("free", "m") == 0
suspend(target.pid)
resume(target.pid)
print(ask("allocate", "n", MIB))
"""
    )
    assert printed == "0\n"


def test_failing_allocation_takes_nothing_from_others(program):
    printed = program(
        ALLOCATING
        + """
import threading
target, ask = allocating()
greedy, ask_greedy = allocating()
assert ask("allocate", "a", 10 * MIB) == 0
results = []
def fail():
    results.extend(ask_greedy("allocate", "x", 60 * MIB) for _ in range(300))
thread = threading.Thread(target=fail)
thread.start()
tries = [ask("allocate", "b", 8 * MIB) or ask("free", "b") for _ in range(300)]
thread.join()
print(set(results), set(tries))
""",
        memory="64MiB",
    )
    assert printed == "{2} {0}\n"


def test_memory_that_was_never_written_costs_nothing(program):
    printed = program(
        ALLOCATING
        + """
target, ask = allocating()
assert ask("allocate", "a", 100 << 30) == ask("write", "a", 5) == 0
start = time.monotonic()
suspend(target.pid)
resume(target.pid)
print(ask("read", "a", 5), time.monotonic() - start < 10)
""",
        memory="128GiB",
    )
    assert printed == "0 True\n"
