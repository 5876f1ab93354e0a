/* Names: of results, and of functions with the version they appeared in. */
#define _GNU_SOURCE
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static const struct {
    CUresult result;
    const char *name, *text;
} results[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED",
     "context is destroyed"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not initiated in this stream"},
    {STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};

static const char *look_up(CUresult result, bool name)
{
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == result)
            return name ? results[i].name : results[i].text;
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult result, const char **name)
{
    if (!name)
        return INVALID_VALUE;
    *name = look_up(result, true);
    return *name ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult result, const char **text)
{
    if (!text)
        return INVALID_VALUE;
    *text = look_up(result, false);
    return *text ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function,
                                    int version, uint64_t flags, int *status);

/* Name, version it appeared in, symbol. */
#define FUNCTIONS(F) \
    F(cuInit, 2000, cuInit) \
    F(cuGetExportTable, 3000, cuGetExportTable) \
    F(cuDriverGetVersion, 2020, cuDriverGetVersion) \
    F(cuDeviceGetCount, 2000, cuDeviceGetCount) \
    F(cuDeviceGet, 2000, cuDeviceGet) \
    F(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2) \
    F(cuDeviceGetName, 2000, cuDeviceGetName) \
    F(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2) \
    F(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId) \
    F(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId) \
    F(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability) \
    F(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute) \
    F(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain) \
    F(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2) \
    F(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2) \
    F(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState) \
    F(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2) \
    F(cuCtxCreate, 3020, cuCtxCreate_v2) \
    F(cuCtxCreate, 12050, cuCtxCreate_v4) \
    F(cuCtxDestroy, 4000, cuCtxDestroy_v2) \
    F(cuCtxSetCurrent, 4000, cuCtxSetCurrent) \
    F(cuCtxGetCurrent, 4000, cuCtxGetCurrent) \
    F(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) \
    F(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2) \
    F(cuCtxGetDevice, 2000, cuCtxGetDevice) \
    F(cuCtxGetDevice, 13000, cuCtxGetDevice_v2) \
    F(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion) \
    F(cuCtxGetFlags, 7000, cuCtxGetFlags) \
    F(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange) \
    F(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer) \
    F(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess) \
    F(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess) \
    F(cuMemAlloc, 3020, cuMemAlloc_v2) \
    F(cuMemAllocManaged, 6000, cuMemAllocManaged) \
    F(cuMemFree, 3020, cuMemFree_v2) \
    F(cuMemGetInfo, 3020, cuMemGetInfo_v2) \
    F(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2) \
    F(cuMemHostAlloc, 2020, cuMemHostAlloc) \
    F(cuMemAllocHost, 3020, cuMemAllocHost_v2) \
    F(cuMemFreeHost, 2000, cuMemFreeHost) \
    F(cuMemHostRegister, 6050, cuMemHostRegister_v2) \
    F(cuMemHostUnregister, 4000, cuMemHostUnregister) \
    F(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2) \
    F(cuMemHostGetFlags, 2030, cuMemHostGetFlags) \
    F(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle) \
    F(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2) \
    F(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle) \
    F(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2) \
    F(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2) \
    F(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2) \
    F(cuMemcpy, 4000, cuMemcpy) \
    F(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2) \
    F(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2) \
    F(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2) \
    F(cuMemcpyAsync, 4000, cuMemcpyAsync) \
    F(cuMemsetD8, 3020, cuMemsetD8_v2) \
    F(cuMemsetD16, 3020, cuMemsetD16_v2) \
    F(cuMemsetD32, 3020, cuMemsetD32_v2) \
    F(cuMemsetD8Async, 3020, cuMemsetD8Async) \
    F(cuMemsetD16Async, 3020, cuMemsetD16Async) \
    F(cuMemsetD32Async, 3020, cuMemsetD32Async) \
    F(cuPointerGetAttribute, 4000, cuPointerGetAttribute) \
    F(cuPointerGetAttributes, 7000, cuPointerGetAttributes) \
    F(cuMemAllocAsync, 11020, cuMemAllocAsync) \
    F(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync) \
    F(cuMemFreeAsync, 11020, cuMemFreeAsync) \
    F(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool) \
    F(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool) \
    F(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool) \
    F(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool) \
    F(cuMemGetMemPool, 13000, cuMemGetMemPool) \
    F(cuMemSetMemPool, 13000, cuMemSetMemPool) \
    F(cuMemPoolCreate, 11020, cuMemPoolCreate) \
    F(cuMemPoolDestroy, 11020, cuMemPoolDestroy) \
    F(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo) \
    F(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute) \
    F(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute) \
    F(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess) \
    F(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess) \
    F(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority) \
    F(cuStreamCreate, 2000, cuStreamCreate) \
    F(cuStreamDestroy, 4000, cuStreamDestroy_v2) \
    F(cuStreamSynchronize, 2000, cuStreamSynchronize) \
    F(cuStreamQuery, 2000, cuStreamQuery) \
    F(cuStreamGetCtx, 9020, cuStreamGetCtx) \
    F(cuStreamGetCtx, 12050, cuStreamGetCtx_v2) \
    F(cuStreamGetDevice, 12080, cuStreamGetDevice) \
    F(cuStreamGetFlags, 5050, cuStreamGetFlags) \
    F(cuStreamGetPriority, 5050, cuStreamGetPriority) \
    F(cuStreamGetId, 12000, cuStreamGetId) \
    F(cuStreamIsCapturing, 10000, cuStreamIsCapturing) \
    F(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2) \
    F(cuStreamEndCapture, 10000, cuStreamEndCapture) \
    F(cuGraphDestroy, 10000, cuGraphDestroy) \
    F(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode) \
    F(cuCtxSynchronize, 2000, cuCtxSynchronize) \
    F(cuEventCreate, 2000, cuEventCreate) \
    F(cuEventDestroy, 4000, cuEventDestroy_v2) \
    F(cuEventRecord, 2000, cuEventRecord) \
    F(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags) \
    F(cuEventSynchronize, 2000, cuEventSynchronize) \
    F(cuEventQuery, 2000, cuEventQuery) \
    F(cuEventElapsedTime, 12080, cuEventElapsedTime_v2) \
    F(cuStreamWaitEvent, 3020, cuStreamWaitEvent) \
    F(cuModuleLoadData, 2000, cuModuleLoadData) \
    F(cuModuleUnload, 2000, cuModuleUnload) \
    F(cuModuleGetFunction, 2000, cuModuleGetFunction) \
    F(cuLaunchKernel, 4000, cuLaunchKernel) \
    F(cuProfilerStart, 4000, cuProfilerStart) \
    F(cuProfilerStop, 4000, cuProfilerStop) \
    F(cuCheckpointOperationComplete, 13040, cuCheckpointOperationComplete) \
    F(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState) \
    F(cuCheckpointProcessGetRestoreThreadId, 12080, cuCheckpointProcessGetRestoreThreadId) \
    F(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock) \
    F(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint) \
    F(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore) \
    F(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock) \
    F(cuGetErrorName, 6000, cuGetErrorName) \
    F(cuGetErrorString, 6000, cuGetErrorString) \
    F(cuGetProcAddress, 12000, cuGetProcAddress_v2)

