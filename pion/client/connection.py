"""One connection, without waiting: what the sync and the trio client share.

A :class:`Connection` moves the bytes of one *flight* of commands over a non-blocking socket, plain or TLS. It never
waits; :meth:`Connection.step` says what to wait for. Replies are taken in while commands are still being written, so
neither side can wait for the other (case A12).
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl as tls
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pion.client.address import Address
from pion.client.errors import ConnectionLostError, reply_error
from pion.errors import CommandError
from pion.wire.resp import (
    LocalProtocolError,
    Part,
    Push,
    RemoteProtocolError,
    ReplyError,
    ReplyParser,
    encode_command,
)

__all__ = ["NOW", "READ", "WRITE", "Connection", "Flight", "Steps", "login", "raise_first"]

READ: Final = 1
WRITE: Final = 2
NOW: Final = 4

_QUEUE: Final = 1 << 20  # bytes encoded ahead of the socket
_STEP: Final = 4 << 20  # bytes moved in one direction before others get their turn
_BUFFERS: Final = 64  # of one sendmsg
_TLS_RECORD: Final = 1 << 16  # a retried TLS write must be the same bytes

T = TypeVar("T")

Command = Sequence[Part]


@dataclass(slots=True)
class Flight:
    """Commands sent together.

    Attributes:
        commands: encoded one by one as the socket takes them; may be a generator that makes the arguments on demand.
        outs: by position of the command, writable buffers for the bulks of its reply, or a function that gives them
            (see ``ReplyParser.expect``).
    """

    commands: Iterable[Command]
    outs: Mapping[int, Sequence[Any] | Callable[[int, int], Any]] = field(default_factory=dict)


Steps = Generator[Flight, list[Any], T]
"""A procedure of several flights: yields what to send, is sent the replies, returns its result."""


def raise_first(replies: Iterable[Any]) -> None:
    """Raise the first error among replies."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply_error(str(reply))


