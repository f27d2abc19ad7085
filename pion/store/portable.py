"""Entry files on their way out of a data directory and into another one.

An entry file says by itself what it is, so a copy of it, byte for byte, is the entry: under its own path (which follows
from its name) a server adopts it at its next start. Two things can go wrong with a copy by hand, and not here: the
index of the other directory remembers that this very file was dropped there, and a file that is damaged is found out
late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pion import limits
from pion._core import framing, vstore
from pion._core.keyspace import Keyspace
from pion.errors import StorageError
from pion.store import layout, loader, startup
from pion.store.copying import copy_file
from pion.store.engine import Engine
from pion.store.entries import Entry
from pion.store.files import DiskFiles, read_header

_REPLACE: Final = os.O_TRUNC | os.O_NOFOLLOW
_ALL_ROWS: Final = 0xFFFFFFFF
_NO_CAP: Final = 1 << 62  # nothing is evicted here; the server's caps hold from its next start on


class EntryFileError(StorageError):
    """A file that is no entry to be carried over; the text says why."""


@dataclass(slots=True)
class EntryFile:
    """An entry file that is whole.

    Attributes:
        entry: what it holds.
        size: bytes of whole records.
    """

    entry: Entry
    size: int

    def __str__(self) -> str:
        name = self.entry.name.decode("utf-8", "backslashreplace")
        declared = self.entry.declared
        if declared.rows is None:
            shape = f"{self.entry.row_count} rows, no declared shape"
        else:
            shape = f"{declared.layers} layers of {declared.rows} tokens"
        states = f", {len(self.entry.states)} recurrent states" if self.entry.states else ""
        return f"{name}: {shape}{states}, {self.size} bytes"


def examine(fd: int, what: object) -> EntryFile:
    """Read an entry file as a whole and compare every checksum.

    Args:
        what: names the file in errors.

    Raises:
        EntryFileError: it is none, of a later format version, damaged, or not complete.
        OSError: it cannot be read.
    """
    try:
        header, key = read_header(fd)
    except framing.FramingError as error:
        if error.reason == "version":
            raise EntryFileError(f"{what} is an entry of a later format version than {layout.ENTRY_VERSION}") from None
        raise EntryFileError(f"{what} is no entry file ({error.reason})") from None
    entry = Entry(key, header.generation)
    entry.seed, entry.states, entry.rows = header.seed, {}, vstore.Rows()
    end = os.fstat(fd).st_size
    try:
        stop, why = entry.rows.scan(fd, header.size, end, header.seed, loader.Collector(entry))
    except vstore.DamageError as error:
        raise EntryFileError(f"{what} is damaged at offset {error.offset} ({error.reason})") from None
    if why == "version":
        raise EntryFileError(f"{what} holds records of a later format version")
    if why and why != "torn" and (later := framing.resync(fd, stop, header.seed, end)) >= 0:
        raise EntryFileError(f"{what} is damaged at offset {stop} ({why}): whole records follow at offset {later}")
    bad = vstore.check_records(fd, header.seed, _records(entry))
    if bad >= 0:
        raise EntryFileError(f"{what} is damaged: the record at offset {bad} does not match its checksum")
    entry.recount()
    if not entry.complete:
        raise EntryFileError(f"{what} does not hold all {entry.declared.rows} rows of every layer")
    return EntryFile(entry, framing.align_up(stop))


def _records(entry: Entry) -> list[int]:
    assert entry.rows is not None
    out = [payload.record for payload in entry.states.values()]
    if entry.blocks is not None:
        out.append(entry.blocks.record)
    for side in (layout.KEYS, layout.VALUES):
        for layer in range(entry.rows.layers(side)):
            out += entry.rows.unchecked(side, layer, 0, _ALL_ROWS)
    return out


def export_entry(root: Path, ns: bytes, target: Path) -> EntryFile:
    """Copy the file of a prefix. A server may hold the directory: it appends to the file, and what stands in it stays.

    Args:
        target: a file that is not there.

    Raises:
        EntryFileError: there is no such prefix, or it is not whole.
        OSError: reading or writing failed.
    """
    source = root / layout.entry_path(layout.PREFIX + ns)
    name = ns.decode("utf-8", "backslashreplace")
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise EntryFileError(f"{root} holds no prefix '{name}'") from None
    try:
        found = examine(fd, f"the entry of '{name}'")
        copy_file(fd, found.size, target, _REPLACE, pad=True)
    finally:
        os.close(fd)
    return found


def import_entry(root: Path, source: Path, *, replace: bool = False) -> EntryFile:
    """Put an entry file into a data directory that no server holds; it is durable when this returns.

    Args:
        replace: an entry of the same name may be there; it is dropped.

    Raises:
        StartupError: a server holds the directory.
        EntryFileError: the file cannot be taken, or an entry of that name is there.
        OSError: reading or writing failed.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = examine(fd, source)
        keyspace = Keyspace(limits.DATABASES)  # of no interest, so the directory's own is not opened
        with Engine(root, max_sessions=1 << 24, max_bytes=_NO_CAP, keyspace=keyspace, ticker=False) as engine:
            _adopt(engine, found, fd, replace)
            engine.commit()
    finally:
        os.close(fd)
    return found


def _adopt(engine: Engine, found: EntryFile, fd: int, replace: bool) -> None:
    store, files = engine._store, engine._files
    assert isinstance(files, DiskFiles)
    assert store.index is not None
    startup.list_directory(store, files, startup.Found())  # files that were copied here by hand count as well
    key = found.entry.key
    with store.lock:
        over = store.get(key)
        if over is not None and not replace:
            raise EntryFileError(
                f"'{over.name.decode('utf-8', 'backslashreplace')}' is there already (--replace drops it)"
            )
        store.announce(key)
        out, temporary = files.scratch(found.entry.path, found.entry.generation)
        os.close(out)
        try:
            copy_file(fd, found.size, files.root / temporary, _REPLACE, pad=True)
            files.adopt(temporary, found.entry.path, over.generation if over is not None else 0)
        except OSError:
            files.remove(temporary)
            raise
        if over is not None:
            store.forget(over, "replaced by pion import")
        entry = Entry(key, found.entry.generation)
        entry.size = found.size
        store.insert(entry)
        store.index.put(key, entry.figures(clean=False))
        if not loader.load(store, entry):
            raise EntryFileError(f"{entry.path} could not be read back")
        store.index.put(key, entry.figures(clean=False))
        store.touch(entry)
        store.wrote(entry, found.size)
