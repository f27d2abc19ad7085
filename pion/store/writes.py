"""Appending to entry files what fits into one write of header and payload; `bodies` has the large ones.

A failed write is cut off, or, when others have written behind it, marked dead.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from pion import limits
from pion._core import framing, vstore
from pion.errors import CommandError, StorageError
from pion.store import layout
from pion.store.entries import Entry, Payload
from pion.store.loader import meta_record

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pion.store.store import Store

log = logging.getLogger("pion.store")

F32, F16, BF16 = limits.FORMATS["fp32"], limits.FORMATS["fp16"], limits.FORMATS["bf16"]
SOURCES: Final = {"F32": F32, "F16": F16, "BF16": BF16}


def storage_error(command: str, error: OSError) -> StorageError:
    """A write that failed: nothing of it is kept."""
    return StorageError(f"ERR {command} failed: {error.strerror}")


def refused(command: str, row: int, fmt: int) -> CommandError:
    """A value the stored format cannot hold."""
    name = layout.format_name(fmt)
    return CommandError(
        f"ERR {command}: row {row} holds a value outside the range of {name} (store it as bf16 or fp32)"
    )


def record_size(nbytes: int) -> int:
    """Bytes that a record with such a payload takes at most."""
    return nbytes + 128 + (vstore.BIG_ALIGN if nbytes >= vstore.BIG_FROM else 0)


def undo(store: Store, entry: Entry) -> None:
    """Take back what a failed write left behind the last record; the next one would overwrite it anyway."""
    try:
        os.ftruncate(store.fd(entry), entry.size)
    except OSError as error:
        log.error("entry %r: a failed write could not be cut off: %s", entry.name, error.strerror)


def cut(store: Store, entry: Entry, at: int, reserved: int) -> None:
    """Take back a region that will not be published. One that stays behind in state pending is never read."""
    if entry.gone:
        return
    if entry.size == at + reserved:
        resize(store, entry, at)
        undo(store, entry)
    elif entry.rows is not None:
        entry.rows.lost(reserved)


def resize(store: Store, entry: Entry, size: int) -> None:
    """The file now ends at `size`."""
    change = -entry.disk
    entry.size = size
    change += entry.disk
    store.totals.disk += change
    if entry.compacting:  # it stands in the copy too, or will
        entry.doubled += change
        store.totals.disk += change


def arriving(entry: Entry, side: int, layer: int) -> bool:
    """Whether a body of this layer is."""
    return any(sink.side == side and sink.layer == layer for sink in entry.open)


def overtake(entry: Entry, side: int, layer: int | None, at: int) -> None:
    """Something of this layer (None: of any) takes effect at `at`: bodies that are still arriving in front of it come
    after it in time, and must stand behind it, for a start takes records in the order of the file."""
    for sink in entry.open:
        if sink.side == side and layer in (None, sink.layer) and sink.at < at:
            sink.overtaken = True


def append_rows(
    store: Store, entry: Entry, side: int, layer: int, start: int, count: int, source: int, blob: Buffer
) -> None:
    """Store rows in one write and publish them. The lock is held.

    Raises:
        CommandError: a value does not fit the stored format, or no room. Nothing is stored.
    """
    rows, about = entry.rows, entry.sides[side]
    assert rows is not None
    assert about is not None
    dim, fmt = about.of(layer)
    at, stride = entry.size, vstore.row_bytes(fmt, dim)
    before = rows.tokens(side, layer)
    store.make_room(record_size(stride * count), entry, own=True, over=start < before or arriving(entry, side, layer))
    if not entry.dirty:
        store.mark_dirty(entry)
    try:
        total = rows.append(store.fd(entry), at, entry.seed, side, layer, start, count, dim, source, fmt, blob)
    except vstore.BadRowError as error:
        raise refused("V.STOREBATCH", error.row, fmt) from None
    except OSError as error:
        undo(store, entry)
        raise storage_error("V.STOREBATCH", error) from error
    overtake(entry, side, layer, at)
    resize(store, entry, at + total)
    grown(store, entry, side, layer, before)
    store.wrote(entry, total)


def grown(store: Store, entry: Entry, side: int, layer: int, before: int) -> None:
    """A layer that reported `before` rows may report more."""
    about = entry.sides[side]
    assert entry.rows is not None
    assert about is not None
    now = entry.rows.tokens(side, layer)
    if now == before:
        return
    totals, rows = store.totals, now - before
    nbytes = about.stored_bytes(layer, now) - about.stored_bytes(layer, before)
    entry.row_count += rows
    entry.nbytes += nbytes
    totals.rows += rows
    totals.nbytes += nbytes
    if side == layout.KEYS and entry.is_prefix:
        entry.key_rows += rows
        totals.key_rows += rows


def append_payload(
    store: Store, entry: Entry, command: str, kind: int, payload: Buffer = b"", *, layer: int = 0, side: int = 0,
    start: int = 0, count: int = 0, room: bool = True,
) -> Payload:  # fmt: skip
    """Write a record that is not rows in one write; the caller publishes it. The lock is held.

    Args:
        room: whether the caps are asked; not where the caller has.
    """
    at = entry.size
    nbytes = memoryview(payload).nbytes
    if room:
        over = kind == layout.STATE and (layer in entry.states or arriving(entry, side, layer))
        store.make_room(record_size(nbytes), entry, own=True, over=over)
    store.mark_dirty(entry)
    try:
        total = vstore.write_record(
            store.fd(entry), at, entry.seed, kind=kind, payload=payload, layer=layer, side=side, start=start,
            count=count,
        )  # fmt: skip
    except OSError as error:
        undo(store, entry)
        raise storage_error(command, error) from error
    overtake(entry, layout.STATES if kind == layout.STATE_DROP else side, layer if layered(kind, start) else None, at)
    resize(store, entry, at + total)
    store.wrote(entry, total)
    return Payload(at, at + total - framing.align_up(nbytes), nbytes, True, start)


def layered(kind: int, start: int) -> bool:
    """Whether a record is about one layer; a STATE_DROP may be about all."""
    return kind != layout.STATE_DROP or start == 1


def append_meta(store: Store, entry: Entry, command: str, *, room: bool = True) -> None:
    """Write down the entry's sides and declaration, which the caller has just changed.

    Args:
        room: whether the caps are asked; not for what makes room.
    """
    at = entry.size
    data = meta_record(entry, at)
    if room:
        store.make_room(len(data), entry, own=True)
    store.mark_dirty(entry)
    try:
        if os.pwrite(store.fd(entry), data, at) != len(data):
            raise OSError(28, os.strerror(28))
    except OSError as error:
        undo(store, entry)
        raise storage_error(command, error) from error
    resize(store, entry, at + len(data))
    store.wrote(entry, len(data))
    if entry.rows is not None:
        entry.rows.lost(len(data))  # the one before holds nothing any more
