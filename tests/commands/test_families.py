"""What the golden and differential tests cannot pin down: chance, walks of large values, saving, shutdown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pion.commands.dispatch import Dispatcher
from pion.commands.scan import ScanCache
from pion.commands.state import memory_bytes
from pion.config import Options
from pion.store.engine import Engine
from tests.support.memory import MemoryClient
from tests.support.replies import Error, Simple


@pytest.mark.parametrize(("add", "scan"), [("HSET", "HSCAN"), ("ZADD", "ZSCAN")])
def test_walk_returns_what_is_always_there(client: MemoryClient, add: str, scan: str) -> None:
    names = [f"stays{i}" for i in range(1500)] + [f"goes{i}" for i in range(500)]
    for i, name in enumerate(names):
        client(add, "big", *((name, i) if add == "HSET" else (i, name)))
    seen: set[bytes] = set()
    cursor, calls = b"0", 0
    while True:
        cursor, found = client(scan, "big", cursor, "COUNT", 100)
        seen.update(found[::2])
        calls += 1
        if cursor == b"0":
            break
        client("HDEL" if add == "HSET" else "ZREM", "big", f"goes{calls}")
        client(add, "big", *((f"new{calls}", 1) if add == "HSET" else (1, f"new{calls}")))
        client("DEL", "other")
        if calls == 5:  # the walk goes on without what was kept for it
            client.dispatcher.server.scans = ScanCache()
    assert calls > 10
    assert {f"stays{i}".encode() for i in range(1500)} <= seen


def test_walk_with_pattern(client: MemoryClient) -> None:
    client("HSET", "h", "apple", 1, "pear", 2, "apricot", 3)
    assert sorted(client("HSCAN", "h", 0, "MATCH", "ap*")[1][::2]) == [b"apple", b"apricot"]


def test_random(client: MemoryClient) -> None:
    client("HSET", "h", *(str(i) for i in range(40)))
    names = {str(i).encode() for i in range(0, 40, 2)}
    assert client("HRANDFIELD", "h") in names
    assert set(client("HRANDFIELD", "h", 5)) <= names
    assert len(set(client("HRANDFIELD", "h", 100))) == 20
    assert len(client("HRANDFIELD", "h", -100)) == 100
    assert client("RANDOMKEY") == b"h"


def test_values_keep_their_size(client: MemoryClient) -> None:
    keyspace = client.dispatcher.engine.keyspace
    before = keyspace.used_bytes
    client("HSET", "h", "f", "x" * 10_000)
    client("ZADD", "z", 1, "m" * 10_000)
    assert keyspace.used_bytes - before > 20_000
    assert client("MEMORY", "USAGE", "h") > 10_000
    client("HSET", "h", "f", "y")
    assert client("MEMORY", "USAGE", "h") < 1000
    client("HSET", "h", "g", "1")
    client("HDEL", "h", "f")
    client("ZREM", "z", "m" * 10_000)
    client("HDEL", "h", "g")
    assert keyspace.used_bytes == before


def test_info_memory_is_real(client: MemoryClient) -> None:
    text = client("INFO", "memory").decode()
    fields = dict(re.findall(r"(\w+):(\S+)\r\n", text))
    anonymous, resident = memory_bytes()
    assert abs(int(fields["used_memory"]) - anonymous) < 64 << 20
    assert abs(int(fields["used_memory_rss"]) - resident) < 64 << 20
    assert int(fields["used_memory_peak"]) >= int(fields["used_memory"])
    number, unit = re.fullmatch(r"([\d.]+)([BKMG])", fields["used_memory_human"]).groups()
    shown = float(number) * 1024 ** "BKMG".index(unit)
    assert abs(shown / int(fields["used_memory"]) - 1) < 0.01


def test_info_sections(client: MemoryClient) -> None:
    text = client("INFO", "server", "CPU", "nosuch").decode()
    assert re.findall(r"# (\w+)", text) == ["Server", "CPU"]
    assert f"process_id:{os.getpid()}\r\n" in text
    assert re.search(r"pion_version:\d+\.\d+\.\d+\+", text)
    assert client("INFO", "nosuch") == b""


def test_info_keyspace(client: MemoryClient) -> None:
    client("SELECT", 3)
    client("SET", "a", 1)
    client("SET", "b", 1, "EX", 100)
    assert client("INFO", "keyspace").startswith(b"# Keyspace\r\ndb3:keys=2,expires=1,")
    client("GET", "a")
    client("GET", "none")
    stats = client("INFO", "stats")
    assert b"keyspace_hits:1\r\n" in stats
    assert b"keyspace_misses:1\r\n" in stats


def test_save(tmp_path: Path) -> None:
    with Engine(tmp_path / "data", ticker=False) as engine:
        client = MemoryClient(Dispatcher(engine, Options()))
        client("SET", "k", "v")
        assert b"rdb_changes_since_last_save:1\r\n" in client("INFO", "persistence")
        before = client("LASTSAVE")
        assert client("SAVE") == Simple(b"OK")
        assert client("LASTSAVE") >= before
        assert b"rdb_changes_since_last_save:0\r\n" in client("INFO", "persistence")
        assert client("BGSAVE") == Error(b"ERR BGSAVE needs a running server")
        assert client("BGREWRITEAOF") == Simple(b"Background append only file rewriting started")
        assert b"aof_rewrite_in_progress:1\r\n" in client("INFO", "persistence")
        assert client("BGREWRITEAOF").code == b"ERR"


def test_nothing_to_save_in_memory(client: MemoryClient) -> None:
    for line in ("SAVE", "BGSAVE", "BGREWRITEAOF"):
        assert client(line) == Error(b"ERR the ordinary keyspace is not kept on disk (--memory-only or --no-wal)")


def test_failed_save_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_fd: int) -> None:
        raise OSError(5, os.strerror(5))

    engine = Engine(tmp_path / "data", ticker=False)
    client = MemoryClient(Dispatcher(engine, Options()))
    client("SET", "k", "v")
    with monkeypatch.context() as patched:
        patched.setattr("pion.store.keyspace.store.sync_file", broken)
        assert client("SAVE").text.startswith(b"ERR the log could not be flushed")
    assert b"rdb_last_bgsave_status:err\r\n" in client("INFO", "persistence")
    assert client("SAVE").text.startswith(b"ERR the log could not be flushed")  # what was lost stays lost
    engine.close()


def test_shutdown(dispatcher: Dispatcher) -> None:
    client = MemoryClient(dispatcher)
    assert client("SHUTDOWN").code == b"ERR"  # nothing to shut down here
    asked: list[bool] = []
    dispatcher.server.shut_down = asked.append
    assert client.raw("SHUTDOWN") == b""
    assert client.raw("SHUTDOWN", "NOSAVE") == b""
    assert asked == [True, False]


def test_client_list_and_kill(dispatcher: Dispatcher) -> None:
    client = MemoryClient(dispatcher)
    client("CLIENT", "SETNAME", "worker")
    line = client("CLIENT", "LIST").decode()
    fields = dict(field.split("=", 1) for field in line.split())
    assert (fields["id"], fields["name"], fields["user"], fields["resp"]) == ("1", "worker", "default", "2")
    assert client("CLIENT", "LIST", "ID", 7) == b""
    assert client("CLIENT", "KILL", "ID", client.conn.id) == 0  # SKIPME
    assert client("CLIENT", "KILL", "ID", client.conn.id, "SKIPME", "no") == 1
    assert client.conn.closing


def test_copy(client: MemoryClient) -> None:
    client("SET", "s", "v", "EX", 100)
    assert client("COPY", "s", "t") == 1
    assert client("TTL", "t") == 100
    client("HSET", "h", "f", "v")
    client("ZADD", "z", 1, "m")
    assert client("COPY", "h", "t") == 0
    assert client("COPY", "h", "t", "REPLACE") == 1
    assert client("COPY", "z", "z", "DB", 1) == 1
    client("HSET", "t", "g", "w")
    client("SELECT", 1)
    client("ZADD", "z", 2, "n")
    assert client("ZRANGE", "z", 0, -1) == [b"m", b"n"]
    client("SELECT", 0)
    assert client("HGETALL", "h") == [b"f", b"v"]
    assert client("ZRANGE", "z", 0, -1) == [b"m"]


@pytest.mark.parametrize("line", [("POST", "/", "HTTP/1.1"), ("Host:", "127.0.0.1:1974")])
def test_lines_a_browser_sends_end_the_connection(client: MemoryClient, line: tuple[str, ...]) -> None:
    assert client.raw(*line) == b""
    assert client.conn.closing


@pytest.mark.parametrize(
    "path", ["pion.wal.2", "pion.snapshot.1", "kv/trash/x", "kv", "blob/b", "quarantine/q", "./x", "a" * 251]
)
def test_a_copy_does_not_take_the_names_of_the_data_directory(client: MemoryClient, path: str) -> None:
    reply = client("KV.PREFIX.SAVE", path)
    assert isinstance(reply, Error)
    assert reply.text.startswith(b"ERR KV.PREFIX.SAVE: ")
