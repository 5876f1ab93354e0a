"""`cuckpt install-shim`: the program named cuda-checkpoint that it makes."""

import json
import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cuckpt.cli import shim

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

CUCKPT = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
PACKAGES = str(Path(shim.__file__).parents[2])


def install(*arguments, path="/usr/bin:/bin"):
    return subprocess.run(
        [CUCKPT, "install-shim", *map(str, arguments)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


def answers(program):
    """Tell whether a program is a cuda-checkpoint that needs nothing around it."""
    kept = "CUCKPT_LIBCUDA", "LD_PRELOAD", "ASAN_OPTIONS"
    result = subprocess.run(
        [program, "--get-state", "--pid", "1"],
        env={name: os.environ[name] for name in kept if name in os.environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    return (result.returncode, result.stdout, result.stderr) == (0, "running\n", "")


def test_program_is_made_and_answers(tmp_path):
    result = install(tmp_path)
    program = tmp_path / "cuda-checkpoint"
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        f"made {program}\nit is not in PATH: export PATH={tmp_path}:$PATH\n"
    )
    assert stat.S_IMODE(program.stat().st_mode) == 0o755
    assert os.listdir(tmp_path) == ["cuda-checkpoint"]
    assert answers(program)


def test_program_that_is_found_needs_no_word(tmp_path):
    result = install(tmp_path, path=f"{tmp_path}:/usr/bin:/bin")
    assert result.stdout == f"made {tmp_path}/cuda-checkpoint\n"


def test_program_before_it_in_path_is_named(tmp_path):
    (tmp_path / "first").mkdir()
    install(tmp_path / "first")
    result = install(tmp_path, path=f"{tmp_path}/first:{tmp_path}")
    assert result.stdout.endswith(
        f"in PATH another one comes first: {tmp_path}/first/cuda-checkpoint\n"
    )


def test_own_program_is_replaced_and_another_is_not(tmp_path):
    program = tmp_path / "cuda-checkpoint"
    assert install(tmp_path).returncode == 0
    assert install(tmp_path).returncode == 0
    program.write_text("NVIDIA's\n")
    result = install(tmp_path)
    assert result.returncode == 1
    assert "none that cuckpt made" in " ".join(result.stderr.split())
    assert program.read_text() == "NVIDIA's\n"
    assert install(tmp_path, "--force").returncode == 0
    assert answers(program)


def test_folder_that_is_not_there_is_an_error(tmp_path):
    result = install(tmp_path / "none")
    assert result.returncode == 1
    problem = f"cuckpt install-shim: there is no folder {tmp_path}/none"
    assert " ".join(result.stderr.split()) == problem


def test_json_tells_where_it_is(tmp_path):
    facts = json.loads(install(tmp_path, "--json").stdout)
    assert facts == {"path": f"{tmp_path}/cuda-checkpoint", "found": None}


@pytest.mark.parametrize("folder", ["a b", "it's $HOME", "long" * 40])
def test_interpreter_that_is_no_first_line_is_run_by_a_shell(tmp_path, folder):
    python = tmp_path / folder / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    program = tmp_path / "cuda-checkpoint"
    program.write_text(shim.program(str(python), PACKAGES))
    program.chmod(0o755)
    assert program.read_text().startswith("#!/bin/sh\n")
    assert answers(program)
