"""One class for each struct of the checkpoint API.

The semantics are those of ``cuda.bindings._v2.driver``: `from_ptr`,
`from_buffer`, `from_data`, ``.ptr``, ``int()``, ``==`` by content and the
buffer protocol. On top, nothing but a wild address can crash, and whatever a
struct points to is kept alive by it.

Threads may share struct objects, with or without a GIL. What a thread reads of a
field is one of the values that were set; a UUID alone, which is not one machine
word, can be seen half changed where there is no GIL.
"""

import sys

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_FULL_RO,
    PyBuffer_FillInfo,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.dict cimport PyDict_Next
from cpython.number cimport PyIndex_Check
from cpython.object cimport PyObject
from cpython.weakref cimport PyWeakref_NewRef
from libc.stdint cimport UINT32_MAX
from libc.string cimport memcmp, memcpy, memmove

from cuckpt._convert cimport as_address, as_uint32

from cuckpt import uuids


cdef extern from "Python.h":
    """
    #define cuckpt_is_heap_type(cls) \
        PyType_HasFeature((PyTypeObject *) (cls), Py_TPFLAGS_HEAPTYPE)

    /* Numbers the objects of subclasses: what __new__ returned is new if its
       number is. */
    static unsigned int cuckpt_serial;
    #define cuckpt_next_serial() \
        __atomic_add_fetch(&cuckpt_serial, 1, __ATOMIC_RELAXED)
    #define cuckpt_serial_now() __atomic_load_n(&cuckpt_serial, __ATOMIC_RELAXED)

    /* Clear a new object word by word. For its size compilers choose rep stos, or
       a call, and on some processors both cost more than all the rest. */
    static inline void *cuckpt_clear(void *memory, size_t size)
    {
        const long long zero = 0;

        #pragma GCC unroll 32
        for (size_t i = 0; i < size; i += sizeof zero) {
            __builtin_memcpy((char *) memory + i, &zero, sizeof zero);
            __asm__("" : : : "memory"); /* or it would become a memset again */
        }
        return memory;
    }
    #define memset(memory, byte, size)                                       \
        (__builtin_constant_p(size) && (byte) == 0 && (size) % 8 == 0        \
             ? cuckpt_clear((memory), (size))                                \
             : (memset)((memory), (byte), (size)))
    """
    bint is_heap_type "cuckpt_is_heap_type" (object cls)
    unsigned int next_serial "cuckpt_next_serial" ()
    unsigned int serial "cuckpt_serial_now" ()
    bint PyType_IsSubtype(type cls, type base)


__all__ = [
    "CheckpointCheckpointArgs",
    "CheckpointCustomStorageInfo",
    "CheckpointCustomStoragePerDeviceData",
    "CheckpointGpuPair",
    "CheckpointLockArgs",
    "CheckpointRestoreArgs",
    "CheckpointUnlockArgs",
    "Uuid",
]


# Not a memoryview, which the garbage collector would show, and anybody release.
# Here, and not in Struct, which would pay for it in every object, a long chain of
# views of views is freed without recursion.

@cython.no_gc_clear
@cython.trashcan(True)
cdef class Keeper:
    """Keeps the memory of a view alive: a struct, or the export of a buffer."""

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


# Whoever reads or changes what an args object owns, and where its struct points, is
# in the critical section of that object: else a thread could free the pairs that
# another has just found. With a GIL such a section is nothing but a promise, which
# a garbage collection breaks, since it runs code of others: so no object that the
# collector knows is made between the steps that belong together.
cdef class Pointees:
    """What an args object owns beside its struct."""


