/* Copies and fills, at once or in a stream.
 *
 * As measured: a copy in a stream returns at once if the host's side is pinned, or
 * if little is copied to the device; else it first waits for the stream.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STAGED_AT_MOST = 65536 };

/* Between places */

static bool write_all(struct place to, const char *from, size_t size)
{
    while (size) {
        ssize_t done = pwrite(to.arena->file, from, size, to.offset);

        if (done <= 0)
            return false;
        from += done;
        to.offset += done;
        size -= (size_t)done;
    }
    return true;
}

static bool read_all(struct place from, char *to, size_t size)
{
    while (size) {
        ssize_t done = pread(from.arena->file, to, size, from.offset);

        if (done <= 0)
            return false;
        to += done;
        from.offset += done;
        size -= (size_t)done;
    }
    return true;
}

static bool copy_on_device(struct place to, struct place from, size_t size)
{
    char buffer[65536];

    while (size) {
        size_t part = size < sizeof buffer ? size : sizeof buffer;

        if (!read_all(from, buffer, part) || !write_all(to, buffer, part))
            return false;
        from.offset += (off_t)part;
        to.offset += (off_t)part;
        size -= part;
    }
    return true;
}

static bool copy_bytes(const struct place *to, const struct place *from, size_t size)
{
    if (to->arena && from->arena)
        return copy_on_device(*to, *from, size);
    if (to->arena)
        return write_all(*to, from->host, size);
    if (from->arena)
        return read_all(*from, to->host, size);
    memmove(to->host, from->host, size);
    return true;
}

/* What is taken for device memory must be some, or pinned. */
static bool take_side(CUdeviceptr pointer, bool is_device, size_t size,
                      struct place *place)
{
    return take_place(pointer, size, place) &&
           (place->arena || !is_device || is_pinned(pointer, size));
}

static bool fill_bytes(struct place to, const struct work *fill)
{
    char buffer[65536];
    size_t size = fill->size;

    for (size_t at = 0; at < sizeof buffer; at += fill->width)
        memcpy(buffer + at, fill->pattern, fill->width);
    while (size) {
        size_t part = size < sizeof buffer ? size : sizeof buffer;

        if (to.arena ? !write_all(to, buffer, part) : !memcpy(to.host, buffer, part))
            return false;
        to.offset += (off_t)part;
        to.host += part;
        size -= part;
    }
    return true;
}

/* Do a copy or fill, or, without `really`, tell whether it can be done. */
static CUresult carry_out_now(const struct work *work, bool really)
{
    struct place to = {0}, from = {0};
    bool done = take_side(work->to, work->to_device, work->size, &to) &&
                (work->width || work->staged ||
                 take_side(work->from, work->from_device, work->size, &from));

    if (work->staged)
        from.host = work->staged;
    if (done && really)
        done = work->width ? fill_bytes(to, work)
                           : copy_bytes(&to, &from, work->size);
    leave_place(&to);
    leave_place(&from);
    return done ? SUCCESS : INVALID_VALUE;
}

static CUresult do_in_stream(const struct work *work)
{
    /* What was there when the work was added is there no more. */
    return carry_out_now(work, true) == SUCCESS ? SUCCESS : ILLEGAL_ADDRESS;
}

static CUresult do_at_once(const struct work *work)
{
    CUcontext context;
    CUresult result = need_context(&context);

    if (result == SUCCESS)
        result = carry_out_now(work, false);
    if (result == SUCCESS)
        result = wait_for_blocking_streams(context);
    return result == SUCCESS ? carry_out_now(work, true) : result;
}

static enum { ORDINARY, PINNED, ON_DEVICE } kind_of(CUdeviceptr pointer, size_t size)
{
    struct place place;
    bool is_device;

    take_place(pointer, size, &place);
    is_device = place.arena != NULL;
    leave_place(&place);
    return is_device ? ON_DEVICE : is_pinned(pointer, size) ? PINNED : ORDINARY;
}

static CUresult stage(struct work *work)
{
    work->staged = malloc(work->size + 1);
    if (!work->staged)
        return OUT_OF_MEMORY;
    memcpy(work->staged, (void *)(uintptr_t)work->from, work->size);
    return SUCCESS;
}

