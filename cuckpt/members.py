"""Who of many processes belongs to a group: those with CUDA state."""

import os
import threading
from collections.abc import Mapping

from cuckpt import driver, proc

_PATIENCE_S = 2.0  # with one process, while many are asked for their state


def reasons_to_skip(
    pids: Mapping[int, str | None], skip_refused: bool
) -> dict[int, str | None]:
    """Tell of each process None, or the reason to leave it out.

    They are asked one after the other in a thread. Who does not answer is being
    checkpointed, so has CUDA state, and the thread is left to wait for that.

    Parameters
    ----------
    pids : mapping of int to str or None
        The kernel's letter for the state of each, if that is known.
    skip_refused : bool
        Whether those are left out as well that may have CUDA state, but not be asked.

    Returns
    -------
    dict of int to str or None
    """
    reasons: dict[int, str | None] = {}
    patience_s = _PATIENCE_S
    while waiting := {pid: pids[pid] for pid in pids if pid not in reasons}:
        answers: dict[int, str | None] = {}
        problems: list[BaseException] = []
        thread = threading.Thread(
            target=_ask_all,
            args=(waiting, skip_refused, answers, problems),
            daemon=True,
        )
        thread.start()
        seen = -1
        while thread.is_alive() and len(answers) > seen:  # as long as it gets on
            seen = len(answers)
            thread.join(patience_s)
        if problems:
            raise problems[0]
        reasons.update(answers.copy())
        for pid in waiting:
            if pid not in reasons:
                reasons[pid] = None
                patience_s = _PATIENCE_S / 10  # there may be many such
                break
    return reasons


def _ask_all(
    pids: Mapping[int, str | None],
    skip_refused: bool,
    answers: dict[int, str | None],
    problems: list[BaseException],
) -> None:
    try:
        for pid, letter in pids.items():
            answers[pid] = _reason_to_skip(pid, letter, skip_refused)
    except BaseException as error:  # as without a driver
        problems.append(error)


def _reason_to_skip(pid: int, letter: str | None, skip_refused: bool) -> str | None:
    if pid == os.getpid():
        return "this process itself"
    if letter is None:
        found = proc.glance(pid)
        letter = found.state if found else None
    if letter == "Z":
        return "has ended: it is a zombie"
    if letter in ("T", "t") and proc.is_stopped(pid):
        # One that may have CUDA state is not left out: the others may need it.
        loaded = proc.has_loaded(pid, "libcuda.so")
        return None if loaded else "stopped: it cannot be asked"
    try:
        driver.checkpoint_process_get_state(pid)
    except driver.NotInitializedError:
        return "no CUDA state"
    except driver.OperatingSystemError as error:
        # Only what shows that it has no CUDA keeps it out: to leave one running by
        # mistake is worse than to fail.
        may_have_cuda = proc.has_loaded(pid, "libcuda.so") is not False
        lives = proc.glance(pid) is not None
        return None if lives and may_have_cuda and not skip_refused else str(error)
    except driver.DriverError:
        return None  # one that has CUDA state; what fails will show
    return None
