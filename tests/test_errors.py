import copy
import os
import pickle
import signal
import subprocess
import sys
import types

import pytest

from cuckpt import driver, errors

CALLS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}


@pytest.fixture
def sleeper():
    """A process without CUDA."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "result", [r for r in errors.Result if r], ids=lambda r: r.name
)
def test_every_result_raises_its_own_class(hook, result):
    hook.answer(int(result))
    with pytest.raises(driver.DriverError) as caught:
        driver.checkpoint_process_lock(os.getpid())
    assert caught.value.status == result
    assert str(caught.value).startswith(f"{result.name} ({int(result)})")
    assert caught.value.args == (f"{result.name} ({int(result)})",)
    assert isinstance(caught.value, errors._CLASSES[result])
    assert len(set(errors._CLASSES.values())) == len(errors.Result) - 1


def test_unknown_result_raises_the_base_class(hook):
    hook.answer(4711)
    with pytest.raises(driver.DriverError, match=r"^Unknown error \(4711\)") as caught:
        driver.init(0)
    assert caught.value.status == 4711


def test_error_code_not_found_of_the_driver_is_a_driver_error(hook):
    # The C functions return the same number when Python has an exception set.
    hook.answer(500)
    with pytest.raises(driver.NotFoundError):
        driver.checkpoint_process_unlock(1)


def test_error_names_call_and_pid(hook):
    hook.answer(700)
    for verb, call in CALLS.items():
        with pytest.raises(
            driver.IllegalAddressError, match=f"from {call} for pid 77$"
        ) as e:
            getattr(driver, f"checkpoint_process_{verb}")(77)
        assert (e.value.call, e.value.pid) == (call, 77)
    with pytest.raises(
        driver.IllegalAddressError, match=r"from cuCheckpointOperationComplete$"
    ):
        driver.checkpoint_operation_complete(16)


@pytest.mark.parametrize(
    ("verb", "result", "text"),
    [
        ("lock", 401, "lock needs a RUNNING process"),
        ("checkpoint", 401, "checkpoint needs a LOCKED process"),
        ("restore", 401, "restore needs a CHECKPOINTED process"),
        ("unlock", 401, "unlock needs a LOCKED process"),
        ("lock", 600, "the time was over"),
        ("checkpoint", 801, "managed memory"),
        ("restore", 2, "too little free memory"),
        ("restore", 1, "UUID in gpu_pairs"),
        ("checkpoint", 1, "older than CUDA 13.4"),
        ("restore", 201, "device_primary_ctx_retain"),
        ("lock", 1, "reserved field"),
        ("unlock", 1, "reserved field"),
        ("unlock", 34, "stub"),
        ("lock", 100, "no GPU is visible"),
        ("lock", 802, "fabricmanager"),
        ("lock", 803, "different versions"),
        ("lock", 999, "dmesg"),
    ],
)
def test_error_explains_itself(hook, verb, result, text):
    hook.answer(result)
    with pytest.raises(driver.DriverError, match=text):
        getattr(driver, f"checkpoint_process_{verb}")(os.getpid())


def failure(hook, result, pid):
    hook.answer(result)
    with pytest.raises(driver.DriverError) as caught:
        driver.checkpoint_process_get_state(pid)
    return str(caught.value)


def test_hint_tells_that_there_is_no_such_process(hook):
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert f"there is no process {process.pid}" in failure(hook, 304, process.pid)
    assert "positive" in failure(hook, 304, -1)
    assert "positive" in failure(hook, 304, 0)


def test_hint_tells_a_zombie(hook, sleeper):
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert "is a zombie" in failure(hook, 3, sleeper.pid)


def test_hint_tells_a_process_without_cuda_from_this_one(hook, sleeper):
    assert "has no CUDA state" in failure(hook, 3, sleeper.pid)
    assert "init(0)" in failure(hook, 3, os.getpid())


def test_hint_tells_a_stopped_process(hook, sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert "it is stopped now" in failure(hook, 304, sleeper.pid)


def test_hint_tells_the_owner_of_a_thread(hook, python):
    program = """
