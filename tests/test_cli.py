import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import cuckpt

COMMAND = str(Path(sysconfig.get_path("scripts")) / "cuckpt")


def run(*arguments, **environment):
    variables = {**os.environ, **environment}
    return subprocess.run(
        [COMMAND, *arguments],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_info_names_the_driver():
    result = run("info")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"cuckpt          {cuckpt.__version__}",
        f"driver          {os.environ['CUCKPT_LIBCUDA']}",
        "CUDA version    13.5",
        "checkpoint      yes",
        "custom storage  yes",
    ]


def test_info_tells_an_old_driver():
    result = run("info", NULL_DRIVER_VERSION="13000")
    assert "CUDA version    13.0\n" in result.stdout
    assert "custom storage  no, needs CUDA 13.4 (driver 615)\n" in result.stdout


def test_info_succeeds_without_a_driver_and_says_so(no_driver):
    result = run("info", **no_driver)
    assert result.returncode == 0
    assert re.search(r"^driver +none$", result.stdout, re.MULTILINE)
    assert "Install the NVIDIA driver" in " ".join(result.stdout.split())


def test_info_fails_with_a_choice_that_does_not_load():
    result = run("info", CUCKPT_LIBCUDA="/nowhere")
    assert result.returncode == 1
    assert "/nowhere" in result.stdout


def test_info_shows_a_driver_that_does_not_tell_its_version(tmp_path):
    source, library = tmp_path / "old.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return flags; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    result = run("info", CUCKPT_LIBCUDA=str(library))
    assert result.returncode == 0
    assert f"driver          {library}" in result.stdout
    assert "CUDA version    unknown" in result.stdout


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (os.devnull, {"driver": None, "cuda_version": None, "custom_storage": False}),
        (None, {"cuda_version": 13050, "custom_storage": True, "error": None}),
    ],
)
def test_info_json(library, expected):
    chosen = {"CUCKPT_LIBCUDA": library} if library else {}
    facts = json.loads(run("info", "--json", **chosen).stdout)
    assert list(facts) == [
        "cuckpt",
        "driver",
        "cuda_version",
        "checkpoint",
        "custom_storage",
        "error",
    ]
    assert facts.items() >= expected.items()


def test_no_verb_prints_help():
    result = run()
    assert result.returncode == 0
    assert "info" in result.stdout


def test_wrong_usage_exits_2():
    assert run("nonsense").returncode == 2


def test_version():
    result = subprocess.run(
        [sys.executable, "-P", "-m", "cuckpt", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == f"cuckpt {cuckpt.__version__}\n"
