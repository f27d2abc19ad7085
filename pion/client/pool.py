"""Connections kept for reuse by threads. ``async_pool`` is the same for trio tasks.

A connection is handed to one caller at a time and comes back only when its last reply was read; one that saw an
error, a timeout or a cancellation is closed instead (case A13).
"""

from __future__ import annotations

import os
import select
import socket
import ssl as tls
import threading
import time
import weakref
from collections import deque
from typing import Any, Final, TypeVar

from pion.client.address import Address
from pion.client.connection import NOW, READ, WRITE, Connection, Flight, Steps, login
from pion.client.errors import CallTimeoutError, ConnectionLostError
from pion.wire.resp import RemoteProtocolError

__all__ = ["Pool", "fly", "open_socket", "run"]

T = TypeVar("T")

_POLL: Final = {READ: select.POLLIN, WRITE: select.POLLOUT, READ | WRITE: select.POLLIN | select.POLLOUT}
_TROUBLE: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL


def timed_out(address: Address, seconds: float | None) -> CallTimeoutError:
    """The error of a call in which nothing moved."""
    return CallTimeoutError(f"{address}: nothing moved for {seconds} s; the connection was closed")


def unreachable(address: Address, error: BaseException) -> ConnectionLostError:
    """The error of a connection that could not be opened."""
    return ConnectionLostError(f"cannot connect to {address}: {error}")


def handshake_failed(address: Address, error: tls.SSLError) -> tls.SSLError:
    """The same error, saying of whom."""
    why = error.reason or str(error)
    hint = "; it seems to speak without TLS" if why == "WRONG_VERSION_NUMBER" else ""
    return type(error)(error.errno, f"TLS with {address} failed: {why}{hint}")


def open_socket(address: Address) -> socket.socket:
    """Connect, with TLS when the address has a context.

    Raises:
        ConnectionLostError: the server cannot be reached.
        ssl.SSLError: the handshake failed or the certificate is not trusted.
    """
    try:
        if address.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(address.connect_timeout)
            try:
                sock.connect(address.path)
            except OSError:
                sock.close()
                raise
            return sock
        # As bytes, a plain name does not make Python load its tables of international ones.
        host: Any = address.host.encode() if address.host.isascii() else address.host
        sock = socket.create_connection((host, address.port), address.connect_timeout)
    except OSError as error:
        raise unreachable(address, error) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if address.ssl is None:
        return sock
    try:
        return address.ssl.wrap_socket(sock, server_hostname=address.host)
    except tls.SSLError as error:
        sock.close()
        raise handshake_failed(address, error) from error
    except BaseException:
        sock.close()
        raise


def no_resp(address: Address, error: RemoteProtocolError) -> ConnectionLostError:
    """The error of something that is there and is no such server."""
    return ConnectionLostError(f"{address} does not speak RESP; is this the port of a Pion server? ({error})")


def fly(connection: Connection, flight: Flight, timeout: float | None, until: float | None = None) -> list[Any]:
    """Run one flight to its end, blocking. Whatever interrupts it closes the connection.

    Args:
        timeout: seconds without progress.
        until: when it must be over, in monotonic seconds; None: whenever.
    """
    poller = select.poll()
    registered = 0
    try:
        connection.start(flight)
        wants = connection.step()
        while wants:
            if wants & NOW:
                wants = connection.step(READ | WRITE)
                continue
            if wants != registered:
                poller.register(connection.sock, _POLL[wants])
                registered = wants
            left = None if until is None else max(0.0, until - time.monotonic())
            patience = min((each for each in (timeout, left) if each is not None), default=None)
            events = poller.poll(None if patience is None else patience * 1000)
            if not events:
                raise timed_out(connection.address, timeout)
            if left == 0.0:
                raise CallTimeoutError(f"{connection.address}: the login took too long; the connection was closed")
            found = events[0][1]
            trouble = READ | WRITE if found & _TROUBLE else 0
            ready = (READ if found & select.POLLIN else 0) | (WRITE if found & select.POLLOUT else 0)
            wants = connection.step(ready | trouble)
        return connection.finish()
    except RemoteProtocolError as error:
        connection.close()
        raise no_resp(connection.address, error) from error
    except BaseException:
        connection.close()
        raise


def run(
    connection: Connection, flight: Flight, steps: Steps[T], timeout: float | None, until: float | None = None
) -> T:
    """Run a procedure of several flights from its first one on, blocking."""
    try:
        while True:
            flight = steps.send(fly(connection, flight, timeout, until))
    except StopIteration as done:
        result: T = done.value
        return result


class Pool:
    """Connections shared by the threads of a process, and left alone by its forked children.

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
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self.size)
        self._idle: deque[Connection] = deque()

    def after_fork(self) -> None:
        """In a forked child: the sockets belong to the parent; close our copies without a word on the wire."""
        idle = self._idle
        self._reset()
        for connection in idle:
            connection.close()

    def open(self) -> Connection:
        """A new connection, logged in."""
        until = time.monotonic() + self.address.connect_timeout
        connection = Connection(open_socket(self.address), self.address)
        try:
            steps = login(self.address)
            run(connection, next(steps), steps, self.address.connect_timeout, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def acquire(self) -> Connection:
        """An idle connection, or a new one.

        Raises:
            CallTimeoutError: all connections stayed busy for the timeout.
            ConnectionLostError, AuthenticationError: see :meth:`open`.
        """
        if self.closed:
            raise ConnectionLostError("the client is closed")
        if not self._free.acquire(timeout=self.address.timeout):
            raise CallTimeoutError(f"all {self.size} connections to {self.address} stayed busy")
        try:
            while (connection := self._take_idle()) is not None:
                if not connection.stale:
                    return connection
                connection.close()
            return self.open()
        except BaseException:
            self._free.release()
            raise

    def _take_idle(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def release(self, connection: Connection) -> None:
        """Give a connection back; a closed one frees its place."""
        with self._lock:
            if self.closed:
                connection.close()
            elif not connection.closed:
                self._idle.append(connection)
        self._free.release()

    def run(self, steps: Steps[T], timeout: float | None) -> T:
        """Run a procedure on one connection of the pool; what it refuses by itself opens none."""
        try:
            flight = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        connection = self.acquire()
        try:
            return run(connection, flight, steps, timeout)
        finally:
            self.release(connection)

    def close(self) -> None:
        """Close the idle connections now and the busy ones when they come back."""
        with self._lock:
            self.closed = True
            while self._idle:
                self._idle.pop().close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


os.register_at_fork(after_in_child=_after_fork)
