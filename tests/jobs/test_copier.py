"""The copier by itself: regions of ordinary memory to files and back."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from cuckpt import driver
from cuckpt.storage import cuda, folder
from cuckpt.storage.copier import Copier, Region
from cuckpt.storage.errors import ImageError
from cuckpt.storage.folder import InMemory, NewImage, OldImage
from cuckpt.storage.reader import damages

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")

KIB, MIB = 1 << 10, 1 << 20
SIZES = [0, 1, 4095, 4096, 4097, 64 * KIB, 3 * MIB + 5]


@pytest.fixture
def regions(cuda_machine):
    """Make regions that are filled; return them, and what compares them."""
    made, held = [], set()

    def make(contents):
        for gpu, content in contents:
            cuda.enter(gpu)
            if gpu not in held:  # a context of its own, for tests that release
                driver.device_primary_ctx_retain(driver.device_get(gpu))
                held.add(gpu)
            pointer = int(cuda.call("cuMemAlloc", max(1, len(content))))
            if content:
                cuda.call("cuMemcpyHtoD", pointer, content, len(content))
            made.append((Region(pointer, len(content), gpu), content))
        return [region for region, _ in made]

    def spoil():
        for region, _ in made:
            if region.size:
                cuda.enter(region.gpu)
                cuda.call("cuMemsetD8", region.device_pointer, 0xA5, region.size)

    def compare():
        for region, content in made:
            cuda.enter(region.gpu)
            found = bytearray(region.size)
            if content:
                cuda.call("cuMemcpyDtoH", found, region.device_pointer, region.size)
            assert found == content, (region.gpu, region.size)

    make.spoil, make.compare = spoil, compare
    yield make
    cuda.release()
    for gpu in held:
        driver.device_primary_ctx_release_v2(driver.device_get(gpu))


def saved(copier, regions, path, **options):
    with NewImage(path, **options) as image:
        image.reserve(copier.file_sizes([region.size for region in regions]))
        contents = copier.save(regions, image)
        image.publish(b"{}", names(contents))
    return contents


def names(contents):
    return {stripe.file for content in contents for stripe in content.stripes}


def load(copier, regions, contents, path):
    sizes = {s.file: s.size for content in contents for s in content.stripes}
    with OldImage(path) as image:
        image.open_all(sizes)
        copier.load(regions, contents, image)


def content_of(kind, size):
    if kind == "random":
        return random.Random(size).randbytes(size)
    if kind == "zeros":
        return bytes(size)
    half = size // 2 // 4096 * 4096  # a hole in the middle, where chunks begin
    return b"\1" * half + bytes(max(0, size - half - 1)) + b"\1" * min(1, size - half)


@pytest.mark.cuda_machine(gpus=8)
@pytest.mark.parametrize("kind", ["random", "zeros", "mixed"])
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("gpus", "workers"), [(1, 1), (1, 5), (2, 3), (8, 16)])
def test_regions_come_back(regions, tmp_path, kind, durable, gpus, workers):
    copier = Copier(64 * KIB, workers)
    made = regions([(gpu, content_of(kind, s)) for gpu in range(gpus) for s in SIZES])
    contents = saved(copier, made, tmp_path / "image", durable=durable)
    regions.spoil()
    load(copier, made, contents, tmp_path / "image")
    regions.compare()
    if kind == "zeros":
        assert names(contents) == set()
        assert os.listdir(tmp_path / "image") == [folder.MANIFEST]


def test_other_copier_loads_what_one_saved(regions, tmp_path):
    made = regions([(0, content_of("mixed", 5 * MIB)), (0, content_of("random", MIB))])
    contents = saved(Copier(128 * KIB, 7), made, tmp_path / "image")
    regions.spoil()
    load(Copier(4 * KIB, 2), made, contents, tmp_path / "image")
    regions.compare()


def test_without_checksums(regions, tmp_path):
    made = regions([(0, content_of("random", MIB))])
    copier = Copier(64 * KIB, checksums=False)
    (content,) = saved(copier, made, tmp_path / "image")
    assert {c.checksum for s in content.stripes for c in s.chunks} == {""}
    regions.spoil()
    load(copier, made, [content], tmp_path / "image")
    regions.compare()


def test_host_memory_takes_it_as_well(regions):
    made = regions([(0, content_of("mixed", MIB))])
    with InMemory(MIB) as memory:
        contents = Copier(64 * KIB).save(made, memory)
        regions.spoil()
        Copier().load(made, contents, memory)
    regions.compare()
    with pytest.raises(MemoryError, match="are left"):
        InMemory(1 << 60)


def test_progress_counts_every_byte(regions, tmp_path):
    made = regions([(0, content_of("mixed", s)) for s in SIZES])
    counted = dict.fromkeys(range(len(SIZES)), 0)

    def advance(number, size):
        counted[number] += size

    copier = Copier(64 * KIB, 1)
    with NewImage(tmp_path / "image") as image:
        contents = copier.save(made, image, advance)
        assert [*counted.values()] == SIZES
        copier.load(made, contents, image, advance)
    assert [*counted.values()] == [2 * size for size in SIZES]


def test_what_progress_raises_ends_the_copies(regions, tmp_path):
    made = regions([(0, content_of("random", MIB))])
    calls = []

    def advance(number, size):
        calls.append(size)
        raise KeyboardInterrupt

    with NewImage(tmp_path / "image") as image, pytest.raises(KeyboardInterrupt):
        Copier(4 * KIB, 4).save(made, image, advance)
    assert len(calls) <= 4
    assert not (tmp_path / "image").exists()


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", [0, 5, 15])
def test_failed_write_leaves_nothing(
    regions, tmp_path, monkeypatch, files_by_python, problem, at
):
    made = regions([(0, content_of("random", MIB))])
    write, count = os.pwrite, iter(range(1000))

    def failing(file, part, offset):
        if next(count) >= at:
            raise OSError(problem, os.strerror(problem))
        return write(file, part, offset)

    with NewImage(tmp_path / "image") as image:
        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match=os.strerror(problem)):
            Copier(64 * KIB).save(made, image)
    assert not (tmp_path / "image").exists()
    cuda.release()  # nothing is in use any more


def test_short_writes_and_reads_are_gone_on_with(
    regions, tmp_path, monkeypatch, files_by_python
):
    made = regions([(0, content_of("random", MIB + 77))])
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(
        os, "pwrite", lambda f, part, at: write(f, part[: 512 + len(part) // 3], at)
    )
    monkeypatch.setattr(
        os,
        "preadv",
        lambda f, parts, at: (
            read(f, [part[: 1 + len(part) // 3] for part in parts], at)
            if len(parts[0]) % 4096
            else read(f, parts, at)
        ),
    )
    contents = saved(Copier(64 * KIB), made, tmp_path / "image")
    regions.spoil()
    load(Copier(64 * KIB), made, contents, tmp_path / "image")
    regions.compare()


def test_write_of_nothing_is_an_error(regions, tmp_path, monkeypatch, files_by_python):
    made = regions([(0, content_of("random", MIB))])
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with (
        NewImage(tmp_path / "image") as image,
        pytest.raises(OSError, match="Input/output"),
    ):
        Copier(64 * KIB).save(made, image)


def test_file_system_without_direct_writes_takes_it(
    regions, tmp_path, monkeypatch, files_by_python
):
    """Opened so, but not to be written so."""
    made = regions([(0, content_of("random", MIB + 1))])
    write, refused = os.pwrite, set()

    def refusing(file, part, offset):
        facts = Path(f"/proc/self/fdinfo/{file}").read_text().split()
        if int(facts[3], 8) & os.O_DIRECT:
            refused.add(file)
            raise OSError(errno.EINVAL, "as on some file systems")
        return write(file, part, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    contents = saved(Copier(64 * KIB), made, tmp_path / "image")
    assert refused
    regions.spoil()
    load(Copier(64 * KIB), made, contents, tmp_path / "image")
    regions.compare()


def test_flipped_bit_is_found_before_it_reaches_the_gpu(regions, tmp_path):
    made = regions([(0, content_of("random", MIB))])
    path = tmp_path / "image"
    contents = saved(Copier(64 * KIB), made, path)
    for name in sorted(names(contents)):
        for at in (0, 70 * KIB, os.path.getsize(path / name) - 1):
            flip(path / name, at)
            regions.spoil()
            with pytest.raises(ImageError, match=name):
                load(Copier(workers=1), made, contents, path)
            with OldImage(path) as image:
                stripes = [s for content in contents for s in content.stripes]
                image.open_all({s.file: s.size for s in stripes})
                (text,) = damages(image, stripes, 2)
                assert name in text
            flip(path / name, at)
    load(Copier(), made, contents, path)
    regions.compare()


def test_misread_chunk_is_read_again(regions, tmp_path, monkeypatch, files_by_python):
    made = regions([(0, content_of("random", MIB))])
    contents = saved(Copier(64 * KIB), made, tmp_path / "image")
    regions.spoil()
    read, misread = os.preadv, set()

    def misreading(file, parts, offset):
        count = read(file, parts, offset)
        if offset not in misread:
            misread.add(offset)
            parts[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", misreading)
    load(Copier(), made, contents, tmp_path / "image")
    regions.compare()
    assert misread


def test_failed_copy_is_told_and_nothing_stays_under_way(regions, tmp_path):
    (region,) = regions([(0, content_of("random", MIB))])
    beyond = region._replace(size=1 << 40)
    with NewImage(tmp_path / "image") as image, pytest.raises(driver.DriverError):
        Copier().save([beyond._replace(size=64 * MIB)], image)
    cuda.release()


def test_buffers_are_kept_and_used_again(regions, tmp_path):
    made = regions([(0, content_of("random", 4 * MIB))])
    copier = Copier(64 * KIB, 3)
    for number in range(3):
        contents = saved(copier, made, tmp_path / str(number))
        load(copier, made, contents, tmp_path / str(number))
    assert 2 <= len(kept(cuda._buffers)) <= 6
    assert 1 <= len(kept(cuda._streams)) <= 7  # one that fills with zeros
    cuda.release()
    assert kept(cuda._buffers) == kept(cuda._streams) == []


def kept(of):
    return [thing for things in of._free.values() for thing in things]


def test_release_is_refused_while_somebody_copies(regions, tmp_path):
    made = regions([(0, content_of("random", MIB))])
    problems = []

    def advance(number, size):
        try:
            cuda.release()
        except RuntimeError as error:
            problems.append(error)

    with NewImage(tmp_path / "image") as image:
        Copier(64 * KIB, 1).save(made, image, advance)
    assert problems


@pytest.mark.parametrize("wrong", [0, -4096, 5000, 1 << 40])
def test_chunk_size_is_checked(cuda_machine, wrong):
    with pytest.raises(ValueError, match="chunk_bytes"):
        Copier(wrong)
    with pytest.raises(ValueError, match="workers"):
        Copier(workers=0)


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_image_can_be_moved(regions, tmp_path):
    made = regions([(0, content_of("random", MIB))])
    contents = saved(Copier(), made, tmp_path / "image")
    shutil.copytree(tmp_path / "image", tmp_path / "other")
    shutil.rmtree(tmp_path / "image")
    regions.spoil()
    load(Copier(), made, contents, tmp_path / "other")
    regions.compare()
