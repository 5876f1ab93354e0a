"""The way of chunks between GPU and file, all of it without the GIL.

A lane is what one thread copies: chunks, one after the other, by turns through the
slots, which are pinned buffers with a stream each. While one is copied from or to the
GPU, another is written or read. A checksum is made piece by piece just before a write,
and just after a read: then the CPU's cache has the piece.

The functions of CUDA and xxhash are called by their addresses. All memory that the
records here name belongs to who calls.
"""

from libc.errno cimport EINTR, EIO, errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memset


cdef extern from "sys/types.h":
    ctypedef int64_t off_t

cdef extern from "unistd.h":
    ssize_t pwrite(int file, const void *memory, size_t size, off_t offset) nogil
    ssize_t pread(int file, void *memory, size_t size, off_t offset) nogil
    long syscall(long number, ...) nogil

cdef extern from *:
    """
    /* Others look at these while a lane writes them. */
    static inline void cuckpt_add(uint64_t *counter, uint64_t size)
    {
        __atomic_fetch_add(counter, size, __ATOMIC_RELAXED);
    }

    static inline int cuckpt_is_set(const uint64_t *flag)
    {
        return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0;
    }
    """
    void cuckpt_add(uint64_t *counter, uint64_t size) nogil
    int cuckpt_is_set(const uint64_t *flag) nogil


cdef struct chunk_t:
    uint64_t offset         # in the region
    uint64_t size
    uint64_t place          # in the file
    uint64_t low, high      # the checksum
    uint64_t kind
    int64_t file, direct    # descriptors; direct is one with O_DIRECT, or -1

cdef struct slot_t:
    char *address           # of the buffer
    void *stream
    void *event

cdef struct digest_t:
    uint64_t low, high

ctypedef int (*from_gpu_t)(void *, uint64_t, size_t, void *) noexcept nogil
ctypedef int (*to_gpu_t)(uint64_t, void *, size_t, void *) noexcept nogil
ctypedef int (*record_t)(void *, void *) noexcept nogil
ctypedef int (*wait_t)(void *) noexcept nogil
ctypedef void *(*new_state_t)() noexcept nogil
ctypedef int (*free_state_t)(void *) noexcept nogil
ctypedef int (*reset_t)(void *) noexcept nogil
ctypedef int (*update_t)(void *, const void *, size_t) noexcept nogil
ctypedef digest_t (*digest_function_t)(const void *) noexcept nogil
ctypedef ssize_t (*write_t)(int, const void *, size_t, off_t) noexcept nogil
ctypedef ssize_t (*read_t)(int, void *, size_t, off_t) noexcept nogil

cdef enum:
    BLOCK = 4096
    PIECE = 1 << 20         # smaller takes more calls, larger leaves the cache
    CACHESTAT = 451         # the number of that system call on all machines

cpdef enum Kind:            # of chunks
    STORED = 0
    ZEROS = 1
    UNCHECKED = 2           # without a checksum
    FRESH = 4               # not to be read from the page cache

cpdef enum Outcome:         # of lanes
    DONE = 0
    STOPPED = 1
    CUDA_FAILED = 2         # with the result
    WRITE_FAILED = 3        # with the errno
    READ_FAILED = 4
    SHORT = 5               # the file ends, with how much there was
    DIFFERENT = 6           # not what was saved

CHUNK = "=6Q2q"
SLOT = "=3Q"
NAMES = {
    "cuda": (
        "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord",
        "cuEventSynchronize",
    ),
    "xxhash": (
        "XXH3_createState", "XXH3_freeState", "XXH3_128bits_reset",
        "XXH3_128bits_update", "XXH3_128bits_digest",
    ),
}


