"""Bodies that move between sockets and files without being held in memory."""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from typing_extensions import Buffer

RAW: int
MIXED: int
CONV_RAW: int
CONV_F32_F16: int
CONV_F32_BF16: int
CONV_F32_INT8: int
CONV_F16_F32: int
CONV_F16_BF16: int
CONV_F16_INT8: int
CONV_BF16_F32: int
CONV_BF16_F16: int
CONV_BF16_INT8: int

class FdRef:
    def __init__(self, fd: int) -> None: ...
    def fileno(self) -> int: ...
    @property
    def refs(self) -> int: ...

class Extents:
    def __init__(
        self,
        segments: Iterable[tuple[FdRef | None, int, int] | tuple[FdRef | None, int, int, int, int, int, int]],
        decode: int = ...,
        dim: int = ...,
        *,
        theta: float = ...,
        head: bytes = ...,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def decode(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def segments(self) -> int: ...
    def tobytes(self) -> bytes: ...
    def readinto(self, buffer: Buffer) -> int: ...

class Sink:
    on_abort: Callable[[Sink], object] | None
    def __init__(
        self,
        fdref: FdRef | None,
        offset: int,
        nbytes: int,
        *,
        convert: int = ...,
        dim: int = ...,
        crc_seed: int = ...,
        reserve: int = ...,
    ) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def feed(self, data: Buffer) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def received(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> int: ...
    @property
    def bad_row(self) -> int: ...
    @property
    def crc(self) -> int: ...

def unlink_later(path: str | bytes | PathLike[str]) -> None: ...
def drain(timeout_s: float = ...) -> bool: ...
