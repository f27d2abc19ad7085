"""Full disks, failing syncs, kills."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pion._core.keyspace import Keyspace
from pion._core.kslog import end_sync, synced, written
from pion.store.keyspace import KeyspaceStore, files
from tests.store.keyspace.support import BIG, NOW, blobs, contents, log_of, open_store, put, reread


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
