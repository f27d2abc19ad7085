"""The compiled membership tables against numpy, and their promise about hashes chosen to hurt."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core import membership
from pion.ref import membership as ref

small = st.integers(0, 5)
hashes = st.lists(st.one_of(small, st.integers(0, 2**64 - 1)), max_size=300)


def packed(values: list[int]) -> bytes:
    return np.array(values, np.uint64).tobytes()


@settings(deadline=None)
@given(members=hashes, probes=hashes, seed=st.integers(0, 2**64 - 1), data=st.data())
def test_agrees_with_the_twin(members: list[int], probes: list[int], seed: int, data: st.DataObject) -> None:
    if members:
        probes = probes + data.draw(st.lists(st.sampled_from(members), max_size=60))
    table = membership.build(packed(members), seed)
    want = ref.probe(packed(members), packed(probes))
    assert membership.probe(table, packed(probes)) == want
    assert membership.probe(table, packed(probes), portable=True) == want
    distinct = sorted(set(members) - {0})
    assert membership.members(table) == packed(distinct)
    assert membership.counts(table) == (len(members), len(distinct))


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 1562, 16384, 100_003])
def test_sizes(n: int) -> None:
    rng = np.random.default_rng(n)
    members = rng.integers(0, 2**64, n, np.uint64)
    probes = np.concatenate([members[::2], rng.integers(0, 2**64, n // 2 + 3, np.uint64)])
    table = membership.build(members)
    want = ref.probe(members.tobytes(), probes.tobytes())
    assert membership.probe(table, probes) == want
    assert membership.probe(table, probes, portable=True) == want


def test_bits_are_least_significant_first_and_padded_with_zero() -> None:
    table = membership.build(packed([10, 20, 30]))
    assert membership.probe(table, packed([10, 1, 20, 1, 1, 1, 1, 30, 1, 30])) == bytes([0b10000101, 0b00000010])
    assert membership.probe(table, b"") == b""


def test_zero_is_a_member_only_when_given() -> None:
    assert membership.probe(membership.build(packed([1, 2])), packed([0, 1])) == b"\x02"
    assert membership.probe(membership.build(packed([0, 1, 2, 0])), packed([0, 1])) == b"\x03"
    assert membership.probe(membership.build(packed([0])), packed([0, 1])) == b"\x01"
    assert membership.probe(membership.build(b""), packed([0, 1])) == b"\x00"


def crafted(seed: int, slots: int, count: int) -> list[int]:
    """Hashes whose home is one of the first 8 buckets of a table with this seed and size: what an attacker who
    knew the seed would send."""
    key, _ = membership.keys(membership.build(b"", seed))
    rng = np.random.default_rng(1)
    found: list[int] = []
    while len(found) < count:
        for value in rng.integers(0, 2**64, 200_000, np.uint64).tolist():
            if ref.home(value, key, slots) < 32:
                found.append(value)
    return found[:count]


def test_hashes_that_collide_are_right_and_not_slow() -> None:
    slots = 1024
    bad = crafted(99, slots, 700)
    members, others = bad[:512], bad[512:]
    table = membership.build(packed(members), 99)
    assert membership.keys(table)[1] == slots
    probes = packed(members + others + [0, 1])
    assert membership.probe(table, probes) == ref.probe(packed(members), probes)
    rng = np.random.default_rng(2)
    friendly = membership.build(rng.integers(0, 2**64, 512, np.uint64), 99)

    def best(blob: bytes) -> float:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            membership.probe(blob, probes)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(table) < 40 * best(friendly)  # a chain of 512 would be hundreds of times slower


def test_the_seed_differs_by_table_and_the_answer_does_not() -> None:
    values = packed(list(range(1000)))
    first, second = membership.build(values, 1), membership.build(values, 2)
    assert first != second
    assert membership.probe(first, values) == membership.probe(second, values) == b"\xff" * 125


def test_tables_work_at_any_alignment() -> None:
    members = packed([3, 5, 7])
    table = membership.build(members)
    for offset in range(1, 8):
        shifted = memoryview(bytes(offset) + table)[offset:]
        assert membership.probe(shifted, memoryview(bytes(offset) + members)[offset:]) == b"\x07"


def test_what_is_no_table_is_refused() -> None:
    table = membership.build(packed([1, 2, 3]))
    for wrong in (b"", table[:63], table[:-1], table + b"x", b"\0" * len(table), table[:8] + b"\xff" * 8 + table[16:]):
        with pytest.raises(ValueError, match="not a membership table"):
            membership.probe(wrong, packed([1]))
    with pytest.raises(ValueError, match="not whole hashes of 8"):
        membership.probe(table, b"1234567")
    with pytest.raises(ValueError, match="not whole hashes of 8"):
        membership.build(b"123456789")
    with pytest.raises(ValueError, match="1048577 hashes are more than 1048576"):
        membership.build(bytes(8 * 1048577))
