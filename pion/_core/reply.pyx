# cython: language_level=3, freethreading_compatible=False
"""Replies of RESP2 and RESP3 on the client's side, parsed incrementally.

A large bulk never passes through the parse window: the parser hands out its final memory as the place to receive
into, so the bytes are copied once, by the kernel. ``pion.ref.resp`` is the readable twin.
"""

from collections import deque

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy, memmove
from pion._core.resp cimport resp_number

from pion._core.resp import LocalProtocolError, Push, RemoteProtocolError

__all__ = ["ReplyError", "ReplyParser"]

cdef size_t WINDOW = 65536      # bytes a fresh window has; a socket read rarely gives more
cdef size_t DIRECT = 32768      # a bulk of this many bytes is received into its final memory
cdef Py_ssize_t MAX_DEPTH = 64

cdef enum:
    LINE
    BODY
    CRLF


class ReplyError(Exception):
    """An error reply. ``code`` is its first word, as in ``WRONGTYPE``; ``str()`` gives the whole line."""

    @property
    def code(self):
        return str(self).partition(" ")[0]


cdef class _Fill:
    """A writable view of a bytes object that nobody else has seen yet."""

    cdef bytes target

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, PyBytes_AS_STRING(self.target), len(self.target), False, flags)


cdef class _Open:
    cdef char kind
    cdef size_t left
    cdef list items


cdef object _hashable(object value):
    """A map key or set element as something a dict or set can hold."""
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, set):
        return frozenset(value)
    return value


cdef object _build(_Open done):
    cdef list items = done.items
    cdef Py_ssize_t i
    if done.kind == b"*":
        return items
    if done.kind == b"%":
        return {_hashable(items[i]): items[i + 1] for i in range(0, len(items), 2)}
    if done.kind == b"~":
        return set(map(_hashable, items))
    return Push(items)


cdef bint _decimal(const char *s, size_t n, bint fraction) noexcept nogil:
    """Only digits, a sign in front and, for a fraction, point, exponent and the exponent's sign."""
    cdef size_t i
    cdef bint digit = False
    for i in range(n):
        if b"0" <= s[i] <= b"9":
            digit = True
        elif s[i] == b"+" or s[i] == b"-":
            if i and not (fraction and (s[i - 1] == b"e" or s[i - 1] == b"E")):
                return False
        elif not (fraction and (s[i] == b"." or s[i] == b"e" or s[i] == b"E")):
            return False
    return digit


