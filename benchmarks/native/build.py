"""Compiles what the benchmarks need, into a folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Distribution, Extension

HERE = Path(__file__).parent


def null_driver(folder):
    """Return the path of the driver that does nothing."""
    path = folder / "libcuda.so.1"
    _compile(HERE / "null_driver.c", path, "-shared", "-Wl,-soname,libcuda.so.1")
    return path


def marks(folder):
    """Return the path of the library that tells callgrind where a part begins."""
    path = folder / "marks.so"
    _compile(HERE / "marks.c", path, "-shared")
    return path


def one_call(folder):
    """Return the path of the program that makes one checkpoint call."""
    path = folder / "one_call"
    _compile(HERE / "one_call.c", path)
    return path


def floor(folder):
    """Return the path of the hand-written extension."""
    return _build(folder, Extension("floor", [str(HERE / "floor.c")]))


def cython_calls(folder):
    """Return the path of the Cython module, built with NVIDIA's cuda.h."""
    nvidia = importlib.util.find_spec("nvidia.cu13").submodule_search_locations
    extension = Extension(
        "cython_calls",
        [str(HERE / "cython_calls.pyx")],
        include_dirs=[f"{folder}/include" for folder in nvidia],
    )
    options = {"language_level": 3, "quiet": True, "build_dir": str(folder)}
    return _build(folder, *cythonize([extension], **options))


def load(path):
    """Import an extension module from its file."""
    name = path.name.partition(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _compile(source, target, *flags):
    compiler = os.environ.get("CC", "cc")
    options = ["-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", target, source]
    subprocess.check_call([compiler, *flags, *options, "-ldl"])


def _build(folder, extension):
    command = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    (path,) = folder.glob(f"{extension.name}.*.so")
    return path
