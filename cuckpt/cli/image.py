"""`cuckpt image`: what is in an image, and whether it is whole."""

import argparse

from cuckpt import storage
from cuckpt.cli import screens


def image(arguments: argparse.Namespace) -> int:
    """Print what is in an image.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    look = storage.verify if arguments.what == "verify" else storage.describe
    found = look(arguments.folder)
    needed_by, text = _needed_by(found)
    if arguments.json:
        screens.print_json({**_facts(found), "needed_by": needed_by})
        return 0
    print(found)
    print(screens.hanging(text, "  "))
    if arguments.what == "verify":
        print("  all of it is as it was saved")
    return 0


def _needed_by(found: storage.Image) -> tuple[list[int] | None, str]:
    """Return for whom it is needed, None if that cannot be told, and a text of it."""
    try:
        pids = storage.needed_by(found.path)
    except (OSError, RuntimeError) as error:
        return None, f"who needs it cannot be told: {screens.error_text(error)}"
    who = ", ".join(map(str, pids)) or "nobody: it can be removed"
    return pids, f"needed by {who}"


def _facts(found: storage.Image) -> dict[str, object]:
    processes = [
        {
            "pid": process.pid,
            "name": process.name,
            "gpu_bytes": {region.gpu: region.size for region in process.regions},
        }
        for process in found.processes
    ]
    return {
        "path": found.path,
        "created": found.created,
        "cuckpt": found.cuckpt,
        "cuda_version": found.cuda_version,
        "bytes": found.size,
        "stored_bytes": found.stored_bytes,
        "processes": processes,
    }
