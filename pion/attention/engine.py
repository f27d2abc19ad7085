"""K/V by session and layer, and attention over it: the slots, a backend, and what queries mean.

Nothing here survives the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pion import limits
from pion.attention import select
from pion.attention.backends import AtOnce, Backend, make
from pion.attention.fold import Fold, fold_of
from pion.attention.merge import F32, Part, merge, with_sinks
from pion.attention.slots import COLD, HIT, MISS, Layer, Shape, Slots

if TYPE_CHECKING:
    from pion.attention.metal_rows import StoredSide

__all__ = ["COLD", "HIT", "MISS", "AttentionEngine", "supported"]


def supported(dim: int) -> bool:
    """Whether heads may have this size."""
    return 0 < dim <= limits.ATTEND_MAX_HEAD_DIM and dim % limits.ATTEND_HEAD_DIM_STEP == 0


_NO_ANSWER: Final = (
    "no answer in fp32: K, V, the query or its sinks hold NaN or infinity, or values so large that their products do"
)
Method = TypeVar("Method", bound=Callable[..., Any])


def _quietly(method: Method) -> Method:
    """What overflows is found in the answer, see `_numbers`; numpy need not warn of it."""

    @functools.wraps(method)
    def quiet(*args: Any, **named: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return method(*args, **named)

    return cast(Method, quiet)


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
        self.slots = Slots(warm_slots, cold_slots, max_bytes)

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
        self._check_size(2 * heads * count * dim * (2 if self.half else 4))
        if self.half and not (np.abs(k).max() <= limits.FP16_MAX and np.abs(v).max() <= limits.FP16_MAX):
            raise ValueError(f"values beyond {limits.FP16_MAX:g} do not fit into half precision")
        self.slots.put((sid, layer), Layer(shape, self.backend.hold(k, v)))

    def store_rows(
        self, sid: bytes, layer: int, heads: int, dim: int, count: int, keys: StoredSide, values: StoredSide
    ) -> bool:
        """Take over a layer as its rows are stored, in place of what was there, where the backend computes with such
        rows: they take the memory of their format, and answers are those over the decoded rows, to the rounding of
        fp32.

        Args:
            heads, dim: of a row.
            count: rows.
            keys, values: what they are; they are read only if they are taken.

        Returns:
            Whether they were taken over; if not, `store` them decoded.

        Raises:
            ValueError: the head size is not supported, or they are more than `max_bytes`.
        """
        backend = self._at_once
        if backend is None:
            return False
        if not supported(dim):
            raise ValueError(f"unsupported D? supported: {limits.ATTEND_HEAD_DIMS}")
        self._check_size(sum(run.nbytes for side in (keys, values) for run in side.runs))
        held = backend.hold_rows(heads, dim, count, keys, values)
        if held is None:
            return False
        self._check_size(held.nbytes)  # with what it needs besides
        self.slots.put((sid, layer), Layer((heads, count, dim), held))
        return True

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self.slots.max_bytes:
            raise ValueError(f"{nbytes} bytes are more than --attend-max-bytes {self.slots.max_bytes}")

    @property
    def _at_once(self) -> AtOnce | None:
        return cast(AtOnce, self.backend) if self.backend.at_once else None

    def lookup(self, sid: bytes, layer: int) -> str:
        """`HIT` (warm), `COLD` or `MISS`. No use is noted."""
        return self.slots.state((sid, layer))

    def shape(self, sid: bytes, layer: int) -> Shape | None:
        """(H, N, D) of a layer that is warm or cold."""
        return self.slots.shape((sid, layer))

    def drop(self, sid: bytes) -> int:
        """Forget all layers of a session, warm and cold; how many there were."""
        return self.slots.drop(sid)

    def sessions(self) -> set[bytes]:
        """The sessions that have layers, warm or cold."""
        return self.slots.sessions()

    def layers(self, sid: bytes) -> dict[int, tuple[str, Shape]]:
        """State and shape of each layer of a session."""
        return self.slots.of(sid)

    def info(self) -> dict[str, int | str]:
        """Figures: slots, bytes, what moved, and the backend."""
        return {**self.slots.info(), "sdpa_backend": self.backend.name, "sdpa_device": self.backend.device}

    def _first(self, count: int, window: int) -> int:
        """The first position that a window leaves: -1 = the engine's own, 0 = none."""
        window = self.window if window < 0 else window
        return max(0, count - window) if window else 0

    # --- queries ------------------------------------------------------------------------------------------------------

    @_quietly
    def query(self, sid: bytes, layer: int, q: F32, *, window: int = -1, sinks: F32 | None = None) -> Part:
        """Attention over the whole prefix, or its window.

        Args:
            q: (H, M, D), H as stored.
            window: see `_first`.
            sinks: (H,) or (H, M) logits of attention sinks; they count in the lse.

        Returns:
            out (H, M, D) and lse (H, M), natural logarithm.

        Raises (this and the following): ColdMissError, AttentionMissError; ValueError, also where an answer would hold
            NaN or infinity.
        """
        heads, _, dim = q.shape
        found = self.slots.use((sid, layer), heads, dim)
        part = self.backend.dense(found.held, _scaled(q), self._first(found.shape[1], window))
        return _with_sinks(part, _sinks(sinks, q.shape))

    @_quietly
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
        fold = fold_of(head_map, heads, kv_heads)
        found = self.slots.use((sid, layer), kv_heads, dim)
        first = self._first(found.shape[1], window)
        part = self._over_both(found, fold.inward(_scaled(q)), (k_suf, v_suf) if suffix else None, rows, first)
        return _with_sinks(fold.outward(part), _sinks(sinks, q.shape))[0]

    def _over_both(self, found: Layer, queries: F32, suffix: tuple[F32, F32] | None, rows: int, first: int) -> Part:
        """Attention over the prefix from `first` on, and causally over a suffix: queries (H, share * rows, D)."""
        if suffix is None:
            return self.backend.dense(found.held, queries, first)
        backend = self._at_once
        if backend is not None:
            return backend.fused(found.held, queries, *suffix, rows, first)
        count = suffix[0].shape[1]
        visible = np.minimum(max(count - rows, 0) + np.arange(rows) + 1, count)
        own = self.backend.suffix(*suffix, queries, np.tile(visible, queries.shape[1] // rows))
        return merge([self.backend.dense(found.held, queries, first), own])

    @_quietly
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
        found = self.slots.use((sid, layer), heads, dim)
        first, count = self._first(found.shape[1], window), found.shape[1]
        where = [row[: int(used)].astype(np.int64) for row, used in zip(indices, counts, strict=True)]
        where = [row[(row >= first) & (row < count)] for row in where]
        queries = _scaled(q)
        sink = _sinks(sinks, (heads, 1, dim))
        some = np.array([len(row) > 0 for row in where])
        out, lse = self._one(_numbers(self.backend.picked(found.held, queries, where), some), sink)
        if not with_mass:
            return out, np.zeros(heads, np.float32)
        once = [np.unique(row) for row in where]
        if any(len(a) != len(b) for a, b in zip(once, where, strict=True)):
            _, lse = self._one(self.backend.picked(found.held, queries, once), sink)
        return out, _mass(lse, self._all(found, queries[:, None], first, sink)[:, 0])

    @_quietly
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
        fold = fold_of(head_map, heads, h_kv)
        found = self.slots.use((sid, layer), h_kv, dim)
        count = found.shape[1]
        first = self._first(count, window)
        queries = _scaled(q)
        folded = fold.inward(queries[:, None])
        suffix = (k_suf, v_suf) if k_suf is not None and v_suf is not None and k_suf.shape[1] else None
        sink = _sinks(sinks, (heads, 1, dim))
        whole = k_top >= -(-count // block)
        if whole:
            part = fold.outward(self._over_both(found, folded, suffix, 1, first))
        else:
            part = self._over_blocks(found, queries, fold, block, k_top, selector, suffix, first)
        out, lse = _with_sinks(part, sink, whole)
        if not with_mass:
            return out[:, 0], np.zeros(heads, np.float32)
        if whole:
            return out[:, 0], np.ones(heads, np.float32)
        everything = [(np.zeros_like(folded), self.backend.sums(found.held, folded, first))]
        if suffix is not None:
            everything.append(self._suffix(suffix, folded))
        _, full = with_sinks(fold.outward(merge(everything)), sink)
        return out[:, 0], _mass(lse[:, 0], full[:, 0])

    def _over_blocks(
        self, found: Layer, queries: F32, fold: Fold, block: int, k_top: int, selector: str,
        suffix: tuple[F32, F32] | None, first: int,
    ) -> Part:  # fmt: skip
        """Attention of queries (H_q, D) over chosen blocks and all of a suffix: (H_q, 1, D) and (H_q, 1)."""
        backend, table = self._at_once, self._table(found, block, selector)
        if backend is not None:
            out, lse = backend.sparse(
                found.held, queries, fold.head_map, table, block, k_top, selector, suffix, first
            )  # fmt: skip
            return out[:, None], lse[:, None]
        scores = (select.quest_scores if selector == select.QUEST else select.mean_scores)(
            queries, fold.head_map, *table
        )
        runs = select.runs(select.best(scores, k_top), block, found.shape[1], first)
        folded = fold.inward(queries[:, None])
        parts = [self.backend.over(found.held, folded, runs)]
        if suffix is not None:
            parts.append(self._suffix(suffix, folded))
        return fold.outward(merge(parts))

    def _suffix(self, suffix: tuple[F32, F32], queries: F32) -> Part:
        """Attention over all of a suffix."""
        visible = np.full(queries.shape[1], suffix[0].shape[1], np.int64)
        return self.backend.suffix(*suffix, queries, visible)

    def _table(self, found: Layer, block: int, selector: str) -> tuple[Any, ...]:
        """What the selector needs of each block; computed at the first query of a layer."""
        table = self.slots.table(found, (block, selector))
        if table is None:
            table = self.backend.table(found.held, block, selector)
            self.slots.keep_table(found, (block, selector), table)
        return table

    def _one(self, part: Part, sink: F32 | None) -> Part:
        """`with_sinks` for one query a head."""
        out, lse = _with_sinks((part[0][:, None], part[1][:, None]), sink, False)
        return out[:, 0], lse[:, 0]

    def _all(self, found: Layer, queries: F32, first: int, sink: F32 | None) -> F32:
        """The lse over all keys that a query could see."""
        sums = self.backend.sums(found.held, queries, first)
        return with_sinks((np.zeros((*sums.shape, 1), np.float32), sums), sink)[1]


def _scaled(q: F32) -> F32:
    scaled: F32 = q * np.float32(q.shape[-1] ** -0.5)
    return scaled


def _numbers(part: Part, some: NDArray[np.bool_] | bool = True) -> Part:
    """The part, if it is made of numbers.

    Args:
        some: whether a key was seen: only else may the lse be -inf.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    out, lse = part
    if not (np.isfinite(out).all() and (np.isfinite(lse) | (np.logical_not(some) & (lse < 0))).all()):
        raise ValueError(_NO_ANSWER)
    return part


def _with_sinks(part: Part, sinks: F32 | None, some: bool = True) -> Part:
    """`with_sinks` of numbers, see `_numbers`."""
    part = _numbers(part, some)
    return part if sinks is None else _numbers(with_sinks(part, sinks), some)


def _sinks(sinks: F32 | None, shape: Sequence[int]) -> F32 | None:
    """Sinks as (H, 1) or (H, M)."""
    if sinks is None:
        return None
    if sinks.shape not in ((shape[0],), (shape[0], shape[1])):
        raise ValueError(f"sinks {sinks.shape} must be one for each head, or for each of its queries")
    return sinks if sinks.ndim == 2 else sinks[:, None]


def _mass(part: F32, whole: F32) -> F32:
    """exp(part - whole), at most 1; 0 where nothing is seen."""
    share = np.where(part == -np.inf, np.float32(0), np.exp(part - whole))
    if np.isnan(share).any():  # keys that were not picked hold what is no number
        raise ValueError(_NO_ANSWER)
    clipped: F32 = np.minimum(share, np.float32(1))
    return clipped
