"""Appending to entry files.

A small body is one write of header and payload. A large one streams: its region is reserved by a header in state
*pending*, the body arrives behind it, and a second write of the header's 64 bytes publishes it. Until then nobody sees
it, after a crash nobody will. A failed write is cut off, or, when others have written behind it, marked dead.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from pion import limits
from pion._core import framing, vstore
from pion._core.stream import CONV_RAW, FdRef, Sink
from pion.errors import CommandError, StorageError
from pion.store import layout
from pion.store.entries import Entry, Payload, SessionNotFoundError
from pion.store.loader import meta_record

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pion.store.store import Store

log = logging.getLogger("pion.store")

RESERVE_MOST: Final = 64 * limits.MIB  # a larger request may search the disk for milliseconds
RESERVE_FROM: Final = 256 * limits.KIB  # asking for the blocks first makes large writes a third cheaper
F32, F16, BF16 = limits.FORMATS["fp32"], limits.FORMATS["fp16"], limits.FORMATS["bf16"]
SOURCES: Final = {"F32": F32, "F16": F16, "BF16": BF16}


def storage_error(command: str, error: OSError) -> StorageError:
    """A write that failed: nothing of it is kept."""
    return StorageError(f"ERR {command} failed: {error.strerror}")


def refused(command: str, row: int, fmt: int) -> CommandError:
    """A value the stored format cannot hold."""
    name = limits.FORMAT_NAMES[fmt]
    return CommandError(
        f"ERR {command}: row {row} holds a value outside the range of {name} (store it as bf16 or fp32)"
    )


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
    before = entry.disk
    entry.size = size
    store.totals.disk += entry.disk - before


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
    at, stride = entry.size, about.row_bytes
    need = stride * count + 128 + (vstore.BIG_ALIGN if stride * count >= vstore.BIG_FROM else 0)
    store.make_room(need, entry)
    if not entry.dirty:
        store.mark_dirty(entry)
    before = rows.tokens(side, layer)
    try:
        total = rows.append(
            store.fd(entry), at, entry.seed, side, layer, start, count, about.dim, source, about.fmt, blob
        )
    except vstore.BadRowError as error:
        raise refused("V.STOREBATCH", error.row, about.fmt) from None
    except OSError as error:
        undo(store, entry)
        raise storage_error("V.STOREBATCH", error) from error
    resize(store, entry, at + total)
    _grown(store, entry, side, rows.tokens(side, layer) - before, stride)
    store.wrote(entry, total)


def _grown(store: Store, entry: Entry, side: int, rows: int, stride: int) -> None:
    """A layer reports more rows."""
    if not rows:
        return
    totals = store.totals
    entry.row_count += rows
    entry.nbytes += rows * stride
    totals.rows += rows
    totals.nbytes += rows * stride
    if side == layout.KEYS and entry.is_prefix:
        entry.key_rows += rows
        totals.key_rows += rows


def append_payload(
    store: Store, entry: Entry, command: str, kind: int, payload: Buffer = b"", *, layer: int = 0, side: int = 0,
    start: int = 0, count: int = 0,
) -> Payload:  # fmt: skip
    """Write a record that is not rows in one write; the caller publishes it. The lock is held."""
    at = entry.size
    nbytes = memoryview(payload).nbytes
    need = nbytes + 128 + (vstore.BIG_ALIGN if nbytes >= vstore.BIG_FROM else 0)
    store.make_room(need, entry)
    store.mark_dirty(entry)
    try:
        total = vstore.write_record(
            store.fd(entry), at, entry.seed, kind=kind, payload=payload, layer=layer, side=side, start=start,
            count=count,
        )  # fmt: skip
    except OSError as error:
        undo(store, entry)
        raise storage_error(command, error) from error
    resize(store, entry, at + total)
    store.wrote(entry, total)
    return Payload(at, at + total - framing.align_up(nbytes), nbytes, True, start)


def append_meta(store: Store, entry: Entry, command: str) -> None:
    """Write down the entry's sides and declaration, which the caller has just changed."""
    at = entry.size
    data = meta_record(entry, at)
    store.make_room(len(data), entry)
    store.mark_dirty(entry)
    try:
        if os.pwrite(store.fd(entry), data, at) != len(data):
            raise OSError(28, os.strerror(28))
    except OSError as error:
        undo(store, entry)
        raise storage_error(command, error) from error
    resize(store, entry, at + len(data))
    store.wrote(entry, len(data))


