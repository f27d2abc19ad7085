"""What durability costs: commits by many writers against one writer, and large values against Redis."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.commands import BIG, big_requests, ours_and_redis, transfer
from bench.harness import Result, bench, compare
from bench.peers import Running, load, pion, scratch
from bench.transfers import latency, ping, repeating
from bench.wire import Wire, command

WRITERS = 64
VALUE = os.urandom(4096)
ROWS, DIM = 2, 1024  # 4 KiB of fp16
SECONDS = 1.0
WIDTH = 4  # digits of a writer's number


def commits(server: Running, request: Path, at: int, writers: int) -> float:
    """Commits each second, all writers together: each sends a write and a COMMIT after the replies to its last pair."""
    return load("pairs", server.host, server.port, writers, SECONDS, request, at, WIDTH, cpu=None)[0]


def keys(_: Running) -> bytes:
    return command("SET", f"key:{'0' * WIDTH}", VALUE)


def entries(server: Running) -> bytes:
    """Each has an entry of its own, and writes the same rows again and again."""
    rows = os.urandom(2 * ROWS * DIM)
    with Wire(server.host, server.port) as wire:
        for n in range(WRITERS):
            wire.call("V.CREATE", f"key:{n:0{WIDTH}d}", DIM, "VQUANT", "fp16")
    return command("V.STOREBATCH", f"key:{'0' * WIDTH}", 0, 0, ROWS, rows, "FMT", "F16")


@bench("commit_64_keys", "commit_64_entries", "ping_p99_commit")
def group_commit() -> Iterator[Result]:
    kinds: tuple[tuple[str, Callable[[Running], bytes], float, str], ...] = (
        ("keys", keys, 15.0, "SET of 4 KiB and COMMIT: 64 writers / one"),
        ("entries", entries, 4.0, "STOREBATCH of 4 KiB and COMMIT: 64 writers with an entry each / one"),
    )
    with scratch() as folder, pion(directory=folder, pin=False) as server, tempfile.TemporaryDirectory() as requests:
        for kind, make, bar, note in kinds:
            write = make(server)
            request, at = Path(requests) / kind, write.index(b"key:") + 4
            request.write_bytes(write + command("KV.PREFIX.COMMIT"))
            many, one = (functools.partial(commits, server, request, at, writers) for writers in (WRITERS, 1))
            yield compare(f"commit_64_{kind}", many, one, unit="commits/s", bar=bar, note=note)
        with repeating(many):
            yield latency("ping_p99_commit", ping(server), 10.0, "beside 64 committing writers")


@bench("durable_16m")
def durable() -> Iterator[Result]:
    with scratch() as folder, ours_and_redis("always") as (server, redis):
        _, put, at = big_requests(Path(folder))
        yield compare(
            "durable_16m",
            transfer(server, put, 5, BIG, at, 8),
            transfer(redis, put, 5, BIG, at, 8),
            unit="GB/s",
            bar=2.0,
            note="SET of 16 MiB, both appendfsync always",
        )
