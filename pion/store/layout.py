"""What stands in the files of the store: names, record kinds, attributes.

```
<dir>/pion.lock                       flock, with the pid of the server that has the directory open
<dir>/pion.index                      what entries there are (index.py)
<dir>/kv/<tenant>/<xx>/<hash>.pion    one entry: records of framing.h, append-only
<dir>/kv/trash/                       dropped entries on their way out; emptied at start
<dir>/export/                         files of V.EXPORT (exports.py); emptied at start and end
<dir>/quarantine/                     damaged entries and cut-off tails, kept for a person to look at
```
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pion import limits
from pion._core import framing, vstore
from pion._core.vstore import GROUP, is_keys
from pion.errors import CommandError

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

_TURBO: Final = tuple(limits.FORMATS[name] for name in ("turbo4", "turbo3", "turbo2"))
_KEYS: Final = 16  # turbo codes with this bit encode groups of keys
_HYBRID: Final = limits.FORMATS["bf16_rope_fp8_body"]  # its parameter is the user's choice

_ENTRY_PATH: Final = re.compile(rf"kv/{TENANT}/[0-9a-f]{{2}}/[0-9a-f]{{40}}\{SUFFIX}")

# Attributes: type, u16. A reader skips the ones it does not know.
_NAME, _DOMAIN, _CREATED = 1, 2, 3
_SIDES, _SHAPE, _DIGEST, _SCOPE, _PARENT, _HEADS, _ROPE, _PARAMS, _LAYERS = 16, 17, 18, 19, 20, 21, 22, 23, 24
_PINNED, _EXPIRES, _STATE_COUNT = 25, 26, 27


@dataclass(frozen=True, slots=True)
class Declared:
    """What was said of a prefix beyond dimension and format; None = not said.

    Attributes:
        rows, layers: the shape; both or neither.
        digest: of token ids and model, lower-case hex.
        scope: names that are searched together.
        parent: the namespace this prefix continues.
        heads, head_dim: what a row is made of.
        rope: base of the rotary embedding of the keys.
        pinned: PIN protects it from eviction.
        expires: when EXPIRE ends it, in ms since 1970.
        states: recurrent states that belong to it, numbered from 0.
    """

    rows: int | None = None
    layers: int | None = None
    digest: str | None = None
    scope: bytes | None = None
    parent: bytes | None = None
    heads: int | None = None
    head_dim: int | None = None
    rope: float | None = None
    pinned: bool | None = None
    expires: int | None = None
    states: int | None = None

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
        if self.pinned:
            out.append((_PINNED, b""))
        if self.expires is not None:
            out.append((_EXPIRES, struct.pack("<Q", self.expires)))
        if self.states is not None:
            out.append((_STATE_COUNT, struct.pack("<I", self.states)))
        return out


UNDECLARED: Final = Declared()


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an entry: what its rows are made of, layer by layer.

    Attributes:
        dim: values per row; 0 = layers beyond `layers` cannot be stored.
        fmt: format: the code, and its parameter from bit 8 on.
        layers: (dim, fmt) of the first layers when they were given one by one; `dim` and `fmt` hold for the others.
    """

    dim: int
    fmt: int
    layers: tuple[tuple[int, int], ...] = ()

    def of(self, layer: int) -> tuple[int, int]:
        """(dim, fmt) of a layer."""
        return self.layers[layer] if 0 <= layer < len(self.layers) else (self.dim, self.fmt)

    def row_bytes(self, layer: int) -> int:
        """Stored bytes of a row of a layer."""
        dim, fmt = self.of(layer)
        return vstore.row_bytes(fmt, dim)

    def stored_bytes(self, layer: int, rows: int) -> int:
        """What the first `rows` rows of a layer take, when all are there."""
        dim, fmt = self.of(layer)
        if not is_keys(fmt):
            return rows * vstore.row_bytes(fmt, dim)
        loose = rows % GROUP
        return (rows - loose) * vstore.row_bytes(fmt, dim) + loose * 2 * dim

    @property
    def has_keys(self) -> bool:
        """Some layer is in a key form."""
        return is_keys(self.fmt) or any(is_keys(fmt) for _, fmt in self.layers)

    def same(self, other: Side) -> bool:
        """Whether rows of the other side would be stored in the same form. The head size is the entry's own matter."""
        mine, theirs = ((_form(side.dim, side.fmt), [_form(*layer) for layer in side.layers]) for side in (self, other))
        return mine == theirs

    @property
    def every(self) -> list[tuple[int, int]]:
        """(dim, fmt) of all layers there may be, equal ones once."""
        return [*self.layers, *([(self.dim, self.fmt)] if self.dim or not self.layers else [])]

    @property
    def shown(self) -> tuple[int, int]:
        """(dim, fmt) the side as a whole is described by: the first layer's, and the dimension given for all."""
        dim, fmt = self.of(0)
        return self.dim or dim, fmt


def _form(dim: int, fmt: int) -> tuple[int, int]:
    return dim, fmt if fmt & 255 == _HYBRID else code_of(fmt)


