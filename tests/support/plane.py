"""A plane with a small command set of its own, in memory or behind sockets with a thread that drives it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pion._core import plane as core
from pion._core.keyspace import Keyspace
from pion._core.plane import PENDING, Conn, Plane
from pion._core.resp import OK, Err
from pion._core.stream import Extents, FdRef, Sink

FAST = [
    (core.FAST_PING, b"PING", -1, 0),
    (core.FAST_ECHO, b"ECHO", 2, 0),
    (core.FAST_GET, b"GET", 2, 0),
    (core.FAST_SET, b"SET", -3, core.FLAG_WRITE | core.FLAG_DENYOOM),
    (core.FAST_DEL, b"DEL", -2, core.FLAG_WRITE),
    (core.FAST_EXISTS, b"EXISTS", -2, 0),
    (core.FAST_INCR, b"INCR", 2, core.FLAG_WRITE | core.FLAG_DENYOOM),
    (core.FAST_MGET, b"MGET", -2, 0),
    (core.FAST_MEMBERSHIP, b"KV.PREFIX.MEMBERSHIP", 4, 0),
]


def frame(*parts: bytes | str | int) -> bytes:
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in raw)


class Commands:
    """FILE offset n | ZEROS n | STORE blob name | LATER | FAIL | WRONG | ARGS ... | PYSET k v | QUIT | PROTO n."""

    def __init__(self, directory: Path, keyspace: Keyspace) -> None:
        self.directory = directory
        self.keyspace = keyspace
        self.plane: Plane
        self.file: FdRef | None = None
        self.recording = True
        self.calls: list[list[Any]] = []
        self.later: list[Conn] = []
        self.unplaced: list[tuple[Conn, int]] = []
        self.aborted: list[Sink] = []
        self.closed: list[Conn] = []

    def content(self, size: int, seed: int = 1) -> bytes:
        """Fills the file that FILE serves; returns its bytes."""
        block = os.urandom(1 << 16)
        data = (block * (size // len(block) + 1))[:size]
        fd = os.open(self.directory / f"content{seed}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(fd, data, 0)
        self.file = FdRef(fd)
        return data

    def open_stream(self, conn: Conn, argv: list[bytes], nbytes: int) -> Any:
        self.calls.append([b"open", *argv, nbytes])
        if conn.data.get("wait"):
            self.unplaced.append((conn, nbytes))
            return PENDING
        return self.sink(conn, nbytes)

    def sink(self, conn: Conn, nbytes: int) -> Sink | None:
        """Where the body of a STORE goes."""
        if conn.data.get("memory"):
            return None
        if conn.data.get("refuse"):
            sink = Sink(None, 0, nbytes)
        else:
            path = self.directory / f"stored{conn.id}"
            sink = Sink(FdRef(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)), 0, nbytes)
        sink.on_abort = self.aborted.append
        return sink

    def __call__(self, conn: Conn, argv: list[Any]) -> Any:
        name = argv[0].upper()
        if self.recording:
            self.calls.append(argv)
        if name == b"FILE":
            return Extents([(self.file, int(argv[1]), int(argv[2]))])
        if name == b"ZEROS":
            return [b"x", Extents([(None, 0, int(argv[1]))]), 7]
        if name == b"STORE":
            body = argv[1]
            return body if isinstance(body, bytes) else [body.received, body.written, body.crc, body.error]
        if name == b"LATER":
            self.later.append(conn)
            return PENDING
        if name == b"FAIL":
            raise ValueError("on purpose")
        if name == b"WRONG":
            return object()
        if name == b"PYSET":
            self.keyspace.set(conn.db, argv[1], argv[2])
            return OK
        if name == b"QUIT":
            self.plane.close(conn)
            return OK
        if name == b"DROPME":
            self.plane.close(conn, after_flush=False)
            return OK
        if name == b"CLOSEOTHERS":
            for other in self.plane.connections:
                if other is not conn:
                    self.plane.close(other)
            time.sleep(0.01)  # longer than a batch may take
            return OK
        if name == b"BIG":
            return b"b" * int(argv[1])
        if name == b"PROTO":
            conn.proto = int(argv[1])
            return OK
        if name == b"AUTH":
            conn.authenticated = True
            return OK
        if name in (b"GET", b"SET", b"PING", b"INCR", b"DEL", b"EXISTS", b"MGET", b"ECHO"):
            return Err(b"ERR slow " + name)
        return argv


@contextlib.contextmanager
def memory_plane(directory: Path, **options: Any) -> Iterator[tuple[Plane, Commands]]:
    """A plane nobody drives: for connections without a descriptor."""
    keyspace = options.pop("keyspace", None) or Keyspace(seed=1)
    commands = Commands(directory, keyspace)
    options.setdefault("fast_table", FAST)
    options.setdefault("streams", [(b"STORE", 1)])
    plane = Plane(keyspace, commands, commands.open_stream, **options)
    plane.on_close = commands.closed.append
    commands.plane = plane
    try:
        yield plane, commands
    finally:
        plane.close()


class Driver:
    """Drives a plane in a thread of its own, as the server's task does."""

    def __init__(self, plane: Plane, commands: Commands) -> None:
        self.plane = plane
        self.commands = commands
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            ticked = time.monotonic()
            while not self._stop:
                if not self.plane.batch():
                    ready, _, _ = select.select([self.plane.fd, self._wake_r], [], [], 0.05)
                    if self._wake_r in ready:
                        os.read(self._wake_r, 100)
                while not self._jobs.empty():
                    job, out, done = self._jobs.get()
                    try:
                        out.append(job())
                    finally:
                        done.set()
                if time.monotonic() - ticked > 0.1:
                    ticked = time.monotonic()
                    self.plane.tick()
        except BaseException as error:
            self.error = error
            raise

    def call(self, job: Callable[[], Any]) -> Any:
        """Runs `job` in the plane's thread."""
        out: list[Any] = []
        done = threading.Event()
        self._jobs.put((job, out, done))
        os.write(self._wake_w, b"x")
        assert done.wait(30)
        assert out, "the job failed in the plane's thread"
        return out[0]

    def connect(
        self, *, tcp: bool = True, authenticated: bool = True, buffers: int | None = None, timeout: float = 20.0
    ) -> socket.socket:
        """A client socket whose other end the plane serves."""
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                if buffers:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
                ours = socket.socket()
                if buffers:
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
                ours.connect(listener.getsockname())
                theirs, _ = listener.accept()
        else:
            ours, theirs = socket.socketpair()
        ours.settimeout(timeout)

        def add() -> Conn:
            conn = self.plane.add(theirs.detach(), unix=not tcp, peer="peer", local="here")
            conn.authenticated = authenticated
            return conn

        self.call(add)
        return ours

    def conn(self, index: int = -1) -> Conn:
        return sorted(self.call(lambda: self.plane.connections), key=lambda conn: conn.id)[index]

    def until(self, condition: Callable[[], Any], timeout: float = 20.0) -> None:
        """Polls a condition in the plane's thread."""
        end = time.monotonic() + timeout
        while not self.call(condition):
            assert time.monotonic() < end, "the condition did not come true"

    def stop(self) -> None:
        self._stop = True
        os.write(self._wake_w, b"x")
        self._thread.join()
        os.close(self._wake_r)
        os.close(self._wake_w)
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def driven_plane(directory: Path, **options: Any) -> Iterator[Driver]:
    """A plane with a thread that drives it."""
    with memory_plane(directory, **options) as (plane, commands):
        driver = Driver(plane, commands)
        try:
            yield driver
        finally:
            driver.stop()


def receive(sock: socket.socket, n: int) -> bytes:
    """Exactly n bytes."""
    out = bytearray(n)
    view = memoryview(out)
    got = 0
    while got < n:
        k = sock.recv_into(view[got:])
        if k == 0:
            raise EOFError(f"end after {got} of {n} bytes: {bytes(out[:got])[-200:]!r}")
        got += k
    return bytes(out)


def receive_all(sock: socket.socket) -> bytes:
    """Everything until the end of the connection."""
    parts = []
    while data := sock.recv(1 << 20):
        parts.append(data)
    return b"".join(parts)


def open_conn(plane: Plane) -> Conn:
    """A connection without a descriptor, logged in."""
    conn = plane.open_memory()
    conn.authenticated = True
    return conn


def ask(plane: Plane, conn: Conn, *parts: bytes | str | int) -> bytes:
    """What one command is answered."""
    plane.feed(conn, frame(*parts))
    return plane.take_output(conn)
