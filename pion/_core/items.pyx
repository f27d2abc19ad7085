# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Payloads of log records about hashes and sorted sets. Little-endian, one item after the other:

    HSET 16   u32 field length | u32 value length | field | value
    HDEL 17   u32 length | field
    ZADD 18   f64 score | u32 length | member
    ZREM 19   u32 length | member
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

__all__ = ["HDEL", "HSET", "ZADD", "ZREM", "pack_items", "unpack_items"]

HSET, HDEL, ZADD, ZREM = 16, 17, 18, 19

cdef enum:
    _HSET = 16
    _HDEL = 17
    _ZADD = 18
    _ZREM = 19


cdef inline char *_put(char *p, bytes item):
    memcpy(p, PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item))
    return p + PyBytes_GET_SIZE(item)


cdef inline char *_put_length(char *p, bytes item):
    cdef uint32_t n = <uint32_t>PyBytes_GET_SIZE(item)
    memcpy(p, &n, 4)
    return p + 4


cpdef bytes pack_items(int kind, items):
    """(field, value) pairs of HSET, (member, score) pairs of ZADD, names of HDEL and ZREM. Raises ValueError for
    another kind or more than 1 GiB."""
    cdef bytes first, second, out
    cdef char *p
    cdef double score
    cdef Py_ssize_t total = 0
    if kind == _HSET:
        for first, second in items:
            total += 8 + PyBytes_GET_SIZE(first) + PyBytes_GET_SIZE(second)
    elif kind == _ZADD:
        for first, _ in items:
            total += 12 + PyBytes_GET_SIZE(first)
    elif kind == _HDEL or kind == _ZREM:
        for first in items:
            total += 4 + PyBytes_GET_SIZE(first)
    else:
        raise ValueError(f"effects of kind {kind} have no items")
    if total > 1 << 30:
        raise ValueError("more than 1 GiB in one effect")
    out = PyBytes_FromStringAndSize(NULL, total)
    p = PyBytes_AS_STRING(out)
    if kind == _HSET:
        for first, second in items:
            p = _put(_put(_put_length(_put_length(p, first), second), first), second)
    elif kind == _ZADD:
        for first, score in items:
            memcpy(p, &score, 8)
            p = _put(_put_length(p + 8, first), first)
    else:
        for first in items:
            p = _put(_put_length(p, first), first)
    return out


cpdef list unpack_items(int kind, bytes payload):
    """What `pack_items` packed. Raises ValueError when lengths do not add up."""
    cdef const char *p = PyBytes_AS_STRING(payload)
    cdef const char *end = p + PyBytes_GET_SIZE(payload)
    cdef uint32_t n, m
    cdef double score
    cdef Py_ssize_t fixed = 8 if kind == _HSET else 12 if kind == _ZADD else 4
    if not _HSET <= kind <= _ZREM:
        raise ValueError(f"effects of kind {kind} have no items")
    out = []
    while p < end:
        if end - p < fixed:
            raise ValueError("an item is cut off")
        if kind == _HSET:
            memcpy(&n, p, 4)
            memcpy(&m, p + 4, 4)
        else:
            memcpy(&n, p + fixed - 4, 4)
            m = 0
        if end - p - fixed < <Py_ssize_t>n + <Py_ssize_t>m:
            raise ValueError("an item is cut off")
        if kind == _HSET:
            out.append((p[8:8 + n], p[8 + n:8 + n + m]))
        elif kind == _ZADD:
            memcpy(&score, p, 8)
            out.append((p[12:12 + n], score))
        else:
            out.append(p[4:4 + n])
        p += fixed + n + m
    return out
