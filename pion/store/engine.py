"""The engine: one object that owns a data directory, its entries and its keyspace.

The server builds one and passes it to the commands. It is also the embedding API: the same store in your own process,
without a socket.

    with pion.Engine("cache") as engine:
        engine.register(b"prompt", kv_dim=256, fmt_code=FORMATS["fp16"], rows=512, layers=24)
        for layer in range(24):
            engine.store(b"prompt", layer, keys[layer], values[layer])
        if engine.lookup(b"prompt"):
            layers = engine.fetch(b"prompt")
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pion import limits
from pion._core import stream
from pion._core.keyspace import Keyspace
from pion.errors import CommandError, StartupError, StorageError
from pion.store import arrays, compact, startup
from pion.store.claims import Claim
from pion.store.durability import Upkeep, save_copy
from pion.store.engine_prefixes import PrefixMethods
from pion.store.engine_sessions import SessionMethods
from pion.store.entries import CrowdedError, Entry
from pion.store.exports import Exports
from pion.store.files import DiskFiles, Files
from pion.store.handouts import Handouts
from pion.store.index import Index
from pion.store.keeping import Keeping
from pion.store.keyspace import KeyspaceStore
from pion.store.ledger import Ledger
from pion.store.matches import Matches
from pion.store.memory_files import MemoryFiles
from pion.store.prefixes import Prefixes, Tables
from pion.store.sessions import Sessions
from pion.store.ssm import States
from pion.store.store import Store

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")

POLICIES: Final = ("always", "everysec", "no")
MEMORY_SHARE: Final = 0.5  # of the free memory, the default cap with memory_only
_START_PATIENCE: Final = 1.0  # seconds that a start waits at most until the blocks of what it evicted are free


class _Closed:
    """Stands in for the parts of an engine that has ended."""

    def __getattr__(self, name: str) -> Any:
        raise StorageError("ERR the engine is closed")


class Engine(SessionMethods, PrefixMethods):
    """A store of prefixes (and a keyspace) in a directory, or in memory.

    Methods may be called from any thread. Namespaces and session names are bytes, format codes those of
    `pion.limits.FORMATS`; errors are `pion.errors.CommandError` with the text a client would see.

    Args:
        path: the data directory, made when missing. One engine per directory.
        memory_only: keep everything in memory; `path` is not used.
        kvcache: whether the server offers the V and KV.PREFIX commands.
        max_sessions: sides of prefixes and raw sessions; the least recently used prefix goes first.
        max_bytes: of entry files. Default: 80 % of the free disk (half of the free memory with memory_only).
        appendfsync: `always` (an acknowledged write is on the medium), `everysec` or `no`.
        wal: False keeps no promise about what survives: nothing is flushed, COMMIT is refused, the keyspace is
            not logged.
        ns_prefix: for the commands, which require namespaces to begin with it.
        databases: of the keyspace.
        keyspace: use this one instead of making one.
        ticker: flush and tidy up every second from a thread of its own. The server calls `fsync_tick` instead.

    Raises:
        StartupError: the directory is in use by another process or cannot be used.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        memory_only: bool = False,
        kvcache: bool = True,
        max_sessions: int = limits.DEFAULT_MAX_SESSIONS,
        max_bytes: int | None = None,
        appendfsync: str = "everysec",
        wal: bool = True,
        ns_prefix: str = "",
        databases: int = limits.DATABASES,
        keyspace: Keyspace | None = None,
        ticker: bool = True,
    ) -> None:
        if appendfsync not in POLICIES:
            raise StartupError(f"appendfsync must be one of {', '.join(POLICIES)}, not '{appendfsync}'")
        if path is None and not memory_only:
            raise StartupError("a path is needed, or memory_only")
        self.kvcache = kvcache
        self.ns_prefix = ns_prefix
        self.wal = wal and not memory_only
        self.memory_only = memory_only
        self.deferred_sync = False  # set by a server that calls `commit` itself before it acknowledges
        self.deferred_room = False  # set by a server that calls `relieve` itself, in a thread
        self.ledger = Ledger()
        self.keyspace_store: KeyspaceStore | None = None
        self.root = Path(path) if path is not None and not memory_only else None
        self.found = startup.Found()
        self._open(max_sessions, max_bytes)
        try:
            self.keyspace = self._open_keyspace(keyspace, databases, appendfsync)
        except BaseException:
            self._files.close()
            raise
        self._policy = appendfsync if self.wal else "no"
        self._upkeep = Upkeep(self._store, self._policy, self.keyspace_store)
        self._tables = Tables(self.keyspace)
        self._sessions = Sessions(self._store)
        self._prefixes = Prefixes(self._store, self.ledger, self._tables)
        self._keeping = Keeping(self._store, self._tables)
        with self._store.lock:
            self._tables.next_use(self._store.order.uses.next_use())
            self._store.order.uses = self._tables
        self._states = States(self._store)
        self._exports = Exports(self._store, self._sessions, self.root)
        self._handouts = Handouts(self._store, self.ledger)
        self._store.on_drop = self._dropped
        with self._store.lock:
            self._matches = Matches(self._store)
            self._store.on_insert = self._matches.came
            self._prefixes.changed = self._matches.changed
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        if isinstance(self._files, DiskFiles) and not self.found.listed:
            self._store.finder = startup.finder(self._store, self._files)
            self._thread("pion-list", self._list_directory)
        if ticker:
            self._thread("pion-tick", self._tick_loop)

    def _open(self, max_sessions: int, max_bytes: int | None) -> None:
        if self.root is None:
            files: Files = MemoryFiles()
            cap = max_bytes or int(files.free_bytes() * MEMORY_SHARE)
            self._store = Store(files, None, max_sessions=max_sessions, max_bytes=cap)
        else:
            disk = files = DiskFiles(self.root)
            try:
                idx = Index(self.root)
                store = self._store = Store(files, idx, max_sessions=max_sessions, max_bytes=1 << 62)
                store.max_sessions = 1 << 30  # caps hold from the moment everything is known
                self.found = startup.bring_up(store, disk, idx, max_sessions, max_bytes)
                store.max_sessions = max_sessions
                held = max(store.totals.disk, self.found.nbytes)
                store.unlisted = held - store.totals.disk
                left = sum(nbytes for nbytes, _ in files.left_behind)  # as good as free
                store.max_bytes = max_bytes or int((files.free_bytes() + held + left) * limits.DEFAULT_MAX_BYTES_SHARE)
                store.enforce()
                if not store.fits_now(0):  # what went is being freed
                    stream.drain(_START_PATIENCE)
            except OSError as error:
                files.close()
                raise StartupError(f"data directory {self.root}: {error}") from error
        self._files = files

    def _open_keyspace(self, keyspace: Keyspace | None, databases: int, appendfsync: str) -> Keyspace:
        if keyspace is not None:
            return keyspace
        keyspace = Keyspace(databases)
        if self.root is not None and self.wal:
            self.keyspace_store = KeyspaceStore(self.root, keyspace, appendfsync)
            try:
                self.keyspace_store.open()
            except OSError as error:
                raise StartupError(f"data directory {self.root}: {error}") from error
        return keyspace

    def _thread(self, name: str, body: Any) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tick_loop(self) -> None:
        while not self._closing.wait(1.0):
            self.fsync_tick()

    def _list_directory(self) -> None:
        if isinstance(self._files, DiskFiles):
            try:
                startup.list_directory(self._store, self._files, self.found)
                with self._store.lock, suppress(CommandError):
                    self._store.enforce()
            finally:
                self._store.finder, self._store.unlisted = None, 0

    def _dropped(self, entry: Entry) -> None:
        if entry.is_prefix:
            self._tables.drop(entry.name)
            self._matches.went(entry)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Make everything durable (unless told not to), write the index down, release the directory. Idempotent.

        Raises:
            StorageError: writing failed, and nobody has been told yet. The directory is released all the same.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._upkeep.stop()
        self._exports.close()
        try:
            self._end()
        finally:
            closed: Any = _Closed()
            self._sessions = self._prefixes = self._states = self._keeping = closed

    def _end(self) -> None:
        if self.root is None:
            self._upkeep.close()
            return
        told = bool(self._upkeep.failure or self.keyspace.sync_error)  # then the next start reads what was not sealed
        try:
            if not told:
                self._write_down()
        except OSError as error:
            raise StorageError(f"ERR the store was not closed in order: {error.strerror}") from error
        finally:
            self._upkeep.close()
            try:
                if self.keyspace_store is not None:
                    self.keyspace_store.close()
            except OSError as error:
                if not told:
                    raise StorageError(f"ERR the keyspace was not closed in order: {error.strerror}") from error
            finally:
                if self._store.index is not None:
                    self._store.index.close()
                self._files.close()

    def _write_down(self) -> None:
        if self._policy != "no":
            self._upkeep.commit()
        with self._store.lock:
            self._store.seal(list(self._store.restless))
        self._upkeep.rewrite_index(closed=True)

    def fsync_tick(self) -> None:
        """Once a second: flush (appendfsync everysec), seal and compact quiet entries. Does not wait for any of it."""
        self._upkeep.tick()
        self._exports.sweep()
        self._handouts.tick()

    # --- durability -------------------------------------------------------------------------------------------------

    def set_appendfsync(self, policy: str) -> None:
        """Change the policy while running; a store that keeps no promise goes on keeping none."""
        if policy not in POLICIES:
            raise ValueError(policy)
        if self.wal:
            self._policy = self._upkeep.policy = policy
            if self.keyspace_store is not None:
                self.keyspace_store.set_policy(policy)

    @property
    def always(self) -> bool:
        """Every acknowledged write has to be on the medium."""
        return self._policy == "always"

    def _acknowledge(self) -> None:
        if self._policy == "always" and not self.deferred_sync:
            self._commit("ERR the write could not be flushed")

    def _commit(self, text: str) -> None:
        try:
            self._upkeep.commit()
        except OSError as error:
            raise StorageError(f"{text} ({error.strerror})") from error

    def claim(self) -> Claim:
        """A context for the tries of one write that was answered CrowdedError."""
        return Claim(self._store)

    def relieve(self, crowded: CrowdedError) -> None:
        """Make the room that a write needs, by a compaction, or wait for it. Blocking."""
        compact.relieve(self._store, crowded)

    def _roomy(self, write: Callable[..., T], *args: Any) -> T:
        """Call something that writes, again and again while it has to wait for room."""
        try:
            return write(*args)
        except CrowdedError as error:
            if self.deferred_room:
                raise
            crowded = error.with_traceback(None)  # else it would hold the frames that hold it
        with self.claim() as claim:
            while True:
                claim.renew(crowded)
                compact.relieve(self._store, crowded)
                if claim.due(crowded):
                    try:
                        return write(*args)
                    except CrowdedError as error:
                        crowded = error.with_traceback(None)
                if claim.over(crowded):
                    raise crowded

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StorageError("ERR the engine is closed")

    def commit(self) -> None:
        """Return when everything acknowledged before is on stable storage.

        Raises:
            StorageError: a flush failed, now or earlier: nothing can be promised.
        """
        if not self.wal:
            raise CommandError("ERR KV.PREFIX.COMMIT: --no-wal, writes are not logged")
        try:
            self._upkeep.commit()
        except OSError as error:
            why = error.strerror
            raise StorageError(f"ERR KV.PREFIX.COMMIT: a log could not be flushed (or --no-wal): {why}") from error

    def checkpoint(self) -> None:
        """COMMIT and a fresh index; also without `wal`.

        Raises:
            OSError: writing failed.
        """
        self._upkeep.commit()
        self._upkeep.rewrite_index()
        self._store.appended = 0

    def save(self, path: str | None = None) -> None:
        """`checkpoint`; with a path instead a copy of every entry, as a data directory of its own below ours.

        Raises:
            StorageError: no session is held, or writing failed.
        """
        failed = "ERR KV.PREFIX.SAVE failed (no active sessions or io error)"
        if self.root is None:
            raise StorageError(failed)
        held = self._store.totals.sessions
        try:
            if path is None:
                self.checkpoint()
            elif held:
                save_copy(self._store, self.root, path)
        except OSError as error:
            raise StorageError(f"{failed}: {error.strerror}") from error
        if not held:
            raise StorageError(failed)

    def info(self) -> dict[str, int]:
        """The lines of KV.PREFIX.INFO, in the published order, then ours."""
        store, totals = self._store, self._store.totals
        with store.lock:
            log_bytes = self.keyspace_store.unsynced_bytes if self.keyspace_store is not None else 0
            return {
                "registered_prefixes": totals.prefixes,
                "total_prefix_tokens": totals.key_rows,
                "vstore_sessions": totals.sessions,
                "vstore_total_fetches": self._sessions.fetches,
                "vstore_evictions": store.evictions,
                "vstore_max_sessions": store.max_sessions,
                "vstore_bytes": totals.nbytes,
                "wal_enabled": int(self.wal),
                "wal_bytes": totals.unsynced + log_bytes if self.wal else 0,
                "wal_appended": store.appended,
                "wal_replayed": self.found.replayed,
                "directory_enabled": 0,
                "my_worker_id": 0,
                "directory_entries": 0,
                "sdpa_warm": 0,
                "sdpa_cold": 0,
                "sdpa_demotions": 0,
                "sdpa_rehydrates": 0,
                "vstore_file_bytes": totals.disk + sum(store.gone_bytes()),
                "vstore_max_bytes": store.max_bytes,
                "vstore_entries": len(store.entries),
                "vstore_quarantined": store.quarantined,
                "vstore_foreign_files": self.found.foreign,
                "vstore_listing": int(store.finder is not None),
                "vstore_sync_failed": int(bool(self._upkeep.failure)),
                "vstore_evicted": store.evicted,
                "vstore_expired": store.expired,
                "vstore_pinned": len(store.order.pins),
                "vstore_leased": len(store.order.leases),
                "vstore_shortened": store.shortened,
            }

    def set_aside(self) -> list[str]:
        """What this process found damaged and moved or copied aside: paths in the data directory, oldest first."""
        recovery = self.keyspace_store.recovery if self.keyspace_store is not None else None
        return [*(path.name for path in (recovery.set_aside if recovery else ())), *self._files.aside]

    # --- numpy ------------------------------------------------------------------------------------------------------

    def store(self, ns: bytes, layer: int, k: Any, v: Any, start: int = 0) -> None:
        """Store K and V rows of one layer of a registered prefix: arrays [rows, dim], float32, float16, or bfloat16
        words as uint16."""
        arrays.store(self, ns, layer, k, v, start)

    def fetch(self, ns: bytes) -> list[tuple[Any, Any]]:
        """(K, V) of every layer, each [rows, dim]: float16 of an fp16 prefix, float32 otherwise."""
        return arrays.fetch(self, ns)

    def compact(self, ns: bytes) -> bool:
        """Rewrite a prefix so that its rows stand together; normally the engine does this by itself."""
        self._check_open()
        return self._upkeep.compact_now(ns)