cdef class ReplyParser:
    """Incremental parser of replies.

    Two ways in: :meth:`feed` with bytes somebody else received, or :meth:`get_target` (where to receive) followed by
    :meth:`commit` (how much arrived). Both return the replies completed.

    ======================  ==========================================================
    reply                   value
    ======================  ==========================================================
    simple string           str
    bulk, verbatim string   bytes (verbatim without its format), or the buffer planned
    integer, big number     int
    double, boolean         float, bool
    null of any kind        None
    array, map, set         list, dict, set (unhashable keys become tuples)
    error                   :class:`ReplyError`, returned, not raised
    push                    ``Push``
    attribute               skipped
    ======================  ==========================================================

    Args:
        max_bulk: largest bulk accepted, in bytes.
        max_line: largest line (status, error, number) accepted, in bytes.
    """

    def __cinit__(self, *, size_t max_bulk=1 << 36, size_t max_line=1 << 20):
        self.window = bytearray(WINDOW)
        self.stack = []
        self.plans = deque()
        self.max_bulk = max_bulk
        self.max_line = max_line

    def __dealloc__(self):
        if self.viewed:
            PyBuffer_Release(&self.view)

    @property
    def idle(self):
        """True between two replies: no byte of an unfinished one has arrived."""
        return self.state == LINE and not self.stack and self.start == self.end

    def expect(self, outs=None):
        """Say where the bulks of the next reply not yet announced belong.

        Call it once for each command, in the order sent; replies nobody announced have no plan.

        Args:
            outs: writable buffers. The i-th bulk of the reply (or of its outermost array; a null counts) is received
                into ``outs[i]`` when it has exactly that many bytes, and ``outs[i]`` itself is the value. A bulk of
                another size arrives as bytes: compare with ``is``. A tuple of buffers takes one bulk, in pieces of
                their sizes. Or a function ``outs(i, nbytes)`` that is called when bulk i begins, -1 bytes for a null,
                and returns its buffer (or tuple) or None: one buffer can then serve all bulks, because the one before
                is complete.
        """
        if outs is not None and not callable(outs):
            outs = list(outs)
            for out in outs:
                for piece in out if isinstance(out, tuple) else (out,):
                    view = memoryview(piece)
                    if view.readonly or not view.c_contiguous:
                        raise LocalProtocolError("a reply can only be received into writable, C-contiguous memory")
        self.plans.append(outs)

    def get_target(self):
        """A writable view of where the next bytes belong; receive into it at once, then :meth:`commit`."""
        self.check()
        if self.state == BODY and self.body is not None:
            return memoryview(self.body).cast("B")[self.got - self.part_start:]
        self.make_room(1)
        return memoryview(self.window)[self.end:]

    def commit(self, size_t n):
        """Account for n bytes received into the last target; return the replies they complete.

        Raises:
            RemoteProtocolError: the peer sent no RESP. Replies completed by the same bytes are in its ``replies``.
                The connection is lost: every later call raises again.
        """
        cdef list out = []
        self.check()
        if self.state == BODY and self.body is not None:
            if n > self.part_end - self.got:
                raise LocalProtocolError("more bytes committed than the target holds")
            self.took(n)
        else:
            if n > <size_t>len(self.window) - self.end:
                raise LocalProtocolError("more bytes committed than the target holds")
            self.end += n
        self.advance(out)
        return out

    def feed(self, data):
        """Parse bytes received elsewhere; return the replies they complete. Raises like :meth:`commit`."""
        cdef Py_buffer view
        cdef size_t at = 0, n
        cdef list out = []
        self.check()
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            while at < <size_t>view.len:
                if self.state == BODY and self.body is not None:
                    n = min(self.part_end - self.got, view.len - at)
                    memcpy(self.dest + (self.got - self.part_start), <char *>view.buf + at, n)
                    self.took(n)
                else:
                    self.make_room(1)
                    n = min(<size_t>len(self.window) - self.end, view.len - at)
                    memcpy(PyByteArray_AS_STRING(self.window) + self.end, <char *>view.buf + at, n)
                    self.end += n
                at += n
                self.advance(out)
        finally:
            PyBuffer_Release(&view)
        return out

    def eof(self):
        """The peer closed the connection.

        Raises:
            RemoteProtocolError: in the middle of a reply.
        """
        self.check()
        if not self.idle:
            self.fail("connection closed in the middle of a reply")

    def check(self):
        if self.error is not None:
            raise RemoteProtocolError(self.error)

    cdef int fail(self, str text) except -1:
        self.error = text
        self.release()
        self.stack = []
        raise RemoteProtocolError(text)

    cdef int make_room(self, size_t n) except -1:
        """Room for at least n more bytes; a view handed out before keeps the old window alive."""
        cdef bytearray bigger
        cdef size_t held = self.end - self.start
        cdef char *buf = PyByteArray_AS_STRING(self.window)
        if held == 0:
            self.start = self.end = self.scan = 0
            if <size_t>len(self.window) > 16 * WINDOW:
                self.window = bytearray(WINDOW)     # one long reply must not keep its memory
        if <size_t>len(self.window) - self.end >= n:
            return 0
        if held + n <= <size_t>len(self.window) // 2:
            memmove(buf, buf + self.start, held)
        else:
            bigger = bytearray(2 * len(self.window))
            memcpy(PyByteArray_AS_STRING(bigger), buf + self.start, held)
            self.window = bigger
        self.scan -= self.start
        self.start = 0
        self.end = held
        return 0

    cdef int release(self) except -1:
        if self.viewed:
            PyBuffer_Release(&self.view)
            self.viewed = False
        self.body = None
        self.parts = None
        self.dest = NULL
        return 0

    cdef object planned(self, int64_t n):
        """The buffer planned for the next bulk of this reply, if its place in the reply has one."""
        if self.plan is None or len(self.stack) > 1:
            return None
        self.slot += 1
        if callable(self.plan):
            return self.plan(self.slot - 1, n)
        return self.plan[self.slot - 1] if self.slot <= len(self.plan) else None

    cdef int enter(self, object buffer) except -1:
        """The next bytes of the bulk belong into this buffer."""
        if self.viewed:
            PyBuffer_Release(&self.view)
            self.viewed = False
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        self.viewed = True
        self.body = buffer
        self.dest = <char *>self.view.buf
        self.part_start = self.got
        self.part_end = self.got + <size_t>self.view.len
        return 0

    cdef int took(self, size_t n) except -1:
        """n more bytes of the bulk are in their place."""
        self.got += n
        while self.got == self.part_end and self.got < self.bulk_len:
            self.part += 1
            self.enter(self.parts[self.part])
        return 0

    cdef int direct(self, object target) except -1:
        """Receive the current bulk into `target`; what is already in the window moves there."""
        cdef size_t here = min(self.end - self.start, self.bulk_len), n
        self.parts = target if isinstance(target, tuple) else None
        self.part = 0
        self.enter(self.parts[0] if self.parts is not None else target)
        self.took(0)
        while here:
            n = min(here, self.part_end - self.got)
            memcpy(self.dest + (self.got - self.part_start), PyByteArray_AS_STRING(self.window) + self.start, n)
            self.start += n
            here -= n
            self.took(n)
        return 0

    cdef int begin_bulk(self, char kind, int64_t n, list out) except -1:
        cdef _Fill fill
        if n == -1 and kind == b"$":
            self.planned(-1)
            return self.complete(None, out)
        if n < 0 or <size_t>n > self.max_bulk:
            self.fail(f"invalid bulk length {n}")
        self.kind = kind
        self.bulk_len = n
        self.got = 0
        self.state = BODY
        if kind != b"$":
            return 0
        target = self.planned(n)
        if target is not None and n == (
            sum([memoryview(piece).nbytes for piece in target]) if isinstance(target, tuple)
            else memoryview(target).nbytes
        ):
            return self.direct(target)
        if self.bulk_len >= DIRECT:
            fill = _Fill.__new__(_Fill)
            fill.target = PyBytes_FromStringAndSize(NULL, n)
            return self.direct(fill)
        return 0

    cdef int finish_bulk(self, list out) except -1:
        """The body is complete and its CRLF seen."""
        cdef const char *data = PyByteArray_AS_STRING(self.window) + self.start
        cdef size_t n = self.bulk_len
        self.state = LINE
        if self.body is not None:
            value = (<_Fill>self.body).target if type(self.body) is _Fill else self.parts or self.body
            self.release()
            return self.complete(value, out)
        self.start += n + 2
        self.scan = self.start
        if self.kind == b"$":
            return self.complete(PyBytes_FromStringAndSize(data, n), out)
        if self.kind == b"!":
            return self.complete(ReplyError(PyUnicode_DecodeUTF8(data, n, "replace")), out)
        if n < 4 or data[3] != b":":
            self.fail("a verbatim string without its format")
        return self.complete(PyBytes_FromStringAndSize(data + 4, n - 4), out)

    cdef int open_aggregate(self, char kind, int64_t n, list out) except -1:
        cdef _Open opened
        if n == -1 and kind == b"*":
            return self.complete(None, out)
        if n < 0 or n > (<int64_t>1 << 48):
            self.fail(f"invalid aggregate length {n}")
        if kind == b">" and self.stack:
            self.fail("a push inside another reply")
        if len(self.stack) >= MAX_DEPTH:
            self.fail(f"a reply nested more than {MAX_DEPTH} levels deep")
        opened = _Open.__new__(_Open)
        opened.kind = kind
        opened.left = 2 * n if kind == b"%" or kind == b"|" else n
        opened.items = []
        self.stack.append(opened)
        if opened.left == 0:
            self.stack.pop()
            return 0 if kind == b"|" else self.complete(_build(opened), out)
        return 0

    cdef int complete(self, object value, list out) except -1:
        """Put one value where it belongs; close the aggregates it fills."""
        cdef _Open top
        while self.stack:
            top = <_Open>self.stack[len(self.stack) - 1]
            top.items.append(value)
            top.left -= 1
            if top.left:
                return 0
            self.stack.pop()
            if top.kind == b"|":
                return 0    # an attribute says something about the value that follows it
            value = _build(top)
        out.append(value)
        if not isinstance(value, Push):
            self.plan = None
        return 0

    cdef int line(self, const char *s, size_t n, list out) except -1:
        """One whole line without its CRLF; s[0] is the type."""
        cdef char kind = s[0]
        cdef int64_t v = 0
        cdef bint plus = n > 1 and s[1] == b"+"
        if not self.stack and kind != b">" and kind != b"|" and self.plan is None:
            self.plan = self.plans.popleft() if self.plans else None
            self.slot = 0
        if kind == b"+":
            return self.complete(PyUnicode_DecodeUTF8(s + 1, n - 1, "surrogateescape"), out)
        if kind == b"-":
            return self.complete(ReplyError(PyUnicode_DecodeUTF8(s + 1, n - 1, "replace")), out)
        if kind == b":":
            if not resp_number(s + 1 + plus, n - 1 - plus, &v) or (plus and v < 0):
                self.fail("invalid integer")
            return self.complete(v, out)
        if kind == b"$" or kind == b"=" or kind == b"!":
            if not resp_number(s + 1, n - 1, &v):
                self.fail("invalid bulk length")
            return self.begin_bulk(kind, v, out)
        if kind == b"*" or kind == b"%" or kind == b"~" or kind == b">" or kind == b"|":
            if not resp_number(s + 1, n - 1, &v):
                self.fail("invalid aggregate length")
            return self.open_aggregate(kind, v, out)
        if kind == b"_" and n == 1:
            self.planned(-1)
            return self.complete(None, out)
        text = s[1:n]
        if kind == b"#" and (text == b"t" or text == b"f"):
            return self.complete(text == b"t", out)
        if kind == b"," and (_decimal(s + 1, n - 1, True) or text.lower() in (b"inf", b"-inf", b"nan", b"-nan")):
            try:
                number = float(text)
            except ValueError:
                return self.fail("invalid double")
            return self.complete(number, out)
        if kind == b"(" and n <= 4300 and _decimal(s + 1, n - 1, False):
            return self.complete(int(text), out)
        return self.fail(f"not a reply: {(<bytes>s[:n])[:32]!r}")

    cdef int advance(self, list out) except -1:
        try:
            self.run(out)
        except RemoteProtocolError as error:
            error.replies = out
            raise
        return 0

    cdef int run(self, list out) except -1:
        cdef char *buf
        cdef size_t i
        while True:
            buf = PyByteArray_AS_STRING(self.window)
            if self.state == LINE:
                i = max(self.scan, self.start)
                while i < self.end and buf[i] != b"\r" and buf[i] != b"\n":
                    i += 1
                self.scan = i
                if i - self.start > self.max_line:
                    self.fail(f"a line of more than {self.max_line} bytes")
                if i < self.end and (i == self.start or buf[i] == b"\n" or (i + 1 < self.end and buf[i + 1] != b"\n")):
                    self.fail("a line without its type or its CRLF")
                if i + 2 > self.end:
                    return 0
                i, self.start = self.start, i + 2
                self.scan = self.start
                self.line(buf + i, self.start - 2 - i, out)
                continue
            if self.state == BODY:
                if self.body is None:
                    if self.end - self.start < self.bulk_len:
                        return 0
                    self.got = self.bulk_len
                elif self.got < self.bulk_len:
                    return 0
                self.state = CRLF
            i = self.start + (0 if self.body is not None else self.bulk_len)
            if (i < self.end and buf[i] != b"\r") or (i + 1 < self.end and buf[i + 1] != b"\n"):
                self.fail("a bulk without its CRLF")
            if i + 2 > self.end:
                return 0
            if self.body is not None:
                self.start = self.scan = i + 2
            self.finish_bulk(out)
