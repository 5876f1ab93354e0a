"""`Machine`: which processes run on it, and what it refuses."""

import os
import textwrap
from pathlib import Path

import pytest

from cuckpt import simulator

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")


def test_machine_runs_this_process_and_its_children(machine_program):
    printed = machine_program(
        """
        for count in 1, 2:  # one machine after the other
            with Machine(gpus=count) as machine:
                driver.init()
                assert driver.device_get_count() == count
                assert str(driver.device_get_uuid_v2(0)) == str(machine.gpus[0])
                target = Target({0: 5 * MIB})
                suspend(target.pid)
                resume(target.pid)
                target.check()
                target.end()
        print("CUCKPT_SIMULATOR" in os.environ)
        try:
            driver.init()
        except driver.NoDeviceError:
            print("no machine any more")
        """,
    )
    assert printed == "False\nno machine any more\n"


def test_machine_refuses_a_second_one_and_another_driver(machine_program):
    printed = machine_program(
        """
        with Machine():
            try:
                Machine().__enter__()
            except SimulatorError as error:
                print(error)
        try:
            Machine(driver_version=13000).__enter__()
        except SimulatorError as error:
            print(error)
        """,
    )
    second, other = printed.splitlines()
    assert "already" in second
    assert "cuckpt simulate --driver-version 13000 -- CMD" in other


def test_machine_refuses_a_process_with_another_libcuda(null_driver):
    with pytest.raises(simulator.SimulatorError, match=r"has loaded .*cuckpt simulate"):
        simulator.Machine().__enter__()


@pytest.mark.parametrize(
    "arguments",
    [
        {"gpus": 0},
        {"gpus": 17},
        {"gpus": []},
        {"gpus": [simulator.Gpu(bytes(16)), simulator.Gpu(bytes(16))]},
        {"memory_bytes": -1},
        {"memory_bytes": 1},
        {"memory_bytes": 1 << 60},
        {"driver_version": 11080},
        {"driver_version": 99000},
    ],
)
def test_machine_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match=r"\w"):
        simulator.Machine(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"memory_bytes": "4GiB"}, {"driver_version": "13.5"}, {"gpus": [1]}],
)
def test_machine_names_the_wrong_type(arguments):
    with pytest.raises(TypeError, match=next(iter(arguments))):
        simulator.Machine(**arguments)


def test_driver_without_a_machine_has_no_device(python):
    text = """
    from cuckpt import driver
    try:
        driver.init()
    except driver.NoDeviceError:
        print("none")
    """
    for machine in None, "", "/nowhere", "/proc/self/maps", os.devnull:
        printed = python(
            textwrap.dedent(text),
            CUCKPT_LIBCUDA=str(simulator.LIBRARY),
            CUCKPT_SIMULATOR=machine,
        ).stdout
        assert printed == "none\n"


@pytest.mark.parametrize(
    ("variable", "message"),
    [(None, "is not set"), ("/nonexistent", "has ended, or none"), ("", "or none")],
)
def test_driver_without_a_machine_says_so_once(python, variable, message):
    text = """
from cuckpt import driver
for _ in range(2):
    try:
        driver.init()
    except driver.NoDeviceError:
        print("none")
"""
    library = str(simulator.LIBRARY)
    result = python(text, CUCKPT_LIBCUDA=library, CUCKPT_SIMULATOR=variable)
    assert result.stdout == "none\n" * 2
    assert result.stderr.count(message) == 1
    assert "cuckpt simulate -- CMD" in result.stderr


def test_file_that_claims_too_many_gpus_is_no_machine(tmp_path, python):
    file = tmp_path / "machine"
    with simulator.Machine().started() as variables:
        content = bytearray(Path(variables["CUCKPT_SIMULATOR"]).read_bytes())
    content[12:16] = (4000).to_bytes(4, "little")
    file.write_bytes(content)
    text = """
from cuckpt import driver
try:
    driver.init()
except driver.NoDeviceError:
    print("none")
"""
    library = str(simulator.LIBRARY)
    result = python(text, CUCKPT_LIBCUDA=library, CUCKPT_SIMULATOR=str(file))
    assert result.stdout == "none\n"
    assert "names no machine of this version" in result.stderr
