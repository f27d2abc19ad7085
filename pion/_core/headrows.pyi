from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

__all__ = ["MAX_THREADS", "clear", "fill", "put", "reserve"]

MAX_THREADS: Final[int]

def put(out: Buffer, first: int, rows: Buffer, heads: int, head_bytes: int) -> None: ...
def clear(out: Buffer, first: int, end: int, heads: int, head_bytes: int) -> None: ...
def reserve(outs: Sequence[Buffer]) -> None: ...
def fill(
    arrays: Sequence[tuple[Buffer, Sequence[tuple[int, Buffer]]]],
    heads: int,
    head_bytes: int,
    *,
    threads: int = ...,
    fresh: bool = ...,
) -> None: ...