# No tp_clear: the memory at `_ptr` must be good as long as the object can be
# reached, and cycles are broken elsewhere, since an owner comes before its view.
@cython.freelist(16)
@cython.no_gc_clear
cdef class Struct:
    """What the struct classes share. Not to be created itself.

    Two structs of one class are equal if their content is; they can change, so
    they have no hash. `copy.copy` and `pickle` copy the content together with
    what it owns; a struct that holds a bare address is copied with the address
    and cannot be pickled (TypeError).
    """

    __hash__ = None

    def __cinit__(self):
        self._ptr = &self._value
        if (type(self) is Struct or type(self) is CustomStorageArgs
                or is_heap_type(type(self))):
            check_class(type(self))
            self._serial = next_serial()

    @classmethod
    def from_ptr(cls, ptr, readonly=False, owner=None):
        """Make a struct from the memory at an address.

        Parameters
        ----------
        ptr : int
            Address of the C struct. It is trusted.
        readonly : bool
            Whether fields refuse to be set.
        owner : object, optional
            Object that keeps the memory alive. If given, the new object is a
            view of the memory; if not, it has a copy of its own.

        Returns
        -------
        Struct
            Of this class.

        Raises
        ------
        TypeError
            If `ptr` is not an integer.
        ValueError
            If `ptr` is 0, or misaligned for a view.
        """
        cdef void *address = as_address(ptr, "ptr")
        cdef Struct self = new(cls)
        if address == NULL:
            raise ValueError("ptr must not be null (0)")
        if owner is None:
            memcpy(self._ptr, address, self._size())
        else:
            view_memory(self, address, owner)
        self._readonly = readonly
        self._read_pointers()
        return self

    @classmethod
    def from_buffer(cls, buffer):
        """Make a struct that is a view of a buffer's memory.

        Parameters
        ----------
        buffer : bytes-like
            Contiguous, of the size of the C struct in bytes, aligned to 8
            bytes. The export is held: what can be resized cannot be while the
            struct exists.

        Returns
        -------
        Struct
            Of this class; read-only if `buffer` is.

        Raises
        ------
        TypeError
            If `buffer` has no buffer protocol.
        ValueError
            If its length, layout or alignment is wrong.
        """
        cdef Struct self = new(cls)
        cdef Keeper keeper = Keeper()
        cdef Py_buffer *export = &keeper.view
        PyObject_GetBuffer(buffer, export, PyBUF_FULL_RO)
        if export.len != self._size():
            raise ValueError(
                f"buffer length must be {self._size()} bytes, not {export.len}")
        if not PyBuffer_IsContiguous(export, b"C"):
            raise ValueError("buffer must be contiguous")
        view_memory(self, export.buf, keeper)
        self._readonly = export.readonly
        return self

    @classmethod
    def from_data(cls, data):
        """Make a struct that is a view of a NumPy array's memory.

        Parameters
        ----------
        data : numpy.ndarray
            A single element of this struct's dtype, such as
            ``checkpoint_lock_args_dtype``.

        Returns
        -------
        Struct
            Of this class; read-only if `data` is.

        Raises
        ------
        TypeError
            If `data` is not an array.
        ValueError
            If its size or dtype is wrong.
        """
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(data, numpy.ndarray):
            raise TypeError("data argument must be a NumPy ndarray")
        if data.size != 1:
            raise ValueError("data array must have a size of 1")
        if data.dtype != dtype(cls._dtype_name):
            raise ValueError(f"data array must be of dtype {cls._dtype_name}")
        return cls.from_buffer(data)

    @property
    def ptr(self):
        """Address of the C struct (int)."""
        return <size_t> self._ptr

    def __int__(self):
        return <size_t> self._ptr

    def __eq__(self, other):
        if type(other) is not type(self) and not (
                isinstance(other, Struct) and are_kin(type(self), type(other))):
            return NotImplemented
        cdef Struct that = other
        return (memcmp(self._ptr, that._ptr, self._size()) == 0
                or content(self) == content(that))

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(
            view, self, self._ptr, self._size(), self._readonly, flags)
        if flags & PyBUF_FORMAT:
            view.format = "b"  # as cuda.bindings has it

    def __copy__(self):
        cdef Struct copy = _rebuild(type(self), *content(self))
        copy._follow(self)
        if hasattr(self, "__dict__"):  # of a subclass
            copy.__dict__.update(self.__dict__)
        return copy

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        cdef tuple found = content(self)
        if self._has_bare_address(<AnyStruct *> PyBytes_AS_STRING(found[0])):
            raise TypeError(
                f"cannot pickle a {type(self).__name__} that holds an address: "
                "it means nothing in another process")
        state = getattr(self, "__dict__", None)  # of a subclass
        return _rebuild, (type(self), *found), state or None

    cdef Py_ssize_t _size(self) noexcept:
        return 0

    cdef int _read_pointers(self) except -1:
        """Copy what the struct points to, which was at a trusted address."""
        return 0

    cdef tuple _content(self):
        """Return the content, owned addresses replaced by what they own."""
        return raw_bytes(self), None, False

    cdef bint _has_bare_address(self, AnyStruct *content) noexcept:
        """Tell whether this is the content of one that holds what it does not own."""
        return False

    cdef void _follow(self, Struct source) noexcept:
        """Take from the original what `_content` does not hold."""


cdef class Uuid(Struct):
    """Uuid(uuid=None)
--

    UUID of a GPU (``CUuuid``).

    Parameters
    ----------
    uuid : optional
        Any form that `cuckpt.uuids.to_bytes` takes. Zeros if left out.
    """

    _dtype_name = "uuid_dtype"

    def __init__(self, uuid=None):
        if uuid is not None:
            set_uuid(self, &self._ptr.uuid, uuid)

    @property
    def bytes(self):
        """The 16 bytes (bytes); set from any form of a UUID."""
        return raw_bytes(self)

    @bytes.setter
    def bytes(self, uuid):
        set_uuid(self, &self._ptr.uuid, uuid)

    def __str__(self):
        return uuids.to_text(self.bytes)

    def __repr__(self):
        return f"{type(self).__name__}('{self}')"

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUuuid)


