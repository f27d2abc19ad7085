"""What runs beside the commands: flushing, sealing, compaction, rewriting the index.

A commit is done once for everybody who waits for it: whoever comes while one is running waits for the next, which one
of them then runs. Its flushes are started together and awaited by several threads.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from pion._core import vstore
from pion._core.stream import FdRef
from pion.errors import StorageError
from pion.store import compact, index, layout, loader
from pion.store.caps import descriptor_cap
from pion.store.copying import copy_file
from pion.store.entries import Entry
from pion.store.store import Store

_log = logging.getLogger("pion.store")

FLUSH_THREADS: Final = 32  # a file system's journal serves those who wait at the same time with one commit
QUIET_TICKS: Final = 2  # seconds without a write before an entry is sealed
_SLICE: Final = 256  # entries per look at the lock while the index is rewritten
_FLUSH_AT_ONCE: Final = 64  # entries at most; their files are open meanwhile
_NOTHING_LOST: Final = (errno.EMFILE, errno.ENFILE)  # only opening fails with these: no flush has begun


class Log(Protocol):
    """What is needed of the keyspace on disk."""

    @property
    def unsynced_bytes(self) -> int: ...
    def fsync(self) -> None: ...


class _Flush:
    """An entry as it was when its flush began."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.nbytes, self.generation = entry.unsynced, entry.generation
        self.size = 0 if entry.writers else entry.size  # a body that streams in is not covered

    def done(self, store: Store) -> None:
        """The file is on the medium up to here: the index says so, for a start after a power cut."""
        entry = self.entry
        if entry.gone or entry.generation != self.generation or self.size <= entry.synced:
            return
        entry.synced = self.size
        if store.index is not None:
            try:
                store.index.put(entry.key, entry.figures(clean=not entry.dirty))
            except OSError as error:  # it only tells less than it could
                _log.warning("the index could not be told of a flush: %s", error.strerror)

    def count(self, store: Store) -> None:
        """Everything else is on the medium too."""
        entry = self.entry
        if entry.gone:  # dropped meanwhile, and counted out then
            return
        entry.unsynced -= self.nbytes
        store.totals.unsynced -= self.nbytes
        if entry.unsynced:
            store.unsynced.add(entry)


