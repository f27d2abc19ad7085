"""Attention over a part of the keys, and joining such parts: what the compiled and Metal kernels are compared with.

A part is (out, lse): the attention over its keys alone, and the natural logarithm of the sum of the exponentials of its
logits. Parts of a partition of the keys join to the attention over all of them, in any order. A part in which a query
sees no key is (0, -inf): the identity of `merge`. After the online softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_MEAN",
    "QUEST",
    "Part",
    "attend",
    "attend_picked",
    "block_scores",
    "choose_blocks",
    "merge",
    "with_sinks",
]

BLOCK_MEAN: Final = "block_mean"
QUEST: Final = "quest"

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


def with_sinks(part: Part, sinks: Array) -> Part:
    """A part to which attention sinks are added: a logit for each query that takes its share and has no value.

    Args:
        sinks: (H_q,) or (H_q, M) logits; -inf = none.
    """
    out, lse = part
    sinks = sinks if sinks.ndim == lse.ndim else sinks[:, None]
    return merge([part, (np.zeros_like(out), np.broadcast_to(sinks, lse.shape).astype(lse.dtype))])


# --- sparse attention ------------------------------------------------------------------------------------------------


def attend_picked(
    queries: Array, keys: Array, values: Array, picked: Sequence[Array], *, scale: float | None = None
) -> Part:
    """Attention of one query a head over some of the keys.

    Args:
        queries: (H_q, D).
        keys, values: (H, N, D), H dividing H_q.
        picked: for each query head the positions of its keys; a position that is given twice counts twice, one outside
            of 0..N-1 not at all.

    Returns:
        out (H_q, D) and lse (H_q,).
    """
    heads, (kv_heads, count, _) = len(queries), keys.shape
    outs, sums = [], []
    for head in range(heads):
        where = np.asarray(picked[head], np.int64)
        where = where[(where >= 0) & (where < count)]
        own = head // (heads // kv_heads)
        side = slice(own, own + 1)
        out, lse = attend(queries[head][None, None], keys[side][:, where], values[side][:, where], scale=scale)
        outs.append(out[0, 0])
        sums.append(lse[0, 0])
    return np.stack(outs), np.stack(sums)


def block_scores(queries: Array, keys: Array, block: int, head_map: Array, selector: str = BLOCK_MEAN) -> Array:
    """How much the blocks of a prefix may matter to the query heads together.

    The mean logit of a block (`BLOCK_MEAN`), or the bound on the logits in it that its least and greatest values in
    each channel give (`QUEST`, arXiv 2406.10774), averaged over the query heads.

    Args:
        queries: (H_q, D).
        keys: (H, N, D).
        block: keys of a block; the last one may have fewer.
        head_map: for each query head its head of `keys`.

    Returns:
        One score for each block, fp64.
    """
    q, k = queries.astype(np.float64), keys.astype(np.float64)
    scores = []
    for start in range(0, k.shape[1], block):
        part = k[:, start : start + block]
        if selector == QUEST:
            low, high = part.min(axis=1)[head_map], part.max(axis=1)[head_map]
            scores.append(np.maximum(q * low, q * high).sum())
        else:
            scores.append((q * part.mean(axis=1)[head_map]).sum())
    averaged: Array = np.array(scores) / len(q) / np.sqrt(q.shape[1])
    return averaged


def choose_blocks(scores: Array, k_top: int) -> list[int]:
    """The `k_top` blocks with the highest scores, of equal ones the earlier, and always the last; ascending."""
    chosen = np.argsort(-scores, kind="stable")[:k_top]
    return sorted({*chosen.tolist(), len(scores) - 1})
