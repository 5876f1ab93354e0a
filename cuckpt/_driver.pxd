"""The checkpoint part of the CUDA driver API: every C name, once.

The structs are declared here, not taken from an installed ``cuda.h``: they
changed meaning between toolkits without changing size, and a package that
cimports cuckpt needs neither header nor include path. The C tags are private
(``cuckpt_*``), so that a module may include ``cuda.h`` as well.
"""

from libc.stdint cimport uint64_t

ctypedef int CUdevice
ctypedef uint64_t CUdeviceptr
ctypedef void *CUcontext
ctypedef void *CUstream
ctypedef void *CUcheckpointOperationHandle


cdef extern from *:
    """
    #ifndef CUCKPT_DRIVER_ABI
    #define CUCKPT_DRIVER_ABI
    #include <stddef.h>
    #include <stdint.h>

    #ifdef __cplusplus
    #define CUCKPT_STATIC_ASSERT(what) static_assert(what, #what)
    #else
    #define CUCKPT_STATIC_ASSERT(what) _Static_assert(what, #what)
    #endif
    #define CUCKPT_SIZE(type, size) CUCKPT_STATIC_ASSERT(sizeof(type) == (size))
    #define CUCKPT_OFFSET(type, field, offset) \\
        CUCKPT_STATIC_ASSERT(offsetof(type, field) == (offset))

    typedef struct { char bytes[16]; } cuckpt_CUuuid;
    CUCKPT_SIZE(cuckpt_CUuuid, 16);

    typedef struct {
        cuckpt_CUuuid oldUuid;
        cuckpt_CUuuid newUuid;
    } cuckpt_CUcheckpointGpuPair;
    CUCKPT_SIZE(cuckpt_CUcheckpointGpuPair, 32);
    CUCKPT_OFFSET(cuckpt_CUcheckpointGpuPair, newUuid, 16);

    typedef struct {
        uint64_t devPtr;
        size_t size;
        void *stream;
    } cuckpt_CUcheckpointCustomStoragePerDeviceData;
    CUCKPT_SIZE(cuckpt_CUcheckpointCustomStoragePerDeviceData, 24);
    CUCKPT_OFFSET(cuckpt_CUcheckpointCustomStoragePerDeviceData, size, 8);
    CUCKPT_OFFSET(cuckpt_CUcheckpointCustomStoragePerDeviceData, stream, 16);

    typedef struct {
        void *handle;
        cuckpt_CUcheckpointCustomStoragePerDeviceData *perDeviceData;
        unsigned int deviceCount;
    } cuckpt_CUcheckpointCustomStorageInfo;
    CUCKPT_SIZE(cuckpt_CUcheckpointCustomStorageInfo, 24);
    CUCKPT_OFFSET(cuckpt_CUcheckpointCustomStorageInfo, perDeviceData, 8);
    CUCKPT_OFFSET(cuckpt_CUcheckpointCustomStorageInfo, deviceCount, 16);

    typedef struct {
        unsigned int timeoutMs;
        unsigned int reserved0;
        uint64_t reserved1[7];
    } cuckpt_CUcheckpointLockArgs;
    CUCKPT_SIZE(cuckpt_CUcheckpointLockArgs, 64);
    CUCKPT_OFFSET(cuckpt_CUcheckpointLockArgs, reserved1, 8);

    typedef struct {
        cuckpt_CUcheckpointCustomStorageInfo **customStorageInfo_out;
        char reserved[56];
    } cuckpt_CUcheckpointCheckpointArgs;
    CUCKPT_SIZE(cuckpt_CUcheckpointCheckpointArgs, 64);
    CUCKPT_OFFSET(cuckpt_CUcheckpointCheckpointArgs, reserved, 8);

    typedef struct {
        cuckpt_CUcheckpointGpuPair *gpuPairs;
        unsigned int gpuPairsCount;
        unsigned int padding0;
        cuckpt_CUcheckpointCustomStorageInfo **customStorageInfo_out;
        char reserved[40];
    } cuckpt_CUcheckpointRestoreArgs;
    CUCKPT_SIZE(cuckpt_CUcheckpointRestoreArgs, 64);
    CUCKPT_OFFSET(cuckpt_CUcheckpointRestoreArgs, gpuPairsCount, 8);
    CUCKPT_OFFSET(cuckpt_CUcheckpointRestoreArgs, customStorageInfo_out, 16);
    CUCKPT_OFFSET(cuckpt_CUcheckpointRestoreArgs, reserved, 24);

    typedef struct { uint64_t reserved[8]; } cuckpt_CUcheckpointUnlockArgs;
    CUCKPT_SIZE(cuckpt_CUcheckpointUnlockArgs, 64);
    #endif
    """

    ctypedef struct CUuuid "cuckpt_CUuuid":
        char bytes[16]

    ctypedef struct CUcheckpointGpuPair "cuckpt_CUcheckpointGpuPair":
        CUuuid oldUuid
        CUuuid newUuid

    ctypedef struct CUcheckpointCustomStoragePerDeviceData \
            "cuckpt_CUcheckpointCustomStoragePerDeviceData":
        CUdeviceptr devPtr
        size_t size
        CUstream stream

    ctypedef struct CUcheckpointCustomStorageInfo \
            "cuckpt_CUcheckpointCustomStorageInfo":
        CUcheckpointOperationHandle handle
        CUcheckpointCustomStoragePerDeviceData *perDeviceData
        unsigned int deviceCount

    ctypedef struct CUcheckpointLockArgs "cuckpt_CUcheckpointLockArgs":
        unsigned int timeoutMs
        unsigned int reserved0
        uint64_t reserved1[7]

    ctypedef struct CUcheckpointCheckpointArgs \
            "cuckpt_CUcheckpointCheckpointArgs":
        CUcheckpointCustomStorageInfo **customStorageInfo_out
        char reserved[56]

    ctypedef struct CUcheckpointRestoreArgs "cuckpt_CUcheckpointRestoreArgs":
        CUcheckpointGpuPair *gpuPairs
        unsigned int gpuPairsCount
        unsigned int padding0
        CUcheckpointCustomStorageInfo **customStorageInfo_out
        char reserved[40]

    ctypedef struct CUcheckpointUnlockArgs "cuckpt_CUcheckpointUnlockArgs":
        uint64_t reserved[8]


