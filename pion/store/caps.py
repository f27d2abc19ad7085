"""--max-sessions and --max-bytes: what makes room for a write, and when a write is refused.

Both hold at any moment. Whoever is about to write asks first, under the lock, for the blocks the write will take; what
compactions write counts too, and so do removed files, until nobody reads them and their blocks are free. A write that
needs those blocks waits for them (CrowdedError): nobody else goes for it.

A session that overwrites its rows leaves dead bytes behind, and they go only with a compaction, which needs room for a
copy of what lives. So a write that would take the last room for that copy, or for moving the bodies that are arriving,
waits for the compaction first (CrowdedError), and no write is refused for dead bytes, its own entry's or another's, as
long as that copy fits under the cap. Nor do others go for more of them than the copy takes. When the compaction has
failed, such a write is refused: else there would be no room for it ever after.

Nor are rows replaced that no compaction could clear away afterwards.

Nobody goes for an entry that can never fit: what is declared to be too large is refused at once, and a record that
would make its entry alone larger than the cap leaves the others where they are.
"""

from __future__ import annotations

import logging
import resource
import time
from typing import TYPE_CHECKING, Final

from pion import limits
from pion._core import stream
from pion.errors import CommandError, OutOfMemoryError, StorageError
from pion.store.entries import BLOCK, CrowdedError, Entry
from pion.store.order import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pion.store.claims import Claims
    from pion.store.files import Files
    from pion.store.layout import Declared, Side
    from pion.store.store import Totals

log = logging.getLogger("pion.store")

_SEARCH_EVERY: Final = 0.1
_TIGHT: Final = 0.2  # seconds after a write that could not have room in which nobody goes before it is known to do
_SETTLE: Final = 0.5  # seconds that a record which had to be written waits at most until it stands below the cap
_SPARE_SHARE: Final = 32  # dead bytes of an entry are worth a copy from this part of what lives in it


def blocks(nbytes: int) -> int:
    """Bytes of the blocks that so many bytes take."""
    return (nbytes + BLOCK - 1) // BLOCK * BLOCK


