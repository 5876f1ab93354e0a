"""`cuckpt install-shim`: a program named cuda-checkpoint."""

import argparse

from cuckpt.cli import screens, shim


def install_shim(arguments: argparse.Namespace) -> int:
    """Make the program, and tell whether it is the one that is found.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    path = shim.install(arguments.folder, arguments.force)
    found = shim.where_found()
    if arguments.json:
        screens.print_json({"path": str(path), "found": found})
        return 0
    print(f"made {path}")
    if found is None:
        print(f"it is not in PATH: export PATH={path.parent}:$PATH")
    elif not path.samefile(found):
        print(f"in PATH another one comes first: {found}")
    return 0
