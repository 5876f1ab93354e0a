# distutils: language = c++
# cython: freethreading_compatible = True
"""Driver calls in a loop, three ways: what a call from Cython costs, in seconds."""

from posix.dlfcn cimport RTLD_NOW, dlopen, dlsym
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from cuda.bindings cimport cydriver

from cuckpt cimport driver

ctypedef int (*Restore)(int, void *) noexcept nogil
ctypedef int (*GetState)(int, int *) noexcept nogil


cdef double now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec + time.tv_nsec / 1e9


def cuckpt_restore(long loops):
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            driver.cuCheckpointProcessRestore(1, NULL)
    return now() - start


def cydriver_restore(long loops):
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            cydriver.cuCheckpointProcessRestore(1, NULL)
    return now() - start


def pointer_restore(long loops, bytes path):
    cdef Restore restore = <Restore> dlsym(
        dlopen(path, RTLD_NOW), b"cuCheckpointProcessRestore")
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            restore(1, NULL)
    return now() - start


def cuckpt_get_state(long loops):
    cdef driver.CUprocessState state
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            driver.cuCheckpointProcessGetState(1, &state)
    return now() - start


def cydriver_get_state(long loops):
    cdef cydriver.CUprocessState state
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            cydriver.cuCheckpointProcessGetState(1, &state)
    return now() - start


def pointer_get_state(long loops, bytes path):
    cdef GetState get_state = <GetState> dlsym(
        dlopen(path, RTLD_NOW), b"cuCheckpointProcessGetState")
    cdef int state
    cdef double start = now()
    with nogil:
        for _ in range(loops):
            get_state(1, &state)
    return now() - start
