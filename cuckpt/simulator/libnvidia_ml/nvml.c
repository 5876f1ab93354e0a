/* A simulated NVML: what the machine's GPUs are, and who uses them.
 *
 * It only reads the machine that the simulated driver writes, apart from the
 * persistence mode. What a simulation cannot know (power, clocks, temperatures)
 * is left out: a caller finds no such function, as with an older real library.
 */
#define _GNU_SOURCE
#include "machine.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    OPERATING_SYSTEM = 17,
    ARGUMENT_VERSION_MISMATCH = 25,
};

typedef int nvmlReturn_t;
typedef const char *nvmlDevice_t;

/* The version field of a struct: its size, and which layout it has. */
#define VERSION(type, number) ((unsigned)sizeof(type) | (unsigned)(number) << 24)

/* One lock for all: nobody is quick with NVML, and a machine must not be left
 * while another thread reads it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned inits;

static void take_lock(void)
{
    pthread_mutex_lock(&lock);
}

static void release_lock(void)
{
    pthread_mutex_unlock(&lock);
}

static int enter(void)
{
    take_lock();
    return inits ? SUCCESS : UNINITIALIZED;
}

static void leave(const int *entered)
{
    (void)entered;
    release_lock();
}

/* At the head of a call. */
#define ENTER                                                            \
    __attribute__((cleanup(leave))) const int entered = enter();         \
    if (entered != SUCCESS)                                              \
        return entered

/* A handle is the address of one of these, and nobody follows it: whatever else
 * a caller passes is told apart. */
static const char handles[MAX_GPUS];

static struct gpu *gpu_of(nvmlDevice_t device)
{
    struct machine *machine = the_machine();
    uintptr_t gpu = (uintptr_t)device - (uintptr_t)handles;

    return gpu < machine->gpu_count ? &machine->gpus[gpu] : NULL;
}

static unsigned ordinal(const struct gpu *gpu)
{
    return (unsigned)(gpu - the_machine()->gpus);
}

static nvmlReturn_t put_text(char *to, unsigned size, const char *text)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* Start and end */

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    static bool handles_fork;
    nvmlReturn_t result = SUCCESS;

    (void)flags; /* about a machine without GPUs, and about attaching to them */
    take_lock();
    if (!inits && !change_machine())
        result = DRIVER_NOT_LOADED;
    else
        inits++;
    if (!handles_fork) {
        handles_fork = true;
        pthread_atfork(take_lock, release_lock, release_lock);
    }
    release_lock();
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

PLAIN(nvmlInit, nvmlInit_v2);

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    ENTER;
    inits--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct {
        nvmlReturn_t result;
        const char *text;
    } known[] = {
        {SUCCESS, "Success"},
        {UNINITIALIZED, "Uninitialized"},
        {INVALID_ARGUMENT, "Invalid Argument"},
        {NOT_SUPPORTED, "Not Supported"},
        {NO_PERMISSION, "Insufficient Permissions"},
        {NOT_FOUND, "Not Found"},
        {INSUFFICIENT_SIZE, "Insufficient Size"},
        {DRIVER_NOT_LOADED, "Driver Not Loaded"},
        {TIMEOUT, "Timeout"},
        {FUNCTION_NOT_FOUND, "Function Not Found"},
        {GPU_IS_LOST, "GPU is lost"},
        {OPERATING_SYSTEM, "The operating system has blocked the request"},
        {ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
    };

    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].result == result)
            return known[i].text;
    return "Unknown Error";
}

/* The system */

/* The driver that first came with a version of CUDA. Only the branch, which is the
 * number before the dot, means something. */
static const char *driver_of_cuda(unsigned version)
{
    static const struct {
        unsigned cuda;
        const char *driver;
    } releases[] = {
        {13040, "615.10"}, {13020, "595.45"}, {13010, "590.44"},
        {13000, "580.65"}, {12090, "575.51"}, {12080, "570.86"},
        {12060, "560.35"}, {12050, "555.42"}, {12040, "550.54"},
        {12030, "545.23"}, {12020, "535.54"}, {12010, "530.30"},
    };

    for (size_t i = 0; i < sizeof releases / sizeof *releases; i++)
        if (version >= releases[i].cuda)
            return releases[i].driver;
    return "525.60";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    ENTER;
    return put_text(version, size, driver_of_cuda(the_machine()->driver_version));
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    ENTER;
    const unsigned cuda = the_machine()->driver_version;
    char text[32];

    snprintf(text, sizeof text, "%u.%s", cuda / 1000, driver_of_cuda(cuda));
    return put_text(version, size, text);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER;
    if (!version)
        return INVALID_ARGUMENT;
    *version = (int)the_machine()->driver_version;
    return SUCCESS;
}

PLAIN(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2);

