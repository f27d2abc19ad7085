"""Which entry is evicted next: the least recently used one that no other continues.

PARENT makes lineage. A child's rows continue its parent's and are of no use without them, so an entry goes only when
its children are gone, and a use of a child is one of all its ancestors. What is pinned, leased, written to or read
stays, and so do its ancestors, which are no leaves as long as it is there.

Leaves wait in a heap under the number of their last use, as far as the heap knows it: a use only changes the entry. One
that comes up with an old number goes back with its new one, so a use costs nothing here and an eviction O(log n).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from pion.store import layout
from pion.store.entries import Entry

MAX_LINEAGE: Final = 64  # ancestors refreshed by one use
MAX_LEASES: Final = 65_536


class Uses(Protocol):
    """Numbers the uses of entries; knows those that compiled code answered by itself."""

    def next_use(self, least: int = 0) -> int: ...
    def table_used(self, name: bytes) -> int: ...


class Counter:
    """Numbers of uses for a store without a keyspace."""

    def __init__(self) -> None:
        self._last = 0

    def next_use(self, least: int = 0) -> int:
        """A number above all that were given out, and above `least`."""
        self._last = max(self._last, least) + 1
        return self._last

    def table_used(self, name: bytes) -> int:
        """Nothing is probed."""
        return 0


class Leases:
    """Names that clients asked to be kept for a time, each with the end (monotonic seconds) of each client's lease.

    In memory only: a restart ends them.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, dict[object, float]] = {}
        self.now: Callable[[], float] = time.monotonic

    def __len__(self) -> int:
        for key in list(self._held):
            self._living(key)
        return len(self._held)

    def _living(self, key: bytes) -> dict[object, float]:
        held = self._held.get(key)
        if held is None:
            return {}
        now = self.now()
        for owner in [owner for owner, end in held.items() if end <= now]:
            del held[owner]
        if not held:
            del self._held[key]
        return held

    def remaining(self, key: bytes) -> float:
        """Seconds until the last lease of a name ends; 0 without one."""
        held = self._living(key) if self._held else None
        return max(held.values()) - self.now() if held else 0.0

    def others(self, key: bytes, owner: object) -> bool:
        """Somebody else has a lease of the name."""
        return any(other != owner for other in self._living(key))

    def grant(self, key: bytes, owner: object, seconds: float) -> bool:
        """Give, prolong or shorten a lease; 0 seconds end it. False: there are too many."""
        held = self._living(key)
        if seconds <= 0:
            held.pop(owner, None)
            self._living(key)
            return True
        if key not in self._held and len(self._held) >= MAX_LEASES and len(self) >= MAX_LEASES:
            return False
        self._held.setdefault(key, held)[owner] = self.now() + seconds
        return True