cdef class CheckpointGpuPair(Struct):
    """CheckpointGpuPair(old=None, new=None)
--

    The GPU that was checkpointed and the GPU to restore onto.

    Mirrors ``CUcheckpointGpuPair``.

    Parameters
    ----------
    old, new : optional
        Any forms that `cuckpt.uuids.to_bytes` takes; both or none. Zeros if
        left out.
    """

    _dtype_name = "checkpoint_gpu_pair_dtype"

    def __init__(self, old=None, new=None):
        if old is None and new is None:
            return
        if old is None or new is None:
            raise TypeError("a GPU pair needs both old and new, or neither")
        cdef CUcheckpointGpuPair pair  # if one is malformed, nothing changes
        read_uuid(&pair.oldUuid, old)
        read_uuid(&pair.newUuid, new)
        require_writable(self)
        self._ptr.pair = pair

    @property
    def old_uuid(self):
        """GPU that was checkpointed (`Uuid`): a view, which writes through."""
        return uuid_view(self, &self._ptr.pair.oldUuid)

    @old_uuid.setter
    def old_uuid(self, uuid):
        set_uuid(self, &self._ptr.pair.oldUuid, uuid)

    @property
    def new_uuid(self):
        """GPU to restore onto (`Uuid`): a view, which writes through."""
        return uuid_view(self, &self._ptr.pair.newUuid)

    @new_uuid.setter
    def new_uuid(self, uuid):
        set_uuid(self, &self._ptr.pair.newUuid, uuid)

    def __repr__(self):
        return f"{type(self).__name__}('{self.old_uuid}', '{self.new_uuid}')"

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointGpuPair)


cdef class CheckpointLockArgs(Struct):
    """CheckpointLockArgs(*, timeout_ms=0)
--

    Arguments of `cuckpt.driver.checkpoint_process_lock`.

    Mirrors ``CUcheckpointLockArgs``.

    Parameters
    ----------
    timeout_ms : int
        How long to wait for the process's GPU work to finish, in
        milliseconds. 0 waits for ever.
    """

    _dtype_name = "checkpoint_lock_args_dtype"

    def __init__(self, *, timeout_ms=0):
        set_timeout(self, timeout_ms)

    @property
    def timeout_ms(self):
        """How long to wait, in milliseconds (int); 0 waits for ever."""
        return self._ptr.lock.timeoutMs

    @timeout_ms.setter
    def timeout_ms(self, timeout_ms):
        set_timeout(self, timeout_ms)

    def __repr__(self):
        return f"{type(self).__name__}(timeout_ms={self.timeout_ms})"

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointLockArgs)


cdef class CheckpointUnlockArgs(Struct):
    """CheckpointUnlockArgs()
--

    Arguments of `cuckpt.driver.checkpoint_process_unlock`: none yet.

    Mirrors ``CUcheckpointUnlockArgs``.
    """

    _dtype_name = "checkpoint_unlock_args_dtype"

    def __init__(self):
        pass

    def __repr__(self):
        return f"{type(self).__name__}()"

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointUnlockArgs)


cdef class CustomStorageArgs(Struct):
    """What the arguments of checkpoint and restore share: custom storage.

    With ``custom_storage=True`` the object has room for the driver's answer,
    and after the call `custom_storage_info` is that answer. Such an object
    serves one call at a time (RuntimeError).
    """

    @property
    def custom_storage_info(self):
        """What the driver mapped (`CheckpointCustomStorageInfo`), or None.

        None before the call, after a failed call, and without
        ``custom_storage=True``. If another binding made the call with this
        object, read this before the operation is completed: the driver's
        memory is copied at the first look.
        """
        cdef Pointees asker = self._asker(self._out(self._ptr)[0])
        return None if asker is None else known_answer(asker)

    @property
    def custom_storage_info_out(self):
        """Where the driver puts the address of its answer (int); 0 is none."""
        return <size_t> self._out(self._ptr)[0]

    @custom_storage_info_out.setter
    def custom_storage_info_out(self, address):
        require_writable(self)
        self._out(self._ptr)[0] = <CUcheckpointCustomStorageInfo **> as_address(
            address, "custom_storage_info_out")

    cdef CUcheckpointCustomStorageInfo ***_out(self, AnyStruct *args) noexcept:
        """Return the address of the field customStorageInfo_out."""
        return &args.checkpoint.customStorageInfo_out

    @cython.critical_section
    cdef Pointees _asker(self, void *out):
        """Return who keeps an answer written to `out`; None if this object does not."""
        return self._pointees if self._is_cell(out) else None

    cdef bint _is_cell(self, void *out) noexcept:
        return self._pointees is not None and out == &self._pointees.cell

    cdef tuple _content(self):
        cdef bytes raw = raw_bytes(self)
        # The addresses are those of this copy: the object's may change meanwhile.
        cdef AnyStruct *copied = <AnyStruct *> PyBytes_AS_STRING(raw)
        cdef bytes pairs = self._take_pairs(copied)
        cdef CUcheckpointCustomStorageInfo ***out = self._out(copied)
        cdef bint custom_storage = self._is_cell(out[0])
        if custom_storage:
            out[0] = NULL
        return raw, pairs, custom_storage

    cdef bytes _take_pairs(self, AnyStruct *args):
        """Return the pairs, if this object owns those of `args`, and unset them."""
        return None

    cdef bint _has_bare_address(self, AnyStruct *content) noexcept:
        return self._out(content)[0] != NULL


