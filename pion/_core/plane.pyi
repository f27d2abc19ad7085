"""The network plane: every plain connection of the server behind one pollable descriptor."""

from typing import Any

from typing_extensions import Buffer

from pion._core.conn import Conn as Conn
from pion._core.planebase import PENDING as PENDING
from pion._core.planebase import PlaneBase

FAST_PING: int
FAST_ECHO: int
FAST_GET: int
FAST_SET: int
FAST_DEL: int
FAST_EXISTS: int
FAST_INCR: int
FAST_MGET: int
FAST_MEMBERSHIP: int
FLAG_WRITE: int
FLAG_DENYOOM: int

class Plane(PlaneBase):
    def open_memory(self, peer: str = "memory", local: str = "memory") -> Conn: ...
    def feed(self, conn: Conn, data: Buffer) -> None: ...
    def take_output(self, conn: Conn) -> bytes: ...
    def hold(self, conn: Conn, nbytes: int, received: int = 0) -> bool: ...
    def begin(self, conn: Conn, name: bytes) -> None: ...
    def finish(self, conn: Conn, sent: int) -> None: ...
    def exec_fast(self, conn: Conn, fast_id: int, argv: list[Any]) -> bytes | None: ...
