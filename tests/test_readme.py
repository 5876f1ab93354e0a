"""What the README shows is what happens."""

import re
from pathlib import Path

from cuckpt import hints

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_simulation_examples_run(python):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    whole, faults = [block for block in blocks if "Machine(" in block]
    printed = python(whole, CUCKPT_LIBCUDA=None).stdout
    assert printed == "<ProcessState.CHECKPOINTED: 2>\n"
    assert python(faults, CUCKPT_LIBCUDA=None).stdout == ""


def test_pytest_example_passes(tmp_path, python):
    (example,) = re.findall(r"```python\n(import pytest.*?)```", README, re.DOTALL)
    (tmp_path / "test_example.py").write_text(example)
    program = "import sys, pytest; sys.exit(pytest.main(['-q', '.']))"
    assert "1 passed" in python(program, CUCKPT_LIBCUDA=None).stdout


def test_error_example_is_the_text_of_the_error():
    (example,) = re.findall(r"```\n(ERROR_.*?)```", README, re.DOTALL)
    text = hints.explain("ERROR_NOT_READY (600)", 600, "cuCheckpointProcessLock", 4711)
    assert " ".join(example.split()) == text
