"""The keyspace on disk: opening, syncing, rewriting.

`flush_log` of the keyspace writes what a batch of commands changed; this module makes it durable, keeps the log from
growing for ever and brings everything back at the next start. Which files there are stands in files.py, what a start
makes of them in replay.py, how a generation is replaced in rewrite.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from pion._core.keyspace import Keyspace, Value
from pion._core.ksload import ghost_of, place, read_ghost
from pion._core.kslog import blob_files, drops_waiting, end_sync, sync_blobs, sync_file, synced, take_drops, written
from pion.store.keyspace import files, objects
from pion.store.keyspace.files import LOG
from pion.store.keyspace.replay import Recovery, Replay, describe
from pion.store.keyspace.rewrite import Job, rewrite
from pion.store.regular import Watch

log = logging.getLogger("pion.keyspace")

REWRITE_MIN: Final = 64 << 20  # a log below this is replayed in a moment: Redis's auto-aof-rewrite-min-size
REWRITE_GROWTH: Final = 1.0  # and it has to be as large again as the snapshot: auto-aof-rewrite-percentage 100
REWRITE_PAUSE: Final = 60.0  # seconds after a rewrite that failed
LOOK_EVERY: Final = 1.0  # seconds between looks at the log's file
IDLE_SYNC: Final = 10.0  # with appendfsync no: seconds between syncs that give back the files of dropped values


class KeyspaceStore:
    """Keeps a keyspace in a directory that nobody else uses (the caller holds its lock).

    One thread owns the keyspace and calls `tick`, `set_policy`; the one that opened it, until `adopt`. `fsync` may be
    called from any thread; called by the owner it also writes what is pending.

    Args:
        root: the data directory.
        keyspace: an empty one.
        appendfsync: "no", "everysec" (the caller calls `fsync` every second) or "always" (`flush_log` is durable).
        rewrite_min: bytes of log from which on a rewrite is considered.
        rewrite_growth: how much larger than the snapshot, as a factor, the log must be.
    """

    def __init__(
        self,
        root: str | Path,
        keyspace: Keyspace,
        appendfsync: str = "everysec",
        *,
        rewrite_min: int = REWRITE_MIN,
        rewrite_growth: float = REWRITE_GROWTH,
    ) -> None:
        self.root = Path(root)
        self.keyspace = keyspace
        self._policy: Any = appendfsync
        self.rewrite_min = rewrite_min
        self.rewrite_growth = rewrite_growth
        self.recovery = Recovery()
        self.rewrites = self.failed_rewrites = 0
        self.number = self.base = 0  # of the log, of the snapshot
        self.generation = 0
        self.snapshot_bytes = 0
        self.blob_fd = -1
        self.log_fd = -1
        self.older: list[int] = []  # descriptors of logs that are to be synced before the current one
        self.older_bytes = 0
        self.superseded: list[str] = []  # value files that only generations before the next snapshot need
        self._owner = 0
        self._files_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._steps: Generator[Job, None, None] | None = None
        self._step: Future[None] | None = None
        self._cold: list[tuple[int, bytes]] = []
        self._warming: tuple[int, bytes, Value, Future[bool]] | None = None
        self._wanted = False
        self._not_before = self._idle_sync = self._next_look = 0.0
        self._refusing = False
        self._log_watch = Watch()

    @property
    def blob_dir(self) -> Path:
        """Where the files of large values stand."""
        return self.root / "blob"

    # --- start and end ----------------------------------------------------------------------------------------------

    def open(self) -> Recovery:
        """Read everything back and attach the log.

        Raises:
            StartupError: a log has records of a newer version, or of a database that there is not.
            OSError: the directory cannot be used.
        """
        self._owner = threading.get_ident()
        if os.path.lexists(self.blob_dir) and not self.blob_dir.is_dir():
            log.error("%s is no directory: it was moved to %s", self.blob_dir, files.move_aside(self.blob_dir))
        self.blob_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.blob_fd = os.open(self.blob_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._open()
        except BaseException:
            self._close_files()
            raise
        return self.recovery

    def _open(self) -> None:
        for name in os.listdir(self.root):
            if name.startswith("pion.snapshot.") and name.endswith(".tmp"):
                files.remove(self.root / name)
        replay = Replay(self.root, self.keyspace, self.blob_fd)
        chain = replay.run()
        self.recovery = replay.recovery
        self.base, self.snapshot_bytes, self.log_fd = chain.base, chain.snapshot_bytes, chain.fd
        offset, seed, number, generation = chain.offset, chain.seed, chain.number, chain.generation
        if self.log_fd < 0:
            number = chain.base + 1
            self.log_fd, head = files.create(files.path_of(self.root, LOG, number), LOG, number, generation)
            offset, seed, generation = head.size, head.seed, head.generation
        else:
            os.ftruncate(self.log_fd, offset)
            self.older_bytes = chain.log_bytes - offset
        sync_file(self.log_fd)
        files.sync_directory(self.root)
        self.number, self.generation = number, generation
        self._cold = chain.cold
        for path in chain.stale:
            log.info("%s is of an older generation: removed", path.name)
            files.remove(path)
        self._remove_orphans()
        self.keyspace.attach_log(self.log_fd, offset, seed, policy=self._policy, blob_fd=self.blob_fd, codec=objects)
        end_sync(self.keyspace, written(self.keyspace))
        self._log_watch.look(self.log_fd, self.keyspace.log_bytes, self.number)
        self._wanted = not self.recovery.clean
        self._worker = ThreadPoolExecutor(1, "pion-keyspace")

    def _remove_orphans(self) -> None:
        """Value files that no key points at: of values dropped just before the end, or never logged."""
        orphans = set(os.listdir(self.blob_dir)) - blob_files(self.keyspace)
        if orphans and not self.recovery.clean:
            log.error("%d files in %s belong to no key; they stay, as a log is damaged", len(orphans), self.blob_dir)
            return
        for name in orphans:
            files.remove(self.blob_dir / name)

    def close(self) -> None:
        """Write and sync what is pending, detach the log. In any thread: nobody else uses the keyspace any more.

        Raises:
            OSError: something that was acknowledged may not be kept.
        """
        if self.log_fd < 0:
            return
        self.adopt()
        if self._worker is not None:
            self._worker.shutdown()
        if self._steps is not None:
            self._steps.close()  # a rewrite under way is given up; the next start goes on from the logs
        try:
            self.fsync()
        finally:
            self.keyspace.detach_log()
            self._close_files()

    def _close_files(self) -> None:
        for fd in (*self.older, self.log_fd, self.blob_fd):
            if fd >= 0:
                os.close(fd)
        self.older, self.log_fd, self.blob_fd = [], -1, -1

    def adopt(self) -> None:
        """The calling thread owns the keyspace from now on. Whoever opens it in a worker thread must say so: that
        thread will serve others, and one of them would write the log while the owner does."""
        self._owner = threading.get_ident()

    # --- durability -------------------------------------------------------------------------------------------------

    def fsync(self) -> None:
        """Return when everything in the log is on disk.

        Raises:
            OSError: it is not. After a failed sync nothing more is called durable, and writers are refused unless
                appendfsync is "no", until `rewrite_now` has written everything anew.
        """
        if threading.get_ident() == self._owner:
            self.keyspace.flush_log()
        self.sync_log()

    def sync_log(self) -> None:
        """`fsync` of what is written."""
        with self._sync_lock:
            position = written(self.keyspace)
            with self._files_lock:
                older, current = list(self.older), self.log_fd
            if self.keyspace.sync_error:
                raise OSError(self.keyspace.sync_error, os.strerror(self.keyspace.sync_error))
            if position > synced(self.keyspace):
                try:
                    sync_blobs(self.keyspace)
                    for fd in (*older, current):
                        sync_file(fd)
                except OSError as error:
                    end_sync(self.keyspace, position, error.errno or 5)
                    log.error("the log could not be synced: %s; nothing more is called durable", error.strerror)
                    raise
                end_sync(self.keyspace, position)
            with self._files_lock:
                self.older = [fd for fd in self.older if fd not in older]
            for fd in older:
                os.close(fd)
            while names := take_drops(self.keyspace):
                for name in names:
                    files.remove(self.blob_dir / name)

    def set_policy(self, appendfsync: str) -> None:
        """Change appendfsync. Raises OSError when what is pending cannot be synced."""
        self.fsync()
        self.keyspace.log_policy = appendfsync

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of log that are not on disk yet, as far as we know."""
        return max(0, written(self.keyspace) + self.keyspace.log_pending - synced(self.keyspace))

    @property
    def log_bytes(self) -> int:
        """Bytes of all logs since the snapshot."""
        return self.older_bytes + self.keyspace.log_bytes

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def tick(self, budget_us: int = 2000) -> None:
        """Some ten times a second, by the owner: write what expiry logged, try failed writes again, go on rewriting."""
        keyspace = self.keyspace
        if keyspace.log_error and keyspace.retry_log():
            log.warning("writing the log works again")
            self._refusing = False
        if not keyspace.refuses and keyspace.log_pending:
            self._flush()
        if keyspace.refuses and not self._refusing:
            log.error("the log cannot be written (%s): writers are refused", os.strerror(keyspace.refuses))
            self._refusing = True
        self._watch()
        self._advance(budget_us)
        self._warm()

    def _watch(self) -> None:
        """Write everything anew when somebody has cut or removed the log: memory still has what it held."""
        if self.rewriting or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY
        what = self._log_watch.look(self.log_fd, self.keyspace.log_bytes, self.number)
        if what:
            log.error("pion.wal.%d %s under the running server: everything is written anew", self.number, what)
            self.request_rewrite()

    def _warm(self) -> None:
        """Load large values one after the other, so that few of them are read by the command that asks for them."""
        if self._warming is not None:
            db, key, value, done = self._warming
            if not done.done():
                return
            if done.result():
                place(self.keyspace, db, key, value)
            self._warming = None
        while self._cold and self._worker is not None:
            db, key = self._cold.pop()
            ghost = ghost_of(self.keyspace, db, key)
            if ghost is not None:
                self._warming = db, key, ghost, self._worker.submit(read_ghost, self.blob_fd, ghost)
                return

    def _flush(self) -> None:
        try:
            self.keyspace.flush_log()
        except OSError as error:
            log.error("writing the log failed: %s", error.strerror)

    def _advance(self, budget_us: int) -> None:
        if self._worker is None or (self._step is not None and not self._step.done()):
            return
        if self._steps is None:
            if drops_waiting(self.keyspace) and time.monotonic() > self._idle_sync:
                self._idle_sync = time.monotonic() + (IDLE_SYNC if self.keyspace.log_policy == "no" else 1.0)
                self._step = self._worker.submit(self.sync_log)
            if not self._due():
                return
            self._wanted = False
            self._steps = rewrite(self, budget_us)
        try:
            if self._step is not None:
                step, self._step = self._step, None
                step.result()
            job = next(self._steps, None)
        except (OSError, MemoryError) as error:
            self._give_up(error)
            return
        if job is None:
            self._steps = None
            self.rewrites += 1
        else:
            self._step = self._worker.submit(job)

    def _due(self) -> bool:
        if self._wanted:
            return True
        if self.keyspace.refuses or time.monotonic() < self._not_before:
            return False
        return self.log_bytes >= max(self.rewrite_min, self.rewrite_growth * self.snapshot_bytes)

    def _give_up(self, error: Exception) -> None:
        log.error("rewriting the log failed: %s; the old files stay in use", error)
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self.failed_rewrites += 1
        self._not_before = time.monotonic() + REWRITE_PAUSE

    @property
    def rewriting(self) -> bool:
        """A rewrite is under way or asked for."""
        return self._steps is not None or self._wanted

    def request_rewrite(self) -> None:
        """Let `tick` begin a rewrite; also the way back when the log failed."""
        self._wanted = True

    def rewrite_now(self) -> None:
        """Rewrite at once, in this thread (the owner's).

        Raises:
            OSError: it failed; the old files stay in use.
        """
        while self._steps is not None:
            if self._step is not None:
                wait([self._step])
            self._advance(1_000_000)
        try:
            for job in rewrite(self, 1_000_000):
                job()
        except OSError:
            self.failed_rewrites += 1
            raise
        self._wanted = False
        self.rewrites += 1

    # --- what a rewrite does ----------------------------------------------------------------------------------------

    def switch(self, begun: tuple[int, files.Head], failure: int) -> None:
        """Let the next effects go to a new log. With a failure (errno) what the old one lacks is given up."""
        fd, head = begun
        with self._files_lock:  # the files first: whoever sees the new position syncs the new file too
            self.older.append(self.log_fd)
            self.older_bytes += self.keyspace.log_bytes
            self.log_fd = fd
        self.number, self.generation = head.number, head.generation
        keyspace = self.keyspace
        keyspace.attach_log(
            fd, head.size, head.seed, policy=keyspace.log_policy, blob_fd=self.blob_fd, codec=objects, error=failure
        )

    def replaced(self, number: int, nbytes: int, recovered: bool) -> None:
        """The snapshot of this generation is complete and durable."""
        self.base, self.snapshot_bytes, self.older_bytes = number, nbytes, 0
        if recovered:
            with self._sync_lock, self._files_lock:
                gone, self.older = self.older, []
            for fd in gone:
                os.close(fd)
            self.keyspace.accept()
            end_sync(self.keyspace, written(self.keyspace))
            log.warning("everything is written anew: writers are welcome again")

    def remove_replaced(self) -> None:
        """Remove the files of older generations. Any thread."""
        snapshots, logs = files.find(self.root)
        for kind, numbers in ((files.SNAPSHOT, snapshots), (LOG, logs)):
            for number in numbers:
                if number < self.base:
                    files.remove(files.path_of(self.root, kind, number))
        names, self.superseded = self.superseded, []
        for name in names:
            files.remove(self.blob_dir / name)
        files.sync_directory(self.root)
        self.sync_log()

    def figures(self) -> dict[str, int]:
        """For INFO."""
        keyspace = self.keyspace
        return {
            **describe(self.recovery),
            "keyspace_log_generation": self.number,
            "keyspace_log_bytes": self.log_bytes,
            "keyspace_log_unsynced": self.unsynced_bytes,
            "keyspace_log_error": keyspace.log_error,
            "keyspace_sync_error": keyspace.sync_error,
            "keyspace_snapshot_bytes": self.snapshot_bytes,
            "keyspace_cold_values": len(self._cold),
            "keyspace_lost_now": keyspace.lost_values,
            "keyspace_rewrites": self.rewrites,
            "keyspace_failed_rewrites": self.failed_rewrites,
            "keyspace_rewriting": int(self.rewriting),
        }