/* The start of it, if the buffer is small: NVML has no error for that here. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name,
                                             unsigned length)
{
    ENTER;
    char path[64], command[4096];

    if (!name || !length)
        return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    if (!read_file(path, command, sizeof command))
        return NOT_FOUND;
    snprintf(name, length, "%s", command);
    return SUCCESS;
}

/* Which GPU */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER;
    if (!count)
        return INVALID_ARGUMENT;
    *count = the_machine()->gpu_count;
    return SUCCESS;
}

PLAIN(nvmlDeviceGetCount, nvmlDeviceGetCount_v2);

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index,
                                                  nvmlDevice_t *device)
{
    ENTER;
    if (!device || index >= the_machine()->gpu_count)
        return INVALID_ARGUMENT;
    *device = &handles[index];
    return SUCCESS;
}

PLAIN(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2);

static nvmlReturn_t find_by_text(const char *uuid, nvmlDevice_t *device)
{
    const struct machine *machine = the_machine();
    char text[UUID_TEXT];

    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        format_uuid(&machine->gpus[gpu].uuid, text);
        if (!strcmp(text, uuid) || !strcmp(text + strlen("GPU-"), uuid)) {
            *device = &handles[gpu];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

static nvmlReturn_t find_by_bytes(const CUuuid *uuid, nvmlDevice_t *device)
{
    const int gpu = find_gpu(uuid);

    if (gpu < 0)
        return NOT_FOUND;
    *device = &handles[gpu];
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid,
                                              nvmlDevice_t *device)
{
    ENTER;
    return uuid && device ? find_by_text(uuid, device) : INVALID_ARGUMENT;
}

struct versioned_uuid {
    unsigned version;
    enum { NO_UUID, ASCII, BINARY } type;
    union {
        char text[UUID_TEXT];
        CUuuid bytes;
    } value;
};

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const struct versioned_uuid *uuid,
                                               nvmlDevice_t *device)
{
    ENTER;
    if (!uuid || !device)
        return INVALID_ARGUMENT;
    if (uuid->version != VERSION(*uuid, 1))
        return ARGUMENT_VERSION_MISMATCH;
    if (uuid->type == BINARY)
        return find_by_bytes(&uuid->value.bytes, device);
    if (uuid->type == ASCII && memchr(uuid->value.text, 0, UUID_TEXT))
        return find_by_text(uuid->value.text, device);
    return INVALID_ARGUMENT;
}

/* As the driver numbers them: the bus is the ordinal and 1. */
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text,
                                                     nvmlDevice_t *device)
{
    ENTER;
    unsigned domain, bus, slot, function;

    if (!text || !device ||
        sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
        return INVALID_ARGUMENT;
    if (domain || slot || function || bus - 1 >= the_machine()->gpu_count)
        return NOT_FOUND;
    *device = &handles[bus - 1];
    return SUCCESS;
}

PLAIN(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2);

/* What a GPU is */

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);

    if (!gpu || !index)
        return INVALID_ARGUMENT;
    *index = ordinal(gpu);
    return SUCCESS;
}

PLAIN(nvmlDeviceGetMinorNumber, nvmlDeviceGetIndex);

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name,
                                      unsigned size)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);

    return gpu ? put_text(name, size, gpu->name) : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid,
                                      unsigned size)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);
    char text[UUID_TEXT];

    if (!gpu)
        return INVALID_ARGUMENT;
    format_uuid(&gpu->uuid, text);
    return put_text(uuid, size, text);
}

/* Each version is longer than the one before. */
struct pci_info {
    char short_bus_id[16];
    unsigned domain, bus, slot;
    unsigned device_id; /* the last field of version 1 */
    unsigned subsystem_id; /* the last known field of version 2 */
    char bus_id[32];
};

static nvmlReturn_t get_pci_info(nvmlDevice_t device, void *info, size_t size)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);
    /* The identifiers are those of an H200. */
    struct pci_info found = {.device_id = 0x233510de, .subsystem_id = 0x18bf10de};

    if (!gpu || !info)
        return INVALID_ARGUMENT;
    found.bus = ordinal(gpu) + 1;
    snprintf(found.short_bus_id, sizeof found.short_bus_id, "0000:%02X:00.0",
             found.bus);
    snprintf(found.bus_id, sizeof found.bus_id, "00000000:%02X:00.0", found.bus);
    memcpy(info, &found, size);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, void *info)
{
    return get_pci_info(device, info, offsetof(struct pci_info, subsystem_id));
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, void *info)
{
    return get_pci_info(device, info, offsetof(struct pci_info, bus_id));
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, void *info)
{
    return get_pci_info(device, info, sizeof(struct pci_info));
}

