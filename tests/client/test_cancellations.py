"""A13 in numbers: ten thousand calls cancelled at any moment, and no answer that belongs to another."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import trio

from pion import AsyncClient
from pion.testing import Server
from tests.support.process import Process

TASKS, CANCELLED = 8, 10_000
SHAPE = (2, 2, 40, 16)


@pytest.mark.slow
async def test_a13_ten_thousand_random_cancellations(tmp_path: Path) -> None:
    """Every answer names its question: values are made of their keys, rows of the number of their prefix."""
    with Process(tmp_path / "data") as server:
        async with AsyncClient(host="127.0.0.1", port=server.port, max_connections=4) as client:
            for number in range(4):
                k = np.full(SHAPE, number, np.float16)
                await client.store(f"p{number}", k, k + np.float16(8))
                await client.call("SET", f"k{number}", b"%d" % number * 20_000)
            counts = {"answered": 0, "cancelled": 0}

            async def one(rng: random.Random) -> None:
                number, what = rng.randrange(4), rng.randrange(4)
                if what == 0:
                    text = f"{rng.random()}"
                    assert await client.call("ECHO", text) == text.encode()
                elif what == 1:
                    assert await client.call("GET", f"k{number}") == b"%d" % number * 20_000
                elif what == 2:
                    found = await client.fetch(f"p{number}")
                    assert (found.k == number).all()
                    assert (found.v == number + 8).all()
                else:
                    texts = [f"{rng.random()}" for _ in range(5)]
                    replies = await client.pipeline([*(["ECHO", text] for text in texts), ["GET", f"k{number}"]])
                    assert replies == [*(text.encode() for text in texts), b"%d" % number * 20_000]

            async def work(seed: int) -> None:
                rng = random.Random(seed)
                while counts["cancelled"] < CANCELLED:
                    with trio.move_on_after(rng.choice((0.0, 0.0002, 0.001, 0.01, 0.1)) * rng.random()) as scope:
                        await one(rng)
                    counts["cancelled" if scope.cancelled_caught else "answered"] += 1

            async with trio.open_nursery() as nursery:
                for seed in range(TASKS):
                    nursery.start_soon(work, seed)
            assert counts["answered"] > 500
            for number in range(4):
                assert await client.call("GET", f"k{number}") == b"%d" % number * 20_000


@pytest.mark.slow
async def test_a_server_that_is_killed_under_calls_gives_errors_and_nothing_else(tmp_path: Path) -> None:
    server = Server(["--port", "0", "--dir", str(tmp_path / "data"), "--kvcache"])
    port, stop, failed = server.port, trio.Event(), [0]
    k = np.arange(np.prod(SHAPE), dtype=np.float16).reshape(SHAPE)

    async def work() -> None:
        async with AsyncClient(host="127.0.0.1", port=port) as client:
            while not stop.is_set():
                try:
                    found = await client.fetch("p")
                except OSError:
                    failed[0] += 1
                    await trio.sleep(0.01)
                else:
                    assert (found.k == k).all()
                    assert (found.v == -k).all()

    try:
        async with AsyncClient(host="127.0.0.1", port=port) as client:
            await client.store("p", k, -k)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(work)
            for _ in range(5):
                await trio.sleep(0.3)
                server.kill()
                await trio.to_thread.run_sync(server.restart)
            stop.set()
    finally:
        server.kill()
    assert failed[0]
