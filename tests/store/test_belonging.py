"""Rows and states that belong to a digest: they go into no other entry, however late they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion.errors import CommandError, MismatchError
from pion.store.engine import Engine
from pion.store.entries import SessionNotFoundError

from .model import F16, words
from .support import DIM, fetched

ROWS = 16
BLOB = words(ROWS, ROWS, DIM, F16)
OURS, THEIRS = "aa" * 8, "bb" * 8

Store = Callable[[Engine, str], None]


@pytest.fixture(params=["disk", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    memory = request.param == "memory"
    with Engine(None if memory else tmp_path / "data", memory_only=memory, ticker=False) as engine:
        yield engine


def register(engine: Engine, digest: str, *, replacing: bool = False) -> None:
    engine.register(b"p", DIM, F16, rows=ROWS, layers=1, states=1, digest=digest, replace=replacing)


def rows(engine: Engine, digest: str) -> None:
    engine.v_store(b"p_pv", 0, 0, ROWS, bytes(reversed(BLOB)), "F16", digest)


def streamed_rows(engine: Engine, digest: str, between: Callable[[], None] = lambda: None) -> None:
    sink = engine.v_store_open(b"p_pv", 0, 0, ROWS, len(BLOB))
    sink.feed(bytes(reversed(BLOB)))
    between()
    engine.v_store_finish(sink, "F16", digest)


def state(engine: Engine, digest: str) -> None:
    engine.ssm_store(b"p", 0, b"late", digest)


def streamed_state(engine: Engine, digest: str, between: Callable[[], None] = lambda: None) -> None:
    sink = engine.ssm_store_open(b"p", 0, 4)
    sink.feed(b"late")
    between()
    engine.ssm_store_finish(sink, digest)


def fill(engine: Engine, digest: str) -> None:
    for sid in (b"p_pk", b"p_pv"):
        engine.v_store(sid, 0, 0, ROWS, BLOB, "F16", digest.upper())
    engine.ssm_store(b"p", 0, b"state", digest)


def untouched(engine: Engine) -> None:
    assert engine.lookup(b"p", digest=THEIRS)
    assert fetched(engine, b"p_pv", 0, ROWS, native=True) == BLOB
    found = engine.ssm_fetch(b"p", 0)
    assert found is not None
    assert found.tobytes() == b"state"


@pytest.mark.parametrize("late", [rows, streamed_rows, state, streamed_state])
def test_what_comes_late_goes_into_no_entry_that_replaced_its_own(engine: Engine, late: Store) -> None:
    register(engine, OURS)
    register(engine, THEIRS, replacing=True)
    fill(engine, THEIRS)
    with pytest.raises(MismatchError, match=f"another digest \\(digest {THEIRS}, not {OURS}\\)"):
        late(engine, OURS)
    untouched(engine)
    assert not engine.abandon(b"p", OURS)
    assert not engine.abandon(b"p", THEIRS)  # it is complete
    untouched(engine)
    late(engine, THEIRS)


@pytest.mark.parametrize("late", [streamed_rows, streamed_state])
def test_nor_when_it_is_replaced_while_it_comes(engine: Engine, late: Callable[..., None]) -> None:
    register(engine, OURS)

    def between() -> None:
        register(engine, THEIRS, replacing=True)
        fill(engine, THEIRS)

    with pytest.raises(CommandError):
        late(engine, OURS, between)
    untouched(engine)


@pytest.mark.parametrize("late", [rows, state, streamed_state])
def test_what_comes_late_makes_no_entry(engine: Engine, late: Store) -> None:
    with pytest.raises((SessionNotFoundError, MismatchError)):
        late(engine, OURS)
    assert engine.list() == (0, [])
    assert engine.ssm_fetch(b"p", 0) is None
    assert engine.why(b"p").startswith("never")


def test_a_store_that_broke_off_is_dropped_by_its_own_digest_only(engine: Engine) -> None:
    register(engine, OURS)
    rows(engine, OURS)
    assert not engine.abandon(b"p", THEIRS)
    assert engine.abandon(b"p", OURS.upper())
    assert not engine.abandon(b"p", OURS)
    assert "ABANDON before it was complete" in engine.why(b"p")
