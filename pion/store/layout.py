"""What stands in the files of the store: names, record kinds, attributes.

```
<dir>/pion.lock                       flock, with the pid of the server that has the directory open
<dir>/pion.index                      what entries there are (index.py)
<dir>/kv/<tenant>/<xx>/<hash>.pion    one entry: records of framing.h, append-only
<dir>/kv/trash/                       dropped entries on their way out; emptied at start
<dir>/quarantine/                     damaged entries and cut-off tails, kept for a person to look at
```
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pion import limits
from pion._core import framing

ENTRY_TYPE: Final = b"PENT"
ENTRY_VERSION: Final = 1
SUFFIX: Final = ".pion"
TENANT: Final = "_"  # the directory of everybody who has no tenant
FANOUT: Final = 16  # directories; each is one more fsync of a commit, so few

#: Record kinds of an entry file. framing.h knows FILE, vstore.h STORE and TRIM.
FILE: Final = framing.KIND_FILE
META: Final = 2  # attributes: all that REGISTER and CREATE said; the last one counts
STORE: Final = 3  # count rows of one layer and side, from position start
BLOCKS: Final = 4  # u64 block hashes; start = block size
STATE: Final = 5  # opaque recurrent state of one layer
TRIM: Final = 6  # a side of a layer was cut to count rows
STATE_DROP: Final = 7  # start = 1: of one layer, 0: of all

KEYS: Final = 0  # sides
VALUES: Final = 1
STATES: Final = 2
PREFIX: Final = b"p"  # domains: the first byte of an entry's key
RAW: Final = b"r"

# Attributes: type, u16. A reader skips the ones it does not know.
_NAME, _DOMAIN, _CREATED = 1, 2, 3
_SIDES, _SHAPE, _DIGEST, _SCOPE, _PARENT, _HEADS, _ROPE = 16, 17, 18, 19, 20, 21, 22


@dataclass(frozen=True, slots=True)
class Declared:
    """What REGISTER said of a prefix beyond dimension and format; None = not said.

    Attributes:
        rows, layers: the shape; both or neither.
        digest: of token ids and model, lower-case hex.
        scope: names that are searched together.
        parent: the namespace this prefix continues.
        heads, head_dim: what a row is made of.
        rope: base of the rotary embedding of the keys.
    """

    rows: int | None = None
    layers: int | None = None
    digest: str | None = None
    scope: bytes | None = None
    parent: bytes | None = None
    heads: int | None = None
    head_dim: int | None = None
    rope: float | None = None

    def pack(self) -> list[tuple[int, bytes]]:
        """As attributes; what is None is left out."""
        out: list[tuple[int, bytes]] = []
        if self.rows is not None and self.layers is not None:
            out.append((_SHAPE, struct.pack("<II", self.rows, self.layers)))
        if self.digest is not None:
            out.append((_DIGEST, bytes.fromhex(self.digest)))
        if self.scope is not None:
            out.append((_SCOPE, self.scope))
        if self.parent is not None:
            out.append((_PARENT, self.parent))
        if self.heads is not None or self.head_dim is not None:
            out.append((_HEADS, struct.pack("<II", self.heads or 0, self.head_dim or 0)))
        if self.rope is not None:
            out.append((_ROPE, struct.pack("<d", self.rope)))
        return out


UNDECLARED: Final = Declared()


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an entry: values per row and format code."""

    dim: int
    fmt: int

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row."""
        return limits.row_bytes(self.fmt, self.dim)


def entry_key(domain: bytes, name: bytes) -> bytes:
    """What identifies an entry everywhere."""
    return domain + name


def entry_path(key: bytes) -> str:
    """Path of an entry's file, relative to the data directory."""
    digest = hashlib.blake2b(key, digest_size=20).hexdigest()
    return f"kv/{TENANT}/{int(digest[:2], 16) % FANOUT:02x}/{digest}{SUFFIX}"


def new_generation() -> int:
    """A random number for a new file; 0 is never used."""
    return int.from_bytes(os.urandom(8), "little") or 1


def file_header(key: bytes, generation: int) -> bytes:
    """The first record of an entry file."""
    attrs = framing.pack_attrs(
        [(_NAME, key[1:]), (_DOMAIN, key[:1]), (_CREATED, struct.pack("<Q", time.time_ns() // 1_000_000))]
    )
    return framing.pack_file_header(ENTRY_TYPE, version=ENTRY_VERSION, generation=generation, attrs=attrs)


def header_key(header: framing.FileHeader) -> bytes:
    """The key in an entry file's first record. Raises FramingError when there is none."""
    attrs = dict(framing.unpack_attrs(header.attrs))
    name, domain = attrs.get(_NAME), attrs.get(_DOMAIN)
    if name is None or domain not in (PREFIX, RAW):
        raise framing.FramingError("field")
    return entry_key(domain, name)


def pack_meta(sides: Sequence[Side | None], declared: Declared) -> bytes:
    """The attributes of a META record (and of an index record)."""
    packed = b"".join(
        struct.pack("<BIB", number, side.dim, side.fmt) for number, side in enumerate(sides) if side is not None
    )
    return framing.pack_attrs([(_SIDES, packed), *declared.pack()])


def unpack_meta(attrs: bytes) -> tuple[list[Side | None], Declared]:
    """The inverse of `pack_meta`. Raises FramingError, struct.error or KeyError for bytes no writer makes."""
    sides: list[Side | None] = [None, None]
    said: dict[str, Any] = {}
    for kind, value in framing.unpack_attrs(attrs):
        if kind == _SIDES:
            for number, dim, fmt in struct.iter_unpack("<BIB", value):
                if number > VALUES or limits.row_bytes(fmt, dim) == 0:
                    raise framing.FramingError("field")
                sides[number] = Side(dim, fmt)
        elif kind == _SHAPE:
            said["rows"], said["layers"] = struct.unpack("<II", value)
        elif kind == _DIGEST:
            said["digest"] = value.hex()
        elif kind == _SCOPE:
            said["scope"] = value
        elif kind == _PARENT:
            said["parent"] = value
        elif kind == _HEADS:
            heads, head_dim = struct.unpack("<II", value)
            said["heads"], said["head_dim"] = heads or None, head_dim or None
        elif kind == _ROPE:
            said["rope"] = struct.unpack("<d", value)[0]
    return sides, Declared(**said) if said else UNDECLARED
