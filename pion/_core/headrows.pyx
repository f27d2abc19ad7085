# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""Stored rows, (rows, heads, values), into the arrays of models, (heads, capacity, values); see headrows.h."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free

from pion._core.headrows cimport (
    HEADROWS_THREADS,
    headrows_array,
    headrows_clear,
    headrows_fill,
    headrows_piece,
    headrows_put,
    headrows_reserve,
    headrows_work,
)

__all__ = ["MAX_THREADS", "clear", "fill", "put", "reserve"]

MAX_THREADS = HEADROWS_THREADS


cdef class _Views:
    """Buffers that are held for the time of a call."""

    cdef Py_buffer *views
    cdef size_t room
    cdef size_t count

    def __cinit__(self, size_t room):
        self.views = <Py_buffer *> calloc(room + 1, sizeof(Py_buffer))
        if self.views == NULL:
            raise MemoryError
        self.room = room

    def __dealloc__(self):
        while self.count:
            self.count -= 1
            PyBuffer_Release(&self.views[self.count])
        free(self.views)

    cdef Py_buffer *hold(self, object owner, int flags) except NULL:
        cdef Py_buffer *view = &self.views[self.count]
        PyObject_GetBuffer(owner, view, flags)
        self.count += 1
        return view


cdef int _describe(headrows_array *to, Py_buffer *view, Py_ssize_t heads, Py_ssize_t head_bytes) except -1:
    if heads < 1 or head_bytes < 1:
        raise ValueError("heads and their bytes are at least 1")
    to.out = <uint8_t *> view.buf
    to.capacity = <size_t> (view.len // head_bytes // heads)
    if <Py_ssize_t> to.capacity * heads * head_bytes != view.len:
        raise ValueError(f"{view.len} bytes are not whole rows of {heads} x {head_bytes}")
    return 0


cdef int _place(headrows_piece *piece, const headrows_array *to, Py_buffer *view, Py_ssize_t first, Py_ssize_t row_bytes
                ) except -1:
    if view.len % row_bytes:
        raise ValueError(f"{view.len} bytes are not whole rows of {row_bytes}")
    piece.rows = <const uint8_t *> view.buf
    piece.count = <size_t> (view.len // row_bytes)
    if first < 0 or piece.count > to.capacity or <size_t> first > to.capacity - piece.count:
        raise ValueError(f"rows {first} to {first + <Py_ssize_t> piece.count} do not fit in {to.capacity}")
    piece.first = <size_t> first
    return 0


def put(out, Py_ssize_t first, rows, Py_ssize_t heads, Py_ssize_t head_bytes):
    """Copy rows into an array.

    Args:
        out: contiguous and writable, (heads, capacity, head_bytes) bytes.
        first: row of the array that the first of `rows` belongs at.
        rows: contiguous, (n, heads, head_bytes) bytes.

    Raises:
        ValueError: no whole rows, or they do not fit.
    """
    cdef _Views views = _Views(2)
    cdef headrows_array to
    cdef headrows_piece piece
    _describe(&to, views.hold(out, PyBUF_WRITABLE), heads, head_bytes)
    _place(&piece, &to, views.hold(rows, PyBUF_SIMPLE), first, heads * head_bytes)
    with nogil:
        headrows_put(&to, &piece, <size_t> heads, <size_t> head_bytes)


def clear(out, Py_ssize_t first, Py_ssize_t end, Py_ssize_t heads, Py_ssize_t head_bytes):
    """Fill rows [first, end) of an array with zeros; `out` as in `put`."""
    cdef _Views views = _Views(1)
    cdef headrows_array to
    _describe(&to, views.hold(out, PyBUF_WRITABLE), heads, head_bytes)
    if not 0 <= first <= end <= <Py_ssize_t> to.capacity:
        raise ValueError(f"rows {first} to {end} do not fit in {to.capacity}")
    with nogil:
        headrows_clear(&to, <size_t> first, <size_t> end, <size_t> heads, <size_t> head_bytes)


def reserve(outs):
    """Ask for the huge pages that arrays cover which were never touched, where the system has them.

    Args:
        outs: a list of contiguous, writable buffers; those that lie side by side share huge pages.
    """
    cdef headrows_work work
    cdef headrows_array *filled
    cdef _Views views = _Views(<size_t> len(outs))
    cdef size_t number = 0
    filled = <headrows_array *> calloc(<size_t> len(outs) + 1, sizeof(headrows_array))
    if filled == NULL:
        raise MemoryError
    try:
        for out, _ in _by_address([(out, None) for out in outs]):
            _describe(&filled[number], views.hold(out, PyBUF_WRITABLE), 1, 1)
            number += 1
        work.arrays = filled
        work.count = number
        work.heads = work.bytes = 1
        work.fresh = True
        with nogil:
            headrows_reserve(&work)
    finally:
        free(filled)


def fill(arrays, Py_ssize_t heads, Py_ssize_t head_bytes, *, int threads=1, bint fresh=False):
    """Fill whole arrays; rows that no piece covers become zeros.

    Args:
        arrays: a list of (out, pieces), `out` as in `put`, pieces a list of (first, rows) in order and without overlap.
        threads: that share the work, at most MAX_THREADS.
        fresh: the arrays were never touched: ask for the huge pages that they cover, where the system has them.

    Raises:
        ValueError: no whole rows, they do not fit, or they overlap.
    """
    cdef size_t total = 0, number = 0, at = 0, reached
    cdef headrows_work work
    cdef headrows_array *filled = NULL
    cdef headrows_piece *pieces = NULL
    cdef _Views views
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"1 to {MAX_THREADS} threads")
    if fresh:
        arrays = _by_address(arrays)
    for _, parts in arrays:
        total += 1 + <size_t> len(parts)
    views = _Views(total)
    try:
        filled = <headrows_array *> calloc(<size_t> len(arrays) + 1, sizeof(headrows_array))
        pieces = <headrows_piece *> calloc(total + 1, sizeof(headrows_piece))
        if filled == NULL or pieces == NULL:
            raise MemoryError
        for out, parts in arrays:
            _describe(&filled[number], views.hold(out, PyBUF_WRITABLE), heads, head_bytes)
            filled[number].pieces = &pieces[at]
            reached = 0
            for first, rows in parts:
                _place(&pieces[at], &filled[number], views.hold(rows, PyBUF_SIMPLE), first, heads * head_bytes)
                if pieces[at].first < reached:
                    raise ValueError("the pieces overlap")
                reached = pieces[at].first + pieces[at].count
                at += 1
            filled[number].count = <size_t> len(parts)
            number += 1
        work.arrays = filled
        work.count = number
        work.heads = <size_t> heads
        work.bytes = <size_t> head_bytes
        work.fresh = fresh
        with nogil:
            headrows_fill(&work, threads)
    finally:
        free(filled)
        free(pieces)


cdef list _by_address(arrays):
    """The same in the order of memory: neighbours share huge pages."""
    cdef Py_buffer view
    cdef list found = []
    for number, item in enumerate(arrays):
        PyObject_GetBuffer(item[0], &view, PyBUF_SIMPLE)
        found.append((<size_t> view.buf, number, item))
        PyBuffer_Release(&view)
    found.sort()
    return [item for _, _, item in found]
