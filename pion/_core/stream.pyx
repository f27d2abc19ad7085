# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Bodies that move between sockets and files without being held in memory. See stream.h for the machinery."""

import atexit
import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strdup

__all__ = ["CONV_BF16_F16", "CONV_BF16_F32", "CONV_BF16_INT8", "CONV_F16_BF16", "CONV_F16_F32", "CONV_F16_INT8",
           "CONV_F32_BF16", "CONV_F32_F16", "CONV_F32_INT8", "CONV_RAW", "MIXED", "RAW", "Extents", "FdRef", "Sink",
           "Room", "drain", "unlink_later"]


cdef extern from "stream.h" nogil:
    ctypedef struct job:
        void (*run)(job *item, void *state) noexcept

    int Q_INT8, Q_FP16, Q_FP32, Q_BF16
    bint q_is_source(int code)
    size_t q_row_bytes(int code, size_t dim)
    jobs *jobs_new(int threads, void *(*state_new)() noexcept, void (*state_free)(void *) noexcept)
    void jobs_submit(jobs *pool, job *item)
    bint jobs_wait_idle(jobs *pool, long timeout_ms)
    room *room_new()
    room *room_ref(room *r)
    void room_unref(room *r)
    int room_refs(room *r)
    fdref *fdref_new(int fd, jobs *closer)
    int fdref_refs(fdref *ref)
    int fdref_state(const fdref *ref, uint64_t least)
    int FDREF_SHORT, FDREF_UNLINKED
    extents *extents_new(int nseg, int decode, uint32_t dim)
    int extents_seal(extents *e)
    sink *sink_new(fdref *ref, int64_t offset, uint64_t want, int conv, uint32_t dim, uint32_t crc)


cdef extern from *:
    """
    typedef struct unlink_job { job item; char *path; room *room; } unlink_job;
    static void unlink_run(job *item, void *state) {
        (void)state;
        unlink_job *self = (unlink_job *)item;
        unlink(self->path);
        room_unref(self->room);
        free(self->path);
        free(self);
    }
    """
    ctypedef struct unlink_job:
        job item
        char *path
        room *room
    void unlink_run(job *item, void *state) noexcept nogil


RAW = CONV_RAW = STREAM_RAW
MIXED = STREAM_MIXED
CONV_F32_F16 = Q_FP32 << 24 | Q_FP16
CONV_F32_BF16 = Q_FP32 << 24 | Q_BF16
CONV_F32_INT8 = Q_FP32 << 24 | Q_INT8
CONV_F16_F32 = Q_FP16 << 24 | Q_FP32
CONV_F16_BF16 = Q_FP16 << 24 | Q_BF16
CONV_F16_INT8 = Q_FP16 << 24 | Q_INT8
CONV_BF16_F32 = Q_BF16 << 24 | Q_FP32
CONV_BF16_F16 = Q_BF16 << 24 | Q_FP16
CONV_BF16_INT8 = Q_BF16 << 24 | Q_INT8

# Last closes and unlinks of the whole process. Two threads: one slow close must not hold up every other. Its only state
# is the queue, and it starts no thread before the first job.
cdef jobs *closer = jobs_new(2, NULL, NULL)


cdef void after_fork():
    # The parent's threads do not exist in the child: leave their pool behind.
    global closer
    closer = jobs_new(2, NULL, NULL)


def _after_fork():
    after_fork()


os.register_at_fork(after_in_child=_after_fork)


def drain(double timeout_s=-1.0):
    """Wait until every close and unlink handed to the background is done. False on timeout; negative waits for ever."""
    cdef long ms = -1 if timeout_s < 0 else <long>(timeout_s * 1000)
    cdef bint idle
    with nogil:
        idle = jobs_wait_idle(closer, ms)
    return idle


atexit.register(drain, 10.0)


cdef class Room:
    """The blocks of a removed file: given to its unlink and to its descriptors, it tells when they are free."""

    def __cinit__(self):
        self.room = room_new()
        if self.room == NULL:
            raise MemoryError

    def __dealloc__(self):
        room_unref(self.room)

    @property
    def taken(self):
        """An unlink or a close that it was given to has not been done yet."""
        return room_refs(self.room) > 1


def unlink_later(path, Room room=None):
    """Remove a file on a background thread (seconds for a big one). A file that is already gone is fine.

    Args:
        room: taken until it is done.
    """
    cdef bytes name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("embedded null byte")
    cdef unlink_job *item = <unlink_job *>calloc(1, sizeof(unlink_job))
    if item == NULL:
        raise MemoryError
    item.path = strdup(PyBytes_AS_STRING(name))
    if item.path == NULL:
        free(item)
        raise MemoryError
    item.room = NULL if room is None else room_ref(room.room)
    item.item.run = unlink_run
    with nogil:
        jobs_submit(closer, &item.item)


