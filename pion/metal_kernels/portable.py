"""The kernels' twins in plain MLX operations, for devices without Metal. One rounding per operation, in the same order.

Each takes the stored bytes, what to decode, the dtype and, for keys, the angles, and returns an array (1, heads,
capacity, head_dim). The stored bytes are a uint8 array of exactly the rows (or blocks) that hold what is wanted.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from pion.metal_kernels.table import KEY_ROWS, Rows, bits_of
from pion.ref import quant_keys, turbo

__all__ = ["keys_turbo", "rows_fp8", "rows_int8", "rows_mlx4g32", "rows_turbo"]

_GROUP: Final = 32
_LIMIT: Final = 65504.0


def _halves(words: Any) -> Any:
    """Bytes (..., 2n) as n fp16 numbers in float32."""
    import mlx.core as mx

    return mx.contiguous(words).view(mx.float16).astype(mx.float32)


def _groups(values: Any) -> Any:
    """Rows (n, dim) as float32 (n, groups, 32), the last group filled with zeros."""
    import mlx.core as mx

    values = mx.pad(values.astype(mx.float32), [(0, 0), (0, -values.shape[1] % _GROUP)])
    return values.reshape(values.shape[0], -1, _GROUP)


def _array(values: Any, rows: Rows, dtype: Any, *, clip: bool = True) -> Any:
    """Decoded rows (n, at least dim values) in the layout of the cache."""
    import mlx.core as mx

    count = values.shape[0]
    values = values.reshape(count, -1)[:, : rows.dim].reshape(count, rows.heads, rows.head_dim)
    if clip:
        values = mx.clip(values, -_LIMIT, _LIMIT)
    values = values.astype(dtype).transpose(1, 0, 2)[None]
    return mx.pad(values, [(0, 0), (0, 0), (0, rows.capacity - count), (0, 0)])


def rows_int8(data: Any, rows: Rows, dtype: Any) -> Any:
    """Codes, then (scale, min) pairs."""
    data = data.reshape(rows.count, -1)
    pairs = _halves(data[:, rows.dim :]).reshape(rows.count, -1, 2)
    return _array(pairs[:, :, 1:] + pairs[:, :, :1] * _groups(data[:, : rows.dim]), rows, dtype)


def rows_fp8(data: Any, rows: Rows, dtype: Any) -> Any:
    """Codes e4m3fn, then scales."""
    import mlx.core as mx

    data = data.reshape(rows.count, -1)
    values = mx.take(mx.array(_e4m3()), data[:, : rows.dim].astype(mx.uint32))
    return _array(_groups(values) * _halves(data[:, rows.dim :])[:, :, None], rows, dtype)


@functools.cache
def _e4m3() -> np.ndarray[Any, Any]:
    """The value of each code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


def rows_mlx4g32(data: Any, rows: Rows, dtype: Any) -> Any:
    """Eight codes in a word, scales, biases: what ``mx.dequantize`` reads, in fp32 arithmetic."""
    import mlx.core as mx

    data = data.reshape(rows.count, -1)
    half = rows.dim // 2
    packed = data[:, :half]
    codes = mx.stack([packed & 15, packed >> 4], axis=2).reshape(rows.count, rows.dim)
    scales, biases = (_halves(part)[:, :, None] for part in mx.split(data[:, half:], 2, axis=1))
    return _array(scales * _groups(codes) + biases, rows, dtype)


# ---- turbo -----------------------------------------------------------------------------------------------------------


