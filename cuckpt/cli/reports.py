"""What came of a job, on a screen and as JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cuckpt.cli import screens
from cuckpt.group_run import GroupError, GroupReport
from cuckpt.passage import Outcome

_PHASES = "lock", "checkpoint", "restore", "prepare", "copy", "complete", "unlock"
_MOST_PIDS = 5


def print_text(verb: str, report: GroupReport) -> None:
    """Print a table, notes, and who was left out.

    Parameters
    ----------
    verb : str
    report : GroupReport
    """
    outcomes = [*report.outcomes.values()]
    print(_table(outcomes), end="")
    notes = ((outcome.pid, note) for outcome in outcomes for note in outcome.notes)
    for line in [*_by_text(notes), *skipped(report.skipped)]:
        print(screens.hanging(screens.in_shell(line), "", "  "))
    if verb == "save" and report.image:
        print(f"image: {report.image}")
    number = screens.counted(len(outcomes), "process", "es")
    print(f"{verb}: {number} in {screens.duration(report.seconds)}")


def print_json(
    verb: str, report: GroupReport, error: "GroupError | None" = None
) -> None:
    """Print one object.

    Parameters
    ----------
    verb : str
    report : GroupReport
    error : GroupError, optional
        Why it failed.
    """
    failed = failures(error) if error else {}
    processes = [
        {
            "pid": outcome.pid,
            "name": outcome.name,
            "before": outcome.before,
            "after": outcome.after,
            "seconds": outcome.seconds,
            "gpu_bytes": outcome.used_bytes,
            "notes": outcome.notes,
            "image": outcome.image,
            "error": screens.error_facts(failed.get(outcome.pid)),
        }
        for outcome in report.outcomes.values()
    ]
    screens.print_json(
        {
            "verb": verb,
            "processes": processes,
            "skipped": {str(pid): why for pid, why in report.skipped.items()},
            "seconds": report.seconds,
            "error": screens.error_facts(error),
        }
    )


def failures(error: GroupError) -> "dict[int | None, Exception]":
    """Return what failed, by pid.

    Parameters
    ----------
    error : GroupError

    Returns
    -------
    dict
    """
    return {getattr(each, "pid", None): each for each in error.exceptions}


def skipped(reasons: Mapping[int, str]) -> list[str]:
    """Return a line for each reason why processes were left out.

    Parameters
    ----------
    reasons : mapping of int to str
        By pid.

    Returns
    -------
    list of str
    """
    return [f"skipped {line}" for line in _by_text(reasons.items())]


def _by_text(texts: "Iterable[tuple[int, str]]") -> Iterator[str]:
    """Yield a line for each text: whom it is about, and the text."""
    pids: dict[str, list[int]] = {}
    for pid, text in texts:
        pids.setdefault(text, []).append(pid)
    for text, about in pids.items():
        first = ", ".join(map(str, about[:_MOST_PIDS]))
        more = len(about) - _MOST_PIDS
        yield f"{first}{f' and {more} more' if more > 0 else ''}: {text}"


def _table(outcomes: Sequence[Outcome]) -> str:
    seen = [name for name in _PHASES if any(name in o.seconds for o in outcomes)]
    columns = ["PID", "NAME", "BEFORE", "AFTER", "MEMORY", *map(str.upper, seen)]
    rows = [
        [
            str(outcome.pid),
            screens.printable(outcome.name),
            outcome.before or "-",
            outcome.after or "-",
            _memory(outcome),
            *(_seconds(outcome, name) for name in seen),
        ]
        for outcome in outcomes
    ]
    return screens.table(columns, rows, left=["NAME", "BEFORE", "AFTER"])


def _memory(outcome: Outcome) -> str:
    if outcome.used_bytes is None:
        return "-"
    return screens.size(sum(outcome.used_bytes.values()))


def _seconds(outcome: Outcome, phase: str) -> str:
    return screens.duration(outcome.seconds[phase]) if phase in outcome.seconds else "-"
