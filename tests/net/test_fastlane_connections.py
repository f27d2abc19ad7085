"""The binary lane of a server process: logins, limits, connections."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
import trio

from pion import limits, testing
from pion.config import Options
from pion.net.server import Server
from tests.support.attention import normal
from tests.support.binary import (
    AUTH,
    ERROR,
    FUSED,
    MISS,
    NOTHING,
    OK,
    PING,
    Binary,
    ask,
    ask_ping,
    figures,
    frame,
    fused_body,
    lane,
    one_key,
    until,
)
from tests.support.raw import Closed, Raw

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def server() -> Iterator[testing.Server]:
    with testing.server("--kvcache") as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[testing.Server]:
    with testing.server("--kvcache", "--requirepass", PASSWORD) as running:
        yield running


# --- logins ----------------------------------------------------------------------------------------------------------


def test_before_the_login_everything_is_an_error(guarded: testing.Server) -> None:
    port = lane(guarded, PASSWORD)
    with Raw(guarded.port) as conn, Binary(port) as binary:
        conn.ok("AUTH", PASSWORD)
        one_key(conn)
        body = fused_body("s", 0, normal(2, 1, 1, 8), NOTHING, NOTHING, [0])
        for command, sent in ((PING, b""), (FUSED, body), (FUSED, b""), (0x10, b""), (AUTH, b"wrong"), (AUTH, b"")):
            assert binary.call(command, sent) == (ERROR, b"")
        before = figures(conn)
        assert binary.call(AUTH, PASSWORD.encode()) == (OK, b"")
        assert binary.call(PING) == (OK, b"")
        assert binary.call(FUSED, body) == (OK, np.ones(8, "<f4").tobytes())
        assert binary.call(AUTH, b"wrong") == (ERROR, b"")
        assert binary.call(PING) == (OK, b""), "who is logged in stays so"
        after = figures(conn)
        assert after["queries"] - before["queries"] == 1
        assert "WRONGPASS" in "".join(conn.fields("INFO", "errorstats"))


def test_a3_before_the_login_only_little_is_received(guarded: testing.Server) -> None:
    """Memory follows bytes received; and before the login these are few."""
    port = lane(guarded, PASSWORD)
    with Binary(port) as binary:
        assert binary.call(FUSED, bytes(limits.FASTLANE_PREAUTH_BODY)) == (ERROR, b"")
        binary.send(struct.pack("<HBI", 0xCA5E, FUSED, limits.FASTLANE_PREAUTH_BODY + 1))
        assert binary.read() == (ERROR, b"")
        assert binary.ended()
    with Binary(port) as binary:
        binary.call(AUTH, PASSWORD.encode())
        assert binary.call(FUSED, bytes(limits.FASTLANE_PREAUTH_BODY + 1)) == (MISS, b"")


def test_a4_unread_answers_before_the_login(guarded: testing.Server) -> None:
    port = lane(guarded, PASSWORD)
    with Raw(guarded.port) as conn:
        conn.ok("AUTH", PASSWORD)
        before = guarded.anonymous_bytes()
        pings = frame(PING) * 20_000
        open_ = [Binary(port) for _ in range(20)]
        for binary in open_:
            binary.sock.setblocking(False)
            sent, end = 0, time.monotonic() + 0.3
            while time.monotonic() < end:
                try:
                    sent += binary.sock.send(pings[sent % 7 :])  # whole frames, whatever the kernel took
                except BlockingIOError:
                    time.sleep(0.01)
        assert conn.call("PING") == "PONG"
        with Binary(port) as other:
            assert other.call(AUTH, PASSWORD.encode()) == (OK, b"")
        held = [int(each) for each in re.findall(rb"laddr=\S+:%d .* qbuf=(\d+)" % port, conn.ok("CLIENT", "LIST"))]
        assert max(held, default=0) <= limits.FASTLANE_PREAUTH_BODY + 7
        assert guarded.anonymous_bytes() - before < 10 << 20
        for binary in open_:
            binary.sock.close()


def test_the_login_is_that_of_resp(guarded: testing.Server) -> None:
    port = lane(guarded, PASSWORD)
    with Raw(guarded.port) as conn, Binary(port) as old:
        conn.ok("AUTH", PASSWORD)
        old.call(AUTH, PASSWORD.encode())
        conn.ok("CONFIG", "SET", "requirepass", "another")
        try:
            with Binary(port) as new:
                assert new.call(AUTH, PASSWORD.encode()) == (ERROR, b"")
                assert new.call(AUTH, b"another") == (OK, b"")
            assert old.call(PING) == (OK, b"")
            conn.ok("CONFIG", "SET", "requirepass", "")
            with Binary(port) as open_:
                assert open_.call(PING) == (OK, b"")
                assert open_.call(AUTH, b"another") == (MISS, b"")
        finally:
            conn.ok("CONFIG", "SET", "requirepass", PASSWORD)


# --- what is not the lane's protocol, and too much of it -------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"P", b"*1\r\n$4\r\nPING\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xca\x5e\xff",
     frame(PING)[:1] + b"\xcb", bytes(7)],
)  # fmt: skip
def test_another_protocol_ends_the_connection(server: testing.Server, garbage: bytes) -> None:
    with Raw(server.port) as conn:
        before = figures(conn)["garbage"]
        for data in (garbage, frame(PING) + garbage):
            with Binary(lane(server)) as binary:
                binary.send(data)
                if data is not garbage:
                    assert binary.read() == (OK, b"")
                with pytest.raises((Closed, ConnectionResetError)):
                    binary.read()
        assert figures(conn)["garbage"] == before + 2


def test_random_bytes(server: testing.Server) -> None:
    rng = np.random.default_rng(7)
    with Raw(server.port) as conn:
        one_key(conn, "after")
    for _ in range(150):
        body = rng.bytes(int(rng.integers(0, 60)))
        data = b"".join(frame(int(rng.choice([PING, AUTH, FUSED, 0x10])), body) for _ in range(3))
        cut = bytearray(data)
        for _ in range(int(rng.integers(0, 4))):
            cut[int(rng.integers(0, len(cut)))] = int(rng.integers(0, 256))
        with Binary(lane(server)) as binary:
            binary.send(bytes(cut))
            binary.sock.shutdown(socket.SHUT_WR)
            assert binary.ended()
    assert ask(lane(server), "after").tolist() == [[[1.0] * 8]]
    assert "Traceback" not in server.output


def test_a3_memory_follows_what_is_received(server: testing.Server) -> None:
    """40 connections announce 200 MiB each and send a little."""
    before = server.anonymous_bytes()
    open_ = []
    for _ in range(40):
        binary = Binary(lane(server))
        open_.append(binary)
        binary.send(struct.pack("<HBI", 0xCA5E, FUSED, 200 << 20) + bytes(1000))
    assert ask_ping(server)
    assert server.anonymous_bytes() - before < 20 << 20
    for binary in open_:
        binary.sock.close()
    with Binary(lane(server)) as binary:
        binary.send(struct.pack("<HBI", 0xCA5E, FUSED, limits.FASTLANE_BODY + 1))
        assert binary.read() == (ERROR, b"")
        assert binary.ended()


def test_a_refused_client_that_goes_on_sending_can_read_why(server: testing.Server) -> None:
    with Binary(lane(server)) as binary:
        binary.send(struct.pack("<HBI", 0xCA5E, FUSED, limits.FASTLANE_BODY + 1) + bytes(1 << 20))
        assert binary.read() == (ERROR, b"")


# --- connections -----------------------------------------------------------------------------------------------------


def test_a4_clients_that_read_nothing_stall_only_themselves(server: testing.Server) -> None:
    """Answers pile up in the kernel's buffers and then no request is read."""
    rows = 30_000
    q = np.ones((1, rows, 8), np.float32)
    sent = frame(FUSED, fused_body("slow", 0, q, NOTHING, NOTHING, [0]))
    with Raw(server.port) as conn:
        one_key(conn, "slow", 3.0)
        before = server.anonymous_bytes()
        slow = []
        for _ in range(10):
            binary = Binary(lane(server))
            binary.sock.setblocking(False)
            slow.append(binary)
            total = 0
            stop = time.monotonic() + 0.3
            while total < 40 << 20 and time.monotonic() < stop:
                try:
                    total += binary.sock.send(sent[total % len(sent) :])
                except BlockingIOError:
                    time.sleep(0.01)
        assert (ask(lane(server), "slow") == 3.0).all()
        assert conn.call("PING") == "PONG"
        assert server.anonymous_bytes() - before < 60 << 20
        for binary in slow:
            binary.sock.close()
        until(lambda: conn.fields("INFO", "clients")["binary_clients"] == "0")


