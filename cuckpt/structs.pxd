from cuckpt._driver cimport (
    CUcheckpointCheckpointArgs,
    CUcheckpointCustomStorageInfo,
    CUcheckpointCustomStoragePerDeviceData,
    CUcheckpointGpuPair,
    CUcheckpointLockArgs,
    CUcheckpointRestoreArgs,
    CUcheckpointUnlockArgs,
    CUuuid,
)


cdef class CheckpointCustomStorageInfo


# What an args object owns beside its struct: made when first needed. It stands
# in the base class because every class with object fields of its own makes its
# objects slower to free.
cdef class Pointees:
    cdef bytes pairs
    cdef CUcheckpointCustomStorageInfo *cell
    cdef CheckpointCustomStorageInfo info
    cdef bint in_call


# In every class `_ptr` is the struct: `_value` inside the object, or memory that
# `_owner` keeps alive. It is never NULL and never changes once the object is
# made. `_memory` and `_size` are the same memory, for what all classes share.

cdef class Struct:
    cdef char *_memory
    cdef Py_ssize_t _size
    cdef object _owner
    cdef Pointees _pointees
    cdef bint _readonly

    cdef void _point_to(self, void *address) noexcept
    cdef Py_ssize_t _alignment(self) noexcept
    cdef void _follow(self, Struct source) noexcept
    cdef tuple _content(self)
    cdef bint _has_bare_address(self) noexcept


cdef class Uuid(Struct):
    cdef CUuuid _value
    cdef CUuuid *_ptr


cdef class CheckpointGpuPair(Struct):
    cdef CUcheckpointGpuPair _value
    cdef CUcheckpointGpuPair *_ptr


cdef class CheckpointLockArgs(Struct):
    cdef CUcheckpointLockArgs _value
    cdef CUcheckpointLockArgs *_ptr


cdef class CheckpointUnlockArgs(Struct):
    cdef CUcheckpointUnlockArgs _value
    cdef CUcheckpointUnlockArgs *_ptr


# Arguments of the two calls that can hand out custom storage. `_out` is the
# field customStorageInfo_out; when it holds the address of `_pointees.cell`,
# the driver answers there.
cdef class CustomStorageArgs(Struct):
    cdef CUcheckpointCustomStorageInfo ***_out

    cdef bint _owns_cell(self) noexcept


cdef class CheckpointCheckpointArgs(CustomStorageArgs):
    cdef CUcheckpointCheckpointArgs _value
    cdef CUcheckpointCheckpointArgs *_ptr


cdef class CheckpointRestoreArgs(CustomStorageArgs):
    cdef CUcheckpointRestoreArgs _value
    cdef CUcheckpointRestoreArgs *_ptr

    cdef bint _owns_pairs(self) noexcept


# One custom-storage operation, shared by its info and its regions.
cdef class Operation:
    cdef object __weakref__
    cdef bint ended
    cdef bint completed


cdef class CheckpointCustomStorageInfo(Struct):
    cdef CUcheckpointCustomStorageInfo _value
    cdef CUcheckpointCustomStorageInfo *_ptr
    cdef tuple _regions
    cdef Operation _operation


cdef class CheckpointCustomStoragePerDeviceData(Struct):
    cdef CUcheckpointCustomStoragePerDeviceData _value
    cdef CUcheckpointCustomStoragePerDeviceData *_ptr
    cdef Operation _operation


cdef CheckpointCustomStorageInfo copy_answer(Pointees own)
cdef Operation known_operation(size_t handle)
cdef void forget_operation(size_t handle, Operation operation)
