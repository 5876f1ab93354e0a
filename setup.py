"""The extension modules and the simulated driver; the rest is in pyproject.toml."""

from glob import glob
from os import path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DIRECTIVES = {
    "language_level": 3,
    "binding": False,  # a bound function costs 0.08 of a call
    "embedsignature": True,
    "embedsignature.format": "clinic",  # for inspect.signature
    "annotation_typing": False,
    "freethreading_compatible": True,  # see "Threads" in CONTRIBUTING.md
}

SIMULATOR = Extension(
    "cuckpt.simulator.libcuda",
    sorted(glob("cuckpt/simulator/libcuda/*.c")),
    depends=glob("cuckpt/simulator/libcuda/*.h"),
    extra_compile_args=["-std=gnu11", "-fvisibility=hidden"],
    extra_link_args=["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"],
    libraries=["pthread"],
)


class BuildExtensions(build_ext):
    """Builds the simulated driver under the name that programs look for."""

    def get_ext_filename(self, fullname):
        """Return the file of an extension: libcuda.so.1 is no module."""
        if fullname.rpartition(".")[2] == "libcuda":
            return path.join(*fullname.split(".")[:-1], "libcuda.so.1")
        return super().get_ext_filename(fullname)


setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=[
        *cythonize(
            [
                Extension(
                    f"cuckpt.{name}",
                    [f"cuckpt/{name}.pyx"],
                    libraries=["dl"],
                )
                for name in ("_driver", "structs", "driver")
            ],
            build_dir="build",  # for the generated C
            compiler_directives=DIRECTIVES,
        ),
        SIMULATOR,
    ],
)
