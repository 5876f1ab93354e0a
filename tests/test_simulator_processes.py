"""Processes of a simulated machine: forks, deaths, callers that meet."""

import signal
import subprocess

import pytest

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")


def test_forked_child_is_no_cuda_process(program):
    printed = program(
        """
        driver.init()
        child = os.fork()
        if child == 0:
            for function in driver.device_get_count, driver.init:
                try:
                    function()
                except driver.NotInitializedError:
                    os.write(1, b"not initialized\\n")
            time.sleep(60)
        time.sleep(0.2)
        try:
            driver.checkpoint_process_get_state(child)
        except driver.NotInitializedError as error:
            print("nor for others")
        os.kill(child, 9)
        print(driver.checkpoint_process_get_state(os.getpid()).name)
        """
    )
    assert printed == "not initialized\n" * 2 + "nor for others\nRUNNING\n"


def test_caller_waits_for_another_ones_turn(program):
    printed = program(
        """
        import threading
        target = Target({0: MIB})
        target.ask("spin 700")
        lock = driver.checkpoint_process_lock
        locker = threading.Thread(target=lock, args=[target.pid])
        locker.start()
        time.sleep(0.1)
        start = time.monotonic()
        print(driver.checkpoint_process_get_state(target.pid).name)
        print(time.monotonic() - start > 0.3)
        locker.join()
        """
    )
    assert printed == "LOCKED\nTrue\n"


def test_target_finishes_when_its_caller_is_killed(program):
    printed = program(
        """
        target = Target({0: MIB})
        target.ask("spin 600")
        caller = subprocess.Popen([sys.executable, "-P", "-c",
            f"from cuckpt import driver; driver.checkpoint_process_lock({target.pid})"])
        time.sleep(0.4)
        caller.kill()
        print(caller.wait())
        print(driver.checkpoint_process_get_state(target.pid).name)
        driver.checkpoint_process_unlock(target.pid)
        target.check()
        """
    )
    assert printed == "-9\nLOCKED\n"


def test_saver_killed_between_leaves_the_target_there(program):
    printed = program(
        """
        target = Target({0: MIB})
        driver.checkpoint_process_lock(target.pid)
        saver = subprocess.run([sys.executable, "-P", "-c", f'''
        import os
        from cuckpt import driver
        driver.init()
        driver.device_primary_ctx_retain(0)
        driver.checkpoint_process_checkpoint(
            {target.pid}, driver.CheckpointCheckpointArgs(custom_storage=True))
        os.kill(os.getpid(), 9)
        '''.replace("\\n        ", "\\n")])
        print(saver.returncode, driver.checkpoint_process_get_state(target.pid).name)
        """
    )
    assert printed == "-9 CHECKPOINTING\n"


def test_complete_refuses_a_handle_twice(program):
    printed = program(
        """
        driver.init()
        driver.device_primary_ctx_retain(0)
        target = Target({0: MIB})
        driver.checkpoint_process_lock(target.pid)
        args = driver.CheckpointCheckpointArgs(custom_storage=True)
        driver.checkpoint_process_checkpoint(target.pid, args)
        handle = args.custom_storage_info.handle
        driver.checkpoint_operation_complete(handle)
        for wrong in handle, 4096:
            try:
                driver.checkpoint_operation_complete(wrong)
            except driver.InvalidValueError:
                print("refused")
        own = driver.CheckpointCheckpointArgs(custom_storage=True)
        driver.checkpoint_process_lock(os.getpid())
        try:
            driver.checkpoint_process_checkpoint(os.getpid(), own)
        except driver.NotSupportedError:
            print("not oneself")
        """
    )
    assert printed == "refused\nrefused\nnot oneself\n"


def test_process_that_is_left_is_found(monkeypatch, processes_with):
    monkeypatch.setenv("CUCKPT_TEST", "control")
    with subprocess.Popen(["sleep", "60"]) as process:
        assert processes_with("CUCKPT_TEST=control") == [str(process.pid)]
        process.kill()


