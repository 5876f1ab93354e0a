"""Unmodified Numba on the simulated driver: device arrays, which need no compiler."""

import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
IMPORTS = """
import ctypes, os, subprocess, sys
import numpy as np
from numba import cuda
"""


def run(code, *options):
    result = subprocess.run(
        [
            *(COMMAND, "simulate", *options),
            *("--", sys.executable, "-P", "-c", IMPORTS + textwrap.dedent(code)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_arrays_go_to_the_device_and_come_back():
    assert run(
        """
        host = np.arange(100_000, dtype=np.float64).reshape(100, 1000)
        array = cuda.to_device(host)
        print((array.copy_to_host() == host).all())
        print((array[3:5].copy_to_host() == host[3:5]).all(), array[7, 7])
        like = cuda.device_array_like(host)
        like.copy_to_device(array)
        target = np.empty_like(host)
        like.copy_to_host(target)
        print((target == host).all())
        empty = cuda.device_array((3, 4), np.int32)
        print(empty.shape, empty.alloc_size, empty.view(np.int16).shape)
        try:
            empty.copy_to_device(np.zeros((4, 3), np.int32))
        except ValueError:
            print("refused")
        """
    ) == ["True", "True 7007.0", "True", "(3, 4) 48 (3, 8)", "refused"]


def test_no_compiler_is_loaded_for_device_arrays():
    assert run(
        """
        cuda.to_device(np.arange(10)).copy_to_host()
        with open("/proc/self/maps") as maps:
            print("libnvrtc.so" in maps.read())
        """
    ) == ["False"]


def test_pinned_and_mapped_memory_is_known_to_the_driver():
    assert run(
        """
        pinned = cuda.pinned_array(1000, np.int32)
        pinned[:] = 4
        print(cuda.to_device(pinned).copy_to_host().sum())
        host = np.ones(5000)
        with cuda.pinned(host):
            print(cuda.to_device(host).copy_to_host().sum())
        with cuda.pinned(host):  # a second time: it had been unregistered
            try:
                cuda.pinned(host).__enter__()
            except cuda.cudadrv.driver.CudaAPIError as error:
                print("HOST_MEMORY_ALREADY_REGISTERED" in str(error))
        with cuda.mapped(host) as mapped:
            mapped.copy_to_device(np.full(5000, 2.0))
            print(host.sum())
        both = cuda.mapped_array(100, np.int32)
        cuda.cudadrv.driver.device_memset(both, 1, 400)
        print((both == 0x01010101).all())
        managed = cuda.managed_array(100, np.int32)
        managed[:] = 3
        print(cuda.as_cuda_array(managed).copy_to_host().sum())
        """
    ) == ["4000", "5000.0", "True", "10000.0", "True", "300"]


def test_streams_and_events_order_what_is_done():
    assert run(
        """
        stream = cuda.stream()
        start, end = cuda.event(), cuda.event()
        host = cuda.pinned_array(1000, np.int32)
        host[:] = 9
        start.record(stream)
        with stream.auto_synchronize():
            array = cuda.to_device(host, stream=stream)
            back = array.copy_to_host(stream=stream)
            end.record(stream)
        print(back.sum(), end.query(), start.elapsed_time(end) >= 0)
        other = cuda.stream()
        end.wait(other)
        other.synchronize()
        end.synchronize()
        cuda.synchronize()
        for default in (cuda.default_stream(), cuda.legacy_default_stream(),
                        cuda.per_thread_default_stream(),
                        cuda.external_stream(int(stream.handle))):
            print(cuda.to_device(host, stream=default).copy_to_host(stream=default)[0])
        """
    ) == ["9000 True True", *["9"] * 4]


def test_memory_is_counted_and_comes_back():
    assert run(
        """
        free, total = cuda.current_context().get_memory_info()
        array = cuda.device_array(10 << 20, np.uint8)
        print(free - cuda.current_context().get_memory_info().free == 10 << 20)
        del array
        cuda.current_context().memory_manager.deallocations.clear()
        print(cuda.current_context().get_memory_info() == (free, total))
        array = cuda.device_array(10 << 20, np.uint8)
        cuda.current_context().reset()
        print(cuda.current_context().get_memory_info() == (free, total))
        cuda.close()
        """,
        *("--memory", "1GiB"),
    ) == ["True", "True", "True"]


def test_each_gpu_has_arrays_of_its_own():
    assert run(
        """
        host = np.arange(1000)
        cuda.select_device(1)
        print(cuda.get_current_device().id, cuda.to_device(host).copy_to_host().sum())
        print(cuda.current_context().can_access_peer(0))
        """,
        *("--gpus", "2"),
    ) == ["1 499500", "True"]
    assert run(
        """
        with cuda.gpus[1]:
            print(cuda.get_current_device().id)
            array = cuda.to_device(np.arange(1000))
        print(cuda.get_current_device().id, array.copy_to_host().sum(), len(cuda.gpus))
        """,
        *("--gpus", "2"),
    ) == ["1", "0 499500 2"]


# The handle travels as bytes: an IpcHandle of numba-cuda 0.30 cannot be pickled with
# cuda-bindings 13.5.
OPEN = """
import ctypes, sys
import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import IpcHandle
from cuda.bindings import driver
content, size, offset = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
inner = driver.CUipcMemHandle()
ctypes.memmove(inner.getPtr(), content, 64)
handle = IpcHandle(None, inner, size, offset=offset)
array = handle.open_array(cuda.current_context(), (2000,), np.dtype(np.float64))
print(array.copy_to_host().sum())
array.copy_to_device(np.ones(2000))
handle.close()
"""


def test_another_process_opens_an_array():
    assert run(
        f"""
        array = cuda.to_device(np.arange(100_000.0))
        handle = array[5000:7000].get_ipc_handle()._ipc_handle
        content = ctypes.string_at(handle.handle.getPtr(), 64)
        print(subprocess.check_output(
            [sys.executable, "-P", "-c", {OPEN!r},
             content.hex(), str(handle.size), str(handle.offset)],
            text=True).strip())
        print(array[4999:7001].copy_to_host().sum())
        """
    ) == [str(sum(range(5000, 7000)) * 1.0), str(4999 + 2000 + 7000.0)]


TARGET = """
import sys
import numpy as np
from numba import cuda
host = np.random.default_rng(1).integers(0, 1 << 40, 1_000_000)
pinned = cuda.pinned_array(1000, np.int64)
pinned[:] = host[:1000]
stream = cuda.stream()
array, other = cuda.to_device(host), cuda.to_device(pinned, stream=stream)
stream.synchronize()
print(array.device_ctypes_pointer.value, flush=True)
sys.stdin.readline()
print((array.copy_to_host() == host).all(), (other.copy_to_host() == pinned).all(),
      array.device_ctypes_pointer.value, flush=True)
print((cuda.to_device(host[::-1].copy()).copy_to_host()[::-1] == host).all())
"""


def test_arrays_survive_a_checkpoint_by_another_process():
    printed = run(
        f"""
        from cuckpt import driver
        driver.init(0)
        cuda.current_context()
        target = subprocess.Popen(
            [sys.executable, "-P", "-c", {TARGET!r}],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        address = target.stdout.readline().strip()
        before = cuda.current_context().get_memory_info().free
        driver.checkpoint_process_lock(target.pid, None)
        driver.checkpoint_process_checkpoint(target.pid, None)
        print(cuda.current_context().get_memory_info().free > before)
        target.stdin.write("\\n")  # its copy waits until it is unlocked
        target.stdin.flush()
        driver.checkpoint_process_restore(target.pid, None)
        driver.checkpoint_process_unlock(target.pid, None)
        one, two, after = target.stdout.readline().split()
        print(one, two, after == address)
        print(target.communicate()[0].strip(), target.returncode)
        """
    )
    assert printed == ["True", "True True True", "True 0"]
