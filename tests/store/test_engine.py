"""Opening, closing, saving, and many threads at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pion.errors import CommandError, StartupError, StorageError
from pion.store.engine import Engine

from .model import F16, F32, words
from .support import DIM, fetched, fill

# --- opening ---------------------------------------------------------------------------------------------------------


def test_one_engine_per_directory(engine: Engine, tmp_path: Path) -> None:
    import os

    with pytest.raises(StartupError, match=rf"in use by the process {os.getpid()}"):
        Engine(tmp_path / "data", ticker=False)
    engine.close()
    engine.close()
    Engine(tmp_path / "data", ticker=False).close()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="appendfsync"):
        Engine(tmp_path, appendfsync="sometimes")
    with pytest.raises(StartupError, match="path"):
        Engine(None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartupError, match="data directory"):
        Engine(tmp_path / "file")


def test_memory_only_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Engine(None, memory_only=True, ticker=False) as engine:
        blob = fill(engine, b"ns")
        for i in range(100):
            engine.v_store(b"ns_pk", 0, i % 16, 1, blob[: DIM * 2], "F16")
        assert engine.compact(b"ns")
        assert fetched(engine, b"ns_pv", 0, 16, native=True) == blob
        assert engine.info()["wal_enabled"] == 0
        with pytest.raises(CommandError, match="COMMIT: --no-wal"):
            engine.commit()
        engine.drop(b"ns")
        assert not engine.lookup(b"ns")
    assert list(tmp_path.iterdir()) == []


def test_lru_order_survives(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i in range(5):
            engine.register(b"p%d" % i, 8, F16)
        engine.lookup(b"p0")
    with Engine(tmp_path / "d", max_sessions=6, ticker=False) as engine:
        assert [engine.lookup(b"p%d" % i) for i in range(5)] == [True, False, False, True, True]


def test_save_copy_is_a_data_directory(engine: Engine, tmp_path: Path) -> None:
    blob = fill(engine, b"ns", digest="ab")
    engine.ssm_store(b"state", 0, b"s")
    engine.save("backup/monday")
    with pytest.raises(StorageError, match="there already"):
        engine.save("backup/monday")
    engine.v_store(b"ns_pk", 0, 0, 16, words(9, 16, DIM, F16), "F16")
    with Engine(tmp_path / "data/backup/monday", ticker=False) as copy:
        assert copy.lookup(b"ns", digest="ab")
        assert fetched(copy, b"ns_pk", 0, 16, native=True) == blob
        assert copy.ssm_fetch(b"state", 0) is not None


def test_save_and_commit_take_the_bytes_out_of_wal_bytes(engine: Engine) -> None:
    with pytest.raises(StorageError, match="no active sessions"):
        engine.save()
    fill(engine, b"ns")
    assert engine.info()["wal_bytes"] > 0
    engine.commit()
    assert engine.info()["wal_bytes"] == 0
    assert engine.info()["wal_appended"] > 0
    engine.save()
    assert engine.info()["wal_appended"] == 0


# --- many at once ----------------------------------------------------------------------------------------------------


def test_writers_of_one_entry_do_not_lose_rows(engine: Engine) -> None:
    """Small and streamed stores, fetches, compactions and commits at the same time; every acknowledged row stays."""
    rows, layers = 400, 8
    engine.register(b"ns", DIM, F32)
    errors: list[BaseException] = []

    def write(layer: int) -> None:
        try:
            blob = words(layer, rows, DIM, F32)
            size = DIM * 4
            at = 0
            while at < rows:
                count = 1 + (at * 7 + layer) % 9
                count = min(count, rows - at)
                piece = blob[at * size : (at + count) * size]
                for sid in (b"ns_pk", b"ns_pv"):
                    if (at + layer) % 3 == 0:
                        sink = engine.v_store_open(sid, layer, at, count, len(piece))
                        sink.feed(piece)
                        engine.v_store_finish(sink, "F32")
                    else:
                        engine.v_store(sid, layer, at, count, piece)
                at += count
                body = engine.v_fetch_range(b"ns_pv", layer, 0, at)
                assert body is not None
                assert body.tobytes() == blob[: at * size]
        except BaseException as error:
            errors.append(error)

    def upkeep() -> None:
        try:
            while any(thread.is_alive() for thread in threads):
                engine.compact(b"ns")
                engine.commit()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(layer,)) for layer in range(layers)]
    for thread in threads:
        thread.start()
    helper = threading.Thread(target=upkeep)
    helper.start()
    for thread in [*threads, helper]:
        thread.join()
    assert not errors
    root = engine.root
    engine.close()
    with Engine(root, ticker=False) as again:
        for layer in range(layers):
            assert fetched(again, b"ns_pk", layer, rows) == words(layer, rows, DIM, F32)


def test_drop_while_others_store_and_fetch(engine: Engine) -> None:
    """Everybody gets whole rows of one generation or a clear error."""
    stop = threading.Event()
    errors: list[BaseException] = []
    blobs = {words(seed, 32, DIM, F16) for seed in range(4)}

    def work(seed: int) -> None:
        blob = words(seed, 32, DIM, F16)
        try:
            while not stop.is_set():
                try:
                    engine.register(b"ns", DIM, F16, rows=32, layers=1)
                    sink = engine.v_store_open(b"ns_pk", 0, 0, 32, len(blob))
                    sink.feed(blob)
                    engine.v_store_finish(sink, "F16")
                    body = engine.v_fetch_range(b"ns_pk", 0, 0, 32, native=True)
                    assert body is None or body.tobytes() in blobs
                except CommandError as error:
                    if not str(error).startswith("ERR session not found"):
                        raise
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        engine.drop(b"ns")
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
