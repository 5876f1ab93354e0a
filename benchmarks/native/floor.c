/* The least that a Python call of the driver can cost: a hand-written extension.
 *
 * Each function does what cuckpt's does on its way to success, and no more: the
 * number is checked, an args struct is copied to the stack, the driver is called
 * without the GIL, the result is checked. Errors say nothing but their number.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>

static PyObject *states; /* a tuple of the members of ProcessState */

#define FUNCTIONS(F)                                                     \
    F(cuInit, (unsigned))                                                \
    F(cuDriverGetVersion, (int *))                                       \
    F(cuDeviceGetCount, (int *))                                         \
    F(cuDeviceGet, (int *, int))                                         \
    F(cuDeviceGetUuid_v2, (char *, int))                                 \
    F(cuDevicePrimaryCtxRetain, (void **, int))                          \
    F(cuDevicePrimaryCtxRelease_v2, (int))                               \
    F(cuCheckpointProcessGetState, (int, int *))                         \
    F(cuCheckpointProcessGetRestoreThreadId, (int, int *))               \
    F(cuCheckpointProcessLock, (int, void *))                            \
    F(cuCheckpointProcessCheckpoint, (int, void *))                      \
    F(cuCheckpointProcessRestore, (int, void *))                         \
    F(cuCheckpointProcessUnlock, (int, void *))                          \
    F(cuCheckpointOperationComplete, (void *))

#define DECLARE(name, parameters) static int (*call_##name) parameters;
FUNCTIONS(DECLARE)

/* Structs */

typedef struct {
    PyObject_HEAD
    _Alignas(8) char value[64];
} Struct;

