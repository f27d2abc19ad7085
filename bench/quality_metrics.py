"""The figures of the quality harness: plain functions of numpy arrays, checked on tiny cases in tests/bench."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def relative_error(true: F32, other: F32) -> float:
    """Norm of the difference over the norm of the true values, all elements together."""
    difference = float(np.linalg.norm((other - true).astype(np.float64)))
    return difference / max(float(np.linalg.norm(true.astype(np.float64))), 1e-300)


def correlation(queries: F32, keys: F32, other: F32) -> float:
    """How well other keys keep the order of what a query attends to.

    Args:
        queries: (query heads, m, d), query heads a multiple of the key heads, as grouped attention has it.
        keys, other: (key heads, n, d).

    Returns:
        Pearson's correlation of q.k with q.k' over the n positions, meaned over queries and heads. What is added to
        all logits of a query falls out, as it does in the softmax.
    """
    groups = len(queries) // len(keys)
    wide = [np.repeat(each, groups, axis=0).swapaxes(1, 2) for each in (keys, other)]
    a, b = ((queries @ each).astype(np.float64) for each in wide)
    a -= a.mean(-1, keepdims=True)
    b -= b.mean(-1, keepdims=True)
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return float(((a * b).sum(-1) / np.maximum(scale, 1e-300)).mean())


def divergence(reference: F32, other: F32) -> F64:
    """Kullback-Leibler divergence of next-token distributions, in nats, for logits of shape (tokens, vocabulary).

    KL(p || q) = log E_p[exp(d - E_p d)] with d = logits of q - logits of p. In this form small divergences are not
    differences of large numbers: equal logits give exactly 0.
    """
    found = np.empty(len(reference))
    one = np.ones(reference.shape[1])
    for i, (p, q) in enumerate(zip(reference, other, strict=True)):
        weights = np.exp(p - p.max(), dtype=np.float64)
        change = np.subtract(q, p, dtype=np.float64)
        total = weights @ one
        change -= weights @ change / total
        found[i] = max(0.0, math.log(weights @ np.exp(change) / total))
    return found


def choices(logits: F32, never: Sequence[int] = ()) -> list[int]:
    """The greedy token of each row of (tokens, vocabulary), without those that are never to be chosen."""
    if len(never):
        logits = logits.copy()
        logits[:, list(never)] = -np.inf
    return [int(token) for token in logits.argmax(-1)]


def bleu(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Corpus BLEU-4 over token ids (Papineni et al. 2002), no smoothing.

    Args:
        pairs: (reference, candidate), one for each prompt.

    Returns:
        Geometric mean of the clipped precisions of 1- to 4-grams times the brevity penalty; 0 when no 4-gram agrees.
    """
    hits, total = [0] * 4, [0] * 4
    lengths = [0, 0]
    for reference, candidate in pairs:
        lengths[0] += len(reference)
        lengths[1] += len(candidate)
        for n in range(1, 5):
            wanted, got = (
                Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in (reference, candidate)
            )
            hits[n - 1] += (wanted & got).total()
            total[n - 1] += got.total()
    if not all(hits):
        return 0.0
    penalty = min(0.0, 1 - lengths[0] / lengths[1])
    return math.exp(penalty + sum(math.log(hit / of) for hit, of in zip(hits, total, strict=True)) / 4)