cdef class CheckpointCheckpointArgs(CustomStorageArgs):
    """CheckpointCheckpointArgs(*, custom_storage=False)
--

    Arguments of `cuckpt.driver.checkpoint_process_checkpoint`.

    Mirrors ``CUcheckpointCheckpointArgs``.

    Parameters
    ----------
    custom_storage : bool
        False: the driver copies GPU memory to host memory. True: it maps GPU
        memory for the caller (see `custom_storage_info`), who copies it and
        then calls `cuckpt.driver.checkpoint_operation_complete`. Needs a
        driver for CUDA 13.4 or later; an older one answers InvalidValueError.
    """

    _dtype_name = "checkpoint_checkpoint_args_dtype"

    def __init__(self, *, custom_storage=False):
        if as_bool(custom_storage, "custom_storage"):
            answer_here(self)

    def __repr__(self):
        return f"{type(self).__name__}({custom_storage_repr(self)})"

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointCheckpointArgs)


cdef class CheckpointRestoreArgs(CustomStorageArgs):
    """CheckpointRestoreArgs(*, gpu_pairs=None, custom_storage=False)
--

    Arguments of `cuckpt.driver.checkpoint_process_restore`.

    Mirrors ``CUcheckpointRestoreArgs``.

    Parameters
    ----------
    gpu_pairs : iterable, optional
        Which GPU to restore onto, each a `CheckpointGpuPair` or
        ``(old, new)``. None or empty: the same GPUs. Otherwise name every GPU
        of the machine, once on either side, those that stay by a pair of the
        same: the documentation asks for every checkpointed GPU, users report
        that the driver wants them all.
    custom_storage : bool
        False: the driver restores from host memory. True: it maps the GPU
        memory for the caller (see `custom_storage_info`), who fills it and
        then calls `cuckpt.driver.checkpoint_operation_complete`. Needs a
        driver for CUDA 13.4 or later; an older one answers InvalidValueError.
    """

    _dtype_name = "checkpoint_restore_args_dtype"

    def __init__(self, *, gpu_pairs=None, custom_storage=False):
        cdef bint answer = as_bool(custom_storage, "custom_storage")
        if gpu_pairs is not None:
            self.gpu_pairs = gpu_pairs
        if answer:
            answer_here(self)

    @property
    def gpu_pairs(self):
        """Address of the array of pairs (int); 0 is none.

        Set it to an iterable of `CheckpointGpuPair` or ``(old, new)``: they
        are copied into memory that this object owns, and `gpu_pairs_count`
        becomes their number. Set it to an address (int) to manage memory and
        count yourself.

        Raises
        ------
        TypeError
            If set to something else.
        ValueError
            If a UUID is malformed, the object is read-only, or an iterable is
            set on a view, which owns nothing.
        """
        return <size_t> self._ptr.restore.gpuPairs

    @gpu_pairs.setter
    def gpu_pairs(self, gpu_pairs):
        require_writable(self)
        if PyIndex_Check(gpu_pairs):
            self._ptr.restore.gpuPairs = <CUcheckpointGpuPair *> as_address(
                gpu_pairs, "gpu_pairs")
            return
        if self._owner is not None:
            raise ValueError(
                f"this {type(self).__name__} is a view and cannot own GPU "
                "pairs; set an address, or make a CheckpointRestoreArgs(...)")
        cdef bytes packed = pack_pairs(gpu_pairs)
        with cython.critical_section(self):
            own_pairs(self, packed)
            self._ptr.restore.gpuPairsCount = <unsigned int> (
                PyBytes_GET_SIZE(packed) // sizeof(CUcheckpointGpuPair))

    @property
    def gpu_pairs_count(self):
        """Number of pairs at `gpu_pairs` (int); 0 restores onto the same GPUs."""
        return self._ptr.restore.gpuPairsCount

    @gpu_pairs_count.setter
    def gpu_pairs_count(self, count):
        require_writable(self)
        self._ptr.restore.gpuPairsCount = as_uint32(count, "gpu_pairs_count")

    def __repr__(self):
        shown = filter(None, (pairs_repr(self), custom_storage_repr(self)))
        return f"{type(self).__name__}({', '.join(shown)})"

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointRestoreArgs)

    cdef CUcheckpointCustomStorageInfo ***_out(self, AnyStruct *args) noexcept:
        return &args.restore.customStorageInfo_out

    cdef bytes _pairs_at(self, void *address):
        """Return the pairs, if this object owns them and they are there, or None."""
        cdef Pointees own = self._pointees
        if own is None or own.pairs is None or (
                address != PyBytes_AS_STRING(own.pairs)):
            return None
        return own.pairs

    cdef bytes _take_pairs(self, AnyStruct *args):
        cdef bytes pairs = self._pairs_at(args.restore.gpuPairs)
        if pairs is not None:
            args.restore.gpuPairs = NULL
        return pairs

    cdef bint _has_bare_address(self, AnyStruct *content) noexcept:
        return (content.restore.gpuPairs != NULL
                or CustomStorageArgs._has_bare_address(self, content))


