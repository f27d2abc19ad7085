"""The backend for Apple's GPUs: the kernels of `pion.metal_kernels`, and MLX operations for suffixes alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pion.attention.merge import F32, Part, nothing
from pion.attention.mlx_ops import Held, MlxBackend
from pion.metal_kernels import attention, attention_blocks
from pion.metal_kernels.device import Device

__all__ = ["MetalBackend"]


class MetalBackend(MlxBackend):
    """See the module text.

    Args:
        half: hold K/V in half precision; the kernels compute in fp32.
        how: ``metal``, or ``ops`` for the kernels' twins, on machines without Metal; a test may name another device.
    """

    name = "metal"

    def __init__(self, half: bool = False, how: str | Device = "metal") -> None:
        super().__init__(half)
        self.how = how

    def dense(self, held: Held, queries: F32, first: int = 0) -> Part:
        """Attention of queries (H, R, D) over the keys from `first` on: out (H, R, D), lse (H, R)."""
        mx = self.mx
        with self._lock:
            q = mx.array(np.ascontiguousarray(queries))
            window = held.keys.shape[1] - first if first else 0
            out, lse = attention.dense(q, held.keys, held.values, scale=1.0, window=window, how=self.how)
            mx.eval(out, lse)
            return np.array(out), np.array(lse)

    def over(self, held: Held, queries: F32, runs: Sequence[tuple[int, int]]) -> Part:
        """Attention of queries (H, R, D) over the keys at some positions, given as runs [start, end)."""
        mx = self.mx
        with self._lock:
            q = mx.array(np.ascontiguousarray(queries)).reshape(-1, queries.shape[2])
            places = mx.array(np.concatenate([np.arange(*run, dtype=np.int32) for run in runs]))
            out, lse = attention.gather_blocks(q, held.keys, held.values, places, 1, scale=1.0, how=self.how)
            mx.eval(out, lse)
            return np.array(out).reshape(queries.shape), np.array(lse).reshape(queries.shape[:2])

    def fused(self, held: Held, queries: F32, keys: F32, values: F32, length: int, first: int = 0) -> Part:
        """Attention over what is held and over a suffix in one pass.

        Args:
            held: the prefix.
            queries: (H, share * length, D); of each `length` rows, row m sees the suffix up to position
                max(S - length, 0) + m.
            keys, values: (H, S, D) of the suffix.
            length: rows of a query head.
            first: of the positions of the prefix that are seen.

        Returns:
            out (H, share * length, D), lse (H, share * length).
        """
        mx = self.mx
        heads, rows, dim = queries.shape
        with self._lock:
            q = mx.array(np.ascontiguousarray(queries)).reshape(heads * rows // length, length, dim)
            suffix = [mx.array(np.ascontiguousarray(side)).astype(self.kind) for side in (keys, values)]
            window = held.keys.shape[1] - first if first else 0
            out, lse = attention.fused(q, *held, *suffix, scale=1.0, window=window, how=self.how)
            mx.eval(out, lse)
            return np.array(out).reshape(queries.shape), np.array(lse).reshape(heads, rows)

    def sums(self, held: Held, queries: F32, first: int = 0) -> F32:
        """The lse (H, R) of `dense` alone."""
        with self._lock:
            q = self.mx.array(np.ascontiguousarray(queries))
            window = held.keys.shape[1] - first if first else 0
            return np.array(attention.logsum(q, held.keys, scale=1.0, window=window, how=self.how))

    def picked(self, held: Held, queries: F32, positions: Sequence[NDArray[np.int64]]) -> Part:
        """Attention of one query a head, (H, D), over the keys at its own positions: out (H, D), lse (H,)."""
        mx = self.mx
        counts = np.array([len(row) for row in positions], np.uint32)
        if not counts.any():
            return nothing(queries.shape)
        table = np.zeros((len(queries), counts.max()), np.int32)
        for row, where in zip(table, positions, strict=True):
            row[: len(where)] = where
        with self._lock:
            out, lse = attention.gather(
                mx.array(np.ascontiguousarray(queries)), held.keys, held.values, mx.array(table), mx.array(counts),
                scale=1.0, how=self.how,
            )  # fmt: skip
            mx.eval(out, lse)
            return np.array(out), np.array(lse)

    def means(self, held: Held, block: int) -> F32:
        """The mean key of each block of `block` positions: (H, blocks, D)."""
        with self._lock:
            return np.array(attention_blocks.block_stats(held.keys, block, how=self.how).mean)

    def extremes(self, held: Held, block: int) -> tuple[F32, F32]:
        """The least and the greatest value of each channel in each block: (H, blocks, D) both."""
        with self._lock:
            stats = attention_blocks.block_stats(held.keys, block, how=self.how)
            return np.array(stats.low), np.array(stats.high)
