"""Options as glibc's getopt_long takes them, with its messages.

The module getopt of the standard library has others, and imports much for them.
"""

from collections.abc import Iterator, Mapping


class Misuse(Exception):
    """Arguments that cannot be; the text says why."""


def parse(
    program: str,
    arguments: "list[str]",
    options: "Mapping[str, bool]",
    letters: "Mapping[str, str]",
) -> "Iterator[tuple[str, str]]":
    """Yield the options that there are, and their arguments; skip everything else.

    Parameters
    ----------
    program : str
        How messages begin.
    arguments : list of str
    options : mapping of str to bool
        Long names, and whether each takes an argument.
    letters : mapping of str to str
        Long names by short ones.

    Yields
    ------
    tuple of str and str
        Long name and argument.

    Raises
    ------
    Misuse
        If an option is none, or lacks its argument.
    """
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            return
        if word.startswith("--"):
            yield _long(program, word[2:], rest, options)
        elif word.startswith("-"):
            yield from _short(program, word[1:], rest, options, letters)


def _long(
    program: str, word: str, rest: "Iterator[str]", options: "Mapping[str, bool]"
) -> "tuple[str, str]":
    key, equals, argument = word.partition("=")
    found = [name for name in options if name.startswith(key)]
    if key in options:
        found = [key]
    if not found:
        raise Misuse(f"{program}: unrecognized option '--{word}'")
    if len(found) > 1:
        names = " ".join(f"'--{name}'" for name in found)
        raise Misuse(
            f"{program}: option '--{word}' is ambiguous; possibilities: {names}"
        )
    (name,) = found
    if equals and not options[name]:
        raise Misuse(f"{program}: option '--{name}' doesn't allow an argument")
    if options[name] and not equals:
        following = next(rest, None)
        if following is None:
            raise Misuse(f"{program}: option '--{name}' requires an argument")
        return name, following
    return name, argument


def _short(
    program: str,
    word: str,
    rest: "Iterator[str]",
    options: "Mapping[str, bool]",
    letters: "Mapping[str, str]",
) -> "Iterator[tuple[str, str]]":
    while word:
        letter, word = word[0], word[1:]
        if letter not in letters:
            raise Misuse(f"{program}: invalid option -- '{letter}'")
        name = letters[letter]
        if not options[name]:
            yield name, ""
            continue
        argument = word or next(rest, None)
        if argument is None:
            raise Misuse(f"{program}: option requires an argument -- '{letter}'")
        yield name, argument
        return
