"""The ordinary commands over a real server: inline commands, limits before and after login, push frames."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pion import testing
from tests.support.replies import Error, Incomplete, Simple, SocketClient, command, parse

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def server() -> Iterator[testing.Server]:
    with testing.server() as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[testing.Server]:
    with testing.server("--requirepass", PASSWORD) as running:
        yield running


def connect(server: testing.Server) -> SocketClient:
    return SocketClient((server.host, server.port))


def closed(client: SocketClient) -> bool:
    """True when the server ends the connection; what it still says is dropped."""
    try:
        while client.sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        client.pending = b""
    client.close()
    return True


def anonymous_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (b"PING\n", Simple(b"PONG")),
        (b"ping\r\n", Simple(b"PONG")),
        (b"\r\n\nPING\r\n", Simple(b"PONG")),
        (b"  ECHO   'lorem ipsum' \r\n", b"lorem ipsum"),
        (b'ECHO "a\\x41b"\r\n', b"aAb"),
        (b"*0\r\n*-1\r\nPING\r\n", Simple(b"PONG")),
    ],
)
def test_a7_inline(server: testing.Server, sent: bytes, reply: object) -> None:
    client = connect(server)
    client.sock.sendall(sent)
    assert client.read() == reply
    client.close()


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b'SET """k""" v\r\n', b"ERR Protocol error: unbalanced quotes in request"),
        (b"ECHO 'a\r\n", b"ERR Protocol error: unbalanced quotes in request"),
        (b"*1\n$4\r\nPING\r\n", b"ERR Protocol error: "),
        (b"*1\r\n#4\r\nPING\r\n", b"ERR Protocol error: expected '$', got '#'"),
        (b"*x\r\n", b"ERR Protocol error: invalid multibulk length"),
        (b"*2\r\n$3\r\nGET\r\n$-7\r\n", b"ERR Protocol error: invalid bulk length"),
    ],
)
def test_a7_protocol_errors_close(server: testing.Server, sent: bytes, text: bytes) -> None:
    client = connect(server)
    client.sock.sendall(sent)
    reply = client.read()
    assert isinstance(reply, Error)
    assert reply.text.startswith(text)
    assert closed(client)


@pytest.mark.parametrize("sent", [b"*1000000\r\n$500000000\r\n", b"*11\r\n", b"*2\r\n$4\r\nAUTH\r\n$16385\r\n"])
def test_a3_bounds_before_login(guarded: testing.Server, sent: bytes) -> None:
    client = connect(guarded)
    client.sock.sendall(sent)
    assert client.read().code == b"ERR"
    assert closed(client)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_a3_memory_follows_bytes_received(server: testing.Server) -> None:
    before = anonymous_bytes(server.pid)
    clients = [connect(server) for _ in range(20)]
    for client in clients:
        client.sock.sendall(b"*1048576\r\n" + b"$400000000\r\n" + b"x" * 1024)
    probe = connect(server)
    for _ in range(20):
        assert probe("PING") == Simple(b"PONG")
    assert anonymous_bytes(server.pid) - before < 32 << 20
    for client in [*clients, probe]:
        client.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_a4_replies_before_login_are_bounded(guarded: testing.Server) -> None:
    before = anonymous_bytes(guarded.pid)
    flood = b"*1\r\n$4\r\nPING\r\n" * 10_000
    clients = [connect(guarded) for _ in range(20)]
    cut = 0
    for client in clients:
        client.sock.settimeout(0.2)
        try:
            for _ in range(200):  # two million, unless the server ends it
                client.sock.sendall(flood)
        except OSError:
            cut += 1
    assert cut == 20, "every connection that does not read is stopped"
    assert anonymous_bytes(guarded.pid) - before < 50 << 20
    other = connect(guarded)
    assert other("AUTH", PASSWORD) == Simple(b"OK")
    assert other("PING") == Simple(b"PONG")
    for client in [*clients, other]:
        client.close()


def test_a10_no_array_is_taken_for_a_reply(server: testing.Server) -> None:
    client = connect(server)
    client("HELLO", 3)
    client.sock.sendall(command("SUBSCRIBE", "ch") + command("PING"))
    assert client.read().text.startswith(b"ERR unknown command 'SUBSCRIBE'")
    assert client.read() == Simple(b"PONG")
    client.close()


def test_pipeline_in_pieces(server: testing.Server) -> None:
    client = connect(server)
    batch = b"".join(command("SET", f"k{i}", "v" * i) + command("GET", f"k{i}") for i in range(200))
    for at in range(0, len(batch), 7):
        client.sock.sendall(batch[at : at + 7])
    for i in range(200):
        assert client.read() == Simple(b"OK")
        assert client.read() == b"v" * i
    client.close()


def test_quit_answers_and_closes(server: testing.Server) -> None:
    client = connect(server)
    client.sock.sendall(command("PING") + command("QUIT") + command("PING"))
    assert client.read() == Simple(b"PONG")
    assert client.read() == Simple(b"OK")
    with pytest.raises(EOFError):
        client.read()


def test_client_kill_another(server: testing.Server) -> None:
    one, other = connect(server), connect(server)
    ident = other("CLIENT", "ID")
    other("CLIENT", "SETNAME", "victim")
    lines = one("CLIENT", "LIST").decode().splitlines()
    assert any(f"id={ident} " in line and "name=victim" in line for line in lines)
    assert one("CLIENT", "KILL", "ID", ident) == 1
    assert closed(other)
    one.close()


def test_client_reply_off(server: testing.Server) -> None:
    client = connect(server)
    lines = [
        "CLIENT REPLY OFF",
        "SET quiet 1",
        "GET quiet",
        "CLIENT REPLY ON",
        "GET quiet",
        "CLIENT REPLY SKIP",
        "PING",
    ]
    client.sock.sendall(b"".join(command(*line.split()) for line in [*lines, "ECHO end"]))
    assert [client.read() for _ in range(3)] == [Simple(b"OK"), b"1", b"end"]
    client.close()


def test_pause_holds_every_client(server: testing.Server) -> None:
    one, other = connect(server), connect(server)
    assert one("CLIENT", "PAUSE", 60_000, "WRITE") == Simple(b"OK")
    other.sock.sendall(command("SET", "paused", "1"))
    assert one("GET", "paused") is None
    other.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        other.sock.recv(1)
    assert one("CLIENT", "UNPAUSE") == Simple(b"OK")
    other.sock.settimeout(20)
    assert other.read() == Simple(b"OK")
    assert one("GET", "paused") == b"1"
    one.close()
    other.close()


def test_expired_keys_go_by_themselves(server: testing.Server) -> None:
    client = connect(server)
    client("FLUSHALL")
    for i in range(100):
        client("SET", f"short{i}", "v", "PX", 20)
    deadline = time.monotonic() + 20
    while client("DBSIZE"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert b"expired_keys:" in client("INFO", "stats")
    client.close()


def test_survives_a_kill(tmp_path: object) -> None:
    with testing.server("--dir", f"{tmp_path}/data") as running:
        client = connect(running)
        client("SET", "s", "v", "EX", 1000)
        client("HSET", "h", "a", 1, "b", 2)
        client("HDEL", "h", "a")
        client("HSET", "gone", "f", "v")
        client("HDEL", "gone", "f")
        client("ZADD", "z", 1.5, "m", 2, "n")
        client("ZREM", "z", "n")
        client("INCR", "n")
        client("SELECT", 5)
        client("RENAME", "none", "x")
        client("SET", "five", "5")
        running.kill()
        client.close()
    with testing.server("--dir", f"{tmp_path}/data") as running:
        client = connect(running)
        assert client("GET", "s") == b"v"
        assert 900 < client("TTL", "s") <= 1000
        assert client("HGETALL", "h") == [b"b", b"2"]
        assert client("EXISTS", "gone") == 0
        assert client("ZRANGE", "z", 0, -1, "WITHSCORES") == [b"m", b"1.5"]
        assert client("GET", "n") == b"1"
        client("SELECT", 5)
        assert client("GET", "five") == b"5"
        assert client("BGSAVE") == Simple(b"Background saving started")
        assert client("BGREWRITEAOF") == Simple(b"Background append only file rewriting started")
        deadline = time.monotonic() + 20
        while b"rewrite_in_progress:0" not in client("INFO", "persistence"):
            assert time.monotonic() < deadline
        assert client("CONFIG", "SET", "appendfsync", "always") == Simple(b"OK")
        assert client("SET", "synced", "1") == Simple(b"OK")
        running.kill()
        client.close()
    with testing.server("--dir", f"{tmp_path}/data") as running:
        client = connect(running)
        assert client("HGETALL", "h") == [b"b", b"2"]
        assert client("SELECT", 5) == Simple(b"OK")
        assert client("GET", "synced") == b"1"
        client.close()


def test_unix_socket(tmp_path: object) -> None:
    path = f"{tmp_path}/s"
    with testing.server("--unixsocket", path), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.settimeout(20)
        sock.sendall(command("PING"))
        got = b""
        while True:
            try:
                reply, _ = parse(got)
                break
            except Incomplete:
                got += sock.recv(100)
        assert reply == Simple(b"PONG")


def test_shutdown_ends_the_process() -> None:
    with testing.server() as running:
        client = connect(running)
        client.sock.sendall(command("SHUTDOWN", "NOSAVE"))
        with pytest.raises(EOFError):
            client.read()
        assert running.process.wait(20) == 0


def test_sigterm_is_graceful() -> None:
    with testing.server() as running:
        client = connect(running)
        client("SET", "k", "v")
        assert running.stop() == 0
        client.close()


def test_a_second_server_on_the_port_is_refused(server: testing.Server) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pion.cli", "--memory-only", "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert f"FATAL: cannot bind port {server.port}" in run.stderr


def test_max_clients() -> None:
    with testing.server("--maxclients", "3") as running:
        clients = [connect(running) for _ in range(3)]
        for client in clients:
            assert client("PING") == Simple(b"PONG")
        extra = connect(running)
        assert extra.read() == Error(b"ERR max number of clients reached")
        assert closed(extra)
        assert b"rejected_connections:1\r\n" in clients[0]("INFO", "stats")
        assert clients[0]("CONFIG", "SET", "maxclients", 4) == Simple(b"OK")
        clients.append(connect(running))
        assert clients[3]("PING") == Simple(b"PONG")
        for client in clients:
            client.close()


def test_idle_connections_are_closed() -> None:
    with testing.server() as running:
        client, busy = connect(running), connect(running)
        assert busy("CONFIG", "SET", "timeout", 1) == Simple(b"OK")
        client.sock.settimeout(0.05)
        deadline = time.monotonic() + 20
        while True:
            assert busy("PING") == Simple(b"PONG")
            assert time.monotonic() < deadline
            try:
                if client.sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
        client.close()
        busy.close()


def test_maxmemory_holds_for_fast_commands_too(server: testing.Server) -> None:
    client = connect(server)
    client("FLUSHALL")
    assert client("CONFIG", "SET", "maxmemory", "8mb") == Simple(b"OK")
    deadline = time.monotonic() + 20
    count = 0
    while (reply := client("SET", f"big{count}", b"x" * (1 << 18))) == Simple(b"OK"):
        count += 1
        assert time.monotonic() < deadline
    assert reply == Error(b"OOM command not allowed when used memory > 'maxmemory'.")
    assert client("GET", "big0") == b"x" * (1 << 18)
    assert client("FLUSHALL") == Simple(b"OK")
    assert client("SET", "k", "v") == Simple(b"OK")
    assert client("CONFIG", "SET", "maxmemory", "0") == Simple(b"OK")
    client.close()
