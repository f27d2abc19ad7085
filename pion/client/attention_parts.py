"""Attention over parts of the keys, in MLX operations: what a mask of mlx-lm shows, a suffix, the merging of parts, and
the blocks of a prefix that fit a query best.

A part is (out, lse), fp32: the attention over its keys alone, and the natural logarithm of the sum of the exponentials
of its logits; (0, -inf) is the part without keys. Merging is that of the online softmax (FlashAttention, arXiv
2205.14135), as in ``pion.attention.merge``.

mlx is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Seen", "merge", "sparse_attention", "suffix_part"]

_HIDDEN: Final = -1e4  # additive masks of mlx-lm hide with this or less: -1e9, or what is left of it in fp16
_SELECTORS: Final = ("block_mean", "block-mean", "", "quest")


@dataclass(frozen=True)
class Seen:
    """What each of M rows of queries sees.

    Attributes:
        prefix: (M,) how many positions of the prefix, counted from its end.
        suffix: (M, S) bool, which of the suffix.
        whole: every row sees all of the prefix.
        causal: row r of M sees the suffix up to S - M + r.
    """

    prefix: NDArray[np.int64]
    suffix: NDArray[np.bool_]
    whole: bool
    causal: bool

    @classmethod
    def of(cls, mask: Any, rows: int, prefix: int, suffix: int, window: int | None = None) -> Seen:
        """Read a mask as mlx-lm makes them.

        Args:
            mask: None, ``"causal"``, or an array (..., M, prefix + S), bool or additive.
            window: positions that a row sees at most, its own included, whatever the mask says.

        Raises:
            NotImplementedError: a mask that biases logits, differs from head to head, shows another part of the prefix
                than its end, or is of another shape.
        """
        ends = suffix - rows + np.arange(rows)  # of each row, its own place in the suffix
        seen = np.arange(suffix)[None] <= ends[:, None]
        count = np.full(rows, prefix, np.int64)
        if mask is None:
            if rows > 1:
                seen = np.ones((rows, suffix), bool)
        elif isinstance(mask, str):
            if mask != "causal":
                raise NotImplementedError(f"PionPrefixCache + mask {mask!r}: 'causal', None or an array is supported")
        else:
            shown = _shown(mask, rows, prefix + suffix)
            count, seen = shown[:, :prefix].sum(axis=1), shown[:, prefix:]
            ends_of_prefix = np.arange(prefix)[None] >= prefix - count[:, None]
            if not np.array_equal(shown[:, :prefix], ends_of_prefix):
                raise NotImplementedError(
                    "PionPrefixCache + a mask that hides positions in the middle of the prefix: only its end, or all"
                )
        if window is not None:
            count = np.minimum(count, np.maximum(window - 1 - ends, 0))
            seen = seen & (np.arange(suffix)[None] > ends[:, None] - window)
        causal = np.array_equal(seen, np.arange(suffix)[None] <= ends[:, None])
        return cls(count, seen, bool((count == prefix).all()), causal)


def _shown(mask: Any, rows: int, columns: int) -> NDArray[np.bool_]:
    """A mask as (M, columns), true where something is shown."""
    import mlx.core as mx

    shape = tuple(mask.shape)
    if shape[-1:] != (columns,) or (len(shape) > 1 and shape[-2] != rows) or (len(shape) == 1 and rows != 1):
        raise NotImplementedError(
            f"PionPrefixCache + a mask of shape {shape}: the last axes must be ({rows}, {columns})"
        )
    if any(size != 1 for size in shape[:-2]):
        raise NotImplementedError(f"PionPrefixCache + a mask of shape {shape} that differs between heads or sequences")
    if mask.dtype == mx.bool_:
        bools: NDArray[np.bool_] = np.array(mask, np.bool_).reshape(rows, columns)
        return bools
    values: NDArray[np.float32] = np.array(mask.astype(mx.float32)).reshape(rows, columns)
    shown: NDArray[np.bool_] = values == 0
    if not (shown | (values <= _HIDDEN)).all():
        raise NotImplementedError("PionPrefixCache + a mask that adds to the logits (ALiBi and the like)")
    return shown


def suffix_part(q: Any, k: Any, v: Any, seen: NDArray[np.bool_] | None, sinks: Any = None) -> tuple[Any, Any]:
    """Attention over a suffix.

    Args:
        q: (H_q, M, D) fp32, scaled.
        k, v: (H_kv, S, D) fp32; query head h has the keys of h // (H_q / H_kv).
        seen: (M, S); None: all.
        sinks: (H_q,) logits that take their share of the softmax and have no value.

    Returns:
        (H_q, M, D), (H_q, M): mlx arrays.
    """
    import mlx.core as mx

    (heads, rows, dim), kv_heads = q.shape, k.shape[0]
    grouped = q.reshape(kv_heads, heads // kv_heads, rows, dim)
    scores = grouped @ k[:, None].swapaxes(-1, -2)
    if seen is not None and not seen.all():
        scores = mx.where(mx.array(seen), scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    base = mx.where(top == -mx.inf, 0.0, top)
    weights = mx.exp(scores - base)
    total = weights.sum(axis=-1, keepdims=True)
    out = (weights @ v[:, None]) / mx.where(total > 0, total, 1.0)
    lse = (base + mx.log(total)).reshape(heads, rows)
    out = out.reshape(heads, rows, dim)
    if sinks is None:
        return out, lse
    sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(heads, 1), (heads, rows))
    return merge([(out, lse), (mx.zeros_like(out), sink)])


def merge(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Join parts over disjoint keys; out (H, M, D), lse (H, M). No keys at all: zeros and -inf."""
    import mlx.core as mx

    sums = mx.stack([lse for _, lse in parts])
    top = sums.max(axis=0)
    base = mx.where(top == -mx.inf, 0.0, top)
    weights = mx.exp(sums - base)
    total = weights.sum(axis=0)
    shares = weights / mx.where(total > 0, total, 1.0)
    out = sum(out * share[..., None] for (out, _), share in zip(parts, shares, strict=True))
    return out, base + mx.log(total)


