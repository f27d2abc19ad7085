# The C interface may change in a minor release.
from pion._core.resp cimport resp_limits, resp_parser


cdef class Parser:
    cdef resp_parser parser
    cdef resp_limits limits
    cdef char *buf
    cdef size_t start, end, room
    cdef size_t sink_left           # bytes the current sink still waits for
    cdef object sink, current
    cdef list taken                 # finished sinks of the frame being received
    cdef int append(self, const char *data, size_t n) except -1
    cdef list argv(self)
    cdef int offer(self) except -1
    cdef int finish_sink(self) except -1
    cdef int run(self, list out) except -1