# The driver's info struct and its array are freed when the operation ends, so
# they are copied when the call returns. The mapped GPU memory ends as well: an
# attempt to complete, even a failed one, makes the regions' memory protocols
# raise. Only a success uses up the handle; after an error one may try again.
cdef class Operation:
    """State of one custom-storage operation."""


cdef class CheckpointCustomStorageInfo(Struct):
    """CheckpointCustomStorageInfo()
--

    What the driver mapped for a custom-storage operation.

    Mirrors ``CUcheckpointCustomStorageInfo``. It comes from
    `CheckpointCheckpointArgs.custom_storage_info` and is a copy, good for as
    long as you like; the GPU memory that it names is mapped until
    `cuckpt.driver.checkpoint_operation_complete`. Iterate over it for its
    `per_device_data`. `from_ptr` copies the array of regions in any case.
    """

    _dtype_name = "checkpoint_custom_storage_info_dtype"

    def __init__(self):
        pass

    @property
    def handle(self):
        """What `checkpoint_operation_complete` takes (int)."""
        return <size_t> self._ptr.info.handle

    @property
    def device_count(self):
        """Number of regions (int)."""
        return self._ptr.info.deviceCount

    @property
    def per_device_data(self):
        """The regions, one for each GPU, in no particular order.

        A tuple of `CheckpointCustomStoragePerDeviceData`.

        Raises
        ------
        ValueError
            If the info came neither from a driver call nor from `from_ptr`,
            or has no array.
        """
        if self._regions is None:
            raise ValueError(
                "no per-device data: it comes from a driver call or from_ptr, "
                "with an array that is not NULL")
        return self._regions

    def __len__(self):
        return self._ptr.info.deviceCount

    def __bool__(self):
        return True

    def __iter__(self):
        return iter(self.per_device_data)

    def __repr__(self):
        return (f"<{type(self).__name__} handle={self.handle:#x} "
                f"device_count={self.device_count}>")

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointCustomStorageInfo)

    cdef int _read_pointers(self) except -1:
        cdef CUcheckpointCustomStorageInfo *info = &self._ptr.info
        self._operation = operation(<size_t> info.handle)
        if info.perDeviceData != NULL:
            self._regions = regions(
                info.perDeviceData, info.deviceCount, self._operation)
        return 0

    cdef bint _has_bare_address(self, AnyStruct *content) noexcept:
        return content.info.handle != NULL or content.info.perDeviceData != NULL

    cdef void _follow(self, Struct source) noexcept:
        self._regions = (<CheckpointCustomStorageInfo> source)._regions
        self._operation = (<CheckpointCustomStorageInfo> source)._operation
        self._readonly = source._readonly


cdef class CheckpointCustomStoragePerDeviceData(Struct):
    """CheckpointCustomStoragePerDeviceData()
--

    GPU memory of the target, mapped on one of the caller's GPUs.

    Mirrors ``CUcheckpointCustomStoragePerDeviceData``. Anything that takes the
    CUDA array interface takes it as a one-dimensional array of bytes, to be
    read after a checkpoint and filled after a restore. Which GPU it lies on
    follows from `stream`: ask cuStreamGetCtx, cuCtxGetDevice and
    cuDeviceGetUuid of cuda.bindings.
    """

    _dtype_name = "checkpoint_custom_storage_per_device_data_dtype"

    def __init__(self):
        pass

    @property
    def dev_ptr(self):
        """Device address (int)."""
        return self._ptr.region.devPtr

    @property
    def size(self):
        """Size in bytes (int)."""
        return self._ptr.region.size

    @property
    def stream(self):
        """Stream of that GPU's primary context (int).

        The driver waits for it before it completes the operation.
        """
        return <size_t> self._ptr.region.stream

    @property
    def __cuda_array_interface__(self):
        """The memory as bytes, by version 3 of the CUDA array interface.

        Raises
        ------
        ValueError
            If completion of the operation has been attempted: the memory is
            not mapped any more.
        """
        if self._operation is not None and self._operation.ended:
            raise ValueError(
                "this GPU memory is not mapped any more: its operation has "
                "been completed, or an attempt was made")
        return {
            "version": 3,
            "shape": (self._ptr.region.size,),
            "typestr": "|u1",
            "data": (self._ptr.region.devPtr, False),
            "strides": None,
            "stream": <size_t> self._ptr.region.stream or None,
        }

    def __repr__(self):
        return (f"<{type(self).__name__} dev_ptr={self.dev_ptr:#x} "
                f"size={self.size} stream={self.stream:#x}>")

    cdef Py_ssize_t _size(self) noexcept:
        return sizeof(CUcheckpointCustomStoragePerDeviceData)

    cdef bint _has_bare_address(self, AnyStruct *content) noexcept:
        return content.region.devPtr != 0 or content.region.stream != NULL

    cdef void _follow(self, Struct source) noexcept:
        self._operation = (
            (<CheckpointCustomStoragePerDeviceData> source)._operation)
        self._readonly = source._readonly


