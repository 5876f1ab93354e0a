"""A CUDA process to checkpoint: obeys one command a line, answers with one line.

Uses libcuda directly, so that it needs nothing but a driver and a GPU.
"""

import ctypes
import hashlib
import os
import sys

SPIN = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry cuckpt_spin(.param .u64 ns)
{
    .reg .u64 %start, %now, %passed, %limit;
    .reg .pred %more;
    ld.param.u64 %limit, [ns];
    mov.u64 %start, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %start;
    setp.lt.u64 %more, %passed, %limit;
    @%more bra AGAIN;
    ret;
}
"""

cuda = ctypes.CDLL("libcuda.so.1")
pointer = ctypes.c_uint64()
size = 0


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result:
        raise SystemExit(f"{name} returned {result}")


def start():
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    return "started"


def fill(text):
    """Allocate device memory and fill it with random bytes; return their digest."""
    global size
    size = int(text)
    content = os.urandom(size)
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    call("cuMemcpyHtoD_v2", pointer, content, ctypes.c_size_t(size))
    return f"{pointer.value:#x} {hashlib.sha256(content).hexdigest()}"


def check():
    """Return where the memory is and the digest of what it holds."""
    content = ctypes.create_string_buffer(size)
    call("cuMemcpyDtoH_v2", content, pointer, ctypes.c_size_t(size))
    return f"{pointer.value:#x} {hashlib.sha256(content.raw).hexdigest()}"


def manage():
    managed = ctypes.c_uint64()
    call("cuMemAllocManaged", ctypes.byref(managed), ctypes.c_size_t(1 << 20), 1)
    return "managed"


def spin(milliseconds):
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), SPIN)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"cuckpt_spin")
    limit = ctypes.c_uint64(int(milliseconds) * 1_000_000)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(limit))
    grid = block = (1, 1, 1)
    call("cuLaunchKernel", kernel, *grid, *block, 0, None, parameters, None)
    return "spinning"


def wait():
    call("cuCtxSynchronize")
    return "waited"


COMMANDS = {f.__name__: f for f in (start, fill, check, manage, spin, wait)}

for line in sys.stdin:
    name, *arguments = line.split()
    print(COMMANDS[name](*arguments), flush=True)
