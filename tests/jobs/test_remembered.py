"""What suspended processes need is known to other programs as well."""

import json
import os
import stat
import subprocess
import sys

import pytest

from cuckpt import proc, remembered
from cuckpt.group import GroupError, ProcessGroup
from cuckpt.process import Process
from cuckpt.process_errors import NoRoomError, ProcessLostError
from cuckpt.target import Target

pytestmark = pytest.mark.thread_unsafe(reason="one machine, and other processes")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "remembered"
    monkeypatch.setattr(remembered, "_path", lambda: str(path))
    return path


def own_key():
    return os.getpid(), proc.start_time(os.getpid())


@pytest.mark.cuda_machine(memory_bytes=64 * MIB)
def test_other_program_refuses_a_restore_without_room(cuda_machine, tmp_path):
    target = cuda_machine.spawn({0: 40 * MIB})
    suspend = f"""
import sys
from cuckpt import Process, remembered
remembered._path = lambda: {os.fspath(tmp_path / "remembered")!r}
Process(int(sys.argv[1])).suspend()
"""
    command = [sys.executable, "-P", "-c", suspend, str(target.pid)]
    subprocess.run(command, check=True, timeout=60)
    process = Process(target.pid)
    with Target({0: 40 * MIB}), pytest.raises(NoRoomError, match="40 MiB are needed"):
        process.resume()
    process.resume()
    target.check()
    assert remembered.recall(process._key) == {}


def test_what_is_kept_is_recalled_until_it_is_forgotten(folder):
    assert remembered.recall(own_key()) == {}
    remembered.keep(own_key(), used_bytes={"GPU-1": 5})
    assert remembered.recall(own_key()) == {"used_bytes": {"GPU-1": 5}}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()] == [0o600]
    remembered.keep(own_key(), image=["/image", "0", {"GPU-1": "GPU-2"}])
    assert set(remembered.recall(own_key())) == {"used_bytes", "image"}
    remembered.forget(own_key())
    remembered.forget(own_key())
    assert remembered.recall(own_key()) == {}


def test_dead_processes_are_forgotten(folder):
    with subprocess.Popen(["sleep", "100"]) as process:
        remembered.keep((process.pid, proc.start_time(process.pid)), used_bytes={})
        process.kill()
    remembered.keep(own_key(), used_bytes={"GPU-1": 5})
    assert len(os.listdir(folder)) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"used_bytes": 5}',
        '{"used_bytes": {"GPU-1": "5"}}',
        '{"image": [1, 2]}',
    ],
)
def test_nonsense_is_nothing(folder, content):
    remembered.keep(own_key(), used_bytes={})
    (file,) = folder.iterdir()
    file.write_text(content)
    assert remembered.recall(own_key()) == {}


def test_folder_of_others_and_links_are_not_used(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    remembered.keep(own_key(), used_bytes={"GPU-1": 5})
    assert os.listdir(tmp_path / "elsewhere") == []
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    remembered.keep(own_key(), used_bytes={"GPU-1": 5})
    assert os.listdir(folder) == []
    folder.chmod(0o700)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"GPU-1": 5}))
    (folder / f"{own_key()[0]}-{own_key()[1]}").symlink_to(secret)
    assert remembered.recall(own_key()) == {}


def test_folder_is_the_users(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert remembered._path() == "/run/cuckpt"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert remembered._path() == "/run/user/1000/cuckpt"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert remembered._path() == "/tmp/cuckpt-1000"


def test_loss_is_known_to_other_programs(cuda_machine):
    target = cuda_machine.spawn({0: MIB})
    process = Process(target.pid)
    process.suspend()
    remembered.keep(process._key, lost=True)  # as another program found
    assert process._is_lost
    with pytest.raises(ProcessLostError, match="end it"):
        process.suspend()
    with pytest.raises(GroupError):
        ProcessGroup.from_pids([target.pid]).suspend()
    process.resume()  # and so it was not
    assert not process._is_lost
    target.check()


def test_map_for_a_running_process_is_noted(cuda_machine):
    target = cuda_machine.spawn({0: MIB})
    (note,) = Process(target.pid).resume(gpu_map={0: 0}).notes
    assert "not used" in note
    report = ProcessGroup.from_pids([target.pid]).resume(gpu_map={0: 0})
    assert any("not used" in note for note in report.outcomes[target.pid].notes)
