"""What driver calls other than the checkpoint ones do; expectations were measured.

The simulator need not have them right for checkpoints, but for programs that are
tested on it: one that forgets to wait must fail there as well.
"""

import ctypes
import threading
import time

import pytest

from cuckpt import driver
from cuckpt.target.__main__ import SPIN

MIB = 1 << 20
Pointer, Address, Size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
cuda = ctypes.CDLL(driver.library_path())

NON_BLOCKING = 1
GLOBAL, OF_THREAD, RELAXED = 0, 1, 2
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE = 1, 201, 400, 401
NOT_READY, ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED = 600, 700, 709


class Api:
    """The driver, called by ctypes; what is made is destroyed at the end."""

    def __init__(self):
        self._undo = []

    def __getattr__(self, name):
        def call(*arguments):
            assert getattr(cuda, name)(*arguments) == 0, name

        return call

    def allocate(self, size):
        pointer = Address()
        self.cuMemAlloc_v2(ctypes.byref(pointer), Size(size))
        self._undo.append(lambda: cuda.cuMemFree_v2(pointer))
        return pointer

    def pin(self, size):
        pointer = Pointer()
        self.cuMemHostAlloc(ctypes.byref(pointer), Size(size), 0)
        self._undo.append(lambda: cuda.cuMemFreeHost(pointer))
        return pointer

    def stream(self, flags=NON_BLOCKING):
        stream = Pointer()
        self.cuStreamCreate(ctypes.byref(stream), flags)
        self._undo.append(lambda: cuda.cuStreamDestroy_v2(stream))
        return stream

    def spin(self, milliseconds, stream):
        module, kernel = Pointer(), Pointer()
        self.cuModuleLoadData(ctypes.byref(module), SPIN)
        self.cuModuleGetFunction(ctypes.byref(kernel), module, b"cuckpt_spin")
        limit = Address(milliseconds * 1_000_000)
        parameters = (Pointer * 1)(ctypes.addressof(limit))
        size = (1,) * 6
        self.cuLaunchKernel(kernel, *size, 0, stream, parameters, None)

    def end(self):
        cuda.cuCtxSynchronize()
        for undo in reversed(self._undo):
            undo()


@pytest.fixture
def api():
    driver.init()
    context = driver.device_primary_ctx_retain(0)
    cuda.cuCtxSetCurrent(Pointer(context))
    api = Api()
    yield api
    api.end()
    driver.device_primary_ctx_release_v2(0)


def took_ms(function, *arguments):
    start = time.perf_counter()
    assert function(*arguments) == 0
    return (time.perf_counter() - start) * 1e3


# Streams

KERNEL_MS = 300


@pytest.mark.parametrize(
    ("call", "size", "returns_at_once"),
    [
        ("to pinned", 8 * MIB, True),
        ("to pageable", 8 * MIB, False),
        ("to pageable", 1024, False),
        ("from pinned", 8 * MIB, True),
        ("from pageable", 8 * MIB, False),
        ("from pageable", 1024, True),
        ("on device", 4 * MIB, True),
        ("fill", 8 * MIB, True),
    ],
)
def test_copy_in_a_stream_waits_only_for_pageable_memory(
    api, call, size, returns_at_once
):
    stream, memory, pinned = api.stream(), api.allocate(8 * MIB), api.pin(8 * MIB)
    pageable = ctypes.create_string_buffer(8 * MIB)
    half = Address(memory.value + 4 * MIB)
    arguments = {
        "to pinned": (cuda.cuMemcpyDtoHAsync_v2, pinned, memory),
        "to pageable": (cuda.cuMemcpyDtoHAsync_v2, pageable, memory),
        "from pinned": (cuda.cuMemcpyHtoDAsync_v2, memory, pinned),
        "from pageable": (cuda.cuMemcpyHtoDAsync_v2, memory, pageable),
        "on device": (cuda.cuMemcpyDtoDAsync_v2, half, memory),
        "fill": (cuda.cuMemsetD8Async, memory, 1),
    }[call]
    api.spin(KERNEL_MS, stream)
    took = took_ms(*arguments, Size(size), stream)
    assert (took < KERNEL_MS / 2) == returns_at_once
    assert cuda.cuStreamQuery(stream) == (NOT_READY if returns_at_once else 0)
    api.cuStreamSynchronize(stream)
    assert cuda.cuStreamQuery(stream) == 0


