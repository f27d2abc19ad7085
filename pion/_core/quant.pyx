# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""Row formats, in both directions, on plain buffers.

A format is an int, code | parameter << 8 (`pack_format`). The code also stands on disk:
    FP32 8, FP16 2, BF16 9: the plain words
    INT8 0: affine, groups of 32
    FP8 5: e4m3fn with an fp16 scale for each group of 32
    BF16_ROPE_FP8_BODY 6: the first `parameter` values bf16, the rest as FP8
    MLX4G32 7: what mlx.core.quantize(group_size=32, bits=4) gives for the fp16 row; dim a multiple of 32
    TURBO4 1, TURBO3 3, TURBO2 4: rotated, Lloyd-Max codes of 4, 3, 2 bits, a 16-bit gain for each block; the parameter
        is the head size, 0 for none
The others take no parameter, so the code alone is the format. The kernels are in quant.h and the q*.h files that it
includes, the readable twin is `pion.ref.quant`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t

from pion._core.quant cimport (
    Q_BF16,
    Q_BF16_ROPE_FP8_BODY,
    Q_FP8,
    Q_FP16,
    Q_FP32,
    Q_GROUP,
    Q_INT8,
    Q_MLX4G32,
    Q_REFUSED,
    Q_TURBO2,
    Q_TURBO3,
    Q_TURBO4,
    heads_split,
    q_decode_with,
    q_e4m3_to_fp32,
    q_encode_with,
    q_fp32_to_e4m3,
    q_group_rows,
    q_have_f16c,
    q_is_source,
    q_row_bytes,
)

__all__ = ["BF16", "BF16_ROPE_FP8_BODY", "FP8", "FP16", "FP32", "GROUP", "INT8", "MLX4G32", "RefusedRowError", "TURBO2",
           "TURBO3", "TURBO4", "decode", "decode_e4m3", "encode", "encode_e4m3", "has_f16c", "pack_format", "row_bytes",
           "split_heads"]

INT8 = Q_INT8
FP16 = Q_FP16
FP32 = Q_FP32
BF16 = Q_BF16
FP8 = Q_FP8
BF16_ROPE_FP8_BODY = Q_BF16_ROPE_FP8_BODY
MLX4G32 = Q_MLX4G32
TURBO4 = Q_TURBO4
TURBO3 = Q_TURBO3
TURBO2 = Q_TURBO2
GROUP = Q_GROUP

_NAMES = {Q_INT8: "int8", Q_TURBO4: "turbo4", Q_FP16: "fp16", Q_TURBO3: "turbo3", Q_TURBO2: "turbo2", Q_FP8: "fp8",
          Q_BF16_ROPE_FP8_BODY: "bf16_rope_fp8_body", Q_MLX4G32: "mlx4g32", Q_FP32: "fp32", Q_BF16: "bf16"}


def _name(fmt: int) -> str:
    return _NAMES.get(fmt & 255, f"format {fmt & 255}")


class RefusedRowError(ValueError):
    """A value does not fit the wanted format. `row` is the first row (from 0) that holds such a value."""

    def __init__(self, row: int, fmt: int) -> None:
        limit = "finite bf16" if fmt == Q_BF16 else "65504"
        super().__init__(f"row {row} holds a value beyond {limit}, which {_name(fmt)} cannot keep")
        self.row = row


def has_f16c() -> bool:
    """Whether this machine runs the F16C kernels (x86 only; the portable ones give the same bytes)."""
    return q_have_f16c() != 0


def pack_format(int code, int param=0) -> int:
    """The format of a code and its parameter (0..65535). ValueError when either is out of range."""
    if not 0 <= code <= 255 or not 0 <= param <= 65535:
        raise ValueError(f"no format has the code {code} and the parameter {param}")
    return code | param << 8


def row_bytes(int fmt, Py_ssize_t dim) -> int:
    """Bytes of one stored row of `dim` values. ValueError for a format not built, or a dim that it does not take.

    For a key form: of 64 rows, divided by 64.
    """
    if dim < 1 or dim > 1 << 24:
        raise ValueError(f"dim {dim} is not in 1..{1 << 24}")
    cdef size_t size = q_row_bytes(fmt, <size_t> dim)
    if size == 0:
        _refuse_format(fmt, dim)
    return size


cdef object _refuse_format(int fmt, Py_ssize_t dim):
    if fmt < 0 or fmt & 255 not in _NAMES:
        raise ValueError(f"format {fmt if fmt < 0 else fmt & 255} is not in this build")
    if fmt & 255 == Q_BF16_ROPE_FP8_BODY:
        raise ValueError(f"{_name(fmt)} takes 1 to {dim - 1} leading values of {dim}, not {fmt >> 8}")
    if fmt == Q_MLX4G32:
        raise ValueError(f"{_name(fmt)} takes multiples of 32 values, not {dim}")
    raise ValueError(f"{_name(fmt)} takes no parameter, not {fmt >> 8}")


cdef object _refuse_groups(int fmt):
    raise ValueError(f"format {fmt & 255} keeps keys in groups of {q_group_rows(fmt)} rows: see pion._core.quantkeys")


