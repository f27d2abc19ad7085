# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The part of the plane that serves descriptors: birth and end of connections, the batch, Python's share of it."""

import logging

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free
from libc.string cimport memset

from pion._core.conn cimport *
from pion._core.keyspace cimport ks_log_pending, ks_log_position
from pion._core.resp cimport RESP_OFF_TAKEN, encode_parts, resp_bulk_done
from pion._core.stream cimport Extents, Sink, scratch, scratch_free, sink_done, sink_feed, sink_ref

from pion._core.resp import OK, Err, register_stream_type

__all__ = ["PENDING", "PlaneBase"]

cdef object log = logging.getLogger("pion.plane")

register_stream_type(Extents)


class _Pending:
    """What a handler returns when `Plane.resume` will bring the reply, and `stream_open` when `Plane.place` will bring
    the sink."""

    __slots__ = ()

    def __repr__(self):
        return "PENDING"


PENDING = _Pending()
cdef object pending = PENDING
cdef object internal_error = Err(b"ERR internal error")
cdef object CLOSE = object()    # in an inbox: close after what stands before it
cdef enum:                      # what else is in an inbox
    PUSH
    REPLY
    PLACE

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


@cython.no_gc_clear
cdef class PlaneBase:
    """Everything but connections without a descriptor and the Python door; see `pion._core.plane.Plane`."""

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
            conn.inbox.append((CLOSE, PUSH))
            self.inboxes[c.id] = conn
        elif c.fd < 0 and not c.pending and not c.waiting and outq_empty(&c.out):
            conn_end(self.p, c)
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
            conn.inbox.append((value, REPLY))
            self.inboxes[c.id] = conn
            return
        plane_touch(self.p, c)
        self._reply_late(c, value)
        if c.fd < 0 and self.depth == 0:
            self._run_memory(c)
        else:
            self._go_on(c)
            self._kick()

    def place(self, Conn conn, Sink sink):
        """Where the argument goes for which `stream_open` answered PENDING; None to collect it as usual.

        When the connection has ended, or was told to, the sink is aborted.
        """
        cdef cconn *c = self._open(conn)
        if c.where == AT_MOVER:
            conn.inbox.append((sink, PLACE))
            self.inboxes[c.id] = conn
            return
        self._placed(c, conn, sink)
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
            conn.inbox.append((value, PUSH))
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
        try:
            found = self.stream_open(owner, self._argv(c, owner), c.parser.bulk_len)
            if found is pending:
                if c.where == AT_HOME:
                    c.waiting = WAIT_PLACE
                    plane_touch(self.p, c)
                return 0
            if found is None:
                sink = None
            elif isinstance(found, Sink) and found.nbytes == c.parser.bulk_len and found.received == 0:
                sink = found
            else:
                raise TypeError(f"{found!r} is not a fresh Sink of {c.parser.bulk_len} bytes")
        except Exception:  # whatever a command does wrong, the others are served; the body is collected in memory
            log.exception("opening a stream failed")
            sink = None
        return self._placed(c, owner, sink)

    cdef int _placed(self, cconn *c, Conn owner, Sink sink) except -1:
        cdef int rc
        if c.where != AT_HOME or c.closing != CLOSE_NO or (c.waiting != WAIT_STREAM and c.waiting != WAIT_PLACE):
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
        c.log_at = ks_log_position(self.p.keyspace)
        try:
            value = self.handler(owner, argv)
        except Exception:  # a fault of one command ends neither its connection nor the server
            log.exception("a command handler failed")
            value = internal_error
        if c.where == AT_END:
            return 0
        if ks_log_pending(self.p.keyspace) != logged:
            conn_wrote(c, c.out.queued)
        if value is pending:
            return 0
        if not c.pending:
            raise RuntimeError("the handler both resumed and answered")
        return self._reply(c, value)

    cdef int _deliver(self, cconn *c, Conn owner) except -1:
        """What arrived for a connection while a mover had it."""
        cdef int what
        while owner.inbox and c.where == AT_HOME:
            value, what = owner.inbox.pop(0)
            plane_touch(self.p, c)
            if value is CLOSE:
                if c.closing == CLOSE_NO:
                    c.closing = CLOSE_FLUSH
                continue
            if what == PLACE:
                self._placed(c, owner, value)
            elif what == REPLY:
                self._reply_late(c, value)
            else:
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

    cdef int _reply(self, cconn *c, object value) except -1:
        """Queue the reply to the current frame; a value without an encoding is none."""
        cdef uint64_t queued = c.out.queued
        c.pending = 0
        self._queue(c, value)
        if c.out.queued != queued:
            c.replies += 1
        return 0

    cdef int _reply_late(self, cconn *c, object value) except -1:
        """The same, after PENDING: a write, if the log got records meanwhile and still has some to write."""
        if ks_log_pending(self.p.keyspace) and ks_log_position(self.p.keyspace) != c.log_at:
            conn_wrote(c, c.out.queued)
        return self._reply(c, value)

    cdef int _queue(self, cconn *c, object value) except -1:
        """Encode a reply value behind what is queued."""
        cdef list parts
        if value is OK:
            outq_put(&c.out, plane_spares(self.p), b"+OK\r\n", 5)
            return 0
        try:
            parts = encode_parts(value, c.proto)
        except Exception:  # the reply is due all the same, or all behind it would change places
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
            sinks = [value for value, what in conn.inbox if what == PLACE]
            sinks.append(conn.sink)
            conn.sink = None
            conn.inbox.clear()
            try:
                for sink in sinks:
                    if sink is not None and sink.on_abort is not None:
                        sink.on_abort(sink)
                if self.on_close is not None:
                    self.on_close(conn)
            except Exception:  # what is below, and other connections, must still be let go
                log.exception("a callback for a closed connection failed")
            conn.data.clear()    # what commands kept there refers to the connection
        return 0

    cdef size_t _feed_sink(self, Conn conn, bytes data) except? 0:
        """Bytes into the open sink: those that came with its header (None), or these. Returns how many it took."""
        cdef cconn *c = conn.c
        cdef scratch tmp
        cdef const char *p = c.early
        cdef size_t n = c.early_n
        if data is not None:
            p = PyBytes_AS_STRING(data)
            n = min(<size_t>PyBytes_GET_SIZE(data), c.sink.want - c.sink.got)
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
        while c.where == AT_HOME and c.waiting and c.waiting != WAIT_PLACE:
            self._serve_slow(ev_now_ns() + self.p.limits.batch_ns)
        with nogil:
            plane_flush(self.p)
        if self.depth == 0:
            self._housekeeping()
        return 0
