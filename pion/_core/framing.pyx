# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Checksummed records of Pion's files: pack, unpack, scan.

The layout stands at the top of framing.h; pion.ref.framing is the same thing in readable Python.
"""

import os
import stat as _stat

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy, memset

__all__ = [
    "ALIGN", "DEAD", "HEADER_SIZE", "KIND_FILE", "MAGIC", "PENDING", "VALID", "VERSION",
    "FileHeader", "FramingError", "Header", "LogRecord", "Scanner",
    "align_up", "crc32c", "crc32c_combine", "crc32c_portable", "crc_file", "pack_attrs", "pack_file_header",
    "pack_header", "pack_log", "read_file_header", "resync", "seed_of", "unpack_attrs", "unpack_file_header",
    "unpack_header", "unpack_log",
]

MAGIC = FR_MAGIC
VERSION = FR_VERSION
HEADER_SIZE = FR_HEADER
ALIGN = FR_ALIGN
KIND_FILE = FR_KIND_FILE
PENDING = FR_PENDING
VALID = FR_VALID
DEAD = FR_DEAD

cdef dict _REASONS = {
    FR_END: "end", FR_SHORT: "short", FR_ZEROS: "zeros", FR_BAD_MAGIC: "magic", FR_NEWER: "version",
    FR_BAD_CRC: "checksum", FR_BAD_FIELD: "field", FR_TORN: "torn",
}


class FramingError(ValueError):
    """Bytes that are not a whole, intact record.

    Attributes:
        reason: "short" (more bytes are needed), "zeros", "magic", "version" (written by a newer Pion), "checksum",
            "field" (lengths or state no writer makes) or "torn" (the payload runs past the end).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a whole record: {reason}")
        self.reason = reason


def crc32c(data, uint32_t seed=0) -> int:
    """CRC-32C of a buffer; `seed` is the CRC of what came before it (or any other start value)."""
    cdef const uint8_t[::1] view = data
    cdef size_t n = view.shape[0]
    cdef uint32_t crc
    if n < 4096:
        return c_crc32c(seed, &view[0] if n else NULL, n)
    with nogil:
        crc = c_crc32c(seed, &view[0], n)
    return crc


def crc32c_portable(data, uint32_t seed=0) -> int:
    """`crc32c` by tables, whatever the machine has."""
    cdef const uint8_t[::1] view = data
    cdef size_t n = view.shape[0]
    return c_crc32c_portable(seed, &view[0] if n else NULL, n)


def crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) -> int:
    """CRC of A + B from crc(A) (seeded or not), the unseeded crc(B), and len(B)."""
    return c_crc32c_combine(crc_a, crc_b, length_b)


def seed_of(uint64_t generation) -> int:
    """Start value of every checksum in a file of this generation."""
    return fr_seed(generation)


def align_up(uint64_t n, uint64_t align=FR_ALIGN) -> int:
    """`n` rounded up to a multiple of `align`."""
    if align == 0:
        raise ValueError("align must be positive")
    return fr_round(n, align)


def crc_file(int fd, uint64_t offset, uint64_t nbytes, uint32_t seed) -> int:
    """CRC of `nbytes` of a file, read in pieces without the GIL. Raises OSError (EIO when the file is shorter)."""
    cdef uint32_t crc = 0
    cdef int error
    with nogil:
        error = fr_crc_file(fd, offset, nbytes, seed, &crc)
    if error:
        raise OSError(error, os.strerror(error))
    return crc


def pack_attrs(pairs) -> bytes:
    """(type, bytes) pairs as u16 type | u16 length | bytes; a reader skips the types it does not know."""
    parts = []
    for kind, value in pairs:
        if not 0 <= kind <= 0xFFFF or len(value) > 0xFFFF:
            raise ValueError("attribute type and length must fit 16 bits")
        parts.append(kind.to_bytes(2, "little") + len(value).to_bytes(2, "little") + bytes(value))
    return b"".join(parts)


def unpack_attrs(attrs) -> list:
    """The (type, bytes) pairs of `pack_attrs`. Raises FramingError("field") when lengths do not add up."""
    cdef bytes raw = bytes(attrs)
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(raw)
    cdef size_t n = len(raw), at = 0, length
    pairs = []
    while at < n:
        if n - at < 4:
            raise FramingError("field")
        length = p[at + 2] | (<size_t>p[at + 3] << 8)
        if n - at - 4 < length:
            raise FramingError("field")
        pairs.append((p[at] | (p[at + 1] << 8), raw[at + 4:at + 4 + length]))
        at += 4 + length
    return pairs


