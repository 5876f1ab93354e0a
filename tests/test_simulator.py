"""The simulated machine: its driver, how it is chosen, what it leaves behind."""

import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest

from cuckpt import simulator

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
SCENARIOS = Path(__file__).parent / "gpu/test_scenarios.py"
UUIDS = [gpu.uuid for gpu in simulator.Machine(2).gpus]

# What the programs below begin with.
PRELUDE = """
import ctypes, os, subprocess, sys, time
from cuckpt import driver
from cuckpt.simulator import Machine, SimulatorError
from cuckpt.target import Program, Target, TargetError

def used(gpu=0):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda = ctypes.CDLL(driver.library_path())
    context = ctypes.c_void_p(driver.device_primary_ctx_retain(gpu))
    cuda.cuCtxSetCurrent(context)
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value

def suspend(pid):
    driver.checkpoint_process_lock(pid, driver.CheckpointLockArgs(timeout_ms=10_000))
    driver.checkpoint_process_checkpoint(pid)

def resume(pid, args=None):
    driver.checkpoint_process_restore(pid, args)
    driver.checkpoint_process_unlock(pid)

MIB = 1 << 20
"""


def simulate(*command, timeout=120, **options):
    arguments = [COMMAND, "simulate"]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run(
        [*arguments, "--", *command], capture_output=True, text=True, timeout=timeout
    )


