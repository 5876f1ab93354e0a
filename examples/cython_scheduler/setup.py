"""Build the scheduler: no header, no include path."""

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    name="scheduler",
    ext_modules=cythonize(
        [
            Extension(
                "scheduler",
                ["scheduler.pyx"],
                # The second: GCC warns of what Cython makes of prange.
                extra_compile_args=["-fopenmp", "-Wno-maybe-uninitialized"],
                extra_link_args=["-fopenmp"],
            )
        ],
        build_dir="build",  # for the generated C
        language_level=3,
        compiler_directives={"freethreading_compatible": True},
    ),
)
