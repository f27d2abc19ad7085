"""Commits beside writers: what a flush in another thread would break."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, frame

THREADS, ROUNDS, KEYS = 8, 1_500, 24
SIZES = (0, 10, 300, 5_000, 40_000)


@pytest.mark.slow
def test_values_are_right_while_others_commit(tmp_path: Path) -> None:
    """Freed memory is overwritten (MALLOC_PERTURB_), so that a value given back too early shows."""
    failures: list[BaseException] = []

    def client(number: int, port: int) -> None:
        rng = random.Random(number)
        held: dict[bytes, bytes | None] = {}
        try:
            with Raw(port) as conn:
                for _ in range(ROUNDS):
                    commands: list[tuple[bytes | str, ...]] = []
                    wanted: list[object] = []
                    for _ in range(rng.choice((1, 1, 5, 16))):
                        key = b"c%d:k%d" % (number, rng.randrange(KEYS))
                        what = rng.random()
                        if what < 0.5:
                            value = rng.randbytes(rng.choice(SIZES))
                            commands.append(("SET", key, value))
                            wanted.append("OK")
                            held[key] = value
                        elif what < 0.7:
                            commands.append(("GET", key))
                            wanted.append(held.get(key))
                        elif what < 0.75:
                            commands.append(("DEL", key))
                            wanted.append(int(held.get(key) is not None))
                            held[key] = None
                        else:
                            commands.append(("KV.PREFIX.COMMIT",))
                            wanted.append("OK")
                    conn.send(b"".join(frame(*command) for command in commands))
                    assert [conn.read() for _ in commands] == wanted
        except BaseException as error:
            failures.append(error)

    with Process(tmp_path / "data", env={"MALLOC_PERTURB_": "85"}) as server:
        clients = [threading.Thread(target=client, args=(number, server.port)) for number in range(THREADS)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
    assert not failures, failures[0]
