"""PIN, EXPIRE, LEASE and lineage, one by one; the random histories are in test_lineage.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion._core import framing
from pion.errors import CommandError, OutOfMemoryError
from pion.store import index, layout, loader
from pion.store.engine import Engine
from pion.store.order import Leases, Order

from .model import F16
from .support import DIM, crash, fill

HOUR = 3_600_000


def small(path: Path, prefixes: int = 3) -> Engine:
    return Engine(path, max_sessions=2 * prefixes, ticker=False)


def register(engine: Engine, *names: bytes, parent: bytes | None = None) -> None:
    for ns in names:
        engine.register(ns, DIM, F16, parent=parent)


def held(engine: Engine) -> set[bytes]:
    return set(engine.list()[1])


def test_a_use_of_a_child_is_one_of_its_ancestors(tmp_path: Path) -> None:
    with small(tmp_path / "d") as engine:
        register(engine, b"root")
        register(engine, b"child", parent=b"root")
        register(engine, b"other")
        engine.lookup(b"child")  # and so root was used after other
        engine.drop(b"child")
        register(engine, b"x", b"y")
        assert held(engine) == {b"root", b"x", b"y"}
        assert engine.why(b"other").startswith("evicted: --max-sessions 6 was reached")


def test_a_whole_lineage_goes_from_its_leaf_up(tmp_path: Path) -> None:
    with small(tmp_path / "d", 4) as engine:
        chain = [b"a", b"b", b"c", b"d"]
        for parent, ns in zip([None, *chain], chain, strict=False):
            register(engine, ns, parent=parent)
        for n in range(3):
            register(engine, b"new%d" % n)
            engine.lookup(b"a")  # a was used last, and yet it may not go before the others
        assert held(engine) == {b"a", b"new0", b"new1", b"new2"}
        assert "and this was a prefix that no other continues, used longest ago" in engine.why(b"d")
        assert engine.info()["vstore_evicted"] == 3
        register(engine, b"new3")
        assert b"a" in held(engine)  # it is a leaf now, as recent as its last use


def test_a_parent_does_not_go_for_its_own_child(tmp_path: Path) -> None:
    with small(tmp_path / "d", 2) as engine:
        register(engine, b"root", b"other")
        register(engine, b"child", parent=b"root")
        assert held(engine) == {b"root", b"child"}


def test_lineage_is_no_circle(tmp_path: Path) -> None:
    with small(tmp_path / "d", 3) as engine:
        register(engine, b"b", parent=b"a")  # a is only named so far
        with pytest.raises(CommandError, match=r"^ERR PARENT must be another namespace, and none that continues"):
            register(engine, b"a", parent=b"b")
        with pytest.raises(CommandError, match="ERR PARENT"):
            register(engine, b"x", parent=b"x")
        assert held(engine) == {b"b"}


def test_lineage_from_files_may_be_a_circle_and_is_evicted_all_the_same(tmp_path: Path) -> None:
    with small(tmp_path / "d", 3) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Order, "circular", lambda *_: False)  # as files of two directories that were put together
        register(engine, b"a", parent=b"b")
        register(engine, b"b", parent=b"a")
        register(engine, b"c")
        engine.pin(b"c")
    with small(tmp_path / "d", 3) as engine:
        register(engine, b"new")
        assert held(engine) == {b"b", b"c", b"new"}
        engine.pin(b"b", b"new")
        with pytest.raises(CommandError, match="no free"):
            register(engine, b"more")


@pytest.mark.parametrize("how", ["close", "kill", "torn index"])
def test_b5_pins_and_ends_outlive_a_restart(tmp_path: Path, how: str) -> None:
    with small(tmp_path / "d", 4) as engine:
        register(engine, b"old", b"timed", b"both")
        engine.pin(b"old", b"both")
        now = engine._store.now_ms()
        assert engine.expire(b"timed", now + HOUR)
        assert engine.expire(b"both", now + 1 + HOUR)
        path = tmp_path / "d"
        if how != "close":
            path = crash(engine.root, tmp_path / "copy")
    if how == "torn index":
        (path / "pion.index").write_bytes(b"no index")
    with small(path, 4) as engine:
        assert engine.lookup(b"old")  # the first look at an entry that no index told of
        for thread in engine._threads:
            thread.join()
        assert engine.info()["vstore_pinned"] == 2
        register(engine, b"new")
        engine.lookup(b"timed")
        register(engine, b"newer")  # others are older, and stay
        assert {b"old", b"both", b"timed", b"newer"} == held(engine)
        assert HOUR - 60_000 < int(engine.about(b"timed")["pttl"]) <= HOUR
        engine._store.now_ms = lambda: now + HOUR
        assert engine.why(b"timed").startswith("expired: the time to live that EXPIRE gave it has ended")
        assert not engine.lookup(b"timed")
        assert engine.lookup(b"both")
    with small(path, 4) as engine:
        assert b"timed" not in held(engine)
        assert engine.unpin(b"old", b"both", b"none") == 2
    with small(path, 4) as engine:
        assert engine.info()["vstore_pinned"] == 0


def test_b5_what_expired_while_nobody_ran_does_not_come_back(tmp_path: Path) -> None:
    with small(tmp_path / "d") as engine:
        fill(engine, b"ns", blocks=(16, b"hashes!!"))
        assert engine.expire(b"ns", engine._store.now_ms() + HOUR)
    late = pytest.MonkeyPatch()
    late.setattr("pion.store.store.wall_ms", lambda: 1 << 62)
    with small(tmp_path / "d") as engine:
        assert (engine.info()["vstore_entries"], engine.info()["vstore_expired"]) == (0, 1)
        assert not list((tmp_path / "d" / "kv" / "_").rglob("*.pion"))
    late.undo()
    with small(tmp_path / "d") as engine:  # a clock set back changes nothing
        assert not engine.lookup(b"ns")


def test_the_tick_drops_what_is_due(tmp_path: Path) -> None:
    with small(tmp_path / "d") as engine:
        register(engine, b"ns")
        engine.expire(b"ns", engine._store.now_ms() + HOUR)
        engine._store.now_ms = lambda: 1 << 62
        engine._upkeep._upkeep()
        assert engine.info()["vstore_entries"] == 0


def test_a_new_description_keeps_the_pin_and_drops_the_end(tmp_path: Path) -> None:
    with small(tmp_path / "d") as engine:
        engine.register(b"ns", DIM, F16, digest="aa")
        engine.pin(b"ns")
        engine.expire(b"ns", engine._store.now_ms() + HOUR)
        engine.register(b"ns", DIM, F16, digest="aa", scope=b"s")  # the same one
        assert (engine.about(b"ns")["pinned"], engine.about(b"ns")["ttl"]) == ("1", "3600")
        engine.register(b"ns", DIM, F16, digest="bb", replace=True)
        assert (engine.about(b"ns")["pinned"], engine.about(b"ns")["ttl"]) == ("1", "-1")
        assert engine.drop(b"ns") == 1


def test_a_full_store_takes_an_unpin(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_bytes=256 << 10, ticker=False) as engine:
        names = []
        with pytest.raises(OutOfMemoryError, match="pinned"):
            for i in range(100):
                names.append(b"p%d" % i)
                fill(engine, names[-1], rows=64)
                engine.pin(names[-1])
        assert engine.info()["vstore_evicted"] == 0
        assert engine.unpin(names[0]) == 1
        fill(engine, b"new", rows=4)
        assert engine.why(names[0]).startswith("evicted: --max-bytes 262144 was reached")
        assert engine.info()["vstore_file_bytes"] <= 256 << 10


def test_more_is_pinned_than_the_caps_allow_at_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i in range(8):
            fill(engine, b"p%d" % i, rows=256)
        engine.pin(*[b"p%d" % i for i in range(4)])
        pinned = sum(int(engine.about(b"p%d" % i)["file_bytes"]) for i in range(4))
    with Engine(tmp_path / "d", max_bytes=pinned // 2, ticker=False) as engine:
        assert held(engine) == {b"p%d" % i for i in range(4)}
        assert "are pinned: they stay" in caplog.text
        with pytest.raises(OutOfMemoryError):
            fill(engine, b"new")
        assert all(engine.lookup(b"p%d" % i) for i in range(4))


def test_leases(tmp_path: Path) -> None:
    now = 0.0
    with small(tmp_path / "d", 2) as engine:
        engine._store.order.leases.now = lambda: now
        assert engine.lease(b"ns", 1000, "a")
        assert not engine.lease(b"ns", 1000, "b")  # somebody computes it
        assert engine.why(b"ns") == "never stored (or longer ago than the server remembers); leased for 1.000 s"
        engine.register(b"ns", DIM, F16, rows=16, layers=2)
        assert not engine.lease(b"ns", 1000, "b")  # not complete yet
        now = 0.9
        assert engine.lease(b"ns", 1000, "a")  # prolonged
        now = 1.5
        assert not engine.lease(b"ns", 1000, "b")
        fill(engine, b"ns")
        assert engine.lease(b"ns", 5000, "b")  # complete: any number of readers
        register(engine, b"x", b"y")
        assert engine.lookup(b"ns")  # kept for its readers
        assert engine.lease(b"ns", 0, "b")
        now = 2.0
        register(engine, b"z", b"w")
        assert not engine.lookup(b"ns")
        assert engine.lease(b"gone", 1000, "a")
        now = 3.0
        assert engine.lease(b"gone", 1000, "b")  # the first one's has ended
        assert engine.info()["vstore_leased"] == 1


def test_leases_are_few_and_forget_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pion.store.order.MAX_LEASES", 3)
    leases, now = Leases(), 0.0
    leases.now = lambda: now
    assert [leases.grant(b"%d" % i, "me", 1.0) for i in range(4)] == [True, True, True, False]
    now = 1.0
    assert leases.grant(b"3", "me", 1.0)
    assert len(leases) == 1


def test_the_heaps_do_not_grow_with_what_comes_and_goes(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False, appendfsync="no") as engine:
        for i in range(300):
            register(engine, b"ns")
            engine.expire(b"ns", engine._store.now_ms() + HOUR + i)
            engine.drop(b"ns")
        assert len(engine._store.order._heap) < 100
        assert len(engine._store.order._due) < 100


def test_an_index_without_flags_is_understood(tmp_path: Path) -> None:
    """As a version wrote it that knew neither pins nor ends, but lineage."""
    with small(tmp_path / "d", 2) as engine:
        register(engine, b"root")
        register(engine, b"leaf", parent=b"root")
        figures = {key: entry.figures(clean=True) for key, entry in engine._store.entries.items()}
    for one in figures.values():
        assert one.flags & index.TOLD
        one.flags &= index.CLEAN | index.STATES | index.KEYS | index.VALUES
    with small(tmp_path / "d", 2) as engine:
        for entry in list(engine._store.entries.values()):
            engine._store.forget(entry, "taken out to be read from the index again")
        engine._store.load_index(figures)
        engine.lookup(b"root")
        register(engine, b"new")
        assert held(engine) == {b"root", b"new"}


def test_attributes_of_a_later_version_are_skipped() -> None:
    sides = [layout.Side(DIM, F16), None]
    said = layout.Declared(rows=3, layers=2, pinned=True, expires=5)
    attrs = framing.unpack_attrs(layout.pack_meta(sides, said))
    more = framing.pack_attrs([*attrs, (999, b"what is this")])
    assert layout.unpack_meta(more) == (sides, said)


def test_repeated_ends_do_not_pile_up_in_the_file(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False, appendfsync="no") as engine:
        fill(engine, b"ns")
        for i in range(9000):
            engine.expire(b"ns", engine._store.now_ms() + HOUR + i)
        engine._upkeep.stop()
        assert int(engine.about(b"ns")["file_bytes"]) < 2 << 20
        assert engine._store.entries[b"pns"].declared.expires is not None
        assert loader.seed_of(engine._store.entries[b"pns"].generation)


def test_a_compaction_keeps_what_was_said(tmp_path: Path) -> None:
    with small(tmp_path / "d") as engine:
        register(engine, b"root")
        fill(engine, b"ns", parent=b"root")
        engine.pin(b"ns")
        engine.expire(b"ns", engine._store.now_ms() + HOUR)
        before = engine.about(b"ns")
        assert engine.compact(b"ns")
        copy = crash(engine.root, tmp_path / "copy")
    (copy / "pion.index").unlink()
    with small(copy) as engine:
        after = engine.about(b"ns")
        assert {**before, "pttl": "", "ttl": "", "file_bytes": ""} == {**after, "pttl": "", "ttl": "", "file_bytes": ""}
        assert int(after["pttl"]) > HOUR - 60_000
        assert engine.info()["vstore_pinned"] == 1
