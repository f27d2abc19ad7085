"""The files of the ordinary keyspace, verified as the next start would read them, without changing them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pion._core.framing import FramingError
from pion._core.keyspace import Keyspace
from pion._core.ksload import Loader, file_of, ghost_of, read_ghost, resync_log
from pion._core.kslog import blob_files
from pion.store.keyspace import files, objects
from pion.store.keyspace.files import LOG, SNAPSHOT, Head
from pion.store.regular import open_regular
from pion.tools.findings import WHY, Finding

DATABASES: Final = 63  # as many as a server can have
_PLAIN: Final = "torn"  # what a kill leaves behind the last record of a log


@dataclass(slots=True)
class KeyspaceFiles:
    """What the files of a keyspace hold.

    Attributes:
        keys: in all databases.
        records: whole ones that were read.
        files: logs, snapshots and value files that were compared.
        findings: what is wrong.
    """

    keys: int = 0
    records: int = 0
    files: int = 0
    findings: list[Finding] = field(default_factory=list)

    def found(self, path: str, offset: int | None, text: str, *, problem: bool = True) -> None:
        """Note something."""
        self.findings.append(Finding(path, offset, text, problem))


def nbytes(root: Path) -> int:
    """Of the files that `verify` will read."""
    snapshots, logs = files.find(root)
    paths = [files.path_of(root, SNAPSHOT, n) for n in snapshots] + [files.path_of(root, LOG, n) for n in logs]
    if (root / "blob").is_dir():
        paths += (root / "blob").iterdir()
    return sum(path.lstat().st_size for path in paths)


class _Verification:
    """One pass over the newest snapshot and the logs that follow it."""

    def __init__(self, root: Path, progress: Callable[[int], None]) -> None:
        self.root = root
        self.progress = progress
        self.out = KeyspaceFiles()
        self.blob_fd = -1
        self.base = 0
        self.generation = 0
        self._fresh()

    def _fresh(self) -> None:
        self.keyspace = Keyspace(DATABASES)
        self.loader = Loader(self.keyspace, objects, self.blob_fd)

    def run(self) -> KeyspaceFiles:
        snapshots, logs = files.find(self.root)
        if (self.root / "blob").is_dir():
            self.blob_fd = os.open(self.root / "blob", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fresh()
            self._snapshots(snapshots, logs)
            self._logs(logs)
            self._values()
        finally:
            if self.blob_fd >= 0:
                os.close(self.blob_fd)
        self.out.keys = sum(self.keyspace.size(db) for db in range(DATABASES))
        return self.out

    def _open(self, kind: bytes, number: int) -> tuple[int, Head | None, str]:
        """(descriptor or -1, head or None, name); what is wrong with the first record is noted."""
        path = files.path_of(self.root, kind, number)
        try:
            fd = open_regular(path)
        except OSError as error:
            self.out.found(path.name, None, f"cannot be read: {error.strerror}")
            return -1, None, path.name
        self.out.files += 1
        try:
            head = files.read_head(fd, kind)
        except FramingError as error:
            self.out.found(path.name, 0, f"the first record: {WHY.get(error.reason, error.reason)}")
            return fd, None, path.name
        if head.number != number:
            self.out.found(path.name, 0, f"the first record says that this is number {head.number}")
            return fd, None, path.name
        return fd, head, path.name

    def _snapshots(self, numbers: list[int], logs: list[int]) -> None:
        for at, number in reversed(list(enumerate(numbers))):
            fd, head, name = self._open(SNAPSHOT, number)
            if fd < 0:
                continue
            try:
                if head is None:
                    continue
                end = os.fstat(fd).st_size
                whole = self._records(fd, head, end, name, snapshot=True)
                self.progress(end)
                if not whole and at and numbers[at - 1] in logs:
                    older = numbers[at - 1]
                    self.out.found(name, None, f"the next start goes back to snapshot {older}", problem=False)
                    self._fresh()
                    continue
                self.base, self.generation = number, head.belongs_to
                for old in numbers[:at]:
                    name = files.path_of(self.root, SNAPSHOT, old).name
                    self.out.found(name, None, "of an older generation; the next start removes it", problem=False)
                return
            finally:
                os.close(fd)

    def _records(self, fd: int, head: Head, end: int, name: str, *, snapshot: bool = False) -> bool:
        """Read all whole records of a file; False when something else stands between or behind them."""
        at, whole = head.size, True
        while True:
            try:
                found = self.loader.load(fd, at, end, head.seed)
            except ValueError as error:
                self.out.found(name, None, str(error))
                return False
            self.out.records += found.records
            if found.reason == "end":
                if snapshot and whole and not found.complete:
                    self.out.found(name, found.offset, "its closing record is missing: the snapshot is not whole")
                    return False
                return whole
            whole, at = False, found.offset
            why = WHY.get(found.reason, found.reason)
            following = resync_log(fd, at + 1, end, head.seed)
            if following >= 0:
                self.out.found(name, at, f"{why}: {following - at} damaged bytes in front of whole records")
                at = following
                continue
            if found.reason == _PLAIN and not snapshot:
                text = f"{end - at} bytes of a write that was interrupted; the next start cuts them off"
                self.out.found(name, at, text, problem=False)
            else:
                self.out.found(name, at, f"{why}: {end - at} bytes behind the last whole record")
            return False

    def _logs(self, numbers: list[int]) -> None:
        last = 0
        for number in numbers:
            name = files.path_of(self.root, LOG, number).name
            if number < self.base:
                self.out.found(name, None, "of an older generation; the next start removes it", problem=False)
                continue
            fd, head, name = self._open(LOG, number)
            if fd < 0:
                continue
            try:
                if head is None:
                    continue
                if not self._belongs(head, last):
                    self.out.found(name, 0, f"does not follow generation {last or self.base}; it will not be used")
                    continue
                end = os.fstat(fd).st_size
                self._records(fd, head, end, name)
                self.progress(end)
                last, self.generation = number, head.generation
            finally:
                os.close(fd)
        if self.base and last < self.base:
            name = files.path_of(self.root, LOG, self.base).name
            self.out.found(name, None, "is missing: what was written after its snapshot is lost")

    def _belongs(self, head: Head, last: int) -> bool:
        """Whether a log is the next one of the chain; a missing one is noted."""
        before = last or self.base
        if not before:
            if head.number > 1:
                name = files.path_of(self.root, SNAPSHOT, head.number).name
                self.out.found(name, None, f"is missing, or the logs before pion.wal.{head.number} are")
            return True
        if head.number == self.base and not last:
            return head.generation == self.generation
        return head.number == before + 1 and head.belongs_to == self.generation

    def _values(self) -> None:
        """The files of large values."""
        self.loader.finish()
        for (db, key), reason in sorted(self.loader.damaged.items()):
            name = f"blob/{self.loader.lost_files[db, key]}"
            self.out.found(name, None, f"the value of key {key!r}, database {db}, is lost ({reason})")
        for db, key in sorted(self.loader.ghosts):
            value = ghost_of(self.keyspace, db, key)
            if value is None:
                continue
            self.out.files += 1
            if not read_ghost(self.blob_fd, value):
                text = f"does not hold the value of key {key!r}, database {db}, that the log says"
                self.out.found(f"blob/{file_of(value)}", None, text)
            self.progress(len(value))
        if self.blob_fd >= 0:
            orphans = set(os.listdir(self.blob_fd)) - blob_files(self.keyspace)
            if orphans:
                self.out.found("blob", None, f"{len(orphans)} files belong to no key", problem=False)


def verify(root: Path, progress: Callable[[int], None] = lambda _: None) -> KeyspaceFiles:
    """Read the newest snapshot and the logs behind it; every checksum is compared, also those of large values.

    Needs as much memory as the keyspace. Raises OSError when the directory cannot be read.
    """
    return _Verification(root, progress).run()
