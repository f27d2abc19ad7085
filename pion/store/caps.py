"""--max-sessions and --max-bytes: what makes room for a write, and when a write is refused.

Both hold at any moment. Whoever is about to write asks first, under the lock, for the blocks the write will take; what
compactions write and what readers hold of dropped files counts too.

A session that overwrites its rows leaves dead bytes behind, and they go only with a compaction, which needs room for a
copy of what lives. So a write that would take the last room for that copy waits for the compaction first
(CrowdedError), and no write is refused for its own entry's dead bytes as long as that copy fits under the cap. Nor do
others go for more of them than the copy takes.

Nobody goes for an entry that can never fit: what is declared to be too large is refused at once, and a record that
would make its entry alone larger than the cap leaves the others where they are.
"""

from __future__ import annotations

import logging
import resource
import time
from typing import TYPE_CHECKING, Final

from pion import limits
from pion.errors import CommandError, OutOfMemoryError, StorageError
from pion.store.entries import BLOCK, CrowdedError, Entry
from pion.store.order import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pion.store.files import Files
    from pion.store.layout import Declared, Side
    from pion.store.store import Totals

log = logging.getLogger("pion.store")

ROOM_TRIES: Final = 64  # compactions a write waits for
_SPARE_SHARE: Final = 32  # dead bytes of an entry are worth a copy from this part of what lives in it


def blocks(nbytes: int) -> int:
    """Bytes of the blocks that so many bytes take."""
    return (nbytes + BLOCK - 1) // BLOCK * BLOCK


