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


# Every function once: its name, the version that cuGetProcAddress is asked for,
# its parameters. Each has a pointer, which stands at first for a function that
# finds the real one and puts it there; so a later call is a jump.
cdef extern from *:
    """
    static void *(*cuckpt_find)(const char *name, int version);

    #define CUCKPT_FUNCTION(name, version, parameters, arguments)          \
        static int cuckpt_first_##name parameters;                         \
        static int (*cuckpt_##name) parameters = cuckpt_first_##name;      \
        static int cuckpt_first_##name parameters                          \
        {                                                                  \
            int (*found) parameters =                                      \
                (int (*) parameters) cuckpt_find(#name, version);          \
            if (!found)                                                    \
                return 500; /* CUDA_ERROR_NOT_FOUND, and an exception */   \
            __atomic_store_n(&cuckpt_##name, found, __ATOMIC_RELEASE);     \
            return found arguments;                                        \
        }
    #define CUCKPT_CALL(name) __atomic_load_n(&cuckpt_##name, __ATOMIC_ACQUIRE)

    CUCKPT_FUNCTION(cuInit, 2000, (unsigned f), (f))
    CUCKPT_FUNCTION(cuDriverGetVersion, 2020, (int *v), (v))
    CUCKPT_FUNCTION(cuDeviceGetCount, 2000, (int *c), (c))
    CUCKPT_FUNCTION(cuDeviceGet, 2000, (int *d, int o), (d, o))
    CUCKPT_FUNCTION(cuDeviceGetUuid, 11040, (void *u, int d), (u, d))
    CUCKPT_FUNCTION(cuDevicePrimaryCtxRetain, 7000, (void **c, int d), (c, d))
    CUCKPT_FUNCTION(cuDevicePrimaryCtxRelease, 11000, (int d), (d))
    CUCKPT_FUNCTION(cuCheckpointProcessGetState, 12080, (int p, void *s), (p, s))
    CUCKPT_FUNCTION(cuCheckpointProcessGetRestoreThreadId, 12080,
                    (int p, int *t), (p, t))
    CUCKPT_FUNCTION(cuCheckpointProcessLock, 12080, (int p, void *a), (p, a))
    CUCKPT_FUNCTION(cuCheckpointProcessCheckpoint, 12080,
                    (int p, void *a), (p, a))
    CUCKPT_FUNCTION(cuCheckpointProcessRestore, 12080, (int p, void *a), (p, a))
    CUCKPT_FUNCTION(cuCheckpointProcessUnlock, 12080, (int p, void *a), (p, a))
    CUCKPT_FUNCTION(cuCheckpointOperationComplete, 13040, (void *h), (h))
    """
    void *(*cuckpt_find)(const char *, int) noexcept nogil

    CUresult call_init "CUCKPT_CALL(cuInit)" (
        unsigned int) noexcept nogil
    CUresult call_version "CUCKPT_CALL(cuDriverGetVersion)" (
        int *) noexcept nogil
    CUresult call_count "CUCKPT_CALL(cuDeviceGetCount)" (
        int *) noexcept nogil
    CUresult call_device "CUCKPT_CALL(cuDeviceGet)" (
        CUdevice *, int) noexcept nogil
    CUresult call_uuid "CUCKPT_CALL(cuDeviceGetUuid)" (
        CUuuid *, CUdevice) noexcept nogil
    CUresult call_retain "CUCKPT_CALL(cuDevicePrimaryCtxRetain)" (
        CUcontext *, CUdevice) noexcept nogil
    CUresult call_release "CUCKPT_CALL(cuDevicePrimaryCtxRelease)" (
        CUdevice) noexcept nogil
    CUresult call_state "CUCKPT_CALL(cuCheckpointProcessGetState)" (
        int, CUprocessState *) noexcept nogil
    CUresult call_tid "CUCKPT_CALL(cuCheckpointProcessGetRestoreThreadId)" (
        int, int *) noexcept nogil
    CUresult call_lock "CUCKPT_CALL(cuCheckpointProcessLock)" (
        int, CUcheckpointLockArgs *) noexcept nogil
    CUresult call_checkpoint "CUCKPT_CALL(cuCheckpointProcessCheckpoint)" (
        int, CUcheckpointCheckpointArgs *) noexcept nogil
    CUresult call_restore "CUCKPT_CALL(cuCheckpointProcessRestore)" (
        int, CUcheckpointRestoreArgs *) noexcept nogil
    CUresult call_unlock "CUCKPT_CALL(cuCheckpointProcessUnlock)" (
        int, CUcheckpointUnlockArgs *) noexcept nogil
    CUresult call_complete "CUCKPT_CALL(cuCheckpointOperationComplete)" (
        CUcheckpointOperationHandle) noexcept nogil


cdef extern from "<dlfcn.h>":
    void *dlopen(const char *file, int mode)
    void *dlsym(void *handle, const char *name)
    int dlclose(void *handle)
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

