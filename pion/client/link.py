"""The prompt cache's own connection: one blocking socket that comes back after an outage.

It differs from a general client in three ways. Bulk replies are received straight into memory the caller owns.
Replies are drained while a long pipeline is still being written. And an outage is a state, not only an exception: the
caller computes locally, says so once, and the link tries again later, so that a dead server costs at most a third of
the time.

Whatever interrupts an exchange (an error, a timeout, Ctrl-C) closes the socket: a connection with a reply left unread
would answer the next question with the previous answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl as tls
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from pion.errors import AuthenticationError, CommandError, MismatchError, OutOfMemoryError, StorageError
from pion.limits import DEFAULT_PORT

__all__ = ["Address", "Link", "parse_url", "raise_reply"]

_CONNECT_TIMEOUT: Final = 5.0
_BUFFER: Final = 1 << 16
_BUFFER_MAX: Final = 1 << 24
_ERRORS: Final[dict[bytes, type[CommandError]]] = {
    b"NOAUTH": AuthenticationError,
    b"WRONGPASS": AuthenticationError,
    b"NOPERM": AuthenticationError,
    b"MISMATCH": MismatchError,
    b"OOM": OutOfMemoryError,
    b"MISCONF": StorageError,
}


def raise_reply(line: bytes) -> None:
    """Raise the exception an error line stands for; `line` is without the leading ``-``."""
    kind = _ERRORS.get(line.split(b" ", 1)[0], CommandError)
    raise kind(line.decode("utf-8", "replace"))


class Address:
    """Where the server is and who we are.

    Args:
        host, port: the server; `host` may be the path of a Unix socket (it starts with ``/``).
        username, password: for AUTH; a password alone is enough.
        ssl: True for the system's certificate authorities, or an ``ssl.SSLContext``.
        timeout: seconds without progress after which a call fails.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        username: str | None = None,
        password: str | None = None,
        ssl: bool | tls.SSLContext | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.host, self.port, self.timeout = host, port, timeout
        self.username, self.password = username, password
        self.context = tls.create_default_context() if ssl is True else (ssl or None)

    def __str__(self) -> str:
        return self.host if self.host.startswith("/") else f"{self.host}:{self.port}"

    def open(self) -> socket.socket:
        """Connect, with TLS when asked.

        Raises:
            ssl.SSLError: the handshake failed or the certificate is not trusted.
            OSError: the server cannot be reached.
        """
        patience = min(self.timeout, _CONNECT_TIMEOUT)
        if self.host.startswith("/"):
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.settimeout(patience)
            with _closing_on_error(plain):
                plain.connect(self.host)
        else:
            plain = socket.create_connection((self.host, self.port), patience)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _closing_on_error(plain):
            sock = self.context.wrap_socket(plain, server_hostname=self.host) if self.context else plain
        sock.settimeout(self.timeout)
        return sock


def parse_url(url: str) -> dict[str, Any]:
    """The keyword arguments of `Address` in a URL.

    ``pion://[[user]:password@]host[:port]`` (also ``redis://``), ``pions://`` (also ``rediss://``) for TLS, and
    ``pion+unix:///path/to.sock`` (also ``unix://``). Reserved characters in the credentials are percent-encoded.

    Raises:
        ValueError: another scheme, or no host.
    """
    parts = urlsplit(url)
    found: dict[str, Any] = {}
    if parts.scheme in ("pion+unix", "unix"):
        found["host"] = unquote(parts.path)
    elif parts.scheme in ("pion", "redis", "pions", "rediss"):
        found["host"] = parts.hostname
        found["port"] = parts.port or DEFAULT_PORT
        found["ssl"] = parts.scheme in ("pions", "rediss") or None
    else:
        raise ValueError(f"unknown scheme {parts.scheme!r} (want pion, pions, pion+unix, redis, rediss or unix)")
    if not found["host"]:
        raise ValueError(f"no host in {parts.scheme}:// URL")
    if parts.password is not None:
        found["password"] = unquote(parts.password)
    if parts.username:
        found["username"] = unquote(parts.username)
    if "timeout" in (query := parse_qs(parts.query)):
        found["timeout"] = float(query["timeout"][0])
    return found


@contextlib.contextmanager
def _closing_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


