"""The demo, on a simulated GPU."""

import contextlib
import os
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")


def demo(**environment):
    variables = {**os.environ, "CUCKPT_LIBCUDA": None, **environment}
    return subprocess.run(
        [COMMAND, "demo", "--memory", "8MiB"],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_demo_runs_on_a_simulated_gpu_and_says_why(no_driver):
    result = demo(**no_driver)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("On a simulated GPU, since there is no real one: ")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "Every byte came back."
    assert [line.split()[-1] for line in lines if " ms  " in line] == [
        *("RUNNING", "LOCKED", "CHECKPOINTED", "LOCKED", "RUNNING", "RUNNING"),
        *("LOCKED", "CHECKPOINTING", "CHECKPOINTING", "CHECKPOINTED"),
        *("RESTORING", "RESTORING", "LOCKED", "RUNNING", "RUNNING"),
    ]
    assert "8 MiB of GPU memory are free again" in result.stdout


def test_demo_ends_quietly_when_its_reader_does(no_driver):
    command = [COMMAND, "demo", "--memory", "2MiB"]
    variables = {**os.environ, **no_driver}
    del variables["CUCKPT_LIBCUDA"]
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_demo_tells_that_the_gpu_is_too_small(simulate):
    result = simulate(COMMAND, "demo", "--memory", "64MiB", memory="32MiB")
    assert result.returncode == 1
    assert "32 MiB free, less than 64 MiB; see --memory" in result.stdout


def test_demo_ends_its_target_when_it_is_ended(no_driver):
    variables = {**os.environ, **no_driver}
    del variables["CUCKPT_LIBCUDA"]
    with subprocess.Popen(
        [COMMAND, "demo", "--memory", "1GiB"], env=variables, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (child := children.read_text().split()):
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 143
    # Nobody reaps it quickly, since its parent has ended.
    deadline = time.monotonic() + 20
    while (stat := Path(f"/proc/{child[0]}/stat")).exists():
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_demo_never_falls_back_from_a_chosen_driver():
    result = demo(CUCKPT_LIBCUDA="/nowhere")
    assert result.returncode == 1
    assert "/nowhere" in result.stdout


def test_demo_tells_that_custom_storage_needs_a_newer_driver(simulate):
    result = simulate(COMMAND, "demo", "--memory", "8MiB", driver_version="13.0")
    assert result.returncode == 0, result.stdout
    assert "driver 615" in result.stdout


def test_demo_fails_if_the_memory_comes_back_changed(simulate):
    changing = """
    import sys
    from cuckpt import demo
    class Changed(demo.Target):
        def answer(self, timeout_s=None):
            command = self._sent[0]
            answer = super().answer(timeout_s)
            return answer + "0" if command == "check" else answer
    demo.Target = Changed
    sys.exit(demo.main(1 << 20))
    """
    result = simulate(sys.executable, "-P", "-c", textwrap.dedent(changing))
    assert result.returncode == 1
    assert "has another content" in result.stdout
