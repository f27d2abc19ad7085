"""Which blocks of a prefix a sparse query attends to. The blocks are few, so this is numpy on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pion.attention.merge import F32

__all__ = ["BLOCK_MEAN", "QUEST", "SELECTORS", "best", "mean_scores", "quest_scores", "runs"]

BLOCK_MEAN: Final = "block_mean"
QUEST: Final = "quest"
SELECTORS: Final = (BLOCK_MEAN, QUEST)

Run = tuple[int, int]


def _by_head(queries: F32, head_map: NDArray[np.int64], heads: int) -> F32:
    """Sums of the queries (H_q, D) over those that share a head of the keys: (heads, D)."""
    out = np.zeros((heads, queries.shape[1]), np.float32)
    np.add.at(out, head_map, queries)
    return out


def mean_scores(queries: F32, head_map: NDArray[np.int64], means: F32) -> F32:
    """The mean logit of each block over its keys and over the query heads.

    Args:
        queries: (H_q, D), scaled.
        head_map: (H_q,) heads of the keys.
        means: (H, blocks, D).
    """
    # Sums block by block in one order, not a product of BLAS: equal blocks get equal scores.
    own = _by_head(queries, head_map, len(means))
    scores: F32 = (means * own[:, None]).sum(axis=2).sum(axis=0) / np.float32(len(queries))
    return scores


def quest_scores(queries: F32, head_map: NDArray[np.int64], low: F32, high: F32) -> F32:
    """A bound on the logits in each block, averaged over the query heads (Quest, arXiv 2406.10774).

    Args:
        low, high: (H, blocks, D), the least and greatest value of each channel in a block.
    """
    # max(q low, q high) = q high where q > 0, q low elsewhere: linear in the two halves of q, so heads can be summed.
    zero = np.float32(0)
    up = _by_head(np.maximum(queries, zero), head_map, len(low))
    down = _by_head(np.minimum(queries, zero), head_map, len(low))
    scores: F32 = (high * up[:, None] + low * down[:, None]).sum(axis=2).sum(axis=0) / np.float32(len(queries))
    return scores


def best(scores: F32, k_top: int) -> list[int]:
    """The `k_top` blocks with the highest scores, of equal ones the earlier, and always the last; ascending."""
    chosen = np.argsort(-scores, kind="stable")[:k_top]
    return sorted({*chosen.tolist(), len(scores) - 1})


def runs(blocks: Sequence[int], block: int, count: int, first: int) -> list[Run]:
    """Positions of ascending blocks as runs [start, end) of neighbours, without those before `first`."""
    out: list[Run] = []
    for number in blocks:
        start, end = max(number * block, first), min((number + 1) * block, count)
        if start >= end:
            continue
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, end))
    return out
