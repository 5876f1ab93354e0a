import uuid
from array import array

import pytest
from hypothesis import given, strategies as st

from cuckpt import uuids
from cuckpt.structs import Uuid

TEXT = "GPU-01234567-89ab-cdef-0123-456789abcdef"
BYTES = bytes.fromhex("0123456789abcdef0123456789abcdef")


@pytest.mark.parametrize(
    "form",
    [
        TEXT,
        TEXT.upper(),
        TEXT.lower(),
        TEXT.removeprefix("GPU-"),
        TEXT.replace("-", "").removeprefix("GPU"),
        "GPU-" + BYTES.hex(),
        BYTES,
        bytearray(BYTES),
        memoryview(BYTES),
        uuid.UUID(bytes=BYTES),
        Uuid(BYTES),
    ],
    ids=repr,
)
def test_to_bytes_takes_every_common_form(form):
    assert uuids.to_bytes(form) == BYTES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GPU-",
        TEXT[:-1],
        TEXT + "0",
        TEXT.replace("a", "g"),
        "GPU-0123456789ab-cdef-0123-4567-89abcdef",
        TEXT.replace("-89ab", " 89ab"),
        " " * 32,
        "\uff10" * 32,
        "01234567-89-abcd-ef01-23456789abcdef",
    ],
)
def test_to_bytes_names_malformed_text(text):
    with pytest.raises(ValueError, match=r"not a GPU UUID: .*32 hexadecimal digits"):
        uuids.to_bytes(text)


def test_to_bytes_tells_a_mig_instance():
    with pytest.raises(ValueError, match="names a MIG instance, not a GPU"):
        uuids.to_bytes("MIG" + TEXT[3:])


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_to_bytes_tells_the_length(size):
    with pytest.raises(ValueError, match=f"16 bytes, got {size}"):
        uuids.to_bytes(bytes(size))


class TextInside:
    bytes = TEXT


@pytest.mark.parametrize(
    "wrong",
    [None, 16, 1.0, [1] * 16, object(), array("Q", [1, 2]), TextInside()],
    ids=repr,
)
def test_to_bytes_names_the_wrong_type(wrong):
    with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
        uuids.to_bytes(wrong)


@given(st.binary(min_size=16, max_size=16))
def test_text_and_bytes_are_inverse(content):
    assert uuids.to_bytes(uuids.to_text(content)) == content
    assert uuids.to_text(content) == f"GPU-{uuid.UUID(bytes=content)}"
