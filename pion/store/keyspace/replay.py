"""Reading a keyspace back from its snapshot and logs.

The rules for what is not whole:

* A torn, zeroed or garbage tail of the last log is what a crash leaves. It is cut off, a copy of it is kept.
* Damage in front of whole records is not a tail. If a later record proves that the damaged place had been on disk
  (every sync leaves such a record), it is corruption: the damaged bytes are set aside, and what is whole behind them
  still counts, as dropping it would lose more and bring back what it deleted. Without that proof it may as well be a
  power cut that wrote the end of the file before the middle: then the log is cut there, so that what is kept is what
  was there at some moment.
* A file that does not belong to the chain of generations, that cannot be read or is of another version of the format
  is moved aside.

Nothing of this stops a start, everything of it is reported.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pion._core.framing import FramingError
from pion._core.keyspace import Keyspace
from pion._core.ksload import Loader, resync_log
from pion.errors import StartupError
from pion.store.keyspace import files, objects
from pion.store.keyspace.files import LOG, SNAPSHOT, Head
from pion.store.regular import open_regular

log = logging.getLogger("pion.keyspace")


@dataclass
class Recovery:
    """What a start found.

    Attributes:
        records: replayed, snapshot included.
        cut_bytes: of unusable tails, set aside.
        damaged_bytes: in places with whole records behind them, set aside.
        lost_values: keys whose value file is missing or wrong.
        unused_files: whole files that could not be used.
        set_aside: where all of that is kept.
    """

    records: int = 0
    cut_bytes: int = 0
    damaged_bytes: int = 0
    lost_values: int = 0
    unused_files: int = 0
    set_aside: list[Path] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Nothing was missing or wrong but the torn tail that every crash may leave."""
        return not (self.damaged_bytes or self.lost_values or self.unused_files)


@dataclass
class Chain:
    """The newest files of a directory, read.

    Attributes:
        base: number of the snapshot, 0 without one.
        snapshot_bytes: its size.
        number: of the last log, 0 without one.
        generation: of the last log, or of the log the snapshot belongs to.
        seed: of the last log.
        fd: of the last log, open for reading and writing; -1 without one.
        offset: behind its last whole record.
        log_bytes: of all logs that count.
        cold: (db, key) of large values that are not loaded yet.
        stale: files of older generations, to be removed once the start is complete.
    """

    base: int = 0
    snapshot_bytes: int = 0
    number: int = 0
    generation: int = 0
    seed: int = 0
    fd: int = -1
    offset: int = 0
    log_bytes: int = 0
    cold: list[tuple[int, bytes]] = field(default_factory=list)
    stale: list[Path] = field(default_factory=list)


