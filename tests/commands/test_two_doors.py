"""Every fast command through both doors: in C beside the parser, and through the dispatcher in Python.

The commands are generated from the table: a command that becomes fast is tested without a change here. Two servers
get the same frames; one has its fast path switched off. Replies must be equal byte for byte, in RESP2 and RESP3, and
so must the counters afterwards.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from pion.commands import table
from tests.support.door import Door
from tests.support.raw import frame

KEYS = [b"k%d" % i for i in range(6)] + [b"", b"missing", b"\xff\x00\r\n", b"ns", b"prefix"]
VALUES = [b"", b"0", b"-1", b"41", b"9223372036854775807", b"01", b" 1", b"1.5", b"text", b"x" * 300, b"y" * 70_000]
HASHES = struct.pack("<4Q", 1, 2, 3, 1 << 63)
WORDS = [b"NX", b"XX", b"GET", b"EX", b"100", b"-5", b"KEEPTTL", b"4", b"2", HASHES, HASHES[:16], HASHES[:7]]
# Arguments that chance would hardly put together.
EXAMPLES: dict[str, list[tuple[bytes, ...]]] = {
    "kv.prefix.membership": [
        *((key, b"4", HASHES) for key in KEYS[:3]),
        *((key, b"2", HASHES[16:]) for key in KEYS[:3]),
        *((key, b"0", b"") for key in KEYS[:3]),
    ],
}


def _counters(door: Door) -> dict[str, Any]:
    ks = door.engine.keyspace
    return {
        "keyspace": (ks.hits, ks.misses, ks.dirty),
        "sizes": [ks.size(db) for db in range(16)],
        "used": ks.used_bytes,
        "commands": door.plane.stats["commands_processed"],
        "values": sorted((key, ks.type(0, key)) for key in ks.keys(0)),
    }


def _setup(rng: random.Random) -> bytes:
    """A command that puts keys into other states: types, times to live, databases, prefixes with a block table."""
    key = rng.choice(KEYS)
    return rng.choice(
        [
            frame("HSET", key, "field", "value"),
            frame("ZADD", key, 1, "member"),
            frame("SET", key, rng.choice(VALUES), "EX", 1000),
            frame("EXPIRE", key, 1000),
            frame("PERSIST", key),
            frame("RENAME", key, rng.choice(KEYS)),
            frame("SELECT", rng.choice([0, 0, 3])),
            frame("KV.PREFIX.REGISTER", key, 4, "fp16", "BLOCKS", 16, 4, HASHES),
            frame("KV.PREFIX.DROP", key),
        ]
    )


def _generated(rng: random.Random, record: table.Command) -> bytes:
    """A frame of the command: right and wrong numbers of arguments, its keys from a small pool, any case."""
    least = max(abs(record.arity) - 1, 1)
    argc = rng.choice([least, least, least, least + 1, least + 2, least + 3, least - 1, 3])
    positions = record.key_positions(argc + 1)
    parts = [rng.choice(KEYS) if i in positions else rng.choice(KEYS + VALUES + WORDS) for i in range(1, argc + 1)]
    if record.name in EXAMPLES and rng.random() < 0.3:
        parts = list(rng.choice(EXAMPLES[record.name]))
    name = record.name.encode()
    return frame(rng.choice([name, name.upper(), name.title()]), *parts)


@pytest.fixture(params=[2, 3])
def doors(request: pytest.FixtureRequest) -> Iterator[tuple[Door, Door]]:
    with Door(request.param, fast=True) as fast, Door(request.param, fast=False) as slow:
        yield fast, slow


@pytest.mark.parametrize("record", table.fast_commands(), ids=lambda record: record.name)
def test_both_doors_answer_the_same(doors: tuple[Door, Door], record: table.Command) -> None:
    fast, slow = doors
    rng = random.Random(record.name)
    for _ in range(400):
        request = _setup(rng) if rng.random() < 0.4 else _generated(rng, record)
        left, right = fast(request), slow(request)
        assert left == right, request[:300]
    assert _counters(fast) == _counters(slow)
    assert fast.slow_frames < slow.slow_frames, "the fast path was taken"


def test_all_commands_mixed_and_pipelined(doors: tuple[Door, Door]) -> None:
    fast, slow = doors
    rng = random.Random(7)
    records = table.fast_commands()
    for _ in range(60):
        batch = b"".join(
            _setup(rng) if rng.random() < 0.2 else _generated(rng, rng.choice(records))
            for _ in range(rng.randint(1, 40))
        )
        left, right = fast(batch), slow(batch)
        assert left == right
    assert _counters(fast) == _counters(slow)


def test_membership_of_every_shape(doors: tuple[Door, Door]) -> None:
    """Tables and probes from none to more than the plane does itself."""
    fast, slow = doors
    rng = random.Random(8)
    for size in (0, 1, 7, 8, 9, 100, 20_000):
        held = [rng.getrandbits(64) for _ in range(size)]
        known = set(held)
        request = frame("KV.PREFIX.REGISTER", "ns", 4, "fp16", "BLOCKS", 16, size, struct.pack(f"<{size}Q", *held))
        assert fast(request) == slow(request) == b"+OK\r\n"
        for count in (0, 1, 8, 9, 1000, 16_384, 16_385):
            probes = [rng.choice(held) if held and rng.random() < 0.5 else rng.getrandbits(64) for _ in range(count)]
            request = frame("KV.PREFIX.MEMBERSHIP", "ns", count, struct.pack(f"<{count}Q", *probes))
            left = fast(request)
            assert left == slow(request)
            bits = bytearray((count + 7) // 8)
            for i, probe in enumerate(probes):
                bits[i >> 3] |= (probe in known) << (i & 7)
            assert left == (b"$%d\r\n%s\r\n" % (len(bits), bytes(bits)) if held else b"+UNKNOWN\r\n")
