"""The copier on ordinary memory: every byte goes to files and comes back."""

import os
import random

import pytest

from cuckpt import driver
from cuckpt.storage import cuda
from cuckpt.storage.copier import Copier, Region
from cuckpt.storage.folder import NewImage, OldImage

SIZES = [1, 4095, 4096, (64 << 20) + 5]


@pytest.fixture
def regions():
    """Memory of several sizes that is filled, and what is in it."""
    driver.init()
    cuda.enter(0)
    made = []
    for size in SIZES:
        content = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
        pointer = int(cuda.call("cuMemAlloc", size))
        cuda.call("cuMemcpyHtoD", pointer, content, size)
        made.append((Region(pointer, size, 0), content))
    yield made
    for region, _ in made:
        cuda.call("cuMemFree", region.device_pointer)
    cuda.release()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("chunk_bytes", [64 << 10, 8 << 20])
def test_memory_comes_back_from_files(regions, tmp_path, durable, chunk_bytes):
    copier = Copier(chunk_bytes)
    where = [region for region, _ in regions]
    with NewImage(tmp_path / "image", durable=durable) as image:
        image.reserve(copier.file_sizes(SIZES))
        contents = copier.save(where, image)
        sizes = {s.file: s.size for content in contents for s in content.stripes}
        image.publish(b"{}", sizes)
    for region in where:
        cuda.call("cuMemsetD8", region.device_pointer, 0xA5, region.size)
    with OldImage(tmp_path / "image") as image:
        image.open_all(sizes)
        copier.load(where, contents, image)
    for region, content in regions:
        found = bytearray(region.size)
        cuda.call("cuMemcpyDtoH", found, region.device_pointer, region.size)
        assert found == content
    assert sum(os.path.getsize(tmp_path / "image" / name) for name in sizes) < sum(
        SIZES
    )


def test_memory_that_is_not_there_is_told(regions, tmp_path):
    with (
        NewImage(tmp_path / "image") as image,
        pytest.raises(driver.DriverError, match="a copy between"),
    ):
        Copier().save([Region(1 << 20, 4096, 0)], image)
    cuda.call("cuCtxSynchronize")  # the context is as good as before
