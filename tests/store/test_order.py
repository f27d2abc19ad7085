"""What came later counts, also after a start, whatever was still arriving when it came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion.limits import FORMATS
from pion.store.engine import Engine

from .support import crash

DIM, ROWS = 32, 192
NAMES = ("fp16", "int8", "fp8", "turbo4")
THREE, SEVEN = (np.full((ROWS, DIM), value, np.float32).tobytes() for value in (3, 7))
ROW = 4 * DIM


def rows(engine: Engine, start: int = 0, end: int = ROWS) -> np.ndarray:
    body = engine.v_fetch_range(b"ns_pk", 0, start, end)
    assert body is not None
    return np.round(np.frombuffer(body.tobytes(), np.float32).reshape(-1, DIM).mean(axis=1))


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path / "data", ticker=False) as made:
        made.register(b"ns", DIM, FORMATS[request.param])
        yield made


def after_a_kill(engine: Engine, tmp_path: Path) -> np.ndarray:
    with Engine(crash(engine.root, tmp_path / "copy"), ticker=False) as again:
        return rows(again)


def test_a_store_while_a_body_arrives(engine: Engine, tmp_path: Path) -> None:
    """The body is complete last, so it counts."""
    sink = engine.v_store_open(b"ns_pk", 0, 0, ROWS, len(THREE))
    sink.feed(THREE[: len(THREE) // 2])
    engine.v_store(b"ns_pk", 0, 64, 64, SEVEN[: 64 * ROW])
    assert (rows(engine, 64, 128) == 7).all()
    sink.feed(THREE[len(THREE) // 2 :])
    engine.v_store_finish(sink, "F32")
    assert (rows(engine) == 3).all()
    assert (after_a_kill(engine, tmp_path) == 3).all()


@pytest.mark.parametrize("first", [0, 1])
def test_two_bodies_at_once(engine: Engine, tmp_path: Path, first: int) -> None:
    sinks = [engine.v_store_open(b"ns_pk", 0, 0, ROWS, len(THREE)) for _ in range(2)]
    for sink, blob in zip(sinks, (THREE, SEVEN), strict=True):
        sink.feed(blob)
    engine.v_store_finish(sinks[first], "F32")
    engine.v_store_finish(sinks[1 - first], "F32")
    assert (rows(engine) == (3, 7)[1 - first]).all()
    assert (after_a_kill(engine, tmp_path) == (3, 7)[1 - first]).all()


def test_a_cut_while_a_body_arrives(engine: Engine, tmp_path: Path) -> None:
    """The cut took what was there before; the body comes after it and stays."""
    snap = engine.v_snapshot(b"ns_pk")
    engine.v_store(b"ns_pk", 0, 0, 10, SEVEN[: 10 * ROW])
    sink = engine.v_store_open(b"ns_pk", 0, 0, ROWS, len(THREE))
    sink.feed(THREE[:5000])
    engine.v_restore(b"ns_pk", snap)
    sink.feed(THREE[5000:])
    engine.v_store_finish(sink, "F32")
    assert (rows(engine) == 3).all()
    assert (after_a_kill(engine, tmp_path) == 3).all()


def test_recurrent_state_while_a_body_arrives(engine: Engine, tmp_path: Path) -> None:
    sink = engine.ssm_store_open(b"ns", 1, 3000)
    sink.feed(bytes(1000))
    engine.ssm_store(b"ns", 1, b"small")
    sink.feed(bytes(2000))
    engine.ssm_store_finish(sink)
    with Engine(crash(engine.root, tmp_path / "copy"), ticker=False) as again:
        for one in (engine, again):
            body = one.ssm_fetch(b"ns", 1)
            assert body is not None
            assert body.tobytes() == bytes(3000)


def test_other_layers_do_not_matter(engine: Engine) -> None:
    """Bodies of several layers at once are not copied."""
    sinks = [engine.v_store_open(b"ns_pk", layer, 0, ROWS, len(THREE)) for layer in range(3)]
    for sink in sinks:
        sink.feed(THREE)
    for sink in reversed(sinks):
        assert not sink.overtaken
        engine.v_store_finish(sink, "F32")