static CUresult prepare_copy(struct work *copy, CUstream stream, bool *is_done)
{
    const int to = kind_of(copy->to, copy->size);
    const int from = kind_of(copy->from, copy->size);
    CUresult result;

    /* Should the memory go meanwhile, its address is not that of host memory. */
    copy->to_device = copy->to_device || to == ON_DEVICE;
    copy->from_device = copy->from_device || from == ON_DEVICE;
    if (to != ORDINARY && from != ORDINARY)
        return SUCCESS;
    if (to != ORDINARY && copy->size <= STAGED_AT_MOST)
        return stage(copy);
    *is_done = true;
    result = wait_for_stream(stream);
    return result == SUCCESS ? carry_out_now(copy, true) : result;
}

static CUresult add_to_stream(struct work *work, CUstream stream)
{
    CUcontext context;
    bool is_done = false;
    CUresult result = need_context(&context);

    if (result == SUCCESS)
        result = carry_out_now(work, false);
    if (result == SUCCESS && is_capturing(stream))
        return SUCCESS;
    if (result == SUCCESS && !work->width)
        result = prepare_copy(work, stream, &is_done);
    if (result != SUCCESS || is_done)
        return result;
    work->run = do_in_stream;
    work->lingers = true;
    return add_work(stream, work);
}

/* Copies */

#define COPY(target, source, bytes, target_is_device, source_is_device) \
    {.to = (target), .from = (source), .size = (bytes),                 \
     .to_device = (target_is_device), .from_device = (source_is_device)}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    ENTER;
    const struct work copy = COPY(to, (uintptr_t)from, size, true, false);

    return do_at_once(&copy);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    ENTER;
    const struct work copy = COPY((uintptr_t)to, from, size, false, true);

    return do_at_once(&copy);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    ENTER;
    const struct work copy = COPY(to, from, size, true, true);

    return do_at_once(&copy);
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    ENTER;
    const struct work copy = COPY(to, from, size, false, false);

    return do_at_once(&copy);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from,
                                     size_t size, CUstream stream)
{
    ENTER;
    struct work copy = COPY(to, (uintptr_t)from, size, true, false);

    return add_to_stream(&copy, stream);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size,
                                     CUstream stream)
{
    ENTER;
    struct work copy = COPY((uintptr_t)to, from, size, false, true);

    return add_to_stream(&copy, stream);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from,
                                     size_t size, CUstream stream)
{
    ENTER;
    struct work copy = COPY(to, from, size, true, true);

    return add_to_stream(&copy, stream);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
                              CUstream stream)
{
    ENTER;
    struct work copy = COPY(to, from, size, false, false);

    return add_to_stream(&copy, stream);
}

/* Fills */

static CUresult prepare_fill(struct work *fill, CUdeviceptr to, const void *pattern,
                             size_t width, size_t count)
{
    if (count > SIZE_MAX / width || to % width)
        return INVALID_VALUE;
    fill->to = to;
    fill->to_device = true;
    fill->size = width * count;
    fill->width = width;
    memcpy(fill->pattern, pattern, width);
    return SUCCESS;
}

#define FILL_FUNCTIONS(name, asynchronous, type)                             \
    EXPORT CUresult name(CUdeviceptr to, type value, size_t count)           \
    {                                                                        \
        ENTER;                                                               \
        struct work fill = {0};                                              \
        const CUresult result =                                              \
            prepare_fill(&fill, to, &value, sizeof value, count);            \
                                                                             \
        return result == SUCCESS ? do_at_once(&fill) : result;               \
    }                                                                        \
                                                                             \
    EXPORT CUresult asynchronous(CUdeviceptr to, type value, size_t count,   \
                                 CUstream stream)                            \
    {                                                                        \
        ENTER;                                                               \
        struct work fill = {0};                                              \
        const CUresult result =                                              \
            prepare_fill(&fill, to, &value, sizeof value, count);            \
                                                                             \
        return result == SUCCESS ? add_to_stream(&fill, stream) : result;    \
    }

FILL_FUNCTIONS(cuMemsetD8_v2, cuMemsetD8Async, unsigned char)
FILL_FUNCTIONS(cuMemsetD16_v2, cuMemsetD16Async, unsigned short)
FILL_FUNCTIONS(cuMemsetD32_v2, cuMemsetD32Async, unsigned)

PLAIN(cuMemcpyHtoD, cuMemcpyHtoD_v2);
PLAIN(cuMemcpyDtoH, cuMemcpyDtoH_v2);
PLAIN(cuMemcpyDtoD, cuMemcpyDtoD_v2);
PLAIN(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2);
PLAIN(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2);
PLAIN(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2);
PLAIN(cuMemsetD8, cuMemsetD8_v2);
PLAIN(cuMemsetD16, cuMemsetD16_v2);
PLAIN(cuMemsetD32, cuMemsetD32_v2);
