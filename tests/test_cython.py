"""Other packages cimport cuckpt: one is built in C and in C++, and run."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuckpt import driver
from cuckpt.structs import CheckpointGpuPair, CheckpointRestoreArgs

SOURCE = Path(__file__).parent / "cython"
OLD, NEW = bytes(range(16)), bytes(range(16, 32))


@pytest.fixture(scope="module", params=["c", "c++"])
def consumer_path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("consumer")
    for file in SOURCE.iterdir():
        shutil.copy(file, folder)
    built = subprocess.run(
        [sys.executable, "-P", "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={
            **os.environ,
            "CONSUMER_LANGUAGE": request.param,
            "CFLAGS": "-O1 -Wall -Wextra -Werror -Wno-unused-parameter",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("consumer.*.so"))


@pytest.fixture(scope="module")
def consumer(consumer_path):
    spec = importlib.util.spec_from_file_location("consumer", consumer_path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_whole_cycle_runs_without_the_gil(hook, consumer):
    assert consumer.suspend_and_resume(4711) == 0
    assert [call for call, _, _ in hook.calls] == [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetUuid_v2",
        "cuCheckpointProcessGetState",
        "cuCheckpointProcessLock",
        "cuCheckpointProcessCheckpoint",
        "cuCheckpointProcessRestore",
        "cuCheckpointProcessUnlock",
    ]
    assert [pid for _, pid, _ in hook.calls[3:]] == [4711] * 5


def test_results_come_back_as_they_are(hook, consumer):
    for result in 401, 500:
        hook.answer(lambda call, *_, result=result: result * call.endswith("Restore"))
        assert consumer.suspend_and_resume(4711) == result


def test_struct_objects_are_cimported(hook, consumer):
    def answer(call, pid, address):
        assert hook.pairs_at(address) == OLD + NEW
        return 7

    hook.answer(answer)
    assert consumer.restore_with(1, CheckpointRestoreArgs(gpu_pairs=[(OLD, NEW)])) == 7
    assert consumer.old_uuid_of(CheckpointGpuPair(OLD, NEW)) == OLD
    with pytest.raises(TypeError):
        consumer.restore_with(1, CheckpointGpuPair())


def test_every_other_function(hook, consumer):
    hook.remove()
    assert consumer.everything_else() == (13050, 1, 4711, True)
    assert consumer.complete(8) == 0
    assert consumer.checkpoint_into(1) is False


def test_missing_function_raises_from_nogil_code(python, consumer_path):
    program = f"""
import sys
sys.path.insert(0, {str(consumer_path.parent)!r})
import consumer
print(consumer.suspend_and_resume(1))
try:
    consumer.complete(8)
except RuntimeError as error:
    print(type(error).__name__)
"""
    result = python(program, NULL_DRIVER_VERSION="13000")
    assert result.stdout == "0\nFunctionNotFoundError\n"


def test_missing_library_raises_from_nogil_code(python, consumer_path):
    program = f"""
import sys
sys.path.insert(0, {str(consumer_path.parent)!r})
import consumer
consumer.suspend_and_resume(1)
"""
    result = python(program, check=False, CUCKPT_LIBCUDA="/nowhere")
    assert "DynamicLibNotFoundError" in result.stderr
    assert driver.DynamicLibNotFoundError.__name__ in result.stderr
