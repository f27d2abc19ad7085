# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Extent maps of entry files, and the file work that needs them. See vstore.h for the machinery."""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.errno cimport ENOMEM, errno
from libc.stdint cimport UINT32_MAX, uint16_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from pion._core.framing cimport (
    FR_BAD_CRC, FR_BAD_FIELD, FR_BAD_MAGIC, FR_END, FR_IO, FR_NEWER, FR_OK, FR_SHORT, FR_TORN, FR_VALID, FR_ZEROS,
    fr_header, fr_scan, fr_scan_free, fr_scan_here, fr_scan_init, fr_total,
)

__all__ = [
    "BIG_ALIGN", "BIG_FROM", "CHECKED", "GROUP", "KIND_STORE", "KIND_TRIM", "LOOSE", "BadRowError", "DamageError",
    "Rows", "beyond", "check_records", "convert_keys", "convert_region", "flush", "is_keys", "narrow",
    "row_bytes", "write_record", "writeback",
]


cdef extern from "quant.h" nogil:
    size_t q_row_bytes(int fmt, size_t dim)
    int Q_FP16
    int Q_FP32
    int q_encode(int source, int target, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row)


CHECKED = VS_CHECKED
BIG_FROM = VS_ALIGN_FROM
BIG_ALIGN = VS_BIG_ALIGN
KIND_STORE = VS_STORE
KIND_TRIM = VS_TRIM
GROUP = VS_GROUP
LOOSE = VS_LOOSE

cdef dict _WHY = {
    FR_END: "", FR_SHORT: "short", FR_ZEROS: "zeros", FR_BAD_MAGIC: "magic", FR_NEWER: "version",
    FR_BAD_CRC: "checksum", FR_BAD_FIELD: "field", FR_TORN: "torn",
}

cdef enum:
    VS_OTHER = 1000  # beside the FR codes: a record for the caller, rows that contradict what is there, no memory
    VS_MISFIT
    VS_NO_MEMORY
    GIL_BYTES = 32 << 10  # smaller writes take a few µs; giving the GIL away may cost a switch interval


class BadRowError(ValueError):
    """Row `row` of the input holds a value the stored format cannot hold."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} holds a value the stored format cannot hold")
        self.row = row


class DamageError(ValueError):
    """A record that says something no writer says, at `offset` of the file."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"damaged record at offset {offset}: {reason}")
        self.offset = offset
        self.reason = reason


cdef _oserror(int error):
    return OSError(error, os.strerror(error))


def is_keys(int fmt) -> bool:
    """Whether the format encodes groups of GROUP rows."""
    return vs_is_keys(fmt)


def row_bytes(int fmt, Py_ssize_t dim) -> int:
    """Stored bytes of a row; of a key form, a 64th of a block. ValueError: a dim that the format does not take."""
    cdef size_t size = q_row_bytes(fmt, <size_t>dim) if 0 < dim <= 1 << 24 else 0
    if size == 0:
        raise ValueError(f"format {fmt & 255} does not take rows of {dim} values")
    return size


def write_record(int fd, uint64_t offset, uint32_t seed, *, uint8_t kind, payload=b"", uint16_t layer=0,
                 uint8_t side=0, int fmt=0, uint32_t start=0, uint32_t count=0, uint32_t dim=0, uint32_t aux=0):
    """Write a valid record without attributes in one call; returns the bytes to the next record. Raises OSError.

    `fmt` with its parameter, which goes into the upper half of `aux`.
    """
    cdef Py_buffer view
    cdef fr_header h
    cdef int error
    PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
    try:
        memset(&h, 0, sizeof(h))
        h.kind, h.state, h.layer, h.side = kind, FR_VALID, layer, side
        h.start, h.count, h.dim, h.aux = start, count, dim, aux
        vs_set_format(&h, fmt)
        h.payload_len = <uint64_t>view.len
        if view.len < GIL_BYTES:
            error = vs_write_record(fd, offset, &h, view.buf, seed)
        else:
            with nogil:
                error = vs_write_record(fd, offset, &h, view.buf, seed)
    finally:
        PyBuffer_Release(&view)
    if error:
        raise _oserror(error)
    return fr_total(&h)


