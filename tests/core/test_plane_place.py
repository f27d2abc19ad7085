"""A large argument that waits for a place: nothing of it is read, everything else goes on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion._core.stream import Sink
from tests.support.plane import Driver, ask, driven_plane, frame, memory_plane, open_conn, receive

MIB = 1 << 20


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Driver]:
    with driven_plane(tmp_path) as driver:
        yield driver


def waiting(rig: Driver) -> None:
    """The next STORE of the newest connection waits for its place."""
    conn = rig.conn()
    rig.call(lambda: conn.data.update(wait=True))


def place(rig: Driver) -> Sink | None:
    """Give the one that waits its place."""

    def act() -> list[Sink | None]:
        conn, nbytes = rig.commands.unplaced.pop()
        sink = rig.commands.sink(conn, nbytes)
        rig.plane.place(conn, sink)
        return [sink]

    rig.until(lambda: rig.commands.unplaced)
    return rig.call(act)[0]


@pytest.mark.parametrize("tcp", [True, False])
@pytest.mark.parametrize("size", [300_000, 20 * MIB])
@pytest.mark.parametrize("where", ["file", "memory", "nowhere"])
def test_a_body_waits_with_the_peer(rig: Driver, tmp_path: Path, tcp: bool, size: int, where: str) -> None:
    body = os.urandom(size)
    with rig.connect(tcp=tcp) as sock, rig.connect(tcp=tcp) as other:
        conn = rig.conn(0)
        rig.call(lambda: conn.data.update(wait=True, memory=where == "memory", refuse=where == "nowhere"))
        message = frame("PING") + frame("STORE", body) + frame("PING")
        sock.setblocking(False)
        sent = sock.send(message[: 1 << 17])
        rig.until(lambda: rig.commands.unplaced)
        for _ in range(50):  # what was read with its header is all that is read, and others are served
            other.sendall(frame("PING"))
            assert receive(other, 7) == b"+PONG\r\n"
        rig.call(rig.plane.tick)
        assert rig.call(lambda: conn.input_bytes) < 2 * MIB
        assert rig.call(lambda: conn.pending)
        assert receive(sock, 7) == b"+PONG\r\n"
        place(rig)
        sock.setblocking(True)
        sock.sendall(message[sent:])
        if where == "memory":
            head = b"$%d\r\n" % size
            assert receive(sock, len(head) + size + 2) == head + body + b"\r\n"
        else:
            reply = b"*4\r\n:%d\r\n:%d\r\n:" % (size, size if where == "file" else 0)
            assert receive(sock, len(reply)) == reply
            rest = b""
            while not rest.endswith(b"+PONG\r\n"):
                rest += sock.recv(100)
        if where == "file":
            assert (tmp_path / f"stored{conn.id}").read_bytes() == body
        assert rig.commands.aborted == []


@pytest.mark.parametrize("end", ["peer", "reset", "close", "flush"])
def test_a_connection_that_ends_while_it_waits_aborts_what_it_is_given(rig: Driver, end: str) -> None:
    sock = rig.connect()
    conn = rig.conn()
    waiting(rig)
    sock.sendall(frame("STORE", b"x" * 400_000)[:100_000])
    rig.until(lambda: rig.commands.unplaced)
    if end == "peer":
        sock.close()
    elif end == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
    else:
        rig.call(lambda: rig.plane.close(conn, after_flush=end == "flush"))
        sock.close()
    sink = place(rig)
    rig.until(lambda: conn.closed)
    assert rig.commands.aborted == [sink]


def test_a_reply_from_a_file_leaves_while_the_next_body_waits(rig: Driver, tmp_path: Path) -> None:
    """The place may come while a mover has the connection."""
    content, body = rig.commands.content(30 * MIB), os.urandom(400_000)
    for _ in range(3):
        with rig.connect(buffers=65536) as sock:
            conn = rig.conn()
            waiting(rig)
            sock.sendall(frame("FILE", 0, len(content)) + frame("STORE", body)[:50_000])
            head = b"$%d\r\n" % len(content)
            assert receive(sock, len(head)) == head
            assert receive(sock, 10 * MIB) == content[: 10 * MIB]
            place(rig)
            assert receive(sock, 20 * MIB + 2) == content[10 * MIB :] + b"\r\n"
            sock.sendall(frame("STORE", body)[50_000:])
            assert receive(sock, 20) == b"*4\r\n:400000\r\n:400000"
            assert (tmp_path / f"stored{conn.id}").read_bytes() == body


def test_closed_while_a_mover_has_it_and_a_place_is_on_its_way(rig: Driver) -> None:
    content = rig.commands.content(30 * MIB)
    sock = rig.connect(buffers=65536)
    conn = rig.conn()
    waiting(rig)
    sock.sendall(frame("FILE", 0, len(content)) + frame("STORE", b"x" * 400_000)[:50_000])
    assert receive(sock, 1 * MIB)
    sink = place(rig)
    sock.close()
    rig.until(lambda: conn.closed)
    assert rig.commands.aborted == [sink]


def test_without_a_descriptor(tmp_path: Path) -> None:
    body = os.urandom(400_000)
    with memory_plane(tmp_path) as (plane, commands):
        conn = open_conn(plane)
        conn.data["wait"] = True
        message = frame("STORE", body) + frame("PING")
        plane.feed(conn, message[:300_000])
        assert plane.take_output(conn) == b""
        plane.place(conn, commands.sink(*commands.unplaced.pop()))
        plane.feed(conn, message[300_000:])
        assert plane.take_output(conn).startswith(b"*4\r\n:400000\r\n:400000\r\n")
        assert (tmp_path / f"stored{conn.id}").read_bytes() == body
        assert ask(plane, conn, "PING") == b"+PONG\r\n"
