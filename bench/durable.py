"""What durability costs: commits by many writers against one writer, and large values against Redis."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.commands import BIG, big_requests, ours_and_redis, transfer
from bench.harness import Result, bench, compare
from bench.peers import Running, pion, scratch
from bench.transfers import latency, ping, repeating
from bench.wire import Wire, command

WRITERS = 64
VALUE = os.urandom(4096)
ROWS, DIM = 2, 1024  # 4 KiB of fp16
SECONDS = 1.0
BOTH = b"+OK\r\n+OK\r\n"


class Writer:
    """A connection that sends a write and a COMMIT again and again, each pair after the replies to the last."""

    def __init__(self, server: Running, write: bytes) -> None:
        self.socket = socket.create_connection((server.host, server.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = write + command("KV.PREFIX.COMMIT")
        self.got = b""

    def send(self) -> None:
        self.socket.sendall(self.request)

    def answered(self) -> bool:
        """Take what has arrived: whether both replies have."""
        self.got += self.socket.recv(4096)
        if len(self.got) >= len(BOTH) and self.got != BOTH:
            raise RuntimeError(self.got.decode())
        if len(self.got) < len(BOTH):
            return False
        self.got = b""
        return True


def commits(writers: list[Writer], seconds: float = SECONDS) -> float:
    """Commits each second, all writers together."""
    done, end = 0, 0.0
    with selectors.DefaultSelector() as ready:
        for writer in writers:
            ready.register(writer.socket, selectors.EVENT_READ, writer)
            writer.send()
        since = time.perf_counter()
        end = since + seconds
        open_ = len(writers)
        while open_:
            for key, _ in ready.select():
                writer: Writer = key.data
                if not writer.answered():
                    continue
                done += 1
                if time.perf_counter() < end:
                    writer.send()
                else:
                    open_ -= 1
        return done / (time.perf_counter() - since)


def keys(server: Running) -> list[Writer]:
    return [Writer(server, command("SET", f"key:{n}", VALUE)) for n in range(WRITERS)]


def entries(server: Running) -> list[Writer]:
    """Each has an entry of its own, and writes the same rows again and again."""
    rows = os.urandom(2 * ROWS * DIM)
    with Wire(server.host, server.port) as wire:
        for n in range(WRITERS):
            wire.call("V.CREATE", f"session:{n}", DIM, "VQUANT", "fp16")
    return [
        Writer(server, command("V.STOREBATCH", f"session:{n}", 0, 0, ROWS, rows, "FMT", "F16")) for n in range(WRITERS)
    ]


@bench("commit_64_keys", "commit_64_entries", "ping_p99_commit")
def group_commit() -> Iterator[Result]:
    kinds: tuple[tuple[str, Callable[[Running], list[Writer]], float, str], ...] = (
        ("keys", keys, 15.0, "SET of 4 KiB and COMMIT: 64 writers / one"),
        ("entries", entries, 4.0, "STOREBATCH of 4 KiB and COMMIT: 64 writers with an entry each / one"),
    )
    with scratch() as folder, pion(directory=folder, pin=False) as server:
        for kind, make, bar, note in kinds:
            writers = make(server)
            yield compare(
                f"commit_64_{kind}",
                lambda writers=writers: commits(writers),
                lambda writers=writers: commits(writers[:1]),
                unit="commits/s",
                bar=bar,
                note=note,
            )
        with repeating(lambda writers=writers: commits(writers)):
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
