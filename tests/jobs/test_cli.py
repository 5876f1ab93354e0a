"""The verbs, each on a simulated machine of its own."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from cuckpt import Process, driver, proc, storage
from cuckpt.cli import verbs
from cuckpt.simulator import Fault

CUCKPT = str(Path(sysconfig.get_path("scripts")) / "cuckpt")
DOCS = (Path(__file__).parents[2] / "docs/cli.md").read_text()
MIB = 1 << 20
two_gpus = pytest.mark.cuda_machine(gpus=2)


def cuckpt(*arguments, **environment):
    variables = {**os.environ, **environment}
    return subprocess.run(
        [CUCKPT, *map(str, arguments)],
        env={name: value for name, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


# Others on this computer may have machines of their own.
OURS = "--tree", os.getpid()


def words(text):
    return " ".join(text.split())


def on_a_terminal(*arguments, columns=80, **environment):
    """Run it on a terminal; return its status and what this shows, with escapes."""
    terminal, end = pty.openpty()
    size = {"COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(
        [CUCKPT, *map(str, arguments)],
        env={**os.environ, **size, **environment},
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    shown = b""
    while select.select([terminal], [], [], 60)[0]:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # so ends a terminal
            break
        shown += part
    os.close(terminal)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


@pytest.fixture
def no_nvml(tmp_path, monkeypatch):
    """As if nvidia-ml-py was not installed."""
    text = "raise ModuleNotFoundError('no pynvml', name='pynvml')"
    (tmp_path / "pynvml.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def no_rich(tmp_path, monkeypatch):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def targets(cuda_machine):
    return [cuda_machine.spawn({0: 2 * MIB}), cuda_machine.spawn({0: 4 * MIB})]


@pytest.fixture
def pids(targets):
    return [target.pid for target in targets]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "image"


def states(targets):
    return [Process(target.pid).state for target in targets]


# ps


@two_gpus
def test_ps_shows_what_each_process_is_and_uses(cuda_machine):
    first = cuda_machine.spawn({0: 256 * MIB, 1: 2 * MIB})
    second = cuda_machine.spawn({1: 100 * MIB})
    Process(second.pid).suspend()
    result = cuckpt("ps", *OURS)
    assert result.stderr == ""
    heading, *rows = map(str.split, result.stdout.splitlines())
    assert heading == ["PID", "NAME", "STATE", "GPU", "MEMORY", "HOST", "AGE"]
    assert rows[0][:6] == [str(first.pid), "python", "running", "0:", "256", "MiB"]
    assert rows[1] == ["1:", "2", "MiB"]
    assert rows[2][:5] == [str(second.pid), "python", "checkpointed", "0", "MiB"]
    assert len(rows) == 3
    assert cuckpt("ps", "--tree", first.pid).stdout.count("python") == 1


@pytest.mark.usefixtures("cuda_machine")
def test_ps_says_that_there_is_nobody():
    result = cuckpt("ps", *OURS)
    assert result.returncode == 0
    assert result.stdout.startswith("There are no CUDA processes")


@pytest.mark.usefixtures("no_nvml")
def test_ps_without_nvml_shows_the_rest_and_says_why(targets):
    result = cuckpt("ps", *OURS)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 3
    assert "pip install 'cuckpt[jobs]'" in words(result.stderr)
    facts = json.loads(cuckpt("ps", *OURS, "--json").stdout)
    assert {process["gpu_bytes"] for process in facts["processes"]} == {None}
    assert "nvidia-ml-py" in facts["note"]


def test_ps_does_not_wait_for_who_does_not_answer(cuda_machine, targets):
    stopped, busy = targets
    stopped.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    Process(busy.pid).lock()
    cuda_machine.inject(Fault("checkpoint", delay_s=600))
    call = threading.Thread(target=checkpoint_until_death, args=[busy.pid])
    call.start()
    while not cuda_machine.calls["checkpoint"]:
        time.sleep(0.01)
    rows = [line.split() for line in cuckpt("ps", *OURS).stdout.splitlines()[1:]]
    assert [row[2] for row in rows] == ["stopped", "busy"]
    busy.process.kill()
    call.join()


def checkpoint_until_death(pid):
    with pytest.raises(driver.OperatingSystemError):
        driver.checkpoint_process_checkpoint(pid)


def test_ps_shows_the_pid_inside_of_a_container(targets, pids, monkeypatch, capsys):
    def inside(pid):
        return {
            **read_status(pid),
            "NSpid": f"{pid}\t7" if pid == pids[0] else str(pid),
        }

    read_status = proc.read_status
    monkeypatch.setattr(proc, "read_status", inside)
    assert verbs.main(["ps", "--tree", str(os.getpid())]) == 0
    heading, *rows = map(str.split, capsys.readouterr().out.splitlines())
    assert heading[:3] == ["PID", "NSPID", "NAME"]
    assert [row[:3] for row in rows] == [
        [str(pids[0]), "7", "python"],
        [str(pids[1]), "-", "python"],
    ]


def test_ps_shortens_names_on_a_narrow_terminal_and_nothing_else(targets):
    wide = cuckpt("ps", *OURS).stdout.splitlines()
    status, shown = on_a_terminal("ps", *OURS, columns=20)
    assert status == 0
    narrow = shown.splitlines()
    assert len(narrow) == len(wide)
    for row, full in zip(narrow[1:], wide[1:], strict=True):
        assert row.split()[1] == "pyt+"
        assert row.split()[2:-2] == full.split()[2:-2]  # the age has changed


# suspend, resume, recover


def test_jobs_are_suspended_and_resumed(targets, pids):
    result = cuckpt("suspend", *pids)
    assert result.returncode == 0, result.stderr
    assert states(targets) == ["checkpointed"] * 2
    heading, *rows = map(str.split, result.stdout.splitlines())
    assert heading[-2:] == ["LOCK", "CHECKPOINT"]
    assert [row[1:6] for row in rows[:2]] == [
        ["python", "running", "checkpointed", size, "MiB"] for size in "24"
    ]
    assert result.stdout.splitlines()[-1].startswith("suspend: 2 processes in ")
    assert sorted(re.findall(r"^(\d+) python: (\w+)", result.stderr, re.MULTILINE)) == (
        sorted((str(pid), phase) for pid in pids for phase in ("lock", "checkpoint"))
    )
    result = cuckpt("resume", *pids)
    assert result.returncode == 0, result.stderr
    for target in targets:
        target.check()


def test_tree_is_suspended_and_recovered(targets):
    assert cuckpt("suspend", "--tree", os.getpid()).returncode == 0
    assert states(targets) == ["checkpointed"] * 2
    assert cuckpt("recover", "--tree", os.getpid()).returncode == 0
    assert states(targets) == ["running"] * 2


def test_processes_without_cuda_are_skipped_and_named(targets):
    result = cuckpt("suspend", targets[0].pid, 1)
    assert result.returncode == 0
    assert "\nskipped 1: no CUDA state\n" in result.stdout
    assert states(targets) == ["checkpointed", "running"]


def test_process_that_has_ended_is_skipped(targets):
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        result = cuckpt("suspend", targets[0].pid, ended.pid)
    assert result.returncode == 0
    assert f"\nskipped {ended.pid}: has ended: it is a zombie\n" in result.stdout


@pytest.mark.parametrize("verb", ["suspend", "resume", "recover", "save"])
def test_pid_that_is_not_there_is_named_and_nothing_is_done(targets, verb, folder):
    if verb in ("resume", "recover"):
        Process(targets[0].pid).suspend()
    before = states(targets)
    more = [folder] if verb == "save" else []
    result = cuckpt(verb, targets[0].pid, 4194305, *more, "--json")
    assert result.returncode == 1
    assert f"cuckpt {verb}: process 4194305 is not there" in result.stderr
    assert json.loads(result.stdout)["error"]["type"] == "ProcessGoneError"
    assert states(targets) == before
    assert not folder.exists()


def test_many_that_are_skipped_are_one_line(targets):
    program = "import subprocess, time; "
    program += "[subprocess.Popen(['sleep', '60']) for _ in range(8)]; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True
    ) as tree:
        while len(proc.tree(tree.pid)) < 9:
            time.sleep(0.01)
        pids = [*proc.tree(tree.pid), targets[0].pid]
        result = cuckpt("suspend", *pids)
        os.killpg(tree.pid, signal.SIGKILL)
    assert result.returncode == 0
    (line,) = [line for line in result.stdout.splitlines() if "skipped" in line]
    assert line == f"skipped {', '.join(map(str, pids[:5]))} and 4 more: no CUDA state"


def test_failure_tells_of_each_and_undoes_all(targets, pids):
    targets[1].ask("manage")
    result = cuckpt("suspend", *pids)
    assert result.returncode == 1
    assert result.stdout == ""
    assert states(targets) == ["running"] * 2
    assert "cuckpt suspend: 1 of 2 processes failed\n" in result.stderr
    assert f"process {pids[0]} (python): was running, is running" in result.stderr
    assert "ERROR_NOT_SUPPORTED (801)" in words(result.stderr)
    assert result.stderr.endswith(f"cuckpt doctor {pids[1]}\n")
    assert max(map(len, result.stderr.splitlines())) < 80


@two_gpus
@pytest.mark.parametrize("form", ["numbers", "UUIDs", "both"])
def test_device_map_moves_memory(cuda_machine, form):
    target = cuda_machine.spawn({0: MIB})
    uuids = [str(gpu) for gpu in cuda_machine.gpus]
    gpu_map = {
        "numbers": "0=1",
        "UUIDs": f"{uuids[0]}={uuids[1]},{uuids[1]}={uuids[0]}",
        "both": f"{uuids[0].removeprefix('GPU-').upper()}=1",
    }[form]
    assert cuckpt("suspend", target.pid).returncode == 0
    result = cuckpt("resume", target.pid, "--device-map", gpu_map)
    assert result.returncode == 0, result.stderr
    assert [*Process(target.pid).used_memory()] == [uuids[1]]
    target.check()


@pytest.mark.parametrize(
    ("gpu_map", "problem"),
    [
        ("7=0", "there is no GPU 7"),
        ("0=7", "there is no GPU 7"),
        ("0=GPU-00000000-0000-0000-0000-000000000000", "is none of this machine"),
        ("0=x", "not a GPU UUID: 'x'"),
    ],
)
def test_device_map_that_cannot_be_is_told(targets, gpu_map, problem):
    Process(targets[0].pid).suspend()
    result = cuckpt("resume", targets[0].pid, "--device-map", gpu_map)
    assert result.returncode == 1
    assert result.stderr.startswith("cuckpt resume: ")
    assert problem in words(result.stderr)
    assert states(targets[:1]) == ["checkpointed"]


def test_process_that_is_stopped_meanwhile_is_waited_for_and_named(
    cuda_machine, targets
):
    cuda_machine.inject(Fault("checkpoint", delay_s=0.5))
    pid = targets[0].pid
    command = [CUCKPT, "suspend", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not cuda_machine.calls["checkpoint"]:
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        while " waits: " not in (line := process.stderr.readline()):
            assert line
        os.kill(pid, signal.SIGCONT)
        process.stderr.read()
        assert process.wait(60) == 0
    assert line.startswith(f"{pid} python: checkpoint waits: ")
    assert "stopped" in line


def test_time_limit_may_be_without_end(targets, pids):
    assert cuckpt("suspend", *pids, "--timeout-s", "inf").returncode == 0
    assert states(targets) == ["checkpointed"] * 2


def test_trace_is_written(targets, pids, tmp_path):
    trace = tmp_path / "trace.json"
    assert cuckpt("suspend", *pids, "--trace", trace).returncode == 0
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert names >= {"lock", "checkpoint"}


def test_what_cannot_be_done_is_said_in_few_lines(targets):
    thread = Process(targets[0].pid).restore_thread_id
    for arguments, problem in (
        (["suspend", thread], f"{thread} is a thread of process {targets[0].pid}"),
        (["recover", 1], "there is no process with CUDA state process 1: no CUDA"),
        (["resume", "--tree", 4194305], "process 4194305 is not there"),
        (["ps", "--tree", 4194305], "process 4194305 is not there"),
        (["suspend", targets[0].pid, "--trace", "/none/x"], "/none/x: No such file"),
    ):
        result = cuckpt(*arguments)
        assert result.returncode == 1
        assert result.stdout == ""
        assert problem in words(result.stderr)
        assert max(map(len, result.stderr.splitlines())) < 80
        assert "Traceback" not in result.stderr
    assert states(targets) == ["running"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_process_of_another_user_is_refused_with_advice(targets):
    # What is imported must be so before: only root may read it where it lies.
    program = """
