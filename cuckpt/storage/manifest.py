"""What stands in the manifest of an image; docs/image-format.md tells the same.

An image may come from anywhere: whatever a manifest says is checked before use.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from cuckpt import uuids
from cuckpt.storage.checksum import checksum_of
from cuckpt.storage.errors import ImageError
from cuckpt.storage.stripes import padded

FORMAT = "cuckpt image"
VERSION = 1
MAX_CHUNK_BYTES = 16 << 20  # so that it is known how much memory a load needs
_FILE = re.compile(r"[0-9a-f]{8}-[0-9]{1,6}\.stripe")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T")


class Chunk(NamedTuple):
    """A piece of GPU memory that is stored.

    Attributes
    ----------
    offset : int
        In the region, in bytes.
    size : int
    place : int
        Where it is in its file, in bytes: a multiple of 4096.
    checksum : str
        XXH3 of 128 bits, in hexadecimal digits; empty if there is none.
    """

    offset: int
    size: int
    place: int
    checksum: str


class Zeros(NamedTuple):
    """A piece of GPU memory, of an image one that is all zeros and not stored."""

    offset: int
    size: int


@dataclasses.dataclass
class Stripe:
    """A file of an image, with the chunks in it by their order."""

    file: str
    size: int
    chunks: list[Chunk]


class Content(NamedTuple):
    """What of a region is where.

    Attributes
    ----------
    stripes : list of Stripe
    zeros : list of Zeros
    """

    stripes: list[Stripe]
    zeros: list[Zeros]


@dataclasses.dataclass
class SavedRegion:
    """The memory of one process on one GPU.

    Attributes
    ----------
    gpu : str
        UUID.
    gpu_name : str
    size : int
        Bytes.
    stripes : list of Stripe
    zeros : list of Zeros
    """

    gpu: str
    gpu_name: str
    size: int
    stripes: list[Stripe]
    zeros: list[Zeros]


@dataclasses.dataclass
class SavedProcess:
    """A process, known by its pid and when it was started.

    Attributes
    ----------
    pid : int
    name : str
    start_time : int
        As in /proc/PID/stat, in clock ticks since the boot.
    boot_id : str
        Of the boot.
    pid_namespace : int
        In which the pid is; 0 if that was not known.
    regions : list of SavedRegion
    """

    pid: int
    name: str
    start_time: int
    boot_id: str
    pid_namespace: int
    regions: list[SavedRegion]

    @property
    def identity(self) -> str:
        """What no other process has: pid, start time, boot."""
        return f"{self.pid} {self.start_time} {self.boot_id}"


@dataclasses.dataclass
class Image:
    """What is in an image.

    Attributes
    ----------
    path : str
        Its folder.
    created : str
        When, in UTC.
    cuckpt : str
        Version.
    cuda_version : int
        Of the driver: 1000 x major + 10 x minor.
    processes : list of SavedProcess
    """

    path: str
    created: str
    cuckpt: str
    cuda_version: int
    processes: list[SavedProcess]

    @property
    def regions(self) -> list[SavedRegion]:
        """Those of all processes."""
        return [each for process in self.processes for each in process.regions]

    @property
    def stripes(self) -> list[Stripe]:
        """Those of all regions."""
        return [stripe for region in self.regions for stripe in region.stripes]

    @property
    def size(self) -> int:
        """How much GPU memory it holds, in bytes."""
        return sum(region.size for region in self.regions)

    @property
    def stored_bytes(self) -> int:
        """How much of it is in files: all but zeros."""
        return sum(stripe.size for stripe in self.stripes)

    def __str__(self) -> str:
        cuda = f"{self.cuda_version // 1000}.{self.cuda_version % 1000 // 10}"
        made = f"{self.created}, cuckpt {self.cuckpt}, CUDA {cuda}"
        stored = f"{_mib(self.stored_bytes)} in {len(self.stripes)} files"
        zeros = sum(part.size for each in self.regions for part in each.zeros)
        lines = [
            self.path,
            f"  created     {made}",
            f"  GPU memory  {_mib(self.size)}: {stored}, {_mib(zeros)} of zeros",
        ]
        for process in self.processes:
            lines.append(f"  process {process.pid} {process.name}")
            lines += [
                f"    {region.gpu}  {region.gpu_name}  {_mib(region.size)}"
                for region in process.regions
            ]
        return "\n".join(map(_printable, lines))

    @property
    def checksum(self) -> str:
        """That of the manifest, which no other image has."""
        return _checksum(_canonical(self._content()))

    def to_json(self) -> bytes:
        """Return the manifest."""
        whole = {"checksum": self.checksum, "content": self._content()}
        return _canonical(whole).encode()

    def _content(self) -> dict[str, Any]:
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        del content["path"]
        return content


def parse(manifest: bytes, path: str) -> Image:
    """Read a manifest, and refuse what cannot be.

    Parameters
    ----------
    manifest : bytes
    path : str
        Of the image.

    Returns
    -------
    Image

    Raises
    ------
    ImageError
        If it is damaged, of an unknown version, or contradicts itself.
    MissingExtraError
        Without xxhash.
    """
    try:
        whole = json.loads(manifest)
        content = whole["content"]
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if _is(content["version"], int) != VERSION:
            raise ImageError(
                f"{path} is of version {content['version']!r} of the format, and this "
                f"cuckpt reads version {VERSION}: use the cuckpt that wrote it, or a "
                "newer one"
            )
        # As bytes, so that nothing at all can differ.
        sound = {"checksum": _checksum(_canonical(content)), "content": content}
        if _canonical(sound).encode() != manifest:
            raise ValueError("its checksum is another")
        image = Image(
            path,
            _is(content["created"], str),
            _is(content["cuckpt"], str),
            _is(content["cuda_version"], int),
            [_process(each) for each in _is(content["processes"], list)],
        )
        names = [stripe.file for stripe in image.stripes]
        if len(set(names)) != len(names):
            raise ValueError("a file is named twice")
        pids = [process.pid for process in image.processes]
        if len(set(pids)) != len(pids):
            raise ValueError("a process is named twice")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ImageError(
            f"{path}: the manifest is damaged, or of something else: "
            f"{type(error).__name__}: {error}"
        ) from None
    return image


def _printable(line: str) -> str:
    """Return a line without what could change a terminal: names may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _checksum(text: str) -> str:
    return checksum_of()(text.encode())


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _process(found: Mapping[str, Any]) -> SavedProcess:
    regions = [_region(each) for each in _is(found["regions"], list)]
    gpus = [region.gpu for region in regions]
    if len(set(gpus)) != len(gpus):
        raise ValueError("a GPU of a process is named twice")
    return SavedProcess(
        _is(found["pid"], int),
        _is(found["name"], str),
        _is(found["start_time"], int),
        _is(found["boot_id"], str),
        _is(found["pid_namespace"], int),
        regions,
    )


