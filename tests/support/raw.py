"""A small blocking RESP client of the tests: nothing of it is shared with the code under test."""

from __future__ import annotations

import socket
from typing import Any


class ReplyError(Exception):
    """An error reply; the text without the leading `-`."""


class Closed(Exception):
    """The server closed the connection where a reply was expected."""


def frame(*parts: bytes | str | int) -> bytes:
    """One multibulk request."""
    raw = [p if isinstance(p, bytes | bytearray | memoryview) else str(p).encode() for p in parts]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in raw)


class Raw:
    """One connection.

    Args:
        port: on 127.0.0.1.
        timeout: seconds for each socket call.
        buffers: SO_SNDBUF and SO_RCVBUF, for tests of narrow connections.
    """

    def __init__(self, port: int, timeout: float = 20.0, buffers: int | None = None) -> None:
        self.sock = socket.socket()
        if buffers is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
        self.sock.settimeout(timeout)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.sock.makefile("rb", buffering=1 << 16)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        self.sock.sendall(data)

    def read(self) -> Any:
        """The next reply: bytes for bulks, str for simple strings, ReplyError (returned, not raised) for errors.

        Raises:
            Closed: the connection ended before the reply was complete.
        """
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise Closed(line)
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode("utf-8", "surrogateescape")
        if kind == b"-":
            return ReplyError(rest.decode("utf-8", "surrogateescape"))
        if kind == b":":
            return int(rest)
        if kind == b"_":
            return None
        if kind in b"$=":
            size = int(rest)
            if size < 0:
                return None
            body = self._file.read(size + 2)
            if len(body) != size + 2:
                raise Closed(b"bulk of %d bytes ended after %d" % (size, len(body)))
            return body[:-2]
        if kind in b"*~>":
            return None if int(rest) < 0 else [self.read() for _ in range(int(rest))]
        if kind == b"%":
            return {self.read(): self.read() for _ in range(int(rest))}
        raise AssertionError(f"not a RESP reply: {line!r}")

    def line(self) -> bytes:
        """The next line, without its end."""
        return self._file.readline()[:-2]

    def read_into(self, buffer: bytearray) -> None:
        """Exactly as many bytes as the buffer has."""
        view = memoryview(buffer)
        while len(view):
            got = self._file.readinto(view)
            if not got:
                raise Closed(b"%d bytes were missing" % len(view))
            view = view[got:]

    def call(self, *parts: bytes | str | int) -> Any:
        """One command and its reply; an error reply is returned as a ReplyError object."""
        self.send(frame(*parts))
        return self.read()

    def ok(self, *parts: bytes | str | int) -> Any:
        """`call`, and an error reply raises."""
        reply = self.call(*parts)
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def many(self, commands: list[tuple[bytes | str | int, ...]]) -> list[Any]:
        """A pipeline: everything is sent before the first reply is read."""
        self.send(b"".join(frame(*parts) for parts in commands))
        return [self.read() for _ in commands]

    def fields(self, *parts: bytes | str | int) -> dict[str, str]:
        """The `name:value` lines of an INFO-like reply."""
        text = self.ok(*parts).decode()
        return dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line and not line.startswith("#"))
