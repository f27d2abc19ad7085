from typing import Final, TypeVar, overload

from typing_extensions import Buffer

from pion._core.quant import RefusedRowError

__all__ = [
    "KTURBO2",
    "KTURBO3",
    "KTURBO4",
    "ROWS",
    "RefusedKeyError",
    "block_bytes",
    "decode_keys",
    "encode_keys",
]

_Out = TypeVar("_Out", bound=Buffer)

KTURBO4: Final = 17
KTURBO3: Final = 19
KTURBO2: Final = 20
ROWS: Final = 64

class RefusedKeyError(RefusedRowError):
    def __init__(self, row: int) -> None: ...

def block_bytes(fmt: int, dim: int) -> int: ...
@overload
def encode_keys(
    src_code: int, fmt: int, data: Buffer, dim: int, first_row: int, theta: float, *, out: None = None
) -> bytearray: ...
@overload
def encode_keys(
    src_code: int, fmt: int, data: Buffer, dim: int, first_row: int, theta: float, *, out: _Out
) -> _Out: ...
@overload
def decode_keys(fmt: int, data: Buffer, dim: int, first_row: int, theta: float, *, out: None = None) -> bytearray: ...
@overload
def decode_keys(fmt: int, data: Buffer, dim: int, first_row: int, theta: float, *, out: _Out) -> _Out: ...
