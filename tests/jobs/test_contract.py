"""What `cuda.core.checkpoint.Process` promises, kept by both classes.

Each test runs with each class, so that what is promised here is what is there.
"""

import inspect
import types

import pytest

from cuckpt import driver
from cuckpt.process import Process
from cuckpt.simulator import Fault

peer = pytest.importorskip("cuda.core.checkpoint")
bindings = pytest.importorskip("cuda.bindings.driver")

MIB = 1 << 20
machine_with = pytest.mark.cuda_machine


@pytest.fixture(params=[peer.Process, Process], ids=["cuda.core", "cuckpt"])
def cls(request):
    return request.param


@pytest.fixture
def target(cuda_machine):
    return cuda_machine.spawn({0: MIB})


@pytest.fixture
def process(cls, target):
    driver.init(0)
    return cls(target.pid)


def error_of(cls):
    """Return what a class raises when the driver refuses."""
    if cls is Process:
        return driver.DriverError
    from cuda.core._utils.cuda_utils import CUDAError

    return CUDAError


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lock", {"timeout_ms": 0}),
        ("checkpoint", {}),
        ("restore", {"gpu_mapping": None}),
        ("unlock", {}),
    ],
)
def test_methods_have_names_and_defaults(cls, name, parameters):
    signature = inspect.signature(getattr(cls, name))
    found = list(signature.parameters.values())[1:]
    assert {each.name: each.default for each in found} == parameters
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in found)


@pytest.mark.parametrize("name", ["pid", "state", "restore_thread_id"])
def test_attributes_are_read_only(cls, name):
    assert isinstance(inspect.getattr_static(cls, name), property)
    assert inspect.getattr_static(cls, name).fset is None


def test_class_takes_a_pid_by_name(cls, target):
    assert cls(pid=target.pid).pid == target.pid


@pytest.mark.parametrize(
    ("pid", "error", "text"),
    [
        (True, TypeError, "pid must be an int"),
        (1.0, TypeError, "pid must be an int"),
        ("1", TypeError, "pid must be an int"),
        (None, TypeError, "pid must be an int"),
        (0, ValueError, "pid must be a positive int"),
        (-5, ValueError, "pid must be a positive int"),
    ],
    ids=repr,
)
def test_class_refuses_what_is_no_pid(cls, pid, error, text):
    with pytest.raises(error, match=text):
        cls(pid)


def test_process_has_a_life(process, target):
    thread = process.restore_thread_id
    assert type(thread) is int
    assert process.state == "running"
    assert process.lock() is None
    assert process.state == "locked"
    assert process.checkpoint() is None
    assert process.state == "checkpointed"
    assert process.restore_thread_id == thread
    assert process.restore() is None
    assert process.state == "locked"
    assert process.unlock() is None
    assert process.state == "running"
    target.check()


def test_failed_is_a_state(cls, process, monkeypatch):
    if cls is Process:
        monkeypatch.setattr(driver, "checkpoint_process_get_state", lambda pid: 3)
    else:
        failed = bindings.CUprocessState.CU_PROCESS_STATE_FAILED
        monkeypatch.setattr(peer, "_call_driver", lambda *arguments: failed)
    assert process.state == "failed"


@pytest.mark.parametrize("timeout_ms", [0, 1000, 2**32 - 1])
def test_lock_takes_a_time(process, timeout_ms):
    process.lock(timeout_ms=timeout_ms)
    assert process.state == "locked"


@pytest.mark.parametrize(
    ("timeout_ms", "error", "text"),
    [
        (True, TypeError, "timeout_ms must be an int"),
        (1.5, TypeError, "timeout_ms must be an int"),
        ("1", TypeError, "timeout_ms must be an int"),
        (None, TypeError, "timeout_ms must be an int"),
        (-1, ValueError, "timeout_ms must be >= 0"),
        (2**32, OverflowError, "."),
    ],
    ids=repr,
)
def test_lock_refuses_what_is_no_time(process, timeout_ms, error, text):
    with pytest.raises(error, match=text):
        process.lock(timeout_ms)
    assert process.state == "running"