class Order:
    """The order of last use of the entries of a store, their lineage, and what keeps them. All under the store's lock.

    Args:
        entries: the store's.
    """

    def __init__(self, entries: dict[bytes, Entry]) -> None:
        self.uses: Uses = Counter()
        self.leases = Leases()
        self.pins: set[Entry] = set()
        self._entries = entries
        self._children: dict[bytes, set[Entry]] = {}
        self._heap: list[tuple[int, int, Entry]] = []
        self._due: list[tuple[int, int, Entry]] = []
        self._tie = itertools.count()
        self._loops = False  # lineage that came from files may run in a circle

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """An entry is there, or is described anew after a `remove`."""
        if entry.pinned:
            self.pins.add(entry)
        if entry.expires and entry.timed != entry.expires:
            entry.timed = entry.expires
            heapq.heappush(self._due, (entry.expires, next(self._tie), entry))
            if len(self._due) > self._most():
                self._due = [item for item in self._due if item[0] == item[2].expires and not item[2].gone]
                heapq.heapify(self._due)
        if entry.parent is not None:
            self._children.setdefault(layout.PREFIX + entry.parent, set()).add(entry)
        self._queue(entry)

    def remove(self, entry: Entry) -> None:
        """An entry is gone, or is about to be described anew."""
        self.pins.discard(entry)
        if entry.parent is None:
            return
        key = layout.PREFIX + entry.parent
        children = self._children.get(key, set())
        children.discard(entry)
        if not children:
            self._children.pop(key, None)
            parent = self._entries.get(key)
            if parent is not None:
                self._queue(parent)

    def _queue(self, entry: Entry) -> None:
        if not entry.queued and not entry.pinned and not self.children(entry):
            entry.queued = True
            heapq.heappush(self._heap, (entry.used, next(self._tie), entry))
            if len(self._heap) > self._most():
                self._heap = [item for item in self._heap if not item[2].gone]
                heapq.heapify(self._heap)

    def _most(self) -> int:
        """Items of a heap from which on those of entries that are gone are taken out."""
        return 2 * len(self._entries) + 64

    def from_files(self) -> None:
        """Lineage was read that no REGISTER has checked for circles."""
        self._loops = True

    # --- lineage ----------------------------------------------------------------------------------------------------

    def children(self, entry: Entry) -> int:
        """How many entries continue this one."""
        found = self._children.get(entry.key)
        return len(found) - (entry in found) if found else 0

    def ancestors(self, entry: Entry) -> Iterator[Entry]:
        """Parent, its parent, ...: those that are there, each once."""
        seen = {entry.key}
        parent = entry.parent
        while parent is not None:
            key = layout.PREFIX + parent
            above = self._entries.get(key)
            if above is None or key in seen:
                return
            seen.add(key)
            yield above
            parent = above.parent

    def circular(self, ns: bytes, parent: bytes) -> bool:
        """Whether `ns` is `parent` or one of its ancestors, stored or only named."""
        seen: set[bytes] = set()
        name: bytes | None = parent
        while name is not None and name not in seen:
            if name == ns:
                return True
            seen.add(name)
            above = self._entries.get(layout.PREFIX + name)
            name = above.parent if above is not None else None
        return False

    def used(self, entry: Entry, number: int) -> list[Entry]:
        """Note a use of an entry and its ancestors; those that were changed."""
        changed = (
            [entry, *itertools.islice(self.ancestors(entry), MAX_LINEAGE)] if entry.parent is not None else [entry]
        )
        for one in changed:
            one.used = max(one.used, number)
        return changed

    def catch_up(self, entry: Entry) -> list[Entry]:
        """Note the uses that compiled code answered by itself; those that were changed."""
        if not entry.is_prefix:
            return []
        number = self.uses.table_used(entry.name)
        return self.used(entry, number) if number > entry.used else []

    # --- going first ------------------------------------------------------------------------------------------------

    def first(self, busy: Callable[[Entry], bool]) -> Entry | None:
        """The entry to evict next, None when all that are left are kept.

        Args:
            busy: entries that may not go at the moment.
        """
        heap = self._heap
        aside: list[tuple[int, int, Entry]] = []
        found: Entry | None = None
        while heap and found is None:
            item = heapq.heappop(heap)
            used, _, entry = item
            if self._entries.get(entry.key) is not entry or entry.pinned or self.children(entry):
                entry.queued = False  # it comes back with `add` or `remove`
                continue
            self.catch_up(entry)
            if entry.used > used:
                heapq.heappush(heap, (entry.used, next(self._tie), entry))
                continue
            aside.append(item)
            if not busy(entry) and not self.leases.remaining(entry.key):
                found = entry
        for item in aside:
            heapq.heappush(heap, item)
        if found is None and self._loops:
            found = self._in_circles(busy)
            self._loops = found is not None
        return found

    def _in_circles(self, busy: Callable[[Entry], bool]) -> Entry | None:
        """The least recently used entry above which nothing is kept: there is one only where lineage runs in circles,
        for otherwise it would have a leaf."""
        kept: set[Entry] = set()
        for entry in self._entries.values():
            if entry.pinned or busy(entry) or self.leases.remaining(entry.key):
                kept.add(entry)
                kept.update(self.ancestors(entry))
        left = [entry for entry in self._entries.values() if entry not in kept]
        return min(left, key=lambda entry: entry.used, default=None)

    def pinned_bytes(self) -> int:
        """On disk, of what is pinned."""
        return sum(entry.disk for entry in self.pins)

    # --- the end of a time to live ----------------------------------------------------------------------------------

    def due(self, now_ms: int) -> list[Entry]:
        """The entries whose time to live has ended."""
        out = []
        while self._due and self._due[0][0] <= now_ms:
            when, _, entry = heapq.heappop(self._due)
            if entry.timed == when:
                entry.timed = 0
            if entry.expires == when and self._entries.get(entry.key) is entry:
                out.append(entry)
        return out
