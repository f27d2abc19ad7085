"""A data directory with everything in it, what may be answered from it, and the ways in which it can be damaged."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pion._core import framing, stream
from pion._core.keyspace import BLOB_MIN
from pion.errors import CommandError
from pion.limits import FORMATS
from pion.store import files
from pion.store.engine import Engine
from pion.store.keyspace.zset import ZSet
from tests.store.model import F16, words
from tests.store.support import DIM, fill

ROWS, LAYERS = 20, 3
F32, TURBO4 = FORMATS["fp32"], FORMATS["turbo4"]
RNG_BYTES = bytes(range(256)) * 16
BIG = b"\x5a" * (BLOB_MIN + 3)

Place = tuple[bytes, int]  # session, layer; state layers count from -1 down
BLOCKS = -100  # the place of the block hashes
Answers = dict[Place, bytes | None]


@dataclass(repr=False)
class Model:
    """What was stored.

    Attributes:
        now: the last acknowledged answer of every place.
        before: answers that had been acknowledged earlier.
        path: entry file of each namespace, relative to the directory.
        keys: the same for keys of the keyspace: all acknowledged values, the last one last.
    """

    now: Answers = field(default_factory=dict)
    before: dict[Place, set[bytes | None]] = field(default_factory=dict)
    path: dict[bytes, str] = field(default_factory=dict)
    keys: dict[bytes, list[Any]] = field(default_factory=dict)
    hits: set[bytes] = field(default_factory=set)

    def places(self, ns: bytes) -> set[Place]:
        """Of a namespace or raw session."""
        return {place for place in self.now if place[0] in (ns, ns + b"_pk", ns + b"_pv")}

    @property
    def names(self) -> list[bytes]:
        """Namespaces and raw sessions."""
        return list(self.path)


def ask(engine: Engine, place: Place) -> bytes | str | None:
    """What is answered: bytes, None for nothing, or the text of an error."""
    sid, layer = place
    try:
        if layer == BLOCKS:
            return engine.blocks(sid)
        if layer < 0:
            body = engine.ssm_fetch(sid, -1 - layer)
        elif sid in (b"raw_f32", b"turbo_pk", b"turbo_pv"):
            body = engine.v_fetch_range(sid, layer, 0, ROWS)
        else:
            body = engine.v_fetch_range(sid, layer, 0, ROWS, native=True)
        return None if body is None else body.tobytes()
    except CommandError as error:
        return str(error)


def keys_of(engine: Engine) -> dict[bytes, Any]:
    """Every key with its value; a sorted set as a list."""
    keyspace = engine.keyspace
    out: dict[bytes, Any] = {}
    for key in keyspace.keys(0):
        value = keyspace.get(0, key)
        out[key] = list(value.items()) if isinstance(value, ZSet) else dict(value) if isinstance(value, dict) else value
    return out


class Builder:
    """Fills a directory and keeps the model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = Model()

    def note(self, *names: bytes) -> None:
        """Ask for everything that these namespaces hold now; what they answered before is remembered."""
        for ns in names:
            self.model.path[ns] = self.engine._store.entries[_key(ns)].path
            sids = [ns] if ns.startswith(b"raw") else [ns + b"_pk", ns + b"_pv"]
            places = [(sid, layer) for sid in sids for layer in range(LAYERS)]
            if not ns.startswith(b"raw"):
                places += [(ns, -1), (ns, -2), (ns, BLOCKS)]
            for place in places:
                answer = ask(self.engine, place)
                assert not isinstance(answer, str), answer
                if place in self.model.now:
                    self.model.before.setdefault(place, set()).add(self.model.now[place])
                self.model.now[place] = answer
            if not ns.startswith(b"raw") and self.engine.lookup(ns):
                self.model.hits.add(ns)

    def keys(self) -> None:
        """The keyspace as it stands now was acknowledged."""
        self.engine.keyspace.flush_log()
        found = keys_of(self.engine)
        for key in found.keys() | self.model.keys.keys():
            history = self.model.keys.setdefault(key, [None])
            if history[-1] != found.get(key):
                history.append(found.get(key))

    def build(self) -> Model:
        """Prefixes of several formats, a raw session, states, block hashes; a snapshot, two logs' worth of keys."""
        engine = self.engine
        fill(engine, b"whole", ROWS, LAYERS, digest="ab" * 16, scope=b"s")
        fill(engine, b"other", ROWS, LAYERS, digest="cd" * 16)
        fill(engine, b"child", ROWS, LAYERS, parent=b"whole")
        engine.register(b"turbo", DIM, TURBO4, rows=ROWS, layers=LAYERS)
        for layer in range(LAYERS):
            for side in (b"_pk", b"_pv"):
                engine.v_store(b"turbo" + side, layer, 0, ROWS, words(layer, ROWS, DIM, F16), "F16")
        engine.register(b"states", DIM, F16, blocks=(16, b"12345678" * 3))
        for layer in range(2):
            engine.ssm_store(b"states", layer, b"%d" % layer * 300)
            engine.v_store(b"states_pk", layer, 0, ROWS, words(layer + 9, ROWS, DIM, F16), "F16")
        engine.v_create(b"raw_f32", DIM, F32)
        engine.v_store(b"raw_f32", 1, 0, ROWS, words(4, ROWS, DIM, F32), "F32")
        self.note(b"whole", b"other", b"child", b"turbo", b"states", b"raw_f32")
        keyspace, store = engine.keyspace, engine.keyspace_store
        assert store is not None
        for i in range(12):
            keyspace.set(0, b"key%d" % i, b"first %d " % i * 9)
            self.keys()
        keyspace.set(0, b"big", BIG)
        self.keys()
        store.fsync()
        store.rewrite_now()
        for i in range(0, 12, 2):
            keyspace.set(0, b"key%d" % i, b"second %d " % i * 7)
            self.keys()
            if i == 6:
                store.fsync()
        keyspace.set(0, b"big2", BIG[::-1] + b"2")
        self.keys()
        keyspace.delete(0, b"key1")
        self.keys()
        keyspace.set(0, b"last", b"one" * 20)
        self.keys()
        return self.model

    def overwrite(self) -> None:
        """Rows over rows, so that an earlier state shows when the end of the file is cut off."""
        for ns in (b"other", b"states"):
            for layer in range(2):
                self.engine.v_store(ns + b"_pk", layer, 0, ROWS, words(70 + layer, ROWS, DIM, F16), "F16")
                self.note(ns)
        self.engine.ssm_store(b"states", 0, b"new" * 90)
        self.note(b"states")


