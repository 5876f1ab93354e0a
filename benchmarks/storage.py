"""Images: GPU memory to files and back, beside the driver's own way and the limits.

    python benchmarks/storage.py --gib 8 --memory /dev/shm --disk /var/tmp

Ordinary allocations are copied, so any driver will do. With each figure comes its
ratio to the driver's own checkpoint or restore of a process of that size, all in one
run. KvikIO is measured as well where it is installed.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

from cuckpt import driver
from cuckpt.storage import cuda
from cuckpt.storage.copier import CHUNK_BYTES, Copier, Region
from cuckpt.storage.folder import NewImage, OldImage
from cuckpt.target import Target

GIB = 1 << 30
PATTERN_BYTES = 64 << 20


def main():
    """Print a line for each figure."""
    options = parsed()
    driver.init()
    cuda.enter(0)
    figures = {}
    for gib in options.gib:
        size = int(gib * GIB)
        run = Run(size, options, figures.setdefault(f"{gib:g} GiB", {}))
        print(f"{gib:g} GiB, {run.copier.workers} workers, {options.chunk_mib} MiB")
        if not options.only_images:
            run.driver_managed()
        with run.region():
            run.bus()
            for name, folder, durable in places(options):
                run.images(name, folder, durable)
            if not options.only_images:
                run.disk()
                run.kvikio()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"peak of host memory: {peak:.2f} GiB")
    figures["host memory"] = {"peak GiB": peak}
    if options.output:
        Path(options.output).write_text(json.dumps(figures, indent=1) + "\n")


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[8.0])
    parser.add_argument("--memory", default="/dev/shm", help="a folder in a tmpfs")
    parser.add_argument("--disk", default="/var/tmp", help="a folder on a disk")
    parser.add_argument("--rounds", type=int, default=3, help="median of so many")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--chunk-mib", type=int, default=CHUNK_BYTES >> 20)
    parser.add_argument("--only-images", action="store_true")
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--output", help="a file for the figures, as JSON")
    return parser.parse_args()


def places(options):
    yield "tmpfs", options.memory, False
    yield "page cache", options.disk, False
    if not options.no_disk:
        yield "disk", options.disk, True


class Run:
    """All ways for memory of one size."""

    def __init__(self, size, options, figures):
        self.size, self.options, self.figures = size, options, figures
        self.copier = Copier(options.chunk_mib << 20, options.workers)
        self.plain = Copier(options.chunk_mib << 20, options.workers, checksums=False)

    def line(self, what, seconds, beside=None):
        rate = self.size / seconds / 1e9
        self.figures[what] = rate
        ratio = (
            f"  {rate / self.figures[beside]:5.2f} x" if beside in self.figures else ""
        )
        print(f"{what:44}{seconds:8.3f} s{rate:8.2f} GB/s{ratio}", flush=True)

    def driver_managed(self):
        """Measure what the driver does by itself."""
        with Target({0: self.size}, timeout_s=600) as target:
            pid = target.pid
            saves, loads = [], []
            for _ in range(self.options.rounds):
                driver.checkpoint_process_lock(pid)
                saves.append(timed(lambda: driver.checkpoint_process_checkpoint(pid)))
                loads.append(timed(lambda: driver.checkpoint_process_restore(pid)))
                driver.checkpoint_process_unlock(pid)
        self.line("driver's checkpoint", statistics.median(saves))
        self.line("driver's restore", statistics.median(loads))

    @contextlib.contextmanager
    def region(self):
        """Allocate memory, and fill it with what no one can compress."""
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
        """Measure what the bus can do: one pinned buffer, one copy after the other."""
        slot = cuda.Slot(min(256 << 20, self.size))
        parts = range(0, self.size, slot.view.nbytes)
        for name, copy in ("to host", slot.fetch), ("to GPU", slot.put):

            def all_parts(copy=copy):
                for offset in parts:
                    count = min(slot.view.nbytes, self.size - offset)
                    copy(self.where.device_pointer + offset, count)
                slot.wait()

            self.line(f"bus, {name}", self.median(all_parts))
        slot.close()

    def images(self, name, folder, durable):
        """Save to a new folder, load from it."""
        for copier, with_checksums in (self.plain, ""), (self.copier, ", checksums"):
            saves, loads = [], []
            for _ in range(self.options.rounds):
                path = Path(folder, f"image-{os.getpid()}")
                with NewImage(path, durable=durable) as image:
                    start = time.perf_counter()
                    image.reserve(copier.file_sizes([self.size]))
                    reserved = time.perf_counter() - start
                    (content,) = copier.save([self.where], image)
                    files = {stripe.file: stripe.size for stripe in content.stripes}
                    image.publish(b"{}", files)
                    saves.append(time.perf_counter() - start)
                if durable:
                    os.sync()
                    drop_cache(path)
                with OldImage(path) as image:
                    image.open_all(files)
                    loads.append(
                        timed(lambda: copier.load([self.where], [content], image))
                    )
                shutil.rmtree(path)
            self.line(
                f"{name}{with_checksums}, save",
                statistics.median(saves),
                "driver's checkpoint",
            )
            print(f"    of which to reserve space {reserved:8.3f} s")
            self.line(
                f"{name}{with_checksums}, load",
                statistics.median(loads),
                "driver's restore",
            )

    def disk(self):
        """Measure what the disk can do: several files, O_DIRECT, aligned memory."""
        if self.options.no_disk:
            return
        for threads in 8, 16:
            writes, reads = [], []
            for _ in range(self.options.rounds):
                write, read = raw_disk(self.options.disk, self.size, threads)
                writes.append(write)
                reads.append(read)
            self.line(f"O_DIRECT by {threads} threads, write", min(writes))
            self.line(f"O_DIRECT by {threads} threads, read", min(reads))

    def kvikio(self):
        """Measure KvikIO, one file, as its users have it."""
        try:
            import cupy
            import kvikio
            import kvikio.defaults
        except ImportError as error:
            print(f"KvikIO: not here ({error})")
            return
        memory = cupy.cuda.UnownedMemory(self.where.device_pointer, self.size, self)
        array = cupy.ndarray(self.size, "u1", memptr=cupy.cuda.MemoryPointer(memory, 0))
        kvikio.defaults.set({"num_threads": 16})
        for name, folder in ("tmpfs", self.options.memory), ("disk", self.options.disk):
            path = Path(folder, f"kvikio-{os.getpid()}")

            def write(path=path):
                with kvikio.CuFile(path, "w") as file:
                    file.write(array)
                    if name == "disk":
                        os.sync()

            def read(path=path):
                with kvikio.CuFile(path, "r") as file:
                    file.read(array)

            with contextlib.suppress(OSError):
                self.line(f"KvikIO, {name}, save", self.median(write))
                self.line(f"KvikIO, {name}, load", self.median(read))
            path.unlink(missing_ok=True)

    def median(self, do):
        return statistics.median(timed(do) for _ in range(self.options.rounds))


def raw_disk(folder, size, threads):
    """Write and read files without the page cache; return the seconds of both."""
    piece = 8 << 20
    each = size // threads // piece * piece
    memory = cuda.Buffer(piece)
    memory.view[:] = os.urandom(piece)
    paths = [Path(folder, f"raw-{os.getpid()}-{n}") for n in range(threads)]
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT

    def in_all(do):
        def work(path):
            file = os.open(path, flags, 0o600)
            for offset in range(0, each, piece):
                do(file, offset)
            os.fsync(file)
            os.close(file)

        workers = [threading.Thread(target=work, args=[path]) for path in paths]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    write = timed(lambda: in_all(lambda f, at: os.pwrite(f, memory.view, at)))
    read = timed(lambda: in_all(lambda f, at: os.preadv(f, [memory.view], at)))
    for path in paths:
        path.unlink()
    memory.free()
    scale = size / (each * threads)
    return write * scale, read * scale


def drop_cache(folder):
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(do):
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
