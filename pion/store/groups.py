"""Writing the keys of a prefix in a key form: 64 neighbouring rows are encoded together, once all of them are there.

Rows of a group that is not whole are *loose*: fp16 rows in records of their own. The store that brings the last missing
row reads the others back, encodes the group and writes it as a *sealed* block; its loose rows are dead bytes from then
on. Encoding always sees fp16 rows, so it does not matter how they came. Where both forms of a row are in the file, the
sealed one counts: a crash between two records changes nothing that was acknowledged.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from pion import limits
from pion._core import framing, quant, quantkeys, vstore
from pion._core.vstore import GROUP
from pion.errors import CommandError
from pion.store import bodies, layout, loader, reading, writes
from pion.store.bodies import Write
from pion.store.copying import read_exactly
from pion.store.entries import CrowdedError, Entry, SessionNotFoundError
from pion.store.reading import theta_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pion.store.store import Store

_F16 = writes.F16
_COMMAND = "V.STOREBATCH"
_LARGEST = 0x7BFF  # 65504, the largest word of fp16
_TURNABLE = 0x79A7  # 46304: two such values, turned, are within that


class _Part(NamedTuple):
    """Rows as they will stand in one record."""

    start: int
    rows: int
    sealed: bool
    payload: bytes


class _Place(NamedTuple):
    """A layer that is being written to."""

    store: Store
    entry: Entry
    side: int
    layer: int
    dim: int
    fmt: int


def _words(source: int, blob: Buffer, dim: int, fmt: int, start: int, theta: float, before: int = 0) -> memoryview:
    """Rows from position `start` on as fp16 words that can be encoded.

    Raises:
        CommandError: a value that the format does not take, with its row (counted from `before` on).
    """
    try:
        words = blob if source == _F16 else quant.encode(source, _F16, blob, dim)
    except quant.RefusedRowError as error:
        raise writes.refused(_COMMAND, before + error.row, fmt) from None
    view = memoryview(words).cast("B")
    bad = vstore.beyond(view, dim, _LARGEST)
    if bad < 0 and theta and vstore.beyond(view, dim, _TURNABLE) >= 0:
        bad = _too_large_unturned(view, dim, fmt, start, theta)
    if bad >= 0:
        raise writes.refused(_COMMAND, before + bad, fmt)
    return view


def _too_large_unturned(words: memoryview, dim: int, fmt: int, start: int, theta: float) -> int:
    """The first row that leaves the range of fp16 when its rotation is taken out, or -1.

    A row is refused when it comes, not when others complete its group.
    """
    lead = start % GROUP
    rows = len(words) // (2 * dim)
    tail = -(lead + rows) % GROUP
    padded = bytes(lead * 2 * dim) + bytes(words) + bytes(tail * 2 * dim)
    try:
        quantkeys.encode_keys(_F16, fmt, padded, dim, start - lead, theta)
    except quantkeys.RefusedKeyError as error:
        return error.row - lead
    return -1


def _read_back(place: _Place, start: int, end: int) -> bytearray:
    """Stored rows as fp16 words, sealed or not; zeros where there are none."""
    store, entry, side, layer, dim, fmt = place
    loader.check_rows(store, entry, side, layer, start, end)
    wide = bytearray((end - start) * dim * 4)
    reading.decoded_keys(store, entry, side, layer, dim, fmt, start, end).readinto(wide)
    return bytearray(vstore.narrow(wide))


def _sealed(place: _Place, start: int, words: Buffer) -> _Part:
    theta = theta_of(place.entry, place.fmt)
    try:
        payload = quantkeys.encode_keys(_F16, place.fmt, words, place.dim, start, theta)
    except quantkeys.RefusedKeyError as error:  # a row came through the codec before, to just beyond fp16
        name = limits.FORMAT_NAMES[layout.code_of(place.fmt)]
        raise CommandError(
            f"ERR {_COMMAND}: row {start + error.row} of layer {place.layer} cannot be encoded once more: "
            f"a value leaves the range of {name}"
        ) from None
    return _Part(start, memoryview(words).nbytes // (2 * place.dim), True, bytes(payload))


def _edge(place: _Place, start: int, words: memoryview) -> _Part:
    """Rows of one group: the whole group, when the others are there already."""
    rows = place.entry.rows
    assert rows is not None
    row = 2 * place.dim
    end = start + len(words) // row
    first = start // GROUP * GROUP
    last = first + GROUP
    if not (rows.covers(place.side, place.layer, first, start) and rows.covers(place.side, place.layer, end, last)):
        return _Part(start, end - start, False, bytes(words))
    whole = _read_back(place, first, last)
    whole[(start - first) * row : (end - first) * row] = words
    return _sealed(place, first, whole)


def _parts(place: _Place, start: int, words: memoryview) -> list[_Part]:
    """Rows cut at the borders of groups; neighbouring sealed groups are one part."""
    row = 2 * place.dim
    end = start + len(words) // row
    cuts = sorted({start, end, min(end, -(-start // GROUP) * GROUP), max(start, end // GROUP * GROUP)})
    parts: list[_Part] = []
    for a, b in itertools.pairwise(cuts):
        piece = words[(a - start) * row : (b - start) * row]
        whole = a % GROUP == 0 and b % GROUP == 0
        part = _sealed(place, a, piece) if whole else _edge(place, a, piece)
        if parts and part.sealed and parts[-1].sealed:
            last = parts.pop()
            part = _Part(last.start, last.rows + part.rows, True, last.payload + part.payload)
        parts.append(part)
    return parts


def append_rows(
    store: Store, entry: Entry, side: int, layer: int, start: int, count: int, source: int, blob: Buffer
) -> None:
    """Store rows and publish them. The lock is held.

    Raises:
        CommandError: a value does not fit, or no room. Nothing is stored.
    """
    about = entry.sides[side]
    assert about is not None
    dim, fmt = about.of(layer)
    place = _Place(store, entry, side, layer, dim, fmt)
    over = entry.rows is not None and start < entry.rows.tokens(side, layer)
    _append(place, _parts(place, start, _words(source, blob, dim, fmt, start, theta_of(entry, fmt))), over=over)


def _append(place: _Place, parts: list[_Part], *, over: bool = False, room: bool = True) -> None:
    """Write records behind the last one, then take their rows in: all or none.

    Args:
        over: they replace rows, beside those that share a group with them.
        room: whether the caps are asked; not where the caller has.
    """
    store, entry, side, layer, dim, fmt = place
    rows, about = entry.rows, entry.sides[side]
    assert rows is not None
    assert about is not None
    if room:
        need = sum(writes.record_size(len(part.payload)) for part in parts)
        store.make_room(need, entry, own=True, over=over or writes.arriving(entry, side, layer))
    store.mark_dirty(entry)
    at = entry.size
    placed = []
    try:
        for part in parts:
            total = vstore.write_record(
                store.fd(entry), at, entry.seed, kind=layout.STORE, payload=part.payload, layer=layer, side=side,
                fmt=fmt if part.sealed else _F16, start=part.start, count=part.rows, dim=dim,
                aux=0 if part.sealed else vstore.LOOSE,
            )  # fmt: skip
            placed.append((part, at, at + total - framing.align_up(len(part.payload))))
            at += total
    except OSError as error:
        writes.undo(store, entry)
        raise writes.storage_error(_COMMAND, error) from error
    written = at - entry.size
    writes.overtake(entry, side, layer, entry.size)
    writes.resize(store, entry, at)
    before = rows.tokens(side, layer)
    for part, record, offset in placed:
        rows.put(
            side, layer, part.start, part.rows, offset, record | vstore.CHECKED, len(part.payload) // part.rows,
            loose=not part.sealed, sealed=part.sealed,
        )  # fmt: skip
    writes.grown(store, entry, side, layer, before)
    store.wrote(entry, written)


def cut_size(entry: Entry, side: int, layer: int, length: int) -> int:
    """Bytes that `before_cut` writes at most."""
    about = entry.sides[side]
    assert about is not None
    dim, fmt = about.of(layer)
    return (length % GROUP) * 2 * dim + 128 if vstore.is_keys(fmt) else 0


def before_cut(store: Store, entry: Entry, side: int, layer: int, length: int) -> None:
    """Keep the rows that a cut to `length` leaves of a sealed group: as loose rows. The lock is held, and there is room
    (`cut_size`)."""
    about, rows = entry.sides[side], entry.rows
    assert about is not None
    assert rows is not None
    dim, fmt = about.of(layer)
    first = length // GROUP * GROUP
    if first == length or not vstore.is_keys(fmt) or rows.pieces(side, layer, first, length)[0][0] != reading.SEALED:
        return
    place = _Place(store, entry, side, layer, dim, fmt)
    _append(place, [_Part(first, length - first, False, bytes(_read_back(place, first, length)))], room=False)


def publish(store: Store, sink: Write, word: str) -> None:
    """Make a body visible that arrived in the file as it came: its whole groups are encoded in place, the rows at its
    ends are stored like few rows. Blocking: called in a thread, without the lock.

    Raises:
        CrowdedError: it can be published after a wait for room.
        CommandError: a write failed, a value does not fit, the entry was dropped or described anew meanwhile.
    """
    try:
        bodies.check_arrived(sink, _COMMAND)
        if sink.converted is None:
            sink.converted = _encode(sink, writes.SOURCES[word])
        with store.lock:
            _publish(store, sink, *sink.converted)
    except OSError as error:
        bodies.abandon(store, sink)
        raise writes.storage_error(_COMMAND, error) from error
    except CrowdedError:
        raise
    except CommandError:
        bodies.abandon(store, sink)
        raise


def _encode(sink: Write, source: int) -> tuple[list[tuple[int, memoryview]], range, int]:
    """(edges as (first row, words), rows of the whole groups, CRC of their blocks)."""
    fd, dim, start, end = sink.file.fileno(), sink.dim, sink.start, sink.start + sink.count
    row = sink.nbytes // sink.count
    middle = range(-(-start // GROUP) * GROUP, end // GROUP * GROUP)
    spans = [(start, middle.start), (middle.stop, end)] if middle else [(start, end)]
    edges = []
    for a, b in spans:
        if a < b:
            blob = read_exactly(fd, (b - a) * row, sink.payload_at + (a - start) * row)
            edges.append((a, _words(source, blob, dim, sink.fmt, a, sink.theta, a - start)))
    crc = 0
    if middle:
        skipped = middle.start - start
        try:
            crc = vstore.convert_keys(
                fd, sink.payload_at + skipped * row, sink.payload_at, len(middle) // GROUP, dim, source, sink.fmt,
                middle.start, sink.theta, sink.entry.seed,
            )  # fmt: skip
        except vstore.BadRowError as error:
            raise writes.refused(_COMMAND, skipped + error.row, sink.fmt) from None
    return edges, middle, crc


def _publish(store: Store, sink: Write, edges: list[tuple[int, memoryview]], middle: range, crc: int) -> None:
    entry = sink.entry
    if entry.gone or entry.rows is None:
        raise SessionNotFoundError("ERR session not found (dropped while the body arrived)")
    place = _Place(store, entry, sink.side, sink.layer, sink.dim, sink.fmt)
    bodies.check_form(sink)
    parts = [_parts(place, start, words) for start, words in edges]  # refused before anything is seen
    loose = sum(writes.record_size(len(part.payload)) for some in parts for part in some)
    store.make_room(loose + bodies.move_size(sink), entry, again=True)
    if middle:
        sink.start, sink.count = middle.start, len(middle)
        sink.payload_len = len(middle) * vstore.row_bytes(sink.fmt, sink.dim)
        bodies.publish_region(store, sink, crc, _COMMAND, room=False)
    else:
        bodies.abandon(store, sink)
    for some in parts:
        _append(place, some, room=False)