def __getattr__(name):
    # The dtypes are made when asked for: importing cuckpt imports no NumPy.
    if name in _DTYPES:
        return new_dtype(name)  # since it can be changed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_DTYPES])


cdef frozenset KINDS = frozenset([globals()[name] for name in __all__])


def _rebuild(cls, content, pairs, custom_storage):
    """Make a struct from what its `_content` was: for copy and pickle."""
    cdef Struct self = new(cls)
    cdef bytes raw = content
    if len(raw) != self._size():
        raise ValueError(
            f"{cls.__name__} has {self._size()} bytes, not {len(raw)}")
    memcpy(self._ptr, PyBytes_AS_STRING(raw), self._size())
    if pairs is not None:
        own_pairs(self, pairs)
    if custom_storage:
        answer_here(self)
    return self


cdef Struct new(type cls):
    """Make an object to be filled; a subclass may have a `__new__` of its own."""
    cdef unsigned int before = serial()
    cdef Struct made = cls.__new__(cls)
    if is_heap_type(cls) and (
            type(made) is not cls or <int> (made._serial - before) <= 0
            or made._ptr != &made._value or made._readonly):
        raise TypeError(f"{cls.__name__}.__new__ must return a new {cls.__name__}")
    return made


cdef int check_class(cls) except -1:
    """Refuse a class that is no struct, or two: their memory would be confused."""
    kinds = [base for base in cls.__mro__ if base in KINDS]
    if len(kinds) != 1:
        raise TypeError(
            f"{cls.__name__} is no struct class: it must have one of them as its "
            f"base, not {len(kinds)}")
    return 0


cdef bint are_kin(type one, type other) noexcept:
    return PyType_IsSubtype(one, other) or PyType_IsSubtype(other, one)


cdef inline int require_writable(Struct self) except -1:
    if self._readonly:
        raise ValueError(f"this {type(self).__name__} instance is read-only")
    return 0


cdef int view_memory(Struct self, void *address, object owner) except -1:
    if <size_t> address % sizeof(void *) != 0:
        raise ValueError(
            f"the memory of a struct must be aligned to {sizeof(void *)} bytes")
    self._owner = kept(owner)
    self._ptr = <AnyStruct *> address
    return 0


cdef object kept(object owner):
    if not isinstance(owner, Struct):
        return owner
    cdef Keeper keeper = Keeper()
    keeper.struct = owner
    return keeper


cdef inline int set_timeout(
        CheckpointLockArgs self, object timeout_ms) except -1:
    require_writable(self)
    self._ptr.lock.timeoutMs = as_uint32(timeout_ms, "timeout_ms")
    return 0


cdef inline bint as_bool(object value, str name) except -1:
    if value is True or value is False:
        return value is True
    raise TypeError(f"{name} must be a bool, not {type(value).__name__}")


cdef tuple content(Struct self):
    with cython.critical_section(self):
        return self._content()


cdef int answer_here(CustomStorageArgs self) except -1:
    require_writable(self)
    if self._owner is not None:
        raise ValueError(
            f"this {type(self).__name__} is a view and cannot own the place of "
            "the driver's answer; set custom_storage_info_out to an address")
    with cython.critical_section(self):
        self._out(self._ptr)[0] = &pointees(self).cell
    return 0


cdef int own_pairs(CheckpointRestoreArgs self, bytes pairs) except -1:
    """Let `self` point to `pairs`, which cannot change and may be shared."""
    cdef Pointees own = pointees(self)
    self._ptr.restore.gpuPairs = NULL
    if pairs:
        self._ptr.restore.gpuPairs = (
            <CUcheckpointGpuPair *> PyBytes_AS_STRING(pairs))
    own.pairs = pairs
    return 0