#define DECLARE(name, since, symbol) extern char symbol##_ __asm__(#symbol);
FUNCTIONS(DECLARE)

#define ROW(name, since, symbol) {#name, since, &symbol##_},
static const struct {
    const char *name;
    int since;
    void *function;
} functions[] = {FUNCTIONS(ROW)};

/* Nobody but the CUDA runtime calls it: cuda.bindings only asks where it is. */
EXPORT CUresult cuGetExportTable(const void **table, const void *id)
{
    static atomic_bool told;

    (void)id;
    if (!atomic_exchange(&told, true))
        fputs("cuckpt simulator: the CUDA runtime, which PyTorch and CuPy use, does "
              "not run on the simulated driver; see docs/simulator.md\n", stderr);
    if (table)
        *table = NULL;
    return NOT_SUPPORTED;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function,
                                    int version, uint64_t flags, int *status)
{
    const struct machine *machine = the_machine();
    int newest = 0;

    (void)flags;
    if (!symbol || !function)
        return INVALID_VALUE;
    *function = NULL;
    if (machine && version > (int)machine->driver_version)
        return INVALID_VALUE;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(symbol, functions[i].name) &&
            functions[i].since <= version && functions[i].since > newest) {
            newest = functions[i].since;
            *function = functions[i].function;
        }
    if (status)
        *status = *function ? 0 : 1; /* found, or not */
    return SUCCESS;
}

/* As it was before CUDA 12: without the status. */
EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version,
                                 uint64_t flags)
{
    CUresult result = cuGetProcAddress_v2(symbol, function, version, flags, NULL);

    return result == SUCCESS && !*function ? NOT_FOUND : result;
}