ctypedef enum CUprocessState:
    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2
    CU_PROCESS_STATE_FAILED = 3
    CU_PROCESS_STATE_CHECKPOINTING = 4
    CU_PROCESS_STATE_RESTORING = 5

ctypedef enum CUresult:
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_PROFILER_DISABLED = 5
    CUDA_ERROR_PROFILER_NOT_INITIALIZED = 6
    CUDA_ERROR_PROFILER_ALREADY_STARTED = 7
    CUDA_ERROR_PROFILER_ALREADY_STOPPED = 8
    CUDA_ERROR_STUB_LIBRARY = 34
    CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER = 36
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_MULTICAST_RESOURCE_FULL = 47
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_DEVICE_NOT_LICENSED = 102
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT = 202
    CUDA_ERROR_MAP_FAILED = 205
    CUDA_ERROR_UNMAP_FAILED = 206
    CUDA_ERROR_ARRAY_IS_MAPPED = 207
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_ALREADY_ACQUIRED = 210
    CUDA_ERROR_NOT_MAPPED = 211
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY = 212
    CUDA_ERROR_NOT_MAPPED_AS_POINTER = 213
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_UNSUPPORTED_LIMIT = 215
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE = 216
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_INVALID_PTX = 218
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT = 219
    CUDA_ERROR_NVLINK_UNCORRECTABLE = 220
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222
    CUDA_ERROR_JIT_COMPILATION_DISABLED = 223
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY = 224
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC = 225
    CUDA_ERROR_CONTAINED = 226
    CUDA_ERROR_INSUFFICIENT_LOADER_VERSION = 227
    CUDA_ERROR_INVALID_SOURCE = 300
    CUDA_ERROR_FILE_NOT_FOUND = 301
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_LOSSY_QUERY = 402
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_LAUNCH_TIMEOUT = 702
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING = 703
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_ASSERT = 710
    CUDA_ERROR_TOO_MANY_PEERS = 711
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715
    CUDA_ERROR_MISALIGNED_ADDRESS = 716
    CUDA_ERROR_INVALID_ADDRESS_SPACE = 717
    CUDA_ERROR_INVALID_PC = 718
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720
    CUDA_ERROR_TENSOR_MEMORY_LEAK = 721
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805
    CUDA_ERROR_MPS_RPC_FAILURE = 806
    CUDA_ERROR_MPS_SERVER_NOT_READY = 807
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED = 809
    CUDA_ERROR_MPS_CLIENT_TERMINATED = 810
    CUDA_ERROR_CDP_NOT_SUPPORTED = 811
    CUDA_ERROR_CDP_VERSION_MISMATCH = 812
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
    CUDA_ERROR_CAPTURED_EVENT = 907
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908
    CUDA_ERROR_TIMEOUT = 909
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910
    CUDA_ERROR_EXTERNAL_DEVICE = 911
    CUDA_ERROR_INVALID_CLUSTER_SIZE = 912
    CUDA_ERROR_FUNCTION_NOT_LOADED = 913
    CUDA_ERROR_INVALID_RESOURCE_TYPE = 914
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915
    CUDA_ERROR_KEY_ROTATION = 916
    CUDA_ERROR_STREAM_DETACHED = 917
    CUDA_ERROR_GRAPH_RECAPTURE_FAILURE = 918
    CUDA_ERROR_FABRIC_NOT_READY = 919
    CUDA_ERROR_UNKNOWN = 999


# Each function finds its symbol in libcuda on its first call. A missing library
# or symbol is a Python exception (DynamicLibNotFoundError,
# FunctionNotFoundError) together with the result CUDA_ERROR_NOT_FOUND; a driver
# that really answers CUDA_ERROR_NOT_FOUND sets no exception.
cdef:
    CUresult cuInit(unsigned int Flags) except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuDriverGetVersion(int *driverVersion) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuDeviceGetCount(int *count) except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuDeviceGet(CUdevice *device, int ordinal) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuDevicePrimaryCtxRelease(CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointProcessCheckpoint(
        int pid, CUcheckpointCheckpointArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointProcessRestore(
        int pid, CUcheckpointRestoreArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil
    CUresult cuCheckpointOperationComplete(
        CUcheckpointOperationHandle handle) \
        except ?CUDA_ERROR_NOT_FOUND nogil

cdef str path_of_library()
cdef bint has_function(const char *name, int version) except -1
