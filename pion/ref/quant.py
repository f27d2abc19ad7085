"""Row formats in numpy, written to be read. The compiled `pion._core.quant` must agree with this file byte for byte.

Everything is float32 arithmetic with one rounding per operation, and integer work on the words themselves where numpy
has no type (bfloat16) or no promise (the payload of a NaN).
"""

import numpy as np
from numpy.typing import NDArray

from pion.ref import turbo

INT8, TURBO4, FP16, TURBO3, TURBO2, FP8, BF16_ROPE_FP8_BODY, MLX4G32, FP32, BF16 = range(10)
BITS = {TURBO4: 4, TURBO3: 3, TURBO2: 2}
SOURCES = (FP32, FP16, BF16)
GROUP = 32
LIMIT = np.float32(65504)

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
U16 = NDArray[np.uint16]
U8 = NDArray[np.uint8]


class RefusedRowError(ValueError):
    """A value does not fit the wanted format; `row` is the first row that holds one."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


def pack_format(code: int, param: int = 0) -> int:
    """A format: the code, and a parameter above it."""
    return code | param << 8


def row_bytes(fmt: int, dim: int) -> int:
    """Bytes of one stored row of `dim` values. 0: the format does not take this dim or parameter."""
    code, param = fmt & 255, fmt >> 8
    groups = -(-dim // GROUP)
    if code in BITS:
        return turbo.row_bytes(BITS[code], param, dim)
    if code == BF16_ROPE_FP8_BODY:
        return 2 * param + row_bytes(FP8, dim - param) if 0 < param < dim else 0
    if param or (code == MLX4G32 and dim % GROUP):
        return 0
    sizes = {INT8: dim + 4 * groups, FP8: dim + 2 * groups, MLX4G32: dim // 2 + 4 * groups}
    return (sizes | {FP16: 2 * dim, FP32: 4 * dim, BF16: 2 * dim})[code]


def half_of(values: F32) -> U16:
    """float32 to the words of fp16, nearest even; a NaN keeps its sign and top payload bits and turns quiet."""
    words = values.view(np.uint32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        half = values.astype(np.float16).view(np.uint16)
    nan = (words >> 16) & 0x8000 | 0x7E00 | (words >> 13) & 0x3FF
    return np.where(np.isnan(values), nan, half).astype(np.uint16)


def half_to(words: U16) -> F32:
    """The words of fp16 to float32, exactly; a signalling NaN turns quiet."""
    wide = words.astype(np.uint32)
    nan = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    with np.errstate(invalid="ignore"):
        value = words.view(np.float16).astype(np.float32).view(np.uint32)
    return np.where(wide & 0x7FFF > 0x7C00, nan, value).astype(np.uint32).view(np.float32)


def bf16_of(values: F32) -> U16:
    """float32 to the words of bf16, nearest even; a NaN keeps its sign and top payload bits and turns quiet."""
    words = values.view(np.uint32).astype(np.uint64)
    rounded = words + 0x7FFF + (words >> 16 & 1) >> 16
    return np.where(np.isnan(values), words >> 16 | 0x40, rounded).astype(np.uint16)


def bf16_to(words: U16) -> F32:
    """The words of bf16 to float32: the upper half of the word."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def widen(code: int, data: bytes, dim: int) -> F32:
    """Rows of fp32, fp16 or bf16 as a float32 array (rows, dim)."""
    if code == FP32:
        flat = np.frombuffer(data, np.float32)
    else:
        flat = (half_to if code == FP16 else bf16_to)(np.frombuffer(data, np.uint16))
    return flat.reshape(-1, dim)


def refused(fmt: int, values: F32) -> NDArray[np.bool_]:
    """Which values of rows the format `fmt` cannot keep."""
    code = fmt & 255
    bad: NDArray[np.bool_] = np.zeros(values.shape, np.bool_)
    if code == FP16:
        bad = np.isfinite(values) & (np.abs(values) > LIMIT)
    elif code == BF16:
        bad = np.isfinite(values) & (bf16_of(values) & 0x7FFF == 0x7F80)
    elif code == BF16_ROPE_FP8_BODY:
        bad = np.concatenate([refused(BF16, values[:, : fmt >> 8]), refused(FP8, values[:, fmt >> 8 :])], axis=1)
    elif code != FP32:
        bad = ~(np.abs(values) <= LIMIT)
    return bad


