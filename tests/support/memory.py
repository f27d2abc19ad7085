"""A connection without a network: commands go to a `Dispatcher`, replies are encoded and parsed as on the wire."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import Any

from pion.commands.dispatch import Dispatcher
from pion.wire.resp import encode
from tests.support import replies


@dataclass(eq=False)
class MemoryConn:
    """The attributes handlers use of a plane's connection."""

    id: int = 1
    fd: int = -1
    name: str = ""
    db: int = 0
    proto: int = 2
    authenticated: bool = False
    user: Any = None
    fast: bool = True
    lib_name: str = ""
    lib_ver: str = ""
    peer: str = "memory:1"
    laddr: str = "memory:0"
    created: float = field(default_factory=time.monotonic)
    last_active: float = field(default_factory=time.monotonic)
    last_cmd: str = ""
    closing: bool = False
    data: dict[str, Any] = field(default_factory=dict)


class MemoryClient:
    """Calls commands of a dispatcher over one `MemoryConn`."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.conn = MemoryConn()
        dispatcher.connected(self.conn)

    def raw(self, *argv: bytes | str | int) -> bytes:
        """The reply's bytes; empty when there is none."""
        value = self.dispatcher(self.conn, replies.argv(argv))
        if inspect.iscoroutine(value):
            try:
                value.send(None)
            except StopIteration as stop:
                value = stop.value
            else:
                raise AssertionError("the command waits; use a server")
        return encode(value, self.conn.proto)

    def __call__(self, *argv: bytes | str | int) -> Any:
        """The parsed reply; see `tests.support.replies`."""
        got, rest = replies.parse(self.raw(*argv))
        assert rest == b""
        return got
