"""Fixtures for tests of programs that checkpoint: simulated GPUs and processes.

pytest loads this wherever cuckpt is installed, so it imports what it needs only when
a fixture is used. It stands outside `cuckpt.simulator` for the same reason.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuckpt.simulator import Machine
    from cuckpt.target import Target

_MARKER = (
    "cuda_machine(gpus, memory_bytes, driver_version, faults): what the machine of "
    "the fixture cuda_machine is to be, as cuckpt.simulator.Machine takes it"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def cuda_machine(request: pytest.FixtureRequest) -> "Iterator[Machine]":
    """Run the test on a simulated machine with GPUs, a `cuckpt.simulator.Machine`.

    So do the children that it starts meanwhile. Each test has its own, with one GPU
    of 8 GiB if the marker says nothing else::

        @pytest.mark.cuda_machine(gpus=2, faults=[Fault("restore", result=2)])
        def test_job_survives(cuda_machine): ...

    It is an error if the process has loaded another libcuda. One process can use
    one `driver_version` only.
    """
    from cuckpt.simulator import Machine

    plain = pytest.mark.cuda_machine.mark
    marker = request.node.get_closest_marker("cuda_machine", plain)
    with Machine(*marker.args, **marker.kwargs) as machine:
        yield machine


@pytest.fixture
def cuda_target(cuda_machine: "Machine") -> "Target":
    """Start a process on `cuda_machine` that fills 64 MiB of memory on GPU 0.

    A `cuckpt.target.Target`: its `check` raises unless every byte is as it was. More
    of them: ``cuda_machine.spawn(memory_bytes={0: 1 << 20})``.
    """
    return cuda_machine.spawn(memory_bytes={0: 64 << 20})
