"""Targets: what they tell, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuckpt import target as target_module
from cuckpt.simulator import Machine
from cuckpt.target import Program, Target, TargetError

pytestmark = pytest.mark.thread_unsafe(reason="each test runs processes of its own")

MIB = 1 << 20


@pytest.fixture
def environment():
    """That of a machine with two GPUs, on which this process is not."""
    with Machine(gpus=2, memory_bytes=256 * MIB).started() as variables:
        yield {**os.environ, **variables}


def memory_file(target, gpu):
    """Return the file that holds the memory of a simulated GPU."""
    files = Path(f"/proc/{target.pid}/fd").iterdir()
    found = [f for f in files if "simulated GPU memory" in os.readlink(f)]
    return sorted(found, key=lambda f: int(f.name))[gpu]


def test_memory_on_several_gpus_is_filled_and_checked(environment):
    sizes = {1: 3 * MIB, 0: 65 * MIB + 7}
    with Target(sizes, environment) as target:
        target.check()
        with open(memory_file(target, 1), "r+b") as file:
            file.write(bytes(100))
        with pytest.raises(TargetError, match=r"GPU 1: .* has another content$"):
            target.check()
        target.ask("fill 1000")
        target.ask("fill 1000 1")
        with open(memory_file(target, 0), "r+b") as file:
            file.seek(64 * MIB)
            content = file.read(100)
            file.seek(64 * MIB)
            file.write(content[::-1])
        with pytest.raises(TargetError, match=r"GPU 1: .*; GPU 0: "):
            target.check()


def test_content_differs_each_time(environment):
    with Target({0: MIB}, environment) as one, Target({0: MIB}, environment) as two:
        assert one._filled[0].split()[2] != two._filled[0].split()[2]
        assert one.ask("check") == one._filled[0]


def test_memory_that_is_gone_is_told(environment):
    with Target({0: MIB}, environment) as target:
        os.truncate(memory_file(target, 0), 0)
        with pytest.raises(TargetError, match=r"cannot be read: cuMemcpyDtoH_v2 ret"):
            target.check()


def test_memory_that_has_moved_is_told():
    text = target_module._difference("1 0x7000 ab", "1 0x8000 ab")
    assert text == "GPU 1: the memory at 0x7000 is at 0x8000 now"


def test_target_without_memory_has_nothing_to_check(environment):
    for sizes in None, {}, {0: 0, 1: 0}:
        with Target(sizes, environment) as target:
            target.check()


@pytest.mark.parametrize("wrong", [1 << 20, "1GiB", [1, 2]])
def test_memory_without_its_gpu_is_refused(wrong):
    with pytest.raises(TypeError, match=r"as \{0: n\} for n bytes on GPU 0"):
        Target(wrong)


@pytest.mark.parametrize("wrong", [{-1: 5}, {0: -5}])
def test_negative_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="must not be negative"):
        Target(wrong)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({2: MIB}, r"at 'fill \d+ 2': cuDeviceGet returned 101 \w+INVALID_DEVICE"),
        ({0: 512 * MIB}, r"cuMemAlloc_v2 returned 2 \w+OUT_OF_MEMORY"),
    ],
)
def test_failing_call_is_told_and_no_process_is_left(environment, sizes, message):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TargetError, match=rf"ended with status 1, .*{message}") as info:
        Target(sizes, environment)
    assert not Path(f"/proc/{str(info.value).split()[1]}").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_target_without_a_driver_says_so():
    environment = {**os.environ, "CUCKPT_LIBCUDA": "/nowhere"}
    with pytest.raises(TargetError, match="no CUDA driver: /nowhere"):
        Target(environment=environment)


def test_start_that_takes_too_long_is_given_up(environment):
    with pytest.raises(TargetError, match=r"no answer in 0\.001 s, at 'start 0'") as e:
        Target(environment=environment, timeout_s=0.001)
    assert not Path(f"/proc/{str(e.value).split()[1]}").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dance", "commands are start, fill, .*, not 'dance'"),
        ("", "commands are"),
        ("fill", r"expected 'fill SIZE \[GPU\]"),
        ("fill 1 2 3", r"expected 'fill SIZE \[GPU\]"),
        ("fill much", "not 'fill much'"),
    ],
)
def test_wrong_command_ends_the_target_with_a_reason(environment, line, message):
    with Target(environment=environment) as target:
        with pytest.raises(TargetError, match=f"ended with status 1.*{message}"):
            target.ask(line)
        for use in target.check, lambda: target.answer(1):
            with pytest.raises(TargetError, match="ended with status 1"):
                use()


def test_stopped_target_is_given_up_and_ended(environment):
    target = Target(environment=environment)
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(TargetError, match=r"no answer in 0\.1 s, at 'wait'"):
        target.ask("wait", timeout_s=0.1)
    target.process.send_signal(signal.SIGCONT)
    assert not target.is_silent(20)
    assert target.answer() == "waited"  # late, but not lost
    target.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TargetError, match="does not read"):  # noqa: PT012
        for _ in range(1000):
            target.send("wait" + " " * 1000)
    target.end()
    assert not Path(f"/proc/{target.pid}").exists()


def test_ended_target_says_so_and_may_be_ended_again(environment):
    with Target(environment=environment) as target:
        target.end()
        for use in target.check, target.answer, lambda: target.is_silent(0):
            with pytest.raises(TargetError, match="has been ended"):
                use()


def test_killed_target_says_by_which_signal(environment):
    with Target(environment=environment) as target:
        target.process.kill()
        with pytest.raises(TargetError, match="ended by signal 9"):
            target.check()


def test_answers_come_one_by_one():
    code = "print('one\\ntwo', end='', flush=True); input(); print('half')"
    with Program("-c", code) as program:
        assert program.answer() == "one"
        assert program.is_silent(0.1)
        program.send("go on")
        assert program.answer() == "twohalf"
        with pytest.raises(TargetError, match="ended with status 0"):
            program.answer()


def test_much_error_output_stops_nobody_and_its_end_is_told():
    code = "import sys; sys.exit('x' * 1_000_000 + 'the end')"
    with Program("-c", code) as program, pytest.raises(TargetError) as info:
        program.answer()
    assert str(info.value).endswith("xxthe end")
    assert len(str(info.value)) < 5000


def test_target_outlives_the_thread_that_started_it(environment):
    made = []
    thread = threading.Thread(
        target=lambda: made.append(Target(environment=environment))
    )
    thread.start()
    thread.join()
    with made[0] as target:
        time.sleep(0.3)
        target.check()


@pytest.mark.parametrize("state", ["running", "suspended"])
def test_target_ends_with_a_killed_parent(end_of, state):
    program = f"""
    import os, signal
    from cuckpt import driver
    from cuckpt.simulator import Machine
    from cuckpt.target import Target
    with Machine():
        target = Target({{0: 1000}})
        if {state!r} == "suspended":
            driver.checkpoint_process_lock(target.pid)
            driver.checkpoint_process_checkpoint(target.pid)
            target.send("check")
            assert target.is_silent(0.2)
        if os.fork() == 0:  # which keeps the target's input open
            import time
            time.sleep(30)
        print(target.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    code = "\n".join(line[4:] for line in program.splitlines())
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env={k: v for k, v in os.environ.items() if k != "CUCKPT_LIBCUDA"},
        stdout=subprocess.PIPE,
        process_group=0,
    ) as process:
        pid = process.stdout.readline().strip().decode()
        assert process.wait(60) == -signal.SIGKILL
        assert end_of(pid)
        os.killpg(process.pid, signal.SIGKILL)


def test_program_does_all_commands_of_its_input_and_ends(environment):
    command = [sys.executable, "-P", "-m", "cuckpt.target"]
    result = subprocess.run(
        command,
        input="start\nstart 1\nfill 1000\ntake 1000 1\nmanage\nspin 5\nwait\ncheck\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert lines[:2] + lines[3:7] == [
        *("started", "started", "taken", "managed", "spinning", "waited")
    ]
    assert lines[2] == lines[7]


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("-h", 0), ("no", 2)])
def test_any_argument_lists_the_commands(argument, status):
    result = subprocess.run(
        [sys.executable, "-P", "-m", "cuckpt.target", argument],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == status
    assert "fill SIZE [GPU]   Fill" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 79
    assert result.stderr == ""


def test_target_starts_without_what_takes_long_to_import():
    imported = "import sys, cuckpt.target.__main__; print(*sys.modules)"
    command = [sys.executable, "-P", "-c", imported]
    modules = subprocess.check_output(command, text=True).split()
    assert "cuckpt.target" in modules
    assert not {"subprocess", "cuckpt.errors", "cuckpt.simulator"} & {*modules}
