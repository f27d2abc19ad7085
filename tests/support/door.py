"""A whole server in this process, reached through a memory connection of the plane."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from pion._core.plane import Plane
from pion.commands.dispatch import Dispatcher
from pion.config import Options
from pion.net.server import plane_limits, stream_table
from pion.store.engine import Engine


def finished(value: Any) -> Any:
    """The reply, of a coroutine that does not really wait too (its threads are plain calls here)."""
    if not inspect.iscoroutine(value):
        return value
    try:
        value.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the command waits; use a server process")


class Door:
    """One memory connection to a server of its own.

    Args:
        proto: RESP version.
        directory: of the data; None keeps everything in memory.
        fast: False sends every frame to the Python handlers.
        stream_min: bodies from this many bytes on go straight to their file; None = as the server has it.
        ns_prefix, engine: options of the store.
        told: further options of the server.

    Attributes:
        slow_frames: how many frames went to Python.
    """

    def __init__(
        self,
        proto: int = 2,
        *,
        directory: Path | None = None,
        fast: bool = True,
        stream_min: int | None = None,
        ns_prefix: str = "",
        told: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self.engine = Engine(directory, memory_only=directory is None, ticker=False, **engine)
        self.dispatcher = Dispatcher(
            self.engine, Options(ns_prefix=ns_prefix, kvcache=engine.get("kvcache", True), **told or {})
        )
        self.slow_frames = 0
        limits = plane_limits() if stream_min is None else {**plane_limits(), "stream_min": stream_min}
        self.plane = Plane(
            self.engine.keyspace,
            self._handle,
            self.dispatcher.stream_open,
            fast_table=self.dispatcher.fast_table(),
            streams=stream_table(),
            movers=1,
            limits=limits,
        )
        self.dispatcher.plane = self.plane
        self.plane.fast_enabled = fast
        self.proto = proto
        self.reconnect()

    def reconnect(self) -> None:
        """A fresh connection."""
        self.conn = self.plane.open_memory()
        self.dispatcher.connected(self.conn)
        self.conn.proto = self.proto

    def _handle(self, conn: Any, argv: list[Any]) -> Any:
        self.slow_frames += 1
        return finished(self.dispatcher(conn, argv))

    def __call__(self, request: bytes) -> bytes:
        """Feeds bytes; returns everything that is answered."""
        self.plane.feed(self.conn, request)
        return bytes(self.plane.take_output(self.conn))

    def close(self) -> None:
        self.plane.close()
        self.engine.close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
