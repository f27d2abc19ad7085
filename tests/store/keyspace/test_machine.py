"""The keyspace on disk against a plain dict: random commands, crashes at any byte of the log, rewrites under way.

After every command the log is flushed, and the model's state is remembered with the length of the log. A crash copies
the directory, cuts the copy's log at any byte that was not synced, adds garbage or not, and opens it: what is there is
the state of the last command that was whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pion._core.kslog import synced, written
from pion.store.keyspace import files
from pion.store.keyspace.rewrite import rewrite
from tests.store.keyspace.support import NOW, State, contents, hdel, hset, open_store, zadd, zrem

databases = st.integers(0, 1)
keys = st.sampled_from([b"", b"a", b"b", b"c", b"key:" + bytes(100)])
names = st.sampled_from([b"", b"f", b"g", b"h" * 50])
values = st.one_of(st.binary(max_size=20), st.sampled_from([b"7", b"x" * 20_000]))
LARGE = 1 << 20


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        shm = "/dev/shm"  # syncing thousands of times is no part of what is tested here
        self.top = Path(tempfile.mkdtemp(prefix="pion-keyspace-", dir=shm if os.path.isdir(shm) else None))
        self.root = self.top / "0"
        self.root.mkdir()
        self.now = NOW
        self.lives = 0
        self.open()

    def open(self) -> None:
        self.store = open_store(self.root, self.now)
        self.ks = self.store.keyspace
        self.steps: Any = None
        # (number of the log, its length, what was there then); nothing before `floor` is lost
        self.history: list[tuple[int, int, State]] = []
        self.remember()
        self.floor = 0

    def remember(self) -> None:
        self.ks.flush_log()
        self.history.append((self.store.number, self.ks.log_bytes, contents(self.ks)))

    @rule(db=databases, key=keys, value=values, ttl=st.sampled_from([0, 0, 5, 500]), keep=st.booleans())
    def set(self, db: int, key: bytes, value: bytes, ttl: int, keep: bool) -> None:
        self.ks.set(db, key, value, self.now + ttl if ttl else 0, keep)
        self.remember()

    @rule(db=databases, key=keys, byte=st.binary(min_size=1, max_size=1), extra=st.integers(0, 3))
    def set_large(self, db: int, key: bytes, byte: bytes, extra: int) -> None:
        self.ks.set(db, key, byte * (LARGE + extra))
        self.remember()

    @rule(db=databases, key=keys)
    def delete(self, db: int, key: bytes) -> None:
        self.ks.delete(db, key)
        self.remember()

    @rule(db=databases, key=keys, offset=st.sampled_from([0, 3, 300, LARGE - 2]), data=st.binary(max_size=30))
    def write(self, db: int, key: bytes, offset: int, data: bytes) -> None:
        if self.ks.type(db, key) in (b"string", None):
            self.ks.write(db, key, offset, data)
            self.remember()

    @rule(db=databases, key=keys, ms=st.sampled_from([-1, 5, 500, 5000]))
    def expire(self, db: int, key: bytes, ms: int) -> None:
        self.ks.set_expire(db, key, self.now + ms)
        self.remember()

    @rule(db=databases, key=keys)
    def persist(self, db: int, key: bytes) -> None:
        self.ks.persist(db, key)
        self.remember()

    @rule(db=databases, key=keys, to=keys, to_db=databases)
    def rename(self, db: int, key: bytes, to: bytes, to_db: int) -> None:
        self.ks.rename(db, key, to, to_db)
        self.remember()

    def command(self, effect: Any, *what: Any) -> None:
        self.ks.group(True)
        effect(self.ks, *what)
        self.ks.group(False)
        self.remember()

    @rule(db=databases, key=keys, pairs=st.lists(st.tuples(names, values), min_size=1, max_size=3))
    def hash_set(self, db: int, key: bytes, pairs: list[tuple[bytes, bytes]]) -> None:
        self.command(hset, db, key, pairs)

    @rule(db=databases, key=keys, gone=st.lists(names, min_size=1, max_size=3))
    def hash_delete(self, db: int, key: bytes, gone: list[bytes]) -> None:
        self.command(hdel, db, key, gone)

    @rule(db=databases, key=keys, pairs=st.lists(st.tuples(names, st.floats(allow_nan=False)), min_size=1, max_size=3))
    def zset_add(self, db: int, key: bytes, pairs: list[tuple[bytes, float]]) -> None:
        self.command(zadd, db, key, pairs)

    @rule(db=databases, key=keys, gone=st.lists(names, min_size=1, max_size=3))
    def zset_remove(self, db: int, key: bytes, gone: list[bytes]) -> None:
        self.command(zrem, db, key, gone)

    @rule(db=st.sampled_from([0, 1, None]))
    def flush(self, db: int | None) -> None:
        self.ks.flush(db)
        self.remember()

    @rule(ms=st.sampled_from([1, 10, 1000]))
    def advance(self, ms: int) -> None:
        # Keys that are due are gone in every state, also in the ones of the past that a crash may bring back.
        self.now += ms
        self.ks.set_clock(self.now)
        self.history = [
            (number, size, {where: what for where, what in state.items() if what[1] < 0 or what[1] > self.now})
            for number, size, state in self.history
        ]
        self.ks.expire_cycle(1_000_000)
        self.remember()

    @rule()
    def sync(self) -> None:
        self.store.fsync()
        self.synced()

    def synced(self) -> None:
        self.floor = len(self.history) - 1

    @rule(steps=st.integers(1, 4))
    def rewrite_some(self, steps: int) -> None:
        for _ in range(steps):
            if self.steps is None:
                self.steps = rewrite(self.store, 1_000_000)
            job = next(self.steps, None)
            self.remember()
            if job is None:
                self.steps = None
                self.store.rewrites += 1
                self.synced()
                return
            job()
            if synced(self.ks) == written(self.ks):
                self.synced()

    @rule(data=st.data(), garbage=st.sampled_from([b"", bytes(40), b"\x20\x00\x00\x00garbage", os.urandom(595)]))
    def crash(self, data: st.DataObject, garbage: bytes) -> None:
        self.lives += 1
        root = self.top / str(self.lives)
        shutil.copytree(self.root, root)
        number, end, _ = self.history[-1]
        low_number, low, _ = self.history[self.floor]
        log = files.path_of(root, files.LOG, number)
        head = log.stat().st_size if low_number == number else self.first_bytes(log)
        cut = data.draw(st.integers(low if low_number == number else head, end), label="cut")
        if not any(garbage):  # zeros may be just what was cut off
            was = log.read_bytes()
            while cut < end and was[cut] == 0:
                cut += 1
        os.truncate(log, cut)
        with log.open("ab") as file:
            file.write(garbage)
        expected = [
            state for at, size, state in self.history[self.floor :] if at < number or (at == number and size <= cut)
        ][-1]
        self.stop()
        shutil.rmtree(self.root)
        self.root = root
        self.open()
        assert contents(self.ks) == expected

    def first_bytes(self, log: Path) -> int:
        with log.open("rb") as file:
            return files.read_head(file.fileno(), files.LOG).size

    @rule()
    def restart(self) -> None:
        before = contents(self.ks)
        self.stop()
        self.open()
        assert contents(self.ks) == before
        assert self.store.recovery.clean
        assert not self.store.recovery.cut_bytes
        listed = set(os.listdir(self.store.blob_dir))
        assert len(listed) <= len(before)

    def stop(self) -> None:
        if self.steps is not None:
            self.steps.close()
        self.store.close()
        self.ks.flush()
        assert self.ks.used_bytes == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.restart()
            self.stop()
            shutil.rmtree(self.top)


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
