"""Replacing a generation: a new log, then a snapshot of everything, then the old files go.

The keyspace serves all the time. The new log is durable before the first effect goes into it; the snapshot is written
in slices while the log grows, and as effects are absolute it does not matter which of them a slice has seen already.
Until the snapshot has its name, the old snapshot and both logs are what a start reads; from then on the old ones are
ignored by their numbers, whether they are removed or not.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final

from pion._core.kslog import LargeValue, Snapshot, sync_file
from pion.store.keyspace import files, objects
from pion.store.keyspace.files import LOG, SNAPSHOT

if TYPE_CHECKING:
    from pion.store.keyspace.store import KeyspaceStore

log = logging.getLogger("pion.keyspace")

Job = Callable[[], None]

SLICE: Final = 256 << 10
BATCH: Final = 4 << 20  # bytes collected before a job writes them


def rewrite(store: KeyspaceStore, budget_us: int) -> Generator[Job, None, None]:
    """Generate the jobs of a rewrite. Each may run in any thread and is done before the next one is asked for, which
    happens in the thread that owns the keyspace.

    When writers are refused because the log failed, this is the way back: they are welcome again once everything is
    written anew.

    Raises:
        OSError: writing failed; the generations on disk stay as they are.
    """
    keyspace, number = store.keyspace, store.number + 1
    failure = keyspace.refuses
    opened = _Files(store, number, bool(failure))
    try:
        yield opened.begin_log
        if not failure:
            keyspace.flush_log()
        store.switch(opened.take_log(), failure)
        yield opened.begin_snapshot
        snapshot = Snapshot(keyspace, opened.snapshot_seed, objects, renew=bool(failure))
        done = False
        while not done:
            parts: list[bytes] = []
            large: list[LargeValue] = []
            if not failure:
                keyspace.flush_log()  # a snapshot shows nothing that the log does not have
            deadline = time.perf_counter() + budget_us / 1e6
            while not (done or large or sum(map(len, parts)) >= BATCH or (parts and time.perf_counter() > deadline)):
                part = snapshot.slice(SLICE)
                done = part is None
                if part is not None:
                    parts.append(part[0])
                    large = part[1]
            yield opened.write_job(parts, large)
            store.superseded += [f"{old:016x}" for old in map(snapshot.settle, large) if old]
        yield opened.finish_job(snapshot.closing())
        store.replaced(number, opened.snapshot_bytes, bool(failure))
        yield store.remove_replaced
    finally:
        opened.close()


class _Files:
    """The files of a rewrite under way."""

    def __init__(self, store: KeyspaceStore, number: int, recovering: bool) -> None:
        self.sync, self.recovering = store.sync_log, recovering
        self.root, self.blob_fd, self.number, self.after = store.root, store.blob_fd, number, store.generation
        self.log: tuple[int, files.Head] | None = None
        self.log_generation = 0
        self.snapshot_fd = -1
        self.snapshot_seed = 0
        self.snapshot_bytes = 0
        self.target = files.path_of(self.root, SNAPSHOT, number)
        self.temporary = self.target.with_name(self.target.name + ".tmp")

    def begin_log(self) -> None:
        self.log = files.create(files.path_of(self.root, LOG, self.number), LOG, self.number, self.after)
        self.log_generation = self.log[1].generation
        sync_file(self.log[0])
        files.sync_directory(self.root)

    def take_log(self) -> tuple[int, files.Head]:
        assert self.log is not None
        taken, self.log = self.log, None
        return taken

    def begin_snapshot(self) -> None:
        self.snapshot_fd, head = files.create(self.temporary, SNAPSHOT, self.number, self.log_generation)
        self.snapshot_seed, self.snapshot_bytes = head.seed, head.size

    def write_job(self, parts: list[bytes], large: list[LargeValue]) -> Job:
        def write() -> None:
            data = list(parts)
            for value in large:
                value.write(self.blob_fd)
                self._sync_value(value)
                data.append(value.record(self.snapshot_seed))
            for piece in data:
                files.write_all(self.snapshot_fd, piece)
                self.snapshot_bytes += len(piece)

        return write

    def _sync_value(self, value: LargeValue) -> None:
        fd = os.open(f"{value.blob:016x}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.blob_fd)
        try:
            sync_file(fd)
        finally:
            os.close(fd)

    def finish_job(self, closing: bytes) -> Job:
        def finish() -> None:
            if not self.recovering:
                self.sync()  # all the snapshot has seen is in the log: what a power cut leaves was there at some moment
            files.write_all(self.snapshot_fd, closing)
            self.snapshot_bytes += len(closing)
            os.fsync(self.blob_fd)
            sync_file(self.snapshot_fd)
            os.rename(self.temporary, self.target)
            files.sync_directory(self.root)

        return finish

    def close(self) -> None:
        if self.log is not None:  # never used
            os.close(self.log[0])
            files.remove(files.path_of(self.root, LOG, self.number))
        if self.snapshot_fd >= 0:
            os.close(self.snapshot_fd)
            files.remove(self.temporary)
