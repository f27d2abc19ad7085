# cython: language_level=3, freethreading_compatible=False
"""RESP2 and RESP3 on the server's side: the request parser and the encoder of replies.

The parsing itself is in ``resp.h``, shared with the network plane; :class:`Parser` is the same code behind a Python
interface, for memory connections, embedding and tests. ``pion.ref.resp`` is the readable twin.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport isinf, isnan
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove

__all__ = [
    "NULL_ARRAY", "OK", "Encoder", "Err", "LocalProtocolError", "Parser", "ProtocolError", "Push", "Raw",
    "RemoteProtocolError", "Simple", "Verbatim", "encode", "encode_parts", "register_stream_type",
]

cdef Py_ssize_t SEPARATE = 16384    # a bytes object of this size or more is passed on instead of copied
cdef int MAX_DEPTH = 64         # of nested reply values; a deeper one is a mistake of the handler


class ProtocolError(Exception):
    """Somebody broke RESP. Raised only as one of its two leaves, which say who."""

    def __init__(self, message):
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError")
        super().__init__(message)


class LocalProtocolError(ProtocolError):
    """This side used the protocol wrongly: a value that has no encoding, a parser used after its end."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are not RESP. The message is the text a server answers behind ``-ERR``.

    ``commands`` (server side) and ``replies`` (client side) hold what was still complete in front of the error.
    """

    def __init__(self, message):
        super().__init__(message)
        self.commands = []
        self.replies = []


cdef class _Text:
    """A reply given as one piece of text; compares by type and bytes."""

    cdef readonly bytes value

    def __init__(self, value):
        self.value = value.encode() if isinstance(value, str) else bytes(value)

    def __eq__(self, other):
        return type(self) is type(other) and self.value == (<_Text>other).value

    def __hash__(self):
        return hash((type(self), self.value))

    def __repr__(self):
        return f"{type(self).__name__}({self.value!r})"


cdef class Simple(_Text):
    """A status line: ``+text``. CR and LF inside become spaces."""


cdef class Err(_Text):
    """An error line: ``-CODE text``. CR and LF inside become spaces."""


cdef class Verbatim(_Text):
    """Text for a human: ``=`` with format ``txt`` in RESP3, an ordinary bulk in RESP2."""


cdef class Raw(_Text):
    """A reply (or several) already encoded for the connection's protocol."""


cdef class Push:
    """An out-of-band message: ``>`` in RESP3, an array in RESP2."""

    cdef readonly object items

    def __init__(self, items):
        self.items = list(items)

    def __eq__(self, other):
        return isinstance(other, Push) and self.items == (<Push>other).items

    __hash__ = None

    def __repr__(self):
        return f"Push({self.items!r})"


cdef class _NullArray:
    def __repr__(self):
        return "NULL_ARRAY"


OK = Simple(b"OK")
NULL_ARRAY = _NullArray()

cdef tuple stream_types = ()


def register_stream_type(cls):
    """Let objects of ``cls`` stand for a bulk whose bytes are sent later.

    ``len(obj)`` is the number of bytes. :func:`encode_parts` keeps the object as a part of its own between the
    header and the CRLF.
    """
    global stream_types
    if cls not in stream_types:
        stream_types = (*stream_types, cls)
    return cls


cdef bytes _double(double v):
    """A double as Redis prints it: the shortest text that reads back the same, whole numbers without a point."""
    if isnan(v):
        return b"nan"
    if isinf(v):
        return b"inf" if v > 0 else b"-inf"
    if -1e17 < v < 1e17 and v == <double>(<int64_t>v):
        return b"-0" if v == 0 and repr(v)[0] == "-" else b"%d" % <int64_t>v
    return repr(v).encode()


