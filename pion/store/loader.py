"""Reading entry files: at first touch, at start after a crash, and when a checksum is compared.

Whole records are kept; what a crash left behind the last of them is cut off (garbage is copied into the quarantine
first). Damage between whole records takes the entry out of service: it cannot be told what is missing.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from typing import TYPE_CHECKING, Final

from pion._core import framing, vstore
from pion._core.stream import FdRef
from pion.errors import StorageError
from pion.store import files, layout
from pion.store.entries import DamagedError, Entry, Payload

if TYPE_CHECKING:
    from pion.store.store import Store

log = logging.getLogger("pion.store")

seed_of = framing.seed_of
NO_FAULT_OF_THE_FILE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
GONE: Final = "its file was removed from the data directory"
_ALL_ROWS: Final = 0xFFFFFFFF
_AT_ONCE: Final = 64  # records between two looks at the lock


def meta_record(entry: Entry, offset: int) -> bytes:
    """A META record for this place in the file."""
    return framing.pack_header(kind=layout.META, seed=entry.seed, attrs=entry.meta, offset=offset)


def blocks_record(entry: Entry, offset: int, size: int, hashes: bytes) -> tuple[bytes, Payload]:
    """A BLOCKS record for this place in the file, and where its hashes are."""
    head = framing.pack_header(
        kind=layout.BLOCKS, seed=entry.seed, payload_len=len(hashes), payload_crc=framing.crc32c(hashes, entry.seed),
        start=size, count=len(hashes) // 8, offset=offset,
    )  # fmt: skip
    padding = bytes(framing.align_up(len(hashes)) - len(hashes))
    return head + hashes + padding, Payload(offset, offset + len(head), len(hashes), True, size)


class Collector:
    """Takes the records of a scan that are not rows."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.sized = 0  # bytes of states that later records replaced
        self.described = False  # there was a META record

    def __call__(
        self, kind: int, offset: int, header_len: int, nbytes: int, layer: int, side: int, start: int, count: int,
        attrs: bytes,
    ) -> None:  # fmt: skip
        """One valid record; kinds of later versions are skipped."""
        entry = self.entry
        if kind == layout.META:
            try:
                entry.describe(*layout.unpack_meta(attrs))
                self.described = True
            except (framing.FramingError, struct.error, KeyError) as error:
                raise vstore.DamageError(offset, "attributes") from error
        elif kind == layout.BLOCKS:
            entry.blocks = Payload(offset, offset + header_len, nbytes, False, start)
        elif kind == layout.STATE:
            old = entry.states.get(layer)
            self.sized += old.nbytes if old else 0
            entry.states[layer] = Payload(offset, offset + header_len, nbytes, False)
        elif kind == layout.STATE_DROP:
            gone = [layer] if start else list(entry.states)
            self.sized += sum(entry.states.pop(number).nbytes for number in gone if number in entry.states)


def load(store: Store, entry: Entry, *, thorough: bool = False) -> bool:
    """Read an entry's file by its record headers.

    Args:
        thorough: also compare every payload with its checksum (after a power cut).

    Returns:
        False when there is no such entry after all: the file is gone, foreign or damaged.
    """
    try:
        unsure = entry.dirty
        store.recounted(entry, lambda: _read(store, entry))
        if thorough:
            _check_thoroughly(store, entry)
        elif unsure and entry.rows is not None and entry.rows.last:
            _check(store, entry, [entry.rows.last])
    except FileNotFoundError:
        _gone(store, entry)
        return False
    except (vstore.DamageError, framing.FramingError) as error:
        store.lose(entry, str(error))
        return False
    except OSError as error:
        if error.errno in NO_FAULT_OF_THE_FILE:
            raise StorageError(f"ERR the entry could not be opened: {error.strerror}") from error
        store.lose(entry, f"cannot be read: {error.strerror}")
        return False
    except DamagedError:
        return not entry.gone and entry.rows is not None
    return True


def _gone(store: Store, entry: Entry) -> None:
    log.warning("entry %r: its file %s is gone", entry.name, entry.path)
    if store.index is not None:
        try:
            store.index.drop(entry.key, entry.generation)
        except OSError as error:
            log.error("index: %s", error.strerror)
    store.forget(entry, GONE)


