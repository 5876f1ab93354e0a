"""The verbs that move jobs, of one process or many: suspend, resume, save, load ..."""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

from cuckpt import proc
from cuckpt.cli import reports, screens
from cuckpt.cli.ending import Ended, let_signals_kill
from cuckpt.cli.phases import Phases
from cuckpt.cli.progress import display
from cuckpt.errors import DriverError
from cuckpt.events import Trace
from cuckpt.group import ProcessGroup
from cuckpt.group_run import GroupError, GroupReport
from cuckpt.process import Process
from cuckpt.process_errors import NoMembersError


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
    return _move(arguments, lambda group: group.resume(arguments.device_map))


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


def save(arguments: argparse.Namespace) -> int:
    """Copy the GPU memory of processes to an image.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    return _move(
        arguments,
        lambda group: group.save(
            arguments.folder,
            arguments.timeout_s,
            fallback=arguments.fallback,
            replace=arguments.replace,
            durable=not arguments.no_sync,
            dry_run=arguments.dry_run,
        ),
    )


def load(arguments: argparse.Namespace) -> int:
    """Bring the processes of an image back.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    return _move(
        arguments,
        lambda group: group.load(
            arguments.folder,
            arguments.device_map,
            same_process=not arguments.any_process,
            remove=arguments.remove,
        ),
    )


def _move(
    arguments: argparse.Namespace, do: Callable[[ProcessGroup], GroupReport]
) -> int:
    """Do something with the processes that the arguments name, and tell of it."""
    phases = Phases(arguments.verb)
    report: GroupReport | None = None
    problem: OSError | None = None
    try:
        with contextlib.ExitStack() as stack:
            watchers: list[Any] = [phases, stack.enter_context(display(arguments.verb))]
            if arguments.trace is not None:
                watchers.append(stack.enter_context(Trace(arguments.trace)))
            report = do(_group(arguments, on_event=watchers))
    except GroupError as error:
        return _fail(arguments, error)
    except OSError as error:
        if report is None:
            raise
        problem = error  # of the trace: what was to be done is
    except Ended as end:
        let_signals_kill()
        return _tell_of_end(arguments, end, phases)
    if arguments.json:
        reports.print_json(arguments.verb, report)
    else:
        reports.print_text(arguments.verb, report)
    if problem is not None:
        text = f"{arguments.trace} is not complete: {screens.error_text(problem)}"
        screens.say(screens.wrapped(f"cuckpt {arguments.verb}: {text}"))
        return 1
    return 0


def _group(arguments: argparse.Namespace, **options: Any) -> ProcessGroup:
    if arguments.verb == "load":
        return ProcessGroup.from_image(arguments.folder, **options)
    if arguments.tree is None:
        for pid in arguments.pids:
            if proc.glance(pid) is None:  # mistyped, most likely
                Process(pid)  # raises what says so
        group = ProcessGroup.from_pids(arguments.pids, **options)
    else:
        group = ProcessGroup.from_tree(arguments.tree, **options)
    if not group.pids:
        raise NoMembersError(group.skipped)
    return group


def _fail(arguments: argparse.Namespace, error: GroupError) -> int:
    if arguments.json:
        reports.print_json(arguments.verb, error.report, error)
    text = screens.error_text(error)
    screens.say(screens.wrapped(f"cuckpt {arguments.verb}: {text}"))
    # Other errors say themselves what to do.
    refused = [each for each in error.exceptions if isinstance(each, DriverError)]
    if refused:
        pids = " ".join(str(each.pid) for each in refused if each.pid)
        advice = f"To see what stands in the way: cuckpt doctor {pids}".rstrip()
        screens.say(screens.wrapped(advice))
    return 1


def _tell_of_end(arguments: argparse.Namespace, end: Ended, phases: Phases) -> int:
    story = phases.story()
    if arguments.json:
        screens.print_json({"error": {"type": end.name, "message": story}})
    screens.say(screens.wrapped(f"cuckpt {arguments.verb}: {end}; {story}"))
    if isinstance(end.__context__, GroupError):
        screens.say(screens.wrapped(end.__context__.message))
    return end.status
