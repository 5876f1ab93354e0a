"""What is printed: tables, paragraphs, colours, JSON."""

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 80
_GAP = "  "
_COLOURS = {"red": 31, "green": 32, "yellow": 33, "dim": 2, "bold": 1}


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()
) -> str:
    """Lay out rows below their columns' names.

    On a terminal that is too narrow the column ``NAME`` is shortened, and nothing else.

    Parameters
    ----------
    columns : sequence of str
    rows : iterable of sequence of str
    left : sequence of str
        Columns of text, which begins at the left.

    Returns
    -------
    str
        Lines, each with its end.
    """
    lines = [list(columns), *map(list, rows)]
    if "NAME" in columns:
        _shorten(lines, list(columns).index("NAME"))
    widths = _widths(lines)
    text = ""
    for line in lines:
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        text += _GAP.join(cells).rstrip() + "\n"
    return text


def _widths(lines: list[list[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*lines, strict=True)]


def _shorten(lines: list[list[str]], column: int) -> None:
    if not is_terminal(sys.stdout):
        return
    widths = _widths(lines)
    others = sum(widths) - widths[column] + len(_GAP) * (len(widths) - 1)
    room = max(len("NAME"), shutil.get_terminal_size().columns - others)
    for line in lines:
        if len(line[column]) > room:
            line[column] = line[column][: room - 1] + "+"


def wrapped(text: str) -> str:
    """Break the lines of a text so that they fit into 80 columns.

    Parameters
    ----------
    text : str
        Lines, which keep their indent.

    Returns
    -------
    str
    """
    return "\n".join(
        hanging(line.lstrip(), line[: len(line) - len(line.lstrip())])
        for line in text.splitlines()
    )


def hanging(text: str, first: str, rest: "str | None" = None) -> str:
    """Break a paragraph so that it fits into 80 columns; all of it is printable.

    Parameters
    ----------
    text : str
    first : str
        What comes before its first line.
    rest : str, optional
        What comes before the others; as much space, and 2 more, if left out.

    Returns
    -------
    str
    """
    lines = textwrap.wrap(
        text,
        WIDTH - 1,
        initial_indent=first,
        subsequent_indent=" " * (len(first) + 2) if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(map(printable, lines))


def coloured(text: str, colour: str) -> str:
    """Return text for the standard output in a colour, if that shows colours.

    Parameters
    ----------
    text : str
    colour : str
        ``red``, ``green``, ``yellow``, ``dim`` or ``bold``.

    Returns
    -------
    str
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not is_terminal(sys.stdout):
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def is_terminal(file: Any) -> bool:
    """Tell whether a file is a terminal; None, which a closed one is, is none.

    Parameters
    ----------
    file : file or None

    Returns
    -------
    bool
    """
    return file is not None and file.isatty()


def printable(text: str) -> str:
    """Return a name without what could change the terminal.

    Parameters
    ----------
    text : str

    Returns
    -------
    str
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def process_text(pid: int, name: str) -> str:
    """Return how a process is named on a screen.

    Parameters
    ----------
    pid : int
    name : str

    Returns
    -------
    str
    """
    return f"{pid} {printable(name)}".rstrip()


def print_json(what: Mapping[str, Any]) -> None:
    """Print an object in one line.

    Parameters
    ----------
    what : mapping
    """
    print(json.dumps(what))


def error_facts(error: "BaseException | None") -> "dict[str, str] | None":
    """Return an error as JSON shows it.

    Parameters
    ----------
    error : exception or None

    Returns
    -------
    dict or None
        ``type``, the name of its class, and ``message``.
    """
    if error is None:
        return None
    return {"type": type(error).__name__, "message": error_text(error)}


def error_text(error: BaseException) -> str:
    """Return what an error says, without what Python adds to it.

    Parameters
    ----------
    error : exception

    Returns
    -------
    str
    """
    return in_shell(_error_text(error))


# What the library's texts name, and what it is on the command line.
_METHOD = re.compile(r"\b(load|recover|resume|suspend)\(\)")
_IN_A_SHELL = {
    "(replace=True)": "(--replace)",
    "resume(gpu_map=...)": "cuckpt resume --device-map",
    "a gpu_map": "--device-map",
    "same_process=False": "--any-process",
}


def in_shell(text: str) -> str:
    """Return a text of the library in the words of the command line.

    Parameters
    ----------
    text : str

    Returns
    -------
    str
    """
    for python, shell in _IN_A_SHELL.items():
        text = text.replace(python, shell)
    return _METHOD.sub(r"cuckpt \1", text)


def _error_text(error: BaseException) -> str:
    if isinstance(error, ExceptionGroup):
        return str(error.message)
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if str(error) != OSError.__str__(error):  # it has a text of its own
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}"


def counted(number: int, what: str, plural: str = "s") -> str:
    """Return a number of things as text.

    Parameters
    ----------
    number : int
    what : str
        One of them.
    plural : str
        What is added for several.

    Returns
    -------
    str
    """
    return f"{number} {what}{'' if number == 1 else plural}"


def say(text: str) -> None:
    """Write to the standard error, whether anybody reads it or not.

    Parameters
    ----------
    text : str
    """
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        # In one piece: several threads do so at once.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def size(size_bytes: int) -> str:
    """Return a size as text of at most 9 letters up to 1 TiB.

    Parameters
    ----------
    size_bytes : int

    Returns
    -------
    str
    """
    if size_bytes < 10 << 30:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"


def duration(seconds: float) -> str:
    """Return how long something took or lives, as text of at most 7 letters.

    Parameters
    ----------
    seconds : float

    Returns
    -------
    str
    """
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes = int(seconds) // 60
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 100 * 60 else f"{minutes // 1440} d"
