"""A CUDA process to checkpoint: obeys one command a line, answers with one line.

Calls libcuda directly, so that it needs nothing but a driver and a GPU, or the
simulated ones. The demo and the tests start it. The commands: ``start`` first,
``fill BYTES``, ``check``, ``take BYTES``, ``spin MILLISECONDS``, ``wait``,
``manage``.
"""

import ctypes
import functools
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


memory = ctypes.c_uint64()
memory_bytes = 0


def main() -> None:
    """Obey until the input ends."""
    for line in sys.stdin:
        name, *arguments = line.split() or [""]
        if name not in _COMMANDS:
            raise SystemExit(f"commands are {', '.join(_COMMANDS)}, not {name!r}")
        print(_COMMANDS[name](*arguments), flush=True)


def start() -> str:
    """Make a context on GPU 0."""
    context = ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    _call("cuCtxSetCurrent", context)
    return "started"


def fill(size: str) -> str:
    """Allocate GPU memory and fill it with random bytes; tell where, and a digest."""
    global memory_bytes
    memory_bytes = int(size)
    content = os.urandom(memory_bytes)
    _call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(memory_bytes))
    _call("cuMemcpyHtoD_v2", memory, content, ctypes.c_size_t(memory_bytes))
    return _describe(content)


def check() -> str:
    """Tell where the GPU memory is, and the digest of what it holds now."""
    content = ctypes.create_string_buffer(memory_bytes)
    _call("cuMemcpyDtoH_v2", content, memory, ctypes.c_size_t(memory_bytes))
    return _describe(content.raw)


def take(size: str) -> str:
    """Allocate GPU memory and leave it as it is: faster than to fill it."""
    taken = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(taken), ctypes.c_size_t(int(size)))
    return "taken"


def manage() -> str:
    """Allocate managed memory."""
    managed = ctypes.c_uint64()
    _call("cuMemAllocManaged", ctypes.byref(managed), ctypes.c_size_t(1 << 20), 1)
    return "managed"


def spin(milliseconds: str) -> str:
    """Start a kernel that runs for so long, and do not wait for it."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), SPIN)
    _call("cuModuleGetFunction", ctypes.byref(kernel), module, b"cuckpt_spin")
    limit = ctypes.c_uint64(int(milliseconds) * 1_000_000)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(limit))
    grid = block = (1, 1, 1)
    _call("cuLaunchKernel", kernel, *grid, *block, 0, None, parameters, None)
    return "spinning"


def wait() -> str:
    """Wait for the GPU."""
    _call("cuCtxSynchronize")
    return "waited"


def _call(name: str, *arguments: object) -> None:
    result = getattr(_driver(), name)(*arguments)
    if result:
        raise SystemExit(f"{name} returned {result}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.environ.get("CUCKPT_LIBCUDA") or "libcuda.so.1")
    except OSError as error:
        raise SystemExit(f"no CUDA driver: {error}") from None


def _describe(content: bytes) -> str:
    return f"{memory.value:#x} {hashlib.sha256(content).hexdigest()}"


_COMMANDS = {f.__name__: f for f in (start, fill, check, take, manage, spin, wait)}

if __name__ == "__main__":
    main()
