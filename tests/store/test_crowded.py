"""Dead bytes of an entry fill the cap: whoever needs the room waits for the compaction, whatever delays that."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pion.errors import OutOfMemoryError
from pion.limits import FORMATS
from pion.store import compact
from pion.store.engine import Engine
from pion.store.entries import SessionNotFoundError

from .model import F16, words
from .support import DIM, fetched

CAP = 1 << 20
ROWS = 512
BLOB = words(7, ROWS, DIM, F16)  # 64 KiB


def disk(engine: Engine, ns: bytes) -> int:
    return engine._store.entries[b"p" + ns].disk


def overwrite(engine: Engine, sid: bytes, times: int) -> None:
    for _ in range(times):
        engine.v_store(sid, 0, 0, ROWS, BLOB, "F16")
        assert engine.info()["vstore_file_bytes"] <= CAP


def open_engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "d", max_bytes=CAP, appendfsync="no", ticker=False)


def streams(engine: Engine, left: int) -> list[Any]:
    """Bodies of another entry that take all room but this much."""
    engine.register(b"other", DIM, F16)
    sinks = []
    while CAP - engine.info()["vstore_file_bytes"] > left + len(BLOB):
        sinks.append(engine.v_store_open(b"other_pk", len(sinks), 0, ROWS, len(BLOB)))
    return sinks


def end_later(engine: Engine, sinks: list[Any]) -> threading.Timer:
    def end() -> None:
        while sinks:
            engine.v_store_abort(sinks.pop())

    timer = threading.Timer(0.5, end)
    timer.start()
    return timer


@pytest.mark.parametrize("another", [False, True])
def test_b11_a_compaction_waits_for_the_bodies_of_others(tmp_path: Path, another: bool) -> None:
    """All other room is taken by an entry that is being written, so the copy has none until that ends."""
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)
        overwrite(engine, b"busy_pk", 5)
        if another:
            engine.register(b"third", DIM, F16)
            engine.pin(b"busy", b"third")  # else they would go
        timer = end_later(engine, streams(engine, 8192))
        started = time.monotonic()
        if another:
            engine.v_store(b"third_pk", 0, 0, ROWS, BLOB, "F16")
        else:
            overwrite(engine, b"busy_pk", 1)
        assert time.monotonic() - started > 0.3  # else nothing was in its way
        timer.join()
        overwrite(engine, b"busy_pk", 40)
        assert fetched(engine, b"busy_pk", 0, ROWS, native=True) == BLOB


def test_b11_an_entry_never_takes_the_room_for_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compactions that fail for a while: writes are refused, and go on once they succeed."""
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)

        def fails(job: object) -> bool:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(compact._Job, "run", fails)
            refusals = []
            for _ in range(40):
                try:
                    overwrite(engine, b"busy_pk", 1)
                except OutOfMemoryError as error:
                    refusals.append(str(error))
            assert len(refusals) > 20
            assert all(text.startswith(f"OOM --max-bytes {CAP} is reached") for text in refusals)
            assert all("could not be compacted" in text for text in refusals)
        time.sleep(compact.STRAINED + 0.1)
        overwrite(engine, b"busy_pk", 40)
        assert fetched(engine, b"busy_pk", 0, ROWS, native=True) == BLOB


def test_b11_bodies_that_have_to_move_leave_the_room_for_the_copy(tmp_path: Path) -> None:
    """Bodies of one layer that arrive together are moved behind one another when they are published."""
    moved = 0
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)

        def stream(number: int) -> int:
            nonlocal moved
            for _ in range(60):
                sink = engine.v_store_open(b"busy_pk", 0, 0, ROWS, len(BLOB))
                sink.feed(BLOB)
                time.sleep(0.001 * number)
                moved += sink.overtaken
                engine.v_store_finish(sink, "F16")
                del sink  # it holds the file
                assert engine.info()["vstore_file_bytes"] <= CAP
            return number

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(stream, range(4))) == [0, 1, 2, 3]
        assert moved > 20
        overwrite(engine, b"busy_pk", 40)
        assert fetched(engine, b"busy_pk", 0, ROWS, native=True) == BLOB


@pytest.mark.parametrize("what", ["rows", "body", "state"])
def test_b11_dead_bytes_of_another_entry_refuse_nobody(tmp_path: Path, what: str) -> None:
    """The entry that has them is pinned, so it cannot go, but it can be compacted."""
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)
        engine.register(b"small", DIM, F16)
        engine.pin(b"busy", b"small")
        overwrite(engine, b"busy_pk", 10)
        full, layer = disk(engine, b"busy"), 0
        assert full > 10 * len(BLOB)
        while disk(engine, b"busy") == full:  # the last record is larger than the copy, so there is room for that
            if what == "rows":
                engine.v_store(b"small_pk", layer, 0, 2 * ROWS, 2 * BLOB, "F16")
            elif what == "body":
                sink = engine.v_store_open(b"small_pk", layer, 0, 2 * ROWS, 2 * len(BLOB))
                sink.feed(2 * BLOB)
                engine.v_store_finish(sink, "F16")
                del sink
            else:
                engine.ssm_store(b"small", layer, 2 * BLOB)
            layer += 1
            assert engine.info()["vstore_file_bytes"] <= CAP
        assert layer > 1
        assert disk(engine, b"busy") < full // 2
        assert fetched(engine, b"busy_pk", 0, ROWS, native=True) == BLOB