def _key(ns: bytes) -> bytes:
    return (b"r" if ns.startswith(b"raw") else b"p") + ns


def make(root: Path, *, killed: bool) -> Model:
    """Build `root`: as an end in order leaves it, or as SIGKILL does."""
    live = root.with_name(root.name + ".live")
    engine = Engine(live, ticker=False)
    builder = Builder(engine)
    model = builder.build()
    builder.overwrite()
    if killed:
        stream.drain()
        shutil.copytree(live, root)
        engine.close()
        shutil.rmtree(live)
    else:
        engine.close()
        live.rename(root)
    return model


# --- damage ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """Something that is done to a file."""

    name: str
    do: Callable[[Path], object]
    plain: bool = False  # what every kill may leave: a note for `pion check`, no problem


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _patch(path: Path, offset: int, change: Callable[[bytes], bytes], n: int = 1) -> None:
    data = bytearray(path.read_bytes())
    offset = min(max(offset, 0), len(data) - n)
    data[offset : offset + n] = change(bytes(data[offset : offset + n]))
    path.write_bytes(data)


def flip(path: Path, offset: int) -> None:
    _patch(path, offset, lambda byte: bytes([byte[0] ^ 0x10]))


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"y")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    moved = path.with_name(path.name + ".moved-away")
    path.rename(moved)
    moved.unlink()
    path.symlink_to(moved)


def _version(path: Path, version: int) -> None:
    """The same file, in another version of its format, with right checksums."""
    fd = os.open(path, os.O_RDONLY)
    try:
        old = framing.read_file_header(fd)
    finally:
        os.close(fd)
    head = framing.pack_file_header(old.type, version=version, generation=old.generation, attrs=old.attrs)
    assert len(head) == old.size
    _patch(path, 0, lambda _: head, len(head))


def _size(path: Path) -> int:
    return path.stat().st_size


def _cut(path: Path, size: int) -> None:
    os.truncate(path, size)


