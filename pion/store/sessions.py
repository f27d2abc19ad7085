"""V.*: sessions, which are sides of entries (wire.md §1).

A session name that ends in `_pk` or `_pv` is the K or V side of the entry of that namespace. Any other name is an entry
of its own with one side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pion import limits
from pion._core import vstore
from pion._core.stream import Extents
from pion.errors import CommandError, MismatchError
from pion.store import bodies, groups, layout, loader, reading, writes
from pion.store.bodies import Write
from pion.store.entries import DamagedError, Entry, SessionNotFoundError
from pion.store.layout import UNDECLARED, Declared, Side
from pion.store.reading import StoredRows
from pion.store.store import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FP32: Final = limits.FORMATS["fp32"]


@dataclass(slots=True)
class SessionInfo:
    """One session.

    Attributes:
        index: its number.
        dim, fmt: values per row; format code. Of the first layer, when layers differ.
        rows: rows reported by each layer, gaps included.
        declared: what REGISTER said of the prefix.
        layers: (dim, format) of each layer; the code is in the lowest byte of the format, its parameter above.
        states: layers of recurrent state that the entry holds besides.
    """

    index: int
    dim: int
    fmt: int
    rows: list[int]
    declared: Declared
    layers: list[tuple[int, int]]
    states: int = 0

    @property
    def num_layers(self) -> int:
        """One more than the highest layer ever stored, or as many as the schema has."""
        return len(self.rows)

    @property
    def uniform(self) -> bool:
        """Every layer is of the session's dimension, and every layer with rows of its format."""
        return all(
            dim == self.dim and (not rows or layout.code_of(fmt) == self.fmt)
            for (dim, fmt), rows in zip(self.layers, self.rows, strict=True)
        )


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

    def find(self, sid: bytes) -> tuple[Entry, int, Side]:
        """Entry, side and what the side is made of. The store's lock is held."""
        key, side = locate(sid)
        known = key in self.store.entries
        entry = self.store.get(key)
        about = entry.sides[side] if entry is not None else None
        if entry is None and known:  # until now
            raise DamagedError(f"ERR the stored entry is out of service: {self.store.ends.get(key, 'damaged')}")
        if entry is None or about is None:
            raise SessionNotFoundError
        return entry, side, about

    def exists(self, sid: bytes) -> bool:
        """Whether the session is there. No use is noted."""
        key, side = locate(sid)
        entry = self.store.find(key)
        return entry is not None and bool(entry.mask & (1 << side))

    def create(self, sid: bytes, dim: int, fmt: int, layers: tuple[tuple[int, int], ...] = ()) -> int:
        """Make a session unless it is there already; returns its number.

        Args:
            dim, fmt: of every layer; an existing session keeps its own.
            layers: (dim, fmt) of the first layers, where they differ. `dim` may be 0: then there are no others.

        Raises:
            MismatchError: the session is there with other layers.
        """
        if not 1 <= len(sid) <= limits.MAX_SID:
            raise CommandError(f"ERR session_id length must be 1..{limits.MAX_SID}")
        key, side = locate(sid)
        store = self.store
        with store.lock:
            entry = store.get(key)
            about = layout.stored_as(key, side, Side(dim, fmt, layers), entry.declared.head_dim if entry else None)
            held = entry.sides[side] if entry is not None else None
            if entry is None:
                sides: list[Side | None] = [None, None]
                sides[side] = about
                entry = store.create(key, sides, UNDECLARED)
            elif held is None:
                self._add_side(entry, side, about)
            elif layers and not held.same(about):
                raise MismatchError("MISMATCH the session is there with another schema")
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

    def store_rows(
        self, sid: bytes, layer: int, start: int, count: int, blob: Buffer, fmt: str, digest: str | None
    ) -> None:
        """Rows that are in memory, in one write; of the prefix with this digest, if it says so."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            entry.expect(digest)
            source = writes.SOURCES[fmt]
            self._check_place(entry, about, layer, start, count, memoryview(blob).nbytes, source)
            store.touch(entry)
            append = groups.append_rows if vstore.is_keys(about.of(layer)[1]) else writes.append_rows
            append(store, entry, side, layer, start, count, source, blob)
            store.means_anew(entry, start)
            if store.fragmented is not None:
                store.fragmented(entry)

    def _check_place(
        self, entry: Entry, about: Side, layer: int, start: int, count: int, nbytes: int, source: int
    ) -> None:
        if layer < 0 or start < 0 or count <= 0:
            raise CommandError("ERR invalid layer_id/start_id/count")
        if layer >= limits.MAX_LAYERS:
            raise CommandError("ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS")
        dim, width = about.of(layer)[0], 4 if source == _FP32 else 2
        if dim == 0:
            raise CommandError(f"ERR V.STOREBATCH: layer {layer} is not among the {len(about.layers)} of the schema")
        if source >= 0 and nbytes != count * dim * width:
            raise CommandError(
                f"ERR V.STOREBATCH: blob size {nbytes} != expected {count * dim * width} "
                f"(count={count} × per_layer_dim={dim} × {width})"
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
            entry, side, about = self.find(sid)
            source = -1 if nbytes == 2 * count * about.of(layer)[0] else _FP32
            self._check_place(entry, about, layer, start, count, nbytes, source)
            store.touch(entry)
            return bodies.open_write(
                store, entry, layout.STORE, nbytes, side=side, layer=layer, start=start, count=count
            )

    def finish_store(self, sink: Write, fmt: str, digest: str | None) -> None:
        """The body has arrived, is of this format, and belongs to this digest."""
        bodies.expect(self.store, sink, digest)
        about = sink.entry.sides[sink.side]
        width, start = 4 if fmt == "F32" else 2, sink.start
        if about is None or sink.nbytes != sink.count * about.of(sink.layer)[0] * width:
            bodies.abandon(self.store, sink)
            raise CommandError("ERR V.STOREBATCH: blob size does not fit its format")
        if vstore.is_keys(sink.fmt):
            groups.publish(self.store, sink, fmt)
        else:
            bodies.publish(self.store, sink, fmt)
        with self.store.lock:
            self.store.means_anew(sink.entry, start)
        if self.store.fragmented is not None:
            self.store.fragmented(sink.entry)

    # --- fetching ---------------------------------------------------------------------------------------------------

    def must_wait(self, sid: bytes) -> bool:
        """A fetch would first read the whole session to compare its checksums (once after each start): call `prepare`
        in a thread before it."""
        key, _ = locate(sid)
        with self.store.lock:
            entry = self.store.find(key)
            return entry is not None and loader.unchecked(entry)

    def prepare(self, sid: bytes) -> None:
        """Compare the checksums of a session without holding the lock; a later fetch does not read for that."""
        entry = self.load(locate(sid)[0])
        if entry is not None:
            loader.precheck(self.store, entry)

    def load(self, key: bytes) -> Entry | None:
        """Read an entry's headers, most of the time without holding the lock."""
        entry = self.store.find(key)
        if entry is not None:
            loader.warm(self.store, entry)
        with self.store.lock:
            return self.store.get(key)

    def fetch_range(self, sid: bytes, layer: int, start: int, end: int, native: bool) -> Extents | None:
        """Rows [start, end) of one layer; None when the layer has none of them."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            store.touch(entry)
            self.fetches += end - start
            return reading.rows(store, entry, about, side, layer, start, end, native=native)

    def fetch_batch(
        self, sid: bytes, start: int, end: int, num_layers: int | None, native: bool
    ) -> list[Extents | None]:
        """The same of the first layers (default, and when there are fewer: all)."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            store.touch(entry)
            layers = self._layers(entry, side, about, num_layers)
            self.fetches += (end - start) * layers
            return [
                reading.rows(store, entry, about, side, layer, start, end, native=native) for layer in range(layers)
            ]

    def fetch_stored(self, sid: bytes, layer: int, start: int, end: int) -> StoredRows | None:
        """Rows [start, end) of one layer as they are stored; None when the layer has none of them."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            store.touch(entry)
            self.fetches += end - start
            return reading.stored(store, entry, about, side, layer, start, end)

    def batch_stored(self, sid: bytes, start: int, end: int, num_layers: int | None) -> list[StoredRows | None]:
        """The same of the first layers (default, and when there are fewer: all)."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            store.touch(entry)
            layers = self._layers(entry, side, about, num_layers)
            self.fetches += (end - start) * layers
            return [reading.stored(store, entry, about, side, layer, start, end) for layer in range(layers)]

    def fetch_ids(self, sid: bytes, layer: int, ids: list[int]) -> Extents | None:
        """Rows in the order of `ids`, as FP32; zeros for positions the layer does not have."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            store.touch(entry)
            self.fetches += len(ids)
            return reading.by_ids(store, entry, about, side, layer, ids)

    # --- telling ----------------------------------------------------------------------------------------------------

    def info(self, sid: bytes) -> SessionInfo:
        """What one session is. No use is noted."""
        store = self.store
        with store.lock:
            entry, side, about = self.find(sid)
            assert entry.rows is not None
            count = self._layers(entry, side, about)
            rows = [entry.rows.tokens(side, layer) for layer in range(count)]
            dim, fmt = about.shown
            layers = [about.of(layer) for layer in range(count)]
            code = layout.code_of(fmt)
            return SessionInfo(store.slot(entry, side), dim, code, rows, entry.declared, layers, len(entry.states))

    def dim(self, sid: bytes, layer: int) -> int:
        """Values per row of a layer; 0 for one beyond a schema without a default."""
        with self.store.lock:
            return self.find(sid)[2].of(layer)[0]

    def num_layers(self, sid: bytes) -> int:
        """One more than the highest layer ever stored, or as many as the schema has."""
        with self.store.lock:
            return self._layers(*self.find(sid))

    def _layers(self, entry: Entry, side: int, about: Side, wanted: int | None = None) -> int:
        assert entry.rows is not None
        held = max(entry.rows.layers(side), len(about.layers))
        return wanted if wanted is not None and 0 < wanted <= held else held

    # --- rollback ---------------------------------------------------------------------------------------------------

    def snapshot(self, sid: bytes) -> int:
        """Remember the length of every layer of a session, in memory only; returns the snapshot's id."""
        store = self.store
        with store.lock:
            entry, side, _ = self.find(sid)
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
            entry, side, _ = self.find(sid)
            kept = (entry.snapshots or {}).get(ident)
            if kept is None or kept[0] != side:
                raise CommandError("ERR V.RESTORE: unknown snap_id for this session")
            rows = entry.rows
            assert rows is not None
            cuts = []
            for layer in range(rows.layers(side)):
                length = kept[layer + 1] if layer + 1 < len(kept) else 0
                if rows.tokens(side, layer) > length:
                    cuts.append((layer, length))
            if not cuts:
                return
            need = sum(writes.record_size(0) + groups.cut_size(entry, side, layer, length) for layer, length in cuts)
            store.make_room(need, entry, own=True)  # for all of them, or none
            try:
                for layer, length in cuts:
                    groups.before_cut(store, entry, side, layer, length)
                    writes.append_payload(
                        store, entry, "V.RESTORE", layout.TRIM, layer=layer, side=side, count=length, room=False
                    )
                    rows.trim(side, layer, length)
                    store.means_anew(entry, length)
            finally:
                if not entry.gone:  # found to be damaged
                    store.recounted(entry, entry.recount)

    def release(self, sid: bytes, ident: int) -> int:
        """Forget a snapshot; 1 when it was there."""
        with self.store.lock:
            entry, side, _ = self.find(sid)
            if entry.snapshots is None or entry.snapshots.get(ident, [-1])[0] != side:
                return 0
            del entry.snapshots[ident]
            return 1
