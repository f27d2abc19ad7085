"""K/V that a GPU computes with as they are stored: what of a prefix can be held so, and rows of it as arrays.

Rows of a layer lie in *runs* of one format. K and V may be cut at different places, so they are held in *pieces*, in
each of which both sides are of one format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pion.limits import FORMATS
from pion.metal_kernels import attention_rows, run
from pion.metal_kernels.table import KEY_ROWS, Rows, bits_of, kernel_of, key_block_bytes
from pion.ref import quant

__all__ = ["HeldRows", "Piece", "Run", "StoredSide", "cuts", "rows_at", "turns_at"]

_WORDS: Final = {FORMATS["fp16"]: "float16", FORMATS["bf16"]: "bfloat16", FORMATS["fp32"]: "float32"}
_MOST_PIECES: Final = 16  # each is a call of the kernels: of a prefix in more, the rows are decoded


class Run(NamedTuple):
    """Neighbouring rows of one format: `rows` from position `start` on, `nbytes` stored bytes. Key forms: whole groups
    of 64 rows, of which the last may go beyond the prefix."""

    fmt: int
    start: int
    rows: int
    nbytes: int


class StoredSide(NamedTuple):
    """The keys or the values of a layer as they are stored.

    Attributes:
        theta: base of the rope that key forms leave out; 0 = none.
        runs: in order, without gaps.
        read: gives the bytes of all runs, one behind the other.
    """

    theta: float
    runs: Sequence[Run]
    read: Callable[[], Any]


class Cut(NamedTuple):
    """`rows` of one side from position `start` on: bytes [begin, end) of what `read` gives."""

    start: int
    rows: Rows
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows from position `start` on. Bytes are arrays of mlx (uint8); turns: `block_angles`, or None."""

    start: int
    key_rows: Rows
    keys: Any
    value_rows: Rows
    values: Any
    turns: Any

    @property
    def end(self) -> int:
        return self.start + self.key_rows.count

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes + (0 if self.turns is None else self.turns.nbytes))


@dataclass(frozen=True, slots=True)
class HeldRows:
    """One layer. `shape`: (H, N, D)."""

    shape: tuple[int, int, int]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(piece.nbytes for piece in self.pieces)


def is_keys(fmt: int) -> bool:
    """Whether it is a key form: groups of 64 rows."""
    return bits_of(fmt) > 0 and fmt & 255 >= 16


def cuts(heads: int, dim: int, count: int, keys: StoredSide, values: StoredSide) -> list[tuple[Cut, Cut]]:
    """The pieces of a layer of `count` rows.

    Raises:
        ValueError: the kernels do not read these rows, none is smaller than plain words, or there are too many pieces.
    """
    formats = [found.fmt for side in (keys, values) for found in side.runs]
    if all(fmt & 255 in _WORDS for fmt in formats):
        raise ValueError("plain words: arrays are as small")
    if any(is_keys(found.fmt) for found in values.runs):
        raise ValueError("values are not stored in key forms")
    edges = {0, count}
    for side in (keys, values):
        edges.update(found.start for found in side.runs if 0 < found.start < count)
    if len(edges) > _MOST_PIECES + 1:
        raise ValueError(f"rows of {len(edges) - 1} pieces: at most {_MOST_PIECES}")
    bounds = sorted(edges)
    out = []
    for start, end in itertools.pairwise(bounds):
        out.append((_cut(heads, dim, keys, start, end), _cut(heads, dim, values, start, end)))
    return out


def _cut(heads: int, dim: int, side: StoredSide, start: int, end: int) -> Cut:
    offset = 0
    for found in side.runs:
        if found.start <= start and end <= found.start + found.rows:
            return _of(heads, dim, side.theta, found, offset, start, end)
        offset += found.nbytes
    raise ValueError(f"rows {start} to {end} are missing")


def _of(heads: int, dim: int, theta: float, found: Run, offset: int, start: int, end: int) -> Cut:
    count, at = end - start, start - found.start
    if is_keys(found.fmt):
        if theta and found.fmt >> 8 != dim:
            raise ValueError(f"keys of heads of {found.fmt >> 8} values, turned, as heads of {dim}")
        rows = Rows(found.fmt, heads, dim, count, count, at % KEY_ROWS, bool(theta))
        size, first = key_block_bytes(rows), at // KEY_ROWS
        whole = found.rows // KEY_ROWS * size
    else:
        rows = Rows(found.fmt, heads, dim, count, count)
        attention_rows.stored_bytes(rows)
        size, first = quant.row_bytes(found.fmt, heads * dim), at
        whole = found.rows * size
    nbytes = attention_rows.stored_bytes(rows)
    if whole != found.nbytes:
        raise ValueError(f"{found.nbytes} bytes for {found.rows} rows that take {whole}")
    begin = offset + first * size
    return Cut(start, rows, begin, begin + nbytes)


def turns_at(turns: Any, blocks: NDArray[np.int64]) -> Any:
    """Cosines and sines (64 * blocks, 2, D // 2) of whole groups, out of `block_angles`."""
    import mlx.core as mx

    step, base = turns[:KEY_ROWS][None], turns[KEY_ROWS:][mx.array(blocks)][:, None]
    (c0, s0), (c1, s1) = ((side[:, :, 0], side[:, :, 1]) for side in (base, step))
    return mx.stack([c0 * c1 - s0 * s1, s0 * c1 + c0 * s1], axis=2).reshape(-1, 2, turns.shape[2])


def rows_at(held: HeldRows, where: NDArray[np.int64], how: str) -> tuple[Any, Any]:
    """Some rows as float32 arrays of mlx (H, len(where), D).

    Args:
        where: ascending positions, at least one.
        how: of `metal_kernels.decode`.
    """
    import mlx.core as mx

    parts = []
    for piece in held.pieces:
        own = where[(where >= piece.start) & (where < piece.end)] - piece.start
        if len(own):
            keys = _decoded(piece.keys, piece.key_rows, own, piece.turns, how)
            parts.append((keys, _decoded(piece.values, piece.value_rows, own, None, how)))
    k, v = (side[0] if len(side) == 1 else mx.concatenate(side, axis=1) for side in map(list, zip(*parts, strict=True)))
    return k, v


def _decoded(data: Any, rows: Rows, own: NDArray[np.int64], turns: Any, how: str) -> Any:
    """Rows `own` of a piece as float32 (H, len(own), D)."""
    import mlx.core as mx

    if is_keys(rows.fmt):
        at = rows.skip + own
        blocks, number = np.unique(at // KEY_ROWS, return_inverse=True)
        size = key_block_bytes(rows)
        count = len(blocks) * KEY_ROWS
        part = Rows(rows.fmt, rows.heads, rows.head_dim, count, count, 0, rows.turned)
        some = data.reshape(-1, size)[mx.array(blocks)].reshape(-1)
        found = run.decode(some, part, mx.float32, turns=None if turns is None else turns_at(turns, blocks), how=how)
        return found[0][:, mx.array(number * KEY_ROWS + at % KEY_ROWS)]
    some = data.reshape(rows.count, -1)[mx.array(own)]
    word = _WORDS.get(rows.fmt & 255)
    if word is not None:
        values = some.view(getattr(mx, word)).reshape(len(own), rows.heads, rows.head_dim)
        return values.transpose(1, 0, 2).astype(mx.float32)
    assert kernel_of(rows.fmt) is not None
    part = Rows(rows.fmt, rows.heads, rows.head_dim, len(own), len(own))
    return run.decode(some.reshape(-1), part, mx.float32, how=how)[0]