class Write(Sink):
    """A large body on its way into an entry; made by `open_write`, ended by `publish` or `abandon`.

    Attributes:
        entry, kind, side, layer, start, count: what it will be.
        at, reserved: the region in the file, header included.
        payload_at, payload_len: where the body goes and its stored length.
        align: of the payload in the file.
        file: held until the body has ended.
        source: format code of the body; -1 = two-byte values whose format stands behind the body.
        ended: published or abandoned.
    """

    entry: Entry
    kind: int
    side: int
    layer: int
    start: int
    count: int
    at: int
    reserved: int
    payload_at: int
    payload_len: int
    align: int
    file: FdRef
    source: int
    ended: bool


def open_write(
    store: Store, entry: Entry, kind: int, nbytes: int, *, side: int, layer: int, start: int = 0, count: int = 0
) -> Write:
    """Reserve a region for a body of `nbytes` as it arrives. The lock is held.

    Rows arrive as FP32 (converted on the way) or as two-byte values, whose format is told only behind the body: they
    are written as they come and converted by `publish` if need be.
    """
    about = entry.sides[side] if kind == layout.STORE else None
    convert, source, payload_len, crc_dim = CONV_RAW, -1, nbytes, 0
    if about is not None:
        payload_len = about.row_bytes * count
        if nbytes == 4 * about.dim * count:
            source = F32
            if about.fmt != F32:
                convert, crc_dim = F32 << 24 | about.fmt, about.dim
    room = framing.align_up(max(payload_len, nbytes if convert == CONV_RAW else 0))
    at = entry.size
    align = vstore.BIG_ALIGN if room >= vstore.BIG_FROM else framing.ALIGN
    reserved = framing.align_up(at + framing.HEADER_SIZE, align) - at + room
    command = "V.STOREBATCH" if about is not None else "SSM.PREFIX.STORE"
    store.make_room(reserved, entry)
    store.mark_dirty(entry)
    head = framing.pack_header(
        kind=kind, seed=entry.seed, state=framing.PENDING, payload_len=room, layer=layer, side=side, offset=at,
        align=align,
    )  # fmt: skip
    try:
        ref = store.ref(entry)
        if os.pwrite(ref.fileno(), head[: framing.HEADER_SIZE], at) != framing.HEADER_SIZE:
            raise OSError(28, os.strerror(28))
    except OSError as error:
        undo(store, entry)
        raise storage_error(command, error) from error
    resize(store, entry, at + reserved)
    blocks = min(room, RESERVE_MOST) if room >= RESERVE_FROM else 0
    sink = _sink(ref, at + reserved - room, nbytes, convert, crc_dim, entry.seed, blocks)
    sink.entry, sink.kind, sink.side, sink.layer, sink.start, sink.count = entry, kind, side, layer, start, count
    sink.at, sink.reserved, sink.payload_at, sink.payload_len = at, reserved, at + reserved - room, payload_len
    sink.align, sink.file, sink.source, sink.ended = align, ref, source, False
    sink.on_abort = lambda _: abandon(store, sink)
    entry.writers += 1
    return sink


def _sink(ref: FdRef, offset: int, nbytes: int, convert: int, dim: int, seed: int, reserve: int) -> Write:
    if dim:
        return Write(ref, offset, nbytes, convert=convert, dim=dim, crc_seed=seed, reserve=reserve)
    return Write(ref, offset, nbytes, crc_seed=seed, reserve=reserve)


def abandon(store: Store, sink: Write) -> None:
    """The body will not be published: its region is taken back. Harmless on one that has ended."""
    with store.lock:
        if sink.ended:
            return
        _end(sink)
        cut(store, sink.entry, sink.at, sink.reserved)


