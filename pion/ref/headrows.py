"""Twin of `pion._core.headrows`: stored rows into the arrays of models, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["fill", "put"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def put(out: Bytes, first: int, rows: Bytes) -> None:
    """Copy rows into an array.

    Args:
        out: (heads, capacity, head_bytes), u8.
        first: row of the array that the first of `rows` belongs at.
        rows: (n, heads, head_bytes), u8.
    """
    out[:, first : first + len(rows)] = rows.swapaxes(0, 1)


def fill(out: Bytes, pieces: Sequence[tuple[int, Bytes]]) -> None:
    """Fill a whole array of (first, rows); what they do not cover becomes zeros."""
    out[...] = 0
    for first, rows in pieces:
        put(out, first, rows)
