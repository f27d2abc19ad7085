"""The part of the plane that serves descriptors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pion._core.conn import Conn
from pion._core.keyspace import Keyspace
from pion._core.stream import Sink

class _Pending:
    pass

PENDING: _Pending

class PlaneBase:
    fast_enabled: bool
    on_close: Callable[[Conn], object] | None
    rejected: int
    def __init__(
        self,
        keyspace: Keyspace,
        handler: Callable[[Conn, list[Any]], Any],
        stream_open: Callable[[Conn, list[bytes], int], Sink | _Pending | None] | None = None,
        *,
        fast_table: Iterable[tuple[int, bytes, int, int]] = (),
        streams: Iterable[tuple[bytes, int]] = (),
        movers: int = 2,
        dwell_us: int = 200,
        slice_bytes: int = ...,
        batch_ms: float = 1.0,
        limits: Mapping[str, Any] | None = None,
    ) -> None: ...
    @property
    def keyspace(self) -> Keyspace: ...
    @property
    def fd(self) -> int: ...
    @property
    def connections(self) -> list[Conn]: ...
    @property
    def connected(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def stats(self) -> dict[str, Any]: ...
    def reset_stats(self) -> None: ...
    def add(self, sock_fd: int, *, unix: bool = False, peer: str = "", local: str = "") -> Conn: ...
    def close(self, conn: Conn | None = None, after_flush: bool = True) -> None: ...
    def resume(self, conn: Conn, value: Any) -> None: ...
    def place(self, conn: Conn, sink: Sink | None) -> None: ...
    def push(self, conn: Conn, value: Any) -> None: ...
    def batch(self) -> bool: ...
    def tick(self) -> None: ...