def intact(store: Store, entry: Entry) -> bool:
    """Whether the file of an entry that was read is still there as a whole. If not, the entry is out of service.

    Somebody may cut or remove it under a running server; what is left in memory would then be answered wrongly, or with
    a broken connection, and what is stored would be lost.
    """
    if not store.files.keeps:
        return True
    # the padding behind the last payload need not be there; what streams in is not there yet
    least = 0 if entry.writers else max(entry.size - framing.ALIGN + 1, 0)
    if entry.ref is not None:
        why = entry.ref.state(least)
    else:
        why = _look_again(store, entry, least)
    if not why:
        return True
    if why == GONE:
        _gone(store, entry)
    else:
        store.lose(entry, why)
    return False


def _look_again(store: Store, entry: Entry, least: int) -> str:
    """What is wrong with the file of an entry whose descriptor was given back; "" = nothing."""
    try:
        fd = store.with_descriptor(lambda: store.files.open(entry.path))
    except OSError as error:
        if error.errno in NO_FAULT_OF_THE_FILE:
            return ""
        return GONE if isinstance(error, FileNotFoundError) else f"cannot be opened: {error.strerror}"
    try:
        size = os.fstat(fd).st_size
        header, _ = files.read_header(fd)
        if header.generation != entry.generation:
            return "another file has taken its place"
        return f"its file was cut to {size} bytes" if size < least else ""
    except (OSError, framing.FramingError) as error:
        return f"its first record: {error}"
    finally:
        os.close(fd)


def _read(store: Store, entry: Entry) -> None:
    ref = FdRef(store.with_descriptor(lambda: store.files.open(entry.path)))
    fd = ref.fileno()
    header, key = files.read_header(fd)
    if key != entry.key:
        raise framing.FramingError("field")
    if header.generation != entry.generation:
        entry.synced = 0  # what the index knows was flushed is another file, which this one replaced
    entry.generation, entry.seed = header.generation, header.seed
    entry.states, entry.blocks = {}, None
    rows = vstore.Rows()
    collect = Collector(entry)
    end = os.fstat(fd).st_size
    stop, why = rows.scan(fd, header.size, end, header.seed, collect)
    if not collect.described:  # every file begins with one; what the index says may be of another time
        raise vstore.DamageError(stop, "its attributes are missing")
    if why:
        _cut(store, entry, fd, stop, end, why)
    rows.lost(collect.sized)
    known = entry.size
    entry.rows, entry.ref = rows, ref
    entry.changes += 1
    entry.size = entry.base = framing.align_up(stop)
    entry.recount()
    store.opened(entry)
    if entry.synced > entry.size:
        _shortened(store, entry)
    if known != entry.size and not entry.dirty:
        log.warning("entry %r: its file has %d bytes of records, the index says %d", entry.name, entry.size, known)
        store.mark_dirty(entry)


def _shortened(store: Store, entry: Entry) -> None:
    """Records are missing that had been on the medium: no crash takes those. What is left counts."""
    store.shortened += 1
    text = "entry %r: %s has %d bytes of records, of %d that had been flushed: what followed is lost"
    log.error(text, entry.name, entry.path, entry.size, entry.synced)
    entry.synced = entry.size
    store.mark_dirty(entry)
    if store.index is not None:
        try:
            store.index.put(entry.key, entry.figures(clean=False))
        except OSError as error:  # the next start says it again
            log.warning("index: %s", error.strerror)


def _cut(store: Store, entry: Entry, fd: int, stop: int, end: int, why: str) -> None:
    """Remove what follows the last whole record, unless whole records follow it."""
    if why == "version":
        raise framing.FramingError(why)
    if why == "torn":  # a write that a crash interrupted; nobody was told that it had happened
        os.ftruncate(fd, stop)
        log.info("entry %r: cut %d bytes of an interrupted write off %s", entry.name, end - stop, entry.path)
        return
    later = framing.resync(fd, stop, entry.seed, end)
    if later >= 0 and not _unsure(store, entry, stop):
        raise vstore.DamageError(stop, f"{why}; whole records follow at offset {later}")
    copy = store.files.keep_tail(entry.path, fd, stop, end)
    os.ftruncate(fd, stop)
    log.warning("entry %r: cut %d bytes that are no record (%s); a copy is in %s", entry.name, end - stop, why, copy)


def _unsure(store: Store, entry: Entry, offset: int) -> bool:
    """A power cut may have torn what stands here; nobody was promised that it would last."""
    return store.power_cut and offset >= entry.synced


def _check_thoroughly(store: Store, entry: Entry) -> None:
    """Compare every payload, taking out what a power cut has torn, until the rest is whole."""
    while entry.rows is not None and not entry.gone:
        try:
            check_all(store, entry)
        except DamagedError:
            continue  # one record fewer, or none at all
        return


