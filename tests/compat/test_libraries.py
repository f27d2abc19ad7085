"""Client libraries as their users run them: connect, a few commands of each kind, binary safety, errors, big values."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import pytest
import trio

from pion.testing import Server
from tests.support.peers import package

from .conftest import PASSWORD

pytestmark = pytest.mark.compat
BINARY = bytes(range(256)) * 5
BIG = os.urandom(3 << 20)


def strings(value: object) -> set[bytes]:
    """Members as bytes, whatever the client decodes to."""
    assert isinstance(value, (list, set, tuple))
    return {item if isinstance(item, bytes) else str(item).encode() for item in value}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("hiredis", [False, True], ids=["python-parser", "hiredis-parser"])
def test_a8_redis_py(server: Server, protocol: int, hiredis: bool, caplog: pytest.LogCaptureFixture) -> None:
    redis = package("redis")
    if hiredis:
        package("hiredis")
    parsers = __import__("redis._parsers", fromlist=["x"])
    plain = parsers._RESP2Parser if protocol == 2 else parsers._RESP3Parser
    kind = parsers._HiredisParser if hiredis else plain
    pool = redis.ConnectionPool(host=server.host, port=server.port, protocol=protocol, parser_class=kind)
    with caplog.at_level(logging.WARNING), redis.Redis(connection_pool=pool) as client:
        client.flushall()
        assert client.ping()
        assert client.set("k", BINARY)
        assert client.get("k") == BINARY
        assert client.get("absent") is None
        assert client.set("big", BIG)
        assert client.get("big") == BIG
        assert client.hset("h", mapping={"a": 1, "b": b"\xff\x00"}) == 2
        assert client.hgetall("h") == {b"a": b"1", b"b": b"\xff\x00"}
        assert client.zadd("z", {"x": 1.5, "y": 2}, nx=True) == 2
        assert [(m, float(s)) for m, s in client.zrange("z", 0, -1, withscores=True)] == [(b"x", 1.5), (b"y", 2.0)]
        assert client.incr("n", 5) == 5
        assert client.expire("n", 100)
        assert 0 < client.ttl("n") <= 100
        assert strings(list(client.scan_iter(match="*", count=2))) == {b"k", b"big", b"h", b"z", b"n"}
        with client.pipeline(transaction=False) as pipe:
            assert pipe.set("p", 1).incr("p").get("p").execute() == [True, 2, b"2"]
        assert client.info("server")["redis_version"].startswith("7.")
        assert client.config_get("maxmemory")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.get("h")
        assert client.client_id() > 0
        assert client.execute_command("KV.PREFIX.REGISTER", "lib", 8, "fp16") in (b"OK", "OK")
        assert client.execute_command("KV.PREFIX.LOOKUP", "lib") in (b"HIT", "HIT")
        assert client.execute_command("PION.STATS")
    pool.disconnect()
    assert [record.message for record in caplog.records] == []


@pytest.mark.parametrize("protocol", [2, 3])
def test_a8_redis_py_asyncio(server: Server, protocol: int) -> None:
    package("redis")
    from redis import asyncio as aredis

    async def use() -> None:
        client = aredis.Redis(host=server.host, port=server.port, protocol=protocol)
        async with client:
            assert await client.set("ak", BINARY)
            assert await client.get("ak") == BINARY
            answers = await asyncio.gather(*(client.incr("ai") for _ in range(50)))
            assert sorted(answers) == list(range(answers and min(answers), min(answers) + 50))
            await client.delete("ai")

    asyncio.run(use())


@pytest.mark.parametrize("protocol", [2, 3])
def test_a8_redis_py_passwords(guarded: Server, protocol: int) -> None:
    redis = package("redis")
    with redis.Redis(host=guarded.host, port=guarded.port, protocol=protocol, password=PASSWORD) as client:
        assert client.set("k", "v")
    for wrong in ("no", None):
        client = redis.Redis(host=guarded.host, port=guarded.port, protocol=protocol, password=wrong)
        with pytest.raises(redis.AuthenticationError), client:
            client.get("k")


def test_a8_redis_py_over_a_unix_socket(tmp_path: Any) -> None:
    redis = package("redis")
    from pion import testing

    path = tmp_path / "pion.sock"
    with testing.server("--unixsocket", str(path)), redis.Redis(unix_socket_path=str(path)) as client:
        assert client.set("k", BIG)
        assert client.get("k") == BIG


async def test_coredis_on_trio(server: Server) -> None:
    coredis = package("coredis")
    with trio.fail_after(30):
        client = coredis.Redis(host=server.host, port=server.port, decode_responses=False)
        async with client:
            assert await client.set("ck", BINARY)
            assert await client.get("ck") == BINARY
            assert await client.hset("ch", {"a": "1"}) == 1
            assert await client.hgetall("ch") == {b"a": b"1"}

            async def bump() -> None:
                await client.incr("ci")

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(bump)
            assert await client.get("ci") == b"20"
            await client.delete(["ci"])


def test_valkey_glide(server: Server) -> None:
    glide = package("glide_sync")
    config = glide.GlideClientConfiguration([glide.NodeAddress(server.host, server.port)])
    client = glide.GlideClient.create(config)
    try:
        assert client.set("gk", BINARY) in (b"OK", "OK")
        assert client.get("gk") == BINARY
        assert client.hset("gh", {"a": "1"}) == 1
        assert client.hgetall("gh") == {b"a": b"1"}
        assert client.custom_command(["KV.PREFIX.LOOKUP", "nobody"]) in (b"MISS", "MISS")
    finally:
        client.close()


def test_hiredis_reads_every_reply_kind(server: Server) -> None:
    import socket

    hiredis = package("hiredis")
    reader = hiredis.Reader()
    requests = [
        (("HELLO", "3"), dict),
        (("SET", "hk", "v"), bytes),
        (("GET", "hk"), bytes),
        (("GET", "none"), type(None)),
        (("HSET", "hh", "a", "1"), int),
        (("HGETALL", "hh"), dict),
        (("ZADD", "hz", "1.5", "m"), int),
        (("ZSCORE", "hz", "m"), float),
        (("PION.STATS",), dict),
        (("NOSUCH",), hiredis.ReplyError),
    ]
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        for request, kind in requests:
            sock.sendall(hiredis.pack_command(request))
            while (reply := reader.gets()) is False:
                reader.feed(sock.recv(65536))
            assert isinstance(reply, kind), (request, reply)