def _region(found: Mapping[str, Any]) -> SavedRegion:
    region = SavedRegion(
        uuids.to_text(uuids.to_bytes(_is(found["gpu"], str))),
        _is(found["gpu_name"], str),
        _count(found["size"]),
        [_stripe(each) for each in _is(found["stripes"], list)],
        [Zeros(*map(_count, each)) for each in _is(found["zeros"], list)],
    )
    pieces: Iterable[tuple[int, int]] = [
        *((chunk.offset, chunk.size) for s in region.stripes for chunk in s.chunks),
        *region.zeros,
    ]
    end = 0
    for offset, size in sorted(pieces):
        if offset != end or not size:
            raise ValueError(f"a region has a gap or an overlap at {end}")
        end += size
    if end != region.size:
        raise ValueError(f"a region of {region.size} bytes ends at {end}")
    return region


def _stripe(found: Mapping[str, Any]) -> Stripe:
    stripe = Stripe(
        _is(found["file"], str),
        _count(found["size"]),
        [_chunk(*each) for each in _is(found["chunks"], list)],
    )
    if not _FILE.fullmatch(stripe.file):
        raise ValueError(f"no name of a file of an image: {stripe.file!r}")
    end = 0
    for chunk in stripe.chunks:
        if chunk.size > MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {chunk.size} bytes is too long")
        if chunk.place != padded(end):
            raise ValueError(f"{stripe.file} has a gap or an overlap at {end}")
        end = chunk.place + chunk.size
    if end != stripe.size:
        raise ValueError(f"{stripe.file} of {stripe.size} bytes ends at {end}")
    return stripe


def _chunk(offset: Any, size: Any, place: Any, checksum: Any) -> Chunk:
    if checksum != "" and not _CHECKSUM.fullmatch(_is(checksum, str)):
        raise ValueError(f"no checksum: {checksum!r}")
    return Chunk(_count(offset), _count(size), _count(place), checksum)


def _count(number: Any) -> int:
    if not 0 <= _is(number, int) < 1 << 62:
        raise ValueError(f"no number of bytes: {number}")
    return int(number)


def _is(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {value!r}")
    return value


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
