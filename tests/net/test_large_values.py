"""Large values under appendfsync always: their file is written while they are received."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.plane import frame
from tests.support.process import Process

MIB = 1 << 20


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data", "--appendfsync", "always") as running:
        yield running


def connect(process: Process) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", process.port))
    sock.settimeout(30)
    return sock


def read(sock: socket.socket, size: int) -> bytes:
    out = bytearray()
    while len(out) < size:
        got = sock.recv(size - len(out))
        assert got, f"closed after {bytes(out[:100])!r}"
        out += got
    return bytes(out)


def value_of(sock: socket.socket, key: str, value: bytes) -> None:
    sock.sendall(frame("GET", key))
    want = b"$%d\r\n%s\r\n" % (len(value), value)
    assert read(sock, len(want)) == want


def files(process: Process) -> list[Path]:
    return sorted((process.directory / "blob").iterdir())


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("size", [MIB, MIB + 1, 3 * MIB - 1, 3 * MIB, 5 * MIB + 77])
def test_a_value_that_comes_in_pieces_survives_a_kill(process: Process, size: int) -> None:
    value = os.urandom(size)
    message = frame("SET", "k", value)
    with connect(process) as sock:
        at = 0
        for piece in (10, 40_000, 1, MIB, 300_000, MIB - 1, 2, 5 * MIB):
            sock.sendall(message[at : at + piece])
            at += piece
            time.sleep(0.02)  # the connection goes home in between
        assert read(sock, 5) == b"+OK\r\n"
    process.kill()
    process.start()
    with connect(process) as sock:
        value_of(sock, "k", value)


def test_values_and_replies_in_one_go(process: Process) -> None:
    """Replies of commands before it leave while a value comes; whoever sends without reading is not stuck."""
    one, two = os.urandom(6 * MIB), os.urandom(4 * MIB + 3)
    with connect(process) as sock:
        sock.sendall(frame("SET", "one", one))
        assert read(sock, 5) == b"+OK\r\n"
        sock.sendall(frame("GET", "one") * 4 + frame("SET", "two", two) + frame("GET", "two") + frame("PING"))
        big = b"$%d\r\n%s\r\n" % (len(one), one)
        assert read(sock, 4 * len(big) + 5) == 4 * big + b"+OK\r\n"
        assert read(sock, len(two) + 12) == b"$%d\r\n%s\r\n" % (len(two), two)
        assert read(sock, 7) == b"+PONG\r\n"


def test_half_a_value_leaves_nothing(process: Process) -> None:
    value = os.urandom(4 * MIB)
    with connect(process) as other:
        other.sendall(frame("SET", "k", "old"))
        assert read(other, 5) == b"+OK\r\n"
        for part in (200, MIB // 2, 3 * MIB + 5):
            with connect(process) as sock:
                sock.sendall(frame("SET", "k", value)[:part])
                if part > MIB:
                    until(lambda: files(process))
        until(lambda: not files(process))
        value_of(other, "k", b"old")
        other.sendall(frame("SET", "k", value))
        assert read(other, 5) == b"+OK\r\n"
        value_of(other, "k", value)


def test_a_kill_in_the_middle_leaves_nothing(process: Process) -> None:
    with connect(process) as sock:
        sock.sendall(frame("SET", "k", "old"))
        assert read(sock, 5) == b"+OK\r\n"
        sock.sendall(frame("SET", "k", os.urandom(4 * MIB))[: 3 * MIB])
        until(lambda: files(process))
        process.kill()
    process.start()
    assert files(process) == []
    with connect(process) as sock:
        value_of(sock, "k", b"old")


def test_a_file_that_cannot_be_written_is_an_error(process: Process) -> None:
    value = os.urandom(3 * MIB)
    with connect(process) as sock:
        sock.sendall(frame("SET", "k", "old"))
        assert read(sock, 5) == b"+OK\r\n"
        shutil.rmtree(process.directory / "blob")
        sock.sendall(frame("SET", "k", value) + frame("PING"))
        reply = b""
        while not reply.endswith(b"+PONG\r\n"):
            reply += read(sock, 1)
        assert reply.startswith(b"-"), reply
        value_of(sock, "k", b"old")


def test_announced_values_take_no_room_from_others(process: Process) -> None:
    """Only what has come counts as half received."""
    waiting = [connect(process) for _ in range(12)]
    try:
        for sock in waiting:
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870912\r\n0123456789")
        with connect(process) as sock:
            sock.sendall(frame("SET", "k", os.urandom(12 * MIB)))
            assert read(sock, 5) == b"+OK\r\n"
    finally:
        for sock in waiting:
            sock.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits the file size of a running process")
@pytest.mark.parametrize("policy", ["everysec", "always"])
def test_a_full_disk_is_named(tmp_path: Path, policy: str) -> None:
    """The value before stays, the connection goes on, and there is room again without a restart."""
    with Process(tmp_path / "data", "--appendfsync", policy) as process, connect(process) as sock:
        values = {"a": os.urandom(MIB), "b": os.urandom(3 * MIB)}
        for key, value in values.items():
            sock.sendall(frame("SET", key, value))
            assert read(sock, 5) == b"+OK\r\n"
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64 << 10, hard))
        for key, value in values.items():
            sock.sendall(frame("SET", key, bytes(len(value))))
            want = b"-ERR SET failed: File too large\r\n"
            assert read(sock, len(want)) == want
            value_of(sock, key, value)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        sock.sendall(frame("SET", "a", bytes(MIB)))
        assert read(sock, 5) == b"+OK\r\n"
        process.restart()
        with connect(process) as again:
            value_of(again, "a", bytes(MIB))
            value_of(again, "b", values["b"])
