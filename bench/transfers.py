"""Storing and fetching 64 MiB of K/V over loopback TCP against bare C sockets, and start-up with many entries."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import Result, bench, compare
from bench.peers import Running, load, pion, scratch
from bench.wire import Wire, command

SIZE = 64 << 20
DIM = 1024
LAYERS = 16
ROWS = SIZE // (LAYERS * DIM * 2)


def store(server: Running, sid: str, rows: int = ROWS, layers: int = LAYERS) -> None:
    block = os.urandom(rows * DIM * 2)
    with Wire(server.host, server.port) as wire:
        wire.call("V.CREATE", sid, DIM, "VQUANT", "fp16")
        for layer in range(layers):
            wire.call("V.STOREBATCH", sid, layer, 0, rows, block, "FMT", "F16")


def fetch_request(folder: Path, sid: str = "warm") -> tuple[Path, int]:
    request = folder / "fetch"
    request.write_bytes(command("V.FETCH", sid, "BATCH", 0, ROWS, LAYERS, "FMT", "NATIVE"))
    each = ROWS * DIM * 2
    return request, len(f"*{LAYERS}\r\n") + LAYERS * (len(f"${each}\r\n") + each + 2)


def store_request(folder: Path) -> tuple[Path, int]:
    """One V.CREATE and one STOREBATCH of 64 MiB into a session named by a counter (two replies)."""
    rows = SIZE // (DIM * 2)
    body = os.urandom(1 << 20) * (SIZE >> 20)
    # one name in both commands: the counter patched is the STOREBATCH's, the sessions are made before
    request = command("V.STOREBATCH", "store:00000000", 0, 0, rows, body, "FMT", "F16")
    path = folder / "store"
    path.write_bytes(request)
    return path, request.index(b"store:") + 6


@bench("fetch_tcp_64m")
def fetch() -> Result:
    with tempfile.TemporaryDirectory() as name, pion() as server:
        store(server, "warm")
        request, reply = fetch_request(Path(name))
        return compare(
            "fetch_tcp_64m",
            lambda: SIZE / load("xfer", server.host, server.port, request, reply, 5)[0] / 1e9,
            lambda: SIZE / load("copy", SIZE, 5)[0] / 1e9,
            unit="GB/s",
            bar=0.8,
            note="bare C socket copy; FMT NATIVE, file in the page cache",
        )


@bench("store_tcp_64m")
def acked_store() -> Result:
    with scratch() as folder, pion(directory=folder) as server:
        request, at = store_request(folder)

        def ours() -> float:
            with Wire(server.host, server.port) as wire:
                for number in range(4):
                    wire.call("V.CREATE", f"store:{number:08d}", DIM, "VQUANT", "fp16")
                taken = load("xfer", server.host, server.port, request, 5, 3, at, 8)[0]
                wire.call("KV.PREFIX.FLUSH")
            return SIZE / taken / 1e9

        return compare(
            "store_tcp_64m",
            ours,
            lambda: SIZE / load("sink", SIZE, 3, folder)[0] / 1e9,
            unit="GB/s",
            bar=0.8,
            note="bare recv + write to a fresh file",
        )


@contextlib.contextmanager
def repeating(call: Callable[[], object]) -> Iterator[None]:
    """Run `call` again and again in a thread while the block runs; its first error is raised at the end."""
    stop, failed = threading.Event(), []

    def loop() -> None:
        try:
            while not stop.is_set():
                call()
        except Exception as error:  # handed to the caller below
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def ping(server: Running, seconds: float = 3.0) -> list[float]:
    """p50, p99, max in ms and the number of PINGs, one every 2 ms.

    Nobody is pinned here: a PING that shares its processor with the other client's long writes would time those.
    """
    p50, p99, worst, count = load("ping", server.host, server.port, seconds, 2000, cpu=None)
    return [p50 / 1e3, p99 / 1e3, worst / 1e3, count]


def drop_pages(folder: Path, *, flush: bool = False) -> None:
    """Ask the kernel to forget the pages of every file under the folder; only written-back pages can be forgotten."""
    for path in folder.rglob("*.pion"):
        fd = os.open(path, os.O_RDONLY)
        try:
            if flush:
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def latency(name: str, sample: list[float], bar: float, note: str) -> Result:
    return Result(
        name,
        sample[1],
        "ms p99",
        bar=bar,
        at_most=True,
        rounds=int(sample[3]),
        spread=[sample[0], sample[2]],
        note=note,
    )


@bench("ping_p99_fetch", "ping_p99_fetch_cold", "ping_p99_store", "ping_p99_drop", "ping_p99_busy")
def pings() -> Iterator[Result]:
    with scratch() as folder, pion(directory=folder, pin=False) as server:
        store(server, "warm")
        request, reply = fetch_request(folder)
        with repeating(lambda: load("xfer", server.host, server.port, request, reply, 5, cpu=None)):
            yield latency("ping_p99_fetch", ping(server), 5.0, "beside 64 MiB fetches")

        drop_pages(folder / "data", flush=True)

        def cold() -> None:
            drop_pages(folder / "data")
            load("xfer", server.host, server.port, request, reply, 1, cpu=None)

        with repeating(cold):
            yield latency("ping_p99_fetch_cold", ping(server), 5.0, "beside 64 MiB fetches of dropped pages")

        put, at = store_request(folder)

        def fresh() -> None:
            with Wire(server.host, server.port) as wire:
                for number in range(6):
                    wire.call("V.CREATE", f"store:{number:08d}", DIM, "VQUANT", "fp16")
                load("xfer", server.host, server.port, put, 5, 5, at, 8, cpu=None)
                wire.call("KV.PREFIX.FLUSH")

        with repeating(fresh):
            yield latency("ping_p99_store", ping(server), 15.0, "beside 64 MiB stores")

        with Wire(server.host, server.port) as wire:
            wire.call("KV.PREFIX.REGISTER", "huge", DIM, "fp16")
        for layer_group in range(0, 32, LAYERS):
            block = os.urandom(ROWS * DIM * 2)
            with Wire(server.host, server.port) as wire:
                for layer in range(layer_group, layer_group + LAYERS):
                    for part in range(16):
                        wire.call("V.STOREBATCH", "huge_pk", layer, part * ROWS, ROWS, block, "FMT", "F16")
        sample: list[list[float]] = []
        watcher = threading.Thread(target=lambda: sample.append(ping(server, 4.0)))
        watcher.start()
        time.sleep(0.5)
        with Wire(server.host, server.port) as wire:
            wire.call("KV.PREFIX.DROP", "huge")
        watcher.join()
        yield latency("ping_p99_drop", sample[0], 15.0, "while an entry of 2 GB is dropped")

        # a large hash read whole is as long as a handler in Python gets here
        with Wire(server.host, server.port) as wire:
            wire.call("HSET", "busy", *(word for n in range(10_000) for word in (f"field:{n:05d}", "value")))
            with repeating(lambda: wire.call("HGETALL", "busy")):
                yield latency("ping_p99_busy", ping(server), 10.0, "beside a handler busy in Python")


def start_seconds(folder: Path) -> float:
    """From the start of the process to its first answer, then stopped."""
    since = time.perf_counter()
    with pion(directory=folder) as server:
        taken = time.perf_counter() - since
        assert server.pid
    return taken


@bench("start_2k_entries")
def start_up() -> Result:
    with scratch() as full, scratch() as none:
        with pion(directory=full) as server, Wire(server.host, server.port) as wire:
            block = os.urandom(1 << 20)
            for number in range(2_000):
                wire.call("KV.PREFIX.REGISTER", f"ns{number}", DIM, "fp16")
                for side in ("pk", "pv"):
                    wire.call("V.STOREBATCH", f"ns{number}_{side}", 0, 0, 512, block, "FMT", "F16")
        start_seconds(none)
        return compare(
            "start_2k_entries",
            lambda: start_seconds(full),
            lambda: start_seconds(none),
            unit="s",
            higher_is_better=False,
            bar=0.7,
            note="a start with 2,000 entries of 2 MB / with none",
        )


def anonymous_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError("this kernel does not report RssAnon")


@bench("rss_idle", "rss_fetch_64m", "rss_store_64m")
def memory() -> Iterator[Result]:
    with scratch() as folder, pion(directory=folder) as server:
        idle = anonymous_kib(server.pid)
        yield Result(
            "rss_idle", idle / 1024, "MiB", bar=60, at_most=True, rounds=1, note="anonymous memory after start"
        )
        put, at = store_request(folder)
        with Wire(server.host, server.port) as wire:
            for number in range(8):
                wire.call("V.CREATE", f"store:{number:08d}", DIM, "VQUANT", "fp16")
        store(server, "warm", rows=8, layers=1)
        before, peak = anonymous_kib(server.pid), 0

        def watch(call: Callable[[], object]) -> float:
            nonlocal peak
            peak = before
            with repeating(call):
                for _ in range(300):
                    peak = max(peak, anonymous_kib(server.pid))
                    time.sleep(0.005)
            return (peak - before) / 1024

        grown = watch(lambda: load("xfer", server.host, server.port, put, 5, 6, at, 8))
        yield Result("rss_store_64m", grown, "MiB", bar=8, at_most=True, rounds=1, note="growth during 64 MiB stores")
        store(server, "warm")
        before = anonymous_kib(server.pid)
        request, reply = fetch_request(folder)
        grown = watch(lambda: load("xfer", server.host, server.port, request, reply, 5))
        yield Result("rss_fetch_64m", grown, "MiB", bar=8, at_most=True, rounds=1, note="growth during 64 MiB fetches")