cdef class Functions:
    """The functions that lanes call, by their addresses.

    Parameters
    ----------
    cuda, xxhash : sequence of int
        Those of `NAMES`, in this order.
    write, read : int
        Of what takes the place of `pwrite` and `pread`; 0: these.
    """

    cdef from_gpu_t from_gpu
    cdef to_gpu_t to_gpu
    cdef record_t record
    cdef wait_t wait
    cdef new_state_t new_state
    cdef free_state_t free_state
    cdef reset_t reset
    cdef update_t update
    cdef digest_function_t digest
    cdef write_t write
    cdef read_t read

    def __init__(self, cuda, xxhash, uintptr_t write=0, uintptr_t read=0):
        cdef uintptr_t a, b, c, d, e
        a, b, c, d = cuda
        self.from_gpu, self.to_gpu = <from_gpu_t> a, <to_gpu_t> b
        self.record, self.wait = <record_t> c, <wait_t> d
        a, b, c, d, e = xxhash
        self.new_state, self.free_state = <new_state_t> a, <free_state_t> b
        self.reset, self.update = <reset_t> c, <update_t> d
        self.digest = <digest_function_t> e
        self.write = <write_t> write if write else <write_t> pwrite
        self.read = <read_t> read if read else <read_t> pread


def save(
    Functions functions not None, bytearray chunks not None, Py_ssize_t first,
    bytearray slots not None, bytearray control not None, Py_ssize_t counter,
    uint64_t device_pointer, bint checksums
):
    """Copy chunks of GPU memory to their file, one after the other.

    Parameters
    ----------
    functions : Functions
    chunks, slots : bytearray
        Records, as `CHUNK` and `SLOT` say. Of a chunk are given offset, size and
        files, and filled in are its place, checksum and kind.
    first : int
        The first that is to be copied; those before it are.
    control : bytearray
        Numbers of 8 bytes: to stop if the first is not 0, others to count.
    counter : int
        Which of them counts the bytes that are copied.
    device_pointer : int
        Of the region.
    checksums : bool

    Returns
    -------
    tuple of int, int and int
        What it came to, the number of the chunk, and what more there is to know.
    """
    cdef lane_t lane
    fill(&lane, functions, chunks, slots, control, counter, device_pointer)
    cdef int outcome
    with nogil:
        outcome = save_lane(&lane, first, checksums)
        end(&lane)
    return outcome, lane.number, lane.code


def load(
    Functions functions not None, bytearray chunks not None, Py_ssize_t first,
    bytearray slots not None, bytearray control not None, Py_ssize_t counter,
    uint64_t device_pointer
):
    """Copy chunks from their files to GPU memory, those that are what was saved.

    Parameters
    ----------
    functions, chunks, first, slots, control, counter, device_pointer
        As for `save`; all of a chunk is given.

    Returns
    -------
    tuple of int, int and int
        As `save`.
    """
    cdef lane_t lane
    fill(&lane, functions, chunks, slots, control, counter, device_pointer)
    cdef int outcome
    with nogil:
        outcome = load_lane(&lane, first)
        end(&lane)
    return outcome, lane.number, lane.code


cdef struct lane_t:
    from_gpu_t from_gpu
    to_gpu_t to_gpu
    record_t record
    wait_t wait
    free_state_t free_state
    reset_t reset
    update_t update
    digest_function_t digest
    write_t write
    read_t read
    chunk_t *chunks
    Py_ssize_t count
    slot_t *slots
    Py_ssize_t slot_count
    uint64_t *stop
    uint64_t *counter
    uint64_t device_pointer
    void *state             # of the checksum
    int64_t number, code    # of the chunk that failed, and why


