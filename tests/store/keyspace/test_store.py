"""The keyspace on disk: what a start makes of damaged files, rewrites, large values, failing disks."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pion._core.framing import FramingError, pack_attrs, pack_file_header, pack_log, seed_of
from pion._core.keyspace import BLOB_MIN, Keyspace
from pion._core.kslog import Loader, end_sync, synced, written
from pion.errors import StartupError
from pion.store.keyspace import KeyspaceStore, files, objects
from pion.store.keyspace.rewrite import rewrite
from tests.store.keyspace.support import NOW, contents, hdel, hset, open_store, reread, zadd, zrem

BIG = BLOB_MIN + 5


def put(store: KeyspaceStore, *keys: str, value: bytes = b"v" * 50) -> list[int]:
    """Set keys one batch each; returns the length of the log before each and after the last."""
    sizes = []
    for key in keys:
        sizes.append(store.keyspace.log_bytes)
        store.keyspace.set(0, key.encode(), value + key.encode())
        store.keyspace.flush_log()
    return [*sizes, store.keyspace.log_bytes]


def names(store: KeyspaceStore) -> list[str]:
    return sorted(key.decode() for key in store.keyspace.keys(0))


def log_of(root: Path, number: int = 1) -> Path:
    return files.path_of(root, files.LOG, number)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def blobs(root: Path) -> set[str]:
    return set(os.listdir(root / "blob"))


# --- starting -------------------------------------------------------------------------------------------------------


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


def test_foreign_and_newer_files(tmp_path: Path) -> None:
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
    with pytest.raises(StartupError, match="newer version"):
        open_store(tmp_path)
    with pytest.raises(FramingError), log_of(tmp_path, 2).open("rb") as file:
        files.read_head(file.fileno(), files.SNAPSHOT)


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


# --- B5: what is deleted stays deleted ------------------------------------------------------------------------------


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


# --- large values ---------------------------------------------------------------------------------------------------


def test_large_values_have_files_of_their_own(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    value = os.urandom(BIG)
    ks.set(0, b"k", value, NOW + 5000)
    assert ks.log_pending < 200
    ks.flush_log()
    assert len(blobs(tmp_path)) == 1
    first = blobs(tmp_path)
    ks.set(0, b"k", value + b"2")
    ks.flush_log()
    assert len(blobs(tmp_path)) == 2  # the record that drops the first is not on disk yet
    store.fsync()
    assert len(blobs(tmp_path)) == 1
    assert not first & blobs(tmp_path)
    ks.rename(0, b"k", b"l")
    ks.flush_log()
    assert reread(tmp_path) == {(0, b"l"): (value + b"2", -1)}
    store.rewrite_now()
    assert reread(tmp_path) == {(0, b"l"): (value + b"2", -1)}
    ks.delete(0, b"l")
    store.close()
    assert blobs(tmp_path) == set()


def test_large_values_that_are_written_to(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    ks.set(0, b"k", b"x" * BIG)
    ks.write(0, b"k", 10, b"abc")
    ks.append(0, b"k", b"end")
    ks.flush_log()
    expected = contents(ks)
    assert reread(tmp_path) == expected
    before = blobs(tmp_path)
    store.rewrite_now()
    assert reread(tmp_path) == expected
    assert len(blobs(tmp_path)) == 1
    assert blobs(tmp_path) != before
    for i in range(BIG // 1000 + 1):  # one that grew large by appending
        ks.append(0, b"grown", bytes([i % 256]) * 1000)
    ks.flush_log()
    expected = contents(ks)
    assert reread(tmp_path) == expected
    store.rewrite_now()
    assert len(blobs(tmp_path)) == 2
    assert reread(tmp_path) == expected
    store.close()


def test_orphans_are_removed_at_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.keyspace.set(0, b"never logged", b"x" * BIG)
    assert len(blobs(tmp_path)) == 1
    store.keyspace.detach_log()
    store.close()
    store = open_store(tmp_path)
    assert blobs(tmp_path) == set()
    store.close()


@pytest.mark.parametrize("damage", ["missing", "flipped", "short", "swapped"])
def test_a_damaged_value_file_loses_its_key_loudly(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    ks.set(0, b"a", b"x" * BIG)
    (name,) = blobs(tmp_path)
    ks.set(0, b"b", b"y" * BIG)
    (other,) = blobs(tmp_path) - {name}
    put(store, "c")
    store.close()
    path = tmp_path / "blob" / name
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        flip(path, BIG // 2)
    elif damage == "short":
        os.truncate(path, BIG // 2)
    else:
        os.replace(tmp_path / "blob" / other, path)
        (tmp_path / "blob" / other).write_bytes(path.read_bytes())
    store = open_store(tmp_path)
    assert names(store) == (["b", "c"])
    assert store.recovery.lost_values == 1
    assert "key b'a': the file of its value is lost" in caplog.text
    store.tick()
    while store.rewriting:
        store.tick()
    store.close()
    assert set(reread(tmp_path)) == {(0, b"b"), (0, b"c")}


def test_a_value_file_that_was_dropped_later_is_not_missed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    ks.set(0, b"k", b"x" * BIG)
    ks.append(0, b"k", b"more")
    ks.set(0, b"k", b"small")
    ks.set(0, b"l", b"x" * BIG)
    ks.append(0, b"l", b"more")
    ks.delete(0, b"l")
    store.fsync()
    assert blobs(tmp_path) == set()
    store.close()
    store = open_store(tmp_path)
    assert contents(store.keyspace) == {(0, b"k"): (b"small", -1)}
    assert store.recovery.clean
    store.close()


# --- failing disks --------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file may grow beyond this: writing fails with EFBIG, as it would with ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("policy", ["no", "everysec", "always"])
def test_a_failed_write_refuses_writers_until_there_is_space(policy: str, tmp_path: Path) -> None:
    store = open_store(tmp_path, policy=policy)
    ks = store.keyspace
    good = put(store, "a", "b")[-1]
    with file_size_limit(good + 100):
        ks.set(0, b"c", b"x" * 1000)
        with pytest.raises(OSError, match="too large"):
            ks.flush_log()
        assert log_of(tmp_path).stat().st_size == good == ks.log_bytes
        assert ks.refuses == errno.EFBIG
        assert set(reread(tmp_path)) == {(0, b"a"), (0, b"b")}
        store.tick()
        assert ks.refuses == errno.EFBIG
        ks.set_clock(NOW + 10)
        ks.set(0, b"a", b"short", NOW + 20)
        ks.set_clock(NOW + 30)
        assert ks.get(0, b"a") is None  # due keys are gone, though their end cannot be logged yet
        assert ks.size(0) == 3
    store.tick()
    assert ks.refuses == 0
    ks.expire_cycle(1_000_000)
    put(store, "d")
    store.close()
    assert set(reread(tmp_path, NOW)) == {(0, b"b"), (0, b"c"), (0, b"d")}


def test_a_large_value_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    put(store, "k")
    before = contents(ks)
    with file_size_limit(BIG // 2):
        with pytest.raises(OSError, match="too large"):
            ks.set(0, b"k", b"x" * BIG)
        assert contents(ks) == before
        assert blobs(tmp_path) == set()
        ks.set(0, b"small", b"v")
        ks.flush_log()
    store.close()
    assert set(reread(tmp_path)) == {(0, b"k"), (0, b"small")}


def test_a_rewrite_that_fails_leaves_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    for i in range(200):
        ks.set(0, b"%d" % i, os.urandom(500))
    ks.flush_log()
    expected = contents(ks)
    with file_size_limit(50_000):
        store.request_rewrite()
        store.tick()
        while store.rewriting:
            store.tick()
        assert store.failed_rewrites == 1
        with pytest.raises(OSError, match="too large"):
            store.rewrite_now()
    assert store.failed_rewrites == 2
    assert "rewriting the log failed" in caplog.text
    assert not list(tmp_path.glob("*.tmp"))
    assert files.find(tmp_path) == ([], [1, 2, 3])
    assert reread(tmp_path) == expected
    put(store, "more")
    expected = contents(ks)
    store.rewrite_now()
    assert files.find(tmp_path) == ([4], [4])
    store.close()
    assert reread(tmp_path) == expected


@pytest.mark.parametrize("policy", ["everysec", "always"])
def test_a_failed_sync_is_not_retried_but_a_rewrite_heals(policy: str, tmp_path: Path) -> None:
    store = open_store(tmp_path, policy=policy)
    ks = store.keyspace
    put(store, "a")
    ks.set(0, b"big", b"x" * BIG)
    ks.flush_log()
    end_sync(ks, written(ks), errno.EIO)
    assert ks.refuses == errno.EIO
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            store.fsync()
    store.tick()
    assert ks.refuses == errno.EIO
    first = blobs(tmp_path)
    store.request_rewrite()
    store.tick()
    while store.rewriting:
        store.tick()
    assert ks.refuses == 0
    assert len(blobs(tmp_path)) == 1
    assert not first & blobs(tmp_path)  # nobody knows whether the disk has the old one
    put(store, "b")
    store.fsync()
    assert synced(ks) == written(ks)
    store.close()
    assert set(reread(tmp_path)) == {(0, b"a"), (0, b"b"), (0, b"big")}


def test_a_sync_of_a_closed_descriptor_is_reported(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "a")
    held, store.log_fd = store.log_fd, os.open(os.devnull, os.O_WRONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        store.fsync()
    assert store.keyspace.sync_error == errno.EINVAL
    os.close(store.log_fd)
    store.log_fd = held
    with pytest.raises(OSError, match="Invalid argument"):
        store.close()


# --- policies, rewrites, groups -------------------------------------------------------------------------------------


def test_always_is_durable_when_flush_returns(tmp_path: Path) -> None:
    store = open_store(tmp_path, policy="always")
    ks = store.keyspace
    put(store, "a")
    assert synced(ks) == written(ks)
    ks.set(0, b"big", b"x" * BIG)
    ks.flush_log()
    assert store.unsynced_bytes == 0
    store.set_policy("everysec")
    put(store, "b")
    assert store.unsynced_bytes > 0
    store.set_policy("always")
    assert store.unsynced_bytes == 0
    assert ks.log_policy == "always"
    store.close()


def test_the_log_is_rewritten_when_it_has_grown(tmp_path: Path) -> None:
    store = open_store(tmp_path, rewrite_min=20_000, rewrite_growth=1.0)
    ks = store.keyspace
    written_bytes = 0
    while store.rewrites < 3:
        ks.set(0, b"k", b"v" * 100)
        written_bytes += ks.log_pending
        ks.flush_log()
        store.tick()
        assert written_bytes < 50_000_000
    assert written_bytes > 60_000
    while store.rewriting:
        store.tick()
    figures = store.figures()
    assert figures["keyspace_rewrites"] == store.rewrites
    assert figures["keyspace_log_error"] == 0
    expected = contents(ks)
    store.close()
    assert reread(tmp_path) == expected


def test_value_files_go_also_when_nobody_syncs(tmp_path: Path) -> None:
    store = open_store(tmp_path, policy="no")
    ks = store.keyspace
    ks.set(0, b"k", b"x" * BIG)
    ks.delete(0, b"k")
    ks.flush_log()
    assert len(blobs(tmp_path)) == 1
    store.tick()
    store.close()
    assert blobs(tmp_path) == set()


def test_a_group_counts_whole_or_not_at_all(tmp_path: Path) -> None:
    root = tmp_path / "data"
    store = open_store(root)
    ks = store.keyspace
    put(store, "a")
    start = ks.log_bytes
    ks.group(True)
    ks.set(0, b"b", b"1")
    ks.group(True)
    ks.rename(0, b"a", b"c")
    ks.group(False)
    ks.set(0, b"d", b"x" * 20_000)
    ks.group(False)
    ks.group(True)
    ks.group(False)  # an empty one leaves nothing
    ks.flush_log()
    size = log_of(root).stat().st_size
    for cut in [*range(start, start + 200, 3), size - 1]:
        copy = tmp_path / f"copy{cut}"
        shutil.copytree(root, copy)
        os.truncate(log_of(copy), cut)
        assert set(reread(copy)) == {(0, b"a")}
    assert set(reread(root)) == {(0, b"b"), (0, b"c"), (0, b"d")}
    store.close()


def test_used_bytes_are_the_same_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ks = store.keyspace
    put(store, "a", "b")
    hset(ks, 0, b"h", [(b"f%d" % i, b"v") for i in range(10)])
    fields = ks.get(0, b"h")
    ks.set_object(0, b"h", fields, b"hash", objects.measure(fields))
    used = ks.used_bytes
    store.close()
    store = open_store(tmp_path)
    assert store.keyspace.used_bytes == used
    store.close()


def test_loading_needs_an_unattached_keyspace(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="attached"):
        Loader(store.keyspace, objects)
    store.close()
    store.close()  # twice is once
    assert seed_of(1) != seed_of(2)


CHILD = """
import os, sys
from pion._core.keyspace import Keyspace
from pion.store.keyspace import KeyspaceStore
ks = Keyspace(1)
store = KeyspaceStore(sys.argv[1], ks, rewrite_min=30_000)
store.open()
i = int(ks.get(0, b"last") or 0)
while True:
    i += 1
    ks.group(True)
    ks.set(0, b"key%d" % (i % 50), b"%d " % i * (i % 300))
    if i % 40 == 0:
        ks.set(0, b"big", b"%d " % i * 300_000)
    if i % 7 == 0:
        ks.delete(0, b"key%d" % ((i - 3) % 50))
    ks.set(0, b"last", b"%d" % i)
    ks.group(False)
    ks.flush_log()
    store.tick()
    os.write(1, b"%d\\n" % i)
"""


def expected_after(i: int) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for n in range(1, i + 1):
        state[b"key%d" % (n % 50)] = b"%d " % n * (n % 300)
        if n % 40 == 0:
            state[b"big"] = b"%d " % n * 300_000
        if n % 7 == 0:
            state.pop(b"key%d" % ((n - 3) % 50), None)
        state[b"last"] = b"%d" % n
    return state


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    for life in range(4):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        acked = 0
        for _ in range(150 + 61 * life):
            acked = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.stdout.close()
        child.wait()
        acked = int(rest[-1]) if rest else acked
        keyspace = Keyspace(1)
        store = KeyspaceStore(tmp_path, keyspace)
        store.open()
        last = int(keyspace.get(0, b"last"))
        assert last in (acked, acked + 1)
        assert {key: keyspace.get(0, key) for key in keyspace.keys(0)} == expected_after(last)
        assert store.recovery.clean
        store.close()
