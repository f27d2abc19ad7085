"""pion.index: which entries there are, so that a start need not open them.

An append-only file of compact records (framing.h) behind a file header. It is a summary: the entry files are the truth,
and the index can be rebuilt from them at any time. What it adds is speed at start, the order of last use, and the
certainty that a dropped entry stays dropped while its file is still on its way out.

A record of an entry is *clean* (its figures describe the whole file) or *dirty* (rows came later, look into the file).
The dirty mark is written before the first row that makes it true. An entry is announced before its file gets its name,
so that a start after a kill in between knows where to look before it answers.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pion._core import framing, vstore
from pion.store.regular import Watch, open_regular

TYPE: Final = b"PIDX"
VERSION: Final = 1
NAME: Final = "pion.index"

# Kinds
PUT: Final = 1  # value: _FIGURES, then the entry's META attributes
DROP: Final = 2  # value: generation
DIRTY: Final = 3
USED: Final = 4  # value: u64 clock
OPENED: Final = 5  # key: boot id; everything before it belongs to an earlier process
CLOSED: Final = 6  # the process ended in order: every record above is clean
MAKING: Final = 7  # an entry is about to get its file; older versions pass over it

_FIGURES: Final = struct.Struct("<QBQQQQQQ")  # as in Figures
CLEAN: Final = 1  # flag bits of a PUT
STATES: Final = 2  # holds recurrent state
KEYS: Final = 4  # has the K side (or is a raw entry)
VALUES: Final = 8
PINNED: Final = 16  # what the three say stands in `meta`: who sees none of them need not look there
EXPIRES: Final = 32
CHILD: Final = 64
TOLD: Final = 128  # written by a version that knows the three
_REWRITE_FROM: Final = 256 * 1024  # bytes; smaller files are not worth a rewrite


@dataclass(slots=True)
class Figures:
    """What the index says of an entry.

    Attributes:
        generation: of its file.
        flags: CLEAN, STATES, KEYS, VALUES, PINNED, EXPIRES, CHILD, TOLD.
        size: bytes of records in the file.
        synced: how many of them, from the beginning, were on the medium when this was written.
        key_rows, rows, nbytes: rows of the K side, of both sides, and their stored bytes.
        used: clock of the last use; larger is later.
        meta: packed sides and declaration (layout.unpack_meta).
    """

    generation: int
    flags: int
    size: int
    synced: int
    key_rows: int
    rows: int
    nbytes: int
    used: int
    meta: bytes

    def pack(self) -> bytes:
        """As the value of a PUT record."""
        return (
            _FIGURES.pack(
                self.generation, self.flags, self.size, self.synced, self.key_rows, self.rows, self.nbytes, self.used
            )
            + self.meta
        )


def unpack_figures(value: bytes) -> Figures:
    """The value of a PUT record."""
    generation, flags, size, synced, key_rows, rows, nbytes, used = _FIGURES.unpack_from(value)
    return Figures(generation, flags, size, synced, key_rows, rows, nbytes, used, value[_FIGURES.size :])


@dataclass(slots=True)
class Loaded:
    """What an index file says at start.

    Attributes:
        entries: by key.
        dropped: key → generation of entries that were dropped and not made again.
        making: keys of entries that may have got a file and were not described.
        trusted: the file is whole; otherwise the directory has to be listed before anything is believed.
        same_boot: the machine has not been restarted since, so what was written is in the page cache at least.
        closed: the last process ended in order.
        tail: bytes that were cut off, and why.
        records: how many were read.
        boot: id of the machine's boot in which the file was opened last; empty = never.
    """

    entries: dict[bytes, Figures] = field(default_factory=dict)
    dropped: dict[bytes, int] = field(default_factory=dict)
    making: set[bytes] = field(default_factory=set)
    trusted: bool = True
    same_boot: bool = True
    closed: bool = True
    tail: int = 0
    reason: str = ""
    records: int = 0
    boot: bytes = b""


def read_header(data: bytes) -> framing.FileHeader:
    """The first record of an index file. Raises FramingError; "version" when another version of Pion wrote it."""
    header = framing.unpack_file_header(data, type=TYPE)
    if header.version != VERSION:
        raise framing.FramingError("version")
    return header


def replay(data: bytes, header: framing.FileHeader, out: Loaded) -> int:
    """Take in the records of an index file; returns where they end, with the reason in `out` if that is too early."""
    view = memoryview(data)
    at = header.size
    unpack, seed = framing.unpack_log, header.seed
    closed = False
    while at < len(data):
        try:
            record = unpack(view[at:], seed)
        except framing.FramingError as error:
            out.reason = error.reason
            break
        at += record.total
        out.records += 1
        kind, key, value = record.kind, record.key, record.value
        closed = kind == CLOSED
        if kind == PUT:
            out.entries[key] = unpack_figures(value)
            out.dropped.pop(key, None)
            out.making.discard(key)
        elif kind == MAKING:
            out.making.add(key)
        elif kind == DROP:
            out.entries.pop(key, None)
            out.making.discard(key)
            out.dropped[key] = int.from_bytes(value, "little")
        elif kind == DIRTY and key in out.entries:
            out.entries[key].flags &= ~CLEAN
        elif kind == USED and key in out.entries:
            out.entries[key].used = int.from_bytes(value, "little")
        elif kind == OPENED:
            out.boot = key
    out.closed = closed
    return at


class Flush:
    """Descriptors of its own, so that the files may be exchanged meanwhile."""

    def __init__(self, fds: list[int], root: Path | None) -> None:
        self._fds, self._root = fds, root

    def run(self) -> None:
        """Wait until the files (and their names) are on the medium. Raises OSError."""
        try:
            for fd in self._fds:
                vstore.flush(fd)
            if self._root is not None:
                flush_directory(self._root)
        finally:
            for fd in self._fds:
                os.close(fd)


class Index:
    """The open index file. Calls are made with the store's lock held, and those of a `Flush` without it."""

    def __init__(self, root: Path) -> None:
        self.path = root / NAME
        self._root = root
        self._fd = -1
        self._seed = 0
        self._size = 0
        self._live = 0  # size right after the last rewrite
        self._moved = False  # renamed into place since the directory was last flushed
        self._unflushed = True  # records were written since the last `to_flush`
        self._watch = Watch()
        self._next: tuple[int, int] | None = None  # descriptor and seed of the file a running rewrite makes

    def load(self, keep_tail: Callable[[int, int, int], str], move_aside: Callable[[], str]) -> Loaded:
        """Read the file and open it for appending; a missing or foreign one is made anew.

        Args:
            keep_tail: called with (fd, offset, end) before a tail that is no record is cut off.
            move_aside: called when the file cannot even be opened, or is no file.
        """
        out = Loaded()
        try:
            self._fd = open_regular(self.path, os.O_RDWR)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
                raise
            out.trusted = False
            out.reason = "missing"
            if not isinstance(error, FileNotFoundError):
                out.reason = f"{error.strerror}; it was moved to {move_aside()}"
            self._create()
            return out
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size, 0)
        try:
            header = read_header(data)
        except framing.FramingError as error:
            out.trusted, out.reason, out.tail = False, f"header: {error.reason}", size
            keep_tail(self._fd, 0, size)
            os.close(self._fd)
            self._create()
            return out
        self._seed, self._size = header.seed, header.size
        end = replay(data, header, out)
        out.same_boot = bool(out.boot) and out.boot == boot_id()
        if end < size:
            out.tail = size - end
            # A record cut short is what a kill leaves of a write nobody was told of. Anything else is damage.
            out.trusted = out.reason == "short"
            keep_tail(self._fd, end, size)
            os.ftruncate(self._fd, end)
        out.trusted = out.trusted and (out.same_boot or out.closed)
        self._size = self._live = end
        return out

    def _create(self) -> None:
        self._fd, self._seed, self._size = self._fresh(self.path.with_suffix(".new"))
        os.rename(self.path.with_suffix(".new"), self.path)
        self._moved = True
        self._live = self._size

    def _fresh(self, path: Path) -> tuple[int, int, int]:
        header = framing.pack_file_header(
            TYPE, version=VERSION, generation=int.from_bytes(os.urandom(8), "little") or 1
        )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.pwrite(fd, header, 0)
        return fd, framing.unpack_file_header(header).seed, len(header)

    # --- records ----------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """This process begins."""
        self._append(OPENED, boot_id(), b"")
        self.damage()  # what is there now counts as whole

    def put(self, key: bytes, figures: Figures) -> None:
        """An entry is there with these figures. Raises OSError; the file is then as before."""
        self._append(PUT, key, figures.pack())

    def making(self, key: bytes) -> None:
        """An entry is about to get its file. Raises OSError."""
        self._append(MAKING, key, b"")

    def drop(self, key: bytes, generation: int) -> None:
        """An entry is gone."""
        self._append(DROP, key, generation.to_bytes(8, "little"))

    def dirty(self, key: bytes) -> None:
        """The figures of an entry are about to become wrong."""
        self._append(DIRTY, key, b"")

    def used(self, clocks: Iterable[tuple[bytes, int]]) -> None:
        """Last uses, in one write."""
        pairs = [(key, clock.to_bytes(8, "little")) for key, clock in clocks]
        for seed, fd in self._targets():
            self._write(fd, b"".join(framing.pack_log(USED, 0, key, value, 0, seed) for key, value in pairs))

    def _append(self, kind: int, key: bytes, value: bytes) -> None:
        for seed, fd in self._targets():
            self._write(fd, framing.pack_log(kind, 0, key, value, 0, seed))

    def _targets(self) -> list[tuple[int, int]]:
        first = [(self._seed, self._fd)]
        return first if self._next is None else [*first, (self._next[1], self._next[0])]

    def _write(self, fd: int, data: bytes) -> None:
        """At the end; a failed write is taken back."""
        at = self._size if fd == self._fd else os.lseek(fd, 0, os.SEEK_END)
        self._unflushed = True
        try:
            written = os.pwrite(fd, data, at)
            if written != len(data):
                raise OSError(28, os.strerror(28))
        except OSError:
            os.ftruncate(fd, at)
            raise
        if fd == self._fd:
            self._size += len(data)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    @property
    def bloated(self) -> bool:
        """Most of the file is out of date."""
        return self._size > _REWRITE_FROM and self._size > 2 * self._live

    def damage(self) -> str:
        """What somebody did to the file, "" = nothing."""
        return self._watch.look(self._fd, self._size, self._seed)

    def begin_rewrite(self) -> None:
        """From here on every record also goes to a new file; `rewrite` brings in what is there already."""
        fd, seed, _ = self._fresh(self.path.with_suffix(".new"))
        self._next = (fd, seed)
        self._append_next(OPENED, boot_id(), b"")

    def _append_next(self, kind: int, key: bytes, value: bytes) -> None:
        assert self._next is not None
        self._write(self._next[0], framing.pack_log(kind, 0, key, value, 0, self._next[1]))

    def rewrite(self, entries: Iterable[tuple[bytes, Figures]]) -> None:
        """Bring these entries into the new file."""
        if self._next is None:
            return
        fd, seed = self._next
        self._write(fd, b"".join(framing.pack_log(PUT, 0, key, figures.pack(), 0, seed) for key, figures in entries))

    def rewritten(self) -> Flush:
        """The new file, to be flushed without the lock before `end_rewrite`; if that fails, nothing depends on it."""
        assert self._next is not None
        return Flush([os.dup(self._next[0])], None)

    def end_rewrite(self, *, closed: bool = False) -> None:
        """Put the new file, which `flush` has made durable as far as that was promised, in the place of the old one.

        Raises:
            OSError: the old one stays.
        """
        if self._next is None:
            return
        fd, seed = self._next
        try:
            if closed:
                self._append_next(CLOSED, b"", b"")
                vstore.flush(fd)
            os.rename(self.path.with_suffix(".new"), self.path)
        except OSError:
            self.cancel_rewrite()
            raise
        os.close(self._fd)
        self._next, self._moved = None, True
        self._fd, self._seed = fd, seed
        self._size = self._live = os.lseek(fd, 0, os.SEEK_END)

    def cancel_rewrite(self) -> None:
        """Forget the new file."""
        if self._next is not None:
            os.close(self._next[0])
            self._next = None
            self.path.with_suffix(".new").unlink(missing_ok=True)

    def to_flush(self) -> Flush:
        """What a commit has to make durable; taken with the lock, flushed without it.

        Nothing, when no record was written since the last call. A caller whose flush fails calls nothing durable again.
        """
        if not (self._unflushed or self._moved):
            return Flush([], None)
        copies: list[int] = []
        try:
            for _, fd in self._targets():
                copies.append(os.dup(fd))
        except OSError:
            for fd in copies:
                os.close(fd)
            raise
        moved, self._moved, self._unflushed = self._moved, False, False
        return Flush(copies, self._root if moved else None)

    def close(self) -> None:
        """Close the file."""
        self.cancel_rewrite()
        os.close(self._fd)


def flush_directory(path: Path) -> None:
    """Make created, renamed and removed names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def boot_id() -> bytes:
    """Changes when the machine restarts; empty (never equal to a stored one) where the system does not tell."""
    if sys.platform == "darwin":
        done = subprocess.run(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=False)
        return done.stdout.strip()
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_bytes().strip() if path.exists() else b""
