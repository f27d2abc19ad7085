"""Entry files handed to clients on the same machine, which map them (KV.PREFIX.LANE).

What a prefix is made of and where it lies is told together with a ticket: a random word, good for one file, once, for a
few seconds. Whoever shows it gets a descriptor that can only read.

A file that was handed out is never shortened and never overwritten, since it is only appended to: a compaction writes
another one, a dropped one loses its name and keeps its blocks as long as somebody maps it. On Linux the kernel can be
asked whether somebody does (a lease is refused), so that these blocks count like those that slow readers hold.

Tickets cost no descriptors to speak of: the files of the newest few are held open. The file of an older one is opened
anew when it is shown, which fails with a reason if a compaction has written another one since.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pion import limits
from pion._core import framing
from pion.errors import CommandError, TicketError
from pion.store import files, layout, loader, reading
from pion.store.caps import descriptor_cap
from pion.store.entries import DamagedError, Entry, SessionNotFoundError
from pion.store.reading import StoredRows

if TYPE_CHECKING:
    from pion._core.stream import FdRef
    from pion.store.ledger import Ledger
    from pion.store.store import Store

__all__ = ["Contents", "Handouts", "Offer", "read_only"]

_TICKET_BYTES: Final = 16
_KNOWN: Final = 64  # entries whose contents are remembered: some 20 KB each
_U64: Final = struct.Struct("<QQ")


class Layer(NamedTuple):
    """One layer of one side: what its rows are, without segments, and (offset, nbytes) of their bytes in the file, in
    order."""

    stored: StoredRows
    pieces: list[tuple[int, int]]

    def packed_pieces(self) -> bytes:
        """The pieces, each two u64 little-endian."""
        return b"".join(_U64.pack(*piece) for piece in self.pieces)


@dataclass(eq=False)
class Contents:
    """Where everything of an entry lies, as long as nothing is written to it.

    Attributes:
        generation, changes: of the entry, when this was so.
        sides: the layers of K and of V.
        states: (number, offset, nbytes).
        nbytes: stored bytes of rows and states.
        told: what the command made of it, kept for the next one who asks.
    """

    generation: int
    changes: int
    sides: tuple[list[Layer], list[Layer]]
    states: list[tuple[int, int, int]]
    nbytes: int
    told: Any = None


class Offer(NamedTuple):
    """What a client is told of an entry.

    Attributes:
        ticket: to be shown at the socket.
        generation: of the file.
        digest, rows, heads: as declared; a row is `heads` times as many values, when it was said.
        contents: where everything lies.
    """

    ticket: bytes
    generation: int
    digest: str | None
    rows: int
    heads: int | None
    contents: Contents


class _Ticket(NamedTuple):
    entry: Entry
    generation: int
    ends: float
    nbytes: int


class Handouts:
    """The tickets of one process. Any thread."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store, self._ledger = store, ledger
        self._lock = threading.Lock()
        self._tickets: OrderedDict[bytes, _Ticket] = OrderedDict()
        self._files: OrderedDict[bytes, FdRef] = OrderedDict()  # of the newest tickets
        self._contents: OrderedDict[Entry, Contents] = OrderedDict()  # of the entries asked for last

    def must_wait(self, ns: bytes) -> bool:
        """An offer would read the whole entry first, to compare its checksums: make it in a thread."""
        with self._store.lock:
            entry = self._store.find(layout.PREFIX + ns)
            if entry is None:
                return False
            return loader.unchecked(entry) or not all(payload.checked for payload in entry.states.values())

    def offer(self, ns: bytes) -> Offer:
        """What a complete prefix is and where it lies, and a ticket for its file.

        Raises:
            SessionNotFoundError: there is none.
            DamagedError: a checksum is wrong.
            CommandError: it is not complete, or was registered without ROWS and LAYERS.
        """
        store, key = self._store, layout.PREFIX + ns
        with store.lock:
            known = key in store.entries
            entry = store.get(key)
            if entry is None:
                if known:
                    raise DamagedError(f"ERR the stored entry is out of service: {store.ends.get(key, 'damaged')}")
                raise SessionNotFoundError
            declared = entry.declared
            if declared.rows is None or declared.layers is None or entry.mask != 3 or not entry.complete:
                raise CommandError("ERR KV.PREFIX.LANE: only prefixes with ROWS and LAYERS that are complete")
            store.touch(entry)
            contents = self._contents_of(entry, declared.layers, declared.rows)
            ticket = self._issue(entry, store.ref(entry), contents.nbytes)
            return Offer(ticket, entry.generation, declared.digest, declared.rows, declared.heads, contents)

    def _contents_of(self, entry: Entry, layers: int, rows: int) -> Contents:
        """Looked at once for each state of the entry. The store's lock is held."""
        known = self._contents.get(entry)
        if known is not None and (known.generation, known.changes) == (entry.generation, entry.changes):
            self._contents.move_to_end(entry)
            return known
        keys, values = (self._layers(entry, side, layers, rows) for side in range(2))
        states = []
        for number, payload in sorted(entry.states.items()):
            loader.check_payload(self._store, entry, payload)
            states.append((number, payload.offset, payload.nbytes))
        nbytes = sum(layer.stored.nbytes for layer in (*keys, *values)) + sum(nbytes for _, _, nbytes in states)
        found = self._contents[entry] = Contents(entry.generation, entry.changes, (keys, values), states, nbytes)
        self._contents.move_to_end(entry)
        if len(self._contents) > _KNOWN:
            self._contents.popitem(last=False)
        return found

    def _layers(self, entry: Entry, side: int, layers: int, rows: int) -> list[Layer]:
        about = entry.sides[side]
        assert about is not None
        out = []
        for layer in range(layers):
            found = reading.stored(self._store, entry, about, side, layer, 0, rows)
            assert found is not None
            pieces = _joined((offset, nbytes) for _, offset, nbytes in found.segments)
            out.append(Layer(found._replace(segments=[]), pieces))  # they would hold the file
        return out

    def _issue(self, entry: Entry, file: FdRef, nbytes: int) -> bytes:
        ticket = secrets.token_hex(_TICKET_BYTES).encode()
        now = time.monotonic()
        with self._lock:
            self._expire(now)
            if len(self._tickets) >= limits.LANE_TICKETS:
                self._files.pop(self._tickets.popitem(last=False)[0], None)
            if len(self._files) >= min(limits.LANE_TICKET_FILES, descriptor_cap() // 4):
                self._files.popitem(last=False)
            self._files[ticket] = file
            self._tickets[ticket] = _Ticket(entry, entry.generation, now + limits.LANE_TICKET_SECONDS, nbytes)
        return ticket

    def _expire(self, now: float) -> None:
        while self._tickets:
            ticket, oldest = next(iter(self._tickets.items()))
            if oldest.ends > now:
                return
            del self._tickets[ticket]
            self._files.pop(ticket, None)

    def redeem(self, ticket: bytes) -> int:
        """A new descriptor, for reading only, of the file that a ticket is for. The ticket is used up.

        Raises:
            TicketError: there is no such ticket (any more), or its entry is gone or written anew.
            OSError: the file could not be opened.
        """
        with self._lock:
            self._expire(time.monotonic())
            found, file = self._tickets.pop(ticket, None), self._files.pop(ticket, None)
        if found is None:
            raise TicketError("no such ticket")
        with self._store.lock:
            if found.entry.gone:
                raise TicketError("the prefix is gone")
            held = file if file is not None else self._opened(found)
            fd = self._store.with_descriptor(
                lambda: read_only(held.fileno(), self._store.files.directory, found.entry.path)
            )
            self._store.lend(found.generation, held)
            self._ledger.bytes_served += found.nbytes
        return fd

    def _opened(self, ticket: _Ticket) -> FdRef:
        """The file of a ticket that was not held open. Raises TicketError or OSError."""
        store, entry = self._store, ticket.entry
        if entry.generation == ticket.generation and not loader.intact(store, entry):
            raise TicketError("the prefix is gone")
        if entry.generation == ticket.generation:
            held = store.ref(entry)
            with contextlib.suppress(framing.FramingError):
                if files.read_header(held.fileno())[0].generation == ticket.generation:
                    return held
        raise TicketError("the file of the prefix was written anew meanwhile: ask again")

    def tick(self) -> None:
        """Forget tickets that nobody came with, and entries that are gone. Once a second."""
        with self._lock:
            self._expire(time.monotonic())
        with self._store.lock:
            for entry in [entry for entry in self._contents if entry.gone]:
                del self._contents[entry]


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few pieces as possible."""
    out: list[tuple[int, int]] = []
    for offset, nbytes in pieces:
        if out and out[-1][0] + out[-1][1] == offset:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((offset, nbytes))
    return out


def read_only(fd: int, root: int | None, path: str) -> int:
    """Open the file of a descriptor once more, for reading only.

    Args:
        fd: open for writing.
        root: descriptor of the data directory, for systems without /proc; None: there is no name.
        path: of the file below it.

    Raises:
        OSError: it cannot be opened, or another file stands there now.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        opened = os.open(f"/proc/self/fd/{fd}", flags)
    except FileNotFoundError:
        if root is None:
            raise
        opened = os.open(path, flags | os.O_NOFOLLOW, dir_fd=root)
    mine, theirs = os.fstat(fd), os.fstat(opened)
    writable = fcntl.fcntl(opened, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    if writable or (mine.st_dev, mine.st_ino) != (theirs.st_dev, theirs.st_ino):
        os.close(opened)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    return opened