def within_half(values: F32) -> F32:
    """Decoded values, kept within what fp16 holds; a NaN stays."""
    return np.clip(values, -LIMIT, LIMIT)


def int8_group(values: F32) -> tuple[U8, U16]:
    """One group of one row: its codes, and its pair (scale, min) as fp16 words.

    min is the fp16 at or below the smallest value, scale the fp16 at or above (largest - min) / 255; the codes are
    chosen against that rounded pair, so they need no clamping.
    """
    zero = np.float32(0)  # adding it turns -0 into +0
    low, high = values.min() + zero, values.max() + zero
    minimum = np.array([low], np.float32).astype(np.float16)
    if np.float32(minimum[0]) > low:
        minimum = np.nextafter(minimum, np.float16(-np.inf))
    base = np.float32(minimum[0])
    wanted = np.float32((high - base) / np.float32(255))
    scale = np.array([wanted], np.float32).astype(np.float16)
    if np.float32(scale[0]) < wanted:
        scale = np.nextafter(scale, np.float16(np.inf))
    step = np.float32(scale[0])
    inverse = np.float32(1) / step if step > 0 else zero
    codes = np.rint((values - base) * inverse).astype(np.uint8)
    return codes, np.concatenate([scale, minimum]).view(np.uint16)


def e4m3_of(values: F32) -> U8:
    """float32 to e4m3fn codes: nearest even, everything beyond 448 saturates, NaN becomes 0x7F with its sign.

    The 127 magnitudes are listed, and the nearest of the two neighbours is taken.
    """
    sign = (values.view(np.uint32) >> 24 & 0x80).astype(np.uint8)
    table = e4m3_to(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448)
    above = np.searchsorted(table, np.nan_to_num(magnitude))
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8) | sign


def e4m3_to(codes: U8) -> F32:
    """e4m3fn codes to float32, exactly: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is the only NaN."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -value, value))
    return value.astype(np.float32)


def fp8_scale(top: F32) -> U16:
    """The fp16 word of a group's scale from its largest magnitude: absmax / 448 to the nearest, doubled until it is a
    normal fp16, at most 14 times; 2^-14 where that is not enough."""
    scale = top / np.float32(448)
    for _ in range(14):
        scale = np.where(scale < 2.0**-14, scale * np.float32(2), scale)
    return half_of(np.where(scale < 2.0**-14, np.float32(2.0**-14), scale).astype(np.float32))


def fp8_rows(values: F32) -> U8:
    """Rows of the fp8 form: all codes, then the scale of each group of 32."""
    rows, dim = values.shape
    padded = np.zeros((rows, -(-dim // GROUP), GROUP), np.float32)
    padded.reshape(rows, -1)[:, :dim] = values
    scales = fp8_scale(np.abs(padded).max(axis=2))
    inverse = np.float32(1) / half_to(scales)
    codes = e4m3_of(padded * inverse[:, :, None]).reshape(rows, -1)[:, :dim]
    return np.concatenate([codes, scales.view(np.uint8)], axis=1)


def fp8_values(rows: U8, dim: int) -> F32:
    """The inverse of `fp8_rows`, for any stored bytes."""
    scales = half_to(np.ascontiguousarray(rows[:, dim:]).view(np.uint16))
    with np.errstate(invalid="ignore"):
        return within_half(np.repeat(scales, GROUP, axis=1)[:, :dim] * e4m3_to(rows[:, :dim]))


def mlx4_rows(values: F32) -> U8:
    """Rows (dim a multiple of 32) as MLX's affine quantization of their fp16 values: codes, scales, biases."""
    rows = len(values)
    groups = half_to(half_of(values)).reshape(rows, -1, GROUP)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale = np.maximum((high - low) / np.float32(15), np.float32(1e-7))
    negative = np.abs(low) > np.abs(high)
    edge, scale = np.where(negative, low, high), np.where(negative, scale, -scale)
    steps = np.rint(edge / scale)
    moved = steps != 0
    scale = np.where(moved, edge / np.where(moved, steps, np.float32(1)), scale)
    bias = np.where(moved, edge, np.float32(0))
    codes = np.clip(np.rint((groups - bias[:, :, None]) / scale[:, :, None]), 0, 15).astype(np.uint8)
    packed = codes.reshape(rows, -1)[:, 0::2] | codes.reshape(rows, -1)[:, 1::2] << 4
    return np.concatenate([packed, half_of(scale).view(np.uint8), half_of(bias).view(np.uint8)], axis=1)


