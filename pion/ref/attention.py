"""Attention over a part of the keys, and joining such parts: what the compiled and Metal kernels are compared with.

A part is (out, lse): the attention over its keys alone, and the natural logarithm of the sum of the exponentials of its
logits. Parts of a partition of the keys join to the attention over all of them, in any order. A part in which a query
sees no key is (0, -inf): the identity of `merge`. After the online softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Part", "attend", "merge"]

Array = NDArray[Any]
Part = tuple[Array, Array]


def attend(
    queries: Array, keys: Array, values: Array, *, scale: float | None = None, seen: Array | None = None
) -> Part:
    """Attention of M queries over N keys.

    Args:
        queries: (H_q, M, D).
        keys, values: (H, N, D), H dividing H_q: query head h uses head h // (H_q / H).
        scale: of the logits; default D ** -0.5.
        seen: (M, N) booleans: which keys a query may see; None = all. Rows without any are allowed, and so is N = 0.

    Returns:
        out (H_q, M, D) and lse (H_q, M), in fp64 for fp64 queries, else in fp32. A query that sees no key has zeros and
        -inf.

    Raises:
        ValueError: shapes that do not fit together.
    """
    heads, count, dim = queries.shape
    if keys.shape != values.shape or keys.shape[2] != dim or keys.shape[0] == 0 or heads % keys.shape[0]:
        raise ValueError(f"queries {queries.shape}, keys {keys.shape} and values {values.shape} do not fit")
    if seen is not None and seen.shape != (count, keys.shape[1]):
        raise ValueError(f"seen is {seen.shape}, not {(count, keys.shape[1])}")
    kind: Any = np.float64 if queries.dtype == np.float64 else np.float32
    share = heads // keys.shape[0]
    k, v = (np.repeat(side.astype(kind), share, axis=0) for side in (keys, values))
    logits = queries.astype(kind) @ k.swapaxes(1, 2) * kind(dim**-0.5 if scale is None else scale)
    if seen is not None:
        logits = np.where(seen, logits, -np.inf)
    top = logits.max(axis=2, initial=-np.inf)
    base = np.where(np.isfinite(top), top, 0)
    weights = np.exp(logits - base[:, :, None])
    total = weights.sum(axis=2)
    out = weights @ v / np.where(total > 0, total, 1)[:, :, None]
    with np.errstate(divide="ignore"):
        return out.astype(kind), (base + np.log(total)).astype(kind)


def merge(parts: Sequence[Part]) -> Part:
    """Join parts over disjoint keys.

    Args:
        parts: at least one; out (..., D) and lse (...) of equal shapes.

    Returns:
        (out, lse) over all keys. Where only one part saw keys its values come back bit for bit; where none did, zeros
        and -inf.

    Raises:
        ValueError: no parts, or shapes that differ.
    """
    if not parts:
        raise ValueError("nothing to merge")
    outs, sums = np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts])
    if outs.shape[:-1] != sums.shape:
        raise ValueError(f"out {outs.shape[1:]} and lse {sums.shape[1:]} do not fit")
    top = sums.max(axis=0)
    base = np.where(np.isfinite(top), top, 0)
    weights = np.exp(sums - base)
    total = weights.sum(axis=0)
    joined = (outs * weights[..., None]).sum(axis=0) / np.where(total > 0, total, 1)[..., None]
    alone = np.count_nonzero(weights, axis=0) == 1
    which = np.argmax(weights, axis=0)
    only = np.take_along_axis(outs, which[None, ..., None], axis=0)[0]
    with np.errstate(divide="ignore"):
        lse = np.where(alone, top, base + np.log(total))
    return np.where(alone[..., None], only, joined).astype(outs.dtype), lse.astype(sums.dtype)
