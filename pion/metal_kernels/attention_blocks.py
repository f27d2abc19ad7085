"""Which blocks of a prefix fit a query: statistics of the keys, made once, and the choice, made for each query.

Arguments and `how` are those of `pion.metal_kernels.attention`, whose `gather_blocks` attends to what was chosen.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from pion.metal_kernels import attention_ops
from pion.metal_kernels.bodies import BODIES
from pion.metal_kernels.device import Device
from pion.metal_kernels.fits import MOST_BLOCKS
from pion.metal_kernels.plans import Heads, device_of, kv_heads, scale_bits

__all__ = ["MOST_BLOCKS", "SELECTORS", "Stats", "block_stats", "select"]

SELECTORS: Final = ("block_mean", "quest")


class Stats(NamedTuple):
    """Of each block of keys the mean, least and largest value: float32 (H, blocks, D)."""

    mean: Any
    low: Any
    high: Any


def block_stats(k: Any, block: int, *, how: str | Device = "metal") -> Stats:
    """Statistics of the keys in blocks of `block` positions, of the last block over what it holds.

    Args:
        k: (H, N, D), N at least 1.
        block: positions of a block.
        how: ``metal`` or ``ops``.
    """
    if len(k.shape) != 3 or 0 in k.shape or block < 1:
        raise ValueError(f"keys {k.shape} in blocks of {block}")
    if how == "ops":
        return Stats(*attention_ops.block_stats(k, block))
    device = device_of(how)
    heads, stored, dim = k.shape
    blocks = -(-stored // block)
    outs = device.call(
        BODIES["block_stats"],
        {"T": device.kind(k), "D": dim},
        {"k": k, "extent": device.array(np.array([stored, block], np.uint32))},
        (dim, blocks, heads),
        min(256, -(-dim // 32) * 32),
        [(heads, blocks, dim)] * 3,
    )
    return Stats(*outs)


def select(
    q: Any,
    stats: Stats,
    most: int,
    *,
    selector: str = "block_mean",
    scale: float | None = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> Any:
    """The blocks that fit a query best, the same for all heads: `most` of them, and the last one.

    ``block_mean`` scores a block by the mean over the query heads of q times the mean key; ``quest`` by the largest
    that q times any key of the block could be (arXiv 2406.10774). Of equal scores the lower block is taken.

    Args:
        q: (H_q, D).
        stats: of the keys.
        most: blocks, at least 1.
        selector: one of `SELECTORS`.
        scale, head_map: see above.
        how: ``metal`` or ``ops``.

    Returns:
        int32 (min(most, blocks) + 1): numbers in ascending order, then -1.
    """
    heads, dim = q.shape
    if selector not in SELECTORS:
        raise ValueError(f"selector {selector!r}: one of {', '.join(SELECTORS)}")
    stored, blocks = stats.mean.shape[:2]
    if most < 1 or stats.mean.shape[2] != dim:
        raise ValueError(f"{most} blocks of statistics {stats.mean.shape} for queries {q.shape}")
    kv_of = kv_heads(heads, stored, head_map)
    most = min(most, blocks)
    low, high = (stats.low, stats.high) if selector == "quest" else (stats.mean, stats.mean)
    factor = dim**-0.5 if scale is None else scale
    if how == "ops":
        return attention_ops.select(q, low, high, kv_of, most, factor)
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{blocks} blocks: {MOST_BLOCKS} are supported, use larger ones")
    device = device_of(how)
    (scores,) = device.call(
        BODIES["block_scores"],
        {"T": "float32", "D": dim, "G": 4, "QUEST": selector == "quest"},
        {
            "q": q,
            "low": low,
            "high": high,
            "kv_of": device.array(kv_of),
            "extent": device.array(np.array([heads, blocks, scale_bits(factor, dim)], np.uint32)),
        },
        (128, blocks, 1),
        128,
        [(blocks,)],
    )
    threads = min(1024, -(-blocks // 32) * 32)
    (chosen,) = device.call(
        BODIES["block_top"],
        {"T": "float32", "ROOM": max(256, 1 << (blocks - 1).bit_length())},
        {"scores": scores, "extent": device.array(np.array([blocks, most], np.uint32))},
        (threads, 1, 1),
        threads,
        [(most + 1,)],
    )
    return chosen
