"""The command line: one call into the layers below per verb."""

import argparse
import json
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import cuckpt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process if left out.

    Returns
    -------
    int
        Exit status: 0 success, 1 failure, 2 wrong usage.
    """
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
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    status: int = arguments.run(arguments)
    return status


def info(arguments: argparse.Namespace) -> int:
    """Print versions, driver and whether custom storage is available."""
    facts = _facts()
    if arguments.json:
        print(json.dumps(facts))
    else:
        print("\n".join(_lines(facts)))
    return 1 if facts["driver"] is None and os.environ.get("CUCKPT_LIBCUDA") else 0


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
        "custom_storage": False,
        "error": None,
    }
    try:
        facts["driver"] = driver.library_path()
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
    offered = "yes" if facts["custom_storage"] else "no, needs CUDA 13.4 (driver 615)"
    return [
        *lines,
        f"CUDA version    {major}.{minor // 10}",
        f"custom storage  {offered}",
    ]
