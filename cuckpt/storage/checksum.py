"""Checksums of what is stored: XXH3 of 128 bits, by xxhash."""

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from cuckpt.process_errors import MissingExtraError


@functools.cache
def checksum_of() -> "Callable[[Any], str]":
    """Return the function that makes 32 hexadecimal digits of bytes.

    Raises
    ------
    MissingExtraError
        Without xxhash.
    """
    try:
        import xxhash
    except ModuleNotFoundError as error:
        if error.name != "xxhash":
            raise
        raise MissingExtraError("xxhash", "storage") from None
    return xxhash.xxh3_128_hexdigest


def addresses_of_xxhash(names: Sequence[str]) -> list[int]:
    """Return where functions of xxhash's library are.

    Parameters
    ----------
    names : sequence of str

    Returns
    -------
    list of int

    Raises
    ------
    MissingExtraError
        Without xxhash.
    ImportError
        If it does not show them.
    """
    checksum_of()
    # The library is in it, or loaded by it.
    _xxhash = importlib.import_module("xxhash._xxhash")

    library = ctypes.CDLL(str(_xxhash.__file__))
    found = []
    for name in names:
        # That which takes what the CPU has comes first.
        for symbol in (f"{name}_dispatch", name):
            function = getattr(library, symbol, None)
            if function is not None:
                found.append(ctypes.cast(function, ctypes.c_void_p).value or 0)
                break
        else:
            raise ImportError(
                f"{_xxhash.__file__} has no {name}: install xxhash anew, 3.0 or later"
            )
    return found


def from_numbers(low: int, high: int) -> str:
    """Return a checksum as 32 hexadecimal digits, or its halves from them."""
    return f"{high:016x}{low:016x}"


def to_numbers(text: str) -> tuple[int, int]:
    """Return the low and the high half of a checksum; 0 of none."""
    number = int(text or "0", 16)
    return number & ((1 << 64) - 1), number >> 64
