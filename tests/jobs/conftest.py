"""What the tests of images have in common."""

import ctypes
import os

import pytest

from cuckpt.storage import _lanes, lanes

WRITE = ctypes.CFUNCTYPE(
    *(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    use_errno=True,
)


@pytest.fixture
def files_by_python(monkeypatch):
    """Let lanes write and read by `os`, whose functions a test can replace."""

    def called(do):
        def call(file, address, size, offset):
            memory = (ctypes.c_char * size).from_address(address)
            try:
                return do(file, memoryview(memory).cast("B"), offset)
            except OSError as error:
                ctypes.set_errno(error.errno)
                return -1

        return WRITE(call)

    kept = [
        called(lambda file, part, offset: os.pwrite(file, part, offset)),
        called(lambda file, part, offset: os.preadv(file, [part], offset)),
    ]
    own = lanes.functions

    def functions():
        own()
        library = ctypes.CDLL(lanes.driver.library_path())
        return _lanes.Functions(
            [lanes._address(library, name) for name in _lanes.NAMES["cuda"]],
            lanes.addresses_of_xxhash(_lanes.NAMES["xxhash"]),
            *(ctypes.cast(each, ctypes.c_void_p).value for each in kept),
        )

    monkeypatch.setattr(lanes, "functions", functions)
    return kept
