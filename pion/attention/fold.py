"""Grouped queries: which head of K/V each query head reads, as a shape of arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion.attention.merge import F32, Part

__all__ = ["Fold", "Map", "fold_of"]

Map = NDArray[np.int64]


class Fold:
    """Query heads that share a head of K/V become rows of it, so that nothing of K/V is repeated.

    Args:
        head_map: (H_q,) the head of K/V of each query head; heads need not have the same number.
    """

    def __init__(self, head_map: NDArray[Any], heads: int, kv_heads: int) -> None:
        self.head_map: Map = np.asarray(head_map, np.int64)
        if self.head_map.shape != (heads,) or self.head_map.min() < 0 or self.head_map.max() >= kv_heads:
            raise ValueError(f"head_map must be {heads} heads below {kv_heads}")
        each = np.bincount(self.head_map, minlength=kv_heads)
        self.share = int(each.max())
        self.kv_heads = kv_heads
        order = np.argsort(self.head_map, kind="stable")
        place = np.empty(heads, np.int64)
        place[order] = np.arange(heads) % self.share  # those of one head are neighbours, and at most so many
        self._place = place
        self._plain = bool((order == np.arange(heads)).all() and (each == self.share).all())

    def inward(self, q: F32) -> F32:
        """(H_q, M, D) to (H_kv, share * M, D); rows that no head fills are zeros."""
        _, rows, dim = q.shape
        if not self._plain:
            wide = np.zeros((self.kv_heads, self.share, rows, dim), np.float32)
            wide[self.head_map, self._place] = q
            q = wide
        return q.reshape(self.kv_heads, self.share * rows, dim)

    def outward(self, part: Part) -> Part:
        """The answer for such rows by query head: (H_q, M, D) and (H_q, M)."""
        out, lse = part
        dim = out.shape[2]
        out, lse = out.reshape(self.kv_heads, self.share, -1, dim), lse.reshape(self.kv_heads, self.share, -1)
        return out[self.head_map, self._place], lse[self.head_map, self._place]


def fold_of(head_map: NDArray[Any], heads: int, kv_heads: int) -> Fold:
    """The `Fold` of a head map; clients send the same one again and again.

    Raises:
        ValueError: it does not fit.
    """
    return _made(np.ascontiguousarray(head_map, np.int64).tobytes(), heads, kv_heads)


@functools.lru_cache(256)
def _made(head_map: bytes, heads: int, kv_heads: int) -> Fold:
    return Fold(np.frombuffer(head_map, np.int64), heads, kv_heads)
