"""A small RESP2/RESP3 client that keeps the type of every reply, written apart from the product's own parsers."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Simple:
    text: bytes


@dataclass(frozen=True)
class Error:
    text: bytes

    @property
    def code(self) -> bytes:
        return self.text.split(b" ", 1)[0]


@dataclass(frozen=True)
class Verbatim:
    text: bytes


@dataclass(frozen=True)
class Items:
    """A RESP3 set (`~`), push (`>`) or map (`%`, flat); arrays are plain lists."""

    kind: bytes
    items: tuple[Any, ...]


def argv(parts: tuple[bytes | str | int, ...]) -> list[bytes]:
    return [part if isinstance(part, bytes) else str(part).encode() for part in parts]


def command(*parts: bytes | str | int) -> bytes:
    words = argv(parts)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class Incomplete(Exception):
    """More bytes are needed."""


def parse(data: bytes) -> tuple[Any, bytes]:
    """One reply and what follows it."""
    value, end = _parse(data, 0)
    return value, data[end:]


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    kind, line, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind in b"+-:,#_(" and kind:
        return _scalar(kind, line), at
    size = int(line)
    if kind in b"$=":
        if size < 0:
            return None, at
        if len(data) < at + size + 2:
            raise Incomplete
        body = data[at : at + size]
        assert data[at + size : at + size + 2] == b"\r\n"
        return (Verbatim(body[4:]) if kind == b"=" else body), at + size + 2
    assert kind in b"*~>%", data[:50]
    if size < 0:
        return None, at
    items = []
    for _ in range(size * 2 if kind == b"%" else size):
        item, at = _parse(data, at)
        items.append(item)
    return (items if kind == b"*" else Items(kind, tuple(items))), at


def _scalar(kind: bytes, line: bytes) -> Any:
    if kind == b"+":
        return Simple(line)
    if kind == b"-":
        return Error(line)
    if kind in b":(":
        return int(line)
    if kind == b",":
        return float(line)
    return None if kind == b"_" else line == b"t"


class SocketClient:
    """One blocking connection to any server that speaks RESP."""

    def __init__(self, address: tuple[str, int], timeout: float = 20.0) -> None:
        self.sock = socket.create_connection(address, timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pending = b""

    def read(self) -> Any:
        """The next reply; `EOFError` when the server closed."""
        while True:
            try:
                value, self.pending = parse(self.pending)
            except Incomplete:
                data = self.sock.recv(1 << 20)
                if not data:
                    self.close()
                    raise EOFError from None
                self.pending += data
            else:
                return value

    def __call__(self, *parts: bytes | str | int) -> Any:
        self.sock.sendall(command(*parts))
        return self.read()

    def close(self) -> None:
        self.sock.close()
