"""Sorted sets against a plain dict that is sorted for every question."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.store.keyspace.zset import ZSet

scores = st.one_of(st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, 5e-324]), st.floats(allow_nan=False))
members = st.sampled_from([b"", b"a", b"b", b"b\0", b"c", b"long name"])
changes = st.lists(st.tuples(members, st.one_of(st.none(), scores)), max_size=30)


@given(changes, scores)
def test_equals_a_sorted_dict(steps: list[tuple[bytes, float | None]], probe: float) -> None:
    zset, model = ZSet(), dict[bytes, float]()
    for member, score in steps:
        if score is None:
            assert zset.remove(member) == (model.pop(member, None) is not None)
        else:
            assert zset.add(member, score) == (member not in model)
            model[member] = score
    order = sorted((score, member) for member, score in model.items())
    assert zset.slice(0, 100) == order
    assert len(zset) == len(model)
    assert dict(zset.items()) == model
    assert set(zset) == set(model)
    for rank, (score, member) in enumerate(order):
        assert zset.rank(member) == rank
        assert zset.score(member) == score
        assert member in zset
    assert zset.first_rank(probe) == sum(score < probe for score, _ in order)
    assert zset.first_rank(probe, after=True) == sum(score <= probe for score, _ in order)
    assert zset.slice(1, 3) == order[1:3]


@given(st.sets(members), members)
def test_name_ranks_of_equal_scores(names: set[bytes], probe: bytes) -> None:
    zset = ZSet((name, 2.0) for name in names)
    assert zset.first_name_rank(probe) == sum(name < probe for name in names)
    assert zset.first_name_rank(probe, after=True) == sum(name <= probe for name in names)


def test_absent_members_and_nan() -> None:
    zset = ZSet([(b"a", 1.0)])
    assert zset.score(b"x") is None
    assert zset.rank(b"x") is None
    assert b"x" not in zset
    assert not zset.add(b"a", 1.0)
    with pytest.raises(ValueError, match="number"):
        zset.add(b"a", math.nan)
    assert zset.slice(0, 9) == [(1.0, b"a")]
