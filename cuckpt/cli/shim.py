"""A program named cuda-checkpoint, for those that call one by that name."""

import os
import shlex
import sys
import tempfile
from pathlib import Path

from cuckpt.cli import CONTRACT_NAME

_MARK = "# cuda-checkpoint by cuckpt: made by `cuckpt install-shim`"
# Linux before 5.1 takes no longer first line.
_LONGEST_FIRST_LINE = 127
# No site-packages but this one, no environment: what they run takes several times as
# long as the call itself, and may print something.
_ISOLATED = "-IS"

# No traceback of one that is interrupted while it starts.
_DIE_QUIETLY = (
    "_signal.getsignal(2) is _signal.default_int_handler"
    " and _signal.signal(2, _signal.SIG_DFL)"
)


def install(folder: "str | os.PathLike[str]", force: bool = False) -> Path:
    """Put a program named cuda-checkpoint into a folder.

    It runs this cuckpt by this Python, whatever the environment is.

    Parameters
    ----------
    folder : str or path
    force : bool
        Whether to replace a file that is not such a program.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    FileExistsError
        If there is another file of that name.
    OSError
        If it cannot be written, as without the folder.
    """
    path = Path(folder).absolute() / CONTRACT_NAME
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    if os.path.lexists(path) and not (force or _is_shim(path)):
        raise FileExistsError(
            f"{path} is there already, and is none that cuckpt made: give another "
            "folder, or --force"
        )
    _replace(path, program(sys.executable, str(Path(__file__).parents[2])))
    return path


def program(python: str, packages: str) -> str:
    """Return the text of the program.

    Parameters
    ----------
    python : str
        The interpreter.
    packages : str
        The folder that has the package cuckpt.

    Returns
    -------
    str
    """
    code = [
        "import _signal, sys",
        _DIE_QUIETLY,
        f"sys.path.append({packages!r})",
        "from cuckpt.cli.contract import main",
        f"sys.exit(main(sys.argv[1:], {CONTRACT_NAME!r}))",
    ]
    first = f"#!{python} {_ISOLATED}"
    if len(os.fsencode(first)) <= _LONGEST_FIRST_LINE and len(first.split()) == 2:
        return "\n".join([first, _MARK, *code, ""])
    command = shlex.join([python, _ISOLATED, "-c", "; ".join(code)])
    return f'#!/bin/sh\n{_MARK}\nexec {command} "$@"\n'


def where_found() -> "str | None":
    """Return the cuda-checkpoint that is found in PATH; None if there is none.

    Returns
    -------
    str or None
    """
    from shutil import which

    return which(CONTRACT_NAME)


def _is_shim(path: Path) -> bool:
    try:
        with open(path, errors="replace") as file:
            return _MARK in file.read(4096)
    except OSError:
        return False


def _replace(path: Path, text: str) -> None:
    """Write it beside, so that nobody runs half a program."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{CONTRACT_NAME}")
    try:
        with open(number, "w", errors="surrogateescape") as file:
            file.write(text)
            os.fchmod(number, 0o755)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
