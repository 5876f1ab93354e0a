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


# Every struct object has room for any of the structs: so all objects have one
# size, and Cython keeps freed ones for reuse. A class uses its own member.
cdef union AnyStruct:
    CUuuid uuid
    CUcheckpointGpuPair pair
    CUcheckpointLockArgs lock
    CUcheckpointCheckpointArgs checkpoint
    CUcheckpointRestoreArgs restore
    CUcheckpointUnlockArgs unlock
    CUcheckpointCustomStorageInfo info
    CUcheckpointCustomStoragePerDeviceData region


cdef class CheckpointCustomStorageInfo
cdef class Pointees


# `_ptr` is the struct: `_value` inside the object, or memory that `_owner` keeps
# alive. It is never NULL and never changes once the object is made.
cdef class Struct:
    cdef AnyStruct _value
    cdef AnyStruct *_ptr
    cdef object _owner
    cdef Pointees _pointees
    cdef bint _readonly
    cdef unsigned int _serial

    cdef Py_ssize_t _size(self) noexcept
    cdef int _read_pointers(self) except -1
    cdef void _follow(self, Struct source) noexcept
    cdef tuple _content(self)
    cdef bint _has_bare_address(self, AnyStruct *content) noexcept


# Keeps the memory of a view alive: a struct, or the export of a buffer.
cdef class Keeper:
    cdef Struct struct
    cdef Py_buffer view


# What an args object owns beside its struct: made when first needed.
cdef class Pointees:
    cdef bytes pairs
    cdef CUcheckpointCustomStorageInfo *cell
    cdef CheckpointCustomStorageInfo info
    cdef bint in_call


cdef class Uuid(Struct):
    pass


cdef class CheckpointGpuPair(Struct):
    pass


cdef class CheckpointLockArgs(Struct):
    pass


cdef class CheckpointUnlockArgs(Struct):
    pass


# Arguments of the two calls that can hand out custom storage. When the field
# customStorageInfo_out, at `_out`, holds the address of `_pointees.cell`, the
# object keeps the driver's answer.
cdef class CustomStorageArgs(Struct):
    cdef CUcheckpointCustomStorageInfo ***_out(self, AnyStruct *args) noexcept
    cdef bytes _take_pairs(self, AnyStruct *args)
    cdef Pointees _asker(self, void *out)
    cdef bint _is_cell(self, void *out) noexcept


cdef class CheckpointCheckpointArgs(CustomStorageArgs):
    pass


cdef class CheckpointRestoreArgs(CustomStorageArgs):
    cdef bytes _pairs_at(self, void *address)


# One custom-storage operation, shared by its info and its regions.
cdef class Operation:
    cdef object __weakref__
    cdef bint in_call
    cdef bint ended
    cdef bint completed


cdef class CheckpointCustomStorageInfo(Struct):
    cdef tuple _regions
    cdef Operation _operation


cdef class CheckpointCustomStoragePerDeviceData(Struct):
    cdef Operation _operation


cdef int keep_answer(
    Pointees asker, CUcheckpointCustomStorageInfo *answer) except -1
cdef Operation known_operation(size_t handle)
cdef void forget_operation(size_t handle, Operation operation)
