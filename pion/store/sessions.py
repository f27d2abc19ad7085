"""V.*: sessions, which are sides of entries (wire.md §1).

A session name that ends in `_pk` or `_pv` is the K or V side of the entry of that namespace. Any other name is an entry
of its own with one side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pion import limits
from pion._core.stream import RAW, Extents
from pion.errors import CommandError
from pion.store import layout, loader, writes
from pion.store.entries import Entry, SessionNotFoundError
from pion.store.layout import UNDECLARED, Declared, Side
from pion.store.store import Store
from pion.store.writes import Write

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FP16: Final = limits.FORMATS["fp16"]
_FP32: Final = limits.FORMATS["fp32"]


@dataclass(slots=True)
class SessionInfo:
    """One session.

    Attributes:
        index: its number.
        dim, fmt: values per row; format code.
        rows: rows reported by each layer, gaps included.
        declared: what REGISTER said of the prefix.
    """

    index: int
    dim: int
    fmt: int
    rows: list[int]
    declared: Declared

    @property
    def num_layers(self) -> int:
        """One more than the highest layer ever stored."""
        return len(self.rows)


def locate(sid: bytes) -> tuple[bytes, int]:
    """Key of the entry and side of a session name."""
    tail = sid[-3:]
    if tail == b"_pk" and len(sid) > 3:
        return layout.PREFIX + sid[:-3], layout.KEYS
    if tail == b"_pv" and len(sid) > 3:
        return layout.PREFIX + sid[:-3], layout.VALUES
    return layout.RAW + sid, layout.KEYS


class Sessions:
    """The V commands on a store. Every method takes the store's lock.

    Raises (all methods with a session name): SessionNotFoundError.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fetches = 0
        self._last_snapshot = 0

    def _find(self, sid: bytes) -> tuple[Entry, int, Side]:
        key, side = locate(sid)
        entry = self.store.get(key)
        about = entry.sides[side] if entry is not None else None
        if entry is None or about is None:
            raise SessionNotFoundError
        return entry, side, about

    def exists(self, sid: bytes) -> bool:
        """Whether the session is there. No use is noted."""
        key, side = locate(sid)
        entry = self.store.entries.get(key)
        return entry is not None and bool(entry.mask & (1 << side))

    def create(self, sid: bytes, dim: int, fmt: int) -> int:
        """Make a session unless it is there already (dimension and format are then kept); returns its number."""
        if not 1 <= len(sid) <= limits.MAX_SID:
            raise CommandError(f"ERR session_id length must be 1..{limits.MAX_SID}")
        key, side = locate(sid)
        store = self.store
        with store.lock:
            entry = store.get(key)
            if entry is None:
                sides: list[Side | None] = [None, None]
                sides[side] = Side(dim, fmt)
                entry = store.create(key, sides, UNDECLARED)
            elif entry.sides[side] is None:
                self._add_side(entry, side, Side(dim, fmt))
            store.touch(entry)
            return store.slot(entry, side)

    def _add_side(self, entry: Entry, side: int, about: Side) -> None:
        store = self.store
        store.make_slots(1, entry)
        before = entry.sides
        sides = list(before)
        sides[side] = about
        store.recounted(entry, lambda: entry.describe(sides, entry.declared))
        try:
            writes.append_meta(store, entry, "V.CREATE")
        except CommandError:
            store.recounted(entry, lambda: entry.describe(before, entry.declared))
            raise

    # --- storing ----------------------------------------------------------------------------------------------------

    def store_rows(self, sid: bytes, layer: int, start: int, count: int, blob: Buffer, fmt: str) -> None:
        """Rows that are in memory, in one write."""
        store = self.store
        with store.lock:
            entry, side, about = self._find(sid)
            source = writes.SOURCES[fmt]
            self._check_place(entry, about, layer, start, count, memoryview(blob).nbytes, source)
            store.touch(entry)
            writes.append_rows(store, entry, side, layer, start, count, source, blob)
            if store.fragmented is not None:
                store.fragmented(entry)

    def _check_place(
        self, entry: Entry, about: Side, layer: int, start: int, count: int, nbytes: int, source: int
    ) -> None:
        if layer < 0 or start < 0 or count <= 0:
            raise CommandError("ERR invalid layer_id/start_id/count")
        if layer >= limits.MAX_LAYERS:
            raise CommandError("ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS")
        width = 4 if source == _FP32 else 2
        if source >= 0 and nbytes != count * about.dim * width:
            raise CommandError(
                f"ERR V.STOREBATCH: blob size {nbytes} != expected {count * about.dim * width} "
                f"(count={count} × per_layer_dim={about.dim} × {width})"
            )
        if start + count > limits.MAX_ROWS:
            raise CommandError("ERR V.STOREBATCH failed")
        declared = entry.declared
        if declared.rows is not None and declared.layers is not None:
            if start + count > declared.rows:
                raise CommandError(
                    f"ERR V.STOREBATCH: rows {start}..{start + count} go beyond the declared ROWS {declared.rows}"
                )
            if layer >= declared.layers:
                raise CommandError(
                    f"ERR V.STOREBATCH: layer {layer} is not below the declared LAYERS {declared.layers}"
                )

    def open_store(self, sid: bytes, layer: int, start: int, count: int, nbytes: int) -> Write:
        """Where a large body goes while it arrives."""
        store = self.store
        with store.lock:
            entry, side, about = self._find(sid)
            source = -1 if nbytes == 2 * count * about.dim else _FP32
            self._check_place(entry, about, layer, start, count, nbytes, source)
            store.touch(entry)
            return writes.open_write(
                store, entry, layout.STORE, nbytes, side=side, layer=layer, start=start, count=count
            )

    def finish_store(self, sink: Write, fmt: str) -> None:
        """The body has arrived and is of this format."""
        about = sink.entry.sides[sink.side]
        width = 4 if fmt == "F32" else 2
        if about is None or sink.nbytes != sink.count * about.dim * width:
            writes.abandon(self.store, sink)
            raise CommandError("ERR V.STOREBATCH: blob size does not fit its format")
        writes.publish(self.store, sink, fmt)
        if self.store.fragmented is not None:
            self.store.fragmented(sink.entry)

    # --- fetching ---------------------------------------------------------------------------------------------------

    def must_wait(self, sid: bytes) -> bool:
        """A fetch would first read the whole session to compare its checksums (once after each start): call `prepare`
        in a thread before it."""
        key, _ = locate(sid)
        with self.store.lock:
            entry = self.store.entries.get(key)
            return entry is not None and loader.unchecked(entry)

    def prepare(self, sid: bytes) -> None:
        """Compare the checksums of a session without holding the lock; a later fetch does not read for that."""
        entry = self.load(locate(sid)[0])
        if entry is not None:
            loader.precheck(self.store, entry)

    def load(self, key: bytes) -> Entry | None:
        """Read an entry's headers, most of the time without holding the lock."""
        entry = self.store.entries.get(key)
        if entry is not None:
            loader.warm(self.store, entry)
        with self.store.lock:
            return self.store.get(key)

    def fetch_range(self, sid: bytes, layer: int, start: int, end: int, native: bool, raw: bool) -> Extents | None:
        """Rows [start, end) of one layer; None when the layer has none of them."""
        store = self.store
        with store.lock:
            entry, side, about = self._find(sid)
            store.touch(entry)
            return self._fetch(entry, side, about, layer, start, end, native, raw)

    def fetch_batch(
        self, sid: bytes, start: int, end: int, num_layers: int | None, native: bool, raw: bool
    ) -> list[Extents | None]:
        """The same for the first `num_layers` layers (all that are stored when None)."""
        store = self.store
        with store.lock:
            entry, side, about = self._find(sid)
            store.touch(entry)
            assert entry.rows is not None
            layers = entry.rows.layers(side)
            if num_layers is not None and 0 < num_layers <= layers:
                layers = num_layers
            return [self._fetch(entry, side, about, layer, start, end, native, raw) for layer in range(layers)]

    def _fetch(
        self, entry: Entry, side: int, about: Side, layer: int, start: int, end: int, native: bool, raw: bool
    ) -> Extents | None:
        rows = entry.rows
        assert rows is not None
        self.fetches += end - start
        if start >= rows.tokens(side, layer):
            return None
        if entry.declared.rows is not None:
            self._check_declared(entry, side, layer, start, end)
        loader.check_rows(self.store, entry, side, layer, start, end)
        segments = rows.segments(self.store.ref(entry), side, layer, start, end, about.row_bytes)
        if len(segments) > limits.COMPACT_EXTENTS and self.store.fragmented is not None:
            self.store.fragmented(entry, quiet=True)
        if raw or about.fmt == _FP32 or (native and about.fmt == _FP16):
            return Extents(segments)
        return Extents(segments, about.fmt, about.dim)

    def _check_declared(self, entry: Entry, side: int, layer: int, start: int, end: int) -> None:
        """Of a declared prefix the rows asked for are there or they are an error, never zeros."""
        rows, declared = entry.rows, entry.declared
        assert rows is not None
        assert declared.rows is not None
        assert declared.layers is not None
        if end > declared.rows or not 0 <= layer < declared.layers:
            raise CommandError(
                f"ERR V.FETCH: layer {layer} rows {start}..{end} are outside the declared "
                f"{declared.layers} layers of {declared.rows} rows"
            )
        if not rows.covers(side, layer, start, end):
            raise CommandError(
                f"ERR V.FETCH: layer {layer} does not hold all rows {start}..{end} "
                f"(it has {rows.live(side, layer)} of the declared {declared.rows})"
            )

    def fetch_ids(self, sid: bytes, layer: int, ids: list[int]) -> Extents | None:
        """Rows in the order of `ids`, as FP32; zeros for positions the layer does not have."""
        store = self.store
        with store.lock:
            entry, side, about = self._find(sid)
            store.touch(entry)
            rows = entry.rows
            assert rows is not None
            self.fetches += len(ids)
            tokens, stride = rows.tokens(side, layer), about.row_bytes
            if not any(0 <= row < tokens for row in ids):
                return None
            if entry.declared.rows is not None:
                for row in ids:
                    self._check_declared(entry, side, layer, row, row + 1)
            ref = store.ref(entry)
            segments = []
            for row in ids:
                if 0 <= row < tokens:
                    loader.check_rows(store, entry, side, layer, row, row + 1)
                    segments += rows.segments(ref, side, layer, row, row + 1, stride)
                else:
                    segments.append((None, 0, stride))
            return Extents(segments, RAW if about.fmt == _FP32 else about.fmt, about.dim)

    # --- telling ----------------------------------------------------------------------------------------------------

    def info(self, sid: bytes) -> SessionInfo:
        """What one session is. No use is noted."""
        store = self.store
        with store.lock:
            entry, side, about = self._find(sid)
            assert entry.rows is not None
            rows = [entry.rows.tokens(side, layer) for layer in range(entry.rows.layers(side))]
            return SessionInfo(store.slot(entry, side), about.dim, about.fmt, rows, entry.declared)

    def dim(self, sid: bytes) -> int:
        """Values per row."""
        with self.store.lock:
            return self._find(sid)[2].dim

    def num_layers(self, sid: bytes) -> int:
        """One more than the highest layer ever stored."""
        with self.store.lock:
            entry, side, _ = self._find(sid)
            assert entry.rows is not None
            return entry.rows.layers(side)

    # --- rollback ---------------------------------------------------------------------------------------------------

    def snapshot(self, sid: bytes) -> int:
        """Remember the length of every layer of a session, in memory only; returns the snapshot's id."""
        store = self.store
        with store.lock:
            entry, side, _ = self._find(sid)
            assert entry.rows is not None
            if entry.snapshots is None:
                entry.snapshots = {}
            if sum(1 for kept in entry.snapshots.values() if kept[0] == side) >= limits.MAX_SNAPSHOTS:
                raise CommandError(f"ERR V.SNAPSHOT: no free snapshot slot (max {limits.MAX_SNAPSHOTS} per session)")
            self._last_snapshot += 1
            lengths = [entry.rows.tokens(side, layer) for layer in range(entry.rows.layers(side))]
            entry.snapshots[self._last_snapshot] = [side, *lengths]
            return self._last_snapshot

    def restore(self, sid: bytes, ident: int) -> None:
        """Cut the layers that are longer than at the snapshot. The cut is written to the file, not flushed."""
        store = self.store
        with store.lock:
            entry, side, _ = self._find(sid)
            kept = (entry.snapshots or {}).get(ident)
            if kept is None or kept[0] != side:
                raise CommandError("ERR V.RESTORE: unknown snap_id for this session")
            rows = entry.rows
            assert rows is not None
            for layer in range(rows.layers(side)):
                length = kept[layer + 1] if layer + 1 < len(kept) else 0
                if rows.tokens(side, layer) > length:
                    writes.append_payload(store, entry, "V.RESTORE", layout.TRIM, layer=layer, side=side, count=length)
                    rows.trim(side, layer, length)
            store.recounted(entry, entry.recount)

    def release(self, sid: bytes, ident: int) -> int:
        """Forget a snapshot; 1 when it was there."""
        with self.store.lock:
            entry, side, _ = self._find(sid)
            if entry.snapshots is None or entry.snapshots.get(ident, [-1])[0] != side:
                return 0
            del entry.snapshots[ident]
            return 1
