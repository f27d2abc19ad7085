"""Writing an entry anew, so that its rows stand together.

Many small stores leave a layer in many pieces, overwritten rows and states leave holes. A compaction writes what is
live into a new file, without the lock; then, with the lock, it copies what was appended meanwhile and puts the new file
in the place of the old one. Readers of the old file keep it.

When: a layer is in more than 64 pieces and a quarter of the file came after the last compaction, so that the bytes
written by all compactions together stay a small multiple of the bytes stored; or a quarter of the file is dead. One
that is read, or that nobody writes to, is compacted earlier.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from pion import limits
from pion._core import framing, vstore
from pion._core.stream import FdRef
from pion.errors import CommandError
from pion.store import layout, loader
from pion.store.caps import copy_size, worth_copying
from pion.store.entries import CrowdedError, Entry
from pion.store.store import Store

log = logging.getLogger("pion.store")

GROWN: Final = 4  # 1/4 of the file is newer than the last compaction
QUIET_GROWN: Final = 16  # the same for an entry that is read, or that nobody writes to
DEAD_FROM: Final = 1 * limits.MIB  # dead bytes in a small file are not worth a rewrite
_ROUNDS: Final = 4
PATIENCE: Final = 10.0  # seconds a writer waits for bodies of others before it is refused
_LOOK: Final = 0.02  # seconds between two tries to find room for a copy, and the most between two looks
_SOON: Final = 0.0005  # at what is freed
STRAINED: Final = 1.0  # seconds until a compaction for want of room is tried again after one that gained nothing
_FAILURES: Final = (OSError, CommandError, vstore.DamageError)


def due(entry: Entry, *, quiet: bool = False) -> bool:
    """Whether a compaction pays."""
    rows = entry.rows
    if rows is None or entry.gone or entry.writers:
        return False
    if rows.dead >= DEAD_FROM and rows.dead >= entry.size * limits.COMPACT_DEAD_SHARE:
        return True
    fresh = entry.size - entry.base
    if fresh * (QUIET_GROWN if quiet else GROWN) < entry.base:
        return False
    return rows.most_extents() > limits.COMPACT_EXTENTS


def compact(store: Store, entry: Entry, *, patient: bool = False, forced: bool = False) -> bool:
    """Rewrite an entry. Blocking; called from a worker thread without the lock.

    Args:
        forced: others go for it when there is no room for the copy.
        patient: wait for a compaction of the same entry that is under way, then do it again.

    Returns:
        False when it was left as it is: dropped or written to all the time, no room, or an error, which is logged.
    """
    try:
        return _compact(store, entry, patient, forced)
    except _FAILURES as error:
        log.warning("entry %r could not be compacted: %s", entry.name, error)
        return False


def relieve(store: Store, crowded: CrowdedError, patience: float = PATIENCE) -> None:
    """Make the room that a write needs: compact the entry whose dead bytes take it, or wait until removed files are
    freed. Blocking; called without the lock. Whoever comes while an entry is compacted for another writer waits for
    that.

    Args:
        crowded: what the write was answered.
        patience: seconds to wait for bodies that are streaming in, here, where no further ones begin meanwhile, or
            into other entries, which could go for the copy if they were not being written.
    """
    entry = crowded.entry
    if entry is None:
        if crowded.busy:
            time.sleep(_LOOK)
        freed(store)
        return
    with store.lock:
        if entry.awaited:
            store.settled.wait_for(lambda: not entry.awaited, 2 * patience)
            return
        entry.awaited = True
        seen = entry.generation
    end = time.monotonic() + patience
    try:
        while not _relieved(store, entry, seen, end):
            with store.lock:
                store.settled.wait(_LOOK)
    finally:
        with store.lock:
            entry.awaited = False
            store.settled.notify_all()


def freed(store: Store, patience: float = 1.0) -> None:
    """Wait until the room is free for whose turn it is (`claims`), or nothing is being freed. Blocking; called without
    the lock."""
    end, pause = time.monotonic() + patience, _SOON
    while time.monotonic() < end:
        time.sleep(pause)
        with store.lock:
            first = store.claims.first()
            if not store.gone_bytes()[1] or (first is not None and store.fits_now(first.nbytes)):
                return
        pause = min(2 * pause, _LOOK)


def _relieved(store: Store, entry: Entry, seen: int, end: float) -> bool:
    """One try to compact an entry of generation `seen`; False: another one may do better."""
    with store.lock:
        quiet = store.settled.wait_for(
            lambda: entry.gone or not (entry.compacting or entry.writers), max(end - time.monotonic(), 0.0)
        )
        if entry.gone or entry.generation != seen or time.monotonic() < entry.strained:
            return True
        if quiet and not worth_copying(entry):
            return True  # what it waited for were bodies that were arriving
    try:
        done = quiet and _compact(store, entry, patient=False, forced=True)
    except _FAILURES as error:
        log.warning("entry %r could not be compacted: %s", entry.name, error)
        done, end = False, 0.0
    with store.lock:
        if done or entry.generation != seen:
            return True
        if time.monotonic() < end:
            return False
        entry.strained = time.monotonic() + STRAINED
        return True


def _compact(store: Store, entry: Entry, patient: bool, forced: bool) -> bool:
    loader.precheck(store, entry)
    job = _begin(store, entry, patient, forced)
    if job is None:
        return False
    try:
        return job.run()
    finally:
        job.close()


def _begin(store: Store, entry: Entry, patient: bool, forced: bool) -> _Job | None:
    """Take the room for a copy and begin it; None: there is none now."""
    with store.lock:
        if patient:
            store.settled.wait_for(lambda: not entry.compacting)
        if entry.gone or entry.rows is None or entry.writers or entry.compacting:
            return None
        need = copy_size(entry)
        full = store.totals.disk + store.gone_bytes()[0] + need > store.max_bytes
        if full and not forced and need > store.max_bytes // 8:
            return None  # others would have to go for it
        try:
            store.make_room(need, entry)
        except CommandError:
            return None
        loader.check_all(store, entry)  # a damaged payload must not get a fresh checksum
        return _Job(store, entry, need)


class _Job:
    """One compaction: the old file as it was at the beginning, and the new one.

    For a while both are on the disk: `need` bytes more count, until the new one counts as the entry's or as removed.
    """

    def __init__(self, store: Store, entry: Entry, need: int) -> None:
        assert entry.rows is not None
        self.store, self.entry = store, entry
        self.source, self.seen, self.seed = store.ref(entry), entry.size, entry.seed
        self.plan = entry.rows.copy()
        self.plan.settle()
        self.payloads = [*([entry.blocks] if entry.blocks else []), *entry.states.values()]
        self.fresh = Entry(entry.key, layout.new_generation())
        self.fresh.seed = loader.seed_of(self.fresh.generation)
        self.fresh.describe(entry.sides, entry.declared)
        self.fresh.states = {}
        self.rows = self.fresh.rows = vstore.Rows()
        fd, self.temporary = store.files.scratch(entry.path, self.fresh.generation)
        self.target = FdRef(fd)
        self.swapped = False
        self.at = self.base = 0
        self.durable = (0, 0)  # what is on the medium: up to here of the old file, standing up to there in the new one
        self.need, self.ended = need, False
        entry.compacting = True
        store.totals.disk += need

    def run(self) -> bool:
        """Copy, catch up with what is appended meanwhile, swap."""
        self._copy_head()
        for payload in self.payloads:
            self._copy(payload.record, payload.offset + framing.align_up(payload.nbytes))
        formats = [
            [side.of(layer) for layer in range(self.plan.layers(number))] if side else []
            for number, side in enumerate(self.fresh.sides)
        ]
        fd = self.target.fileno()
        self.at = self.plan.merge_into(self.rows, self.source.fileno(), fd, self.at, self.fresh.seed, formats)
        self.base = self.at
        for _ in range(_ROUNDS):
            self._flush()
            with self.store.lock:
                if not self._possible():
                    return False
                end = self.entry.size
                if end == self.seen:
                    self._swap()
                    return True
            self._copy(self.seen, end)
            self.seen = end
        with self.store.lock:  # the writers never pause: make them
            if not self._possible():
                return False
            self._copy(self.seen, self.entry.size)
            self.seen = self.entry.size
            if self.entry.synced > self.durable[0]:
                self._flush()  # a commit came between: what it made durable stays so
            self._swap()
            return True

    def close(self) -> None:
        """Remove the new file unless it was swapped in."""
        try:
            if not self.swapped and self.temporary:
                self.store.files.remove(self.temporary)
        finally:
            with self.store.lock:
                if not self.swapped:
                    written = max(self.at, os.fstat(self.target.fileno()).st_blocks * 512)
                    self.store.release(self.target, written, self.fresh.generation)
                self._end()
        del self.source, self.target  # else whoever keeps the error of a compaction that failed would keep the files

    def _end(self) -> None:
        """The copy counts as something else from now on. The lock is held."""
        if not self.ended:
            self.ended = True
            self.store.totals.disk -= self.need + self.entry.doubled
            self.entry.doubled = 0
            self.entry.compacting = False
            self.store.settled.notify_all()

    def _possible(self) -> bool:
        entry = self.entry
        return (
            not entry.gone
            and entry.generation != self.fresh.generation
            and entry.seed == self.seed
            and not entry.writers
        )

    def _flush(self) -> None:
        """What is durable in the old file must be durable in the new one before it takes its place."""
        seen, at = self.seen, self.at
        if self.store.files.keeps:
            vstore.flush(self.target.fileno())
        self.durable = (seen, at)

    def _copy_head(self) -> None:
        head = layout.file_header(self.fresh.key, self.fresh.generation)
        data = head + loader.meta_record(self.fresh, len(head))
        if os.pwrite(self.target.fileno(), data, 0) != len(data):
            raise OSError(28, os.strerror(28))
        self.at = len(data)
        for side in range(2):  # rows of no layer say that there was a higher one, which a RESTORE has emptied
            top = self.plan.layers(side)
            if top and not self.plan.tokens(side, top - 1):
                self.at += vstore.write_record(
                    self.target.fileno(), self.at, self.fresh.seed, kind=layout.TRIM, layer=top - 1, side=side
                )

    def _copy(self, start: int, end: int) -> None:
        collect = loader.Collector(self.fresh)
        self.at = self.rows.copy_tail(
            self.source.fileno(), start, end, self.seed, self.target.fileno(), self.at, self.fresh.seed, collect
        )
        self.rows.lost(collect.sized)

    def _swap(self) -> None:
        """The new file takes the place of the old one, on disk and in memory. The lock is held."""
        store, entry, fresh = self.store, self.entry, self.fresh
        store.mark_dirty(entry)
        store.files.adopt(self.temporary, entry.path, entry.generation)
        self.swapped = True
        for payload in [*fresh.states.values(), *([fresh.blocks] if fresh.blocks else [])]:
            payload.checked = True
        old, nbytes, generation = entry.ref, entry.disk, entry.generation

        def change() -> None:
            entry.generation, entry.seed = fresh.generation, fresh.seed
            entry.rows, entry.states, entry.blocks = fresh.rows, fresh.states, fresh.blocks
            entry.ref = self.target
            entry.size, entry.base = self.at, self.base
            entry.recount()

        store.recounted(entry, change)
        entry.synced = self.durable[1]
        store.release(old, nbytes, generation)
        self._end()
        if store.index is not None:
            store.index.put(entry.key, entry.figures(clean=False))
        store.opened(entry)
