"""What the GPUs of a simulated machine are makes a difference to restores."""

import os
import subprocess
import sys

import pytest

from cuckpt.simulator import Gpu, Machine
from cuckpt.target import Target

pytestmark = pytest.mark.thread_unsafe(reason="each test runs programs of its own")

CALLER = """
import sys
from cuckpt import driver, uuids
if sys.argv[1] == "init":
    driver.init()
pid = int(sys.argv[2])
for name in sys.argv[3:]:
    name, _, uuid = name.partition("=")
    args = driver.CheckpointRestoreArgs() if name == "restore" else None
    if uuid:
        pairs = [pair.split(">") for pair in uuid.split(",")]
        args.gpu_pairs = [tuple(map(uuids.to_bytes, pair)) for pair in pairs]
    try:
        getattr(driver, f"checkpoint_process_{name}")(pid, args)
        print(0)
    except driver.DriverError as error:
        print(int(error.status))
print(driver.checkpoint_process_get_state(pid).name)
"""


def call(target, variables, *calls, init="init"):
    """Let a process of the machine call the driver; return results and state."""
    return subprocess.check_output(
        [sys.executable, "-P", "-c", CALLER, init, str(target.pid), *calls],
        env={**os.environ, **variables},
        text=True,
        timeout=60,
    ).split()


def gpu(number, **options):
    return Gpu(bytes([number] * 16), 64 << 20, **options)


def test_without_persistence_mode_a_restore_needs_init():
    machine = Machine([gpu(1, persistence_mode=False), gpu(2)])
    with machine.started() as variables:
        target, other = machine.spawn({0: 1 << 20}), machine.spawn({1: 1 << 20})
        suspend = "lock", "checkpoint"
        for process, result, state in (
            (target, "3", "CHECKPOINTED"),
            (other, "0", "LOCKED"),
        ):
            assert call(process, variables, *suspend)[:2] == ["0", "0"]
            assert call(process, variables, "restore", init="no") == [result, state]
        resume = call(target, variables, "restore", "unlock")
        assert resume == ["0", "0", "RUNNING"]
        target.check()


def test_mig_makes_a_checkpoint_run_out_of_memory():
    machine = Machine([gpu(1, mig_mode=True), gpu(2)])
    with machine.started() as variables:
        target, other = machine.spawn({0: 1 << 20}), machine.spawn({1: 1 << 20})
        results = call(target, variables, "lock", "checkpoint", "unlock")
        assert results == ["0", "2", "0", "RUNNING"]
        results = call(other, variables, "lock", "checkpoint")
        assert results == ["0", "0", "CHECKPOINTED"]


def test_memory_comes_back_on_a_gpu_of_its_kind_only():
    gpus = [gpu(1), gpu(2), gpu(3, name="another kind")]
    machine = Machine(gpus)
    with machine.started() as variables:
        target = machine.spawn({0: 1 << 20})
        assert call(target, variables, "lock", "checkpoint")[:2] == ["0", "0"]
        for order, result in ((2, 1, 0), "1"), ((1, 0), "1"), ((1, 0, 2), "0"):
            pairs = [f"{gpus[i]}>{gpus[n]}" for i, n in enumerate(order)]
            results = call(target, variables, f"restore={','.join(pairs)}")
            assert results[0] == result
        call(target, variables, "unlock")
        target.check()
        used = machine.processes()[target.pid]
        assert [bytes_used > 0 for bytes_used in used.values()] == [False, True, False]


@pytest.mark.parametrize(
    ("version", "checkpoint", "custom_storage"),
    [(12040, 0, 0), (12080, 1, 0), (13000, 1, 0), (13040, 1, 1), (13050, 1, 1)],
)
def test_version_decides_what_there_is(version, checkpoint, custom_storage):
    program = (
        "from cuckpt import driver; driver.init(); "
        "print(driver.driver_get_version(), +driver.has_checkpoint(), "
        "+driver.has_custom_storage())"
    )
    with Machine(driver_version=version).started() as variables:
        printed = subprocess.check_output(
            [sys.executable, "-P", "-c", program],
            env={**os.environ, **variables},
            text=True,
        )
    assert printed == f"{version} {checkpoint} {custom_storage}\n"


@pytest.mark.parametrize("name", ["", "x" * 60, "näme"])
def test_wrong_names_are_refused(name):
    with pytest.raises(ValueError, match="1 to 59 ASCII characters"):
        gpu(1, name=name)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("1,0", [1, 0]),
        ("2", [2]),
        (f"{gpu(3)},0", [2, 0]),
        ("GPU-0202", [1]),
        ("0,7,1", [0]),
        ("-1", None),
        ("", None),
        ("0,0", None),
        ("GPU-", None),
        ("nonsense", None),
    ],
)
def test_only_visible_devices_are_seen(visible, seen):
    program = """
from cuckpt import driver
try:
    driver.init()
except driver.NoDeviceError:
    print(None)
else:
    gpus = range(driver.device_get_count())
    print([driver.device_get_uuid_v2(gpu).bytes[0] - 1 for gpu in gpus])
"""
    with Machine([gpu(1), gpu(2), gpu(3)]).started() as variables:
        printed = subprocess.check_output(
            [sys.executable, "-P", "-c", program],
            env={**os.environ, **variables, "CUDA_VISIBLE_DEVICES": visible},
            text=True,
        )
    assert printed == f"{seen}\n"


def test_process_that_sees_one_gpu_only_is_moved_by_pairs_of_all():
    gpus = [gpu(1), gpu(2)]
    machine = Machine(gpus)
    with machine.started() as variables:
        environment = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": "1"}
        with Target({0: 1 << 20}, environment) as target:
            used = machine.processes()[target.pid]
            assert (used[0], used[1] > 0) == (0, True)
            one = f"restore={gpus[1]}>{gpus[0]}"
            both = f"{one},{gpus[0]}>{gpus[1]}"
            results = call(target, variables, "lock", "checkpoint", one, both, "unlock")
            assert results == ["0", "0", "1", "0", "0", "RUNNING"]
            target.check()
            used = machine.processes()[target.pid]
            assert (used[0] > 0, used[1]) == (True, 0)
