"""The attention kernels' twins in plain MLX operations, for machines without Metal.

The arguments are those of `pion.metal_kernels.attention`, which has checked them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["attend", "block_stats", "merge", "select"]

U32 = NDArray[np.uint32]


def attend(
    q: Any,
    k: Any,
    v: Any,
    more: tuple[Any, Any] | None,
    form: int,
    numbers: Any,
    counts: Any,
    block: int,
    scale: float | None,
    first: int,
    sinks: Any,
    kv_of: U32,
) -> tuple[Any, Any]:
    """The kernel `attend` and its merge.

    Args:
        q: float32 (H_q, M, D).
        k, v: (H, N, D); v None: the lse alone is wanted, and the first of the results means nothing.
        more: keys and values (H, S, D) of a suffix.
        form, numbers, counts, block: PICKED, pick, counts and block of the kernel.
        scale, sinks, kv_of: see there.
        first: the first position of the prefix that is seen.
    """
    import mlx.core as mx

    heads, length, dim = q.shape
    stored = k.shape[1]
    v = k if v is None else v
    seen = None  # (H_q or 1, M, places)
    if form == 0:
        k, v = k[:, first:], v[:, first:]
    elif form == 1:
        seen = (numbers >= first) & (numbers < stored) & (mx.arange(numbers.shape[1])[None] < counts[:, None])
        at = mx.where(seen, numbers, 0)[:, :, None]
        kv = mx.array(kv_of)
        k, v = (mx.take_along_axis(side[kv], at, axis=1) if stored else mx.zeros((heads, 0, dim)) for side in (k, v))
        kv_of = np.arange(heads, dtype=np.uint32)
        seen = seen[:, None] if stored else None
    else:
        at = (numbers[:, None] * block + mx.arange(block)[None]).reshape(-1)
        real = mx.repeat((numbers >= 0) & (numbers <= stored // block), block)
        seen = (real & (at >= first) & (at < stored))[None, None]
        k, v = (mx.take(side, mx.where(seen[0, 0], at, 0), axis=1) if stored else side for side in (k, v))
        seen = seen if stored else None
    if more is not None:
        own, suffix = k.shape[1], more[0].shape[1]
        limit = mx.arange(length)[:, None] + max(suffix - length, 0)
        later = (mx.arange(suffix)[None] <= limit)[None]
        before = mx.ones((1, length, own), mx.bool_) if seen is None else mx.repeat(seen, length, axis=1)
        seen = mx.concatenate([before, mx.broadcast_to(later, (before.shape[0], length, suffix))], axis=2)
        k, v = (mx.concatenate([side, tail], axis=1) for side, tail in zip((k, v), more, strict=True))
    return _softmax(q, k, v, seen, dim**-0.5 if scale is None else scale, sinks, kv_of)


def _softmax(q: Any, k: Any, v: Any, seen: Any, scale: float, sinks: Any, kv_of: U32) -> tuple[Any, Any]:
    """Attention of q (H_q, M, D) over k, v (H, N, D), of which `seen` (H_q or 1, M, N) says what may be read."""
    import mlx.core as mx

    heads, length, dim = q.shape
    if not k.shape[1]:
        out, lse = mx.zeros(q.shape), mx.full((heads, length), -np.inf)
        return out, lse if sinks is None else mx.broadcast_to(sinks[:, None], lse.shape)
    share = heads // k.shape[0]
    together = heads == share * k.shape[0] and np.array_equal(kv_of, np.arange(heads) // max(share, 1))
    k, v = (side.astype(mx.float32) for side in (k, v))
    if not together:
        k, v = (side[mx.array(kv_of)] for side in (k, v))
    rows = (k.shape[0], -1, dim)
    logits = ((q * scale).reshape(rows) @ k.swapaxes(1, 2)).reshape(heads, length, -1)
    if seen is not None:
        logits = mx.where(seen, logits, -np.inf)
    top = logits.max(axis=2)
    if sinks is not None:
        top = mx.maximum(top, sinks[:, None])
    base = mx.where(top == -np.inf, 0, top)
    weights = mx.exp(logits - base[:, :, None])
    total = weights.sum(axis=2)
    if sinks is not None:
        total = total + mx.exp(sinks[:, None] - base)
    values = (weights.reshape(k.shape[0], -1, k.shape[1]) @ v).reshape(q.shape)
    return values / mx.where(total == 0, 1, total)[:, :, None], base + mx.log(total)


def merge(outs: Any, sums: Any, sinks: Any) -> tuple[Any, Any]:
    """The kernel `merge`: parts (parts, H_q, M, D) and their logarithms (parts, H_q, M)."""
    import mlx.core as mx

    top = sums.max(axis=0)
    if sinks is not None:
        top = mx.maximum(top, sinks[:, None])
    base = mx.where(top == -np.inf, 0, top)
    weights = mx.exp(sums - base)
    total = weights.sum(axis=0)
    if sinks is not None:
        total = total + mx.exp(sinks[:, None] - base)
    joined = (outs * weights[..., None]).sum(axis=0)
    return joined / mx.where(total == 0, 1, total)[..., None], base + mx.log(total)


def block_stats(k: Any, block: int) -> tuple[Any, Any, Any]:
    """The kernel of that name."""
    import mlx.core as mx

    heads, stored, dim = k.shape
    k = k.astype(mx.float32)
    whole = stored // block * block
    blocks = k[:, :whole].reshape(heads, -1, block, dim)
    last = k[:, None, whole:]
    mean, low, high = (
        mx.concatenate([f(part, axis=2) for part in (blocks, last) if part.size], axis=1)
        for f in (mx.mean, mx.min, mx.max)
    )
    return mean, low, high


def select(q: Any, low: Any, high: Any, kv_of: U32, most: int, scale: float) -> Any:
    """The kernels `block_scores` and `block_top`."""
    import mlx.core as mx

    blocks = low.shape[1]
    scores = mx.zeros((blocks,))
    for head, kv in enumerate(kv_of.tolist()):
        row = q[head][None]
        scores = scores + mx.maximum(row * low[kv], row * high[kv]).sum(axis=1)
    scores = scores * (scale / len(kv_of))
    scores = mx.where(scores == scores, scores, -np.inf)
    # Sorting need not be stable: of the blocks at the threshold the lowest fill what the better ones leave.
    threshold = mx.sort(scores)[blocks - most]
    above, level = scores > threshold, scores == threshold
    chosen = above | (level & (mx.cumsum(level.astype(mx.int32)) <= most - above.sum()))
    number = mx.arange(blocks)
    order = mx.sort(mx.where(chosen | (number == blocks - 1), number, blocks))
    order = mx.pad(order, (0, 1), constant_values=blocks)[: most + 1]
    return mx.where(order == blocks, -1, order).astype(mx.int32)
