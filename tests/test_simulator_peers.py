"""One script through cuckpt and unmodified cuda.bindings, on the simulated driver."""

import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from cuckpt import simulator

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
UUID = simulator.Machine().gpus[0].uuid

# `ask(name, pid, args)` returns the result's number and the value, for each binding.
ADAPTERS = {
    "cuckpt": """
from cuckpt import driver
def lock_args(timeout_ms):
    return driver.CheckpointLockArgs(timeout_ms=timeout_ms)
def restore_args(pairs):
    return driver.CheckpointRestoreArgs(gpu_pairs=pairs)
""",
    "v2": """
from cuda.bindings._v2 import driver
kept = []
def lock_args(timeout_ms):
    args = driver.CheckpointLockArgs()
    args.timeout_ms = timeout_ms
    return args
def restore_args(pairs):
    array = b"".join(old + new for old, new in pairs)
    kept.append(ctypes.create_string_buffer(array, len(array)))
    args = driver.CheckpointRestoreArgs()
    args.gpu_pairs = ctypes.addressof(kept[-1])
    args.gpu_pairs_count = len(pairs)
    return args
""",
    "v1": """
from cuda.bindings import driver
def lock_args(timeout_ms):
    args = driver.CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    return args
def restore_args(pairs):
    args = driver.CUcheckpointRestoreArgs()
    made = []
    for old, new in pairs:
        made.append(driver.CUcheckpointGpuPair())
        ctypes.memmove(made[-1].getPtr(), old + new, 32)
    args.gpuPairs, args.gpuPairsCount = made, len(made)
    return args
def checkpoint_args(out):
    args = driver.CUcheckpointCheckpointArgs()
    ctypes.c_void_p.from_address(args.getPtr()).value = out
    return args
def storage_restore_args(out):
    args = driver.CUcheckpointRestoreArgs()
    ctypes.c_void_p.from_address(args.getPtr() + 16).value = out
    return args
""",
}
ASK = {
    "new": """
Error = driver.DriverError
def checkpoint_args(out):
    args = driver.CheckpointCheckpointArgs()
    args.custom_storage_info_out = out
    return args
def storage_restore_args(out):
    args = driver.CheckpointRestoreArgs()
    args.custom_storage_info_out = out
    return args
def ask(name, *arguments):
    try:
        value = getattr(driver, name)(*arguments)
        return 0, None if value is None else value
    except Error as error:
        return int(error.status), None
def init():
    driver.init(0)
def retain():
    return driver.device_primary_ctx_retain(0)
def uuid():
    return bytes(driver.device_get_uuid_v2(driver.device_get(0)).bytes)
""",
    "v1": """
NAMES = {
    "checkpoint_process_get_state": "cuCheckpointProcessGetState",
    "checkpoint_process_get_restore_thread_id": "cuCheckpointProcessGetRestoreThreadId",
    "checkpoint_process_lock": "cuCheckpointProcessLock",
    "checkpoint_process_checkpoint": "cuCheckpointProcessCheckpoint",
    "checkpoint_process_restore": "cuCheckpointProcessRestore",
    "checkpoint_process_unlock": "cuCheckpointProcessUnlock",
    "checkpoint_operation_complete": "cuCheckpointOperationComplete",
}
def ask(name, *arguments):
    result, *values = getattr(driver, NAMES[name])(*arguments)
    return int(result), int(values[0]) if values and not result else None
def init():
    assert int(driver.cuInit(0)[0]) == 0
def retain():
    return int(driver.cuDevicePrimaryCtxRetain(0)[1])
def uuid():
    return bytes(driver.cuDeviceGetUuid(driver.cuDeviceGet(0)[1])[1].bytes)
""",
}

