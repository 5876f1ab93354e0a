"""The command line: how fast an answer comes, and how fast many are listed.

    cuckpt simulate -- python benchmarks/cli.py

A simulated machine is enough, since what is measured is what comes on top of the
driver.
"""

import contextlib
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from cuckpt.target import Target

CUCKPT = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
ROUNDS = 15
MANY = 300
WITH_CUDA = 3


def main():
    """Print a line for each figure; a promise beside it fails nothing."""
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(Target()) for _ in range(WITH_CUDA)]
        answers(targets[0].pid, stack.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(MANY - WITH_CUDA):
            sleeper = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
            stack.callback(sleeper.kill)
        listed = median([CUCKPT, "ps"], rounds=5)
        line(f"ps, {WITH_CUDA} of {MANY} processes", listed, "s", promise=1.0)


def answers(pid, folder):
    """Compare the answer about a state with the import that others begin with."""
    subprocess.run([CUCKPT, "install-shim", folder], check=True, capture_output=True)
    question = ["--get-state", "--pid", str(pid)]
    by_cuckpt = [CUCKPT, *question]
    by_shim = [f"{folder}/cuda-checkpoint", *question]
    imported = median([sys.executable, "-c", "import argparse"])
    line('python -c "import argparse"', imported * 1e3, "ms")
    for name, command in ("cuckpt", by_cuckpt), ("cuda-checkpoint", by_shim):
        taken = median(command)
        line(f"{name} --get-state", taken * 1e3, "ms")
        line("  ratio", taken / imported, "x", promise=1.5)


def median(command, rounds=ROUNDS):
    return statistics.median(timed(command) for _ in range(rounds))


def timed(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def line(what, figure, unit, promise=None):
    promised = "" if promise is None else f"  promised: at most {promise:g}"
    print(f"{what:46}{figure:9.3g} {unit}{promised}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
