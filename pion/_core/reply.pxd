# The C interface may change in a minor release.
from libc.stdint cimport int64_t


cdef class ReplyParser:
    cdef bytearray window               # received bytes, decided ones in front of `start`
    cdef size_t start, end, scan
    cdef list stack                     # open aggregates, outermost first
    cdef object plans                   # deque: one entry for each expected reply
    cdef object plan                    # buffers for the bulks of the reply being received, or None
    cdef Py_ssize_t slot
    cdef int state
    cdef char kind                      # of the bulk being received
    cdef size_t bulk_len, got, max_bulk, max_line
    cdef object body                    # its final buffer, once it is received directly
    cdef tuple parts                    # its buffers, when it was planned into several
    cdef size_t part, part_start, part_end    # which of them `body` is, and the bytes of the bulk that belong there
    cdef Py_buffer view
    cdef bint viewed
    cdef char *dest
    cdef object error

    cdef int fail(self, str text) except -1
    cdef int make_room(self, size_t n) except -1
    cdef int release(self) except -1
    cdef int begin_bulk(self, char kind, int64_t n, list out) except -1
    cdef int direct(self, object target) except -1
    cdef int enter(self, object buffer) except -1
    cdef int took(self, size_t n) except -1
    cdef int finish_bulk(self, list out) except -1
    cdef object planned(self, int64_t n)
    cdef int open_aggregate(self, char kind, int64_t n, list out) except -1
    cdef int complete(self, object value, list out) except -1
    cdef int line(self, const char *s, size_t n, list out) except -1
    cdef int advance(self, list out) except -1
    cdef int run(self, list out) except -1
