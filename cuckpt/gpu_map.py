"""GPU maps: which GPU the memory of another is to be restored on.

The driver wants a pair for every GPU of the machine, also for those that stay, and
loses nothing but time if one is wrong; the checks here say which and why.
"""

from collections.abc import Mapping, Sequence

from cuckpt import uuids
from cuckpt.nvml import GpuFacts


def complete(
    gpu_map: Mapping[object, object],
    gpus: Sequence[GpuFacts],
    needed_bytes: Mapping[bytes, int] | None = None,
) -> list[tuple[bytes, bytes]]:
    """Complete a map over all GPUs, and check it.

    A GPU that is displaced takes the place that becomes free: from A to B follows
    from B to A, and from A to B to C follows from C to A. The others stay.

    Parameters
    ----------
    gpu_map : mapping
        From old to new, each a UUID in any form that `cuckpt.uuids.to_bytes` takes,
        or the ordinal of a GPU. A `cuckpt.structs.Uuid` can change, so is no key:
        its `bytes` are.
    gpus : sequence of GpuFacts
        All GPUs of the machine.
    needed_bytes : mapping of bytes to int, optional
        How much memory comes from each old GPU, by UUID. Of a new one so much must
        be free.

    Returns
    -------
    list of tuple of bytes and bytes
        Pairs of old and new, one for each GPU of the machine, in its order.

    Raises
    ------
    TypeError, ValueError
        If the map is none, or one that cannot be.
    MemoryError
        If a GPU has too little free memory.
    """
    check_type(gpu_map)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    told: dict[bytes, bytes] = {}
    for old, new in gpu_map.items():
        pair = _known(old, gpus, "old"), _known(new, gpus, "new")
        if pair[0] in told:
            raise ValueError(f"GPU {uuids.to_text(pair[0])} is an old one twice")
        told[pair[0]] = pair[1]
    if len(set(told.values())) != len(told):
        twice = next(u for u in told.values() if [*told.values()].count(u) > 1)
        raise ValueError(f"GPU {uuids.to_text(twice)} is a new one twice")
    whole = _close_cycles(told, [gpu.uuid for gpu in gpus])
    for old, new in whole:
        _check_pair(by_uuid[old], by_uuid[new], (needed_bytes or {}).get(old, 0))
    return whole


def check_type(gpu_map: object) -> None:
    """Raise TypeError if something is no map.

    Parameters
    ----------
    gpu_map : object
    """
    if not isinstance(gpu_map, Mapping):
        raise TypeError(
            "gpu_map must be a mapping of old GPU UUIDs to new ones, not "
            f"{type(gpu_map).__name__}"
        )


def _known(gpu: object, gpus: Sequence[GpuFacts], which: str) -> bytes:
    if isinstance(gpu, int) and not isinstance(gpu, bool):
        for each in gpus:
            if each.ordinal == gpu:
                return each.uuid
        raise ValueError(f"there is no GPU {gpu}: there are 0 to {len(gpus) - 1}")
    raw = uuids.to_bytes(gpu)
    known = [each.uuid for each in gpus]
    if raw not in known:
        raise ValueError(
            f"the {which} GPU {uuids.to_text(raw)} is none of this machine, which has "
            f"{', '.join(map(uuids.to_text, known))}"
        )
    return raw


def _close_cycles(
    told: Mapping[bytes, bytes], all_uuids: Sequence[bytes]
) -> list[tuple[bytes, bytes]]:
    whole = dict(told)
    for start in told.keys() - set(told.values()):
        end = told[start]
        while end in told:
            end = told[end]
        whole[end] = start
    return [(uuid, whole.get(uuid, uuid)) for uuid in all_uuids]


def _check_pair(old: GpuFacts, new: GpuFacts, needed_bytes: int) -> None:
    if old.name != new.name:
        raise ValueError(
            f"GPU {uuids.to_text(old.uuid)} is {old.name}, and GPU "
            f"{uuids.to_text(new.uuid)} is {new.name}: memory is only restored on a "
            "GPU of the same kind"
        )
    if new.free_bytes < needed_bytes:
        raise MemoryError(
            f"GPU {new.ordinal} ({uuids.to_text(new.uuid)}) has {mib(new.free_bytes)} "
            f"free, and {mib(needed_bytes)} are needed"
        )


def mib(size: int) -> str:
    """Return a size as text.

    Parameters
    ----------
    size : int
        Bytes.

    Returns
    -------
    str
    """
    return f"{size / (1 << 20):.0f} MiB"