cdef class Encoder:
    """Encodes reply values one after another into parts that are ready to send.

    Args:
        proto: 2 or 3.
    """

    def __cinit__(self, int proto=2):
        if proto != 2 and proto != 3:
            raise LocalProtocolError(f"unknown protocol version {proto}")
        self.proto = proto
        self.parts = []

    def __dealloc__(self):
        free(self.buf)

    cdef int reserve(self, size_t n) except -1:
        cdef size_t room = self.room * 2 if self.room else 256
        cdef char *buf
        if self.room - self.used < n:
            while room - self.used < n:
                room *= 2
            buf = <char *>realloc(self.buf, room)
            if buf is NULL:
                raise MemoryError
            self.buf = buf
            self.room = room
        return 0

    cdef int raw(self, const char *data, size_t n) except -1:
        self.reserve(n)
        memcpy(self.buf + self.used, data, n)
        self.used += n
        return 0

    cdef int num(self, char kind, int64_t v) except -1:
        self.reserve(RESP_NUM_MAX)
        self.used += resp_put_num(self.buf + self.used, kind, v)
        return 0

    cdef int line(self, char kind, bytes text) except -1:
        cdef size_t n = PyBytes_GET_SIZE(text)
        self.reserve(n + 3)
        self.used += resp_put_line(self.buf + self.used, kind, PyBytes_AS_STRING(text), n)
        return 0

    cdef int bulk(self, object owner, const char *data, size_t n) except -1:
        """A bulk of n bytes; `owner` is the bytes object that holds them, or None when they must be copied."""
        self.num(b"$", n)
        if owner is not None and n >= <size_t>SEPARATE:
            self.flush()
            self.parts.append(owner)
        else:
            self.raw(data, n)
        self.raw(b"\r\n", 2)
        return 0

    def flush(self):
        """End the current part, so that the next one starts a bytes object of its own."""
        if self.used:
            self.parts.append(PyBytes_FromStringAndSize(self.buf, self.used))
            self.used = 0

    cdef list take(self):
        cdef list parts
        self.flush()
        parts = self.parts
        self.parts = []
        return parts

    def add(self, value):
        """Encode one more reply value (the table is in ``pion.wire.resp``)."""
        self.value(value, 0)

    def parts_taken(self):
        """Everything encoded since the last call, as a list of bytes and stream objects."""
        return self.take()

    cdef int items(self, char kind, object values, int depth) except -1:
        self.num(kind, len(values))
        for item in values:
            self.value(item, depth + 1)
        return 0

    cdef int buffer(self, object value) except -1:
        cdef Py_buffer view
        PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
        try:
            self.bulk(None, <const char *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        return 0

    cdef int integer(self, object value) except -1:
        cdef bytes digits
        if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
            return self.num(b":", value)
        digits = b"%d" % value
        if self.proto == 3:
            return self.line(b"(", digits)
        return self.bulk(digits, digits, len(digits))

    cdef int value(self, object value, int depth) except -1:
        cdef bytes text
        cdef Py_ssize_t n
        if depth > MAX_DEPTH:
            raise LocalProtocolError(f"a reply nested more than {MAX_DEPTH} levels deep")
        cdef type kind = type(value)
        if kind is bytes:
            return self.bulk(value, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
        if kind is int:
            return self.integer(value)
        if value is None:
            self.reserve(5)
            self.used += resp_put_null(self.buf + self.used, self.proto)
            return 0
        if kind is Simple:
            return self.line(b"+", (<_Text>value).value)
        if kind is list or kind is tuple:
            return self.items(b"*", value, depth)
        if kind is str:
            text = value.encode()
            return self.bulk(text, text, len(text))
        if kind is Err:
            return self.line(b"-", (<_Text>value).value)
        if kind is bool:
            if self.proto == 3:
                return self.raw(b"#t\r\n" if value else b"#f\r\n", 4)
            return self.num(b":", 1 if value else 0)
        if kind is float:
            text = _double(value)
            if self.proto == 3:
                return self.line(b",", text)
            return self.bulk(text, text, len(text))
        if kind is dict:
            if self.proto == 3:
                self.num(b"%", len(value))
            else:
                self.num(b"*", 2 * len(value))
            for key, item in value.items():
                self.value(key, depth + 1)
                self.value(item, depth + 1)
            return 0
        if kind is set or kind is frozenset:
            return self.items(b"~" if self.proto == 3 else b"*", value, depth)
        if kind is bytearray or kind is memoryview:
            return self.buffer(value)
        if kind is Verbatim:
            text = (<_Text>value).value
            if self.proto == 3:
                self.num(b"=", len(text) + 4)
                self.raw(b"txt:", 4)
                self.raw(text, len(text))
                return self.raw(b"\r\n", 2)
            return self.bulk(text, text, len(text))
        if kind is Push:
            return self.items(b">" if self.proto == 3 else b"*", (<Push>value).items, depth)
        if kind is Raw:
            text = (<_Text>value).value
            if len(text) >= SEPARATE:
                self.flush()
                self.parts.append(text)
                return 0
            return self.raw(text, len(text))
        if value is NULL_ARRAY:
            return self.raw(b"_\r\n", 3) if self.proto == 3 else self.raw(b"*-1\r\n", 5)
        if isinstance(value, stream_types):
            n = len(value)
            self.num(b"$", n)
            self.flush()
            self.parts.append(value)
            return self.raw(b"\r\n", 2)
        raise LocalProtocolError(f"a reply cannot hold a {kind.__module__}.{kind.__qualname__}")


cpdef list encode_parts(object value, int proto):
    """Encode one reply value for protocol 2 or 3.

    Returns:
        ``bytes`` objects and stream objects in the order in which they are sent. ``bytes`` of 16 KiB and more are the
        caller's own objects, not copies.

    Raises:
        LocalProtocolError: the value has no encoding.
    """
    cdef Encoder out = Encoder.__new__(Encoder, proto)
    out.value(value, 0)
    return out.take()


cpdef bytes encode(object value, int proto):
    """Encode one reply value into a single bytes object; stream objects are refused."""
    cdef list parts = encode_parts(value, proto)
    if len(parts) == 1 and type(parts[0]) is bytes:
        return parts[0]
    for part in parts:
        if type(part) is not bytes:
            raise LocalProtocolError(f"a {type(part).__name__} is sent from its file; use encode_parts")
    return b"".join(parts)


cdef class Parser:
    """Incremental parser of requests, for connections without a descriptor.

    Args:
        max_args, max_bulk, max_inline, max_command: see ``resp_limits`` in ``resp.h``; bytes and counts.
        big: a bulk of at least this many bytes is offered to ``sink`` first (default: never).
        sink: ``sink(argv_so_far, nbytes)`` returns None (receive it as bytes) or an object with ``feed(view)``,
            which is given the bytes piece by piece and stands in the argument's place.
        unauthenticated: start with the limits of a connection before AUTH (case A3); see :meth:`authenticate`.
    """

    cdef resp_parser parser
    cdef resp_limits limits
    cdef char *buf
    cdef size_t start, end, room, sink_left
    cdef object sink, current
    cdef list taken

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