def test_lock_gives_up(cls, process, target):
    target.ask("spin 3000000")
    with pytest.raises(error_of(cls), match="NOT_READY"):
        process.lock(timeout_ms=50)
    assert process.state == "running"


@pytest.mark.parametrize("verb", ["checkpoint", "restore", "unlock"])
def test_verbs_are_refused_while_it_runs(cls, process, verb):
    with pytest.raises(error_of(cls), match="ILLEGAL_STATE"):
        getattr(process, verb)()
    assert process.state == "running"


@machine_with(faults=[Fault("checkpoint", result=2)])
def test_error_of_the_driver_is_raised(cls, process):
    process.lock()
    with pytest.raises(error_of(cls), match="OUT_OF_MEMORY"):
        process.checkpoint()
    assert process.state == "locked"


def test_process_that_has_ended_cannot_be_asked(process, target):
    target.end()
    for ask in (
        lambda: process.state,
        lambda: process.restore_thread_id,
        process.lock,
        process.checkpoint,
        process.restore,
        process.unlock,
    ):
        with pytest.raises(Exception, match=r"OPERATING_SYSTEM|has ended"):
            ask()


# GPU mappings

FORMS = {
    "hyphens": lambda gpu: str(gpu).removeprefix("GPU-"),
    "digits": lambda gpu: gpu.uuid.hex(),
    "upper case": lambda gpu: gpu.uuid.hex().upper(),
}


@machine_with(gpus=2)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_restore_takes_texts(cuda_machine, process, target, form):
    first, second = map(form, cuda_machine.gpus)
    process.lock()
    process.checkpoint()
    process.restore(gpu_mapping={first: second, second: first})
    process.unlock()
    target.check()
    assert cuda_machine.processes()[target.pid] == {0: 0, 1: 2 * MIB}


@machine_with(gpus=2)
def test_restore_takes_uuids_of_the_driver(cuda_machine, process, target):
    found = [bindings.cuDeviceGetUuid(gpu)[1] for gpu in range(2)]
    assert [uuid.bytes for uuid in found] == [gpu.uuid for gpu in cuda_machine.gpus]
    process.lock()
    process.checkpoint()
    process.restore(dict(zip(found, reversed(found), strict=True)))
    process.unlock()
    target.check()
    assert cuda_machine.processes()[target.pid] == {0: 0, 1: 2 * MIB}


@pytest.mark.parametrize("mapping", [None, {}, types.MappingProxyType({})], ids=repr)
def test_restore_takes_no_mapping(process, target, mapping):
    process.lock()
    process.checkpoint()
    process.restore(mapping)
    process.unlock()
    target.check()


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ([], TypeError),
        ([("a", "b")], TypeError),
        ("ab", TypeError),
        (5, TypeError),
        ({5: 5}, TypeError),
        ({None: None}, TypeError),
        ({"": ""}, ValueError),
        ({"00" * 15: "00" * 16}, ValueError),
        ({"00" * 16: "00" * 17}, ValueError),
        ({"zz" * 16: "00" * 16}, ValueError),
    ],
    ids=repr,
)
def test_restore_refuses_what_is_no_mapping(cuda_machine, process, mapping, error):
    process.lock()
    process.checkpoint()
    with pytest.raises(error):
        process.restore(mapping)
    assert cuda_machine.calls["restore"] == 0
    assert process.state == "checkpointed"


@machine_with(gpus=2)
def test_restore_wants_all_gpus_that_there_are(cls, cuda_machine, process, target):
    first, second = (gpu.uuid.hex() for gpu in cuda_machine.gpus)
    process.lock()
    process.checkpoint()
    for mapping in {first: second}, {first: first, "00" * 16: second}:
        with pytest.raises(error_of(cls), match="INVALID_VALUE"):
            process.restore(mapping)
        assert process.state == "checkpointed"
    process.restore({first: first, second: second})
    process.unlock()
    target.check()
