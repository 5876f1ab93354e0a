"""NVML of the simulated machine, as unmodified nvidia-ml-py (pynvml) sees it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pynvml
import pytest

from cuckpt import simulator

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")

# What the programs below begin with.
PRELUDE = """
import ctypes, os, subprocess, sys, threading
import pynvml as nvml
from cuckpt import driver
from cuckpt.simulator import Gpu, Machine

class Target:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cuckpt.target"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.ask("start")
    def ask(self, command):
        self.process.stdin.write(command + "\\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()
    def end(self):
        self.process.kill()
        self.process.communicate()

def suspend(pid):
    driver.checkpoint_process_lock(pid, driver.CheckpointLockArgs(timeout_ms=10_000))
    driver.checkpoint_process_checkpoint(pid)

def resume(pid, args=None):
    driver.checkpoint_process_restore(pid, args)
    driver.checkpoint_process_unlock(pid)

def gpu(index=0):
    return nvml.nvmlDeviceGetHandleByIndex(index)

def used(index=0):
    return nvml.nvmlDeviceGetMemoryInfo(gpu(index)).used

def users(index=0):
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu(index))
    return {process.pid: process.usedGpuMemory for process in processes}

def fails(error, function, *arguments):
    try:
        function(*arguments)
    except nvml.NVMLError as raised:
        return raised.value == error
    return False

