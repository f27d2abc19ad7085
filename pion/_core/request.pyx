# cython: language_level=3, freethreading_compatible=False
"""Requests of RESP on the server's side.

The parsing itself is in ``resp.h``, shared with the network plane; :class:`Parser` is the same code behind a Python
interface, for memory connections, embedding and tests. ``pion.ref.resp`` is the readable twin.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove
from pion._core.resp cimport (
    RESP_BULK, RESP_ERROR, RESP_ERROR_MAX, RESP_FRAME, RESP_LIMITS_DEFAULT, RESP_LIMITS_UNAUTH, RESP_MORE,
    RESP_OFF_TAKEN, resp_arg, resp_bulk_done, resp_bulk_here, resp_bulk_keep, resp_bulk_take, resp_error_text,
    resp_free, resp_init, resp_next, resp_parse,
)

from pion._core.resp import RemoteProtocolError

__all__ = ["Parser"]


cdef class Parser:
    """Incremental parser of requests, for connections without a descriptor.

    Args:
        max_args, max_bulk, max_inline, max_command: see ``resp_limits`` in ``resp.h``; bytes and counts.
        big: a bulk of at least this many bytes is offered to ``sink`` first (default: never).
        sink: ``sink(argv_so_far, nbytes)`` returns None (receive it as bytes) or an object with ``feed(view)``,
            which is given the bytes piece by piece and stands in the argument's place.
        unauthenticated: start with the limits of a connection before AUTH (case A3); see :meth:`authenticate`.
    """

    def __cinit__(self, *, max_args=None, max_bulk=None, max_inline=None, max_command=None, big=None, sink=None,
                  bint unauthenticated=False):
        self.limits = RESP_LIMITS_DEFAULT
        if max_args is not None:
            self.limits.max_args = max_args
        if max_bulk is not None:
            self.limits.max_bulk = max_bulk
        if max_inline is not None:
            self.limits.max_inline = max_inline
        if max_command is not None:
            self.limits.max_command = max_command
        self.limits.big = RESP_OFF_TAKEN if sink is None else (32768 if big is None else big)
        self.sink = sink
        self.taken = []
        resp_init(&self.parser, &RESP_LIMITS_UNAUTH if unauthenticated else &self.limits)

    def __dealloc__(self):
        resp_free(&self.parser)
        free(self.buf)

    def authenticate(self):
        """The limits of a logged-in connection apply from the next frame on."""
        self.parser.limits = &self.limits

    @property
    def buffered(self):
        """Bytes held for a frame that is not complete."""
        return self.end - self.start

    @property
    def memory(self):
        """Bytes of memory reserved for the window and the argument table."""
        return self.room + self.parser.cap * sizeof(resp_arg)

    cdef int append(self, const char *data, size_t n) except -1:
        cdef size_t room
        cdef char *buf
        if self.start and (self.start == self.end or self.room - self.end < n):
            memmove(self.buf, self.buf + self.start, self.end - self.start)
            self.end -= self.start
            self.start = 0
        if self.room - self.end < n:
            room = max(self.room * 2, self.end + n)
            buf = <char *>realloc(self.buf, room)
            if buf is NULL:
                raise MemoryError
            self.buf = buf
            self.room = room
        memcpy(self.buf + self.end, data, n)
        self.end += n
        return 0

    cdef list argv(self):
        cdef list out = []
        cdef size_t i
        cdef Py_ssize_t taken = 0
        for i in range(self.parser.nargs):
            if self.parser.args[i].off == RESP_OFF_TAKEN:
                out.append(self.taken[taken])
                taken += 1
            else:
                out.append(PyBytes_FromStringAndSize(self.buf + self.start + self.parser.args[i].off,
                                                     self.parser.args[i].len))
        return out

    cdef int offer(self) except -1:
        """Ask the sink for the announced bulk; 0 = keep it, 1 = taken."""
        cdef size_t here
        sink = self.sink(self.argv(), self.parser.bulk_len)
        if sink is None:
            resp_bulk_keep(&self.parser)
            return 0
        self.current = sink
        here = resp_bulk_here(&self.parser, self.end - self.start)
        data = PyBytes_FromStringAndSize(self.buf + self.start + self.parser.pos, here)
        self.sink_left = self.parser.bulk_len - here
        self.end -= resp_bulk_take(&self.parser, self.buf + self.start, self.end - self.start)
        if here:
            sink.feed(memoryview(data))
        return 1

    cdef int finish_sink(self) except -1:
        self.taken.append(self.current)
        self.current = None
        if resp_bulk_done(&self.parser) == RESP_ERROR:
            raise MemoryError
        return 0

    def feed(self, data):
        """Add received bytes; return the commands they complete, each a list of bytes (or sink objects).

        Frames without arguments are dropped, as no reply is due for them.

        Raises:
            RemoteProtocolError: with the text of the error reply. Commands completed by the same bytes are in its
                ``commands``; every further call raises again.
        """
        cdef Py_buffer view
        cdef size_t at = 0, n
        cdef list out = []
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if self.current is not None:
                n = min(self.sink_left, <size_t>view.len)
                self.current.feed(memoryview(PyBytes_FromStringAndSize(<const char *>view.buf, n)))
                self.sink_left -= n
                at = n
                if self.sink_left:
                    return out
                self.finish_sink()
            self.append(<const char *>view.buf + at, view.len - at)
        finally:
            PyBuffer_Release(&view)
        self.run(out)
        return out

    cdef int run(self, list out) except -1:
        cdef int rc
        cdef char text[RESP_ERROR_MAX]
        while True:
            rc = resp_parse(&self.parser, self.buf + self.start, self.end - self.start)
            if rc == RESP_FRAME:
                if self.parser.nargs:
                    out.append(self.argv())
                    self.taken = []
                self.start += self.parser.pos
                resp_next(&self.parser)
            elif rc == RESP_BULK:
                if self.offer() and self.sink_left:
                    return 0
                if self.current is not None:
                    self.finish_sink()
            elif rc == RESP_MORE:
                if self.start == self.end and self.room > 65536:
                    free(self.buf)
                    self.buf = NULL
                    self.start = self.end = self.room = 0
                return 0
            else:
                error = RemoteProtocolError(text[:resp_error_text(&self.parser, text)].decode("latin-1"))
                error.commands = out
                free(self.buf)
                self.buf = NULL
                self.start = self.end = self.room = 0
                raise error
