"""Every fast command through its doors: C in the plane, the same C from Python, and the Python handler."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core.plane import PENDING, Plane
from pion.commands import Dispatcher, table
from pion.config import Options
from pion.limits import FORMATS
from pion.store.engine import Engine
from tests.differential import commands as make
from tests.support.memory import MemoryClient
from tests.support.replies import command

NOW = 1_700_000_000_000
BLOCKS = b"".join(i.to_bytes(8, "little") for i in range(100))
PROBE = b"".join(i.to_bytes(8, "little") for i in range(90, 110))

COUNTERS = ("hits", "misses", "expired", "used_bytes", "dirty")


class Door:
    """One way into a server of its own."""

    def __init__(self, fast: bool | None, proto: int) -> None:
        self.engine = Engine(None, memory_only=True, kvcache=True, ticker=False)
        self.engine.keyspace.set_clock(NOW)
        self.engine.register(b"ns", 32, FORMATS["fp16"], blocks=(16, BLOCKS))
        self.dispatcher = Dispatcher(self.engine, Options(kvcache=True))
        self.fast = fast
        if fast is None:
            self.client = MemoryClient(self.dispatcher)
            self.client.conn.proto = proto
            return
        self.plane = Plane(
            self.engine.keyspace, self._handle, self.dispatcher.stream_open, fast_table=self.dispatcher.fast_table()
        )
        self.dispatcher.plane = self.plane
        self.conn = self.plane.open_memory()
        self.dispatcher.connected(self.conn)
        self.conn.proto = proto
        self.conn.fast = fast
        self.slow_frames = 0

    def _handle(self, conn: Any, argv: list[Any]) -> Any:
        self.slow_frames += 1
        value = self.dispatcher(conn, argv)
        assert not inspect.iscoroutine(value)
        assert value is not PENDING
        return value

    def __call__(self, argv: list[bytes]) -> bytes:
        if self.fast is None:
            return self.client.raw(*argv)
        self.plane.feed(self.conn, command(*argv))
        return self.plane.take_output(self.conn)

    def calls(self) -> dict[str, int]:
        return {name: stats.calls for name, stats in self.dispatcher.server.command_stats().items() if stats.calls}

    def close(self) -> None:
        if self.fast is not None:
            self.plane.close()
        self.engine.close()


def doors(proto: int) -> list[Door]:
    return [Door(True, proto), Door(False, proto), Door(None, proto)]


def compare(proto: int, sequence: list[list[bytes]]) -> None:
    opened = doors(proto)
    try:
        for argv in sequence:
            got = [door(argv) for door in opened]
            assert got[0] == got[1] == got[2], f"{argv}: {got}"
        for name in COUNTERS:
            values = [getattr(door.engine.keyspace, name) for door in opened]
            assert values[0] == values[1] == values[2], f"{name} after {sequence}: {values}"
        calls = [door.calls() for door in opened]
        assert calls[0] == calls[1] == calls[2]
    finally:
        for door in opened:
            door.close()


fast_only = st.one_of(
    make.call("GET", make.key),
    make.call("SET", make.key, make.value),
    make.call("SET", make.key, make.value, make.expiry(b"NX", b"XX", b"GET", b"KEEPTTL")),
    make.call("DEL", make.many(make.key)),
    make.call("EXISTS", make.many(make.key)),
    make.call("INCR", make.key),
    make.call("MGET", make.many(make.key)),
    make.call("PING", make.words(b"hi")),
    make.call("ECHO", make.value),
    make.call("HSET", make.key, make.field, make.value),
    make.call("ZADD", make.key, make.score, make.member),
    make.call("PEXPIREAT", make.key, st.sampled_from([b"1", b"4102444800000"])),
    make.call("SELECT", st.sampled_from([b"0", b"1"])),
)


@pytest.mark.parametrize("proto", [2, 3])
@settings(max_examples=60, deadline=None)
@given(sequence=st.lists(fast_only, min_size=1, max_size=25))
def test_random_commands(proto: int, sequence: list[list[bytes]]) -> None:
    compare(proto, sequence)


@pytest.mark.parametrize("proto", [2, 3])
@pytest.mark.parametrize("argc", range(6))
def test_every_fast_command_with_few_and_many_arguments(proto: int, argc: int) -> None:
    names = [record.name.upper().encode() for record in table.fast_commands()]
    compare(proto, [[name, *[b"k1", b"1", b"", b"NX", b"x"][:argc]] for name in names])


@pytest.mark.parametrize("proto", [2, 3])
def test_membership(proto: int) -> None:
    name = b"KV.PREFIX.MEMBERSHIP"
    compare(
        proto,
        [
            [name, b"ns", b"20", PROBE],
            [name, b"ns", b"0", b""],
            [name, b"ns", b"19", PROBE],
            [name, b"ns", b"x", PROBE],
            [name, b"ns", b"-1", PROBE],
            [name, b"none", b"20", PROBE],
            [name, b"", b"20", PROBE],
            [name, b"n" * 201, b"20", PROBE],
            [name, b"ns", b"20"],
            [name.lower(), b"ns", b"20", PROBE, b"ignored"],
        ],
    )


def test_the_doors_are_the_doors() -> None:
    opened = doors(2)
    try:
        for door in opened:
            door([b"SET", b"k", b"v"])
            assert door([b"GET", b"k"]) == b"$1\r\nv\r\n"
        assert opened[0].slow_frames == 0
        assert opened[1].slow_frames == 2
        assert opened[0].plane.stats["fast_calls"][b"get"] == 1
        assert opened[1].plane.stats["fast_calls"][b"get"] == 0
    finally:
        for door in opened:
            door.close()


def test_membership_is_not_fast_when_c_cannot_check() -> None:
    for options, kvcache in ((Options(kvcache=True, ns_prefix="team|"), True), (Options(), False)):
        with Engine(None, memory_only=True, kvcache=kvcache, ticker=False) as engine:
            names = [name for _, name, _, _ in Dispatcher(engine, options).fast_table()]
            assert b"kv.prefix.membership" not in names
            assert b"get" in names
