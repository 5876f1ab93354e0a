"""The pages in docs/ name what there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIMULATOR = (ROOT / "docs/simulator.md").read_text()


def names_in(*files):
    text = "".join(file.read_text() for file in files)
    return set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def test_rows_of_the_simulator_name_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", SIMULATOR))
    assert named <= names_in(*(ROOT / "tests").glob("**/test_*.py"))


def test_scenarios_are_all_in_the_table_as_measured():
    rows = [line for line in SIMULATOR.splitlines() if "| measured |" in line]
    named = set(re.findall(r"`(test_\w+)`", "".join(rows)))
    files = [*(ROOT / "tests/gpu").glob("test_*.py")]
    others = {
        *("test_copier.py", "test_frameworks.py", "test_jobs.py"),
        *("test_cli_contract.py", "test_criu.py"),
    }
    files = [file for file in files if file.name not in others]
    assert names_in(*files) == named


def test_example_of_a_test_passes(tmp_path, python):
    (example,) = re.findall(r"```python\n(.*?)```", SIMULATOR, re.DOTALL)
    file = tmp_path / "test_example.py"
    file.write_text(example)
    program = f"import sys, pytest; sys.exit(pytest.main(['-q', {str(file)!r}]))"
    assert "1 passed" in python(program, CUCKPT_LIBCUDA=None).stdout
