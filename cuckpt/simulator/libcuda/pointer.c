/* What an address is. */
#define _GNU_SOURCE
#include "simulator.h"

enum {
    ATTRIBUTE_CONTEXT = 1,
    ATTRIBUTE_MEMORY_TYPE = 2,
    ATTRIBUTE_DEVICE_POINTER = 3,
    ATTRIBUTE_HOST_POINTER = 4,
    ATTRIBUTE_IS_MANAGED = 8,
    ATTRIBUTE_DEVICE_ORDINAL = 9,
    ATTRIBUTE_RANGE_START = 11,
    ATTRIBUTE_RANGE_SIZE = 12,
    ATTRIBUTE_MAPPED = 13,
    ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
    ATTRIBUTE_ACCESS_FLAGS = 16,
    ATTRIBUTE_POOL = 17,
};

enum type { UNKNOWN, OF_HOST, OF_DEVICE };
enum { NO_DEVICE_KNOWN = -2, READ_AND_WRITE = 3 };

struct address {
    enum type type;
    CUdevice device;
    CUcontext context;
    bool managed;
    CUdeviceptr base;
    size_t size;
    CUmemoryPool pool;
};

static struct address look_up(CUdeviceptr pointer)
{
    struct address address = {.device = NO_DEVICE_KNOWN};
    struct allocation allocation;
    unsigned flags, gpu;

    if (describe_pinned(pointer, &address.base, &address.size, &flags)) {
        address.type = OF_HOST;
        address.device = 0;
        address.context = primary_context(0);
    } else if (describe_allocation(pointer, &address.base, &address.device,
                                   &allocation)) {
        address.type = OF_DEVICE;
        address.context = allocation.context;
        address.managed = allocation.managed;
        address.size = allocation.size;
    }
    if (!address.type &&
        describe_foreign(pointer, &address.base, &address.size, &gpu)) {
        address.type = OF_DEVICE;
        address.device = device_with(gpu);
        address.context = primary_context(address.device);
    }
    address.pool = pool_of(pointer);
    if (address.pool)
        address.context = NULL;
    return address;
}

/* Of an address that nobody knows everything is 0. */
static CUresult get_attribute(void *data, int attribute, CUdeviceptr pointer,
                              const struct address *address)
{
    switch (attribute) {
    case ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = address->context;
        return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = address->type;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = address->type ? pointer : 0;
        return SUCCESS;
    case ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)data = address->type == OF_HOST ? pointer : 0;
        return address->type == OF_DEVICE ? INVALID_VALUE : SUCCESS;
    case ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = address->managed;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = address->device;
        return SUCCESS;
    case ATTRIBUTE_RANGE_START:
        *(CUdeviceptr *)data = address->base;
        return SUCCESS;
    case ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = address->size;
        return SUCCESS;
    case ATTRIBUTE_MAPPED:
        *(unsigned *)data = address->type != UNKNOWN;
        return SUCCESS;
    case ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)data = 0;
        return SUCCESS;
    case ATTRIBUTE_ACCESS_FLAGS:
        *(int *)data = address->type ? READ_AND_WRITE : 0;
        return SUCCESS;
    case ATTRIBUTE_POOL:
        *(CUmemoryPool *)data = address->pool;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute,
                                      CUdeviceptr pointer)
{
    ENTER;
    const struct address address = look_up(pointer);

    if (!data || !address.type)
        return INVALID_VALUE;
    return get_attribute(data, attribute, pointer, &address);
}

EXPORT CUresult cuPointerGetAttributes(unsigned number, const int *attributes,
                                       void **data, CUdeviceptr pointer)
{
    ENTER;
    const struct address address = look_up(pointer);

    if (!number || !attributes || !data)
        return INVALID_VALUE;
    for (unsigned i = 0; i < number; i++)
        if (!data[i] ||
            (get_attribute(data[i], attributes[i], pointer, &address) != SUCCESS &&
             attributes[i] != ATTRIBUTE_HOST_POINTER))
            return INVALID_VALUE;
    return SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size,
                                        CUdeviceptr pointer)
{
    ENTER;
    const struct address address = look_up(pointer);

    if (!address.type)
        return NOT_FOUND;
    if (base)
        *base = address.base;
    if (size)
        *size = address.size;
    return SUCCESS;
}

PLAIN(cuMemGetAddressRange, cuMemGetAddressRange_v2);
