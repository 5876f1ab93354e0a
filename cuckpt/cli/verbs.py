"""The verbs of cuckpt: which function does what, and how errors are told."""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from cuckpt import errors
from cuckpt.cli import screens
from cuckpt.cli.ending import Ended, signals_raise
from cuckpt.cli.parser import parser

# Where the function of a verb is, if not in a module of its name.
_MODULES = {
    "ps": "listing",
    "suspend": "jobs",
    "resume": "jobs",
    "recover": "jobs",
    "save": "jobs",
    "load": "jobs",
    "doctor": "health",
    "install-shim": "install",
}
# What is told as a message; anything else is a fault of cuckpt.
_EXPECTED = (
    errors.DriverError,
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
)


def main(argv: Sequence[str]) -> int:
    """Run a verb.

    Parameters
    ----------
    argv : sequence of str
        Arguments without the program's name.

    Returns
    -------
    int
        Exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may be of any letters
            stream.reconfigure(errors="backslashreplace")
    whole = parser()
    try:
        arguments = whole.parse_args(argv)
    except OSError as error:  # of the help or version, which cannot be written
        screens.say(f"cuckpt: {screens.error_text(error)}")
        return 1
    name = f"cuckpt {arguments.verb}" if arguments.verb else "cuckpt"
    try:
        with signals_raise():
            status = _run(arguments) if arguments.verb else _help(whole)
    except Ended as end:
        screens.say(f"{name}: {end}")
        return end.status
    if sys.stdout is None:  # closed: nobody got what was printed
        return status or 1
    problem = _flush()
    if problem is None or status:
        return status
    if not isinstance(problem, BrokenPipeError):  # else whoever reads has enough
        screens.say(f"{name}: {screens.error_text(problem)}")
    return 1


def _help(whole: argparse.ArgumentParser) -> int:
    whole.print_help()
    return 0


def _run(arguments: argparse.Namespace) -> int:
    name = arguments.verb
    module = importlib.import_module(f"cuckpt.cli.{_MODULES.get(name, name)}")
    do: Callable[[argparse.Namespace], int] = getattr(module, name.replace("-", "_"))
    try:
        return do(arguments)
    except BrokenPipeError:
        return 1
    except _EXPECTED as error:
        _tell(arguments, error)
        return 1


def _tell(arguments: argparse.Namespace, error: Exception) -> None:
    if getattr(arguments, "json", False):
        with contextlib.suppress(OSError):  # which may be what has failed
            screens.print_json({"error": screens.error_facts(error)})
    text = f"cuckpt {arguments.verb}: {screens.error_text(error)}"
    advice = [text for kind, text in _advice() if isinstance(error, kind)]
    screens.say("\n".join(map(screens.wrapped, [text, *advice[:1]])))


def _advice() -> "list[tuple[type[BaseException], str]]":
    """Return what to do next after an error that does not say it itself."""
    from cuckpt.process_errors import NoMembersError, ProcessGoneError

    see = "To see the CUDA processes that there are: cuckpt ps"
    look = "To see what stands in the way: cuckpt doctor"
    return [(NoMembersError, see), (ProcessGoneError, see), (errors.DriverError, look)]


def _flush() -> OSError | None:
    """Return why what was printed could not be written; None if it was."""
    try:
        print(end="", flush=True)
    except OSError as error:
        # Else the interpreter tries again, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
