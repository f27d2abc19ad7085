"""KV.PREFIX.*: prefixes, which are entries with a K and a V side (wire.md §4)."""

from __future__ import annotations

import bisect
import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from pion._core import framing, membership
from pion._core.keyspace import Keyspace, glob_match
from pion._core.stream import Extents
from pion.errors import CommandError, MismatchError, OutOfMemoryError
from pion.store import layout, loader, writes
from pion.store.entries import Entry, Payload, Sides
from pion.store.layout import Declared, Side
from pion.store.ledger import Ledger
from pion.store.store import Store

Asked = Sequence[Side]


def _unsaid(entry: Entry, declared: Declared) -> bool:
    """Whether the entry holds what a digest names and the call names none."""
    return entry.declared.digest is not None and declared.digest is None


class Prefixes:
    """The prefix commands on a store. Every method takes the store's lock.

    Args:
        tables: where the compiled membership probe looks for block tables: get, set and delete by namespace.
    """

    def __init__(self, store: Store, ledger: Ledger, tables: Tables) -> None:
        self.store = store
        self.ledger = ledger
        self._tables = tables
        self.changed: Callable[[Entry], None] = lambda entry: None  # told of another scope or block table
        self._order: list[tuple[int, bytes]] = []  # of LIST, by hash of the name
        self._order_of = -1

    def _find(self, ns: bytes) -> Entry | None:
        return self.store.get(layout.PREFIX + ns)

    # --- registering ------------------------------------------------------------------------------------------------

    def register(
        self, ns: bytes, asked: Asked, blocks: tuple[int, bytes] | None, prefill_ms: int, declared: Declared,
        replacing: bool,
    ) -> None:  # fmt: skip
        """Make a prefix, or confirm one that is there.

        Args:
            asked: K and V, in formats of `pion.limits.FORMATS`.

        Raises:
            MismatchError: what is there is something else and `replacing` is not set.
            OutOfMemoryError: the declared rows will never fit under --max-bytes.
        """
        if (declared.rows is None) != (declared.layers is None):
            raise CommandError("ERR ROWS and LAYERS are declared together")
        if declared.layers is not None and any(side.layers and len(side.layers) != declared.layers for side in asked):
            raise CommandError("ERR LAYERS must be the number of layers of the schema")
        store = self.store
        with store.lock:
            if declared.parent is not None and store.order.circular(ns, declared.parent):
                raise CommandError("ERR PARENT must be another namespace, and none that continues this one")
            above = store.find(layout.PREFIX + declared.parent) if declared.parent is not None else None
            if above is not None:
                store.touch(above)  # it must not go for its own child
            entry = self._find(ns)
            if entry is None or (replacing and (self._differences(entry, asked, declared) or _unsaid(entry, declared))):
                entry = self._make(ns, asked, blocks, declared, entry)
            else:
                self._confirm(entry, asked, blocks, declared)
            entry.prefill_ms = prefill_ms
            store.touch(entry)

    def _make(
        self, ns: bytes, asked: Asked, blocks: tuple[int, bytes] | None, declared: Declared, over: Entry | None
    ) -> Entry:
        key = layout.PREFIX + ns
        sides = _stored(key, asked, declared)
        try:
            self.store.fit(sides, declared)
        except OutOfMemoryError as error:
            if over is None:
                self.store.remember(key, f"never stored: its REGISTER was refused: {error}")
            raise
        if over is not None and over.pinned:  # a pin is on the name; a time to live ends with what it was given to
            declared = replace(declared, pinned=True)
        entry = self.store.create(key, sides, declared, blocks=blocks, over=over)
        if blocks is not None:
            self._told_blocks(entry, blocks[1])
        return entry

    def _confirm(self, entry: Entry, asked: Asked, blocks: tuple[int, bytes] | None, declared: Declared) -> None:
        different = self._differences(entry, asked, declared)
        if different:
            raise MismatchError(f"MISMATCH '{_text(entry.name)}' is stored with another {different}")
        store = self.store
        before = (entry.sides, entry.declared)
        said = {field.name: getattr(declared, field.name) for field in fields(declared)}
        fresh = replace(entry.declared, **{name: value for name, value in said.items() if value is not None})
        sides = _stored(entry.key, asked, fresh)
        table = 0 if blocks is None else writes.record_size(len(blocks[1]))
        if entry.row_count:  # what is stored stays what it is
            sides = [held or side for held, side in zip(entry.sides, sides, strict=True)]
        if (sides, fresh) != (list(before[0]), before[1]):
            store.fit(sides, fresh)
            store.make_slots(sum(side is None for side in entry.sides), entry)
            store.recounted(entry, lambda: entry.describe(sides, fresh))
            try:
                store.make_room(len(entry.meta) + 128 + table, entry, own=True)  # for both records, or neither
                writes.append_meta(store, entry, "KV.PREFIX.REGISTER", room=False)
            except CommandError:
                store.recounted(entry, lambda: entry.describe(*before))
                raise
            if blocks is not None:
                try:
                    self._put_blocks(entry, *blocks, room=False)
                except CommandError:
                    self._take_back(entry, *before)
                    raise
            self.changed(entry)
        elif blocks is not None:
            self._put_blocks(entry, *blocks)

    def _take_back(self, entry: Entry, sides: Sides, declared: Declared) -> None:
        """What an entry was said to be before a REGISTER that failed; the file says it too, if that can be."""
        store = self.store
        store.recounted(entry, lambda: entry.describe(sides, declared))
        with contextlib.suppress(CommandError):
            writes.append_meta(store, entry, "KV.PREFIX.REGISTER", room=False)

    def _differences(self, entry: Entry, asked: Asked, declared: Declared) -> str:
        """What keeps the call from meaning the stored entry: a list in words, empty when nothing does.

        What the call does not say is not compared; what an entry without rows does not say yet is added to it.
        """
        out: list[str] = []
        for held, side in zip(entry.sides, asked, strict=True):
            if held is not None and not held.same(side):
                out += _different(held, side)
                break
        words = {name: f"number of {name}" for name in ("rows", "layers", "states", "heads")}
        for name in ("rows", "layers", "states", "digest", "heads", "head_dim", "rope"):
            wanted, has = getattr(declared, name), getattr(entry.declared, name)
            loose = name == "states" and bool(entry.states)  # they may be somebody else's
            if wanted is not None and wanted != has and (has is not None or entry.row_count or loose):
                out.append(f"{words.get(name, name)} ({'none' if has is None else has}, not {wanted})")
        return ", ".join(out)

    # --- lookup -----------------------------------------------------------------------------------------------------

    def lookup(self, ns: bytes, digest: str | None, tokens: int | None, prefill_ms: int | None) -> bool:
        """Whether the prefix is here as a whole; booked in the ledger.

        Raises:
            MismatchError: it is here, for other tokens or another model. Nothing is booked.
        """
        store = self.store
        with store.lock:
            entry = self._find(ns)
            if entry is None or entry.mask != 3 or not entry.complete:
                self.ledger.misses += 1
                return False
            if digest is not None and digest != entry.declared.digest:
                held = entry.declared.digest or "none"
                raise MismatchError(f"MISMATCH '{_text(ns)}' is stored with another digest ({held}, not {digest})")
            store.touch(entry)
            assert entry.rows is not None
            measured = entry.prefill_ms
            if tokens is not None:
                measured = prefill_ms or 0
            else:
                tokens = entry.rows.tokens(layout.KEYS, 0) or entry.declared.rows or 0
                measured = prefill_ms or measured
            self.ledger.hit(tokens, measured * 1000)
            return True

    def drop(self, names: tuple[bytes, ...]) -> int:
        """Drop prefixes with all they hold; how many there were."""
        store = self.store
        with store.lock:
            dropped = 0
            for ns in names:
                entry = store.find(layout.PREFIX + ns)
                if entry is not None:
                    store.drop(entry, f"dropped by KV.PREFIX.DROP{_unfinished(entry)}")
                    dropped += 1
            return dropped

    def abandon(self, ns: bytes, digest: str) -> bool:
        """Drop what a store that broke off has left behind; what is complete, or another one's, stays."""
        store = self.store
        with store.lock:
            entry = store.get(layout.PREFIX + ns)
            if entry is None or entry.declared.digest != digest or (entry.mask == 3 and entry.complete):
                return False
            store.drop(entry, f"dropped by KV.PREFIX.ABANDON{_unfinished(entry)}")
            return True

    def flush(self) -> int:
        """Drop every prefix, and the sessions that belong to none; how many prefixes there were."""
        with self.store.lock:
            self.store.flushes += 1
            doomed = list(self.store.entries.values())
            for entry in doomed:
                self.store.drop(entry, "dropped by KV.PREFIX.FLUSH")
            return sum(entry.is_prefix for entry in doomed)

    def held(self, ns: bytes) -> bool:
        """Whether the K side is here, whatever is in it."""
        with self.store.lock:
            entry = self.store.find(layout.PREFIX + ns)
            return entry is not None and bool(entry.mask & 1)

    def why(self, ns: bytes) -> str:
        """A sentence that starts with hit, never, dropped, evicted, expired, incomplete, or with what else ended it."""
        store = self.store
        with store.lock:
            key = layout.PREFIX + ns
            entry = store.get(key)
            if entry is None:
                return store.ends.get(key, "never stored (or longer ago than the server remembers)")
            declared = entry.declared
            if entry.mask != 3:
                return f"incomplete: the {'V' if entry.mask & 1 else 'K'} side was never created"
            assert entry.rows is not None
            about = _described(entry)
            about += f", digest {declared.digest}" if declared.digest else ", no digest"
            if not entry.complete:
                return f"incomplete: {self._missing(entry)}; {about}"
            shape = f"{declared.layers} layers of {declared.rows} rows" if declared.rows else "no declared shape"
            shape += f" and {declared.states} states" if declared.states else ""
            return f"hit: {shape}, {entry.row_count} rows, {entry.nbytes} bytes; {about}"

    def _missing(self, entry: Entry) -> str:
        rows, declared = entry.rows, entry.declared
        assert rows is not None
        for number in range(declared.states or 0):
            if number not in entry.states:
                return f"state {number} of the declared {declared.states} is missing"
        assert declared.rows is not None
        assert declared.layers is not None
        for layer in range(declared.layers):
            for side in (layout.KEYS, layout.VALUES):
                live = rows.live(side, layer)
                if live != declared.rows:
                    return f"layer {layer} of {'KV'[side]} holds {live} of {declared.rows} rows"
        return "rows beyond the declared shape"

    def list(self, scope: bytes | None, match: bytes | None, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Namespaces in the order of a hash of their names, from `cursor` on; the next cursor (0: that was all).

        A namespace that is there during the whole walk is returned exactly once.
        """
        store = self.store
        with store.lock:
            if self._order_of != store.changes:
                self._order = sorted((_place(key[1:]), key) for key in store.entries if key[:1] == layout.PREFIX)
                self._order_of = store.changes
            names: list[bytes] = []
            first = bisect.bisect_left(self._order, (cursor, b""))
            for i in range(first, len(self._order)):
                place, key = self._order[i]
                if i - first >= count and place != self._order[i - 1][0]:
                    return place, names
                entry = store.find(key)
                if entry is None or not entry.mask & 1 or (scope is not None and entry.peek().scope != scope):
                    continue
                if match is None or glob_match(match, entry.name):
                    names.append(entry.name)
            return 0, names

    # --- block tables -----------------------------------------------------------------------------------------------

    def _put_blocks(self, entry: Entry, size: int, hashes: bytes, *, room: bool = True) -> None:
        store = self.store
        old = entry.blocks
        entry.blocks = writes.append_payload(
            store, entry, "KV.PREFIX.REGISTER", layout.BLOCKS, hashes, start=size, count=len(hashes) // 8, room=room
        )
        if old is not None and entry.rows is not None:
            entry.rows.lost(old.nbytes)
        self._told_blocks(entry, hashes)

    def _told_blocks(self, entry: Entry, hashes: bytes) -> None:
        self._tables.drop(entry.name)
        self.changed(entry)
        if hashes:
            self._tables.put(entry.name, membership.build(hashes), entry.expires)

    def _hashes(self, ns: bytes) -> tuple[Payload, bytes] | None:
        entry = self._find(ns)
        if entry is None or entry.blocks is None or not entry.blocks.nbytes:
            return None
        loader.check_payload(self.store, entry, entry.blocks)
        self.store.touch(entry)
        body = Extents([(self.store.ref(entry), entry.blocks.offset, entry.blocks.nbytes)])
        return entry.blocks, body.tobytes()

    def blocks(self, ns: bytes) -> bytes | None:
        """u32 block size, u32 count, u64 hashes in token order; None without a table."""
        with self.store.lock:
            found = self._hashes(ns)
            if found is None:
                return None
            payload, hashes = found
            return struct.pack("<II", payload.extra, len(hashes) // 8) + hashes

    def membership(self, ns: bytes, blob: bytes) -> bytes | None:
        """Bitmap of the probes that are in the table, bit i (least significant first) for probe i; None without one."""
        with self.store.lock:
            entry = self.store.find(layout.PREFIX + ns)
            table = self._tables.get(ns) if entry is not None else None
            if entry is None or table is None:
                found = self._hashes(ns)
                if found is None:
                    return None
                table = membership.build(found[1])
                self._tables.put(ns, table, entry.expires if entry is not None else 0)
            else:
                self.store.touch(entry)
        return membership.probe(table, blob)


def _stored(key: bytes, asked: Asked, declared: Declared) -> list[Side | None]:
    return [layout.stored_as(key, number, side, declared.head_dim) for number, side in enumerate(asked)]


def _different(held: Side, asked: Side) -> list[str]:
    """In words, how two sides differ."""
    if held.layers or asked.layers:
        count = max(len(held.layers), len(asked.layers))
        for layer in range(count):
            has, wants = held.of(layer), asked.of(layer)
            if not Side(*has).same(Side(*wants)):
                return [f"schema (layer {layer} is {_layer(*has)}, not {_layer(*wants)})"]
        return [f"schema ({len(held.layers)} layers of their own, not {len(asked.layers)})"]
    out = []
    if held.dim != asked.dim:
        out.append(f"kv_dim ({held.dim}, not {asked.dim})")
    if layout.code_of(held.fmt) != layout.code_of(asked.fmt):
        out.append(f"format ({layout.format_name(held.fmt)}, not {layout.format_name(asked.fmt)})")
    return out


def _layer(dim: int, fmt: int) -> str:
    return f"{layout.format_name(fmt)} of {dim}"


def _unfinished(entry: Entry) -> str:
    """What an entry had when it was dropped before it was complete; "" when it was, or that is not known."""
    declared, rows = entry.declared, entry.rows
    if rows is None or declared.rows is None or declared.layers is None or (entry.mask == 3 and entry.complete):
        return ""
    stored = sum(
        all(rows.live(side, layer) == declared.rows for side in (layout.KEYS, layout.VALUES))
        for layer in range(declared.layers)
    )
    text = f" before it was complete: {stored} of {declared.layers} layers"
    if declared.states:
        text += f" and {sum(number in entry.states for number in range(declared.states))} of {declared.states} states"
    return f"{text} were stored"


def _described(entry: Entry) -> str:
    """Format and dimension of both sides, or the formats of their layers."""
    texts = []
    for side in entry.sides:
        assert side is not None
        dim, fmt = side.shown
        names = dict.fromkeys(layout.format_name(fmt) for _, fmt in side.layers or [(dim, fmt)])
        dims = dict.fromkeys(str(dim) for dim, _ in side.layers or [(dim, fmt)])
        texts.append(f"{'/'.join(names)}, {'/'.join(dims)} values per row")
    return texts[0] if texts[0] == texts[1] else f"K {texts[0]}, V {texts[1]}"


class Tables:
    """Packed membership tables by namespace, and the numbers of uses, which a compiled probe takes too.

    They stand beside the keyspace, where the compiled probe finds them and no client does.
    """

    def __init__(self, keyspace: Keyspace) -> None:
        self.next_use = keyspace.next_use
        self.table_used = keyspace.table_used
        self.get = keyspace.table_get
        self.put = keyspace.table_put
        self.drop = keyspace.table_drop


def _place(name: bytes) -> int:
    return framing.crc32c(name) | 1


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace").translate({13: " ", 10: " "})
