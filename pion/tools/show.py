"""`pion inspect FILE`: what is in a file of Pion, whichever it is."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pion._core import framing
from pion._core.framing import FramingError
from pion.store import index, layout
from pion.store.keyspace import files as keyspace_files
from pion.store.regular import open_regular
from pion.tools import entryfile
from pion.tools.findings import WHY, Finding

WHOLE, DAMAGED, FAILED = 0, 1, 2  # exit codes
BLOB: Final = b"BLOB"
LOG_KINDS: Final = {
    1: "SET", 2: "BLOB", 3: "DEL", 4: "EXPIRE", 5: "FLUSHDB", 6: "FLUSHALL", 7: "WRITE", 8: "SYNC", 9: "GROUP",
    10: "END", 16: "HSET", 17: "HDEL", 18: "ZADD", 19: "ZREM",
}  # fmt: skip
INDEX_KINDS: Final = {1: "PUT", 2: "DROP", 3: "DIRTY", 4: "USED", 5: "OPENED", 6: "CLOSED", 7: "MAKING"}
_NAMES: Final = {index.TYPE: "index", keyspace_files.LOG: "keyspace log", keyspace_files.SNAPSHOT: "keyspace snapshot"}
_ATTRIBUTES: Final = {keyspace_files.NUMBER: "number", keyspace_files.BELONGS_TO: "belongs to"}
_WINDOW: Final = 4 << 20
_SHOWN: Final = 60  # bytes of a key


def describe(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """A file as plain values.

    Args:
        verify: compare payloads with their checksums.

    Raises:
        OSError: it cannot be read.
        FramingError: it is no file of Pion, or its first record is damaged.
    """
    fd = open_regular(path, follow=True)
    try:
        header = framing.read_file_header(fd)
        if header.type == layout.ENTRY_TYPE:
            return entryfile.described(entryfile.read(path, str(path), verify=verify))
        size = os.fstat(fd).st_size
        out: dict[str, Any] = {
            "file": str(path), "type": _NAMES.get(header.type, "value" if header.type == BLOB else repr(header.type)),
            "bytes": size, "version": header.version, "generation": f"{header.generation:016x}",
        }  # fmt: skip
        if header.type == BLOB:
            return out | _value(path, fd, header, size)
        if header.type in _NAMES:
            return out | _records(path, fd, header, size)
        return out | {"findings": [Finding(str(path), 0, "a type that this version does not know").as_json()]}
    finally:
        os.close(fd)


def _value(path: Path, fd: int, header: framing.FileHeader, size: int) -> dict[str, Any]:
    """A large value of the keyspace: one record."""
    scanner = framing.Scanner(fd, header.size, header.seed, size)
    found: list[Finding] = []
    head = next(scanner, None)
    if head is None:
        found.append(Finding(str(path), scanner.offset, WHY.get(scanner.reason, scanner.reason)))
        return {"findings": [item.as_json() for item in found]}
    good = framing.crc_file(fd, head.payload_offset, head.payload_len, header.seed) == head.payload_crc
    if not good:
        found.append(Finding(str(path), head.offset, "the value does not match its checksum"))
    return {"value_bytes": head.payload_len, "checksum": good, "findings": [item.as_json() for item in found]}


def _records(path: Path, fd: int, header: framing.FileHeader, size: int) -> dict[str, Any]:
    """An index, a log or a snapshot: compact records."""
    is_index = header.type == index.TYPE
    kinds = INDEX_KINDS if is_index else LOG_KINDS
    counts: Counter[str] = Counter()
    records: list[dict[str, Any]] = []
    found: list[Finding] = []
    window, base, at = b"", 0, header.size
    while at < size:
        try:
            record = framing.unpack_log(memoryview(window)[at - base :], header.seed)
        except FramingError as error:
            # it may only reach behind the window: what is read anew begins at the record
            if base != at or len(window) < size - at:
                want = _WINDOW
                if error.reason == "short" and base == at:
                    want = max(2 * len(window), _WINDOW)
                window, base = os.pread(fd, min(want, size - at), at), at
                continue
            found.append(Finding(str(path), at, f"{WHY.get(error.reason, error.reason)}: {size - at} bytes"))
            break
        name = kinds.get(record.kind, f"kind {record.kind}")
        counts[name] += 1
        records.append({"offset": at, "kind": name} | (_of_index(record) if is_index else _of_log(record)))
        at += record.total
    return {
        "attributes": {
            _ATTRIBUTES.get(kind, f"attribute {kind}"): int.from_bytes(value, "little")
            for kind, value in framing.unpack_attrs(header.attrs)
        },
        "record_bytes": at,
        "counts": dict(sorted(counts.items())),
        "records": records,
        "findings": [item.as_json() for item in found],
    }


def _of_index(record: framing.LogRecord) -> dict[str, Any]:
    if record.kind in (index.OPENED, index.CLOSED):
        return {"boot": _text(record.key)} if record.key else {}
    out: dict[str, Any] = {"name": _text(record.key[1:]), "path": layout.entry_path(record.key)}
    if record.kind == index.PUT:
        figures = index.unpack_figures(record.value)
        out |= {
            "generation": f"{figures.generation:016x}", "clean": bool(figures.flags & index.CLEAN),
            "size": figures.size, "synced": figures.synced, "rows": figures.rows, "bytes": figures.nbytes,
            "used": figures.used,
        }  # fmt: skip
    elif record.kind in (index.DROP, index.USED):
        number = int.from_bytes(record.value, "little")
        out |= {"generation": f"{number:016x}"} if record.kind == index.DROP else {"used": number}
    return out


def _of_log(record: framing.LogRecord) -> dict[str, Any]:
    out: dict[str, Any] = {"db": record.db, "key": _text(record.key), "value_bytes": len(record.value)}
    if record.expire:
        out["expire_ms"] = record.expire
    if record.kind == 2 and len(record.value) == 20:
        out |= {
            "value_file": f"blob/{int.from_bytes(record.value[:8], 'little'):016x}",
            "value_bytes": int.from_bytes(record.value[8:16], "little"),
        }
    elif record.kind in (8, 9, 10) and len(record.value) == 8:
        out = {"number": int.from_bytes(record.value, "little")}
    return out


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


# --- for people ------------------------------------------------------------------------------------------------------


def lines(about: dict[str, Any], *, records: bool = True) -> list[str]:
    """The same as text."""
    out = [f"{about['file']}: {about['type']}, format version {about.get('version', '?')}, {about['bytes']} bytes"]
    for name in ("domain", "name", "path", "generation"):
        if name in about:
            out.append(f"  {name:<12} {about[name]}")
    if about.get("created_ms"):
        made = datetime.datetime.fromtimestamp(about["created_ms"] / 1000, datetime.UTC)
        out.append(f"  {'created':<12} {made:%Y-%m-%d %H:%M:%S} UTC")
    for name, value in (about.get("declared") or about.get("attributes") or {}).items():
        out.append(f"  {name:<12} {value}")
    for side in about.get("sides", ()):
        out += _side(side)
    for layer, nbytes in about.get("states", {}).items():
        out.append(f"  state        layer {layer}: {nbytes} bytes")
    for name in ("value_bytes", "checksum", "record_bytes", "dead_bytes"):
        if name in about:
            out.append(f"  {name.replace('_', ' '):<12} {about[name]}")
    if about.get("counts"):
        out.append("  counts       " + ", ".join(f"{count} {name}" for name, count in about["counts"].items()))
    if records and about.get("records"):
        out.append(f"{'offset':>14}  {'kind':<11} what")
        out += [_record(record) for record in about["records"]]
    for item in about["findings"]:
        out.append(str(Finding(item["path"], item["offset"], item["text"], item["problem"])))
    return out


def _side(side: dict[str, Any]) -> list[str]:
    what = f"{side['format']}, {side['dim']} values" if side["dim"] else "by layer"
    head = f"  {side['side']:<12} {what}; {side['rows']} rows in {len(side['layers'])} layers, {side['bytes']} bytes"
    out: list[str] = []
    for layer in side["layers"]:  # neighbours that are alike share a line
        text = f"{layer['rows']} rows in {layer['extents']} extent{'s' if layer['extents'] != 1 else ''}"
        if layer["length"] != layer["rows"]:
            text += f", length {layer['length']}"
        if (layer["format"], layer["dim"]) != (side["format"], side["dim"]):
            text += f", {layer['format']} of {layer['dim']}"
        out.append(text)
    grouped: list[str] = []
    first = 0
    for at in range(1, len(out) + 1):
        if at == len(out) or out[at] != out[first]:
            which = f"layer {first}" if at - first == 1 else f"layers {first}..{at - 1}"
            grouped.append(f"  {'':<12}   {which}: {out[first]}")
            first = at
    return [head, *grouped]


def _record(record: dict[str, Any]) -> str:
    if "state" in record:
        state = "" if record["state"] == "valid" else f" ({record['state']})"
        body = f", {record['payload_bytes']} bytes at {record['payload_offset']}" if record["payload_bytes"] else ""
        bad = ", CHECKSUM WRONG" if record["checksum"] is False else ""
        return f"{record['offset']:>14}  {record['kind']:<11} {record['about']}{state}{body}{bad}".rstrip()
    rest = [f"{name} {_short(value)}" for name, value in record.items() if name not in ("offset", "kind")]
    return f"{record['offset']:>14}  {record['kind']:<11} {', '.join(rest)}".rstrip()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def main(argv: Sequence[str]) -> int:
    """The command.

    Returns:
        0: the file is whole as far as it was read; 1: something in it is damaged; 2: it could not be read.
    """
    parser = argparse.ArgumentParser(
        prog="pion inspect",
        description="Print what is in a file of a data directory: an entry, the index, a log or snapshot of the "
        "keyspace, a large value, or a file from the quarantine. Nothing is changed.",
        epilog="exit code: 0 whole, 1 something is damaged, 2 it is no file of Pion or could not be read",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verify", action="store_true", help="also compare payloads with their checksums")
    parser.add_argument("--summary", action="store_true", help="leave the list of records out")
    args = parser.parse_args(argv)
    try:
        about = describe(args.file, verify=args.verify)
    except OSError as error:
        print(f"pion inspect: {args.file}: {error.strerror}", file=sys.stderr)
        return FAILED
    except FramingError as error:
        why = WHY.get(error.reason, error.reason)
        print(f"pion inspect: {args.file}: no file of Pion, or its first record is damaged ({why})", file=sys.stderr)
        return FAILED
    if args.summary:
        about.pop("records", None)
    print(json.dumps(about, indent=2) if args.json else "\n".join(lines(about)))
    return DAMAGED if any(item["problem"] for item in about["findings"]) else WHOLE