def check_rows(store: Store, entry: Entry, side: int, layer: int, start: int, end: int) -> None:
    """Make sure that the payloads behind these rows are intact before anybody gets them.

    Only the first time after a start: what this process wrote is known to be right.

    Raises:
        DamagedError: one is not; the record, or the entry, is out of service now.
    """
    assert entry.rows is not None
    records = entry.rows.unchecked(side, layer, start, end)
    if records:
        _check(store, entry, records)
        entry.rows.mark_checked(records)


def check_payload(store: Store, entry: Entry, payload: Payload) -> None:
    """The same for a state or a block table."""
    if not payload.checked:
        _check(store, entry, [payload.record])
        payload.checked = True


def check_all(store: Store, entry: Entry) -> None:
    """Compare every payload of an entry."""
    assert entry.rows is not None
    for side in (layout.KEYS, layout.VALUES):
        for layer in range(entry.rows.layers(side)):
            check_rows(store, entry, side, layer, 0, _ALL_ROWS)
    for payload in [*entry.states.values(), *([entry.blocks] if entry.blocks else [])]:
        check_payload(store, entry, payload)


def warm(store: Store, entry: Entry) -> None:
    """Read the headers of an entry's file without the lock and forget them: a `load` that follows finds them cached."""
    if entry.rows is not None or not store.files.keeps:
        return
    try:
        fd = store.files.open(entry.path)
    except OSError:
        return  # `load` says what is wrong
    try:
        header, _ = files.read_header(fd)
        vstore.Rows().scan(fd, header.size, os.fstat(fd).st_size, header.seed, lambda *_: None)
    except (OSError, framing.FramingError, vstore.DamageError):
        return
    finally:
        os.close(fd)


def precheck(store: Store, entry: Entry) -> None:
    """Compare the checksums of all rows without holding the lock, so that a later `check_rows` has little to read.

    What is damaged stays unchecked: `check_rows` finds it again and decides what to do about it.
    """
    with store.lock:
        rows = entry.rows
        if entry.gone or rows is None:
            return
        ref, seed = store.ref(entry), entry.seed
        records = [
            record
            for side in (layout.KEYS, layout.VALUES)
            for layer in range(rows.layers(side))
            for record in rows.unchecked(side, layer, 0, _ALL_ROWS)
        ]
    for i in range(0, len(records), _AT_ONCE):
        some = records[i : i + _AT_ONCE]
        if vstore.check_records(ref.fileno(), seed, some) >= 0:
            return
        with store.lock:
            rows.mark_checked(some)


def unchecked(entry: Entry) -> bool:
    """A fetch of this entry may read much more than it answers."""
    return entry.rows is None or entry.rows.doubtful()


def _check(store: Store, entry: Entry, records: list[int]) -> None:
    try:
        bad = vstore.check_records(store.fd(entry), entry.seed, records)
    except OSError as error:
        if error.errno in NO_FAULT_OF_THE_FILE:
            raise StorageError(f"ERR the entry could not be read: {error.strerror}") from error
        store.lose(entry, f"cannot be read: {error.strerror}")
        raise DamagedError(
            f"ERR the stored entry could not be read ({error.strerror}) and is out of service"
        ) from error
    if bad < 0:
        return
    if not _retire(store, entry, bad):
        store.lose(entry, f"checksum of the record at offset {bad}")
    raise DamagedError("ERR stored bytes do not match their checksum: they are out of service")


def _retire(store: Store, entry: Entry, bad: int) -> bool:
    """Take a damaged record out when what remains is what was promised: the last one is like a torn tail, and a power
    cut may tear what was not flushed. False otherwise.

    Readers may hold the file, so it is not cut: the record is marked dead.
    """
    fd = store.fd(entry)
    try:
        old = framing.unpack_header(os.pread(fd, framing.HEADER_SIZE, bad), entry.seed, bad)
    except framing.FramingError:  # not even a record any more: somebody wrote over it
        return False
    last = framing.align_up(bad + old.total_len) >= entry.size
    if entry.writers or not (last or _unsure(store, entry, bad)):
        return False
    head = framing.pack_header(
        kind=old.kind, seed=entry.seed, state=framing.DEAD, offset=bad,
        payload_len=old.total_len - framing.HEADER_SIZE,
    )  # fmt: skip
    copy = store.files.keep_tail(entry.path, fd, bad, bad + old.total_len)
    os.pwrite(fd, head, bad)
    log.warning(
        "entry %r: %d bytes at offset %d are damaged and out of service; a copy is in %s",
        entry.name, old.total_len, bad, copy,
    )  # fmt: skip
    entry.rows = None
    store.recounted(entry, lambda: _read(store, entry))
    return True
