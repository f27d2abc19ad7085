"""Requests as bytes and replies read whole, for the benchmarks' setup steps."""

from __future__ import annotations

import socket
import struct
from types import TracebackType


def command(*parts: bytes | str | int) -> bytes:
    """One RESP command."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)])


class Wire:
    """A blocking connection that reads RESP2 replies; nothing more than a benchmark's setup needs."""

    def __init__(self, host: str, port: int, timeout: float = 120.0) -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb", buffering=1 << 20)

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.socket.close()

    def call(self, *parts: bytes | str | int) -> object:
        self.socket.sendall(command(*parts))
        return self.reply()

    def reply(self) -> object:
        line = self.file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b"+":
            return rest.decode()
        if kind == b":":
            return int(rest)
        if kind == b"$":
            size = int(rest)
            if size < 0:
                return None
            body = self.file.read(size + 2)
            return body[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise RuntimeError(f"unexpected reply {line!r}")

    def info(self, *section: str) -> dict[str, str]:
        text = self.call("INFO", *section)
        assert isinstance(text, bytes)
        pairs = (line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        return dict(pairs)


def hashes(count: int, seed: int) -> bytes:
    """`count` well-mixed u64, little-endian (splitmix64)."""
    out = []
    state = seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return struct.pack(f"<{count}Q", *out)