def program(text, **options):
    """Run a program on a simulated machine; return what it printed."""
    code = PRELUDE + textwrap.dedent(text)
    result = simulate(sys.executable, "-P", "-W", "error", "-c", code, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# The same scenarios as on a real GPU


@pytest.mark.parametrize("version", ["13.5", "13.0"])
def test_scenarios_of_the_real_driver_pass(version):
    result = simulate(
        *(sys.executable, "-m", "pytest", "--driver=real", "-q", SCENARIOS),
        driver_version=version,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout
    assert "21 passed" in result.stdout


# The command


def test_simulate_ends_as_the_command_does():
    assert simulate("sh", "-c", "exit 7").returncode == 7
    assert simulate("sh", "-c", "kill -9 $$").returncode == -9
    missing = simulate("no-such-command")
    assert missing.returncode == 127
    assert missing.stderr.startswith("cuckpt simulate: no-such-command: ")
    assert simulate(os.devnull).returncode == 126


def test_simulate_passes_input_and_signals():
    with subprocess.Popen(
        [COMMAND, "simulate", "--", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as cat:
        cat.stdin.write(b"through\n")
        cat.stdin.flush()
        assert cat.stdout.readline() == b"through\n"
        cat.send_signal(signal.SIGTERM)
        assert cat.wait(30) == -signal.SIGTERM


def test_simulate_is_configured_by_its_variables_alone():
    before = {**os.environ}
    command = [COMMAND, "simulate", "--", "env", "-0"]
    lines = subprocess.check_output(command, env=before, text=True).split("\0")
    after = dict(line.split("=", 1) for line in lines if line)
    changed = {name for name, value in after.items() if before.get(name) != value}
    assert changed - {"_"} == {"LD_LIBRARY_PATH", "CUCKPT_SIMULATOR", "CUCKPT_LIBCUDA"}


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("memory", "5X", "as 512MiB or 4GiB, not '5X'"),
        ("memory", "4GB", "as 512MiB or 4GiB, not '4GB'"),
        ("memory", "0", "not '0'"),
        ("memory", "2TiB", "2 MiB to 1 TiB"),
        ("gpus", "0", "1 to 16 GPUs"),
        ("gpus", "17", "1 to 16 GPUs"),
        ("gpus", "x", "invalid int value"),
        ("driver_version", "new", "as 13.5 or 13050, not 'new'"),
        ("driver_version", "13.45", "as 13.5 or 13050, not '13.45'"),
        ("driver_version", "14", "not 14.0"),
        ("driver_version", "11.8", "12.0 or later"),
        ("memory", "-1", "argument --memory"),
    ],
)
def test_simulate_refuses_nonsense(option, value, problem):
    result = simulate("true", **{option: value})
    assert result.returncode == 2
    assert problem in result.stderr


def test_simulate_needs_no_dashes_but_a_command():
    command = [COMMAND, "simulate", "--gpus", "2", sys.executable, "-c", "print(7)"]
    assert subprocess.check_output(command, text=True) == "7\n"
    for empty in [], ["--"]:
        result = subprocess.run([COMMAND, "simulate", *empty], capture_output=True)
        assert result.returncode == 2
        assert b"no command" in result.stderr


def test_simulate_takes_its_options():
    printed = program(
        """
        driver.init()
        size = ctypes.c_size_t()
        ctypes.CDLL(driver.library_path()).cuDeviceTotalMem_v2(ctypes.byref(size), 1)
        print(driver.device_get_count(), size.value, driver.driver_get_version())
        """,
        gpus=2,
        memory="512MiB",
        driver_version="13.4",
    )
    assert printed == f"2 {512 << 20} 13040\n"


# Machine


def machine_program(python, text):
    return python(
        PRELUDE + textwrap.dedent(text), CUCKPT_LIBCUDA=None, CUCKPT_SIMULATOR=None
    ).stdout


def test_machine_runs_this_process_and_its_children(python):
    printed = machine_program(
        python,
        """
        for count in 1, 2:  # one machine after the other
            with Machine(gpus=count) as machine:
                driver.init()
                assert driver.device_get_count() == count
                assert str(driver.device_get_uuid_v2(0)) == str(machine.gpus[0])
                target = Target({0: 5 * MIB})
                suspend(target.pid)
                resume(target.pid)
                target.check()
                target.end()
        print("CUCKPT_SIMULATOR" in os.environ)
        try:
            driver.init()
        except driver.NoDeviceError:
            print("no machine any more")
        """,
    )
    assert printed == "False\nno machine any more\n"


def test_machine_refuses_a_second_one_and_another_driver(python):
    printed = machine_program(
        python,
        """
        with Machine():
            try:
                Machine().__enter__()
            except SimulatorError as error:
                print(error)
        try:
            Machine(driver_version=13000).__enter__()
        except SimulatorError as error:
            print(error)
        """,
    )
    second, other = printed.splitlines()
    assert "already" in second
    assert "cuckpt simulate --driver-version 13000 -- CMD" in other


def test_machine_refuses_a_process_with_another_libcuda(null_driver):
    with pytest.raises(simulator.SimulatorError, match=r"has loaded .*cuckpt simulate"):
        simulator.Machine().__enter__()


@pytest.mark.parametrize(
    "arguments",
    [
        {"gpus": 0},
        {"gpus": 17},
        {"gpus": []},
        {"gpus": [simulator.Gpu(bytes(16)), simulator.Gpu(bytes(16))]},
        {"memory_bytes": -1},
        {"memory_bytes": 1},
        {"memory_bytes": 1 << 60},
        {"driver_version": 11080},
        {"driver_version": 99000},
    ],
)
def test_machine_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match=r"\w"):
        simulator.Machine(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"memory_bytes": "4GiB"}, {"driver_version": "13.5"}, {"gpus": [1]}],
)
def test_machine_names_the_wrong_type(arguments):
    with pytest.raises(TypeError, match=next(iter(arguments))):
        simulator.Machine(**arguments)


def test_driver_without_a_machine_has_no_device(python):
    text = """
    from cuckpt import driver
    try:
        driver.init()
    except driver.NoDeviceError:
        print("none")
    """
    for machine in None, "", "/nowhere", "/proc/self/maps", os.devnull:
        printed = python(
            textwrap.dedent(text),
            CUCKPT_LIBCUDA=str(simulator.LIBRARY),
            CUCKPT_SIMULATOR=machine,
        ).stdout
        assert printed == "none\n"


# Memory


def test_memory_is_shared_and_freed_by_a_checkpoint():
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


def test_memory_runs_out():
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


def test_restore_without_memory_loses_the_target():
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


def test_pairs_move_the_memory_to_another_gpu():
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


def test_device_addresses_are_no_host_addresses():
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


def test_memory_calls_check_their_addresses():
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


# Processes


