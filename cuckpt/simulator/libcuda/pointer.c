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
};

enum { MEMORY_OF_HOST = 1, MEMORY_OF_DEVICE = 2 };

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size,
                                        CUdeviceptr pointer)
{
    ENTER;
    CUdeviceptr start;
    CUdevice device;
    struct allocation allocation;

    if (!describe_allocation(pointer, &start, &device, &allocation))
        return NOT_FOUND;
    if (base)
        *base = start;
    if (size)
        *size = allocation.size;
    return SUCCESS;
}

static CUresult describe_pinned(void *data, int attribute, CUdeviceptr pointer)
{
    switch (attribute) {
    case ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = MEMORY_OF_HOST;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER:
    case ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)data = pointer;
        return SUCCESS;
    case ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = 0;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = 0;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute,
                                      CUdeviceptr pointer)
{
    ENTER;
    CUdeviceptr base;
    CUdevice device;
    struct allocation allocation;

    if (!data)
        return INVALID_VALUE;
    if (!describe_allocation(pointer, &base, &device, &allocation))
        return is_pinned(pointer, 1) ? describe_pinned(data, attribute, pointer)
                                     : INVALID_VALUE;
    switch (attribute) {
    case ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = allocation.context;
        return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = MEMORY_OF_DEVICE;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        return SUCCESS;
    case ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = allocation.managed;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = device;
        return SUCCESS;
    case ATTRIBUTE_RANGE_START:
        *(CUdeviceptr *)data = base;
        return SUCCESS;
    case ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = allocation.size;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

PLAIN(cuMemGetAddressRange, cuMemGetAddressRange_v2);