SCRIPT = """
from cuckpt.target import Target

def say(*what):
    print(*what, flush=True)

def check():
    target.check()
    say("right")

def process(name, *arguments):
    return ask(f"checkpoint_process_{name}", *arguments)

STEPS = ["lock", "checkpoint", "restore", "unlock"]
ALLOWED = {0: ["lock"], 1: ["checkpoint", "unlock"], 2: ["restore"]}

init()
say(uuid().hex())
target = Target({0: 5_000_000})
pid = target.pid

# every call in every state
for step in STEPS:
    state = process("get_state", pid)
    say(step, "in", state, process("get_restore_thread_id", pid)[0])
    for wrong in STEPS:
        if wrong not in ALLOWED[state[1]]:
            say("  wrong", wrong, process(wrong, pid, None))
    say("  right", process(step, pid, None))
check()

# who may be asked about
for other in -1, 0, 1, 2 ** 22 + 1, os.getpid():
    say(other if other < 2 else "pid", process("get_state", other)[0])

# time limits, pairs
target.ask("spin 600")
say("timeout", process("lock", pid, lock_args(50)), process("get_state", pid))
say("patience", process("lock", pid, lock_args(5000)))
say(process("checkpoint", pid, None))
own, other = uuid(), bytes(16)
for pairs in [(other, own)], [(own, other)], [(own, own)] * 2, [(own, own)]:
    say("pairs", process("restore", pid, restore_args(pairs)))
say(process("unlock", pid, None))
check()

# custom storage, its structs read by ctypes
cuda = ctypes.CDLL(os.environ["CUCKPT_LIBCUDA"])

def regions(cell):
    handle, array, count = struct.unpack("<QQI", ctypes.string_at(cell.value, 20))
    return handle, list(struct.iter_unpack("<QQQ", ctypes.string_at(array, 24 * count)))

def copy(function, pointer, size, content):
    arguments = (content, ctypes.c_uint64(pointer)), (ctypes.c_uint64(pointer), content)
    assert function(*arguments["HtoD" in function.__name__], ctypes.c_size_t(size)) == 0

cell = ctypes.c_void_p()
out = ctypes.addressof(cell)
say(process("lock", pid, None))
say("without a context", process("checkpoint", pid, checkpoint_args(out)))
cuda.cuCtxSetCurrent(ctypes.c_void_p(retain()))
say("prepare", process("checkpoint", pid, checkpoint_args(out)))
say(process("get_state", pid))
handle, (region,) = regions(cell)
image = ctypes.create_string_buffer(region[1])
copy(cuda.cuMemcpyDtoH_v2, region[0], region[1], image)
say("complete", ask("checkpoint_operation_complete", handle), process("get_state", pid))
say("again", ask("checkpoint_operation_complete", handle))
say("plain restore", process("restore", pid, None))
args = storage_restore_args(out)
say("restore", process("restore", pid, args), process("get_state", pid))
handle, (region,) = regions(cell)
copy(cuda.cuMemcpyHtoD_v2, region[0], region[1], image)
say("complete", ask("checkpoint_operation_complete", handle), process("get_state", pid))
say(process("unlock", pid, None))
check()

# managed memory
target.ask("manage")
say(process("lock", pid, None), process("checkpoint", pid, None))
say(process("unlock", pid, None))
target.end()
say("dead", process("get_state", pid), process("lock", pid, None))
"""

IMPORTS = "import ctypes, os, struct, subprocess, sys\n"


