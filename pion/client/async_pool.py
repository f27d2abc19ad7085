"""Connections kept for reuse by trio tasks; see ``pool`` for the rules."""

from __future__ import annotations

import socket
import ssl as tls
from collections import deque
from typing import Any, TypeVar

import trio

from pion.client.address import Address
from pion.client.connection import NOW, READ, WRITE, Connection, Flight, Steps, login
from pion.client.errors import CallTimeoutError, ConnectionLostError
from pion.client.pool import no_resp, timed_out, unreachable
from pion.wire.resp import RemoteProtocolError

__all__ = ["AsyncPool"]

T = TypeVar("T")


async def _ready(sock: socket.socket, wants: int) -> int:
    """Wait until the socket can be read or written as wanted; which of them it is."""
    if wants == READ:
        await trio.lowlevel.wait_readable(sock)
        return READ
    if wants == WRITE:
        await trio.lowlevel.wait_writable(sock)
        return WRITE
    found = 0

    async def readable() -> None:
        nonlocal found
        await trio.lowlevel.wait_readable(sock)
        found |= READ
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(readable)
        await trio.lowlevel.wait_writable(sock)
        found |= WRITE
        nursery.cancel_scope.cancel()
    return found


async def open_socket(address: Address) -> socket.socket:
    """Connect, with TLS when the address has a context; see ``pool.open_socket``."""
    try:
        if address.path:
            stream = await trio.open_unix_socket(address.path)
        else:
            stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as error:
        raise unreachable(address, error) from error
    plain = stream.socket
    sock = socket.socket(plain.family, plain.type, plain.proto, plain.detach())
    try:
        if not address.path:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.ssl is None:
            return sock
        sock = address.ssl.wrap_socket(sock, server_hostname=address.host, do_handshake_on_connect=False)
        await _handshake(sock)
        return sock
    except BaseException:
        sock.close()
        raise


async def _handshake(sock: tls.SSLSocket) -> None:
    while True:
        try:
            return sock.do_handshake()
        except tls.SSLWantReadError:
            await _ready(sock, READ)
        except tls.SSLWantWriteError:
            await _ready(sock, WRITE)


async def fly(connection: Connection, flight: Flight, patience: float | None) -> list[Any]:
    """Run one flight to its end. An error, a timeout or a cancellation closes the connection."""
    try:
        connection.start(flight)
        wants = connection.step()
        while wants:
            if wants & NOW:
                await trio.lowlevel.checkpoint()
                wants = connection.step(READ | WRITE)
                continue
            with trio.move_on_after(float("inf") if patience is None else patience) as scope:
                ready = await _ready(connection.sock, wants)
            if scope.cancelled_caught:
                raise timed_out(connection.address, patience)
            wants = connection.step(ready)
        return connection.finish()
    except RemoteProtocolError as error:
        connection.close()
        raise no_resp(connection.address, error) from error
    except BaseException:
        connection.close()
        raise


async def run(connection: Connection, flight: Flight, steps: Steps[T], patience: float | None) -> T:
    """Run a procedure of several flights from its first one on."""
    try:
        while True:
            flight = steps.send(await fly(connection, flight, patience))
    except StopIteration as done:
        result: T = done.value
        return result


class AsyncPool:
    """Connections shared by the tasks of one ``trio.run``.

    Args:
        address: the server.
        size: connections open at the same time at most; a further caller waits for one, at most the timeout.
    """

    def __init__(self, address: Address, size: int = 16) -> None:
        if size < 1:
            raise ValueError("a pool needs at least one connection")
        self.address = address
        self.size = size
        self.closed = False
        self._free = trio.Semaphore(size)
        self._idle: deque[Connection] = deque()

    async def open(self) -> Connection:
        """A new connection, logged in."""
        with trio.move_on_after(self.address.connect_timeout) as scope:
            connection = Connection(await open_socket(self.address), self.address)
            try:
                steps = login(self.address)
                await run(connection, next(steps), steps, None)
            except BaseException:
                connection.close()
                raise
            return connection
        assert scope.cancelled_caught
        raise ConnectionLostError(f"cannot connect to {self.address}: timed out")

    async def acquire(self) -> Connection:
        """An idle connection, or a new one; raises like ``Pool.acquire``."""
        if self.closed:
            raise ConnectionLostError("the client is closed")
        patience = float("inf") if self.address.timeout is None else self.address.timeout
        with trio.move_on_after(patience) as scope:
            await self._free.acquire()
        if scope.cancelled_caught:
            raise CallTimeoutError(f"all {self.size} connections to {self.address} stayed busy")
        try:
            while self._idle:
                connection = self._idle.pop()
                if not connection.stale:
                    return connection
                connection.close()
            return await self.open()
        except BaseException:
            self._free.release()
            raise

    def release(self, connection: Connection) -> None:
        """Give a connection back; a closed one frees its place."""
        if self.closed:
            connection.close()
        elif not connection.closed:
            self._idle.append(connection)
        self._free.release()

    async def run(self, steps: Steps[T], patience: float | None) -> T:
        """Run a procedure on one connection of the pool; what it refuses by itself opens none."""
        try:
            flight = next(steps)
        except StopIteration as done:
            result: T = done.value
            await trio.lowlevel.checkpoint()
            return result
        connection = await self.acquire()
        try:
            return await run(connection, flight, steps, patience)
        finally:
            self.release(connection)

    def close(self) -> None:
        """Close the idle connections now and the busy ones when they come back."""
        self.closed = True
        while self._idle:
            self._idle.pop().close()
