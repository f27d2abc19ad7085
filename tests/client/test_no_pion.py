"""What answers at the address is no Pion server: clients say so, in time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pion import AsyncClient, Client
from pion.client.errors import CallTimeoutError, ConnectionLostError


@contextlib.contextmanager
def answering(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """A port where every connection gets what `talk` sends."""
    over = threading.Event()
    threads = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threads.append(threading.Thread(target=serve, args=(sock,)))
                    threads[-1].start()

        def serve(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                talk(sock, over)

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def babble(sock: socket.socket, over: threading.Event) -> None:
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    over.wait()


def trickle(sock: socket.socket, over: threading.Event) -> None:
    """One byte at a time of an answer that never ends."""
    sock.sendall(b"$1000000\r\n")
    while not over.wait(0.05):
        sock.sendall(b"x")


def test_a_program_of_another_protocol_is_named() -> None:
    with answering(babble) as port, Client(port=port) as client:
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match=f"{port} does not speak RESP; is this the port of a Pion"):
                client.ping()


async def test_a_program_of_another_protocol_is_named_for_trio() -> None:
    with answering(babble) as port:
        async with AsyncClient(port=port) as client:
            with pytest.raises(ConnectionLostError, match="does not speak RESP"):
                await client.ping()


def test_a_login_that_never_ends_does() -> None:
    with (
        answering(trickle) as port,
        Client(port=port, timeout=60, connect_timeout=0.5) as client,
        pytest.raises(CallTimeoutError),  # by one of two texts: the end may come between two bytes
    ):
        client.ping()
