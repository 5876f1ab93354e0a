"""What the benchmarks run on: the rivals, each over the driver that does nothing."""

import contextlib
import ctypes
import os

from native import build


class Context:
    """The rivals in this process.

    ``cuckpt``, ``v2``, ``v1``, ``ctypes`` and ``C`` are what the code of a rival
    may name: the module to call as ``DRIVER``, and what its calls need.

    Parameters
    ----------
    folder : Path
        Where `compile_all` put what is compiled.
    """

    def __init__(self, folder):
        self.library = folder / "libcuda.so.1"
        os.environ["CUCKPT_LIBCUDA"] = str(self.library)
        # cuda.bindings finds by its name the library that is loaded already.
        import cuda.bindings._v2.driver as v2
        import cuda.bindings.driver as v1

        from cuckpt import driver

        assert driver.library_path() == str(self.library)
        (floor,) = folder.glob("floor.*.so")
        floor = build.load(floor)
        floor.load(str(self.library), tuple(driver.ProcessState))
        (calls,) = folder.glob("cython_calls.*.so")
        self.cython_calls = build.load(calls)
        self._null_driver = ctypes.CDLL(str(self.library))
        self.cuckpt = {"DRIVER": driver}
        self.v2 = {"DRIVER": v2}
        self.C = {"DRIVER": floor}
        v1.cuInit(0)
        self.v1 = {"DRIVER": v1, "device": v1.cuDeviceGet(0)[1]}
        self.ctypes = _scope_of_ctypes(self._null_driver)
        self.facts = {"driver": "one that does nothing"}

    @contextlib.contextmanager
    def hook(self, name):
        """Let the driver answer by one of its hooks meanwhile."""
        slot = ctypes.c_void_p.in_dll(self._null_driver, "null_driver_hook")
        function = getattr(self._null_driver, name)
        slot.value = ctypes.cast(function, ctypes.c_void_p).value
        try:
            yield
        finally:
            slot.value = None


def compile_all(folder):
    """Compile what a `Context` loads."""
    build.null_driver(folder)
    build.floor(folder)
    build.cython_calls(folder)


def _scope_of_ctypes(library):
    number, address = ctypes.c_int(), ctypes.c_void_p()
    return {
        "DRIVER": library,
        "number": number,
        "at_number": ctypes.byref(number),
        "address": address,
        "at_address": ctypes.byref(address),
        "uuid": ctypes.create_string_buffer(16),
        "one": ctypes.c_void_p(1),
        "create_string_buffer": ctypes.create_string_buffer,
    }
