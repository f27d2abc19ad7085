# The C interface may change in a minor release.
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t


cdef extern from "headrows.h" nogil:
    int HEADROWS_THREADS

    ctypedef struct headrows_piece:
        const uint8_t *rows
        size_t first
        size_t count

    ctypedef struct headrows_array:
        uint8_t *out
        size_t capacity
        const headrows_piece *pieces
        size_t count

    ctypedef struct headrows_work:
        const headrows_array *arrays
        size_t count
        size_t heads
        size_t bytes
        int fresh

    void headrows_put(const headrows_array *to, const headrows_piece *piece, size_t heads, size_t bytes)
    void headrows_clear(const headrows_array *to, size_t first, size_t end, size_t heads, size_t bytes)
    void headrows_reserve(headrows_work *work)
    void headrows_fill(headrows_work *work, int threads)
