import queue
import subprocess
import sys
import threading

import pytest

from cuckpt import driver


class Target:
    """A child process that uses the GPU; no answer in time is a failure."""

    def __init__(self, *command):
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def send(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self, timeout=60):
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            pytest.fail(f"target {self.pid} gave no answer in {timeout} s")
        assert line is not None, f"target ended with {self.process.wait()}"
        return line

    def ask(self, command):
        self.send(command)
        return self.answer()

    def is_silent(self, seconds):
        try:
            self._lines.put(self._lines.get(timeout=seconds))
        except queue.Empty:
            return True
        return False

    def end(self):
        self.process.kill()
        self._reader.join()
        with self.process:  # closes the pipes
            pass


@pytest.fixture
def spawn():
    """Start targets, and end them whatever happens."""
    targets = []

    def start(*command):
        targets.append(Target(*command))
        return targets[-1]

    yield start
    for target in targets:
        target.end()


@pytest.fixture
def target(spawn):
    """A target with a context on GPU 0."""
    made = spawn("-m", "cuckpt.target")
    assert made.ask("start") == "started"
    return made


@pytest.fixture(scope="session")
def gpu_uuid():
    """UUID of GPU 0."""
    driver.init(0)
    return driver.device_get_uuid_v2(driver.device_get(0))
