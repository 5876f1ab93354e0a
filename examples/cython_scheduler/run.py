"""Time slicing: processes take turns on a GPU that only one may use at a time."""

import argparse
import contextlib
import time

import scheduler

from cuckpt import driver
from cuckpt.target import Target


def main():
    """Start the targets and let each have its turn in every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64, help="GPU memory of each")
    options = parser.parse_args()
    driver.init()  # without persistence mode, a restore needs it
    with contextlib.ExitStack() as stack:
        memory_bytes = {0: options.mib << 20}
        targets = [
            stack.enter_context(Target(memory_bytes)) for _ in range(options.targets)
        ]
        pids = [target.pid for target in targets]
        print(f"all suspended in {ms(scheduler.suspend, *pids):.1f} ms\n")
        print("round      pid  ms to resume  ms to suspend  content")
        for turn in range(1, options.rounds + 1):
            for target in targets:
                resume = ms(scheduler.resume, target.pid)
                target.check()
                suspend = ms(scheduler.suspend, target.pid)
                print(f"{turn:5} {target.pid:8} {resume:13.1f} {suspend:14.1f}  right")
        print(f"\nall resumed in {ms(scheduler.resume, *pids):.1f} ms")
        for target in targets:
            target.check()
    print("every content was right")


def ms(function, *pids):
    """Call a function; return how many milliseconds it took."""
    start = time.perf_counter()
    function(*pids)
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
