"""The tests of jobs, which need a simulated driver in their own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="it runs tests in a process of their own")

JOBS = Path(__file__).parent / "jobs"


def test_jobs_are_suspended_and_resumed_on_simulated_machines(monkeypatch, capfd):
    monkeypatch.delenv("CUCKPT_LIBCUDA")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--driver=simulated"]
    workers = min(4, len(os.sched_getaffinity(0)))
    command += ["-n", str(workers), JOBS]
    result = subprocess.run(command, timeout=900, check=False)
    printed, errors = capfd.readouterr()
    assert result.returncode == 0, printed + errors
    assert "skipped" not in printed