def test_content_is_there_once_somebody_has_waited(api):
    stream, memory, pinned = api.stream(), api.allocate(MIB), api.pin(MIB)
    ctypes.memset(pinned, 1, MIB)
    api.cuMemsetD8_v2(memory, 7, Size(MIB))
    api.cuCtxSynchronize()
    api.spin(KERNEL_MS, stream)
    api.cuMemcpyDtoHAsync_v2(pinned, memory, Size(MIB), stream)
    assert ctypes.string_at(pinned, MIB) == b"\1" * MIB
    api.cuStreamSynchronize(stream)
    assert ctypes.string_at(pinned, MIB) == b"\7" * MIB


def test_staged_content_is_that_of_the_call(api):
    stream, memory = api.stream(), api.allocate(1024)
    content = ctypes.create_string_buffer(b"a" * 1024, 1024)
    api.spin(KERNEL_MS, stream)
    api.cuMemcpyHtoDAsync_v2(memory, content, Size(1024), stream)
    ctypes.memset(content, 0, 1024)
    api.cuStreamSynchronize(stream)
    api.cuMemcpyDtoH_v2(content, memory, Size(1024))
    assert content.raw == b"a" * 1024


def test_what_waits_for_a_kernel_in_another_stream(api):
    memory, host = api.allocate(1024), ctypes.create_string_buffer(1024)
    copy = (cuda.cuMemcpyDtoH_v2, host, memory, Size(1024))
    free = Address()

    def allocate():
        return cuda.cuMemAlloc_v2(ctypes.byref(free), Size(1024))

    blocking, other = api.stream(flags=0), api.stream()
    for stream, call, waits in (
        (blocking, copy, True),
        (other, copy, False),
        (blocking, (allocate,), False),
        (blocking, (cuda.cuMemFree_v2, free), True),
        (other, (cuda.cuCtxSynchronize,), True),
    ):
        api.spin(KERNEL_MS, stream)
        assert (took_ms(*call) > KERNEL_MS / 2) == waits
        api.cuCtxSynchronize()


def test_stream_that_is_destroyed_finishes_its_work(api):
    stream = Pointer()
    api.cuStreamCreate(ctypes.byref(stream), 0)
    api.spin(KERNEL_MS, stream)
    assert took_ms(cuda.cuStreamDestroy_v2, stream) < KERNEL_MS / 2
    assert took_ms(cuda.cuCtxSynchronize) > KERNEL_MS / 2


def test_event_is_as_far_as_its_stream_was(api):
    stream, other = api.stream(), api.stream()
    events = [Pointer(), Pointer()]
    for event in events:
        api.cuEventCreate(ctypes.byref(event), 0)
    api.cuEventRecord(events[0], stream)
    api.spin(KERNEL_MS, stream)
    api.cuEventRecord(events[1], stream)
    api.cuStreamWaitEvent(other, events[1], 0)
    assert cuda.cuEventQuery(events[1]) == NOT_READY
    assert took_ms(cuda.cuStreamSynchronize, other) > KERNEL_MS / 2
    assert cuda.cuEventQuery(events[1]) == 0
    api.cuEventSynchronize(events[1])
    milliseconds = ctypes.c_float()
    api.cuEventElapsedTime_v2(ctypes.byref(milliseconds), *events)
    assert KERNEL_MS * 0.9 < milliseconds.value < KERNEL_MS * 3
    for event in events:
        api.cuEventDestroy_v2(event)
        assert cuda.cuEventDestroy_v2(event) == CONTEXT_IS_DESTROYED


def test_garbage_is_no_stream(api):
    garbage = ctypes.create_string_buffer(4096)
    for call in cuda.cuStreamSynchronize, cuda.cuStreamQuery:
        assert call(Pointer(ctypes.addressof(garbage))) == INVALID_HANDLE


# Capture


def capturing(stream):
    status = ctypes.c_int(-1)
    assert cuda.cuStreamIsCapturing(stream, ctypes.byref(status)) == 0
    return ("no", "yes", "spoilt")[status.value]


def end_capture(stream):
    graph = Pointer()
    result = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    assert bool(graph.value) == (result == 0)
    if graph.value:
        assert cuda.cuGraphDestroy(graph) == 0
    return result


