"""What a disk may hold after a power cut, computed from the shim's log.

Promised by POSIX and nothing more: what was written before a successful fsync of the file is in it; names are in a
directory once the directory was synced. Everything else may be there, or not, in any order, torn at 512 bytes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CREATE, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, LINK, MKDIR, MARK, RESERVE = range(1, 11)
SECTOR = 512
_ENTRY = struct.Struct("<IIIIQQq")


@dataclass(frozen=True)
class Call:
    """One successful call: paths relative to the directory, `number` of calls counted until then."""

    op: int
    path: str
    other: str
    inode: int
    offset: int
    data: bytes
    number: int


def read_log(path: Path) -> Iterator[Call]:
    """The calls of a log, in the order they happened."""
    raw, at = path.read_bytes(), 0
    while at + _ENTRY.size <= len(raw):
        op, path_len, other_len, data_len, inode, offset, number = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        name, other = raw[at : at + path_len].decode(), raw[at + path_len : at + path_len + other_len].decode()
        at += path_len + other_len
        yield Call(op, name, other, inode, offset, raw[at : at + data_len], number)
        at += data_len


@dataclass
class File:
    """Content: on the medium, and what was done since in order (a write, or a length with data None)."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def copy(self) -> File:
        return File(bytearray(self.safe), list(self.pending))

    def settle(self) -> None:
        """After an fsync."""
        for offset, data in self.pending:
            _apply(self.safe, offset, data)
        self.pending.clear()


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        if len(content) > offset:
            del content[offset:]
        else:
            content.extend(bytes(offset - len(content)))
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


Change = tuple[str, int | None]  # a name in a directory gets this inode, or goes


class Disk:
    """Replays calls; `after_power_cut` writes what may be left into a directory."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        self._made: dict[int, int] = {}  # inode → key in `files`: the number of a removed file is soon given out again
        self.names: dict[str, int] = {}  # as every process sees them
        self.folders: set[str] = {""}
        self.safe: dict[str, int] = {}  # names on the medium
        self.safe_folders: set[str] = {""}
        self.pending: list[list[tuple[str, Change]]] = []  # groups that happen as one: (directory, change)

    def play(self, call: Call) -> None:
        if call.op == CREATE:
            self._made[call.inode] = number = len(self.files)
            self.files[number] = File()
            self._change([(call.path, number)])
        elif call.op == WRITE:
            self.files[self._made[call.inode]].pending.append((call.offset, call.data))
        elif call.op == TRUNCATE:
            self.files[self._made[call.inode]].pending.append((call.offset, None))
        elif call.op == SYNC:
            if call.path in self.folders:
                self._sync_folder(call.path)
            else:
                self.files[self._made[call.inode]].settle()
        elif call.op == RENAME:
            self._change([(call.path, None), (call.other, self.names[call.path])])
        elif call.op == LINK:
            self._change([(call.other, self.names[call.path])])
        elif call.op == UNLINK:
            self._change([(call.path, None)])
        elif call.op == MKDIR:
            self.folders.add(call.path)
            self.pending.append([(_parent(call.path), (call.path, -1))])

    def _change(self, changes: list[Change]) -> None:
        for path, inode in changes:
            if inode is None:
                self.names.pop(path, None)
            else:
                self.names[path] = inode
        self.pending.append([(_parent(path), (path, inode)) for path, inode in changes])

    def _sync_folder(self, folder: str) -> None:
        """Changes of names in this directory are on the medium, together with what happened as one with them."""
        left = []
        for group in self.pending:
            if any(directory == folder for directory, _ in group):
                self._settle(group, self.safe, self.safe_folders)
            else:
                left.append(group)
        self.pending = left

    @staticmethod
    def _settle(group: list[tuple[str, Change]], names: dict[str, int], folders: set[str]) -> None:
        for _, (path, inode) in group:
            if inode is None:
                names.pop(path, None)
            elif inode == -1:
                folders.add(path)
            else:
                names[path] = inode

    def after_power_cut(self, root: Path, variant: int, seed: int) -> None:
        """Write one possible outcome.

        Args:
            variant: 0 = nothing that was not synced; 1 = all names, file lengths too, but zeros instead of data; 2 = a
                random part of everything: names up to some moment, each sector or not.
        """
        rng = random.Random(seed)
        names, folders = dict(self.safe), set(self.safe_folders)
        keep = {0: 0, 1: len(self.pending), 2: rng.randint(0, len(self.pending))}[variant]
        for group in self.pending[:keep]:
            self._settle(group, names, folders)
        root.mkdir(parents=True)
        for folder in sorted(folders - {""}):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path, inode in names.items():
            if _parent(path) not in folders:
                continue  # its directory is not on the medium, so neither is the name
            content = bytearray(self.files[inode].safe)
            for offset, data in self.files[inode].pending:
                if variant == 1:
                    _apply(
                        content, offset, None if data is None else bytes(len(data)) if offset >= len(content) else b""
                    )
                elif variant == 2:
                    _tear(content, offset, data, rng)
            (root / path).write_bytes(content)


def _tear(content: bytearray, offset: int, data: bytes | None, rng: random.Random) -> None:
    """Some sectors of a write reach the medium, others do not."""
    if data is None:
        if rng.random() < 0.5:
            _apply(content, offset, None)
        return
    luck = rng.choice([0.0, 0.5, 1.0])
    at = offset
    while at < offset + len(data):
        end = min((at // SECTOR + 1) * SECTOR, offset + len(data))
        if rng.random() < luck:
            _apply(content, at, data[at - offset : end - offset])
        at = end


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
