# cython: language_level=3
"""The part of the plane that serves descriptors. The C interface may change in a minor release."""

from libc.stdint cimport uint64_t

from pion._core.conn cimport Conn, cconn, plane
from pion._core.keyspace cimport Keyspace
from pion._core.stream cimport Sink


cdef class PlaneBase:
    cdef plane *p
    cdef readonly Keyspace keyspace
    cdef object handler
    cdef object stream_open
    cdef public object on_close
    cdef public object rejected
    cdef dict conns
    cdef dict inboxes
    cdef int depth

    cdef Conn _new(self, int fd, str peer, str laddr)
    cdef cconn *_open(self, Conn conn) except NULL
    cdef list _argv(self, cconn *c, Conn owner)
    cdef int _serve_slow(self, uint64_t until) except -1
    cdef int _serve(self, cconn *c) except -1
    cdef int _place_stream(self, cconn *c, Conn owner) except -1
    cdef int _placed(self, cconn *c, Conn owner, Sink sink) except -1
    cdef int _run_frame(self, cconn *c, Conn owner) except -1
    cdef int _go_on(self, cconn *c) except -1
    cdef int _reply(self, cconn *c, object value) except -1
    cdef int _reply_late(self, cconn *c, object value) except -1
    cdef int _queue(self, cconn *c, object value) except -1
    cdef int _queue_bytes(self, cconn *c, bytes data) except -1
    cdef int _deliver(self, cconn *c, Conn owner) except -1
    cdef int _housekeeping(self) except -1
    cdef int _run_memory(self, cconn *c) except -1
    cdef int _kick(self) except -1
    cdef size_t _feed_sink(self, Conn conn, bytes data) except? 0
