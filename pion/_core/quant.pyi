from typing import Final, TypeVar, overload

from typing_extensions import Buffer

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "GROUP",
    "INT8",
    "RefusedRowError",
    "decode",
    "encode",
    "has_f16c",
    "pack_format",
    "row_bytes",
]

_Out = TypeVar("_Out", bound=Buffer)

INT8: Final = 0
FP16: Final = 2
FP32: Final = 8
BF16: Final = 9
GROUP: Final = 32

class RefusedRowError(ValueError):
    row: int
    def __init__(self, row: int, fmt: int) -> None: ...

def has_f16c() -> bool: ...
def pack_format(code: int, param: int = 0) -> int: ...
def row_bytes(fmt: int, dim: int) -> int: ...
@overload
def encode(
    src_fmt: int, dst_fmt: int, data: Buffer, dim: int, *, out: None = None, portable: bool = False
) -> bytearray: ...
@overload
def encode(src_fmt: int, dst_fmt: int, data: Buffer, dim: int, *, out: _Out, portable: bool = False) -> _Out: ...
@overload
def decode(fmt: int, data: Buffer, dim: int, *, out: None = None, portable: bool = False) -> bytearray: ...
@overload
def decode(fmt: int, data: Buffer, dim: int, *, out: _Out, portable: bool = False) -> _Out: ...
