"""Joining attention over parts of the keys: case C14, and the tolerances of the specification."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.ref.attention import attend, merge

EPS = float(np.finfo(np.float32).eps)


def some(seed: int, rows: int, heads: int = 2, queries: int = 3, dim: int = 16) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((2 * heads, queries, dim), (heads, rows, dim), (heads, rows, dim))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def nothing() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((4, 3, 16), np.float32), np.full((4, 3), -np.inf, np.float32)


def test_attend_is_the_softmax() -> None:
    q, k, v = some(0, 20)
    out, lse = attend(q, k, v)
    for head in range(4):
        logits = q[head].astype(np.float64) @ k[head // 2].T.astype(np.float64) / 4
        weights = np.exp(logits)
        assert np.allclose(out[head], weights / weights.sum(1, keepdims=True) @ v[head // 2], atol=1e-6)
        assert np.allclose(lse[head], np.log(weights.sum(1)), atol=1e-6)


def test_c14_two_empty_parts_are_empty() -> None:
    out, lse = merge([nothing(), nothing()])
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("turned", [False, True])
def test_c14_an_empty_part_changes_no_bit(turned: bool) -> None:
    part = attend(*some(1, 9))
    out, lse = merge([nothing(), part][:: -1 if turned else 1])
    assert np.array_equal(out, part[0])
    assert np.array_equal(lse, part[1])


def test_c14_logits_far_below_zero_count() -> None:
    """A part whose logits are all -1e6 is not masked."""
    q, k, v = some(2, 8)
    low = np.ones_like(q), -np.abs(k) * 0 - 1e6 / 4, v
    part = attend(*low)
    assert np.allclose(part[0], np.repeat(v.mean(axis=1), 2, axis=0)[:, None], atol=1e-5)
    assert np.isfinite(part[1]).all()
    out, lse = merge([part, nothing()])
    assert np.array_equal(out, part[0])
    assert np.array_equal(lse, part[1])


def test_c14_queries_before_the_first_key_see_nothing() -> None:
    """q_len > kv_len, causal: the first queries have zeros and -inf."""
    q, k, v = some(3, 2)
    seen = np.arange(2)[None, :] <= np.arange(3)[:, None] - 1
    out, lse = attend(q, k, v, seen=seen)
    assert (out[:, 0] == 0).all()
    assert (lse[:, 0] == -np.inf).all()
    assert np.array_equal(out[:, 1], np.repeat(v[:, 0], 2, axis=0))
    assert np.isfinite(lse[:, 1:]).all()


def test_c14_three_parts_in_every_order() -> None:
    q, k, v = some(4, 30)
    parts = [attend(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 7), (7, 8), (8, 30))]
    whole = attend(q, k, v)
    for order in itertools.permutations(parts):
        out, lse = merge(order)
        assert np.abs(out - whole[0]).max() < 1e-6
        assert np.abs(lse - whole[1]).max() < 1e-6


def test_c14_a_prefix_without_rows() -> None:
    q, k, v = some(5, 6)
    empty = attend(q, k[:, :0], v[:, :0])
    whole = attend(q, k, v)
    assert (empty[1] == -np.inf).all()
    assert np.array_equal(merge([empty, whole])[0], whole[0])


@settings(max_examples=80, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 1000), spread=st.sampled_from([1.0, 30.0, 1e4])
)
def test_any_split_equals_the_whole(cuts: list[int], seed: int, spread: float) -> None:
    q, k, v = some(seed, 40)
    q = q * np.float32(spread)
    edges = [0, *sorted(cuts), 40]
    whole = attend(q.astype(np.float64), k, v)
    out, _ = merge([attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)])
    top = np.abs(q.astype(np.float64) @ np.repeat(k, 2, axis=0).swapaxes(1, 2) / 4).max()
    bound = 1e-6 if top <= 5 else 8 * EPS * top * np.abs(v).max()
    assert np.abs(out - whole[0]).max() <= bound


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = some(6, 4)
    with pytest.raises(ValueError, match="do not fit"):
        attend(q, k, v[:, :3])
    with pytest.raises(ValueError, match="seen is"):
        attend(q, k, v, seen=np.ones((1, 4), bool))
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
