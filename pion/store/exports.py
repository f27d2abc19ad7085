"""V.EXPORT: K and V of a range of rows as a safetensors file, for a client on the same machine (wire.md §1.7).

Tensors ``k.<i>`` and ``v.<i>``, F16, shape (1, heads, rows, head_dim): the order of a model's cache, so that a client
maps the file instead of receiving and re-ordering rows.

A file belongs to the request it was made for and to the rows as they were then. Asked for again while nothing was
stored, it is answered again; otherwise it is deleted, and so is one that nobody asked for in ten minutes, and all of
them at the end. Nothing of its path comes from a client. The files lie in a directory of this process alone, of mode
0700; what a process left behind that was killed is removed by the next one, which knows it by its lock that nobody
holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from pion import limits
from pion._core import quant, stream
from pion._core.stream import Extents
from pion.errors import CommandError, StorageError
from pion.store import reading
from pion.store.copying import write_all
from pion.store.entries import Entry
from pion.store.files import EXPORT
from pion.store.layout import Side
from pion.store.sessions import Sessions
from pion.store.store import Store

log = logging.getLogger("pion.store")

VARIABLE: Final = "PION_EXPORT_DIR"  # of the original
_PREFIX: Final = "pion-export-"
_SUFFIX: Final = ".safetensors"
_OUR_FOLDER: Final = re.compile(re.escape(_PREFIX) + r"\w{8}")  # as mkdtemp makes them
_OUR_FILE: Final = re.compile(r"[0-9a-f]{32}" + re.escape(_SUFFIX))
_PIECE: Final = 4 * limits.MIB  # of FP32: what is in memory at a time
_GROUP: Final = 64  # rows; keys in a turbo format are decoded in groups of so many
_FP16: Final = limits.FORMATS["fp16"]


class Request(NamedTuple):
    """What a client asks for: rows [start, end) of the first layers of two sessions."""

    k_sid: bytes
    v_sid: bytes
    start: int
    end: int
    layers: int
    heads: int
    head_dim: int

    @property
    def side_bytes(self) -> int:
        """Of one layer of K or of V in the file."""
        return 2 * (self.end - self.start) * self.heads * self.head_dim


Stamp = tuple[tuple[Entry, int], ...]
"""The entries and how many changes they had seen."""


class _Piece(NamedTuple):
    offset: int  # of the layer-side's data in the file
    row: int  # first, from the start of the range
    rows: int
    native: bool  # fp16 words as they are; else FP32
    body: Extents


@dataclass(slots=True)
class _File:
    name: str
    nbytes: int
    stamp: Stamp
    used: float


class Exports:
    """The files of one process.

    Args:
        root: the data directory; None when there is none.
    """

    def __init__(self, store: Store, sessions: Sessions, root: Path | None) -> None:
        self._store, self._sessions = store, sessions
        self._root = root
        self._base = _base(root)
        self._folder: _Folder | None = None
        self._files: OrderedDict[Request, _File] = OrderedDict()
        self._lock = threading.Lock()  # one export at a time
        _remove_stale(self._base)

    def path(self, request: Request) -> str:
        """The file of a request, made now if need be. Blocking.

        Raises:
            SessionNotFoundError, CommandError: the sessions do not hold what is asked for, or not as fp16 can.
            StorageError: the file cannot be written.
        """
        for sid in (request.k_sid, request.v_sid):
            self._sessions.prepare(sid)
        with self._lock:
            with self._store.lock:
                stamp, pieces = self._plan(request)
            self._forget_stale()
            known = self._files.get(request)
            if known is not None:
                self._files.move_to_end(request)
                known.used = time.monotonic()
                return self._opened().path(known.name)
            try:
                return self._make(request, stamp, pieces)
            except OSError as error:
                raise StorageError(f"ERR V.EXPORT: the file could not be written: {error.strerror}") from error

    def sweep(self) -> None:
        """Delete what is out of date or unused. Once a second; does not wait for an export that is being made."""
        if self._files and self._lock.acquire(blocking=False):
            try:
                self._forget_stale()
                oldest = time.monotonic() - limits.EXPORT_UNUSED
                for request in [request for request, file in self._files.items() if file.used < oldest]:
                    self._delete(request)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Delete all of them."""
        with self._lock:
            self._files.clear()
            if self._folder is not None:
                self._folder.remove()
                self._folder = None

    # --- what a request means ---------------------------------------------------------------------------------------

    def _plan(self, request: Request) -> tuple[Stamp, list[_Piece]]:
        """Where the rows are. The store's lock is held: they are of one moment, and what is appended later leaves them
        as they are."""
        store = self._store
        stamp: list[tuple[Entry, int]] = []
        pieces: list[_Piece] = []
        step = max(_GROUP, _PIECE // (4 * request.heads * request.head_dim) // _GROUP * _GROUP)
        for side_number, sid in enumerate((request.k_sid, request.v_sid)):
            entry, side, about = self._sessions.find(sid)
            self._check(request, entry, side, about, "KV"[side_number])
            store.touch(entry)
            stamp.append((entry, entry.changes))
            for layer in range(request.layers):
                native = about.of(layer)[1] == _FP16
                offset = (2 * layer + side_number) * request.side_bytes
                for row in range(request.start, request.end, step):
                    last = min(request.end, row + step)
                    body = reading.rows(store, entry, about, side, layer, row, last, native=native)
                    assert body is not None
                    pieces.append(_Piece(offset, row - request.start, last - row, native, body))
        return tuple(stamp), pieces

    def _check(self, request: Request, entry: Entry, side: int, about: Side, what: str) -> None:
        assert entry.rows is not None
        held = max(entry.rows.layers(side), len(about.layers))
        if request.layers > held:
            raise CommandError(f"ERR V.EXPORT: n_layers {request.layers}, {what} has {held}")
        width = request.heads * request.head_dim
        for layer in range(request.layers):
            if about.of(layer)[0] != width:
                raise CommandError(
                    f"ERR V.EXPORT: n_kv_heads x head_dim is {width}, layer {layer} of {what} has rows of "
                    f"{about.of(layer)[0]} values"
                )
            if not entry.rows.covers(side, layer, request.start, request.end):
                raise CommandError(
                    f"ERR V.EXPORT: layer {layer} of {what} does not hold all rows {request.start}..{request.end}"
                )

    # --- files ------------------------------------------------------------------------------------------------------

    def _make(self, request: Request, stamp: Stamp, pieces: list[_Piece]) -> str:
        head = _header(request)
        nbytes = len(head) + 2 * request.layers * request.side_bytes
        self._make_room(nbytes)
        folder = self._opened()
        name = f"{secrets.token_hex(16)}{_SUFFIX}"
        fd = folder.create(name)
        try:
            os.ftruncate(fd, nbytes)
            write_all(fd, head)
            self._write_rows(fd, len(head), request, pieces)
        except BaseException:
            folder.unlink(name)
            raise
        finally:
            os.close(fd)
        self._files[request] = _File(name, nbytes, stamp, time.monotonic())
        return folder.path(name)

    def _write_rows(self, fd: int, base: int, request: Request, pieces: list[_Piece]) -> None:
        rows, head_bytes = request.end - request.start, 2 * request.head_dim
        dim = request.heads * request.head_dim
        for piece in pieces:
            words = bytearray(len(piece.body))
            piece.body.readinto(words)
            if not piece.native:
                try:
                    words = quant.encode(quant.FP32, quant.FP16, words, dim)
                except quant.RefusedRowError as error:
                    row = request.start + piece.row + error.row
                    raise CommandError(f"ERR V.EXPORT: row {row} holds a value that fp16 cannot hold") from None
            split = memoryview(quant.split_heads(words, request.heads, head_bytes))
            size = piece.rows * head_bytes
            for head in range(request.heads):
                at = base + piece.offset + (head * rows + piece.row) * head_bytes
                write_all(fd, split[head * size : (head + 1) * size], at)

    def _make_room(self, nbytes: int) -> None:
        cap = min(limits.EXPORT_BYTES, self._store.max_bytes // limits.EXPORT_SHARE)
        if nbytes > cap:
            raise CommandError(f"ERR V.EXPORT: a file of {nbytes} bytes is above the {cap} bytes of all exports")
        while self._files and (
            sum(file.nbytes for file in self._files.values()) + nbytes > cap or len(self._files) >= limits.EXPORT_FILES
        ):
            self._delete(next(iter(self._files)))
        info = os.statvfs(self._opened().name)
        if info.f_bavail * info.f_frsize < 2 * nbytes:  # the stores of others come first
            raise CommandError(f"ERR V.EXPORT: not enough free disk for a file of {nbytes} bytes")

    def _forget_stale(self) -> None:
        for request in [request for request, file in self._files.items() if not _current(file.stamp)]:
            self._delete(request)

    def _delete(self, request: Request) -> None:
        file = self._files.pop(request)
        stream.unlink_later(self._opened().path(file.name))  # a client that has it open keeps it

    def _opened(self) -> _Folder:
        if self._folder is None:
            self._folder = _Folder(self._base)
        return self._folder


def _current(stamp: Stamp) -> bool:
    return all(not entry.gone and entry.changes == changes for entry, changes in stamp)


def _header(request: Request) -> bytes:
    """Length and header; the data begins at a multiple of 64 bytes."""
    shape = [1, request.heads, request.end - request.start, request.head_dim]
    size = request.side_bytes
    tensors: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    for number in range(2 * request.layers):
        name = f"{'kv'[number % 2]}.{number // 2}"
        tensors[name] = {"dtype": "F16", "shape": shape, "data_offsets": [number * size, (number + 1) * size]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text = text.ljust((len(text) + 8 + 63) // 64 * 64 - 8)
    return len(text).to_bytes(8, "little") + text


# --- directories ----------------------------------------------------------------------------------------------------


def _base(root: Path | None) -> Path:
    """Where the directories of processes are."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).absolute()
    return root.absolute() / EXPORT if root is not None else Path(tempfile.gettempdir()).absolute()


class _Folder:
    """A fresh directory of this process.

    Raises:
        OSError: it could not be made.
        StorageError: the base is another user's, or open to others.
    """

    def __init__(self, base: Path) -> None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(10):
            self.name = tempfile.mkdtemp(prefix=_PREFIX, dir=base)  # mode 0700
            try:
                self._fd = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process saw it before it was locked, and took it for a dead one's
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.path.isdir(self.name):
                break
            os.close(self._fd)
        else:
            raise StorageError(f"ERR V.EXPORT: no directory could be made in {base}")
        info = os.fstat(self._fd)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise StorageError(f"ERR V.EXPORT: {self.name} is open to others")

    def path(self, name: str) -> str:
        """The absolute path of a file."""
        return f"{self.name}/{name}"

    def create(self, name: str) -> int:
        """A new file, open for writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Delete a file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove(self) -> None:
        """Delete the directory and what is in it."""
        _empty(self._fd, self.name)
        os.close(self._fd)


def _remove_stale(base: Path) -> None:
    """Delete the directories of processes that have ended."""
    try:
        found = [item.path for item in os.scandir(base) if _OUR_FOLDER.fullmatch(item.name)]
    except OSError:
        return
    for name in found:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # no directory, or not ours
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _empty(fd, name)
        except OSError as error:
            log.debug("%s is another process's: %s", name, error)
        finally:
            os.close(fd)


def _empty(fd: int, name: str) -> None:
    """Delete our files in a directory, and the directory if nothing else is in it."""
    for item in os.listdir(fd):
        if _OUR_FILE.fullmatch(item):
            with contextlib.suppress(OSError):
                os.unlink(item, dir_fd=fd)
    with contextlib.suppress(OSError):
        os.rmdir(name)
