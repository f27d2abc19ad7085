"""Bringing a data directory up.

With a whole index only the entries it calls dirty are read: those written after it last described them. Otherwise every
file is looked at. Either way the figures are true before the first command. Files that are no entries are reported and
left alone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pion._core import framing
from pion.store import index, layout, loader
from pion.store.entries import Entry
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
    """

    replayed: int = 0
    adopted: int = 0
    foreign: int = 0


def bring_up(store: Store, files: DiskFiles, idx: index.Index) -> tuple[Found, index.Loaded]:
    """Read the index, then what it does not vouch for, and drop what has expired meanwhile."""
    found = Found()
    with _no_collection():
        known = idx.load(lambda fd, start, end: files.keep_tail(index.NAME, fd, start, end))
    if known.tail:
        log.warning("index: cut %d bytes that are no record (%s)", known.tail, known.reason)
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
        _bury(files, key, generation)
    if not known.trusted:
        list_directory(store, files, found)
    for entry in [entry for entry in store.entries.values() if entry.dirty]:
        found.replayed += 1
        loader.load(store, entry, thorough=store.power_cut)
    store.expire(store.now_ms())
    return found, known


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


def _bury(files: DiskFiles, key: bytes, generation: int) -> None:
    """Remove a dropped entry whose file was still there when the process ended."""
    path = layout.entry_path(key)
    try:
        fd = files.open(path)
    except OSError:
        return
    try:
        header, _ = read_header(fd)
    except (framing.FramingError, OSError):
        return
    finally:
        os.close(fd)
    if header.generation == generation:
        files.discard(path, generation)


def list_directory(store: Store, files: DiskFiles, found: Found) -> None:
    """Take in entry files the index does not know, report what is none, remove unfinished ones."""
    with store.lock:
        known = {entry.path: entry for entry in store.entries.values()}
        flushes = store.flushes
    foreign: list[str] = []
    for folder, _, names in os.walk(files.root / "kv" / layout.TENANT):
        base = os.path.relpath(folder, files.root)
        for name in names:
            path = f"{base}/{name}"
            if path in known:
                _compare_size(store, files, known[path])
            elif name.endswith((layout.SUFFIX + ".new", layout.SUFFIX + ".compact")):
                _remove_unfinished(files, path)
            elif not (name.endswith(layout.SUFFIX) and _adopt(store, files, path, flushes)):
                foreign.append(path)
            else:
                found.adopted += 1
    found.foreign = len(foreign)
    if foreign:
        shown = ", ".join(foreign[:_SHOWN])
        log.warning("%d files in %s are no entries and are left alone: %s", len(foreign), files.root / "kv", shown)


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


def _adopt(store: Store, files: DiskFiles, path: str, flushes: int) -> bool:
    """Take in one entry file; False when it is none, or another entry's under a wrong name.

    One that a FLUSH would have dropped, had it been known by then, is removed instead.
    """
    with store.lock:
        try:
            fd = files.open(path)
        except FileNotFoundError:
            return True  # dropped since the directory was read
        except OSError:
            return False
        try:
            header, key = read_header(fd)
        except (framing.FramingError, OSError):
            return False
        finally:
            os.close(fd)
        if layout.entry_path(key) != path:
            return False
        if key in store.entries:
            return True
        if store.flushes != flushes:
            files.discard(path, header.generation)
            return True
        entry = Entry(key, header.generation)
        entry.size = os.stat(files.root / path).st_size
        entry.used = 1  # nobody knows: the first to go
        store.insert(entry)
        if loader.load(store, entry) and store.index is not None:
            store.index.put(key, entry.figures(clean=False))
        store.order.from_files()
        store.enforce()
        return True


def foreign_originals(root: Path) -> list[str]:
    """Snapshots of the original Pion in the directory: never read as ours, never overwritten."""
    out = []
    for path in sorted(root.glob("pion.vstore.*")):
        with path.open("rb") as file:
            if file.read(8) == b"PIONVS01":
                out.append(path.name)
    return out
