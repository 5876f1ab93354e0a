"""The simulated driver by itself, without Python, under sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

from cuckpt.simulator import Machine

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "cuckpt/simulator/libcuda"


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def protocol(request, tmp_path_factory):
    """Build tests/native/protocol.c and the driver into one program."""
    program = tmp_path_factory.mktemp("protocol") / "protocol"
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"),
            *(f"-fsanitize={request.param}", "-fno-sanitize-recover=all"),
            *("-I", SOURCES, "-o", program, ROOT / "tests/native/protocol.c"),
            *sorted(SOURCES.glob("*.c")),
        ],
        check=True,
    )
    return str(program)


@pytest.fixture
def environment():
    """The variables of a machine; no other sanitizer may be in the program's way."""
    with Machine(memory_bytes=256 << 20, faults=[]).started() as variables:
        inherited = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        yield {**inherited, **variables, "ASAN_OPTIONS": "", "TSAN_OPTIONS": ""}


def run(*command, environment):
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_process_suspends_itself_while_its_threads_work(protocol, environment):
    printed = run(protocol, environment=environment)
    suspended = [int(line.split()[0]) for line in printed.splitlines()]
    assert len(suspended) == 2
    assert sum(suspended) > 50


def test_custom_storage_of_a_process_whose_threads_work(protocol, environment):
    with subprocess.Popen(
        [protocol, "serve"],
        env=environment,
        text=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
    ) as target:
        assert target.stdout.readline() == "ready\n"
        run(protocol, str(target.pid), environment=environment)
        printed, errors = target.communicate(timeout=60)
        assert target.returncode == 0, printed + errors


def test_no_source_knows_python():
    for source in SOURCES.parent.glob("*/*.[ch]"):
        assert "Python.h" not in source.read_text()
