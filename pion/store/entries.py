"""One entry in memory, and the errors of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pion._core import framing
from pion.errors import CommandError, MismatchError, OutOfMemoryError
from pion.store import index, layout
from pion.store.layout import UNDECLARED, Declared, Side

if TYPE_CHECKING:
    from pion._core.stream import FdRef
    from pion._core.vstore import Rows

Sides = Sequence[Side | None]
NO_SIDES: Final[Sides] = (None, None)  # shared by all entries whose file has not been read, like the next
NO_STATES: Final[dict[int, Payload]] = {}
BLOCK: Final = 4096  # what a file occupies is counted in blocks of this size


class SessionNotFoundError(CommandError):
    """No such session. Clients match on this text."""

    def __init__(self, text: str = "ERR session not found") -> None:
        super().__init__(text)


class DamagedError(CommandError):
    """A stored record does not match its checksum; it is out of service and will never be answered."""


class CrowdedError(OutOfMemoryError):
    """A write needs room that is taken for a while: wait for it (`compact.relieve`) and write again.

    Nothing was changed, though others may have been evicted.

    Attributes:
        entry: its dead bytes take the room; None: removed files do, which are being freed.
        keep: another entry, which is written to: it must not go while the write waits.
        key: of the entry that is written to, where removed files take the room.
        nbytes: needed then.
        evicted: as much was evicted for it; else there was nothing to evict, or only what waits itself.
        busy: what is left is written or read by others, who may end.
    """

    def __init__(
        self,
        entry: Entry | None,
        text: str,
        keep: Entry | None = None,
        *,
        key: bytes = b"",
        nbytes: int = 0,
        evicted: bool = False,
        busy: bool = False,
    ) -> None:
        super().__init__(text)
        self.entry = entry
        self.keep = keep
        self.key, self.nbytes, self.evicted, self.busy = key, nbytes, evicted, busy


@dataclass(slots=True)
class Payload:
    """A body in an entry file that is not rows: where it is, and whether its checksum has been compared."""

    record: int
    offset: int
    nbytes: int
    checked: bool
    extra: int = 0  # BLOCKS: the block size


class Entry:
    """What is known of one entry. All attributes belong to the store's lock.

    Attributes:
        key: identity.
        generation, seed: of the file.
        sides: K and V (a raw entry has only the first); None = not created.
        rows: where the rows are; None until the file has been read.
        states, blocks: recurrent state by layer; block-hash table.
        size: bytes of records, reservations included; the next record goes here.
        base: size right after the last compaction.
        key_rows, row_count, nbytes: totals that INFO shows.
        used: number of the last use.
        parent, pinned, expires: as declared; known before the file has been read. 0 = never expires.
        queued, timed: of order.py: it is in the heap of leaves; the end it has in that of ends.
        ref: the open file.
        writers: bodies that are streaming in.
        waiting: writes that wait for the compaction of another entry, or for what was evicted for them.
        open: these bodies.
        compacting: a worker is writing the file anew.
        doubled: bytes that came since, charged for its new file as well.
        awaited: a writer waits until it can be: no further body begins to stream in.
        strained: until then (monotonic seconds) no writer waits for it: it was tried and gained nothing.
        dirty: the index knows that its figures are out of date.
        unsynced: bytes written since the last flush.
        synced: bytes of the file, from its beginning, that are on the medium for certain.
        quiet: ticks without a write.
        slots: session numbers by side, given out on demand.
        prefill_ms: as registered in this process.
        changes: records written, or found damaged, in this process.
        gone: dropped; the object may still be in somebody's hands.
    """

    __slots__ = (
        "_meta", "_path", "awaited", "base", "blocks", "changes", "compacting", "declared", "dirty", "doubled",
        "expires", "generation", "gone", "has_states", "key", "key_rows", "mask", "nbytes", "open", "parent", "pinned",
        "prefill_ms", "queued", "quiet", "ref", "row_count", "rows", "seed", "sides", "size", "slots", "snapshots",
        "states", "strained", "synced", "timed", "unsynced", "used", "waiting",
        "writers",
    )  # fmt: skip

    def __init__(self, key: bytes, generation: int) -> None:
        self.key = key
        self._path = ""
        self.generation = generation
        self.seed = 0
        self.sides: Sides = NO_SIDES
        self.declared: Declared = UNDECLARED
        self.mask = 0
        self.has_states = False
        self.rows: Rows | None = None
        self.states: dict[int, Payload] = NO_STATES
        self.blocks: Payload | None = None
        self.size = 0
        self.base = 0
        self.key_rows = 0
        self.row_count = 0
        self.nbytes = 0
        self.used = 0
        self.parent: bytes | None = None
        self.pinned = self.queued = False
        self.expires = self.timed = 0
        self.ref: FdRef | None = None
        self.writers = self.waiting = 0
        self.open: tuple[Any, ...] = ()
        self.compacting = False
        self.awaited = False
        self.doubled = 0
        self.strained = 0.0
        self.dirty = True
        self.unsynced = 0
        self.synced = 0
        self.quiet = 0
        self.slots: list[int | None] | None = None
        self.prefill_ms = 0
        self.snapshots: dict[int, list[int]] | None = None
        self.changes = 0
        self.gone = False
        self._meta = b""

    @classmethod
    def from_index(cls, key: bytes, figures: index.Figures) -> Entry:
        """An entry whose file has not been looked at."""
        entry = cls(key, figures.generation)
        entry.size, entry.synced = figures.size, figures.synced
        entry.key_rows, entry.row_count, entry.nbytes = figures.key_rows, figures.rows, figures.nbytes
        entry.used = figures.used
        entry.dirty = not figures.flags & index.CLEAN
        entry.has_states = bool(figures.flags & index.STATES)
        entry.mask = (1 if figures.flags & index.KEYS else 0) | (2 if figures.flags & index.VALUES else 0)
        entry._meta = figures.meta
        if not figures.flags & index.TOLD or figures.flags & (index.PINNED | index.EXPIRES | index.CHILD):
            with contextlib.suppress(framing.FramingError):  # its file may tell
                entry.parent, entry.pinned, entry.expires = layout.unpack_kept(figures.meta)
        return entry

    def figures(self, *, clean: bool) -> index.Figures:
        """For the index."""
        flags = index.CLEAN if clean else 0
        flags |= (index.STATES if self.has_states else 0) | (index.KEYS if self.mask & 1 else 0)
        flags |= (index.VALUES if self.mask & 2 else 0) | (index.PINNED if self.pinned else 0) | index.TOLD
        flags |= (index.EXPIRES if self.expires else 0) | (index.CHILD if self.parent is not None else 0)
        return index.Figures(
            self.generation,
            flags,
            self.size,
            self.synced,
            self.key_rows,
            self.row_count,
            self.nbytes,
            self.used,
            self.meta,
        )

    @property
    def meta(self) -> bytes:
        """Packed sides and declaration."""
        if not self._meta:
            self._meta = layout.pack_meta(self.sides, self.declared)
        return self._meta

    def describe(self, sides: Sides, declared: Declared) -> None:
        """Take on what a META record says."""
        self.sides, self.declared = sides, declared
        self.mask = (sides[0] is not None) | (sides[1] is not None) << 1
        self._meta = b""
        self.parent, self.pinned, self.expires = declared.parent, bool(declared.pinned), declared.expires or 0

    def peek(self) -> Declared:
        """The declaration, from the index when the file has not been read."""
        if self.rows is None and self._meta:
            return layout.unpack_meta(self._meta)[1]
        return self.declared

    @property
    def path(self) -> str:
        """Of its file, relative to the data directory."""
        if not self._path:
            self._path = layout.entry_path(self.key)
        return self._path

    @property
    def name(self) -> bytes:
        """Namespace or raw session name."""
        return self.key[1:]

    @property
    def is_prefix(self) -> bool:
        """A namespace, not a raw session."""
        return self.key[:1] == layout.PREFIX

    @property
    def side_count(self) -> int:
        """Sessions this entry stands for."""
        return (0, 1, 1, 2)[self.mask]

    @property
    def disk(self) -> int:
        """Bytes the file is charged for."""
        return (self.size + BLOCK - 1) // BLOCK * BLOCK

    @property
    def complete(self) -> bool:
        """As declared: every layer of both sides holds every row, and every state is there. True when nothing was
        declared."""
        declared = self.declared
        if declared.states is not None and any(number not in self.states for number in range(declared.states)):
            return False
        if declared.rows is None or declared.layers is None:
            return True
        return self.rows is not None and self.rows.complete(declared.rows, declared.layers)

    def expect(self, digest: str | None) -> None:
        """What is about to be written belongs to this digest; None: it does not say.

        Raises:
            MismatchError: the entry is another one's, by now perhaps.
        """
        if digest is not None and self.declared.digest != digest.lower():
            held = f"digest {self.declared.digest}" if self.declared.digest else "no digest"
            name = self.name.decode("utf-8", "backslashreplace")
            raise MismatchError(f"MISMATCH '{name}' is stored with another digest ({held}, not {digest})")

    def recount(self) -> None:
        """Totals from the rows."""
        assert self.rows is not None
        key_rows, key_bytes = self._total(self.rows, layout.KEYS)
        value_rows, value_bytes = self._total(self.rows, layout.VALUES)
        self.key_rows = key_rows if self.is_prefix else 0
        self.row_count = key_rows + value_rows
        self.nbytes = key_bytes + value_bytes
        self.has_states = bool(self.states)

    def _total(self, rows: Rows, number: int) -> tuple[int, int]:
        total, nbytes = rows.total(number)
        side = self.sides[number]
        if side is not None and side.has_keys:
            layers = range(rows.layers(number))
            nbytes = sum(side.stored_bytes(layer, rows.tokens(number, layer)) for layer in layers)
        return total, nbytes
