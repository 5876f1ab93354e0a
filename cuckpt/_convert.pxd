"""Python integers to C integers, by ``__index__``: 1.9 is refused, not cut."""

from cpython.long cimport PyLong_CheckExact
from cpython.number cimport PyIndex_Check
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, UINT32_MAX


cdef extern from *:
    """
    /* The value of a small exact int, found without a call. */
    #if PY_VERSION_HEX >= 0x030C0000
    #define cuckpt_is_small(n) PyUnstable_Long_IsCompact((PyLongObject *) (n))
    #define cuckpt_small(n) PyUnstable_Long_CompactValue((PyLongObject *) (n))
    #else
    #define cuckpt_is_small(n) ((size_t) (Py_SIZE(n) + 1) <= 2)
    #define cuckpt_small(n) \\
        (Py_SIZE(n) * (long long) ((PyLongObject *) (n))->ob_digit[0])
    #endif
    """
    bint is_small "cuckpt_is_small" (object n)
    long long small "cuckpt_small" (object n)


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) \
        except? -1


cdef inline int as_int32(object value, str name) except? -1:
    return <int> as_integer(value, name, INT32_MIN, INT32_MAX)


cdef inline unsigned int as_uint32(object value, str name) except? 0xffffffff:
    return <unsigned int> as_integer(value, name, 0, UINT32_MAX)


cdef inline void *as_address(object value, str name) except? NULL:
    return <void *> <size_t> as_integer(value, name, 0, INT64_MAX)


cdef inline long long as_integer(
        object value, str name, long long low, long long high) except? -1:
    if PyLong_CheckExact(value) and is_small(value):
        if low <= small(value) <= high:
            return small(value)
    return as_integer_slowly(value, name, low, high)


cdef inline long long as_integer_slowly(
        object value, str name, long long low, long long high) except? -1:
    cdef int overflow = 0
    cdef long long number
    if not PyIndex_Check(value):
        raise TypeError(
            f"{name} must be an integer, not {type(value).__name__}")
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or number < low or number > high:
        raise OverflowError(
            f"{name} must be between {low} and {high}, not "
            + (f"{value}" if value.bit_length() < 256 else "so large"))
    return number
