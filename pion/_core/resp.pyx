# cython: language_level=3, freethreading_compatible=False
"""Reply values and their encoding in RESP2 and RESP3. ``pion.ref.resp`` is the readable twin."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport isinf, isnan
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

__all__ = [
    "NULL_ARRAY", "OK", "Encoder", "Err", "LocalProtocolError", "ProtocolError", "Push", "Raw",
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
