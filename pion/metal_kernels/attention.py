"""Attention on a GPU: over a prefix, over a prefix and a suffix, over chosen keys or blocks of them.

Every function takes `how`: ``metal`` runs the kernels, ``ops`` their twins in plain MLX operations (`attention_ops`),
and another `Device` the kernels there. Arrays are those of mlx, or of the device. Queries are float32; keys and values
float32, float16 or bfloat16; results float32. An answer is a part in the sense of `pion.ref.attention`: the attention
over the keys that were read, and the natural logarithm of the sum of the exponentials of their logits, so that answers
over disjoint keys can be merged. A row that sees no key is zeros and -inf.

Arguments that several functions share:
    scale: of the logits; default D ** -0.5.
    window: only the last so many positions of the prefix are seen; 0 = all. The suffix is always seen.
    sinks: (H_q) logits that take part in the softmax of their head without a value; None = none. They count into the
        logarithm as well, so of several parts that will be merged only one may have them.
    head_map: for each query head the head of keys it uses; None = h // (H_q / H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pion.metal_kernels import attention_ops
from pion.metal_kernels.bodies import BODIES
from pion.metal_kernels.device import Device, Metal

__all__ = ["SELECTORS", "Stats", "block_stats", "dense", "fused", "gather", "gather_blocks", "merge", "select"]

MOST_DIM: Final = 512
MOST_BLOCKS: Final = 16384  # their flags are in threadgroup memory
SELECTORS: Final = ("block_mean", "quest")

# Sizes that were chosen by reasoning and have not been measured: there was no Mac.
GROUPS: Final = 8  # SIMD groups of a threadgroup
_AT_ONCE: Final = 256  # threadgroups that shall be there for a GPU to be busy
_LEAST: Final = 256  # keys that are worth a threadgroup
_MOST_SPLITS: Final = 64

Heads = Sequence[int] | NDArray[Any] | bytes | None


class Stats(NamedTuple):
    """Of each block of keys the mean, least and largest value: float32 (H, blocks, D)."""

    mean: Any
    low: Any
    high: Any


def device_of(how: str | Device) -> Device:
    """The device; ValueError for a name that is none, RuntimeError when Metal is asked for and not there."""
    if not isinstance(how, str):
        return how
    if how != "metal":
        raise ValueError(f"how is {how!r}, not 'metal' or 'ops'")
    import mlx.core as mx

    if not mx.metal.is_available():
        raise RuntimeError("no Metal on this machine: use how='ops'")
    return Metal()


def kv_heads(heads: int, stored: int, head_map: Heads) -> NDArray[np.uint32]:
    """The head of keys of each query head.

    Raises:
        ValueError: a map of another length or with other heads, or H_q that H does not divide.
    """
    if head_map is None:
        if stored < 1 or heads % stored:
            raise ValueError(f"{heads} query heads are not a multiple of {stored} heads of keys")
        return (np.arange(heads) // (heads // stored)).astype(np.uint32)
    given = np.frombuffer(head_map, np.uint8) if isinstance(head_map, bytes) else np.asarray(head_map)
    if given.shape != (heads,):
        raise ValueError(f"the head map has shape {given.shape}, not ({heads},)")
    if given.size and not (given.min() >= 0 and given.max() < stored):
        raise ValueError(f"the head map names heads outside 0..{stored - 1}")
    return given.astype(np.uint32)


@dataclass(frozen=True)
class Slots:
    """Query rows that share a head of keys lie side by side: `rows` of each slot, whose head is in `kv_of`."""

    kv_of: NDArray[np.uint32]
    rows: int

    @classmethod
    def of(cls, kv_of: NDArray[np.uint32], stored: int, length: int, *, alone: bool = False) -> Slots:
        """A slot for each head of keys where the query heads come in their order, else (`alone`: always) for each
        query head."""
        heads = len(kv_of)
        share = heads // stored
        if not alone and heads == share * stored and np.array_equal(kv_of, np.arange(heads) // max(share, 1)):
            return cls(np.arange(stored, dtype=np.uint32), share * length)
        return cls(kv_of, length)

    def at_once(self, dim: int) -> int:
        """Query rows that a threadgroup takes: a power of two, 32 registers of a thread at most."""
        most = max(1, 32 // -(-dim // 32))
        return min(1 << (self.rows - 1).bit_length(), most, 8)


def splits_of(places: int, groups: int, step: int) -> tuple[int, int]:
    """How many threadgroups share the keys of a row, and the keys of each: a multiple of `step`."""
    wanted = max(1, min(_AT_ONCE // groups, _MOST_SPLITS, -(-places // _LEAST)))
    each = -(-max(places, 1) // wanted)
    each = -(-each // step) * step
    return max(1, -(-places // each)), each


def scale_bits(scale: float | None, dim: int) -> int:
    """A scale as the word of a float32."""
    return int(np.float32(dim**-0.5 if scale is None else scale).view(np.uint32))


def check(q: Any, k: Any, v: Any) -> None:
    """Refuse shapes that do not fit: q (H_q, M, D), k and v (H, N, D)."""
    if len(q.shape) != 3 or len(k.shape) != 3 or k.shape != v.shape or k.shape[2] != q.shape[2] or 0 in q.shape:
        raise ValueError(f"queries {q.shape}, keys {k.shape} and values {v.shape} do not fit")
    if not 1 <= q.shape[2] <= MOST_DIM:
        raise ValueError(f"heads of {q.shape[2]} values: 1 to {MOST_DIM} are supported")
    if k.size >= 1 << 32:
        raise ValueError(f"{k.size} values of keys: fewer than {1 << 32} are supported")


def dense(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Any = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> tuple[Any, Any]:
    """Attention over a prefix.

    Args:
        q: (H_q, M, D).
        k, v: (H, N, D); N may be 0.
        scale, window, sinks, head_map: see above.
        how: ``metal`` or ``ops``.

    Returns:
        out (H_q, M, D) and lse (H_q, M).

    Raises:
        ValueError: shapes, a head map or `how` that do not fit.
        RuntimeError: Metal is asked for and not there.
    """
    return _attend(q, k, v, None, None, scale, window, sinks, head_map, how)


def fused(
    q: Any,
    k: Any,
    v: Any,
    k_suf: Any,
    v_suf: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Any = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> tuple[Any, Any]:
    """Attention over a prefix and a suffix in one softmax.

    Row m sees all of the (windowed) prefix and the suffix up to position max(S - M, 0) + m.

    Args:
        q: (H_q, M, D).
        k, v: (H, N, D).
        k_suf, v_suf: (H, S, D) of the same dtype; S may be 0.
        scale, window, sinks, head_map: see above.
        how: ``metal`` or ``ops``.

    Returns, raises: as `dense`.
    """
    return _attend(q, k, v, k_suf, v_suf, scale, window, sinks, head_map, how)


def gather(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    counts: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Any = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> tuple[Any, Any]:
    """Attention over the keys that each query head names.

    Args:
        q: (H_q, D): one row.
        k, v: (H, N, D).
        indices: int32 (H_q, K), positions; those outside the prefix or before the window are skipped, and one that is
            named twice counts twice.
        counts: uint32 (H_q): only the first so many are read.
        scale, window, sinks, head_map: see above.
        how: ``metal`` or ``ops``.

    Returns:
        out (H_q, D) and lse (H_q).
    """
    heads = q.shape[0]
    if len(indices.shape) != 2 or indices.shape[0] != heads or counts.shape != (heads,):
        raise ValueError(f"indices {indices.shape} and counts {counts.shape} do not fit {heads} query heads")
    picked = _Picked(1, indices, counts, indices.shape[1], 1)
    out, lse = _attend(q.reshape(heads, 1, -1), k, v, None, None, scale, window, sinks, head_map, how, picked)
    return out.reshape(q.shape), lse.reshape(heads)


def gather_blocks(
    q: Any,
    k: Any,
    v: Any,
    blocks: Any,
    block: int,
    k_suf: Any = None,
    v_suf: Any = None,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Any = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> tuple[Any, Any]:
    """Attention over blocks of a prefix, the same for all heads, and over all of a suffix.

    Args:
        q: (H_q, D): one row.
        k, v: (H, N, D).
        blocks: int32 (B), numbers of blocks, as `select` gives them; those outside the prefix are skipped.
        block: positions of a block.
        k_suf, v_suf: (H, S, D) of the same dtype, or None.
        scale, window, sinks, head_map: see above.
        how: ``metal`` or ``ops``.

    Returns:
        out (H_q, D) and lse (H_q).
    """
    if block < 1 or len(blocks.shape) != 1:
        raise ValueError(f"blocks of {block} positions, their numbers of shape {blocks.shape}")
    picked = _Picked(2, blocks, None, blocks.shape[0] * block, block)
    out, lse = _attend(q.reshape(q.shape[0], 1, -1), k, v, k_suf, v_suf, scale, window, sinks, head_map, how, picked)
    return out.reshape(q.shape), lse.reshape(q.shape[0])


@dataclass(frozen=True)
class _Picked:
    """Which keys of the prefix are read: see attend.metal."""

    form: int
    numbers: Any
    counts: Any
    places: int
    block: int


def _attend(
    q: Any,
    k: Any,
    v: Any,
    k_suf: Any,
    v_suf: Any,
    scale: float | None,
    window: int,
    sinks: Any,
    head_map: Heads,
    how: str | Device,
    picked: _Picked | None = None,
) -> tuple[Any, Any]:
    check(q, k, v)
    heads, length, dim = q.shape
    kv_of = kv_heads(heads, k.shape[0], head_map)
    if (k_suf is None) != (v_suf is None):
        raise ValueError("a suffix has keys and values")
    if k_suf is not None:
        check(q, k_suf, v_suf)
        if k_suf.shape[0] != k.shape[0]:
            raise ValueError(f"a suffix of {k_suf.shape[0]} heads behind a prefix of {k.shape[0]}")
    suffix = 0 if k_suf is None else k_suf.shape[1]
    first = max(k.shape[1] - window, 0) if window > 0 else 0
    if how == "ops":
        form, numbers, counts, _, block = (0, None, None, 0, 1) if picked is None else vars(picked).values()
        more = (k_suf, v_suf) if suffix else None
        return attention_ops.attend(q, k, v, more, form, numbers, counts, block, scale, first, sinks, kv_of)
    device = device_of(how)
    if suffix and device.kind(k_suf) != device.kind(k):
        raise ValueError(f"a suffix of {device.kind(k_suf)} behind a prefix of {device.kind(k)}")
    slots = Slots.of(kv_of, k.shape[0], length, alone=picked is not None and picked.form == 1)
    at_once = slots.at_once(dim)
    keys = 8 if at_once <= 4 else 4
    count = len(slots.kv_of) * -(-slots.rows // at_once)
    places = k.shape[1] - first if picked is None else picked.places
    splits, each = splits_of(places + suffix, count, GROUPS * keys)
    block = 1 if picked is None else picked.block
    extent = [slots.rows, length, heads * length, k.shape[1], first, suffix, places, block, each]
    extent += [dim, k.shape[1] * dim, scale_bits(scale, dim)]
    parts, tops = device.call(
        BODIES["attend"],
        {
            "T": device.kind(k),
            "D": dim,
            "R": at_once,
            "K": keys,
            "G": GROUPS,
            "PICKED": 0 if picked is None else picked.form,
            "SUFFIX": suffix > 0,
        },
        {
            "q": q,
            "k": k,
            "v": v,
            "k_suf": k_suf if suffix else k,
            "v_suf": v_suf if suffix else v,
            "pick": device.array(np.zeros(8, np.int32)) if picked is None else picked.numbers,
            "counts": device.array(np.zeros(8, np.uint32))
            if picked is None or picked.counts is None
            else picked.counts,
            "kv_of": device.array(slots.kv_of),
            "extent": device.array(np.array(extent, np.uint32)),
        },
        (32 * GROUPS, count, splits),
        32 * GROUPS,
        [(splits, heads, length, dim), (splits, heads, length, 2)],
    )
    return join(device, parts, tops, sinks)


def join(device: Device, parts: Any, tops: Any, sinks: Any) -> tuple[Any, Any]:
    """The kernel `merge`: parts (splits, H_q, M, D) and their tops (splits, H_q, M, 2) to (out, lse)."""
    splits, heads, length, dim = parts.shape
    out, lse = device.call(
        BODIES["merge"],
        {"T": "float32", "D": dim, "SINKS": sinks is not None},
        {
            "parts": parts,
            "tops": tops,
            "sinks": device.array(np.zeros(8, np.float32)) if sinks is None else sinks,
            "extent": device.array(np.array([splits, heads * length, length], np.uint32)),
        },
        (dim, heads * length, 1),
        min(256, -(-dim // 32) * 32),
        [(heads, length, dim), (heads, length)],
    )
    return out, lse


def merge(outs: Any, sums: Any, *, sinks: Any = None, how: str | Device = "metal") -> tuple[Any, Any]:
    """Join parts over disjoint keys.

    Args:
        outs: (parts, H_q, M, D), what each part answered.
        sums: (parts, H_q, M), their logarithms.
        sinks: see above.
        how: ``metal`` or ``ops``.

    Returns:
        out (H_q, M, D) and lse (H_q, M). Where only one part saw keys its values come back as they are.
    """
    if len(outs.shape) != 4 or tuple(sums.shape) != tuple(outs.shape[:-1]) or 0 in outs.shape:
        raise ValueError(f"parts {outs.shape} and their logarithms {sums.shape} do not fit")
    if how == "ops":
        return attention_ops.merge(outs, sums, sinks)
    device = device_of(how)
    return join(device, outs, device.with_ones(sums), sinks)


# ---- blocks ----------------------------------------------------------------------------------------------------------


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
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{blocks} blocks: {MOST_BLOCKS} are supported, use larger ones")
    kv_of = kv_heads(heads, stored, head_map)
    most = min(most, blocks)
    low, high = (stats.low, stats.high) if selector == "quest" else (stats.mean, stats.mean)
    factor = dim**-0.5 if scale is None else scale
    if how == "ops":
        return attention_ops.select(q, low, high, kv_of, most, factor)
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