def check_records(int fd, uint32_t seed, records) -> int:
    """Compare the payloads of the records at these offsets with their checksums, without the GIL.

    Returns the first offset that is damaged, or -1. Raises OSError when reading fails otherwise.
    """
    cdef list offsets = list(records)
    cdef Py_ssize_t n = len(offsets), i
    cdef uint64_t *at = <uint64_t *>malloc(n * sizeof(uint64_t) + 8)
    cdef int rc = FR_OK, error = 0
    if at == NULL:
        raise MemoryError
    try:
        for i in range(n):
            at[i] = offsets[i]
        i = 0
        with nogil:
            while i < n:
                rc = vs_check_record(fd, at[i], seed)
                if rc:
                    error = errno
                    break
                i += 1
    finally:
        free(at)
    if rc == FR_IO:
        raise _oserror(error)
    return offsets[i] if rc else -1


def convert_region(int fd, uint64_t offset, uint64_t rows, uint32_t dim, int source, int target, uint32_t seed) -> int:
    """Re-encode rows in their file, in place and without the GIL; returns the CRC of the result.

    The region holds the longer of both forms. Raises BadRowError (the region is then undefined) or OSError.
    """
    cdef uint8_t *buf = <uint8_t *>malloc(2 * VS_PIECE)
    cdef uint32_t crc = 0
    cdef int64_t bad = -1
    cdef int rc
    if buf == NULL:
        raise MemoryError
    with nogil:
        rc = vs_convert(fd, offset, rows, dim, source, target, seed, buf, buf + VS_PIECE, &crc, &bad)
        free(buf)
    if rc < 0:
        raise BadRowError(bad)
    if rc:
        raise _oserror(rc)
    return crc


def convert_keys(int fd, uint64_t rows_at, uint64_t at, uint64_t groups, uint32_t dim, int source, int target,
                 uint64_t first, double theta, uint32_t seed) -> int:
    """Encode groups of GROUP rows in their file, without the GIL; returns the CRC of the blocks.

    Args:
        rows_at, at: where the rows stand, and where the blocks go: not behind the rows.
        first, theta: position of the first row; base of the rotary embedding of the keys, 0 = none.

    Raises BadRowError (the region is then undefined) or OSError.
    """
    cdef uint32_t crc = 0
    cdef int64_t bad = -1
    cdef int rc
    with nogil:
        rc = vs_convert_keys(fd, rows_at, at, groups, dim, source, target, first, theta, seed, &crc, &bad)
    if rc < 0:
        raise BadRowError(bad)
    if rc:
        raise _oserror(rc)
    return crc


