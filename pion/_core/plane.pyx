# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The network plane: every plain connection of the server behind one pollable descriptor.

Theory of operation. ``Plane.fd`` is readable when a connection has something to do. ``Plane.batch`` then makes turns:
one pass of C over all ready connections (receive, parse, fast commands, send), without the GIL; then, holding it, the
frames for Python: `handler` is called for each, its value encoded into the connection's output, and the connection
goes on parsing. Replies leave after the log records of the batch were written. File bodies travel on mover threads
(movers.h). A connection whose reply comes later (PENDING) parses no further; `resume` completes it.

A connection without a descriptor (`open_memory`) runs the same code: `feed` bytes in, `take_output` out. Or somebody
else serves it, in another protocol, and tells the plane (`hold`, `begin`, `finish`), so that it counts, is listed and
ends like any other.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pion._core.conn cimport *
from pion._core.planebase cimport PlaneBase
from pion._core.stream cimport extents_read, scratch, scratch_free

from pion._core.planebase import PENDING

__all__ = ["Conn", "FAST_DEL", "FAST_ECHO", "FAST_EXISTS", "FAST_GET", "FAST_INCR", "FAST_MEMBERSHIP", "FAST_MGET",
           "FAST_PING", "FAST_SET", "FLAG_DENYOOM", "FLAG_WRITE", "PENDING", "Plane"]


cdef extern from "plane.h" nogil:
    enum:
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
globals()["Conn"] = Conn    # a name that is only cimported is not in the module


@cython.final
@cython.no_gc_clear
cdef class Plane(PlaneBase):
    """See the module text.

    Args:
        keyspace: what the fast commands work on.
        handler: `handler(conn, argv) -> reply value | PENDING`; argv holds bytes, and a Sink where one was opened.
        stream_open: `stream_open(conn, argv_so_far, nbytes) -> Sink | None | PENDING` for the argument of a command in
            `streams`.
        fast_table: (FAST_*, NAME, arity, flags) of the commands that may run in C.
        streams: (NAME, index) of arguments that may be received straight into a file.
        movers: threads for file bodies.
        dwell_us: how long `batch` waits for more before it returns.
        slice_bytes: most bytes moved for one connection before the others get their turn.
        batch_ms: most time a batch takes before other tasks get theirs.
        limits: overrides of the bounds, by name (DEFAULTS above).

    Attributes:
        fast_enabled: False sends every frame to the handler.
        on_close: called with each connection that ended.
        rejected: connections refused by whoever accepts them.
    """

    def open_memory(self, str peer="memory", str local="memory"):
        """A connection without a descriptor; see `feed` and `take_output`."""
        return self._new(-1, peer, local)

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

    # --- served by somebody else ----------------------------------------------------------------------------------

    def hold(self, Conn conn, size_t nbytes, size_t received=0):
        """Memory connections: so many bytes are held for it, and so many have just arrived.

        Returns:
            False when all connections together hold more than they may.
        """
        cdef cconn *c = self._open(conn)
        self.p.input_bytes += nbytes - c.body_counted
        c.body_got = c.body_counted = nbytes
        if received and c.where != AT_END:
            c.net_in += received
            c.active_ns = ev_now_ns()
        return self.p.input_bytes <= self.p.limits.input_total

    def begin(self, Conn conn, bytes name):
        """Memory connections: a command runs; until `finish` the connection is busy."""
        cdef cconn *c = self._open(conn)
        c.pending = 1
        c.commands += 1
        self.p.commands += 1
        c.last_cmd = NULL
        conn.last = name

    def finish(self, Conn conn, size_t sent):
        """Memory connections: it is answered, by so many bytes. Ends the connection if it was to be closed."""
        cdef cconn *c = self._open(conn)
        if c.where == AT_END:
            return
        c.pending = 0
        c.net_out += sent
        c.active_ns = ev_now_ns()
        if c.closing != CLOSE_NO:
            conn_end(self.p, c)
            if self.depth == 0:
                self._housekeeping()

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
