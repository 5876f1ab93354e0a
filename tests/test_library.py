"""Which driver is loaded, and what is said if it is not, or lacks a function."""

import os

import pytest

CALL = "from cuckpt import driver; driver.checkpoint_process_get_state(1)"


def fails(python, program, **environment):
    result = python(program, check=False, **environment)
    assert result.returncode == 1, result
    return result.stderr.splitlines()[-1]


def test_missing_library_says_so(python, no_driver):
    text = fails(python, CALL, **no_driver)
    assert "DynamicLibNotFoundError: no CUDA driver: " in text
    assert "libcuda.so.1" in text
    assert "Install the NVIDIA driver" in text


def test_empty_choice_is_no_choice(python, no_driver):
    text = fails(python, CALL, **no_driver | {"CUCKPT_LIBCUDA": ""})
    assert "DynamicLibNotFoundError: no CUDA driver: " in text


@pytest.mark.parametrize("choice", ["/nowhere/libcuda.so.1", "libcuda.so.1"])
def test_choice_that_cannot_be_loaded_is_an_error(python, choice):
    # A bare name is a path too: it is not searched for.
    text = fails(python, CALL, CUCKPT_LIBCUDA=choice)
    assert "CUCKPT_LIBCUDA names a driver that cannot be loaded: " in text
    assert choice in text


def test_bare_name_is_no_name_to_search_for(python):
    text = fails(python, CALL, CUCKPT_LIBCUDA="libc.so.6")
    assert "./libc.so.6: cannot open" in text


def test_driver_of_cuda_12_8_has_all_process_functions(python):
    program = """
from cuckpt import driver
for name in "get_state get_restore_thread_id lock checkpoint restore unlock".split():
    getattr(driver, f"checkpoint_process_{name}")(1)
print(driver.has_checkpoint(), driver.has_custom_storage())
"""
    assert python(program, NULL_DRIVER_VERSION="12080").stdout == "True False\n"


def test_failed_load_is_tried_again(python):
    program = """
import os
from cuckpt import driver
library = os.environ.pop("CUCKPT_LIBCUDA")
os.environ["CUCKPT_LIBCUDA"] = "/nowhere"
try:
    driver.init(0)
except driver.DynamicLibNotFoundError:
    os.environ["CUCKPT_LIBCUDA"] = library
driver.init(0)
os.environ["CUCKPT_LIBCUDA"] = "/nowhere"  # the choice is final now
driver.checkpoint_process_get_state(1)
print(driver.library_path() == library)
"""
    assert python(program).stdout == "True\n"


def test_missing_symbol_fails_only_its_own_function(python):
    program = """
from cuckpt import driver
print(driver.has_custom_storage(), driver.driver_get_version())
driver.checkpoint_process_lock(1)
driver.checkpoint_operation_complete(8)
"""
    text = fails(python, program, NULL_DRIVER_VERSION="13000")
    assert text.startswith("cuckpt.errors.FunctionNotFoundError: ")
    assert "cuCheckpointOperationComplete is not in this driver" in text
    assert os.environ["CUCKPT_LIBCUDA"] in text
    assert "CUDA 13.0" in text
    assert text.endswith("it needs CUDA 13.4 or later")


def test_driver_older_than_the_checkpoint_api(python):
    text = fails(python, CALL, NULL_DRIVER_VERSION="12040")
    assert "cuCheckpointProcessGetState is not in this driver" in text
    assert text.endswith("it needs CUDA 12.8 or later")


def test_custom_storage_is_asked_for_at_13040(python):
    program = """
from cuckpt import driver
print(driver.has_custom_storage())
driver.checkpoint_operation_complete(8)
"""
    assert python(program, NULL_DRIVER_VERSION="13040").stdout == "True\n"


def test_library_that_is_no_driver(python):
    program = "from cuckpt import driver; driver.init(0)"
    import _ctypes

    text = fails(python, program, CUCKPT_LIBCUDA=_ctypes.__file__)
    assert f"{_ctypes.__file__} is not a CUDA driver: it has no cuInit" in text


def test_driver_without_get_proc_address(python, tmp_path):
    # Drivers before CUDA 12.0: plain symbols, no checkpoint functions.
    import subprocess

    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned f) { return f; }")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = "from cuckpt import driver; driver.init(0); print('ran'); " + CALL
    result = python(program, check=False, CUCKPT_LIBCUDA=str(library))
    assert result.stdout == "ran\n"
    assert "FunctionNotFoundError: cuCheckpointProcessGetState" in result.stderr
