# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""Row formats: fp32, fp16, bf16 and int8 (affine, groups of 32), in both directions, on plain buffers.

A format is named by the code that also stands on disk: INT8 0, FP16 2, FP32 8, BF16 9. The kernels are in quant.h, the
readable twin is `pion.ref.quant`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t

from pion._core.quant cimport (
    Q_BF16,
    Q_FP16,
    Q_FP32,
    Q_GROUP,
    Q_INT8,
    Q_REFUSED,
    q_decode_with,
    q_encode_with,
    q_have_f16c,
    q_is_source,
    q_row_bytes,
)

__all__ = ["BF16", "FP16", "FP32", "GROUP", "INT8", "RefusedRowError", "decode", "encode", "has_f16c", "row_bytes"]

INT8 = Q_INT8
FP16 = Q_FP16
FP32 = Q_FP32
BF16 = Q_BF16
GROUP = Q_GROUP

_NAMES = {Q_INT8: "int8", Q_FP16: "fp16", Q_FP32: "fp32", Q_BF16: "bf16"}


class RefusedRowError(ValueError):
    """A value does not fit the wanted format. `row` is the first row (from 0) that holds such a value."""

    def __init__(self, row: int, code: int) -> None:
        limit = "finite bf16" if code == Q_BF16 else "65504"
        super().__init__(f"row {row} holds a value beyond {limit}, which {_NAMES[code]} cannot keep")
        self.row = row


def has_f16c() -> bool:
    """Whether this machine runs the F16C kernels (x86 only; the portable ones give the same bytes)."""
    return q_have_f16c() != 0


def row_bytes(int code, Py_ssize_t dim) -> int:
    """Bytes of one stored row of `dim` values. ValueError for a format not built or a dim below 1."""
    if dim < 1 or dim > 1 << 24:
        raise ValueError(f"dim {dim} is not in 1..{1 << 24}")
    cdef size_t size = q_row_bytes(code, <size_t> dim)
    if size == 0:
        raise ValueError(f"format {code} is not in this build")
    return size


cdef object _refuse_room(Py_ssize_t have, Py_ssize_t want):
    raise ValueError(f"out holds {have} bytes, {want} are needed")


def encode(int src_code, int dst_code, data, Py_ssize_t dim, *, out=None, bint portable=False):
    """Convert whole rows of fp32, fp16 or bf16 to a stored format.

    Args:
        src_code: FP32, FP16 or BF16: what `data` holds.
        dst_code: INT8, FP16, FP32 or BF16. The same code as `src_code` copies the words verbatim.
        data: a contiguous buffer of whole rows, little-endian.
        dim: values of a row.
        out: a writable contiguous buffer of at least the result's size; without it a new bytearray is made.
        portable: use the portable kernels although the machine has better ones.

    Returns:
        `out`, or the new bytearray.

    Raises:
        RefusedRowError: a finite value beyond the format (|x| > 65504 for fp16; for int8 also NaN and infinities; for
            bf16 what would round to infinity). The content of `out` is then undefined.
        ValueError: a format not built, a size that is no multiple of a row, or an `out` that is too small.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t width = row_bytes(src_code, dim)
    cdef size_t stored = row_bytes(dst_code, dim)
    cdef size_t rows
    cdef int64_t bad_row = -1
    cdef int result
    cdef int f16c = not portable and q_have_f16c()
    if not q_is_source(src_code):
        raise ValueError(f"rows cannot be given as {_NAMES[src_code]}")
    PyObject_GetBuffer(data, &src, PyBUF_SIMPLE)
    try:
        rows = <size_t> src.len // width
        if rows * width != <size_t> src.len:
            raise ValueError(f"{src.len} bytes are not whole rows of {width}")
        if out is None:
            out = bytearray(rows * stored)
        PyObject_GetBuffer(out, &dst, PyBUF_WRITABLE)
        try:
            if <size_t> dst.len < rows * stored:
                _refuse_room(dst.len, rows * stored)
            with nogil:
                result = q_encode_with(src_code, dst_code, src.buf, dst.buf, rows, <size_t> dim, &bad_row, f16c)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    if result == Q_REFUSED:
        raise RefusedRowError(bad_row, dst_code)
    return out


def decode(int code, data, Py_ssize_t dim, *, out=None, bint portable=False):
    """Stored rows of any built format to fp32 rows.

    Args, errors and result as in `encode`; every stored pattern decodes, NaN and infinities included.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t stored = row_bytes(code, dim)
    cdef size_t rows
    cdef int f16c = not portable and q_have_f16c()
    PyObject_GetBuffer(data, &src, PyBUF_SIMPLE)
    try:
        rows = <size_t> src.len // stored
        if rows * stored != <size_t> src.len:
            raise ValueError(f"{src.len} bytes are not whole rows of {stored}")
        if out is None:
            out = bytearray(rows * 4 * <size_t> dim)
        PyObject_GetBuffer(out, &dst, PyBUF_WRITABLE)
        try:
            if <size_t> dst.len < rows * 4 * <size_t> dim:
                _refuse_room(dst.len, rows * 4 * dim)
            with nogil:
                q_decode_with(code, src.buf, dst.buf, rows, <size_t> dim, f16c)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    return out