def test_capture_begins_and_ends(api):
    stream, memory = api.stream(), api.allocate(MIB)
    assert end_capture(stream) == ILLEGAL_STATE
    assert cuda.cuStreamBeginCapture_v2(None, GLOBAL) == 900
    assert capturing(stream) == "no"
    api.cuStreamBeginCapture_v2(stream, RELAXED)
    assert cuda.cuStreamBeginCapture_v2(stream, RELAXED) == ILLEGAL_STATE
    api.cuMemsetD8_v2(memory, 7, Size(MIB))
    api.cuMemsetD8Async(memory, 1, Size(100), stream)
    assert capturing(stream) == "yes"
    assert end_capture(stream) == 0
    content = ctypes.create_string_buffer(100)
    api.cuMemcpyDtoH_v2(content, memory, Size(100))
    assert content.raw == b"\7" * 100


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (RELAXED, "cuStreamQuery"),
        (RELAXED, "cuStreamSynchronize"),
        (RELAXED, "cuCtxSynchronize"),
        (GLOBAL, "cuMemAlloc_v2"),
    ],
)
def test_capture_is_spoilt_by_waiting(api, mode, name):
    stream, pointer = api.stream(), Address()
    api.cuStreamBeginCapture_v2(stream, mode)
    arguments = {
        "cuMemAlloc_v2": (ctypes.byref(pointer), Size(1)),
        "cuCtxSynchronize": (),
    }.get(name, (stream,))
    assert getattr(cuda, name)(*arguments) == 900
    assert capturing(stream) == "spoilt"
    assert end_capture(stream) == 901
    assert capturing(stream) == "no"


# Of a capture in a blocking stream, and in a non-blocking one, what these come to.
# "unsafe": 900, but for a relaxed capture.
REFUSED = {
    "copy": (906, 0),
    "fill": (906, 0),
    "fill in the default stream": (906, 0),
    "wait for the default stream": (906, "unsafe"),
    "query the default stream": (906, "unsafe"),
    "wait for another stream": ("unsafe", "unsafe"),
    "query another stream": ("unsafe", "unsafe"),
    "free": ("unsafe", "unsafe"),
    "allocate": ("unsafe", "unsafe"),
    "pin": ("unsafe", "unsafe"),
    "wait for an event": ("unsafe", "unsafe"),
    "query an event": ("unsafe", "unsafe"),
    "fill in another stream": (0, 0),
    "copy to pageable memory in it": (0, 0),
}


@pytest.mark.parametrize("mode", [GLOBAL, OF_THREAD, RELAXED])
@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
@pytest.mark.parametrize("what", REFUSED)
def test_capture_refuses(api, mode, flags, what):
    memory, freed, other = api.allocate(MIB), Address(), api.stream()
    host, event, pointer = ctypes.create_string_buffer(8), Pointer(), Pointer()
    api.cuMemAlloc_v2(ctypes.byref(freed), Size(8))
    api.cuEventCreate(ctypes.byref(event), 0)
    api.cuEventRecord(event, None)
    api.cuCtxSynchronize()
    stream = api.stream(flags)
    api.cuStreamBeginCapture_v2(stream, mode)
    result = {
        "copy": lambda: cuda.cuMemcpyDtoH_v2(host, memory, Size(8)),
        "fill": lambda: cuda.cuMemsetD8_v2(memory, 1, Size(8)),
        "fill in the default stream": lambda: cuda.cuMemsetD8Async(
            memory, 1, Size(8), None
        ),
        "wait for the default stream": lambda: cuda.cuStreamSynchronize(None),
        "query the default stream": lambda: cuda.cuStreamQuery(None),
        "wait for another stream": lambda: cuda.cuStreamSynchronize(other),
        "query another stream": lambda: cuda.cuStreamQuery(other),
        "free": lambda: cuda.cuMemFree_v2(freed),
        "allocate": lambda: cuda.cuMemAlloc_v2(ctypes.byref(freed), Size(8)),
        "pin": lambda: cuda.cuMemHostAlloc(ctypes.byref(pointer), Size(8), 0),
        "wait for an event": lambda: cuda.cuEventSynchronize(event),
        "query an event": lambda: cuda.cuEventQuery(event),
        "fill in another stream": lambda: cuda.cuMemsetD8Async(
            memory, 1, Size(8), other
        ),
        "copy to pageable memory in it": lambda: cuda.cuMemcpyDtoHAsync_v2(
            host, memory, Size(8), stream
        ),
    }[what]()
    expected = REFUSED[what][flags]
    if expected == "unsafe":
        expected = 0 if mode == RELAXED else 900
    assert result == expected
    assert capturing(stream) == ("spoilt" if expected else "yes")
    assert end_capture(stream) == (901 if expected else 0)
    api.cuEventDestroy_v2(event)


