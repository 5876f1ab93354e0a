import contextlib

import pytest

from cuckpt import driver
from cuckpt.target import Program, Target


@pytest.fixture
def spawn():
    """Start Python programs, and end them whatever happens."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Program(*arguments))


@pytest.fixture
def target():
    """A target with a context on GPU 0."""
    with Target() as target:
        yield target


@pytest.fixture(scope="session")
def same_pairs():
    """A pair for every GPU: each onto itself."""
    driver.init(0)
    gpus = range(driver.device_get_count())
    uuids = [driver.device_get_uuid_v2(driver.device_get(gpu)) for gpu in gpus]
    return [(uuid, uuid) for uuid in uuids]


@pytest.fixture(scope="session")
def gpu_uuid():
    """UUID of GPU 0."""
    driver.init(0)
    return driver.device_get_uuid_v2(driver.device_get(0))
