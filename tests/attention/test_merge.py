"""Joining parts, against one-shot attention in fp64: case C14 and the bounds of the specification."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.attention.merge import merge, nothing, with_sinks
from pion.attention.numpy_ops import NumpyBackend
from pion.ref import attention as ref
from tests.support.attention import normal

EPS = float(np.finfo(np.float32).eps)


def part_of(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """By the backend, of keys that may be none."""
    return NumpyBackend().suffix(k, v, q, np.full(q.shape[1], k.shape[1]))


def test_c14_two_empty_parts_are_empty() -> None:
    out, lse = merge([nothing((2, 3, 8)), nothing((2, 3, 8))])
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("empty_before", [0, 1, 3])
@pytest.mark.parametrize("empty_behind", [0, 1, 2])
def test_c14_empty_parts_change_no_bit(empty_before: int, empty_behind: int) -> None:
    q, k, v = normal(0, 2, 3, 16), normal(1, 2, 9, 16), normal(2, 2, 9, 16)
    part = part_of(q, k, v)
    part[0][0, 0, :3] = -0.0, 1e-45, -1e-45  # added to a zero, the first would lose its sign
    nil = nothing(q.shape)
    out, lse = merge([*[nil] * empty_before, part, *[nil] * empty_behind])
    assert out.tobytes() == part[0].tobytes()
    assert lse.tobytes() == part[1].tobytes()


def test_c14_logits_of_minus_a_million_are_exact() -> None:
    q, v = np.full((1, 2, 8), 1e3, np.float32), normal(0, 1, 4, 8)
    k = np.full((1, 4, 8), -1e6 / 8e3, np.float32)
    part = part_of(q, k, v)
    assert np.allclose(part[1], -1e6 + np.log(4), rtol=1e-7)
    assert np.allclose(part[0], v.mean(axis=1)[:, None], atol=1e-6)
    out, lse = merge([nothing(q.shape), part])
    assert np.array_equal(out, part[0])
    assert np.array_equal(lse, part[1])


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 60), max_size=7), order=st.randoms(use_true_random=False), seed=st.integers(0, 999),
    spread=st.sampled_from([0.5, 1.0, 30.0, 1e4]),
)  # fmt: skip
def test_c14_any_split_in_any_order_equals_one_shot(cuts: list[int], order: Any, seed: int, spread: float) -> None:
    q, k, v = normal(seed, 2, 3, 16), normal(seed + 1, 2, 60, 16), normal(seed + 2, 2, 60, 16)
    q = q * np.float32(spread / 4)
    whole, total = ref.attend(q.astype(np.float64), k, v, scale=1.0)
    edges = [0, *sorted(cuts), 60]
    parts = [part_of(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)]
    order.shuffle(parts)
    out, lse = merge(parts)
    top = float(np.abs(q.astype(np.float64) @ k.swapaxes(1, 2)).max())
    bound = 1e-6 if top <= 5 else 8 * EPS * top * float(np.abs(v).max())
    assert np.abs(out - whole).max() <= bound
    assert np.abs(lse - total).max() <= max(1e-6, 8 * EPS * top)


def test_sinks_take_their_share() -> None:
    q, k, v = normal(0, 3, 2, 8), normal(1, 3, 5, 8), normal(2, 3, 5, 8)
    sinks = np.array([0.5, -np.inf, 30.0], np.float32)
    part = part_of(q * np.float32(8**-0.5), k, v)
    out, lse = with_sinks(part, sinks[:, None])
    logits = q.astype(np.float64) @ k.swapaxes(1, 2) / np.sqrt(8)
    total = np.exp(logits).sum(axis=2) + np.exp(sinks.astype(np.float64))[:, None]
    assert np.allclose(out, np.exp(logits) @ v / total[..., None], atol=1e-6)
    assert np.allclose(lse, np.log(total), atol=1e-6)
    assert np.array_equal(out[1], part[0][1])
    again = ref.with_sinks(part, sinks)
    assert np.allclose(again[0], out, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
    with pytest.raises(ValueError, match="do not fit"):
        merge([nothing((1, 2, 8)), nothing((1, 3, 8))])


def test_what_is_not_a_number_stays() -> None:
    """A part whose sum is NaN is no part without keys."""
    good = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    bad = np.full((1, 1, 4), np.nan, np.float32), np.full((1, 1), np.nan, np.float32)
    for parts in ([good, bad], [bad, good], [bad, nothing((1, 1, 4))], [nothing((1, 1, 4)), bad], [bad]):
        out, lse = merge(parts)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
