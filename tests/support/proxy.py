"""A TCP proxy in front of a real server, for what happens between two commands or in the middle of a reply."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


class Proxy:
    """Forwards bytes both ways.

    Attributes:
        port: where clients connect.
        before: called with each piece of a request before it is passed on; None = nothing.
        limit, request_limit: bytes of replies, or of requests, after which a connection is cut; None = never.
        piece: bytes taken at a time.
        accepted: connections so far.
        answered: bytes of replies passed on so far.
        turns: how often a request followed a reply, over all connections: the round trips.
    """

    def __init__(self, port: int) -> None:
        self.before: Callable[[bytes], None] | None = None
        self.limit: int | None = None
        self.request_limit: int | None = None
        self.accepted = self.turns = self.answered = 0
        self._answered = True
        self.piece = 1 << 16
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._socks += [client, server]
            self._start(lambda pair=(client, server): self._pump(*pair, request=True))  # type: ignore[misc]
            self._start(lambda pair=(server, client): self._pump(*pair, request=False))  # type: ignore[misc]

    def _pump(self, source: socket.socket, target: socket.socket, *, request: bool) -> None:
        moved = 0
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece):
                self.turns += request and self._answered
                self._answered = not request
                if request and self.before is not None:
                    self.before(data)
                limit = self.request_limit if request else self.limit
                if limit is not None and moved + len(data) > limit:
                    target.sendall(data[: limit - moved])
                    break
                self.answered += 0 if request else len(data)
                target.sendall(data)
                moved += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up on everybody and stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._socks:
            sock.close()


@contextlib.contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """A proxy to a local port."""
    running = Proxy(port)
    try:
        yield running
    finally:
        running.close()
