"""Checksums of what is stored: XXH3 of 128 bits, by xxhash."""

import functools
from collections.abc import Callable
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
