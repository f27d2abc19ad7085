# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The network plane: every plain connection of the server behind one pollable descriptor.

Theory of operation. ``Plane.fd`` is readable when a connection has something to do. ``Plane.batch`` then makes turns:
one pass of C over all ready connections (receive, parse, fast commands, send), without the GIL; then, holding it, the
frames for Python: `handler` is called for each, its value encoded into the connection's output, and the connection
goes on parsing. Replies leave after the log records of the batch were written. File bodies travel on mover threads
(movers.h). A connection whose reply comes later (PENDING) parses no further; `resume` completes it.

A connection without a descriptor (`open_memory`) runs the same code: `feed` bytes in, `take_output` out.
"""

import logging

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pion._core.keyspace cimport ks_log_pending
from pion._core.resp cimport RESP_OFF_TAKEN, encode_parts, resp_bulk_done
from pion._core.stream cimport Extents, Sink, extents_read, scratch, scratch_free, sink_done, sink_feed, \
    sink_ref, sink_unref

from pion._core.resp import OK, Err, register_stream_type

__all__ = ["FAST_DEL", "FAST_ECHO", "FAST_EXISTS", "FAST_GET", "FAST_INCR", "FAST_MEMBERSHIP", "FAST_MGET", "FAST_PING",
           "FAST_SET", "FLAG_DENYOOM", "FLAG_WRITE", "PENDING", "Conn", "Plane"]


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
        FAST_SLOTS
        FAST_DONE
        SLOT_PIN
        _FAST_PING "FAST_PING"
        _FAST_ECHO "FAST_ECHO"
        _FAST_GET "FAST_GET"
        _FAST_SET "FAST_SET"
        _FAST_DEL "FAST_DEL"
        _FAST_EXISTS "FAST_EXISTS"
        _FAST_INCR "FAST_INCR"
        _FAST_MGET "FAST_MGET"
        _FAST_MEMBERSHIP "FAST_MEMBERSHIP"
        _FLAG_WRITE "FLAG_WRITE"
        _FLAG_DENYOOM "FLAG_DENYOOM"
        SLOT_EXT
        CONN_SHARED

    const resp_limits RESP_LIMITS_DEFAULT

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


FAST_PING = _FAST_PING
FAST_ECHO = _FAST_ECHO
FAST_GET = _FAST_GET
FAST_SET = _FAST_SET
FAST_DEL = _FAST_DEL
FAST_EXISTS = _FAST_EXISTS
FAST_INCR = _FAST_INCR
FAST_MGET = _FAST_MGET
FAST_MEMBERSHIP = _FAST_MEMBERSHIP
FLAG_WRITE = _FLAG_WRITE
FLAG_DENYOOM = _FLAG_DENYOOM

cdef object log = logging.getLogger("pion.plane")

register_stream_type(Extents)


class _Pending:
    """What a handler returns when `Plane.resume` will bring the reply."""

    __slots__ = ()

    def __repr__(self):
        return "PENDING"


PENDING = _Pending()
cdef object pending = PENDING
cdef object internal_error = Err(b"ERR internal error")
cdef object CLOSE = object()    # in an inbox: close after what stands before it

# Every bound, in bytes, counts or seconds. limits.py gives the reasons for the values the server uses.
cdef dict DEFAULTS = {
    "max_args": 1024 * 1024,
    "max_bulk": 512 << 20,
    "max_inline": 64 << 10,
    "query_buffer": 256 << 20,        # one half-received command, bodies that go elsewhere excepted
    "query_buffer_total": 4 << 30,    # all half-received commands
    "direct_min": 32 << 10,           # a SET value from here on is received where it will stay
    "stream_min": 256 << 10,          # a streamed argument from here on goes to its file
    "preauth_output": 64 << 10,       # unread replies before login (case A4)
    "max_output": 64 << 20,           # unread replies in memory; then the connection is no longer read
    "max_output_slots": 65536,
    "output_total": 1 << 30,          # unread replies of all connections
    "send_timeout": 60.0,
    "linger": 2.0,
}


@cython.final
@cython.no_gc_clear
cdef class Conn:
    """One connection: what commands may know and change about it.

    Attributes:
        id: never reused within a server's life.
        fd: descriptor, -1 without one or after the end.
        peer, laddr: "address:port" of both ends, or a path.
        db, proto: selected database; RESP version, 2 or 3.
        authenticated: before that, only small commands and few unread replies are accepted.
        fast: False sends every frame to the handler, in order.
        user, name, lib_name, lib_ver: filled in by commands.
        data: state of command families.
        created, last_active: seconds of `time.monotonic`.
        closing: no further command will run.
        output_bytes, input_bytes: memory held for unread replies, for a half-received command (0 while a mover has it).
        wants_input: (memory connections) False while feeding more would only pile up.
    """

    def __cinit__(self):
        self.name = ""
        self.lib_name = ""
        self.lib_ver = ""
        self.data = {}
        self.inbox = []

    def __dealloc__(self):
        if self.c != NULL:
            sink_unref(self.c.sink)
            free(self.c)

    def __repr__(self):
        return f"<Conn {self.c.id} {self.peer}>"

    @property
    def id(self):
        return self.c.id

    @property
    def fd(self):
        return self.c.fd

    @property
    def db(self):
        return self.c.db

    @db.setter
    def db(self, int value):
        if not 0 <= value <= 255:
            raise ValueError("database index out of range")
        self.c.db = value

    @property
    def proto(self):
        return self.c.proto

    @proto.setter
    def proto(self, int value):
        if value != 2 and value != 3:
            raise ValueError("RESP version is 2 or 3")
        self.c.proto = value

    @property
    def authenticated(self):
        return bool(self.c.authed)

    @authenticated.setter
    def authenticated(self, bint value):
        self.c.authed = value
        conn_set_limits(self.c)

    @property
    def fast(self):
        return bool(self.c.fast)

    @fast.setter
    def fast(self, bint value):
        self.c.fast = value

    @property
    def created(self):
        return self.c.created_ns / 1e9

    @property
    def last_active(self):
        return self.c.active_ns / 1e9

    @property
    def cmd_count(self):
        return self.c.commands

    @property
    def net_in(self):
        return self.c.net_in

    @property
    def net_out(self):
        return self.c.net_out

    @property
    def last_cmd(self):
        """Lower-case name of the last command, b"" before the first."""
        if self.c.last_cmd != NULL:
            return <bytes>self.c.last_cmd
        return self.last or b""

    @last_cmd.setter
    def last_cmd(self, bytes value):
        self.c.last_cmd = NULL
        self.last = value

    @property
    def closing(self):
        return self.c.closing != CLOSE_NO or self.c.where == AT_END or self.c.kill != 0

    @property
    def closed(self):
        """The connection has ended."""
        return self.c.where == AT_END

    @property
    def pending(self):
        """A reply is due through `Plane.resume`."""
        return bool(self.c.pending)

    @property
    def output_bytes(self):
        return self.c.out.ram if self.c.where == AT_HOME else 0

    @property
    def input_bytes(self):
        return self.c.cap + self.c.body_got if self.c.where == AT_HOME else 0

    @property
    def wants_input(self):
        return self.c.where == AT_HOME and conn_wants_input(self.c)


@cython.final
@cython.no_gc_clear
cdef class Plane:
    """See the module text.

    Args:
        keyspace: what the fast commands work on.
        handler: `handler(conn, argv) -> reply value | PENDING`; argv holds bytes, and a Sink where one was opened.
        stream_open: `stream_open(conn, argv_so_far, nbytes) -> Sink | None` for the argument of a command in `streams`.
        fast_table: (FAST_*, NAME, arity, flags) of the commands that may run in C.
        streams: (NAME, index) of arguments that may be received straight into a file.
        movers: threads for file bodies.
        dwell_us: how long `batch` waits for more before it returns.
        slice_bytes: most bytes moved for one connection before the others get their turn.
        batch_ms: most time a batch takes before other tasks get theirs.
        limits: overrides of the bounds, by name (DEFAULTS above).

    Attributes:
        fast_enabled: False sends every frame to the handler.
        oom: True sends fast commands with FLAG_DENYOOM to the handler.
        on_close: called with each connection that ended.
        rejected: connections refused by whoever accepts them.
    """

    def __cinit__(self, Keyspace keyspace not None, handler, stream_open=None, *, fast_table=(), streams=(),
                  int movers=2, int dwell_us=200, Py_ssize_t slice_bytes=1 << 20, double batch_ms=1.0, limits=None):
        cdef plane_limits bounds
        cdef bytes name
        values = dict(DEFAULTS)
        for key, value in (limits or {}).items():
            if key not in values:
                raise TypeError(f"unknown limit {key!r}")
            values[key] = value
        if slice_bytes < 4096 or dwell_us < 0 or batch_ms <= 0:
            raise ValueError("slice_bytes, dwell_us or batch_ms out of range")
        memset(&bounds, 0, sizeof(bounds))
        bounds.parse = RESP_LIMITS_DEFAULT
        bounds.parse.max_args = values["max_args"]
        bounds.parse.max_bulk = values["max_bulk"]
        bounds.parse.max_inline = values["max_inline"]
        bounds.parse.max_command = values["query_buffer"]
        bounds.parse.big = min(values["direct_min"], values["stream_min"])
        bounds.stream_min = values["stream_min"]
        bounds.input_total = values["query_buffer_total"]
        bounds.preauth_output = values["preauth_output"]
        bounds.max_output = values["max_output"]
        bounds.max_slots = values["max_output_slots"]
        bounds.output_total = values["output_total"]
        bounds.slice = slice_bytes
        bounds.batch_ns = <uint64_t>(batch_ms * 1e6)
        bounds.dwell_ns = <uint64_t>dwell_us * 1000
        bounds.send_timeout_ns = <uint64_t>(<double>values["send_timeout"] * 1e9)
        bounds.linger_ns = <uint64_t>(<double>values["linger"] * 1e9)
        self.keyspace = keyspace
        self.handler = handler
        self.stream_open = stream_open
        self.rejected = 0
        self.conns = {}
        self.inboxes = {}
        self.p = plane_new(keyspace.k, &bounds, movers)
        if self.p == NULL:
            raise OSError("the plane could not be set up (descriptors or memory)")
        for ident, name, arity, flags in fast_table:
            name = name.upper()
            if fast_add(self.p, ident, name, len(name), arity, flags):
                raise ValueError(f"fast command {name!r}")
        for name, index in streams:
            name = name.upper()
            if stream_add(self.p, name, len(name), index):
                raise ValueError(f"streamed command {name!r}")

    def __dealloc__(self):
        if self.p != NULL:
            with nogil:
                plane_end_all(self.p)
            while self.p.pydead.n:
                self.p.pydead.n -= 1
                Py_DECREF(<object>self.p.pydead.items[self.p.pydead.n])
            plane_free(self.p)

    @property
    def fd(self):
        return self.p.ev.fd

    @property
    def fast_enabled(self):
        return bool(self.p.fast_enabled)

    @fast_enabled.setter
    def fast_enabled(self, bint value):
        self.p.fast_enabled = value

    @property
    def oom(self):
        return bool(self.p.oom)

    @oom.setter
    def oom(self, bint value):
        self.p.oom = value

    @property
    def connections(self):
        return list(self.conns.values())

    @property
    def connected(self):
        """Number of open connections."""
        return self.p.all.n

    @property
    def lent(self):
        """Connections that movers have at the moment."""
        return self.p.lent

    @property
    def stats(self):
        """Counters by name; fast_calls by command name."""
        cdef size_t i
        cdef cconn *c
        cdef uint64_t net_in = self.p.net_in, net_out = self.p.net_out
        cdef size_t max_input = 0, max_output = 0
        for i in range(self.p.all.n):
            c = self.p.all.items[i]
            net_in += c.net_in
            net_out += c.net_out
            if c.where == AT_HOME:
                max_input = max(max_input, c.cap + c.body_got)
                max_output = max(max_output, c.out.ram)
        return {
            "total_connections": self.p.total_connections,
            "connected": self.p.all.n,
            "commands_processed": self.p.commands,
            "net_in": net_in,
            "net_out": net_out,
            "rejected": self.rejected,
            "timed_out": self.p.timed_out,
            "overflowed": self.p.overflowed,
            "max_input": max_input,
            "max_output": max_output,
            "input_bytes": self.p.input_bytes,
            "lent": self.p.lent,
            "fast_calls": {<bytes>self.p.fast[i].lower: self.p.fast[i].calls
                           for i in range(FAST_SLOTS) if self.p.fast[i].len},
        }

    def reset_stats(self):
        """CONFIG RESETSTAT: the counters start again at zero."""
        cdef size_t i
        self.p.total_connections = self.p.commands = self.p.net_in = self.p.net_out = 0
        self.p.timed_out = self.p.overflowed = 0
        self.rejected = 0
        for i in range(self.p.all.n):
            self.p.all.items[i].net_in = 0
            self.p.all.items[i].net_out = 0
        for i in range(FAST_SLOTS):
            self.p.fast[i].calls = 0

    # --- connections ----------------------------------------------------------------------------------------------

    cdef Conn _new(self, int fd, str peer, str laddr):
        cdef Conn conn = Conn.__new__(Conn)
        if self.p == NULL:
            raise RuntimeError("the plane is closed")
        conn.c = conn_new(self.p, fd)
        if conn.c == NULL:
            raise MemoryError
        conn.c.py = <void *>conn
        conn.peer = peer
        conn.laddr = laddr
        self.conns[conn.c.id] = conn
        return conn

    def add(self, int sock_fd, *, bint unix=False, str peer="", str local=""):
        """Serve a connected socket. Its descriptor belongs to the plane from here on."""
        cdef int rc = ev_prepare_socket(sock_fd)
        if rc < 0:
            raise OSError(-rc, "cannot make the socket non-blocking")
        cdef Conn conn = self._new(sock_fd, peer, local)
        conn_want(self.p, conn.c)
        if conn.c.where == AT_END:
            self._housekeeping()
            raise OSError("the socket cannot be watched")
        return conn

    def open_memory(self, str peer="memory", str local="memory"):
        """A connection without a descriptor; see `feed` and `take_output`."""
        return self._new(-1, peer, local)

    cdef cconn *_open(self, Conn conn) except NULL:
        if self.p == NULL:
            raise RuntimeError("the plane is closed")
        return conn.c

    def close(self, Conn conn=None, bint after_flush=True):
        """End a connection (or, without one, the plane and all its connections).

        Args:
            after_flush: queued replies still leave; otherwise the end is immediate.
        """
        cdef cconn *c
        if conn is None:
            self._close_all()
            return
        c = self._open(conn)
        if c.where == AT_END:
            return
        if not after_flush:
            conn_end(self.p, c)
        elif c.where == AT_MOVER:
            conn.inbox.append((CLOSE, False))
            self.inboxes[c.id] = conn
        elif c.closing == CLOSE_NO:
            c.closing = CLOSE_FLUSH
            plane_touch(self.p, c)
        self._kick()

    def _close_all(self):
        if self.p == NULL:
            return
        with nogil:
            plane_end_all(self.p)
        self._housekeeping()
        self.handler = self.stream_open = self.on_close = None

    def resume(self, Conn conn, value):
        """Complete a PENDING reply. After the connection's end this does nothing.

        Raises:
            RuntimeError: no reply is due.
        """
        cdef cconn *c = self._open(conn)
        if c.where == AT_END:
            return
        if not c.pending:
            raise RuntimeError("no reply is due on this connection")
        if c.where == AT_MOVER:
            conn.inbox.append((value, True))
            self.inboxes[c.id] = conn
            return
        c.pending = 0
        plane_touch(self.p, c)
        if ks_log_pending(self.p.keyspace):
            c.wrote = 1
        self._queue(c, value)
        if c.fd < 0 and self.depth == 0:
            self._run_memory(c)
        else:
            self._go_on(c)
            self._kick()

    def push(self, Conn conn, value):
        """Send something between two replies."""
        cdef cconn *c = self._open(conn)
        if c.where == AT_END or c.closing != CLOSE_NO:
            return
        if c.where == AT_MOVER:
            conn.inbox.append((value, False))
            self.inboxes[c.id] = conn
            return
        plane_touch(self.p, c)
        self._queue(c, value)
        self._kick()

    cdef int _kick(self) except -1:
        """Something was changed from outside: have the next batch run soon."""
        if self.depth == 0:
            self._housekeeping()
            ev_wake(&self.p.ev)
        return 0

    # --- the batch ------------------------------------------------------------------------------------------------

    def batch(self):
        """Serve what is ready. True: call again (after a checkpoint) without waiting for the descriptor."""
        cdef uint64_t until
        cdef int64_t timeout = 0
        cdef int served
        if self.p == NULL:
            raise RuntimeError("the plane is closed")
        until = ev_now_ns() + self.p.limits.batch_ns
        self.depth += 1
        try:
            while True:
                with nogil:
                    served = plane_turn(self.p, timeout)
                if served < 0:
                    raise OSError(-served, "waiting for connections failed")
                if self.p.slow_n or self.inboxes:
                    self._serve_slow(until)
                self._housekeeping()
                if served == 0 and not plane_busy(self.p):
                    if timeout or not self.p.limits.dwell_ns:
                        return False
                elif ev_now_ns() >= until:
                    return True
                timeout = 0 if plane_busy(self.p) else <int64_t>self.p.limits.dwell_ns
        finally:
            self.depth -= 1

    def tick(self):
        """Ten times a second: send timeouts, peers that do not close."""
        with nogil:
            plane_tick(self.p)
        self._housekeeping()

    cdef int _serve_slow(self, uint64_t until) except -1:
        """Frames that wait for Python, the longest waiting first, until none is left or the time is up."""
        cdef cconn *c
        cdef Conn owner
        if self.inboxes:
            for owner in list(self.inboxes.values()):
                if owner.c.where != AT_MOVER:
                    del self.inboxes[owner.c.id]
                    self._deliver(owner.c, owner)
        while True:
            c = plane_pop_slow(self.p)
            if c == NULL:
                break
            if c.where != AT_HOME:
                continue
            self._serve(c)
            if ev_now_ns() > until:
                break
        with nogil:
            plane_flush(self.p)
        return 0

    cdef int _serve(self, cconn *c) except -1:
        cdef Conn owner = <Conn>c.py
        if c.waiting == WAIT_STREAM:
            self._place_stream(c, owner)
        elif c.waiting == WAIT_FRAME:
            self._run_frame(c, owner)
        return self._go_on(c)

    cdef int _go_on(self, cconn *c) except -1:
        """Parse and run on."""
        if c.where != AT_HOME:
            return 0
        conn_run(self.p, c)
        if conn_keep_window(c):
            conn_end(self.p, c)
        return 0

    cdef list _argv(self, cconn *c, Conn owner):
        """The complete arguments of the current frame."""
        cdef list argv = []
        cdef size_t i
        cdef resp_arg *arg
        for i in range(c.parser.nargs):
            arg = &c.parser.args[i]
            if arg.off != RESP_OFF_TAKEN:
                argv.append(PyBytes_FromStringAndSize(c.inp + c.start + arg.off, arg.len))
            elif c.sink != NULL:
                argv.append(owner.sink)
            else:
                argv.append(PyBytes_FromStringAndSize(c.body.data, c.body.len))
        return argv

    cdef int _place_stream(self, cconn *c, Conn owner) except -1:
        """Ask where a large argument goes."""
        cdef Sink sink
        cdef int rc
        try:
            found = self.stream_open(owner, self._argv(c, owner), c.parser.bulk_len)
            if found is None:
                sink = None
            elif isinstance(found, Sink) and found.nbytes == c.parser.bulk_len and found.received == 0:
                sink = found
            else:
                raise TypeError(f"{found!r} is not a fresh Sink of {c.parser.bulk_len} bytes")
        except Exception:
            log.exception("opening a stream failed")
            sink = None
        if c.where != AT_HOME:
            if sink is not None and sink.on_abort is not None:
                sink.on_abort(sink)
            return 0
        plane_touch(self.p, c)
        owner.sink = sink
        rc = conn_stream(self.p, c, NULL if sink is None else sink_ref(sink.body))
        if rc:
            conn_end(self.p, c)
        elif c.fd < 0 and sink is not None:
            self._feed_sink(owner, None)
        return 0

    cdef int _run_frame(self, cconn *c, Conn owner) except -1:
        """Call the handler with a complete frame."""
        cdef list argv = self._argv(c, owner)
        cdef size_t logged
        cdef bytes name = argv[0]
        owner.sink = None
        c.waiting = WAIT_NO
        conn_consume(c)
        c.pending = 1
        c.commands += 1
        self.p.commands += 1
        c.last_cmd = NULL
        owner.last = name.lower() if len(name) <= 64 else name[:64].lower()
        plane_touch(self.p, c)
        logged = ks_log_pending(self.p.keyspace)
        try:
            value = self.handler(owner, argv)
        except Exception:
            log.exception("a command handler failed")
            value = internal_error
        if c.where == AT_END:
            return 0
        if ks_log_pending(self.p.keyspace) != logged:
            c.wrote = 1
        if value is pending:
            return 0
        if not c.pending:
            raise RuntimeError("the handler both resumed and answered")
        c.pending = 0
        return self._queue(c, value)

    cdef int _deliver(self, cconn *c, Conn owner) except -1:
        """What arrived for a connection while a mover had it."""
        cdef bint reply
        while owner.inbox and c.where == AT_HOME:
            value, reply = owner.inbox.pop(0)
            plane_touch(self.p, c)
            if value is CLOSE:
                if c.closing == CLOSE_NO:
                    c.closing = CLOSE_FLUSH
                continue
            if reply:
                c.pending = 0
                if ks_log_pending(self.p.keyspace):
                    c.wrote = 1
            self._queue(c, value)
        return self._go_on(c)

    cdef int _queue_bytes(self, cconn *c, bytes data) except -1:
        cdef size_t n = PyBytes_GET_SIZE(data)
        if n < SLOT_PIN:
            outq_put(&c.out, plane_spares(self.p), PyBytes_AS_STRING(data), n)
        elif outq_put_object(&c.out, &self.p.pydead, self.p.pinned, <void *>data, PyBytes_AS_STRING(data), n):
            Py_INCREF(data)
            self.p.pinned += 1
        else:
            c.out.failed = 1
        return 0

    cdef int _queue(self, cconn *c, object value) except -1:
        """Encode a reply value behind what is queued."""
        cdef list parts
        if value is OK:
            outq_put(&c.out, plane_spares(self.p), b"+OK\r\n", 5)
            return 0
        try:
            parts = encode_parts(value, c.proto)
        except Exception:
            log.exception("a handler answered something that has no encoding")
            parts = encode_parts(internal_error, c.proto)
        for part in parts:
            if type(part) is bytes:
                self._queue_bytes(c, <bytes>part)
            elif conn_put_extents(self.p, c, (<Extents?>part).body):
                c.out.failed = 1
        return 0

    cdef int _housekeeping(self) except -1:
        """Give back sent and overwritten objects, say goodbye to connections that ended."""
        cdef cconn *c
        cdef Conn conn
        cdef Sink sink
        while self.p.pydead.n:
            self.p.pydead.n -= 1
            self.p.pinned -= 1
            Py_DECREF(<object>self.p.pydead.items[self.p.pydead.n])
        while self.p.keyspace.ndead:
            self.p.keyspace.ndead -= 1
            Py_DECREF(<object>self.p.keyspace.dead[self.p.keyspace.ndead])
        while self.p.dead.n:
            self.p.dead.n -= 1
            c = self.p.dead.items[self.p.dead.n]
            conn = <Conn>c.py
            plane_forget(self.p, c)
            del self.conns[c.id]
            self.inboxes.pop(c.id, None)
            conn.inbox.clear()
            sink, conn.sink = conn.sink, None
            try:
                if sink is not None and sink.on_abort is not None:
                    sink.on_abort(sink)
                if self.on_close is not None:
                    self.on_close(conn)
            except Exception:
                log.exception("a callback for a closed connection failed")
        return 0

    # --- without a descriptor -------------------------------------------------------------------------------------

    def feed(self, Conn conn, data):
        """Memory connections: bytes from the peer. Runs every complete command, file writes included."""
        cdef cconn *c = self._open(conn)
        cdef Py_buffer view
        cdef const char *p
        cdef size_t n, take
        cdef int rc
        if c.fd >= 0:
            raise ValueError("this connection has a descriptor of its own")
        plane_clock(self.p)
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        self.depth += 1
        try:
            p = <const char *>view.buf
            n = view.len
            c.net_in += n
            while n and c.where == AT_HOME and c.closing == CLOSE_NO:
                if c.body != NULL and not c.body_ready:
                    take = min(n, c.body.len - c.body_got)
                    memcpy(c.body.data + c.body_got, p, take)
                    conn_body_got(self.p, c, take)
                elif conn_sink_open(c):
                    take = self._feed_sink(conn, PyBytes_FromStringAndSize(p, min(n, 1 << 20)))
                else:
                    take = min(n, CONN_SHARED)
                    rc = conn_room(c, take)
                    if rc:
                        conn_fail_room(self.p, c, rc)
                        break
                    memcpy(c.inp + c.end, p, take)
                    c.end += take
                p += take
                n -= take
                self._run_memory(c)
        finally:
            self.depth -= 1
            PyBuffer_Release(&view)
        self._run_memory(c)

    def _feed_sink(self, Conn conn, data):
        """Bytes into the open sink: those that came with its header (None), or these. Returns how many it took."""
        cdef cconn *c = conn.c
        cdef scratch tmp
        cdef const char *p = c.early
        cdef size_t n = c.early_n
        if data is not None:
            p = PyBytes_AS_STRING(<bytes>data)
            n = min(<size_t>PyBytes_GET_SIZE(<bytes>data), c.sink.want - c.sink.got)
        with nogil:
            memset(&tmp, 0, sizeof(tmp))
            if n:
                sink_feed(c.sink, p, n, &tmp)
            scratch_free(&tmp)
        if data is None:
            free(c.early)
            c.early = NULL
            c.early_n = 0
        if sink_done(c.sink):
            c.body_ready = 1
            resp_bulk_done(&c.parser)
        return n

    cdef int _run_memory(self, cconn *c) except -1:
        """Run a memory connection as far as it goes, Python's frames included."""
        if c.where == AT_HOME:
            self._go_on(c)
        while c.where == AT_HOME and c.waiting:
            self._serve_slow(ev_now_ns() + self.p.limits.batch_ns)
        with nogil:
            plane_flush(self.p)
        if self.depth == 0:
            self._housekeeping()
        return 0

    def take_output(self, Conn conn):
        """Memory connections: everything queued, file bodies read in. Runs commands that waited for room.

        Raises:
            EOFError, OSError: a file body could not be read; the connection is closed.
        """
        cdef cconn *c = self._open(conn)
        cdef list parts = []
        cdef scratch tmp
        cdef slot *head
        cdef bytes data
        cdef char *to
        cdef size_t n
        cdef Py_ssize_t got
        if c.fd >= 0:
            raise ValueError("this connection has a descriptor of its own")
        while c.where == AT_HOME and not outq_empty(&c.out):
            head = outq_head(&c.out)
            if head.kind == SLOT_EXT:
                n = (<extents *>head.owner).total - head.at.out
                data = PyBytes_FromStringAndSize(NULL, n)
                to = PyBytes_AS_STRING(data)
                with nogil:
                    memset(&tmp, 0, sizeof(tmp))
                    got = extents_read(<extents *>head.owner, &head.at, &tmp, to, n)
                    scratch_free(&tmp)
                if got != <Py_ssize_t>n:
                    conn_end(self.p, c)
                    self._housekeeping()
                    raise EOFError("a file is shorter than the rows it should hold")
                parts.append(data)
            elif head.n:
                parts.append(PyBytes_FromStringAndSize(head.p, head.n))
            outq_pop(&c.out, plane_spares(self.p))
        out = b"".join(parts)
        c.net_out += len(out)
        outq_collect(&c.out, &self.p.pydead)
        if c.where == AT_HOME:
            if c.closing != CLOSE_NO:
                conn_end(self.p, c)
            elif c.stalled:
                c.stalled = 0
                self._run_memory(c)
        if self.depth == 0:
            self._housekeeping()
        return out

    # --- the Python door of the fast commands ---------------------------------------------------------------------

    def exec_fast(self, Conn conn, int fast_id, list argv):
        """Run a fast command as the plane would. Returns the encoded reply, or None: the caller must do it."""
        cdef fast_arg small[8]
        cdef fast_arg *args = small
        cdef size_t n = len(argv), i
        cdef fast_call call
        cdef outq q
        cdef slot *head
        cdef list parts = []
        cdef int rc
        for item in argv:
            if type(item) is not bytes:
                return None
        if self.depth == 0:
            plane_clock(self.p)
        if n > 8:
            args = <fast_arg *>malloc(n * sizeof(fast_arg))
            if args == NULL:
                raise MemoryError
        memset(&q, 0, sizeof(q))
        try:
            for i in range(n):
                args[i].p = PyBytes_AS_STRING(<bytes>argv[i])
                args[i].n = PyBytes_GET_SIZE(<bytes>argv[i])
            call.plane = self.p
            call.conn = conn.c
            call.out = &q
            call.direct = args
            call.argc = n
            rc = fast_exec(&call, fast_id)
            if q.failed:
                raise MemoryError
            if rc != FAST_DONE:
                return None
            while not outq_empty(&q):
                head = outq_head(&q)
                if head.n:
                    parts.append(PyBytes_FromStringAndSize(head.p, head.n))
                outq_pop(&q, plane_spares(self.p))
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            outq_clear(&q, plane_spares(self.p))
            if args != small:
                free(args)