cdef extern from *:
    """
    static void *cuckpt_library;

    static void *cuckpt_published(void)
    {
        return __atomic_load_n(&cuckpt_library, __ATOMIC_ACQUIRE);
    }

    /* Return what is in use from now on: this library, or an earlier one. */
    static void *cuckpt_publish(void *library)
    {
        void *earlier = NULL;

        if (__atomic_compare_exchange_n(&cuckpt_library, &earlier, library, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return library;
        dlclose(library);
        return earlier;
    }
    """
    void *published "cuckpt_published" () noexcept
    void *publish "cuckpt_publish" (void *library) noexcept


cdef CUresult cuInit(unsigned int Flags) except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_init(Flags)


cdef CUresult cuDriverGetVersion(int *driverVersion) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_version(driverVersion)


cdef CUresult cuDeviceGetCount(int *count) except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_count(count)


cdef CUresult cuDeviceGet(CUdevice *device, int ordinal) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_device(device, ordinal)


cdef CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_uuid(uuid, dev)


cdef CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_retain(pctx, dev)


cdef CUresult cuDevicePrimaryCtxRelease(CUdevice dev) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_release(dev)


cdef CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_state(pid, state)


cdef CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_tid(pid, tid)


cdef CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_lock(pid, args)


cdef CUresult cuCheckpointProcessCheckpoint(
        int pid, CUcheckpointCheckpointArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_checkpoint(pid, args)


cdef CUresult cuCheckpointProcessRestore(
        int pid, CUcheckpointRestoreArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_restore(pid, args)


cdef CUresult cuCheckpointProcessUnlock(
        int pid, CUcheckpointUnlockArgs *args) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_unlock(pid, args)


cdef CUresult cuCheckpointOperationComplete(
        CUcheckpointOperationHandle handle) \
        except ?CUDA_ERROR_NOT_FOUND nogil:
    return call_complete(handle)


cdef void *find(const char *name, int version) except NULL with gil:
    cdef void *found = look_up(name, version)
    if found == NULL:
        raise catchable(FunctionNotFoundError)(
            f"{name.decode()} is not in this driver "
            f"({path_of_library()}, {driver_version()}); it needs "
            f"CUDA {dotted(version)} or later"
        )
    return found


cuckpt_find = <void *(*)(const char *, int) noexcept nogil> find


cdef bint has_function(const char *name, int version) except -1:
    return look_up(name, version) != NULL


cdef void *look_up(const char *name, int version) except? NULL:
    cdef void *found = NULL
    cdef int status = 0
    cdef void *library = the_library()
    cdef GetProcAddress get_proc_address = <GetProcAddress> dlsym(
        library, "cuGetProcAddress_v2")
    if get_proc_address == NULL:  # a driver older than CUDA 12.0
        return dlsym(library, name)
    if get_proc_address(name, &found, version, 0, &status) != CUDA_SUCCESS:
        return NULL
    return found


# Without a lock, which a forked child could inherit from a thread that it does not
# have: several threads may load the driver at once, and the first decides which.
cdef void *the_library() except NULL:
    cdef void *library = published()
    cdef bytes path
    if library == NULL:
        path = chosen_path()
        library = publish(loaded(path))
    return library


cdef bytes chosen_path():
    cdef const char *chosen = getenv("CUCKPT_LIBCUDA")
    cdef bytes path = chosen if chosen != NULL else b""
    if path and b"/" not in path:
        path = b"./" + path  # a path, not a name to search for
    return path


cdef void *loaded(bytes path) except NULL:
    cdef void *library = dlopen(path or b"libcuda.so.1", RTLD_NOW)
    if library == NULL:
        raise_load_failure(path, dlerror())
    elif dlsym(library, "cuInit") == NULL:
        dlclose(library)
        raise_load_failure(
            path, (path or b"libcuda.so.1")
            + b" is not a CUDA driver: it has no cuInit")
    return library


cdef int raise_load_failure(bytes path, bytes reason) except -1:
    raise catchable(DynamicLibNotFoundError)(
        load_failure(path.decode(errors="replace"), reason.decode(errors="replace")))


cdef str load_failure(str path, str reason):
    if path:
        return (f"CUCKPT_LIBCUDA names a driver that cannot be loaded: "
                f"{reason}. Correct the path, or unset the variable to use "
                f"the system's libcuda.so.1")
    return (f"no CUDA driver: {reason}. Install the NVIDIA driver, set "
            f"CUCKPT_LIBCUDA to the path of a libcuda.so.1, or run on a simulated "
            f"one: cuckpt simulate -- CMD...")


cdef str path_of_library():
    """Return the file that the driver was loaded from; loads it if need be."""
    cdef link_map *where = NULL
    if dlinfo(the_library(), RTLD_DI_LINKMAP, &where) != 0 or where == NULL:
        return "libcuda.so.1"
    return where.l_name.decode(errors="surrogateescape")


cdef str driver_version():
    cdef void *found = dlsym(the_library(), "cuDriverGetVersion")
    cdef int version = 0
    if found == NULL or (<CUresult (*)(int *) noexcept nogil> found)(
            &version) != CUDA_SUCCESS:
        return "version unknown"
    return f"CUDA {dotted(version)}"


cdef str dotted(int version):
    return f"{version // 1000}.{version % 1000 // 10}"
