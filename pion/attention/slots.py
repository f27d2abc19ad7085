"""The K/V in memory: warm, cold and missing layers.

A layer is *warm* (its K/V are in memory), *cold* (they went for others and only its shape is remembered) or *missing*.
Warm layers are bounded in number and in bytes; the least recently used goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from pion.errors import AttentionMissError, ColdMissError

__all__ = ["COLD", "HIT", "MISS", "Layer", "Shape", "Slots"]

HIT: Final = "HIT"
COLD: Final = "COLD"
MISS: Final = "MISS"

_TABLES: Final = 2  # block tables kept of a layer: a client asks with one block size and one selector
Key = tuple[bytes, int]
Shape = tuple[int, int, int]


@dataclass(eq=False, slots=True)
class Layer:
    """One warm layer. `held` never changes, so a query goes on with it whatever happens to the table meanwhile."""

    shape: Shape
    held: Any
    tables: OrderedDict[tuple[int, str], tuple[Any, ...]] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        return int(self.held.nbytes + sum(array.nbytes for table in self.tables.values() for array in table))


class Slots:
    """See the module text. Methods may be called from any thread.

    Args:
        warm_slots, cold_slots: layers in memory; layers that are remembered.
        max_bytes: of the layers in memory.
    """

    def __init__(self, warm_slots: int, cold_slots: int, max_bytes: int) -> None:
        self.warm_slots, self.cold_slots, self.max_bytes = warm_slots, cold_slots, max_bytes
        self._lock = threading.Lock()
        self._warm: OrderedDict[Key, Layer] = OrderedDict()  # the least recently used first
        self._cold: OrderedDict[Key, Shape] = OrderedDict()
        self._bytes = 0
        self._demotions = self._rehydrates = self._queries = 0

    def put(self, key: Key, made: Layer) -> None:
        """Make a layer warm, in place of what was there; the least recently used go for it."""
        with self._lock:
            if self._cold.pop(key, None) is not None:
                self._rehydrates += 1
            self._forget(key)
            self._make_room(1, made.nbytes)
            self._warm[key] = made
            self._bytes += made.nbytes

    def _forget(self, key: Key) -> None:
        layer = self._warm.pop(key, None)
        if layer is not None:
            self._bytes -= layer.nbytes

    def _make_room(self, slots: int, nbytes: int) -> None:
        while self._warm and (len(self._warm) + slots > self.warm_slots or self._bytes + nbytes > self.max_bytes):
            key, layer = self._warm.popitem(last=False)
            self._bytes -= layer.nbytes
            self._cold[key] = layer.shape
            self._demotions += 1
            while len(self._cold) > self.cold_slots:
                self._cold.popitem(last=False)

    def use(self, key: Key, heads: int, dim: int) -> Layer:
        """The layer for a query, now the most recently used.

        Raises:
            ColdMissError: cold.
            AttentionMissError: missing, or of another shape.
        """
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

    def state(self, key: Key) -> str:
        """`HIT`, `COLD` or `MISS`. No use is noted."""
        with self._lock:
            return HIT if key in self._warm else COLD if key in self._cold else MISS

    def shape(self, key: Key) -> Shape | None:
        """(H, N, D) of a layer that is warm or cold."""
        with self._lock:
            found = self._warm.get(key)
            return found.shape if found is not None else self._cold.get(key)

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

    def sessions(self) -> set[bytes]:
        """The sessions that have layers, warm or cold."""
        with self._lock:
            return {sid for sid, _ in (*self._warm, *self._cold)}

    def of(self, sid: bytes) -> dict[int, tuple[str, Shape]]:
        """State and shape of each layer of a session."""
        with self._lock:
            found = {key[1]: (HIT, layer.shape) for key, layer in self._warm.items() if key[0] == sid}
            found |= {key[1]: (COLD, shape) for key, shape in self._cold.items() if key[0] == sid}
        return dict(sorted(found.items()))

    def table(self, layer: Layer, name: tuple[int, str]) -> tuple[Any, ...] | None:
        """The block table of that name, if it is kept."""
        with self._lock:
            return layer.tables.get(name)

    def keep_table(self, layer: Layer, name: tuple[int, str], table: tuple[Any, ...]) -> None:
        """Keep a block table with its layer, if that is still warm; it counts as memory of the layer."""
        with self._lock:
            before = layer.nbytes
            fits = before + sum(array.nbytes for array in table) <= self.max_bytes
            if fits and any(warm is layer for warm in self._warm.values()):
                layer.tables.pop(name, None)
                while len(layer.tables) >= _TABLES:
                    layer.tables.popitem(last=False)
                layer.tables[name] = table
                self._bytes += layer.nbytes - before
                self._make_room(0, 0)

    def info(self) -> dict[str, int | str]:
        """Figures: slots, bytes, what moved."""
        with self._lock:
            return {
                "sdpa_warm": len(self._warm),
                "sdpa_cold": len(self._cold),
                "sdpa_demotions": self._demotions,
                "sdpa_rehydrates": self._rehydrates,
                "sdpa_warm_bytes": self._bytes,
                "sdpa_queries": self._queries,
            }
