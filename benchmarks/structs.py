"""Struct objects: made, read, set, compared, viewed."""

from case import Case, statement

_CLASSES = [
    "Uuid",
    "CheckpointGpuPair",
    "CheckpointLockArgs",
    "CheckpointCheckpointArgs",
    "CheckpointRestoreArgs",
    "CheckpointUnlockArgs",
]
_LOCK = "DRIVER.CheckpointLockArgs"

# What is done; the code for cuckpt and v2, where it differs that for v2; setup.
_OPERATIONS = [
    (
        "lock args with a timeout",
        "A(timeout_ms=5)",
        "a = A(); a.timeout_ms = 5",
        f"A = {_LOCK}",
    ),
    (
        "a pair of two UUIDs",
        "P(old, new)",
        "p = P(); p.old_uuid.bytes = old; p.new_uuid.bytes = new",
        "P = DRIVER.CheckpointGpuPair; old = bytes(16); new = bytes(16)",
    ),
    (
        "restore args with a pair",
        "A(gpu_pairs=[p])",
        "a = A(); a.gpu_pairs = p.ptr; a.gpu_pairs_count = 1",
        "A = DRIVER.CheckpointRestoreArgs; p = DRIVER.CheckpointGpuPair()",
    ),
    ("args.timeout_ms", "a.timeout_ms", None, f"a = {_LOCK}()"),
    ("args.timeout_ms = 5", "a.timeout_ms = 5", None, f"a = {_LOCK}()"),
    ("uuid.bytes", "u.bytes", None, "u = DRIVER.Uuid()"),
    ("uuid.bytes = b", "u.bytes = b", None, "u = DRIVER.Uuid(); b = bytes(16)"),
    ("pair.old_uuid", "p.old_uuid", None, "p = DRIVER.CheckpointGpuPair()"),
    ("args.ptr", "a.ptr", None, f"a = {_LOCK}()"),
    ("int(args)", "int(a)", None, f"a = {_LOCK}()"),
    ("bytes(args)", "bytes(a)", None, f"a = {_LOCK}()"),
    ("args == args2", "a == b", None, f"a = {_LOCK}(); b = {_LOCK}()"),
    (
        "from_ptr, a copy",
        "f(p)",
        None,
        f"f = {_LOCK}.from_ptr; a = {_LOCK}(); p = a.ptr",
    ),
    (
        "from_ptr, a view",
        "f(p, owner=a)",
        None,
        f"f = {_LOCK}.from_ptr; a = {_LOCK}(); p = a.ptr",
    ),
    (
        "from_buffer",
        "f(b)",
        None,
        f"f = {_LOCK}.from_buffer; b = bytearray(64)",
    ),
    (
        "from_data",
        "f(d)",
        None,
        f"""import numpy; f = {_LOCK}.from_data
d = numpy.zeros(1, DRIVER.checkpoint_lock_args_dtype)""",
    ),
]


def cases(context):
    """Yield a case for each class, and for each thing done to objects."""
    for name in _CLASSES:
        limits = {"v2": 0.78} if name.endswith("Args") else {}
        rivals = {
            rival: statement("A()", f"A = DRIVER.{name}", **getattr(context, rival))
            for rival in ("cuckpt", "v2", "C")
        }
        v1_name = "CUuuid" if name == "Uuid" else f"CUc{name[1:]}"
        rivals["v1"] = statement("A()", f"A = DRIVER.{v1_name}", **context.v1)
        chart = name == "CheckpointLockArgs"
        yield Case("Structs", f"{name}()", rivals, limits, chart=chart)
    for name, code, v2_code, setup in _OPERATIONS:
        rivals = {
            "cuckpt": statement(code, setup, **context.cuckpt),
            "v2": statement(v2_code or code, setup, **context.v2),
        }
        chart = name == "a pair of two UUIDs"
        yield Case("Structs", name, rivals, chart=chart)
