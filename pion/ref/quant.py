"""Row formats in numpy, written to be read. The compiled `pion._core.quant` must agree with this file byte for byte.

Everything is float32 arithmetic with one rounding per operation, and integer work on the words themselves where numpy
has no type (bfloat16) or no promise (the payload of a NaN).
"""

import numpy as np
from numpy.typing import NDArray

INT8, FP16, FP32, BF16 = 0, 2, 8, 9
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


def row_bytes(code: int, dim: int) -> int:
    """Bytes of one stored row of `dim` values."""
    return {INT8: dim + 4 * -(-dim // GROUP), FP16: 2 * dim, FP32: 4 * dim, BF16: 2 * dim}[code]


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


def refused(code: int, values: F32) -> NDArray[np.bool_]:
    """Which values the format `code` cannot keep."""
    bad: NDArray[np.bool_] = np.zeros(values.shape, np.bool_)
    if code == FP16:
        bad = np.isfinite(values) & (np.abs(values) > LIMIT)
    elif code == INT8:
        bad = ~(np.abs(values) <= LIMIT)
    elif code == BF16:
        bad = np.isfinite(values) & (bf16_of(values) & 0x7FFF == 0x7F80)
    return bad


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


def encode(src_code: int, dst_code: int, data: bytes, dim: int) -> bytes:
    """Rows given as fp32, fp16 or bf16 to the stored bytes of `dst_code`. Raises RefusedRowError."""
    if src_code == dst_code:
        return bytes(data)
    values = widen(src_code, data, dim)
    bad = refused(dst_code, values).any(axis=1)
    if bad.any():
        raise RefusedRowError(int(bad.argmax()))
    if dst_code == FP32:
        return values.tobytes()
    if dst_code in (FP16, BF16):
        return (half_of if dst_code == FP16 else bf16_of)(np.ascontiguousarray(values)).tobytes()
    rows = []
    for row in values:
        groups = [int8_group(row[start : start + GROUP]) for start in range(0, dim, GROUP)]
        rows.append(b"".join(codes.tobytes() for codes, _ in groups) + b"".join(pair.tobytes() for _, pair in groups))
    return b"".join(rows)


def decode(code: int, data: bytes, dim: int) -> bytes:
    """Stored rows to fp32 rows."""
    if code != INT8:
        return widen(code, data, dim).tobytes()
    rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(INT8, dim))
    groups = -(-dim // GROUP)
    pairs = half_to(np.ascontiguousarray(rows[:, dim:]).view(np.uint16)).reshape(len(rows), groups, 2)
    scale, minimum = (np.repeat(pairs[:, :, part], GROUP, axis=1)[:, :dim] for part in (0, 1))
    return (minimum + scale * rows[:, :dim].astype(np.float32)).astype(np.float32).tobytes()