class Replay:
    """Read a directory into an empty keyspace."""

    def __init__(self, root: Path, keyspace: Keyspace, blob_fd: int) -> None:
        self.root = root
        self.keyspace = keyspace
        self.loader = Loader(keyspace, objects, blob_fd)
        self.recovery = Recovery()

    def run(self) -> Chain:
        """Read everything.

        Raises:
            StartupError: a file has records of a newer version, or more databases than there are.
            OSError: reading failed.
        """
        snapshots, logs = files.find(self.root)
        chain = Chain()
        self._load_snapshot(chain, snapshots)
        chain.stale += [files.path_of(self.root, LOG, number) for number in logs if number < chain.base]
        following = [number for number in logs if number >= chain.base]
        for i, number in enumerate(following):
            if not self._load_log(chain, number, following[i + 1 :]):
                self._refuse(following[i:] if chain.number != number else following[i + 1 :])
                break
        if chain.base and not following:
            log.error("pion.wal.%d is missing: what was written after its snapshot is lost", chain.base)
        self.loader.finish()
        chain.cold = list(self.loader.ghosts)
        for (db, key), reason in self.loader.damaged.items():
            name = self.loader.lost_files[db, key]
            log.error("database %d, key %r: the file of its value, blob/%s, is lost (%s); the key is gone",
                      db, key, name, reason)  # fmt: skip
            self.recovery.lost_values += 1
            with suppress(FileNotFoundError):
                self.recovery.set_aside.append(files.move_aside(self.root / "blob" / name, f"blob.{name}"))
        return chain

    # --- snapshots --------------------------------------------------------------------------------------------------

    def _load_snapshot(self, chain: Chain, numbers: list[int]) -> None:
        """Load the newest complete snapshot, or what is left of the newest."""
        for number in reversed(numbers):
            path = files.path_of(self.root, SNAPSHOT, number)
            fd = self._opened(path, os.O_RDONLY)
            if fd < 0:
                self._unused(path)
                continue
            try:
                head = self._head(path, fd, SNAPSHOT, number)
                if head is None:
                    continue
                end = os.fstat(fd).st_size
                found = self.loader.load(fd, head.size, end, head.seed)
                whole = found.complete
                older = [other for other in numbers if other < number]
                if not whole and older and (self.root / f"pion.wal.{older[-1]}").exists():
                    log.error("%s is not whole (%s at byte %d); going back to snapshot %d",
                              path.name, found.reason, found.offset, older[-1])  # fmt: skip
                    self._unused(path)
                    self.keyspace.flush()
                    self.keyspace.expire_cycle(60_000_000)
                    continue
                self.recovery.records += found.records
                if whole and found.reason != "end":  # something was appended to it
                    self._aside(path, fd, found.offset, end - found.offset, found.reason)
                    self.recovery.cut_bytes += end - found.offset
                    with suppress(PermissionError):
                        os.truncate(path, found.offset)
                    end = found.offset
                if not whole:
                    self._salvage(path, fd, found.offset, end, head.seed, found.reason)
                chain.base, chain.snapshot_bytes, chain.generation = number, end, head.belongs_to
                chain.stale += [files.path_of(self.root, SNAPSHOT, other) for other in older]
                return
            finally:
                os.close(fd)

    def _salvage(self, path: Path, fd: int, offset: int, end: int, seed: int, reason: str) -> None:
        """Go on behind every damaged place of a snapshot: its records do not depend on each other."""
        log.error("%s is not whole (%s at byte %d); what is whole in it counts", path.name, reason, offset)
        self.recovery.damaged_bytes += 1 if reason == "end" else 0  # its closing record is what is missing
        while reason != "end":
            self._known(path, reason)
            following = resync_log(fd, offset + 1, end, seed)
            stop = following if following >= 0 else end
            self._aside(path, fd, offset, stop - offset, reason)
            self.recovery.damaged_bytes += stop - offset
            found = self.loader.load(fd, stop, end, seed)
            self.recovery.records += found.records
            offset, reason = found.offset, found.reason

    # --- logs -------------------------------------------------------------------------------------------------------

    def _load_log(self, chain: Chain, number: int, later: list[int]) -> bool:
        """Replay one log; False when what follows, or with another `chain.number` the log itself, does not count."""
        path = files.path_of(self.root, LOG, number)
        fd = self._opened(path, os.O_RDWR)
        if fd < 0:
            return False
        head = self._head(path, fd, LOG, number)
        if head is None or not self._belongs(chain, head, path):
            os.close(fd)
            return False
        if chain.fd >= 0:
            os.close(chain.fd)
        chain.fd, chain.number, chain.generation, chain.seed = fd, number, head.generation, head.seed
        chain.offset, intact = self._replay(path, fd, head, os.fstat(fd).st_size, later)
        chain.log_bytes += chain.offset
        return intact or not later

    def _belongs(self, chain: Chain, head: Head, path: Path) -> bool:
        """Whether a log is the next one of the chain."""
        last = chain.number or chain.base
        if not last:
            if head.number > 1:
                log.error("%s: pion.snapshot.%d, or the logs before it, are missing", path.name, head.number)
                self.recovery.damaged_bytes += 1
            return True
        if head.number == chain.base and not chain.number:
            belongs = head.generation == chain.generation
        else:
            belongs = head.number == last + 1 and head.belongs_to == chain.generation
            if belongs and not chain.number:
                log.error("pion.wal.%d is missing: what was written after its snapshot is lost", chain.base)
                self.recovery.damaged_bytes += 1
        if not belongs:
            log.error("%s does not follow generation %d", path.name, last)
        return belongs

    def _replay(self, path: Path, fd: int, head: Head, end: int, later: list[int]) -> tuple[int, bool]:
        """Apply the records of a log; returns where it ends, and whether logs behind it still count."""
        offset = head.size
        while True:
            found = self.loader.load(fd, offset, end, head.seed)
            self.recovery.records += found.records
            offset = found.offset
            if found.reason == "end":
                return offset, True
            self._known(path, found.reason)
            following = resync_log(fd, offset + 1, end, head.seed)
            whole = 0
            if following >= 0 and found.reason != "group":
                whole, durable = self._look_ahead(fd, following, end, head.seed)
                if durable > offset or self._synced(later):
                    lost = following - offset
                    self._aside(path, fd, offset, lost, found.reason)
                    self.recovery.damaged_bytes += lost
                    log.error("%s: %d bytes at %d are damaged (%s) although they had been on disk; %d whole records "
                              "behind them still count", path.name, lost, offset, found.reason, whole)  # fmt: skip
                    offset = following
                    continue
            self._aside(path, fd, offset, end - offset, found.reason)
            self.recovery.cut_bytes += end - offset
            if whole:
                self.recovery.damaged_bytes += end - offset
                log.error("%s: cut at byte %d (%s): %d bytes, among them %d whole records that were never synced, are "
                          "set aside", path.name, offset, found.reason, end - offset, whole)  # fmt: skip
            else:
                log.warning("%s: cut a tail of %d bytes at byte %d (%s)", path.name, end - offset, offset, found.reason)
            return offset, self._synced(later)

    def _look_ahead(self, fd: int, offset: int, end: int, seed: int) -> tuple[int, int]:
        """(whole records behind a damaged place, how far a later record says the file was on disk)."""
        records = durable = 0
        while 0 <= offset < end:
            found = self.loader.load(fd, offset, end, seed, apply=False)
            records, durable = records + found.records, max(durable, found.durable)
            if found.reason == "end":
                break
            offset = resync_log(fd, found.offset + 1, end, seed)
        return records, durable

    def _synced(self, later: list[int]) -> bool:
        """Whether a later log was ever synced: then so had been all before it."""
        for number in later:
            try:
                fd = open_regular(files.path_of(self.root, LOG, number))
            except OSError:
                continue
            try:
                head = files.read_head(fd, LOG)
                if self._look_ahead(fd, head.size, os.fstat(fd).st_size, head.seed)[1]:
                    return True
            except FramingError:
                continue
            finally:
                os.close(fd)
        return False

    # --- what is wrong ----------------------------------------------------------------------------------------------

    def _opened(self, path: Path, flags: int) -> int:
        """A descriptor, or -1 when the file cannot be used: no permission, or something else has its name."""
        try:
            return open_regular(path, flags)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
                raise
            log.error("%s cannot be read: %s", path.name, error.strerror)
            return -1

    def _head(self, path: Path, fd: int, kind: bytes, number: int) -> Head | None:
        try:
            head = files.read_head(fd, kind)
        except FramingError as error:
            if error.reason == "version":
                log.error("%s was written by another version of Pion", path.name)
            else:
                log.error("%s: its first record is not whole (%s)", path.name, error.reason)
            if kind == SNAPSHOT:
                self._unused(path)
            return None
        if head.number != number:
            log.error("%s says it is number %d", path.name, head.number)
            if kind == SNAPSHOT:
                self._unused(path)
            return None
        return head

    def _known(self, path: Path, reason: str) -> None:
        if reason == "kind":
            raise StartupError(f"{path}: has records of a newer version of Pion")
        if reason == "database":
            raise StartupError(f"{path}: has keys in a database above {self.keyspace.databases - 1}; raise --databases")

    def _aside(self, path: Path, fd: int, offset: int, nbytes: int, reason: str) -> None:
        try:
            copy = files.set_aside(path, fd, offset, nbytes)
        except OSError as error:  # no reason to lose what is whole
            log.error("%s: no copy of %d bytes from %d on (%s): %s", path.name, nbytes, offset, reason, error.strerror)
            return
        self.recovery.set_aside.append(copy)
        log.warning("%s: %d bytes from %d on (%s) are kept in %s", path.name, nbytes, offset, reason, copy.name)

    def _refuse(self, numbers: list[int]) -> None:
        for number in numbers:
            self._unused(files.path_of(self.root, LOG, number))

    def _unused(self, path: Path) -> None:
        try:
            copy = files.move_aside(path)
        except FileNotFoundError:
            return
        self.recovery.unused_files += 1
        self.recovery.set_aside.append(copy)
        log.error("%s is not used; it is kept as %s", path.name, copy.name)


def describe(recovery: Recovery) -> dict[str, int]:
    """The figures of a start, for INFO."""
    return {
        "keyspace_loaded_records": recovery.records,
        "keyspace_cut_bytes": recovery.cut_bytes,
        "keyspace_damaged_bytes": recovery.damaged_bytes,
        "keyspace_lost_values": recovery.lost_values,
        "keyspace_unused_files": recovery.unused_files,
    }
