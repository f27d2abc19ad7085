"""The entries of one data directory: find, create, load, drop, and the order of their last use.

One lock guards everything in memory. It is held over the small file operations (a header, a record of up to 256 KiB)
and never over an fsync, a large transfer or the last close of a file.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from pion._core import stream, vstore
from pion._core.stream import FdRef
from pion.errors import StorageError
from pion.store import layout, loader
from pion.store.caps import Caps, descriptor_cap
from pion.store.claims import Claims
from pion.store.entries import Entry
from pion.store.files import Files
from pion.store.index import Figures, Index
from pion.store.layout import Declared, Side
from pion.store.lending import Lending
from pion.store.order import Order

log = logging.getLogger("pion.store")

T = TypeVar("T")

REMEMBERED: Final = 4096  # names whose end is remembered, for WHY


@dataclass(slots=True)
class Totals:
    """Sums over all entries.

    Attributes:
        sessions: sides; prefixes: K sides of namespaces.
        key_rows, rows, nbytes: as in Entry.
        disk: bytes charged for files.
        unsynced: bytes no COMMIT has covered yet.
    """

    sessions: int = 0
    prefixes: int = 0
    key_rows: int = 0
    rows: int = 0
    nbytes: int = 0
    disk: int = 0
    unsynced: int = 0


class Fragmented(Protocol):
    """Told of entries that may be in too many pieces; `quiet`: one that is being read."""

    def __call__(self, entry: Entry, *, quiet: bool = False) -> None: ...


def wall_ms() -> int:
    """Milliseconds since 1970, as times to live count."""
    return time.time_ns() // 1_000_000


class Store(Caps):
    """Entries by key.

    Args:
        files: where entry files live.
        index: None when nothing outlives the process.
        max_sessions, max_bytes: caps.
    """

    def __init__(self, files: Files, index: Index | None, *, max_sessions: int, max_bytes: int) -> None:
        self.files = files
        self.index = index
        self.max_sessions = max_sessions
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self.settled = threading.Condition(self.lock)  # told when a compaction ends
        self.entries: dict[bytes, Entry] = {}
        self.order = Order(self.entries)
        self.totals = Totals()
        self.now_ms: Callable[[], int] = wall_ms
        self.changes = 0  # entries that came or went
        self.evictions = 0
        self.quarantined = 0
        self.shortened = 0  # entries that lost records which had been flushed
        self.flushes = 0  # FLUSHes since the start: a file found after one is not taken in
        self.power_cut = False  # before this start: what was not flushed may be anything
        self.appended = 0  # records since the start or the last SAVE
        self.unsynced: set[Entry] = set()
        self.restless: set[Entry] = set()  # dirty entries the ticker will seal once they are quiet
        self.used: set[Entry] = set()  # whose clock the index does not know yet
        self.ends: OrderedDict[bytes, str] = OrderedDict()
        self.on_drop: Callable[[Entry], None] | None = None
        self.on_insert: Callable[[Entry], None] | None = None
        self.on_new_meaning: Callable[[Entry, int | None], None] | None = None
        self.finder: Callable[[bytes], Entry | None] | None = None  # while the directory is listed: look for one entry
        self.fragmented: Fragmented | None = None
        self.unlisted = 0  # bytes of files the listing has not come to yet
        self.claims = Claims()
        self._lending = Lending()
        for nbytes, room in files.left_behind:
            self._lending.removed(None, nbytes, 0, room)
        self._open: OrderedDict[Entry, None] = OrderedDict()
        self._free_slots: list[int] = []
        self._next_slot = 0

    # --- finding ----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Entry | None:
        """The entry, whether its file has been read or not."""
        entry = self.entries.get(key)
        if entry is None and self.finder is not None:
            entry = self.finder(key)
        return None if entry is None or self._due(entry) else entry

    def get(self, key: bytes) -> Entry | None:
        """The entry, its file read and still what it was; None when there is none (or it has just turned out to be
        damaged, or due: `ends` then says so)."""
        entry = self.find(key)
        if entry is None:
            due = self.entries.get(key)
            if due is not None:
                with contextlib.suppress(StorageError):  # the tick tries again
                    self.expire_one(due)
            return None
        if entry.rows is None:
            return entry if loader.load(self, entry) and not self._due(entry) else None
        return entry if loader.intact(self, entry) else None

    def _due(self, entry: Entry) -> bool:
        return 0 < entry.expires <= self.now_ms()

    def touch(self, entry: Entry) -> None:
        """Note a use of an entry, which is one of its ancestors."""
        entry.used = self.order.uses.next_use()
        self.used.add(entry)
        if entry.parent is not None:
            self.used.update(self.order.used(entry, entry.used))

    def fd(self, entry: Entry) -> int:
        """A descriptor of the entry's file, opened when needed. Raises OSError."""
        return self.ref(entry).fileno()

    def ref(self, entry: Entry) -> FdRef:
        """The same, to be held by a reply or a sink."""
        if entry.ref is None:
            lent = self._lending.file(entry.generation)  # a second one of our own would look like a client's
            entry.ref = lent or FdRef(self.with_descriptor(lambda: self.files.open(entry.path)))
            self.opened(entry)
        return entry.ref

    def watch(self) -> None:
        """Take entries out of service whose file failed while a reply was sent, and see who still maps what was lent.

        Once a second. The lock is held.
        """
        for entry in [entry for entry in self._open if entry.ref is not None and entry.ref.failed]:
            loader.intact(self, entry)
        self._lending.look()

    def with_descriptor(self, make: Callable[[], T]) -> T:
        """Call something that opens a file. When there are no descriptors left, half of ours are given back first.

        Raises:
            OSError: as `make` does.
        """
        try:
            return make()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self.files.keeps:
                raise
        self.spare_descriptors()
        return make()

    def spare_descriptors(self) -> None:
        """Close the half of the entry files that were opened longest ago. The lock is held."""
        self._close_oldest(len(self._open) // 2 + 1)
        stream.drain(2.0)  # they are closed in the background

    def _close_oldest(self, number: int) -> None:
        """Those in use are left: their blocks would not be counted once they are removed."""
        for _ in range(min(number, len(self._open))):
            oldest, _ = self._open.popitem(last=False)
            if oldest.compacting or (oldest.ref is not None and oldest.ref.refs > 1):
                self._open[oldest] = None
            else:
                oldest.ref = None

    def opened(self, entry: Entry) -> None:
        """Count an open file; the ones opened longest ago are closed when there are too many, unless they are read."""
        self._open[entry] = None
        if not self.files.keeps:
            return
        self._close_oldest(len(self._open) - descriptor_cap())

    def slot(self, entry: Entry, side: int) -> int:
        """The session number of a side: the smallest that is free."""
        if entry.slots is None:
            entry.slots = [None, None]
        slot = entry.slots[side]
        if slot is None:
            if self._free_slots:
                slot = heapq.heappop(self._free_slots)
            else:
                slot, self._next_slot = self._next_slot, self._next_slot + 1
            entry.slots[side] = slot
        return slot

    # --- making -----------------------------------------------------------------------------------------------------

    def create(
        self,
        key: bytes,
        sides: list[Side | None],
        declared: Declared,
        *,
        blocks: tuple[int, bytes] | None = None,
        over: Entry | None = None,
    ) -> Entry:
        """A new entry with its file; it takes the place of `over` at once, or nothing happens.

        Args:
            blocks: block size and hashes of its table.

        Raises:
            OutOfMemoryError: the caps leave no room.
            StorageError: the file or the index could not be written.
        """
        entry = Entry(key, layout.new_generation())
        entry.seed = loader.seed_of(entry.generation)
        entry.describe(sides, declared)
        sessions = entry.side_count or 1
        self.make_slots(sessions - (over.side_count if over else 0), over, entries=0 if over else 1)
        head = layout.file_header(key, entry.generation)
        data = head + loader.meta_record(entry, len(head))
        table = None
        if blocks is not None:
            record, table = loader.blocks_record(entry, len(data), *blocks)
            data += record
        self.make_room(len(data), over, again=True, key=key)
        if over is not None:
            self.mark_dirty(over)  # from here on the file says what there is, this one or the new one
        else:
            self.announce(key)
        try:
            fd = self.with_descriptor(lambda: self.files.create(entry.path, data, over=over.generation if over else 0))
        except OSError as error:
            raise StorageError(f"ERR the entry could not be created: {error.strerror}") from error
        entry.ref = FdRef(fd)
        entry.rows, entry.states, entry.blocks = vstore.Rows(), {}, table
        entry.size = entry.base = len(data)
        if over is not None:
            self.forget(over, "replaced by a REGISTER with REPLACE")
        if self.index is not None:
            try:
                self.index.put(key, entry.figures(clean=False))
            except OSError as error:
                if over is None:
                    self.files.discard(entry.path, entry.generation)
                    self.release(entry.ref, entry.disk, entry.generation)
                    raise StorageError(f"ERR the index could not be written: {error.strerror}") from error
                log.warning("entry %r: its file was replaced, the index still has the old figures", entry.name)
        self.insert(entry)
        self.opened(entry)
        self.wrote(entry, len(data))
        self.ends.pop(key, None)
        self.means_anew(entry, None)
        return entry

    def means_anew(self, entry: Entry, start: int | None) -> None:
        """The entry is another one than what may have had its name, or its time has ended (None); or its rows from
        `start` on are others than they may have been. The lock is held."""
        if self.on_new_meaning is not None:
            self.on_new_meaning(entry, start)

    def insert(self, entry: Entry) -> None:
        """Count an entry in."""
        entry.used = entry.used or self.order.uses.next_use()
        self.entries[entry.key] = entry
        self.changes += 1
        self._count(entry, 1)
        if entry.dirty:
            self.restless.add(entry)
        if self.on_insert is not None:
            self.on_insert(entry)

    def _count(self, entry: Entry, sign: int) -> None:
        totals = self.totals
        totals.sessions += sign * entry.side_count
        totals.prefixes += sign * (entry.is_prefix and entry.mask & 1)
        totals.key_rows += sign * entry.key_rows
        totals.rows += sign * entry.row_count
        totals.nbytes += sign * entry.nbytes
        totals.disk += sign * entry.disk
        if sign < 0:
            self.order.remove(entry)
        elif not entry.gone:
            self.order.add(entry)

    def recounted(self, entry: Entry, change: Callable[[], object]) -> None:
        """Make a change that moves an entry's totals."""
        self._count(entry, -1)
        try:
            change()
        finally:
            self._count(entry, 1)

    def wrote(self, entry: Entry, nbytes: int) -> None:
        """Bytes of records have reached the page cache and are not on the medium yet."""
        entry.unsynced += nbytes
        entry.changes += 1
        entry.quiet = 0
        self.totals.unsynced += nbytes
        self.unsynced.add(entry)
        self.appended += 1

    def announce(self, key: bytes) -> None:
        """Before an entry gets a file that the index does not know. Raises StorageError."""
        if self.index is not None:
            try:
                self.index.making(key)
            except OSError as error:
                raise StorageError(f"ERR the index could not be written: {error.strerror}") from error

    def mark_dirty(self, entry: Entry) -> None:
        """Before the first record that the index does not know. Raises StorageError."""
        if entry.dirty:
            return
        if self.index is not None:
            try:
                self.index.dirty(entry.key)
            except OSError as error:
                raise StorageError(f"ERR the index could not be written: {error.strerror}") from error
        entry.dirty = True
        self.restless.add(entry)

    # --- dropping ---------------------------------------------------------------------------------------------------

    def drop(self, entry: Entry, reason: str) -> None:
        """The entry is gone when this returns; its blocks are freed in the background, readers keep what they have.

        Raises:
            StorageError: neither the index nor the directory could be changed; the entry is then still there.
        """
        try:
            if self.index is not None:
                self.index.drop(entry.key, entry.generation)
            self.files.discard(entry.path, entry.generation)
        except OSError as error:
            try:  # without room for an index record, the missing file says the same at the next start
                self.files.discard(entry.path, entry.generation)
            except OSError:
                raise StorageError(f"ERR the entry could not be dropped: {error.strerror}") from error
        self.forget(entry, reason)

    def forget(self, entry: Entry, reason: str) -> None:
        """Take an entry out of memory; its file is somebody else's matter."""
        self.used.update(self.order.catch_up(entry))  # its ancestors' uses
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        self.changes += 1
        self._count(entry, -1)
        self.evictions += entry.side_count
        self.totals.unsynced -= entry.unsynced
        entry.gone = True
        with self.lock:  # a start does not hold it
            self.settled.notify_all()  # nobody need wait for it any more
        for group in (self.unsynced, self.restless, self.used):
            group.discard(entry)
        self._open.pop(entry, None)
        for slot in entry.slots or ():
            if slot is not None:
                heapq.heappush(self._free_slots, slot)
        entry.slots = None
        self.remember(entry.key, reason)
        self.release(entry.ref, entry.disk, entry.generation)
        entry.ref = None
        if self.on_drop is not None:
            self.on_drop(entry)

    def remember(self, key: bytes, reason: str) -> None:
        """Why there is no such entry, for WHY."""
        self.ends[key] = reason
        self.ends.move_to_end(key)
        if len(self.ends) > REMEMBERED:
            self.ends.popitem(last=False)

    def release(self, ref: FdRef | None, nbytes: int, generation: int) -> None:
        """Let go of a removed file; its blocks count until they are free."""
        self._lending.removed(ref, nbytes, generation, self.files.leaving.pop(generation, stream.Room()))

    def lend(self, generation: int, ref: FdRef) -> None:
        """A client got a descriptor of this file."""
        self._lending.lend(generation, ref)

    def is_lent(self, entry: Entry) -> bool:
        """A client of this machine has the entry's file: its blocks would not be freed."""
        return self._lending.holds(entry.generation)

    def in_use(self) -> Iterable[Entry]:
        """Entries whose file is open, all that are written or read among them."""
        return self._open

    def gone_bytes(self) -> tuple[int, int]:
        """Bytes of removed files: (those that readers and other processes still hold; those being freed)."""
        return self._lending.gone_bytes()

    def lose(self, entry: Entry, why: str) -> None:
        """Take a damaged entry out of service: its file is moved aside, never deleted, never served."""
        self.quarantined += 1
        moved = True
        try:
            where = self.files.quarantine(entry.path, entry.generation)
            log.error("entry %r, %s, is damaged (%s): moved to %s", entry.name, entry.path, why, where)
        except OSError as error:
            moved = isinstance(error, FileNotFoundError)
            text = "entry %r, %s, is damaged (%s) and could not be moved aside: %s"
            log.error(text, entry.name, entry.path, why, error.strerror)
        if self.index is not None and moved:  # else the next start looks at it again, and does not delete it
            try:
                self.index.drop(entry.key, entry.generation)
            except OSError as error:
                log.error("index: %s", error.strerror)
        self.forget(entry, f"damaged ({why}); its file is in the quarantine")

    # --- the index ---------------------------------------------------------------------------------------------------

    def seal(self, entries: Iterable[Entry]) -> None:
        """Tell the index the figures of entries that have been quiet."""
        for entry in entries:
            if self.index is not None and not entry.gone:
                self.index.put(entry.key, entry.figures(clean=True))
            entry.dirty = False
            self.restless.discard(entry)

    def load_index(self, figures: dict[bytes, Figures]) -> None:
        """Take in what the index says."""
        for key, known in figures.items():
            self.insert(Entry.from_index(key, known))
        self.order.uses.next_use(max((known.used for known in figures.values()), default=0))
        self.order.from_files()
