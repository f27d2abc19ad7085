"""A real server for the tests of a module, and a byte server for what no healthy one does: wrong bytes, hang-ups."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pion.testing import server as start_server
from pion.wire.resp import OK, Err, Parser, Raw, Simple, encode
from tests.support.proxy import Proxy, proxy

Answer = Callable[["Peer", list[bytes]], Any]
HANG_UP = object()
SILENCE = object()


class Peer:
    """One connection of the byte server."""

    def __init__(self, server: ByteServer, sock: socket.socket) -> None:
        self.server, self.sock, self.proto = server, sock, 2

    def serve(self) -> None:
        """Answer commands until either side hangs up."""
        parser = Parser()
        with contextlib.suppress(OSError), self.sock:
            while data := self.sock.recv(1 << 16):
                for argv in parser.feed(data):
                    self.server.seen.append(argv)
                    value = self.server.answer(self, argv)
                    if value is HANG_UP:
                        return
                    if value is not SILENCE:
                        self.sock.sendall(encode(value, self.proto))


def ordinary(peer: Peer, argv: list[bytes]) -> Any:
    """HELLO, PING, ECHO, GET, SET as a Redis answers them."""
    data = peer.server.data
    match argv[0].upper(), argv[1:]:
        case b"HELLO", [version, *_]:
            peer.proto = int(version)
            return {b"server": b"bytes", b"proto": peer.proto}
        case b"PING", []:
            return Simple("PONG")
        case b"CLIENT" | b"AUTH" | b"SELECT", _:
            return OK
        case b"ECHO", [text]:
            return text
        case b"SET", [key, value]:
            data[key] = value
            return OK
        case b"GET", [key]:
            return data.get(key)
    return Err(f"ERR unknown command '{argv[0].decode()}'")


class ByteServer:
    """Accepts connections and answers with `answer`; replace it at any time."""

    def __init__(self, context: ssl.SSLContext | None, rcvbuf: int | None, path: str | None) -> None:
        self.answer: Answer = ordinary
        self.seen: list[list[bytes]] = []
        self.data: dict[bytes, bytes] = {}
        self.accepted = 0
        self.context = context
        self.listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        if rcvbuf:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, rcvbuf)
        self.listener.bind(path or ("127.0.0.1", 0))
        self.listener.listen()
        self.port = 0 if path else self.listener.getsockname()[1]
        self.threads: list[threading.Thread] = []
        self.socks: list[socket.socket] = []
        self.closing = False
        self._spawn(self._accept)

    def _spawn(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.closing:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.context is not None:
                try:
                    sock = self.context.wrap_socket(sock, server_side=True)
                except OSError:
                    sock.close()
                    continue
            self.socks.append(sock)
            self._spawn(Peer(self, sock).serve)

    def drop_connections(self) -> None:
        """Hang up on everybody."""
        for sock in self.socks:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, stop listening, and wait for the threads."""
        self.closing = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.drop_connections()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def between(server: Any) -> Iterator[Proxy]:
    with proxy(server.port) as running:
        yield running


@pytest.fixture
def byte_server() -> Iterator[Callable[..., ByteServer]]:
    """Start byte servers: ``byte_server(context=…, rcvbuf=…, path=…)``."""
    started: list[ByteServer] = []

    def start(
        *, context: ssl.SSLContext | None = None, rcvbuf: int | None = None, path: str | None = None
    ) -> ByteServer:
        started.append(ByteServer(context, rcvbuf, path))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def answers() -> dict[str, Any]:
    """The special answers, as test modules cannot import this file."""
    return {"ordinary": ordinary, "hang up": HANG_UP, "silence": SILENCE, "raw": Raw, "error": Err}
