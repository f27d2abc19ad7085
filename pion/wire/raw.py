"""The answer to `FMT RAW`: stored rows as they are, with a header that says what they are.

Little-endian; the header is padded with zeros to a multiple of 64 bytes, the stored bytes of the segments follow in
order:

```
 0 "PRAW" | 4 version u16 (1) | 6 header length u16 | 8 dim u32 | 12 first row asked for u32 | 16 rows asked for u32
20 segments u32 | 24 rope theta f64 (0 = the rows carry none)
32 for each segment: format code u8 | flags u8 | parameter u16 | start row u32 | rows u32 | 0 u32 | bytes u64
```

Flag 1: these rows are not stored; they have no bytes and stand for zeros. The segments cover the rows asked for without
a gap. One of a format that encodes groups of rows holds whole groups: it may begin before the first row asked for and
end behind the last one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["MAX_SEGMENTS", "Segment", "Stored", "header_length", "pack", "parse"]

MAGIC: Final = b"PRAW"
VERSION: Final = 1
MISSING: Final = 1
ALIGN: Final = 64

_HEAD: Final = struct.Struct("<4sHHIIIId")
_SEGMENT: Final = struct.Struct("<BBHIIIQ")

KEY_FORMS: Final = (17, 19, 20)  # codes of the formats that encode groups of rows

MAX_SEGMENTS: Final = (0xFFFF // ALIGN * ALIGN - _HEAD.size) // _SEGMENT.size


class Segment(NamedTuple):
    """A run of rows.

    Attributes:
        fmt: format: code, and its parameter from bit 8 on.
        start, rows: positions in the sequence.
        nbytes: stored bytes; 0 for rows that are not stored.
        missing: not stored; zeros.
        offset: of the stored bytes in the answer (filled in by `parse`).
    """

    fmt: int
    start: int
    rows: int
    nbytes: int
    missing: bool = False
    offset: int = 0

    @property
    def is_keys(self) -> bool:
        """Whole groups of keys; the rotary embedding of the header is to be taken into account."""
        return self.fmt & 255 in KEY_FORMS


class Stored(NamedTuple):
    """A parsed header.

    Attributes:
        dim: values per row.
        start, rows: what was asked for.
        theta: base of the rotary embedding the keys carry, 0 = none.
        segments: in row order.
    """

    dim: int
    start: int
    rows: int
    theta: float
    segments: Sequence[Segment]


def header_length(segments: int) -> int:
    """Bytes in front of the rows."""
    return (_HEAD.size + segments * _SEGMENT.size + ALIGN - 1) // ALIGN * ALIGN


def pack(dim: int, start: int, rows: int, theta: float, segments: Sequence[Segment]) -> bytes:
    """The header of an answer.

    Raises:
        ValueError: more than `MAX_SEGMENTS` segments.
    """
    if len(segments) > MAX_SEGMENTS:
        raise ValueError(f"{len(segments)} segments, at most {MAX_SEGMENTS} fit")
    length = header_length(len(segments))
    out = bytearray(_HEAD.pack(MAGIC, VERSION, length, dim, start, rows, len(segments), theta))
    for fmt, first, count, nbytes, missing, _ in segments:
        flags = MISSING if missing else 0
        out += _SEGMENT.pack(fmt & 255, flags, fmt >> 8, first, count, 0, 0 if missing else nbytes)
    return bytes(out.ljust(length, b"\0"))


def parse(answer: bytes | bytearray | memoryview, body: int | None = None) -> Stored:
    """Read the header of an answer and check that it describes the answer.

    Args:
        answer: header and rows; or the header alone, the bytes of the rows being somewhere else.
        body: how many they are, then.

    Raises:
        ValueError: it is none, of a later version, or its lengths and positions do not fit.
    """
    view = memoryview(answer).cast("B")
    total = len(view) + (body or 0)
    if len(view) < _HEAD.size or bytes(view[:4]) != MAGIC:
        raise ValueError("not an answer to FMT RAW")
    _, version, length, dim, start, rows, count, theta = _HEAD.unpack_from(view)
    if version != VERSION:
        raise ValueError(f"FMT RAW of version {version}; this client knows version {VERSION}")
    if length != header_length(count) or length > len(view):
        raise ValueError("FMT RAW: the header is not whole")
    segments = list(_segments(view, count, length))
    reached = start
    for segment in segments:
        if segment.start > reached or segment.start + segment.rows <= reached:
            raise ValueError("FMT RAW: the segments leave rows out")
        reached = segment.start + segment.rows
        if segment.start >= start + rows or reached <= start or (segment.missing and segment.nbytes):
            raise ValueError("FMT RAW: a segment has none of the rows asked for, or bytes for rows that are missing")
    end = segments[-1].offset + segments[-1].nbytes if segments else length
    if reached < start + rows or end != total:
        raise ValueError("FMT RAW: the answer is not what its header says")
    return Stored(dim, start, rows, theta, segments)


def _segments(view: memoryview, count: int, offset: int) -> Iterable[Segment]:
    for i in range(count):
        code, flags, param, start, rows, _, nbytes = _SEGMENT.unpack_from(view, _HEAD.size + i * _SEGMENT.size)
        yield Segment(code | param << 8, start, rows, nbytes, bool(flags & MISSING), offset)
        offset += nbytes
