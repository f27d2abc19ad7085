"""A command that is refused in its middle has changed nothing; compactions of two entries of one name do not meet."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pion.errors import CommandError, OutOfMemoryError
from pion.store import compact
from pion.store.engine import Engine

from .model import F16, words
from .support import DIM, fetched

ROWS = 512
DIGESTS = "11" * 32, "22" * 32


def store(engine: Engine, ns: bytes, seed: int, digest: str | None = None, *, replace: bool = False) -> bytes:
    blob = words(seed, ROWS, DIM, F16)
    engine.register(ns, DIM, F16, rows=ROWS, layers=1, digest=digest, replace=replace)
    for side in (b"_pk", b"_pv"):
        engine.v_store(ns + side, 0, 0, ROWS, blob, "F16")
    return blob


@pytest.mark.parametrize("end", ["drop", "replace"])
def test_a_compaction_that_outlives_its_entry_leaves_the_next_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The old one goes on writing, and removes its file, while the new one is written anew."""
    run, head = compact._Job.run, compact._Job._copy_head
    begun, go, second = threading.Event(), threading.Event(), threading.Event()

    def slow(job: compact._Job) -> None:
        head(job)
        if not begun.is_set():
            begun.set()
            assert go.wait(20)
        elif not second.is_set():
            second.set()
            go.set()
            first.join(20)  # it has written, seen that its entry is gone, and removed its file

    monkeypatch.setattr(compact._Job, "_copy_head", slow)
    with Engine(tmp_path / "d", appendfsync="no", ticker=False) as engine:
        store(engine, b"ns", 1, DIGESTS[0])
        first = threading.Thread(target=engine.compact, args=(b"ns",))
        first.start()
        assert begun.wait(20)
        if end == "drop":
            engine.drop(b"ns")
        blob = store(engine, b"ns", 2, DIGESTS[1], replace=end == "replace")
        assert engine.compact(b"ns")
        assert second.is_set()
        assert run is compact._Job.run
        assert fetched(engine, b"ns_pk", 0, ROWS, native=True) == blob
        assert not list((tmp_path / "d" / "kv").rglob("*.compact"))
    with Engine(tmp_path / "d", ticker=False) as engine:
        assert fetched(engine, b"ns_pv", 0, ROWS, native=True) == blob
        assert engine.info()["vstore_quarantined"] == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_a_replacement_with_a_table_that_has_no_room_keeps_what_was_there(tmp_path: Path, pinned: bool) -> None:
    with Engine(tmp_path / "d", max_bytes=4 << 20, ticker=False) as engine:
        blob = store(engine, b"ns", 1, DIGESTS[0])
        if pinned:
            engine.pin(b"ns")
        with pytest.raises(OutOfMemoryError):
            engine.register(b"ns", DIM, F16, blocks=(16, bytes(8 * 600_000)), digest=DIGESTS[1], replace=True)
        assert fetched(engine, b"ns_pk", 0, ROWS, native=True) == blob
        assert engine.lookup(b"ns", digest=DIGESTS[0])
        assert engine.about(b"ns")["pinned"] == str(int(pinned))


def test_a_table_comes_with_its_prefix(tmp_path: Path) -> None:
    hashes = [words(3, 64, DIM, F16)[:256], b"", words(4, 4096, DIM, F16)]  # of 32, of none, of 64 Ki blocks
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i, some in enumerate(hashes):
            engine.register(b"n%d" % i, DIM, F16, blocks=(16, some))
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i, some in enumerate(hashes):
            found = engine.blocks(b"n%d" % i)
            assert (found or bytes(8))[8:] == some
        assert engine.info()["vstore_quarantined"] == 0


def test_a_confirmation_with_a_table_that_has_no_room_says_nothing_new(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_bytes=4 << 20, ticker=False) as engine:
        store(engine, b"ns", 1, DIGESTS[0])
        with pytest.raises(OutOfMemoryError):
            engine.register(b"ns", DIM, F16, blocks=(16, bytes(8 * 600_000)), scope=b"other", parent=b"above")
        about = engine.about(b"ns")
        assert (about["scope"], about["parent"]) == ("", "")
        used = engine.info()["vstore_file_bytes"]
        for _ in range(100):  # nor does it grow
            with pytest.raises(OutOfMemoryError):
                engine.register(b"ns", DIM, F16, blocks=(16, bytes(8 * 600_000)), scope=b"other" * 100)
        assert engine.info()["vstore_file_bytes"] == used


@pytest.mark.parametrize("streamed", [False, True])
def test_a_state_that_is_refused_leaves_no_entry(tmp_path: Path, streamed: bool) -> None:
    with Engine(tmp_path / "d", max_bytes=1 << 20, ticker=False) as engine:
        with pytest.raises(OutOfMemoryError):
            if streamed:
                engine.ssm_store_open(b"ns", 0, 2 << 20)
            else:
                engine.ssm_store(b"ns", 0, bytes(2 << 20))
        assert engine.info()["vstore_entries"] == 0
        assert engine.why(b"ns").startswith("never stored: its SSM.PREFIX.STORE was refused: OOM")
        store(engine, b"ns", 1)
        engine.drop(b"ns")
        with pytest.raises(OutOfMemoryError):
            engine.ssm_store(b"ns", 0, bytes(2 << 20))
        assert engine.why(b"ns").startswith("dropped by KV.PREFIX.DROP")  # that is why it is not there


def test_unpin_in_a_full_store_stays_below_the_cap(tmp_path: Path) -> None:
    cap = 1 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        names = []
        with pytest.raises(OutOfMemoryError):
            for i in range(10_000):
                engine.register(b"n%d" % i, DIM, F16, digest=DIGESTS[0], scope=b"s" * 3200)  # UNPIN takes a new block
                engine.pin(b"n%d" % i)
                names.append(b"n%d" % i)
        assert engine.unpin(*names) == len(names) > 100
        assert engine.info()["vstore_file_bytes"] <= cap
        assert engine.info()["vstore_entries"] > len(names) // 2


def test_a_rollback_cuts_all_layers_or_none(tmp_path: Path) -> None:
    cap, layers = 1 << 20, 70
    blob = words(5, 16, DIM, F16)
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        engine.register(b"ns", DIM, F16)
        for layer in range(layers):
            engine.v_store(b"ns_pk", layer, 0, 8, blob[: len(blob) // 2], "F16")
        snap = engine.v_snapshot(b"ns_pk")
        for layer in range(layers):
            engine.v_store(b"ns_pk", layer, 8, 8, blob[len(blob) // 2 :], "F16")
        engine.pin(b"ns")
        engine.register(b"fill", DIM, F16)
        engine.register(b"block", DIM, F16)
        engine.pin(b"fill", b"block")
        for size in (16384, 1024, 1):
            with pytest.raises(OutOfMemoryError):
                for layer in range(9_000):
                    engine.ssm_store(b"fill", layer + size % 7 * 9_000, bytes(size))
        engine.drop(b"block")  # 4 KiB: enough for the first cuts, not for all
        with pytest.raises(CommandError):
            engine.v_restore(b"ns_pk", snap)
        assert engine.v_info(b"ns_pk").rows == [16] * layers
        engine.drop(b"fill")
        engine.v_restore(b"ns_pk", snap)
        assert engine.v_info(b"ns_pk").rows == [8] * layers
        assert engine.info()["vstore_file_bytes"] <= cap
