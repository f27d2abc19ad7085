"""From rows as they are stored to the arrays of a prompt cache that decodes at native speed:

* their memory is filled where it is (blank.py), by compiled code, in huge pages and by several threads: the first touch
  of memory costs more than all else;
* arrays are as long as the prefix plus `ROOM` tokens. One of exactly n tokens would be copied as a whole at the first
  decoded token (57 to 118 ms for 2,048 tokens of a small model);
* nothing else refers to their buffers when they are handed out, for the same reason.

mlx is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from pion import metal_kernels
from pion._core import headrows
from pion.client.blank import Job, blank_arrays, filled_arrays
from pion.client.caches import Layout, mlx_modules
from pion.client.decode import CODES, NUMPY, Decoder, is_keys, wanted_part
from pion.wire.raw import Segment, Stored

__all__ = ["ROOM", "Restorer"]

Place = tuple[int, int]
"""Layer and side; 0 = K, 1 = V."""

ROOM: Final = 256  # tokens that can be appended without a copy: mlx-lm's own step


class Restorer:
    """Builds the arrays of a prompt cache from rows as they are stored, one layer-side at a time.

    On a GPU the stored bytes go there as they are, small where the format is, and are decoded there; on a CPU by the
    compiled decoders, in pieces that stay in its cache.

    Args:
        layout: what `caches.inspect_model` said.
        count: tokens of the prefix.
        how: decode by ``metal`` kernels, mlx ``ops``, or on the ``cpu``; None: what suits the machine.
        ready: called with the number of a layer when both of its sides are placed.
    """

    def __init__(
        self, layout: Layout, count: int, how: str | None = None, ready: Callable[[int], None] | None = None
    ) -> None:
        self._layout, self._count = layout, count
        self._arrays: dict[Place, Any] = {}
        self._mx, _ = mlx_modules()
        self._dtype = getattr(self._mx, layout.dtype)
        self._how = how or metal_kernels.backend() or "cpu"
        self._decoder = Decoder(layout.kv_dim, layout.dtype)
        self._blank: dict[Place, memoryview] = {}  # of arrays that wait for rows
        self._head_bytes = layout.head_dim * np.dtype(NUMPY[layout.dtype]).itemsize
        self._placed: set[Place] = set()
        self._ready = ready
        self._turns: dict[tuple[int, int, float], Any] = {}

    @property
    def places(self) -> list[Place]:
        """All (layer, side), the sides of a layer side by side."""
        return [(layer, side) for layer in range(self._layout.cache_len) for side in (0, 1)]

    @property
    def nbytes_each(self) -> int:
        """Bytes of one array."""
        return int(self._layout.n_kv_heads * (self._count + ROOM) * self._head_bytes)

    def prepare(self, places: Sequence[Place] | None = None) -> list[memoryview]:
        """Make the arrays of these places, or of all, where rows are decoded on the CPU. In the thread that mlx is used
        in, which need not be that of `place`.

        Returns:
            Their memory, for `reserve`.
        """
        wanted = [place for place in places or self.places if place not in self._arrays]
        if self._how != "cpu" or not wanted:
            return []
        return self._take(wanted, blank_arrays(self._shapes(wanted)))

    def _shapes(self, places: Sequence[Place]) -> list[tuple[tuple[int, ...], str]]:
        layout = self._layout
        shape = (1, layout.n_kv_heads, self._count + ROOM, layout.head_dim)
        return [(shape, layout.dtype)] * len(places)

    def _take(self, places: Sequence[Place], made: tuple[list[Any], list[memoryview]]) -> list[memoryview]:
        self._arrays.update(zip(places, made[0], strict=True))
        self._blank.update(zip(places, made[1], strict=True))
        return made[1]

    def place_all(self, sides: Sequence[Sequence[tuple[Stored, Sequence[memoryview]]]]) -> None:
        """Place the rows of all layers of K and of V, which are in memory already, by several threads.

        Args:
            sides: of each layer what it holds, its segments counted from the beginning of the bytes, and the pieces
                that the bytes are in.

        Raises:
            ValueError: as in `place`.
        """
        if self._how == "cpu" and self._layout.cache_len:
            self._fill(sides)
        if len(self._placed) < 2 * self._layout.cache_len:
            headrows.reserve(list(self._blank.values()))
        for side, layers in enumerate(sides):
            for layer, (stored, pieces) in enumerate(layers):
                if (layer, side) not in self._placed:
                    self.place_pieces(side, layer, stored, pieces)

    def _fill(self, sides: Sequence[Sequence[tuple[Stored, Sequence[memoryview]]]]) -> None:
        """Make the arrays, and place what is in the words of the model already."""
        places = self.places
        words: dict[Place, list[tuple[int, memoryview]]] = {}
        for layer, side in places:
            stored, pieces = sides[side][layer]
            self._check(layer, stored)
            if (rows := self._words(stored, pieces)) is not None:
                words[layer, side] = rows

        def jobs(number: int, view: memoryview) -> list[Job]:
            rows = words.get(places[number])
            return [] if rows is None else [(view, rows)]

        self._take(places, filled_arrays(self._shapes(places), jobs, self._layout.n_kv_heads, self._head_bytes))
        self._placed.update(words)

    def place_pieces(self, side: int, layer: int, stored: Stored, pieces: Sequence[memoryview]) -> None:
        """`place` for bytes in several pieces, with segments counted from their beginning."""
        self.place(side, layer, stored, pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))

    def _words(self, stored: Stored, pieces: Sequence[memoryview]) -> list[tuple[int, memoryview]] | None:
        """The pieces as (first row, rows), when all of them are rows in the words of the model."""
        code, row = CODES[self._layout.dtype], self._layout.n_kv_heads * self._head_bytes
        if any(segment.fmt != code or segment.missing for segment in stored.segments):
            return None
        out, first = [], 0
        for piece in pieces:
            if len(piece) % row:
                return None
            out.append((first, piece))
            first += len(piece) // row
        if first != self._count:
            raise ValueError(f"{first} rows came, not {self._count}")
        return out

    def _check(self, layer: int, stored: Stored) -> None:
        if (stored.start, stored.rows, stored.dim) != (0, self._count, self._layout.kv_dim):
            got = f"rows {stored.start} to {stored.start + stored.rows} of {stored.dim} values"
            raise ValueError(f"layer {layer}: {got}, not 0 to {self._count} of {self._layout.kv_dim}")
        if any(segment.missing for segment in stored.segments):
            raise ValueError(f"layer {layer}: rows are missing")

    def place(self, side: int, layer: int, stored: Stored, answer: memoryview) -> None:
        """Decode the rows of a layer into its array.

        Args:
            side: 0 = K, 1 = V.
            layer: from 0.
            stored: what `answer` holds; rows 0 to `count`.
            answer: an answer to FMT RAW; it may be overwritten afterwards.

        Raises:
            ValueError: these are not `count` rows of this model, or of a format this version does not know.
        """
        self._check(layer, stored)
        if self._how != "cpu" and all(self._on_gpu(segment, stored.theta) for segment in stored.segments):
            self._arrays[layer, side] = self._gathered(stored, answer)
        else:
            self._lay_out(layer, side, stored, answer)
        self._placed.add((layer, side))
        if self._ready is not None and (layer, 1 - side) in self._placed:
            self._ready(layer)

    def _lay_out(self, layer: int, side: int, stored: Stored, answer: memoryview) -> None:
        layout, count = self._layout, self._count
        if (layer, side) not in self._blank:
            self.prepare([(layer, side)])
        if (layer, side) not in self._blank:  # one that the GPU's kernels do not take
            arrays, views = blank_arrays([((1, layout.n_kv_heads, count + ROOM, layout.head_dim), layout.dtype)])
            self._arrays[layer, side], self._blank[layer, side] = arrays[0], views[0]
        out = self._blank[layer, side]
        for first, rows in self._decoder.pieces(stored, answer):
            headrows.put(out, first, rows.data, layout.n_kv_heads, self._head_bytes)
        headrows.clear(out, count, count + ROOM, layout.n_kv_heads, self._head_bytes)

    # --- on a GPU -------------------------------------------------------------------------------------------------

    def _on_gpu(self, segment: Segment, theta: float) -> bool:
        if theta and is_keys(segment.fmt):  # the kernel turns the heads it writes
            return segment.fmt >> 8 == self._layout.head_dim > 1
        return segment.fmt in CODES.values() or metal_kernels.kernel_of(segment.fmt) is not None

    def _gathered(self, stored: Stored, answer: memoryview) -> Any:
        """The array of a layer, put together of its segments; nothing is computed yet."""
        heads, size = self._layout.n_kv_heads, self._layout.head_dim
        parts = [self._decoded(segment, stored, answer, len(stored.segments) == 1) for segment in stored.segments]
        room = self._count + ROOM - sum(part.shape[2] for part in parts)
        if room:
            parts.append(self._mx.zeros((1, heads, room, size), self._dtype))
        return parts[0] if len(parts) == 1 else self._mx.concatenate(parts, axis=2)

    def _decoded(self, segment: Segment, stored: Stored, answer: memoryview, alone: bool) -> Any:
        mx, layout = self._mx, self._layout
        first, last = wanted_part(segment, stored)
        data = np.frombuffer(answer[segment.offset : segment.offset + segment.nbytes], np.uint8)
        name = next((name for name, code in CODES.items() if code == segment.fmt), None)
        if name is not None:
            words = mx.array(data.view(np.uint16 if name == "bfloat16" else NUMPY[name]))
            words = words.view(mx.bfloat16) if name == "bfloat16" else words
            rows = words.reshape(-1, layout.n_kv_heads, layout.head_dim)[first:last]
            return rows.astype(self._dtype).transpose(1, 0, 2)[None]
        start, turns = segment.start + first, None
        if is_keys(segment.fmt):
            data = data[: len(data) // (segment.rows // 64) * -(-last // 64)]
            if stored.theta:
                turns = self._angles(start, last - first, stored.theta)
        rows = metal_kernels.Rows(
            segment.fmt,
            layout.n_kv_heads,
            layout.head_dim,
            last - first,
            self._count + ROOM if alone else last - first,
            skip=first if is_keys(segment.fmt) else 0,
            turned=turns is not None,
        )
        return metal_kernels.decode(mx.array(data), rows, self._dtype, turns=turns, how=self._how)

    def _angles(self, first: int, count: int, theta: float) -> Any:
        """The same for all layers: computed and sent once."""
        known = self._turns.get((first, count, theta))
        if known is None:
            known = self._mx.array(metal_kernels.angles(first, count, theta, self._layout.head_dim))
            self._turns[first, count, theta] = known
        return known

    def finish(self) -> list[tuple[Any, Any]]:
        """(K, V) of each layer, evaluated: mlx arrays (1, heads, `count` + `ROOM`, head_dim) that nobody else holds.

        Raises:
            ValueError: a layer-side was never placed.
        """
        wanted = [(layer, side) for layer in range(self._layout.cache_len) for side in (0, 1)]
        missing = [place for place in wanted if place not in self._placed]
        if missing:
            raise ValueError(f"{len(missing)} of {len(wanted)} layer-sides are missing")
        self._mx.eval(list(self._arrays.values()))
        return [self.take(layer) for layer in range(self._layout.cache_len)]

    def take(self, layer: int) -> tuple[Any, Any]:
        """(K, V) of one layer that is placed; nothing here refers to them afterwards."""
        for side in (0, 1):
            self._blank.pop((layer, side), None)
        pair = self._arrays.pop((layer, 0)), self._arrays.pop((layer, 1))
        self._mx.eval(pair)
        return pair