MIB = 1 << 20
"""


def run(text, *wrapper, **environment):
    """Run a program; return its result, which must be a success."""
    code = PRELUDE + textwrap.dedent(text)
    variables = {**os.environ, **environment}
    result = subprocess.run(
        [*wrapper, sys.executable, "-P", "-W", "error", "-c", code],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def program(text, **options):
    """Run a program on a simulated machine; return what it printed."""
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return run(text, COMMAND, "simulate", *arguments, "--").stdout


def machine_program(text):
    """Run a program that makes machines itself; return what it printed."""
    return run(text, CUCKPT_LIBCUDA=None, CUCKPT_SIMULATOR=None).stdout


# The GPUs


def test_devices_are_those_of_the_machine():
    printed = program(
        """
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 3
        for i in range(3):
            handle = gpu(i)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            pci = nvml.nvmlDeviceGetPciInfo(handle)
            assert nvml.nvmlDeviceGetIndex(handle) == i
            assert nvml.nvmlDeviceGetMinorNumber(handle) == i
            assert (pci.domain, pci.bus, pci.device) == (0, i + 1, 0)
            assert pci.busId == f"00000000:0{i + 1}:00.0"
            assert pci.busIdLegacy == f"0000:0{i + 1}:00.0"
            for found in (
                nvml.nvmlDeviceGetHandleByUUID(uuid),
                nvml.nvmlDeviceGetHandleByUUIDV(uuid, nvml.NVML_UUID_TYPE_ASCII),
                nvml.nvmlDeviceGetHandleByUUIDV(
                    bytes.fromhex(uuid[4:].replace("-", "")),
                    nvml.NVML_UUID_TYPE_BINARY),
                nvml.nvmlDeviceGetHandleByPciBusId(pci.busId),
                nvml.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy),
            ):
                assert nvml.nvmlDeviceGetIndex(found) == i
            print(uuid)
            print(nvml.nvmlDeviceGetName(handle))
        """,
        gpus=3,
    )
    gpus = simulator.Machine(3).gpus
    assert printed.split("\n") == [
        text for gpu in gpus for text in (str(gpu), gpu.name)
    ] + [""]


def test_devices_are_those_of_the_driver():
    program(
        """
        nvml.nvmlInit()
        driver.init()
        cuda = ctypes.CDLL(driver.library_path())
        for i in range(2):
            uuid = nvml.nvmlDeviceGetUUID(gpu(i))
            assert uuid == str(driver.device_get_uuid_v2(i))
            text = ctypes.create_string_buffer(32)
            assert cuda.cuDeviceGetPCIBusId(text, 32, i) == 0
            found = nvml.nvmlDeviceGetHandleByPciBusId(text.value)
            assert nvml.nvmlDeviceGetIndex(found) == i
        handle = gpu(0)
        assert nvml.nvmlDeviceGetCudaComputeCapability(handle) == (9, 0)
        assert nvml.nvmlDeviceGetArchitecture(handle) == nvml.NVML_DEVICE_ARCH_HOPPER
        assert nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_DEFAULT
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        assert (rates.gpu, rates.memory) == (0, 0)
        """,
        gpus=2,
    )


@pytest.mark.parametrize(
    ("version", "branch"),
    [("12.0", 525), ("12.4", 550), ("12.8", 570), ("13.0", 580), ("13.5", 615)],
)
def test_system_has_the_version_of_the_machine(version, branch):
    printed = program(
        """
        nvml.nvmlInit()
        print(nvml.nvmlSystemGetCudaDriverVersion())
        print(nvml.nvmlSystemGetCudaDriverVersion_v2())
        print(nvml.nvmlSystemGetDriverVersion())
        print(nvml.nvmlSystemGetNVMLVersion())
        """,
        driver_version=version,
    )
    major, minor = version.split(".")
    cuda, cuda_v2, driver, library = printed.split()
    assert cuda == cuda_v2 == str(int(major) * 1000 + int(minor) * 10)
    assert driver.startswith(f"{branch}.")
    assert library == f"{major}.{driver}"


def test_modes_are_those_of_each_gpu():
    machine_program(
        """
        gpus = [
            Gpu(bytes([1] * 16), name="one"),
            Gpu(bytes([2] * 16), name="two", persistence_mode=False),
            Gpu(bytes([3] * 16), name="x" * 59, mig_mode=True),
        ]
        with Machine(gpus=gpus):
            nvml.nvmlInit()
            handles = [gpu(i) for i in range(3)]
            names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
            assert names == [gpu.name for gpu in gpus]
            modes = [nvml.nvmlDeviceGetPersistenceMode(handle) for handle in handles]
            assert modes == [1, 0, 1]
            migs = [nvml.nvmlDeviceGetMigMode(handle) for handle in handles]
            assert migs == [[0, 0], [0, 0], [1, 1]]
        """
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_persistence_mode_is_changed_for_all_processes():
    program(
        """
        SHOW = ("import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex;"
                "print(*(n.nvmlDeviceGetPersistenceMode(h(i)) for i in (0, 1)),"
                "n.nvmlDeviceGetMigMode(h(1)))")
        def seen():
            command = [sys.executable, "-P", "-c", SHOW]
            return subprocess.check_output(command, text=True)
        nvml.nvmlInit()
        nvml.nvmlDeviceSetPersistenceMode(gpu(1), 0)
        assert seen() == "1 0 [0, 0]\\n"
        nvml.nvmlDeviceSetPersistenceMode(gpu(1), 1)
        assert seen() == "1 1 [0, 0]\\n"
        assert fails(2, nvml.nvmlDeviceSetPersistenceMode, gpu(), 2)
        """,
        gpus=2,
    )


def test_persistence_mode_is_changed_by_root_alone():
    program(
        """
        nvml.nvmlInit()
        if os.geteuid() == 0:
            os.seteuid(65534)
        assert fails(nvml.NVML_ERROR_NO_PERMISSION,
                     nvml.nvmlDeviceSetPersistenceMode, gpu(), 0)
        assert nvml.nvmlDeviceGetPersistenceMode(gpu()) == 1
        """
    )


# Who uses them


def test_memory_and_processes_follow_a_target_through_a_checkpoint():
    program(
        """
        nvml.nvmlInit()
        before = used()
        assert (before, users()) == (0, {})
        target = Target()
        started = used()
        target.ask(f"fill {64 * MIB}")
        assert used() - started == 64 * MIB
        assert users() == {target.pid: used()}
        assert used(1) == 0 and users(1) == {}
        info = nvml.nvmlDeviceGetMemoryInfo(gpu())
        info_2 = nvml.nvmlDeviceGetMemoryInfo(gpu(), nvml.nvmlMemory_v2)
        assert info.total == info.used + info.free == 512 * MIB
        assert (info.total, info.used) == (info_2.total, info_2.used)
        assert info_2.total == info_2.used + info_2.free + info_2.reserved
        suspend(target.pid)
        assert (used(), users()) == (0, {})
        resume(target.pid)
        assert used() - started == 64 * MIB
        assert users() == {target.pid: used()}
        target.end()
        assert (used(), users()) == (0, {})
        """,
        gpus=2,
        memory="512MiB",
    )


def test_process_moves_to_another_gpu():
    program(
        """
        nvml.nvmlInit()
        target = Target()
        target.ask(f"take {32 * MIB}")
        driver.init()
        a, b = (driver.device_get_uuid_v2(i).bytes for i in range(2))
        suspend(target.pid)
        resume(target.pid, driver.CheckpointRestoreArgs(gpu_pairs=[(a, b), (b, a)]))
        assert users(0) == {}
        assert users(1) == {target.pid: used(1)}
        assert used(1) >= 32 * MIB
        target.end()
        """,
        gpus=2,
    )


def test_processes_are_listed_in_every_version_until_they_are_dead():
    program(
        """
        nvml.nvmlInit()
        targets = [Target() for _ in range(3)]
        for target in targets:
            target.ask(f"take {4 * MIB}")
        pids = {target.pid for target in targets}
        assert set(users()) == pids
        for process in nvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu()):
            assert process.pid in pids
            assert process.gpuInstanceId == 0xFFFFFFFF
            assert process.computeInstanceId == 0xFFFFFFFF
        oldest = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetComputeRunningProcesses
        class Entry(ctypes.Structure):
            _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]
        array, count = (Entry * 3)(), ctypes.c_uint(3)
        assert oldest(gpu(), ctypes.byref(count), array) == 0
        assert {entry.pid: entry.used for entry in array} == users()
        assert nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu()) == []
        assert nvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu()) == []
        targets[0].process.kill()
        os.waitid(os.P_PID, targets[0].pid, os.WEXITED | os.WNOWAIT)
        assert set(users()) == pids - {targets[0].pid}  # a zombie
        for target in targets:
            target.end()
        assert users() == {}
        """
    )


def test_process_list_says_how_much_room_it_needs():
    program(
        """
        nvml.nvmlInit()
        targets = [Target() for _ in range(2)]
        for target in targets:
            target.ask(f"take {4 * MIB}")
        library = ctypes.CDLL("libnvidia-ml.so.1")
        list_v3 = library.nvmlDeviceGetComputeRunningProcesses_v3
        guard = 0x5A5A5A5A
        for room, result in (0, 7), (1, 7), (2, 0), (3, 0):
            array = (nvml.c_nvmlProcessInfo_v3_t * 4)()
            for entry in array:
                entry.pid = guard
            count = ctypes.c_uint(room)
            assert list_v3(gpu(), ctypes.byref(count), array) == result
            assert count.value == 2
            written = [entry.pid for entry in array if entry.pid != guard]
            assert len(written) == min(room, 2)
        for target in targets:
            target.end()
        """
    )


def test_process_name_is_that_of_its_command():
    program(
        """
        nvml.nvmlInit()
        assert nvml.nvmlSystemGetProcessName(os.getpid()) == sys.orig_argv[0]
        name = ctypes.create_string_buffer(b"xxxxxxx")
        library = ctypes.CDLL("libnvidia-ml.so.1")
        assert library.nvmlSystemGetProcessName(os.getpid(), name, 3) == 0
        assert name.raw[2:4] == b"\\0x"
        for pid in 0, 2**22 + 1, 2**32 - 1:
            assert fails(nvml.NVML_ERROR_NOT_FOUND,
                         nvml.nvmlSystemGetProcessName, pid)
        """
    )


# Start and end


def test_init_is_counted():
    program(
        """
        nvml._LoadNvmlLibrary()
        uninitialized = nvml.NVML_ERROR_UNINITIALIZED
        assert fails(uninitialized, nvml.nvmlDeviceGetCount)
        assert fails(uninitialized, nvml.nvmlShutdown)
        nvml.nvmlInit()
        nvml.nvmlInitWithFlags(nvml.NVML_INIT_FLAG_NO_GPUS)
        library = ctypes.CDLL("libnvidia-ml.so.1")
        assert library.nvmlInit() == library.nvmlInit_v2() == 0
        handle = gpu()
        for _ in range(4):
            assert nvml.nvmlDeviceGetCount() == 1
            nvml.nvmlShutdown()
        assert fails(uninitialized, nvml.nvmlShutdown)
        assert fails(uninitialized, nvml.nvmlDeviceGetName, handle)
        """
    )


@pytest.mark.parametrize("machine", [None, "", "/nowhere", os.devnull])
def test_init_without_a_machine_finds_no_driver(machine):
    result = run(
        """
        for _ in range(2):
            assert fails(nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.nvmlInit)
        assert fails(nvml.NVML_ERROR_UNINITIALIZED, nvml.nvmlDeviceGetCount)
        """,
        CUCKPT_SIMULATOR=machine,
        LD_LIBRARY_PATH=str(simulator.NVML_LIBRARY.parent),
    )
    assert result.stderr.count("cuckpt simulator: CUCKPT_SIMULATOR") == 1
    assert "`cuckpt simulate -- CMD...`" in result.stderr


def test_machine_brings_its_nvml_into_this_process():
    machine_program(
        """
        for count in 1, 2:  # one machine after the other
            with Machine(gpus=count) as machine:
                nvml.nvmlInit()
                assert nvml.nvmlDeviceGetCount() == count
                assert nvml.nvmlDeviceGetUUID(gpu(count - 1)) == str(machine.gpus[-1])
                target = Target()
                target.ask(f"take {8 * MIB}")
                assert users() == {target.pid: used()}
                target.end()
                nvml.nvmlShutdown()
        assert fails(nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.nvmlInit)
        """
    )


def test_machine_leaves_another_nvml_alone(tmp_path):
    other = tmp_path / "libnvidia-ml.so.1"
    shutil.copy(simulator.NVML_LIBRARY, other)
    machine_program(
        f"""
        before = ctypes.CDLL({str(other)!r})
        with Machine():
            assert ctypes.CDLL("libnvidia-ml.so.1")._handle == before._handle
        """
    )


def test_threads_and_forked_children_may_use_it_at_once():
    program(
        """
        stop = threading.Event()
        failed = []
        def work():
            while not stop.is_set():
                nvml.nvmlInit()
                if nvml.nvmlDeviceGetCount() != 1 or users() != expected:
                    failed.append("wrong answer")
                nvml.nvmlShutdown()
        target = Target()
        target.ask(f"take {4 * MIB}")
        nvml.nvmlInit()
        expected = users()
        assert list(expected) == [target.pid]
        nvml.nvmlShutdown()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        library = ctypes.CDLL("libnvidia-ml.so.1")
        for _ in range(50):
            child = os.fork()
            if child == 0:
                count = ctypes.byref(ctypes.c_uint())
                os._exit(library.nvmlInit() or library.nvmlDeviceGetCount_v2(count))
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed
        target.end()
        """
    )


# Wrong arguments


def test_errors_say_what_is_wrong():
    program(
        """
        nvml.nvmlInit()
        invalid, missing = nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND
        uuid = nvml.nvmlDeviceGetUUID(gpu())
        assert fails(invalid, nvml.nvmlDeviceGetHandleByIndex, 1)
        for other in "", "GPU-", uuid[:-1], uuid + "0", "MIG" + uuid[3:]:
            assert fails(missing, nvml.nvmlDeviceGetHandleByUUID, other)
        assert fails(missing, nvml.nvmlDeviceGetHandleByUUIDV, bytes(16), 2)
        assert fails(invalid, nvml.nvmlDeviceGetHandleByUUIDV, "x" * 41, 1)
        assert fails(invalid, nvml.nvmlDeviceGetHandleByUUIDV, bytes(16), 0)
        for other in "0:2:0.0", "1:1:0.0", "0:1:1.0", "0:1:0.1", "0:0:0.0":
            assert fails(missing, nvml.nvmlDeviceGetHandleByPciBusId, other)
        for other in "", "GPU", "1":
            assert fails(invalid, nvml.nvmlDeviceGetHandleByPciBusId, other)
        assert fails(nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
                     nvml.nvmlDeviceGetMemoryInfo, gpu(), 1)
        assert fails(nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                     nvml.nvmlDeviceGetPowerUsage, gpu())
        text = nvml.nvmlErrorString(nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        assert text == "Argument version mismatch"
        assert nvml.nvmlErrorString(12345) == "Unknown Error"

        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(b"z" * 90, 96)
        for size in 0, 1, 40:
            assert library.nvmlDeviceGetUUID(gpu(), text, size) == 7
            assert text.raw[:90] == b"z" * 90
        for function in library.nvmlSystemGetDriverVersion, \\
                library.nvmlSystemGetNVMLVersion:
            assert function(text, 3) == 7
        assert library.nvmlDeviceGetName(gpu(), text, 20) == 7
        assert library.nvmlDeviceGetName(gpu(), text, 21) == 0
        """
    )


def test_no_function_follows_a_wrong_pointer():
    asked = re.findall(
        r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(pynvml.__file__).read_text()
    )
    # Older names of the same functions.
    plain = [re.sub(r"_v\d$", "", name) for name in asked]
    second = [f"{name}_v2" for name in plain] + ["nvmlInit", "nvmlInit_v2"]
    printed = program(
        f"""
        library = ctypes.CDLL("libnvidia-ml.so.1")
        names = {sorted({*asked, *plain, *second})}
        names = [name for name in names if hasattr(library, name)]
        ends = "nvmlInit", "nvmlShutdown", "nvmlErrorString"
        checked = [name for name in names if not name.startswith(ends)]
        null = [ctypes.c_void_p()] * 5
        for name in checked:
            assert getattr(library, name)(*null) == 1, name  # uninitialized
        for name in set(names) - set(checked):
            getattr(library, name)(*null)
        nvml.nvmlInit()
        valid = ctypes.cast(gpu(), ctypes.c_void_p).value
        buffer = ctypes.create_string_buffer(4096)
        for name in checked:
            function = getattr(library, name)
            assert function(*null) == 2, name
            if "System" in name or "Count" in name or "HandleBy" in name:
                continue
            for wrong in 1, valid - 1, valid + 1, valid + 16, 2**63, 2**64 - 1:
                assert function(ctypes.c_void_p(wrong), *[buffer] * 3) == 2, name
            if "Set" not in name:
                assert function(ctypes.c_void_p(valid), *null) == 2, name
        print(len(names), hasattr(library, "the_machine"))
        """
    )
    assert printed == "43 False\n"
