"""The dispatcher: login gate, memory gate, pause, CLIENT REPLY, errors and accounting."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import trio

from pion.commands import table
from pion.commands.dispatch import Dispatcher
from pion.errors import CommandError
from tests.support.memory import MemoryClient, MemoryConn
from tests.support.replies import Error, Simple

NOAUTH = Error(b"NOAUTH Authentication required.")
OK = Simple(b"OK")


def test_nothing_before_login(guarded: Dispatcher) -> None:
    client = MemoryClient(guarded)
    for argv in (("GET", "k"), ("PING",), ("NOSUCH",), ("CLIENT", "NOSUCH"), ("COMMAND",), ("GET",), ("INFO",)):
        assert client(*argv) == NOAUTH
    assert client("HELLO", 3).code == b"NOAUTH"
    assert client("AUTH", "wrong") == Error(b"WRONGPASS invalid username-password pair or user is disabled.")
    assert client("GET", "k") == NOAUTH
    assert client("AUTH", "secret") == OK
    assert client("GET", "k") is None
    assert client("RESET") == Simple(b"RESET")
    assert client("GET", "k") == NOAUTH


def test_a8_hello_with_auth(guarded: Dispatcher) -> None:
    client = MemoryClient(guarded)
    assert client("HELLO", 3, "AUTH", "user", "wrong").code == b"WRONGPASS"
    assert client.conn.proto == 2
    assert client("HELLO", 4).code == b"NOPROTO"
    reply = client("HELLO", 3, "AUTH", "default", "secret", "SETNAME", "me")
    assert reply.items[reply.items.index(b"proto") + 1] == 3
    assert client("CLIENT", "GETNAME") == b"me"


def test_quit_needs_no_login(guarded: Dispatcher) -> None:
    client = MemoryClient(guarded)
    assert client("QUIT") == OK
    assert client.conn.closing


def test_changed_password(client: MemoryClient) -> None:
    assert client("CONFIG", "SET", "requirepass", "new") == OK
    assert client("PING") == Simple(b"PONG")  # who is in stays in, as in Redis
    other = MemoryClient(client.dispatcher)
    assert other("PING") == NOAUTH
    assert other("AUTH", "new") == OK
    assert other("CONFIG", "GET", "requirepass") == [b"requirepass", b"(hidden)"]
    assert other("CONFIG", "SET", "requirepass", "") == OK
    assert MemoryClient(client.dispatcher)("PING") == Simple(b"PONG")


def test_out_of_memory(client: MemoryClient) -> None:
    assert client("SET", "k", "x" * 1000) == OK
    assert client("CONFIG", "SET", "maxmemory", "1") == OK
    refused = Error(b"OOM command not allowed when used memory > 'maxmemory'.")
    for argv in (
        ("SET", "k", "v"),
        ("INCR", "n"),
        ("HSET", "h", "f", "v"),
        ("ZADD", "z", 1, "m"),
        ("APPEND", "k", "v"),
    ):
        assert client(*argv) == refused
    assert client("GET", "k") == b"x" * 1000
    assert b"maxmemory_refusing_writes:1" in client("INFO", "memory")
    assert client("DEL", "k") == 1
    assert client("SET", "k", "v") == OK  # below again, without waiting for a timer
    assert client("CONFIG", "SET", "maxmemory", "0") == OK


def test_broken_log_refuses_writes(client: MemoryClient, tmp_path: Any) -> None:
    keyspace = client.dispatcher.engine.keyspace
    target = tmp_path / "log"
    target.touch()
    fd = os.open(target, os.O_RDONLY)  # every write to it fails
    try:
        keyspace.attach_log(fd, 0, 1)
        assert client("SET", "k", "v") == OK
        with pytest.raises(OSError):
            keyspace.flush_log()
        assert client("SET", "k", "w").code == b"MISCONF"
        assert client("HSET", "h", "f", "v").code == b"MISCONF"
        assert client("GET", "k") == b"v"
        assert b"aof_last_write_status:err" in client("INFO", "persistence")
        keyspace.detach_log()
    finally:
        os.close(fd)


def test_internal_error_is_logged_and_answered(client: MemoryClient, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_ctx: Any, _argv: list[bytes]) -> Any:
        raise ZeroDivisionError("secret detail")

    table.command("TEST.BROKEN", 1, "readonly", 0, 0, 0, "test", "0.1.0", "Fails.", "O(1)")(broken)
    try:
        with caplog.at_level(logging.ERROR):
            assert client("TEST.BROKEN") == Error(b"ERR internal error")
        assert "secret detail" in caplog.text
        assert client("PING") == Simple(b"PONG")
    finally:
        del table.COMMANDS[b"test.broken"]


def test_coroutines_end_with_a_reply(client: MemoryClient) -> None:
    async def refused(_ctx: Any, _argv: list[bytes]) -> Any:
        raise CommandError("ERR no")

    table.command("TEST.ASYNC", 1, "readonly", 0, 0, 0, "test", "0.1.0", "Refuses.", "O(1)")(refused)
    try:
        assert client("TEST.ASYNC") == Error(b"ERR no")
        assert client.dispatcher.server.commands["test.async"].failed == 1
    finally:
        del table.COMMANDS[b"test.async"]


def test_client_reply(client: MemoryClient) -> None:
    assert client.raw("CLIENT", "REPLY", "SKIP") == b""
    assert client.raw("SET", "k", "1") == b""
    assert client.raw("GET", "k") == b"$1\r\n1\r\n"
    assert client.raw("CLIENT", "REPLY", "OFF") == b""
    assert not client.conn.fast
    assert client.raw("NOSUCH") == b""
    assert client.raw("CLIENT", "REPLY", "SKIP") == b""
    assert client.raw("SET", "k", "2") == b""
    assert client.raw("CLIENT", "REPLY", "ON") == b"+OK\r\n"
    assert client.conn.fast
    assert client.raw("GET", "k") == b"$1\r\n2\r\n"


async def test_client_pause(dispatcher: Dispatcher) -> None:
    dispatcher.server.new_event = trio.Event
    held, other = MemoryConn(id=1), MemoryConn(id=2)
    for conn in (held, other):
        dispatcher.connected(conn)
    assert dispatcher(other, [b"CLIENT", b"PAUSE", b"100000", b"WRITE"]).value == b"OK"
    assert dispatcher(held, [b"GET", b"k"]) is None
    waiting = dispatcher(held, [b"SET", b"k", b"v"])
    assert not hasattr(waiting, "value")
    done: list[Any] = []

    async def run() -> None:
        done.append(await waiting)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        assert done == []
        assert dispatcher(other, [b"CLIENT", b"UNPAUSE"]).value == b"OK"
    assert done[0].value == b"OK"
    assert dispatcher(held, [b"GET", b"k"]) == b"v"


async def test_pause_ends_by_itself(dispatcher: Dispatcher) -> None:
    dispatcher.server.new_event = trio.Event
    conn = MemoryConn()
    dispatcher.connected(conn)
    dispatcher(conn, [b"CLIENT", b"PAUSE", b"1"])
    deadline = trio.current_time() + 10
    while dispatcher.server.holds(write=True):
        assert trio.current_time() < deadline
        await trio.sleep(0.001)
    assert dispatcher(conn, [b"PING"]).value == b"PONG"


def test_accounting(client: MemoryClient) -> None:
    client("SET", "k", "v")
    client("GET", "k")
    client("INCR", "k")
    client("GET")
    client("NOSUCH")
    stats = client.dispatcher.server.commands
    assert (stats["get"].calls, stats["get"].rejected, stats["incr"].failed) == (1, 1, 1)
    lines = client("INFO", "commandstats", "errorstats").decode().split("\r\n")
    assert any(line.startswith("cmdstat_get:calls=1,usec=") for line in lines)
    assert "errorstat_ERR:count=3" in lines
    client("CONFIG", "RESETSTAT")
    assert "errorstat_ERR:count=3" not in client("INFO", "errorstats").decode()


def test_slowlog_hides_passwords_and_shortens(guarded: Dispatcher) -> None:
    client = MemoryClient(guarded)
    client("AUTH", "secret")
    client("CONFIG", "SET", "slowlog-log-slower-than", 0)
    client("AUTH", "secret")
    client("HELLO", 2, "AUTH", "default", "secret")
    client("CONFIG", "SET", "requirepass", "secret")
    client("SET", "k", "x" * 1000)
    client("MSET", *[str(i) for i in range(100)])
    client("CONFIG", "SET", "slowlog-log-slower-than", -1)
    entries = client("SLOWLOG", "GET", -1)
    assert all(b"secret" not in b" ".join(entry[3]) for entry in entries)
    shown = {entry[3][0]: entry[3] for entry in entries}
    assert shown[b"SET"][2] == b"x" * 128 + b"... (872 more bytes)"
    assert len(shown[b"MSET"]) == 32
    assert shown[b"MSET"][31] == b"... (70 more arguments)"
    assert client("SLOWLOG", "LEN") == len(entries)
    client("CONFIG", "SET", "slowlog-max-len", 1)
    assert client("SLOWLOG", "LEN") == 1
