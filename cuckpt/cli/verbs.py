"""The command line: one call into the layers below per verb."""

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cuckpt

if TYPE_CHECKING:
    from cuckpt.simulator import Fault


def main(argv: Sequence[str]) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process if left out.

    Returns
    -------
    int
        Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # such as no space for what is printed
        print(f"cuckpt: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuckpt",
        description="Checkpoint and restore the GPU state of CUDA processes.",
    )
    parser.add_argument(
        "--version", action="version", version=f"cuckpt {cuckpt.__version__}"
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    verb = verbs.add_parser(
        "info",
        help="show the version and the driver in use",
        description="Show the version and the CUDA driver in use. Exits 0 also "
        "without a driver; 1 if CUCKPT_LIBCUDA names one that does not load.",
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=info)
    verb = verbs.add_parser(
        "simulate",
        help="run a command on a simulated machine with GPUs",
        usage="cuckpt simulate [options] -- CMD...",
        description="Run a command on a simulated machine with GPUs, for itself and "
        "its children. The exit status is the command's; 127 if there is no such "
        "command.",
        epilog="example: cuckpt simulate --gpus 2 --memory 4GiB -- python job.py",
    )
    verb.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="how many GPUs, 1 to 16; default 1",
    )
    _add_memory(verb, "8GiB", "of each GPU: bytes, or as 512MiB or 4GiB")
    verb.add_argument(
        "--driver-version",
        type=_version,
        default=_version("13.5"),
        metavar="V",
        help="as 13.5 or 13050; default 13.5",
    )
    verb.add_argument(
        "--fault",
        type=_fault,
        action="append",
        metavar="FAULT",
        help="what is to go wrong, as restore=OUT_OF_MEMORY@2 (the second restore) "
        "or checkpoint,delay=5 (the first); also count=, when=after, kill=target or "
        "caller; as often as you like. Without one: those in CUCKPT_FAULTS",
    )
    verb.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="CMD", help=argparse.SUPPRESS
    )
    verb.set_defaults(run=simulate)
    verb = verbs.add_parser(
        "demo",
        help="checkpoint, restore and check a real process",
        description="Start a process that fills GPU memory with random bytes, "
        "suspend it, restore it and check every byte; then the same through "
        "custom storage. On the real driver and a GPU if there are, else on a "
        "simulated machine. Exits 0 only if every check passed.",
    )
    _add_memory(verb, "64MiB", "how much the process fills")
    verb.set_defaults(run=demonstrate)
    return parser


def _add_memory(verb: argparse.ArgumentParser, default: str, what: str) -> None:
    verb.add_argument(
        "--memory",
        type=_size,
        default=_size(default),
        metavar="SIZE",
        help=f"{what}; default {default}",
    )


def info(arguments: argparse.Namespace) -> int:
    """Print versions, driver and whether custom storage is available."""
    facts = _facts()
    if arguments.json:
        print(json.dumps(facts))
    else:
        print("\n".join(_lines(facts)))
    return 1 if facts["driver"] is None and os.environ.get("CUCKPT_LIBCUDA") else 0


def simulate(arguments: argparse.Namespace) -> int:
    """Become the command, on a simulated machine."""
    from cuckpt.simulator import Machine, SimulatorError

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


def demonstrate(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from cuckpt.demo import main as demo

    return demo(arguments.memory)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(?:([KMGT])iB)?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, or as 512MiB or 4GiB, not {text!r}"
        )
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def _fault(text: str) -> "Fault":
    from cuckpt.simulator import Fault

    try:
        return Fault.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _version(text: str) -> int:
    match = re.fullmatch(r"(\d\d)(?:\.(\d)|(\d\d)0)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected as 13.5 or 13050, not {text!r}")
    return int(match[1]) * 1000 + int(match[2] or match[3] or 0) * 10


def _facts() -> dict[str, Any]:
    """Return what `info` prints, as documented for ``--json``.

    ``driver`` is the file that is in use, or null; ``cuda_version`` is
    1000 x major + 10 x minor, or null; ``error`` says why something is null.
    """
    from cuckpt import driver

    facts: dict[str, Any] = {
        "cuckpt": cuckpt.__version__,
        "driver": None,
        "cuda_version": None,
        "checkpoint": False,
        "custom_storage": False,
        "error": None,
    }
    try:
        facts["driver"] = driver.library_path()
        facts["checkpoint"] = driver.has_checkpoint()
        facts["custom_storage"] = driver.has_custom_storage()
        facts["cuda_version"] = driver.driver_get_version()
    except (
        driver.DriverError,
        driver.DynamicLibNotFoundError,
        driver.FunctionNotFoundError,
    ) as error:
        facts["error"] = str(error)
    return facts


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"cuckpt          {facts['cuckpt']}"]
    if facts["driver"] is None:
        return [*lines, "driver          none", "", *textwrap.wrap(facts["error"], 78)]
    lines.append(f"driver          {facts['driver']}")
    if facts["cuda_version"] is None:
        return [
            *lines,
            "CUDA version    unknown",
            "",
            *textwrap.wrap(facts["error"], 78),
        ]
    major, minor = divmod(facts["cuda_version"], 1000)
    checkpoint = "yes" if facts["checkpoint"] else "no, needs CUDA 12.8 (driver 570)"
    custom = "yes" if facts["custom_storage"] else "no, needs CUDA 13.4 (driver 615)"
    return [
        *lines,
        f"CUDA version    {major}.{minor // 10}",
        f"checkpoint      {checkpoint}",
        f"custom storage  {custom}",
    ]