def test_thread_can_allow_itself_what_a_capture_forbids(api):
    stream, mode = api.stream(), ctypes.c_int(RELAXED)
    api.cuStreamBeginCapture_v2(stream, GLOBAL)
    api.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == GLOBAL
    api.allocate(8)
    api.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert end_capture(stream) == 0


def test_stream_joins_a_capture_by_an_event(api):
    stream, other, event = api.stream(), api.stream(), Pointer()
    memory, host = api.allocate(8), ctypes.create_string_buffer(8)
    api.cuMemsetD8_v2(memory, 7, Size(8))
    api.cuEventCreate(ctypes.byref(event), 0)
    api.cuStreamBeginCapture_v2(stream, RELAXED)
    api.cuEventRecord(event, stream)
    api.cuStreamWaitEvent(other, event, 0)
    assert capturing(other) == "yes"
    api.cuMemsetD8Async(memory, 1, Size(8), other)
    api.cuEventRecord(event, other)
    api.cuStreamWaitEvent(stream, event, 0)
    assert end_capture(stream) == 0
    assert capturing(other) == "no"
    api.cuMemcpyDtoH_v2(host, memory, Size(8))
    assert host.raw == b"\7" * 8
    api.cuStreamBeginCapture_v2(stream, RELAXED)
    api.cuEventRecord(event, stream)
    api.cuStreamWaitEvent(other, event, 0)
    assert end_capture(other) == 903
    assert end_capture(stream) == 901
    api.cuEventDestroy_v2(event)


def test_capture_is_ended_by_the_thread_that_began_it(api):
    stream, results = api.stream(), []
    api.cuStreamBeginCapture_v2(stream, GLOBAL)
    thread = threading.Thread(target=lambda: results.append(end_capture(stream)))
    thread.start()
    thread.join()
    assert results == [908]
    assert end_capture(stream) == ILLEGAL_STATE


def test_relaxed_capture_allows_to_allocate(api):
    stream = api.stream()
    api.cuStreamBeginCapture_v2(stream, RELAXED)
    api.allocate(1)
    assert end_capture(stream) == 0


def test_captured_event_cannot_be_waited_for(api):
    stream, event = api.stream(), Pointer()
    api.cuEventCreate(ctypes.byref(event), 0)
    api.cuStreamBeginCapture_v2(stream, RELAXED)
    api.cuEventRecord(event, stream)
    assert cuda.cuEventSynchronize(event) == 907
    assert cuda.cuEventQuery(event) == INVALID_VALUE
    assert capturing(stream) == "spoilt"
    assert end_capture(stream) == 901
    api.cuEventDestroy_v2(event)


# Memory


def test_device_memory_is_as_large_as_was_asked_for(api):
    memory, host = api.allocate(1000), ctypes.create_string_buffer(MIB)
    base, size = Address(), Size()
    inside = Address(memory.value + 10)
    api.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), inside)
    assert (base.value, size.value) == (memory.value, 1000)
    assert cuda.cuMemcpyDtoH_v2(host, memory, Size(MIB)) == INVALID_VALUE
    assert cuda.cuMemFree_v2(inside) == INVALID_VALUE
    freed = Address()
    assert cuda.cuMemAlloc_v2(ctypes.byref(freed), Size(0)) == INVALID_VALUE
    api.cuMemAlloc_v2(ctypes.byref(freed), Size(1000))
    api.cuMemFree_v2(freed)
    assert cuda.cuMemFree_v2(freed) == INVALID_VALUE
    assert cuda.cuMemcpyDtoH_v2(host, freed, Size(10)) == INVALID_VALUE


