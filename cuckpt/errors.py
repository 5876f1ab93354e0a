"""Results, states and exceptions of the CUDA driver API.

Everything here comes from one table, ``_RESULTS``: the members of `Result` and
one exception class per error. The names are those of
``cuda.bindings._v2.driver``.
"""

import sys
from enum import IntEnum

_RESULTS = {
    "SUCCESS": 0,
    "ERROR_INVALID_VALUE": 1,
    "ERROR_OUT_OF_MEMORY": 2,
    "ERROR_NOT_INITIALIZED": 3,
    "ERROR_DEINITIALIZED": 4,
    "ERROR_PROFILER_DISABLED": 5,
    "ERROR_PROFILER_NOT_INITIALIZED": 6,
    "ERROR_PROFILER_ALREADY_STARTED": 7,
    "ERROR_PROFILER_ALREADY_STOPPED": 8,
    "ERROR_STUB_LIBRARY": 34,
    "ERROR_CALL_REQUIRES_NEWER_DRIVER": 36,
    "ERROR_DEVICE_UNAVAILABLE": 46,
    "ERROR_MULTICAST_RESOURCE_FULL": 47,
    "ERROR_NO_DEVICE": 100,
    "ERROR_INVALID_DEVICE": 101,
    "ERROR_DEVICE_NOT_LICENSED": 102,
    "ERROR_INVALID_IMAGE": 200,
    "ERROR_INVALID_CONTEXT": 201,
    "ERROR_CONTEXT_ALREADY_CURRENT": 202,
    "ERROR_MAP_FAILED": 205,
    "ERROR_UNMAP_FAILED": 206,
    "ERROR_ARRAY_IS_MAPPED": 207,
    "ERROR_ALREADY_MAPPED": 208,
    "ERROR_NO_BINARY_FOR_GPU": 209,
    "ERROR_ALREADY_ACQUIRED": 210,
    "ERROR_NOT_MAPPED": 211,
    "ERROR_NOT_MAPPED_AS_ARRAY": 212,
    "ERROR_NOT_MAPPED_AS_POINTER": 213,
    "ERROR_ECC_UNCORRECTABLE": 214,
    "ERROR_UNSUPPORTED_LIMIT": 215,
    "ERROR_CONTEXT_ALREADY_IN_USE": 216,
    "ERROR_PEER_ACCESS_UNSUPPORTED": 217,
    "ERROR_INVALID_PTX": 218,
    "ERROR_INVALID_GRAPHICS_CONTEXT": 219,
    "ERROR_NVLINK_UNCORRECTABLE": 220,
    "ERROR_JIT_COMPILER_NOT_FOUND": 221,
    "ERROR_UNSUPPORTED_PTX_VERSION": 222,
    "ERROR_JIT_COMPILATION_DISABLED": 223,
    "ERROR_UNSUPPORTED_EXEC_AFFINITY": 224,
    "ERROR_UNSUPPORTED_DEVSIDE_SYNC": 225,
    "ERROR_CONTAINED": 226,
    "ERROR_INSUFFICIENT_LOADER_VERSION": 227,
    "ERROR_INVALID_SOURCE": 300,
    "ERROR_FILE_NOT_FOUND": 301,
    "ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND": 302,
    "ERROR_SHARED_OBJECT_INIT_FAILED": 303,
    "ERROR_OPERATING_SYSTEM": 304,
    "ERROR_INVALID_HANDLE": 400,
    "ERROR_ILLEGAL_STATE": 401,
    "ERROR_LOSSY_QUERY": 402,
    "ERROR_NOT_FOUND": 500,
    "ERROR_NOT_READY": 600,
    "ERROR_ILLEGAL_ADDRESS": 700,
    "ERROR_LAUNCH_OUT_OF_RESOURCES": 701,
    "ERROR_LAUNCH_TIMEOUT": 702,
    "ERROR_LAUNCH_INCOMPATIBLE_TEXTURING": 703,
    "ERROR_PEER_ACCESS_ALREADY_ENABLED": 704,
    "ERROR_PEER_ACCESS_NOT_ENABLED": 705,
    "ERROR_PRIMARY_CONTEXT_ACTIVE": 708,
    "ERROR_CONTEXT_IS_DESTROYED": 709,
    "ERROR_ASSERT": 710,
    "ERROR_TOO_MANY_PEERS": 711,
    "ERROR_HOST_MEMORY_ALREADY_REGISTERED": 712,
    "ERROR_HOST_MEMORY_NOT_REGISTERED": 713,
    "ERROR_HARDWARE_STACK_ERROR": 714,
    "ERROR_ILLEGAL_INSTRUCTION": 715,
    "ERROR_MISALIGNED_ADDRESS": 716,
    "ERROR_INVALID_ADDRESS_SPACE": 717,
    "ERROR_INVALID_PC": 718,
    "ERROR_LAUNCH_FAILED": 719,
    "ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": 720,
    "ERROR_TENSOR_MEMORY_LEAK": 721,
    "ERROR_NOT_PERMITTED": 800,
    "ERROR_NOT_SUPPORTED": 801,
    "ERROR_SYSTEM_NOT_READY": 802,
    "ERROR_SYSTEM_DRIVER_MISMATCH": 803,
    "ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": 804,
    "ERROR_MPS_CONNECTION_FAILED": 805,
    "ERROR_MPS_RPC_FAILURE": 806,
    "ERROR_MPS_SERVER_NOT_READY": 807,
    "ERROR_MPS_MAX_CLIENTS_REACHED": 808,
    "ERROR_MPS_MAX_CONNECTIONS_REACHED": 809,
    "ERROR_MPS_CLIENT_TERMINATED": 810,
    "ERROR_CDP_NOT_SUPPORTED": 811,
    "ERROR_CDP_VERSION_MISMATCH": 812,
    "ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "ERROR_STREAM_CAPTURE_INVALIDATED": 901,
    "ERROR_STREAM_CAPTURE_MERGE": 902,
    "ERROR_STREAM_CAPTURE_UNMATCHED": 903,
    "ERROR_STREAM_CAPTURE_UNJOINED": 904,
    "ERROR_STREAM_CAPTURE_ISOLATION": 905,
    "ERROR_STREAM_CAPTURE_IMPLICIT": 906,
    "ERROR_CAPTURED_EVENT": 907,
    "ERROR_STREAM_CAPTURE_WRONG_THREAD": 908,
    "ERROR_TIMEOUT": 909,
    "ERROR_GRAPH_EXEC_UPDATE_FAILURE": 910,
    "ERROR_EXTERNAL_DEVICE": 911,
    "ERROR_INVALID_CLUSTER_SIZE": 912,
    "ERROR_FUNCTION_NOT_LOADED": 913,
    "ERROR_INVALID_RESOURCE_TYPE": 914,
    "ERROR_INVALID_RESOURCE_CONFIGURATION": 915,
    "ERROR_KEY_ROTATION": 916,
    "ERROR_STREAM_DETACHED": 917,
    "ERROR_GRAPH_RECAPTURE_FAILURE": 918,
    "ERROR_FABRIC_NOT_READY": 919,
    "ERROR_UNKNOWN": 999,
}

