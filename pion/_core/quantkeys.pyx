# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""The key forms of turbo4, turbo3 and turbo2: groups of 64 rows, rope undone, levels per channel.

The kernels and the block's layout are in quant_keys.h, the readable twin is `pion.ref.quant_keys`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t

from pion._core.quant cimport Q_BF16, Q_FP16, Q_FP32, Q_KTURBO2, Q_KTURBO3, Q_KTURBO4, Q_REFUSED
from pion._core.quantkeys cimport (
    QK_POSITIONS,
    QK_ROWS,
    q_keys_decode,
    q_keys_encode,
    qk_block_bytes,
    qk_rope_fits,
)
from pion._core.quant import RefusedRowError

__all__ = [
    "KTURBO2",
    "KTURBO3",
    "KTURBO4",
    "ROWS",
    "RefusedKeyError",
    "block_bytes",
    "decode_keys",
    "encode_keys",
]

KTURBO4 = Q_KTURBO4
KTURBO3 = Q_KTURBO3
KTURBO2 = Q_KTURBO2
ROWS = QK_ROWS


class RefusedKeyError(RefusedRowError):
    """A key that no group can hold. `row` is the first such row (from 0)."""

    def __init__(self, row: int) -> None:
        ValueError.__init__(self, f"row {row} holds a value beyond 65504 (or does so once its rope is undone)")
        self.row = row


def block_bytes(int fmt, Py_ssize_t dim) -> int:
    """Bytes of the block of 64 rows of `dim` values. ValueError for what is no key form or a dim below 1."""
    if dim < 1 or dim > 1 << 24:
        raise ValueError(f"dim {dim} is not in 1..{1 << 24}")
    cdef size_t size = qk_block_bytes(fmt, <size_t> dim)
    if size == 0:
        raise ValueError(f"format {fmt & 0xff} is no key form (want {Q_KTURBO4}, {Q_KTURBO3} or {Q_KTURBO2})")
    return size


cdef uint64_t _checked(int fmt, Py_ssize_t dim, object first_row, double theta, size_t groups) except? 1:
    if not qk_rope_fits(fmt, <size_t> dim, theta):
        raise ValueError(
            f"a rope of base {theta} and head size {fmt >> 8} does not fit rows of {dim}: want a base above 0 and a "
            "head size that divides the row, or base 0 for keys without a rope"
        )
    if not 0 <= first_row <= QK_POSITIONS - QK_ROWS * groups:
        raise ValueError(f"rows from {first_row} on are not in 0..{QK_POSITIONS - 1}")
    return first_row


def encode_keys(int src_code, int fmt, data, Py_ssize_t dim, first_row, double theta, *, out=None):
    """Whole groups of 64 rows of keys to blocks.

    The values are rounded to fp16 first: rows that waited as fp16 give the same block.

    Args:
        src_code: FP32, FP16 or BF16 of `pion._core.quant`: what `data` holds.
        fmt: KTURBO4, KTURBO3 or KTURBO2; with a rope, the head size is its parameter (`quant.pack_format`).
        data: a contiguous buffer of whole groups, row-major, little-endian.
        dim: values of a row.
        first_row: the position of the first row in its sequence.
        theta: the base of the rope; 0 for keys without one.
        out: a writable contiguous buffer of at least the result's size; without it a new bytearray is made.

    Returns:
        `out`, or the new bytearray.

    Raises:
        RefusedKeyError: NaN, an infinity or |x| > 65504, or a pair that leaves that range when its rope is undone. The
            content of `out` is then undefined.
        ValueError: another format, a rope that does not fit, a size that is no multiple of a group, or an `out` that
            is too small.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t stored = block_bytes(fmt, dim)
    cdef size_t width
    cdef size_t groups
    cdef uint64_t first
    cdef int64_t bad_row = -1
    cdef int result
    if src_code not in (Q_FP32, Q_FP16, Q_BF16):
        raise ValueError(f"keys cannot be given as format {src_code} (want fp32, fp16 or bf16)")
    width = QK_ROWS * <size_t> dim * (4 if src_code == Q_FP32 else 2)
    PyObject_GetBuffer(data, &src, PyBUF_SIMPLE)
    try:
        groups = <size_t> src.len // width
        if groups * width != <size_t> src.len:
            raise ValueError(f"{src.len} bytes are not whole groups of {width}")
        first = _checked(fmt, dim, first_row, theta, groups)
        if out is None:
            out = bytearray(groups * stored)
        PyObject_GetBuffer(out, &dst, PyBUF_WRITABLE)
        try:
            if <size_t> dst.len < groups * stored:
                raise ValueError(f"out holds {dst.len} bytes, {groups * stored} are needed")
            with nogil:
                result = q_keys_encode(src_code, fmt, src.buf, dst.buf, groups, <size_t> dim, first, theta, &bad_row)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    if result == Q_REFUSED:
        raise RefusedKeyError(bad_row)
    return out


def decode_keys(int fmt, data, Py_ssize_t dim, first_row, double theta, *, out=None):
    """Blocks to fp32 rows.

    Args, errors and result as in `encode_keys`; fmt, first_row and theta must be those of encoding. Every stored
    pattern decodes.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t stored = block_bytes(fmt, dim)
    cdef size_t wide = 4 * QK_ROWS * <size_t> dim
    cdef size_t groups
    cdef uint64_t first
    PyObject_GetBuffer(data, &src, PyBUF_SIMPLE)
    try:
        groups = <size_t> src.len // stored
        if groups * stored != <size_t> src.len:
            raise ValueError(f"{src.len} bytes are not whole blocks of {stored}")
        first = _checked(fmt, dim, first_row, theta, groups)
        if out is None:
            out = bytearray(groups * wide)
        PyObject_GetBuffer(out, &dst, PyBUF_WRITABLE)
        try:
            if <size_t> dst.len < groups * wide:
                raise ValueError(f"out holds {dst.len} bytes, {groups * wide} are needed")
            with nogil:
                q_keys_decode(fmt, src.buf, dst.buf, groups, <size_t> dim, first, theta)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    return out
