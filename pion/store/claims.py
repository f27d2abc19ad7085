"""Writes that wait until removed files are freed, in the order of their coming.

Each has evicted as much as it needs, so together they have room once all of it is free. Who comes later takes none of
it before: the blocks that are free already belong to the first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from pion.store.entries import CrowdedError, Entry
    from pion.store.store import Store

COMPACTIONS: Final = 64  # that a write waits for,
ROOM_PATIENCE: Final = 20.0  # and seconds after which it is refused,
BUSY_PATIENCE: Final = 3.0  # or when there will only be room if others end to write or read


class Claims:
    """The claims of one store. Its lock is held in every call."""

    def __init__(self) -> None:
        self._order: dict[Claim, None] = {}

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, claim: Claim) -> None:
        """Behind all others, or where it stands."""
        self._order.setdefault(claim)

    def ahead(self, claim: Claim) -> int:
        """Bytes claimed by those before it."""
        total = 0
        for other in self._order:
            if other is claim:
                break
            total += other.nbytes
        return total

    def remove(self, claim: Claim) -> None:
        self._order.pop(claim, None)

    def first(self) -> Claim | None:
        """Whose turn it is."""
        return next((claim for claim in self._order if claim.nbytes), None)

    def besides(self, key: bytes) -> tuple[int, int]:
        """Bytes claimed for other writes than the first that waits for this entry: (of those before it; of all)."""
        ahead = total = 0
        mine = False
        for claim in self._order:
            if not mine and claim.key == key and claim.nbytes:
                mine, ahead = True, total
            else:
                total += claim.nbytes
        return (ahead if mine else total), total

    def meet(self, key: bytes) -> None:
        """The first write that waits for this entry has its room."""
        for claim in self._order:
            if claim.key == key and claim.nbytes:
                claim.nbytes = 0
                return


class Claim:
    """A context around the tries of one write that was answered CrowdedError.

    Attributes:
        key: of the entry that is written.
        nbytes: for which others were evicted; 0: none, or it has its room.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keep: Entry | None = None
        self.key = b""
        self.nbytes = 0
        self._began = time.monotonic()
        self._compactions = 0

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._store.lock:
            self._store.claims.remove(self)
            self._protect(None)

    def _protect(self, entry: Entry | None) -> None:
        """The entry that is written to does not go for the room of others."""
        if self._keep is not None:
            self._keep.waiting -= 1
        self._keep = entry
        if entry is not None:
            entry.waiting += 1

    def renew(self, crowded: CrowdedError) -> None:
        """What the write has just been answered."""
        self._compactions += crowded.entry is not None
        with self._store.lock:
            self._protect(crowded.keep)
            self.key, self.nbytes = crowded.key, crowded.nbytes if crowded.evicted else 0
            if crowded.entry is None:
                self._store.claims.add(self)
            else:
                self._store.claims.remove(self)

    def due(self, crowded: CrowdedError) -> bool:
        """Whether it is worth a try: it is this write's turn, or nothing is being freed any more."""
        store = self._store
        with store.lock:
            if crowded.entry is not None or not crowded.evicted or not store.gone_bytes()[1]:
                return True
            return store.fits_now(self.nbytes + store.claims.ahead(self))

    def over(self, crowded: CrowdedError) -> bool:
        """Whether it has waited long enough: it is refused."""
        patience = BUSY_PATIENCE if crowded.busy else ROOM_PATIENCE
        return self._compactions > COMPACTIONS or time.monotonic() - self._began > patience
