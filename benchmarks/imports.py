"""Importing in a fresh process: how long it takes, how much memory it costs."""

import subprocess
import sys

from case import Case

_MODULES = {
    "cuckpt": "cuckpt.driver",
    "v2": "cuda.bindings._v2.driver",
    "v1": "cuda.bindings.driver",
    "ctypes": "ctypes",
}
_TIME = """
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""
_MEMORY = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
import os
page = os.sysconf("SC_PAGE_SIZE")
resident()
before = resident()
import {module}
print((resident() - before) * page)
"""


def cases(context):
    """Yield time and memory."""
    once = {"loops": 1, "chart": True}
    yield Case("Import", "import", _rivals(_TIME), {"v2": 0.10}, rounds=7, **once)
    memory = _rivals(_MEMORY)
    yield Case("Import", "its memory", memory, unit="byte", rounds=3, **once)


def _rivals(program):
    return {
        name: _fresh(program.format(module=module)) for name, module in _MODULES.items()
    }


def _fresh(program):
    def run(loops):
        command = [sys.executable, "-P", "-c", program]
        return sum(float(subprocess.check_output(command)) for _ in range(loops))

    return run
