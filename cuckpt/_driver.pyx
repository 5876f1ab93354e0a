"""Finds libcuda and its functions, once each.

Which driver: the path in the environment variable ``CUCKPT_LIBCUDA``, else
``libcuda.so.1`` as the dynamic loader finds it. The first call that loads a
driver decides; a choice that cannot be loaded is an error, and never a silent
return to another.

Which function: what cuGetProcAddress returns for the version in which the
function appeared. A driver that lacks it fails that function alone.
"""

from libc.stdlib cimport getenv

from cuckpt.errors import (
    DynamicLibNotFoundError,
    FunctionNotFoundError,
    catchable,
)


cdef extern from * nogil:
    """
    #define cuckpt_load_acquire(slot) __atomic_load_n((slot), __ATOMIC_ACQUIRE)
    #define cuckpt_store_release(slot, value) \\
        __atomic_store_n((slot), (value), __ATOMIC_RELEASE)
    """
    void *load_acquire "cuckpt_load_acquire"(void **slot)
    void store_release "cuckpt_store_release"(void **slot, void *value)


cdef extern from "<dlfcn.h>":
    void *dlopen(const char *file, int mode)
    void *dlsym(void *handle, const char *name)
    char *dlerror()
    int dlinfo(void *handle, int request, void *info)
    int RTLD_NOW
    int RTLD_DI_LINKMAP


cdef extern from "<link.h>":
    cdef struct link_map:
        char *l_name


ctypedef CUresult (*GetProcAddress)(
    const char *symbol, void **function, int version, uint64_t flags,
    int *status) noexcept nogil

cdef void *library = NULL
cdef GetProcAddress get_proc_address = NULL


# The functions, in the order of _driver.pxd. The slot of each is written once.

cdef void *init_slot
cdef void *driver_get_version_slot
cdef void *device_get_count_slot
cdef void *device_get_slot
cdef void *device_get_uuid_slot
cdef void *primary_ctx_retain_slot
cdef void *primary_ctx_release_slot
cdef void *get_state_slot
cdef void *get_restore_thread_id_slot
cdef void *lock_slot
cdef void *checkpoint_slot
cdef void *restore_slot
cdef void *unlock_slot
cdef void *complete_slot


cdef CUresult cuInit(unsigned int Flags) except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(unsigned int) noexcept nogil>
            function(&init_slot, b"cuInit", 2000))(Flags)


cdef CUresult cuDriverGetVersion(int *driverVersion) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int *) noexcept nogil>
            function(&driver_get_version_slot, b"cuDriverGetVersion", 2020)
            )(driverVersion)


cdef CUresult cuDeviceGetCount(int *count) except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int *) noexcept nogil>
            function(&device_get_count_slot, b"cuDeviceGetCount", 2000)
            )(count)


cdef CUresult cuDeviceGet(CUdevice *device, int ordinal) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(CUdevice *, int) noexcept nogil>
            function(&device_get_slot, b"cuDeviceGet", 2000)
            )(device, ordinal)


cdef CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(CUuuid *, CUdevice) noexcept nogil>
            function(&device_get_uuid_slot, b"cuDeviceGetUuid", 11040)
            )(uuid, dev)


cdef CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(CUcontext *, CUdevice) noexcept nogil>
            function(&primary_ctx_retain_slot, b"cuDevicePrimaryCtxRetain",
                     7000))(pctx, dev)


cdef CUresult cuDevicePrimaryCtxRelease(CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(CUdevice) noexcept nogil>
            function(&primary_ctx_release_slot, b"cuDevicePrimaryCtxRelease",
                     11000))(dev)


cdef CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int, CUprocessState *) noexcept nogil>
            function(&get_state_slot, b"cuCheckpointProcessGetState", 12080)
            )(pid, state)


cdef CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int, int *) noexcept nogil>
            function(&get_restore_thread_id_slot,
                     b"cuCheckpointProcessGetRestoreThreadId", 12080)
            )(pid, tid)


cdef CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int, CUcheckpointLockArgs *) noexcept nogil>
            function(&lock_slot, b"cuCheckpointProcessLock", 12080)
            )(pid, args)


