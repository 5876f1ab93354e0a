"""The command line of cuda-checkpoint: what needs no GPU, or faults to be seen.

Each row of it is tested by tests/gpu/test_cli_contract.py.
"""

import os
import signal
import subprocess
import sysconfig
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

CUCKPT = str(Path(sysconfig.get_path("scripts")) / "cuckpt")


def run(*arguments, **environment):
    variables = {**os.environ, **environment}
    return subprocess.run(
        [CUCKPT, *arguments],
        env={name: value for name, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
    )


def test_driver_that_is_missing_is_named(no_driver):
    result = run("--get-state", "--pid", "1", **no_driver)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith('Error initializing CUDA: "no CUDA driver: ')
    assert result.stderr.count("\n") == 1


def test_driver_without_checkpoint_calls_is_named():
    result = run("--get-state", "--pid", "1", NULL_DRIVER_VERSION="12000")
    assert result.returncode == 1
    assert result.stderr == (
        'Error initializing CUDA: "this driver has no checkpoint calls, which came '
        'with CUDA 12.8 (570)"\n'
    )


def test_init_that_fails_is_told(simulate):
    command = [CUCKPT, "--action", "lock", "--pid", "1"]
    result = simulate("env", "CUDA_VISIBLE_DEVICES=", *command)
    assert result.returncode == 1
    assert result.stderr == (
        'Error initializing CUDA: "no CUDA-capable device is detected"\n'
    )


def test_strings_are_those_of_the_driver(machine_program):
    printed = machine_program(
        f"""
        from cuckpt.simulator import Fault
        strings = {{
            1: "invalid argument",
            2: "out of memory",
            3: "initialization error",
            201: "invalid device context",
            304: "OS call failed or operation not supported on this OS",
            401: "the operation cannot be performed in the present state",
            600: "device not ready",
            801: "operation not supported",
            100: "no CUDA-capable device is detected",
        }}
        with Machine() as machine:
            target = machine.spawn()
            for action in "lock", "checkpoint", "restore", "unlock":
                for status, string in strings.items():
                    at = machine.calls[action] + 1
                    machine.inject(Fault(action, result=status, at=at))
                    result = subprocess.run(
                        [{CUCKPT!r}, "--action", action, "--pid", str(target.pid)],
                        capture_output=True,
                        text=True,
                    )
                    assert result.returncode == 1
                    assert result.stdout == ""
                    expected = f'Could not {{action}} on process ID {{target.pid}}: '
                    assert result.stderr == f'{{expected}}"{{string}}"\\n'
            print("all")
        """
    )
    assert printed == "all\n"


def test_states_of_a_later_driver_are_words(machine_program):
    printed = machine_program(
        f"""
        with Machine() as machine:
            target = machine.spawn({{0: MIB}})
            driver.init()
            driver.device_primary_ctx_retain(0)
            driver.checkpoint_process_lock(target.pid)
            args = driver.CheckpointCheckpointArgs(custom_storage=True)
            driver.checkpoint_process_checkpoint(target.pid, args)
            ask = [{CUCKPT!r}, "--get-state", "--pid", str(target.pid)]
            print(subprocess.check_output(ask, text=True), end="")
            driver.checkpoint_operation_complete(args)
            args = driver.CheckpointRestoreArgs(custom_storage=True)
            driver.checkpoint_process_restore(target.pid, args)
            print(subprocess.check_output(ask, text=True), end="")
        """
    )
    assert printed == "checkpointing\nrestoring\n"


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONWARNINGS": "error"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "nowhere.UTF-8", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": None, "USER": None, "PATH": "/nowhere"},
        {"TERM": None, "COLUMNS": "1"},
    ],
    ids=lambda environment: "+".join(environment),
)
def test_environment_adds_nothing_to_an_answer(environment):
    result = run("--get-state", "--pid", "1", **environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "running\n", "")
    result = run("--\u00e9t\udce9", **environment)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def test_little_is_imported_for_an_answer(python):
    program = """
    import sys
    before = set(sys.modules)
    from cuckpt.cli import main
    assert main(["--get-state", "--pid", "1"]) == 0
    heavy = ["argparse", "json", "typing", "dataclasses", "ctypes", "pathlib", "shutil"]
    heavy += ["subprocess", "importlib.metadata", "cuckpt.process", "cuckpt.cli.verbs"]
    print([name for name in heavy if name in set(sys.modules) - before])
    """
    assert python(textwrap.dedent(program)).stdout == "running\n[]\n"


def test_interrupt_ends_a_lock_that_waits(machine_program):
    printed = machine_program(
        f"""
        import signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # not ignored by the child
        with Machine() as machine:
            target = machine.spawn()
            target.ask(f"spin {{10**9}}")
            command = [{CUCKPT!r}, "--action", "lock", "--pid", str(target.pid)]
            with subprocess.Popen(command, stderr=subprocess.PIPE) as lock:
                while not machine.calls["lock"]:
                    time.sleep(0.01)
                lock.send_signal(signal.SIGINT)
                print(lock.wait(60), lock.stderr.read())
        """
    )
    assert printed == f"{-signal.SIGINT} b''\n"


GETOPT = """
#include <getopt.h>
int main(int argc, char **argv)
{
    static struct option options[] = {
        {"get-state", 0, 0, 1}, {"get-restore-tid", 0, 0, 2}, {"action", 1, 0, 3},
        {"toggle", 0, 0, 4}, {"pid", 1, 0, 'p'}, {"timeout", 1, 0, 't'},
        {"device-map", 1, 0, 'd'}, {"help", 0, 0, 'h'}, {0},
    };
    int found;

    argv[0] = "cuckpt";
    while ((found = getopt_long(argc, argv, "p:t:d:h", options, 0)) != -1)
        if (found == '?')
            return 1;
    return 0;
}
"""


def test_messages_are_those_of_getopt_long(tmp_path):
    source, program = tmp_path / "getopt.c", tmp_path / "getopt"
    source.write_text(GETOPT)
    subprocess.run(["cc", "-o", program, source], check=True)
    for arguments in (
        *("--get", "--foo=1", "--=1", "--g=3", "--t", "--toggle=1", "--pid"),
        *("-x", "-p", "--toggle -t", "--get-state -p1 --x", "--toggle --p"),
        *("--toggle stray -y", "--toggle --timeout=", "--pid 1 --help="),
    ):
        theirs = subprocess.run(
            [program, *arguments.split()], capture_output=True, text=True
        )
        ours = run(*arguments.split())
        if theirs.returncode:
            assert ours.stderr.startswith(theirs.stderr), arguments
            assert "Usage: " in ours.stderr
        else:
            assert "option" not in ours.stderr.partition("\n")[0], arguments


def test_symbolic_link_of_that_name_is_cuda_checkpoint(tmp_path):
    link = tmp_path / "cuda-checkpoint"
    link.symlink_to(CUCKPT)
    result = subprocess.run([link, "ps"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("No operation selected\nUsage: cuda-checkpoint ")