# If another binding asked, the answer lies in memory that the driver frees when the
# operation is completed. That memory is read where nobody can take `cell` away, so
# before anybody could complete; the first of several who have read it decides.
cdef CheckpointCustomStorageInfo known_answer(Pointees asker):
    """Return the driver's answer; if another binding asked, it is copied now."""
    cdef CUcheckpointCustomStorageInfo *cell
    cdef bytes copied = None
    with cython.critical_section(asker):
        cell = asker.cell
        if cell == NULL:
            return asker.info
        copied = copied_answer(cell)
    cdef CheckpointCustomStorageInfo info = answered_info(copied)
    with cython.critical_section(asker):
        if asker.cell == cell:
            asker.cell = NULL
            asker.info = info
            operation(<size_t> info._value.info.handle, info._operation)
        return asker.info


cdef int keep_answer(
        Pointees asker, CUcheckpointCustomStorageInfo *answer) except -1:
    cdef CheckpointCustomStorageInfo info = answered_info(copied_answer(answer))
    operation(<size_t> info._value.info.handle, info._operation)
    with cython.critical_section(asker):
        asker.info = info
    return 0


cdef bytes copied_answer(CUcheckpointCustomStorageInfo *answer):
    """Return the info, and after it the array that it points to."""
    cdef Py_ssize_t size = 0
    if answer.perDeviceData != NULL:
        size = answer.deviceCount * sizeof(CUcheckpointCustomStoragePerDeviceData)
    cdef bytes copied = PyBytes_FromStringAndSize(NULL, sizeof(answer[0]) + size)
    memcpy(PyBytes_AS_STRING(copied), answer, sizeof(answer[0]))
    if size:
        memcpy(PyBytes_AS_STRING(copied) + sizeof(answer[0]),
               answer.perDeviceData, size)
    return copied


cdef CheckpointCustomStorageInfo answered_info(bytes copied):
    cdef CheckpointCustomStorageInfo info
    cdef char *content = PyBytes_AS_STRING(copied)
    info = CheckpointCustomStorageInfo.__new__(CheckpointCustomStorageInfo)
    memcpy(&info._value, content, sizeof(CUcheckpointCustomStorageInfo))
    info._readonly = True
    # Not one that is known: the driver may use an earlier handle again.
    info._operation = Operation()
    if info._value.info.deviceCount == 0 or info._value.info.perDeviceData != NULL:
        info._regions = regions(
            <CUcheckpointCustomStoragePerDeviceData *> (
                content + sizeof(CUcheckpointCustomStorageInfo)),
            info._value.info.deviceCount, info._operation)
    return info


cdef Pointees pointees(Struct self):
    cdef Pointees made
    if self._pointees is None:
        made = Pointees()
        if self._pointees is None:
            self._pointees = made
    return self._pointees


cdef str custom_storage_repr(CustomStorageArgs self):
    cdef void *out = self._out(self._ptr)[0]
    if out == NULL:
        return ""
    if self._asker(out) is not None:
        return "custom_storage=True"
    return f"custom_storage_info_out={<size_t> out:#x}"


cdef str pairs_repr(CheckpointRestoreArgs self):
    cdef void *address
    cdef Py_ssize_t count
    cdef bytes pairs
    with cython.critical_section(self):
        address = self._ptr.restore.gpuPairs
        count = self._ptr.restore.gpuPairsCount
        pairs = self._pairs_at(address)
    if address == NULL and count == 0:
        return ""
    if pairs and len(pairs) == count * 32:
        shown = ", ".join([
            f"('{uuids.to_text(pairs[at:at + 16])}', "
            f"'{uuids.to_text(pairs[at + 16:at + 32])}')"
            for at in range(0, len(pairs), 32)
        ])
        return f"gpu_pairs=[{shown}]"
    return f"gpu_pairs={<size_t> address:#x}, gpu_pairs_count={count}"


cdef bytes raw_bytes(Struct self):
    return PyBytes_FromStringAndSize(<char *> self._ptr, self._size())


cdef int set_uuid(Struct self, CUuuid *target, object uuid) except -1:
    require_writable(self)
    return read_uuid(target, uuid)


cdef int read_uuid(CUuuid *target, object uuid) except -1:
    cdef bytes content
    if isinstance(uuid, Uuid):
        memmove(target, (<Uuid> uuid)._ptr, sizeof(CUuuid))
        return 0
    content = uuid if type(uuid) is bytes else bytes(uuids.to_bytes(uuid))
    if len(content) != sizeof(CUuuid):
        raise ValueError(f"a GPU UUID is 16 bytes, got {len(content)}")
    memcpy(target, PyBytes_AS_STRING(content), sizeof(CUuuid))
    return 0


cdef Uuid uuid_view(CheckpointGpuPair pair, CUuuid *uuid):
    cdef Uuid view = Uuid.__new__(Uuid)
    view._ptr = <AnyStruct *> uuid
    view._owner = kept(pair)
    view._readonly = pair._readonly
    return view


