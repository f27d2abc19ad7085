"""kill -9 of a process that stores, streams, drops and compacts; every acknowledged operation must have happened."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pion.store.engine import Engine

from .model import F16, words
from .support import stored


def _replay(state: dict[str, dict[object, object]], line: str) -> None:
    what, ns, *rest = line.split()
    if what == "register":
        state.setdefault(ns, {})["sides"] = True
    elif what == "drop":
        state.pop(ns, None)
    elif what == "state":
        state.setdefault(ns, {})["state"] = rest[0]
    else:
        side, layer, start, count, number = rest[0], *map(int, rest[1:])
        blob = words(number, count, 64, F16)
        for i in range(count):
            state[ns][(side, layer, start + i)] = blob[i * 128 : (i + 1) * 128]


def _held(engine: Engine, ns: str) -> dict[object, object] | None:
    """What the engine has of a namespace, in the shape of the model."""
    out: dict[object, object] = {}
    name = ns.encode()
    body = engine.ssm_fetch(name, 1)
    if body is not None:
        out["state"] = body.tobytes().decode()
    if engine.v_exists(name + b"_pk"):
        out["sides"] = True
        for side in ("_pk", "_pv"):
            for layer, tokens in enumerate(engine.v_info(name + side.encode()).rows):
                blob = stored(engine, name + side.encode(), layer, 0, tokens) or b"" if tokens else b""
                for row in range(tokens):
                    piece = blob[row * 128 : (row + 1) * 128]
                    if piece != bytes(128):
                        out[side, layer, row] = piece
    return out or None


def _kill_once(root: Path, seed: int, rng: random.Random) -> None:
    command = [sys.executable, "-m", "tests.store.storing_child", str(root), str(seed)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert child.stdout is not None
    lines: list[str] = []
    for _ in range(rng.randrange(10, 400)):
        lines.append(child.stdout.readline().decode())
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.read().decode().splitlines(keepends=True)
    child.wait()
    child.stdout.close()
    done: dict[str, dict[object, object]] = {}
    asked = ""
    for line in lines:
        if not line.endswith("\n"):
            break
        if line[0] == "!":
            _replay(done, line[2:])
            asked = ""
        else:
            asked = line[2:]
    maybe = {ns: dict(held) for ns, held in done.items()}
    if asked:
        _replay(maybe, asked)
    with Engine(root, ticker=False) as engine:
        info = engine.info()
        assert info["vstore_quarantined"] == 0
        for ns in "abcd":
            assert _held(engine, ns) in (done.get(ns), maybe.get(ns)), f"{ns} after {asked!r}, seed {seed}"
        engine.flush()


def test_b5_b7_kill_9_loses_nothing_and_brings_nothing_back(tmp_path: Path) -> None:
    rng = random.Random(7)
    for seed in range(6):
        _kill_once(tmp_path / "data", seed, rng)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_b5_b7_kill_9_many_times(tmp_path: Path) -> None:
    rng = random.Random(8)
    for seed in range(100, 200):
        _kill_once(tmp_path / "data", seed, rng)
