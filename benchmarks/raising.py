"""The error path: a call that the driver answers with an error."""

from case import Case, statement

_CALL = "f = DRIVER.checkpoint_process_get_state; E = DRIVER.OperatingSystemError"


def cases(context):
    """Yield raise and catch, and what the text of an error costs when asked for."""
    for name, handle, limits in (
        ("raise and catch", "pass", {"v2": 0.85}),
        ("raise, catch and str()", "str(e)", {}),
    ):
        code = f"try: f(1)\nexcept E as e: {handle}"
        rivals = {
            rival: _failing(context, statement(code, _CALL, **getattr(context, rival)))
            for rival in ("cuckpt", "v2")
        }
        yield Case("Errors", name, rivals, limits, chart=bool(limits))


def _failing(context, rival):
    def run(loops):
        with context.hook("null_driver_fails"):
            return rival(loops)

    return run
