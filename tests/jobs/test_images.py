"""Processes and groups, saved to images and loaded from them."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuckpt import driver, proc, storage
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process import Process
from cuckpt.process_errors import (
    NoMembersError,
    ProcessBusyError,
    ProcessError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
    ProcessSavedError,
)
from cuckpt.simulator import Fault
from cuckpt.storage import ImageError, NotLoadedError, NotSavedError, cuda
from cuckpt.target import Target

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_kept(cuda_machine):
    yield
    cuda.release()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "image"


@pytest.fixture
def target(cuda_machine):
    return cuda_machine.spawn({0: 300 * KIB})


def state_of(target):
    return driver.checkpoint_process_get_state(target.pid).name.lower()


def fail(machine, call, **how):
    machine.inject(Fault(call, at=machine.calls[call] + how.pop("at", 1), **how))


def runs(target):
    return state_of(target) == "running" and target.check() is None


# What works


@pytest.mark.cuda_machine(gpus=8)
@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5 * MIB + 1])
def test_process_comes_back(cuda_machine, path, gpus, size):
    target = cuda_machine.spawn(dict.fromkeys(range(gpus), size))
    process = Process(target.pid)
    outcome = process.save(path)
    assert (outcome.before, outcome.after) == ("running", "checkpointed")
    assert outcome.image == str(path)
    assert list(outcome.seconds) == ["lock", "prepare", "copy", "complete"]
    assert state_of(target) == "checkpointed"
    storage.verify(path)
    outcome = process.load(path)
    assert (outcome.before, outcome.after) == ("checkpointed", "running")
    assert list(outcome.seconds) == ["prepare", "copy", "complete", "unlock"]
    target.check()


def test_process_can_be_saved_and_loaded_again_and_again(target, path):
    process = Process(target.pid)
    for _ in range(3):
        process.save(path, replace=True)
        process.load(path)
        target.check()
        target.ask(f"fill {100 * KIB}")
    files = {*os.listdir(path)} - {"manifest.json", "loaded"}
    assert files == {stripe.file for stripe in storage.describe(path).stripes}


def test_other_program_loads_it(target, path):
    Process(target.pid).save(path)
    program = """
import sys
from cuckpt import Process
Process(int(sys.argv[1])).load(sys.argv[2])
"""
    command = [sys.executable, "-P", "-c", program, str(target.pid), str(path)]
    subprocess.run(command, check=True, timeout=60)
    target.check()


@pytest.mark.cuda_machine(gpus=2)
def test_memory_comes_back_on_another_gpu(cuda_machine, path):
    target = cuda_machine.spawn({0: MIB})
    process = Process(target.pid)
    process.save(path)
    process.load(path, gpu_map={0: 1})
    target.check()
    assert set(process.used_memory()) == {
        storage.operation.gpu_uuid(1)  # the one it has moved to
    }
    process.save(path, replace=True)
    (saved,) = storage.describe(path).processes
    assert [region.gpu for region in saved.regions] == [storage.operation.gpu_uuid(1)]
    process.load(path)
    target.check()


@pytest.mark.cuda_machine(gpus=2)
def test_group_comes_back(cuda_machine, path):
    targets = [cuda_machine.spawn({0: 100 * KIB, 1: n * MIB}) for n in (0, 1, 3)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    report = group.save(path)
    assert set(group.states().values()) == {"checkpointed"}
    assert {outcome.image for outcome in report.outcomes.values()} == {str(path)}
    assert sorted(p.pid for p in storage.describe(path).processes) == sorted(group.pids)
    group.load(path, gpu_map={0: 1})
    for target in targets:
        target.check()


def test_members_without_gpu_memory_or_cuda_are_no_problem(cuda_machine, path):
    target = cuda_machine.spawn({0: MIB})
    with Target() as other, subprocess.Popen(["sleep", "100"]) as sleeper:
        group = ProcessGroup.from_pids([target.pid, other.pid, sleeper.pid])
        report = group.save(path)
        assert list(report.skipped) == [sleeper.pid]
        group.load(path)
        target.check()
        sleeper.kill()


def test_hooks_are_called(target, path):
    called = []
    group = ProcessGroup.from_pids(
        [target.pid],
        before_suspend=lambda group: called.append("before"),
        after_resume=lambda group: called.append("after"),
    )
    group.save(path)
    assert called == ["before"]
    group.load(path)
    assert called == ["before", "after"]


def test_locked_process_can_be_saved(target, path):
    process = Process(target.pid)
    process.lock(1000)
    process.save(path)
    process.load(path)
    target.check()


def test_zeros_are_not_stored(cuda_machine, path):
    target = cuda_machine.spawn({0: 0})
    target.ask(f"take {64 * MIB}")
    Process(target.pid).save(path)
    image = storage.describe(path)
    assert image.size >= 64 * MIB
    assert image.stored_bytes <= 2 * MIB
    assert sum(file.stat().st_size for file in path.iterdir()) < 4 * MIB
    Process(target.pid).load(path)
    assert state_of(target) == "running"


def test_image_is_its_owners_only(target, path):
    before = os.umask(0)
    try:
        Process(target.pid).save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in path.iterdir()} == {0o600}


def test_events_tell_of_phases_and_progress(cuda_machine, path):
    target = cuda_machine.spawn({0: 40 * MIB})
    events = []
    process = Process(target.pid, on_event=events.append)
    process.save(path)
    process.load(path)
    told = [(e.phase, e.moment) for e in events if e.moment in ("start", "end")]
    phases = ["lock", "prepare", "copy", "complete"]
    phases += ["prepare", "copy", "complete", "unlock"]
    assert told == [(p, moment) for p in phases for moment in ("start", "end")]
    progress = [event for event in events if event.moment == "progress"]
    assert progress
    for event in progress:
        assert 0 < event.done_bytes <= event.bytes == 40 * MIB


def test_dry_run_writes_nothing(target, path):
    outcome = Process(target.pid).save(path, dry_run=True)
    assert (outcome.before, outcome.after) == ("running", "running")
    assert any(f"go to {path}" in note for note in outcome.notes)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Process(target.pid).save(path / "not" / "there", dry_run=True)


def test_description_can_be_read(target, path):
    Process(target.pid).save(path)
    text = str(storage.describe(path))
    for part in (str(path), f"process {target.pid} python", "GPU-", "CUDA 13.5"):
        assert part in text
    assert max(map(len, text.splitlines()[1:])) <= 80
    Process(target.pid).load(path)


# What is refused before anything is done


def test_driver_without_custom_storage_is_named_before_anything_is_done(path):
    """In a program of its own, since this one has loaded another version."""
    program = f"""