class Connection:
    """A logged-in or about to be logged-in connection. Used by one flight at a time.

    Args:
        sock: connected; becomes non-blocking and belongs to the connection.
        address: where it leads.
    """

    def __init__(self, sock: socket.socket, address: Address) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.address = address
        self.closed = False
        self._tls = isinstance(sock, tls.SSLSocket)
        self._parser = ReplyParser()
        self._commands: Iterator[tuple[int, Command]] | None = None
        self._outs: Mapping[int, Sequence[Any] | Callable[[int, int], Any]] = {}
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._awaited = 0
        self._replies: list[Any] = []
        self._tls_wants = 0

    def close(self) -> None:
        """Close the socket. Anything the server still sends is lost with it."""
        self.closed = True
        self._queue.clear()
        self._commands = None
        self.sock.close()

    # --- a flight -------------------------------------------------------------------------------------------------

    def start(self, flight: Flight) -> None:
        """Begin a flight; :meth:`step` moves it."""
        if self.closed or self._awaited or self._commands is not None:
            raise LocalProtocolError("the connection is closed or busy")
        self._commands = enumerate(flight.commands)
        self._outs = flight.outs
        self._replies = []

    def finish(self) -> list[Any]:
        """The replies of the flight, in order; errors are among them as values."""
        replies, self._replies = self._replies, []
        return replies

    def step(self, ready: int = WRITE) -> int:
        """Move what can be moved without waiting.

        Args:
            ready: what the socket was found ready for.

        Returns:
            0 when the flight is complete, else what to wait for: READ, WRITE or both; NOW among them means that
            there is more to do at once, after giving others a turn.

        Raises:
            ConnectionLostError: the server hung up.
            RemoteProtocolError: the server does not speak RESP.
        """
        self._tls_wants = 0
        self._refill()
        if self._queue and (ready & WRITE or self._tls):
            self._write()
        if self._awaited and (ready & READ or self._tls):
            self._read()
            if self._queue and ready & WRITE:
                self._write()
        if not self._queue and not self._awaited and self._commands is None:
            if not self._parser.idle:
                raise RemoteProtocolError("the server sent a reply nobody asked for")
            return 0
        wants = self._tls_wants or (WRITE if self._queue else 0) | (READ if self._awaited else 0)
        # Decrypted bytes wait inside the TLS object, where no poll sees them.
        return wants | NOW if isinstance(self.sock, tls.SSLSocket) and self.sock.pending() else wants

    def _refill(self) -> None:
        """Encode commands until enough is queued; remember where their replies belong."""
        while self._commands is not None and self._queued < _QUEUE:
            try:
                index, command = next(self._commands)
            except StopIteration:
                self._commands = None
                return
            pieces = encode_command(*command)
            self._parser.expect(self._outs.get(index))
            self._awaited += 1
            for piece in pieces:
                self._queue.append(memoryview(piece))
                self._queued += len(piece)

    def _write(self) -> None:
        moved = 0
        while self._queue and moved < _STEP:
            try:
                if self._tls:
                    sent = self.sock.send(self._queue[0][:_TLS_RECORD])
                elif len(self._queue) == 1:
                    sent = self.sock.send(self._queue[0])
                else:
                    sent = self.sock.sendmsg([self._queue[i] for i in range(min(len(self._queue), _BUFFERS))])
            except (BlockingIOError, tls.SSLWantWriteError):
                return
            except tls.SSLWantReadError:
                self._tls_wants = READ
                return
            except OSError as error:
                # The server may have said why before it hung up, and that is the better message.
                with contextlib.suppress(OSError):
                    self._read()
                raise self._lost(error) from error
            moved += sent
            self._queued -= sent
            while sent:
                head = self._queue[0]
                if sent < len(head):
                    self._queue[0] = head[sent:]
                    break
                sent -= len(head)
                self._queue.popleft()
            self._refill()

    def _read(self) -> None:
        moved = 0
        while self._awaited and moved < _STEP:
            target = self._parser.get_target()
            try:
                got = self.sock.recv_into(target)
            except (BlockingIOError, tls.SSLWantReadError):
                return
            except tls.SSLWantWriteError:
                self._tls_wants = WRITE
                return
            except (tls.SSLEOFError, tls.SSLZeroReturnError):
                got = 0
            except OSError as error:
                raise self._lost(error) from error
            if not got:
                raise self._lost(None)
            moved += got
            self._take(self._parser.commit(got))
            if got < len(target) and not self._tls:
                return

    def _take(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, Push):
                continue
            if not self._awaited:
                raise RemoteProtocolError("the server sent a reply nobody asked for")
            self._awaited -= 1
            self._replies.append(value)

    def _lost(self, error: OSError | None) -> ConnectionLostError:
        said = [str(reply) for reply in self._replies if isinstance(reply, ReplyError)]
        hint = f" after {said[-1]!r}" if said else ""
        cause = f": {error.strerror or error}" if error else ""
        return ConnectionLostError(f"{self.address} closed the connection{hint}{cause}")

    @property
    def stale(self) -> bool:
        """An idle connection that became readable was closed by the server, or holds bytes nobody asked for."""
        if self.closed:
            return True
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return bool(poller.poll(0))


def login(address: Address) -> Steps[None]:
    """The first flights on a connection: protocol, credentials, name, database.

    Raises:
        AuthenticationError: wrong or missing credentials.
        CommandError: the server refused the database.
    """
    auth: list[Part] = []
    if address.password is not None:
        auth = [address.username or "default", address.password]
    about: list[list[Part]] = [["CLIENT", "SETINFO", "LIB-NAME", "pion"]]
    if address.client_name:
        about.append(["CLIENT", "SETNAME", address.client_name])
    if address.db:
        about.append(["SELECT", address.db])
    if address.protocol == 3:
        replies = yield Flight([["HELLO", 3, *(["AUTH", *auth] if auth else [])], *about])
        hello = replies[0]
        if not isinstance(hello, ReplyError):
            _check_about(about, replies[1:])
            return
        if hello.code not in ("ERR", "NOPROTO"):
            raise reply_error(str(hello))
    # An old server knows no HELLO: RESP2 and AUTH, which itself may know no user names.
    first: list[list[Part]] = []
    if auth:
        first = [["AUTH", *auth]] if address.username else [["AUTH", auth[1]]]
    replies = yield Flight([*first, *about])
    raise_first(replies[: len(first)])
    _check_about(about, replies[len(first) :])


def _check_about(about: list[list[Part]], replies: list[Any]) -> None:
    """CLIENT SETINFO is a courtesy an old server may refuse; the rest must hold."""
    for command, reply in zip(about, replies, strict=True):
        if isinstance(reply, ReplyError) and (command[1] != "SETINFO" or reply.code == "NOAUTH"):
            raise reply_error(str(reply))


def expect_ok(reply: Any, command: str) -> None:
    """The reply must be ``+OK``."""
    raise_first([reply])
    if reply != "OK":
        raise CommandError(f"{command} answered {reply!r}")
