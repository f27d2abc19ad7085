"""Large values, which stand in files of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pion.errors import StorageError
from tests.store.keyspace.support import BIG, NOW, blobs, contents, flip, names, open_store, put, reread


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
    if damage in ("missing", "short"):  # seen without reading it
        assert names(store) == ["b", "c"]
        assert store.recovery.lost_values == 1
    else:
        assert store.keyspace.get(0, b"a") is None
        assert store.keyspace.lost_values == 1
        store.keyspace.flush_log()
    assert f"key b'a': the file of its value, blob/{name}, is lost" in caplog.text
    kept = tmp_path / f"blob.{name}.unused"  # for a person to look at
    assert kept.exists() == (damage != "missing")
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


def test_large_values_are_loaded_after_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    values = {b"%d" % i: os.urandom(BIG) for i in range(6)}
    for key, value in values.items():
        store.keyspace.set(0, key, value)
    used = store.keyspace.used_bytes
    store.close()
    store = open_store(tmp_path)
    ks = store.keyspace
    assert ks.strlen(0, b"0") == BIG
    assert ks.get(0, b"1") == values[b"1"]
    pinned = ks.pin(0, b"2")
    assert pinned is not None
    assert bytes(pinned) == values[b"2"]
    assert ks.write(0, b"3", 0, b"ab") == BIG
    assert ks.append(0, b"4", b"cd") == BIG + 2
    assert ks.rename(0, b"5", b"6")
    expected = {**values, b"3": b"ab" + values[b"3"][2:], b"4": values[b"4"] + b"cd", b"6": values[b"5"]}
    del expected[b"5"]
    store.rewrite_now()
    deadline = time.monotonic() + 60
    while store.figures()["keyspace_cold_values"] or ks.memory(0, b"0") != ks.memory(0, b"1"):
        store.tick()
        assert time.monotonic() < deadline
    assert {key: ks.get(0, key) for key in ks.keys(0)} == expected
    assert used <= ks.used_bytes < used + BIG
    store.close()
    assert {key: value for (_, key), (value, _) in reread(tmp_path).items()} == expected


def test_a_value_that_cannot_be_read_is_an_error_and_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.keyspace.set(0, b"k", b"x" * BIG)
    store.close()
    store = open_store(tmp_path)
    (name,) = blobs(tmp_path)
    path = tmp_path / "blob" / name
    path.rename(tmp_path / "kept")
    path.mkdir()
    with pytest.raises(StorageError, match=f"^ERR the file of the value, blob/{name}, cannot be read: Is a directory$"):
        store.keyspace.get(0, b"k")
    path.rmdir()
    (tmp_path / "kept").rename(path)
    assert store.keyspace.get(0, b"k") == b"x" * BIG
    store.close()


@pytest.mark.parametrize("policy", ["no", "everysec", "always"])
def test_a_flush_gives_back_the_files(policy: str, tmp_path: Path) -> None:
    store = open_store(tmp_path, policy=policy)
    for i in range(3):
        store.keyspace.set(0, b"%d" % i, b"x" * BIG)
    store.fsync()
    store.keyspace.flush()
    deadline = time.monotonic() + 60
    while blobs(tmp_path):
        store.keyspace.expire_cycle(1000)
        store.tick()
        assert time.monotonic() < deadline
    store.close()
