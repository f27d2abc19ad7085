"""The backend for CPUs: matrix products of numpy's BLAS, everything else in numpy's vector loops.

Keys are held transposed, (H, D, N): the product of a single query with them is then a sum of rows, which BLAS does in
60 % of the time of as many dot products (measured at 2,048 keys of 128).

Queries come scaled.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion._core import quant
from pion.attention.merge import F32, Part, nothing
from pion.attention.select import QUEST

__all__ = ["Held", "NumpyBackend", "calm_blas"]

_TILE: Final = 8 << 20  # logits at a time; more queries are computed piece by piece
_STRIP: Final = 64
_RUNS: Final = 64  # more runs of positions are put together: each costs two calls of BLAS
_KEPT: Final = 16 << 20  # bytes of a buffer that a thread keeps

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """K/V of one layer.

    Attributes:
        keys: (H, D, N), fp32 or fp16.
        values: (H, N, D).
    """

    keys: NDArray[Any]
    values: NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.keys.nbytes + self.values.nbytes


class NumpyBackend:
    """See the module text.

    Args:
        half: hold K/V in half precision; they are computed with in fp32.
    """

    name = "cpu"
    device = "numpy"
    at_once = False

    def __init__(self, half: bool = False) -> None:
        self.kind: Any = np.float16 if half else np.float32

    def hold(self, keys: F32, values: F32) -> Held:
        """Copies of (H, N, D) arrays, as this backend computes with them."""
        heads, count, dim = keys.shape
        held = np.empty((heads, dim, count), self.kind)
        for at in range(0, count, _STRIP):  # transposed in strips, which stay in the cache
            held[:, :, at : at + _STRIP] = keys[:, at : at + _STRIP].swapaxes(1, 2)
        return Held(held, np.array(values, self.kind, order="C"))

    def dense(self, held: Held, queries: F32, first: int = 0) -> Part:
        """Attention of queries (H, R, D) over the keys from `first` on: out (H, R, D), lse (H, R)."""
        keys, values = held.keys[:, :, first:], held.values[:, first:]
        if self.kind == np.float32:
            return _attend(queries, keys, values)
        out, lse = nothing(queries.shape)
        for head in range(len(queries)):  # one at a time: its fp32 copy stays in the cache
            own = slice(head, head + 1)
            out[own], lse[own] = _attend(queries[own], _wide(keys[own], "keys"), _wide(values[own], "values"))
        return out, lse

    def suffix(self, keys: F32, values: F32, queries: F32, visible: NDArray[np.int64]) -> Part:
        """Attention over keys (H, S, D) that are not held; row r of the queries sees the first `visible[r]` of them."""
        return _attend(queries, keys.swapaxes(1, 2), values, visible)

    def over(self, held: Held, queries: F32, runs: Sequence[Run]) -> Part:
        """Attention of queries (H, R, D) over the keys at some positions, given as runs [start, end)."""
        if len(runs) > _RUNS:
            return self.dense(
                Held(
                    np.concatenate([held.keys[:, :, start:end] for start, end in runs], axis=2),
                    np.concatenate([held.values[:, start:end] for start, end in runs], axis=1),
                ),
                queries,
            )
        # Run by run, out of the arrays as they are: putting the runs together first takes five times as long.
        logits = np.concatenate([queries @ _wide(held.keys[:, :, start:end]) for start, end in runs], axis=2)
        lse, total = _softmax(logits)

        def product(weights: F32) -> F32:
            out, at = np.zeros(queries.shape, np.float32), 0
            for start, end in runs:
                out += weights[:, :, at : at + end - start] @ _wide(held.values[:, start:end])
                at += end - start
            return out

        return _mean(logits, total, product), lse

    def picked(self, held: Held, queries: F32, positions: Sequence[NDArray[np.int64]]) -> Part:
        """Attention of one query a head, (H, D), over the keys at its own positions: out (H, D), lse (H,)."""
        out, lse = nothing(queries.shape)
        for head, where in enumerate(positions):
            if len(where):
                keys = held.keys[head][:, where].astype(np.float32, copy=False)
                values = held.values[head][where].astype(np.float32, copy=False)
                part = _attend(queries[head][None, None], keys[None], values[None])
                out[head], lse[head] = part[0][0, 0], part[1][0, 0]
        return out, lse

    def sums(self, held: Held, queries: F32, first: int = 0) -> F32:
        """The lse (H, R) of `dense` alone."""
        lse = np.empty(queries.shape[:2], np.float32)
        for head in range(len(queries)):
            logits = queries[head] @ _wide(held.keys[head, :, first:], "keys")
            top = logits.max(axis=1)
            base = np.where(np.isfinite(top), top, np.float32(0))
            lse[head] = base + np.log(np.exp(logits - base[:, None]).sum(axis=1))
        return lse

    def table(self, held: Held, block: int, selector: str) -> tuple[F32, ...]:
        """What `selector` needs of each block: `means`, or `extremes`."""
        return self.extremes(held, block) if selector == QUEST else (self.means(held, block),)

    def means(self, held: Held, block: int) -> F32:
        """The mean key of each block of `block` positions: (H, blocks, D)."""
        starts = np.arange(0, held.keys.shape[2], block)
        fill = np.diff(starts, append=held.keys.shape[2])
        total = np.add.reduceat(held.keys, starts, axis=2, dtype=np.float64)
        return np.ascontiguousarray((total / fill).swapaxes(1, 2), np.float32)

    def extremes(self, held: Held, block: int) -> tuple[F32, F32]:
        """The least and the greatest value of each channel in each block: (H, blocks, D) both."""
        starts = np.arange(0, held.keys.shape[2], block)
        low, high = (kind.reduceat(held.keys, starts, axis=2) for kind in (np.minimum, np.maximum))
        return (
            np.ascontiguousarray(low.swapaxes(1, 2), np.float32),
            np.ascontiguousarray(high.swapaxes(1, 2), np.float32),
        )


_own = threading.local()


def _wide(array: NDArray[Any], use: str = "") -> F32:
    """As fp32. The compiled decoder takes a tenth of numpy's time, and wants its values in one piece.

    Args:
        use: names a buffer of this thread. The result lives in it until the next call: fresh memory costs more than
            decoding into it.
    """
    if array.dtype == np.float32 or not array.flags.c_contiguous:
        return array.astype(np.float32, copy=False)
    flat: F32 | None = getattr(_own, use, None)
    if flat is None or flat.size < array.size:
        flat = np.empty(array.size, np.float32)
        if flat.nbytes <= _KEPT:
            setattr(_own, use, flat)
    out = flat[: array.size]
    quant.decode(quant.FP16, array.reshape(-1).data.cast("B"), array.shape[-2], out=out.data.cast("B"))
    return out.reshape(array.shape)


def _attend(queries: F32, keys: F32, values: F32, visible: NDArray[np.int64] | None = None) -> Part:
    """Queries (H, R, D), keys (H, D, N), values (H, N, D); row r sees the first `visible[r]` keys, by default all."""
    heads, rows, _ = queries.shape
    count = values.shape[1]
    out, lse = nothing(queries.shape)
    if not count:
        return out, lse
    step = max(1, _TILE // (heads * count))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        logits = queries[:, part] @ keys
        if visible is not None:
            np.copyto(logits, np.float32(-np.inf), where=np.arange(count) >= visible[part, None])
        lse[:, part], total = _softmax(logits)
        out[:, part] = _mean(logits, total, lambda weights: weights @ values)
    return out, lse


def _softmax(logits: F32) -> tuple[F32, F32]:
    """Turn logits (H, R, N) into weights, in place. Returns the lse (H, R) and the sums of the weights, (H, R, 1)."""
    top = logits.max(axis=2, keepdims=True)
    base = np.where(np.isfinite(top), top, np.float32(0))
    logits -= base
    np.exp(logits, out=logits)
    total = logits.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        return (base + np.log(total))[:, :, 0], total


def _mean(weights: F32, total: F32, product: Callable[[F32], F32]) -> F32:
    """The weighted mean, of weights that add up to `total`, given their product with the values."""
    divisor = np.where(total > 0, total, np.float32(1))
    out: F32 = np.divide(product(weights), divisor, dtype=np.float32)
    if np.isfinite(out).all():
        return out
    weights /= divisor  # the sum of large values overflows, their mean does not
    return product(weights)


def calm_blas() -> None:
    """Lets each product run in the thread that asks for it.

    Queries of different clients run side by side anyway, and OpenBLAS's threads wait for each other by spinning: with
    the cores busy, two were 5 to 10 times slower than one.
    """
    if sys.platform != "linux" or "OPENBLAS_NUM_THREADS" in os.environ:
        return
    for path in Path(np.__file__).parent.parent.glob("numpy.libs/libscipy_openblas64_*.so*"):
        getattr(ctypes.CDLL(str(path)), "scipy_openblas_set_num_threads64_", lambda _: None)(1)
