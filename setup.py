"""The extension modules; everything else stands in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

DIRECTIVES = {
    "language_level": 3,
    "binding": False,  # a bound function costs 0.08 of a call
    "embedsignature": True,
    "embedsignature.format": "clinic",  # for inspect.signature
    "annotation_typing": False,
}

setup(
    ext_modules=cythonize(
        [
            Extension(f"cuckpt.{name}", [f"cuckpt/{name}.pyx"], libraries=["dl"])
            for name in ("_driver", "structs", "driver")
        ],
        build_dir="build",  # for the generated C
        compiler_directives=DIRECTIVES,
    ),
)
