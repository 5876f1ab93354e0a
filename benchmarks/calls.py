"""Calls of the driver from Python: what each function adds to the C function."""

from case import Case, statement

# The function, its arguments, and how v1 and ctypes make the same call; these are
# given in the terms of the scope below.
_FUNCTIONS = [
    ("init", "0", "cuInit(0)", "cuInit(0)"),
    (
        "driver_get_version",
        "",
        "cuDriverGetVersion()",
        "cuDriverGetVersion(at_number); number.value",
    ),
    (
        "device_get_count",
        "",
        "cuDeviceGetCount()",
        "cuDeviceGetCount(at_number); number.value",
    ),
    ("device_get", "0", "cuDeviceGet(0)", "cuDeviceGet(at_number, 0); number.value"),
    (
        "device_get_uuid_v2",
        "0",
        "cuDeviceGetUuid(device)",
        "cuDeviceGetUuid_v2(uuid, 0); uuid.raw",
    ),
    (
        "device_primary_ctx_retain",
        "0",
        "cuDevicePrimaryCtxRetain(device)",
        "cuDevicePrimaryCtxRetain(at_address, 0); address.value",
    ),
    (
        "device_primary_ctx_release_v2",
        "0",
        "cuDevicePrimaryCtxRelease(device)",
        "cuDevicePrimaryCtxRelease_v2(0)",
    ),
    (
        "checkpoint_process_get_state",
        "1",
        "cuCheckpointProcessGetState(1)",
        "cuCheckpointProcessGetState(1, at_number); number.value",
    ),
    (
        "checkpoint_process_get_restore_thread_id",
        "1",
        "cuCheckpointProcessGetRestoreThreadId(1)",
        "cuCheckpointProcessGetRestoreThreadId(1, at_number); number.value",
    ),
    (
        "checkpoint_operation_complete",
        "1",
        None,
        "cuCheckpointOperationComplete(one)",
    ),
]
_LIMITS = {"C": 1.10}
_CHART = ["get_state(1)", "lock(1, None)", "restore(1, args)"]


def cases(context):
    """Yield a case for each function; two for those that take args."""
    for name, arguments, v1_call, ctypes_call in _FUNCTIONS:
        yield _case(context, name, arguments, v1_call, ctypes_call)
    for verb in ("lock", "checkpoint", "restore", "unlock"):
        function = f"checkpoint_process_{verb}"
        v1_function = f"cuCheckpointProcess{verb.capitalize()}"
        struct = f"Checkpoint{verb.capitalize()}Args"
        for arguments in ("1, None", "1, args"):
            yield _case(
                context,
                function,
                arguments,
                f"{v1_function}({arguments})",
                f"{v1_function}({arguments})",
                setup=f"args = DRIVER.{struct}()",
                v1_setup=f"args = DRIVER.CUc{struct[1:]}()",
                ctypes_setup="args = create_string_buffer(64)",
            )
    for name in ("library_path", "has_checkpoint", "has_custom_storage"):
        rivals = {"cuckpt": statement("f()", f"f = DRIVER.{name}", **context.cuckpt)}
        yield Case("Calls", f"{name}()", rivals)


def _case(
    context,
    name,
    arguments,
    v1_call,
    ctypes_call,
    setup="pass",
    v1_setup="pass",
    ctypes_setup="pass",
):
    def function(call):
        called, _, rest = call.partition("(")
        return f"f = DRIVER.{called}", f"f({rest}"

    rivals = {}
    for rival in ("cuckpt", "v2", "C"):
        bind, code = function(f"{name}({arguments})")
        rivals[rival] = statement(code, f"{bind}; {setup}", **getattr(context, rival))
    if v1_call:
        bind, code = function(v1_call)
        rivals["v1"] = statement(code, f"{bind}; {v1_setup}", **context.v1)
    bind, code = function(ctypes_call)
    rivals["ctypes"] = statement(code, f"{bind}; {ctypes_setup}", **context.ctypes)
    short = name.removeprefix("checkpoint_").removeprefix("process_")
    shown = f"{short}({arguments})"
    return Case("Calls", shown, rivals, _LIMITS, chart=shown in _CHART)