def beyond(words, Py_ssize_t dim, uint32_t limit) -> int:
    """The first row of fp16 words with one whose magnitude is above the word `limit`, or -1. Infinity is 0x7c00."""
    cdef Py_buffer view
    cdef int64_t bad
    PyObject_GetBuffer(words, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            bad = vs_beyond(<const uint8_t *>view.buf, view.len // 2, limit)
    finally:
        PyBuffer_Release(&view)
    return bad // dim if bad >= 0 else -1


def narrow(bytearray wide) -> bytearray:
    """Finite FP32 values as fp16 words; what lies beyond its range becomes the largest word. `wide` is changed."""
    cdef size_t n = len(wide) // 4
    cdef bytearray out = bytearray(2 * n)
    cdef char *src = PyByteArray_AS_STRING(wide)
    cdef char *dst = PyByteArray_AS_STRING(out)
    cdef int64_t bad
    with nogil:
        vs_clamp(<float *>src, n)
        q_encode(Q_FP32, Q_FP16, src, dst, 1, n, &bad)
    return out


def writeback(int fd) -> None:
    """Start writing a file's dirty pages, without waiting."""
    with nogil:
        vs_writeback(fd)


def flush(int fd) -> None:
    """Wait until a file's data is on the medium (fdatasync, F_FULLFSYNC). Raises OSError."""
    cdef int error
    with nogil:
        error = vs_flush(fd)
    if error:
        raise _oserror(error)


cdef class Rows:
    """The rows of both sides of one entry, by layer.

    Sides are 0 and 1, layers 0..79, rows u32. The caller holds the store's lock during every call. Layers of a key form
    have sealed groups of rows and loose rows (see vstore.h); the methods speak of both together.

    Attributes:
        dead: payload bytes in the file that no extent refers to any more.
        last: offset of the last valid record that a scan saw, 0 when that has no payload.
    """

    def __dealloc__(self):
        cdef int side, i
        for side in range(4):
            for i in range(self.used[side]):
                vs_free(&self.maps[side][i])
            free(self.maps[side])

    cdef vs_map *_map(self, int side, Py_ssize_t layer) noexcept nogil:
        if side < 0 or side > 3 or layer < 0 or layer >= self.used[side]:
            return NULL
        return &self.maps[side][layer]

    cdef vs_map *_grow(self, int side, Py_ssize_t layer) noexcept nogil:
        if side < 0 or side > 3 or layer < 0 or layer >= VS_LAYERS:
            return NULL
        if self.maps[side] == NULL:
            self.maps[side] = <vs_map *>calloc(VS_LAYERS, sizeof(vs_map))
            if self.maps[side] == NULL:
                return NULL
        if layer >= self.used[side]:
            self.used[side] = <int>layer + 1
        return &self.maps[side][layer]

    cdef int _take(self, int side, Py_ssize_t layer, uint32_t start, uint32_t count, uint64_t offset, uint64_t record,
                   uint32_t stride) noexcept nogil:
        """0, -1 (no memory) or -2 (out of range, or rows of another size than the layer's)."""
        cdef vs_map *m
        if side < 0 or side > 3 or layer < 0 or layer >= VS_LAYERS or count == 0 or stride == 0:
            return -2
        m = self._grow(side, layer)
        if m == NULL or vs_room(m) != 0:
            return -1
        if start > UINT32_MAX - count or (m.stride != 0 and m.stride != stride):
            return -2
        m.stride = stride
        self.dead += vs_put(m, start, count, offset, record) * stride
        return 0

    cdef int _unloose(self, int side, Py_ssize_t layer, uint32_t start, uint32_t count) noexcept nogil:
        """Forget the loose rows of groups that are sealed now. 0 or -1 (no memory)."""
        cdef vs_map *m = self._map(side + 2, layer)
        if m == NULL or m.n == 0:
            return 0
        if vs_room(m) != 0:
            return -1
        self.dead += vs_splice(m, start, start + count, NULL) * m.stride
        return 0

    cdef int _take_record(self, const fr_header *h, uint64_t at) noexcept nogil:
        """Take in a record of rows that stands at `at` (with VS_CHECKED when its payload is known to be right).

        0, VS_NO_MEMORY or VS_MISFIT.
        """
        cdef int fmt = vs_format(h), rc
        cdef uint32_t stride = <uint32_t>q_row_bytes(fmt, h.dim)
        cdef bint loose = (h.aux & VS_LOOSE) != 0, keys = vs_is_keys(fmt)
        if h.side > 1 or <uint64_t>stride * h.count != h.payload_len or (loose and fmt != Q_FP16):
            return VS_MISFIT
        if keys and (h.start % VS_GROUP or h.count % VS_GROUP):
            return VS_MISFIT
        rc = self._take(h.side + 2 * loose, h.layer, h.start, h.count, (at & ~VS_CHECKED) + h.header_len, at, stride)
        if rc == 0 and keys:
            self.maps[h.side][h.layer].group = VS_GROUP
            rc = self._unloose(h.side, h.layer, h.start, h.count)
        return 0 if rc == 0 else VS_NO_MEMORY if rc == -1 else VS_MISFIT

    cdef int _cut(self, const fr_header *h) noexcept nogil:
        """Take in a trim, also of a layer without rows: it has been there. As _take_record."""
        if h.layer >= VS_LAYERS:
            return VS_MISFIT
        if self._grow(h.side & 1, h.layer) == NULL:
            return VS_NO_MEMORY
        self._trim(h.side & 1, h.layer, h.count)
        return 0

    cdef int _put(self, int side, Py_ssize_t layer, uint32_t start, uint32_t count, uint64_t offset, uint64_t record,
                  uint32_t stride) except -1:
        cdef int rc = self._take(side, layer, start, count, offset, record, stride)
        if rc == -1:
            raise MemoryError
        if rc:
            raise ValueError("side, layer or rows out of range, or rows of another size than the layer's")
        return 0

    def put(self, int side, int layer, uint32_t start, uint32_t count, uint64_t offset, uint64_t record,
            uint32_t stride, *, bint loose=False, bint sealed=False) -> None:
        """Publish rows that are in the file.

        Args:
            record: the offset of their record, plus CHECKED when that is known to be intact.
            stride: stored bytes of a row.
            loose, sealed: rows of a key form: single ones, or whole groups, whose loose rows are then forgotten.
        """
        if side < 0 or side > 1 or (sealed and (start % VS_GROUP or count % VS_GROUP)):
            raise ValueError("side out of range, or no whole groups")
        self._put(side + 2 * loose, layer, start, count, offset, record, stride)
        if sealed:
            self.maps[side][layer].group = VS_GROUP
            if self._unloose(side, layer, start, count) != 0:
                raise MemoryError

    def lost(self, uint64_t nbytes) -> None:
        """Count bytes of the file that hold nothing: an abandoned region, an overwritten state."""
        self.dead += nbytes

    def layers(self, int side) -> int:
        """One more than the highest layer ever stored."""
        return max(self.used[side], self.used[side + 2]) if 0 <= side <= 1 else 0

    def tokens(self, int side, Py_ssize_t layer) -> int:
        """Rows the layer reports, gaps included; 0 for a layer without a store."""
        if side < 0 or side > 1:
            return 0
        return self._tokens(side, layer)

    cdef uint32_t _tokens(self, int side, Py_ssize_t layer) noexcept nogil:
        cdef vs_map *m = self._map(side, layer)
        cdef vs_map *loose = self._map(side + 2, layer)
        cdef uint32_t tokens = m.tokens if m != NULL else 0
        return loose.tokens if loose != NULL and loose.tokens > tokens else tokens

    def live(self, int side, Py_ssize_t layer) -> int:
        """Rows that are there, gaps excluded."""
        if side < 0 or side > 1:
            return 0
        return self._live(side, layer)

    cdef uint64_t _live(self, int side, Py_ssize_t layer) noexcept nogil:
        cdef vs_map *m = self._map(side, layer)
        cdef vs_map *loose = self._map(side + 2, layer)
        cdef uint64_t rows = m.live if m != NULL else 0
        if loose == NULL:
            return rows
        return rows + loose.live - (vs_hidden(m, loose) if m != NULL else 0)

    def covers(self, int side, Py_ssize_t layer, uint32_t start, uint32_t end) -> bool:
        """Every row of [start, end) is there."""
        cdef uint32_t rows = 0
        cdef uint64_t offset = 0
        if start < end and (side < 0 or side > 1):
            return False
        while start < end:
            if vs_next_of_two(self._map(side, layer), self._map(side + 2, layer), &start, end, &offset, &rows) == 0:
                return False
        return True

    def complete(self, uint32_t rows, Py_ssize_t layers) -> bool:
        """Both sides hold exactly `rows` rows, without gaps, in each of `layers` layers."""
        cdef int side
        cdef Py_ssize_t layer
        for side in range(2):
            if max(self.used[side], self.used[side + 2]) != layers:
                return False
            for layer in range(layers):
                if self._tokens(side, layer) != rows or self._live(side, layer) != rows:
                    return False
        return True

    def extents(self, int side, Py_ssize_t layer) -> int:
        """Pieces the layer is stored in."""
        cdef vs_map *m = self._map(side, layer)
        cdef vs_map *loose = self._map(side + 2, layer) if 0 <= side <= 1 else NULL
        return (m.n if m != NULL else 0) + (loose.n if loose != NULL else 0)

    def most_extents(self) -> int:
        """Pieces of the most fragmented layer."""
        cdef uint32_t most = 0
        cdef int side, i
        for side in range(4):
            for i in range(self.used[side]):
                if self.maps[side][i].n > most:
                    most = self.maps[side][i].n
        return most

    def total(self, int side) -> tuple[int, int]:
        """(rows reported, the bytes of as many rows of each layer's size) over all layers of a side.

        The bytes leave loose rows out: a side with key forms is counted by `Side.stored_bytes`.
        """
        cdef uint64_t rows = 0, nbytes = 0
        cdef uint32_t tokens
        cdef int i
        if side < 0 or side > 1:
            return 0, 0
        for i in range(max(self.used[side], self.used[side + 2])):
            tokens = self._tokens(side, i)
            rows += tokens
            if i < self.used[side]:
                nbytes += <uint64_t>tokens * self.maps[side][i].stride
        return rows, nbytes

    def trim(self, int side, Py_ssize_t layer, uint32_t rows) -> None:
        """Forget the rows from `rows` on; of a sealed group that goes beyond, all rows."""
        if 0 <= side <= 1:
            self._trim(side, layer, rows)

    cdef void _trim(self, int side, Py_ssize_t layer, uint32_t rows) noexcept nogil:
        cdef vs_map *m = self._map(side, layer)
        cdef vs_map *loose = self._map(side + 2, layer)
        if m != NULL:
            self.dead += vs_trim(m, rows) * m.stride
        if loose != NULL:
            self.dead += vs_trim(loose, rows) * loose.stride

    def settle(self) -> None:
        """Forget loose rows that sealed groups hide."""
        cdef vs_map *m
        cdef int side, layer
        cdef uint32_t i
        for side in range(2):
            for layer in range(min(self.used[side], self.used[side + 2])):
                m = &self.maps[side][layer]
                for i in range(m.n):
                    if self._unloose(side, layer, m.at[i].start, m.at[i].count) != 0:
                        raise MemoryError

    def pieces(self, int side, Py_ssize_t layer, uint32_t start, uint32_t end) -> list:
        """[start, end) of a key form as (kind, offset, row, rows) in row order.

        kind: 0 = rows are missing, 1 = sealed (the offset is that of the group the first row is in), 2 = loose.
        """
        cdef vs_map *m = self._map(side, layer)
        cdef uint32_t row = start, first, rows = 0
        cdef uint64_t offset = 0
        cdef int kind
        cdef list out = []
        if side < 0 or side > 1:
            return out
        while row < end:
            first = row
            kind = vs_next_of_two(m, self._map(side + 2, layer), &row, end, &offset, &rows)
            if kind == 1:
                offset -= <uint64_t>(first % VS_GROUP) * m.stride
            out.append((kind, offset, first, rows))
        return out

    def segments(self, ref, int side, Py_ssize_t layer, uint32_t start, uint32_t end, uint32_t stride) -> list:
        """[start, end) as (ref, offset, nbytes) pieces in row order; (None, 0, nbytes) where rows are missing."""
        cdef vs_map *m = self._map(side, layer)
        cdef uint32_t i, row = start, rows = 0
        cdef uint64_t offset = 0
        cdef int hit = 0
        cdef list out = []
        if m == NULL or m.n == 0:
            return [(None, 0, <uint64_t>(end - start) * stride)] if end > start else out
        i = vs_find(m, start)
        while row < end:
            vs_next(m, &i, &row, end, &hit, &offset, &rows)
            out.append((ref if hit else None, offset, <uint64_t>rows * stride))
        return out

    def unchecked(self, int side, Py_ssize_t layer, uint32_t start, uint32_t end) -> list:
        """Offsets of the records behind [start, end) whose payload nobody has compared with its checksum yet."""
        cdef vs_map *m
        cdef uint32_t i
        cdef int which
        cdef uint64_t last = VS_CHECKED
        cdef list out = []
        for which in (side, side + 2) if 0 <= side <= 1 else ():
            m = self._map(which, layer)
            if m == NULL or m.unchecked == 0:
                continue
            i = vs_find(m, start)
            while i < m.n and m.at[i].start < end:
                if not m.at[i].record & VS_CHECKED and m.at[i].record != last:
                    last = m.at[i].record
                    out.append(last)
                i += 1
        return out

    def doubtful(self) -> bool:
        """Some payload has not been compared with its checksum yet."""
        cdef int side, i
        for side in range(4):
            for i in range(self.used[side]):
                if self.maps[side][i].unchecked:
                    return True
        return False

    def mark_checked(self, records) -> None:
        """These records (offsets) are intact."""
        cdef set known = set(records)
        cdef vs_map *m
        cdef int side, layer
        cdef uint32_t i
        for side in range(4):
            for layer in range(self.used[side]):
                m = &self.maps[side][layer]
                if m.unchecked == 0:
                    continue
                for i in range(m.n):
                    if not m.at[i].record & VS_CHECKED and m.at[i].record in known:
                        m.at[i].record |= VS_CHECKED
                        m.unchecked -= 1

    def copy(self) -> Rows:
        """A snapshot that later stores do not change."""
        cdef Rows out = Rows.__new__(Rows)
        cdef vs_map *src
        cdef vs_map *dst
        cdef int side, layer
        out.dead = self.dead
        for side in range(4):
            for layer in range(self.used[side]):
                src = &self.maps[side][layer]
                dst = out._grow(side, layer)
                if dst == NULL:
                    raise MemoryError
                dst[0] = src[0]
                dst.cap = src.n
                dst.at = <vs_extent *>malloc(src.n * sizeof(vs_extent) + 1)
                if dst.at == NULL:
                    dst.n = 0
                    raise MemoryError
                memcpy(dst.at, src.at, src.n * sizeof(vs_extent))
        return out

    def append(self, int fd, uint64_t at, uint32_t seed, int side, int layer, uint32_t start, uint32_t count,
               uint32_t dim, int source, int target, blob) -> int:
        """Encode rows, write them as one record at `at` and publish them. Returns the bytes to the next record.

        Args:
            source, target: formats of `blob` and of the file (no key form); blob holds count x dim values.

        Raises:
            BadRowError: a value does not fit; nothing is written.
            OSError: the write failed; the caller cuts the file back to `at`.
        """
        cdef Py_buffer view
        cdef fr_header h
        cdef size_t stride = q_row_bytes(target, dim), nbytes = stride * count
        cdef int64_t bad = -1
        cdef int rc = 0, error = 0
        cdef uint8_t *encoded = NULL
        cdef const void *payload
        if side < 0 or side > 1 or layer < 0 or layer >= VS_LAYERS:
            raise ValueError("side or layer out of range")
        PyObject_GetBuffer(blob, &view, PyBUF_SIMPLE)
        try:
            if stride == 0 or count == 0 or <size_t>view.len != q_row_bytes(source, dim) * count:
                raise ValueError("blob is not count rows of dim values")
            payload = view.buf
            if source != target:
                encoded = <uint8_t *>malloc(nbytes)
                if encoded == NULL:
                    raise MemoryError
                payload = encoded
            memset(&h, 0, sizeof(h))
            h.kind, h.state, h.layer, h.side = VS_STORE, FR_VALID, <uint16_t>layer, <uint8_t>side
            vs_set_format(&h, target)
            h.start, h.count, h.dim, h.payload_len = start, count, dim, nbytes
            if nbytes < GIL_BYTES:
                if encoded != NULL:
                    rc = q_encode(source, target, view.buf, encoded, count, dim, &bad)
                if rc == 0:
                    error = vs_write_record(fd, at, &h, payload, seed)
            else:
                with nogil:
                    if encoded != NULL:
                        rc = q_encode(source, target, view.buf, encoded, count, dim, &bad)
                    if rc == 0:
                        error = vs_write_record(fd, at, &h, payload, seed)
        finally:
            PyBuffer_Release(&view)
            free(encoded)
        if rc:
            if bad < 0:
                raise ValueError(f"no conversion from format {source} to {target}")
            raise BadRowError(bad)
        if error:
            raise _oserror(error)
        self._put(side, layer, start, count, at + h.header_len, at | VS_CHECKED, <uint32_t>stride)
        return fr_total(&h)

    def scan(self, int fd, uint64_t offset, uint64_t end, uint32_t seed, others) -> tuple[int, str]:
        """Take in the records of a file by their headers; payloads stay unchecked.

        Args:
            others: called with (kind, offset, header_len, payload_len, layer, side, start, count, attrs) for each valid
                record that is neither rows nor a trim, in file order.

        Returns:
            (offset where the scan stopped, why: "" for the clean end, else a reason of framing.FramingError)

        Raises:
            DamageError: an intact header that contradicts the records before it.
            OSError: reading failed.
        """
        cdef fr_scan s
        cdef fr_header h
        cdef const uint8_t *attrs = NULL
        cdef int rc
        if fr_scan_init(&s, fd, offset, end, seed):
            raise MemoryError
        try:
            while True:
                with nogil:
                    rc = self._scan_rows(&s, &h, &attrs)
                if rc == VS_OTHER:
                    others(h.kind, s.offset, h.header_len, h.payload_len, h.layer, h.side, h.start, h.count,
                           (<const char *>attrs)[:h.attrs_len] if h.attrs_len else b"")
                    s.offset += fr_total(&h)
                elif rc == VS_MISFIT:
                    raise DamageError(s.offset, "rows do not fit their header, or the layer")
                elif rc == VS_NO_MEMORY:
                    raise MemoryError
                elif rc == FR_IO:
                    raise _oserror(s.error)
                else:
                    return s.offset, _WHY[rc]
        finally:
            fr_scan_free(&s)

    cdef int _scan_rows(self, fr_scan *s, fr_header *h, const uint8_t **attrs) noexcept nogil:
        """Take in rows and trims up to the first other valid record (VS_OTHER) or the end of the scan (its reason)."""
        cdef int rc
        while True:
            rc = fr_scan_here(s, h, attrs)
            if rc:
                return rc
            if h.state == FR_VALID:
                self.last = s.offset if h.payload_len else 0
                if h.kind == VS_STORE:
                    rc = self._take_record(h, s.offset)
                    if rc:
                        return rc
                elif h.kind == VS_TRIM:
                    rc = self._cut(h)
                    if rc:
                        return rc
                else:
                    return VS_OTHER
            else:
                self.dead += fr_total(h)
            s.offset += fr_total(h)

    def merge_into(self, Rows fresh, int src, int dst, uint64_t at, uint32_t seed, formats) -> int:
        """Write every row of this map into another file, one record for each run without a gap.

        Args:
            fresh: empty; gets the same rows at their new places.
            formats: for each side and layer that has rows (dim, format).

        Returns:
            The offset behind the last record. Raises OSError.
        """
        cdef int side, layer, error
        cdef int fmt[4 * VS_LAYERS]
        cdef uint32_t dim[4 * VS_LAYERS]
        cdef uint8_t *buf = <uint8_t *>malloc(VS_PIECE)
        if buf == NULL:
            raise MemoryError
        try:
            for side in range(2):
                for layer in range(self.layers(side)):
                    dim[side * VS_LAYERS + layer], fmt[side * VS_LAYERS + layer] = formats[side][layer]
                    dim[(side + 2) * VS_LAYERS + layer] = dim[side * VS_LAYERS + layer]
                    fmt[(side + 2) * VS_LAYERS + layer] = Q_FP16
            with nogil:
                error = self._merge(fresh, src, dst, &at, seed, fmt, dim, buf)
            if error == ENOMEM:
                raise MemoryError
            if error:
                raise _oserror(error)
            return at
        finally:
            free(buf)

    cdef int _merge(self, Rows fresh, int src, int dst, uint64_t *at, uint32_t seed, const int *fmt,
                    const uint32_t *dim, uint8_t *buf) noexcept nogil:
        """0 or errno."""
        cdef fr_header h
        cdef vs_map *m
        cdef vs_map *into
        cdef int side, layer, error
        cdef uint32_t i, j
        cdef uint64_t total = 0
        for side in range(4):
            for layer in range(self.used[side]):
                m = &self.maps[side][layer]
                i = 0
                while i < m.n:
                    j = i + 1
                    while j < m.n and m.at[j].start == m.at[j - 1].start + m.at[j - 1].count:
                        j += 1
                    memset(&h, 0, sizeof(h))
                    h.kind, h.state, h.layer, h.side = VS_STORE, FR_VALID, <uint16_t>layer, <uint8_t>(side & 1)
                    h.dim, h.aux = dim[side * VS_LAYERS + layer], VS_LOOSE if side > 1 else 0
                    vs_set_format(&h, fmt[side * VS_LAYERS + layer])
                    error = vs_merge(m, i, j, src, dst, at[0], &h, seed, buf, &total)
                    if error:
                        return error
                    if fresh._take(side, layer, h.start, h.count, at[0] + h.header_len, at[0] | VS_CHECKED, m.stride):
                        return ENOMEM
                    at[0] += total
                    i = j
                into = fresh._grow(side, layer)
                if into == NULL:
                    return ENOMEM
                if m.tokens > into.tokens:
                    into.tokens = m.tokens
                into.stride, into.group = m.stride, m.group
        return 0

    def copy_tail(self, int src, uint64_t offset, uint64_t end, uint32_t seed, int dst, uint64_t at, uint32_t dst_seed,
                  others) -> int:
        """Append the valid records of [offset, end) of one file to another of a different seed, and take them in.

        `others` as in scan, with offsets of the new file. Returns the offset behind the last record.

        Raises:
            DamageError: a record is not whole or its checksum is wrong.
            OSError: reading or writing failed.
        """
        cdef fr_scan s
        cdef fr_header h
        cdef const uint8_t *attrs = NULL
        cdef int rc
        cdef uint8_t *buf = <uint8_t *>malloc(VS_PIECE)
        if buf == NULL or fr_scan_init(&s, src, offset, end, seed):
            free(buf)
            raise MemoryError
        try:
            while True:
                with nogil:
                    rc = self._copy_rows(src, &s, &h, &attrs, seed, dst, &at, dst_seed, buf)
                if rc == VS_OTHER:
                    others(h.kind, at, h.header_len, h.payload_len, h.layer, h.side, h.start, h.count,
                           (<const char *>attrs)[:h.attrs_len] if h.attrs_len else b"")
                    at += fr_total(&h)
                elif rc == FR_END:
                    return at
                elif rc == FR_IO:
                    raise _oserror(s.error)
                elif rc == VS_NO_MEMORY:
                    raise MemoryError
                else:
                    raise DamageError(s.offset, "checksum" if rc == VS_MISFIT else "not a whole record")
        finally:
            fr_scan_free(&s)
            free(buf)

    cdef int _copy_rows(self, int src, fr_scan *s, fr_header *h, const uint8_t **attrs, uint32_t seed, int dst,
                        uint64_t *at, uint32_t dst_seed, uint8_t *buf) noexcept nogil:
        """Copy records up to the first valid one that is not rows (VS_OTHER: copied, *at not moved on) or the end."""
        cdef int rc
        cdef uint64_t step
        while True:
            rc = fr_scan_here(s, h, attrs)
            if rc:
                return rc
            step = fr_total(h)
            if h.state != FR_VALID:
                s.offset += step
                continue
            rc = vs_recode(src, s.offset, h, attrs[0], seed, dst, at[0], dst_seed, buf)
            if rc == FR_IO:
                s.error = errno
                return FR_IO
            if rc:
                return VS_MISFIT
            s.offset += step
            if h.kind == VS_STORE:
                rc = self._take_record(h, at[0] | VS_CHECKED)
                if rc:
                    return rc
            elif h.kind == VS_TRIM:
                rc = self._cut(h)
                if rc:
                    return rc
            else:
                return VS_OTHER
            at[0] += fr_total(h)
