"""Threads: calls that wait for the driver, and calls that do not, by many at once."""

import sysconfig
import threading
import time

from case import Case, statement

_WAIT_MS = 20
_CALLS = {
    "cuckpt": "checkpoint_process_get_state",
    "v2": "checkpoint_process_get_state",
    "v1": "cuCheckpointProcessGetState",
    "C": "checkpoint_process_get_state",
}


def cases(context):
    """Yield waiting calls, whose time is shared, and calls that do nothing."""
    gil = "" if not sysconfig.get_config_var("Py_GIL_DISABLED") else ", no GIL"
    for threads in (1, 8):
        rivals = {
            rival: _waiting(context, threads, _loop(context, rival, _WAIT_MS))
            for rival in _CALLS
        }
        name = f"{_WAIT_MS} ms calls, {threads} threads{gil}"
        yield Case("Threads", name, rivals, loops=1, rounds=3)
    for threads in (1, 2, 4):
        rivals = {
            rival: _together(threads, _loop(context, rival, 1)) for rival in _CALLS
        }
        name = f"short calls, {threads} threads{gil}"
        # Longer than a thread may keep the GIL: else they would take turns.
        yield Case("Threads", name, rivals, rounds=5, round_s=0.05)


def _loop(context, rival, argument):
    code, setup = f"f({argument})", f"f = DRIVER.{_CALLS[rival]}"
    return statement(code, setup, **getattr(context, rival))


def _waiting(context, threads, loop):
    together = _together(threads, loop)

    def run(loops):
        with context.hook("null_driver_sleeps"):
            return together(loops * threads)

    return run


def _together(threads, loop):
    """Divide the loops among threads; the time is that of all of them."""

    def run(loops):
        share = -(-loops // threads)
        barrier = threading.Barrier(threads + 1)

        def work():
            barrier.wait()
            loop(share)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        barrier.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        return (time.perf_counter() - start) * loops / (share * threads)

    return run
