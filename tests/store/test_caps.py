"""Sessions and bytes are capped, at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion.errors import CommandError, OutOfMemoryError
from pion.store.engine import Engine

from .model import F16, words
from .support import DIM, fetched, fill


def test_256_sessions_behave_as_published(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=8, ticker=False) as engine:
        for i in range(4):
            engine.register(b"p%d" % i, 8, F16)
        engine.v_fetch_range(b"p0_pv", 0, 0, 1)  # one side is enough to refresh both
        for i in range(4, 8):
            engine.register(b"p%d" % i, 8, F16)
        assert engine.info()["vstore_evictions"] == 8
        assert engine.info()["vstore_sessions"] == 8
        assert [engine.lookup(b"p%d" % i) for i in range(8)] == [False] * 4 + [True] * 4
        engine.v_create(b"raw", 8, F16)
        assert engine.info()["vstore_sessions"] == 7
        assert engine.why(b"p4").startswith("evicted")
    with pytest.raises(CommandError, match="no free V-store slots"), Engine(tmp_path / "e", max_sessions=1) as small:
        small.register(b"ns", 8, F16)


def test_lineage_leaves_go_first(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=6, ticker=False) as engine:
        engine.register(b"root", 8, F16)
        engine.register(b"other", 8, F16)
        engine.register(b"leaf", 8, F16, parent=b"root")
        engine.register(b"new1", 8, F16)
        assert not engine.lookup(b"other")
        engine.register(b"new2", 8, F16)
        assert [engine.lookup(ns) for ns in (b"root", b"leaf")] == [True, False]


def test_b11_bytes_are_capped_and_stay_capped_at_start(tmp_path: Path) -> None:
    cap = 2 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        for i in range(40):
            fill(engine, b"p%d" % i, rows=256, layers=2)
            assert engine.info()["vstore_file_bytes"] <= cap
        on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "d" / "kv" / "_").rglob("*.pion"))
        assert on_disk <= cap
        assert engine.lookup(b"p39")
        assert engine.why(b"p0").startswith("evicted")
    for name in ("README", "kv/_/strange.pion", "kv/_/00/notes.txt"):
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    with Engine(tmp_path / "d", max_bytes=cap // 4, ticker=False) as engine:
        assert engine.info()["vstore_file_bytes"] <= cap // 4
        assert engine.lookup(b"p39")
        for thread in engine._threads:
            thread.join()
        assert engine.info()["vstore_foreign_files"] == 2
        with pytest.raises(OutOfMemoryError, match=r"^OOM --max-bytes"):
            fill(engine, b"large", rows=4096, layers=1)
        assert not engine.lookup(b"large")
    assert (tmp_path / "d" / "kv/_/00/notes.txt").read_bytes() == b"x" * 1000


def test_what_is_being_written_is_not_evicted(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_bytes=1 << 20, ticker=False) as engine:
        engine.register(b"busy", DIM, F16)
        blob = words(1, 2048, DIM, F16)
        sink = engine.v_store_open(b"busy_pk", 0, 0, 2048, len(blob))
        for i in range(20):
            fill(engine, b"p%d" % i, rows=256, layers=1)
        sink.feed(blob)
        engine.v_store_finish(sink, "F16")
        assert fetched(engine, b"busy_pk", 0, 2048, native=True) == blob


def test_a_dropped_file_counts_while_a_reader_holds_it(engine: Engine) -> None:
    blob = fill(engine, b"ns", rows=512)
    body = engine.v_fetch_range(b"ns_pk", 0, 0, 512, native=True)
    before = engine.info()["vstore_file_bytes"]
    engine.drop(b"ns")
    fill(engine, b"ns", rows=4)
    assert engine.info()["vstore_file_bytes"] >= before
    assert body is not None
    assert body.tobytes() == blob  # one generation, whole
    del body
    assert engine.info()["vstore_file_bytes"] < before


def test_h6_the_default_cap_is_finite(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine, Engine(None, memory_only=True, ticker=False) as memory:
        assert 0 < engine.info()["vstore_max_bytes"] < 1 << 50
        assert 0 < memory.info()["vstore_max_bytes"] < 1 << 45


def test_entries_that_hold_only_state_are_capped_too(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=8, ticker=False) as engine:
        for i in range(30):
            engine.ssm_store(b"s%d" % i, 0, b"state")
        assert engine.info()["vstore_entries"] == 8
        assert engine.ssm_fetch(b"s29", 0) is not None
        assert engine.ssm_fetch(b"s0", 0) is None
