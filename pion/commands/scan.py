"""Cursors inside one value (HSCAN, ZSCAN): elements ordered by a hash of their name.

The cursor is a place in the hash order, so every element that is there from the first call to the last is returned,
whatever is added or removed meanwhile. The sorted list of a value is kept between calls only to save time: without it
(evicted, other value under the key) it is made again and the walk goes on at the same place.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

_SMALL = 512  # as Redis, small values come in one answer
_KEPT = 16  # walks at a time that stay fast


class ScanCache:
    """The sorted elements of the values that are being walked."""

    def __init__(self) -> None:
        self._walks: OrderedDict[int, tuple[Any, list[tuple[int, bytes]]]] = OrderedDict()

    def step(self, value: Any, names: Iterable[bytes], size: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """One call of a walk.

        Args:
            value: the object walked; its identity ties calls together.
            names: its elements, iterated only when the sorted list has to be made.
            size: how many there are.
            cursor: 0 = a new walk, else what the last call returned.
            count: about how many to return.

        Returns:
            (next cursor, 0 = the end; names, some of which may have been removed since).
        """
        if size <= _SMALL and cursor == 0:
            return 0, list(names)
        ident = id(value)
        held = self._walks.get(ident)
        if cursor == 0 or held is None or held[0] is not value:
            held = (value, sorted((zlib.crc32(name), name) for name in names))
            self._walks[ident] = held
        self._walks.move_to_end(ident)
        order = held[1]
        start = bisect_left(order, (cursor, b""))
        end = min(start + count, len(order))
        while 0 < end < len(order) and order[end][0] == order[end - 1][0]:
            end += 1
        found = [name for _, name in order[start:end]]
        if end >= len(order):
            del self._walks[ident]
            return 0, found
        while len(self._walks) > _KEPT:
            self._walks.popitem(last=False)
        return order[end][0], found
