# distutils: language = c++
"""One driver call in a loop, three ways: what a call from Cython costs."""

from posix.dlfcn cimport RTLD_NOW, dlopen, dlsym
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from cuda.bindings cimport cydriver

from cuckpt cimport driver

ctypedef int (*Restore)(int, void *) noexcept nogil


cdef double now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec * 1e9 + time.tv_nsec


def cuckpt_ns(long loops):
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            driver.cuCheckpointProcessRestore(1, NULL)
    return (now() - start) / loops


def cydriver_ns(long loops):
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            cydriver.cuCheckpointProcessRestore(1, NULL)
    return (now() - start) / loops


def pointer_ns(bytes path, long loops):
    cdef Restore restore = <Restore> dlsym(
        dlopen(path, RTLD_NOW), b"cuCheckpointProcessRestore")
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            restore(1, NULL)
    return (now() - start) / loops
