"""Many small stores: found, merged, and never in the way of a writer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pion.limits import COMPACT_EXTENTS
from pion.store import compact
from pion.store.engine import Engine

from .model import F16, words
from .support import DIM, fetched

ROW = 2 * DIM


def pieces(engine: Engine, ns: bytes) -> int:
    """Of the most fragmented layer."""
    rows = engine._store.entries[b"p" + ns].rows
    assert rows is not None
    return rows.most_extents()


def size(engine: Engine, ns: bytes) -> int:
    """Of the file."""
    assert engine.root is not None
    return os.stat(engine.root / engine._store.entries[b"p" + ns].path).st_size


def until(condition: object, seconds: float = 30) -> None:
    """Poll."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_one_row_appends_end_as_one_record(engine: Engine) -> None:
    """2,048 rows one by one: merged while they come, whole at the first read, and no larger than stored at once."""
    layers, rows = 2, 2048
    blob = words(1, rows, DIM, F16)
    for ns in (b"once", b"rows"):
        engine.register(ns, DIM, F16)
    for layer in range(layers):
        for side in (b"_pk", b"_pv"):
            engine.v_store(b"once" + side, layer, 0, rows, blob, "F16")
    for row in range(rows):
        for layer in range(layers):
            for side in (b"_pk", b"_pv"):
                engine.v_store(b"rows" + side, layer, row, 1, blob[row * ROW : (row + 1) * ROW], "F16")
    assert fetched(engine, b"rows_pk", 1, rows, native=True) == blob
    until(lambda: pieces(engine, b"rows") <= COMPACT_EXTENTS + rows // compact.QUIET_GROWN)
    assert engine.compact(b"rows")
    assert pieces(engine, b"rows") == 1
    assert size(engine, b"rows") <= 1.1 * size(engine, b"once")
    for layer in range(layers):
        for side in (b"_pk", b"_pv"):
            assert fetched(engine, b"rows" + side, layer, rows, native=True) == blob
    root = engine.root
    engine.close()
    with Engine(root, ticker=False) as again:
        assert fetched(again, b"rows_pv", 0, rows, native=True) == blob
        assert again.info()["vstore_quarantined"] == 0


def test_the_bytes_rewritten_stay_a_small_multiple(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending row by row may not copy the entry again and again."""
    copied = []
    original = compact.compact

    def counted(store: object, entry: object, **options: bool) -> bool:
        done = original(store, entry, **options)  # type: ignore[arg-type]
        copied.append(entry.size)  # type: ignore[attr-defined]
        return done

    monkeypatch.setattr(compact, "compact", counted)
    engine.register(b"ns", DIM, F16)
    row = words(1, 1, DIM, F16)
    for i in range(6000):
        engine.v_store(b"ns_pk", 0, i, 1, row, "F16")
        if i % 50 == 0:
            until(lambda: engine._upkeep.idle)
    assert copied
    assert sum(copied) <= 8 * size(engine, b"ns")
    assert pieces(engine, b"ns") <= 2 * COMPACT_EXTENTS + 6000 // compact.GROWN


def test_what_is_asked_for_during_a_compaction_is_done(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one under way may have looked at the entry before, or less strictly."""
    original, calls = compact.compact, []

    def beaten(store: object, entry: object, **options: bool) -> bool:
        calls.append(entry)
        if len(calls) > 1:
            return original(store, entry, **options)  # type: ignore[arg-type]
        engine._upkeep.consider(entry, quiet=True)  # type: ignore[arg-type]
        return False  # a writer was in the way, say

    monkeypatch.setattr(compact, "compact", beaten)
    engine.register(b"ns", DIM, F16)
    blob = words(3, COMPACT_EXTENTS + 1, DIM, F16)
    for i in range(COMPACT_EXTENTS + 1):  # the last one makes it due
        engine.v_store(b"ns_pk", 0, i, 1, blob[i * ROW : (i + 1) * ROW], "F16")
    until(lambda: engine._upkeep.idle)
    assert len(calls) == 2
    assert pieces(engine, b"ns") == 1


def test_overwritten_rows_give_their_bytes_back(engine: Engine) -> None:
    engine.register(b"ns", DIM, F16)
    rows = 4096
    last = b""
    for i in range(20):
        last = words(i, rows, DIM, F16)
        engine.v_store(b"ns_pk", 0, 0, rows, last, "F16")
    until(lambda: engine._upkeep.idle)
    assert size(engine, b"ns") <= 8 * len(last)
    assert fetched(engine, b"ns_pk", 0, rows, native=True) == last


def test_a_reader_keeps_the_old_file(engine: Engine) -> None:
    engine.register(b"ns", DIM, F16)
    blob = words(3, 200, DIM, F16)
    for i in range(200):
        engine.v_store(b"ns_pk", 0, i, 1, blob[i * ROW : (i + 1) * ROW], "F16")
    body = engine.v_fetch_range(b"ns_pk", 0, 0, 200, native=True)
    assert engine.compact(b"ns")
    engine.v_store(b"ns_pk", 0, 0, 200, words(4, 200, DIM, F16), "F16")
    assert body is not None
    assert body.tobytes() == blob


def test_gaps_and_trims_stay_what_they_are(engine: Engine) -> None:
    engine.v_create(b"ns_pk", DIM, F16)
    blob = words(5, 30, DIM, F16)
    engine.v_store(b"ns_pk", 2, 10, 30, blob, "F16")
    snap = engine.v_snapshot(b"ns_pk")
    engine.v_store(b"ns_pk", 2, 60, 30, blob, "F16")
    engine.v_restore(b"ns_pk", snap)
    before = fetched(engine, b"ns_pk", 2, 50, native=True)
    assert engine.compact(b"ns")
    assert engine.v_info(b"ns_pk").rows == [0, 0, 40]
    assert fetched(engine, b"ns_pk", 2, 50, native=True) == before
    engine.close()
    with Engine(engine.root, ticker=False) as again:
        assert again.v_info(b"ns_pk").rows == [0, 0, 40]
        assert fetched(again, b"ns_pk", 2, 50, native=True) == before


def test_no_compaction_while_a_body_streams_in(engine: Engine) -> None:
    engine.register(b"ns", DIM, F16)
    blob = words(1, 100, DIM, F16)
    sink = engine.v_store_open(b"ns_pk", 0, 0, 100, len(blob))
    sink.feed(blob[:100])
    assert not engine.compact(b"ns")
    sink.feed(blob[100:])
    engine.v_store_finish(sink, "F16")
    assert engine.compact(b"ns")
    assert fetched(engine, b"ns_pk", 0, 100, native=True) == blob


def test_a_drop_during_a_compaction_wins(engine: Engine, tmp_path: Path) -> None:
    blob = words(1, 4000, DIM, F16)
    stop = threading.Event()
    errors: list[BaseException] = []

    def compacting() -> None:
        try:
            while not stop.is_set():
                engine.compact(b"ns")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compacting)
    thread.start()
    for _ in range(40):
        engine.register(b"ns", DIM, F16)
        engine.v_store(b"ns_pk", 0, 0, 4000, blob, "F16")
        assert engine.drop(b"ns") == 1
        assert not engine.lookup(b"ns")
    stop.set()
    thread.join()
    assert not errors
    assert not list((tmp_path / "data/kv/_").rglob("*.pion*"))
