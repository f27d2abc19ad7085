"""A small blocking client of the binary lane: written from the wire's description, nothing shared with pion.wire."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pion import testing
from tests.support import attend
from tests.support.attention import normal
from tests.support.raw import Closed, Raw

PING, AUTH, FUSED = 0xFF, 0x37, 0x24
OK, MISS, ERROR, COLDMISS = range(4)

Array = np.ndarray[Any, Any]

NOTHING: Array = np.zeros((1, 0, 8), np.float32)  # an empty suffix of one head of 8


def frame(command: int, body: bytes = b"") -> bytes:
    return struct.pack("<HBI", 0xCA5E, command, len(body)) + body


def fused_body(sid: str, layer: int, q: Array, k: Array, v: Array, head_map: Any, window: int | None = None) -> bytes:
    heads, rows, dim = q.shape
    head = struct.pack("<H", len(sid)) + sid.encode()
    head += struct.pack("<HHHHII", layer, heads, dim, len(k), rows, k.shape[1])
    tail = b"" if window is None else struct.pack("<i", window)
    return head + q.tobytes() + k.tobytes() + v.tobytes() + bytes(head_map) + tail


class Binary:
    """One connection to a lane on 127.0.0.1.

    Args:
        timeout: seconds for each socket call.
        buffers: SO_RCVBUF, for tests of slow readers.
    """

    def __init__(self, port: int, timeout: float = 20.0, buffers: int | None = None) -> None:
        self.sock = socket.socket()
        if buffers is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
        self.sock.settimeout(timeout)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Binary:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def _exactly(self, count: int) -> bytes:
        got = bytearray()
        while len(got) < count:
            part = self.sock.recv(count - len(got))
            if not part:
                raise Closed(bytes(got))
            got += part
        return bytes(got)

    def read(self) -> tuple[int, bytes]:
        """Status and body of the next response. Raises Closed."""
        magic, status, nbytes = struct.unpack("<HBI", self._exactly(7))
        assert magic == 0xCA5E
        return status, self._exactly(nbytes)

    def call(self, command: int, body: bytes = b"") -> tuple[int, bytes]:
        self.send(frame(command, body))
        return self.read()

    def ended(self) -> bool:
        """True when the server has closed; what it sent before is thrown away."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def fused(
        self, sid: str, layer: int, q: Array, k: Array, v: Array, head_map: Any, window: int | None = None
    ) -> Any:
        """The answer as an array; the status where it is not OK."""
        status, body = self.call(FUSED, fused_body(sid, layer, q, k, v, head_map, window))
        return status if status else np.frombuffer(body, "<f4").reshape(q.shape)


def lane(server: testing.Server, password: str = "") -> int:
    """Where the lane of a server is."""
    with Raw(server.port) as conn:
        if password:
            conn.ok("AUTH", password)
        return int(conn.fields("INFO", "server")["binary_port"])


def figures(conn: Raw) -> dict[str, int]:
    told = conn.fields("INFO", "attention")
    return {name[7:]: int(value) for name, value in told.items() if name.startswith("binary_")}


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def one_key(conn: Raw, sid: str = "s", value: float = 1.0) -> None:
    """A layer of one key: whoever asks gets its value."""
    assert attend.store(conn, sid, 0, normal(1, 1, 1, 8), np.full((1, 1, 8), value, np.float32)) == "OK"


def ask(port: int, sid: str = "s") -> Any:
    with Binary(port) as conn:
        return conn.fused(sid, 0, normal(2, 1, 1, 8), NOTHING, NOTHING, [0])


def ask_ping(server: testing.Server) -> bool:
    with Binary(lane(server)) as conn:
        return conn.call(PING) == (OK, b"")


@contextlib.contextmanager
def beside(*flags: str, **more: Any) -> Iterator[testing.Server]:
    """A server whose lane is at the next port, as clients of the original expect. Somewhere else it is when a client of
    another test has just had that port."""
    for _ in range(10):
        with testing.server("--kvcache", *flags, **more) as server:
            if lane(server) == server.port + 1:
                yield server
                return
    raise RuntimeError("ten times the port beside a free one was taken")
