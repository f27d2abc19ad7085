"""One entry file, read and verified record by record."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pion._core import framing, vstore
from pion._core.framing import FramingError
from pion.store import layout
from pion.store.files import read_header
from pion.store.layout import UNDECLARED, Declared, Side
from pion.store.regular import open_regular
from pion.tools.findings import WHY, Finding

KINDS: Final = {
    layout.META: "META",
    layout.STORE: "STORE",
    layout.BLOCKS: "BLOCKS",
    layout.STATE: "STATE",
    layout.TRIM: "TRIM",
    layout.STATE_DROP: "STATE_DROP",
}
STATES: Final = {framing.PENDING: "pending", framing.VALID: "valid", framing.DEAD: "dead"}
SIDES: Final = ("K", "V")
_ALL_ROWS: Final = 0xFFFFFFFF


@dataclass(slots=True)
class Record:
    """One record as it stands in the file. `good`: its payload equals its checksum; None = not compared."""

    header: framing.Header
    good: bool | None = None

    @property
    def kind(self) -> str:
        """Its name."""
        return KINDS.get(self.header.kind, f"kind {self.header.kind}")

    @property
    def state(self) -> str:
        """Whether it counts."""
        return STATES[self.header.state]

    def about(self, *, raw: bool = False) -> str:
        """What it holds, in words; the rows of a raw session are neither K nor V."""
        head = self.header
        rows = "" if raw else f"{SIDES[head.side & 1]} "
        if head.kind == layout.STORE:
            return f"layer {head.layer} {rows}rows {head.start}..{head.start + head.count - 1}"
        if head.kind == layout.TRIM:
            return f"layer {head.layer} {rows}cut to {head.count} rows"
        if head.kind == layout.STATE:
            return f"layer {head.layer} recurrent state"
        if head.kind == layout.STATE_DROP:
            return f"layer {head.layer} state dropped" if head.start else "all states dropped"
        if head.kind == layout.BLOCKS:
            return f"{head.payload_len // 8} block hashes, block size {head.start}"
        return f"{len(head.attrs)} bytes of attributes" if head.attrs else ""


@dataclass(slots=True)
class EntryFile:
    """What is in an entry file.

    Attributes:
        path: as findings name it.
        nbytes: of the file.
        header, key: of its first record; None when that is not whole.
        records: all whole records behind it.
        end: offset behind the last of them.
        sides, declared: of the last META record.
        states: bytes of recurrent state by layer.
        rows: extents of the records in front of the first damaged place.
        findings: what is wrong.
        payloads: offset of the record that counts, of the state of each layer, and (-1) of the block hashes.
    """

    path: str
    nbytes: int = 0
    header: framing.FileHeader | None = None
    key: bytes = b""
    records: list[Record] = field(default_factory=list)
    end: int = 0
    sides: list[Side | None] = field(default_factory=lambda: [None, None])
    declared: Declared = UNDECLARED
    states: dict[int, int] = field(default_factory=dict)
    rows: vstore.Rows = field(default_factory=vstore.Rows)
    findings: list[Finding] = field(default_factory=list)
    payloads: dict[int, int] = field(default_factory=dict)

    @property
    def is_raw(self) -> bool:
        """A raw session, not a prefix."""
        return self.key[:1] == layout.RAW

    @property
    def dead(self) -> int:
        """Bytes that nothing can be read from any more."""
        return self.rows.dead

    def total(self, number: int) -> tuple[int, int]:
        """(rows, stored bytes) of a side."""
        total, nbytes = self.rows.total(number)
        side = self.sides[number]
        if side is not None and side.has_keys:
            layers = range(self.rows.layers(number))
            nbytes = sum(side.stored_bytes(layer, self.rows.tokens(number, layer)) for layer in layers)
        return total, nbytes

    def found(self, offset: int | None, text: str, *, problem: bool = True) -> None:
        """Note something."""
        self.findings.append(Finding(self.path, offset, text, problem))

    @property
    def damaged(self) -> bool:
        """Something is wrong with it."""
        return any(item.problem for item in self.findings)


def read(
    path: Path, name: str = "", *, verify: bool = True, progress: Callable[[int], None] = lambda _: None
) -> EntryFile:
    """Read an entry file.

    Args:
        name: for findings; default: the path.
        verify: compare every payload with its checksum, else only headers are read.
        progress: called with bytes that are done.

    Raises:
        OSError: it cannot be read at all.
    """
    out = EntryFile(name or str(path))
    fd = open_regular(path)
    try:
        out.nbytes = os.fstat(fd).st_size
        try:
            out.header, out.key = read_header(fd)
        except FramingError as error:
            out.found(0, f"the first record: {WHY.get(error.reason, error.reason)}")
            return out
        _scan(out, fd, out.header)
        _take_in(out, fd, out.header)
        if verify:
            live = _live(out)
            for record in out.records:
                _compare(out, fd, out.header.seed, record, live)
                progress(record.header.total_len)
    finally:
        os.close(fd)
    return out


def _scan(out: EntryFile, fd: int, header: framing.FileHeader) -> None:
    """All whole records; what stands between and behind them is a finding."""
    at = out.end = header.size
    while True:
        scanner = framing.Scanner(fd, at, header.seed, out.nbytes)
        out.records += [Record(head) for head in scanner]
        at = scanner.offset
        out.end = max(out.end, at)
        if scanner.reason == "end":
            return
        following = framing.resync(fd, at + framing.ALIGN, header.seed, out.nbytes)
        lost = (following if following >= 0 else out.nbytes) - at
        why = WHY[scanner.reason]
        if following >= 0:
            out.found(at, f"{why}: {lost} damaged bytes in front of whole records")
        elif scanner.reason == "torn":
            out.found(at, f"{lost} bytes of a write that was interrupted; the next start cuts them off", problem=False)
        else:
            out.found(at, f"{why}: {lost} bytes behind the last whole record")
        if following < 0:
            return
        at = following


def _take_in(out: EntryFile, fd: int, header: framing.FileHeader) -> None:
    """Attributes and extents, as the server reads them: up to the first damaged place."""

    def other(
        kind: int, offset: int, header_len: int, nbytes: int, layer: int, side: int, start: int, count: int,
        attrs: bytes,
    ) -> None:  # fmt: skip
        del header_len, side, count
        if kind == layout.META:
            try:
                out.sides, out.declared = layout.unpack_meta(attrs)
            except (FramingError, struct.error, KeyError):
                out.found(offset, "attributes that no writer makes")
        elif kind == layout.BLOCKS:
            out.payloads[-1] = offset
        elif kind == layout.STATE:
            out.states[layer], out.payloads[layer] = nbytes, offset
        elif kind == layout.STATE_DROP:
            for number in [layer] if start else list(out.states):
                out.states.pop(number, None)
                out.payloads.pop(number, None)

    try:
        out.rows.scan(fd, header.size, out.nbytes, header.seed, other)
    except vstore.DamageError as error:
        out.found(error.offset, error.reason)
    if not any(record.header.kind == layout.META for record in out.records):
        out.found(header.size, "its attributes are missing")


def _live(out: EntryFile) -> set[int]:
    """Offsets of the records that anything can still be read from."""
    live = set(out.payloads.values())
    for number in (layout.KEYS, layout.VALUES):
        for layer in range(out.rows.layers(number)):
            live.update(out.rows.unchecked(number, layer, 0, _ALL_ROWS))
    return live


def _compare(out: EntryFile, fd: int, seed: int, record: Record, live: set[int]) -> None:
    head = record.header
    if head.state != framing.VALID or not head.payload_len:
        return
    try:
        crc = framing.crc_file(fd, head.payload_offset, head.payload_len, seed)
    except OSError as error:
        out.found(head.offset, f"the payload cannot be read: {error.strerror}")
        record.good = False
        return
    record.good = crc == head.payload_crc
    if not record.good:
        what = record.about(raw=out.is_raw)
        about = f" ({what})" if what else ""
        text = f"the payload of a {record.kind} record{about} does not match its checksum"
        if head.offset not in live and not out.damaged:
            out.found(head.offset, f"{text}; nothing is read from it, later records replace it", problem=False)
        else:
            out.found(head.offset, text)


def described(entry: EntryFile) -> dict[str, Any]:
    """An entry as plain values, for `--json` and for the text alike."""
    header = entry.header
    out: dict[str, Any] = {"file": entry.path, "type": "entry", "bytes": entry.nbytes}
    if header is not None:
        created = dict(framing.unpack_attrs(header.attrs)).get(3, b"")
        out |= {
            "version": header.version,
            "generation": f"{header.generation:016x}",
            "created_ms": int.from_bytes(created, "little"),
            "domain": "session" if entry.is_raw else "prefix",
            "name": _text(entry.key[1:]),
            "path": layout.entry_path(entry.key),
        }
    declared = entry.declared
    out["declared"] = {
        name: _text(value) if isinstance(value, bytes) else value
        for name in declared.__slots__
        if (value := getattr(declared, name)) is not None
    }
    out["sides"] = [
        _side(entry, number, side) for number, side in enumerate(entry.sides) if side is not None
    ]  # K, V; a raw session has only the first
    out["states"] = {str(layer): nbytes for layer, nbytes in sorted(entry.states.items())}
    out["record_bytes"] = entry.end
    out["dead_bytes"] = entry.dead
    out["records"] = [
        {
            "offset": record.header.offset,
            "kind": record.kind,
            "state": record.state,
            "about": record.about(raw=entry.is_raw),
            "payload_offset": record.header.payload_offset,
            "payload_bytes": record.header.payload_len,
            "checksum": record.good,
        }
        for record in entry.records
    ]
    out["findings"] = [item.as_json() for item in entry.findings]
    return out


def _side(entry: EntryFile, number: int, side: Side) -> dict[str, Any]:
    rows = entry.rows
    total, nbytes = entry.total(number)
    return {
        "side": "rows" if entry.is_raw else SIDES[number],
        "dim": side.dim,
        "format": layout.format_name(side.fmt),
        "rows": total,
        "bytes": nbytes,
        "layers": [
            {
                "layer": layer,
                "dim": side.of(layer)[0],
                "format": layout.format_name(side.of(layer)[1]),
                "rows": rows.live(number, layer),
                "length": rows.tokens(number, layer),
                "extents": rows.extents(number, layer),
            }
            for layer in range(rows.layers(number))
        ],
    }


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
