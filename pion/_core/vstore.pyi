"""Extent maps of entry files, and the file work that needs them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from typing_extensions import Buffer

BIG_ALIGN: Final[int]
BIG_FROM: Final[int]
CHECKED: Final[int]
GROUP: Final[int]
KIND_STORE: Final[int]
KIND_TRIM: Final[int]
LOOSE: Final[int]

__all__ = [
    "BIG_ALIGN",
    "BIG_FROM",
    "CHECKED",
    "GROUP",
    "KIND_STORE",
    "KIND_TRIM",
    "LOOSE",
    "BadRowError",
    "DamageError",
    "Rows",
    "beyond",
    "check_records",
    "convert_keys",
    "convert_region",
    "flush",
    "is_keys",
    "narrow",
    "row_bytes",
    "write_record",
    "writeback",
]

_Others = Callable[[int, int, int, int, int, int, int, int, bytes], object]

class BadRowError(ValueError):
    row: int
    def __init__(self, row: int) -> None: ...

class DamageError(ValueError):
    offset: int
    reason: str
    def __init__(self, offset: int, reason: str) -> None: ...

def row_bytes(fmt: int, dim: int) -> int: ...
def is_keys(fmt: int) -> bool: ...
def write_record(
    fd: int,
    offset: int,
    seed: int,
    *,
    kind: int,
    payload: Buffer = b"",
    layer: int = 0,
    side: int = 0,
    fmt: int = 0,
    start: int = 0,
    count: int = 0,
    dim: int = 0,
    aux: int = 0,
) -> int: ...
def check_records(fd: int, seed: int, records: Iterable[int]) -> int: ...
def convert_region(fd: int, offset: int, rows: int, dim: int, source: int, target: int, seed: int) -> int: ...
def convert_keys(
    fd: int,
    rows_at: int,
    at: int,
    groups: int,
    dim: int,
    source: int,
    target: int,
    first: int,
    theta: float,
    seed: int,
) -> int: ...
def beyond(words: Buffer, dim: int, limit: int) -> int: ...
def narrow(wide: bytearray) -> bytearray: ...
def writeback(fd: int) -> None: ...
def flush(fd: int) -> None: ...

class Rows:
    @property
    def dead(self) -> int: ...
    @property
    def last(self) -> int: ...
    def put(
        self,
        side: int,
        layer: int,
        start: int,
        count: int,
        offset: int,
        record: int,
        stride: int,
        *,
        loose: bool = False,
        sealed: bool = False,
    ) -> None: ...
    def lost(self, nbytes: int) -> None: ...
    def layers(self, side: int) -> int: ...
    def tokens(self, side: int, layer: int) -> int: ...
    def live(self, side: int, layer: int) -> int: ...
    def covers(self, side: int, layer: int, start: int, end: int) -> bool: ...
    def complete(self, rows: int, layers: int) -> bool: ...
    def extents(self, side: int, layer: int) -> int: ...
    def most_extents(self) -> int: ...
    def total(self, side: int) -> tuple[int, int]: ...
    def trim(self, side: int, layer: int, rows: int) -> None: ...
    def settle(self) -> None: ...
    def pieces(self, side: int, layer: int, start: int, end: int) -> list[tuple[int, int, int, int]]: ...
    def segments(
        self, ref: Any, side: int, layer: int, start: int, end: int, stride: int
    ) -> list[tuple[Any, int, int]]: ...
    def unchecked(self, side: int, layer: int, start: int, end: int) -> list[int]: ...
    def doubtful(self) -> bool: ...
    def mark_checked(self, records: Iterable[int]) -> None: ...
    def copy(self) -> Rows: ...
    def append(
        self,
        fd: int,
        at: int,
        seed: int,
        side: int,
        layer: int,
        start: int,
        count: int,
        dim: int,
        source: int,
        target: int,
        blob: Buffer,
    ) -> int: ...
    def scan(self, fd: int, offset: int, end: int, seed: int, others: _Others) -> tuple[int, str]: ...
    def merge_into(
        self, fresh: Rows, src: int, dst: int, at: int, seed: int, formats: Sequence[Sequence[tuple[int, int]]]
    ) -> int: ...
    def copy_tail(
        self, src: int, offset: int, end: int, seed: int, dst: int, at: int, dst_seed: int, others: _Others
    ) -> int: ...
