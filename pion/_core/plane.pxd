# cython: language_level=3
"""The network plane. The C interface may change in a minor release."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pion._core.keyspace cimport Keyspace, ks, kval
from pion._core.resp cimport resp_arg, resp_limits, resp_parser
from pion._core.stream cimport Sink, extents, extents_at, sink


cdef extern from "plane.h" nogil:
    ctypedef struct pyheap:
        void **items
        size_t n

    ctypedef struct outq:
        size_t ram
        int failed

    ctypedef struct cconn "conn":
        void *py
        uint64_t id
        int fd
        uint8_t where
        uint8_t closing
        uint8_t waiting
        uint8_t eof
        uint8_t pending
        uint8_t stalled
        uint8_t wrote
        uint8_t authed
        uint8_t fast
        uint8_t proto
        uint8_t db
        uint8_t kill
        uint8_t body_ready
        char *inp "in"
        size_t start
        size_t end
        size_t cap
        resp_parser parser
        kval *body
        size_t body_got
        sink *sink
        char *early
        size_t early_n
        outq out
        uint64_t commands
        uint64_t net_in
        uint64_t net_out
        uint64_t created_ns
        uint64_t active_ns
        const char *last_cmd

    ctypedef struct conn_list:
        cconn **items
        size_t n

    ctypedef struct fast_cmd:
        char *name
        char *lower
        uint8_t len
        uint64_t calls

    ctypedef struct stream_cmd:
        char *name
        uint8_t len
        size_t arg

    ctypedef struct plane_limits:
        resp_limits parse
        size_t preauth_output
        size_t max_output
        size_t max_slots
        size_t input_total
        size_t output_total
        size_t slice
        size_t stream_min
        uint64_t batch_ns
        uint64_t dwell_ns
        uint64_t send_timeout_ns
        uint64_t linger_ns

    ctypedef struct ev:
        int fd

    ctypedef struct plane:
        ev ev
        ks *keyspace
        plane_limits limits
        uint8_t fast_enabled
        uint8_t oom
        fast_cmd *fast
        stream_cmd *streams
        int nstreams
        conn_list all
        conn_list dead
        size_t slow_n
        size_t lent
        pyheap pydead
        size_t pinned
        size_t input_bytes
        uint64_t now_ms
        uint64_t now_ns
        uint64_t total_connections
        uint64_t commands
        uint64_t net_in
        uint64_t net_out
        uint64_t timed_out
        uint64_t overflowed


cdef class Conn:
    cdef cconn *c
    cdef Sink sink
    cdef list inbox
    cdef bytes last
    cdef readonly str peer
    cdef readonly str laddr
    cdef public object name
    cdef public object user
    cdef public object lib_name
    cdef public object lib_ver
    cdef public dict data


cdef class Plane:
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
    cdef int _run_frame(self, cconn *c, Conn owner) except -1
    cdef int _go_on(self, cconn *c) except -1
    cdef int _queue(self, cconn *c, object value) except -1
    cdef int _queue_bytes(self, cconn *c, bytes data) except -1
    cdef int _deliver(self, cconn *c, Conn owner) except -1
    cdef int _housekeeping(self) except -1
    cdef int _run_memory(self, cconn *c) except -1
    cdef int _kick(self) except -1
