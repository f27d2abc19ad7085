# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""Which of these 64-bit block hashes does a prefix hold?

`build` packs the hashes of a prefix into one bytes object that `probe` (and, without the GIL, the network plane) asks.
Hashes travel as 8 bytes each, little-endian. The tables are seeded per process, so they are not kept on disk.
The layout and its bounds are described in membership.h; the readable twin is `pion.ref.membership`.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc

from pion._core.membership cimport MT_MAX, mt_build, mt_have_avx2, mt_open, mt_probe_with, mt_room, mt_view

__all__ = ["MAX_HASHES", "build", "counts", "keys", "members", "probe"]

MAX_HASHES = MT_MAX

cdef uint64_t process_seed = int.from_bytes(os.urandom(8), "little")


cdef Py_ssize_t _hash_count(const Py_buffer *view) except -1:
    if view.len % 8 != 0:
        raise ValueError(f"{view.len} bytes are not whole hashes of 8")
    if view.len // 8 > MT_MAX:
        raise ValueError(f"{view.len // 8} hashes are more than {MT_MAX}")
    return view.len // 8


cdef int _open(const Py_buffer *buffer, mt_view *view) except -1:
    if mt_open(<const char *> buffer.buf, <size_t> buffer.len, view) != 0:
        raise ValueError("not a membership table")
    return 0


def build(hashes, seed: int | None = None) -> bytes:
    """Pack hashes into a table.

    Args:
        hashes: buffer of 8-byte little-endian hashes; 0 and duplicates are welcome, at most MAX_HASHES.
        seed: key of the table's hash; without it the one drawn when the process started.

    Raises:
        ValueError: a length that is no multiple of 8, or too many hashes.
    """
    cdef Py_buffer src
    cdef Py_ssize_t n
    cdef size_t length
    cdef uint64_t key = process_seed if seed is None else <uint64_t> (seed & 0xFFFFFFFFFFFFFFFF)
    cdef char *room
    PyObject_GetBuffer(hashes, &src, PyBUF_SIMPLE)
    try:
        n = _hash_count(&src)
        room = <char *> malloc(mt_room(<size_t> n))
        if room == NULL:
            raise MemoryError
        try:
            with nogil:
                length = mt_build(<const char *> src.buf, <size_t> n, key, room)
            return PyBytes_FromStringAndSize(room, <Py_ssize_t> length)
        finally:
            free(room)
    finally:
        PyBuffer_Release(&src)


def probe(table, hashes, *, bint portable=False) -> bytes:
    """One bit for each hash, set when it is a member: bit i is in byte i >> 3, least significant first.

    Args:
        table: what `build` returned.
        hashes: buffer of 8-byte little-endian hashes, at most MAX_HASHES.
        portable: use the portable loop although the machine has a better one.

    Raises:
        ValueError: not a table, a length that is no multiple of 8, or too many hashes.
    """
    cdef Py_buffer blob
    cdef Py_buffer src
    cdef Py_ssize_t n
    cdef uint8_t *bitmap
    cdef int result
    cdef int avx2 = not portable and mt_have_avx2()
    PyObject_GetBuffer(table, &blob, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(hashes, &src, PyBUF_SIMPLE)
        try:
            n = _hash_count(&src)
            answer = PyBytes_FromStringAndSize(NULL, (n + 7) // 8)
            bitmap = <uint8_t *> PyBytes_AS_STRING(answer)
            with nogil:
                result = mt_probe_with(
                    <const char *> blob.buf, <size_t> blob.len, <const char *> src.buf, <size_t> n, bitmap, avx2
                )
        finally:
            PyBuffer_Release(&src)
    finally:
        PyBuffer_Release(&blob)
    if result != 0:
        raise ValueError("not a membership table")
    return answer


def counts(table) -> tuple[int, int]:
    """(hashes as they were given, distinct ones other than 0)."""
    cdef Py_buffer blob
    cdef mt_view view
    PyObject_GetBuffer(table, &blob, PyBUF_SIMPLE)
    try:
        _open(&blob, &view)
        return view.head.given, view.head.distinct
    finally:
        PyBuffer_Release(&blob)


def keys(table) -> tuple[int, int]:
    """(key, slots) of the table's hash; `pion.ref.membership.home` computes home slots from them."""
    cdef Py_buffer blob
    cdef mt_view view
    PyObject_GetBuffer(table, &blob, PyBUF_SIMPLE)
    try:
        _open(&blob, &view)
        return view.head.key, view.head.slots
    finally:
        PyBuffer_Release(&blob)


def members(table) -> bytes:
    """The distinct members other than 0, ascending, 8 bytes each."""
    cdef Py_buffer blob
    cdef mt_view view
    PyObject_GetBuffer(table, &blob, PyBUF_SIMPLE)
    try:
        _open(&blob, &view)
        return PyBytes_FromStringAndSize(view.sorted, 8 * <Py_ssize_t> view.head.distinct)
    finally:
        PyBuffer_Release(&blob)