def code_of(fmt: int) -> int:
    """The format code a user knows, of `pion.limits.FORMATS`."""
    return fmt & 255 & ~_KEYS


def stored_as(key: bytes, number: int, asked: Side, head_dim: int | None) -> Side:
    """How a side of an entry keeps rows that are asked for in formats of `pion.limits.FORMATS`.

    turbo is told the size of a head where that divides the row; keys of a prefix are kept in groups of rows.

    Raises:
        CommandError: a format that does not take rows of this many values.
    """

    def form(dim: int, fmt: int) -> tuple[int, int]:
        code = fmt & 255
        if code in _TURBO:
            fmt = code | (head_dim << 8 if head_dim and dim % head_dim == 0 else 0)
            if number == KEYS and key[:1] == PREFIX:
                fmt |= _KEYS
        return dim, fmt

    side = Side(*form(asked.dim, asked.fmt), tuple(form(*layer) for layer in asked.layers))
    for dim, fmt in side.every:
        _check_dim(dim, fmt)
    return side


def _check_dim(dim: int, fmt: int) -> None:
    try:
        vstore.row_bytes(fmt, dim)
    except ValueError:
        name = format_name(fmt)
        allowed = "multiples of 32 values" if name == "mlx4g32" else "1 to 8192 values"
        if fmt & 255 == _HYBRID:
            allowed = "more values than its parameter, which is at least 1"
        raise CommandError(f"ERR format {name} takes rows of {allowed}, not {dim}") from None


def format_name(fmt: int) -> str:
    """The name of a stored format."""
    return limits.FORMAT_NAMES[code_of(fmt)]


def entry_key(domain: bytes, name: bytes) -> bytes:
    """What identifies an entry everywhere."""
    return domain + name


def entry_path(key: bytes) -> str:
    """Path of an entry's file, relative to the data directory."""
    digest = hashlib.blake2b(key, digest_size=20).hexdigest()
    return f"kv/{TENANT}/{int(digest[:2], 16) % FANOUT:02x}/{digest}{SUFFIX}"


def is_entry_path(path: str) -> bool:
    """Whether a file of this name, relative to the data directory, can only be an entry."""
    return _ENTRY_PATH.fullmatch(path) is not None


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
    known = [(number, side) for number, side in enumerate(sides) if side is not None]
    packed = b"".join(struct.pack("<BIB", number, side.dim, side.fmt & 255) for number, side in known)
    attrs = [(_SIDES, packed)]
    params = b"".join(struct.pack("<BH", number, side.fmt >> 8) for number, side in known if side.fmt >> 8)
    if params:
        attrs.append((_PARAMS, params))
    for number, side in known:
        if side.layers:
            layers = b"".join(struct.pack("<IBH", dim, fmt & 255, fmt >> 8) for dim, fmt in side.layers)
            attrs.append((_LAYERS, bytes([number]) + layers))
    return framing.pack_attrs([*attrs, *declared.pack()])


def unpack_meta(attrs: bytes) -> tuple[list[Side | None], Declared]:
    """The inverse of `pack_meta`. Raises FramingError or struct.error for bytes no writer makes."""
    plain: dict[int, tuple[int, int]] = {}
    params: dict[int, int] = {}
    layers: dict[int, tuple[tuple[int, int], ...]] = {}
    said: dict[str, Any] = {}
    for kind, value in framing.unpack_attrs(attrs):
        if kind == _SIDES:
            plain = {number: (dim, code) for number, dim, code in struct.iter_unpack("<BIB", value)}
        elif kind == _PARAMS:
            params = dict(struct.iter_unpack("<BH", value))
        elif kind == _LAYERS and value:
            layers[value[0]] = tuple(
                (dim, code | param << 8) for dim, code, param in struct.iter_unpack("<IBH", value[1:])
            )
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
        elif kind == _PINNED:
            said["pinned"] = True
        elif kind == _EXPIRES:
            said["expires"] = struct.unpack("<Q", value)[0]
        elif kind == _STATE_COUNT:
            said["states"] = struct.unpack("<I", value)[0]
    sides: list[Side | None] = [None, None]
    for number, (dim, code) in plain.items():
        if number > VALUES:
            raise framing.FramingError("field")
        sides[number] = _checked(Side(dim, code | params.get(number, 0) << 8, layers.get(number, ())))
    return sides, Declared(**said) if said else UNDECLARED


def unpack_kept(attrs: bytes) -> tuple[bytes | None, bool, int]:
    """Only parent, pinned and expires (0 = never) of the attributes of a META: a start needs no more of them."""
    parent: bytes | None = None
    pinned, expires = False, 0
    for kind, value in framing.unpack_attrs(attrs):
        if kind == _PARENT:
            parent = value
        elif kind == _PINNED:
            pinned = True
        elif kind == _EXPIRES:
            expires = int.from_bytes(value, "little")
    return parent, pinned, expires


def _checked(side: Side) -> Side:
    for dim, fmt in side.every:
        try:
            vstore.row_bytes(fmt, dim)
        except ValueError as error:
            raise framing.FramingError("field") from error
    return side