def mlx4_values(rows: U8, dim: int) -> F32:
    """The inverse of `mlx4_rows` in fp32 arithmetic (MLX decodes in fp16)."""
    codes = np.stack([rows[:, : dim // 2] & 15, rows[:, : dim // 2] >> 4], axis=2).reshape(len(rows), dim)
    pairs = half_to(np.ascontiguousarray(rows[:, dim // 2 :]).view(np.uint16))
    scale, bias = (np.repeat(part, GROUP, axis=1) for part in np.split(pairs, 2, axis=1))
    with np.errstate(invalid="ignore"):
        return within_half(scale * codes.astype(np.float32) + bias)


def encode(src_fmt: int, dst_fmt: int, data: bytes, dim: int) -> bytes:
    """Rows given as fp32, fp16 or bf16 to the stored bytes of `dst_fmt`. Raises RefusedRowError."""
    if src_fmt == dst_fmt:
        return bytes(data)
    code, param = dst_fmt & 255, dst_fmt >> 8
    values = widen(src_fmt, data, dim)
    bad = refused(dst_fmt, values).any(axis=1)
    if bad.any():
        raise RefusedRowError(int(bad.argmax()))
    if code == FP32:
        return values.tobytes()
    if code in (FP16, BF16):
        return (half_of if code == FP16 else bf16_of)(np.ascontiguousarray(values)).tobytes()
    if not len(values):
        return b""
    if code in BITS:
        return turbo.encode(BITS[code], param, values)
    if code == FP8:
        return fp8_rows(values).tobytes()
    if code == MLX4G32:
        return mlx4_rows(values).tobytes()
    if code == BF16_ROPE_FP8_BODY:
        lead = np.ascontiguousarray(values[:, :param])
        if src_fmt == BF16:  # word for word, NaN payloads included
            words = np.ascontiguousarray(np.frombuffer(data, np.uint16).reshape(-1, dim)[:, :param])
        else:
            words = bf16_of(lead)
        return np.concatenate([words.view(np.uint8), fp8_rows(values[:, param:])], axis=1).tobytes()
    rows = []
    for row in values:
        groups = [int8_group(row[start : start + GROUP]) for start in range(0, dim, GROUP)]
        rows.append(b"".join(codes.tobytes() for codes, _ in groups) + b"".join(pair.tobytes() for _, pair in groups))
    return b"".join(rows)


def decode(fmt: int, data: bytes, dim: int) -> bytes:
    """Stored rows to fp32 rows."""
    code, param = fmt & 255, fmt >> 8
    if code in SOURCES:
        return widen(code, data, dim).tobytes()
    rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(fmt, dim))
    if not len(rows):
        return b""
    if code in BITS:
        return turbo.decode(BITS[code], param, data, dim).tobytes()
    if code == FP8:
        return fp8_values(rows, dim).tobytes()
    if code == MLX4G32:
        return mlx4_values(rows, dim).tobytes()
    if code == BF16_ROPE_FP8_BODY:
        lead = bf16_to(np.ascontiguousarray(rows[:, : 2 * param]).view(np.uint16))
        return np.concatenate([lead, fp8_values(rows[:, 2 * param :], dim - param)], axis=1).tobytes()
    groups = -(-dim // GROUP)
    pairs = half_to(np.ascontiguousarray(rows[:, dim:]).view(np.uint16)).reshape(len(rows), groups, 2)
    scale, minimum = (np.repeat(pairs[:, :, part], GROUP, axis=1)[:, :dim] for part in (0, 1))
    with np.errstate(invalid="ignore"):
        return within_half((minimum + scale * rows[:, :dim].astype(np.float32)).astype(np.float32)).tobytes()


def split_heads(data: bytes, heads: int, head_bytes: int) -> bytes:
    """Rows of `heads` pieces, to all rows of each piece."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, heads, head_bytes)
    return rows.swapaxes(0, 1).tobytes()
