"""Simulated GPUs."""

import uuid as uuids_of_python
from dataclasses import dataclass

from cuckpt import uuids

DEFAULT_MEMORY_BYTES = 8 << 30
MAX_GPUS = 16

_CHUNK = 2 << 20
_NAMESPACE = uuids_of_python.UUID("63756b70-7420-7369-6d75-6c617465642e")


@dataclass(frozen=True)
class Gpu:
    """A simulated GPU.

    Parameters
    ----------
    uuid : bytes
        16 bytes.
    memory_bytes : int
        Size of its memory.
    name : str
        What kind of GPU it is, in at most 59 ASCII characters. Memory can only be
        restored on a GPU of the same kind.
    persistence_mode : bool
        If off, a caller needs ``cuInit`` before it can restore what was on this
        GPU.
    mig_mode : bool
        If on, a checkpoint of what is on this GPU runs out of memory.

    Raises
    ------
    ValueError
        If a parameter is wrong.
    """

    uuid: bytes
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    name: str = "cuckpt simulated GPU"
    persistence_mode: bool = True
    mig_mode: bool = False

    def __post_init__(self) -> None:
        if len(self.uuid) != 16:
            raise ValueError(f"a GPU UUID is 16 bytes, got {len(self.uuid)}")
        if not _CHUNK <= self.memory_bytes <= 1 << 40:
            raise ValueError(
                f"the memory of a GPU is 2 MiB to 1 TiB, not {self.memory_bytes} bytes"
            )

        if not (self.name.isascii() and 0 < len(self.name) < 60):
            raise ValueError("the name of a GPU is 1 to 59 ASCII characters")

    def __str__(self) -> str:
        return uuids.to_text(self.uuid)

    def fields(self) -> list[bytes | int]:
        """Return the fields of its C struct."""
        flags = self.persistence_mode | self.mig_mode << 1
        return [self.uuid, self.memory_bytes, flags, self.name.encode()]

    @classmethod
    def numbered(cls, ordinal: int, memory_bytes: int) -> "Gpu":
        """Return the GPU of a machine of which only the number of GPUs is told."""
        uuid = uuids_of_python.uuid5(_NAMESPACE, f"GPU {ordinal}").bytes
        return cls(uuid, memory_bytes)