cdef class Header:
    """One decoded record header. Records of a `Scanner` also know their file `offset`."""

    @property
    def kind(self) -> int:
        return self.h.kind

    @property
    def state(self) -> int:
        return self.h.state

    @property
    def flags(self) -> int:
        return self.h.flags

    @property
    def header_len(self) -> int:
        """Bytes from the start of the record to its payload."""
        return self.h.header_len

    @property
    def payload_len(self) -> int:
        return self.h.payload_len

    @property
    def payload_crc(self) -> int:
        return self.h.payload_crc

    @property
    def payload_offset(self) -> int:
        return self.offset + self.h.header_len

    @property
    def total_len(self) -> int:
        """Bytes from the start of the record to the next one."""
        return fr_total(&self.h)

    @property
    def layer(self) -> int:
        return self.h.layer

    @property
    def side(self) -> int:
        return self.h.side

    @property
    def fmt(self) -> int:
        return self.h.fmt

    @property
    def start(self) -> int:
        return self.h.start

    @property
    def count(self) -> int:
        return self.h.count

    @property
    def dim(self) -> int:
        return self.h.dim

    @property
    def aux(self) -> int:
        return self.h.aux

    @property
    def token(self) -> int:
        return self.h.token

    def __repr__(self) -> str:
        return (
            f"<Header kind={self.h.kind} state={self.h.state} at {self.offset} payload={self.h.payload_len} "
            f"layer={self.h.layer} side={self.h.side} rows={self.h.start}+{self.h.count}>"
        )


cdef Header _header(const fr_header *h, const uint8_t *attrs, uint64_t offset):
    cdef Header out = Header.__new__(Header)
    out.h = h[0]
    out.offset = offset
    out.attrs = PyBytes_FromStringAndSize(<const char *>attrs, h.attrs_len) if h.attrs_len else b""
    return out


def pack_header(
    *, uint8_t kind, uint32_t seed, uint8_t state=FR_VALID, uint8_t flags=0, uint64_t payload_len=0,
    uint32_t payload_crc=0, uint16_t layer=0, uint8_t side=0, uint8_t fmt=0, uint32_t start=0, uint32_t count=0,
    uint32_t dim=0, uint32_t aux=0, uint64_t token=0, bytes attrs=b"", uint64_t offset=0, uint32_t align=FR_ALIGN,
) -> bytes:
    """The whole header block: 64 bytes, attributes, padding up to the payload.

    Args:
        offset: where in the file the record will stand (a multiple of 64).
        align: the payload begins at a multiple of this many bytes in the file (a multiple of 64).
        payload_crc: `crc32c(payload, seed)`.
    """
    cdef fr_header h
    cdef uint32_t attrs_len
    if offset % FR_ALIGN or align == 0 or align % FR_ALIGN or align > 1 << 20:
        raise ValueError("offset and align must be multiples of 64, align at most 1 MiB")
    if len(attrs) > FR_ATTRS_MAX:
        raise ValueError(f"attributes of {len(attrs)} bytes (at most {FR_ATTRS_MAX})")
    if payload_len > FR_PAYLOAD_MAX or state > FR_DEAD:
        raise ValueError("payload_len or state out of range")
    attrs_len = <uint32_t>len(attrs)
    memset(&h, 0, sizeof(h))
    h.kind, h.state, h.flags = kind, state, flags
    h.payload_len, h.payload_crc = payload_len, payload_crc
    h.layer, h.side, h.fmt = layer, side, fmt
    h.start, h.count, h.dim, h.aux, h.token = start, count, dim, aux, token
    h.attrs_len = attrs_len
    h.header_len = fr_header_len(offset, attrs_len, align)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, h.header_len)
    cdef uint8_t *p = <uint8_t *>PyBytes_AS_STRING(out)
    memset(p + FR_HEADER, 0, h.header_len - FR_HEADER)
    memcpy(p + FR_HEADER, PyBytes_AS_STRING(attrs), attrs_len)
    fr_encode(p, &h, p + FR_HEADER, seed)
    return out


def unpack_header(data, uint32_t seed, uint64_t offset=0) -> Header:
    """Decode the header at the start of `data` (64 bytes and the padded attributes are needed, more is ignored).

    Raises:
        FramingError: not a record of a file with this seed; `reason` says why.
    """
    cdef const uint8_t[::1] view = data
    cdef fr_header h
    cdef int rc
    if view.shape[0] == 0:
        raise FramingError("short")
    rc = fr_decode(&view[0], view.shape[0], seed, &h)
    if rc:
        raise FramingError(_REASONS[rc])
    return _header(&h, &view[0] + FR_HEADER, offset)


class FileHeader:
    """The first record of a file.

    Attributes:
        type: four bytes naming what the file holds.
        version: of that content, chosen by its owner.
        generation: random 64 bits, the source of `seed`.
        size: bytes of the record; the next one begins there.
        attrs: packed attributes.
    """

    __slots__ = ("attrs", "generation", "seed", "size", "type", "version")

    def __init__(self, type: bytes, version: int, generation: int, size: int, attrs: bytes) -> None:
        self.type = type
        self.version = version
        self.generation = generation
        self.seed = seed_of(generation)
        self.size = size
        self.attrs = attrs


def pack_file_header(bytes type, *, version: int, generation: int, bytes attrs=b"") -> bytes:
    """The first record of a file; see FileHeader for the arguments."""
    if len(type) != 4:
        raise ValueError("a file type is four bytes")
    return pack_header(
        kind=FR_KIND_FILE, seed=0, aux=int.from_bytes(type, "little"), token=generation, start=version, attrs=attrs
    )


