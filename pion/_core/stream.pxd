# cython: language_level=3
"""Bodies that move between sockets and files: descriptors, reply extents, argument sinks.

The C structs are counted; an object owns one reference and may hand further ones to the plane.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "stream.h" nogil:
    int STREAM_RAW
    int STREAM_MIXED
    int STREAM_SHORT
    size_t STREAM_PIECE

    ctypedef struct jobs:
        pass

    ctypedef struct room:
        pass

    ctypedef struct fdref:
        int failed
        int fd
        room *room

    ctypedef struct scratch:
        const void *key

    ctypedef struct extent:
        fdref *ref
        const char *mem
        int64_t offset
        uint64_t n
        int fmt
        uint32_t first
        uint32_t skip
        uint32_t rows

    ctypedef struct extents:
        int nseg
        int decode
        uint32_t dim
        double theta
        char *head
        uint64_t total
        extent *seg

    ctypedef struct extents_at:
        uint64_t out

    ctypedef struct sink:
        uint64_t want
        uint64_t got
        uint64_t written
        uint64_t reserve
        int conv
        uint32_t crc
        int error
        int64_t bad_row

    fdref *fdref_ref(fdref *ref) noexcept
    void fdref_unref(fdref *ref) noexcept
    void scratch_free(scratch *s) noexcept
    extents *extents_ref(extents *e) noexcept
    void extents_unref(extents *e) noexcept
    Py_ssize_t extents_read(const extents *e, extents_at *at, scratch *s, char *buf, size_t n) noexcept
    sink *sink_ref(sink *s) noexcept
    void sink_unref(sink *s) noexcept
    bint sink_done(const sink *s) noexcept
    void sink_feed(sink *s, const char *p, size_t n, scratch *t) noexcept


cdef class Room:
    cdef room *room


cdef class FdRef:
    cdef fdref *ref


cdef class Extents:
    cdef extents *body
    cdef _read(self, char *out, uint64_t n)


cdef class Sink:
    cdef sink *body
    cdef dict __dict__
    cdef public object on_abort
