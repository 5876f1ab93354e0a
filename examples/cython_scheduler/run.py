"""Time slicing: processes take turns on a GPU that only one may use at a time."""

import argparse
import contextlib
import subprocess
import sys
import time

import scheduler

from cuckpt import driver


def main():
    """Start the targets and let each have its turn in every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64, help="GPU memory of each")
    options = parser.parse_args()
    driver.init()  # without persistence mode, a restore needs it
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(started()) for _ in range(options.targets)]
        pids = [target.pid for target in targets]
        contents = [fill(target, options.mib) for target in targets]
        print(f"all suspended in {ms(scheduler.suspend, *pids):.1f} ms\n")
        print("round      pid  ms to resume  ms to suspend  content")
        for turn in range(1, options.rounds + 1):
            for target, content in zip(targets, contents, strict=True):
                resume = ms(scheduler.resume, target.pid)
                check(target, content)
                suspend = ms(scheduler.suspend, target.pid)
                print(f"{turn:5} {target.pid:8} {resume:13.1f} {suspend:14.1f}  right")
        print(f"\nall resumed in {ms(scheduler.resume, *pids):.1f} ms")
        for target, content in zip(targets, contents, strict=True):
            check(target, content)
    print("every content was right")


@contextlib.contextmanager
def started():
    """Start a target; end it in any case, which a suspended one cannot by itself."""
    command = [sys.executable, "-P", "-m", "cuckpt.target"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as target:
        try:
            yield target
        finally:
            target.kill()


def ask(target, command):
    """Let a target obey a command; return its answer."""
    target.stdin.write(command + "\n")
    answer = target.stdout.readline()
    if not answer:
        sys.exit(f"target {target.pid} ended at the command {command!r}")
    return answer


def fill(target, mib):
    """Let a target fill GPU memory; return the address and a digest."""
    ask(target, "start")
    return ask(target, f"fill {mib << 20}")


def check(target, content):
    """End with an error if a target's GPU memory is not as it was filled."""
    if ask(target, "check") != content:
        sys.exit(f"the GPU memory of target {target.pid} has changed")


def ms(function, *pids):
    """Call a function; return how many milliseconds it took."""
    start = time.perf_counter()
    function(*pids)
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
