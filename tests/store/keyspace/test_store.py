"""Policies, rewrites, groups, accounting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pion._core.ksload import Loader
from pion._core.kslog import synced, written
from pion.store.keyspace import objects
from tests.store.keyspace.support import BIG, blobs, contents, hset, log_of, open_store, put, reread


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