cdef bytes pack_pairs(object pairs):
    if isinstance(pairs, (str, bytes, bytearray, dict)):
        raise TypeError(
            "gpu_pairs must be an iterable of CheckpointGpuPair or (old, new), "
            f"or an address, not {type(pairs).__name__}"
            + ("; pass its items()" if isinstance(pairs, dict) else ""))
    cdef bytes packed = b"".join([pack_pair(pair) for pair in pairs])
    if len(packed) // sizeof(CUcheckpointGpuPair) > UINT32_MAX:
        raise OverflowError("too many GPU pairs")
    return packed


cdef bytes pack_pair(object pair):
    if type(pair) is CheckpointGpuPair:
        return raw_bytes(pair)
    for old, new in (("old_uuid", "new_uuid"), ("oldUuid", "newUuid")):
        if hasattr(pair, old):  # a pair of a subclass, of v2, of v1
            pair = getattr(pair, old), getattr(pair, new)
            break
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            "each of gpu_pairs must be a CheckpointGpuPair or (old, new), not "
            f"{pair!r}")
    old, new = pair
    return bytes(CheckpointGpuPair(old, new))


cdef tuple regions(
        CUcheckpointCustomStoragePerDeviceData *array, Py_ssize_t count,
        Operation operation):
    return tuple([region(&array[i], operation) for i in range(count)])


cdef CheckpointCustomStoragePerDeviceData region(
        CUcheckpointCustomStoragePerDeviceData *source, Operation operation):
    cdef CheckpointCustomStoragePerDeviceData self
    self = CheckpointCustomStoragePerDeviceData.__new__(
        CheckpointCustomStoragePerDeviceData)
    self._value.region = source[0]
    self._operation = operation
    self._readonly = True
    return self


# The operations that somebody still holds an info or a region of: by handle, a weak
# reference each. Guarded by an object of its own: a dict takes its own critical
# section in each of its operations, and that would end one around several.
cdef dict operations = {}
cdef object operations_guard = object()


cdef Operation operation(size_t handle, Operation new=None):
    """Return the operation that a handle names: from now on `new`, if given."""
    cdef Operation known = None
    cdef Operation made = Operation() if new is None else new
    cdef object reference = PyWeakref_NewRef(made, None)
    with cython.critical_section(operations_guard):
        forget_dead_operations()
        if new is None:
            known = referent(operations.get(handle))
        if known is None:
            known = made
            operations[handle] = reference
    return known


cdef int forget_dead_operations() except -1:
    cdef PyObject *handle = NULL
    cdef PyObject *reference = NULL
    cdef Py_ssize_t place = 0
    while PyDict_Next(operations, &place, &handle, &reference):
        if referent(<object> reference) is None:
            del operations[<object> handle]
            place = 0
    return 0


cdef Operation known_operation(size_t handle):
    if not operations:  # a call by handle makes no object then
        return None
    with cython.critical_section(operations_guard):
        return referent(operations.get(handle))


cdef void forget_operation(size_t handle, Operation operation):
    with cython.critical_section(operations_guard):
        if referent(operations.get(handle)) is operation:
            operations.pop(handle, None)


cdef inline Operation referent(object reference):
    return None if reference is None else reference()


cdef object dtype(str name):
    made = dtypes.get(name)
    if made is None:
        made = dtypes[name] = new_dtype(name)
    return made


cdef object new_dtype(str name):
    import numpy

    return numpy.dtype(_DTYPES[name])


cdef dict dtypes = {}


# Named and laid out as in cuda.bindings, with its padding fields.
_UUID = [("bytes", "i1", (16,))]
_DTYPES = {
    "uuid_dtype": _UUID,
    "checkpoint_gpu_pair_dtype": [("old_uuid", _UUID), ("new_uuid", _UUID)],
    "checkpoint_lock_args_dtype": [
        ("timeout_ms", "u4"),
        ("reserved0", "u4"),
        ("reserved1", "u8", (7,)),
    ],
    "checkpoint_checkpoint_args_dtype": [
        ("custom_storage_info_out", "i8"),
        ("reserved", "i1", (56,)),
    ],
    "checkpoint_restore_args_dtype": [
        ("gpu_pairs", "i8"),
        ("gpu_pairs_count", "u4"),
        ("padding0", "u4"),
        ("custom_storage_info_out", "i8"),
        ("reserved", "i1", (40,)),
    ],
    "checkpoint_unlock_args_dtype": [("reserved", "u8", (8,))],
    "checkpoint_custom_storage_info_dtype": [
        ("handle", "i8"),
        ("per_device_data", "i8"),
        ("device_count", "u4"),
        ("padding0", "u4"),
    ],
    "checkpoint_custom_storage_per_device_data_dtype": [
        ("dev_ptr", "u8"),
        ("size", "u8"),
        ("stream", "i8"),
    ],
}