from cuckpt import driver, Process
from cuckpt.simulator import Machine
with Machine(driver_version=13000) as machine:
    target = machine.spawn({{0: 1 << 20}})
    for do in (Process(target.pid).save, Process(target.pid).load):
        try:
            do({os.fspath(path)!r})
        except driver.FunctionNotFoundError as error:
            assert "CUDA 13.0" in str(error)
            print(str(error)[-70:])
    assert Process(target.pid).state == "running"
    target.check()
"""
    command = [sys.executable, "-P", "-W", "error", "-c", program]
    alone = {name: v for name, v in os.environ.items() if "CUCKPT" not in name}
    printed = subprocess.check_output(command, text=True, timeout=60, env=alone)
    assert printed.splitlines() == 2 * [printed.splitlines()[0]]
    assert "keeps GPU memory" in printed
    assert not path.exists()


def refused(target, path, error, text, **options):
    with pytest.raises(error, match=text):
        Process(target.pid).save(path, **options)
    assert runs(target)


def test_folder_that_holds_something_is_refused(target, path):
    path.mkdir(0o700)
    (path / "thesis.tex").write_text("years of work")
    refused(target, path, FileExistsError, "thesis.tex")
    refused(target, path, FileExistsError, "thesis.tex", replace=True)
    assert (path / "thesis.tex").read_text() == "years of work"


def test_image_is_not_replaced_unless_that_is_wanted(target, path):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    before = (path / "manifest.json").read_bytes()
    refused(target, path, FileExistsError, "replaced")
    assert (path / "manifest.json").read_bytes() == before


def test_folder_of_others_is_refused(target, path):
    path.mkdir()
    path.chmod(0o755)
    refused(target, path, PermissionError, "chmod 700")


def test_links_are_not_followed(target, path, tmp_path):
    (tmp_path / "elsewhere").mkdir(0o700)
    path.symlink_to(tmp_path / "elsewhere")
    refused(target, path, OSError, "link")
    path.unlink()
    process = Process(target.pid)
    process.save(path)
    stripe = path / storage.describe(path).stripes[0].file
    stripe.rename(tmp_path / "moved")
    stripe.symlink_to(tmp_path / "moved")
    with pytest.raises(ImageError, match="link"):
        process.load(path)
    stripe.unlink()
    (tmp_path / "moved").rename(stripe)
    process.load(path)
    target.check()


def test_one_writer_at_a_time(target, path):
    path.mkdir(0o700)
    folder = os.open(path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_SH)
    refused(target, path, ImageError, "in use")
    os.close(folder)
    process = Process(target.pid)
    process.save(path)
    folder = os.open(path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ImageError, match="in use"):
        process.load(path)
    os.close(folder)
    process.load(path)


def test_too_little_space_is_told_before_the_lock(target, path, monkeypatch):
    events = []
    room = os.statvfs_result([4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255, 0])
    monkeypatch.setattr(os, "fstatvfs", lambda _: room)
    with pytest.raises(OSError, match="are free") as caught:
        Process(target.pid, on_event=events.append).save(path)
    assert caught.value.errno == errno.ENOSPC
    assert events == []
    assert not path.exists()
    assert runs(target)


def test_suspended_process_has_to_be_resumed_first(target, path):
    process = Process(target.pid)
    process.suspend()
    with pytest.raises(NotSavedError, match="resume it first"):
        process.save(path)
    assert state_of(target) == "checkpointed"
    process.resume()
    target.check()


def test_job_file_has_no_custom_storage(cuda_machine, path):
    variables = {**os.environ, "CUDA_CHECKPOINT_JOB_FILE": "/nowhere"}
    with Target(environment=variables) as target:
        refused(target, path, NotSavedError, "CUDA_CHECKPOINT_JOB_FILE")


def test_process_that_runs_is_not_loaded(target, path):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    with pytest.raises(NotLoadedError, match="is running"):
        process.load(path)
    target.check()


def test_image_is_used_up_by_the_process_that_ran_on_from_it(target, path, tmp_path):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    process.save(tmp_path / "newer")
    shutil.copytree(path, tmp_path / "copy")
    (tmp_path / "copy/loaded").unlink()
    for older in (path, tmp_path / "copy"):
        with pytest.raises(NotLoadedError, match=r"saved since, to .*newer"):
            process.load(older)
    assert process.state == "checkpointed"
    process.load(tmp_path / "newer")
    process.save(tmp_path / "newest")
    process._image = None  # as if nobody had kept it in mind
    with pytest.raises(NotLoadedError, match="has run since"):
        process.load(tmp_path / "newer")
    process.load(tmp_path / "newest")
    target.check()


def test_image_of_another_process_is_refused(cuda_machine, target, path):
    other = cuda_machine.spawn({0: 300 * KIB})
    Process(target.pid).save(path)
    Process(other.pid).save(path.with_name("other"))
    with pytest.raises(ImageError, match=f"also, or only, of.*{target.pid}"):
        Process(other.pid).load(path)
    change(path, lambda content: content["processes"][0].update(start_time=1))
    with pytest.raises(NotLoadedError, match="another process"):
        Process(target.pid).load(path)
    Process(target.pid).load(path, same_process=False)
    Process(other.pid).load(path.with_name("other"))
    target.check()
    other.check()


def test_part_of_a_job_is_not_loaded(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    group.save(path)
    with pytest.raises(ImageError, match="together"):
        Process(targets[0].pid).load(path)
    group.load(path)
    for target in targets:
        target.check()


def test_group_without_members_is_told(path):
    with pytest.raises(NoMembersError):
        ProcessGroup.from_pids([os.getpid()]).save(path)
    assert not path.exists()


def test_image_of_a_newer_driver_is_refused(target, path):
    Process(target.pid).save(path)
    Process(target.pid)._image = None  # the manifest will be another
    change(path, lambda content: content.update(cuda_version=14000))
    with pytest.raises(ImageError, match=r"CUDA 14.0.*13.5"):
        Process(target.pid).load(path)
    change(path, lambda content: content.update(cuda_version=13040))
    Process(target.pid).load(path)
    target.check()


def test_image_of_other_sizes_is_refused_and_the_process_stays(cuda_machine, path):
    small, large = (cuda_machine.spawn({0: size}) for size in (MIB, 5 * MIB))
    for target in (small, large):
        Process(target.pid).save(path.with_name(str(target.pid)))
    own = path.with_name(str(large.pid))
    shutil.copytree(path.with_name(str(small.pid)), path)
    change(path, lambda content: content["processes"][0].update(pid=large.pid))
    with pytest.raises(NotLoadedError, match="needs memory"):
        Process(large.pid).load(path, same_process=False)
    assert state_of(large) == "checkpointed"
    Process(large.pid).load(own)
    large.check()


@pytest.mark.cuda_machine(gpus=2, memory_bytes=32 * MIB)
def test_load_without_room_is_refused_before_the_driver_is_called(cuda_machine, path):
    target = cuda_machine.spawn({0: 20 * MIB})
    process = Process(target.pid)
    process.save(path)
    with Target({0: 20 * MIB}):
        calls = cuda_machine.calls["restore"]
        with pytest.raises(MemoryError, match="free"):
            process.load(path)
        assert cuda_machine.calls["restore"] == calls
        assert process.state == "checkpointed"
        process.load(path, gpu_map={0: 1})
        target.check()


@pytest.mark.parametrize("module", ["xxhash", "cuda", "cuda.bindings"])
def test_missing_extra_is_named_before_anything_is_done(target, path, module):
    program = f"""
