"""The command line of cuda-checkpoint: each row as NVIDIA's tool answers it."""

import contextlib
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from cuckpt import driver
from cuckpt.target import Target

CUCKPT = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
State = driver.ProcessState
IN_STATE = (
    'on process ID {pid}: "the operation cannot be performed in the present state"'
)
INVALID = 'Could not restore on process ID {pid}: "invalid argument"'
NOWHERE = "GPU-00000000-0000-0000-0000-000000000000"


class Row(NamedTuple):
    """What is asked of a target in which state, the answer, and the state then."""

    before: State
    arguments: str
    after: State
    printed: str = ""
    problem: str = ""  # the first line of the error output
    with_usage: bool = False

    @property
    def status(self):
        return 1 if self.problem else 0


def stays(state, arguments, printed="", problem="", with_usage=False):
    return Row(state, arguments, state, printed, problem, with_usage)


def misuse(arguments, problem):
    return stays(State.RUNNING, arguments, "", problem, True)


RUNNING, LOCKED, CHECKPOINTED = State.RUNNING, State.LOCKED, State.CHECKPOINTED
ROWS = [
    stays(RUNNING, "--get-state --pid {pid}", "running\n"),
    stays(RUNNING, "--get-state -p{pid}", "running\n"),
    stays(RUNNING, "--get-s --pid={pid}", "running\n"),
    stays(RUNNING, "--get-state --pid {thread}", "running\n"),
    stays(RUNNING, "--get-restore-tid --pid {pid}", "{thread}\n"),
    stays(RUNNING, "--get-restore-tid --pid {thread}", "{thread}\n"),
    stays(
        RUNNING,
        "--get-state --pid 1",
        problem='Error getting process state for process ID 1: "initialization error"',
    ),
    stays(
        RUNNING,
        "--get-state --pid 4194305",
        problem="Error getting process state for process ID 4194305: "
        '"OS call failed or operation not supported on this OS"',
    ),
    stays(
        RUNNING,
        "--get-restore-tid --pid 1",
        problem="Could not find restore thread for process ID 1",
    ),
    stays(
        RUNNING,
        "--get-restore-tid --pid 0",
        problem="Could not find restore thread for process ID 0",
    ),
    stays(
        RUNNING,
        "--toggle --pid 1",
        problem='Error toggling CUDA in process ID 1: "initialization error"',
    ),
    stays(
        RUNNING,
        "--action lock --pid 1 --timeout 100",
        problem='Could not lock on process ID 1: "initialization error"',
    ),
    *[
        stays(
            RUNNING,
            f"--action {action} --pid {{pid}}",
            problem=f"Could not {action} {IN_STATE}",
        )
        for action in ("checkpoint", "restore", "unlock")
    ],
    Row(RUNNING, "--action lock --pid {pid} --timeout 10000", LOCKED),
    stays(LOCKED, "--get-state --pid {thread}", "locked\n"),
    stays(LOCKED, "--get-restore-tid --pid {pid}", "{thread}\n"),
    stays(
        LOCKED, "--action lock --pid {pid} -t 100", problem=f"Could not lock {IN_STATE}"
    ),
    stays(
        LOCKED,
        "--toggle --pid {pid}",
        problem="Error toggling CUDA in process ID {pid}: "
        '"the operation cannot be performed in the present state"',
    ),
    Row(LOCKED, "--action unlock --pid {pid}", RUNNING),
    Row(RUNNING, "--action lock --pid {pid}", LOCKED),
    Row(LOCKED, "--action checkpoint --pid {pid}", CHECKPOINTED),
    stays(CHECKPOINTED, "--get-state --pid {pid}", "checkpointed\n"),
    stays(CHECKPOINTED, "--get-restore-tid --pid {pid}", "{thread}\n"),
    stays(
        CHECKPOINTED,
        f"--action restore --pid {{pid}} --device-map {NOWHERE}={NOWHERE}",
        problem=INVALID,
    ),
    Row(CHECKPOINTED, "--action restore --pid {pid}", LOCKED),
    Row(LOCKED, "--action checkpoint --pid {thread}", CHECKPOINTED),
    Row(CHECKPOINTED, "--action restore --pid {pid} --device-map {map}", LOCKED),
    Row(LOCKED, "--action checkpoint -p {pid}", CHECKPOINTED),
    Row(CHECKPOINTED, "--action restore -d{map} -p {pid}", LOCKED),
    Row(LOCKED, "--action unlock --pid {pid}", RUNNING),
    Row(RUNNING, "--toggle --pid {pid}", CHECKPOINTED),
    Row(CHECKPOINTED, "--toggle --pid {pid}", RUNNING),
    misuse("--pid {pid}", "No operation selected"),
    misuse("--get-state", "Missing pid to perform operation on"),
    misuse("--toggle", "Missing pid to perform operation on"),
    misuse("--action lock", "Missing pid to perform operation on"),
    *[
        misuse(f"--get-state --pid {pid}", "pid must be a non-negative integer")
        for pid in ("x", "-1", "1.5", "0x10", "1,2", "2147483648", "9" * 5000, "\u0661")
    ],
    misuse(
        "--action lock --timeout x --pid {pid}",
        "timeout must be a non-negative integer",
    ),
    misuse("--action stop --pid {pid}", "Invalid process state"),
    *[
        misuse(
            f"--action restore --pid {{pid}} --device-map {text}",
            "Invalid device remap",
        )
        for text in ("x", "0=1", NOWHERE, f"{NOWHERE}={NOWHERE},", f"{NOWHERE}=")
    ],
    misuse("--foo --pid {pid}", "{program}: unrecognized option '--foo'"),
    misuse("-p {pid} -x", "{program}: invalid option -- 'x'"),
    misuse("--get-state --pid", "{program}: option '--pid' requires an argument"),
    misuse("--toggle -p", "{program}: option requires an argument -- 'p'"),
    misuse("--toggle=1", "{program}: option '--toggle' doesn't allow an argument"),
    misuse(
        "--get",
        "{program}: option '--get' is ambiguous; possibilities: "
        "'--get-state' '--get-restore-tid'",
    ),
]
CALLS = [row for row in ROWS if not row.with_usage]
NEXT = {
    (RUNNING, LOCKED): driver.checkpoint_process_lock,
    (RUNNING, CHECKPOINTED): driver.checkpoint_process_lock,
    (LOCKED, CHECKPOINTED): driver.checkpoint_process_checkpoint,
    (CHECKPOINTED, LOCKED): driver.checkpoint_process_restore,
    (CHECKPOINTED, RUNNING): driver.checkpoint_process_restore,
    (LOCKED, RUNNING): driver.checkpoint_process_unlock,
}