def test_many_at_a_time(server: testing.Server) -> None:
    with Raw(server.port) as conn:
        one_key(conn, "many", 5.0)
        port = lane(server)
        body = frame(FUSED, fused_body("many", 0, normal(3, 1, 1, 8), NOTHING, NOTHING, [0]))
        clients = [Binary(port) for _ in range(300)]
        assert int(conn.fields("INFO", "clients")["binary_clients"]) <= 300
        for _ in range(3):
            for client in clients:
                client.send(body)
            for client in clients:
                assert client.read() == (OK, np.full(8, 5, "<f4").tobytes())
        told = conn.fields("INFO", "clients")
        assert (told["binary_clients"], told["connected_clients"]) == ("300", "301")
        for client in clients:
            client.sock.close()
        until(lambda: conn.fields("INFO", "clients")["binary_clients"] == "0")
        until(lambda: conn.fields("INFO", "clients")["connected_clients"] == "1")


def test_both_ports_count_for_maxclients() -> None:
    with testing.server("--kvcache", "--maxclients", "3") as server, Raw(server.port) as conn:
        port = int(conn.fields("INFO", "server")["binary_port"])
        with Binary(port) as first, Binary(port) as second:
            assert first.call(PING) == second.call(PING) == (OK, b"")
            with Binary(port) as third:
                assert third.read() == (ERROR, b"")
                assert third.ended()
            with Raw(server.port) as fourth:
                assert "max number of clients" in str(fourth.read())
            assert conn.fields("INFO", "stats")["rejected_connections"] == "2"
        until(lambda: conn.fields("INFO", "clients")["connected_clients"] == "1")
        with Binary(port) as again:
            assert again.call(PING) == (OK, b"")


