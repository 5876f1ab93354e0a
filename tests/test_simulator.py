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

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
SCENARIOS = Path(__file__).parent / "gpu/test_scenarios.py"
UUIDS = [simulator._uuid_of(n) for n in range(2)]

# What the programs below begin with.
PRELUDE = """
import ctypes, os, subprocess, sys, time
from cuckpt import driver
from cuckpt.simulator import Machine, SimulatorError

class Target:
    def __init__(self, size=0):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cuckpt.target"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.ask("start")
        self.content = self.ask(f"fill {size}") if size else None
    def ask(self, command):
        self.process.stdin.write(command + "\\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()
    def end(self):
        self.process.kill()
        self.process.communicate()

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
        ("memory", "5X", "invalid size value: '5X'"),
        ("gpus", "0", "1 to 16 GPUs"),
        ("gpus", "17", "1 to 16 GPUs"),
        ("gpus", "x", "invalid int value"),
        ("driver_version", "new", "invalid version value: 'new'"),
        ("driver_version", "11.8", "12.0 or later"),
        ("memory", "-1", "memory"),
    ],
)
def test_simulate_refuses_nonsense(option, value, problem):
    result = simulate("true", **{option: value})
    assert result.returncode == 2
    assert problem in result.stderr


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
                target = Target(5 * MIB)
                suspend(target.pid)
                resume(target.pid)
                print(target.ask("check") == target.content)
                target.end()
        print("CUCKPT_SIMULATOR" in os.environ)
        """,
    )
    assert printed == "True\nTrue\nFalse\n"


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
        target = Target(10 * MIB)
        filled = used()
        suspend(target.pid)
        print(filled, used())
        resume(target.pid)
        print(used() == filled, target.ask("check") == target.content)
        target.end()
        print(used())
        """
    )
    assert printed == f"{10 << 20} 0\nTrue True\n0\n"


def test_memory_runs_out():
    printed = program(
        """
        driver.init()
        first, second = Target(40 * MIB), Target()
        print(repr(second.ask(f"fill {40 * MIB}")))
        second.end()
        first.end()
        print(Target(40 * MIB).content is not None)
        """,
        memory="64MiB",
    )
    assert printed == "''\nTrue\n"


def test_restore_without_memory_loses_the_target():
    printed = program(
        """
        driver.init()
        first = Target(40 * MIB)
        suspend(first.pid)
        second = Target(40 * MIB)
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
        target = Target(10 * MIB)
        print(used(0), used(1))
        suspend(target.pid)
        wrongs = [(a, b)], [(a, b), (b, b)], [(a, a), (a, b)], [(a, b), (b, bytes(16))]
        for wrong in wrongs:
            try:
                resume(target.pid, driver.CheckpointRestoreArgs(gpu_pairs=wrong))
            except driver.InvalidValueError:
                print("refused")
        resume(target.pid, driver.CheckpointRestoreArgs(gpu_pairs=[(a, b), (b, a)]))
        print(used(0), used(1), target.ask("check") == target.content)
        """,
        gpus=2,
    )
    assert printed == f"{10 << 20} 0\n" + "refused\n" * 4 + f"0 {10 << 20} True\n"


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
            cuda.cuMemAlloc_v2(ctypes.byref(second), size(1)),
            cuda.cuMemsetD8_v2(first, 7, size(100)),
            cuda.cuMemcpyDtoD_v2(second, first, size(100)),
            cuda.cuMemcpyDtoH_v2(host, second, size(100)),
            cuda.cuMemcpyDtoH_v2(host, u64(second.value + (1 << 40)), size(1)),
            cuda.cuMemcpyHtoD_v2(u64(4096), host, size(1)),
            cuda.cuMemFree_v2(u64(first.value + 1)),
            cuda.cuMemFree_v2(first),
            cuda.cuMemFree_v2(first),
            cuda.cuMemFree_v2(u64(0)),
        ]
        print(results, host.raw == b"\\7" * 100, used() // MIB)
        """
    )
    assert printed == "[1, 2, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0] True 2\n"


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
        target = Target(MIB)
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
        target = Target(MIB)
        target.ask("spin 600")
        caller = subprocess.Popen([sys.executable, "-P", "-c",
            f"from cuckpt import driver; driver.checkpoint_process_lock({target.pid})"])
        time.sleep(0.4)
        caller.kill()
        print(caller.wait())
        print(driver.checkpoint_process_get_state(target.pid).name)
        driver.checkpoint_process_unlock(target.pid)
        print(target.ask("check") == target.content)
        """
    )
    assert printed == "-9\nLOCKED\nTrue\n"


def test_saver_killed_between_leaves_the_target_there():
    printed = program(
        """
        target = Target(MIB)
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
        target = Target(MIB)
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


def simulated_files():
    """Return what of a simulated machine some process still holds."""
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "simulated" in os.readlink(link):
                held.add(str(link))
        except OSError:
            pass
    with open("/proc/net/unix") as sockets:
        return held | {line for line in sockets if "@cuckpt/" in line}


def test_fifty_targets_suspend_and_resume_and_leave_nothing():
    before = simulated_files()
    printed = program(
        """
        driver.init()
        targets = [Target(4 * MIB) for _ in range(50)]
        pids = [target.pid for target in targets]
        for pid in pids:
            driver.checkpoint_process_lock(pid)
        for pid in pids:
            driver.checkpoint_process_checkpoint(pid)
        print(used())
        for pid in pids:
            resume(pid)
        print(all(target.ask("check") == target.content for target in targets))
        for target in targets[::2]:
            target.process.kill()
        for target in targets[::2]:
            target.end()
        print(used() // MIB)
        """,
        timeout=180,
    )
    assert printed == "0\nTrue\n100\n"
    wait_until_gone(before)


def test_killed_machine_leaves_nothing():
    before = simulated_files()
    code = """
    targets = [Target(4 * MIB) for _ in range(3)]
    driver.checkpoint_process_lock(targets[0].pid)
    suspend(targets[1].pid)
    os.kill(os.getpid(), 9)
    """
    code = PRELUDE + textwrap.dedent(code)
    assert simulate(sys.executable, "-P", "-c", code).returncode == -signal.SIGKILL
    wait_until_gone(before)


def wait_until_gone(before):
    deadline = time.monotonic() + 20
    while (left := simulated_files() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()


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
    from cuckpt import demo, driver
    real = driver.checkpoint_process_unlock
    class Changed(demo._Demo):
        def ask(self, command):
            answer = super().ask(command)
            return answer + "0" if command == "check" else answer
    demo._Demo = Changed
    sys.exit(demo.main(1 << 20))
    """
    result = simulate(sys.executable, "-P", "-c", textwrap.dedent(changing))
    assert result.returncode == 1
    assert "FAILED: expected" in result.stdout