def unpack_file_header(data, *, bytes type=None) -> FileHeader:
    """Decode the first record of a file.

    Raises:
        FramingError: not a file header, or ("magic") one of another `type`.
    """
    cdef Header head = unpack_header(data, 0)
    found = int(head.h.aux).to_bytes(4, "little")
    if head.h.kind != FR_KIND_FILE or (type is not None and found != type):
        raise FramingError("magic")
    return FileHeader(found, head.h.start, head.h.token, fr_total(&head.h), head.attrs)


def read_file_header(int fd, *, bytes type=None) -> FileHeader:
    """`unpack_file_header` of an open file."""
    data = os.pread(fd, 4096, 0)
    try:
        return unpack_file_header(data, type=type)
    except FramingError as error:
        if error.reason != "short" or len(data) < 4096:
            raise
    return unpack_file_header(os.pread(fd, FR_HEADER + FR_ATTRS_MAX, 0), type=type)


cdef class Scanner:
    """Iterate over the records of a file, pending and dead ones included, by headers only.

    Iteration stops at the first thing that is not a whole record; `reason` then says why ("end" for a clean end, else
    a reason of FramingError) and `offset` where. `end` is taken at the start, so later appends are not looked at.

    Args:
        fd: an open file; read with pread, never closed.
        offset: of the first record.
        seed: `seed_of` the file's generation.
        end: where to stop (default: the file's size now).

    Raises:
        OSError: reading failed.
    """

    def __cinit__(self, int fd, uint64_t offset, uint32_t seed, end=None):
        cdef uint64_t stop
        if end is None:
            info = os.fstat(fd)
            stop = info.st_size if _stat.S_ISREG(info.st_mode) else os.lseek(fd, 0, os.SEEK_END)
        else:
            stop = end
        self.reason = ""
        if fr_scan_init(&self.s, fd, offset, stop, seed):
            raise MemoryError

    def __dealloc__(self):
        fr_scan_free(&self.s)

    @property
    def offset(self) -> int:
        """Where the next record is expected."""
        return self.s.offset

    @property
    def end(self) -> int:
        return self.s.end

    def __iter__(self):
        return self

    def __next__(self) -> Header:
        cdef fr_header h
        cdef const uint8_t *attrs = NULL
        cdef int rc
        cdef Header out
        if self.reason:
            raise StopIteration
        with nogil:
            rc = fr_scan_here(&self.s, &h, &attrs)
        if rc == FR_OK:
            out = _header(&h, attrs, self.s.offset)
            self.s.offset += fr_total(&h)
            return out
        if rc == FR_IO:
            raise OSError(self.s.error, os.strerror(self.s.error))
        self.reason = _REASONS[rc]
        raise StopIteration


def resync(int fd, uint64_t offset, uint32_t seed, end=None) -> int:
    """Offset of the first whole record at or after `offset`, or -1.

    Tells damage in the middle of a file (whole records follow) from a torn tail. Costs one look per 64 bytes.
    """
    cdef Scanner scanner = Scanner(fd, offset, seed, end)
    cdef int64_t found
    with nogil:
        found = fr_resync(&scanner.s, offset)
    if scanner.s.error:
        raise OSError(scanner.s.error, os.strerror(scanner.s.error))
    return found


class LogRecord:
    """One compact record of the keyspace log; `total` is its length in bytes."""

    __slots__ = ("db", "expire", "key", "kind", "total", "value")

    def __init__(self, kind: int, db: int, key: bytes, value: bytes, expire: int, total: int) -> None:
        self.kind = kind
        self.db = db
        self.key = key
        self.value = value
        self.expire = expire
        self.total = total


def pack_log(uint8_t kind, uint8_t db, bytes key, bytes value, uint64_t expire, uint32_t seed) -> bytes:
    """One compact record. Raises ValueError when key and value together reach 2 GiB."""
    if len(key) + len(value) > FR_LOG_MAX - FR_LOG_FIXED:
        raise ValueError("log record too large")
    cdef uint32_t klen = <uint32_t>len(key), vlen = <uint32_t>len(value)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>FR_LOG_HEADER + klen + vlen)
    cdef uint8_t *p = <uint8_t *>PyBytes_AS_STRING(out)
    memcpy(p + FR_LOG_HEADER, PyBytes_AS_STRING(key), klen)
    memcpy(p + FR_LOG_HEADER + klen, PyBytes_AS_STRING(value), vlen)
    fr_log_encode(p, kind, db, PyBytes_AS_STRING(key), klen, PyBytes_AS_STRING(value), vlen, expire, seed)
    return out


def unpack_log(data, uint32_t seed) -> LogRecord:
    """The compact record at the start of `data`. Raises FramingError."""
    cdef const uint8_t[::1] view = data
    cdef fr_log r
    cdef int rc = FR_SHORT
    if view.shape[0]:
        rc = fr_log_decode(&view[0], view.shape[0], seed, &r)
    if rc:
        raise FramingError(_REASONS[rc])
    return LogRecord(r.kind, r.db, r.key[:r.klen], r.value[:r.vlen], r.expire, r.total)
