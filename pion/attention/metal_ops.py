"""The backend for Apple's GPUs: the kernels of `pion.metal_kernels`, over arrays and over rows as they are stored.

What the kernels do not take (`pion.metal_kernels.unfit`) their twins in MLX operations compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion import limits, metal_kernels
from pion.attention import metal_rows, select
from pion.attention.merge import F32, Part, nothing
from pion.attention.metal_rows import HeldRows, Piece, StoredSide
from pion.attention.mlx_ops import Held, MlxBackend
from pion.metal_kernels import Stats
from pion.metal_kernels.device import Device

__all__ = ["MetalBackend"]

_PIECE: Final = 8192  # rows that are decoded at a time for statistics

Both = Held | HeldRows


class MetalBackend(MlxBackend):
    """See the module text.

    Args:
        half: hold K/V in half precision; the kernels compute in fp32.
        how: ``metal``, or ``ops`` for the kernels' twins, on machines without Metal; a test may name another device.
    """

    name = "metal"
    at_once = True

    def __init__(self, half: bool = False, how: str | Device = "metal") -> None:
        super().__init__(half)
        self.how = how

    # --- holding ------------------------------------------------------------------------------------------------------

    def hold_rows(self, heads: int, dim: int, count: int, keys: StoredSide, values: StoredSide) -> HeldRows | None:
        """Rows of a layer as they are stored; None when the kernels do not read them. `count` rows of heads * dim."""
        try:
            pairs = metal_rows.cuts(heads, dim, count, keys, values)
        except ValueError:
            return None
        data = [np.frombuffer(side.read(), np.uint8) for side in (keys, values)]
        mx, pieces = self.mx, []
        with self._lock:
            for key, value in pairs:
                sides = [mx.array(raw[cut.begin : cut.end]) for raw, cut in zip(data, (key, value), strict=True)]
                turns = None
                if key.rows.turned:
                    turns = mx.array(metal_kernels.block_angles(key.start, key.rows.count, keys.theta, dim))
                pieces.append(Piece(key.start, key.rows, sides[0], value.rows, sides[1], turns))
            mx.eval([array for piece in pieces for array in (piece.keys, piece.values)])
        return HeldRows((heads, count, dim), tuple(pieces))

    # --- computing ----------------------------------------------------------------------------------------------------

    def _how(self, held: Both, queries: Sequence[int], **more: int) -> Any:
        """Kernels, or their twins where a kernel does not take the call."""
        heads, stored, _ = held.shape if isinstance(held, HeldRows) else held.keys.shape
        if isinstance(held, HeldRows):
            more["nbytes"] = max(side.nbytes for piece in held.pieces for side in (piece.keys, piece.values))
        q_heads, length, dim = queries
        return "ops" if metal_kernels.unfit(q_heads, length, dim, heads, stored, **more) is not None else self.how

    def _array(self, values: NDArray[Any]) -> Any:
        return self.mx.array(np.ascontiguousarray(values))

    def _suffix(self, suffix: tuple[F32, F32], held: Both) -> list[Any] | None:
        """Keys and values of a suffix as the kernels take them beside `held`; None: in a pass of their own, since they
        are not as what is held, or half precision does not hold them."""
        if isinstance(held, HeldRows) or (
            self.kind == self.mx.float16 and not all((np.abs(side) <= limits.FP16_MAX).all() for side in suffix)
        ):
            return None
        return [self._array(side).astype(self.kind) for side in suffix]

    def _alone(self, q: Any, suffix: tuple[F32, F32], head_map: Any, how: Any) -> tuple[Any, Any]:
        """Attention of q (H_q, M, D) over a suffix alone."""
        none = self.mx.zeros((suffix[0].shape[0], 0, q.shape[2]))
        given = [self._array(side) for side in suffix]
        return metal_kernels.fused(q, none, none, *given, scale=1.0, head_map=head_map, how=how)

    def dense(self, held: Both, queries: F32, first: int = 0) -> Part:
        """Attention of queries (H, R, D) over the keys from `first` on: out (H, R, D), lse (H, R)."""
        with self._lock:
            return self._numpy(self._dense(held, self._array(queries), first))

    def _dense(self, held: Both, q: Any, first: int) -> tuple[Any, Any]:
        how = self._how(held, q.shape)
        if isinstance(held, HeldRows):
            return self._joined(self._parts(held, q, first, how), how)
        window = held.keys.shape[1] - first if first else 0
        return metal_kernels.dense(q, held.keys, held.values, scale=1.0, window=window, how=how)

    def _parts(self, held: HeldRows, q: Any, first: int, how: Any) -> list[tuple[Any, Any]]:
        """Attention over each piece."""
        return [
            metal_kernels.dense_rows(
                q, piece.keys, piece.key_rows, piece.values, piece.value_rows, turns=piece.turns, scale=1.0,
                window=piece.end - first if first > piece.start else 0, how=how,
            )
            for piece in held.pieces
            if piece.end > first
        ]  # fmt: skip

    def _joined(self, parts: list[tuple[Any, Any]], how: Any) -> tuple[Any, Any]:
        if len(parts) == 1:
            return parts[0]
        outs, sums = (self.mx.stack(list(side)) for side in zip(*parts, strict=True))
        return metal_kernels.merge(outs, sums, how=how)

    def fused(self, held: Both, queries: F32, keys: F32, values: F32, length: int, first: int = 0) -> Part:
        """Attention over what is held and over a suffix in one pass.

        Args:
            held: the prefix.
            queries: (H, share * length, D); of each `length` rows, row m sees the suffix up to position
                max(S - length, 0) + m.
            keys, values: (H, S, D) of the suffix.
            length: rows of a query head.
            first: of the positions of the prefix that are seen.

        Returns:
            out (H, share * length, D), lse (H, share * length).
        """
        heads, rows, dim = queries.shape
        with self._lock:
            q = self._array(queries).reshape(heads * rows // length, length, dim)
            suffix = self._suffix((keys, values), held)
            how = self._how(held, q.shape, suffix=keys.shape[1])
            if suffix is None or isinstance(held, HeldRows):
                parts = [self._dense(held, q, first), self._alone(q, (keys, values), None, how)]
                out, lse = self._numpy(self._joined(parts, how))
            else:
                window = held.keys.shape[1] - first if first else 0
                out, lse = self._numpy(metal_kernels.fused(q, *held, *suffix, scale=1.0, window=window, how=how))
            return out.reshape(queries.shape), lse.reshape(heads, rows)

    def sums(self, held: Both, queries: F32, first: int = 0) -> F32:
        """The lse (H, R) of `dense` alone."""
        with self._lock:
            q = self._array(queries)
            if isinstance(held, HeldRows):
                return np.array(self._dense(held, q, first)[1])
            window = held.keys.shape[1] - first if first else 0
            return np.array(metal_kernels.logsum(q, held.keys, scale=1.0, window=window, how=self._how(held, q.shape)))

    # --- some of the keys ---------------------------------------------------------------------------------------------

    def over(self, held: Both, queries: F32, runs: Sequence[tuple[int, int]]) -> Part:
        """Attention of queries (H, R, D) over the keys at some positions, given as runs [start, end)."""
        where = np.concatenate([np.arange(*run) for run in runs])
        with self._lock:
            if isinstance(held, HeldRows):
                return self._numpy(self._dense(self._some(held, where), self._array(queries), 0))
            q = self._array(queries).reshape(-1, queries.shape[2])
            places = self._array(where.astype(np.int32))
            how = self._how(held, (len(q), 1, q.shape[1]), picked=len(where))
            out, lse = self._numpy(
                metal_kernels.gather_blocks(q, held.keys, held.values, places, 1, scale=1.0, how=how)
            )
            return out.reshape(queries.shape), lse.reshape(queries.shape[:2])

    def sparse(
        self,
        held: Both,
        queries: F32,
        head_map: NDArray[np.int64],
        table: tuple[Any, ...],
        block: int,
        k_top: int,
        selector: str,
        suffix: tuple[F32, F32] | None,
        first: int,
    ) -> Part:
        """Choose blocks and attend to them and to a suffix, without a detour through this process's memory.

        Args:
            queries: (H_q, D).
            head_map: (H_q,) the head of keys of each.
            table: what `table` gave for `block` and `selector`.
            k_top: blocks, fewer than there are.
            suffix: keys and values (H, S, D), seen as a whole.
            first: of the positions of the prefix that are seen.

        Returns:
            out (H_q, D), lse (H_q,).
        """
        heads, dim = queries.shape
        stats = Stats(table[0], table[0], table[-1])
        blocks = stats.mean.shape[1]
        tail = 0 if suffix is None else suffix[0].shape[1]
        with self._lock:
            q = self._array(queries)
            how = self._how(held, (heads, 1, dim), blocks=blocks)
            chosen = metal_kernels.select(
                q, stats, k_top, selector=selector, scale=1.0, head_map=head_map, how=how
            )  # fmt: skip
            parts = []
            more = self._suffix(suffix, held) if suffix is not None else []
            if suffix is not None and more is None:
                parts.append(self._alone(q[:, None], suffix, head_map, how))
            if isinstance(held, HeldRows):
                numbers = np.array(chosen)
                found = select.runs(numbers[numbers >= 0].tolist(), block, held.shape[1], first)
                some = self._some(held, np.concatenate([np.arange(*run) for run in found]))
                how = self._how(some, (heads, 1, dim))
                parts.append(metal_kernels.dense(q[:, None], *some, scale=1.0, head_map=head_map, how=how))
            else:
                window = held.keys.shape[1] - first if first else 0
                how = self._how(held, (heads, 1, dim), suffix=tail, picked=k_top + 1, block=block)
                out, lse = metal_kernels.gather_blocks(
                    q, *held, chosen, block, *(more or []), scale=1.0, window=window, head_map=head_map, how=how
                )
                parts.append((out[:, None], lse[:, None]))
            out, lse = self._numpy(self._joined(parts, how))
            return out[:, 0], lse[:, 0]

    def picked(self, held: Both, queries: F32, positions: Sequence[NDArray[np.int64]]) -> Part:
        """Attention of one query a head, (H, D), over the keys at its own positions: out (H, D), lse (H,)."""
        counts = np.array([len(row) for row in positions], np.uint32)
        if not counts.any():
            return nothing(queries.shape)
        heads, dim = queries.shape
        with self._lock:
            if isinstance(held, HeldRows):
                some = np.unique(np.concatenate(positions))
                positions = [np.searchsorted(some, row) for row in positions]
                held = self._some(held, some)
            table = np.zeros((heads, counts.max()), np.int32)
            for row, where in zip(table, positions, strict=True):
                row[: len(where)] = where
            how = self._how(held, (heads, 1, dim), picked=table.size)
            given = self._array(table), self._array(counts)
            return self._numpy(metal_kernels.gather(self._array(queries), *held, *given, scale=1.0, how=how))

    def table(self, held: Both, block: int, selector: str) -> tuple[Any, ...]:
        """What `selector` needs of each block of `block` positions, on the device: (H, blocks, D) each."""
        with self._lock:
            stats = self._stats(held, block)
            found = (stats.low, stats.high) if selector == select.QUEST else (stats.mean,)
            self.mx.eval(found)
            return found

    def means(self, held: Both, block: int) -> F32:
        """The mean key of each block of `block` positions: (H, blocks, D)."""
        with self._lock:
            return np.array(self._stats(held, block).mean)

    def extremes(self, held: Both, block: int) -> tuple[F32, F32]:
        """The least and the greatest value of each channel in each block: (H, blocks, D) both."""
        with self._lock:
            stats = self._stats(held, block)
            return np.array(stats.low), np.array(stats.high)

    def _stats(self, held: Both, block: int) -> Stats:
        if not isinstance(held, HeldRows):
            return metal_kernels.block_stats(held.keys, block, how=self._how(held, (1, 1, held.keys.shape[2])))
        step, count = max(1, _PIECE // block) * block, held.shape[1]
        parts = []
        for start in range(0, count, step):
            some = self._some(held, np.arange(start, min(start + step, count)))
            parts.append(self._stats(some, block))
            self.mx.eval(list(parts[-1]))  # else all rows would be decoded at once
        return Stats(*(self.mx.concatenate(list(side), axis=1) for side in zip(*parts, strict=True)))

    def _some(self, held: HeldRows, where: NDArray[np.int64]) -> Held:
        """Rows at ascending positions, decoded."""
        how = self.how if isinstance(self.how, str) else "ops"
        return Held(*metal_rows.rows_at(held, where, how))

    def _numpy(self, part: tuple[Any, Any]) -> Part:
        self.mx.eval(*part)
        return np.array(part[0]), np.array(part[1])
