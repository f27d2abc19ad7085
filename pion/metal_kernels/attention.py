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

from dataclasses import dataclass
from typing import Any

import numpy as np

from pion.metal_kernels import attention_ops
from pion.metal_kernels.bodies import BODIES
from pion.metal_kernels.device import Device
from pion.metal_kernels.plans import GROUPS, Heads, Slots, check, device_of, kv_heads, scale_bits, splits_of

__all__ = ["dense", "fused", "gather", "gather_blocks", "join", "logsum", "merge"]


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


def logsum(
    q: Any,
    k: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Any = None,
    head_map: Heads = None,
    how: str | Device = "metal",
) -> Any:
    """The lse of `dense` alone, without reading values: what the mass that a sparse answer kept is measured against.

    exp(lse of the sparse answer - this) is the part of the softmax that the chosen keys have.

    Args:
        q: (H_q, M, D).
        k: (H, N, D).
        scale, window, sinks, head_map: see above.
        how: ``metal`` or ``ops``.

    Returns:
        lse (H_q, M).
    """
    return _attend(q, k, None, None, None, scale, window, sinks, head_map, how)[1]


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
    check(q, k, k if v is None else v)
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
            "VALUES": v is not None,
        },
        {
            "q": q,
            "k": k,
            "v": k if v is None else v,
            "k_suf": k_suf if suffix else k,
            "v_suf": v_suf if suffix else k,
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
