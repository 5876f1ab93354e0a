/* A libcuda.so.1 that does nothing: every call succeeds at once.
 *
 * Benchmarks measure the caller over it. Tests make it answer: a call asks
 * null_driver_hook first, when that is set, and returns what the hook returns.
 * NULL_DRIVER_VERSION in the environment makes it an older driver (13050 if
 * unset), whose later functions are missing as they are in the real one;
 * NULL_DRIVER_LOAD_MS makes it slow to load.
 *
 * cc -shared -fPIC -O2 -Wl,-soname,libcuda.so.1 -o libcuda.so.1 null_driver.c
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OPERATING_SYSTEM = 304 };
enum { SYMBOL_FOUND = 0, SYMBOL_NOT_FOUND = 1 };

typedef int (*hook)(const char *call, int pid, void *argument);

hook null_driver_hook;
int null_driver_version = 13050;

__attribute__((constructor)) static void load(void)
{
    const char *version = getenv("NULL_DRIVER_VERSION");
    const char *milliseconds = getenv("NULL_DRIVER_LOAD_MS");
    if (version)
        null_driver_version = atoi(version);
    if (milliseconds)
        usleep(1000 * (unsigned)atoi(milliseconds));
}

/* A hook: takes as many milliseconds as the first number it is given. */
int null_driver_sleeps(const char *call, int milliseconds, void *argument)
{
    (void)call, (void)argument;
    usleep(1000 * (unsigned)milliseconds);
    return SUCCESS;
}

/* A hook: there is no such process. */
int null_driver_fails(const char *call, int pid, void *argument)
{
    (void)call, (void)pid, (void)argument;
    return OPERATING_SYSTEM;
}

static int answer(const char *call, int pid, void *argument)
{
    return null_driver_hook ? null_driver_hook(call, pid, argument) : SUCCESS;
}

int cuInit(unsigned flags)
{
    return answer("cuInit", (int)flags, NULL);
}

int cuDriverGetVersion(int *version)
{
    *version = null_driver_version;
    return answer("cuDriverGetVersion", 0, version);
}

int cuDeviceGetCount(int *count)
{
    *count = 1;
    return answer("cuDeviceGetCount", 0, count);
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return answer("cuDeviceGet", ordinal, device);
}

int cuDeviceGetUuid_v2(char uuid[16], int device)
{
    memset(uuid, device, 16);
    return answer("cuDeviceGetUuid_v2", device, uuid);
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = context;
    return answer("cuDevicePrimaryCtxRetain", device, context);
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    return answer("cuDevicePrimaryCtxRelease_v2", device, NULL);
}

int cuCheckpointProcessGetState(int pid, int *state)
{
    *state = 0;
    return answer("cuCheckpointProcessGetState", pid, state);
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    *tid = pid;
    return answer("cuCheckpointProcessGetRestoreThreadId", pid, tid);
}

int cuCheckpointProcessLock(int pid, void *args)
{
    return answer("cuCheckpointProcessLock", pid, args);
}

int cuCheckpointProcessCheckpoint(int pid, void *args)
{
    return answer("cuCheckpointProcessCheckpoint", pid, args);
}

int cuCheckpointProcessRestore(int pid, void *args)
{
    return answer("cuCheckpointProcessRestore", pid, args);
}

int cuCheckpointProcessUnlock(int pid, void *args)
{
    return answer("cuCheckpointProcessUnlock", pid, args);
}

int cuCheckpointOperationComplete(void *handle)
{
    return answer("cuCheckpointOperationComplete", 0, handle);
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version,
                        uint64_t flags, int *status);

static const struct {
    const char *name;
    int since;
    void *function;
} symbols[] = {
    {"cuInit", 2000, cuInit},
    {"cuDriverGetVersion", 2020, cuDriverGetVersion},
    {"cuDeviceGetCount", 2000, cuDeviceGetCount},
    {"cuDeviceGet", 2000, cuDeviceGet},
    {"cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2},
    {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2},
    {"cuCheckpointProcessGetState", 12080, cuCheckpointProcessGetState},
    {"cuCheckpointProcessGetRestoreThreadId", 12080,
     cuCheckpointProcessGetRestoreThreadId},
    {"cuCheckpointProcessLock", 12080, cuCheckpointProcessLock},
    {"cuCheckpointProcessCheckpoint", 12080, cuCheckpointProcessCheckpoint},
    {"cuCheckpointProcessRestore", 12080, cuCheckpointProcessRestore},
    {"cuCheckpointProcessUnlock", 12080, cuCheckpointProcessUnlock},
    {"cuCheckpointOperationComplete", 13040, cuCheckpointOperationComplete},
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char *symbol, void **function, int version,
                        uint64_t flags, int *status)
{
    (void)flags;
    *function = NULL;
    if (version > null_driver_version)
        return INVALID_VALUE;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        if (!strcmp(symbol, symbols[i].name) && version >= symbols[i].since)
            *function = symbols[i].function;
    if (status)
        *status = *function ? SYMBOL_FOUND : SYMBOL_NOT_FOUND;
    return SUCCESS;
}
