"""Sorted sets: members by score, then by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedList


class ZSet:
    """Members with scores, in the order (score, member). Scores are floats, infinities allowed, NaN not.

    Lookup of a score is O(1), everything that asks for or changes an order O(log n).
    """

    __slots__ = ("__weakref__", "_order", "_scores")

    def __init__(self, pairs: Iterable[tuple[bytes, float]] = ()) -> None:
        self._scores: dict[bytes, float] = dict(pairs)
        self._order: SortedList = SortedList((score, member) for member, score in self._scores.items())

    def __len__(self) -> int:
        return len(self._scores)

    def __iter__(self) -> Iterator[bytes]:
        """Members in no particular order."""
        return iter(self._scores)

    def __contains__(self, member: bytes) -> bool:
        return member in self._scores

    def __repr__(self) -> str:
        return f"ZSet({list(self.items())!r})"

    def items(self) -> Iterable[tuple[bytes, float]]:
        """(member, score) pairs in no particular order."""
        return self._scores.items()

    def score(self, member: bytes) -> float | None:
        """The score of a member, None when it is not in the set."""
        return self._scores.get(member)

    def add(self, member: bytes, score: float) -> bool:
        """Give a member this score; True when it is new.

        Raises:
            ValueError: the score is NaN, which has no place in an order.
        """
        if math.isnan(score):
            raise ValueError("a score must be a number")
        old = self._scores.get(member)
        if old is not None:
            if old == score:
                return False
            self._order.remove((old, member))
        self._scores[member] = score
        self._order.add((score, member))
        return old is None

    def remove(self, member: bytes) -> bool:
        """Take a member out; True when it was there."""
        score = self._scores.pop(member, None)
        if score is None:
            return False
        self._order.remove((score, member))
        return True

    def rank(self, member: bytes) -> int | None:
        """How many members stand before this one, None when it is not in the set."""
        score = self._scores.get(member)
        return None if score is None else int(self._order.bisect_left((score, member)))

    def slice(self, start: int, stop: int) -> list[tuple[float, bytes]]:
        """(score, member) at the ranks [start, stop), both at least 0."""
        return list(self._order.islice(start, stop))

    def first_rank(self, score: float, *, after: bool = False) -> int:
        """Rank of the first member with at least this score; with `after`, with a higher one."""
        if not after:
            return int(self._order.bisect_left((score,)))
        if score == math.inf:
            return len(self._order)
        return int(self._order.bisect_left((math.nextafter(score, math.inf),)))

    def first_name_rank(self, name: bytes, *, after: bool = False) -> int:
        """Rank of the first member named at least (with `after`: behind) `name`, where all scores are the same."""
        if not self._order:
            return 0
        lowest = self._order[0][0]
        return int(self._order.bisect_left((lowest, name + b"\0" if after else name)))