static PyMemberDef timeout_member[] = {
    {"timeout_ms", T_UINT, offsetof(Struct, value), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define STRUCT(name, members)                                            \
    static PyTypeObject name = {                                         \
        PyVarObject_HEAD_INIT(NULL, 0)                                   \
        .tp_name = "floor." #name,                                       \
        .tp_basicsize = sizeof(Struct),                                  \
        .tp_flags = Py_TPFLAGS_DEFAULT,                                  \
        .tp_members = members,                                           \
        .tp_new = PyType_GenericNew,                                     \
    };
STRUCT(Uuid, NULL)
STRUCT(CheckpointGpuPair, NULL)
STRUCT(CheckpointLockArgs, timeout_member)
STRUCT(CheckpointCheckpointArgs, NULL)
STRUCT(CheckpointRestoreArgs, NULL)
STRUCT(CheckpointUnlockArgs, NULL)

/* Calls */

static int as_int(PyObject *object, int *number)
{
    long value = PyLong_AsLong(object);

    if (value == -1 && PyErr_Occurred())
        return 0;
    if (value < INT_MIN || value > INT_MAX) {
        PyErr_SetString(PyExc_OverflowError, "too large");
        return 0;
    }
    *number = (int)value;
    return 1;
}

static int count_is(Py_ssize_t count, Py_ssize_t least, Py_ssize_t most)
{
    if (count >= least && count <= most)
        return 1;
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return 0;
}

static PyObject *failure(int result)
{
    return PyErr_Format(PyExc_RuntimeError, "error %d", result);
}

#define WITHOUT_GIL(result, call)                                        \
    do {                                                                 \
        Py_BEGIN_ALLOW_THREADS                                           \
        result = call;                                                   \
        Py_END_ALLOW_THREADS                                             \
    } while (0)

#define METHOD(name)                                                     \
    static PyObject *name(PyObject *module, PyObject *const *args,       \
                          Py_ssize_t count)

/* A function of a number and perhaps of an args struct, without an answer. */
#define ACT(name, call, type)                                            \
    METHOD(name)                                                         \
    {                                                                    \
        char copy[64], *p_copy = NULL;                                   \
        int pid, result;                                                 \
        (void)module;                                                    \
        if (!count_is(count, 1, 2) || !as_int(args[0], &pid))            \
            return NULL;                                                 \
        if (count == 2 && args[1] != Py_None) {                          \
            if (!PyObject_TypeCheck(args[1], &type))                     \
                return PyErr_Format(PyExc_TypeError, "not " #type);      \
            p_copy = memcpy(copy, ((Struct *)args[1])->value, 64);       \
        }                                                                \
        WITHOUT_GIL(result, call(pid, p_copy));                          \
        return result ? failure(result) : Py_NewRef(Py_None);            \
    }
ACT(checkpoint_process_lock, call_cuCheckpointProcessLock, CheckpointLockArgs)
ACT(checkpoint_process_checkpoint, call_cuCheckpointProcessCheckpoint,
    CheckpointCheckpointArgs)
ACT(checkpoint_process_restore, call_cuCheckpointProcessRestore,
    CheckpointRestoreArgs)
ACT(checkpoint_process_unlock, call_cuCheckpointProcessUnlock,
    CheckpointUnlockArgs)

/* A function of a number. */
#define TELL(name, type, call, answer)                                   \
    METHOD(name)                                                         \
    {                                                                    \
        int number, result;                                              \
        type value = 0;                                                  \
        (void)module;                                                    \
        if (!count_is(count, 1, 1) || !as_int(args[0], &number))         \
            return NULL;                                                 \
        WITHOUT_GIL(result, call);                                       \
        return result ? failure(result) : answer;                        \
    }
TELL(init, int, call_cuInit((unsigned)number),
     ((void)value, Py_NewRef(Py_None)))
TELL(device_get, int, call_cuDeviceGet(&value, number),
     PyLong_FromLong(value))
TELL(device_primary_ctx_retain, void *,
     call_cuDevicePrimaryCtxRetain(&value, number),
     PyLong_FromSize_t((size_t)value))
TELL(device_primary_ctx_release_v2, int,
     call_cuDevicePrimaryCtxRelease_v2(number),
     ((void)value, Py_NewRef(Py_None)))
TELL(checkpoint_process_get_state, int,
     call_cuCheckpointProcessGetState(number, &value),
     Py_NewRef(PyTuple_GET_ITEM(states, value)))
TELL(checkpoint_process_get_restore_thread_id, int,
     call_cuCheckpointProcessGetRestoreThreadId(number, &value),
     PyLong_FromLong(value))

/* A function of nothing, in the way that C has for it (METH_NOARGS), although
 * Python 3.11 calls that more slowly than METH_FASTCALL. */
#define TELL_ALWAYS(name, call)                                          \
    static PyObject *name(PyObject *module, PyObject *nothing)           \
    {                                                                    \
        int result, value = 0;                                           \
        (void)module, (void)nothing;                                     \
        WITHOUT_GIL(result, call(&value));                               \
        return result ? failure(result) : PyLong_FromLong(value);        \
    }
TELL_ALWAYS(driver_get_version, call_cuDriverGetVersion)
TELL_ALWAYS(device_get_count, call_cuDeviceGetCount)

METHOD(device_get_uuid_v2)
{
    Struct *uuid;
    int device, result;

    (void)module;
    if (!count_is(count, 1, 1) || !as_int(args[0], &device))
        return NULL;
    uuid = (Struct *)PyType_GenericNew(&Uuid, NULL, NULL);
    if (!uuid)
        return NULL;
    WITHOUT_GIL(result, call_cuDeviceGetUuid_v2(uuid->value, device));
    if (!result)
        return (PyObject *)uuid;
    Py_DECREF(uuid);
    return failure(result);
}

METHOD(checkpoint_operation_complete)
{
    void *handle;
    int result;

    (void)module;
    if (!count_is(count, 1, 1))
        return NULL;
    handle = (void *)(uintptr_t)PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred())
        return NULL;
    WITHOUT_GIL(result, call_cuCheckpointOperationComplete(handle));
    return result ? failure(result) : Py_NewRef(Py_None);
}

/* Load the driver at this path; return these states from now on. */
METHOD(load)
{
    void *library;

    (void)module;
    if (!count_is(count, 2, 2))
        return NULL;
    library = dlopen(PyUnicode_AsUTF8(args[0]), RTLD_NOW);
    if (!library)
        return PyErr_Format(PyExc_RuntimeError, "%s", dlerror());
    Py_XSETREF(states, Py_NewRef(args[1]));
#define FIND(name, parameters)                                           \
    call_##name = (int (*) parameters)dlsym(library, #name);             \
    if (!call_##name)                                                    \
        return PyErr_Format(PyExc_RuntimeError, "no " #name);
    FUNCTIONS(FIND)
    Py_RETURN_NONE;
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    ENTRY(load),
    ENTRY(init),
    {"driver_get_version", driver_get_version, METH_NOARGS, NULL},
    {"device_get_count", device_get_count, METH_NOARGS, NULL},
    ENTRY(device_get),
    ENTRY(device_get_uuid_v2),
    ENTRY(device_primary_ctx_retain),
    ENTRY(device_primary_ctx_release_v2),
    ENTRY(checkpoint_process_get_state),
    ENTRY(checkpoint_process_get_restore_thread_id),
    ENTRY(checkpoint_process_lock),
    ENTRY(checkpoint_process_checkpoint),
    ENTRY(checkpoint_process_restore),
    ENTRY(checkpoint_process_unlock),
    ENTRY(checkpoint_operation_complete),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "floor", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit_floor(void)
{
    PyTypeObject *types[] = {
        &Uuid, &CheckpointGpuPair, &CheckpointLockArgs, &CheckpointCheckpointArgs,
        &CheckpointRestoreArgs, &CheckpointUnlockArgs,
    };
    PyObject *module = PyModule_Create(&definition);

    for (size_t i = 0; module && i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) < 0)
            Py_CLEAR(module);
    return module;
}
