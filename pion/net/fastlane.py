"""The binary lane's sockets: one task for each connection, which answers its requests in order.

A connection is also one of the plane's, without a descriptor there: so it counts for maxclients, stands in CLIENT LIST,
and ends by CLIENT KILL, the idle timeout or the end of the server as any other does.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, Final

import trio

from pion import limits
from pion._core.plane import Conn, Plane
from pion.commands import Dispatcher
from pion.commands.fastlane import Answer, BinaryCalls
from pion.config import Options
from pion.errors import StartupError
from pion.net.listeners import address_text, open_tcp
from pion.wire.fastlane import Requests, Status, TooLongError, WireError, reply

log = logging.getLogger("pion.net")

_RECEIVE: Final = 1 << 20  # bytes at a time, into a buffer of all connections
_TURN: Final = 0.001  # seconds that a connection may take before others get theirs
_LINGER: Final = 2.0  # seconds in which a client may read why it is sent away
_HIGHEST_PORT: Final = 65_535


def open_listeners(options: Options, port: int) -> list[tuple[socket.socket, str]]:
    """The lane's listening sockets; none where there is to be no lane, or where the port beside RESP's is taken.

    Args:
        port: RESP's, 0 without one.

    Raises:
        StartupError: the port that was asked for by name cannot be bound.
    """
    wanted = options.binary_port
    if not options.kvcache or wanted == -1 or (wanted is None and not port):
        return []
    if wanted is not None:
        try:
            sockets = open_tcp(options.bind, wanted)
        except StartupError as error:
            raise StartupError(f"--binary-port: {error}") from None
    else:
        sockets = _beside(options, port)
    return [(sock, address_text(sock.getsockname())) for sock in sockets]


def _beside(options: Options, port: int) -> list[socket.socket]:
    """At the next port, which is where clients look without asking; for a port that was picked, else at any other."""
    why = f"there is no port above {port}"
    if port < _HIGHEST_PORT:
        try:
            return open_tcp(options.bind, port + 1)
        except StartupError as error:
            why = str(error)
    if options.port == 0:
        return open_tcp(options.bind, 0)
    log.warning("no binary lane, attention queries go over RESP: %s; --binary-port N puts it elsewhere", why)
    return []


class FastLane:
    """Connections of the lane.

    Args:
        plane, dispatcher: of the server.
        spawn: `spawn(async_fn, *args)` starts a task that ends with the server.
    """

    def __init__(self, plane: Plane, dispatcher: Dispatcher, spawn: Callable[..., object]) -> None:
        self._plane, self._dispatcher, self._spawn = plane, dispatcher, spawn
        self._calls = BinaryCalls(dispatcher)
        self._figures = dispatcher.server.binary
        self._scopes: dict[int, trio.CancelScope] = {}
        self._shared = memoryview(bytearray(_RECEIVE))  # what it receives is taken over before another task runs
        plane.on_close = self._closed

    def welcome(self, sock: socket.socket, address: Any, _name: str) -> None:
        """Serve a connection that was accepted."""
        sock.setblocking(False)
        if self._plane.connected >= self._dispatcher.server.maxclients:
            self._plane.rejected += 1
            try:
                sock.send(b"".join(reply(Status.ERROR)))
            except OSError as error:
                log.debug("a refused client is gone already: %s", error)
            sock.close()
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            local = address_text(sock.getsockname())
        except OSError as error:  # on macOS, of one that is gone already
            log.debug("a client left at once: %s", error)
            sock.close()
            return
        conn = self._plane.open_memory(address_text(address), local)
        self._dispatcher.connected(conn)
        self._scopes[conn.id] = trio.CancelScope()
        self._figures.clients = len(self._scopes)
        self._spawn(self._serve, conn, sock)

    def _closed(self, conn: Conn) -> None:
        """The plane was told to end a connection."""
        scope = self._scopes.get(conn.id)
        if scope is not None:
            scope.cancel()

    async def _serve(self, conn: Conn, sock: socket.socket) -> None:
        try:
            with sock, self._scopes[conn.id]:
                await self._talk(conn, sock)
        except OSError as error:
            log.debug("%s went away: %s", conn.peer, error)
        except Exception:  # one connection's trouble is not the server's
            log.exception("the binary lane failed")
        finally:
            del self._scopes[conn.id]
            self._figures.clients = len(self._scopes)
            self._plane.hold(conn, 0)
            self._plane.close(conn, after_flush=False)

    async def _talk(self, conn: Conn, sock: socket.socket) -> None:
        plane = self._plane
        requests = Requests(0)
        turn = trio.current_time()
        while not conn.closed:
            if trio.current_time() - turn > _TURN:
                await trio.lowlevel.checkpoint()
                turn = trio.current_time()
            requests.limit = limits.FASTLANE_BODY if conn.authenticated else limits.FASTLANE_PREAUTH_BODY
            try:
                request = requests.next()
            except TooLongError as error:
                await self._refuse(conn, sock, str(error))
                return
            except WireError as error:
                self._figures.garbage += 1
                log.info("%s: %s; its connection was closed", conn.peer, error)
                return
            if request is not None:
                plane.begin(conn, self._calls.name(request.command))
                sent = 0
                try:
                    sent = await self._send(conn, sock, await self._calls.answer(conn, request))
                finally:
                    plane.finish(conn, sent)
                del request
                plane.hold(conn, len(requests))
                continue
            try:
                # Before the login no more than can be used: what is received stays until the answers are taken.
                got = sock.recv_into(self._shared, _RECEIVE if conn.authenticated else requests.limit)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(sock)
                turn = trio.current_time()
                continue
            if not got:
                return
            requests.feed(self._shared[:got])
            if not plane.hold(conn, len(requests), got):
                await self._refuse(conn, sock, "the half-received requests of all connections exceed their limit")
                return

    async def _send(self, conn: Conn, sock: socket.socket, answer: Answer) -> int:
        """Send a response; how many bytes it had. OSError when the peer does not take it."""
        view = memoryview(b"".join(reply(*answer)))
        total = len(view)
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                with trio.move_on_after(limits.SEND_TIMEOUT) as patience:
                    await trio.lowlevel.wait_writable(sock)
                if patience.cancelled_caught:
                    log.warning("%s does not take its answers; its connection was closed", conn.peer)
                    raise TimeoutError from None
        return total

    async def _refuse(self, conn: Conn, sock: socket.socket, why: str) -> None:
        """ERROR to a request that will not be received, and the end, behind what the client has still to send: closing
        with unread input would make the kernel send RST, which may overtake the response."""
        log.info("%s: %s; its connection was closed", conn.peer, why)
        self._figures.errors += 1
        self._plane.hold(conn, 0)
        await self._send(conn, sock, (Status.ERROR, b""))
        sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(_LINGER):
            while True:
                await trio.lowlevel.wait_readable(sock)
                if not sock.recv_into(self._shared):
                    return