cdef int fill(
    lane_t *lane, Functions functions, bytearray chunks, bytearray slots,
    bytearray control, Py_ssize_t counter, uint64_t device_pointer
) except -1:
    cdef char *numbers = control
    lane.from_gpu, lane.to_gpu = functions.from_gpu, functions.to_gpu
    lane.record, lane.wait = functions.record, functions.wait
    lane.free_state, lane.reset = functions.free_state, functions.reset
    lane.update, lane.digest = functions.update, functions.digest
    lane.write, lane.read = functions.write, functions.read
    lane.chunks = <chunk_t *> <char *> chunks
    lane.count = len(chunks) // sizeof(chunk_t)
    lane.slots = <slot_t *> <char *> slots
    lane.slot_count = len(slots) // sizeof(slot_t)
    if lane.slot_count == 0 or not 0 < counter < len(control) // 8:
        raise ValueError("a lane needs a slot and a counter")
    lane.stop = <uint64_t *> numbers
    lane.counter = lane.stop + counter
    lane.device_pointer = device_pointer
    lane.number = lane.code = 0
    lane.state = functions.new_state()
    if lane.state == NULL:
        raise MemoryError
    return 0


cdef void end(lane_t *lane) noexcept nogil:
    lane.free_state(lane.state)


cdef int failed(
    lane_t *lane, int outcome, Py_ssize_t number, int64_t code
) noexcept nogil:
    lane.number, lane.code = number, code
    return outcome


cdef inline uint64_t padded(uint64_t size) noexcept nogil:
    return (size + BLOCK - 1) // BLOCK * BLOCK


# From the GPU to a file

cdef int save_lane(lane_t *lane, Py_ssize_t first, bint checksums) noexcept nogil:
    cdef Py_ssize_t i
    cdef chunk_t *chunk
    cdef slot_t *slot
    cdef int result
    for i in range(first, min(first + lane.slot_count, lane.count)):
        result = fetch(lane, i)
        if result:
            return failed(lane, CUDA_FAILED, i, result)
    for i in range(first, lane.count):
        if cuckpt_is_set(lane.stop):
            return failed(lane, STOPPED, i, 0)
        chunk, slot = lane.chunks + i, lane.slots + i % lane.slot_count
        result = lane.wait(slot.event)
        if result:
            return failed(lane, CUDA_FAILED, i, result)
        chunk.place = end_before(lane, i)
        if is_zero(slot.address, chunk.size):
            chunk.kind = ZEROS
        else:
            chunk.kind = STORED if checksums else UNCHECKED
            result = write_chunk(lane, chunk, slot.address)
            if result:
                return failed(lane, WRITE_FAILED, i, result)
        cuckpt_add(lane.counter, chunk.size)
        if i + lane.slot_count < lane.count:
            result = fetch(lane, i + lane.slot_count)
            if result:
                return failed(lane, CUDA_FAILED, i, result)
    return DONE


cdef int fetch(lane_t *lane, Py_ssize_t number) noexcept nogil:
    cdef chunk_t *chunk = lane.chunks + number
    cdef slot_t *slot = lane.slots + number % lane.slot_count
    cdef int result = lane.from_gpu(
        slot.address, lane.device_pointer + chunk.offset, chunk.size, slot.stream)
    return result or lane.record(slot.event, slot.stream)


cdef uint64_t end_before(lane_t *lane, Py_ssize_t number) noexcept nogil:
    """Return where the next chunk is stored in the file."""
    cdef chunk_t *chunk
    while number > 0:
        number -= 1
        chunk = lane.chunks + number
        if chunk.kind == ZEROS:
            return chunk.place
        return padded(chunk.place + chunk.size)
    return 0


cdef bint is_zero(const char *memory, uint64_t size) noexcept nogil:
    return memory[0] == 0 and not memcmp(memory, memory + 1, size - 1)


cdef int write_chunk(lane_t *lane, chunk_t *chunk, char *memory) noexcept nogil:
    cdef uint64_t size = chunk.size, end = padded(size), start = 0, piece
    cdef int file = <int> chunk.file, result
    cdef digest_t digest
    memset(memory + size, 0, end - size)
    lane.reset(lane.state)
    if chunk.direct >= 0:
        file, piece = <int> chunk.direct, end
    else:
        piece = PIECE
    while start < end:
        piece = min(piece, end - start)
        if chunk.kind == STORED:
            lane.update(lane.state, memory + start, min(piece, size - start))
        result = write_all(lane, file, memory + start, piece, chunk.place + start)
        if result:
            return result
        start += piece
    if chunk.kind == STORED:
        digest = lane.digest(lane.state)
        chunk.low, chunk.high = digest.low, digest.high
    return 0