cdef class FdRef:
    """Owns a file descriptor; it is closed, on a background thread, when neither Python nor a queued reply uses it.

    Args:
        fd: an open descriptor. Ownership passes to the object.
    """

    def __cinit__(self, int fd):
        if fd < 0:
            raise ValueError("negative descriptor")
        self.ref = fdref_new(fd, closer)
        if self.ref == NULL:
            raise MemoryError

    def __dealloc__(self):
        fdref_unref(self.ref)

    def fileno(self):
        return self.ref.fd

    @property
    def refs(self):
        """Users of the file: 1 when only this object holds it, no reply and no sink."""
        return fdref_refs(self.ref)

    def occupy(self, Room room not None):
        """The file was removed: the room is taken until it is closed here. Once; a second room changes nothing."""
        if self.ref.room == NULL:
            self.ref.room = room_ref(room.room)

    @property
    def failed(self):
        """errno of a read, for a reply, that did not give what should be there; 0 = none so far."""
        return fdref_state(self.ref, 0) if self.ref.failed else 0

    def state(self, uint64_t least):
        """What became of the file: "" while it has a name and at least so many bytes, else what is wrong with it."""
        cdef int rc = fdref_state(self.ref, least)
        if rc == 0:
            return ""
        if rc == FDREF_SHORT:
            return f"its file was cut to {os.fstat(self.ref.fd).st_size} bytes"
        if rc == FDREF_UNLINKED:
            return "its file was removed from the data directory"
        return f"its file could not be read: {os.strerror(rc)}"

    def __repr__(self):
        return f"FdRef({self.ref.fd})"


cdef class Extents:
    """One bulk reply body made of file pieces and zeros; never held in memory as a whole.

    Args:
        segments: (FdRef or None, offset, nbytes) in reply order. None stands for nbytes zeros. nbytes are stored bytes.
            With MIXED each goes on with (format, skip, rows, first): what it holds, how many stored rows at its
            beginning and how many behind them are answered, and the position of its first stored row in the sequence.
        decode: RAW, or the format the rows are stored in (code | param << 8), or MIXED; they are then answered as FP32.
        dim: values per row (decode only).
        theta: base of the rotary embedding of the rows, for formats that take it out; 0 = none.
        head: bytes in front of the segments (RAW only).

    Raises:
        ValueError: a decoded segment is not a whole number of rows, or numbers are out of range.
    """

    def __cinit__(self, segments, int decode=STREAM_RAW, Py_ssize_t dim=0, *, double theta=0.0, bytes head=b""):
        cdef Py_ssize_t i
        cdef int lead = 1 if head else 0
        cdef object ref, offset, n
        segments = list(segments)
        if decode != STREAM_RAW and (dim <= 0 or dim > 1 << 24 or decode < STREAM_MIXED or
                                     (decode >= 0 and q_row_bytes(decode, dim) == 0)):
            raise ValueError(f"cannot decode format {decode} with {dim} values per row")
        if lead and decode != STREAM_RAW:
            raise ValueError("decoded rows have no head")
        if len(segments) > 1 << 28:
            raise ValueError("too many segments")
        self.body = extents_new(<int>len(segments) + lead, decode, <uint32_t>dim)
        if self.body == NULL:
            raise MemoryError
        self.body.theta = theta
        if lead:
            self.body.head = <char *>malloc(len(head))
            if self.body.head == NULL:
                raise MemoryError
            memcpy(self.body.head, PyBytes_AS_STRING(head), len(head))
            self.body.seg[0].mem = self.body.head
            self.body.seg[0].n = <uint64_t>len(head)
        for i in range(len(segments)):
            if decode == STREAM_MIXED:
                ref, offset, n, self.body.seg[i].fmt, self.body.seg[i].skip, self.body.seg[i].rows, \
                    self.body.seg[i].first = segments[i]
            else:
                ref, offset, n = segments[i]
            if not 0 <= offset <= INT64_MAX or not 0 <= n <= INT64_MAX - offset:
                raise ValueError("segment out of range")
            if ref is not None:
                self.body.seg[i + lead].ref = fdref_ref((<FdRef?>ref).ref)
            self.body.seg[i + lead].offset = offset
            self.body.seg[i + lead].n = n
        if extents_seal(self.body) != 0:
            raise ValueError("a segment is not a whole number of rows")

    def __dealloc__(self):
        extents_unref(self.body)

    def __len__(self):
        return <Py_ssize_t>self.body.total

    @property
    def decode(self):
        return self.body.decode

    @property
    def dim(self):
        return self.body.dim

    @property
    def segments(self):
        """Number of pieces the body is made of, its head included."""
        return self.body.nseg

    def tobytes(self):
        """The whole body. For tests, the embedding API and small replies."""
        cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>self.body.total)
        self._read(PyBytes_AS_STRING(out), self.body.total)
        return out

    def readinto(self, buffer):
        """Read the whole body into a writable buffer of at least len(self) bytes; returns the bytes read."""
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            if <uint64_t>view.len < self.body.total:
                raise ValueError(f"buffer of {view.len} bytes for a body of {self.body.total}")
            self._read(<char *>view.buf, self.body.total)
        finally:
            PyBuffer_Release(&view)
        return <Py_ssize_t>self.body.total

    cdef _read(self, char *out, uint64_t n):
        cdef scratch tmp
        cdef extents_at at
        cdef Py_ssize_t got
        with nogil:
            memset(&tmp, 0, sizeof(tmp))
            memset(&at, 0, sizeof(at))
            got = extents_read(self.body, &at, &tmp, out, n)
            scratch_free(&tmp)
        if got == STREAM_SHORT:
            raise EOFError("a file is shorter than the rows it should hold")
        if got < 0:
            raise OSError(-got, os.strerror(-got))