def test_a_prefix_that_waits_for_room_does_not_go_for_it(tmp_path: Path) -> None:
    """Neither is pinned; the copy of the one with the dead bytes takes another one's room."""
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)
        engine.pin(b"busy")
        engine.register(b"idle", DIM, F16)
        engine.v_store(b"idle_pk", 0, 0, ROWS, BLOB, "F16")
        engine.register(b"small", DIM, F16)
        overwrite(engine, b"busy_pk", 8)
        full = disk(engine, b"busy")
        for layer in range(4):
            engine.v_store(b"small_pk", layer, 0, 2 * ROWS, 2 * BLOB, "F16")
        assert disk(engine, b"busy") < full
        assert fetched(engine, b"small_pk", 3, 2 * ROWS, native=True) == 2 * BLOB


def test_those_who_wait_end_when_the_prefix_is_dropped(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)
        sink = engine.v_store_open(b"busy_pk", 1, 0, ROWS, len(BLOB))  # the compaction has to wait for its end
        refused: list[Exception] = []

        def write() -> None:
            try:
                overwrite(engine, b"busy_pk", 40)
            except SessionNotFoundError as error:
                refused.append(error)

        writers = [threading.Thread(target=write) for _ in range(3)]
        for thread in writers:
            thread.start()
        entry = engine._store.entries[b"pbusy"]
        while not entry.awaited:
            time.sleep(0.01)
        started = time.monotonic()
        engine.drop(b"busy")
        for thread in writers:
            thread.join()
        assert time.monotonic() - started < compact.PATIENCE / 2
        assert len(refused) == 3
        assert sink is not None


@pytest.mark.parametrize("live", [False, True])
def test_b11_bodies_that_arrive_together_leave_the_room_for_the_copy(tmp_path: Path, live: bool) -> None:
    """They replace each other's rows, so nothing is dead before they end: eight of a tenth of the cap."""
    blob = words(7, 13 * ROWS // 8, DIM, F16)
    rows = len(blob) // (2 * DIM)
    with open_engine(tmp_path) as engine:
        engine.register(b"busy", DIM, F16)
        if live:
            engine.v_store(b"busy_pk", 0, 0, rows, blob, "F16")
        together = threading.Barrier(8)

        def stream(number: int) -> None:
            together.wait()
            sink = engine.v_store_open(b"busy_pk", 0, 0, rows, len(blob))
            time.sleep(0.2)
            sink.feed(blob)
            engine.v_store_finish(sink, "F16")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(stream, range(8)))
        for _ in range(20):
            engine.v_store(b"busy_pk", 0, 0, rows, blob, "F16")
        assert fetched(engine, b"busy_pk", 0, rows, native=True) == blob


@pytest.mark.parametrize("what", ["rows", "keys", "state", "body"])
def test_b11_what_could_not_be_cleared_away_is_not_replaced(tmp_path: Path, what: str) -> None:
    """Neither the first time nor later: what is there stays, and the session can still grow."""
    size = 45 * CAP // 100 // (64 * DIM * 2) * 64 * DIM * 2
    blob = words(7, size // (2 * DIM), DIM, F16)
    rows = size // (2 * DIM)
    with open_engine(tmp_path) as engine:
        engine.register(b"ns", DIM, FORMATS["turbo4"] if what == "keys" else F16)
        if what == "keys":  # a quarter of the size each
            rows *= 3
            blob *= 3

        def put() -> None:
            if what == "state":
                engine.ssm_store(b"ns", 0, blob)
            elif what == "body":
                sink = engine.v_store_open(b"ns_pk", 0, 0, rows, len(blob))
                sink.feed(blob)
                engine.v_store_finish(sink, "F16")
            else:
                engine.v_store(b"ns_pk", 0, 0, rows, blob, "F16")

        put()
        before = disk(engine, b"ns")
        for _ in range(3):
            with pytest.raises(OutOfMemoryError):
                put()
        assert disk(engine, b"ns") == before
        if what == "state":
            engine.ssm_store(b"ns", 1, BLOB)
        else:
            engine.v_store(b"ns_pk", 0, rows, ROWS, BLOB, "F16")
            engine.v_store(b"ns_pk", 1, 0, ROWS, BLOB, "F16")