/* As cuDeviceGetAttribute has it, and in all of these of an H200. */
EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device,
                                                       int *major, int *minor)
{
    ENTER;
    if (!gpu_of(device) || !major || !minor)
        return INVALID_ARGUMENT;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

static nvmlReturn_t answer(nvmlDevice_t device, unsigned *to, unsigned value)
{
    ENTER;
    if (!gpu_of(device) || !to)
        return INVALID_ARGUMENT;
    *to = value;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device,
                                              unsigned *architecture)
{
    return answer(device, architecture, 9); /* Hopper */
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode)
{
    return answer(device, mode, 0); /* any number of processes */
}

/* How a GPU is set up */

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device,
                                                 unsigned *mode)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);

    if (!gpu || !mode)
        return INVALID_ARGUMENT;
    *mode = (gpu->flags & PERSISTENCE_MODE) != 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device,
                                                 unsigned mode)
{
    ENTER;
    struct gpu *gpu = gpu_of(device);

    if (!gpu || mode > 1)
        return INVALID_ARGUMENT;
    if (geteuid() != 0)
        return NO_PERMISSION;
    if (mode)
        gpu->flags |= PERSISTENCE_MODE;
    else
        gpu->flags &= ~(uint32_t)PERSISTENCE_MODE;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current,
                                         unsigned *pending)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);

    if (!gpu || !current || !pending)
        return INVALID_ARGUMENT;
    *current = *pending = (gpu->flags & MIG_MODE) != 0;
    return SUCCESS;
}

/* How a GPU is used */

struct utilization {
    unsigned gpu, memory;
};

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
                                                  struct utilization *rates)
{
    ENTER;
    if (!gpu_of(device) || !rates)
        return INVALID_ARGUMENT;
    *rates = (struct utilization){0, 0};
    return SUCCESS;
}

/* Of two that race for the last bytes both may be counted for a moment. */
static unsigned long long used_at_most_all(const struct gpu *gpu)
{
    const uint64_t used = used_on_gpu(ordinal(gpu));

    return used < gpu->memory_bytes ? used : gpu->memory_bytes;
}

struct memory_info {
    unsigned long long total, free, used;
};

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device,
                                            struct memory_info *info)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);

    if (!gpu || !info)
        return INVALID_ARGUMENT;
    info->total = gpu->memory_bytes;
    info->used = used_at_most_all(gpu);
    info->free = info->total - info->used;
    return SUCCESS;
}

struct memory_info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device,
                                               struct memory_info_v2 *info)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);

    if (!gpu || !info)
        return INVALID_ARGUMENT;
    if (info->version != VERSION(*info, 2))
        return ARGUMENT_VERSION_MISMATCH;
    info->total = gpu->memory_bytes;
    info->reserved = 0;
    info->used = used_at_most_all(gpu);
    info->free = info->total - info->used;
    return SUCCESS;
}

struct user {
    unsigned pid;
    unsigned long long used_bytes; /* the last field of version 1 */
    unsigned gpu_instance, compute_instance;
};

/* A checkpointed process is none, for it has nothing on the GPU. */
static bool is_user(const struct slot *slot, unsigned gpu, struct user *user)
{
    const uint64_t owner = slot->owner;

    if (!owner)
        return false;
    user->pid = (unsigned)(owner >> 32);
    user->used_bytes = slot->used_bytes[gpu];
    user->gpu_instance = user->compute_instance = UINT32_MAX; /* none */
    return (user->used_bytes || slot->contexts >> gpu & 1) && is_alive(owner) &&
           owner == slot->owner; /* or the numbers are another's */
}

static nvmlReturn_t list_users(nvmlDevice_t device, unsigned *count, void *list,
                               size_t size)
{
    ENTER;
    const struct gpu *gpu = gpu_of(device);
    unsigned room, found = 0;
    struct user user;

    if (!gpu || !count || (*count && !list))
        return INVALID_ARGUMENT;
    room = *count;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        if (!is_user(&the_machine()->slots[i], ordinal(gpu), &user))
            continue;
        if (found < room)
            memcpy((char *)list + found * size, &user, size);
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device,
                                                         unsigned *count,
                                                         void *list)
{
    return list_users(device, count, list, offsetof(struct user, gpu_instance));
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device,
                                                            unsigned *count,
                                                            void *list)
{
    return list_users(device, count, list, sizeof(struct user));
}

PLAIN(nvmlDeviceGetComputeRunningProcesses_v2,
      nvmlDeviceGetComputeRunningProcesses_v3);

/* There is no graphics, and no MPS. */
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device,
                                                             unsigned *count,
                                                             const void *list)
{
    ENTER;
    if (!gpu_of(device) || !count || (*count && !list))
        return INVALID_ARGUMENT;
    *count = 0;
    return SUCCESS;
}

PLAIN(nvmlDeviceGetGraphicsRunningProcesses,
      nvmlDeviceGetGraphicsRunningProcesses_v3);
PLAIN(nvmlDeviceGetGraphicsRunningProcesses_v2,
      nvmlDeviceGetGraphicsRunningProcesses_v3);
PLAIN(nvmlDeviceGetMPSComputeRunningProcesses,
      nvmlDeviceGetGraphicsRunningProcesses_v3);
PLAIN(nvmlDeviceGetMPSComputeRunningProcesses_v2,
      nvmlDeviceGetGraphicsRunningProcesses_v3);
PLAIN(nvmlDeviceGetMPSComputeRunningProcesses_v3,
      nvmlDeviceGetGraphicsRunningProcesses_v3);
