"""For other Cython code: the C functions, named as in cuda.bindings.cydriver.

    from cuckpt.driver cimport cuCheckpointProcessRestore

The types are in `cuckpt._driver`, the struct classes in `cuckpt.structs`.
"""

from cuckpt._driver cimport (
    cuCheckpointOperationComplete,
    cuCheckpointProcessCheckpoint,
    cuCheckpointProcessGetRestoreThreadId,
    cuCheckpointProcessGetState,
    cuCheckpointProcessLock,
    cuCheckpointProcessRestore,
    cuCheckpointProcessUnlock,
    cuDeviceGet,
    cuDeviceGetCount,
    cuDeviceGetUuid,
    cuDevicePrimaryCtxRelease,
    cuDevicePrimaryCtxRetain,
    cuDriverGetVersion,
    cuInit,
)