def test_forked_child_is_no_cuda_process():
    printed = program(
        """
        driver.init()
        child = os.fork()
        if child == 0:
            for function in driver.device_get_count, driver.init:
                try:
                    function()
                except driver.NotInitializedError:
                    os.write(1, b"not initialized\\n")
            time.sleep(60)
        time.sleep(0.2)
        try:
            driver.checkpoint_process_get_state(child)
        except driver.NotInitializedError as error:
            print("nor for others")
        os.kill(child, 9)
        print(driver.checkpoint_process_get_state(os.getpid()).name)
        """
    )
    assert printed == "not initialized\n" * 2 + "nor for others\nRUNNING\n"


def test_caller_waits_for_another_ones_turn():
    printed = program(
        """
        import threading
        target = Target({0: MIB})
        target.ask("spin 700")
        lock = driver.checkpoint_process_lock
        locker = threading.Thread(target=lock, args=[target.pid])
        locker.start()
        time.sleep(0.1)
        start = time.monotonic()
        print(driver.checkpoint_process_get_state(target.pid).name)
        print(time.monotonic() - start > 0.3)
        locker.join()
        """
    )
    assert printed == "LOCKED\nTrue\n"


def test_target_finishes_when_its_caller_is_killed():
    printed = program(
        """
        target = Target({0: MIB})
        target.ask("spin 600")
        caller = subprocess.Popen([sys.executable, "-P", "-c",
            f"from cuckpt import driver; driver.checkpoint_process_lock({target.pid})"])
        time.sleep(0.4)
        caller.kill()
        print(caller.wait())
        print(driver.checkpoint_process_get_state(target.pid).name)
        driver.checkpoint_process_unlock(target.pid)
        target.check()
        """
    )
    assert printed == "-9\nLOCKED\n"


def test_saver_killed_between_leaves_the_target_there():
    printed = program(
        """
        target = Target({0: MIB})
        driver.checkpoint_process_lock(target.pid)
        saver = subprocess.run([sys.executable, "-P", "-c", f'''
        import os
        from cuckpt import driver
        driver.init()
        driver.device_primary_ctx_retain(0)
        driver.checkpoint_process_checkpoint(
            {target.pid}, driver.CheckpointCheckpointArgs(custom_storage=True))
        os.kill(os.getpid(), 9)
        '''.replace("\\n        ", "\\n")])
        print(saver.returncode, driver.checkpoint_process_get_state(target.pid).name)
        """
    )
    assert printed == "-9 CHECKPOINTING\n"


def test_complete_refuses_a_handle_twice():
    printed = program(
        """
        driver.init()
        driver.device_primary_ctx_retain(0)
        target = Target({0: MIB})
        driver.checkpoint_process_lock(target.pid)
        args = driver.CheckpointCheckpointArgs(custom_storage=True)
        driver.checkpoint_process_checkpoint(target.pid, args)
        handle = args.custom_storage_info.handle
        driver.checkpoint_operation_complete(handle)
        for wrong in handle, 4096:
            try:
                driver.checkpoint_operation_complete(wrong)
            except driver.InvalidValueError:
                print("refused")
        own = driver.CheckpointCheckpointArgs(custom_storage=True)
        driver.checkpoint_process_lock(os.getpid())
        try:
            driver.checkpoint_process_checkpoint(os.getpid(), own)
        except driver.NotSupportedError:
            print("not oneself")
        """
    )
    assert printed == "refused\nrefused\nnot oneself\n"


@pytest.fixture
def nothing_is_left(monkeypatch):
    """What the test starts has ended after it.

    Simulated memory and sockets are those of processes: who has none left has
    left nothing. They are known by a variable, since others may simulate too.
    """
    mark = f"CUCKPT_TEST={os.getpid()}.{time.monotonic_ns()}"
    monkeypatch.setenv(*mark.split("="))
    yield
    deadline = time.monotonic() + 20
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def processes_with(variable):
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.append(file.parent.name)
        except OSError:
            pass
    return found


def test_process_that_is_left_is_found(monkeypatch):
    monkeypatch.setenv("CUCKPT_TEST", "control")
    with subprocess.Popen(["sleep", "60"]) as process:
        assert processes_with("CUCKPT_TEST=control") == [str(process.pid)]
        process.kill()


