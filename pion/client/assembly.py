"""A prompt cache as the parts that are stored, and a prompt cache put together from parts that were fetched.

mlx and mlx-lm are imported inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pion.client import slots
from pion.client.caches import CacheOptions, Layout, Prefilled, new_cache
from pion.client.manifest import FIRST, Leaf, Manifest
from pion.client.mlx_arrays import PionMlxCompatError, mlx_modules, pack_rows
from pion.client.restore import ROOM
from pion.client.transfer import Parts, Rows
from pion.errors import MismatchError

__all__ = ["Plan", "built", "checked", "not_numbers", "planned"]


@dataclass(frozen=True)
class Plan:
    """The parts of a prefix.

    Attributes:
        manifest: what they are.
        rows: gives those of the layers that are rows, packed one layer-side at a time as they are asked for.
        states: all of them by number, packed, the manifest and the tokens included.
    """

    manifest: Manifest
    rows: Callable[[], Rows]
    states: dict[int, Any] = field(default_factory=dict)


def checked(cache: Sequence[Any], layout: Layout, count: int) -> None:
    """Whether a prompt cache is one of this model's, of so many tokens.

    Raises:
        PionMlxCompatError: it is made of something else; nothing was sent.
        ValueError: it holds another number of tokens.
    """
    if not isinstance(cache, list | tuple):
        raise TypeError(f"a prompt cache is a list, not {type(cache).__name__}")
    trees = slots.structure(cache)
    if trees != layout.trees:
        got, want = (slots.tree_kind(found) or f"{len(found)} x KVCache" for found in (trees, layout.trees))
        raise PionMlxCompatError(f"a cache of {got[:300]}; this model, with these options, has {want[:300]}")
    for leaf in slots.leaves(cache):
        length = slots.length(leaf)
        if length not in (None, count) and not (length == 0 and leaf.keys is None):
            raise ValueError(f"a {type(leaf).__name__} of {length} tokens in a cache that should hold {count}")
    for place in layout.rows:
        for array in (cache[place].keys, cache[place].values):
            if array is None:
                raise ValueError(f"slot {place} is empty in a cache that should hold {count} tokens")
            found = (array.shape[1], array.shape[3], str(array.dtype).rpartition(".")[2])
            if found != (layout.n_kv_heads, layout.head_dim, layout.dtype):
                raise PionMlxCompatError(f"slot {place} has {found[0]} heads x {found[1]} {found[2]}, not this model's")


def planned(
    done: Prefilled, layout: Layout, ids: np.ndarray[Any, np.dtype[np.uint32]], identity: bytes, as_states: bool
) -> Plan:
    """The parts of a prefix.

    Args:
        done: its cache, and states taken down on the way to it.
        layout: of the model.
        ids: its tokens.
        identity: of what it belongs to.
        as_states: store everything as states, bit for bit, whatever the format of rows is.

    Raises:
        PionMlxCompatError, ValueError: the cache is not one of this layout and these tokens, see `checked`.
    """
    count = len(ids)
    checked(done.cache, layout, count)
    ranks = {} if as_states else {place: rank for rank, place in enumerate(layout.rows)}
    found: list[tuple[Any, int | None]] = []
    for place, slot in enumerate(done.cache):
        found += [(leaf, ranks.get(place)) for leaf in slots.leaves([slot])]
    cut = [rank is not None or slots.cuttable(leaf) or slots.whole(leaf) for leaf, rank in found]
    boundaries = (count,) if all(cut) else (*sorted(done.snapshots), count)
    states: dict[int, Any] = {0: b"", 1: ids.tobytes()}
    leaves = []
    for number, (leaf, rank) in enumerate(found):
        if rank is not None:
            leaves.append(Leaf(rank))
            continue
        earlier = () if cut[number] else boundaries[:-1]
        first = len(states)
        for boundary in earlier:
            states[len(states)] = done.snapshots[boundary][number]
        states[len(states)] = slots.take(leaf).pack(leaf=number, tokens=count)
        leaves.append(Leaf(None, tuple(range(first, len(states))), cut[number]))
    manifest = Manifest(count, identity.hex(), layout.trees, boundaries, tuple(leaves))
    assert len(states) == manifest.state_count >= FIRST
    states[0] = manifest.pack()
    return Plan(manifest, lambda: _rows(done.cache, ranks, count), states)


def _rows(cache: list[Any], ranks: Mapping[int, int], count: int) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    for place, rank in ranks.items():
        yield rank, 0, pack_rows(cache[place].keys, count)
        yield rank, 1, pack_rows(cache[place].values, count)


def not_numbers(rows: Iterable[tuple[int, int, np.ndarray[Any, Any]]], dtype: str) -> str:
    """Where packed rows hold NaN, as a sentence; empty when they hold none."""
    for layer, side, data in rows:
        if dtype == "bfloat16":
            found = (data & 0x7FFF) > 0x7F80
        else:
            found = np.isnan(data.view(np.float16) if data.dtype == np.uint16 else data)
        if found.any():
            return f"row {int(found.any(axis=1).argmax())} of layer {layer} of {'KV'[side]} holds NaN"
    return ""


def built(
    model: Any, options: CacheOptions, layout: Layout, manifest: Manifest | None, parts: Parts, count: int, *,
    rows: bool = True,
) -> list[Any]:  # fmt: skip
    """A prompt cache that holds exactly `count` tokens and belongs to the caller alone.

    Args:
        model, options, layout: what it is for.
        manifest: what the parts are; None: rows of all layers.
        parts: which nobody else may hold.
        count: tokens.
        rows: fill the slots that are rows; else they stay empty.

    Raises:
        MismatchError: what is stored is another kind of cache.
        ValueError: a state is not what the manifest says; the parts cannot be used.
    """
    mx, module = mlx_modules()
    if manifest is not None and manifest.trees != layout.trees:
        got, want = (slots.tree_kind(trees) or "KVCache" for trees in (manifest.trees, layout.trees))
        raise MismatchError(f"MISMATCH cache: stored as {got[:300]}, asked for as {want[:300]}")
    if manifest is None and layout.is_hybrid:
        raise MismatchError("MISMATCH cache: rows are stored and no states, which this model needs")
    cache = new_cache(model, options)
    for place, tree in enumerate(layout.trees):
        if tree["class"] == "QuantizedKVCache" and type(cache[place]) is module.KVCache:
            cache[place] = module.QuantizedKVCache(group_size=tree["group_size"], bits=tree["bits"])
    found = list(slots.leaves(cache))
    if slots.structure(cache) != layout.trees:
        raise ValueError("the model makes another cache than it made when it was looked at")
    leaves = manifest.leaves if manifest is not None else tuple(Leaf(rank) for rank in range(len(found)))
    if len(leaves) != len(found):
        raise ValueError(f"{len(leaves)} leaves are stored, this cache has {len(found)}")
    arrays: list[Any] = []
    pairs: list[Any] = list(parts.rows)
    for number, (leaf, where) in enumerate(zip(found, leaves, strict=True)):
        if where.rows is not None and not rows:
            continue
        if where.rows is not None:
            leaf.keys, leaf.values = pairs[where.rows]
            pairs[where.rows] = ()  # nobody else may hold them: the first decoded token would copy them
            leaf.offset = count
            continue
        assert manifest is not None
        state = slots.parse(parts.states[number], leaf=number, tokens=manifest.tokens if where.cut else count)
        cut = count if where.cut and count < manifest.tokens and state.numbers.get("offset") else None
        arrays += slots.give(leaf, state, cut, ROOM, layout.shapes[number] if layout.shapes else None)
    mx.eval(arrays)
    parts.rows.clear()
    pairs.clear()
    for leaf in found:
        length = slots.length(leaf)
        if length not in (None, count) and not (length == 0 and leaf.keys is None):
            raise ValueError(f"a state of {length} tokens among those of {count}")
    return cache
