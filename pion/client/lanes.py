"""Which way the bytes of a prefix come, and how they become the arrays of its rows:

    process     copies that this process keeps (local.py)
    map         the server's own file, mapped: for a server on this machine (mapped.py)
    tcp         over the connection, K and V of all layers in one flight, decoded by a second thread as they arrive
    export      a file that the server writes (V.EXPORT), as the published client has it; only when asked for

The first one that can be used is; ``PION_LANE`` in the environment forces one.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pion._core import headrows
from pion.client.address import Address
from pion.client.caches import Layout
from pion.client.connection import Command, Flight, Steps, raise_first
from pion.client.errors import IncompleteError, LaneError, PrefixMissError
from pion.client.exported import exported
from pion.client.formats import Sides, belongs
from pion.client.local import DEFAULT_BYTES, LocalCopies
from pion.client.mapped import MappedKV, NoDescriptorError, is_local, mapped
from pion.client.receive import Receiver
from pion.client.restore import Restorer

__all__ = ["LANES", "VARIABLE", "Lanes", "Pairs"]

log = logging.getLogger("pion.client")

VARIABLE: Final = "PION_LANE"
LANES: Final = ("process", "map", "tcp", "export")
_GROUP: Final = 8 << 20  # bytes of arrays that are made at a time
_AGAIN: Final = 60.0  # seconds after which a server that refused the lane is asked again

Pairs = list[tuple[Any, Any]]
"""(K, V) of each layer: mlx arrays (1, heads, tokens + ROOM, head_dim) that nobody else holds."""


class Lanes:
    """The ways to one server. Any thread.

    Args:
        address: the server.
        local_bytes: of the copies kept in this process.

    Attributes:
        forced: the only way that may be taken; empty: any.
        local: the copies kept in this process.
        used: how often each way was taken.

    Raises:
        ValueError: ``PION_LANE`` names none, or one that leads nowhere from here.
    """

    def __init__(self, address: Address, local_bytes: int = DEFAULT_BYTES) -> None:
        self.address = address
        self.local = LocalCopies(local_bytes)
        self.used = dict.fromkeys(LANES, 0)
        self._refused_until = 0.0
        self.forced = os.environ.get(VARIABLE, "").strip().lower()
        if self.forced and self.forced not in LANES:
            raise ValueError(f"{VARIABLE}={self.forced!r} is no way to get a prefix (want {', '.join(LANES)})")
        if self.forced in ("map", "export") and not is_local(address):
            raise ValueError(f"{VARIABLE}={self.forced}: {address} is not on this machine")
        if self.forced == "process" and not self.local.max_bytes:
            raise ValueError(f"{VARIABLE}=process: this process keeps no copies (local_bytes=0)")

    def fetch(
        self, ns: str, digest: str, infos: list[Any], formats: Sides, layout: Layout, count: int,
        ready: Callable[[int, Restorer], None] | None = None, *, whole: bool = True, offer: Any = None,
    ) -> Steps[Pairs]:  # fmt: skip
        """Rows of a prefix as arrays.

        Args:
            ns, digest: the prefix.
            infos: what V.INFO said of both sides: over a connection the rows count only if it says so behind them too.
            formats: of the layers, as V.INFO told them.
            layout, count: what is fetched: so many tokens of this model.
            ready: called for each layer when it is complete, over the connection while others arrive, with what to
                take it from; nothing is returned then.
            whole: these are all tokens of the prefix. A part of one comes over the connection.
            offer: what KV.PREFIX.LANE said, when it was asked already.

        Raises:
            IncompleteError: rows are missing, or the prefix was replaced meanwhile. No arrays were made.
            LaneError: the way that ``PION_LANE`` forces cannot be taken.
            CommandError: the server refused.
        """
        if not whole:
            part = yield from _received(ns, infos, formats, layout, count, ready)
            self.used["tcp"] += 1
            return part
        pairs: Pairs | None = self._kept(ns, digest, layout) if ready is None else None
        if pairs is None and self._may_map():
            pairs = yield from self._map(ns, digest, formats, layout, count, ready, offer)
        if pairs is None and self.forced == "export":
            pairs = yield from exported(ns, infos, layout, count)
            self.used["export"] += 1
            if ready is not None:
                raise LaneError(f"{VARIABLE}=export has no layers one by one")
        if pairs is None:
            pairs = yield from _received(ns, infos, formats, layout, count, ready)
            self.used["tcp"] += 1
        if ready is None:
            self.keep(ns, digest, pairs)
        return pairs

    # --- in this process ------------------------------------------------------------------------------------------

    def keep(self, ns: str, digest: str, pairs: Pairs) -> None:
        """Keep copies of a prefix that is used again and again."""
        if self._may_keep():
            self.local.put(ns, digest, [array for pair in pairs for array in pair])

    def _kept(self, ns: str, digest: str, layout: Layout) -> Pairs | None:
        if not self._may_keep():
            return None
        arrays = self.local.get(ns, digest)
        if arrays is not None and len(arrays) == 2 * layout.cache_len:
            self.used["process"] += 1
            return list(zip(arrays[::2], arrays[1::2], strict=True))
        return None

    # --- mapped ---------------------------------------------------------------------------------------------------

    def may_offer(self, ns: str, digest: str) -> bool:
        """Whether a lookup may as well ask for the file: it would be mapped."""
        return self._may_map() and not (self._may_keep() and self.local.has(ns, digest))

    def _may_keep(self) -> bool:
        return self.forced in ("", "process")

    def _may_map(self) -> bool:
        if self.forced:
            return self.forced == "map"
        return is_local(self.address) and time.monotonic() >= self._refused_until

    def _map(
        self, ns: str, digest: str, formats: Sides, layout: Layout, count: int,
        ready: Callable[[int, Restorer], None] | None, offer: Any,
    ) -> Steps[Pairs | None]:  # fmt: skip
        try:
            found = yield from mapped(ns, self.address, digest, count, offer)
        except PrefixMissError as error:
            raise IncompleteError(f"dropped behind the lookup: {error}") from error
        except LaneError as error:
            if self.forced:
                raise LaneError(f"{VARIABLE}=map: {error}") from error
            level = logging.WARNING if isinstance(error, NoDescriptorError) else logging.DEBUG
            log.log(level, "%s: no file is mapped (%s); rows come over the connection", self.address, error)
            self._refused_until = time.monotonic() + _AGAIN
            return None
        _check_formats(found, formats, layout)
        restorer = Restorer(layout, count)
        try:
            if ready is None:
                restorer.place_all(found.sides)
                pairs = restorer.finish()
            else:
                restorer.prepare()
                for layer in range(layout.cache_len):
                    for side in (0, 1):
                        restorer.place_pieces(side, layer, *found.sides[side][layer])
                    ready(layer, restorer)
                pairs = []
        except ValueError as error:
            raise IncompleteError(str(error)) from error
        self.used["map"] += 1
        return pairs


def _check_formats(found: MappedKV, formats: Sides, layout: Layout) -> None:
    for side, name in enumerate("KV"):
        if len(found.sides[side]) != layout.cache_len:
            raise IncompleteError(f"{len(found.sides[side])} layers of {name} are stored, not {layout.cache_len}")
        for layer, (stored, _) in enumerate(found.sides[side]):
            for segment in stored.segments:
                if not belongs(segment.fmt, formats[side][layer]):
                    raise IncompleteError("the prefix was replaced behind the lookup")


# --- over the connection ----------------------------------------------------------------------------------------------


def _received(
    ns: str, infos: list[Any], formats: Sides, layout: Layout, count: int,
    ready: Callable[[int, Restorer], None] | None,
) -> Steps[Pairs]:  # fmt: skip
    """One flight: rows of K and of V, and the description of the entry behind them."""
    layers, sids = layout.cache_len, (f"{ns}_pk".encode(), f"{ns}_pv".encode())

    def complete(layer: int) -> None:
        if ready is not None:
            ready(layer, restorer)

    restorer = Restorer(layout, count, ready=complete)

    # One by one, the layers alternate; a whole side in one answer costs both ends less.
    order = restorer.places if ready else sorted(restorer.places, key=lambda place: place[1])
    each = max(1, _GROUP // (restorer.nbytes_each or 1))
    made = 0

    def home(number: int, nbytes: int) -> Any:
        """Memory for an answer; arrays are made shortly before their rows arrive, and others while those are placed."""
        nonlocal made
        while made <= number and made < len(order):
            memory = restorer.prepare(order[made : made + each])
            made += each
            if memory:
                worker.submit(headrows.reserve, memory)
        return receiver(number, nbytes)

    def of_layer(number: int, _bulk: int, nbytes: int) -> Any:
        return home(number, nbytes)

    def of_side(side: int, bulk: int, nbytes: int) -> Any:
        return home(side * layers + bulk, nbytes) if bulk < layers else None

    def place(number: int, stored: Any, answer: memoryview) -> None:
        layer, side = order[number]
        restorer.place(side, layer, stored, answer)

    asked: list[Command]
    if ready:
        asked = [["V.FETCH", sids[side], layer, "RANGE", 0, count, "FMT", "RAW"] for layer, side in order]
    else:
        asked = [["V.FETCH", sid, "BATCH", 0, count, layers, "FMT", "RAW"] for sid in sids]
    outs = {number: functools.partial(of_layer if ready else of_side, number) for number in range(len(asked))}
    # The entry may be replaced at any time: the rows are those of `infos` only if it is the same behind them.
    infos_behind: list[Command] = [["V.INFO", sid] for sid in sids]
    with ThreadPoolExecutor(1, "pion place") as worker:
        receiver = Receiver(
            "K and V", len(order), count, layout.kv_dim, place, worker=worker,
            names=lambda number: f"layer {order[number][0]} of {'KV'[order[number][1]]}",
        )  # fmt: skip
        *answers, keys, values = yield Flight(asked + infos_behind, outs)
        raise_first([*answers, keys, values])
        wrong = receiver.finish([formats[side][layer] for layer, side in order])
    if [keys, values] != infos:
        raise IncompleteError("the prefix was replaced while it was fetched")
    if wrong:
        raise IncompleteError(wrong)
    return restorer.finish() if ready is None else []
