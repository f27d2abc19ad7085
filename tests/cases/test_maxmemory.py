"""H6: --maxmemory holds at any moment, for any number of writers, and what it evicts stays away."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, ReplyError, frame

SIZE = 10_000
CAP = 2 << 20
WRITERS = 50
SECONDS = 3.0
POLICIES = ["noeviction", "allkeys-lru", "volatile-lru", "volatile-ttl"]
OOM = "OOM command not allowed when used memory > 'maxmemory'."


def held(conn: Raw) -> int:
    return int(conn.fields("INFO", "memory")["used_memory_dataset"])


@pytest.mark.parametrize("policy", POLICIES)
def test_h6_fifty_writers_stay_within_maxmemory(tmp_path: Path, policy: str) -> None:
    """Written in pipelines by the compiled path, by the Python path and as hashes, while INFO is watched."""
    with Process(tmp_path / "data", "-kvcache", "--maxmemory", str(CAP), "--maxmemory-policy", policy) as process:
        end = time.monotonic() + SECONDS
        refused = [0] * WRITERS

        def writer(number: int) -> None:
            value = b"%02d" % number * (SIZE // 2)
            with Raw(process.port) as conn:
                i = 0
                while time.monotonic() < end:
                    commands = []
                    for _ in range(4):
                        i += 1
                        plain = frame("SET", f"s{number}:{i}", value)
                        timed = frame("SET", f"t{number}:{i}", value, "EX", 1000 + i)
                        commands += [timed if policy.startswith("volatile") else plain, timed]
                        commands.append(
                            frame("HSET", f"h{number}", "field", value) if policy == "allkeys-lru" else timed
                        )
                    conn.send(b"".join(commands))
                    for _ in commands:
                        reply = conn.read()
                        if isinstance(reply, ReplyError):
                            assert str(reply) == OOM
                            refused[number] += 1

        threads = [threading.Thread(target=writer, args=(number,)) for number in range(WRITERS)]
        most = 0
        with Raw(process.port) as conn:
            for thread in threads:
                thread.start()
            while time.monotonic() < end:
                most = max(most, held(conn))
            for thread in threads:
                thread.join()
            most = max(most, held(conn))
            stats = conn.fields("INFO", "stats")
            evicted = int(stats["evicted_keys"])
            assert CAP // 2 < most <= CAP + SIZE + 500, most  # one value beyond, with its key
            assert (evicted > 100) == (policy != "noeviction")
            assert (sum(refused) > 0) == (policy == "noeviction")
            keys = set(conn.ok("KEYS", "*"))
        process.restart()
        with Raw(process.port) as conn:
            now = set(conn.ok("KEYS", "*"))
            assert now <= keys, "an evicted key came back"
            assert len(now) >= len(keys) - 1  # one that the start itself evicted: the value beyond
            assert held(conn) <= CAP or policy == "noeviction"


def test_h6_a_start_with_more_than_maxmemory(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "-kvcache") as process, Raw(process.port) as conn:
        for i in range(300):
            conn.ok("SET", f"k{i}", b"x" * SIZE)
        conn.ok("SET", "timed", b"x" * SIZE, "EX", 1000)
    for flags in (["--maxmemory", "1mb"], ["--maxmemory", "1mb", "--maxmemory-policy", "volatile-ttl"]):
        with Process(tmp_path / "data", "-kvcache", *flags) as process, Raw(process.port) as conn:
            assert conn.ok("DBSIZE") == (301 if len(flags) == 2 else 300)
            assert str(conn.call("SET", "k", "v")) == OOM  # the first command after the start
            assert str(conn.call("HSET", "h", "f", "v")) == OOM
            assert conn.fields("INFO", "memory")["maxmemory_refusing_writes"] == "1"
            assert conn.ok("GET", "k7") == b"x" * SIZE
    flags = ["--maxmemory", "1mb", "--maxmemory-policy", "allkeys-lru"]
    with Process(tmp_path / "data", "-kvcache", *flags) as process, Raw(process.port) as conn:
        assert held(conn) <= 1 << 20
        left = conn.ok("DBSIZE")
        assert 90 <= left <= 105
        process.restart()
        with Raw(process.port) as again:
            assert again.ok("DBSIZE") == left


def test_h6_maxmemory_and_its_policy_change_while_running(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "-kvcache") as process, Raw(process.port) as conn:
        for i in range(200):
            conn.ok("SET", f"k{i}", b"x" * SIZE)
        conn.ok("CONFIG", "SET", "maxmemory", "1mb")
        assert str(conn.call("SET", "k", "v")) == OOM
        refused = str(conn.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"))
        assert refused == (
            "ERR CONFIG SET failed (possibly related to argument 'maxmemory-policy') - argument(s) must be one of the "
            "following: noeviction, allkeys-lru, volatile-lru, volatile-ttl"
        )
        assert conn.ok("DBSIZE") == 200
        conn.ok("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert conn.ok("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"allkeys-lru"]
        assert held(conn) <= 1 << 20
        assert conn.fields("INFO", "memory")["maxmemory_policy"] == "allkeys-lru"
        assert conn.ok("SET", "k", b"y" * SIZE) == "OK"
        assert conn.ok("GET", "k") == b"y" * SIZE
        assert int(conn.fields("INFO", "stats")["evicted_keys"]) >= 90
