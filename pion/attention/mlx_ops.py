"""The portable backend: attention in plain MLX operations, on whatever device MLX computes on.

Queries come scaled; numpy goes in and comes out, K/V stay where MLX keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pion.attention.merge import F32, Part, nothing
from pion.attention.select import QUEST

__all__ = ["Held", "MlxBackend"]

_TILE: Final = 8 << 20  # logits at a time; more queries are computed piece by piece
_CACHE: Final = 256 << 20  # bytes that MLX's allocator may keep of what was freed; on a GPU it would keep all


class Held(NamedTuple):
    """K/V of one layer: arrays of mlx (H, N, D)."""

    keys: Any
    values: Any

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return int(self.keys.nbytes + self.values.nbytes)


class MlxBackend:
    """See the module text.

    Args:
        half: hold K/V in half precision, and multiply in it.
    """

    name = "mlx"
    at_once = False

    def __init__(self, half: bool = False) -> None:
        import mlx.core as mx

        self.mx = mx
        self.kind = mx.float16 if half else mx.float32
        self.device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
        if self.device == "gpu":
            mx.set_cache_limit(_CACHE)
        # One graph at a time: the device is one, and graphs that were built in several threads queue up there anyway.
        self._lock = threading.Lock()

    def hold(self, keys: F32, values: F32) -> Held:
        """Copies of (H, N, D) arrays."""
        with self._lock:
            held = Held(*(self.mx.array(np.ascontiguousarray(side)).astype(self.kind) for side in (keys, values)))
            self.mx.eval(held.keys, held.values)
        return held

    def dense(self, held: Held, queries: F32, first: int = 0) -> Part:
        """Attention of queries (H, R, D) over the keys from `first` on: out (H, R, D), lse (H, R)."""
        with self._lock:
            return self._attend(queries, held.keys[:, first:], held.values[:, first:])

    def suffix(self, keys: F32, values: F32, queries: F32, visible: NDArray[np.int64]) -> Part:
        """Attention over keys (H, S, D) that are not held; row r of the queries sees the first `visible[r]` of them."""
        with self._lock:  # as they came: half precision need not hold them
            k, v = (self.mx.array(np.ascontiguousarray(side)) for side in (keys, values))
            return self._attend(queries, k, v, visible)

    def over(self, held: Held, queries: F32, runs: Sequence[tuple[int, int]]) -> Part:
        """Attention of queries (H, R, D) over the keys at some positions, given as runs [start, end)."""
        with self._lock:
            k, v = (self.mx.concatenate([side[:, start:end] for start, end in runs], axis=1) for side in held)
            return self._attend(queries, k, v)

    def picked(self, held: Held, queries: F32, positions: Sequence[NDArray[np.int64]]) -> Part:
        """Attention of one query a head, (H, D), over the keys at its own positions: out (H, D), lse (H,)."""
        mx = self.mx
        lengths = np.array([len(row) for row in positions])
        out, lse = nothing(queries.shape)
        if not lengths.any():
            return out, lse
        table = np.zeros((len(queries), lengths.max()), np.int32)
        for row, where in zip(table, positions, strict=True):
            row[: len(where)] = where
        with self._lock:
            heads, where = mx.arange(len(queries))[:, None], mx.array(table)
            q = mx.array(queries).astype(self.kind)[:, None]
            logits = (q @ held.keys[heads, where].swapaxes(1, 2)).astype(mx.float32)[:, 0]
            logits = mx.where(mx.arange(table.shape[1]) < mx.array(lengths)[:, None], logits, -mx.inf)
            sums = mx.logsumexp(logits, axis=1, keepdims=True)
            weights = mx.exp(logits - sums).astype(self.kind)[:, None]
            found = (weights @ held.values[heads, where])[:, 0].astype(mx.float32)
            mx.eval(found, sums)
            some = lengths > 0
            out[some], lse[some] = np.array(found)[some], np.array(sums)[some, 0]
        return out, lse

    def sums(self, held: Held, queries: F32, first: int = 0) -> F32:
        """The lse (H, R) of `dense` alone."""
        mx = self.mx
        with self._lock:
            q = mx.array(np.ascontiguousarray(queries)).astype(self.kind)
            return np.array(mx.logsumexp((q @ held.keys[:, first:].swapaxes(1, 2)).astype(mx.float32), axis=2))

    def table(self, held: Held, block: int, selector: str) -> tuple[Any, ...]:
        """What `selector` needs of each block: `means`, or `extremes`."""
        return self.extremes(held, block) if selector == QUEST else (self.means(held, block),)

    def means(self, held: Held, block: int) -> F32:
        """The mean key of each block of `block` positions: (H, blocks, D)."""
        with self._lock:
            return self._by_block(held.keys, block, self.mx.mean)

    def extremes(self, held: Held, block: int) -> tuple[F32, F32]:
        """The least and the greatest value of each channel in each block: (H, blocks, D) both."""
        with self._lock:
            return self._by_block(held.keys, block, self.mx.min), self._by_block(held.keys, block, self.mx.max)

    def _by_block(self, keys: Any, block: int, of: Any) -> F32:
        keys = keys.astype(self.mx.float32)
        heads, count, dim = keys.shape
        whole = count // block
        parts = [of(keys[:, : whole * block].reshape(heads, whole, block, dim), axis=2)] if whole else []
        if whole * block < count:
            parts.append(of(keys[:, whole * block :], axis=1, keepdims=True))
        return np.array(self.mx.concatenate(parts, axis=1))

    def _attend(self, queries: F32, keys: Any, values: Any, visible: NDArray[np.int64] | None = None) -> Part:
        """Queries (H, R, D), keys and values (H, N, D) of mlx; row r sees the first `visible[r]` keys, at least one."""
        mx = self.mx
        heads, rows, _ = queries.shape
        count = keys.shape[1]
        outs, sums = [], []
        step = max(1, _TILE // (heads * count))
        for row in range(0, rows, step):
            q = mx.array(np.ascontiguousarray(queries[:, row : row + step])).astype(keys.dtype)
            logits = (q @ keys.swapaxes(1, 2)).astype(mx.float32)
            if visible is not None:
                seen = mx.arange(count) < mx.array(visible[row : row + step].astype(np.int32))[:, None]
                logits = mx.where(seen, logits, -mx.inf)
            lse = mx.logsumexp(logits, axis=2, keepdims=True)
            out = (mx.exp(logits - lse).astype(keys.dtype) @ values).astype(mx.float32)
            mx.eval(out, lse)
            outs.append(np.array(out))
            sums.append(np.array(lse)[:, :, 0])
        return np.concatenate(outs, axis=1), np.concatenate(sums, axis=1)