class _Wish:
    """A compaction asked for or under way."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.again = True  # asked for since its worker last looked


class Upkeep:
    """The background work of a store.

    Args:
        policy: appendfsync: `always`, `everysec` or `no`.
        log: the keyspace on disk, flushed together with the entries; None without one.
    """

    def __init__(self, store: Store, policy: str, log: Log | None = None) -> None:
        self.store = store
        self.policy = policy
        self.log = log
        self.failure = ""  # of the first flush that failed: what it covered may be lost, and nobody can tell
        self._workers = ThreadPoolExecutor(2, "pion-upkeep")
        self._flushers: ThreadPoolExecutor | None = None
        self._turn = threading.Condition()
        self._started = self._finished = 0
        self._running = False
        self._errors: dict[int, OSError] = {}
        self._ticking = threading.Lock()
        self._compacting: dict[Entry, _Wish] = {}
        self._wishes = threading.Lock()
        store.fragmented = self.consider

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Return when everything written before the call is on the medium.

        Raises:
            OSError: a flush failed.
        """
        with self._turn:
            mine = self._started + 1
            while self._finished < mine:
                if self._running:
                    self._turn.wait()
                    continue
                self._running = True
                self._started += 1
                number = self._started
                self._turn.release()
                error: OSError | None = None
                try:
                    self._flush_all()
                except OSError as failure:
                    error = failure
                finally:
                    self._turn.acquire()
                    self._running = False
                    self._finished = number
                    if error is not None:
                        self._errors[number] = error
                    self._errors.pop(number - 64, None)
                    self._turn.notify_all()
            if mine in self._errors:
                raise self._errors[mine]

    def _flush_all(self) -> None:
        if self.failure:
            raise OSError(5, self.failure)
        store = self.store
        with store.lock:
            todo = list(store.unsynced)
        work: list[_Flush] = []
        try:
            if store.files.keeps:
                some = min(_FLUSH_AT_ONCE, descriptor_cap())
                done = 0
                while done < len(todo):
                    done += self._flush_some(todo[done : done + some], work)
                with store.lock:
                    flush = store.with_descriptor(store.index.to_flush) if store.index is not None else None
                if flush is not None:
                    flush.run()
                self._sync_names()
            else:
                with store.lock:
                    work = self._take(todo)
        except OSError as error:
            with store.lock:
                store.unsynced.update(item.entry for item in work if not item.entry.gone)
            if error.errno in _NOTHING_LOST:
                _log.warning("flush put off: %s", error.strerror)
                raise
            self.failure = f"an earlier flush failed: {error.strerror}"
            _log.error("flush failed: %s; nothing will be called durable until the server is restarted", error.strerror)
            raise
        with store.lock:
            for item in work:
                item.count(store)
        if self.log is not None:
            self.log.fsync()  # it remembers its own failures, and recovers from them by a rewrite

    def _sync_names(self) -> None:
        try:
            self.store.files.sync()
        except OSError as error:
            if error.errno not in _NOTHING_LOST:
                raise
            with self.store.lock:
                self.store.spare_descriptors()
            self.store.files.sync()

    def _take(self, entries: list[Entry]) -> list[_Flush]:
        """Those that still wait for a flush; later writes to them wait for the next one. The lock is held."""
        out = [_Flush(entry) for entry in entries if entry in self.store.unsynced]
        self.store.unsynced.difference_update(entries)
        return out

    def _flush_some(self, entries: list[Entry], work: list[_Flush]) -> int:
        """Flush a batch, so that not every file is open at the same time.

        An entry whose file was closed meanwhile and is not there any more goes out of service: no flush has failed.

        Returns:
            How many were flushed; fewer than all when there are no descriptors for more.
        """
        store = self.store
        refs: list[FdRef] = []
        with store.lock:
            for number, entry in enumerate(entries):
                if entry not in store.unsynced or not (entry.ref is not None or loader.intact(store, entry)):
                    continue
                try:
                    refs.append(store.ref(entry))
                except OSError as error:
                    if not refs or error.errno not in _NOTHING_LOST:
                        raise
                    entries = entries[:number]
                    break
            batch = self._take(entries)
        work += batch
        self._flush_files(refs)
        with store.lock:
            for item in batch:
                item.done(store)
        return len(entries)

    def _flush_files(self, refs: list[FdRef]) -> None:
        if len(refs) <= 1:
            for ref in refs:
                vstore.flush(ref.fileno())
            return
        for ref in refs:
            vstore.writeback(ref.fileno())
        if self._flushers is None:
            self._flushers = ThreadPoolExecutor(FLUSH_THREADS, "pion-flush")
        for _ in self._flushers.map(lambda ref: vstore.flush(ref.fileno()), refs):
            pass

    # --- every second -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Hand a second's upkeep to a worker; does not wait. A second tick while one is at work does nothing."""
        if self._ticking.acquire(blocking=False):
            try:
                self._workers.submit(self._tick)
            except RuntimeError:  # closing
                self._ticking.release()

    def _tick(self) -> None:
        try:
            self._upkeep()
        except OSError as error:
            _log.error("upkeep: %s", error)
        finally:
            self._ticking.release()

    def _upkeep(self) -> None:
        store = self.store
        with store.lock:
            store.gone_bytes()
            store.expire(store.now_ms())
            store.watch()
            if store.index is not None and store.used:  # before what may take long: a kill forgets untold uses
                store.index.used([(entry.key, entry.used) for entry in store.used if not entry.gone])
            store.used.clear()
        pending = bool(store.unsynced) or (self.log is not None and self.log.unsynced_bytes > 0)
        if self.policy == "everysec" and pending and not self.failure:
            self.commit()
        quiet: list[Entry] = []
        with store.lock:
            for entry in store.restless:
                entry.quiet += 1
                if entry.quiet >= QUIET_TICKS and not entry.writers:
                    quiet.append(entry)
        for entry in quiet:
            if compact.due(entry, quiet=True):
                compact.compact(store, entry)
        self.seal(quiet)
        with store.lock:
            damage = store.index.damage() if store.index is not None else ""
        if damage:
            _log.error("%s %s under the running server: it is written anew", index.NAME, damage)
            self.rewrite_index()
        elif store.index is not None and store.index.bloated:
            self.rewrite_index()

    def seal(self, entries: Iterable[Entry]) -> None:
        """Tell the index what quiet entries hold; one that has been written to meanwhile waits for its next turn."""
        store = self.store
        for entry in entries:
            with store.lock:
                if entry.dirty and not entry.gone and not entry.writers and entry.quiet >= QUIET_TICKS:
                    store.seal([entry])

    def rewrite_index(self, *, closed: bool = False) -> None:
        """Write the index anew, in slices, while the store is used."""
        store, idx = self.store, self.store.index
        if idx is None:
            return
        with store.lock:
            store.with_descriptor(idx.begin_rewrite)
            entries = list(store.entries.values())
        try:
            for i in range(0, len(entries), _SLICE):
                with store.lock:
                    for entry in entries[i : i + _SLICE]:
                        store.order.catch_up(entry)
                    idx.rewrite(
                        (entry.key, entry.figures(clean=not entry.dirty))
                        for entry in entries[i : i + _SLICE]
                        if not entry.gone
                    )
            with store.lock:
                flush = store.with_descriptor(idx.rewritten)
            flush.run()  # the bulk of it, without the lock
        except OSError:
            with store.lock:
                idx.cancel_rewrite()
            raise
        with store.lock:
            idx.end_rewrite(closed=closed)

    def consider(self, entry: Entry, *, quiet: bool = False) -> None:
        """Compact an entry in the background when that pays. Called with every store, and with fetches of fragments."""
        if not compact.due(entry, quiet=quiet):
            return
        with self._wishes:
            running = self._compacting.get(entry)
            if running is not None:  # it may have looked at the entry already, and less strictly
                running.again, running.quiet = True, running.quiet or quiet
                return
            self._compacting[entry] = _Wish(quiet)
        try:
            self._workers.submit(self._compact, entry)
        except RuntimeError:  # closing
            with self._wishes:
                del self._compacting[entry]

    @property
    def idle(self) -> bool:
        """Whether no compaction is under way or asked for."""
        return not self._compacting

    def compact_now(self, ns: bytes) -> bool:
        """Compact a prefix in this thread."""
        with self.store.lock:
            entry = self.store.get(layout.PREFIX + ns)
        return entry is not None and compact.compact(self.store, entry, patient=True)

    def _compact(self, entry: Entry) -> None:
        wish = self._compacting[entry]
        try:
            while wish.again:
                with self._wishes:
                    wish.again, quiet = False, wish.quiet
                while compact.due(entry, quiet=quiet) and compact.compact(self.store, entry):
                    continue  # what was appended meanwhile may be worth another round
                with self._wishes:
                    if not wish.again:
                        del self._compacting[entry]
        except BaseException:
            with self._wishes:
                self._compacting.pop(entry, None)
            raise

    def stop(self) -> None:
        """Finish what is running; nothing starts by itself any more. `commit` still works."""
        self._workers.shutdown(cancel_futures=True)

    def close(self) -> None:
        """After the last `commit`."""
        if self._flushers is not None:
            self._flushers.shutdown()


def save_copy(store: Store, root: Path, path: str) -> None:
    """Write every entry into a directory of the same layout: a data directory of its own, without an index.

    It appears under its name when it is complete and durable.

    Raises:
        StorageError: there is something else of that name already.
        OSError: writing failed; what was written is left in `<path>.new`.
    """
    target, fresh = root / path, root / f"{path}.new"
    if target.exists():
        raise StorageError(f"ERR KV.PREFIX.SAVE failed ('{path}' is there already)")
    fresh.mkdir(parents=True, mode=0o700)
    with store.lock:
        entries = list(store.entries.values())
    folders = {fresh}
    for entry in entries:
        with store.lock:
            if entry.gone:
                continue
            ref, size = store.ref(entry), entry.size
        copy = fresh / entry.path
        if copy.parent not in folders:
            copy.parent.mkdir(parents=True, exist_ok=True)
            folders.add(copy.parent)
        copy_file(ref.fileno(), size, copy, os.O_EXCL)
    for folder in (*folders, *{folder.parent for folder in folders}):
        index.flush_directory(folder)
    os.rename(fresh, target)
    index.flush_directory(target.parent)
