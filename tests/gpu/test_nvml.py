"""NVML: what it tells of checkpointed processes, and how it refuses."""

import ctypes

import pytest

from cuckpt import driver
from cuckpt.uuids import to_text

nvml = pytest.importorskip("pynvml")

GIB = 1 << 30
NOT_FOUND, INVALID_ARGUMENT, INSUFFICIENT_SIZE = 6, 2, 7


@pytest.fixture
def gpu():
    nvml.nvmlInit()
    yield nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlShutdown()


def test_checkpointed_process_is_not_there(target, gpu):
    def seen():
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        return {process.pid: process.usedGpuMemory for process in processes}

    assert target.pid in seen()
    before = seen()[target.pid]
    target.ask(f"take {GIB}")
    assert seen()[target.pid] >= before + GIB
    driver.checkpoint_process_lock(target.pid)
    assert target.pid in seen()
    driver.checkpoint_process_checkpoint(target.pid)
    assert target.pid not in seen()
    driver.checkpoint_process_restore(target.pid)
    driver.checkpoint_process_unlock(target.pid)
    assert seen()[target.pid] >= before + GIB


def test_gpus_are_those_of_the_driver(gpu, gpu_uuid):
    text = nvml.nvmlDeviceGetUUID(gpu)
    assert text == to_text(bytes(gpu_uuid.bytes))
    for form in text, text.removeprefix("GPU-"):
        assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(form)) == 0
    major = driver.driver_get_version() // 1000
    assert nvml.nvmlSystemGetNVMLVersion().startswith(f"{major}.")


@pytest.mark.parametrize(
    ("name", "argument", "error"),
    [
        ("nvmlDeviceGetHandleByUUID", "GPU-" + "0" * 32, NOT_FOUND),
        ("nvmlDeviceGetHandleByUUID", "nonsense", NOT_FOUND),
        ("nvmlDeviceGetHandleByPciBusId", "nonsense", INVALID_ARGUMENT),
        ("nvmlDeviceGetHandleByPciBusId", "0000:77:00.0", NOT_FOUND),
        ("nvmlDeviceGetHandleByIndex", 77, INVALID_ARGUMENT),
        ("nvmlSystemGetProcessName", 2**22 + 1, NOT_FOUND),
    ],
)
def test_what_is_not_there_is_refused(gpu, name, argument, error):
    with pytest.raises(nvml.NVMLError) as caught:
        getattr(nvml, name)(argument)
    assert caught.value.value == error


def test_count_of_processes_is_asked_for_first(target, gpu):
    call = nvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3
    count = ctypes.c_uint(5)
    assert call(gpu, ctypes.byref(count), None) == INVALID_ARGUMENT
    count.value = 0
    assert call(gpu, ctypes.byref(count), None) == INSUFFICIENT_SIZE
    assert count.value >= 1


UNINITIALIZED = """
import ctypes, pynvml as nvml
nvml.nvmlInit()  # finds the library
nvml.nvmlShutdown()
count = ctypes.byref(ctypes.c_uint())
print([nvml.nvmlLib.nvmlDeviceGetCount_v2(count), nvml.nvmlLib.nvmlShutdown()])
"""


def test_nothing_is_told_before_init(spawn):
    # In a process of its own: PyTorch calls nvmlInit as well.
    error = nvml.NVML_ERROR_UNINITIALIZED
    assert spawn("-u", "-c", UNINITIALIZED).answer() == f"[{error}, {error}]"