def copy_size(entry: Entry) -> int:
    """Bytes a compaction of an entry will write at most: what lives, and 16 KiB for each 512 KiB, to which large
    records are aligned."""
    live = max(entry.size - (entry.rows.dead if entry.rows is not None else 0), 0)
    return blocks(live + live // 32 + BLOCK)


def worth_copying(entry: Entry) -> bool:
    """Whether an entry has so many dead bytes that a copy of the rest is worth its while."""
    rows = entry.rows
    return rows is not None and not entry.gone and rows.dead >= max(BLOCK, (entry.size - rows.dead) // _SPARE_SHARE)


class Caps:
    """Mixed into `Store`.

    Attributes:
        max_sessions, max_bytes: the caps.
        unlisted: bytes of files that a listing after the start has not come to yet.
        claims: writes that wait until removed files are freed.
        searched: until then (monotonic seconds), and until more records than so many have been written, no entry with
            dead bytes is looked for: there was none.
        tight: until then (monotonic seconds) nobody goes for a write before it is known that it would do.
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
    claims: Claims
    searched = (0.0, 0)
    tight = 0.0
    appended: int
    evicted = 0
    expired = 0

    if TYPE_CHECKING:

        def drop(self, entry: Entry, reason: str) -> None: ...
        def means_anew(self, entry: Entry, start: int | None) -> None: ...
        def gone_bytes(self) -> tuple[int, int]: ...
        def is_lent(self, entry: Entry) -> bool: ...
        def in_use(self) -> Iterable[Entry]: ...

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

    def make_room(
        self,
        nbytes: int,
        keep: Entry | None = None,
        *,
        own: bool = False,
        over: bool = False,
        again: bool = False,
        key: bytes = b"",
    ) -> None:
        """Evict until this many more bytes fit under --max-bytes.

        Args:
            keep: an entry that stays.
            own: they are a record of `keep`, which its writer can write again after a compaction.
            over: with `own`: it replaces rows, or may: others of its layer are arriving.
            again: whoever asks can do it again after a compaction of another entry; implied by `own`.
            key: of the entry that is made.

        Raises:
            OutOfMemoryError: all that is left is being written or read, leased or pinned, or `keep` could not be
                compacted. When it is known before that it would not do, nothing is evicted.
            CrowdedError: removed files take the room, or with `own` or `again` dead bytes.
        """
        most, grow, disk, moving = self.max_bytes, blocks(nbytes), 0, 0
        total = self.totals.disk + self.unlisted
        if keep is not None:
            disk = keep.disk
            if own:
                moving = sum(sink.reserved for sink in keep.open)  # bodies may have to stand behind later ones
                grow *= 2 if keep.compacting else 1  # the compaction will copy it
        key = key if keep is None else keep.key
        ahead, claimed = self.claims.besides(key) if self.claims else (0, 0)
        held, freeing = self.gone_bytes()
        if total + held + freeing + claimed + grow + (disk + grow + moving + BLOCK if own else 0) <= most:
            self.claims.meet(key)
            return
        used, fixed = total + held + claimed, self._fixed(keep)
        worth = possible = False
        if own and keep is not None:
            if keep.compacting and used + grow > most:
                raise CrowdedError(keep, self._full())  # there is more room when that has ended
            worth, copy = worth_copying(keep), copy_size(keep)
            possible = worth and fixed + copy <= most
            alone = disk + self.unlisted + moving + copy
            if (worth or over) and alone + (2 * grow if worth or keep.open else grow) > most:
                # Afterwards no copy would fit, whoever goes.
                if keep.open and time.monotonic() >= keep.strained:
                    raise CrowdedError(keep, self._full())  # it may when these have ended
                if alone <= most or keep.open:
                    raise self._crowded(keep) if possible else self._refusal(keep, held)
            if possible and time.monotonic() >= keep.strained and self._copy_now(keep, grow, used, fixed + moving):
                raise CrowdedError(keep, self._full())
        if not worth and blocks(nbytes) + disk > most:
            raise OutOfMemoryError(
                f"OOM --max-bytes {most} is less than the {disk + blocks(nbytes)} bytes that this entry "
                "alone would take: nothing was evicted for it"
            )
        evicted = self.evicted
        while self.totals.disk + self.unlisted + held + claimed + grow > most:
            never = hard = fixed + held + grow > most
            if self.evicted == evicted + (time.monotonic() >= self.tight):  # before more than one go: would all do?
                never = hard or self.unlisted + self._kept(keep) + held + grow > most
            if never or not self._evict(keep, f"--max-bytes {most}", mapped=False):
                if possible and keep is not None:
                    raise self._crowded(keep)
                self.tight = time.monotonic() + _TIGHT
                if not hard and (claimed or self.gone_bytes()[1]):  # who waits for these may be evicted afterwards
                    raise self._unfreed(key, grow)
                error = self._refusal(keep, held) if own or again else OutOfMemoryError(self._full())
                if type(error) is OutOfMemoryError and not hard and any(map(self._busy, self.in_use())):
                    error = CrowdedError(None, str(error), key=key, nbytes=grow, busy=True)
                raise error
        if not self.fits_now(ahead + grow):
            raise self._unfreed(key, grow, keep, evicted=True)
        self.claims.meet(key)

    def fits_now(self, nbytes: int) -> bool:
        """Whether there is room for this many more bytes beside all that takes some at this moment."""
        return self.totals.disk + self.unlisted + sum(self.gone_bytes()) + nbytes <= self.max_bytes

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

    def _fixed(self, keep: Entry | None) -> int:
        """Bytes that stay whoever is evicted, when `keep` is not: itself, what is pinned, what is not listed yet."""
        pinned = self.order.pinned_bytes() if self.order.pins else 0
        return self.unlisted + pinned + (keep.disk if keep is not None and not keep.pinned else 0)

    def _kept(self, keep: Entry | None) -> int:
        """Bytes of the entries that do not go now: pinned, `keep`, or written or read at this moment."""
        pinned = self.order.pinned_bytes() if self.order.pins else 0
        return pinned + sum(
            entry.disk for entry in self.in_use() if not entry.pinned and (entry is keep or self._busy(entry))
        )

    def _copy_now(self, entry: Entry, grow: int, used: int, fixed: int) -> bool:
        """Whether an entry is to be compacted before it grows. What it writes may live on: then its copy grows too."""
        most, copy = self.max_bytes, copy_size(entry)
        dead = entry.rows.dead if entry.rows is not None else 0
        if fixed + 2 * grow + copy > most:  # afterwards there would be no room for the copy, whoever goes
            return True
        if used + grow > most and dead >= copy:  # others would go for its dead bytes: fewer go for the copy
            return True
        return used + copy <= most < used + 2 * grow + copy and dead >= copy * limits.COMPACT_DEAD_SHARE

    def _refusal(self, keep: Entry | None, held: int) -> OutOfMemoryError:
        """Why a write has no room: dead bytes of another entry, or it is full."""
        other = self._most_dead(keep, held)
        return OutOfMemoryError(self._full()) if other is None else CrowdedError(other, self._full(), keep)

    def _most_dead(self, keep: Entry | None, held: int) -> Entry | None:
        """The entry, not `keep`, with the most dead bytes that a compaction can reclaim. None: there is none, or there
        was none a moment ago and nothing was written since."""
        now = time.monotonic()
        if now < self.searched[0] and self.searched[1] == self.appended:
            return None
        best, most = None, 0
        for entry in self.entries.values():
            dead = entry.rows.dead if entry.rows is not None else 0
            if dead <= most or entry is keep or not worth_copying(entry) or now < entry.strained:
                continue
            kept = keep.disk if keep is not None and not keep.pinned else 0
            if self._fixed(entry) + kept + held + copy_size(entry) <= self.max_bytes:
                best, most = entry, dead
        if best is None:
            self.searched = time.monotonic() + _SEARCH_EVERY, self.appended
        return best

    def _full(self) -> str:
        return (
            f"OOM --max-bytes {self.max_bytes} is reached and nothing else can be evicted "
            "(what is left is pinned, leased, being written or being read)"
        )

    def _unfreed(self, key: bytes, nbytes: int, keep: Entry | None = None, *, evicted: bool = False) -> CrowdedError:
        text = f"OOM --max-bytes {self.max_bytes} is reached, and the files of removed entries are not freed yet"
        return CrowdedError(None, text, keep, key=key, nbytes=nbytes, evicted=evicted)

    def _crowded(self, entry: Entry) -> OutOfMemoryError:
        if time.monotonic() >= entry.strained:
            return CrowdedError(entry, self._full())
        return OutOfMemoryError(self._full() + "; this entry has overwritten rows, but could not be compacted")

    def _evict(self, keep: Entry | None, cap: str, *, mapped: bool = True) -> bool:
        """Drop one entry; one that a client has mapped, whose blocks would not be free, only with `mapped`."""
        entry = self.order.first(
            lambda entry: (
                entry is keep or entry.waiting > 0 or self._busy(entry) or (not mapped and self.is_lent(entry))
            )
        )
        if entry is None:
            return False
        what = "a prefix that no other continues, " if entry.parent is not None else ""
        self.drop(entry, f"evicted: {cap} was reached, and this was {what}used longest ago")
        self.evicted += 1
        return True

    @staticmethod
    def _busy(entry: Entry) -> bool:
        return bool(entry.writers) or (entry.ref is not None and entry.ref.refs > 1)

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

    def settle(self) -> None:
        """After a record that had to be written: whoever was used longest ago goes for it, as long as that helps."""
        most = self.max_bytes
        while self.totals.disk + self.unlisted + self.gone_bytes()[0] > most:
            if not self._evict(None, f"--max-bytes {most}", mapped=False):
                break
        if not self.fits_now(0):  # such records seldom come, but a command may write many
            stream.drain(_SETTLE)

    def enforce(self) -> None:
        """Bring what was found on disk under the caps. What is pinned stays; what needs room is then refused."""
        sessions, most = self.max_sessions, self.max_bytes
        while self.totals.sessions > sessions or len(self.entries) > sessions:
            if not self._evict(None, f"--max-sessions {sessions}"):
                log.warning("more than --max-sessions %d are pinned: they stay, and others are refused", sessions)
                break
        while self.totals.disk + self.gone_bytes()[0] > most:
            if not self._evict(None, f"--max-bytes {most}", mapped=False):
                log.warning("more than --max-bytes %d are pinned: they stay, and what needs room is refused", most)
                break


def descriptor_cap() -> int:
    """Entry files that may be open at once: a quarter of what the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else max(8, min(soft, 1 << 18) // 4)
