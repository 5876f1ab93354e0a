"""Saves and loads with random faults, and manifests that say anything.

`CUCKPT_STEPS=5000 pytest --driver=simulated tests/jobs/test_image_chances.py` runs
longer.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from cuckpt import driver, storage
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process_errors import ProcessError, ProcessLeftError, ProcessLostError
from cuckpt.simulator import Fault, Machine
from cuckpt.storage import ImageError, NotLoadedError, NotSavedError, cuda
from cuckpt.storage.copier import Copier
from cuckpt.storage.manifest import _canonical, _checksum, parse

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")

STEPS = int(os.environ.get("CUCKPT_STEPS", "120"))
KIB = 1 << 10
CALLS = "lock", "checkpoint", "restore", "complete", "unlock"

faults_of_the_driver = st.builds(
    dict,
    call=st.sampled_from(CALLS),
    result=st.sampled_from([1, 2, 201, 304, 801, 999]),
    at=st.integers(1, 3),
    count=st.integers(1, 4),
    when=st.sampled_from(["before", "before", "after"]),
    kill=st.sampled_from([None, None, None, "target"]),
)
faults_of_the_disk = st.builds(
    dict,
    name=st.sampled_from(["pwrite", "preadv", "fsync", "ftruncate", "replace"]),
    problem=st.sampled_from([errno.ENOSPC, errno.EIO, "short"]),
    at=st.integers(0, 12),
    count=st.integers(1, 3),
)
DOCUMENTED = (
    driver.DriverError,
    ProcessError,
    ImageError,
    NotSavedError,
    NotLoadedError,
    GroupError,
    OSError,
)


class Disk:
    """Functions of `os` that fail when they are told to."""

    NAMES = "pwrite", "preadv", "fsync", "ftruncate", "replace"

    def __init__(self, monkeypatch):
        self.faults = []
        self.calls = dict.fromkeys(self.NAMES, 0)
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.failing(name, getattr(os, name)))

    def failing(self, name, do):
        def function(*arguments, **options):
            number = self.calls[name]
            self.calls[name] += 1
            for fault in self.faults:
                first = fault["at"]
                if fault["name"] == name and first <= number < first + fault["count"]:
                    if fault["problem"] != "short":
                        raise OSError(fault["problem"], os.strerror(fault["problem"]))
                    if name == "pwrite":
                        file, part, offset = arguments
                        return do(file, part[: len(part) // 2 or 1], offset)
            return do(*arguments, **options)

        return function

    def inject(self, faults):
        self.faults = [
            {**fault, "at": self.calls[fault["name"]] + fault["at"]} for fault in faults
        ]


@pytest.fixture
def machine():
    with Machine(gpus=2, memory_bytes=1 << 30) as machine:
        yield machine
        cuda.release()


def test_whatever_fails_nobody_runs_with_a_wrong_byte(
    machine, monkeypatch, files_by_python
):
    monkeypatch.setattr(storage.saving, "Copier", lambda: Copier(64 * KIB, 2))
    disk = Disk(monkeypatch)
    folder = tempfile.mkdtemp()
    done = {"saved": 0, "loaded": 0, "failed": 0, "lost": 0}

    @settings(
        max_examples=STEPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        count=st.integers(1, 3),
        kib=st.integers(0, 600),
        of_driver=st.lists(faults_of_the_driver, max_size=2),
        of_disk=st.lists(faults_of_the_disk, max_size=2),
    )
    def example(count, kib, of_driver, of_disk):
        path = os.path.join(folder, "image")
        shutil.rmtree(path, ignore_errors=True)
        targets = [machine.spawn({n % 2: kib * KIB + n}) for n in range(count)]
        group = ProcessGroup.from_pids(target.pid for target in targets)
        given_up = set()
        for verb in (group.save, group.load, group.save, group.load):
            inject(of_driver, of_disk)
            try:
                verb(path, **({"replace": True} if verb == group.save else {}))
                done["saved" if verb == group.save else "loaded"] += 1
            except DOCUMENTED as error:
                done["failed"] += 1
                errors = getattr(error, "exceptions", [error])
                given_up |= {
                    each.pid
                    for each in errors
                    if isinstance(each, ProcessLostError | ProcessLeftError)
                }
            disk.inject([])
            compare(targets, given_up, path)
            if given_up:
                done["lost"] += 1
                break
        for target in targets:
            target.end()

    def inject(of_driver, of_disk):
        for fault in of_driver:
            calls = machine.calls[fault["call"]]
            with contextlib.suppress(ValueError):
                machine.inject(Fault(**{**fault, "at": calls + fault["at"]}))
        disk.inject(of_disk)

    def compare(targets, given_up, path):
        for target in targets:
            if target.pid in given_up:
                continue
            try:
                state = driver.checkpoint_process_get_state(target.pid).name.lower()
            except (driver.NotInitializedError, driver.OperatingSystemError):
                assert target.process.wait(10)  # it was killed, perhaps just now
                continue
            assert state in ("running", "checkpointed"), state
            if state == "running":
                target.check()
            else:
                assert target.pid in {p.pid for p in storage.verify(path).processes}
        if os.path.exists(os.path.join(path, "manifest.json")):
            storage.verify(path)

    example()
    shutil.rmtree(folder)
    print(done)
    assert done["saved"]
    assert done["loaded"]
    assert done["failed"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=6,
)


@given(anything)
def test_manifest_of_anything_is_refused(content):
    with pytest.raises(ImageError):
        parse(json.dumps({"content": content}).encode(), "image")


@given(st.binary())
def test_manifest_of_any_bytes_is_refused(content):
    with pytest.raises(ImageError):
        parse(content, "image")


SOUND = {
    "format": "cuckpt image",
    "version": 1,
    "created": "2026-11-29T00:00:00+00:00",
    "cuckpt": "0.1.0",
    "cuda_version": 13050,
    "processes": [
        {
            "pid": 7,
            "name": "python",
            "start_time": 9,
            "boot_id": "b",
            "pid_namespace": 1,
            "regions": [
                {
                    "gpu": "GPU-01234567-89ab-cdef-0123-456789abcdef",
                    "gpu_name": "NVIDIA H200",
                    "size": 20000,
                    "stripes": [
                        {
                            "file": "01234567-0.stripe",
                            "size": 8200,
                            "chunks": [[0, 4096, 0, "0" * 32], [8192, 4104, 4096, ""]],
                        }
                    ],
                    "zeros": [[4096, 4096], [12296, 7704]],
                }
            ],
        }
    ],
}


def whole(content):
    sound = {"checksum": _checksum(_canonical(content)), "content": content}
    return _canonical(sound).encode()


def test_sound_manifest_is_read_and_written_the_same():
    image = parse(whole(SOUND), "image")
    assert image.size == 20000
    assert image.to_json() == whole(SOUND)


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        value = value.items()
    elif isinstance(value, list):
        value = enumerate(value)
    else:
        return
    for key, inner in value:
        yield from paths(inner, (*path, key))


@pytest.mark.parametrize("path", [path for path in paths(SOUND) if path], ids=str)
@pytest.mark.parametrize("wrong", [None, -1, 1 << 70, "x", [], {}, True, 1.5])
def test_manifest_with_one_wrong_value_is_refused_or_harmless(path, wrong):
    content = json.loads(json.dumps(SOUND))
    place = content
    for key in path[:-1]:
        place = place[key]
    if place[path[-1]] == wrong and type(place[path[-1]]) is type(wrong):
        return
    place[path[-1]] = wrong
    with contextlib.suppress(ImageError):
        image = parse(whole(content), "image")
        # What may be anything, or nothing at all.
        assert path[-1] in {
            *("created", "cuckpt", "cuda_version", "pid", "name", "start_time"),
            *("boot_id", "pid_namespace", "gpu_name", "processes", "regions", 3),
        }, image


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c.update(format="tar"), "tar"),
        (lambda c: c["processes"].append(c["processes"][0]), "twice"),
        (lambda c: region(c)["zeros"].pop(), "ends at"),
        (lambda c: region(c)["zeros"].append([0, 4096]), "overlap"),
        (lambda c: region(c)["stripes"][0].update(file="../../etc/passwd"), "no name"),
        (lambda c: region(c)["stripes"][0]["chunks"][1].__setitem__(2, 8192), "gap"),
        (lambda c: region(c).update(gpu="GPU-7"), "not a GPU UUID"),
        (lambda c: region(c)["stripes"][0]["chunks"][0].append(1), "positional"),
    ],
)
def test_manifest_that_contradicts_itself_is_refused(change, text):
    content = json.loads(json.dumps(SOUND))
    change(content)
    with pytest.raises(ImageError, match=text):
        parse(whole(content), "image")


def region(content):
    return content["processes"][0]["regions"][0]