import sys
sys.modules[{module!r}] = None
from cuckpt import Process
try:
    Process(int(sys.argv[1])).save(sys.argv[2])
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-P", "-c", program, str(target.pid), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "pip install 'cuckpt[storage]'" in result.stdout, result.stderr
    assert not path.exists()
    assert runs(target)


def test_resume_of_a_saved_process_names_the_image(cuda_machine, target, path):
    other = cuda_machine.spawn({0: MIB})
    Process(target.pid).save(path)
    Process(other.pid).suspend()
    calls = cuda_machine.calls["restore"]
    for do in (Process(target.pid).resume, Process(target.pid).recover):
        with pytest.raises(ProcessSavedError, match=re.escape(str(path))):
            do()
    group = ProcessGroup.from_pids([target.pid, other.pid])
    with pytest.raises(ProcessSavedError):
        group.resume()
    assert cuda_machine.calls["restore"] == calls
    with pytest.raises(GroupError) as caught:
        group.recover()
    assert [type(each) for each in caught.value.exceptions] == [ProcessSavedError]
    assert runs(other)
    Process(target.pid).load(path)
    target.check()
    Process(target.pid).suspend()
    Process(target.pid).resume()


def test_save_inside_of_a_suspension_is_refused(target, path):
    process = Process(target.pid)
    with (
        process.suspended(),
        pytest.raises(NotSavedError, match="resume it first"),
    ):
        process.save(path)
    target.check()


# Images that are not what was saved


