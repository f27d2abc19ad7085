from collections.abc import Iterable
from typing import Any

__all__ = ["HDEL", "HSET", "ZADD", "ZREM", "pack_items", "unpack_items"]

HSET: int
HDEL: int
ZADD: int
ZREM: int

def pack_items(kind: int, items: Iterable[Any]) -> bytes: ...
def unpack_items(kind: int, payload: bytes) -> list[Any]: ...
