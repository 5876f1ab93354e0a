"""GPU UUIDs: parse and format every common form."""


def to_bytes(uuid: object) -> bytes:
    """Return the 16 bytes of a GPU UUID.

    Parameters
    ----------
    uuid : str, bytes-like or object with a ``bytes`` attribute
        Text of 32 hexadecimal digits, with or without hyphens and the prefix
        ``GPU-``, in either case; 16 bytes; or an object whose ``bytes`` are
        those: `cuckpt.structs.Uuid`, `uuid.UUID`, the UUID objects of
        cuda.bindings.

    Returns
    -------
    bytes
        16 bytes, in the order in which the text shows them.

    Raises
    ------
    TypeError
        If `uuid` has none of these forms.
    ValueError
        If it has one of them, but not 16 bytes.
    """
    if isinstance(uuid, str):
        return _parse(uuid)
    content = getattr(uuid, "bytes", uuid)
    try:
        with memoryview(content) as view:  # type: ignore[arg-type]
            # Numbers of more than a byte are no bytes of a UUID.
            content = view.tobytes() if view.itemsize == 1 else None
    except TypeError:
        content = None
    if content is None:
        raise TypeError(
            "a GPU UUID must be text, 16 bytes or a UUID object, "
            f"not {type(uuid).__name__}"
        )
    if len(content) != 16:
        raise ValueError(f"a GPU UUID is 16 bytes, got {len(content)}")
    return content


def to_text(uuid: bytes) -> str:
    """Return a GPU UUID as NVIDIA's tools print it.

    Parameters
    ----------
    uuid : bytes
        16 bytes.

    Returns
    -------
    str
        ``GPU-`` and 32 lower-case hexadecimal digits in five groups.
    """
    digits = uuid.hex()
    groups = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return "GPU-" + "-".join(groups)


def _parse(text: str) -> bytes:
    if text[:4].upper() == "MIG-":
        raise ValueError(f"{text!r} names a MIG instance, not a GPU")
    digits = text[4:] if text[:4].upper() == "GPU-" else text
    if len(digits) == 36 and {digits[i] for i in (8, 13, 18, 23)} == {"-"}:
        digits = digits.replace("-", "")
    try:
        content = bytes.fromhex(digits)  # skips white space, hence the length
    except ValueError:
        content = b""
    if len(content) != 16 or len(digits) != 32:
        raise ValueError(
            f"not a GPU UUID: {text!r}; expected 32 hexadecimal digits, such as "
            "GPU-01234567-89ab-cdef-0123-456789abcdef"
        )
    return content