def change(path, how):
    """Change what a manifest says, so that its checksum fits."""
    file = path / "manifest.json"
    content = json.loads(file.read_bytes())["content"]
    how(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    whole = {"checksum": storage.manifest._checksum(text), "content": content}
    file.write_text(json.dumps(whole, sort_keys=True, separators=(",", ":")))


def flip(file, at, bit=0):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def test_flipped_bit_in_every_part_is_found_and_the_process_stays(
    cuda_machine, path, monkeypatch
):
    monkeypatch.setattr(storage.saving, "Copier", small_chunks)
    target = cuda_machine.spawn({0: 3 * MIB})
    process = Process(target.pid)
    process.save(path)
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        for at in {0, size // 3, size // 2, size - 1, *range(17, size, size // 7)}:
            flip(file, at, at % 8)
            with pytest.raises((ImageError, NotLoadedError)):
                process.load(path)
            with pytest.raises(ImageError):
                storage.verify(path)
            assert state_of(target) == "checkpointed"
            flip(file, at, at % 8)
    storage.verify(path)
    process.load(path)
    target.check()


def small_chunks(workers=4):
    return storage.copier.Copier(64 * KIB, workers)


@pytest.mark.parametrize("how", ["truncated", "longer", "missing", "folder", "fifo"])
def test_files_that_cannot_be_are_refused_before_the_driver_is_called(
    cuda_machine, target, path, how
):
    process = Process(target.pid)
    process.save(path)
    stripe = path / storage.describe(path).stripes[0].file
    content = stripe.read_bytes()
    if how == "truncated":
        stripe.write_bytes(content[:-1])
    elif how == "longer":
        stripe.write_bytes(content + b"\0")
    else:
        stripe.unlink()
        if how == "folder":
            stripe.mkdir()
        elif how == "fifo":
            os.mkfifo(stripe)
    calls = cuda_machine.calls
    for look in (process.load, storage.describe, storage.verify):
        with pytest.raises(ImageError, match=stripe.name):
            look(path)
    assert cuda_machine.calls["restore"] == calls["restore"]
    if how == "folder":
        stripe.rmdir()
    else:
        stripe.unlink(missing_ok=True)
    stripe.write_bytes(content)
    process.load(path)
    target.check()


def test_folder_without_an_image_is_told(tmp_path, target):
    Process(target.pid).save(tmp_path / "image")
    with pytest.raises(ImageError, match="no image"):
        Process(target.pid).load(tmp_path)
    with pytest.raises(FileNotFoundError):
        storage.describe(tmp_path / "not there")
    with pytest.raises(NotADirectoryError):
        storage.describe(tmp_path / "image" / "manifest.json")
    Process(target.pid).load(tmp_path / "image")
    target.check()


# What fails in the middle


CALLS_OF_A_SAVE = ["lock", "checkpoint", "complete"]


@pytest.mark.parametrize("call", CALLS_OF_A_SAVE)
@pytest.mark.parametrize("result", [1, 2, 201, 304, 801, 999])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_save_fails_and_the_process_runs(
    cuda_machine, target, path, call, result, count
):
    fail(cuda_machine, call, result=result, count=count)
    process = Process(target.pid)
    try:
        process.save(path)
    except ProcessLostError as error:
        assert "its checkpoint cannot be completed" in str(error)
        assert (call, count) == ("complete", 100)
        assert state_of(target) == "checkpointing"
        storage.verify(path)
    except (driver.DriverError, ProcessError):
        assert not path.exists()
        assert runs(target)
    else:
        process.load(path)
        target.check()


@pytest.mark.parametrize("call", ["lock", "complete"])
def test_what_is_done_in_spite_of_an_error_counts(cuda_machine, target, path, call):
    fail(cuda_machine, call, result=999, when="after")
    outcome = Process(target.pid).save(path)
    assert any(f"{call} is done" in note for note in outcome.notes)
    Process(target.pid).load(path)
    target.check()


def test_checkpoint_that_hands_nothing_out_loses_the_process(
    cuda_machine, target, path
):
    fail(cuda_machine, "checkpoint", result=999, when="after")
    with pytest.raises(ProcessLostError, match="did not hand out"):
        Process(target.pid).save(path)
    assert state_of(target) == "checkpointing"
    assert not path.exists()


@pytest.mark.parametrize("call", ["restore", "complete", "unlock"])
@pytest.mark.parametrize("result", [1, 304, 401, 999])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_load_fails_and_the_process_stays_or_runs(
    cuda_machine, target, path, call, result, count
):
    if (call, result) == ("restore", 304):
        count = 1  # twice: it is lost
    process = Process(target.pid)
    process.save(path)
    fail(cuda_machine, call, result=result, count=count)
    for _ in range(count):
        with contextlib.suppress(driver.DriverError, ProcessLeftError, NotLoadedError):
            process.load(path)
        if state_of(target) == "locked":  # loaded, but not to be unlocked then
            process.recover()
        if state_of(target) == "running":
            break
        assert state_of(target) == "checkpointed"
    else:
        process.load(path)
    assert runs(target)


def test_process_that_can_be_restored_no_more_is_lost(cuda_machine, target, path):
    process = Process(target.pid)
    process.save(path)
    fail(cuda_machine, "restore", result=2)  # which loses it, as with driver 580
    with pytest.raises(ProcessLostError, match="OUT_OF_MEMORY"):
        process.load(path)
    assert state_of(target) == "checkpointed"


def test_restore_that_cannot_be_completed_loses_the_process(cuda_machine, target, path):
    process = Process(target.pid)
    process.save(path)
    fail(cuda_machine, "complete", result=999, count=100)
    with pytest.raises(ProcessLostError, match="cannot be completed"):
        process.load(path)
    assert state_of(target) == "restoring"
    storage.verify(path)


def test_one_of_a_group_fails_and_all_run(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(3)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    fail(cuda_machine, "checkpoint", result=801, at=3)
    with pytest.raises(GroupError) as caught:
        group.save(path)
    assert len(caught.value.exceptions) == 1
    assert all(map(runs, targets))
    assert not path.exists()


def test_one_of_a_group_fails_to_be_loaded_and_all_stay(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(3)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    group.save(path)
    fail(cuda_machine, "restore", result=999, at=3, count=2)
    with pytest.raises(GroupError):
        group.load(path)
    assert set(map(state_of, targets)) == {"checkpointed"}
    group.load(path)
    assert all(map(runs, targets))


def broken(monkeypatch, name, problem, at=0, only=None):
    """Let a function of `os` fail from a call on; return how often it has."""
    do, count, failed = getattr(os, name), iter(range(10**6)), []

    def failing(*arguments, **options):
        if (only is None or only(*arguments)) and next(count) >= at:
            failed.append(arguments)
            raise OSError(problem, os.strerror(problem))
        return do(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    return failed


def is_on_disk(file, *_):
    return "memfd" not in os.readlink(f"/proc/self/fd/{file}")


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("pwrite", 0), ("pwrite", 2), ("fsync", 0), ("fsync", 1), ("fsync", 2)),
        *(("ftruncate", 0), ("replace", 0)),
    ],
)
def test_image_cannot_be_written_and_the_process_runs(
    cuda_machine, path, monkeypatch, files_by_python, problem, name, at
):
    monkeypatch.setattr(storage.saving, "Copier", small_chunks)
    target = cuda_machine.spawn({0: 3 * MIB})
    on_disk = None if name == "replace" else is_on_disk
    failed = broken(monkeypatch, name, problem, at, on_disk)
    with pytest.raises(NotSavedError, match=os.strerror(problem)):
        Process(target.pid).save(path)
    assert failed
    monkeypatch.undo()
    assert runs(target)
    assert not path.exists()


def test_other_folder_takes_what_the_first_does_not(
    cuda_machine, path, tmp_path, monkeypatch, files_by_python
):
    target = cuda_machine.spawn({0: 3 * MIB})
    first = os.fspath(path)

    def is_first(file, *_):
        return os.readlink(f"/proc/self/fd/{file}").startswith(first + "/")

    broken(monkeypatch, "pwrite", errno.ENOSPC, only=is_first)
    other = tmp_path / "other"
    outcome = Process(target.pid).save(
        path, fallback=[tmp_path / "not" / "there", other]
    )
    assert outcome.image == str(other)
    assert any("No space left" in note for note in outcome.notes)
    assert not path.exists()
    Process(target.pid).load(other)
    target.check()


def test_process_is_lost_when_no_place_takes_its_memory(
    cuda_machine, target, path, monkeypatch, files_by_python
):
    broken(monkeypatch, "pwrite", errno.ENOSPC)
    monkeypatch.setattr(proc, "memory_left", lambda: (0, False))
    with pytest.raises(ProcessLostError) as caught:
        Process(target.pid).save(path)
    for part in (str(target.pid), "lost", "host memory", "No space left"):
        assert part in str(caught.value)
    assert state_of(target) == "checkpointing"
    assert not path.exists()
    with pytest.raises(ProcessBusyError):
        Process(target.pid).recover()


def test_folder_takes_it_for_the_way_back_without_host_memory(
    cuda_machine, path, monkeypatch, files_by_python
):
    target = cuda_machine.spawn({0: 3 * MIB})
    monkeypatch.setattr(proc, "memory_left", lambda: (0, False))
    broken(monkeypatch, "replace", errno.EIO)
    with pytest.raises(NotSavedError, match="Input/output"):
        Process(target.pid).save(path)
    assert runs(target)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("at", [0, 3])
def test_image_cannot_be_read_and_the_process_stays(
    cuda_machine, path, monkeypatch, files_by_python, at
):
    monkeypatch.setattr(storage.saving, "Copier", small_chunks)
    target = cuda_machine.spawn({0: 3 * MIB})
    process = Process(target.pid)
    process.save(path)
    with monkeypatch.context() as patch:
        broken(patch, "preadv", errno.EIO, at)
        with pytest.raises(NotLoadedError, match="Input/output"):
            process.load(path)
    assert state_of(target) == "checkpointed"
    process.load(path)
    target.check()


def test_read_only_image_can_be_loaded(target, path, monkeypatch):
    process = Process(target.pid)
    process.save(path)
    monkeypatch.setattr(
        storage.folder.OldImage,
        "add_user",
        lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")),
    )
    outcome = process.load(path)
    assert any("once only" in note for note in outcome.notes)
    target.check()


# Death, and signals


def test_target_that_dies_during_the_copy_is_told(
    cuda_machine, path, monkeypatch, files_by_python
):
    target = cuda_machine.spawn({0: MIB})
    process = Process(target.pid)
    write = os.pwrite

    def kill(*arguments):
        target.process.kill()
        target.process.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", kill)
    with pytest.raises((ProcessGoneError, ProcessError, driver.DriverError)):
        process.save(path)
    monkeypatch.undo()


def test_other_members_run_when_one_dies(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(3)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    fail(cuda_machine, "checkpoint", at=2, kill="target")
    report = group.save(path)
    (dead,) = report.skipped
    living = [target for target in targets if target.pid != dead]
    ProcessGroup.from_pids(target.pid for target in living).load(path)
    assert all(map(runs, living))


def test_interrupt_during_the_copy_brings_it_back(
    cuda_machine, path, monkeypatch, files_by_python
):
    target = cuda_machine.spawn({0: 20 * MIB})
    write, main = os.pwrite, threading.main_thread()

    def interrupt(*arguments):
        if is_on_disk(arguments[0]):
            signal.pthread_kill(main.ident, signal.SIGINT)
            time.sleep(0.1)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Process(target.pid).save(path)
    monkeypatch.undo()
    assert runs(target)
    assert not path.exists()


def test_interrupt_during_a_load_leaves_it_suspended(
    cuda_machine, path, monkeypatch, files_by_python
):
    target = cuda_machine.spawn({0: 20 * MIB})
    process = Process(target.pid)
    process.save(path)
    read, main = os.preadv, threading.main_thread()

    def interrupt(*arguments):
        signal.pthread_kill(main.ident, signal.SIGINT)
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.load(path)
    monkeypatch.undo()
    assert state_of(target) == "checkpointed"
    process.load(path)
    target.check()


SAVER = """
import sys
from cuckpt import Process
print("begins", flush=True)
process = Process(int(sys.argv[1]))
while True:
    process.save(sys.argv[2], replace=True)
    process.load(sys.argv[2])
"""


def test_saver_is_killed_at_any_moment_and_no_image_is_incomplete(
    cuda_machine, tmp_path
):
    """Whatever the state then, an image that is there is whole."""
    chance = random.Random(7)
    seen = set()
    for number in range(12):
        target = cuda_machine.spawn({0: 20 * MIB})
        path = tmp_path / str(number)
        command = [sys.executable, "-P", "-c", SAVER, str(target.pid), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as saver:
            saver.stdout.readline()
            time.sleep(0.3 + chance.random() * 0.5)
            saver.kill()
        state = state_of(target)
        seen.add(state)
        is_there = (path / "manifest.json").exists()
        if is_there:
            storage.verify(path)
        process = Process(target.pid)
        if state in ("checkpointing", "restoring"):
            with pytest.raises(ProcessBusyError):
                process.recover()
        elif state == "checkpointed":
            assert is_there
            with contextlib.suppress(NotLoadedError):
                process.load(path)
        if state_of(target) == "locked":
            process.recover()
        if state_of(target) == "running":
            target.check()
        # Who comes next finds the folder usable.
        other = cuda_machine.spawn({0: MIB})
        Process(other.pid).save(path, replace=True)
        assert {s.file for s in storage.describe(path).stripes} == {
            *os.listdir(path)
        } - {"manifest.json", "loaded"}
        Process(other.pid).load(path)
        other.check()
        target.end()
    assert len(seen) > 1


def test_host_memory_of_the_saver_does_not_grow_with_the_target(cuda_machine, tmp_path):
    """Not measured by the size of this process, which others have made grow."""
    program = """
import resource, sys
from cuckpt import Process
process = Process(int(sys.argv[1]))
process.save(sys.argv[2], replace=True)
process.load(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    peaks = []
    for size in (4 * MIB, 600 * MIB):
        target = cuda_machine.spawn({0: size})
        command = [sys.executable, "-P", "-c", program]
        command += [str(target.pid), str(tmp_path / "image")]
        peaks.append(int(subprocess.check_output(command, timeout=120)))
        target.check()
        target.end()
    # What it maps of the simulated GPU does not count as its own.
    assert peaks[1] < peaks[0] + 300


def test_manifest_tells_what_the_documentation_says(target, path):
    Process(target.pid).save(path)
    text = (Path(__file__).parents[2] / "docs/image-format.md").read_text()
    whole = json.loads((path / "manifest.json").read_bytes())

    def names(value):
        if isinstance(value, dict):
            for name, inner in value.items():
                yield name
                yield from names(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from names(inner)

    for name in names(whole):
        assert f"`{name}`" in text
    Process(target.pid).load(path)


def test_documentation_reads_an_image(cuda_machine, path):
    target = cuda_machine.spawn({0: 3 * MIB})
    content = target.ask("check").split()[-1]
    Process(target.pid).save(path)
    text = (Path(__file__).parents[2] / "docs/image-format.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(program.replace("/scratch/server", str(path)), names)
    assert len(names["memory"]) == storage.describe(path).size
    Process(target.pid).load(path)
    assert target.ask("check").split()[-1] == content


# What a review found


@pytest.fixture
def two_images(cuda_machine, path, monkeypatch):
    """A process in an image, which another one is to replace."""
    monkeypatch.setattr(storage.saving, "refuse_needed", lambda path: None)
    first, second = cuda_machine.spawn({0: MIB}), cuda_machine.spawn({0: 2 * MIB})
    Process(first.pid).save(path)
    return first, second


@pytest.mark.parametrize("call", [None, "checkpoint", "complete"])
def test_image_is_kept_when_what_was_to_replace_it_fails(
    cuda_machine, two_images, path, monkeypatch, files_by_python, call
):
    first, second = two_images
    with monkeypatch.context() as patch:
        if call is None:
            broken(patch, "pwrite", errno.EIO, only=is_on_disk)
        else:
            fail(cuda_machine, call, result=999, count=3)
        with pytest.raises((NotSavedError, driver.DriverError)):
            Process(second.pid).save(path, replace=True)
    assert runs(second)
    storage.verify(path)
    Process(first.pid).load(path)
    assert runs(first)
    assert set(os.listdir(path)) == {
        *("manifest.json", "loaded"),
        *(stripe.file for stripe in storage.describe(path).stripes),
    }


def test_image_is_kept_when_the_next_process_dies(cuda_machine, two_images, path):
    first, second = two_images
    fail(cuda_machine, "checkpoint", kill="target")
    with pytest.raises(ProcessGoneError):
        Process(second.pid).save(path, replace=True)
    Process(first.pid).load(path)
    assert runs(first)


def test_process_that_dies_leaves_no_image(cuda_machine, target, path):
    fail(cuda_machine, "checkpoint", kill="target")
    with pytest.raises(ProcessGoneError):
        Process(target.pid).save(path)
    assert not path.exists()


def test_job_is_loaded_without_those_that_have_ended(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(3)]
    pids = [target.pid for target in targets]
    ProcessGroup.from_pids(pids).save(path)
    dead, *living = targets
    dead.end()
    report = ProcessGroup.from_pids(pids).load(path)
    assert "has ended" in report.skipped[dead.pid]
    assert all(map(runs, living))


def test_memory_in_these_hands_is_brought_back_whoever_moved_it(
    cuda_machine, target, path, monkeypatch, files_by_python
):
    fail(cuda_machine, "lock", result=401, when="after")  # as if another was faster
    with monkeypatch.context() as patch:
        broken(patch, "pwrite", errno.EIO, only=is_on_disk)
        with pytest.raises(NotSavedError):
            Process(target.pid).save(path)
    assert runs(target)


def test_interrupt_after_a_completion_that_was_told_as_failed(
    cuda_machine, target, path, monkeypatch
):
    fail(cuda_machine, "complete", result=999, when="after")
    monkeypatch.setattr(storage.saving, "is_asked_to_end", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        Process(target.pid).save(path)
    assert runs(target)
    assert not path.exists()


@pytest.mark.cuda_machine(memory_bytes=64 * MIB)
def test_copy_for_the_way_back_becomes_an_image_when_there_is_no_room(
    cuda_machine, path, monkeypatch, files_by_python
):
    target = cuda_machine.spawn({0: 40 * MIB})
    others = []
    complete = storage.operation.Operation.complete

    def take_the_room(operation):
        complete(operation)
        if not others:
            others.append(cuda_machine.spawn({0: 40 * MIB}))

    monkeypatch.setattr(storage.operation.Operation, "complete", take_the_room)
    with monkeypatch.context() as patch:
        broken(patch, "fsync", errno.EIO, only=lambda file: "image/" in name_of(file))
        with pytest.raises(ProcessLeftError, match="load") as caught:
            Process(target.pid).save(path)
    rescued = path.with_name(f"image.{target.pid}")
    assert str(rescued) in str(caught.value)
    assert state_of(target) == "checkpointed"
    others[0].end()
    Process(target.pid).load(rescued)
    assert runs(target)


def name_of(file):
    return os.readlink(f"/proc/self/fd/{file}")


def test_member_that_runs_on_cannot_be_loaded_from_the_image_of_the_others(
    cuda_machine, path, monkeypatch
):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    restore = storage.saving.SavePassage._restore

    def fail_for_one(passage):
        if passage.process.pid == targets[0].pid:
            raise OSError("it cannot be brought back")  # so the image is kept for it
        restore(passage)

    monkeypatch.setattr(storage.saving.SavePassage, "_restore", fail_for_one)
    monkeypatch.setattr(storage.saving, "is_asked_to_end", lambda: True)
    with pytest.raises(GroupError):
        group.save(path)
    monkeypatch.undo()
    left, other = targets
    assert (state_of(left), state_of(other)) == ("checkpointed", "running")
    Process(other.pid).save(path.with_name("other"))
    Process(other.pid)._image = None
    with pytest.raises(GroupError, match="has run since"):
        group.load(path)
    Process(other.pid).load(path.with_name("other"))
    other.end()
    group.load(path)
    assert runs(left)


@pytest.mark.parametrize("what", ["thread", "memory"])
def test_copies_do_without_threads_and_memory(
    cuda_machine, target, path, monkeypatch, what
):
    if what == "thread":
        start = threading.Thread.start

        def refuse(thread):
            if thread.name == "cuckpt copies":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        Process(target.pid).save(path)
        Process(target.pid).load(path)
    else:
        monkeypatch.setattr(storage.saving.SaveRun, "_copy_to", raising(MemoryError))
        with pytest.raises(NotSavedError, match="MemoryError"):
            Process(target.pid).save(path)
    assert runs(target)


def raising(error):
    def function(*_, **__):
        raise error

    return function


def test_too_few_descriptors_are_told_before_the_lock(target, path, monkeypatch):
    limits = (len(os.listdir("/proc/self/fd")) + 3, 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    refused(target, path, OSError, "ulimit -n")
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (4096, 4096) if kind == 1 else (1000, 1000)
    )
    refused(target, path, OSError, "ulimit -f")


def test_two_programs_at_once_lose_nobody(cuda_machine, tmp_path):
    target = cuda_machine.spawn({0: MIB})
    program = """
import sys, time
from cuckpt import Process, storage
from cuckpt.process_errors import ProcessLostError
process = Process(int(sys.argv[1]))
end = time.monotonic() + 3
while time.monotonic() < end:
    for do in (process.save, process.load):
        try:
            do(sys.argv[2], **({"replace": True} if do == process.save else {}))
        except ProcessLostError:
            raise
        except Exception:
            pass
"""
    command = [sys.executable, "-P", "-c", program, str(target.pid)]
    both = [
        subprocess.Popen([*command, str(tmp_path / name)], stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    if state_of(target) == "checkpointed":
        for name in ("a", "b"):
            with contextlib.suppress(NotLoadedError, ImageError):
                Process(target.pid).load(tmp_path / name)
    assert runs(target)


def test_dry_run_calls_no_hook_and_removes_nothing(target, path):
    path.mkdir(0o700)
    (path / "01234567-0.stripe").write_bytes(b"of who was killed")
    called = []
    group = ProcessGroup.from_pids([target.pid], before_suspend=called.append)
    group.save(path, dry_run=True)
    assert called == []
    assert len(os.listdir(path)) == 1


@pytest.mark.cuda_machine(gpus=2)
def test_failed_load_with_a_map_leaves_it_on_its_gpu(cuda_machine, path):
    target = cuda_machine.spawn({0: MIB})
    process = Process(target.pid)
    process.save(path)
    stripe = path / storage.describe(path).stripes[0].file
    flip(stripe, 5)
    with pytest.raises(NotLoadedError):
        process.load(path, gpu_map={0: 1})
    flip(stripe, 5)
    process.load(path)
    assert runs(target)


def test_forked_child_keeps_no_folder_locked(target, path, monkeypatch):
    children = []
    publish = storage.folder.NewImage.publish

    def fork(image, *arguments):
        children.append(os.fork())
        if not children[0]:
            time.sleep(60)
            os._exit(0)
        publish(image, *arguments)

    monkeypatch.setattr(storage.folder.NewImage, "publish", fork)
    Process(target.pid).save(path)
    try:
        Process(target.pid).load(path)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    target.check()


def test_first_folder_that_is_full_or_not_there_is_passed_by(
    target, path, tmp_path, monkeypatch
):
    room = os.fstatvfs
    small = os.statvfs_result([4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255, 0])
    (tmp_path / "small").mkdir(0o700)

    def left(folder):
        return small if name_of(folder).endswith("/small") else room(folder)

    monkeypatch.setattr(os, "fstatvfs", left)
    outcome = Process(target.pid).save(
        tmp_path / "small", fallback=[tmp_path / "not/there", path]
    )
    assert outcome.image == str(path)
    assert sum("another folder" in note for note in outcome.notes) == 2
    Process(target.pid).load(path)


@pytest.mark.parametrize("wrong", ["/folder", b"/folder", Path("/folder"), [None]])
def test_fallback_is_a_sequence_of_folders(target, path, wrong):
    refused(target, path, TypeError, "fallback|NoneType", fallback=wrong)
    refused(target, path, ValueError, "twice", fallback=[path])


def test_failed_reservation_leaves_no_descriptor(target, path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(storage.stripes.StripeFile, "reserve", full)
    opened = []
    for _ in range(4):
        refused(target, path, OSError, "x")
        gc.collect()  # errors hold the processes that they came from
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[1:] == opened[1:2] * 3
    assert not path.exists()


def test_release_is_refused_in_the_middle(target, path, monkeypatch):
    problems = []
    complete = storage.operation.Operation.complete

    def release(operation):
        with contextlib.suppress(RuntimeError):
            storage.release()
            problems.append("released")
        complete(operation)

    monkeypatch.setattr(storage.operation.Operation, "complete", release)
    Process(target.pid).save(path)
    Process(target.pid).load(path)
    assert problems == []


def test_program_cannot_save_itself(cuda_machine, path):
    driver.init()
    with pytest.raises(NotSavedError, match="is this program"):
        Process(os.getpid()).save(path)
    assert Process(os.getpid()).state == "running"


def test_process_without_cuda_is_told(path):
    with pytest.raises(driver.NotInitializedError):
        Process(1).save(path)


def test_living_process_is_never_loaded_from_an_older_save(target, path, tmp_path):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    process.save(tmp_path / "newer")
    with pytest.raises(NotLoadedError, match="saved since"):
        process.load(path, same_process=False)
    process.load(tmp_path / "newer")
    target.check()