def copy_size(entry: Entry) -> int:
    """Bytes a compaction of an entry will write at most: what lives, and 16 KiB for each 512 KiB, to which large
    records are aligned."""
    live = max(entry.size - (entry.rows.dead if entry.rows is not None else 0), 0)
    return blocks(live + live // 32 + BLOCK)


class Caps:
    """Mixed into `Store`.

    Attributes:
        max_sessions, max_bytes: the caps.
        unlisted: bytes of files that a listing after the start has not come to yet.
        evicted: entries that went for them.
        expired: entries whose time to live ended.
    """

    files: Files
    totals: Totals
    entries: dict[bytes, Entry]
    order: Order
    max_sessions: int
    max_bytes: int
    unlisted: int
    evicted = 0
    expired = 0

    if TYPE_CHECKING:

        def drop(self, entry: Entry, reason: str) -> None: ...
        def means_anew(self, entry: Entry, start: int | None) -> None: ...
        def held_bytes(self) -> int: ...

    def make_slots(self, sessions: int, keep: Entry | None = None, *, entries: int = 0) -> None:
        """Evict until this many more sessions and entries fit under --max-sessions (an entry may be state alone).

        Raises:
            CommandError: they never will.
        """
        most = self.max_sessions
        while self.totals.sessions + sessions > most or len(self.entries) + entries > most:
            if not self._evict(keep, f"--max-sessions {most}"):
                raise CommandError("ERR KV.PREFIX.REGISTER failed (no free V-store slots)")
        if not self.files.keeps:  # every entry is an open descriptor
            while len(self.entries) + entries > descriptor_cap() * 2:
                if not self._evict(keep, "the number of file descriptors"):
                    raise CommandError("ERR KV.PREFIX.REGISTER failed (no free V-store slots)")

    def make_room(self, nbytes: int, keep: Entry | None = None, *, own: bool = False) -> None:
        """Evict until this many more bytes fit under --max-bytes.

        Args:
            keep: an entry that stays.
            own: they are a record of `keep`, which its writer can write again after a compaction.

        Raises:
            OutOfMemoryError: all that is left is being written or read, leased or pinned. When it is known before that
                it would not do, nothing is evicted.
            CrowdedError: with `own`, dead bytes of `keep` take the room.
        """
        grow = blocks(nbytes)
        if keep is not None and keep.compacting and own:
            grow *= 2  # the compaction will copy it
        disk = keep.disk if keep is not None else 0
        total = self.totals.disk + self.unlisted
        if total + grow + (disk + grow + BLOCK if own else 0) <= self.max_bytes and not self.held_bytes():
            return
        held = self.held_bytes()
        stays = disk + held + self.unlisted + (self.order.pinned_bytes() if self.order.pins else 0)
        if keep is not None and keep.pinned:
            stays -= disk
        used = total + held
        reclaimable = False
        if own and keep is not None:
            if keep.compacting and used + grow > self.max_bytes:
                raise self._crowded(keep)  # there is more room when that has ended
            reclaimable = self._reclaimable(keep, stays)
            if reclaimable and self._copy_now(keep, grow, used, stays):
                raise self._crowded(keep)
        if not reclaimable and blocks(nbytes) + disk > self.max_bytes:
            raise OutOfMemoryError(
                f"OOM --max-bytes {self.max_bytes} is less than the {disk + blocks(nbytes)} bytes that this entry "
                "alone would take: nothing was evicted for it"
            )
        while self.totals.disk + self.unlisted + held + grow > self.max_bytes:
            if stays + grow > self.max_bytes or not self._evict(keep, f"--max-bytes {self.max_bytes}"):
                if reclaimable and keep is not None:
                    raise self._crowded(keep)
                raise OutOfMemoryError(self._full())

    def fit(self, sides: Sequence[Side | None], declared: Declared) -> None:
        """Refuse what can never be complete under --max-bytes, as far as its shape is declared.

        Raises:
            OutOfMemoryError: its rows take more. Nothing is evicted.
        """
        rows, layers = declared.rows or 0, declared.layers or 0
        nbytes = sum(side.stored_bytes(layer, rows) for side in sides if side is not None for layer in range(layers))
        if nbytes > self.max_bytes:
            raise OutOfMemoryError(
                f"OOM --max-bytes {self.max_bytes} is less than the {nbytes} bytes of this prefix ({layers} layers of "
                f"{rows} rows): nothing was evicted for it"
            )

    def _copy_now(self, entry: Entry, grow: int, used: int, stays: int) -> bool:
        """Whether an entry is to be compacted before it grows. What it writes may live on: then its copy grows too."""
        most, copy = self.max_bytes, copy_size(entry)
        dead = entry.rows.dead if entry.rows is not None else 0
        if stays + 2 * grow + copy > most:  # afterwards there would be no room for the copy, whoever goes
            return True
        if used + grow > most and dead >= copy:  # others would go for its dead bytes: fewer go for the copy
            return True
        return used + copy <= most < used + 2 * grow + copy and dead >= copy * limits.COMPACT_DEAD_SHARE

    def _full(self) -> str:
        return (
            f"OOM --max-bytes {self.max_bytes} is reached and nothing else can be evicted "
            "(what is left is pinned, leased, being written or being read)"
        )

    def _crowded(self, entry: Entry) -> CrowdedError:
        return CrowdedError(entry, self._full())

    def _reclaimable(self, entry: Entry, stays: int) -> bool:
        """Dead bytes of an entry are worth a compaction, there is room for one, and none has just failed."""
        rows = entry.rows
        if rows is None or entry.gone or rows.dead < max(BLOCK, (entry.size - rows.dead) // _SPARE_SHARE):
            return False
        return stays + copy_size(entry) <= self.max_bytes and time.monotonic() >= entry.strained

    def _evict(self, keep: Entry | None, cap: str) -> bool:
        def busy(entry: Entry) -> bool:
            return entry is keep or entry.writers > 0 or (entry.ref is not None and entry.ref.refs > 1)

        entry = self.order.first(busy)
        if entry is None:
            return False
        what = "a prefix that no other continues, " if entry.parent is not None else ""
        self.drop(entry, f"evicted: {cap} was reached, and this was {what}used longest ago")
        self.evicted += 1
        return True

    def expire(self, now_ms: int) -> None:
        """Drop what has reached the end of its time to live, pinned, leased or not: readers keep what they have."""
        for entry in self.order.due(now_ms):
            try:
                self.expire_one(entry)
            except StorageError as error:
                log.error("entry %r: %s", entry.name, error)

    def expire_one(self, entry: Entry) -> None:
        """The same of one entry. Raises StorageError."""
        self.drop(entry, "expired: the time to live that EXPIRE gave it has ended")
        self.means_anew(entry, None)
        self.expired += 1

    def enforce(self) -> None:
        """Bring what was found on disk under the caps. What is pinned stays; what needs room is then refused."""
        sessions, most = self.max_sessions, self.max_bytes
        while self.totals.sessions > sessions or len(self.entries) > sessions:
            if not self._evict(None, f"--max-sessions {sessions}"):
                log.warning("more than --max-sessions %d are pinned: they stay, and others are refused", sessions)
                break
        while self.totals.disk + self.held_bytes() > most:
            if not self._evict(None, f"--max-bytes {most}"):
                log.warning("more than --max-bytes %d are pinned: they stay, and what needs room is refused", most)
                break


def descriptor_cap() -> int:
    """Entry files that may be open at once: a quarter of what the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else max(8, min(soft, 1 << 18) // 4)