@dataclass
class Blocks:
    """How a prefix is attended to by blocks, and what was computed of them.

    Attributes:
        block: positions of a block.
        count: how many blocks.
        selector: ``block_mean`` or ``quest``.
        table: of one prefix, what the selector needs of each block.
    """

    block: int
    count: int
    selector: str
    table: tuple[Any, ...] = ()

    @classmethod
    def of(cls, given: Any) -> Blocks | None:
        """From ``{"K_block": 64, "K_blocks": 8, "selector": "block_mean"}``.

        Raises:
            ValueError: something else.
        """
        if not given:
            return None
        if not isinstance(given, dict) or not given.keys() <= {"K_block", "K_blocks", "selector"}:
            raise ValueError(f"sparse mode is a dict of K_block, K_blocks and selector, not {given!r}")
        found = cls(given.get("K_block", 64), given.get("K_blocks", 8), given.get("selector", "block_mean"))
        if found.selector not in _SELECTORS:
            raise ValueError(f"unknown selector {found.selector!r}; expected 'block_mean' or 'quest'")
        if not all(isinstance(number, int) and number > 0 for number in (found.block, found.count)):
            raise ValueError(f"K_block={found.block!r} and K_blocks={found.count!r} must be positive numbers")
        return found

    def measure(self, keys: Any) -> None:
        """Compute the table of a prefix, keys (H_kv, N, D)."""
        import mlx.core as mx

        heads, length, dim = keys.shape
        blocks = -(-length // self.block)
        room = blocks * self.block - length

        def cut(fill: float) -> Any:
            rest = mx.full((heads, room, dim), fill, dtype=mx.float32)
            padded = mx.concatenate([keys.astype(mx.float32), rest], axis=1) if room else keys.astype(mx.float32)
            return padded.reshape(heads, blocks, self.block, dim)

        if self.selector == "quest":
            self.table = cut(np.inf).min(axis=2), cut(-np.inf).max(axis=2)
        else:
            held = np.full(blocks, self.block, np.float32)
            held[-1] -= room
            self.table = (cut(0.0).sum(axis=2) / mx.array(held)[:, None],)
        mx.eval(*self.table)

    def scores(self, q: Any) -> Any:
        """How well each block fits queries (H_q, D), over all heads: (blocks,)."""
        import mlx.core as mx

        heads, dim = q.shape
        grouped = q.astype(mx.float32).reshape(self.table[0].shape[0], -1, dim)
        if len(self.table) == 1:
            return (grouped @ self.table[0].swapaxes(-1, -2)).sum(axis=(0, 1)) / heads
        low, high = self.table
        up, down = mx.maximum(grouped, 0), mx.minimum(grouped, 0)
        return (up @ high.swapaxes(-1, -2) + down @ low.swapaxes(-1, -2)).sum(axis=(0, 1)) / heads


def sparse_attention(q: Any, keys: Any, values: Any, prefix: int, blocks: Blocks, scale: float, sinks: Any) -> Any:
    """Attention of one row a head over the blocks of a prefix that fit best, its last block, and all that follows.

    Args:
        q: (1, H_q, 1, D).
        keys, values: (1, H_kv, T, D), the first `prefix` positions of which are the prefix.

    Returns:
        (1, H_q, 1, D), or None when all blocks are chosen: attend to everything.
    """
    import mlx.core as mx

    total = -(-prefix // blocks.block)
    if blocks.count >= total:
        return None
    if not blocks.table:
        blocks.measure(keys[0, :, :prefix])
    best = mx.sort(mx.argsort(-blocks.scores(q[0, :, 0]))[: blocks.count]).astype(mx.int32)
    last = mx.array([total - 1], dtype=mx.int32)
    places = (mx.concatenate([best, last])[:, None] * blocks.block + mx.arange(blocks.block)).reshape(-1)
    # The last block stands behind the chosen ones; where it is among them its second time is hidden.
    twice = mx.repeat(mx.concatenate([mx.zeros_like(best) > 0, (best == last).any()[None]]), blocks.block)
    hidden = (places >= prefix) | twice
    places = mx.minimum(places, prefix - 1)
    picked = [mx.concatenate([mx.take(a, places, axis=2), a[:, :, prefix:]], axis=2) for a in (keys, values)]
    bias = mx.where(mx.concatenate([hidden, mx.zeros((keys.shape[2] - prefix,)) > 0]), -mx.inf, 0.0)
    more = {} if sinks is None else {"sinks": sinks}
    return mx.fast.scaled_dot_product_attention(
        q, *picked, scale=scale, mask=bias.astype(q.dtype)[None, None, None], **more
    )