def _end(sink: Write) -> None:
    sink.ended = True
    sink.on_abort = None
    sink.entry.writers -= 1


def heavy(sink: Write, fmt: str) -> bool:
    """Publishing this body means converting it in its file: milliseconds for each MiB, better done in a thread."""
    about = sink.entry.sides[sink.side] if sink.kind == layout.STORE else None
    return about is not None and sink.source < 0 and SOURCES[fmt] != about.fmt


def publish(store: Store, sink: Write, fmt: str = "") -> Payload | None:
    """Make a body that has arrived visible; a state's place is returned, rows are in the map.

    Raises:
        CommandError: the body cannot be kept (a write failed, a value does not fit, the entry was dropped meanwhile).
    """
    command = "V.STOREBATCH" if sink.kind == layout.STORE else "SSM.PREFIX.STORE"
    try:
        _check_arrived(sink, command)
        crc = _convert(sink, fmt, command) if sink.kind == layout.STORE and heavy(sink, fmt) else sink.crc
        with store.lock:
            return _publish(store, sink, crc, command)
    except OSError as error:
        abandon(store, sink)
        raise storage_error(command, error) from error
    except CommandError:
        abandon(store, sink)
        raise


def _check_arrived(sink: Write, command: str) -> None:
    if sink.error:
        raise StorageError(f"ERR {command} failed: {os.strerror(sink.error)}")
    if sink.bad_row >= 0:
        about = sink.entry.sides[sink.side]
        assert about is not None
        raise refused(command, sink.bad_row, about.fmt)
    if not sink.done or sink.ended:
        raise CommandError(f"ERR {command} failed: the body did not arrive")


def _convert(sink: Write, fmt: str, command: str) -> int:
    """Turn the two-byte values in the region into the stored format, in place; the CRC of the result."""
    about = sink.entry.sides[sink.side]
    assert about is not None
    try:
        return vstore.convert_region(
            sink.file.fileno(), sink.payload_at, sink.count, about.dim, SOURCES[fmt], about.fmt, sink.entry.seed
        )
    except vstore.BadRowError as error:
        raise refused(command, error.row, about.fmt) from None


def _publish(store: Store, sink: Write, crc: int, command: str) -> Payload | None:
    entry = sink.entry
    if entry.gone or entry.rows is None:
        raise SessionNotFoundError("ERR session not found (dropped while the body arrived)")
    about = entry.sides[sink.side] if sink.kind == layout.STORE else None
    fmt, dim = (about.fmt, about.dim) if about else (0, 0)
    fd = sink.file.fileno()
    used = sink.payload_at - sink.at + framing.align_up(sink.payload_len)
    head = framing.pack_header(
        kind=sink.kind, seed=entry.seed, payload_len=sink.payload_len, payload_crc=crc, layer=sink.layer,
        side=sink.side, start=sink.start, count=sink.count, offset=sink.at, align=sink.align, fmt=fmt, dim=dim,
    )[: framing.HEADER_SIZE]  # fmt: skip
    spare = sink.reserved - used
    if spare and entry.size != sink.at + sink.reserved:
        filler = framing.pack_header(
            kind=layout.STORE, seed=entry.seed, state=framing.DEAD, payload_len=spare - framing.HEADER_SIZE
        )
        os.pwrite(fd, filler, sink.at + used)
        entry.rows.lost(spare)
    if os.pwrite(fd, head, sink.at) != len(head):
        raise OSError(28, os.strerror(28))
    if spare and entry.size == sink.at + sink.reserved:
        os.ftruncate(fd, sink.at + used)
        resize(store, entry, sink.at + used)
    _end(sink)
    store.wrote(entry, used)
    if about is None:
        return Payload(sink.at, sink.payload_at, sink.payload_len, True)
    before = entry.rows.tokens(sink.side, sink.layer)
    entry.rows.put(
        sink.side, sink.layer, sink.start, sink.count, sink.payload_at, sink.at | vstore.CHECKED, about.row_bytes
    )
    _grown(store, entry, sink.side, entry.rows.tokens(sink.side, sink.layer) - before, about.row_bytes)
    return None
