"""A3, A4 and A12 against the real server: bounded memory, no deadlock."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, frame

MIB = 1 << 20


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data", "--requirepass", "s3cret") as process:
        yield process


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data") as running:
        yield running


def _until_closed(sock: socket.socket) -> bytes:
    """Everything the server still says before it closes."""
    said = bytearray()
    try:
        while piece := sock.recv(1 << 16):
            said += piece
    except ConnectionResetError:
        pass
    return bytes(said)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"*1000000\r\n$500000000\r\n",
        b"*11\r\n$4\r\nPING\r\n",
        b"*2\r\n$4\r\nPING\r\n$16385\r\n",
        b"*2\r\n$3\r\nGET\r\n$500000000\r\n",
    ],
)
def test_a3_before_auth_ten_arguments_of_16_kib(guarded: Process, request_bytes: bytes) -> None:
    with Raw(guarded.port) as other:
        before = guarded.anonymous()
        with Raw(guarded.port) as conn:
            conn.send(request_bytes)
            assert _until_closed(conn.sock).startswith(b"-ERR Protocol error: unauthenticated ")
        assert guarded.anonymous() - before < 4 * MIB
        assert other.call("AUTH", "s3cret") == "OK"


def test_a3_after_auth_memory_follows_the_bytes_received(guarded: Process) -> None:
    conns = []
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Raw(guarded.port))
        assert first.call("AUTH", "s3cret") == "OK"
        before = guarded.anonymous()
        for _ in range(40):
            conn = stack.enter_context(Raw(guarded.port))
            assert conn.call("AUTH", "s3cret") == "OK"
            conn.send(b"*1048576\r\n$3\r\nSET\r\n$400000000\r\n" + bytes(1024))
            conns.append(conn)
        assert first.call("PING") == "PONG"
        assert guarded.anonymous() - before < 40 * MIB
    # more than the limits of Redis are refused at once
    with Raw(guarded.port) as conn:
        assert conn.call("AUTH", "s3cret") == "OK"
        conn.send(b"*1048577\r\n")
        assert _until_closed(conn.sock) == b"-ERR Protocol error: invalid multibulk length\r\n"
    with Raw(guarded.port) as conn:
        assert conn.call("AUTH", "s3cret") == "OK"
        conn.send(b"*2\r\n$3\r\nGET\r\n$536870913\r\n")
        assert _until_closed(conn.sock) == b"-ERR Protocol error: invalid bulk length\r\n"


def test_a3_one_command_has_a_budget(guarded: Process) -> None:
    """Many arguments, each within its limit, may not add up without end."""
    with Raw(guarded.port, timeout=60) as conn:
        assert conn.call("AUTH", "s3cret") == "OK"
        before = guarded.anonymous()
        conn.send(b"*1048576\r\n$4\r\nMSET\r\n")
        part = b"$1048576\r\n" + bytes(1 << 20) + b"\r\n"
        sent = 0
        try:
            for _ in range(1200):
                conn.send(part)
                sent += len(part)
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent <= 1100 * MIB
    with Raw(guarded.port) as other:
        assert other.call("AUTH", "s3cret") == "OK"
    deadline = time.monotonic() + 20
    while guarded.anonymous() - before > 64 * MIB:
        assert time.monotonic() < deadline, "the memory of the refused command was not given back"


@pytest.mark.parametrize("clients", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_a4_unread_replies_before_auth(guarded: Process, clients: int) -> None:
    burst = b"PING\r\n" * 100_000  # each is answered with NOAUTH, far more than the kernel's own buffers hold
    with Raw(guarded.port) as other, contextlib.ExitStack() as stack:
        assert other.call("AUTH", "s3cret") == "OK"
        before = guarded.anonymous()
        waiting = {}
        for _ in range(clients):
            conn = stack.enter_context(Raw(guarded.port, buffers=4096))
            conn.sock.setblocking(False)
            waiting[conn.sock] = memoryview(burst)
        deadline = time.monotonic() + 60 + 10 * clients
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} connections were never closed"
            _, writable, _ = select.select([], list(waiting), [], 1.0)
            for sock in writable:
                try:
                    waiting[sock] = waiting[sock][sock.send(waiting[sock]) :] or memoryview(burst)
                except (ConnectionResetError, BrokenPipeError):
                    del waiting[sock]
            assert other.call("PING") == "PONG"
            assert guarded.anonymous() - before < 50 * MIB


@pytest.mark.parametrize("buffers", [16 * 1024, None])
def test_a12_large_payloads_both_ways(process: Process, buffers: int | None) -> None:
    dim, layers_rows = 1024, 16_384  # 32 MiB of fp16
    rows = bytes(range(256)) * (2 * dim * layers_rows // 256)
    with Raw(process.port, timeout=60) as setup:
        setup.ok("V.CREATE", "a12", dim, "VQUANT", "fp16")
        setup.ok("V.STOREBATCH", "a12", 0, 0, layers_rows, rows, "FMT", "F16")
    before = process.anonymous()
    with Raw(process.port, timeout=60, buffers=buffers) as conn, Raw(process.port) as other:
        slowest = 0.0
        done = threading.Event()

        def ping() -> None:
            nonlocal slowest
            while not done.is_set():
                started = time.monotonic()
                assert other.call("PING") == "PONG"
                slowest = max(slowest, time.monotonic() - started)

        watcher = threading.Thread(target=ping)
        watcher.start()
        try:
            # nothing is read before everything is written
            conn.send(frame("V.FETCH", "a12", 0, "RANGE", 0, layers_rows, "FMT", "NATIVE"))
            for start in (0, layers_rows):
                conn.send(frame("V.STOREBATCH", "a12", 1, start, layers_rows, rows, "FMT", "F16"))
            conn.send(frame("PING"))
            assert conn.read() == rows
            assert [conn.read() for _ in range(3)] == ["OK", "OK", "PONG"]
        finally:
            done.set()
            watcher.join()
        assert slowest < 1.0
        assert process.anonymous() - before < 40 * MIB
        assert other.ok("V.FETCH", "a12", 1, "RANGE", 0, layers_rows, "FMT", "NATIVE") == rows


def test_a12_sixty_four_stores_before_the_first_read(process: Process) -> None:
    rows = bytes(range(256)) * (4096 * 512 * 2 // 256)  # 4 MiB
    with Raw(process.port, timeout=60) as conn:
        conn.ok("KV.PREFIX.REGISTER", "deep", 512, "fp16")
        for layer in range(64):
            conn.send(frame("V.STOREBATCH", "deep_pk", layer, 0, 4096, rows, "FMT", "F16"))
        assert [conn.read() for _ in range(64)] == ["OK"] * 64
        assert conn.ok("V.FETCH", "deep_pk", 63, "RANGE", 0, 4096, "FMT", "NATIVE") == rows