import locale, os, sys
from cuckpt import driver, hints
from cuckpt.cli import jobs, verbs
driver.has_checkpoint()
os.setgroups([])
os.setresuid(65534, 65534, 65534)
sys.exit(verbs.main(["suspend", sys.argv[1]]))
"""
    command = [sys.executable, "-P", "-c", program, str(targets[0].pid)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stdout
    assert "belongs to uid 0 and this one runs as uid 65534" in words(result.stderr)
    assert "CAP_SYS_PTRACE" in result.stderr
    assert states(targets) == ["running"] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        "suspend",
        "suspend x",
        "suspend 0",
        "suspend 99999999999",
        "suspend 1 --tree 1",
        "suspend 1 --timeout-s -1",
        "suspend 1 --timeout-s nan",
        "suspend 1 --device-map 0=1",
        "resume 1 --timeout-s 1",
        "resume 1 --device-map 0",
        "resume 1 --device-map 0=",
        "resume 1 --device-map 0=1,0=1",
        "ps 1",
        "save 1",
        "save --tree 1",
        "save x /nowhere",
        "load",
        "load DIR DIR",
        "load 1 DIR",
        "image",
        "image show /nowhere",
        "doctor x",
        "install-shim",
    ],
)
def test_wrong_usage_is_2(arguments):
    result = cuckpt(*arguments.split())
    assert result.returncode == 2
    assert result.stderr.startswith(f"usage: cuckpt {arguments.split()[0]} ")


@pytest.fixture
def signals_are_heeded():
    """Let children not inherit that one is ignored, as in the background of a shell."""
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.usefixtures("signals_are_heeded")
@pytest.mark.parametrize(
    ("verb", "call", "before"),
    [("suspend", "checkpoint", "running"), ("resume", "restore", "checkpointed")],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_undoes_what_was_begun_and_tells(
    cuda_machine, targets, pids, verb, call, before, number
):
    if verb == "resume":
        for pid in pids:
            Process(pid).suspend()
    made = cuda_machine.calls[call]
    cuda_machine.inject(Fault(call, delay_s=0.5, at=made + 1, count=2))
    command = [CUCKPT, verb, *map(str, pids)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while cuda_machine.calls[call] == made:
            time.sleep(0.01)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert printed == ""
    assert states(targets) == [before] * 2
    told = errors[errors.index(f"cuckpt {verb}: ended by {number.name}; undone: ") :]
    for pid in pids:
        assert f"\n  process {pid} python: " in told
    assert told.count(f"; is {before}\n") == 2


def test_signal_that_is_ignored_changes_nothing(cuda_machine, targets, pids):
    cuda_machine.inject(Fault("checkpoint", delay_s=0.5, count=2))
    script = 'trap \'\' HUP; exec "$0" "$@"'
    command = ["sh", "-c", script, CUCKPT, "suspend", *map(str, pids)]
    with subprocess.Popen(command) as process:
        while not cuda_machine.calls["checkpoint"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
    assert states(targets) == ["checkpointed"] * 2


# Images


def test_job_is_saved_and_loaded(targets, pids, folder):
    result = cuckpt("save", *pids, folder)
    assert result.returncode == 0, result.stderr
    assert states(targets) == ["checkpointed"] * 2
    assert re.search(rf"^{pids[0]} python: copy .* MiB, .* MiB/s$", result.stderr, re.M)
    assert "COPY" in result.stdout.splitlines()[0]
    result = cuckpt("image", "info", folder)
    assert result.stdout.startswith(f"{folder}\n")
    assert f"process {pids[1]} python" in result.stdout
    assert result.stdout.endswith(f"\n  needed by {pids[0]}, {pids[1]}\n")
    result = cuckpt("image", "verify", folder)
    assert result.stdout.endswith("all of it is as it was saved\n")
    result = cuckpt("load", folder)
    assert result.returncode == 0, result.stderr
    assert states(targets) == ["running"] * 2
    for target in targets:
        target.check()
    result = cuckpt("image", "info", folder)
    assert result.stdout.endswith("\n  needed by nobody: it can be removed\n")


def test_image_is_removed_once_all_run_if_that_is_wanted(targets, pids, folder):
    assert cuckpt("save", *pids, folder).returncode == 0
    result = cuckpt("load", "--remove", folder)
    assert result.returncode == 0, result.stderr
    assert not folder.exists()
    for target in targets:
        target.check()


def test_load_tells_that_an_image_knows_its_processes(folder):
    result = cuckpt("load", 8173, folder)
    assert "8173 may be a pid, and an image knows its processes" in result.stderr


def test_load_that_says_why_does_not_point_to_the_doctor(targets, folder):
    assert cuckpt("save", targets[0].pid, folder).returncode == 0
    assert cuckpt("load", folder).returncode == 0
    result = cuckpt("load", folder)
    assert result.returncode == 1
    assert "is running: there is nothing to load" in words(result.stderr)
    assert "doctor" not in result.stderr


def test_image_is_told_though_it_is_not_known_who_needs_it(targets, folder):
    assert cuckpt("save", targets[0].pid, folder).returncode == 0

    def told(**environment):
        facts = json.loads(
            cuckpt("image", "info", folder, "--json", **environment).stdout
        )
        result = cuckpt("image", "info", folder, **environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"{folder}\n")
        return facts["needed_by"], words(result.stdout)

    needed_by, text = told(CUCKPT_LIBCUDA="/dev/null")
    assert needed_by is None
    assert " who needs it cannot be told: " in text
    assert cuckpt("load", folder).returncode == 0
    assert told()[0] == []
    change_manifest(folder, boot_id="of another")
    needed_by, text = told()
    assert needed_by is None
    assert "of another machine, or of before a boot" in text


def change_manifest(folder, **facts):
    """Let an image be of a process that is another."""
    image = storage.describe(folder)
    vars(image.processes[0]).update(facts)
    (folder / "manifest.json").write_bytes(image.to_json())


def test_names_cannot_change_the_terminal(targets, tmp_path):
    folder = tmp_path / "image\033[2J"
    Process(targets[0].pid).save(folder)
    change_manifest(folder, name="\033[2J\n  needed by 1")
    results = [cuckpt("image", what, folder) for what in ("info", "verify")]
    assert [result.returncode for result in results] == [0, 0]
    for file in folder.glob("*.stripe"):
        file.write_bytes(b"")
    results.append(cuckpt("image", "verify", folder))
    results.append(cuckpt("load", folder))
    assert [result.returncode for result in results[2:]] == [1, 1]
    for result in results:
        shown = result.stdout + result.stderr
        assert "?[2J" in shown
        assert "\033" not in shown
        assert "\n  needed by 1\n" not in shown


@two_gpus
def test_tree_is_saved_over_an_image_and_loaded_elsewhere(cuda_machine, folder):
    target = cuda_machine.spawn({0: 2 * MIB})
    assert cuckpt("save", "--tree", os.getpid(), folder).returncode == 0
    assert cuckpt("load", folder).returncode == 0
    result = cuckpt("save", "--tree", os.getpid(), folder)
    assert result.returncode == 1
    assert "holds an image already" in words(result.stderr)
    assert cuckpt("save", "--replace", *OURS, folder).returncode == 0
    assert cuckpt("load", folder, "--device-map", "0=1").returncode == 0
    assert [*Process(target.pid).used_memory()] == [str(cuda_machine.gpus[1])]
    target.check()


def test_image_that_is_damaged_is_told_and_not_loaded(targets, pids, folder):
    assert cuckpt("save", *pids, folder).returncode == 0
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    with open(largest, "r+b") as file:
        file.write(b"not what was there")
    assert cuckpt("image", "info", folder).returncode == 0
    result = cuckpt("image", "verify", folder)
    assert (result.returncode, result.stdout) == (1, "")
    assert largest.name in result.stderr
    result = cuckpt("load", folder)
    assert result.returncode == 1
    assert "cuckpt load it from a whole copy of the image" in words(result.stderr)
    assert states(targets) == ["checkpointed"] * 2


def test_what_is_no_image_is_said(targets, tmp_path):
    for arguments in (
        ["image", "info", tmp_path],
        ["image", "verify", tmp_path / "none"],
        ["load", tmp_path],
        ["save", targets[0].pid, "/proc/none"],
    ):
        result = cuckpt(*arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert words(result.stderr).startswith(f"cuckpt {arguments[0]}: ")
        assert "Traceback" not in result.stderr
    assert states(targets) == ["running"] * 2


@pytest.mark.usefixtures("signals_are_heeded")
def test_signal_undoes_a_save(cuda_machine, targets, pids, folder):
    cuda_machine.inject(Fault("complete", delay_s=0.5, count=2))
    command = [CUCKPT, "save", *map(str, pids), folder]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not cuda_machine.calls["complete"]:
            time.sleep(0.01)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "cuckpt save: ended by SIGTERM; undone: 2 processes as before\n" in errors
    assert states(targets) == ["running"] * 2
    assert not folder.exists()
    for target in targets:
        target.check()


def test_bar_shows_how_far_a_copy_is(cuda_machine, folder):
    target = cuda_machine.spawn({0: 1024 * MIB})
    status, shown = on_a_terminal("save", target.pid, folder, columns=120)
    assert status == 0
    assert "Traceback" not in shown
    plain = re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"copy .*\d+% of 1024 MiB, \d+ MiB/s", plain)


# Terminals and readers


def test_bar_shows_phases_and_memory_on_a_terminal(cuda_machine, targets, pids):
    cuda_machine.inject(Fault("checkpoint", delay_s=0.5, count=2))
    status, shown = on_a_terminal("suspend", *pids)
    assert status == 0
    plain = re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", shown)
    assert "Traceback" not in plain
    for pid, size in zip(pids, "24", strict=True):
        lines = [line for line in re.split(r"[\r\n]", plain) if f"{pid} python" in line]
        assert any("checkpoint" in line and f"{size} MiB" in line for line in lines)
    assert "suspend: 2 processes in " in shown
    assert "\033[" in shown


@pytest.mark.usefixtures("no_rich")
def test_lines_are_shown_on_a_terminal_without_rich(targets, pids):
    status, shown = on_a_terminal("suspend", *pids)
    assert status == 0
    assert f"\n{pids[0]} python: checkpoint " in shown
    assert "\033" not in shown


@pytest.mark.usefixtures("cuda_machine")
@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_doctor_is_coloured_where_that_is_wanted(environment, coloured):
    _, shown = on_a_terminal("doctor", **environment)
    assert ("\033[" in shown) is coloured
    assert "\033" not in cuckpt("doctor").stdout


def test_doctor_fails_if_there_is_a_problem(targets):
    result = cuckpt("doctor", targets[0].pid)
    assert result.returncode == 0
    assert result.stdout.endswith("\n0 problems, 0 warnings\n") or os.geteuid() != 0
    result = cuckpt("doctor", targets[0].pid, 1)
    assert result.returncode == 1
    assert f"process {targets[0].pid}\n  ok       python, running\n" in result.stdout
    assert "process 1\n  problem  ERROR_NOT_INITIALIZED (3)" in result.stdout


@pytest.mark.parametrize("verb", ["ps", "doctor", "info"])
@pytest.mark.usefixtures("targets")
def test_answer_that_cannot_be_written_is_a_failure(verb):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [CUCKPT, verb], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == 1
    assert result.stderr == f"cuckpt {verb}: No space left on device\n"
    command = f"{CUCKPT} {verb} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, timeout=60)
    assert (result.returncode, result.stderr) == (1, b"")
    result = subprocess.run(["bash", "-c", f"{CUCKPT} {verb} <&- >&- 2>&-"], timeout=60)
    assert result.returncode == 1


# JSON


def keys_of(value, path=""):
    """Yield the keys that there are, as docs/cli.md writes them."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys_of(value[0], f"{path}[]")
    elif isinstance(value, dict) and path.rpartition(".")[2] not in BY_NAME:
        for key, inner in value.items():
            yield from keys_of(inner, f"{path}.{key}" if path else key)
    else:
        yield path