@pytest.fixture(scope="module")
def subject():
    """One target for all rows, since each leaves it in a state that is known."""
    with Target({0: 16 << 20}) as target:
        yield target
        bring(target.pid, RUNNING)
        target.check()


def state_of(pid):
    return driver.checkpoint_process_get_state(pid)


def bring(pid, goal):
    while (state := state_of(pid)) != goal:
        NEXT[state, goal](pid)


@pytest.fixture
def words(subject, same_pairs):
    """What stands for the words in braces."""
    texts = [str(uuid) for pair in same_pairs for uuid in pair]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return {
        "pid": subject.pid,
        "thread": driver.checkpoint_process_get_restore_thread_id(subject.pid),
        "map": ",".join(f"{old}={new}" for old, new in pairs),
    }


@pytest.fixture(params=["cuda-checkpoint", "cuckpt"])
def program(request, shim):
    return shim if request.param == "cuda-checkpoint" else CUCKPT


def run(program, arguments, through=(), **options):
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, **options}
    command = [*through, program, *arguments]
    return subprocess.run(command, timeout=60, text=True, **options)


def compare(row, program, words, through=(), **options):
    """Ask, and compare everything that comes of it."""
    bring(words["pid"], row.before)
    arguments = row.arguments.format(**words).split()
    result = run(program, arguments, through, **options)
    words = {**words, "program": Path(program).name}
    problem = row.problem.format(**words)
    if problem:
        problem += "\n"
    if row.with_usage:
        problem += usage(program)
    assert result.stdout == row.printed.format(**words)
    assert result.stderr == problem
    assert result.returncode == row.status
    assert state_of(words["pid"]) == row.after


