"""Faults: what is to go wrong on a simulated machine."""

import math
import re
from dataclasses import dataclass
from typing import Any

from cuckpt.errors import Result

MAX_FAULTS = 64
CALLS = (
    "get_state",
    "get_restore_thread_id",
    "lock",
    "checkpoint",
    "restore",
    "unlock",
    "complete",
)

_MAX_INT = (1 << 31) - 1
_MOMENTS = ("before", "after")
_VICTIMS = (None, "target", "caller")


@dataclass(frozen=True)
class Fault:
    """What is to go wrong on a machine, and at which calls.

    If several happen to one call, it takes all their delays, and of their results
    the last counts. A restore that is given ERROR_OUT_OF_MEMORY before it is done
    loses the process, as a true one does on driver 580. Others who ask about the
    process wait meanwhile.

    Parameters
    ----------
    call : str
        ``get_state``, ``get_restore_thread_id``, ``lock``, ``checkpoint``,
        ``restore``, ``unlock`` or ``complete``.
    result : int, optional
        What the call returns, such as ``cuckpt.driver.Result.ERROR_UNKNOWN``;
        what it comes to by itself if left out.
    at : int
        The first call that it happens to. Those that reach a process are
        counted, from 1 at the machine's start, all of the machine together:
        ``at=machine.calls["checkpoint"] + 1`` is the next checkpoint.
    count : int
        How many calls it happens to.
    delay_s : float
        How long the call takes besides, in seconds, whatever its time limit;
        ``math.inf``: until the process is killed.
    when : str
        When all this happens: ``before`` the thing is done, which it is not if
        there is a `result`, or ``after``.
    kill : str, optional
        ``target`` or ``caller``: that process is killed, after the delay. Without
        the target the call returns ERROR_OPERATING_SYSTEM in any case.

    Raises
    ------
    ValueError, TypeError
        If a parameter is wrong.
    """

    call: str
    result: int | None = None
    at: int = 1
    count: int = 1
    delay_s: float = 0.0
    when: str = "before"
    kill: str | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("call", self.call, CALLS),
            ("when", self.when, _MOMENTS),
            ("kill", self.kill, _VICTIMS),
        ):
            if value not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {known}, not {value!r}")
        for name, number, low in (
            ("result", 0 if self.result is None else self.result, 0),
            ("at", self.at, 1),
            ("count", self.count, 1),
        ):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an int, not {type(number).__name__}")
            if not low <= number <= _MAX_INT:
                raise ValueError(f"{name} must be {low} to {_MAX_INT}, not {number}")
        if not isinstance(self.delay_s, int | float):
            raise TypeError(
                f"delay_s must be a number, not {type(self.delay_s).__name__}"
            )
        if not (0 <= self.delay_s <= 1e9 or self.delay_s == math.inf):
            raise ValueError(
                f"delay_s must be 0 to 1e9, or math.inf, not {self.delay_s}"
            )
        if self.result is None and not self.delay_s and self.kill is None:
            raise ValueError("a fault needs a result, delay_s or kill")

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Make a fault from text, as ``cuckpt simulate --fault`` takes it.

        Parameters
        ----------
        text : str
            ``CALL``, then what of ``=RESULT``, ``@AT``, ``,count=COUNT``,
            ``,delay=SECONDS``, ``,when=after`` and ``,kill=target`` there is to
            say. A result is a number or a name without ``ERROR_``.

        Returns
        -------
        Fault

        Raises
        ------
        ValueError
            If it is no such text.

        Examples
        --------
        >>> Fault.parse("restore=OUT_OF_MEMORY@2").at
        2
        >>> Fault.parse("checkpoint,delay=0.5,kill=target").kill
        'target'
        """
        head, *options = text.split(",")
        match = re.fullmatch(r"(\w+)(?:=(\w+))?(?:@(\d+))?", head)
        read = {"count": int, "delay": float, "when": str, "kill": str}
        found: dict[str, Any] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in read or name in found or not value:
                match = None
                break
            found[name] = _read(read[name], value)
        if not match:
            raise ValueError(
                f"{text!r} is no fault: expected as restore=OUT_OF_MEMORY@2 or "
                "checkpoint@1,count=3,delay=0.5,when=after,kill=target"
            )
        found["delay_s"] = found.pop("delay", 0.0)
        if match[2]:
            found["result"] = _result(match[2])
        return cls(match[1], at=int(match[3] or 1), **found)

    def fields(self) -> list[int]:
        """Return the fields of its C struct."""
        hangs = self.delay_s == math.inf
        return [
            CALLS.index(self.call),
            _MOMENTS.index(self.when),
            self.at,
            self.count,
            -1 if self.result is None else self.result,
            _VICTIMS.index(self.kill),
            (1 << 64) - 1 if hangs else int(self.delay_s * 1e9),
        ]


def _read(kind: type, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _result(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        short = name.removeprefix("CUDA_").removeprefix("ERROR_")
        return int(Result[f"ERROR_{short}"])
    except KeyError:
        raise ValueError(
            f"there is no result {name}; there is OUT_OF_MEMORY, say"
        ) from None
