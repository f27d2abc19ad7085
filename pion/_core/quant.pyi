from typing import Final, TypeVar, overload

from typing_extensions import Buffer

__all__ = [
    "BF16",
    "BF16_ROPE_FP8_BODY",
    "FP8",
    "FP16",
    "FP32",
    "GROUP",
    "INT8",
    "MLX4G32",
    "TURBO2",
    "TURBO3",
    "TURBO4",
    "RefusedRowError",
    "decode",
    "decode_e4m3",
    "encode",
    "encode_e4m3",
    "has_f16c",
    "pack_format",
    "row_bytes",
    "split_heads",
]

_Out = TypeVar("_Out", bound=Buffer)

INT8: Final = 0
FP16: Final = 2
FP32: Final = 8
BF16: Final = 9
FP8: Final = 5
BF16_ROPE_FP8_BODY: Final = 6
MLX4G32: Final = 7
TURBO4: Final = 1
TURBO3: Final = 3
TURBO2: Final = 4
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
@overload
def encode_e4m3(data: Buffer, *, out: None = None) -> bytearray: ...
@overload
def encode_e4m3(data: Buffer, *, out: _Out) -> _Out: ...
@overload
def decode_e4m3(data: Buffer, *, out: None = None) -> bytearray: ...
@overload
def decode_e4m3(data: Buffer, *, out: _Out) -> _Out: ...
@overload
def split_heads(data: Buffer, heads: int, head_bytes: int, *, out: None = None) -> bytearray: ...
@overload
def split_heads(data: Buffer, heads: int, head_bytes: int, *, out: _Out) -> _Out: ...