@pytest.mark.usefixtures("nothing_is_left")
def test_two_hundred_targets_suspend_and_resume_and_leave_nothing(machine_program):
    printed = machine_program(
        """
        from concurrent.futures import ThreadPoolExecutor

        def each(function):
            return list(pool.map(function, targets))

        def start(_):
            target = machine.spawn({0: 10 * MIB})
            target.ask(f"take {80 * MIB}")
            return target

        with ThreadPoolExecutor(8) as pool:
            with Machine(memory_bytes=20 << 30) as machine:
                driver.init()
                number = os.stat(os.environ["CUCKPT_SIMULATOR"]).st_ino
                targets = list(pool.map(start, range(200)))
                print(used() // MIB, len(machine.processes()))
                each(lambda target: suspend(target.pid))
                print(used(), len(machine.processes()))
                each(lambda target: resume(target.pid))
                each(Target.check)
                for target in targets[::2]:
                    target.end()
                print(used() // MIB, machine.calls["restore"])
        print(*[t.pid for t in targets if os.path.exists(f"/proc/{t.pid}")])
        print(f"cuckpt/{number}/" in open("/proc/net/unix").read())
        files = [os.readlink(entry) for entry in os.scandir("/proc/self/fd")
                 if os.path.lexists(entry)]
        print(sum("simulated" in file or "target" in file for file in files))
        """,
        timeout=180,
    )
    assert printed == f"{200 * 90} 201\n0 201\n{100 * 90} 200\n\nFalse\n0\n"


@pytest.mark.usefixtures("nothing_is_left")
def test_killed_machine_leaves_nothing(program):
    code = """
    targets = [Target({0: 4 * MIB}) for _ in range(3)]
    driver.checkpoint_process_lock(targets[0].pid)
    suspend(targets[1].pid)
    os.kill(os.getpid(), 9)
    """
    program(code, status=-signal.SIGKILL)


def test_target_short_of_files_answers_when_it_has_some_again(program):
    printed = program(
        '''
driver.init()
used()
import threading
target = Program("-c", """
import resource, sys
from cuckpt.target import __main__ as target
target.start()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
print("no descriptor is free", flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
sys.stdin.readline()
""")
target.answer()
states = []
def get_state():
    states.append(driver.checkpoint_process_get_state(target.pid))
# One may be answered: it waits for callers with a descriptor in its hand.
askers = [threading.Thread(target=get_state) for _ in range(3)]
for asker in askers:
    asker.start()
time.sleep(0.3)
print(any(asker.is_alive() for asker in askers))
target.send("go on")
for asker in askers:
    asker.join(30)
print(len(states))
'''
    )
    assert printed == "True\n3\n"


def test_storage_that_the_caller_cannot_map_leaves_the_target_as_it_was(program):
    printed = program(
        """
driver.init()
used()
import resource
target = Target({0: 4 * MIB})
driver.checkpoint_process_lock(target.pid)
args = driver.CheckpointCheckpointArgs(custom_storage=True)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * 4096
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + MIB, limits[1]))
try:
    driver.checkpoint_process_checkpoint(target.pid, args)
except driver.OutOfMemoryError:
    print("no room")
finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
print(driver.checkpoint_process_get_state(target.pid).name)
driver.checkpoint_process_unlock(target.pid)
target.check()
"""
    )
    assert printed == "no room\nLOCKED\n"


def test_exec_gives_the_memory_back(program):
    printed = program(
        '''
driver.init()
used()
target = Program("-c", """
import os
from cuckpt.target import __main__ as target
target.start()
target.fill(5000000)
print("filled", flush=True)
os.execvp("cat", ["cat"])
""")
target.answer()
target.send("cat runs")
print(target.answer())
print(used())
'''
    )
    assert printed == "cat runs\n0\n"


def test_caller_learns_of_the_death_of_a_target_that_had_forked(program):
    printed = program(
        '''
driver.init()
used()
import threading
target = Program("-c", """
import os, sys
from cuckpt.target import __main__ as target
target.start()
target.spin(8000)
print("spins", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
print("forked", flush=True)
os.wait()
""")
target.answer()
results = []
def lock():
    try:
        driver.checkpoint_process_lock(target.pid)
    except driver.OperatingSystemError as error:
        results.append(error.status)
caller = threading.Thread(target=lock)
caller.start()
time.sleep(0.3)
target.send("go on")
target.answer()
target.process.kill()
caller.join(5)
print(results)
'''
    )
    assert printed == "[304]\n"
