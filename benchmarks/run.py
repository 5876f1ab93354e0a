"""Measure cuckpt beside cuda.bindings, ctypes and C.

    pip install '.[bench]' && python benchmarks/run.py --quick

Writes NAME.json.gz (for pyperf as well), NAME.md and NAME.svg. Times say little
about another machine: compare the ratios, which come from rivals measured in turn
in one process, and do not trust even those while the machine has other work.
Without --gpu all rivals run over a driver that does nothing.
"""

import argparse
import fnmatch
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for python -P as well

import calls
import context
import from_cython
import gpu
import imports
import pyperf
import raising
import report
import structs
import threads
from case import measure

# A new benchmark: yield one more Case in one of these, or add a module here.
OVER_NULL_DRIVER = [calls, structs, raising, from_cython, imports, threads]
ON_A_GPU = [gpu]


def main():
    """Measure, print the table, write the files."""
    options = parse()
    if options.worker:
        worker(options)
        return
    drawn = Path(f"{options.output}.svg")
    if not drawn.parent.is_dir():
        sys.exit(f"--output: there is no folder {drawn.parent}")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        (gpu if options.gpu else context).compile_all(options.folder)
        suite = in_processes(options)
    file = Path(f"{options.output}.json.gz")
    suite.dump(str(file), replace=True)
    Path(f"{options.output}.md").write_text(report.markdown({drawn.name: suite}))
    print(report.text(suite))
    report.chart(suite, drawn)
    print(f"\nWritten: {options.output}.json.gz, .md and .svg")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="15 seconds, for a look; else 4 minutes"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="measure the real driver: needs a GPU"
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="cases whose whole name matches, as 'restore*'; ? shows all names",
    )
    parser.add_argument(
        "--output", default="benchmark", metavar="NAME", help="default: benchmark"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_processes(options):
    """Run the workers, one after the other; return all that they measured."""
    processes = 1 if options.quick or options.gpu else 6
    suite = None
    for number in range(processes):
        progress(f"process {number + 1} of {processes}")
        output = options.folder / f"{number}.json"
        command = [sys.executable, "-P", __file__, "--worker", "--only", options.only]
        command += ["--folder", options.folder, "--output", output]
        command += ["--quick"] * options.quick + ["--gpu"] * options.gpu
        if subprocess.run(command).returncode:
            sys.exit(1)  # it has said why
        part = pyperf.BenchmarkSuite.load(str(output))
        if suite is None:
            suite = part
        else:
            suite.add_runs(part)
    return suite


def progress(what):
    """Tell what is done now, on a line of its own that the next one replaces."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{what:60}", end=end, file=sys.stderr, flush=True)


def worker(options):
    """Measure everything once, in this process."""
    if options.gpu:
        place = gpu.Context(options.folder, options.quick)
    else:
        place = context.Context(options.folder)
    rounds, round_s = (9, 0.002) if options.quick else (20, 0.005)
    benchmarks, names = [], []
    facts = machine() | place.facts
    for module in ON_A_GPU if options.gpu else OVER_NULL_DRIVER:
        for case in module.cases(place):
            names.append(case.name)
            if fnmatch.fnmatch(case.name, options.only):
                progress(f"  {case.name}")
                benchmarks += measured(case, rounds, round_s, facts)
    if not benchmarks:
        sys.exit("\n".join([f"no case matches {options.only!r}; there are", *names]))
    pyperf.BenchmarkSuite(benchmarks).dump(str(options.output), replace=True)


def machine():
    """Return what a reader must know of where this was measured."""
    found = pyperf.Run([1.0], collect_metadata=True).get_metadata()
    names = "date", "platform", "cpu_model_name", "cpu_count", "python_version"
    facts = {name: found[name] for name in names if name in found}
    for package in "cuckpt", "cuda-bindings", "cython":
        facts[package] = importlib.metadata.version(package)
    return facts


def measured(case, rounds, round_s, facts):
    """Measure a case; return a pyperf.Benchmark for each rival."""
    loops, values = measure(case, rounds, round_s)
    for rival, taken in values.items():
        about = {
            "name": f"{case.group}: {case.name}: {rival}",
            "group": case.group,
            "case": case.name,
            "rival": rival,
            "unit": case.unit,
            "loops": loops[rival],
            "chart": int(case.chart),
        }
        if rival in case.limits:
            about["limit"] = case.limits[rival]
        taken = [float(f"{value:.5g}") for value in taken]  # more is noise
        run = pyperf.Run(taken, metadata=facts | about, collect_metadata=False)
        yield pyperf.Benchmark([run])


if __name__ == "__main__":
    main()
