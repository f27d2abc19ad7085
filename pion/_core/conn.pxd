# cython: language_level=3
"""The C side of the network plane, and its connections. It may change in a minor release."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pion._core.keyspace cimport Keyspace, ks, kval
from pion._core.resp cimport resp_arg, resp_limits, resp_parser
from pion._core.stream cimport Sink, extents, extents_at, sink


cdef extern from "plane.h" nogil:
    enum:
        AT_HOME
        AT_MOVER
        AT_END
        CLOSE_NO
        CLOSE_FLUSH
        WAIT_NO
        WAIT_FRAME
        WAIT_STREAM
        WAIT_PLACE
        FAST_SLOTS
        FAST_DONE
        SLOT_PIN
        SLOT_EXT
        CONN_SHARED

    const resp_limits RESP_LIMITS_DEFAULT

    ctypedef struct pyheap:
        void **items
        size_t n

    ctypedef struct outq:
        size_t ram
        uint64_t queued
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
        uint64_t log_at
        size_t replies
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
        size_t body_counted
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

    ctypedef struct spares:
        pass

    ctypedef struct slot:
        uint8_t kind
        size_t n
        const char *p
        void *owner
        extents_at at

    ctypedef struct fast_arg:
        const char *p
        size_t n

    ctypedef struct fast_call:
        plane *plane
        cconn *conn
        outq *out
        const fast_arg *direct
        size_t argc

    uint64_t ev_now_ns()
    int ev_prepare_socket(int fd)
    void ev_wake(ev *e)
    plane *plane_new(ks *keyspace, const plane_limits *limits, int movers)
    void plane_end_all(plane *p)
    void plane_free(plane *p)
    int plane_turn(plane *p, int64_t timeout_ns)
    void plane_flush(plane *p)
    void plane_tick(plane *p)
    bint plane_busy(const plane *p)
    void plane_clock(plane *p)
    void plane_touch(plane *p, cconn *c)
    void conn_wrote(cconn *c, uint64_t queued)
    void plane_forget(plane *p, cconn *c)
    cconn *plane_pop_slow(plane *p)
    cconn *conn_new(plane *p, int fd)
    void conn_end(plane *p, cconn *c)
    void conn_run(plane *p, cconn *c)
    int conn_room(cconn *c, size_t least)
    int conn_keep_window(cconn *c)
    void conn_consume(cconn *c)
    void conn_body_got(plane *p, cconn *c, size_t n)
    int conn_stream(plane *p, cconn *c, sink *s)
    bint conn_sink_open(const cconn *c)
    void conn_want(plane *p, cconn *c)
    void conn_set_limits(cconn *c)
    int conn_put_extents(plane *p, cconn *c, extents *e)
    bint conn_wants_input(const cconn *c)
    void conn_fail_room(plane *p, cconn *c, int rc)
    void outq_put(outq *q, spares *s, const void *p, size_t n)
    int outq_put_object(outq *q, pyheap *all, size_t all_pinned, void *object, const char *p, size_t n)
    bint outq_empty(const outq *q)
    slot *outq_head(const outq *q)
    void outq_pop(outq *q, spares *s)
    void outq_clear(outq *q, spares *s)
    void outq_collect(outq *q, pyheap *all)
    spares *plane_spares(plane *p)
    int fast_add(plane *p, int id, const char *name, size_t n, int arity, int flags)
    int fast_exec(fast_call *f, int id)
    int stream_add(plane *p, const char *name, size_t n, size_t arg)


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
