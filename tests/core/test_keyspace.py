"""The compiled keyspace against a plain dict, through growth, shrinking, expiry and scans."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pion._core.keyspace import Keyspace, glob_match
from pion.errors import CommandError, WrongTypeError

NOW = 1_700_000_000_000
keys = st.sampled_from([b"", b"a", b"b", b"key:1", b"key:2", b"x" * 300, b"\0\xff"])
values = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"12", b"-7", b"v" * 70_000, b"v" * 90_000]))
databases = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    """Model: {(db, key): [value, expire or 0]}; a due key is no key."""

    @initialize()
    def start(self) -> None:
        self.ks = Keyspace(2, seed=7)
        self.now = NOW
        self.ks.set_clock(self.now)
        self.model: dict[tuple[int, bytes], tuple[object, int]] = {}

    def live(self, db: int, key: bytes) -> tuple[object, int] | None:
        found = self.model.get((db, key))
        if found and found[1] and found[1] <= self.now:
            del self.model[db, key]
            return None
        return found

    @rule(db=databases, key=keys, value=values, ttl=st.sampled_from([0, 0, 1, 50]), keep=st.booleans())
    def set(self, db: int, key: bytes, value: bytes, ttl: int, keep: bool) -> None:
        old = self.live(db, key)
        expire = self.now + ttl if ttl else 0
        self.ks.set(db, key, value, expire, keep)
        self.model[db, key] = (value, (old[1] if old else 0) if keep else expire)

    @rule(db=databases, key=keys)
    def delete(self, db: int, key: bytes) -> None:
        assert self.ks.delete(db, key) == (self.live(db, key) is not None)
        self.model.pop((db, key), None)

    @rule(db=databases, key=keys, offset=st.integers(0, 50), data=st.binary(max_size=30))
    def write(self, db: int, key: bytes, offset: int, data: bytes) -> None:
        old = self.live(db, key)
        if old and not isinstance(old[0], bytes):
            with pytest.raises(WrongTypeError):
                self.ks.write(db, key, offset, data)
            return
        text = old[0] if old else b""
        assert isinstance(text, bytes)
        if data:
            text = text.ljust(offset, b"\0")
            text = text[:offset] + data + text[offset + len(data) :]
            self.model[db, key] = (text, old[1] if old else 0)
        assert self.ks.write(db, key, offset, data) == len(text)

    @rule(db=databases, key=keys, by=st.integers(-(2**63), 2**63 - 1))
    def incr(self, db: int, key: bytes, by: int) -> None:
        old = self.live(db, key)
        text = old[0] if old else b"0"
        digits = isinstance(text, bytes) and len(text) < 25 and text.lstrip(b"-").isdigit()
        number = int(text) if isinstance(text, bytes) and digits and b"%d" % int(text) == text else None
        if number is None or not -(2**63) <= number + by < 2**63:
            with pytest.raises(CommandError):
                self.ks.incr(db, key, by)
            return
        assert self.ks.incr(db, key, by) == number + by
        self.model[db, key] = (b"%d" % (number + by), old[1] if old else 0)

    @rule(db=databases, key=keys, ms=st.sampled_from([-5, 0, 1, 50, 1000]))
    def expire(self, db: int, key: bytes, ms: int) -> None:
        old = self.live(db, key)
        assert self.ks.set_expire(db, key, self.now + ms) == (old is not None)
        if old and ms <= 0:
            del self.model[db, key]
        elif old:
            self.model[db, key] = (old[0], self.now + ms)

    @rule(db=databases, key=keys)
    def persist(self, db: int, key: bytes) -> None:
        old = self.live(db, key)
        assert self.ks.persist(db, key) == bool(old and old[1])
        if old:
            self.model[db, key] = (old[0], 0)

    @rule(db=databases, key=keys, to=keys, to_db=databases)
    def rename(self, db: int, key: bytes, to: bytes, to_db: int) -> None:
        old = self.live(db, key)
        assert self.ks.rename(db, key, to, to_db) == (old is not None)
        if old:
            del self.model[db, key]
            self.model[to_db, to] = old

    @rule(db=databases, key=keys, fields=st.integers(1, 3))
    def put_object(self, db: int, key: bytes, fields: int) -> None:
        old = self.live(db, key)
        obj = {b"f%d" % i: b"v" for i in range(fields)}
        self.ks.set_object(db, key, obj, b"hash", 100)
        self.model[db, key] = (obj, old[1] if old else 0)

    @rule(db=databases)
    def flush(self, db: int) -> None:
        self.ks.flush(db)
        self.model = {where: what for where, what in self.model.items() if where[0] != db}

    @rule(ms=st.sampled_from([1, 10, 100]), cycle=st.booleans())
    def advance(self, ms: int, cycle: bool) -> None:
        self.now += ms
        self.ks.set_clock(self.now)
        if cycle:
            self.ks.expire_cycle(100_000)
            for db in (0, 1):
                assert self.ks.size(db) == sum(where[0] == db for where in self.alive())

    def alive(self) -> dict[tuple[int, bytes], tuple[object, int]]:
        return {where: what for where, what in self.model.items() if not what[1] or what[1] > self.now}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "ks"):
            return
        alive = self.alive()
        for db in (0, 1):
            assert sorted(self.ks.keys(db)) == sorted(key for where, key in alive if where == db)
        for (db, key), (value, expire) in alive.items():
            assert self.ks.get(db, key) == value
            assert self.ks.expire_at(db, key) == (expire or -1)
            assert self.ks.type(db, key) == (b"string" if isinstance(value, bytes) else b"hash")
            assert (self.ks.memory(db, key) or 0) > len(key)

    def teardown(self) -> None:
        if hasattr(self, "ks"):
            self.ks.flush()
            assert self.ks.used_bytes == 0
            assert self.ks.size(0) == self.ks.size(1) == self.ks.expires(0) == 0


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def full_scan(ks: Keyspace, count: int, between: object = None) -> list[bytes]:
    cursor, found = 0, []
    while True:
        cursor, part = ks.scan(0, cursor, count)
        found += part
        if callable(between):
            between()
        if not cursor:
            return found


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_scan_during_growth_and_shrinking_returns_every_key_once(count: int) -> None:
    ks = Keyspace(1, seed=3)
    stay = {b"stay:%d" % i for i in range(2000)}
    for key in stay:
        ks.set(0, key, b"v")
    pick = random.Random(5)
    fresh: list[bytes] = []

    def churn() -> None:
        if pick.random() > min(1, count / 100):
            return
        if pick.random() < 0.5:
            for _ in range(pick.randrange(8000)):
                fresh.append(b"new:%d" % len(fresh))
                ks.set(0, fresh[-1], b"v")
        else:
            pick.shuffle(fresh)
            for _ in range(pick.randrange(len(fresh) + 1)):
                ks.delete(0, fresh.pop())

    for _ in range(3):
        found = full_scan(ks, count, churn)
        assert len(found) == len(set(found))
        assert stay <= set(found)


def test_scan_filters_after_counting() -> None:
    ks = Keyspace(1, seed=3)
    for i in range(100):
        ks.set(0, b"s:%d" % i, b"v")
        ks.set_object(0, b"h:%d" % i, {b"f": b"v"}, b"hash")
    seen: set[bytes] = set()
    cursor = 0
    while True:
        cursor, part = ks.scan(0, cursor, 20, b"h:1*", b"hash")
        assert len(part) <= 40
        seen.update(part)
        if not cursor:
            break
    assert seen == {b"h:%d" % i for i in range(100) if str(i).startswith("1")}
    assert ks.scan(0, 0, 1000, None, b"list") == (0, [])


def test_a_hundred_thousand_keys_and_back() -> None:
    ks = Keyspace(1)
    for i in range(100_000):
        ks.set(0, b"k%d" % i, b"%d" % i)
    assert ks.size(0) == 100_000
    assert all(ks.get(0, b"k%d" % i) == b"%d" % i for i in range(0, 100_000, 997))
    assert ks.random(0) is not None
    grown = ks.table_bytes
    for i in range(100_000):
        assert ks.delete(0, b"k%d" % i)
    while ks.table_bytes >= grown / 100:
        before = ks.table_bytes
        ks.expire_cycle(10_000)
        assert ks.table_bytes < before
    assert ks.used_bytes == 0
    assert ks.random(0) is None


@pytest.mark.parametrize("size", [17, 33, 40, 100, 1030])
def test_flush_while_the_table_is_resized(size: int) -> None:
    ks = Keyspace(1)
    for _ in range(3):
        for i in range(size):
            ks.set(0, b"k%d" % i, b"v")
        ks.flush(0)
        assert list(ks.keys(0)) == []
        ks.expire_cycle(1_000_000)
        assert ks.used_bytes == 0


def test_expiry_is_exact_and_lazy() -> None:
    ks = Keyspace(1)
    ks.set_clock(NOW)
    for i in range(1000):
        ks.set(0, b"k%d" % i, b"v", NOW + 1 + i)
    assert ks.expires(0) == 1000
    ks.set_clock(NOW + 500)
    assert ks.get(0, b"k499") is None
    assert ks.get(0, b"k500") == b"v"
    assert ks.size(0) == 999  # the one that was asked for; the others wait for the cycle
    assert ks.expire_cycle(1_000_000) == 499
    assert ks.size(0) == ks.expires(0) == 500
    assert ks.expired == 500
    ks.flush(0)
    ks.set_clock(NOW + 5000)
    assert ks.expire_cycle(1_000_000) == 0


def test_flush_of_one_database_leaves_expiries_of_the_others() -> None:
    ks = Keyspace(2)
    ks.set_clock(NOW)
    for i in range(50):
        ks.set(i % 2, b"k%d" % i, b"v", NOW + 100 + i)
    ks.flush(0)
    ks.set_clock(NOW + 125)
    assert ks.expire_cycle(1_000_000) == 13
    assert ks.size(1) == 12


def test_pinned_values_never_change() -> None:
    ks = Keyspace(1)
    for size in (10, 100_000, 3_000_000):
        ks.set(0, b"k", b"a" * size)
        pinned = ks.pin(0, b"k")
        assert pinned is not None
        ks.write(0, b"k", 0, b"zz")
        ks.set(0, b"k", b"b" * size)
        ks.delete(0, b"k")
        assert bytes(pinned) == b"a" * size
        assert len(pinned) == size
        assert memoryview(pinned).readonly
    assert ks.pin(0, b"k") is None
    ks.set_object(0, b"h", {b"f": b"v"}, b"hash")
    with pytest.raises(WrongTypeError):
        ks.pin(0, b"h")


def test_large_buffers_are_recycled_and_given_back() -> None:
    ks = Keyspace(1)
    for _ in range(5):
        ks.set(0, b"k", bytes(4 << 20))
    ks.delete(0, b"k")
    assert 4 << 20 <= ks.cached_bytes <= 10 << 20
    for _ in range(3):
        ks.expire_cycle()
    assert ks.cached_bytes == 0


def test_replaced_objects_are_released() -> None:
    class Canary(dict[bytes, bytes]):
        gone = 0

        def __del__(self) -> None:
            Canary.gone += 1

    ks = Keyspace(1)
    ks.set_object(0, b"a", Canary(), b"hash")
    ks.set(0, b"a", b"string")
    ks.set_object(0, b"a", Canary(), b"hash")
    ks.delete(0, b"a")
    ks.set_object(0, b"a", Canary(), b"hash")
    ks.flush()
    ks.expire_cycle(1_000_000)
    ks.set_object(0, b"a", Canary(), b"hash")
    assert Canary.gone == 3
    del ks
    assert Canary.gone == 4


def test_accounting_follows_objects() -> None:
    ks = Keyspace(1)
    fields: dict[bytes, bytes] = {}
    ks.set_object(0, b"h", fields, b"hash")
    base = ks.used_bytes
    ks.adjust(0, b"h", 500)
    assert ks.used_bytes == base + 500
    ks.adjust(0, b"h", -10_000)
    assert 0 < ks.used_bytes <= base
    ks.set_object(0, b"h", fields, b"hash", 300)
    assert ks.used_bytes == base + 300
    ks.set(0, b"h", b"x")
    ks.delete(0, b"h")
    assert ks.used_bytes == 0


def test_tables_are_apart_and_take_several_threads() -> None:
    ks = Keyspace(16)
    ks.table_put(b"ns", b"table")
    ks.flush()
    assert ks.table_get(b"ns") == b"table"
    assert ks.used_bytes == 0
    assert ks.get(0, b"ns") is None
    assert ks.table_drop(b"ns")
    assert not ks.table_drop(b"ns")
    assert ks.table_get(b"ns") is None
    with pytest.raises(IndexError):
        ks.get(16, b"ns")
    with pytest.raises(IndexError):
        ks.set(-1, b"ns", b"")

    def work(number: int) -> None:
        for i in range(3000):
            ks.table_put(b"%d" % (i % 7), b"%d" % number * 200)
            found = ks.table_get(b"%d" % (i % 5))
            assert found is None or len(set(found)) == 1
            ks.table_drop(b"%d" % (i % 3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_hits_misses_and_idle_time() -> None:
    ks = Keyspace(1)
    ks.set_clock(NOW)
    ks.set(0, b"k", b"v")
    ks.get(0, b"k")
    ks.get(0, b"nope")
    assert (ks.hits, ks.misses) == (1, 1)
    ks.set_clock(NOW + 60_000)
    assert 55 <= (ks.idle_seconds(0, b"k") or 0) <= 65
    assert ks.touch(0, b"k")
    assert ks.idle_seconds(0, b"k") == 0
    assert not ks.touch(0, b"nope")
    ks.reset_stats()
    assert (ks.hits, ks.misses) == (0, 0)


@pytest.mark.parametrize("text", [b"", b" 1", b"1 ", b"+1", b"01", b"-0", b"1.0", b"0x1", b"9223372036854775808", b"-"])
def test_incr_refuses_what_redis_refuses(text: bytes) -> None:
    ks = Keyspace(1)
    ks.set(0, b"k", text)
    with pytest.raises(CommandError, match="not an integer"):
        ks.incr(0, b"k", 1)
    assert ks.get(0, b"k") == text


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (b"*", b"", True), (b"", b"", True), (b"", b"a", False), (b"a*c", b"abbbc", True), (b"a*c", b"abbb", False),
        (b"h?llo", b"hello", True), (b"h[ae]llo", b"hallo", True), (b"h[^e]llo", b"hello", False),
        (b"h[a-c]llo", b"hbllo", True), (b"h[c-a]llo", b"hbllo", True), (b"h\\?llo", b"h?llo", True),
        (b"h\\?llo", b"hello", False), (b"*a*b*c*", b"xxaxxbxxc", True), (b"[\\]]", b"]", True), (b"[abc", b"b", True),
        (b"a\\", b"a\\", True), (b"**", b"x", True), (b"[^]", b"x", True),
    ],
)  # fmt: skip
def test_glob(pattern: bytes, text: bytes, expected: bool) -> None:
    assert glob_match(pattern, text) is expected


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_glob_of_an_escaped_text_matches_only_itself(text: bytes, other: bytes) -> None:
    escaped = b"".join(b"\\" + bytes([c]) for c in text)
    assert glob_match(escaped, text)
    assert glob_match(escaped, other) == (text == other)
    assert glob_match(b"*" + escaped + b"*", other + text + other)


def test_glob_does_not_explode() -> None:
    assert not glob_match(b"*a" * 50 + b"b", b"a" * 5000)
