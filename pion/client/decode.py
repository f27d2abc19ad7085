"""Rows as they are stored (`pion.wire.raw`) to words of a dtype, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from pion._core import quant, quantkeys
from pion.wire.raw import MAX_SEGMENTS, Segment, Stored, header_length

__all__ = ["CODES", "NUMPY", "Decoder", "is_keys", "most_bytes", "wanted_part"]

NUMPY: Final[dict[str, Any]] = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}
CODES: Final = {"float16": quant.FP16, "bfloat16": quant.BF16, "float32": quant.FP32}  # formats that are plain words

_PIECE: Final = 256 << 10  # bytes of fp32 decoded at a time: they stay in the processor's cache
_KEYS: Final = (quantkeys.KTURBO4, quantkeys.KTURBO3, quantkeys.KTURBO2)


def is_keys(fmt: int) -> bool:
    """Whether a format encodes groups of 64 rows of keys."""
    return fmt & 255 in _KEYS


def most_bytes(rows: int, dim: int) -> int:
    """An upper bound of an answer with so many rows: as fp32, with whole groups and the longest header."""
    return 4 * dim * (rows + 2 * quantkeys.ROWS) + header_length(MAX_SEGMENTS)


def wanted_part(segment: Segment, stored: Stored) -> tuple[int, int]:
    """The rows of a segment that were asked for, from its start."""
    first = max(0, stored.start - segment.start)
    return first, min(segment.rows, stored.start + stored.rows - segment.start)


class Decoder:
    """Decodes the layers of one fetch; used by one thread.

    Args:
        dim: values of a row.
        dtype: wanted: ``float16``, ``bfloat16`` (as uint16 words) or ``float32``.
    """

    def __init__(self, dim: int, dtype: str) -> None:
        self.dim, self.dtype = dim, dtype
        self._code, self._kind = CODES[dtype], np.dtype(NUMPY[dtype])
        self._step = max(1, _PIECE // (4 * dim))
        rows = max(self._step, quantkeys.ROWS)
        self._wide = memoryview(bytearray(4 * dim * rows))
        self._narrow = memoryview(bytearray(2 * dim * rows))

    def pieces(self, stored: Stored, answer: memoryview) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """The rows asked for, piece by piece and in order.

        Yields:
            (first, rows): rows (n, dim) that belong at `first` of those asked for. They are valid until the next
            piece is asked for. Rows that are not stored are zeros.

        Raises:
            ValueError: a format this version does not know, or lengths that do not fit it.
        """
        if stored.dim != self.dim:
            raise ValueError(f"rows of {stored.dim} values, not {self.dim}")
        for segment in stored.segments:
            first, last = wanted_part(segment, stored)
            at = segment.start + first - stored.start
            data = answer[segment.offset : segment.offset + segment.nbytes]
            if segment.missing:
                yield at, np.broadcast_to(np.zeros((), self._kind), (last - first, self.dim))
            elif segment.fmt == self._code:
                self._check(segment, quant.row_bytes(segment.fmt, self.dim) * segment.rows)
                yield at, np.frombuffer(data, self._kind).reshape(-1, self.dim)[first:last]
            elif is_keys(segment.fmt):
                yield from self._keys(segment, data, stored, first, last)
            else:
                yield from self._rows(segment, data, at, first, last)

    def _check(self, segment: Segment, nbytes: int) -> None:
        if segment.nbytes != nbytes:
            raise ValueError(
                f"{segment.nbytes} bytes are not {segment.rows} rows of {self.dim} values in format {segment.fmt & 255}"
            )

    def _words(self, rows: int) -> np.ndarray[Any, Any]:
        """The first rows of the fp32 scratch in the dtype wanted."""
        wide = self._wide[: 4 * self.dim * rows]
        if self.dtype == "float32":
            return np.frombuffer(wide, np.float32).reshape(rows, self.dim)
        narrow = self._narrow[: 2 * self.dim * rows]
        quant.encode(quant.FP32, self._code, wide, self.dim, out=narrow)
        return np.frombuffer(narrow, self._kind).reshape(rows, self.dim)

    def _rows(
        self, segment: Segment, data: memoryview, at: int, first: int, last: int
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        size = quant.row_bytes(segment.fmt, self.dim)
        self._check(segment, size * segment.rows)
        for row in range(first, last, self._step):
            count = min(self._step, last - row)
            wide = self._wide[: 4 * self.dim * count]
            quant.decode(segment.fmt, data[size * row : size * (row + count)], self.dim, out=wide)
            yield at + row - first, self._words(count)

    def _keys(
        self, segment: Segment, data: memoryview, stored: Stored, first: int, last: int
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        group, size = quantkeys.ROWS, quantkeys.block_bytes(segment.fmt, self.dim)
        if segment.rows % group or segment.start % group:
            raise ValueError("keys that are no whole groups")
        self._check(segment, size * (segment.rows // group))
        for row in range(first // group * group, last, group):
            wide = self._wide[: 4 * self.dim * group]
            block = data[size * (row // group) : size * (row // group + 1)]
            quantkeys.decode_keys(segment.fmt, block, self.dim, segment.start + row, stored.theta, out=wide)
            if self.dtype == "float16":  # turning may lengthen one of a pair beyond what fp16 holds
                values = np.frombuffer(wide, np.float32)
                np.clip(values, -65504, 65504, out=values)
            low, high = max(row, first), min(row + group, last)
            yield segment.start + low - stored.start, self._words(group)[low - row : high - row]
