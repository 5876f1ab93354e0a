/* The one kernel there is: cuckpt_spin(ns), which takes so much time. */
#define _GNU_SOURCE
#include "simulator.h"

#include <string.h>

static char module, function;

/* Any PTX that has an entry cuckpt_spin is taken for the kernel. */
EXPORT CUresult cuModuleLoadData(void **handle, const void *image)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);

    if (result != SUCCESS)
        return result;
    if (!handle || !image)
        return INVALID_VALUE;
    if (!strstr(image, ".entry cuckpt_spin"))
        return INVALID_IMAGE;
    *handle = &module;
    return SUCCESS;
}

EXPORT CUresult cuModuleUnload(void *handle)
{
    ENTER;
    return handle == &module ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuModuleGetFunction(void **handle, void *of, const char *name)
{
    ENTER;
    if (of != &module)
        return INVALID_HANDLE;
    if (!handle || !name)
        return INVALID_VALUE;
    if (strcmp(name, "cuckpt_spin") != 0)
        return NOT_FOUND;
    *handle = &function;
    return SUCCESS;
}

EXPORT CUresult cuLaunchKernel(void *kernel, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, CUstream stream,
                               void **parameters, void **extra)
{
    ENTER;
    CUcontext context;
    const CUresult result = need_context(&context);
    struct work spin = {0};

    (void)shared_bytes, (void)extra;
    if (result != SUCCESS)
        return result;
    if (kernel != &function)
        return INVALID_HANDLE;
    if (!parameters || !parameters[0] || !grid_x || !grid_y || !grid_z ||
        !block_x || !block_y || !block_z)
        return INVALID_VALUE;
    memcpy(&spin.duration_ns, parameters[0], sizeof spin.duration_ns);
    return add_work(stream, &spin);
}

/* There is nothing to profile. */

EXPORT CUresult cuProfilerStart(void)
{
    ENTER;
    CUcontext context;

    return need_context(&context);
}

EXPORT CUresult cuProfilerStop(void)
{
    return cuProfilerStart();
}