import threading, sys
ready = threading.Event()
def tell():
    print(threading.get_native_id(), flush=True)
    sys.stdin.read()
threading.Thread(target=tell).start()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        thread = int(process.stdout.readline())
        text = failure(hook, 304, thread)
        process.stdin.close()
    assert f"{thread} is a thread of process {process.pid}" in text


def test_hint_tells_another_user(hook, monkeypatch, sleeper):
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert "belongs to uid 0 and this one runs as uid 12345" in failure(
            hook, 304, sleeper.pid
        )
    else:
        assert "belongs to uid 0" in failure(hook, 304, 1)


def test_hint_tells_that_ptrace_may_be_refused(hook, monkeypatch, sleeper):
    from cuckpt import hints

    owner = os.stat(f"/proc/{sleeper.pid}").st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner or 1)
    monkeypatch.setattr(hints, "_ptrace_scope", lambda: 2)
    status = hints.read_status(sleeper.pid) | {"Uid": f"{owner or 1}\t0\t0\t0"}
    monkeypatch.setattr(hints, "read_status", lambda pid: status)
    assert "kernel.yama.ptrace_scope = 2" in failure(hook, 304, sleeper.pid)


def test_notes_of_an_error_survive_pickling():
    for cls in (
        errors.OperatingSystemError,
        errors.FunctionNotFoundError,
        errors.DynamicLibNotFoundError,
    ):
        error = cls(304)
        error.add_note("more")
        assert pickle.loads(pickle.dumps(error)).__notes__ == ["more"]


def test_explanation_never_calls_the_driver(hook):
    hook.answer(304)
    with pytest.raises(driver.OperatingSystemError) as caught:
        driver.checkpoint_process_get_state(1)
    calls = len(hook.calls)
    str(caught.value)
    assert len(hook.calls) == calls


def test_text_survives_pickling_and_the_process(hook, sleeper):
    hook.answer(304)
    with pytest.raises(driver.OperatingSystemError) as caught:
        driver.checkpoint_process_lock(sleeper.pid)
    pickled = pickle.dumps(caught.value)
    sleeper.kill()
    sleeper.wait()
    assert "ended during the call" in str(pickle.loads(pickled))
    for twin in (pickle.loads(pickled), copy.copy(caught.value)):
        assert type(twin) is errors.OperatingSystemError
        assert str(twin) == str(caught.value)
        assert (twin.status, twin.call, twin.pid) == (
            304,
            "cuCheckpointProcessLock",
            sleeper.pid,
        )


def test_subclass_of_an_error_pickles_as_itself():
    twin = pickle.loads(pickle.dumps(OwnError(401)))
    assert type(twin) is OwnError
    assert twin.status == 401


class OwnError(errors.IllegalStateError):
    pass


def test_errors_can_be_made_by_hand():
    error = errors.OperatingSystemError(304)
    assert str(error) == "ERROR_OPERATING_SYSTEM (304)"
    assert repr(error) == "OperatingSystemError('ERROR_OPERATING_SYSTEM (304)')"


def test_peer_that_is_being_imported_is_found_when_it_is_ready(monkeypatch):
    peer = types.ModuleType("cuda.bindings._v2.driver")
    monkeypatch.setitem(sys.modules, peer.__name__, peer)
    assert type(errors.driver_error(401)) is errors.IllegalStateError
    for _ in range(2):  # and again when it is imported anew
        peer.IllegalStateError = type("IllegalStateError", (Exception,), {})
        assert isinstance(errors.driver_error(401), peer.IllegalStateError)
        assert isinstance(errors.driver_error(401), errors.IllegalStateError)
    monkeypatch.delitem(sys.modules, peer.__name__)
    assert type(errors.driver_error(401)) is errors.IllegalStateError
