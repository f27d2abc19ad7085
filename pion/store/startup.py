"""Bringing a data directory up.

With a whole index only the entries it calls dirty are read, those written after it last described them, and those it
announces without describing them; the figures are true before the first command. Without one the entries are found
while the server answers, in the order of the directory, and at once when somebody asks for one; only when all of them
might be too much for the caps, or after a power cut, they are read before. Files that are no entries are reported and
left alone, damaged ones are moved aside.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pion._core import framing
from pion.store import index, layout, loader
from pion.store.entries import BLOCK, Entry
from pion.store.files import DiskFiles, read_header
from pion.store.store import Store

log = logging.getLogger("pion.store")

_SHOWN = 10  # names of foreign files in the log


@dataclass(slots=True)
class Found:
    """What a start found.

    Attributes:
        replayed: dirty entries that were read.
        adopted: entry files the index did not know.
        foreign: files that are no entries.
        listed: the directory has been listed; otherwise `list_directory` is to be called while the store is used.
        nbytes: of the files in the directory, when they were counted.
    """

    replayed: int = 0
    adopted: int = 0
    foreign: int = 0
    listed: bool = False
    nbytes: int = 0


def bring_up(store: Store, files: DiskFiles, idx: index.Index, max_sessions: int, max_bytes: int | None) -> Found:
    """Read the index, then what it does not vouch for, and drop what has expired meanwhile.

    Args:
        max_sessions, max_bytes: what will be the caps.
    """
    found = Found()
    with _no_collection():
        known = idx.load(
            lambda fd, start, end: files.keep_tail(index.NAME, fd, start, end),
            lambda: files.quarantine(index.NAME, 0),
        )
    if known.tail:
        log.warning("%s: cut %d bytes that are no record (%s)", index.NAME, known.tail, known.reason)
    for name in foreign_originals(files.root):
        log.warning("%s is a snapshot of another Pion: it is neither read nor overwritten", name)
    store.power_cut = not known.same_boot
    idx.opened()
    for figures in known.entries.values():
        if not known.trusted or not (known.same_boot or figures.synced >= figures.size):
            figures.flags &= ~index.CLEAN
    with _no_collection():
        store.load_index(known.entries)
    for key, generation in known.dropped.items():
        _bury(store, files, key, generation)
    for key in known.making - known.entries.keys():
        found.adopted += _adopt(store, files, layout.entry_path(key), store.flushes) is not None
    if not known.trusted:
        fits = _fits(files, found, max_sessions, max_bytes)
        if found.nbytes or known.reason != "missing":
            log.warning("%s: %s; it is made from the entries", index.NAME, known.reason or "not closed in order")
        if store.power_cut or not fits:
            list_directory(store, files, found)
            found.listed = True
    for entry in [entry for entry in store.entries.values() if entry.dirty]:
        found.replayed += 1
        if entry.rows is None or store.power_cut:
            loader.load(store, entry, thorough=store.power_cut)
    store.expire(store.now_ms())
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of objects that all stay: looking for cycles among them takes longer than making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _bury(store: Store, files: DiskFiles, key: bytes, generation: int) -> None:
    """Remove a dropped entry whose file was still there when the process ended."""
    path = layout.entry_path(key)
    try:
        fd = files.open(path)
    except OSError:
        return
    try:
        header, _ = read_header(fd)
        size = os.fstat(fd).st_size
    except (framing.FramingError, OSError):
        return
    finally:
        os.close(fd)
    if header.generation == generation:
        files.discard(path, generation)
        store.release(None, size, generation)


def _fits(files: DiskFiles, found: Found, max_sessions: int, max_bytes: int | None) -> bool:
    """Whether everything in the directory is below the caps, whatever it is."""
    count = 0
    for path in files.entry_files():
        with contextlib.suppress(OSError):
            found.nbytes += -(-files.size(path) // BLOCK) * BLOCK
            count += 1
    return 2 * count <= max_sessions and (max_bytes is None or found.nbytes <= max_bytes)


def list_directory(store: Store, files: DiskFiles, found: Found, flushes: int = 0) -> None:
    """Take in entry files the index does not know, report what is none, remove unfinished ones.

    Args:
        flushes: how many there had been when what is in the directory was stored.
    """
    with store.lock:
        known = {entry.path: entry for entry in store.entries.values()}
    foreign: list[str] = []
    for path in files.entry_files():
        if path in known:
            _compare_size(store, files, known[path])
        elif path.endswith((layout.SUFFIX + ".new", layout.SUFFIX + ".compact")):
            _remove_unfinished(files, path)
        elif layout.is_entry_path(path):
            found.adopted += _adopt(store, files, path, flushes) is not None
        else:
            foreign.append(path)
    found.foreign = len(foreign)
    if foreign:
        shown = ", ".join(foreign[:_SHOWN])
        log.warning("%d files in %s are no entries and are left alone: %s", len(foreign), files.root / "kv", shown)


def finder(store: Store, files: DiskFiles) -> Callable[[bytes], Entry | None]:
    """Looks for the entry of a key that the listing has not come to yet."""
    flushes = store.flushes
    return lambda key: _adopt(store, files, layout.entry_path(key), flushes, 0)


def _compare_size(store: Store, files: DiskFiles, entry: Entry) -> None:
    """A file of another length than the index says is read at once, not at its first use."""
    with store.lock:
        if entry.gone or entry.rows is not None:
            return
        try:
            size = os.stat(files.root / entry.path).st_size
        except FileNotFoundError:
            size = -1
        if framing.align_up(max(size, 0)) != entry.size:
            loader.load(store, entry)
            store.enforce()


def _remove_unfinished(files: DiskFiles, path: str) -> None:
    """A file that an earlier process was making."""
    try:
        age = os.stat(files.root / path).st_mtime
    except FileNotFoundError:
        return
    if age < files.since:
        files.remove(path)


def _adopt(store: Store, files: DiskFiles, path: str, flushes: int, used: int = 1) -> Entry | None:
    """Take in one entry file; None when there is none, or a damaged one, which is moved aside.

    One that a FLUSH would have dropped, had it been known by then, is removed instead.

    Args:
        used: number of its last use, which nobody knows: 1 = it is the first to go, 0 = it is used now.
    """
    with store.lock:
        try:
            fd = store.with_descriptor(lambda: files.open(path))
        except FileNotFoundError:
            return None  # dropped since the directory was read
        except OSError as error:
            _set_aside(store, files, path, f"cannot be read: {error.strerror}", error.errno)
            return None
        try:
            header, key = read_header(fd)
            size = os.fstat(fd).st_size
        except framing.FramingError as error:
            _set_aside(store, files, path, f"its first record: {error}")
            return None
        except OSError as error:
            _set_aside(store, files, path, f"cannot be read: {error.strerror}", error.errno)
            return None
        finally:
            os.close(fd)
        if layout.entry_path(key) != path:
            _set_aside(store, files, path, f"it is the file of entry {key[1:]!r}")
            return None
        if key in store.entries:
            return store.entries[key]
        if store.flushes != flushes:
            files.discard(path, header.generation)
            store.release(None, size, header.generation)
            return None
        entry = Entry(key, header.generation)
        entry.size = size
        entry.used = used
        store.insert(entry)
        if not loader.load(store, entry):
            return None
        if store.index is not None:
            try:
                store.index.put(key, entry.figures(clean=False))
            except OSError as error:  # the next start finds it again
                log.warning("index: %s", error.strerror)
        store.unlisted = max(0, store.unlisted - entry.disk)
        store.order.from_files()
        store.enforce()
        return None if entry.gone else entry


def _set_aside(store: Store, files: DiskFiles, path: str, why: str, error: int | None = None) -> None:
    """A file with the name of an entry that is none."""
    if error in loader.NO_FAULT_OF_THE_FILE:
        return
    store.quarantined += 1
    try:
        log.error("%s is damaged (%s): moved to %s", path, why, files.quarantine(path, 0))
    except OSError as failure:
        log.error("%s is damaged (%s) and could not be moved aside: %s", path, why, failure.strerror)


def foreign_originals(root: Path) -> list[str]:
    """Snapshots of the original Pion in the directory: never read as ours, never overwritten."""
    out = []
    for path in sorted(root.glob("pion.vstore.*")):
        with path.open("rb") as file:
            if file.read(8) == b"PIONVS01":
                out.append(path.name)
    return out