def rows_turbo(data: Any, rows: Rows, dtype: Any) -> Any:
    """Packed codes of all blocks, then their gains."""
    import mlx.core as mx

    bits, sizes = bits_of(rows.fmt), turbo.blocks(rows.dim, rows.fmt >> 8)
    data = data.reshape(rows.count, -1)
    widths = [-(-bits * size // 8) for size in sizes]
    packed = sum(widths)
    gains = mx.contiguous(data[:, packed:]).view(mx.uint16).astype(mx.uint32)
    gains = (gains << 15).view(mx.float32)
    if len(set(sizes)) == 1:  # all blocks at once
        codes = data[:, :packed].reshape(-1, widths[0])
        return _array(_blocks(codes, gains.reshape(-1), bits, sizes[0]).reshape(rows.count, -1), rows, dtype)
    parts, at = [], 0
    for number, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        parts.append(_blocks(data[:, at : at + width], gains[:, number], bits, size))
        at += width
    return _array(mx.concatenate(parts, axis=1), rows, dtype)


def _blocks(packed: Any, gains: Any, bits: int, size: int) -> Any:
    """Blocks of one size, from the bytes of their codes and their gains."""
    import mlx.core as mx

    bit = mx.arange(size, dtype=mx.uint32) * bits
    wide = mx.pad(packed, [(0, 0), (0, 1)]).astype(mx.uint32)
    word = mx.take(wide, bit // 8, axis=1) | mx.take(wide, bit // 8 + 1, axis=1) << 8
    levels = mx.array(np.concatenate([turbo.LEVELS[bits], -turbo.LEVELS[bits]]))
    values = mx.take(levels, word >> bit % 8 & (2**bits - 1))
    first, second = (mx.array(turbo.signs(size, seed)) for seed in turbo.SEEDS)
    return _spread(_spread(values) * second) * first * (gains / size)[:, None]


def _spread(values: Any) -> Any:
    """Rows times Hartley(m) (x) Hadamard(2^k)."""
    import mlx.core as mx

    count, size = values.shape
    run = size & -size
    odd, stride = size // run, run // 2
    while stride:
        pairs = values.reshape(count, -1, 2, stride)
        first, second = pairs[:, :, :1], pairs[:, :, 1:]
        values = mx.concatenate([first + second, first - second], axis=2)
        stride //= 2
    values = values.reshape(count, odd, run)
    if odd > 1:
        factors = turbo.hartley(odd)[np.outer(np.arange(odd), np.arange(odd)) % odd]
        total = values[:, :1]
        for j in range(1, odd):
            total = total + values[:, j : j + 1] * mx.array(factors[:, j : j + 1])
        values = total
    return values.reshape(count, size)


# ---- keys ------------------------------------------------------------------------------------------------------------


def keys_turbo(data: Any, rows: Rows, dtype: Any, turns: Any) -> Any:
    """Blocks of 64 rows; `turns` (count, 2, head_dim // 2): cosines and sines of the rows wanted."""
    import mlx.core as mx

    bits, dim = bits_of(rows.fmt), rows.dim
    blocks = -(-(rows.skip + rows.count) // KEY_ROWS)
    data = data.reshape(blocks, -1)
    planes = data[:, : 8 * bits * dim].reshape(blocks, 8, bits, dim)
    partner = quant_keys.partners(dim, rows.head_dim if rows.turned else dim)
    scale, bias = (_halves(part)[:, None] for part in mx.split(data[:, 8 * bits * dim :][:, : 4 * dim], 2, axis=1))
    words = mx.contiguous(data[:, 8 * bits * dim :][:, : 2 * dim]).view(mx.uint16)
    wide = (words >> 15).astype(mx.uint8) * mx.array((partner != np.arange(dim)).astype(np.uint8))
    other = mx.array(partner.astype(np.uint32))
    last = planes[:, :, -1]
    beyond = mx.take(last, other, axis=2) * wide[:, None]
    last = last * (1 - mx.take(wide, other, axis=1))[:, None]
    codes = mx.zeros((blocks, 8, 8, dim), mx.uint8)
    for k, plane in enumerate([*(planes[:, :, k] for k in range(bits - 1)), last, beyond]):
        codes = codes | mx.stack([plane >> row & 1 for row in range(8)], axis=2) << k
    values = bias + mx.abs(scale) * codes.reshape(blocks, KEY_ROWS, dim).astype(mx.float32)
    values = values.reshape(-1, dim)[rows.skip : rows.skip + rows.count]
    if rows.turned:
        values = values.reshape(rows.count, rows.heads, rows.head_dim)
        half = rows.head_dim // 2
        low, high, rest = values[:, :, :half], values[:, :, half : 2 * half], values[:, :, 2 * half :]
        c, s = turns[:, :1], turns[:, 1:]
        values = mx.concatenate([low * c - high * s, high * c + low * s, rest], axis=2)
    # Turning may lengthen one of a pair beyond what fp16 holds.
    return _array(values, rows, dtype, clip=dtype == mx.float16)
