"""Checkpoint, suspend, move and restore the GPU state of running processes.

``Process`` and ``ProcessGroup`` suspend and resume, save to images and load from them;
``doctor`` tells what will stand in the way, and ``cuckpt.storage`` what is in an image.
``cuckpt.simulator`` is a machine without a GPU to try all of it.

Below them, ``cuckpt.driver`` mirrors the checkpoint part of
``cuda.bindings._v2.driver``; ``cuckpt.structs`` are its structs, ``cuckpt.errors`` its
exceptions, ``cuckpt.uuids`` the forms of a GPU's UUID. Importing any of them loads
neither a driver nor a third-party package.
"""

import importlib

# Not from typing, which takes long to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cuckpt import (
        driver as driver,
        errors as errors,
        storage as storage,
        structs as structs,
        uuids as uuids,
    )
    from cuckpt.diagnosis import doctor as doctor
    from cuckpt.group import ProcessGroup as ProcessGroup
    from cuckpt.process import Process as Process

    __version__: str

_MODULES = ("driver", "errors", "storage", "structs", "uuids")
_NAMES = {
    "Process": "process",
    "ProcessGroup": "group",
    "doctor": "diagnosis",
}

__all__ = [*_MODULES, *_NAMES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _MODULES or name in _NAMES:
        try:
            module = importlib.import_module(f"cuckpt.{_NAMES.get(name, name)}")
        except ModuleNotFoundError as error:
            error.add_note(
                f"cuckpt is imported from {__path__[0]}. If that is its source, it is "
                "not built there: run from another folder, or with python -P."
            )
            raise
        return getattr(module, name) if name in _NAMES else module
    if name == "__version__":
        from importlib.metadata import version

        return version("cuckpt")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
