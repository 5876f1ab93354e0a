"""What those who watch are told, and what they make of it."""

import dataclasses
import io
import json
import sys
import threading

import pytest
import rich.console
import rich.progress

from cuckpt.events import Event, Phase, ProgressBar, Trace
from cuckpt.process import Process
from cuckpt.process_errors import MissingExtraError

MIB = 1 << 20


def phases_of(pid, *phases, error=None):
    """Return the events of some phases that take a second each."""
    events = []
    for time_s, phase in enumerate(phases):
        events.append(Event(pid, phase, "start", time_s, bytes=3 * MIB))
        events.append(Event(pid, phase, "end", time_s + 1, 1.0, 3 * MIB, error))
    return events


# Phases


def test_phase_tells_its_begin_and_end():
    events = []
    with Phase(events.append, 5, "lock", 7) as phase:
        assert [event.moment for event in events] == ["start"]
    start, end = events
    assert start == Event(5, "lock", "start", start.time_s, None, 7, None)
    assert end == Event(5, "lock", "end", end.time_s, phase.seconds, 7, None)
    assert end.time_s - start.time_s == pytest.approx(phase.seconds)


def test_phase_tells_of_an_error_and_lets_it_pass():
    events = []
    with pytest.raises(KeyError), Phase(events.append, 5, "lock", None):
        raise KeyError("gone")
    assert events[1].error == "'gone'"


def test_phase_needs_nobody_who_watches():
    with Phase(None, 5, "lock", None) as phase:
        pass
    assert phase.seconds >= 0
    assert phase.problem is None


def test_phase_goes_on_when_the_watcher_raises():
    problem = ValueError("I/O operation on closed file")

    def watch(event):
        raise problem

    with pytest.raises(ZeroDivisionError), Phase(watch, 5, "lock", None) as phase:
        raise ZeroDivisionError
    assert phase.problem is problem


def test_event_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        phases_of(5, "lock")[0].pid = 6


# Traces


def test_trace_is_one_of_chrome(tmp_path):
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        for event in phases_of(5, "lock", "checkpoint", error="ERROR (1) \"'\n"):
            trace(event)
    begin, end, *more = json.loads(path.read_text())
    assert begin == {
        "name": "lock",
        "ph": "B",
        "ts": 0.0,
        "pid": 5,
        "tid": 5,
        "args": {"bytes": 3 * MIB},
    }
    assert (end["ph"], end["ts"]) == ("E", 1e6)
    assert end["args"]["error"] == "ERROR (1) \"'\n"
    assert [entry["name"] for entry in more] == ["checkpoint"] * 2


def test_trace_can_be_read_at_any_time(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for count, event in enumerate(phases_of(5, "lock", "unlock"), 1):
        trace(event)
        # Those who open such files do without the end.
        assert len(json.loads(path.read_text() + "]")) == count
    trace.close()
    assert len(json.loads(path.read_text())) == 4


def test_trace_is_complete_when_nothing_happened_or_something_was_raised(tmp_path):
    with Trace(tmp_path / "empty.json"):
        pass
    assert json.loads((tmp_path / "empty.json").read_text()) == []
    trace = Trace(tmp_path / "one.json")
    trace(phases_of(5, "lock")[0])
    with pytest.raises(KeyError), trace:
        raise KeyError
    assert len(json.loads((tmp_path / "one.json").read_text())) == 1


def test_trace_is_closed_twice_and_replaces_a_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("something else, which is longer than an empty trace")
    trace = Trace(str(path))
    trace.close()
    trace.close()
    assert json.loads(path.read_text()) == []


def test_trace_leaves_out_what_comes_after_its_end(tmp_path):
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        pass
    trace(phases_of(5, "lock")[0])
    assert json.loads(path.read_text()) == []


def test_trace_cannot_be_written_where_no_folder_is(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace(tmp_path / "none" / "trace.json")


def test_trace_is_written_by_many_threads(tmp_path):
    path = tmp_path / "trace.json"
    with Trace(path) as trace:

        def watch(pid):
            for event in phases_of(pid, *["lock"] * 100):
                trace(event)

        threads = [threading.Thread(target=watch, args=[pid]) for pid in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entries = json.loads(path.read_text())
    for pid in range(8):
        letters = [entry["ph"] for entry in entries if entry["pid"] == pid]
        assert letters == ["B", "E"] * 100


def test_trace_of_a_process_shows_what_was_done(cuda_machine, tmp_path):
    target = cuda_machine.spawn({0: MIB})
    path = tmp_path / "trace.json"
    with Trace(path) as trace, Process(target.pid, on_event=trace).suspended():
        pass
    entries = json.loads(path.read_text())
    assert [entry["name"] for entry in entries[::2]] == [
        "lock",
        "checkpoint",
        "restore",
        "unlock",
    ]
    times = [entry["ts"] for entry in entries]
    assert times == sorted(times)


# Progress bars


@pytest.fixture
def screen(monkeypatch):
    """What is left on a screen of 80 columns, as text."""
    console = rich.console.Console(file=io.StringIO(), width=80, record=True)
    monkeypatch.setattr(rich.progress, "get_console", lambda: console)
    return lambda: console.export_text(clear=False)


def test_progress_bar_has_a_line_for_each_process(screen):
    with ProgressBar() as bar:
        for pid in 4711, 4194304:
            for event in phases_of(pid, "lock", "checkpoint"):
                bar(event)
        bar(Event(12, "restore", "end", 1.0, 1.0, None, "ERROR_UNKNOWN (999)"))
    lines = [line for line in screen().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    shown = [line.split() for line in lines[-3:]]
    assert [line[:5] for line in shown[:2]] == [
        ["4711", "checkpoint", "done", "3", "MiB"],
        ["4194304", "checkpoint", "done", "3", "MiB"],
    ]
    assert shown[2][:3] == ["12", "restore", "failed"]


def test_progress_bar_shows_a_process(screen, cuda_machine):
    target = cuda_machine.spawn({0: MIB})
    with ProgressBar() as bar:
        Process(target.pid, on_event=bar).suspend()
    assert f"{target.pid} checkpoint done" in screen()


def test_progress_bar_needs_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(MissingExtraError, match=r"rich: pip install 'cuckpt\[jobs\]'"):
        ProgressBar()