cdef int write_all(
    lane_t *lane, int file, const char *memory, uint64_t size, uint64_t place
) noexcept nogil:
    """Write all; return the errno."""
    cdef ssize_t written
    while size:
        written = lane.write(file, memory, size, <off_t> place)
        if written < 0:
            if errno == EINTR:
                continue
            return errno
        if written == 0:
            return EIO
        memory += written
        size -= <uint64_t> written
        place += <uint64_t> written
    return 0


# From a file to the GPU

cdef int load_lane(lane_t *lane, Py_ssize_t first) noexcept nogil:
    cdef Py_ssize_t i
    cdef chunk_t *chunk
    cdef slot_t *slot
    cdef int result
    for i in range(first, lane.count):
        if cuckpt_is_set(lane.stop):
            return failed(lane, STOPPED, i, 0)
        chunk, slot = lane.chunks + i, lane.slots + i % lane.slot_count
        result = lane.wait(slot.event)
        if result:
            return failed(lane, CUDA_FAILED, i, result)
        result = read_chunk(lane, i, slot.address)
        if result != DONE:
            return result
        result = lane.to_gpu(
            lane.device_pointer + chunk.offset, slot.address, chunk.size, slot.stream)
        result = result or lane.record(slot.event, slot.stream)
        if result:
            return failed(lane, CUDA_FAILED, i, result)
        cuckpt_add(lane.counter, chunk.size)
    return DONE


cdef int read_chunk(lane_t *lane, Py_ssize_t number, char *memory) noexcept nogil:
    cdef chunk_t *chunk = lane.chunks + number
    cdef uint64_t start = 0, piece = PIECE, wanted
    cdef bint fresh = chunk.kind & FRESH
    cdef bint direct = chunk.direct >= 0 and (fresh or not is_cached(chunk))
    cdef int file = <int> (chunk.direct if direct else chunk.file)
    cdef ssize_t found
    cdef digest_t digest
    if direct:
        piece = chunk.size
    lane.reset(lane.state)
    while start < chunk.size:
        piece = min(piece, chunk.size - start)
        wanted = padded(piece) if direct else piece
        found = read_all(
            lane, file, memory + start, wanted, chunk.place + start, direct)
        if found < 0:
            return failed(lane, READ_FAILED, number, -found)
        if <uint64_t> found < piece:
            return failed(lane, SHORT, number, <int64_t> (start + found))
        if not chunk.kind & UNCHECKED:
            lane.update(lane.state, memory + start, piece)
        start += piece
    if chunk.kind & UNCHECKED:
        return DONE
    digest = lane.digest(lane.state)
    if digest.low != chunk.low or digest.high != chunk.high:
        return failed(lane, DIFFERENT, number, 0)
    return DONE


cdef ssize_t read_all(
    lane_t *lane, int file, char *memory, uint64_t size, uint64_t place, bint direct
) noexcept nogil:
    """Read until the file ends; return how much there was, or the negative errno."""
    cdef ssize_t done = 0, count
    while <uint64_t> done < size:
        count = lane.read(
            file, memory + done, size - <uint64_t> done, <off_t> (place + done))
        if count < 0:
            if errno == EINTR:
                continue
            return -errno
        done += count
        # At its end what is left is no whole block, and O_DIRECT takes no other.
        if count == 0 or (direct and done % BLOCK):
            break
    return done


cdef bint is_cached(const chunk_t *chunk) noexcept nogil:
    """Tell whether all of a chunk is in the page cache; not before Linux 6.5."""
    cdef uint64_t part[2]
    cdef uint64_t found[5]
    part[0], part[1] = chunk.place, chunk.size
    if syscall(CACHESTAT, <int> chunk.file, part, found, 0):
        return False
    return found[0] >= (chunk.size + BLOCK - 1) // BLOCK
