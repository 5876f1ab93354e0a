"""Jobs of many processes: how they are found, and suspended at once.

    cuckpt simulate -- python benchmarks/jobs.py

A simulated machine is enough, since what is measured is what comes on top of the
driver. On a GPU, without ``cuckpt simulate``, the first part is left out, which needs
the delays of a simulated machine.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time

from cuckpt import driver
from cuckpt.group import ProcessGroup
from cuckpt.simulator import LIBRARY, Fault, Machine
from cuckpt.target import Target

DELAY_S = 0.1
TREE = 300
WITH_CUDA = 3
SIZES = 1, 2, 4


def main():
    """Print a line for each figure; a promise beside it fails nothing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="median of so many")
    parser.add_argument(
        "--mib", type=int, default=1, help="GPU memory of each target of a group"
    )
    options = parser.parse_args()
    if driver.library_path() == str(LIBRARY):
        at_once(options.rounds)
    discovery(options.rounds)
    beside_single_calls(options.rounds, options.mib)


def at_once(rounds):
    """Compare eight with one, whose checkpoints all take a tenth of a second more."""
    with delayed_machine(rounds) as machine:
        taken = {}
        for count in (1, 8):
            pids = [machine.spawn({0: 1 << 16}).pid for _ in range(count)]
            taken[count] = median(rounds, lambda pids=pids: suspension(pids))
    line("suspend 1, its checkpoint takes 0.1 s more", taken[1] * 1e3, "ms")
    line("suspend 8, each as that one", taken[8] * 1e3, "ms")
    line("  ratio", taken[8] / taken[1], "x", promise=1.3)


def discovery(rounds):
    """Find a few among many, beside a loop that only reads about the same."""
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(Target()) for _ in range(WITH_CUDA)]
        others = [sleeper(stack) for _ in range(TREE - WITH_CUDA)]
        pids = [target.pid for target in targets] + others
        finds = {
            "from_pids": lambda: ProcessGroup.from_pids(pids),
            "from_tree": lambda: ProcessGroup.from_tree(os.getpid()),
        }
        for name, find in finds.items():
            assert find().pids == pids[:WITH_CUDA]
            differences, reading, asking = [], [], []
            for _ in range(max(rounds, 5)):
                reading.append(timed(lambda: read_stats(set(pids))))
                asking.append(timed(lambda: ask(pids)))
                differences.append(timed(find) - reading[-1])
            beyond = statistics.median(differences) / TREE
            line(f"{name}, {WITH_CUDA} of {TREE}", beyond * 1e6, "us each", promise=40)
        line("  on top of reading", statistics.median(reading) / TREE * 1e6, "us each")
        line("  of which get_state", statistics.median(asking) / TREE * 1e6, "us each")


def beside_single_calls(rounds, mib):
    """Compare a group with the same calls, one after the other, by the driver."""
    for count in SIZES:
        with contextlib.ExitStack() as stack:
            size = {0: mib << 20}
            pids = [stack.enter_context(Target(size)).pid for _ in range(count)]
            group = ProcessGroup.from_pids(pids)
            by_group = median(rounds, lambda group=group: timed(lambda: cycle(group)))
            by_calls = median(rounds, lambda pids=pids: timed(lambda: calls(pids)))
        line(f"suspend and resume {count}, group", by_group * 1e3, "ms")
        line("  single calls", by_calls * 1e3, "ms")


@contextlib.contextmanager
def delayed_machine(rounds):
    with Machine(memory_bytes=1 << 30) as machine:
        many = 9 * (rounds + 1)
        machine.inject(Fault("checkpoint", delay_s=DELAY_S, count=many))
        yield machine


def suspension(pids):
    group = ProcessGroup.from_pids(pids)
    taken = timed(group.suspend)
    group.resume()
    return taken


def cycle(group):
    group.suspend()
    group.resume()


def calls(pids):
    for call in "lock", "checkpoint", "restore", "unlock":
        for pid in pids:
            getattr(driver, f"checkpoint_process_{call}")(pid)


def sleeper(stack):
    process = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
    stack.callback(process.kill)
    return process.pid


def read_stats(pids):
    """Do what nobody can do without who looks for processes: list and read."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) in pids:
            with open(f"/proc/{name}/stat") as file:
                file.read()


def ask(pids):
    for pid in pids:
        with contextlib.suppress(driver.NotInitializedError):
            driver.checkpoint_process_get_state(pid)


def timed(do):
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def median(rounds, measured):
    measured()  # the first is slower: host memory and threads are new
    return statistics.median(measured() for _ in range(rounds))


def line(what, figure, unit, promise=None):
    promised = "" if promise is None else f"  promised: at most {promise:g}"
    print(f"{what:46}{figure:9.3g} {unit}{promised}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
