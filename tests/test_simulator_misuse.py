"""Programs that go to the limits, or err, on a simulated machine."""

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

CALLS = """
import resource, threading
cuda = ctypes.CDLL(driver.library_path())
u64, size, by = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref

def use(gpu=0):
    driver.init()
    context = ctypes.c_void_p(driver.device_primary_ctx_retain(gpu))
    assert cuda.cuCtxSetCurrent(context) == 0
    return context

def allocate(length):
    memory = u64()
    return cuda.cuMemAlloc_v2(by(memory), size(length)), memory

def stream():
    made = ctypes.c_void_p()
    assert cuda.cuStreamCreate(by(made), 1) == 0
    return made

def pinned(length):
    memory = ctypes.c_void_p()
    assert cuda.cuMemHostAlloc(by(memory), size(length), 0) == 0
    return memory
"""


@pytest.fixture
def calls(program):
    return lambda text, **options: program(CALLS + text, **options)


def test_process_without_descriptors_takes_nobody_for_dead(calls):
    printed = calls(
        """
target = Target({0: 200 * MIB})
use()
before = allocate(200 * MIB)[0]
files = []
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
try:
    while True:
        files.append(os.dup(0))
except OSError:
    pass
print(before, allocate(200 * MIB)[0], allocate(20 * MIB)[0])
""",
        memory="256MiB",
    )
    assert printed == "2 2 0\n"


def test_failed_init_leaves_no_thread_and_can_be_repeated(calls):
    printed = calls(
        """
def init():
    try:
        driver.init()
        return 0
    except driver.DriverError as error:
        return int(error.status)

threads = len(os.listdir("/proc/self/task"))
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for count in range(1, 6):
    # Fails one step later each time: at memory, at the socket, ...
    used = max(map(int, os.listdir("/proc/self/fd")))
    free = sum(n not in map(int, os.listdir("/proc/self/fd")) for n in range(used))
    low = [os.dup(0) for _ in range(free)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, limits[1]))
    status = init()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for file in low:
        os.close(file)
    if status == 0:
        break
    assert len(os.listdir("/proc/self/task")) == threads, "a thread is left"
print(init(), driver.checkpoint_process_get_state(os.getpid()).name)
print(len(os.listdir("/proc/self/task")) - threads)
"""
    )
    assert printed == "0 RUNNING\n1\n"


def test_memory_goes_only_when_every_context_has_done_with_it(calls):
    printed = calls(
        """
use(0)
second = use(1)
copies = stream()
result, memory = allocate(MIB)
host = pinned(MIB)
for free in (
    lambda: cuda.cuMemFreeHost(host), lambda: cuda.cuMemFree_v2(memory)
):
    assert cuda.cuMemcpyDtoHAsync_v2(host, memory, size(MIB), copies) == 0
    use(0)
    assert free() == 0
    cuda.cuCtxSetCurrent(second)
    print(cuda.cuStreamSynchronize(copies))
    host = pinned(MIB)
""",
        gpus=2,
    )
    assert printed == "0\n0\n"


def test_machine_can_be_left_while_a_lock_waits(machine_program):
    printed = machine_program(
        "machine = Machine(); machine.__enter__()\n"
        + CALLS
        + """
from cuckpt.target.__main__ import spin
OTHER = "from cuckpt import driver; import sys; "
OTHER += "driver.checkpoint_process_lock(int(sys.argv[1]))"
use()
spin(10**9)
command = [sys.executable, "-P", "-c", OTHER, str(os.getpid())]
other = subprocess.Popen(command, stderr=subprocess.DEVNULL)
while not machine.calls["lock"]:
    time.sleep(0.01)
start = time.monotonic()
machine.__exit__(None, None, None)
print(time.monotonic() - start < 5, other.wait(30))
"""
    )
    assert printed == "True 1\n"


def test_failure_is_seen_by_all_calls_and_ends_with_the_context(calls):
    printed = calls(
        """
context = use()
copies, frees = stream(), stream()
(_, first), (_, second) = allocate(MIB), allocate(MIB)
event = ctypes.c_void_p()
assert cuda.cuEventCreate(by(event), 0) == 0
assert cuda.cuMemcpyDtoDAsync_v2(first, second, size(4096), copies) == 0
assert cuda.cuMemFreeAsync(first, frees) == 0
assert cuda.cuStreamSynchronize(frees) == 0
assert cuda.cuEventRecord(event, copies) == 0
print(cuda.cuEventSynchronize(event), cuda.cuEventQuery(event),
      cuda.cuStreamQuery(copies), cuda.cuMemAllocAsync(by(first), size(8), copies),
      cuda.cuEventRecord(event, copies), cuda.cuStreamWaitEvent(copies, event, 0))
print(cuda.cuDevicePrimaryCtxReset_v2(0), allocate(8)[0])
use()
print(allocate(8)[0])
"""
    )
    assert printed == "700 700 700 700 700 700\n0 709\n0\n"


