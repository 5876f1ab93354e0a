"""`cuckpt simulate`: a command on a simulated machine."""

import argparse
import sys

from cuckpt.simulator import Machine, SimulatorError


def simulate(arguments: argparse.Namespace) -> int:
    """Become the command, on a simulated machine.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status, if there is no becoming.
    """
    command = arguments.command
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        print("cuckpt simulate: no command; see cuckpt simulate -h", file=sys.stderr)
        return 2
    try:
        machine = Machine(
            arguments.gpus,
            arguments.memory,
            arguments.driver_version,
            arguments.fault,
        )
        machine.execute(command)
    except ValueError as error:
        print(f"cuckpt simulate: {error}", file=sys.stderr)
        return 2
    except SimulatorError as error:
        print(f"cuckpt simulate: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cuckpt simulate: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
