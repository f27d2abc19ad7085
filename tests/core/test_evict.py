"""What goes when the keyspace is above its bound: the right keys, no more than needed, and for good."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pion._core.keyspace import Keyspace
from tests.store.keyspace.support import NOW, contents, open_store, reread

SIZE = 1000
POLICIES = ["noeviction", "allkeys-lru", "volatile-lru", "volatile-ttl"]


def filled(count: int, ttl: int = 0) -> tuple[Keyspace, int]:
    """A keyspace whose keys 0.. were used one after the other, 100 ms apart, and the time after the last one."""
    keyspace, now = Keyspace(2, seed=1), NOW
    for i in range(count):
        keyspace.set_clock(now)
        keyspace.set(i % 2, b"%d" % i, b"x" * SIZE, NOW + 10**9 + ttl * (count - i) if ttl else 0)
        now += 100
    keyspace.set_clock(now)
    return keyspace, now


def held(keyspace: Keyspace) -> list[int]:
    return sorted(int(key) for db in range(2) for key in keyspace.keys(db))


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_the_least_recently_used_go(policy: str) -> None:
    keyspace, now = filled(2000, ttl=1)
    for i in range(0, 2000, 20):
        keyspace.set_clock(now + i)
        keyspace.get(i % 2, b"%d" % i)  # a use saves it
    keyspace.bound(keyspace.used_bytes // 2, policy)
    assert keyspace.over
    assert keyspace.make_room()
    assert not keyspace.over
    kept = held(keyspace)
    assert keyspace.evicted == 2000 - len(kept)
    assert 980 <= len(kept) <= 1000  # no more went than had to
    assert set(range(0, 2000, 20)) <= set(kept)
    gone = set(range(2000)) - set(kept)
    assert sum(i < 1100 for i in gone) >= 0.9 * len(gone)  # sampled, as in Redis


def test_volatile_ttl_takes_the_shortest_life_first() -> None:
    keyspace, _ = filled(400, ttl=1)  # the last key goes first
    for i in range(100):
        keyspace.set(0, b"%d" % (1000 + i), b"x" * SIZE)  # these stay for ever
    keyspace.bound(keyspace.used_bytes // 2, "volatile-ttl")
    assert keyspace.make_room()
    kept = held(keyspace)
    assert kept == [*range(len(kept) - 100), *range(1000, 1100)]


def test_keys_without_a_time_to_live_do_not_go_under_a_volatile_policy() -> None:
    for policy in ("volatile-lru", "volatile-ttl"):
        keyspace, now = filled(100)
        keyspace.set(0, b"999", b"x" * SIZE, now + 5000)
        keyspace.bound(keyspace.used_bytes // 2, policy)
        assert not keyspace.make_room()
        assert held(keyspace) == list(range(100))
        assert keyspace.evicted == 1


def test_noeviction_keeps_everything() -> None:
    keyspace, _ = filled(50)
    keyspace.bound(SIZE)
    assert not keyspace.make_room()
    assert held(keyspace) == list(range(50))
    keyspace.bound(0)
    assert keyspace.make_room()


def test_due_keys_go_before_others_are_evicted() -> None:
    keyspace, now = filled(50)
    for i in range(50, 100):
        keyspace.set(0, b"%d" % i, b"x" * SIZE, now + 10)
    keyspace.bound(keyspace.used_bytes * 6 // 10, "allkeys-lru")
    keyspace.set_clock(now + 11)
    assert keyspace.make_room()
    assert (keyspace.evicted, held(keyspace)[:50]) == (0, list(range(50)))


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_what_was_evicted_does_not_come_back(tmp_path: Path, policy: str) -> None:
    store = open_store(tmp_path / "d")
    keyspace = store.keyspace
    for i in range(200):
        keyspace.set(0, b"%d" % i, b"x" * SIZE, NOW + 10**6 + i)
    keyspace.bound(keyspace.used_bytes // 3, policy)
    keyspace.flush_log()
    assert keyspace.make_room()
    keyspace.flush_log()
    assert 0 < keyspace.evicted < 200
    assert reread(tmp_path / "d") == contents(keyspace)
    store.close()


def test_without_a_log_that_can_be_written_nothing_is_evicted(tmp_path: Path) -> None:
    keyspace, _ = filled(50)
    target = tmp_path / "log"
    target.touch()
    with target.open("rb") as file:  # every write to it fails
        keyspace.attach_log(file.fileno(), 0, 1)
        keyspace.set(0, b"x", b"")
        with pytest.raises(OSError):
            keyspace.flush_log()
        keyspace.bound(SIZE, "allkeys-lru")
        assert not keyspace.make_room()
        assert keyspace.evicted == 0
        keyspace.detach_log()


class Machine(RuleBasedStateMachine):
    """Writers that ask for room first pass the bound by one value at most, whatever else happens."""

    @initialize(policy=st.sampled_from(POLICIES[1:]), seed=st.integers(0, 99))
    def start(self, policy: str, seed: int) -> None:
        self.ks, self.now, self.policy = Keyspace(2, seed=seed), NOW, policy
        self.ks.set_clock(self.now)
        self.limit, self.largest = 20_000, 0
        self.ks.bound(self.limit, policy)

    @rule(db=st.integers(0, 1), name=st.integers(0, 40), size=st.integers(0, 3000), ttl=st.sampled_from([0, 5, 500]))
    def write(self, db: int, name: int, size: int, ttl: int) -> None:
        if not self.ks.make_room():
            assert self.policy != "allkeys-lru"
            assert not any(self.ks.expires(db) for db in range(2))
            return
        before = self.ks.used_bytes
        assert before <= self.limit
        self.ks.set(db, b"%d" % name, b"v" * size, self.now + ttl if ttl else 0)
        self.largest = max(self.largest, self.ks.used_bytes - before)

    @rule(db=st.integers(0, 1), name=st.integers(0, 40))
    def use(self, db: int, name: int) -> None:
        self.ks.get(db, b"%d" % name)

    @rule(db=st.integers(0, 1), name=st.integers(0, 40))
    def delete(self, db: int, name: int) -> None:
        self.ks.delete(db, b"%d" % name)

    @rule(ms=st.sampled_from([1, 100, 10_000]))
    def wait(self, ms: int) -> None:
        self.now += ms
        self.ks.set_clock(self.now)

    @rule(limit=st.sampled_from([0, 5_000, 20_000]))
    def bound(self, limit: int) -> None:
        self.limit = limit or 1 << 40
        self.ks.bound(limit, self.policy)

    @rule()
    def flush(self) -> None:
        self.ks.flush(random.Random(self.now).randrange(2))

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        if hasattr(self, "ks"):
            sizes = [self.ks.memory(db, key) or 0 for db in range(2) for key in self.ks.keys(db)]
            assert self.ks.used_bytes >= sum(sizes)


TestMachine = Machine.TestCase
