"""Images: GPU memory to files and back, beside the driver's own way and the limits.

    python benchmarks/storage.py --gib 8 32 --output docs/benchmarks/storage.json

Ordinary allocations are copied, so any driver will do. With each figure comes its
ratio to the driver's own checkpoint or restore of a process of that size, all in one
run. KvikIO is measured as well where it is installed. report.py makes the page of it.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

from gpu import driver_version, gpu_name

from cuckpt import driver
from cuckpt.storage import cuda
from cuckpt.storage.copier import Copier, Region
from cuckpt.storage.folder import NewImage, OldImage
from cuckpt.target import Target

GIB = 1 << 30
PATTERN_BYTES = 64 << 20
PIECE_BYTES = 8 << 20
DISK_THREADS = 8


def main():
    """Print a line for each figure, and keep all of them in a file."""
    options = parsed()
    driver.init()
    cuda.enter(0)
    figures = {}
    for gib in options.gib:
        figures[f"{gib:g} GiB"] = rows = {}
        print(f"{gib:g} GiB")
        size = int(gib * GIB)
        run = Run(size, options, rows)
        run.driver_managed()
        with run.region():
            for part in run.parts(slow=gib == options.gib[0]):
                part()
                keep(figures, options.output)  # since the next may take long
    print(f"host memory at its peak: {peak_bytes() / GIB:.2f} GiB")


def keep(figures, output):
    found = {"facts": facts(), "figures": figures, "peak_bytes": peak_bytes()}
    if output:
        Path(output).write_text(json.dumps(found, indent=1) + "\n")


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[8.0])
    parser.add_argument("--memory", default="/dev/shm", help="a folder in a tmpfs")
    parser.add_argument(
        "--huge", help="a folder in a tmpfs that is mounted with huge=within_size"
    )
    parser.add_argument("--disk", default="/var/tmp", help="a folder on a disk")
    parser.add_argument("--rounds", type=int, default=3, help="median of so many")
    parser.add_argument("--output", help="a file for the figures, as JSON")
    return parser.parse_args()


def facts():
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu_name(driver),
        "driver": driver_version(driver),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{
            name: importlib.metadata.version(name)
            for name in ("cuckpt", "cuda-bindings", "xxhash")
        },
    }


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Run:
    """All ways for memory of one size."""

    def __init__(self, size, options, figures):
        self.size, self.options, self.figures = size, options, figures

    def parts(self, slow):
        """Yield what is to be measured; what is slow is as slow for any size."""
        few = min(2, self.options.rounds)
        yield self.bus
        yield lambda: self.images("tmpfs", self.options.memory)
        if self.options.huge:
            yield lambda: self.images("tmpfs of huge pages", self.options.huge)
        yield lambda: self.images("page cache", self.options.disk, few)
        if slow:
            yield lambda: self.images("disk", self.options.disk, few, durable=True)
            yield self.disk
            yield self.kvikio

    def line(self, what, taken, beside=None):
        """Keep and print a figure, of the seconds that each round took."""
        seconds = statistics.median(taken)
        rate = self.size / seconds / 1e9
        self.figures[what] = {"seconds": seconds, "GB/s": rate}
        if beside in self.figures:
            self.figures[what]["x"] = self.figures[beside]["seconds"] / seconds
        ratio = f"{self.figures[what].get('x', 0):8.2f} x" if beside else ""
        print(f"  {what:42}{seconds:8.3f} s{rate:8.2f} GB/s{ratio}", flush=True)

    def rounds(self, do):
        """Return the seconds of each round."""
        return [timed(do) for _ in range(self.options.rounds)]

    def driver_managed(self):
        """Measure what the driver does by itself."""
        saves, loads = [], []
        with Target({0: self.size}, timeout_s=600) as target:
            for _ in range(min(2, self.options.rounds)):
                driver.checkpoint_process_lock(target.pid)
                saves.append(timed(driver.checkpoint_process_checkpoint, target.pid))
                loads.append(timed(driver.checkpoint_process_restore, target.pid))
                driver.checkpoint_process_unlock(target.pid)
        self.line("driver's checkpoint", saves)
        self.line("driver's restore", loads)

    @contextlib.contextmanager
    def region(self):
        """Allocate memory, and fill it with what cannot be compressed."""
        pointer = int(cuda.call("cuMemAlloc", self.size))
        pattern = os.urandom(min(PATTERN_BYTES, self.size))
        for offset in range(0, self.size, len(pattern)):
            count = min(len(pattern), self.size - offset)
            cuda.call("cuMemcpyHtoD", pointer + offset, pattern, count)
        self.where = Region(pointer, self.size, 0)
        try:
            yield
        finally:
            cuda.call("cuMemFree", pointer)

    def bus(self):
        """Measure what the bus can do: one pinned buffer, copy after copy."""
        slot = cuda.Slot(min(256 << 20, self.size))

        def all_parts(copy):
            for offset in range(0, self.size, slot.view.nbytes):
                count = min(slot.view.nbytes, self.size - offset)
                copy(self.where.device_pointer + offset, count)
            slot.wait()

        self.line("bus, to host", self.rounds(lambda: all_parts(slot.fetch)))
        self.line("bus, to GPU", self.rounds(lambda: all_parts(slot.put)))
        slot.close()

    def images(self, name, folder, rounds=None, durable=False):
        """Save to a new folder and load from it, by turns with checksums or not."""
        taken = {}
        for _ in range(rounds or self.options.rounds):
            for kind in "", ", no checksums":
                copier = Copier(checksums=not kind)
                path = Path(folder, f"image-{os.getpid()}")
                for what, seconds in self.image(copier, path, durable).items():
                    taken.setdefault(f"{name}{kind}, {what}", []).append(seconds)
                shutil.rmtree(path)
        for what, seconds in taken.items():
            beside = "restore" if what.endswith("load") else "checkpoint"
            self.line(what, seconds, f"driver's {beside}")
        for what in "save", "load":
            pairs = zip(
                taken[f"{name}, {what}"],
                taken[f"{name}, no checksums, {what}"],
                strict=True,
            )
            cost = statistics.median(own / without for own, without in pairs)
            self.figures[f"{name}, {what}"]["x without checksums"] = cost
            print(f"    {what} takes {cost:.2f} times what it does without checksums")

    def image(self, copier, path, durable):
        """Make one image; return the seconds of each part."""
        start = time.perf_counter()
        with NewImage(path, durable=durable) as image:
            image.reserve(copier.file_sizes([self.size]))
            reserved = time.perf_counter()
            (content,) = copier.save([self.where], image)
            files = {stripe.file: stripe.size for stripe in content.stripes}
            image.publish(b"{}", files)
        saved = time.perf_counter()
        if durable:
            drop_cache(path)
        with OldImage(path) as image:
            image.open_all(files)
            load = timed(copier.load, [self.where], [content], image)
        return {
            "save": saved - start,
            "save, after space is reserved": saved - reserved,
            "load": load,
        }

    def disk(self):
        """Measure what the disk can do: several files, O_DIRECT, aligned memory."""
        writes, reads = [], []
        for _ in range(min(2, self.options.rounds)):
            with raw_files(self.options.disk, self.size) as work:
                writes.append(timed(work, os.pwrite))
                reads.append(timed(work, lambda f, part, at: os.preadv(f, [part], at)))
        self.line("the disk itself, write", writes)
        self.line("the disk itself, read", reads)

    def kvikio(self):
        """Measure KvikIO with one file, as its users have it."""
        try:
            import cupy
            import kvikio
            import kvikio.defaults
        except ImportError as error:
            print(f"  KvikIO: not here ({error})")
            return
        kvikio.defaults.set({"num_threads": 16})
        memory = cupy.cuda.UnownedMemory(self.where.device_pointer, self.size, self)
        start = cupy.cuda.MemoryPointer(memory, 0)
        array = cupy.ndarray(self.size, "u1", memptr=start)
        path = Path(self.options.memory, f"kvikio-{os.getpid()}")

        def move(mode):
            with kvikio.CuFile(path, mode) as file:
                (file.write if mode == "w" else file.read)(array)

        self.line("KvikIO, tmpfs, save", self.rounds(lambda: move("w")))
        self.line("KvikIO, tmpfs, load", self.rounds(lambda: move("r")))
        path.unlink()


@contextlib.contextmanager
def raw_files(folder, size):
    """Yield what moves so many bytes between memory and files, past the page cache."""
    memory = cuda.Buffer(PIECE_BYTES)
    memory.view[:] = os.urandom(PIECE_BYTES)
    paths = [Path(folder, f"raw-{os.getpid()}-{n}") for n in range(DISK_THREADS)]
    each = size // DISK_THREADS

    def move(path, do):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        for offset in range(0, each, PIECE_BYTES):
            do(file, memory.view[: min(PIECE_BYTES, each - offset)], offset)
        os.fsync(file)
        os.close(file)

    def work(do):
        threads = [threading.Thread(target=move, args=[path, do]) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    try:
        yield work
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        memory.free()


def drop_cache(folder):
    """Forget what the page cache has of the files of a folder."""
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(do, *arguments):
    start = time.perf_counter()
    do(*arguments)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
