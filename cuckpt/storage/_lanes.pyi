from collections.abc import Sequence
from enum import IntEnum

class Kind(IntEnum):
    STORED = 0
    ZEROS = 1
    UNCHECKED = 2
    FRESH = 4

class Outcome(IntEnum):
    DONE = 0
    STOPPED = 1
    CUDA_FAILED = 2
    WRITE_FAILED = 3
    READ_FAILED = 4
    SHORT = 5
    DIFFERENT = 6

CHUNK: str
SLOT: str
NAMES: dict[str, tuple[str, ...]]

class Functions:
    def __init__(
        self,
        cuda: Sequence[int],
        xxhash: Sequence[int],
        write: int = 0,
        read: int = 0,
    ) -> None: ...

def save(
    functions: Functions,
    chunks: bytearray,
    first: int,
    slots: bytearray,
    control: bytearray,
    counter: int,
    device_pointer: int,
    checksums: bool,
) -> tuple[int, int, int]: ...
def load(
    functions: Functions,
    chunks: bytearray,
    first: int,
    slots: bytearray,
    control: bytearray,
    counter: int,
    device_pointer: int,
) -> tuple[int, int, int]: ...
