"""Calls from Cython, in a loop without the GIL."""

import os

from case import Case


def cases(context):
    """Yield two functions, each cimported from cuckpt, from cydriver, by pointer."""
    module = context.cython_calls
    path = os.fsencode(context.library)
    for name, function in (("restore", "Restore"), ("get_state", "GetState")):
        rivals = {
            "cuckpt": getattr(module, f"cuckpt_{name}"),
            "cydriver": getattr(module, f"cydriver_{name}"),
            "pointer": _by_pointer(getattr(module, f"pointer_{name}"), path),
        }
        yield Case(
            "From Cython",
            f"cuCheckpointProcess{function}",
            rivals,
            {"cydriver": 0.80},
            chart=name == "restore",
        )


def _by_pointer(function, path):
    return lambda loops: function(loops, path)