cdef class Sink:
    """One bulk argument on its way into a file (or nowhere).

    The plane fills it from the socket on a mover; `feed` does the same from memory. After an error or a refused row the
    rest of the body is still taken, so that the connection stays in step, but no longer written.

    Args:
        fdref: the file, or None to drop the bytes.
        offset: where the first byte is written.
        nbytes: length of the body as it arrives.
        convert: CONV_RAW, or from_format << 24 | to_format.
        dim: values per row (conversions only).
        crc_seed: start value of `crc`.
        reserve: disk blocks, in bytes from `offset` on, to ask for before the first write; failure is ignored.

    Attributes:
        on_abort: called with the sink when the connection ends before the body is complete.

    Raises:
        ValueError: a body that is not whole rows, an unknown conversion, numbers out of range.
    """

    def __cinit__(self, FdRef fdref, offset, nbytes, *, int convert=STREAM_RAW, Py_ssize_t dim=0, uint32_t crc_seed=0,
                  uint64_t reserve=0, **kwargs):
        cdef int source = convert >> 24, target = convert & 0xffffff
        cdef size_t row_in
        if not 0 <= offset <= INT64_MAX or not 0 <= nbytes <= INT64_MAX - offset:
            raise ValueError("offset or length out of range")
        if convert != STREAM_RAW:
            if dim <= 0 or dim > 1 << 24:
                raise ValueError(f"{dim} values per row")
            if not q_is_source(source) or q_row_bytes(target, dim) == 0:
                raise ValueError(f"no conversion from format {source} to {target}, {dim} values per row")
            row_in = q_row_bytes(source, dim)
            if nbytes % row_in:
                raise ValueError(f"{nbytes} bytes are not whole rows of {row_in}")
        self.body = sink_new(NULL if fdref is None else fdref.ref, offset, nbytes, convert, <uint32_t>dim, crc_seed)
        if self.body == NULL:
            raise MemoryError
        self.body.reserve = reserve

    def __init__(self, fdref, offset, nbytes, *, convert=STREAM_RAW, dim=0, crc_seed=0, reserve=0):
        pass

    def __dealloc__(self):
        sink_unref(self.body)

    def feed(self, data):
        """Take the next bytes; returns how many belonged to the body (the rest is the caller's)."""
        cdef Py_buffer view
        cdef scratch tmp
        cdef uint64_t n
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            n = self.body.want - self.body.got
            if n > <uint64_t>view.len:
                n = <uint64_t>view.len
            if n:
                with nogil:
                    memset(&tmp, 0, sizeof(tmp))
                    sink_feed(self.body, <const char *>view.buf, n, &tmp)
                    scratch_free(&tmp)
        finally:
            PyBuffer_Release(&view)
        return n

    @property
    def nbytes(self):
        """Length of the body as it arrives."""
        return self.body.want

    @property
    def received(self):
        return self.body.got

    @property
    def written(self):
        """Bytes in the file, after conversion."""
        return self.body.written

    @property
    def done(self):
        """The whole body has arrived (it may still have failed: see error and bad_row)."""
        return bool(sink_done(self.body))

    @property
    def error(self):
        """0, or the errno of the first failed write."""
        return self.body.error

    @property
    def bad_row(self):
        """The first row the target format cannot hold, or -1."""
        return self.body.bad_row

    @property
    def crc(self):
        """CRC32C of the bytes written, continued from crc_seed."""
        return self.body.crc
