from collections.abc import Iterable
from typing import Any, Literal, final

from typing_extensions import Buffer

__all__ = [
    "ALIGN",
    "DEAD",
    "HEADER_SIZE",
    "KIND_FILE",
    "MAGIC",
    "PENDING",
    "VALID",
    "VERSION",
    "FileHeader",
    "FramingError",
    "Header",
    "LogRecord",
    "Scanner",
    "align_up",
    "crc32c",
    "crc32c_combine",
    "crc32c_portable",
    "crc_file",
    "pack_attrs",
    "pack_file_header",
    "pack_header",
    "pack_log",
    "read_file_header",
    "resync",
    "seed_of",
    "unpack_attrs",
    "unpack_file_header",
    "unpack_header",
    "unpack_log",
]

Reason = Literal["", "end", "short", "zeros", "magic", "version", "checksum", "field", "torn"]

MAGIC: int
VERSION: int
HEADER_SIZE: int
ALIGN: int
KIND_FILE: int
PENDING: int
VALID: int
DEAD: int

class FramingError(ValueError):
    reason: Reason
    def __init__(self, reason: str) -> None: ...

def crc32c(data: Buffer, seed: int = 0) -> int: ...
def crc32c_portable(data: Buffer, seed: int = 0) -> int: ...
def crc32c_combine(crc_a: int, crc_b: int, length_b: int) -> int: ...
def seed_of(generation: int) -> int: ...
def align_up(n: int, align: int = ...) -> int: ...
def crc_file(fd: int, offset: int, nbytes: int, seed: int) -> int: ...
def pack_attrs(pairs: Iterable[tuple[int, bytes]]) -> bytes: ...
def unpack_attrs(attrs: Any) -> list[tuple[int, bytes]]: ...

@final
class Header:
    attrs: bytes
    offset: int
    @property
    def kind(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def header_len(self) -> int: ...
    @property
    def payload_len(self) -> int: ...
    @property
    def payload_crc(self) -> int: ...
    @property
    def payload_offset(self) -> int: ...
    @property
    def total_len(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def side(self) -> int: ...
    @property
    def fmt(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def aux(self) -> int: ...
    @property
    def token(self) -> int: ...

def pack_header(
    *,
    kind: int,
    seed: int,
    state: int = ...,
    flags: int = 0,
    payload_len: int = 0,
    payload_crc: int = 0,
    layer: int = 0,
    side: int = 0,
    fmt: int = 0,
    start: int = 0,
    count: int = 0,
    dim: int = 0,
    aux: int = 0,
    token: int = 0,
    attrs: bytes = b"",
    offset: int = 0,
    align: int = ...,
) -> bytes: ...
def unpack_header(data: Buffer, seed: int, offset: int = 0) -> Header: ...

class FileHeader:
    type: bytes
    version: int
    generation: int
    seed: int
    size: int
    attrs: bytes
    def __init__(self, type: bytes, version: int, generation: int, size: int, attrs: bytes) -> None: ...

def pack_file_header(type: bytes, *, version: int, generation: int, attrs: bytes = b"") -> bytes: ...
def unpack_file_header(data: Buffer, *, type: bytes | None = None) -> FileHeader: ...
def read_file_header(fd: int, *, type: bytes | None = None) -> FileHeader: ...

@final
class Scanner:
    reason: Reason
    def __init__(self, fd: int, offset: int, seed: int, end: int | None = None) -> None: ...
    @property
    def offset(self) -> int: ...
    @property
    def end(self) -> int: ...
    def __iter__(self) -> Scanner: ...
    def __next__(self) -> Header: ...

def resync(fd: int, offset: int, seed: int, end: int | None = None) -> int: ...

class LogRecord:
    kind: int
    db: int
    key: bytes
    value: bytes
    expire: int
    total: int
    def __init__(self, kind: int, db: int, key: bytes, value: bytes, expire: int, total: int) -> None: ...

def pack_log(kind: int, db: int, key: bytes, value: bytes, expire: int, seed: int) -> bytes: ...
def unpack_log(data: Buffer, seed: int) -> LogRecord: ...
