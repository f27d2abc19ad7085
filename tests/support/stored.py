"""Answers to FMT RAW, made without a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pion._core import quant, quantkeys
from pion.wire import raw

F32 = quant.FP32


def encoded(fmt: int, rows: np.ndarray, first: int = 0, theta: float = 0.0) -> bytes:
    """float32 rows (n, dim) in a stored format; key forms: whole groups that begin at position `first`."""
    data, dim = np.ascontiguousarray(rows, np.float32).tobytes(), rows.shape[1]
    if fmt & 255 in (quantkeys.KTURBO4, quantkeys.KTURBO3, quantkeys.KTURBO2):
        return bytes(quantkeys.encode_keys(F32, fmt, data, dim, first, theta))
    return data if fmt == F32 else bytes(quant.encode(F32, fmt, data, dim))


def decoded(fmt: int, data: bytes, dim: int, first: int = 0, theta: float = 0.0) -> np.ndarray:
    """The inverse, by the compiled decoders in one call."""
    if fmt & 255 in (quantkeys.KTURBO4, quantkeys.KTURBO3, quantkeys.KTURBO2):
        wide = quantkeys.decode_keys(fmt, data, dim, first, theta)
    else:
        wide = quant.decode(fmt, data, dim)
    return np.frombuffer(wide, np.float32).reshape(-1, dim)


def answer(
    dim: int, start: int, rows: int, segments: Sequence[tuple[int, int, int, bytes | None]], theta: float = 0.0
) -> memoryview:
    """An answer for rows `start` to `start + rows`. A segment is (format, first row, rows, bytes; None = missing)."""
    told = [
        raw.Segment(fmt, first, count, len(data or b""), missing=data is None) for fmt, first, count, data in segments
    ]
    head = raw.pack(dim, start, rows, theta, told)
    return memoryview(bytearray(head + b"".join(data or b"" for *_, data in segments)))
