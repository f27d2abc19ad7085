"""Large bodies on their way into entry files.

A body's region is reserved by a header in state *pending*, the body arrives behind it, and a second write of the
header's 64 bytes publishes it. Until then nobody sees it, after a crash nobody will.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion._core import framing, vstore
from pion._core.stream import CONV_RAW, FdRef, Sink
from pion.errors import CommandError, StorageError
from pion.store import layout
from pion.store.copying import move_within
from pion.store.entries import CrowdedError, Entry, Payload, SessionNotFoundError
from pion.store.reading import theta_of
from pion.store.writes import F32, SOURCES, arriving, cut, grown, overtake, refused, resize, storage_error, undo

if TYPE_CHECKING:
    from pion.store.store import Store

RESERVE_MOST: Final = 64 * limits.MIB  # a larger request may search the disk for milliseconds
RESERVE_FROM: Final = 256 * limits.KIB  # asking for the blocks first makes large writes a third cheaper


class Write(Sink):
    """A large body on its way into an entry; made by `open_write`, ended by `publish` or `abandon`.

    Attributes:
        entry, kind, side, layer, start, count: what it will be.
        at, reserved: the region in the file, header included.
        payload_at, payload_len: where the body goes and its stored length.
        align: of the payload in the file.
        file: held until the body has ended.
        source: format code of the body; -1 = two-byte values whose format stands behind the body.
        dim, fmt: values per row and stored format.
        theta: of the keys' rotary embedding, 0 = none.
        overtaken: something of the same layer was stored, behind the region, while the body arrived.
        converted: what converting it in the file gave, once that is done.
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
    dim: int
    fmt: int
    theta: float
    overtaken: bool
    converted: Any
    ended: bool


def open_write(
    store: Store, entry: Entry, kind: int, nbytes: int, *, side: int, layer: int, start: int = 0, count: int = 0
) -> Write:
    """Reserve a region for a body of `nbytes` as it arrives. The lock is held.

    Rows arrive as FP32 (converted on the way) or as two-byte values, whose format is told only behind the body: they
    are written as they come and converted by `publish` if need be. So are rows of a key form, whatever they are.
    """
    about = entry.sides[side] if kind == layout.STORE else None
    convert, source, payload_len, crc_dim = CONV_RAW, -1, nbytes, 0
    dim, fmt = about.of(layer) if about is not None else (0, 0)
    if about is not None:
        keys = vstore.is_keys(fmt)
        payload_len = nbytes if keys else vstore.row_bytes(fmt, dim) * count
        if nbytes == 4 * dim * count:
            source = F32
            if fmt != F32 and not keys:
                convert, crc_dim = F32 << 24 | fmt, dim
    room = framing.align_up(max(payload_len, nbytes if convert == CONV_RAW else 0))
    at = entry.size
    align = vstore.BIG_ALIGN if room >= vstore.BIG_FROM else framing.ALIGN
    reserved = framing.align_up(at + framing.HEADER_SIZE, align) - at + room
    command = "V.STOREBATCH" if about is not None else "SSM.PREFIX.STORE"
    if entry.awaited:
        raise CrowdedError(entry, f"OOM {command}: the entry is waiting for a compaction")
    loose = 2 * vstore.GROUP * 4 * dim + 256 if about is not None and vstore.is_keys(fmt) else 0  # rows at its edges
    if kind == layout.STATE:
        over = layer in entry.states
    else:
        over = entry.rows is not None and start < entry.rows.tokens(side, layer)
    store.make_room(reserved + loose, entry, own=True, over=over or arriving(entry, side, layer))
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
    sink.dim, sink.fmt, sink.theta = dim, fmt, theta_of(entry, fmt)
    sink.on_abort = lambda _: abandon(store, sink)
    sink.overtaken, sink.converted = False, None
    entry.writers += 1
    entry.open += (sink,)
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
        _end(store, sink)
        cut(store, sink.entry, sink.at, sink.reserved)


def _end(store: Store, sink: Write) -> None:
    sink.ended = True
    sink.on_abort = None
    sink.entry.writers -= 1
    sink.entry.open = tuple(other for other in sink.entry.open if other is not sink)
    if sink.entry.awaited:
        store.settled.notify_all()


def heavy(sink: Write, fmt: str) -> bool:
    """Publishing this body means converting it in its file: milliseconds for each MiB, better done in a thread."""
    if sink.kind != layout.STORE:
        return False
    return vstore.is_keys(sink.fmt) or (sink.source < 0 and SOURCES[fmt] != sink.fmt)