cdef CUresult cuCheckpointProcessCheckpoint(
        int pid, CUcheckpointCheckpointArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int, CUcheckpointCheckpointArgs *) noexcept nogil>
            function(&checkpoint_slot, b"cuCheckpointProcessCheckpoint", 12080)
            )(pid, args)


cdef CUresult cuCheckpointProcessRestore(
        int pid, CUcheckpointRestoreArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int, CUcheckpointRestoreArgs *) noexcept nogil>
            function(&restore_slot, b"cuCheckpointProcessRestore", 12080)
            )(pid, args)


cdef CUresult cuCheckpointProcessUnlock(
        int pid, CUcheckpointUnlockArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(int, CUcheckpointUnlockArgs *) noexcept nogil>
            function(&unlock_slot, b"cuCheckpointProcessUnlock", 12080)
            )(pid, args)


cdef CUresult cuCheckpointOperationComplete(
        CUcheckpointOperationHandle handle) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return (<CUresult (*)(CUcheckpointOperationHandle) noexcept nogil>
            function(&complete_slot, b"cuCheckpointOperationComplete", 13040)
            )(handle)


cdef inline void *function(void **slot, const char *name, int version) \
        except NULL nogil:
    cdef void *found = load_acquire(slot)
    return found if found != NULL else find(slot, name, version)


cdef void *find(void **slot, const char *name, int version) \
        except NULL with gil:
    cdef void *found = look_up(name, version)
    if found == NULL:
        raise catchable(FunctionNotFoundError)(
            f"{name.decode()} is not in this driver "
            f"({library_path()}, {driver_version()}); it needs "
            f"CUDA {dotted(version)} or later"
        )
    store_release(slot, found)
    return found


cdef bint has_function(const char *name, int version) except -1:
    return look_up(name, version) != NULL


cdef void *look_up(const char *name, int version) except? NULL:
    cdef void *found = NULL
    cdef int status
    open_library()
    if get_proc_address == NULL:  # a driver older than CUDA 12.0
        return dlsym(library, name)
    if get_proc_address(name, &found, version, 0, &status) != CUDA_SUCCESS:
        return NULL
    return found


# The GIL, held from test to assignment, makes the first load happen once.
cdef int open_library() except -1:
    global library, get_proc_address
    if library != NULL:
        return 0
    cdef const char *chosen = getenv("CUCKPT_LIBCUDA")
    cdef bytes path = chosen if chosen != NULL else b""
    if path and b"/" not in path:
        path = b"./" + path  # a path, not a name to search for
    cdef void *handle = dlopen(path or b"libcuda.so.1", RTLD_NOW)
    if handle == NULL:
        raise catchable(DynamicLibNotFoundError)(
            load_failure(path.decode(errors="replace"),
                         dlerror().decode(errors="replace"))
        )
    get_proc_address = <GetProcAddress> dlsym(handle, "cuGetProcAddress_v2")
    library = handle
    return 0


cdef str load_failure(str path, str reason):
    if path:
        return (f"CUCKPT_LIBCUDA names a driver that cannot be loaded: "
                f"{reason}. Correct the path, or unset the variable to use "
                f"the system's libcuda.so.1")
    return (f"no CUDA driver: {reason}. Install the NVIDIA driver, or set "
            f"CUCKPT_LIBCUDA to the path of a libcuda.so.1")


cdef str library_path():
    """Return the file that the driver was loaded from; loads it if need be."""
    open_library()
    cdef link_map *where = NULL
    if dlinfo(library, RTLD_DI_LINKMAP, &where) != 0 or where == NULL:
        return "libcuda.so.1"
    return where.l_name.decode(errors="surrogateescape")


cdef str driver_version():
    cdef void *found = dlsym(library, "cuDriverGetVersion")
    cdef int version = 0
    if found == NULL or (<CUresult (*)(int *) noexcept nogil> found)(
            &version) != CUDA_SUCCESS:
        return "not a CUDA driver"
    return f"CUDA {dotted(version)}"


cdef str dotted(int version):
    return f"{version // 1000}.{version % 1000 // 10}"
