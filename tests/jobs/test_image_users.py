"""Who an image is for: several programs, folders and processes, and later moments."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from cuckpt import driver, storage
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.passage import Passage
from cuckpt.process import Process
from cuckpt.process_errors import (
    NoMembersError,
    ProcessError,
    ProcessGoneError,
    ProcessLeftError,
    ProcessLostError,
)
from cuckpt.simulator import Fault, Machine
from cuckpt.storage import (
    ImageError,
    ImageInUseError,
    NotLoadedError,
    NotSavedError,
    cuda,
)
from cuckpt.storage.copier import Copier, Region
from cuckpt.storage.folder import NewImage
from cuckpt.storage.operation import Operation, gpu_uuid

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "image"


@pytest.fixture
def target(cuda_machine):
    return cuda_machine.spawn({0: MIB})


def state_of(target):
    return driver.checkpoint_process_get_state(target.pid).name.lower()


def fail(machine, call, **how):
    machine.inject(Fault(call, at=machine.calls[call] + how.pop("at", 1), **how))


def runs(target):
    return state_of(target) == "running" and target.check() is None


def in_another_program(target, code):
    program = f"from cuckpt import Process\nprocess = Process({target.pid})\n{code}"
    return subprocess.run([sys.executable, "-P", "-c", program], timeout=60)


def copy_of(path, name):
    copy = path.with_name(name)
    shutil.copytree(path, copy)
    copy.chmod(0o700)
    return copy


def damaged(path):
    stripe = path / storage.describe(path).stripes[0].file
    content = bytearray(stripe.read_bytes())
    content[7] ^= 1
    stripe.write_bytes(content)


# Later moments


def test_what_another_program_has_done_since_counts(target, path):
    process = Process(target.pid)
    process.save(path)
    older, newer = copy_of(path, "older"), path.with_name("newer")
    in_another_program(target, f"process.load({str(path)!r})").check_returncode()
    target.ask(f"fill {2 * MIB}")
    in_another_program(target, f"process.save({str(newer)!r})").check_returncode()
    with pytest.raises(NotLoadedError, match="saved since"):
        process.load(older)
    process.load(newer)
    assert runs(target)


def test_saver_killed_before_it_has_removed_the_image_of_before_leaves_a_whole_one(
    target, path
):
    process = Process(target.pid)
    process.save(path)
    process.load(path)  # `loaded` tells of that
    killed = in_another_program(
        target,
        "import os\n"
        "from cuckpt.passage import Passage\n"
        "Passage.check_that_nothing_is_left = lambda self: os.kill(os.getpid(), 9)\n"
        f"process.save({str(path)!r}, replace=True)",
    )
    assert killed.returncode == -signal.SIGKILL
    Process(target.pid).load(path)
    assert runs(target)


def test_image_is_loaded_though_what_was_there_before_stays(target, path, monkeypatch):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    unlink = os.unlink

    def fail_for_stripes(name, **how):
        if str(name).endswith(".stripe"):
            raise OSError(errno.EIO, "bad disk", name)
        unlink(name, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail_for_stripes)
        process.save(path, replace=True)
    process.load(path)
    assert runs(target)


def test_image_that_another_program_makes_meanwhile_is_not_forgotten(
    cuda_machine, path, monkeypatch
):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    newer = path.with_name("newer")
    withdraw = NewImage.withdraw

    def save_one_first(image):
        if image.path == str(path) and state_of(targets[0]) == "running":
            code = f"process.save({str(newer)!r})"
            in_another_program(targets[0], code).check_returncode()
        withdraw(image)

    monkeypatch.setattr(NewImage, "withdraw", save_one_first)
    monkeypatch.setattr(storage.saving, "is_asked_to_end", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        ProcessGroup.from_pids(target.pid for target in targets).save(path)
    monkeypatch.undo()
    assert Process(targets[0].pid)._image[0] == str(newer)
    Process(targets[0].pid).load(newer)
    assert all(map(runs, targets))


# Who needs one


def test_needed_by_tells_for_whom_an_image_still_is(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    pids = sorted(target.pid for target in targets)
    group = ProcessGroup.from_pids(pids)
    report = group.save(path)
    assert report.image == str(path)
    assert sorted(storage.needed_by(path)) == pids
    targets[0].end()
    assert storage.needed_by(path) == [targets[1].pid]
    ProcessGroup.from_image(path).load(path)
    assert storage.needed_by(path) == []
    assert runs(targets[1])


def test_needed_by_counts_who_cannot_be_asked(target, path):
    Process(target.pid).save(path)
    os.kill(target.pid, signal.SIGSTOP)  # it may be asked before it heeds that
    assert storage.needed_by(path) == [target.pid]
    os.kill(target.pid, signal.SIGCONT)


def test_needed_by_does_not_tell_of_other_machines(target, path, monkeypatch):
    Process(target.pid).save(path)
    with monkeypatch.context() as patch:
        patch.setattr("cuckpt.proc.boot_id", lambda: "of another machine")
        with pytest.raises(ImageError, match="another machine"):
            storage.needed_by(path)
    assert storage.needed_by(path) == [target.pid]


def test_image_of_another_pid_namespace_is_neither_judged_nor_replaced(
    cuda_machine, target, path, monkeypatch
):
    Process(target.pid).save(path)
    other = cuda_machine.spawn({0: MIB})
    with monkeypatch.context() as patch:
        patch.setattr("cuckpt.proc.pid_namespace", lambda: 5)
        with pytest.raises(ImageError, match="another pid namespace"):
            storage.needed_by(path)
        with pytest.raises(ImageError, match="another pid namespace"):
            Process(other.pid).save(path, replace=True)
    assert runs(other)
    Process(target.pid).load(path)
    assert runs(target)


def test_image_of_a_boot_before_can_be_replaced(target, path, monkeypatch):
    process = Process(target.pid)
    with monkeypatch.context() as patch:
        patch.setattr("cuckpt.proc.boot_id", lambda: "of before")
        process.save(path)
        process.load(path)
    process.save(path, replace=True)
    process.load(path)
    assert runs(target)


def test_image_is_not_removed_while_criu_may_make_one_of_it_anew(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    group.save(path)
    targets[0].end()
    group.load(path, same_process=False, remove=True)
    assert runs(targets[1])
    storage.verify(path)


def test_image_in_use_has_an_error_of_its_own(target, path):
    process = Process(target.pid)
    process.save(path)
    with NewImage(path, replace=True), pytest.raises(ImageInUseError, match="in use"):
        process.load(path)
    process.load(path)
    assert runs(target)


def test_image_is_removed_once_all_run(target, path):
    process = Process(target.pid)
    process.save(path)
    process.load(path, remove=True)
    assert runs(target)
    assert not path.exists()


def test_image_stays_when_it_cannot_be_loaded_or_removed(target, path):
    process = Process(target.pid)
    process.save(path)
    damaged(path)
    with pytest.raises(NotLoadedError, match="whole copy"):
        process.load(path, remove=True)
    damaged(path)
    (path / "README").write_text("of somebody else")
    outcome = process.load(path, remove=True)
    assert any("could not be removed" in note for note in outcome.notes)
    assert os.listdir(path) == ["README"]
    assert runs(target)


def test_image_that_somebody_needs_is_not_replaced(cuda_machine, target, path):
    other = cuda_machine.spawn({0: MIB})
    Process(target.pid).save(path)
    with pytest.raises(FileExistsError, match=f"all that is left .* {target.pid}"):
        Process(other.pid).save(path, replace=True)
    assert runs(other)
    Process(target.pid).load(path)
    Process(other.pid).save(path, replace=True)
    Process(other.pid).load(path)
    assert runs(target)


def test_zombie_keeps_no_other_from_being_loaded(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    group.save(path)
    os.kill(targets[0].pid, signal.SIGKILL)  # and nobody waits for it
    deadline = time.monotonic() + 30
    while not Process(targets[1].pid)._has_ended() and time.monotonic() < deadline:
        try:
            Process(targets[0].pid)
        except ProcessGoneError:
            break
        time.sleep(0.01)
    report = group.load(path)
    assert "has ended" in report.skipped[targets[0].pid]
    assert runs(targets[1])


@pytest.mark.parametrize("alone", [False, True])
def test_member_left_in_an_image_is_loaded_while_the_others_run(
    cuda_machine, path, monkeypatch, alone
):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    restore = storage.saving.SavePassage._restore

    def fail_for_one(passage):
        if passage.process.pid == targets[0].pid:
            raise OSError("it cannot be brought back")
        restore(passage)

    with monkeypatch.context() as patch:
        patch.setattr(storage.saving.SavePassage, "_restore", fail_for_one)
        patch.setattr(storage.saving, "is_asked_to_end", lambda: True)
        with pytest.raises(GroupError, match=r"load\(\) brings it back"):
            group.save(path)
    left, other = targets
    assert (state_of(left), state_of(other)) == ("checkpointed", "running")
    if alone:
        Process(left.pid).load(path)
    else:
        assert "runs on" in group.load(path).skipped[other.pid]
    assert all(map(runs, targets))


# Nobody is left


def test_save_of_who_dies_in_the_middle_leaves_no_image(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    group = ProcessGroup.from_pids(target.pid for target in targets)
    for target in targets:
        fail(cuda_machine, "complete", kill="target", at=1 + targets.index(target))
    with pytest.raises(NoMembersError, match="no process"):
        group.save(path)
    assert not path.exists()


def test_process_that_dies_while_its_save_fails_is_gone(target, path, monkeypatch):
    def full(image, *_):
        target.end()
        raise OSError(errno.ENOSPC, "full", image.path)

    monkeypatch.setattr(NewImage, "publish", full)
    with pytest.raises(ProcessGoneError):
        Process(target.pid).save(path)
    assert not path.exists()


def test_group_of_which_one_dies_while_the_save_fails_names_it(
    cuda_machine, path, monkeypatch
):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]

    def full(image, *_):
        targets[0].end()
        raise OSError(errno.ENOSPC, "full", image.path)

    monkeypatch.setattr(NewImage, "publish", full)
    with pytest.raises(GroupError, match="2 of 2 processes failed") as caught:
        ProcessGroup.from_pids(target.pid for target in targets).save(path)
    gone = [each for each in caught.value.exceptions if each.pid == targets[0].pid]
    assert [type(each) for each in gone] == [ProcessGoneError]
    assert "full" in str(gone[0].__cause__)
    assert runs(targets[1])


def test_suspended_one_that_comes_later_is_refused(cuda_machine, path):
    targets = [cuda_machine.spawn({0: MIB}) for _ in range(2)]
    pids = [targets[0].pid]
    group = ProcessGroup(lambda: list(pids))
    Process(targets[1].pid).suspend()
    pids.append(targets[1].pid)
    with pytest.raises(GroupError, match="suspended already"):
        group.save(path)
    assert runs(targets[0])
    assert state_of(targets[1]) == "checkpointed"


# The way back


def test_save_that_cannot_be_completed_loses_the_process(cuda_machine, target, path):
    fail(cuda_machine, "complete", result=999, count=60)
    process = Process(target.pid)
    with pytest.raises(ProcessLostError, match="cannot be completed"):
        process.save(path)
    with pytest.raises(ProcessError):
        process.recover()


def test_failed_load_that_cannot_be_completed_loses_the_process(
    cuda_machine, target, path
):
    process = Process(target.pid)
    process.save(path)
    damaged(path)
    fail(cuda_machine, "complete", result=999, at=2, count=60)
    with pytest.raises(ProcessLostError, match="cannot be completed"):
        process.load(path)


@pytest.mark.cuda_machine(gpus=2)
def test_checkpoint_that_fails_after_it_has_begun_is_not_begun_again(
    cuda_machine, target, path
):
    fail(cuda_machine, "checkpoint", result=201, when="after")
    with pytest.raises(ProcessLostError, match="did not hand out"):
        Process(target.pid).save(path)


@pytest.mark.cuda_machine(memory_bytes=64 * MIB, gpus=2)
def test_failed_load_with_a_map_needs_no_room_on_the_gpu_of_before(cuda_machine, path):
    target = cuda_machine.spawn({0: 40 * MIB})
    process = Process(target.pid)
    process.save(path)
    whole = copy_of(path, "whole")
    damaged(path)
    other = cuda_machine.spawn({0: 40 * MIB})
    with pytest.raises(NotLoadedError, match="damaged"):
        process.load(path, {0: 1, 1: 0})
    assert state_of(target) == "checkpointed"
    with pytest.raises(NotLoadedError, match="damaged"):
        process.load(path, {0: 1, 1: 0})  # from where it is by now
    in_another_program(target, f"process.load({str(whole)!r}, {{0: 1, 1: 0}})")
    assert runs(target)
    assert set(process.used_memory()) == {gpu_uuid(1)}
    other.check()


@pytest.mark.cuda_machine(gpus=2)
def test_failed_load_with_a_map_is_followed_by_one_without(cuda_machine, target, path):
    process = Process(target.pid)
    process.save(path)
    whole = copy_of(path, "whole")
    damaged(path)
    with pytest.raises(NotLoadedError, match="damaged"):
        process.load(path, {0: 1, 1: 0})
    process.load(whole)
    assert runs(target)
    assert set(process.used_memory()) == {gpu_uuid(0)}


@pytest.mark.cuda_machine(memory_bytes=64 * MIB)
def test_rescue_goes_to_the_next_folder_when_one_fails(cuda_machine, path, monkeypatch):
    target = cuda_machine.spawn({0: 40 * MIB})
    last = path.with_name(f"last.{target.pid}")
    last.mkdir()  # of an earlier rescue
    publish, complete = NewImage.publish, Operation.complete
    others = []

    def fail_but_at_last(image, *arguments):
        if not image.path.startswith(str(last)):
            raise OSError(errno.EIO, "bad disk", image.path)
        publish(image, *arguments)

    def take_the_room(operation):
        complete(operation)
        if not others:
            others.append(cuda_machine.spawn({0: 40 * MIB}))

    with monkeypatch.context() as patch:
        patch.setattr(NewImage, "publish", fail_but_at_last)
        patch.setattr(Operation, "complete", take_the_room)
        with pytest.raises(ProcessLeftError, match="load"):
            Process(target.pid).save(path, fallback=[path.with_name("last")])
    others[0].end()
    Process(target.pid).load(f"{last}.2")
    assert runs(target)


def test_nothing_is_made_after_the_memory_is_handed_out(target, path, monkeypatch):
    call = cuda.call
    operations, made_late = [], []

    def watch(name, *arguments):
        if name in ("cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"):
            made_late.extend(name for _ in operations)
        return call(name, *arguments)

    def note(cls, *arguments):
        operations.append(arguments)
        return checkpoint(*arguments)

    checkpoint = Operation.checkpoint
    monkeypatch.setattr(cuda, "call", watch)
    monkeypatch.setattr(Operation, "checkpoint", classmethod(note))
    Process(target.pid).save(path)
    assert operations
    assert made_late == []
    monkeypatch.undo()
    Process(target.pid).load(path)


@pytest.mark.parametrize("name", ["cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"])
def test_save_without_pinned_memory_is_refused_before_the_lock(
    cuda_machine, target, path, monkeypatch, name
):
    call = cuda.call

    def refuse(called, *arguments):
        if called == name:
            raise driver.OutOfMemoryError(2, name)
        return call(called, *arguments)

    monkeypatch.setattr(cuda, "call", refuse)
    with pytest.raises(driver.OutOfMemoryError):
        Process(target.pid).save(path)
    assert cuda_machine.calls["lock"] == 0
    assert not path.exists()


def test_copies_go_on_with_what_pinned_memory_there_is(cuda_machine, path, monkeypatch):
    targets = [cuda_machine.spawn({0: 40 * MIB}) for _ in range(2)]
    call, made = cuda.call, []

    def refuse(name, *arguments):
        if name == "cuMemHostAlloc":
            if made:
                raise driver.OutOfMemoryError(2, name)
            made.append(name)
        return call(name, *arguments)

    monkeypatch.setattr(cuda, "call", refuse)
    group = ProcessGroup.from_pids(target.pid for target in targets)
    group.save(path)
    group.load(path)
    assert all(map(runs, targets))
    assert len(made) == 1


# Paths, files and signals


@pytest.mark.parametrize("kind", [os.fspath, os.fsencode, lambda path: path])
def test_path_may_be_of_any_kind(target, path, kind):
    process = Process(target.pid)
    assert process.save(kind(path)).image == str(path)
    process.load(kind(path))
    assert runs(target)


@pytest.mark.parametrize("empty", ["", b""])
def test_empty_path_is_refused(target, empty):
    for use in Process(target.pid).save, Process(target.pid).load, storage.describe:
        with pytest.raises(ValueError, match="empty"):
            use(empty)
    assert runs(target)


def test_dry_run_tells_which_folder_would_take_it(target, path, tmp_path):
    missing = tmp_path / "missing" / "image"
    outcome = Process(target.pid).save(missing, fallback=[path], dry_run=True)
    assert any(f"it would go to {path}" in note for note in outcome.notes)
    assert any(str(missing) in note for note in outcome.notes)
    assert runs(target)


def test_file_system_that_cannot_read_with_o_direct_is_read_without(
    target, path, files_by_python, monkeypatch
):
    process = Process(target.pid)
    process.save(path)
    directs, refused = set(), []
    descriptors, preadv = storage.folder.StripeFile.descriptors, os.preadv

    def remember(file):
        plain, direct = descriptors(file)
        directs.add(direct if direct >= 0 else os.dup(plain))
        return plain, max(directs)

    def refuse(file, *arguments):
        if file in directs:
            refused.append(file)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return preadv(file, *arguments)

    for stripe in path.iterdir():
        with stripe.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        patch.setattr(storage.folder.StripeFile, "descriptors", remember)
        process.load(path)
    assert refused
    assert runs(target)


def test_process_is_not_taken_for_ended_without_descriptors(target, monkeypatch):
    process = Process(target.pid)

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many open files") as caught:
        _ = process.state
    assert not isinstance(caught.value, ProcessError)


def test_no_thread_copies_on_after_an_interrupt(cuda_machine, tmp_path):
    cuda.release()  # what was kept of another machine
    driver.init(0)
    cuda.enter(0)
    size = 64 * MIB
    pointer = int(cuda.call("cuMemAlloc", size))
    cuda.call("cuMemsetD8", pointer, 7, size)

    def handler(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    interrupts = 0
    try:
        for number in range(40):
            try:
                with NewImage(tmp_path / str(number), durable=False) as folder:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.0005 * number)
                        Copier(workers=8).save([Region(pointer, size, 0)], folder)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        names = [each.name for each in threading.enumerate()]
                        assert "cuckpt copies" not in names
            except InterruptedError:
                interrupts += 1
    finally:
        signal.signal(signal.SIGALRM, before)
        cuda.call("cuMemFree", pointer)
    assert interrupts


# What somebody else has destroyed


def test_machines_follow_each_other_in_a_program(tmp_path):
    for number in range(3):
        with Machine(gpus=1 + number) as machine:
            target = machine.spawn({number: MIB})
            process = Process(target.pid)
            process.save(tmp_path / str(number))
            process.load(tmp_path / str(number))
            assert runs(target)
    cuda.release()


def test_reset_of_the_gpu_between_two_saves_is_no_problem(target, path):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    cuda.call("cuDevicePrimaryCtxReset", 0)
    process.save(path, replace=True)
    process.load(path)
    assert runs(target)


def test_reset_that_nobody_can_see_any_more_costs_one_stream(target, path):
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    device = driver.device_get(0)
    cuda.call("cuDevicePrimaryCtxReset", 0)
    driver.device_primary_ctx_retain(device)  # it is active again
    process.save(path, replace=True)
    process.load(path)
    assert runs(target)
    driver.device_primary_ctx_release_v2(device)


def test_buffers_of_another_size_make_room(cuda_machine, target, path, monkeypatch):
    call, sizes = cuda.call, []

    def limited(name, *arguments):
        if name == "cuMemHostAlloc":
            if sum(sizes) + arguments[0] > 24 * MIB:
                raise driver.OutOfMemoryError(2, name)
            sizes.append(arguments[0])
        if name == "cuMemFreeHost":
            sizes.pop(0)
        return call(name, *arguments)

    monkeypatch.setattr(cuda, "call", limited)
    driver.init(0)
    cuda.enter(0)
    cuda.Slot(16 * MIB).close()
    process = Process(target.pid)
    process.save(path)
    process.load(path)
    assert runs(target)


def test_verify_names_the_files_that_differ(target, path):
    Process(target.pid).save(path)
    damaged(path)
    with pytest.raises(ImageError, match=r"is not what was saved:\n  .*stripe is"):
        storage.verify(path)
    Process(target.pid)._image = None
    target.end()


def test_passage_forgets_only_the_image_that_was_loaded(target, path, monkeypatch):
    process = Process(target.pid)
    read_state = Passage.read_state

    def save_meanwhile(passage):
        state = read_state(passage)
        if state_of(target) == "running":
            in_another_program(target, f"process.save({str(path)!r})")
        return state

    monkeypatch.setattr(Passage, "read_state", save_meanwhile)
    with pytest.raises((ProcessError, NotSavedError, driver.DriverError)):
        process.suspend()
    monkeypatch.undo()
    assert process._image is not None
    process.load(path)
    assert runs(target)