@pytest.mark.usefixtures("nothing_is_left")
def test_fifty_targets_suspend_and_resume_and_leave_nothing():
    printed = program(
        """
        driver.init()
        targets = [Target({0: 4 * MIB}) for _ in range(50)]
        pids = [target.pid for target in targets]
        for pid in pids:
            driver.checkpoint_process_lock(pid)
        for pid in pids:
            driver.checkpoint_process_checkpoint(pid)
        print(used())
        for pid in pids:
            resume(pid)
        for target in targets:
            target.check()
        for target in targets[::2]:
            target.end()
        print(used() // MIB)
        """,
        timeout=180,
    )
    assert printed == "0\n100\n"


@pytest.mark.usefixtures("nothing_is_left")
def test_killed_machine_leaves_nothing():
    code = """
    targets = [Target({0: 4 * MIB}) for _ in range(3)]
    driver.checkpoint_process_lock(targets[0].pid)
    suspend(targets[1].pid)
    os.kill(os.getpid(), 9)
    """
    code = PRELUDE + textwrap.dedent(code)
    assert simulate(sys.executable, "-P", "-c", code).returncode == -signal.SIGKILL


# The demo


def demo(**environment):
    variables = {**os.environ, "CUCKPT_LIBCUDA": None, **environment}
    return subprocess.run(
        [COMMAND, "demo", "--memory", "8MiB"],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_demo_runs_on_a_simulated_gpu_and_says_why(no_driver):
    result = demo(**no_driver)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("On a simulated GPU, since there is no real one: ")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "Every byte came back."
    assert [line.split()[-1] for line in lines if " ms  " in line] == [
        *("RUNNING", "LOCKED", "CHECKPOINTED", "LOCKED", "RUNNING", "RUNNING"),
        *("LOCKED", "CHECKPOINTING", "CHECKPOINTING", "CHECKPOINTED"),
        *("RESTORING", "RESTORING", "LOCKED", "RUNNING", "RUNNING"),
    ]
    assert "8 MiB of GPU memory are free again" in result.stdout


def test_demo_ends_quietly_when_its_reader_does(no_driver):
    command = [COMMAND, "demo", "--memory", "2MiB"]
    variables = {**os.environ, **no_driver}
    del variables["CUCKPT_LIBCUDA"]
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_demo_tells_that_the_gpu_is_too_small():
    result = simulate(COMMAND, "demo", "--memory", "64MiB", memory="32MiB")
    assert result.returncode == 1
    assert "32 MiB free, less than 64 MiB; see --memory" in result.stdout


def test_demo_ends_its_target_when_it_is_ended(no_driver):
    variables = {**os.environ, **no_driver}
    del variables["CUCKPT_LIBCUDA"]
    with subprocess.Popen(
        [COMMAND, "demo", "--memory", "1GiB"], env=variables, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (child := children.read_text().split()):
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 143
    assert not Path(f"/proc/{child[0]}").exists()


def test_demo_never_falls_back_from_a_chosen_driver():
    result = demo(CUCKPT_LIBCUDA="/nowhere")
    assert result.returncode == 1
    assert "/nowhere" in result.stdout


def test_demo_tells_that_custom_storage_needs_a_newer_driver():
    result = simulate(COMMAND, "demo", "--memory", "8MiB", driver_version="13.0")
    assert result.returncode == 0, result.stdout
    assert "driver 615" in result.stdout


def test_demo_fails_if_the_memory_comes_back_changed():
    changing = """
    import sys
    from cuckpt import demo
    class Changed(demo.Target):
        def answer(self, timeout_s=None):
            command = self._sent[0]
            answer = super().answer(timeout_s)
            return answer + "0" if command == "check" else answer
    demo.Target = Changed
    sys.exit(demo.main(1 << 20))
    """
    result = simulate(sys.executable, "-P", "-c", textwrap.dedent(changing))
    assert result.returncode == 1
    assert "has another content" in result.stdout


# What went wrong once


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


def test_freed_memory_between_allocations_stays_out_of_the_way():
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


def test_restore_needs_room_for_what_is_allocated_only():
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


def test_managed_memory_that_was_freed_is_forgotten():
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


def test_failing_allocation_takes_nothing_from_others():
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


def test_memory_that_was_never_written_costs_nothing():
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


def test_target_short_of_files_answers_when_it_has_some_again():
    printed = program(
        ALLOCATING
        + '''
import threading
target = start("""
import resource, sys
from cuckpt.target import __main__ as target
target.start()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
print("no descriptor is free", flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
sys.stdin.readline()
""")
target.answer()
states = []
def get_state():
    states.append(driver.checkpoint_process_get_state(target.pid))
# One may be answered: it waits for callers with a descriptor in its hand.
askers = [threading.Thread(target=get_state) for _ in range(3)]
for asker in askers:
    asker.start()
time.sleep(0.3)
print(any(asker.is_alive() for asker in askers))
target.send("go on")
for asker in askers:
    asker.join(30)
print(len(states))
'''
    )
    assert printed == "True\n3\n"


def test_storage_that_the_caller_cannot_map_leaves_the_target_as_it_was():
    printed = program(
        ALLOCATING
        + """
import resource
target = Target({0: 4 * MIB})
driver.checkpoint_process_lock(target.pid)
args = driver.CheckpointCheckpointArgs(custom_storage=True)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * 4096
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + MIB, limits[1]))
try:
    driver.checkpoint_process_checkpoint(target.pid, args)
except driver.OutOfMemoryError:
    print("no room")
finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
print(driver.checkpoint_process_get_state(target.pid).name)
driver.checkpoint_process_unlock(target.pid)
target.check()
"""
    )
    assert printed == "no room\nLOCKED\n"


def test_exec_gives_the_memory_back():
    printed = program(
        ALLOCATING
        + '''
target = start("""
import os
from cuckpt.target import __main__ as target
target.start()
target.fill(5000000)
print("filled", flush=True)
os.execvp("cat", ["cat"])
""")
target.answer()
target.send("cat runs")
print(target.answer())
print(used())
'''
    )
    assert printed == "cat runs\n0\n"


def test_caller_learns_of_the_death_of_a_target_that_had_forked():
    printed = program(
        ALLOCATING
        + '''
import threading
target = start("""
import os, sys
from cuckpt.target import __main__ as target
target.start()
target.spin(8000)
print("spins", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
print("forked", flush=True)
os.wait()
""")
target.answer()
results = []
def lock():
    try:
        driver.checkpoint_process_lock(target.pid)
    except driver.OperatingSystemError as error:
        results.append(error.status)
caller = threading.Thread(target=lock)
caller.start()
time.sleep(0.3)
target.send("go on")
target.answer()
target.process.kill()
caller.join(5)
print(results)
'''
    )
    assert printed == "[304]\n"


def test_command_may_use_low_descriptors_itself():
    call = "from cuckpt import driver; driver.init(); print(7)"
    script = f"exec 3>/dev/null 9>/dev/null; {sys.executable} -P -c '{call}'"
    assert simulate("sh", "-c", script).stdout == "7\n"


def test_file_that_claims_too_many_gpus_is_no_machine(tmp_path, python):
    file = tmp_path / "machine"
    with simulator.Machine().started() as variables:
        content = bytearray(Path(variables["CUCKPT_SIMULATOR"]).read_bytes())
    content[12:16] = (4000).to_bytes(4, "little")
    file.write_bytes(content)
    text = """
from cuckpt import driver
try:
    driver.init()
except driver.NoDeviceError:
    print("none")
"""
    library = str(simulator.LIBRARY)
    result = python(text, CUCKPT_LIBCUDA=library, CUCKPT_SIMULATOR=str(file))
    assert result.stdout == "none\n"
    assert "names no machine of this version" in result.stderr


@pytest.mark.parametrize(
    ("variable", "message"),
    [(None, "is not set"), ("/nonexistent", "has ended, or none"), ("", "or none")],
)
def test_driver_without_a_machine_says_so_once(python, variable, message):
    text = """
from cuckpt import driver
for _ in range(2):
    try:
        driver.init()
    except driver.NoDeviceError:
        print("none")
"""
    library = str(simulator.LIBRARY)
    result = python(text, CUCKPT_LIBCUDA=library, CUCKPT_SIMULATOR=variable)
    assert result.stdout == "none\n" * 2
    assert result.stderr.count(message) == 1
    assert "cuckpt simulate -- CMD" in result.stderr
