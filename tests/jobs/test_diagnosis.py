"""What the doctor finds, and what it says about that."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cuckpt import diagnosis, driver, nvml, proc, storage
from cuckpt.diagnosis import Finding, doctor
from cuckpt.process import Process
from cuckpt.simulator import Gpu
from cuckpt.storage import checksum, cuda

MIB = 1 << 20
machine_with = pytest.mark.cuda_machine


@pytest.fixture
def target(cuda_machine):
    return cuda_machine.spawn({0: MIB})


@pytest.fixture
def files(monkeypatch):
    """Files that are read instead of the true ones; None: there is no such file."""
    fake = {}

    def reading(truly, keepends):
        def lines(path):
            if str(path) in fake:
                return (fake[str(path)] or "").splitlines(keepends=keepends)
            return truly(path)

        return lines

    monkeypatch.setattr(diagnosis, "_lines", reading(diagnosis._lines, False))
    monkeypatch.setattr(proc, "_lines", reading(proc._lines, True))
    return fake


def about(subject, findings, *levels):
    """Return what was found about a subject, of some levels."""
    levels = levels or ("ok", "problem", "warning", "skipped")
    return [f for f in findings if f.subject == subject and f.level in levels]


def only(subject, findings, *levels):
    (finding,) = about(subject, findings, *levels)
    return finding


# The machine


def test_doctor_finds_nothing_on_a_good_machine(cuda_machine, target):
    calls = cuda_machine.calls
    findings = doctor([target.pid])
    assert [f for f in findings if f.level == "problem"] == []
    assert only("driver", findings).what.endswith("libcuda.so.1, CUDA 13.5")
    assert only("custom storage", findings).level == "ok"
    assert "simulated GPU, 8190 MiB of 8192 MiB free" in only("GPU 0", findings).what
    assert only("host memory", findings).level == "ok"
    name = proc.facts(target.pid).name
    assert only(f"process {target.pid}", findings).what == f"{name}, running"
    for verb in "lock", "checkpoint", "restore", "unlock":
        assert cuda_machine.calls[verb] == calls[verb]


def test_finding_is_told_in_a_line():
    assert str(Finding("ok", "driver", "here")) == "ok: driver: here"
    finding = Finding("warning", "GPU 0", "is slow", "that takes time", "wait")
    assert str(finding) == "warning: GPU 0: is slow. that takes time. wait."


@pytest.mark.usefixtures("cuda_machine")
def test_every_finding_but_a_good_one_says_why_and_what_to_do(files):
    files["/proc/mounts"] = "proc /proc proc rw,hidepid=2 0 0\n"
    files["/proc/meminfo"] = "MemAvailable: 0 kB\n"
    for finding in doctor([1, 2**22 + 1, os.getpid()]):
        if finding.level in ("warning", "problem"):
            assert finding.why
            assert finding.do


@pytest.mark.parametrize(
    ("pid", "do"),
    [
        (2**22 + 1, "look for its pid"),
        ("x", "give a number"),
        (1, "leave it out"),
    ],
)
def test_doctor_says_what_to_do_about_a_process(cuda_machine, pid, do):
    assert only(f"process {pid}", doctor([pid])).do.startswith(do)


def test_doctor_says_what_to_do_about_a_stopped_process(target):
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    assert "kill -CONT" in only(f"process {target.pid}", doctor([target.pid])).do
    target.process.send_signal(signal.SIGCONT)


def test_doctor_needs_a_driver(cuda_machine, target, monkeypatch):
    def fail():
        raise RuntimeError("libcuda.so.1 cannot be loaded")

    monkeypatch.setattr(driver, "library_path", fail)
    findings = doctor([target.pid])
    finding = only("driver", findings)
    assert (finding.level, finding.what) == ("problem", "libcuda.so.1 cannot be loaded")
    assert only(f"process {target.pid}", findings).what.endswith(", not asked")
    assert cuda_machine.calls["get_state"] == 0


@pytest.mark.usefixtures("cuda_machine")
def test_doctor_wants_a_driver_that_can_checkpoint(monkeypatch):
    monkeypatch.setattr(driver, "has_checkpoint", lambda: False)
    findings = doctor()
    assert only("driver", findings).level == "problem"
    assert "CUDA 12.8 (driver 570)" in only("driver", findings).why
    assert about("custom storage", findings) == []


@pytest.mark.usefixtures("cuda_machine")
def test_doctor_warns_of_a_driver_without_custom_storage(monkeypatch):
    monkeypatch.setattr(driver, "has_custom_storage", lambda: False)
    finding = only("custom storage", doctor())
    assert finding.level == "warning"
    assert "13.4 (driver 615)" in finding.why


@pytest.fixture
def without_extra(monkeypatch):
    """Return what lets a package of the extra be missing."""
    known = [checksum.checksum_of, cuda.bindings]

    def remove(module):
        monkeypatch.setitem(sys.modules, module, None)
        for function in known:
            function.cache_clear()

    yield remove
    for function in known:
        function.cache_clear()


@pytest.mark.usefixtures("cuda_machine")
@pytest.mark.parametrize(
    ("module", "package"),
    [("xxhash", "xxhash"), ("cuda.bindings", "cuda-bindings")],
)
def test_doctor_warns_of_a_package_that_images_need(without_extra, module, package):
    assert about("images", doctor()) == []
    without_extra(module)
    finding = only("images", doctor())
    assert finding.level == "warning"
    assert finding.what == f"{package} cannot be imported"
    assert finding.do == "pip install 'cuckpt[storage]'"


@pytest.mark.parametrize(
    ("capabilities", "scope", "expected"),
    [
        ("0000000000080000", "1", ["ok"]),
        ("0000000000000000", "0", ["warning"]),
        ("0000000000000000", None, ["warning"]),
        ("fffffffffff7ffff", "1", ["warning", "warning"]),
    ],
)
@pytest.mark.usefixtures("cuda_machine")
def test_doctor_looks_at_permissions(files, monkeypatch, capabilities, scope, expected):
    monkeypatch.setattr(proc, "read_status", lambda pid: {"CapEff": capabilities})
    files["/proc/sys/kernel/yama/ptrace_scope"] = scope
    files["/proc/mounts"] = None
    findings = about("permissions", doctor())
    assert [finding.level for finding in findings] == expected


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ("rw,nosuid", False),
        ("rw,hidepid=0", False),
        ("rw,hidepid=off,gid=5", False),
        ("rw,hidepid=1", True),
        ("rw,hidepid=2", True),
        ("rw,hidepid=invisible", True),
        ("rw,hidepid=ptraceable", True),
    ],
)
@pytest.mark.usefixtures("cuda_machine")
def test_doctor_looks_whether_processes_are_hidden(files, options, warned):
    files["/proc/mounts"] = (
        f"none /other/proc proc rw,hidepid=2 0 0\nproc /proc proc {options} 0 0\n"
    )
    found = [f for f in about("permissions", doctor()) if "hidepid" in f.what]
    assert [finding.level for finding in found] == ["warning"] * warned


@machine_with(
    gpus=[Gpu(bytes([1] * 16), persistence_mode=False), Gpu(bytes(16), mig_mode=True)]
)
def test_doctor_looks_at_the_modes_of_gpus(cuda_machine):
    findings = doctor()
    assert only("GPU 0", findings, "warning").what == "persistence mode is off"
    assert about("GPU 0", findings, "problem") == []
    assert only("GPU 1", findings, "problem").what == "MIG is on"
    assert about("GPU 1", findings, "warning") == []


@pytest.mark.usefixtures("cuda_machine")
def test_doctor_does_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    findings = doctor()
    assert only("GPUs", findings).level == "skipped"
    assert "pip install 'cuckpt[jobs]'" in only("GPUs", findings).what
    assert only("host memory", findings).level == "ok"


# Host memory


@pytest.fixture
def memory(files, cuda_machine):
    """A machine of which nothing but the files tell how much memory there is."""
    files["/proc/self/cgroup"] = None
    files["/proc/meminfo"] = f"MemTotal: 9 kB\nMemAvailable: {100 << 10} kB\n"
    return files


V1 = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("cgroup", "more", "text"),
    [
        (None, {}, "100 MiB available"),
        ("0::/a/b\n", {}, "100 MiB available"),
        (
            "0::/a/b\n",
            {f"{V2}/a/memory.max": 30, f"{V2}/a/memory.current": 10},
            "20 MiB left in the cgroup",
        ),
        (
            "5:cpu:/\n4:memory:/a\n",
            {
                f"{V1}/a/memory.limit_in_bytes": 50,
                f"{V1}/a/memory.usage_in_bytes": 60,
                f"{V1}/memory.limit_in_bytes": 30,
                f"{V1}/memory.usage_in_bytes": 10,
            },
            "0 MiB left in the cgroup",
        ),
        (
            "4:memory:/a\n",
            {
                f"{V1}/a/memory.limit_in_bytes": 1 << 43,
                f"{V1}/a/memory.usage_in_bytes": 60,
            },
            "100 MiB available",
        ),
    ],
)
def test_host_memory_is_the_least_of_what_limits_it(memory, cgroup, more, text):
    memory["/proc/self/cgroup"] = cgroup
    memory |= {name: f"{size * MIB}\n" for name, size in more.items()}
    assert only("host memory", doctor()).what == text


def test_cgroup_without_a_limit_limits_nothing(memory):
    memory |= {
        "/proc/self/cgroup": "0::/a\n",
        f"{V2}/a/memory.max": "max\n",
        f"{V2}/a/memory.current": "5\n",
    }
    assert only("host memory", doctor()).what == "100 MiB available"


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used", "field"),
    [
        ("0::/a\n", f"{V2}/a", "memory.max", "memory.current", "inactive_file"),
        (
            "4:memory:/a\n",
            f"{V1}/a",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_cache_is_no_used_memory(memory, cgroup, folder, limit, used, field):
    memory |= {
        "/proc/self/cgroup": cgroup,
        f"{folder}/{limit}": f"{50 * MIB}\n",
        f"{folder}/{used}": f"{50 * MIB}\n",
        f"{folder}/memory.stat": f"anon 5\n{field} {40 * MIB}\n",
    }
    assert only("host memory", doctor()).what == "40 MiB left in the cgroup"


def test_host_memory_is_compared_with_that_of_the_processes(memory, cuda_machine):
    small, large = cuda_machine.spawn({0: MIB}), cuda_machine.spawn({0: 200 * MIB})
    assert only("host memory", doctor([small.pid])).level == "ok"
    for pids in [large.pid], None:
        finding = only("host memory", doctor(pids))
        assert finding.level == "problem"
        assert "100 MiB available, 20" in finding.what


def test_host_memory_may_be_unknown(memory):
    memory["/proc/meminfo"] = None
    assert only("host memory", doctor()).level == "skipped"


# Processes


def test_doctor_tells_the_state_of_a_process(target):
    Process(target.pid).suspend()
    finding = only(f"process {target.pid}", doctor([target.pid]))
    assert finding.what.endswith(", checkpointed")


@pytest.mark.usefixtures("cuda_machine")
def test_doctor_says_who_cannot_be_suspended(target):
    thread = Process(target.pid).restore_thread_id
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        pids = [2**22 + 1, thread, sleeper.pid, -1, "1"]
        findings = doctor(iter(pids))
        sleeper.kill()
    said = [only(f"process {pid}", findings, "problem").what for pid in pids]
    for what, text in zip(
        said,
        [
            "none with this pid",
            f"{thread} is a thread of process {target.pid}",
            "has no CUDA state",
            "pid must be a positive int",
            "pid must be an int",
        ],
        strict=True,
    ):
        assert text in what


def test_doctor_says_who_is_stopped(target):
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    finding = only(f"process {target.pid}", doctor([target.pid]))
    assert finding.level == "problem"
    assert "SIGSTOP" in finding.what


def test_doctor_tells_the_pid_in_a_container(target, monkeypatch):
    truly = proc.facts

    def facts(pid):
        return truly(pid)._replace(namespace_pids=(pid, 7, 1))

    monkeypatch.setattr(proc, "facts", facts)
    what = only(f"process {target.pid}", doctor([target.pid])).what
    assert what.endswith("running, pid 1 in its container")


def spoil(folder, how):
    match how:
        case "removed":
            shutil.rmtree(folder)
        case "shortened":
            next(folder.glob("*.stripe")).write_bytes(b"")
        case "another":
            image = storage.describe(folder)
            image.created = "later"
            (folder / "manifest.json").write_bytes(image.to_json())


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("removed", "No such file"),
        ("shortened", "is damaged"),
        ("another", "it holds another image"),
    ],
)
def test_doctor_looks_for_the_image_of_a_process(target, tmp_path, how, expected):
    folder = tmp_path / "image"
    Process(target.pid).save(folder)
    finding = only(f"process {target.pid}", doctor([target.pid]))
    assert finding.level == "ok"
    assert finding.what.endswith(f", its GPU memory is in {folder}")
    spoil(folder, how)
    finding = only(f"process {target.pid}", doctor([target.pid]))
    assert finding.level == "problem"
    assert f"cannot be loaded from {folder}: " in finding.what
    assert expected in finding.what
    assert "its GPU memory is lost" in finding.do


def test_doctor_tells_the_image_of_a_process_without_xxhash(
    target, tmp_path, without_extra
):
    Process(target.pid).save(tmp_path / "image")
    without_extra("xxhash")
    finding = only(f"process {target.pid}", doctor([target.pid]))
    assert finding.level == "ok"


def test_doctor_warns_of_a_job_file(target, monkeypatch):
    variables = {"CUDA_CHECKPOINT_JOB_FILE": "/tmp/job"}
    monkeypatch.setattr(proc, "environment", lambda pid: variables)
    finding = only(f"process {target.pid}", doctor([target.pid]), "warning")
    assert finding.what == "CUDA_CHECKPOINT_JOB_FILE=/tmp/job"
    assert "one after the other" in finding.why


@pytest.mark.parametrize(
    ("library", "variables", "expected"),
    [
        ("libcuda.so.1", {}, []),
        ("libcupti.so.13", {}, ["CUPTI is loaded"]),
        (
            "libnccl.so.2",
            {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "1"},
            ["NCCL is loaded without NCCL_NVLS_ENABLE=0 NCCL_SHM_DISABLE=1"],
        ),
        (
            "libnccl.so.2",
            {
                "NCCL_P2P_DISABLE": "1",
                "NCCL_NVLS_ENABLE": "0",
                "NCCL_SHM_DISABLE": "1",
            },
            [],
        ),
    ],
)
def test_doctor_warns_of_libraries(
    target, files, monkeypatch, library, variables, expected
):
    files[f"/proc/{target.pid}/maps"] = (
        f"7f00-7f01 r-xp 00000000 08:01 5  /usr/lib/{library}\n"
    )
    monkeypatch.setattr(proc, "environment", lambda pid: variables)
    found = about(f"process {target.pid}", doctor([target.pid]), "warning")
    assert [finding.what for finding in found] == expected


# What it asks


def test_environment_and_files_are_those_of_a_process(tmp_path):
    path = tmp_path / "open"
    with (
        path.open("w") as file,
        subprocess.Popen(
            ["sleep", "60"],
            env={"A": "1=2", "B": "", "PATH": "/bin:/usr/bin"},
            stdout=file,
        ) as sleeper,
    ):
        while "A" not in proc.environment(sleeper.pid):  # while it starts
            time.sleep(0.01)
        assert proc.environment(sleeper.pid)["A"] == "1=2"
        assert proc.environment(sleeper.pid)["B"] == ""
        assert proc.open_files(sleeper.pid, str(tmp_path)) == [str(path)]
        assert sleeper.pid in proc.pids()
        sleeper.kill()
    assert proc.environment(sleeper.pid) == {}
    assert proc.open_files(sleeper.pid, "/") == []
    assert proc.threads(sleeper.pid) == []
    assert proc.start_time(sleeper.pid) is None
    assert not proc.is_stopped(sleeper.pid)
    assert not proc.is_frozen(sleeper.pid)


@machine_with(gpus=2)
def test_nvml_tells_who_uses_what(cuda_machine):
    target = cuda_machine.spawn({1: 4 * MIB})
    first, second = nvml.gpus()
    assert [first.uuid, second.uuid] == [gpu.uuid for gpu in cuda_machine.gpus]
    assert second.used_bytes == {target.pid: 4 * MIB}
    assert first.used_bytes == {}
    assert nvml.used_memory(target.pid) == {str(cuda_machine.gpus[1]): 4 * MIB}