GENERAL = [
    Damage("garbage tail", lambda p: _write(p, p.read_bytes() + RNG_BYTES[252:847])),
    Damage("zero tail", lambda p: _write(p, p.read_bytes() + bytes(4096))),
    Damage("short tail", lambda p: _write(p, p.read_bytes() + b"\x7f" * 3), plain=True),
    Damage("empty", lambda p: _write(p, b"")),
    Damage("one byte", lambda p: _write(p, b"P")),
    Damage("cut in the header", lambda p: _cut(p, 40)),
    Damage("cut in the middle", lambda p: _cut(p, _size(p) // 2), plain=True),
    Damage("cut by a byte", lambda p: _cut(p, _size(p) - 1), plain=True),
    Damage("cut by 70 bytes", lambda p: _cut(p, _size(p) - 70), plain=True),
    Damage("flip in the magic", lambda p: flip(p, 1)),
    Damage("flip in the version", lambda p: flip(p, 4)),
    Damage("flip in the generation", lambda p: flip(p, 50)),
    Damage("flip in the header checksum", lambda p: flip(p, 61)),
    Damage("flip in an attribute", lambda p: flip(p, 66)),
    Damage("flip at a third", lambda p: flip(p, _size(p) // 3)),
    Damage("flip at the half", lambda p: flip(p, _size(p) // 2)),
    Damage("flip near the end", lambda p: flip(p, _size(p) - 30)),
    Damage("zeros in the middle", lambda p: _patch(p, _size(p) // 2 // 512 * 512, lambda old: bytes(len(old)), 512)),
    Damage("all zeros", lambda p: _write(p, bytes(_size(p)))),
    Damage("foreign", lambda p: _write(p, b"PIONVS01" + RNG_BYTES)),
    Damage("text", lambda p: _write(p, b"something a person wrote\n" * 40)),
    Damage("newer version", lambda p: _version(p, 77)),
    Damage("older version", lambda p: _version(p, 0)),
    Damage("directory", _replace_by_directory),
    Damage("pipe", _pipe),
    Damage("dangling link", _link),
    Damage("gone", lambda p: p.unlink()),
]


def record_damages(path: Path) -> list[Damage]:
    """Flips in the header and in the payload of each record of an entry file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        header, _ = files.read_header(fd)
        heads = list(framing.Scanner(fd, header.size, header.seed))
    finally:
        os.close(fd)
    out = []
    for at, head in enumerate(heads):
        for field_at in (0, 5, 16, 29, 40, 61):
            out.append(Damage(f"record {at} header byte {field_at}", _flipper(head.offset + field_at)))
        if head.attrs:
            out.append(Damage(f"record {at} attributes", _flipper(head.offset + 66)))
        if head.payload_len:
            out.append(Damage(f"record {at} payload", _flipper(head.payload_offset + head.payload_len // 2)))
    return out


def log_damages(path: Path, *, step: int = 1) -> list[Damage]:
    """Flips in each record of a log, snapshot or index."""
    data = path.read_bytes()
    header = framing.unpack_file_header(data)
    out, at, number = [], header.size, 0
    while at < len(data):
        record = framing.unpack_log(memoryview(data)[at:], header.seed)
        if number % step == 0:
            out.append(Damage(f"record {number} length", _flipper(at + 1)))
            out.append(Damage(f"record {number} checksum", _flipper(at + 5)))
            out.append(Damage(f"record {number} body", _flipper(at + record.total - 1)))
        at += record.total
        number += 1
    return out


def _flipper(offset: int) -> Callable[[Path], object]:
    return lambda path: flip(path, offset)


def splice(path: Path, kind: int, at: float, length: int, data: bytes) -> None:
    """A random change: flip, cut, overwrite, insert, remove, zero."""
    content = bytearray(path.read_bytes())
    offset = min(int(at * (len(content) + 1)), len(content))
    if kind == 0 and content:
        content[min(offset, len(content) - 1)] ^= 1 << length % 8
    elif kind == 1:
        del content[offset:]
    elif kind == 2:
        content[offset : offset + len(data)] = data
    elif kind == 3:
        content[offset:offset] = data
    elif kind == 4:
        del content[offset : offset + length]
    elif kind == 5:
        content[offset : offset + length] = bytes(min(length, len(content) - offset))
    path.write_bytes(content)


assert struct.calcsize("<Q") == 8