# Class names that do not follow from the result's name.
_IRREGULAR = {
    "ERROR_FILE_NOT_FOUND": "DriverFileNotFoundError",
    "ERROR_TIMEOUT": "DriverTimeoutError",
    "ERROR_HARDWARE_STACK_ERROR": "HardwareStackError",
}

Result = IntEnum("Result", _RESULTS)
Result.__doc__ = "What a driver call returns (``CUresult``)."


class ProcessState(IntEnum):
    """State of a CUDA process (``CUprocessState``)."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5

    __str__ = IntEnum.__repr__  # print(state) tells more than a number


class DriverError(Exception):
    """A driver call returned an error.

    Each error code has a subclass of its own; an unknown code is raised as
    `DriverError` itself. The text begins with the code's name and number, and
    goes on with the call, the process and the likely cause, which are looked
    up when the text is first asked for.

    Parameters
    ----------
    status : int
        The ``CUresult``.
    call : str, optional
        Name of the C function.
    pid : int, optional
        The process that the call was about.

    Attributes
    ----------
    status, call, pid
        As given.
    """

    _peer_module = "cuda.bindings._v2.driver"
    _text = None

    def __init__(self, status, call=None, pid=None):
        # Not super(): beside the peer's class (see catchable), that is next.
        Exception.__init__(self, _TEXTS.get(status) or _text(status))
        self.status = status
        self.call = call
        self.pid = pid

    def __str__(self):
        if self._text is None:
            from cuckpt.hints import explain

            self._text = explain(self.args[0], self.status, self.call, self.pid)
        return self._text

    def __reduce__(self):
        str(self)  # the likely cause can only be looked up here and now
        state = self.__dict__.copy()
        return _plain(self), (self.status, self.call, self.pid), state


class FunctionNotFoundError(RuntimeError):
    """The loaded driver does not have the function."""

    _peer_module = "cuda.bindings._internal.utils"

    def __reduce__(self):
        return _plain(self), self.args, self.__dict__ or None


class DynamicLibNotFoundError(RuntimeError):
    """The CUDA driver library cannot be loaded."""

    _peer_module = "cuda.pathfinder"

    def __reduce__(self):
        return _plain(self), self.args, self.__dict__ or None


def driver_error(status, call=None, pid=None):
    """Make the exception for an error code.

    Parameters
    ----------
    status : int
        The ``CUresult``; not 0.
    call : str, optional
        Name of the C function.
    pid : int, optional
        The process that the call was about.

    Returns
    -------
    DriverError
        Of the code's own subclass; also an instance of the class of the same
        name in ``cuda.bindings._v2.driver`` when that module is loaded.
    """
    name, peer, cls = _RAISED.get(status) or ("", _NOT_YET, DriverError)
    if getattr(sys.modules.get(DriverError._peer_module), name, None) is not peer:
        cls = _find_raised(status)
    # What __init__ does, without the time that a call of it takes.
    error = cls.__new__(cls, _TEXTS.get(status) or _text(status))
    error.status = status
    error.call = call
    error.pid = pid
    return error


def _find_raised(status):
    cls = _CLASSES.get(status)
    if cls is None:
        return catchable(DriverError)
    raised = catchable(cls)
    peer = raised.__bases__[1] if raised is not cls else None
    _RAISED[status] = cls.__name__, peer, raised
    return raised


def catchable(cls):
    """Return the class to raise so that a peer's ``except`` catches it too.

    Parameters
    ----------
    cls : type
        An exception class of this module.

    Returns
    -------
    type
        `cls`, or a subclass of `cls` and of the peer's class of the same name
        when the peer's module is loaded.
    """
    peer = getattr(sys.modules.get(cls._peer_module), cls.__name__, None)
    if peer is None:
        return cls
    both = _COMBINED.get((cls, peer))
    if both is None:
        names = {"__module__": cls.__module__, "_stands_for": cls}
        both = type(cls.__name__, (cls, peer), names)
        both = _COMBINED.setdefault((cls, peer), both)  # another thread's, if first
    return both


def _plain(error):
    """Return the class to name in a pickle, which a peer may not be around for."""
    cls = type(error)
    return vars(cls).get("_stands_for", cls)


def _text(status):
    return f"Unknown error ({status})"


def _class_name(result_name):
    words = result_name.removeprefix("ERROR_").split("_")
    camel = "".join(word.capitalize() for word in words) + "Error"
    return _IRREGULAR.get(result_name, camel)


_TEXTS = {code: f"{name} ({code})" for name, code in _RESULTS.items()}
_COMBINED = {}  # the class to raise, by the two classes that it stands for
_RAISED = {}  # the last one of each result, with the name and class of the peer
_NOT_YET = object()
_CLASSES = {
    code: type(
        _class_name(name),
        (DriverError,),
        {"__module__": __name__, "__doc__": f"``CUDA_{name}`` ({code})."},
    )
    for name, code in _RESULTS.items()
    if code != 0
}
_ERRORS = {cls.__name__: cls for cls in _CLASSES.values()}
globals().update(_ERRORS)

__all__ = [
    "DriverError",
    "DynamicLibNotFoundError",
    "FunctionNotFoundError",
    "ProcessState",
    "Result",
    *_ERRORS,
]
