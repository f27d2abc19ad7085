# cython: language_level=3
"""Rows to int8 and a membership question, through the C interface and without Python in between."""

from libc.stdint cimport int64_t, uint8_t

from pion._core.membership cimport mt_probe
from pion._core.quant cimport Q_FP32, Q_INT8, Q_OK, q_encode, q_row_bytes
from pion._core.resp cimport Encoder


def to_int8(const uint8_t[::1] rows, Py_ssize_t dim) -> bytes:
    """fp32 rows to int8 rows; ValueError names the first refused row."""
    cdef Py_ssize_t count = rows.shape[0] // (4 * dim)
    cdef int64_t bad_row = -1
    cdef int result
    out = bytearray(count * q_row_bytes(Q_INT8, dim))
    cdef uint8_t[::1] target = out
    with nogil:
        result = q_encode(Q_FP32, Q_INT8, &rows[0], &target[0], count, dim, &bad_row)
    if result != Q_OK:
        raise ValueError(f"row {bad_row}")
    return bytes(out)


def first_eight(const uint8_t[::1] table, const uint8_t[::1] hashes) -> int:
    """The membership bits of up to eight hashes; -1 when `table` is none."""
    cdef uint8_t bits = 0
    cdef int result
    with nogil:
        result = mt_probe(
            <const char *> &table[0], table.shape[0], <const char *> &hashes[0], min(hashes.shape[0] // 8, 8), &bits
        )
    return bits if result == 0 else -1


def number_reply(int64_t value) -> bytes:
    """An integer reply made by a cdef method of the package's own encoder."""
    cdef Encoder encoder = Encoder(2)
    encoder.num(b":", value)
    return b"".join(encoder.take())
