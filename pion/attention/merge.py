"""Joining attention over parts of the keys.

A part is (out, lse): the attention over its keys alone, and the natural logarithm of the sum of the exponentials of its
logits. (0, -inf) is the part without keys, and changes nothing. After the online softmax of FlashAttention (arXiv
2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["F32", "Part", "merge", "nothing", "with_sinks"]

F32 = NDArray[np.float32]
Part = tuple[F32, F32]


def nothing(shape: Sequence[int]) -> Part:
    """The part without keys, for an output of this shape."""
    return np.zeros(tuple(shape), np.float32), np.full(tuple(shape[:-1]), -np.inf, np.float32)


def merge(parts: Sequence[Part]) -> Part:
    """Join parts over disjoint keys, in any order.

    Args:
        parts: at least one; out (..., D) and lse (...) of equal shapes, fp32.

    Returns:
        (out, lse) over all keys. Where only one part saw keys its values come back bit for bit; where none did, zeros
        and -inf.

    Raises:
        ValueError: no parts, or shapes that differ.
    """
    if not parts:
        raise ValueError("nothing to merge")
    shape = parts[0][0].shape
    if any(out.shape != shape or lse.shape != shape[:-1] for out, lse in parts):
        raise ValueError(f"parts of shapes {[(out.shape, lse.shape) for out, lse in parts]} do not fit")
    out, lse = parts[0]
    if len(parts) == 1:
        return out, lse
    sums = np.stack([part[1] for part in parts])
    top = sums.max(axis=0)
    base = np.where(np.isfinite(top), top, np.float32(0))
    weights = np.exp(sums - base)
    total = weights.sum(axis=0)
    divisor = np.where(total > 0, total, np.float32(1))
    joined = sum(part[0] * (weight / divisor)[..., None] for part, weight in zip(parts, weights, strict=True))
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    alone = np.count_nonzero(sums != -np.inf, axis=0) == 1  # what is not a number counts, and stays
    if alone.any():
        for (own, _), value in zip(parts, sums, strict=True):
            joined = np.where((alone & (value != -np.inf))[..., None], own, joined)
    return _f32(joined), _f32(lse)


def with_sinks(part: Part, sinks: F32 | None) -> Part:
    """Add attention sinks: logits that take their share of the softmax and have no value.

    Args:
        part: out (H, M, D), lse (H, M).
        sinks: (H, 1) or (H, M); -inf = none. None: nothing to add.
    """
    if sinks is None:
        return part
    out, lse = part
    return merge([part, (np.zeros_like(out), _f32(np.broadcast_to(sinks, lse.shape)))])


def _f32(values: Any) -> F32:
    return np.ascontiguousarray(values, np.float32)
