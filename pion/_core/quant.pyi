from typing import Final, TypeVar, overload

from typing_extensions import Buffer

__all__ = ["BF16", "FP16", "FP32", "GROUP", "INT8", "RefusedRowError", "decode", "encode", "has_f16c", "row_bytes"]

_Out = TypeVar("_Out", bound=Buffer)

INT8: Final = 0
FP16: Final = 2
FP32: Final = 8
BF16: Final = 9
GROUP: Final = 32

class RefusedRowError(ValueError):
    row: int
    def __init__(self, row: int, code: int) -> None: ...

def has_f16c() -> bool: ...
def row_bytes(code: int, dim: int) -> int: ...
@overload
def encode(
    src_code: int, dst_code: int, data: Buffer, dim: int, *, out: None = None, portable: bool = False
) -> bytearray: ...
@overload
def encode(src_code: int, dst_code: int, data: Buffer, dim: int, *, out: _Out, portable: bool = False) -> _Out: ...
@overload
def decode(code: int, data: Buffer, dim: int, *, out: None = None, portable: bool = False) -> bytearray: ...
@overload
def decode(code: int, data: Buffer, dim: int, *, out: _Out, portable: bool = False) -> _Out: ...
