"""Unmodified cuda.core on the simulated driver: memory, streams, events, Process."""

import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
IMPORTS = """
import ctypes, subprocess, sys
from cuda.core import *
device = Device(0)
device.set_current()
stream = device.create_stream()
def content(buffer):  # through pinned memory
    host = LegacyPinnedMemoryResource().allocate(buffer.size, stream=stream)
    host.copy_from(buffer, stream=stream)
    stream.sync()
    return ctypes.string_at(int(host.handle), buffer.size)
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


def test_device_tells_its_properties():
    assert run(
        """
        properties = device.properties
        print(properties.memory_pools_supported, properties.multiprocessor_count)
        print(device.arch, len(Device.get_all_devices()), device.can_access_peer(1))
        """,
        *("--gpus", "2"),
    ) == ["True 132", "90 2 True"]


def test_buffers_are_filled_and_copied_in_a_stream():
    assert run(
        """
        buffer = device.allocate(1000, stream=stream)
        print(buffer.is_device_accessible, buffer.is_host_accessible, buffer.device_id)
        buffer.fill(7, stream=stream)
        print(content(buffer) == b"\\7" * 1000)
        other = device.allocate(1000, stream=stream)
        other.copy_from(buffer, stream=stream)
        print(content(other) == b"\\7" * 1000)
        part = Buffer.from_handle(int(other.handle) + 10, 5)
        part.fill(b"\\1\\2\\3\\4\\5"[:1], stream=stream)
        print(content(other)[8:17].hex(), part.is_device_accessible)
        for one in buffer, other:
            one.close(stream=stream)
        """
    ) == ["True False 0", "True", "True", "070701010101010707 True"]


def test_pools_count_what_they_give():
    assert run(
        """
        pool = DeviceMemoryResource(device)
        buffer = pool.allocate(3 << 20, stream=stream)
        counts = pool.attributes
        print(counts.used_mem_current, counts.reserved_mem_current >= 3 << 20)
        print(pool.is_handle_owned, pool.device_id, pool.is_ipc_enabled)
        buffer.close()
        stream.sync()
        print(counts.used_mem_current, counts.used_mem_high)
        limited = DeviceMemoryResourceOptions(max_size=64 << 20)
        own = DeviceMemoryResource(device, limited)
        print(own.is_handle_owned, own.handle != pool.handle)
        kept = own.allocate(60 << 20, stream=stream)
        try:
            own.allocate(5 << 20, stream=stream)
        except Exception as error:
            print(str(error).split(":")[0])
        own.close()  # what it gave is still there
        kept.fill(1, stream=stream)
        stream.sync()
        kept.close()
        """
    ) == [
        *("3145728 True", "False 0 False", "0 3145728", "True True"),
        "CUDA_ERROR_OUT_OF_MEMORY",
    ]


def test_pools_grant_access_to_peers():
    assert run(
        """
        pool = DeviceMemoryResource(device, DeviceMemoryResourceOptions())
        print(len(pool.peer_accessible_by))
        pool.peer_accessible_by = {1}
        print([peer.device_id for peer in pool.peer_accessible_by])
        pool.peer_accessible_by = []
        print(len(pool.peer_accessible_by))
        """,
        *("--gpus", "2"),
    ) == ["0", "[1]", "0"]


def test_pinned_memory_is_of_the_host_and_of_the_device():
    assert (
        run(
            """
        for resource in (PinnedMemoryResource(), LegacyPinnedMemoryResource(),
                         PinnedMemoryResource(PinnedMemoryResourceOptions())):
            host = resource.allocate(100, stream=stream)
            stream.sync()
            ctypes.memset(int(host.handle), 5, 100)
            buffer = device.allocate(100, stream=stream)
            buffer.copy_from(host, stream=stream)
            known = Buffer.from_handle(int(host.handle), 100)
            print(known.is_host_accessible, known.is_device_accessible,
                  content(buffer) == b"\\5" * 100)
            host.close(stream=stream)
        """
        )
        == ["True True True"] * 3
    )


def test_streams_wait_for_events():
    assert run(
        """
        options = StreamOptions(priority=-1, nonblocking=True)
        other = device.create_stream(options=options)
        print(other.priority, other.is_nonblocking, other.device == device)
        event = stream.record()
        other.wait(event)
        other.wait(stream)
        other.sync()
        event.sync()
        print(event.is_done, event.device == device)
        timed = EventOptions(timing_enabled=True)
        start, end = stream.record(options=timed), stream.record(options=timed)
        end.sync()
        print(end - start >= 0)
        device.default_stream.sync()
        print(Stream.from_handle(int(stream.handle)) == stream)
        """
    ) == ["-1 True True", "True True", "True", "True"]


TARGET = (
    IMPORTS
    + """
import random
random.seed(1)
pattern = random.randbytes(3_000_000)
host = LegacyPinnedMemoryResource().allocate(len(pattern), stream=stream)
ctypes.memmove(int(host.handle), pattern, len(pattern))
own = DeviceMemoryResource(device, DeviceMemoryResourceOptions())
buffers = [resource.allocate(len(pattern), stream=stream)
           for resource in (device.memory_resource, own)]
for buffer in buffers:
    buffer.copy_from(host, stream=stream)
stream.sync()
print("ready", flush=True)
sys.stdin.readline()
print(*[content(buffer) == pattern for buffer in buffers], flush=True)
buffers.pop().close(stream=stream)
again = own.allocate(len(pattern), stream=stream)
again.copy_from(buffers[0], stream=stream)
print(content(again) == pattern, own.attributes.used_mem_current, flush=True)
"""
)


def test_buffers_of_pools_survive_a_checkpoint():
    printed = run(
        f"""
        from cuda.core.checkpoint import Process
        from cuckpt import driver
        target = subprocess.Popen(
            [sys.executable, "-P", "-c", {TARGET!r}],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(target.stdout.readline().strip())
        process = Process(target.pid)
        driver.checkpoint_process_lock(target.pid, None)
        driver.checkpoint_process_checkpoint(target.pid, None)
        print(process.state)
        process.restore()
        process.unlock()
        print(target.communicate("\\n")[0].strip(), target.returncode)
        """
    )
    assert printed == ["ready", "checkpointed", "True True", "True 3000000 0"]
