"""What a start makes of whole, damaged, older and foreign files."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from pion._core.framing import FramingError, pack_attrs, pack_file_header, pack_log
from pion._core.keyspace import Keyspace
from pion.errors import StartupError
from pion.store.keyspace import KeyspaceStore, files
from pion.store.keyspace.rewrite import rewrite
from tests.store.keyspace.support import (
    BIG,
    NOW,
    contents,
    flip,
    hdel,
    hset,
    log_of,
    names,
    open_store,
    put,
    reread,
    zadd,
    zrem,
)


@pytest.mark.parametrize(
    "tail", [os.urandom(595), bytes(4096), b"\x30\0\0\0half a record"], ids=["random", "zeros", "torn"]
)
def test_b1_a_bad_tail_is_cut_and_kept(tail: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    end = put(store, "a", "b", "c")[-1]
    store.close()
    with log_of(tmp_path).open("ab") as file:
        file.write(tail)
    with caplog.at_level(logging.WARNING, "pion.keyspace"):
        store = open_store(tmp_path)
    assert names(store) == ["a", "b", "c"]
    assert store.recovery.cut_bytes == len(tail)
    assert [path.read_bytes() for path in store.recovery.set_aside] == [tail]
    assert f"cut a tail of {len(tail)} bytes" in caplog.text
    assert log_of(tmp_path).stat().st_size == end
    put(store, "d")
    store.close()
    store = open_store(tmp_path)
    assert names(store) == ["a", "b", "c", "d"]
    assert store.recovery.cut_bytes == 0
    store.close()


def test_b1_a_flipped_bit_in_the_last_record_cuts_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sizes = put(store, "a", "b", "c")
    store.close()
    flip(log_of(tmp_path), sizes[2] + 40)
    store = open_store(tmp_path)
    assert names(store) == ["a", "b"]
    assert store.recovery.cut_bytes == sizes[3] - sizes[2]
    store.close()


def test_b1_a_flipped_bit_in_a_middle_record_is_not_skipped_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    sizes = put(store, "a", "b", "c")
    store.close()
    flip(log_of(tmp_path), sizes[1] + 40)
    with caplog.at_level(logging.ERROR, "pion.keyspace"):
        store = open_store(tmp_path)
    assert names(store) == ["a"]  # nothing says that the file had ever been on disk: what is kept was there once
    assert "among them 1 whole records that were never synced" in caplog.text
    assert not store.recovery.clean
    assert sum(path.stat().st_size for path in store.recovery.set_aside) == sizes[3] - sizes[1]
    store.close()


def test_b1_damage_in_what_was_synced_loses_only_the_damaged_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "data"
    store = open_store(root)
    sizes = put(store, "a", "b", "c")
    store.fsync()
    put(store, "d")
    store.close()
    for number in range(sizes[1], sizes[2], 7):  # whatever part of the record it is
        copy = tmp_path / f"copy{number}"
        shutil.copytree(root, copy)
        flip(log_of(copy), number)
        caplog.clear()
        store = open_store(copy)
        assert names(store) == ["a", "c", "d"], number
        assert "although they had been on disk; 3 whole records behind them still count" in caplog.text
        assert store.recovery.damaged_bytes == sizes[2] - sizes[1]
        store.tick()
        assert store.rewriting
        while store.rewriting:
            store.tick()
        store.close()
        store = open_store(copy)
        assert names(store) == ["a", "c", "d"]
        assert store.recovery.clean
        store.close()


def test_damage_in_a_snapshot_keeps_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, *"abcdefgh")
    store.rewrite_now()
    put(store, "i")
    store.close()
    snapshot = files.path_of(tmp_path, files.SNAPSHOT, 2)
    flip(snapshot, snapshot.stat().st_size // 2)
    store = open_store(tmp_path)
    assert len(names(store)) == 8
    assert "i" in names(store)
    assert store.recovery.damaged_bytes > 0
    assert "what is whole in it counts" in caplog.text
    store.close()


def test_a_snapshot_without_its_end_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, "a", "b")
    store.rewrite_now()
    store.close()
    snapshot = files.path_of(tmp_path, files.SNAPSHOT, 2)
    os.truncate(snapshot, snapshot.stat().st_size - 30)
    store = open_store(tmp_path)
    assert names(store) == ["a", "b"]
    assert not store.recovery.clean
    assert "pion.snapshot.2 is not whole" in caplog.text
    store.close()


def test_b4_an_older_log_beside_a_newer_snapshot_is_ignored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "a", "b")
    store.keyspace.set(0, b"t", b"old", NOW + 10)
    store.keyspace.flush_log()
    kept = log_of(tmp_path).read_bytes()
    store.keyspace.delete(0, b"a")
    store.keyspace.set(0, b"t", b"new", NOW + 500)
    store.rewrite_now()
    store.close()
    log_of(tmp_path).write_bytes(kept)
    store = open_store(tmp_path)
    assert contents(store.keyspace) == {(0, b"b"): (b"v" * 50 + b"b", -1), (0, b"t"): (b"new", NOW + 500)}
    assert not log_of(tmp_path).exists()
    assert store.recovery.clean
    store.close()


def test_b4_an_older_log_under_the_newer_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, "a")
    kept = log_of(tmp_path).read_bytes()
    store.keyspace.delete(0, b"a")
    store.rewrite_now()
    put(store, "b")
    store.close()
    log_of(tmp_path, 2).write_bytes(kept)
    store = open_store(tmp_path)
    assert names(store) == []
    assert store.recovery.unused_files == 1
    assert (tmp_path / "pion.wal.2.unused").read_bytes() == kept
    put(store, "c")
    store.close()
    store = open_store(tmp_path)
    assert names(store) == ["c"]
    store.close()


def test_b4_every_step_of_a_rewrite_can_be_the_last(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *"abcdef")
    store.keyspace.set(0, b"big", b"x" * BIG)
    store.keyspace.write(0, b"big", 3, b"yy")
    store.keyspace.flush_log()
    expected = contents(store.keyspace)
    steps = 0
    for job in rewrite(store, 1000):
        assert reread(tmp_path) == expected
        job()
        assert reread(tmp_path) == expected
        steps += 1
        put(store, f"during{steps}")
        store.keyspace.append(0, b"big", b"z")
        store.keyspace.delete(0, b"abcdef"[steps : steps + 1])
        store.keyspace.flush_log()
        expected = contents(store.keyspace)
        assert reread(tmp_path) == expected
    assert steps == 6
    store.close()
    assert reread(tmp_path) == expected
    assert files.find(tmp_path) == ([2], [2])


def test_a_snapshot_survives_the_loss_of_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, "a")
    store.rewrite_now()
    put(store, "b")
    store.close()
    log_of(tmp_path, 2).unlink()
    store = open_store(tmp_path)
    assert names(store) == ["a"]
    assert "pion.wal.2 is missing" in caplog.text
    put(store, "c")
    store.close()
    store = open_store(tmp_path)
    assert names(store) == ["a", "c"]
    store.close()


def test_foreign_and_newer_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "pion.wal.01").write_bytes(b"x")
    (tmp_path / "pion.wal.backup").write_bytes(b"x")
    (tmp_path / "pion.snapshot.4.tmp").write_bytes(b"x")
    store = open_store(tmp_path)
    put(store, "a")
    store.close()
    assert (tmp_path / "pion.wal.01").exists()
    assert not (tmp_path / "pion.snapshot.4.tmp").exists()
    first = pack_file_header(
        files.LOG,
        version=files.VERSION + 1,
        generation=5,
        attrs=pack_attrs([(files.NUMBER, (2).to_bytes(8, "little"))]),
    )
    log_of(tmp_path, 2).write_bytes(first)
    for kind in (files.LOG, files.SNAPSHOT):
        with pytest.raises(FramingError), log_of(tmp_path, 2).open("rb") as file:
            files.read_head(file.fileno(), kind)
    store = open_store(tmp_path)
    assert names(store) == ["a"]
    assert "pion.wal.2 was written by another version" in caplog.text
    assert [path.name for path in store.recovery.set_aside] == ["pion.wal.2.unused"]
    assert store.recovery.unused_files == 1
    assert (tmp_path / "pion.wal.2.unused").read_bytes() == first
    store.close()


def test_records_of_a_newer_version_and_of_more_databases_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.keyspace.set(1, b"k", b"v")
    store.close()
    keyspace = Keyspace(1)
    with pytest.raises(StartupError, match="database above 0"):
        KeyspaceStore(tmp_path, keyspace).open()
    with log_of(tmp_path).open("r+b") as file:
        head = files.read_head(file.fileno(), files.LOG)
        file.seek(0, os.SEEK_END)
        file.write(pack_log(99, 0, b"k", b"", 0, head.seed))
    with pytest.raises(StartupError, match="newer version"):
        open_store(tmp_path)


def test_b5_nothing_deleted_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    put(store, "deleted", "renamed", "overwritten", "stays")
    ks.set(0, b"due", b"v", NOW + 10)
    ks.set(0, b"expired by command", b"v")
    ks.set(1, b"other database", b"v")
    hset(ks, 0, b"hash", [(b"f", b"1"), (b"g", b"2")])
    hset(ks, 0, b"half", [(b"f", b"1"), (b"g", b"2")])
    zadd(ks, 0, b"zset", [(b"m", 1.0)])
    ks.set(0, b"big", b"x" * BIG)
    ks.flush_log()
    store.rewrite_now()
    ks.delete(0, b"deleted")
    ks.rename(0, b"renamed", b"new name")
    ks.set(0, b"overwritten", b"now")
    ks.set_expire(0, b"expired by command", NOW - 1)
    hdel(ks, 0, b"hash", [b"f", b"g"])
    hdel(ks, 0, b"half", [b"f"])
    zrem(ks, 0, b"zset", [b"m"])
    ks.delete(0, b"big")
    ks.set_clock(NOW + 11)
    ks.expire_cycle(1_000_000)
    ks.flush(1)
    ks.flush_log()
    expected = {
        (0, b"half"): ({b"g": b"2"}, -1),
        (0, b"new name"): (b"v" * 50 + b"renamed", -1),
        (0, b"overwritten"): (b"now", -1),
        (0, b"stays"): (b"v" * 50 + b"stays", -1),
    }
    # Also under a clock that was set back before the deadline of what expired.
    assert reread(tmp_path, NOW) == reread(tmp_path, NOW + 11) == expected
    ks.flush()
    ks.flush_log()
    assert reread(tmp_path) == {}
    store.close()


def test_expiries_are_absolute(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    ks.set(0, b"a", b"v", NOW + 1000)
    hset(ks, 0, b"h", [(b"f", b"1")])
    ks.set_expire(0, b"h", NOW + 2000)
    ks.set(0, b"p", b"v", NOW + 1000)
    ks.persist(0, b"p")
    store.rewrite_now()
    store.close()
    assert {key: expire for key, (_, expire) in reread(tmp_path, NOW + 999).items()} == {
        (0, b"a"): NOW + 1000, (0, b"h"): NOW + 2000, (0, b"p"): -1,
    }  # fmt: skip
    assert set(reread(tmp_path, NOW + 1000)) == {(0, b"h"), (0, b"p")}
