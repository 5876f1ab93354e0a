"""The real driver: calls about other processes, checkpoints by size and in numbers.

Beside cuckpt and v2 stands the use of a tool that is one process a call, for which
a small C program serves.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

from case import Case
from native import build

from cuckpt.target import Target

GIB = 1 << 30
ROUNDS_BY_GIB = {0: 5, 1: 5, 4: 3, 16: 2}
PROCESSES_AT_ONCE = [1, 2, 4, 8]


class Context:
    """The rivals, each as a function of a verb and a process.

    Parameters
    ----------
    folder : Path
        Where `compile_all` put the program.
    quick : bool
        Whether little memory and few processes will do.
    """

    def __init__(self, folder, quick):
        import cuda.bindings._v2.driver as v2

        from cuckpt import driver

        try:
            driver.init(0)
        except (RuntimeError, driver.DriverError) as error:
            sys.exit(textwrap.fill(f"--gpu needs a GPU: {error}", 79))
        v2.init(0)
        self.quick = quick
        self._folder = folder
        self.rivals = {
            "cuckpt": _by_module(driver),
            "v2": _by_module(v2),
            "process": self._by_process,
        }
        self.facts = {"gpu": gpu_name(driver), "driver": driver_version(driver)}

    def _by_process(self, verb, pid):
        name = "".join(word.capitalize() for word in verb.split("_"))
        subprocess.check_call([self._folder / "one_call", name, str(pid)])


def compile_all(folder):
    """Compile what a `Context` uses."""
    build.one_call(folder)


def cases(context):
    """Yield calls that tell, calls that lock, and checkpoints."""
    with started() as pid:
        yield from _calls(context, pid)
    for gib, rounds in ROUNDS_BY_GIB.items():
        size = gib * GIB
        if context.quick and gib > 1:
            continue
        with started(size) as pid:
            yield from _transitions(context, f"{gib} GiB", [pid], rounds)
    for count in PROCESSES_AT_ONCE[: 2 if context.quick else None]:
        with contextlib.ExitStack() as stack:
            pids = [stack.enter_context(started(GIB)) for _ in range(count)]
            name = f"{count} x 1 GiB at once"
            yield from _transitions(context, name, pids, rounds=3)


def _calls(context, pid):
    def one_by_one(call, *verbs):
        for verb in verbs:
            call(verb, pid)

    for verb, before, after in (
        ("get_state", [], []),
        ("get_restore_thread_id", [], []),
        ("lock", [], ["unlock"]),
        ("unlock", ["lock"], []),
    ):
        rivals = _rivals(context, one_by_one, verb, before, after)
        yield Case("Calls", f"{verb}(pid)", rivals, chart=True)


def _transitions(context, what, pids, rounds):
    """Yield checkpoint and restore of all these processes at once."""
    pool = ThreadPoolExecutor(len(pids))

    def all_at_once(call, *verbs):
        for verb in verbs:
            list(pool.map(lambda pid, verb=verb: call(verb, pid), pids))

    with pool:
        # The first time takes longer: host memory is new.
        all_at_once(context.rivals["cuckpt"], "lock", "checkpoint", "restore", "unlock")
        for verb, before, after in (
            ("checkpoint", ["lock"], ["restore", "unlock"]),
            ("restore", ["lock", "checkpoint"], ["unlock"]),
        ):
            yield Case(
                "Checkpoint and restore",
                f"{verb}, {what}",
                _rivals(context, all_at_once, verb, before, after),
                loops=1,
                rounds=1 if context.quick else rounds,
                chart=True,
            )


def _rivals(context, do, verb, before, after):
    """Return rivals that are timed for a verb; cuckpt does what comes around it."""

    def timed(call):
        def run(loops):
            taken = 0.0
            for _ in range(loops):
                do(own, *before)
                start = time.perf_counter()
                do(call, verb)
                taken += time.perf_counter() - start
                do(own, *after)
            return taken

        return run

    own = context.rivals["cuckpt"]
    return {name: timed(call) for name, call in context.rivals.items()}


def _by_module(module):
    def call(verb, pid):
        function = getattr(module, f"checkpoint_process_{verb}")
        return function(pid) if verb.startswith("get_") else function(pid, None)

    return call


@contextlib.contextmanager
def started(size=0):
    """Start a process with a context, and GPU memory if asked; yield its pid."""
    with Target() as target:
        if size:
            target.ask(f"take {size}")
        yield target.pid


def gpu_name(driver):
    """Return the name of GPU 0."""
    cuda = ctypes.CDLL(driver.library_path())
    name = ctypes.create_string_buffer(128)
    if cuda.cuDeviceGetName(name, len(name), driver.device_get(0)):
        return "unknown"
    return name.value.decode()


def driver_version(driver):
    """Return the versions of the driver: its own, if there is one, and CUDA's."""
    cuda = driver.driver_get_version()
    found = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    if os.path.exists("/sys/module/nvidia/version"):
        with open("/sys/module/nvidia/version") as file:
            return f"{file.read().strip()}, {found}"
    return found