def usage(program):
    # cuckpt -h tells of its verbs.
    return run(program, ["--toggle", "-h"]).stdout


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arguments[:60])
def test_row_is_answered(row, program, words):
    compare(row, program, words)


def test_nothing_asked_is_no_operation(shim):
    result = run(shim, [])
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "No operation selected\n" + usage(shim)


@pytest.mark.parametrize("option", ["-h", "--help", "--he"])
def test_help_tells_of_action_early_enough(shim, option):
    result = run(shim, [option])
    assert (result.returncode, result.stderr) == (0, "")
    assert "--action" in result.stdout[:2047]
    assert result.stdout.startswith("Usage: cuda-checkpoint ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arguments[:60])
def test_row_is_answered_in_an_empty_environment(row, shim, words):
    kept = "CUCKPT_LIBCUDA", "CUCKPT_SIMULATOR", "LD_LIBRARY_PATH"  # the machine
    kept += "LD_PRELOAD", "ASAN_OPTIONS"  # a sanitizer
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PATH"] = "/usr/bin:/bin"
    compare(row, shim, words, env=environment, cwd="/")


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.arguments[:60])
def test_row_is_answered_without_standard_input(row, shim, words):
    compare(row, shim, words, through=closing("<&-"))


def closing(redirections):
    """Return how to start a program with some descriptors closed."""
    return ["sh", "-c", f'exec "$0" "$@" {redirections}']


@contextlib.contextmanager
def without_readers():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextlib.contextmanager
def full_device():
    with open("/dev/full", "wb") as full:
        yield full


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.arguments[:60])
@pytest.mark.parametrize(
    ("output", "through"),
    [
        (without_readers, []),
        (full_device, []),
        (contextlib.nullcontext, closing("<&- >&- 2>&-")),
        (contextlib.nullcontext, closing(">&-")),
    ],
    ids=["no reader", "no space", "all closed", "output closed"],
)
def test_action_is_done_and_an_answer_that_cannot_arrive_is_a_failure(
    row, shim, words, output, through
):
    bring(words["pid"], row.before)
    arguments = row.arguments.format(**words).split()
    with output() as place:
        outputs = {"capture_output": False, "stdout": place, "stderr": place}
        result = run(shim, arguments, through, **outputs)
    assert result.returncode == (1 if row.printed else row.status)
    assert state_of(words["pid"]) == row.after


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in CALLS
        if "action lock" not in row.arguments and "toggle" not in row.arguments
    ],
    ids=lambda row: row.arguments[:60],
)
def test_row_is_answered_while_only_the_restore_thread_runs(row, shim, words, tracer):
    bring(words["pid"], row.before)
    assert tracer.stop_all_but(words["pid"], words["thread"]) >= 1
    compare(row, shim, words)


def test_lock_gives_up_after_so_many_milliseconds(target, program):
    assert target.ask("spin 3000") == "spinning"
    arguments = ["--action", "lock", "--pid", str(target.pid), "--timeout", "100"]
    result = run(program, arguments)
    assert result.stderr == (
        f'Could not lock on process ID {target.pid}: "device not ready"\n'
    )
    assert result.returncode == 1
    assert target.process.poll() is None
    assert state_of(target.pid) is RUNNING
    assert target.ask("wait") == "waited"


def test_what_cannot_be_checkpointed_runs_after_a_toggle(target, program):
    target.ask("manage")
    pid = str(target.pid)
    result = run(program, ["--toggle", "--pid", pid])
    assert result.stderr == (
        f'Error toggling CUDA in process ID {pid}: "operation not supported"\n'
    )
    assert state_of(target.pid) is RUNNING


def test_what_cannot_be_checkpointed_stays_locked(target, program):
    target.ask("manage")
    pid = str(target.pid)
    driver.checkpoint_process_lock(target.pid)
    result = run(program, ["--action", "checkpoint", "--pid", pid])
    assert result.stderr == (
        f'Could not checkpoint on process ID {pid}: "operation not supported"\n'
    )
    assert state_of(target.pid) is LOCKED
