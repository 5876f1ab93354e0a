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


def simulated(name, sources):
    """Return one of the libraries that a simulated machine has."""
    return Extension(
        f"cuckpt.simulator.{name}",
        sources,
        include_dirs=["cuckpt/simulator/libcuda"],
        depends=glob("cuckpt/simulator/libcuda/*.h"),
        extra_compile_args=["-std=gnu11", "-fvisibility=hidden"],
        # It has threads: dlclose must not take it away.
        extra_link_args=[
            f"-Wl,-soname,{name}.so.1",
            "-Wl,-Bsymbolic",
            "-Wl,-z,nodelete",
        ],
        libraries=["pthread"],
    )


class BuildExtensions(build_ext):
    """Builds simulated libraries under the names that programs look for."""

    def get_ext_filename(self, fullname):
        """Return the file of an extension: libcuda.so.1 is no module."""
        *packages, name = fullname.split(".")
        if name.startswith("lib"):
            return path.join(*packages, f"{name}.so.1")
        return super().get_ext_filename(fullname)


setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=[
        *cythonize(
            [
                Extension(
                    f"cuckpt.{name}",
                    [f"cuckpt/{name.replace('.', '/')}.pyx"],
                    libraries=["dl"],
                )
                for name in ("_driver", "structs", "driver", "storage._lanes")
            ],
            build_dir="build",  # for the generated C
            compiler_directives=DIRECTIVES,
        ),
        simulated("libcuda", sorted(glob("cuckpt/simulator/libcuda/*.c"))),
        simulated(
            "libnvidia-ml",
            [
                "cuckpt/simulator/libcuda/machine.c",
                "cuckpt/simulator/libnvidia_ml/nvml.c",
            ],
        ),
    ],
)