def encode(parts: Sequence[Any]) -> list[Any]:
    """A command as buffers to send: small parts joined, large ones as they are."""
    joined, out = bytearray(b"*%d\r\n" % len(parts)), []
    for part in parts:
        data = part.encode() if isinstance(part, str) else b"%d" % part if isinstance(part, int) else part
        size = memoryview(data).nbytes
        joined += b"$%d\r\n" % size
        if size < 4096:
            joined += data
        else:
            out += [bytes(joined), memoryview(data).cast("B")]
            joined.clear()
        joined += b"\r\n"
    return [*out, bytes(joined)]


class Link:
    """One connection, opened when first needed and again after it was lost. Safe to share between threads.

    Use it through `session`, `call` and `call_array`.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.RLock()
        self._sock: socket.socket | None = None
        self._pid = os.getpid()
        self._buffer, self._start, self._end = bytearray(_BUFFER), 0, 0
        self._pause_until = 0.0
        self.owed = 0  # replies the server still owes

    # --- life of the connection -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock, self._start, self._end, self.owed = None, 0, 0, 0

    @contextlib.contextmanager
    def session(self) -> Iterator[Link]:
        """Exclusive use of a live connection.

        Leaving it by an exception closes the connection, unless that is a `CommandError` and no reply is left unread.

        Raises:
            ConnectionError, TimeoutError, OSError: the server cannot be reached, or was lost inside.
        """
        with self._lock:
            if self._pid != os.getpid():  # forked: the socket belongs to the parent as well, and its stream is not ours
                self._drop()
                self._pid = os.getpid()
            try:
                if self._sock is None:
                    self._connect()
                yield self
            except CommandError:
                if self.owed:
                    self._drop()
                raise
            except (tls.SSLEOFError, tls.SSLZeroReturnError) as error:
                self._drop()
                raise ConnectionResetError(f"{self.address} closed the connection") from error
            except BaseException:
                self._drop()
                raise

    def _connect(self) -> None:
        started = time.monotonic()
        if started < self._pause_until:
            raise ConnectionRefusedError(f"{self.address} was not reachable a moment ago")
        try:
            self._sock = self.address.open()
            if self.address.password is not None:
                user = [self.address.username] if self.address.username else []
                self.execute("AUTH", *user, self.address.password)
        except CommandError:
            self._drop()
            raise
        except tls.SSLError:
            raise
        except OSError:
            ended = time.monotonic()
            self._pause_until = ended + min(30.0, 2 * (ended - started))
            raise

    # --- calls ----------------------------------------------------------------------------------------------------

    def call(self, *parts: Any) -> bytes:
        """Send one command and return its whole reply as raw bytes, an error reply too. Parts: str, bytes, int."""
        with self.session():
            self.send(encode(parts))
            return self.frame()

    def call_array(self, *parts: Any) -> list[Any]:
        """Send one command whose reply is an array; see `value` for its items.

        Raises:
            CommandError: an error reply.
            ConnectionError: the reply is no array.
        """
        reply = self.execute(*parts)
        if not isinstance(reply, list):
            raise ConnectionError(f"{parts[0]} answered {type(reply).__name__} instead of an array")
        return reply

    def execute(self, *parts: Any) -> Any:
        """Send one command and return its reply, see `value`."""
        with self.session():
            self.send(encode(parts))
            return self.value()

    # --- inside a session -----------------------------------------------------------------------------------------

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise ConnectionError("not connected")
        return self._sock

    def send(self, buffers: Sequence[Any], replies: int = 1) -> None:
        """Write commands that `replies` replies will answer.

        Replies that arrive meanwhile are taken in, so that neither side waits for the other.
        """
        sock = self._socket()
        self.owed += replies
        if isinstance(sock, tls.SSLSocket):
            for buffer in buffers:
                sock.sendall(buffer)
            return
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT)
        for buffer in buffers:
            left = memoryview(buffer).cast("B")
            while left:
                events = poller.poll(self.address.timeout * 1000)
                if not events:
                    raise TimeoutError(f"{self.address} took no bytes for {self.address.timeout} s")
                if events[0][1] & ~select.POLLOUT:
                    self._fill()
                if events[0][1] & select.POLLOUT:
                    left = left[sock.send(left) :]

    def _fill(self) -> None:
        """Take in what has arrived, at least one byte; the buffer grows when nobody read its content meanwhile."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            kept = self._buffer[self._start : self._end]
            if 2 * len(kept) > _BUFFER_MAX:
                raise ConnectionError("the server sent more than the commands so far can have asked for")
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
            self._buffer.extend(bytes(max(0, 2 * len(kept) - len(self._buffer))))
        with memoryview(self._buffer) as view, view[self._end :] as room:
            got = self._socket().recv_into(room)
        if not got:
            raise ConnectionResetError(f"{self.address} closed the connection")
        self._end += got

    def line(self) -> bytes:
        """The next line of a reply, without its end."""
        looked = self._start
        while True:
            at = self._buffer.find(b"\r\n", looked, self._end)
            if at >= 0:
                found = bytes(self._buffer[self._start : at])
                self._start = at + 2
                return found
            looked = max(self._start, self._end - 1) - self._start
            self._fill()
            looked += self._start

    def read_into(self, target: Any) -> None:
        """Receive exactly as many bytes as `target`, a writable flat buffer of bytes, holds."""
        view = memoryview(target)
        ready = min(len(view), self._end - self._start)
        view[:ready] = self._buffer[self._start : self._start + ready]
        self._start += ready
        sock = self._socket()
        while ready < len(view):
            got = sock.recv_into(view[ready:])
            if not got:
                raise ConnectionResetError(f"{self.address} closed the connection")
            ready += got

    def end_bulk(self) -> None:
        """Consume the line end behind the bytes of a bulk."""
        tail = bytearray(2)
        self.read_into(tail)
        if tail != b"\r\n":
            raise ConnectionError("a bulk reply does not end where it said")

    def header(self, kind: bytes) -> int | None:
        """The length in a bulk (``$``) or array (``*``) header; None for a null.

        Raises:
            CommandError: an error reply stands there.
            ConnectionError: something else does.
        """
        line = self.line()
        if line[:1] == b"-":
            self.owed -= 1
            raise_reply(line[1:])
        if line == b"_":
            return None
        if line[:1] != kind:
            raise ConnectionError(f"expected a reply of kind {kind.decode()}, got {line[:32]!r}")
        size = int(line[1:])
        return None if size < 0 else size

    def done(self) -> None:
        """Say that a reply taken apart with `header` and `read_into` is consumed."""
        self.owed -= 1

    def has_line(self) -> bool:
        """Whether the next reply, or its first line, has arrived."""
        return self._buffer.find(b"\r\n", self._start, self._end) >= 0

    def refusal(self) -> CommandError | None:
        """The next reply if it is an error; None for any other."""
        reply = self._value()
        self.owed -= 1
        return reply if isinstance(reply, CommandError) else None

    def value(self) -> Any:
        """The next reply: bytes for bulk and simple strings, int, None, or a list of these.

        Raises:
            CommandError: an error reply (also one inside an array, after the whole array was read).
        """
        reply = self._value()
        self.owed -= 1
        if isinstance(reply, CommandError):
            raise reply
        if isinstance(reply, list):
            for item in reply:
                if isinstance(item, CommandError):
                    raise item
        return reply

    def _value(self) -> Any:
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            try:
                raise_reply(rest)
            except CommandError as error:
                return error
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$" and int(rest) >= 0:
            body = bytearray(int(rest))
            self.read_into(body)
            self.end_bulk()
            return bytes(body)
        if kind == b"*" and int(rest) >= 0:
            return [self._value() for _ in range(int(rest))]
        if kind in (b"$", b"*", b"_"):
            return None
        raise ConnectionError(f"unexpected reply {line[:32]!r}")

    def frame(self) -> bytes:
        """The next reply as raw bytes, whatever it is."""
        raw = self._frame()
        self.owed -= 1
        return raw

    def _frame(self) -> bytes:
        line = self.line()
        out = bytearray(line + b"\r\n")
        kind = line[:1]
        if kind == b"$" and int(line[1:]) >= 0:
            body = bytearray(int(line[1:]) + 2)
            self.read_into(body)
            out += body
        elif kind == b"*":
            for _ in range(int(line[1:])):
                out += self._frame()
        elif kind not in (b"+", b"-", b":", b"$", b"_"):
            raise ConnectionError(f"unexpected reply {line[:32]!r}")
        return bytes(out)
