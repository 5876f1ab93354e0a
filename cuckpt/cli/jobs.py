"""`cuckpt suspend`, `resume` and `recover`: jobs of one process or many."""

import argparse
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from cuckpt import nvml
from cuckpt.cli import reports, screens
from cuckpt.cli.ending import Ended, let_signals_kill
from cuckpt.cli.phases import Phases
from cuckpt.cli.progress import all_of, display
from cuckpt.events import Trace
from cuckpt.group import GroupError, GroupReport, ProcessGroup


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
        reports.print_json(arguments.verb, report)
    else:
        reports.print_text(arguments.verb, report)
    return 0


def _group(arguments: argparse.Namespace, **options: Any) -> ProcessGroup:
    if arguments.tree is None:
        group = ProcessGroup.from_pids(arguments.pids, **options)
    else:
        group = ProcessGroup.from_tree(arguments.tree, **options)
    if not group.pids:
        reasons = [f"  {line}" for line in reports.skipped(group.skipped)]
        raise NobodyError("\n".join(["no CUDA process is among these", *reasons]))
    return group


def _fail(arguments: argparse.Namespace, error: GroupError) -> int:
    if arguments.json:
        reports.print_json(arguments.verb, error.report, error)
    pids = " ".join(str(pid) for pid in reports.failures(error) if pid is not None)
    screens.say(screens.wrapped(f"cuckpt {arguments.verb}: {error.message}"))
    advice = f"To see what stands in the way: cuckpt doctor {pids}"
    screens.say(screens.wrapped(advice.rstrip()))
    return 1


def _tell_of_end(arguments: argparse.Namespace, end: Ended, phases: Phases) -> int:
    story = phases.story()
    if arguments.json:
        screens.print_json({"error": {"type": end.name, "message": story}})
    screens.say(screens.wrapped(f"cuckpt {arguments.verb}: {end}; {story}"))
    if isinstance(end.__context__, GroupError):
        screens.say(screens.wrapped(end.__context__.message))
    return end.status
