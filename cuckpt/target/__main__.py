"""A CUDA process to checkpoint: obeys one command a line, answers with one line.

Calls libcuda directly, so that it needs nothing but a driver and a GPU, or the
simulated ones. `cuckpt.target.Target` starts it and talks to it. It ends with its
input, and with its parent. With any argument it prints its commands.
"""

import ctypes
import functools
import hashlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator

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

_PIECE = 64 << 20

# GPU, address and size of what was filled.
_filled: list[tuple[int, int, int]] = []


def main() -> int:
    """Obey until the input ends."""
    if len(sys.argv) > 1:
        print("Commands, one a line; where GPU is left out it is 0:\n")
        print("\n".join(_usage(name) for name in _COMMANDS))
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    _die_with_parent()
    for line in sys.stdin:
        print(_obey(line), flush=True)
    return 0


def start(gpu: int = 0) -> str:
    """Make a context on a GPU; what needs one does so by itself."""
    _use(gpu)
    return "started"


def fill(size: int, gpu: int = 0) -> str:
    """Fill new memory with random bytes; answer where and a digest."""
    address = _allocate(size, gpu)
    digest = hashlib.sha256()
    place = address
    for piece in _random_pieces(size):
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(place), piece, _size(len(piece)))
        digest.update(piece)
        place += len(piece)
    _filled.append((gpu, address, size))
    return f"{gpu} {address:#x} {digest.hexdigest()}"


def check() -> str:
    """Answer as `fill` did, about what all that memory holds now."""
    return ", ".join(_look(*memory) for memory in _filled) or "nothing"


def take(size: int, gpu: int = 0) -> str:
    """Allocate memory and leave it as it is, which is faster."""
    _allocate(size, gpu)
    return "taken"


def manage(gpu: int = 0) -> str:
    """Allocate 1 MiB of managed memory."""
    _use(gpu)
    managed = ctypes.c_uint64()
    _call("cuMemAllocManaged", ctypes.byref(managed), _size(1 << 20), 1)
    return "managed"


def spin(ms: int, gpu: int = 0) -> str:
    """Start a kernel that runs for so long, and do not wait for it."""
    _use(gpu)
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), SPIN)
    _call("cuModuleGetFunction", ctypes.byref(kernel), module, b"cuckpt_spin")
    limit = ctypes.c_uint64(ms * 1_000_000)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(limit))
    grid = block = (1, 1, 1)
    _call("cuLaunchKernel", kernel, *grid, *block, 0, None, parameters, None)
    return "spinning"


def wait(gpu: int = 0) -> str:
    """Wait for a GPU."""
    _use(gpu)
    _call("cuCtxSynchronize")
    return "waited"


def _die_with_parent() -> None:
    """End when the parent has ended, also while the driver lets nothing else go on.

    The end of the input would not be noticed in a call that a lock has stopped. A
    signal by PR_SET_PDEATHSIG comes as soon as the thread ends that started this
    process, and not only with its process.
    """
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:  # not on this kernel; or it has ended, and so has the input
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _obey(line: str) -> str:
    name, *arguments = line.split() or [""]
    if name not in _COMMANDS:
        raise SystemExit(f"commands are {', '.join(_COMMANDS)}, not {name!r}")
    code, defaults = _COMMANDS[name].__code__, _COMMANDS[name].__defaults__ or ()
    count = code.co_argcount
    numbers = [int(argument) for argument in arguments if argument.isdecimal()]
    allowed = range(count - len(defaults), count + 1)
    if len(numbers) < len(arguments) or len(numbers) not in allowed:
        raise SystemExit(f"expected {_usage(name)!r}, not {line.strip()!r}")
    return _COMMANDS[name](*numbers)


def _usage(name: str) -> str:
    command = _COMMANDS[name]
    names = command.__code__.co_varnames[: command.__code__.co_argcount]
    words = [f"[{n}]" if n == "gpu" else n for n in names]
    doc = (command.__doc__ or "").partition("\n")[0]
    return f"{' '.join([name, *map(str.upper, words)]):18}{doc}"


@functools.cache
def _context(gpu: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), gpu)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _use(gpu: int) -> None:
    _call("cuCtxSetCurrent", _context(gpu))


def _allocate(size: int, gpu: int) -> int:
    _use(gpu)
    memory = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(memory), _size(size))
    return memory.value


def _random_pieces(size: int) -> Iterator[bytes]:
    """Yield random bytes; from 64 MiB on what came before, turned round at random."""
    random = os.urandom(min(size, _PIECE))
    for start in range(0, size, _PIECE):
        yield random[: size - start]
        turn = int.from_bytes(os.urandom(8), "little") % len(random)
        random = random[turn:] + random[:turn]


def _look(gpu: int, address: int, size: int) -> str:
    """Return what `fill` answered, or the error if the memory is not there."""
    digest = hashlib.sha256()
    content = ctypes.create_string_buffer(min(size, _PIECE))
    try:
        _use(gpu)
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            place = ctypes.c_uint64(address + start)
            _call("cuMemcpyDtoH_v2", content, place, _size(length))
            digest.update(memoryview(content)[:length])
    except SystemExit as error:
        return f"{gpu} {address:#x} {error}"
    return f"{gpu} {address:#x} {digest.hexdigest()}"


def _size(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)


def _call(name: str, *arguments: object) -> None:
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        raise SystemExit(f"{name} returned {result} {(text.value or b'').decode()}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.environ.get("CUCKPT_LIBCUDA") or "libcuda.so.1")
    except OSError as error:
        raise SystemExit(f"no CUDA driver: {error}") from None


_COMMANDS = {f.__name__: f for f in (start, fill, check, take, manage, spin, wait)}

if __name__ == "__main__":
    sys.exit(main())
