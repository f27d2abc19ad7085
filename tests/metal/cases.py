"""What the kernels are tried on: formats, shapes, and stored rows made by the reference encoders."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from pion import limits
from pion.metal_kernels import Rows
from pion.ref import quant, quant_keys

ORDERS: Final = (0, 1, 12345)  # forward, reverse, shuffled
DTYPES: Final = ("float16", "bfloat16", "float32")

PLAIN: Final = tuple(limits.FORMATS[name] for name in ("int8", "fp8", "mlx4g32"))
TURBO: Final = tuple(limits.FORMATS[name] for name in ("turbo4", "turbo3", "turbo2"))
KEYS: Final = tuple(code + 16 for code in TURBO)
CODES: Final = (*PLAIN, *TURBO, *KEYS)

# (heads, head size): ordinary ones, sizes whose last group is shorter, single values, odd and prime sizes.
SHAPES: Final = ((2, 64), (3, 80), (1, 128), (5, 9), (1, 1), (1, 33), (2, 96), (1, 257), (3, 65))


def kind(dtype: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 values in the words of a dtype; bfloat16 as uint16."""
    if dtype == "bfloat16":
        return quant.bf16_of(np.ascontiguousarray(values, np.float32).reshape(-1)).reshape(values.shape)
    return values.astype(dtype)


def values_of(count: int, heads: int, head_dim: int) -> np.ndarray[Any, Any]:
    """Rows (count, heads * head_dim) of a bell, with large channels, a row of zeros, a constant and a tiny one."""
    rng = np.random.default_rng(count * 1000 + heads * 100 + head_dim)
    rows = rng.normal(size=(count, heads * head_dim)).astype(np.float32)
    rows[:, ::7] *= 30
    if count > 3:
        rows[1], rows[2], rows[3] = 0, 3.25, rows[3] * 1e-6
    return rows


@functools.cache
def stored(rows: Rows, first: int = 0, theta: float = 0.0) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Stored bytes, and the fp32 array (1, heads, capacity, head_dim) that the reference decodes them to.

    For key forms `first` is the position of the first row wanted; bytes are whole blocks.
    """
    if rows.fmt & 255 in KEYS:
        start = first - rows.skip
        blocks = -(-(rows.skip + rows.count) // 64)
        given = values_of(64 * blocks, rows.heads, rows.head_dim)
        data = quant_keys.encode_keys(quant.FP32, rows.fmt, given.tobytes(), rows.dim, start, theta)
        flat = quant_keys.decode_keys(rows.fmt, data, rows.dim, start, theta)
    else:
        given = values_of(rows.count, rows.heads, rows.head_dim)
        data = quant.encode(quant.FP32, rows.fmt, given.tobytes(), rows.dim)
        flat = quant.decode(rows.fmt, data, rows.dim)
    decoded = np.frombuffer(flat, np.float32).reshape(-1, rows.dim)[rows.skip :][: rows.count]
    out = np.zeros(rows.shape, np.float32)
    out[0, :, : rows.count] = decoded.reshape(rows.count, rows.heads, rows.head_dim).swapaxes(0, 1)
    return data, out
