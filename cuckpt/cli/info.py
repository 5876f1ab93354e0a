"""`cuckpt info`: the version and the driver in use."""

import argparse
import os
import textwrap
from typing import Any

import cuckpt
from cuckpt import driver
from cuckpt.cli import screens


def info(arguments: argparse.Namespace) -> int:
    """Print versions, driver and whether custom storage is available.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    facts = _facts()
    if arguments.json:
        screens.print_json(facts)
    else:
        print("\n".join(_lines(facts)))
    return 1 if facts["driver"] is None and os.environ.get("CUCKPT_LIBCUDA") else 0


def _facts() -> dict[str, Any]:
    """Return what `info` prints, as documented for ``--json``.

    ``driver`` is the file that is in use, or null; ``cuda_version`` is
    1000 x major + 10 x minor, or null; ``error`` says why something is null.
    """
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
