"""From rows as they are stored to the arrays of a prompt cache that decodes at native speed:

* arrays are as long as the prefix plus `ROOM` tokens. One of exactly n tokens would be copied as a whole at the first
  decoded token (57 to 118 ms for 2,048 tokens of a small model);
* nothing else refers to their buffers when they are handed out, for the same reason.

mlx is imported inside functions.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from pion import metal_kernels
from pion.client.caches import Layout, mlx_modules
from pion.client.decode import CODES, NUMPY, Decoder, is_keys, wanted_part
from pion.wire.raw import Segment, Stored

__all__ = ["ROOM", "Restorer"]

ROOM: Final = 256  # tokens that can be appended without a copy: mlx-lm's own step


class Restorer:
    """Builds the arrays of a prompt cache from rows as they are stored, one layer-side at a time.

    On a GPU the stored bytes go there as they are, small where the format is, and are decoded there; on a CPU by the
    compiled decoders, in pieces that stay in its cache.

    Args:
        layout: what `caches.inspect_model` said.
        count: tokens of the prefix.
        how: decode by ``metal`` kernels, mlx ``ops``, or on the ``cpu``; None: what suits the machine.
    """

    def __init__(self, layout: Layout, count: int, how: str | None = None) -> None:
        self._layout, self._count = layout, count
        self._arrays: dict[tuple[int, int], Any] = {}
        self._mx, _ = mlx_modules()
        self._dtype = getattr(self._mx, layout.dtype)
        self._how = how or metal_kernels.backend() or "cpu"
        self._decoder = Decoder(layout.kv_dim, layout.dtype)
        self._stage: np.ndarray[Any, Any] | None = None
        self._turns: dict[tuple[int, int, float], Any] = {}

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
        if (stored.start, stored.rows, stored.dim) != (0, self._count, self._layout.kv_dim):
            got = f"rows {stored.start} to {stored.start + stored.rows} of {stored.dim} values"
            raise ValueError(f"layer {layer}: {got}, not 0 to {self._count} of {self._layout.kv_dim}")
        if any(segment.missing for segment in stored.segments):
            raise ValueError(f"layer {layer}: rows are missing")
        if self._how != "cpu" and all(self._on_gpu(segment, stored.theta) for segment in stored.segments):
            self._arrays[layer, side] = self._gathered(stored, answer)
        else:
            self._arrays[layer, side] = self._laid_out(stored, answer)

    def _laid_out(self, stored: Stored, answer: memoryview) -> Any:
        layout, count = self._layout, self._count
        if self._stage is None:
            # Laid out here, then copied: half as many passes over fresh memory as filling an mlx array in place.
            self._stage = np.zeros((1, layout.n_kv_heads, count + ROOM, layout.head_dim), NUMPY[layout.dtype])
        stage = self._stage[0]
        for first, rows in self._decoder.pieces(stored, answer):
            heads = rows.reshape(len(rows), layout.n_kv_heads, layout.head_dim)
            np.copyto(stage[:, first : first + len(rows)], heads.swapaxes(0, 1))
        return self._mx.array(self._stage)

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
        missing = [place for place in wanted if place not in self._arrays]
        if missing:
            raise ValueError(f"{len(missing)} of {len(wanted)} layer-sides are missing")
        for place in wanted:
            if self._arrays[place].dtype != self._dtype:  # numpy has no bfloat16: u16 until here
                self._arrays[place] = self._arrays[place].view(self._dtype)
        self._mx.eval(list(self._arrays.values()))
        layers = range(self._layout.cache_len)
        return [(self._arrays.pop((layer, 0)), self._arrays.pop((layer, 1))) for layer in layers]
