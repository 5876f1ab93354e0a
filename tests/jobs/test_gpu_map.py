"""GPU maps: what they are completed to, and what is said about wrong ones."""

import uuid as python_uuid

import pytest
from hypothesis import given, strategies as st

from cuckpt import uuids
from cuckpt.gpu_map import complete, mib
from cuckpt.nvml import GpuFacts
from cuckpt.structs import Uuid

MIB = 1 << 20
KIND = "NVIDIA H200"


def gpu(number, name=KIND, free_bytes=1000 * MIB):
    raw = bytes([number + 1]) * 16
    return GpuFacts(number, raw, name, free_bytes, 1000 * MIB, True, False, {})


GPUS = [gpu(number) for number in range(4)]
A, B, C, D = (each.uuid for each in GPUS)
STRANGER = bytes(16)


def text(raw):
    return uuids.to_text(raw)


@pytest.mark.parametrize(
    ("told", "whole"),
    [
        ({}, "ABCD"),
        ({A: A}, "ABCD"),
        ({A: B}, "BACD"),
        ({A: B, B: A}, "BACD"),
        ({A: B, B: C}, "BCAD"),
        ({B: C, A: B}, "BCAD"),
        ({A: B, C: D}, "BADC"),
        ({A: B, B: C, C: D}, "BCDA"),
        ({A: D, D: B}, "DACB"),
        ({A: C, B: B}, "CBAD"),
        ({A: B, B: C, C: D, D: A}, "BCDA"),
    ],
    ids=str,
)
def test_map_is_completed(told, whole):
    by_letter = dict(zip("ABCD", (A, B, C, D), strict=True))
    new = [by_letter[letter] for letter in whole]
    assert complete(told, GPUS) == list(zip((A, B, C, D), new, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        bytes,
        bytearray,
        memoryview,
        bytes.hex,
        text,
        lambda raw: text(raw).upper(),
        lambda raw: text(raw).removeprefix("GPU-"),
        lambda raw: python_uuid.UUID(bytes=raw),
    ],
)
def test_map_takes_every_form_of_a_uuid(form):
    pairs = [(A, B), (B, A), (C, C), (D, D)]
    if form in (bytearray, memoryview):  # not to be keys
        assert complete({A: form(B)}, GPUS) == pairs
    else:
        assert complete({form(A): form(B)}, GPUS) == pairs


def test_map_takes_a_struct_and_an_ordinal_as_a_new_gpu():
    assert complete({A: Uuid(B)}, GPUS) == complete({A: 1}, GPUS)
    assert complete({A: 1}, GPUS) == complete({A: B}, GPUS)


def test_map_takes_an_ordinal_as_an_old_gpu():
    assert complete({0: 1}, GPUS) == complete({A: B}, GPUS)


def test_ordinal_is_that_of_nvml_and_no_index():
    gpus = [GPUS[2], GPUS[0]]
    assert complete({C: 0}, gpus) == [(C, A), (A, C)]


@pytest.mark.parametrize(
    ("told", "error", "match"),
    [
        (None, TypeError, "mapping of old GPU UUIDs to new ones, not NoneType"),
        ([(A, B)], TypeError, "not list"),
        ("GPU-", TypeError, "not str"),
        ({True: A}, TypeError, "not bool"),
        ({4: A}, ValueError, "there is no GPU 4: there are 0 to 3"),
        ({A: B, 0: C}, ValueError, f"GPU {text(A)} is an old one twice"),
        ({A: None}, TypeError, "not NoneType"),
        ({A: True}, TypeError, "not bool"),
        ({A: 1.0}, TypeError, "not float"),
        ({"GPU-0": A}, ValueError, "not a GPU UUID: 'GPU-0'"),
        ({A: bytes(15)}, ValueError, "16 bytes, got 15"),
        ({A: 4}, ValueError, "there is no GPU 4: there are 0 to 3"),
        ({A: -1}, ValueError, "there is no GPU -1"),
        ({STRANGER: A}, ValueError, f"the old GPU {text(STRANGER)} is none of this"),
        (
            {A: STRANGER},
            ValueError,
            f"the new GPU {text(STRANGER)} is none of .*{text(D)}",
        ),
        ({A: B, text(A): C}, ValueError, f"GPU {text(A)} is an old one twice"),
        ({A: C, B: C}, ValueError, f"GPU {text(C)} is a new one twice"),
        ({A: C, B: 2}, ValueError, f"GPU {text(C)} is a new one twice"),
        ({A: "MIG-" + text(A)[4:]}, ValueError, "names a MIG instance"),
    ],
    ids=str,
)
def test_map_is_refused_that_cannot_be(told, error, match):
    with pytest.raises(error, match=match):
        complete(told, GPUS)


def test_map_is_refused_between_kinds():
    gpus = [gpu(0), gpu(1, "NVIDIA L4"), gpu(2)]
    with pytest.raises(
        ValueError, match=r"is NVIDIA H200, and .* is NVIDIA L4: memory"
    ):
        complete({A: B}, gpus)
    assert complete({A: C}, gpus) == [(A, C), (B, B), (C, A)]


def test_map_is_refused_that_is_closed_between_kinds():
    gpus = [gpu(0), gpu(1), gpu(2, "NVIDIA L4")]
    with pytest.raises(ValueError, match="only restored on a GPU of the same kind"):
        complete({A: B, B: C}, gpus)


def test_map_is_refused_without_room():
    gpus = [gpu(0), gpu(1, free_bytes=10 * MIB)]
    with pytest.raises(MemoryError) as caught:
        complete({A: B}, gpus, {A: 20 * MIB})
    assert str(caught.value) == (
        f"GPU 1 ({text(B)}) has 10 MiB free, and 20 MiB are needed"
    )
    assert complete({A: B}, gpus, {A: 10 * MIB}) == [(A, B), (B, A)]
    assert complete({}, gpus, {A: 20 * MIB}) == [(A, A), (B, B)]
    with pytest.raises(MemoryError):
        complete({}, gpus, {B: 20 * MIB})


def test_machine_without_gpus_has_an_empty_map():
    assert complete({}, []) == []


@given(st.data())
def test_completed_map_is_a_permutation_with_what_was_told(data):
    gpus = [gpu(number) for number in range(data.draw(st.integers(1, 16)))]
    all_uuids = [each.uuid for each in gpus]
    old = data.draw(st.lists(st.sampled_from(all_uuids), unique=True))
    new = data.draw(st.permutations(all_uuids))[: len(old)]
    told = dict(zip(old, new, strict=True))
    whole = complete(told, gpus)
    assert [pair[0] for pair in whole] == all_uuids
    assert sorted(pair[1] for pair in whole) == sorted(all_uuids)
    assert told.items() <= dict(whole).items()
    # Who is neither told of nor displaced stays.
    for uuid in set(all_uuids) - set(old) - set(new):
        assert dict(whole)[uuid] == uuid
    # To complete it once more changes nothing.
    assert complete(dict(whole), gpus) == whole


def test_size_is_told_in_mib():
    assert [mib(size) for size in (0, MIB, 3 * MIB // 2, 1 << 40)] == [
        "0 MiB",
        "1 MiB",
        "2 MiB",
        "1048576 MiB",
    ]
