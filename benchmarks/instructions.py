"""Guard the hot calls against getting slower: by instructions, not by time.

    pip install '.[bench]' && python benchmarks/instructions.py

Counts under callgrind (valgrind) the instructions of each call, of cuckpt's and of
cuda.bindings' in the same process, and fails if cuckpt's are too many beside the
other's. Nothing is compared with an earlier run, and no clock is read, so a busy
machine changes nothing.
"""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for python -P as well

import calls
import context
import raising
import structs
from native import build

LOOPS = 500
TOLERANCE = 0.03
# The most instructions that cuckpt may need, as a ratio to v2's: the highest that
# was seen on Python 3.11 to 3.13; the tolerance comes on top.
LIMITS = {
    "get_state(1)": 0.89,
    "get_restore_thread_id(1)": 0.89,
    "lock(1, None)": 0.90,
    "checkpoint(1, None)": 0.90,
    "restore(1, None)": 0.90,
    "unlock(1, None)": 0.90,
    "lock(1, args)": 0.70,
    "checkpoint(1, args)": 0.72,
    "restore(1, args)": 0.73,
    "unlock(1, args)": 0.70,
    "operation_complete(1)": 0.95,
    "CheckpointLockArgs()": 0.67,
    "CheckpointCheckpointArgs()": 0.65,
    "CheckpointRestoreArgs()": 0.67,
    "CheckpointUnlockArgs()": 0.58,
    "CheckpointGpuPair()": 0.67,
    "Uuid()": 0.43,
    "a pair of two UUIDs": 0.11,
    "restore args with a pair": 1.51,  # v2's neither copy nor keep the pair
    "from_ptr, a copy": 0.89,
    "from_buffer": 0.80,
    "raise and catch": 0.73,
}


def main():
    """Count; print a line for each call; return how many are beyond their limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        execute_all(options.worker)
        return 0
    if not shutil.which("valgrind"):
        sys.exit("valgrind is needed: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        counts = count_all(Path(folder))
    return sum([is_beyond(name, counts) for name in LIMITS])


def count_all(folder):
    """Return the instructions of one execution, by case and rival."""
    context.compile_all(folder)
    build.marks(folder)
    command = ["valgrind", "-q", "--tool=callgrind", "--cache-sim=no"]
    command += [f"--callgrind-out-file={folder}/counted"]
    command += [sys.executable, "-P", __file__, "--worker", folder]
    subprocess.check_call(command, env={**os.environ, "PYTHONHASHSEED": "0"})
    found = {}
    for file in folder.glob("counted.*"):
        text = file.read_text(errors="replace")
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
        if name:
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
            found[tuple(name[1].split("|"))] = int(total[1]) / LOOPS
    return found


def execute_all(folder):
    """Execute each rival of each case, between marks; in the counted process."""
    place = context.Context(folder)
    marks = ctypes.CDLL(str(folder / "marks.so"))
    cases = {
        case.name: case
        for module in (calls, structs, raising)
        for case in module.cases(place)
        if case.name in LIMITS
    }
    if missing := LIMITS.keys() - cases.keys():
        sys.exit(f"no such case: {', '.join(missing)}")
    marks.mark_begin()
    marks.mark_end(b"nothing|nobody")  # the first count holds what was before
    for case in cases.values():
        for rival in "cuckpt", "v2", "C":
            if rival in case.rivals:
                execute = case.rivals[rival]
                name = f"{case.name}|{rival}".encode()
                execute(LOOPS)  # what is done once has been done
                marks.mark_begin()
                execute(LOOPS)
                marks.mark_end(name)


def is_beyond(name, counts):
    """Print the counts of a case; tell whether cuckpt needs too many."""
    own, other = counts[name, "cuckpt"], counts[name, "v2"]
    ratio, limit = own / other, LIMITS[name]
    beyond = ratio > limit + TOLERANCE
    floor = counts.get((name, "C"))
    beside = f", C {floor:.0f}" if floor else ""
    print(f"{name:28} cuckpt {own:6.0f}, v2 {other:6.0f}{beside}; x v2 {ratio:.3f}")
    if beyond:
        print(
            f"    TOO MANY: at most {limit:.2f} x v2, with a tolerance of {TOLERANCE}. "
            f"A change has made this slower, or the limit in {Path(__file__).name} "
            "is out of date: look with callgrind_annotate, or `cython -a`."
        )
    return beyond


if __name__ == "__main__":
    sys.exit(main())