BY_NAME = {"gpu_bytes", "seconds", "skipped"}  # whose keys are data


def documented_keys():
    section = DOCS[DOCS.index("## JSON") : DOCS.index("## cuda-checkpoint")]
    found, verbs = {}, []
    for line in section.splitlines():
        if line.startswith("| ") and "---" not in line:
            first, key = (cell.strip() for cell in line.split("|")[1:3])
            verbs = re.findall(r"`([\w-]+)`", first) or (["any"] if first else verbs)
            for verb in verbs:
                found.setdefault(verb, set()).update(re.findall(r"`([\w.\[\]]+)`", key))
    return found


def test_documented_keys_are_printed(targets, pids, tmp_path):
    documented = documented_keys()
    for arguments in (
        ["ps"],
        ["suspend", *pids],
        ["resume", *pids],
        ["recover", *pids],
        ["doctor", *pids],
        ["info"],
        ["install-shim", tmp_path],
        ["save", *pids, tmp_path / "image"],
        ["image", "info", tmp_path / "image"],
        ["image", "verify", tmp_path / "image"],
        ["load", tmp_path / "image"],
    ):
        result = cuckpt(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("\n") == 1
        assert set(keys_of(json.loads(result.stdout))) == documented[arguments[0]]
    for arguments in ["suspend", 1], ["ps", "--tree", 4194305]:
        result = cuckpt(*arguments, "--json")
        assert result.returncode == 1
        assert set(keys_of(json.loads(result.stdout))) == documented["any"]


def test_failure_in_json_names_who_failed(targets, pids):
    targets[1].ask("manage")
    facts = json.loads(cuckpt("suspend", *pids, "--json").stdout)
    assert facts["error"]["type"] == "GroupError"
    first, second = facts["processes"]
    assert first["error"] is None
    assert second["error"]["type"] == "NotSupportedError"
    assert {process["after"] for process in facts["processes"]} == {"running"}


# Screens in the documentation


def screens():
    """Return what each command in the documentation shows there."""
    blocks = re.findall(r"```text\n\$ cuckpt (.*?)\n(.*?)```", DOCS, re.DOTALL)
    return dict(blocks)


def alike(text):
    """Return a screen without what differs from time to time."""
    text = re.sub(r"\d+(\.\d+)? (ms|s|MiB)\b|\b[01]: ", "N ", text)
    return re.sub(r"\b\d+\b", "N", words(text))


@two_gpus
def test_screens_are_as_documented(cuda_machine):
    first = cuda_machine.spawn({0: 256 * MIB, 1: 2 * MIB})
    second = cuda_machine.spawn({0: 100 * MIB})
    pids = [first.pid, second.pid]
    documented = [*screens().values()]
    assert alike(cuckpt("ps", *OURS).stdout) == alike(documented[0])
    assert alike(cuckpt("suspend", *pids, 1).stdout) == alike(documented[1])
    cuckpt("resume", *pids)
    second.ask("manage")
    errors = cuckpt("suspend", *pids).stderr
    errors = errors[errors.index("cuckpt suspend: ") :]
    assert alike(errors) == alike(documented[2])
    assert documented[3].startswith("driver\n")


@pytest.mark.usefixtures("cuda_machine")
def test_verbs_need_a_driver_and_say_so(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("not a library")
    without = {"CUCKPT_LIBCUDA": None, "LD_LIBRARY_PATH": str(tmp_path)}
    for arguments in ["ps"], ["suspend", 1]:
        result = cuckpt(*arguments, **without)
        assert result.returncode == 1
        beginning = f"cuckpt {arguments[0]}: no CUDA driver: "
        assert words(result.stderr).startswith(beginning)
        assert "Traceback" not in result.stderr
    result = cuckpt("ps", "--json", **without)
    facts = json.loads(result.stdout)
    assert facts["error"]["type"] == "DynamicLibNotFoundError"


def test_folder_that_may_be_a_pid_is_refused(targets):
    first, second = targets[:2]
    result = cuckpt("save", first.pid, second.pid)
    assert result.returncode == 2
    assert f"./{second.pid}" in result.stderr
    assert not Path(str(second.pid)).exists()


def test_work_that_is_done_is_told_though_the_trace_fails(targets):
    result = cuckpt("suspend", targets[0].pid, "--json", "--trace", "/dev/full")
    assert result.returncode == 1
    assert json.loads(result.stdout)["processes"][0]["after"] == "checkpointed"
    assert "/dev/full is not complete" in result.stderr
    assert cuckpt("resume", targets[0].pid).returncode == 0


def test_image_of_a_process_is_shown(targets, tmp_path):
    folder = tmp_path / "image"
    pid = targets[0].pid
    assert f"image: {folder}\n" in cuckpt("save", pid, folder).stdout
    assert f"{pid} is in the image {folder}\n" in cuckpt("ps").stdout
    for verb, told in ("resume", "cuckpt load"), ("save", "cuckpt load"):
        more = [tmp_path / "other"] if verb == "save" else []
        result = cuckpt(verb, pid, *more)
        assert result.returncode == 1
        assert told in " ".join(result.stderr.split())
    assert cuckpt("load", folder).returncode == 0
    assert "in the image" not in cuckpt("ps").stdout


def test_two_signals_are_told_as_one(cuda_machine, targets):
    calls = cuda_machine.calls["checkpoint"]
    cuda_machine.inject(Fault("checkpoint", at=calls + 1, delay_s=1.5))
    command = [CUCKPT, "suspend", "--json", str(targets[0].pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while cuda_machine.calls["checkpoint"] == calls:
            time.sleep(0.01)
        for number in (signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode in (129, 143)
    assert "undone: 1 process" in json.loads(printed)["error"]["message"]
