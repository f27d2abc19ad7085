"""B7 and B9 under load: no reader ever sees a torn row, another layer's row or half an entry."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, ReplyError, frame

DIM, SPAN = 256, 4000
WIDTH = 2 * DIM
SECONDS = 4.0


@pytest.fixture(params=[(), ("--memory-only",)], ids=["disk", "memory"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data", *request.param) as running:
        yield running


def _row(value: int) -> bytes:
    return struct.pack("<H", value) * DIM


def test_b7_b9_readers_beside_writers_drops_and_broken_connections(process: Process) -> None:
    """Every row is written as one repeated value that names its layer: a torn one would show."""
    end = time.monotonic() + SECONDS
    failures: list[BaseException] = []
    fetched = [0]

    def writer(layer: int) -> None:
        rng = random.Random(layer)
        with Raw(process.port) as conn:
            while time.monotonic() < end:
                count = rng.choice([1, 1, 7, 64, 2000])
                row = _row(1000 * layer + rng.randrange(1, 1000))
                start = rng.randrange(SPAN - count)
                reply = conn.call("V.STOREBATCH", "ns_pk", layer, start, count, row * count, "FMT", "F16")
                assert reply == "OK" or "session not found" in str(reply), reply

    def reader(seed: int) -> None:
        rng = random.Random(100 + seed)
        with Raw(process.port) as conn:
            while time.monotonic() < end:
                layer, first = rng.randrange(1, 4), rng.randrange(SPAN)
                rows = rng.choice([1, 10, 1000, 3000])
                body = conn.call("V.FETCH", "ns_pk", layer, "RANGE", first, first + rows, "FMT", "NATIVE")
                if body is None or isinstance(body, ReplyError):
                    assert body is None or "session not found" in str(body), body
                    continue
                assert len(body) == rows * WIDTH
                fetched[0] += 1
                for at in range(0, len(body), WIDTH):
                    row = body[at : at + WIDTH]
                    (value,) = struct.unpack("<H", row[:2])
                    assert row == _row(value), "a torn row"
                    assert value == 0 or value // 1000 == layer, "a row of another layer"

    def dropper() -> None:
        rng = random.Random(5)
        tick = threading.Event()
        with Raw(process.port) as conn:
            while time.monotonic() < end:
                tick.wait(rng.random())
                conn.ok("KV.PREFIX.DROP", "ns")
                conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16")

    def breaker() -> None:
        rng = random.Random(6)
        store = frame("V.STOREBATCH", "ns_pk", 1, 0, SPAN, _row(1001) * SPAN, "FMT", "F16")
        while time.monotonic() < end:
            with Raw(process.port) as conn:
                if rng.random() < 0.5:
                    conn.send(store[: rng.randrange(1, len(store))])
                else:
                    conn.send(frame("V.FETCH", "ns_pk", 1, "RANGE", 0, SPAN) * 20)

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as failure:
                failures.append(failure)

        return run

    with Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16")
    work = [*(lambda n=n: writer(n) for n in (1, 2, 3)), *(lambda n=n: reader(n) for n in range(3)), dropper, breaker]
    threads = [threading.Thread(target=guarded(one)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert fetched[0] > 20


def test_b9_a_pipeline_in_one_piece_runs_in_order(process: Process) -> None:
    """Bodies that go straight to files keep their place among the commands around them."""
    one, two = _row(1) * SPAN, _row(2) * SPAN
    request = b"".join(
        [
            frame("V.CREATE", "raw", DIM, "VQUANT", "fp16"),
            frame("V.STOREBATCH", "raw", 0, 0, SPAN, one, "FMT", "F16"),
            frame("V.FETCH", "raw", 0, "RANGE", 0, SPAN, "FMT", "NATIVE"),
            frame("V.STOREBATCH", "nobody", 0, 0, SPAN, one, "FMT", "F16"),
            frame("V.STOREBATCH", "raw", 0, 0, SPAN, two, "FMT", "F17"),
            frame("V.STOREBATCH", "raw", 0, 0, SPAN + 1, two, "FMT", "F16"),
            frame("V.STOREBATCH", "raw", 0, 0, SPAN, two, "FMT", "F16"),
            frame("V.FETCH", "raw", 0, "RANGE", 0, SPAN, "FMT", "NATIVE"),
            frame("KV.PREFIX.REGISTER", "ns", DIM, "fp16"),
            frame("V.STOREBATCH", "ns_pk", 0, 0, SPAN, one, "FMT", "F16"),
            frame("KV.PREFIX.DROP", "ns"),
            frame("V.STOREBATCH", "ns_pk", 0, 0, SPAN, one, "FMT", "F16"),
            frame("SSM.PREFIX.STORE", "ns", 0, two),
            frame("SSM.PREFIX.FETCH", "ns", 0),
            frame("PING"),
        ]
    )
    with Raw(process.port) as conn:
        conn.send(request)
        replies = [conn.read() for _ in range(15)]
    texts = [str(reply) if isinstance(reply, ReplyError) else reply for reply in replies]
    assert texts[1:] == [
        "OK",
        one,
        "ERR session not found",
        "ERR V.STOREBATCH: unknown option (expected FMT F16)",
        f"ERR V.STOREBATCH: blob size {len(two)} != expected {len(two) + WIDTH} "
        f"(count={SPAN + 1} × per_layer_dim={DIM} × 2)",
        "OK",
        two,
        "OK",
        "OK",
        1,
        "ERR session not found",
        "OK",
        two,
        "PONG",
    ]