def publish(store: Store, sink: Write, fmt: str = "") -> Payload | None:
    """Make a body that has arrived visible; a state's place is returned, rows are in the map.

    Raises:
        CrowdedError: it can be published after a wait for room.
        CommandError: the body cannot be kept (a write failed, a value does not fit, the entry was dropped meanwhile).
    """
    command = "V.STOREBATCH" if sink.kind == layout.STORE else "SSM.PREFIX.STORE"
    try:
        check_arrived(sink, command)
        if heavy(sink, fmt) and sink.converted is None:
            sink.converted = _convert(sink, fmt, command)
        with store.lock:
            crc = sink.crc if sink.converted is None else sink.converted
            return publish_region(store, sink, crc, command)
    except OSError as error:
        abandon(store, sink)
        raise storage_error(command, error) from error
    except CrowdedError:
        raise
    except CommandError:
        abandon(store, sink)
        raise


def expect(store: Store, sink: Write, digest: str | None) -> None:
    """A body that has arrived belongs to this digest: else it is abandoned, and MismatchError raised."""
    try:
        sink.entry.expect(digest)
    except CommandError:
        abandon(store, sink)
        raise


def check_arrived(sink: Write, command: str) -> None:
    if sink.error:
        raise StorageError(f"ERR {command} failed: {os.strerror(sink.error)}")
    if sink.bad_row >= 0:
        raise refused(command, sink.bad_row, sink.fmt)
    if not sink.done or sink.ended:
        raise CommandError(f"ERR {command} failed: the body did not arrive")


def _convert(sink: Write, fmt: str, command: str) -> int:
    """Turn the two-byte values in the region into the stored format, in place; the CRC of the result."""
    try:
        return vstore.convert_region(
            sink.file.fileno(), sink.payload_at, sink.count, sink.dim, SOURCES[fmt], sink.fmt, sink.entry.seed
        )
    except vstore.BadRowError as error:
        raise refused(command, error.row, sink.fmt) from None


def check_form(sink: Write) -> None:
    """What the rows are must still be what it was when the body began.

    Raises:
        CommandError: the prefix was registered with another head size or rope meanwhile.
    """
    about = sink.entry.sides[sink.side] if sink.kind == layout.STORE else None
    if about is not None and (*about.of(sink.layer), theta_of(sink.entry, sink.fmt)) != (
        sink.dim,
        sink.fmt,
        sink.theta,
    ):
        raise CommandError("ERR V.STOREBATCH failed: the prefix was described anew while the body arrived")


def publish_region(store: Store, sink: Write, crc: int, command: str, *, room: bool = True) -> Payload | None:
    """Turn the region of a body into a record, and take it in. The lock is held.

    Args:
        room: whether the caps are asked for `move_size`; not where the caller has.
    """
    entry = sink.entry
    if entry.gone or entry.rows is None:
        raise SessionNotFoundError("ERR session not found (dropped while the body arrived)")
    check_form(sink)
    fd = sink.file.fileno()
    if sink.overtaken:
        if room:
            store.make_room(move_size(sink), entry, again=True)
        _move_behind(store, sink)
    used = sink.payload_at - sink.at + framing.align_up(sink.payload_len)
    head = framing.pack_header(
        kind=sink.kind, seed=entry.seed, payload_len=sink.payload_len, payload_crc=crc, layer=sink.layer,
        side=sink.side, start=sink.start, count=sink.count, offset=sink.at, align=sink.align, fmt=sink.fmt & 255,
        dim=sink.dim, aux=(sink.fmt >> 8) << 16,
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
    _end(store, sink)
    overtake(entry, sink.side, sink.layer, sink.at)
    store.wrote(entry, used)
    if sink.kind != layout.STORE:
        return Payload(sink.at, sink.payload_at, sink.payload_len, True)
    before = entry.rows.tokens(sink.side, sink.layer)
    entry.rows.put(
        sink.side, sink.layer, sink.start, sink.count, sink.payload_at, sink.at | vstore.CHECKED,
        sink.payload_len // sink.count, sealed=vstore.is_keys(sink.fmt),
    )  # fmt: skip
    grown(store, entry, sink.side, sink.layer, before)
    return None


def move_size(sink: Write) -> int:
    """Bytes that a body takes when it has to be moved behind what has overtaken it; 0: it need not."""
    if not sink.overtaken:
        return 0
    at = sink.entry.size
    return framing.align_up(at + framing.HEADER_SIZE, sink.align) - at + framing.align_up(sink.payload_len)


def _move_behind(store: Store, sink: Write) -> None:
    """Copy a body that has arrived to the end of the file. The lock is held."""
    entry, fd, total = sink.entry, sink.file.fileno(), move_size(sink)
    at = entry.size
    payload_at = framing.align_up(at + framing.HEADER_SIZE, sink.align)
    resize(store, entry, at + total)
    lost, sink.at, sink.reserved = sink.reserved, at, total
    move_within(fd, sink.payload_at, sink.payload_len, payload_at)
    os.ftruncate(fd, at + total)
    sink.payload_at = payload_at
    if entry.rows is not None:
        entry.rows.lost(lost)
