"""B12: a directory without a usable index is served while it is listed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion.errors import CommandError, MismatchError, StorageError
from pion.store import startup
from pion.store.engine import Engine
from pion.store.files import DiskFiles
from pion.store.index import Index

from .model import F16, words
from .support import DIM, crash, fetched, fill

N = 12


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Prefixes p0 to p11 of i + 1 rows, one raw session; no index."""
    root = tmp_path / "data"
    with Engine(root, ticker=False) as engine:
        for i in range(N):
            fill(engine, b"p%d" % i, rows=i + 1, digest="ab")
        engine.v_create(b"raw", DIM, F16)
        engine.v_store(b"raw", 0, 0, 2, words(2, 2, DIM, F16), "F16")
    (root / "pion.index").unlink()
    return root


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The listing waits for it."""
    event = threading.Event()
    original = startup.list_directory

    def slow(*args: object) -> None:
        assert event.wait(30)
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(startup, "list_directory", slow)
    yield event
    event.set()


def _listed(engine: Engine) -> None:
    for thread in engine._threads:
        thread.join()
    assert engine.info()["vstore_listing"] == 0


def test_b12_an_entry_is_there_at_first_touch(lost: Path, gate: threading.Event) -> None:
    with Engine(lost, ticker=False) as engine:
        assert engine.info()["vstore_listing"] == 1
        assert engine.info()["vstore_entries"] == 0
        assert engine.lookup(b"p3", digest="ab")
        with pytest.raises(MismatchError):
            engine.lookup(b"p4", digest="cd")
        assert fetched(engine, b"p5_pv", 1, 6, native=True) == words(6, 6, DIM, F16)
        assert fetched(engine, b"raw", 0, 2, native=True) == words(2, 2, DIM, F16)
        assert engine.v_exists(b"p6_pk")
        assert engine.why(b"p7").startswith("hit")
        assert not engine.lookup(b"never")
        assert engine.info()["vstore_entries"] == 6
        gate.set()
        _listed(engine)
        assert engine.info()["vstore_entries"] == N + 1
        assert engine.info()["total_prefix_tokens"] == 2 * sum(range(1, N + 1))
    with Engine(lost, ticker=False) as engine:
        assert engine.info()["vstore_entries"] == N + 1


def test_b5_what_is_dropped_before_it_is_found_stays_dropped(lost: Path, gate: threading.Event) -> None:
    with Engine(lost, ticker=False) as engine:
        assert engine.drop(b"p0", b"p1") == 2
        engine.register(b"p2", DIM, F16, rows=3, layers=2, digest="ab")  # confirms what is there
        assert engine.lookup(b"p2", digest="ab")
        with pytest.raises(MismatchError):
            engine.register(b"p3", DIM, F16, digest="cd")
        engine.register(b"p4", DIM, F16, digest="cd", replace=True)
        gate.set()
        _listed(engine)
        assert [engine.lookup(b"p%d" % i) for i in range(6)] == [False, False, True, True, True, True]
        assert engine.v_info(b"p4_pk").rows == []
    with Engine(lost, ticker=False) as engine:
        assert [engine.lookup(b"p%d" % i) for i in range(6)] == [False, False, True, True, True, True]


def test_b5_a_flush_takes_what_has_not_been_found(lost: Path, gate: threading.Event) -> None:
    with Engine(lost, ticker=False) as engine:
        assert engine.lookup(b"p0")
        engine.flush()
        assert not engine.lookup(b"p0")
        assert not engine.lookup(b"p1")
        fill(engine, b"p2", rows=1)
        gate.set()
        _listed(engine)
        assert [engine.lookup(b"p%d" % i) for i in range(N)] == [i == 2 for i in range(N)]
        with pytest.raises(CommandError, match="session not found"):
            engine.v_info(b"raw")
    with Engine(lost, ticker=False) as engine:
        assert engine.list(count=100)[1] == [b"p2"]


@pytest.mark.parametrize("caps", [{"max_sessions": 10}, {"max_bytes": 40_000}])
def test_b11_caps_hold_before_the_first_answer(lost: Path, caps: dict[str, int]) -> None:
    """What might be too much is read and evicted at start."""
    with Engine(lost, ticker=False, **caps) as engine:  # type: ignore[arg-type]
        info = engine.info()
        assert info["vstore_listing"] == 0
        assert info["vstore_sessions"] <= caps.get("max_sessions", 1000)
        assert info["vstore_file_bytes"] <= caps.get("max_bytes", 1 << 40)
        assert 0 < info["vstore_entries"] < N + 1


@pytest.mark.parametrize("done", ["named", "described"])
def test_b12_a_kill_between_a_file_and_its_figures_leaves_the_first_ones_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: str
) -> None:
    """The index announces an entry before its file gets its name."""
    copies: list[Path] = []
    with Engine(tmp_path / "data", ticker=False) as engine:
        fill(engine, b"old", digest="ab")
        original = Index.put

        def put(self: Index, key: bytes, figures: object) -> None:
            if done == "named" and not copies:
                copies.append(crash(engine.root, tmp_path / "copy"))
            original(self, key, figures)  # type: ignore[arg-type]

        monkeypatch.setattr(Index, "put", put)
        engine.register(b"new", DIM, F16, rows=1, layers=1)
        monkeypatch.undo()
        root = copies[0] if copies else crash(engine.root, tmp_path / "copy")
    monkeypatch.setattr(startup, "list_directory", lambda *_: None)  # the directory is looked through later
    with Engine(root, ticker=False) as engine:
        info = engine.info()
        assert (info["vstore_entries"], info["registered_prefixes"]) == (2, 2)
        assert engine.lookup(b"old", digest="ab")
        assert engine.v_info(b"new_pk")


def test_b12_an_entry_that_was_announced_and_never_made_is_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path / "data", ticker=False) as engine:
        monkeypatch.setattr(DiskFiles, "create", _no_file)
        with pytest.raises(StorageError):
            engine.register(b"new", DIM, F16)
        root = crash(engine.root, tmp_path / "copy")
    monkeypatch.undo()
    with Engine(root, ticker=False) as engine:
        assert engine.info()["vstore_entries"] == 0
    assert not caplog.records


def _no_file(*_: object, **__: object) -> int:
    raise OSError(28, "No space left on device")
