"""What a benchmark is, and how its rivals are measured: in turn, in one process."""

import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """Several ways to do one thing, to be compared.

    Parameters
    ----------
    group : str
        The table that it stands in.
    name : str
        What is done, as few words or code.
    rivals : mapping
        By name, a function that does it a number of times and returns what that
        took in all, in `unit`. ``cuckpt`` is one of the names.
    limits : mapping
        By the name of a rival, the most that cuckpt may take, as a ratio.
    unit : str
        ``second`` or ``byte``.
    loops : int, optional
        How many times a round does it; found out if left out.
    rounds : int, optional
        How many rounds there are, whatever the run asks for.
    round_s : float, optional
        How long a round takes at least, in seconds, whatever the run asks for.
    chart : bool
        Whether the chart shows it.
    """

    group: str
    name: str
    rivals: Mapping[str, Callable[[int], float]]
    limits: Mapping[str, float] = field(default_factory=dict)
    unit: str = "second"
    loops: int | None = None
    rounds: int | None = None
    round_s: float | None = None
    chart: bool = False


def statement(code, setup="pass", **scope):
    """Return a rival that executes code, as timeit does."""
    return timeit.Timer(code, setup, globals=scope).timeit


def measure(case, rounds, round_s):
    """Measure the rivals of a case in turn.

    Parameters
    ----------
    case : Case
    rounds : int
        How many values each rival gets, if the case does not say.
    round_s : float
        About how long a rival goes on in each round, in seconds.

    Returns
    -------
    loops : dict
        How many times a round did it, for each rival.
    values : dict
        A list for each rival; what stands at one index was measured at one time.
    """
    rivals = list(case.rivals.items())
    round_s = case.round_s or round_s
    loops = {name: case.loops or _loops(rival, round_s) for name, rival in rivals}
    values = {name: [] for name, _ in rivals}
    for turn in range(case.rounds or rounds):
        start = turn % len(rivals)  # so that none is always the first
        for name, rival in rivals[start:] + rivals[:start]:
            values[name].append(rival(loops[name]) / loops[name])
    return loops, values


def _loops(rival, round_s):
    loops = 1
    while (taken := rival(loops)) < round_s:
        loops = max(2 * loops, int(loops * round_s / max(taken, 1e-9)))
    return loops
