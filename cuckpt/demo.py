"""The demo: a real process's GPU memory, checkpointed, restored and checked."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeAlias

from cuckpt import driver, simulator
from cuckpt.target import Target

_Region: TypeAlias = driver.CheckpointCustomStoragePerDeviceData

_PROBE = """
import json
from cuckpt import driver
try:
    driver.init(0)
    print(json.dumps("" if driver.device_get_count() else "it sees no GPU"))
except (RuntimeError, driver.DriverError) as error:
    print(json.dumps(str(error)))
"""


def main(memory_bytes: int) -> int:
    """Run the demo and print a line for each step.

    Parameters
    ----------
    memory_bytes : int
        How much GPU memory the target fills.

    Returns
    -------
    int
        0 if every check passed, else 1.
    """
    # As an exception, so that the target is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    problem = _probe()
    if problem and os.environ.get("CUCKPT_LIBCUDA"):
        _say(f"The driver that CUCKPT_LIBCUDA names cannot be used: {problem}")
        return 1
    with contextlib.ExitStack() as stack:
        if problem:
            _say(f"On a simulated GPU, since there is no real one: {problem}")
            size = max(simulator.DEFAULT_MEMORY_BYTES, 2 * memory_bytes)
            try:
                stack.enter_context(simulator.Machine(memory_bytes=size))
            except simulator.SimulatorError as error:
                _say(f"FAILED: {error}")
                return 1
        elif driver.library_path() == str(simulator.LIBRARY):
            _say("On a simulated GPU, as chosen.")
        else:
            _say(f"On a real GPU, with {driver.library_path()}.")
        print()
        try:
            # Time enough for a slow machine with much memory.
            target = stack.enter_context(Target(timeout_s=60 + memory_bytes / 1e8))
            demo = _Demo(target, memory_bytes)
            demo.through_host_memory()
            demo.through_a_file()
        except BrokenPipeError:
            raise
        except (driver.DriverError, RuntimeError, OSError) as error:
            _say(f"FAILED: {error}")
            return 1
    print("\nEvery byte came back.")
    return 0


def _say(text: str) -> None:
    print(textwrap.fill(text, 79))


def _probe() -> str:
    """Return why the real driver cannot be used; in a process of its own.

    A libcuda that this process has loaded would stand in the simulated one's way.
    """
    result = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True
    )
    if result.returncode != 0:
        return f"it crashed: {result.stderr.strip() or result.returncode}"
    reason: str = json.loads(result.stdout)
    return reason


class _Demo:
    """A target and what is done to it."""

    def __init__(self, target: Target, memory_bytes: int) -> None:
        self.target = target
        self.memory_bytes = memory_bytes
        self.cuda = ctypes.CDLL(driver.library_path())
        driver.init(0)
        self.context = driver.device_primary_ctx_retain(0)
        self.call("cuCtxSetCurrent", ctypes.c_void_p(self.context))

    def through_host_memory(self) -> None:
        """Suspend and resume: the driver keeps the content in host memory."""
        pid = self.target.pid
        free, total = self.free_and_total()
        if free < self.memory_bytes:
            raise RuntimeError(
                f"the GPU has {_mib(free)} free, less than {_mib(self.memory_bytes)}; "
                "see --memory"
            )
        before = total - free
        self.step(
            f"process {pid} fills {_mib(self.memory_bytes)} with random bytes",
            lambda: self.target.ask(f"fill {self.memory_bytes}"),
        )
        filled = self.used_bytes()
        self.step("lock", lambda: driver.checkpoint_process_lock(pid, _TEN_SECONDS))
        self.step("checkpoint", lambda: driver.checkpoint_process_checkpoint(pid))
        freed = filled - self.used_bytes()
        print(f"    {_mib(freed)} of GPU memory are free again")
        if freed < filled - before:
            raise RuntimeError("the GPU memory was not released")
        same = driver.CheckpointRestoreArgs(gpu_pairs=_pairs())
        self.step(
            "restore, by UUID", lambda: driver.checkpoint_process_restore(pid, same)
        )
        self.step("unlock", lambda: driver.checkpoint_process_unlock(pid))
        self.step("compare address and content", self.target.check)

    def through_a_file(self) -> None:
        """Suspend and resume once more: with custom storage, by a file."""
        if not driver.has_custom_storage():
            print("\nNot shown: custom storage, which needs driver 615 (CUDA 13.4).")
            return
        pid = self.target.pid
        print("\nOnce more, through custom storage:\n")
        with tempfile.TemporaryFile() as file:
            save = driver.CheckpointCheckpointArgs(custom_storage=True)
            self.step("lock", lambda: driver.checkpoint_process_lock(pid, _TEN_SECONDS))
            self.step(
                "checkpoint", lambda: driver.checkpoint_process_checkpoint(pid, save)
            )
            regions = save.custom_storage_info or ()
            self.step("copy to a file", lambda: self.save(regions, file))
            self.step("complete", lambda: driver.checkpoint_operation_complete(save))
            file.seek(0)
            load = driver.CheckpointRestoreArgs(gpu_pairs=_pairs(), custom_storage=True)
            self.step("restore", lambda: driver.checkpoint_process_restore(pid, load))
            places = load.custom_storage_info or ()
            self.step("copy from the file", lambda: self.load(places, file))
            self.step("complete", lambda: driver.checkpoint_operation_complete(load))
        self.step("unlock", lambda: driver.checkpoint_process_unlock(pid))
        self.step("compare address and content", self.target.check)

    def save(self, regions: Iterable[_Region], file: IO[bytes]) -> None:
        """Copy GPU memory to a file."""
        for region in regions:
            size = ctypes.c_size_t(region.size)
            content = ctypes.create_string_buffer(region.size)
            self.call("cuMemcpyDtoH_v2", content, ctypes.c_uint64(region.dev_ptr), size)
            file.write(content)

    def load(self, regions: Iterable[_Region], file: IO[bytes]) -> None:
        """Copy a file to GPU memory."""
        for region in regions:
            size = ctypes.c_size_t(region.size)
            content = file.read(region.size)
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(region.dev_ptr), content, size)

    def free_and_total(self) -> tuple[int, int]:
        """Return how many bytes of GPU memory are free, and how many there are."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def used_bytes(self) -> int:
        """Return how much of the GPU's memory is in use, by whomever."""
        free, total = self.free_and_total()
        return total - free

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver that cuckpt does not bind."""
        result = getattr(self.cuda, name)(*arguments)
        if result:
            raise driver.DriverError(result, name)

    def step(self, what: str, do: "Callable[[], Any]") -> Any:
        """Do something; print what, how long it took, and the state it left."""
        start = time.perf_counter()
        result = do()
        milliseconds = (time.perf_counter() - start) * 1e3
        state = driver.checkpoint_process_get_state(self.target.pid)
        name = getattr(state, "name", str(state))
        print(f"{what:51} {milliseconds:9.1f} ms  {name}", flush=True)
        return result


_TEN_SECONDS = driver.CheckpointLockArgs(timeout_ms=10_000)


def _pairs() -> list[tuple[driver.Uuid, driver.Uuid]]:
    """Return a pair for every GPU: each onto itself."""
    count = driver.device_get_count()
    uuids = [driver.device_get_uuid_v2(driver.device_get(n)) for n in range(count)]
    return [(uuid, uuid) for uuid in uuids]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