def test_pinned_memory_is_known(api):
    pinned, own = api.pin(4096), ctypes.create_string_buffer(MIB)
    kind, device = ctypes.c_uint(), Address()
    api.cuPointerGetAttribute(ctypes.byref(kind), 2, Address(pinned.value))
    assert kind.value == 1  # CU_MEMORYTYPE_HOST
    api.cuMemHostGetDevicePointer_v2(ctypes.byref(device), pinned, 0)
    assert device.value == pinned.value
    of_own = Address(ctypes.addressof(own))
    assert cuda.cuPointerGetAttribute(ctypes.byref(kind), 2, of_own) == INVALID_VALUE
    results = [
        cuda.cuMemFreeHost(Pointer(0x123000)),
        cuda.cuMemHostRegister_v2(own, Size(MIB), 0),
        cuda.cuMemHostRegister_v2(own, Size(MIB), 0),
        cuda.cuMemHostUnregister(own),
        cuda.cuMemHostUnregister(own),
    ]
    assert results == [INVALID_VALUE, 0, 712, 0, 713]


def test_pinned_memory_stays_until_a_copy_is_done(api):
    stream, memory, own = api.stream(), api.allocate(MIB), bytearray(2 * MIB)
    start = ctypes.addressof(ctypes.c_char.from_buffer(own))
    api.cuMemHostRegister_v2(Pointer(start), Size(MIB), 0)
    api.spin(KERNEL_MS, stream)
    api.cuMemcpyDtoHAsync_v2(Pointer(start), memory, Size(MIB), stream)
    assert took_ms(cuda.cuMemHostUnregister, Pointer(start)) > KERNEL_MS / 2
    results = [
        cuda.cuMemHostRegister_v2(Pointer(start + 4096), Size(8192), 0),
        cuda.cuMemHostRegister_v2(Pointer(start), Size(8192), 0),
        cuda.cuMemHostRegister_v2(Pointer(start), Size(2**64 - 1), 0),
        cuda.cuMemHostUnregister(Pointer(start + 4096)),
        cuda.cuMemFreeAsync(api.pin(8), stream),
        cuda.cuMemFree_v2(api.pin(8)),
    ]
    assert results == [0, 712, INVALID_VALUE, 0, INVALID_VALUE, INVALID_VALUE]


def test_pool_gives_again_what_was_freed_in_the_same_stream(api):
    stream, memory = api.stream(), Address()
    size = free_bytes() * 2 // 3
    for _ in range(4):
        api.cuMemAllocAsync(ctypes.byref(memory), Size(size), stream)
        api.cuMemsetD8Async(memory, 1, Size(100), stream)
        api.cuMemFreeAsync(memory, stream)
    api.cuStreamSynchronize(stream)


# Contexts


def free_bytes():
    free, total = Size(), Size()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def test_context_takes_its_memory_along(api):
    before, context, memory = free_bytes(), Pointer(), Address()
    api.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
    api.cuMemAlloc_v2(ctypes.byref(memory), Size(64 * MIB))
    assert free_bytes() <= before - 64 * MIB
    api.cuCtxDestroy_v2(context)
    assert free_bytes() >= before - MIB
    host = ctypes.create_string_buffer(8)
    assert cuda.cuMemcpyDtoH_v2(host, memory, Size(8)) == INVALID_VALUE
    # Both were seen; a real driver does not keep what has been destroyed.
    assert cuda.cuCtxDestroy_v2(context) in (INVALID_CONTEXT, CONTEXT_IS_DESTROYED)


PRIMARY = """
import ctypes, os
from cuckpt import driver
cuda = ctypes.CDLL(driver.library_path())
size, memory, handle = ctypes.c_size_t, ctypes.c_uint64(), ctypes.c_void_p()
driver.init()
context = ctypes.c_void_p(driver.device_primary_ctx_retain(0))
cuda.cuCtxSetCurrent(context)
def allocate():
    return cuda.cuMemAlloc_v2(ctypes.byref(memory), size(1 << 20))
results = [
    allocate(),
    cuda.cuDevicePrimaryCtxReset_v2(0),
    allocate(),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(handle), 0),
    handle.value == context.value,
    allocate(),
    cuda.cuDevicePrimaryCtxRelease_v2(0),
    allocate(),
    cuda.cuDevicePrimaryCtxRelease_v2(0),
    allocate(),
    cuda.cuDevicePrimaryCtxRelease_v2(0),
]
print(results, flush=True)
os._exit(0)
"""


def test_primary_context_ends_and_begins_again(spawn):
    gone = CONTEXT_IS_DESTROYED
    # A reset leaves the count as it is: two releases are to follow.
    expected = [0, 0, gone, 0, True, 0, 0, 0, 0, gone, INVALID_CONTEXT]
    assert spawn("-c", PRIMARY).answer() == str(expected)
