"""What those who watch are told, and what they make of it."""

import dataclasses
import io
import json
import os
import sys
import threading
import types

import pytest
import rich.console
import rich.progress

from cuckpt import proc
from cuckpt.events import Event, Phase, ProgressBar, Teller, Trace
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


# Tellers


def test_teller_keeps_the_order_and_tells_all_before_its_end():
    first, second = [], []
    teller = Teller([first.append, second.append])
    events = phases_of(5, *["lock"] * 500)
    for event in events:
        teller(event)
    assert teller.finish() == []
    assert first == second == events


def test_teller_goes_on_when_one_who_watches_raises():
    problem, events = ValueError("I/O operation on closed file"), []

    def watch(event):
        raise problem

    teller = Teller([watch, events.append])
    for event in phases_of(5, "lock", "unlock"):
        teller(event)
    assert teller.finish() == [(5, f"on_event raised {problem!r}")]
    assert len(events) == 4


def test_teller_does_not_wait_for_ever_for_one_who_watches(monkeypatch):
    monkeypatch.setattr(Teller, "_PATIENCE_S", 0.05)
    is_over, events = threading.Event(), []
    teller = Teller([lambda event: is_over.wait(20), events.append])
    for pid in 5, 6:
        teller(phases_of(pid, "lock")[0])
    assert teller.finish() == [
        (5, "on_event has not returned"),
        (6, "on_event has not returned"),
    ]
    assert events == []
    is_over.set()
    teller._thread.join(20)
    assert len(events) == 2


def test_teller_tells_by_itself_when_there_can_be_no_thread(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    events = []
    teller = Teller([events.append, lambda event: 1 / 0])
    teller(phases_of(5, "lock")[0])
    assert len(events) == 1
    assert "ZeroDivisionError" in teller.finish()[0][1]


@pytest.mark.parametrize("on_event", [5, "lock", [print, None]], ids=repr)
def test_process_refuses_watchers_that_cannot_be_called(on_event):
    with pytest.raises(TypeError, match="on_event must be a callable"):
        Process(os.getpid(), on_event)


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
    name = proc.facts(target.pid).name
    for what in "process_name", "thread_name":
        entry = entries.pop(0)
        assert (entry["ph"], entry["name"], entry["pid"]) == ("M", what, target.pid)
        assert entry["args"] == {"name": name}
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


def test_progress_bar_keeps_a_failure_in_view(screen):
    with ProgressBar() as bar:
        for event in [
            *phases_of(5, "checkpoint", error="ERROR_UNKNOWN (999)"),
            *phases_of(5, "unlock"),
        ]:
            bar(event)
    lines = [line for line in screen().splitlines() if line.strip()]
    assert [line.split()[:3] for line in lines[-2:]] == [
        ["5", "checkpoint", "failed"],
        ["5", "unlock", "done"],
    ]


def test_those_who_watch_show_that_one_waits(screen, tmp_path):
    event = Event(5, "lock", "waiting", 1.0, error="process 5 is stopped")
    with ProgressBar() as bar, Trace(tmp_path / "trace.json") as trace:
        bar(event)
        trace(event)
    assert "5 lock waiting" in screen()
    (entry,) = json.loads((tmp_path / "trace.json").read_text())
    assert (entry["ph"], entry["name"]) == ("i", "waiting")
    assert entry["args"] == {"error": "process 5 is stopped"}


def test_those_who_watch_show_how_far_a_copy_is(screen, tmp_path):
    start, end = phases_of(5, "copy")
    half = dataclasses.replace(end, moment="progress", time_s=0.5, done_bytes=MIB)
    path = tmp_path / "trace.json"
    with Trace(path) as trace, ProgressBar() as bar:
        for event in start, half, end:
            trace(event)
            bar(event)
    written = [each for each in json.loads(path.read_text()) if each["ph"] != "M"]
    assert [each["ph"] for each in written] == ["B", "C", "E"]
    assert written[1]["args"] == {"bytes": MIB}
    assert "copy done" in screen()


def test_progress_bar_shows_why_rich_cannot_be_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ModuleNotFoundError, match=r"import of rich\.progress halted"):
        ProgressBar()


def test_progress_bar_shows_a_process(screen, cuda_machine):
    target = cuda_machine.spawn({0: MIB})
    with ProgressBar() as bar:
        Process(target.pid, on_event=bar).suspend()
    assert f"{target.pid} checkpoint done" in screen()


def test_progress_bar_needs_rich(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rich")]:
        monkeypatch.delitem(sys.modules, name)
    nowhere = types.SimpleNamespace(find_spec=lambda *where: None)
    monkeypatch.setattr(sys, "meta_path", [nowhere])
    with pytest.raises(MissingExtraError, match=r"rich: pip install 'cuckpt\[jobs\]'"):
        ProgressBar()
