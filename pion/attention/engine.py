"""K/V by session and layer, and attention over it.

Three states, as on the wire (section 5.8): a layer is *warm* (its K/V are in memory), *cold* (they went for others and
only its shape is remembered: WARM, or a store, brings it back) or *missing*. Warm layers are bounded in number and in
bytes; the least recently used goes first. Nothing here survives the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion import limits
from pion.attention import select
from pion.attention.backends import Backend, make
from pion.attention.merge import F32, Part, merge, with_sinks
from pion.errors import AttentionMissError, ColdMissError

__all__ = ["COLD", "HIT", "MISS", "AttentionEngine", "supported"]

HIT: Final = "HIT"
COLD: Final = "COLD"
MISS: Final = "MISS"

_TABLES: Final = 2  # block tables kept of a layer: a client asks with one block size and one selector
Key = tuple[bytes, int]
Shape = tuple[int, int, int]
Map = NDArray[np.int64]


def supported(dim: int) -> bool:
    """Whether heads may have this size."""
    return 0 < dim <= limits.ATTEND_MAX_HEAD_DIM and dim % limits.ATTEND_HEAD_DIM_STEP == 0


@dataclass(eq=False, slots=True)
class _Layer:
    """One warm layer. `held` never changes, so a query goes on with it whatever happens to the table meanwhile."""

    shape: Shape
    held: Any
    tables: OrderedDict[tuple[int, str], tuple[F32, ...]] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        return int(self.held.nbytes) + sum(array.nbytes for table in self.tables.values() for array in table)


class AttentionEngine:
    """See the module text. Methods may be called from any thread.

    Args:
        backend: `auto`, `metal`, `mlx` or `cpu`; see `pion.attention.backends.make`.
        half: hold K/V in half precision.
        window: positions at the end of a prefix that queries see which do not say so themselves; 0 = all.
        warm_slots, cold_slots: layers in memory; layers that are remembered.
        max_bytes: of the layers in memory.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        half: bool = False,
        window: int = 0,
        warm_slots: int = limits.ATTEND_WARM_SLOTS,
        cold_slots: int = limits.ATTEND_COLD_SLOTS,
        max_bytes: int = limits.ATTEND_MAX_BYTES,
    ) -> None:
        self.backend: Backend = make(backend, half)
        self.half, self.window = half, window
        self.warm_slots, self.cold_slots, self.max_bytes = warm_slots, cold_slots, max_bytes
        self._lock = threading.Lock()
        self._warm: OrderedDict[Key, _Layer] = OrderedDict()  # the least recently used first
        self._cold: OrderedDict[Key, Shape] = OrderedDict()
        self._bytes = 0
        self._demotions = self._rehydrates = self._queries = 0

    # --- the table ----------------------------------------------------------------------------------------------------

    def store(self, sid: bytes, layer: int, k: F32, v: F32) -> None:
        """Take over the K/V of a layer, in place of what was there.

        Args:
            k, v: (H, N, D) fp32, copied.

        Raises:
            ValueError: shapes, a head size that is not supported, more than `max_bytes`, or values that half precision
                cannot hold.
        """
        heads, count, dim = shape = k.shape
        if k.shape != v.shape or not heads or not count:
            raise ValueError(f"k {k.shape} and v {v.shape} must both be (H, N, D)")
        if not supported(dim):
            raise ValueError(f"unsupported D? supported: {limits.ATTEND_HEAD_DIMS}")
        size = 2 * heads * count * dim * (2 if self.half else 4)
        if size > self.max_bytes:
            raise ValueError(f"{size} bytes are more than --attend-max-bytes {self.max_bytes}")
        if self.half and not (np.abs(k).max() <= limits.FP16_MAX and np.abs(v).max() <= limits.FP16_MAX):
            raise ValueError(f"values beyond {limits.FP16_MAX:g} do not fit into half precision")
        made = _Layer(shape, self.backend.hold(k, v))
        key = (sid, layer)
        with self._lock:
            if self._cold.pop(key, None) is not None:
                self._rehydrates += 1
            self._forget(key)
            self._make_room(1, made.nbytes)
            self._warm[key] = made
            self._bytes += made.nbytes

    def _forget(self, key: Key) -> bool:
        layer = self._warm.pop(key, None)
        if layer is not None:
            self._bytes -= layer.nbytes
        return layer is not None

    def _make_room(self, slots: int, nbytes: int) -> None:
        while self._warm and (len(self._warm) + slots > self.warm_slots or self._bytes + nbytes > self.max_bytes):
            key, layer = self._warm.popitem(last=False)
            self._bytes -= layer.nbytes
            self._cold[key] = layer.shape
            self._demotions += 1
            while len(self._cold) > self.cold_slots:
                self._cold.popitem(last=False)

    def lookup(self, sid: bytes, layer: int) -> str:
        """`HIT` (warm), `COLD` or `MISS`. No use is noted."""
        with self._lock:
            key = (sid, layer)
            return HIT if key in self._warm else COLD if key in self._cold else MISS

    def shape(self, sid: bytes, layer: int) -> Shape | None:
        """(H, N, D) of a layer that is warm or cold."""
        with self._lock:
            found = self._warm.get((sid, layer))
            return found.shape if found is not None else self._cold.get((sid, layer))

    def drop(self, sid: bytes) -> int:
        """Forget all layers of a session, warm and cold; how many there were."""
        with self._lock:
            warm = [key for key in self._warm if key[0] == sid]
            cold = [key for key in self._cold if key[0] == sid]
            for key in warm:
                self._forget(key)
            for key in cold:
                del self._cold[key]
            return len(warm) + len(cold)

    def layers(self, sid: bytes) -> dict[int, tuple[str, Shape]]:
        """State and shape of each layer of a session."""
        with self._lock:
            found = {key[1]: (HIT, layer.shape) for key, layer in self._warm.items() if key[0] == sid}
            found |= {key[1]: (COLD, shape) for key, shape in self._cold.items() if key[0] == sid}
        return dict(sorted(found.items()))

    def info(self) -> dict[str, int | str]:
        """Figures: slots, bytes, what moved, and the backend."""
        with self._lock:
            return {
                "sdpa_warm": len(self._warm),
                "sdpa_cold": len(self._cold),
                "sdpa_demotions": self._demotions,
                "sdpa_rehydrates": self._rehydrates,
                "sdpa_warm_bytes": self._bytes,
                "sdpa_queries": self._queries,
                "sdpa_backend": self.backend.name,
                "sdpa_device": self.backend.device,
            }

    def _use(self, sid: bytes, layer: int, heads: int, dim: int) -> _Layer:
        """The layer for a query.

        Raises:
            ColdMissError: cold.
            AttentionMissError: missing, or of another shape.
        """
        key = (sid, layer)
        with self._lock:
            found = self._warm.get(key)
            if found is None:
                if key in self._cold:
                    raise ColdMissError
                raise AttentionMissError
            if (found.shape[0], found.shape[2]) != (heads, dim):
                raise AttentionMissError
            self._warm.move_to_end(key)
            self._queries += 1
            return found

    def _first(self, count: int, window: int) -> int:
        """The first position that a window leaves: -1 = the engine's own, 0 = none."""
        window = self.window if window < 0 else window
        return max(0, count - window) if window else 0

    # --- queries ------------------------------------------------------------------------------------------------------

    def query(self, sid: bytes, layer: int, q: F32, *, window: int = -1, sinks: F32 | None = None) -> Part:
        """Attention over the whole prefix, or its window.

        Args:
            q: (H, M, D), H as stored.
            window: see `_first`.
            sinks: (H,) or (H, M) logits of attention sinks; they count in the lse.

        Returns:
            out (H, M, D) and lse (H, M), natural logarithm.

        Raises (this and the following): ColdMissError, AttentionMissError, ValueError.
        """
        heads, _, dim = q.shape
        found = self._use(sid, layer, heads, dim)
        part = self.backend.dense(found.held, _scaled(q), self._first(found.shape[1], window))
        return with_sinks(part, _sinks(sinks, q.shape))

    def query_fused(
        self,
        sid: bytes,
        layer: int,
        q: F32,
        k_suf: F32,
        v_suf: F32,
        head_map: NDArray[Any],
        *,
        window: int = -1,
        sinks: F32 | None = None,
    ) -> F32:
        """Attention over prefix and suffix in one softmax.

        Row m sees all of the prefix (or its window) and the suffix up to position max(S - M, 0) + m.

        Args:
            q: (H_q, M, D).
            k_suf, v_suf: (H_kv, S, D); S may be 0.
            head_map: (H_q,) the head of K/V of each query head.

        Returns:
            (H_q, M, D).
        """
        heads, rows, dim = q.shape
        kv_heads, suffix, _ = k_suf.shape
        if k_suf.shape != v_suf.shape or k_suf.shape[2] != dim:
            raise ValueError(f"q {q.shape}, k_suf {k_suf.shape} and v_suf {v_suf.shape} do not fit")
        fold = _Fold(head_map, heads, kv_heads)
        found = self._use(sid, layer, kv_heads, dim)
        queries = fold.inward(_scaled(q))
        parts = [self.backend.dense(found.held, queries, self._first(found.shape[1], window))]
        if suffix:
            visible = np.minimum(max(suffix - rows, 0) + np.arange(rows) + 1, suffix)
            parts.append(self.backend.suffix(k_suf, v_suf, queries, np.tile(visible, fold.share)))
        out, lse = fold.outward(merge(parts))
        return with_sinks((out, lse), _sinks(sinks, q.shape))[0]

    def query_sparse(
        self,
        sid: bytes,
        layer: int,
        q: F32,
        indices: NDArray[Any],
        counts: NDArray[Any],
        *,
        window: int = -1,
        sinks: F32 | None = None,
        with_mass: bool = True,
    ) -> tuple[F32, F32]:
        """Attention of one query a head over keys of the caller's choice.

        Args:
            q: (H, D), H as stored.
            indices: (H, K) positions; those outside of the prefix or its window are skipped, repeated ones count as
                often as they are given.
            counts: (H,) how many of them count.
            with_mass: compute the mass; it takes the logits of all keys.

        Returns:
            out (H, D), zeros where nothing was picked; and the share of the full softmax that the picked keys have
            (each once), (H,), or zeros without `with_mass`.
        """
        heads, dim = q.shape
        if indices.shape[0] != heads or counts.shape != (heads,):
            raise ValueError(f"q {q.shape}, indices {indices.shape} and counts {counts.shape} do not fit")
        found = self._use(sid, layer, heads, dim)
        first, count = self._first(found.shape[1], window), found.shape[1]
        where = [row[: int(used)].astype(np.int64) for row, used in zip(indices, counts, strict=True)]
        where = [row[(row >= first) & (row < count)] for row in where]
        queries = _scaled(q)
        sink = _sinks(sinks, (heads, 1, dim))
        out, lse = self._one(self.backend.picked(found.held, queries, where), sink)
        if not with_mass:
            return out, np.zeros(heads, np.float32)
        once = [np.unique(row) for row in where]
        if any(len(a) != len(b) for a, b in zip(once, where, strict=True)):
            _, lse = self._one(self.backend.picked(found.held, queries, once), sink)
        return out, _mass(lse, self._all(found, queries[:, None], first, sink)[:, 0])

    def query_sparse_auto(
        self,
        sid: bytes,
        layer: int,
        q: F32,
        block: int,
        k_top: int,
        h_kv: int,
        head_map: NDArray[Any],
        *,
        k_suf: F32 | None = None,
        v_suf: F32 | None = None,
        window: int = -1,
        selector: str = select.BLOCK_MEAN,
        sinks: F32 | None = None,
        with_mass: bool = True,
    ) -> tuple[F32, F32]:
        """Attention of one query a head over the blocks that matter most, and all of a suffix.

        All heads attend to the same blocks: the `k_top` with the highest scores and the last one.

        Args:
            q: (H_q, D).
            block: positions of a block.
            head_map: (H_q,) the head of K/V of each query head.
            k_suf, v_suf: (h_kv, S, D), seen as a whole.
            selector: `block_mean` or `quest`.

        Returns:
            out (H_q, D), and the share of the full softmax that what was seen has, (H_q,), as in `query_sparse`.
        """
        heads, dim = q.shape
        if block < 1 or k_top < 1 or selector not in select.SELECTORS:
            raise ValueError(f"block {block}, k_top {k_top} and selector {selector!r} are not possible")
        fold = _Fold(head_map, heads, h_kv)
        found = self._use(sid, layer, h_kv, dim)
        count = found.shape[1]
        first = self._first(count, window)
        queries = _scaled(q)
        runs = select.runs(self._blocks(found, queries, fold.head_map, block, k_top, selector), block, count, first)
        folded = fold.inward(queries[:, None])
        whole = runs == [(first, count)]
        if whole:
            prefix = self.backend.dense(found.held, folded, first)
        else:
            prefix = self.backend.dense(self.backend.taken(found.held, runs), folded)
        parts = [prefix]
        if k_suf is not None and v_suf is not None and k_suf.shape[1]:
            visible = np.full(folded.shape[1], k_suf.shape[1], np.int64)
            parts.append(self.backend.suffix(k_suf, v_suf, folded, visible))
        sink = _sinks(sinks, (heads, 1, dim))
        out, lse = with_sinks(fold.outward(merge(parts)), sink)
        if not with_mass:
            return out[:, 0], np.zeros(heads, np.float32)
        if whole:
            return out[:, 0], np.ones(heads, np.float32)
        everything = [(np.zeros_like(folded), self.backend.sums(found.held, folded, first)), *parts[1:]]
        _, full = with_sinks(fold.outward(merge(everything)), sink)
        return out[:, 0], _mass(lse[:, 0], full[:, 0])

    def _blocks(
        self, found: _Layer, queries: F32, head_map: Map, block: int, k_top: int, selector: str
    ) -> Sequence[int]:
        count = -(-found.shape[1] // block)
        if k_top >= count:
            return range(count)
        table = self._table(found, block, selector)
        if selector == select.QUEST:
            return select.best(select.quest_scores(queries, head_map, *table), k_top)
        return select.best(select.mean_scores(queries, head_map, *table), k_top)

    def _table(self, found: _Layer, block: int, selector: str) -> tuple[F32, ...]:
        """What the selector needs of each block; computed at the first query of a layer."""
        with self._lock:
            table = found.tables.get((block, selector))
        if table is not None:
            return table
        backend = self.backend
        made = backend.extremes(found.held, block) if selector == select.QUEST else (backend.means(found.held, block),)
        with self._lock:
            warm = any(layer is found for layer in self._warm.values())
            before = found.nbytes
            if warm and before + sum(array.nbytes for array in made) <= self.max_bytes:
                while len(found.tables) >= _TABLES:
                    found.tables.popitem(last=False)
                found.tables[(block, selector)] = made
                self._bytes += found.nbytes - before
                self._make_room(0, 0)
        return made

    def _one(self, part: Part, sink: F32 | None) -> Part:
        """`with_sinks` for one query a head."""
        out, lse = with_sinks((part[0][:, None], part[1][:, None]), sink)
        return out[:, 0], lse[:, 0]

    def _all(self, found: _Layer, queries: F32, first: int, sink: F32 | None) -> F32:
        """The lse over all keys that a query could see."""
        sums = self.backend.sums(found.held, queries, first)
        return with_sinks((np.zeros((*sums.shape, 1), np.float32), sums), sink)[1]


class _Fold:
    """Query heads that share a head of K/V become rows of it, so that nothing of K/V is repeated.

    Args:
        head_map: (H_q,) the head of K/V of each query head; heads need not have the same number.
    """

    def __init__(self, head_map: NDArray[Any], heads: int, kv_heads: int) -> None:
        self.head_map: Map = np.asarray(head_map, np.int64)
        if self.head_map.shape != (heads,) or self.head_map.min() < 0 or self.head_map.max() >= kv_heads:
            raise ValueError(f"head_map must be {heads} heads below {kv_heads}")
        each = np.bincount(self.head_map, minlength=kv_heads)
        self.share = int(each.max())
        self.kv_heads = kv_heads
        order = np.argsort(self.head_map, kind="stable")
        place = np.empty(heads, np.int64)
        place[order] = np.arange(heads) - np.repeat(np.cumsum(each) - each, each)
        self._place = place
        self._plain = bool((order == np.arange(heads)).all() and (each == self.share).all())

    def inward(self, q: F32) -> F32:
        """(H_q, M, D) to (H_kv, share * M, D); rows that no head fills are zeros."""
        _, rows, dim = q.shape
        if not self._plain:
            wide = np.zeros((self.kv_heads, self.share, rows, dim), np.float32)
            wide[self.head_map, self._place] = q
            q = wide
        return q.reshape(self.kv_heads, self.share * rows, dim)

    def outward(self, part: Part) -> Part:
        """The answer for such rows by query head: (H_q, M, D) and (H_q, M)."""
        out, lse = part
        dim = out.shape[2]
        out, lse = out.reshape(self.kv_heads, self.share, -1, dim), lse.reshape(self.kv_heads, self.share, -1)
        return out[self.head_map, self._place], lse[self.head_map, self._place]


def _scaled(q: F32) -> F32:
    scaled: F32 = q * np.float32(q.shape[-1] ** -0.5)
    return scaled


def _sinks(sinks: F32 | None, shape: Sequence[int]) -> F32 | None:
    """Sinks as (H, 1) or (H, M)."""
    if sinks is None:
        return None
    if sinks.shape not in ((shape[0],), (shape[0], shape[1])):
        raise ValueError(f"sinks {sinks.shape} must be one for each head, or for each of its queries")
    return sinks if sinks.ndim == 2 else sinks[:, None]


def _mass(part: F32, whole: F32) -> F32:
    """exp(part - whole), at most 1; 0 where nothing is seen."""
    with np.errstate(invalid="ignore"):
        share = np.exp(part - whole)
    clipped: F32 = np.minimum(np.where(part == -np.inf, np.float32(0), share), np.float32(1))
    return clipped