cdef object _refuse_room(Py_ssize_t have, Py_ssize_t want):
    raise ValueError(f"out holds {have} bytes, {want} are needed")


def encode(int src_fmt, int dst_fmt, data, Py_ssize_t dim, *, out=None, bint portable=False):
    """Convert whole rows of fp32, fp16 or bf16 to a stored format.

    Args:
        src_fmt: FP32, FP16 or BF16: what `data` holds.
        dst_fmt: any format. The same as `src_fmt` copies the words verbatim.
        data: a contiguous buffer of whole rows, little-endian.
        dim: values of a row.
        out: a writable contiguous buffer of at least the result's size; without it a new bytearray is made.
        portable: use the portable kernels although the machine has better ones.

    Returns:
        `out`, or the new bytearray.

    Raises:
        RefusedRowError: a finite value beyond the format (|x| > 65504 for fp16; what would round to infinity for bf16;
            |x| > 65504, NaN and infinities for all formats with scales). The content of `out` is then undefined.
        ValueError: a format not built, a size that is no multiple of a row, or an `out` that is too small.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t width = row_bytes(src_fmt, dim)
    cdef size_t stored = row_bytes(dst_fmt, dim)
    cdef size_t rows
    cdef int64_t bad_row = -1
    cdef int result
    cdef int f16c = not portable and q_have_f16c()
    if not q_is_source(src_fmt):
        raise ValueError(f"rows cannot be given as {_name(src_fmt)}")
    if q_group_rows(dst_fmt) != 1:
        _refuse_groups(dst_fmt)
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
                result = q_encode_with(src_fmt, dst_fmt, src.buf, dst.buf, rows, <size_t> dim, &bad_row, f16c)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    if result == Q_REFUSED:
        raise RefusedRowError(bad_row, dst_fmt)
    return out


def decode(int fmt, data, Py_ssize_t dim, *, out=None, bint portable=False):
    """Stored rows of any built format to fp32 rows.

    Args, errors and result as in `encode`; every stored pattern decodes, NaN and infinities included. What was encoded
    from fp16 values decodes to values that fp16 holds.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t stored = row_bytes(fmt, dim)
    cdef size_t rows
    cdef int f16c = not portable and q_have_f16c()
    if q_group_rows(fmt) != 1:
        _refuse_groups(fmt)
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
                q_decode_with(fmt, src.buf, dst.buf, rows, <size_t> dim, f16c)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    return out


cdef object _cast(data, out, bint narrow):
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t n
    PyObject_GetBuffer(data, &src, PyBUF_SIMPLE)
    try:
        n = <size_t> src.len // 4 if narrow else <size_t> src.len
        if narrow and n * 4 != <size_t> src.len:
            raise ValueError(f"{src.len} bytes are not whole fp32 values")
        if out is None:
            out = bytearray(n if narrow else 4 * n)
        PyObject_GetBuffer(out, &dst, PyBUF_WRITABLE)
        try:
            if <size_t> dst.len < (n if narrow else 4 * n):
                _refuse_room(dst.len, n if narrow else 4 * n)
            with nogil:
                if narrow:
                    q_fp32_to_e4m3(<const unsigned char *> src.buf, <unsigned char *> dst.buf, n)
                else:
                    q_e4m3_to_fp32(<const unsigned char *> src.buf, <unsigned char *> dst.buf, n)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    return out


def encode_e4m3(data, *, out=None):
    """The plain cast of fp32 values to e4m3fn codes, a byte each, without scales: nearest even, everything beyond 448
    saturates (infinities too), NaN becomes the NaN of its sign. `data` and `out` are contiguous buffers; returns `out`
    or a new bytearray."""
    return _cast(data, out, True)


def decode_e4m3(data, *, out=None):
    """e4m3fn codes, a byte each, to fp32 values, exactly."""
    return _cast(data, out, False)


def split_heads(data, Py_ssize_t heads, Py_ssize_t head_bytes, *, out=None):
    """Rows of `heads` pieces of `head_bytes` bytes, to all rows of the first piece, then of the second, and so on.

    Returns `out`, by default a new bytearray. ValueError: no whole rows, or `out` is too small.
    """
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef size_t rows
    if heads < 1 or head_bytes < 1:
        raise ValueError("heads and their bytes are at least 1")
    PyObject_GetBuffer(data, &src, PyBUF_SIMPLE)
    try:
        rows = <size_t> src.len // (<size_t> heads * <size_t> head_bytes)
        if <Py_ssize_t> (rows * <size_t> heads * <size_t> head_bytes) != src.len:
            raise ValueError(f"{src.len} bytes are not whole rows of {heads} x {head_bytes}")
        if out is None:
            out = bytearray(src.len)
        PyObject_GetBuffer(out, &dst, PyBUF_WRITABLE)
        try:
            if dst.len < src.len:
                _refuse_room(dst.len, src.len)
            with nogil:
                heads_split(src.buf, dst.buf, rows, <size_t> heads, <size_t> head_bytes)
        finally:
            PyBuffer_Release(&dst)
    finally:
        PyBuffer_Release(&src)
    return out