def run(code):
    result = subprocess.run(
        [COMMAND, "simulate", "--", sys.executable, "-P", "-c", IMPORTS + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def transcript():
    """What cuckpt's run of the script prints."""
    return run(ADAPTERS["cuckpt"] + ASK["new"] + SCRIPT)


def test_script_shows_what_the_driver_is_known_to_do(transcript):
    text = "\n".join(
        line.replace("<ProcessState.", "").replace(">", "") for line in transcript
    )
    assert transcript[0] == UUID.hex()
    for expected in (
        "wrong checkpoint (401, None)",
        "timeout (600, None)",
        "patience (0, None)",
        "without a context (201, None)",
        "plain restore (1, None)",
        "(0, None) (801, None)",
        "dead (304, None) (304, None)",
        "-1 304\n0 304\n1 3\npid 304\npid 0",
    ):
        assert expected in text
    assert [line for line in transcript if line.startswith("pairs")] == [
        *["pairs (1, None)"] * 3,
        "pairs (0, None)",
    ]
    assert transcript.count("right") == 3


@pytest.mark.parametrize(("peer", "style"), [("v2", "new"), ("v1", "v1")])
def test_script_runs_the_same_through_the_peer(transcript, peer, style):
    def plain(lines):
        return [re.sub(r"<ProcessState\.\w+: (\d)>", r"\1", line) for line in lines]

    assert plain(run(ADAPTERS[peer] + ASK[style] + SCRIPT)) == plain(transcript)


def test_cuda_core_process_runs_its_lifecycle():
    printed = run(
        textwrap.dedent(
            f"""
            from cuda.core import Device
            from cuda.core.checkpoint import Process
            from cuckpt.target import Target
            target = Target({{0: 5_000_000}})
            process = Process(target.pid)
            print(process.state, process.pid == target.pid)
            process.lock(timeout_ms=5000)
            print(process.state)
            process.checkpoint()
            print(process.state)
            own = {UUID.hex()!r}
            process.restore(gpu_mapping={{own: own}})
            print(process.state)
            process.unlock()
            target.check()
            print(process.state)
            thread = process.restore_thread_id
            print(os.path.exists(f"/proc/{{target.pid}}/task/{{thread}}"))
            print(Device(0).uuid.replace("-", "") == own)
            target.end()
            """
        )
    )
    assert printed == [
        *("running True", "locked", "checkpointed", "locked", "running"),
        *("True", "True"),
    ]


SYMBOLS = """
cuda = ctypes.CDLL(os.environ["CUCKPT_LIBCUDA"])
find = cuda.cuGetProcAddress_v2
def at(name, version):
    pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
    no_flags, out = ctypes.c_uint64(), ctypes.byref(status)
    result = find(name, ctypes.byref(pointer), version, no_flags, out)
    return result, bool(pointer.value), status.value
"""


def test_symbols_have_versions():
    printed = run(
        SYMBOLS
        + textwrap.dedent(
            """
            print(at(b"cuCheckpointOperationComplete", 13040))
            print(at(b"cuCheckpointOperationComplete", 13000))
            print(at(b"cuCheckpointProcessLock", 12070))
            print(at(b"cuInit", 13060))
            print(at(b"cuNonsense", 12000))
            for name in "cuMemAlloc", "cuMemAlloc_v2", "cuGetProcAddress", "cuInit":
                print(hasattr(cuda, name))
            """
        )
    )
    assert printed == [
        *("(0, True, 0)", "(0, False, 1)", "(0, False, 1)", "(1, False, -1)"),
        "(0, False, 1)",
        *["True"] * 4,
    ]


def test_unmodified_bindings_use_memory_streams_and_events():
    printed = run(
        textwrap.dedent(
            """
            from cuda.bindings import driver as cu
            def ok(answer):
                assert int(answer[0]) == 0, answer
                return answer[1] if len(answer) == 2 else answer[1:]
            ok(cu.cuInit(0))
            device = ok(cu.cuDeviceGet(0))
            context = ok(cu.cuDevicePrimaryCtxRetain(device))
            ok(cu.cuCtxSetCurrent(context))
            print(ok(cu.cuDeviceGetName(64, device)).split(b"\\0")[0])
            major = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            print(ok(cu.cuDeviceGetAttribute(major, device)))
            stream = ok(cu.cuStreamCreate(0))
            start, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
            pointer = ok(cu.cuMemAlloc(1000))
            host = ok(cu.cuMemHostAlloc(1000, 0))
            ok(cu.cuMemsetD8Async(pointer, 9, 1000, stream))
            ok(cu.cuEventRecord(start, stream))
            ok(cu.cuMemcpyDtoHAsync(host, pointer, 1000, stream))
            ok(cu.cuEventRecord(end, stream))
            ok(cu.cuStreamSynchronize(stream))
            print(ctypes.string_at(host, 1000) == bytes([9]) * 1000)
            print(ok(cu.cuEventElapsedTime(start, end)) >= 0)
            print(int(ok(cu.cuStreamGetCtx(stream))) == int(context))
            free, total = ok(cu.cuMemGetInfo())
            print(total - free)
            for done in (cu.cuMemFree(pointer), cu.cuMemFreeHost(host),
                         cu.cuEventDestroy(end), cu.cuStreamDestroy(stream)):
                ok(done)
            print(int(cu.cuMemFree(pointer)[0]))
            """
        )
    )
    assert printed == [
        *("b'cuckpt simulated GPU'", "9", "True", "True", "True", str(2 << 20), "1")
    ]


def test_bindings_say_nothing_and_the_runtime_says_why_it_does_not_run(tmp_path):
    program = """
import ctypes, nvidia, pathlib
from cuda.bindings import driver
assert int(driver.cuInit(0)[0]) == 0
print("silent so far", file=sys.stderr, flush=True)
(file,) = pathlib.Path(nvidia.__path__[0]).glob("cu13/lib/libcudart.so.13")
count = ctypes.c_int()
print(ctypes.CDLL(str(file)).cudaGetDeviceCount(ctypes.byref(count)))
"""
    result = subprocess.run(
        [COMMAND, "simulate", "--", sys.executable, "-P", "-c", "import sys" + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "801\n"
    silent, told = result.stderr.splitlines()
    assert silent == "silent so far"
    assert "the CUDA runtime" in told
