"""A package that cimports cuckpt, as a user's: no header, no include path."""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

language = os.environ["CONSUMER_LANGUAGE"]

setup(
    name="consumer",
    ext_modules=cythonize(
        [Extension("consumer", ["consumer.pyx"], language=language)],
        language_level=3,
        compiler_directives={"freethreading_compatible": True},
    ),
)
