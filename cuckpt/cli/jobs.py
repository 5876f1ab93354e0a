"""`cuckpt suspend`, `resume` and `recover`: jobs of one process or many."""

import argparse
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from cuckpt import nvml
from cuckpt.cli import screens
from cuckpt.cli.ending import Ended, let_signals_kill
from cuckpt.cli.phases import Phases
from cuckpt.cli.progress import all_of, display
from cuckpt.events import Trace
from cuckpt.group import GroupError, GroupReport, ProcessGroup
from cuckpt.passage import Outcome

_PHASES = "lock", "checkpoint", "restore", "unlock"


class NobodyError(LookupError):
    """There is no CUDA process among those that were named."""


def suspend(arguments: argparse.Namespace) -> int:
    """Lock and checkpoint processes.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    return _move(arguments, lambda group: group.suspend(arguments.timeout_s))


def resume(arguments: argparse.Namespace) -> int:
    """Restore and unlock processes.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    gpu_map = arguments.device_map
    if gpu_map is not None:
        gpu_map = _by_uuid(gpu_map)
    return _move(arguments, lambda group: group.resume(gpu_map))


def recover(arguments: argparse.Namespace) -> int:
    """Bring processes to RUNNING, from whatever state they were left in.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    return _move(arguments, lambda group: group.recover())


def _by_uuid(gpu_map: Mapping[str | int, str | int]) -> dict[str | bytes, str | int]:
    """Return a map with UUIDs in the place of the ordinals of old GPUs."""
    uuids = {gpu.ordinal: gpu.uuid for gpu in nvml.gpus()}
    found: dict[str | bytes, str | int] = {}
    for old, new in gpu_map.items():
        if isinstance(old, int):
            if old not in uuids:
                raise ValueError(f"there is no GPU {old}: there are {len(uuids)}")
            found[uuids[old]] = new
        else:
            found[old] = new
    return found


def _move(
    arguments: argparse.Namespace, do: Callable[[ProcessGroup], GroupReport]
) -> int:
    """Do something with the processes that the arguments name, and tell of it."""
    phases = Phases()
    try:
        with contextlib.ExitStack() as stack:
            watchers: list[Any] = [phases, stack.enter_context(display())]
            if arguments.trace is not None:
                watchers.append(stack.enter_context(Trace(arguments.trace)))
            group = _group(arguments, on_event=all_of(*watchers))
            report = do(group)
    except GroupError as error:
        return _fail(arguments, error)
    except Ended as end:
        let_signals_kill()
        return _tell_of_end(arguments, end, phases)
    if arguments.json:
        _print_json(arguments.verb, report)
    else:
        _print_report(arguments.verb, report)
    return 0


def _group(arguments: argparse.Namespace, **options: Any) -> ProcessGroup:
    if arguments.tree is None:
        group = ProcessGroup.from_pids(arguments.pids, **options)
    else:
        group = ProcessGroup.from_tree(arguments.tree, **options)
    if not group.pids:
        reasons = [f"  process {pid}: {why}" for pid, why in group.skipped.items()]
        raise NobodyError("\n".join(["no CUDA process is among these", *reasons]))
    return group


def _print_report(verb: str, report: GroupReport) -> None:
    outcomes = report.outcomes.values()
    seen = [name for name in _PHASES if any(name in o.seconds for o in outcomes)]
    columns = ["PID", "NAME", "BEFORE", "AFTER", "GPU MEMORY", *map(str.upper, seen)]
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
    print(screens.table(columns, rows, left=["NAME", "BEFORE", "AFTER"]), end="")
    noted: dict[str, list[str]] = {}
    for outcome in outcomes:
        for note in outcome.notes:
            noted.setdefault(note, []).append(str(outcome.pid))
    for note, pids in noted.items():
        print(screens.hanging(f"{', '.join(pids)}: {note}", "", "  "))
    for pid, why in report.skipped.items():
        print(screens.hanging(f"{pid} was skipped: {why}", "", "  "))
    number = screens.counted(len(outcomes), "process", "es")
    print(f"{verb}: {number} in {screens.duration(report.seconds)}")


def _memory(outcome: Outcome) -> str:
    if outcome.used_bytes is None:
        return "-"
    return screens.size(sum(outcome.used_bytes.values()))


def _seconds(outcome: Outcome, phase: str) -> str:
    return screens.duration(outcome.seconds[phase]) if phase in outcome.seconds else "-"


def _print_json(
    verb: str, report: GroupReport, error: "GroupError | None" = None
) -> None:
    failed = {
        getattr(each, "pid", None): each for each in (error.exceptions if error else ())
    }
    processes = [
        {
            "pid": outcome.pid,
            "name": outcome.name,
            "before": outcome.before,
            "after": outcome.after,
            "seconds": outcome.seconds,
            "gpu_bytes": outcome.used_bytes,
            "notes": outcome.notes,
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


def _fail(arguments: argparse.Namespace, error: GroupError) -> int:
    if arguments.json:
        _print_json(arguments.verb, error.report, error)
    pids = " ".join(map(str, error.report.outcomes))
    screens.say(
        screens.wrapped(f"cuckpt {arguments.verb}: {error.message}")
        + "\n"
        + screens.wrapped(f"To see what stands in the way: cuckpt doctor {pids}")
    )
    return 1


def _tell_of_end(arguments: argparse.Namespace, end: Ended, phases: Phases) -> int:
    story = phases.story()
    if arguments.json:
        screens.print_json({"error": {"type": end.name, "message": story}})
    screens.say(screens.wrapped(f"cuckpt {arguments.verb}: {end}; {story}"))
    if isinstance(end.__context__, GroupError):
        screens.say(screens.wrapped(end.__context__.message))
    return end.status
