"""cuckpt beside cuda.bindings, over a driver that does nothing.

    pip install '.[test]' && python benchmarks/compare.py

Every case is measured in this one process, the rivals in turn, many short
rounds each; the figure is the best round. Times say little on another machine:
compare the ratios. Needs a C and a C++ compiler.
"""

import argparse
import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

HERE = Path(__file__).parent
UUIDS = bytes(range(16)), bytes(range(16, 32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds a case")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        library = build_null_driver(Path(folder))
        os.environ["CUCKPT_LIBCUDA"] = str(library)
        report("import, ms", "v2", import_times(), 0.12)
        for name, limit, rivals in python_cases(library):
            report(name + ", ns", "v2", python_times(rivals, rounds), limit)
        times = cython_times(Path(folder), library, rounds)
        report("call from Cython, ns", "cydriver", times, 0.6)
        above = times["cuckpt"] - times["pointer"]
        print(f"call from Cython above a C function pointer: {above:.2f} ns")


def python_cases(library):
    """Yield name, limit of the ratio to v2 or None, and the rivals' code."""
    import cuda.bindings._v2.driver as v2
    import cuda.bindings.driver as v1

    from cuckpt import driver

    assert driver.library_path() == str(library)
    driver.init(0)
    v2.init(0)  # finds the library that is loaded already
    scope = {"cuckpt": driver, "v2": v2, "v1": v1}

    def rivals(statement, setup="pass", v1_statement=None, v1_setup="pass"):
        made = {
            name: timeit.Timer(
                statement.replace("DRIVER", name),
                setup.replace("DRIVER", name),
                globals=scope,
            )
            for name in ("cuckpt", "v2")
        }
        if v1_statement:
            made["v1"] = timeit.Timer(v1_statement, v1_setup, globals=scope)
        return made

    for call in ("lock", "checkpoint", "restore", "unlock"):
        title = call.capitalize()
        function = f"f = DRIVER.checkpoint_process_{call}"
        v1_function = f"f = v1.cuCheckpointProcess{title}"
        yield (
            f"{call}(pid, None)",
            0.95,
            rivals("f(1, None)", function, "f(1, None)", v1_function),
        )
        yield (
            f"{call}(pid, args)",
            0.85,
            rivals(
                "f(1, args)",
                f"{function}; args = DRIVER.Checkpoint{title}Args()",
                "f(1, args)",
                f"{v1_function}; args = v1.CUcheckpoint{title}Args()",
            ),
        )
        yield (
            f"Checkpoint{title}Args()",
            0.85,
            rivals(
                "A()",
                f"A = DRIVER.Checkpoint{title}Args",
                "A()",
                f"A = v1.CUcheckpoint{title}Args",
            ),
        )
    yield (
        "get_state(pid)",
        0.95,
        rivals(
            "f(1)",
            "f = DRIVER.checkpoint_process_get_state",
            "f(1)",
            "f = v1.cuCheckpointProcessGetState",
        ),
    )
    yield (
        "get_restore_thread_id(pid)",
        0.95,
        rivals("f(1)", "f = DRIVER.checkpoint_process_get_restore_thread_id"),
    )
    yield (
        "CheckpointGpuPair()",
        0.80,
        rivals(
            "P()", "P = DRIVER.CheckpointGpuPair", "P()", "P = v1.CUcheckpointGpuPair"
        ),
    )
    scope["old"], scope["new"] = UUIDS
    yield (
        "a pair of two UUIDs",
        0.80,
        {
            "cuckpt": timeit.Timer(
                "P(old, new)", "P = cuckpt.CheckpointGpuPair", globals=scope
            ),
            "v2": timeit.Timer(
                "p = P(); p.old_uuid.bytes = old; p.new_uuid.bytes = new",
                "P = v2.CheckpointGpuPair",
                globals=scope,
            ),
        },
    )
    yield "raise and catch", 1.0, failing_calls(library, scope)


def failing_calls(library, scope):
    """Return timers of a call that the driver answers with an error."""
    null_driver = ctypes.CDLL(str(library))
    hook = ctypes.c_void_p.in_dll(null_driver, "null_driver_hook")
    failing = ctypes.cast(null_driver.null_driver_fails, ctypes.c_void_p)
    statement = "try: f(1)\nexcept E: pass"
    setup = (
        "f = DRIVER.checkpoint_process_get_state; E = DRIVER.OperatingSystemError; "
        "hook.value = failing.value"
    )
    scope |= {"hook": hook, "failing": failing}
    return {
        name: timeit.Timer(statement, setup.replace("DRIVER", name), globals=scope)
        for name in ("cuckpt", "v2")
    }


def python_times(rivals, rounds):
    loops = max(1, int(0.002 / (min(rivals["v2"].repeat(3, 1000)) / 1000)))
    best = dict.fromkeys(rivals, float("inf"))
    for _ in range(rounds):
        for name, timer in rivals.items():
            best[name] = min(best[name], timer.timeit(loops) / loops * 1e9)
    return best


def import_times(rounds=7):
    modules = {
        "cuckpt": "cuckpt.driver",
        "v2": "cuda.bindings._v2.driver",
        "v1": "cuda.bindings.driver",
    }
    best = dict.fromkeys(modules, float("inf"))
    for _ in range(rounds):
        for name, module in modules.items():
            code = (
                "import time; t = time.perf_counter(); "
                f"import {module}; print((time.perf_counter() - t) * 1e3)"
            )
            out = subprocess.check_output([sys.executable, "-P", "-c", code])
            best[name] = min(best[name], float(out))
    return best


def cython_times(folder, library, rounds):
    module = build_cython_calls(folder)
    ways = {
        "cuckpt": module.cuckpt_ns,
        "cydriver": module.cydriver_ns,
        "pointer": lambda loops: module.pointer_ns(os.fsencode(library), loops),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            best[name] = min(best[name], way(200_000))
    return best


def build_null_driver(folder):
    library = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", library, HERE / "null_driver.c"]
    subprocess.check_call(command)
    return library


def build_cython_calls(folder):
    """Compile cython_calls.pyx against the cuda.h of nvidia-cuda-runtime."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    header = importlib.util.find_spec("nvidia.cu13").submodule_search_locations
    extension = Extension(
        "cython_calls",
        [str(HERE / "cython_calls.pyx")],
        include_dirs=[f"{header[0]}/include"],
    )
    modules = cythonize(
        [extension], build_dir=str(folder), language_level=3, quiet=True
    )
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    spec = importlib.util.spec_from_file_location(
        "cython_calls", next(folder.glob("cython_calls*.so"))
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(name, base, times, limit):
    figures = "  ".join(f"{rival} {time:8.2f}" for rival, time in times.items())
    ratio = times["cuckpt"] / times[base]
    verdict = "" if limit is None else f" (at most {limit:.2f})"
    print(f"{name:34} {figures}   {ratio:.2f} x {base}{verdict}", flush=True)


if __name__ == "__main__":
    main()
