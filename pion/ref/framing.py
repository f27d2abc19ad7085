"""Readable twin of pion._core.framing: the record layout in plain Python, the oracle of its tests.

Layout of the 64 header bytes, little-endian::

    magic "PION" | version u8 | kind u8 | state u8 | flags u8 | header_len u32 | attrs_len u32 | payload_len u64
    layer u16 | side u8 | fmt u8 | start u32 | count u32 | dim u32 | payload_crc u32 | aux u32 | token u64 | 0 u32
    header_crc u32

Attributes follow, then zeros up to ``header_len``, then the payload, then zeros up to a multiple of 64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"PION"
VERSION = 1
HEADER = struct.Struct("<4sBBBBIIQHBBIIIIIQI")  # the checksum follows
HEADER_SIZE = 64
LOG = struct.Struct("<BBIQ")  # kind, db, klen, expire
PENDING, VALID, DEAD = 0, 1, 2
POLY = 0x82F63B78
ATTRS_MAX = 1 << 20
HEADER_LEN_MAX = 4 << 20
PAYLOAD_MAX = 1 << 48
LOG_MAX = 0x7FFFFFFF


class FramingError(ValueError):
    """Bytes that are not a whole, intact record; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C bit by bit (RFC 3720, appendix B.4 has test vectors)."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLY if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seed_of(generation: int) -> int:
    """Start value of every checksum in a file of this generation."""
    return crc32c(generation.to_bytes(8, "little"))


def align_up(n: int, align: int = 64) -> int:
    """``n`` rounded up to a multiple of ``align``."""
    return -(-n // align) * align


@dataclass
class Header:
    """The fields of one record header."""

    kind: int
    state: int = VALID
    flags: int = 0
    header_len: int = 0
    payload_len: int = 0
    layer: int = 0
    side: int = 0
    fmt: int = 0
    start: int = 0
    count: int = 0
    dim: int = 0
    payload_crc: int = 0
    aux: int = 0
    token: int = 0
    attrs: bytes = b""

    @property
    def total_len(self) -> int:
        """Bytes from the start of the record to the next one."""
        return self.header_len + align_up(self.payload_len)


def pack_header(head: Header, seed: int, *, offset: int = 0, align: int = 64) -> bytes:
    """The header block of a record at ``offset`` whose payload begins at a multiple of ``align``."""
    attrs = head.attrs.ljust(align_up(len(head.attrs)), b"\0")
    head.header_len = align_up(offset + HEADER_SIZE + len(attrs), align) - offset
    fixed = HEADER.pack(
        MAGIC, VERSION, head.kind, head.state, head.flags, head.header_len, len(head.attrs), head.payload_len,
        head.layer, head.side, head.fmt, head.start, head.count, head.dim, head.payload_crc, head.aux, head.token, 0,
    )  # fmt: skip
    crc = crc32c(fixed + attrs, seed)
    return (fixed + crc.to_bytes(4, "little") + attrs).ljust(head.header_len, b"\0")


def unpack_header(data: bytes, seed: int) -> Header:
    """Decode the header at the start of ``data``."""
    if len(data) < HEADER_SIZE:
        raise FramingError("short")
    if data[:4] != MAGIC:
        raise FramingError("magic" if any(data[:HEADER_SIZE]) else "zeros")
    (_, version, kind, state, flags, header_len, attrs_len, payload_len, layer, side, fmt, start, count, dim,
     payload_crc, aux, token, _) = HEADER.unpack_from(data)  # fmt: skip
    if attrs_len > ATTRS_MAX:
        raise FramingError("field")
    need = HEADER_SIZE + align_up(attrs_len)
    if len(data) < need:
        raise FramingError("short")
    if crc32c(data[:60] + data[HEADER_SIZE:need], seed) != int.from_bytes(data[60:64], "little"):
        raise FramingError("checksum")
    if version != VERSION:
        raise FramingError("version")
    too_long = header_len > HEADER_LEN_MAX or payload_len > PAYLOAD_MAX
    if state > DEAD or header_len < need or header_len % 64 or too_long:
        raise FramingError("field")
    attrs = data[HEADER_SIZE : HEADER_SIZE + attrs_len]
    return Header(
        kind, state, flags, header_len, payload_len, layer, side, fmt, start, count, dim, payload_crc, aux, token, attrs
    )


def scan(data: bytes, offset: int, seed: int) -> Iterator[tuple[int, Header | str]]:
    """(offset, header) of every record of a file's bytes, then (offset, reason) of the place where it stops."""
    while offset < len(data):
        try:
            head = unpack_header(data[offset:], seed)
        except FramingError as error:
            yield offset, error.reason
            return
        if offset + head.header_len + head.payload_len > len(data):
            yield offset, "torn"
            return
        yield offset, head
        offset += head.total_len
    yield offset, "end"


def pack_log(kind: int, db: int, key: bytes, value: bytes, expire: int, seed: int) -> bytes:
    """One compact record of the keyspace log: len u32 | crc u32, then LOG, the key and the value."""
    body = LOG.pack(kind, db, len(key), expire) + key + value
    length = len(body).to_bytes(4, "little")
    return length + crc32c(length + body, seed).to_bytes(4, "little") + body


def unpack_log(data: bytes, seed: int) -> tuple[int, int, bytes, bytes, int, int]:
    """(kind, db, key, value, expire, total bytes) of the compact record at the start of ``data``."""
    if not data:
        raise FramingError("short")
    length = int.from_bytes(data[:4], "little")
    if len(data) < 4:
        raise FramingError("short")
    if not LOG.size <= length <= LOG_MAX:
        raise FramingError("field" if length else "zeros")
    if len(data) < 8 + length:
        raise FramingError("short")
    kind, db, klen, expire = LOG.unpack_from(data, 8)
    if klen > length - LOG.size:
        raise FramingError("field")
    if crc32c(data[:4] + data[8 : 8 + length], seed) != int.from_bytes(data[4:8], "little"):
        raise FramingError("checksum")
    body = data[8 + LOG.size : 8 + length]
    return kind, db, body[:klen], body[klen:], expire, 8 + length