def test_wrong_sizes_and_handles_are_refused(calls):
    printed = calls(
        """
use()
host, huge = pinned(4096), size(2**64 - 1)
graph, copies = ctypes.c_void_p(), stream()
assert cuda.cuStreamBeginCapture_v2(copies, 2) == 0
assert cuda.cuStreamEndCapture(copies, by(graph)) == 0

class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int),
                ("location", ctypes.c_int * 2), ("more", ctypes.c_char * 72)]

properties = Properties(1, 0, (ctypes.c_int * 2)(1, -5))
pool = ctypes.c_void_p()
print(cuda.cuMemcpyHtoD_v2(host, host, huge), cuda.cuMemsetD8_v2(host, 0, huge),
      cuda.cuGraphDestroy(graph), cuda.cuGraphDestroy(graph),
      cuda.cuGraphDestroy(ctypes.c_void_p(4096)),
      cuda.cuMemPoolCreate(by(pool), by(properties)),
      cuda.cuMemPoolTrimTo(ctypes.c_void_p(4096), size(0)))
"""
    )
    assert printed == "1 1 0 1 1 1 1\n"


def test_kernel_that_never_ends_does_not_end(calls):
    printed = calls(
        """
from cuckpt.target.__main__ import SPIN
use()
module, kernel, copies = ctypes.c_void_p(), ctypes.c_void_p(), stream()
assert cuda.cuModuleLoadData(by(module), SPIN) == 0
assert cuda.cuModuleGetFunction(by(kernel), module, b"cuckpt_spin") == 0
limit = u64(2**64 - 1)
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(limit))
ones = [1] * 6
assert cuda.cuLaunchKernel(kernel, *ones, 0, copies, parameters, None) == 0
time.sleep(0.3)
print(cuda.cuStreamQuery(copies), flush=True)
os._exit(0)
"""
    )
    assert printed == "600\n"


def test_library_that_is_closed_stays(calls):
    printed = calls(
        """
program = '''
import ctypes, sys
libc = ctypes.CDLL(None)
libc.dlopen.restype = ctypes.c_void_p
libc.dlsym.restype = ctypes.c_void_p
libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
libc.dlclose.argtypes = [ctypes.c_void_p]
handle = libc.dlopen(sys.argv[1].encode(), 2)
init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(libc.dlsym(handle, b"cuInit"))
assert init(0) == 0
assert libc.dlclose(handle) == 0
print("closed", flush=True)
input()
'''
other = Program("-c", program, driver.library_path())
assert other.answer() == "closed"
print(driver.checkpoint_process_get_state(other.pid).name)
other.end()
"""
    )
    assert printed == "RUNNING\n"


def test_imported_memory_is_device_memory(calls):
    printed = calls(
        '''
program = """
import ctypes, sys
from cuckpt import driver
cuda = ctypes.CDLL(driver.library_path())
driver.init()
cuda.cuCtxSetCurrent(ctypes.c_void_p(driver.device_primary_ctx_retain(0)))
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
memory, kind = ctypes.c_uint64(), ctypes.c_uint()
base, length = ctypes.c_uint64(), ctypes.c_size_t()
assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(memory), handle, 1) == 0
assert cuda.cuPointerGetAttribute(ctypes.byref(kind), 2, memory) == 0
inside = ctypes.c_uint64(memory.value + 5)
by = ctypes.byref
assert cuda.cuMemGetAddressRange_v2(by(base), by(length), inside) == 0
print(kind.value, base.value == memory.value, length.value, flush=True)
"""
use()
_, memory = allocate(5000)
handle = ctypes.create_string_buffer(64)
assert cuda.cuIpcGetMemHandle(handle, memory) == 0
print(Program("-c", program, handle.raw.hex()).answer())
'''
    )
    assert printed == "2 True 5000\n"


def test_fault_that_is_happening_is_not_replaced(machine_program):
    printed = machine_program(
        """
        import threading
        from cuckpt.simulator import Fault
        slow = Fault("get_state", delay_s=1, result=999)
        with Machine(faults=[slow] + [Fault("unlock", 1, at=10**6)] * 63) as machine:
            target, outcome = machine.spawn(), []
            def ask():
                try:
                    driver.checkpoint_process_get_state(target.pid)
                except driver.DriverError as error:
                    outcome.append(int(error.status))
            asker = threading.Thread(target=ask)
            asker.start()
            while not machine.calls["get_state"]:
                time.sleep(0.01)
            try:
                machine.inject(Fault("lock", kill="target", at=500))
            except ValueError:
                print("full")
            asker.join()
            machine.inject(Fault("lock", kill="target", at=500))
            print(outcome, driver.checkpoint_process_get_state(target.pid).name)
        """
    )
    assert printed == "full\n[999] RUNNING\n"