def test_client_list_and_kill(server: testing.Server) -> None:
    def clients() -> list[dict[str, str]]:
        lines = conn.ok("CLIENT", "LIST").decode().splitlines()
        found = [dict(pair.split("=", 1) for pair in line.split()) for line in lines]
        return [each for each in found if each["laddr"].endswith(f":{port}")]

    with Raw(server.port) as conn:
        port = lane(server)
        until(lambda: not clients())
        with Binary(port) as binary, Binary(port) as other:
            assert (binary.call(PING), other.call(0x10)) == ((OK, b""), (MISS, b""))
            binary.send(frame(FUSED, bytes(100))[:50])
            until(lambda: sum(int(each["qbuf"]) for each in clients()) == 50)
            named = {each["cmd"] for each in clients()}
            assert named == {"ping", "binary|0x10"}
            address = "{}:{}".format(*binary.sock.getsockname())
            assert conn.ok("CLIENT", "KILL", "ADDR", address) == 1
            assert binary.ended()
            assert other.call(PING) == (OK, b"")
            assert conn.ok("CLIENT", "KILL", "LADDR", f"127.0.0.1:{port}") == 1
            assert other.ended()
        until(lambda: not clients())


async def test_who_does_not_take_an_answer_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """After limits.SEND_TIMEOUT without progress."""
    monkeypatch.setattr(limits, "SEND_TIMEOUT", 0.3)
    server = Server(Options(port=0, memory_only=True, kvcache=True))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.run)
        with trio.fail_after(30):

            def ask() -> Binary:
                with Raw(port) as conn:
                    one_key(conn)
                binary = Binary(server.state.binary.port, buffers=8192)
                sent = frame(FUSED, fused_body("s", 0, np.ones((1, 100_000, 8), np.float32), NOTHING, NOTHING, [0]))
                binary.send(3 * sent)  # three times 3.2 MB come back, which is more than the kernel's buffers hold
                return binary

            binary = await trio.to_thread.run_sync(ask)
            figures = server.state.binary
            await trio.to_thread.run_sync(until, lambda: figures.queries >= 2 and not figures.clients)
            assert server.plane.connected == 0
            binary.sock.close()
            server.stopping.set()


def test_idle_connections_are_closed_when_asked_for() -> None:
    with testing.server("--kvcache") as server, Raw(server.port) as conn:
        port = int(conn.fields("INFO", "server")["binary_port"])
        with Binary(port) as idle, Binary(port) as half:
            idle.call(PING)
            half.send(frame(PING)[:3])
            conn.ok("CONFIG", "SET", "timeout", 1)
            until(lambda: conn.fields("INFO", "clients")["binary_clients"] == "0")
            assert idle.ended()
            assert half.ended()


def test_a_paused_server_answers_afterwards(server: testing.Server) -> None:
    with Raw(server.port) as conn, Binary(lane(server)) as binary:
        one_key(conn, "pause", 4.0)
        conn.ok("CLIENT", "PAUSE", 300, "ALL")
        began = time.monotonic()
        assert (binary.fused("pause", 0, normal(2, 1, 1, 8), NOTHING, NOTHING, [0]) == 4.0).all()
        assert time.monotonic() - began > 0.2
