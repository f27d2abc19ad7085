"""Parts of attention in MLX operations against numpy in double precision: masks, suffixes, merging, blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pion.client.attention_parts import Blocks, Seen, merge, sparse_attention, suffix_part
from tests.support import models

models.need_mlx()
mx = models.mx


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def oracle(q: Any, k: Any, v: Any, seen: Any) -> tuple[Any, Any]:
    """q (H, M, D) scaled, k and v (H, T, D), seen (M, T); rows that see nothing: zeros, -inf."""
    scores = np.where(seen, q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2), -np.inf)
    top = scores.max(axis=2, keepdims=True)
    base = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - base)
    total = weights.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total > 0, total, 1) @ v, (base + np.log(total))[..., 0]


# --- masks ------------------------------------------------------------------------------------------------------------

PREFIX, SUFFIX = 10, 5


def causal(rows: int, window: int = 1000) -> Any:
    """(rows, PREFIX + SUFFIX), as mlx-lm makes them."""
    place = np.arange(PREFIX + SUFFIX)
    own = place[-rows:, None]
    return (place <= own) & (place > own - window)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("window", [1000, 12, 6, 5, 2])
@pytest.mark.parametrize("kind", ["bool", "fp32", "fp16", "four axes"])
def test_what_an_array_shows_is_read_off_it(rows: int, window: int, kind: str) -> None:
    shown = causal(rows, window)
    mask = mx.array(shown)
    if kind in ("fp32", "fp16"):
        mask = (mx.where(mask, 0.0, -1e9)).astype(mx.float32 if kind == "fp32" else mx.float16)
    elif kind == "four axes":
        mask = mask[None, None]
    seen = Seen.of(mask, rows, PREFIX, SUFFIX)
    np.testing.assert_array_equal(seen.prefix, shown[:, :PREFIX].sum(axis=1))
    np.testing.assert_array_equal(seen.suffix, shown[:, PREFIX:])
    assert seen.whole == bool(shown[:, :PREFIX].all())
    assert seen.causal == bool((shown[:, PREFIX:] == causal(rows)[:, PREFIX:]).all())


@pytest.mark.parametrize("rows", [1, 4])
def test_a_window_bounds_what_a_word_shows(rows: int) -> None:
    for window in (3, 8, 14, 15, 100):
        shown = causal(rows, window)
        seen = Seen.of("causal", rows, PREFIX, SUFFIX, window)
        np.testing.assert_array_equal(seen.prefix, shown[:, :PREFIX].sum(axis=1))
        np.testing.assert_array_equal(seen.suffix, shown[:, PREFIX:])
    seen = Seen.of("causal", rows, PREFIX, SUFFIX)
    assert (seen.whole, seen.causal) == (True, True)


def test_no_mask_shows_everything() -> None:
    one, many = Seen.of(None, 1, PREFIX, SUFFIX), Seen.of(None, 3, PREFIX, SUFFIX)
    assert (one.causal, many.causal) == (True, False)
    assert many.suffix.all()
    assert many.whole


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ("sliding", "mask 'sliding'"),
        (np.ones((3, PREFIX + SUFFIX - 1), bool), "shape"),
        (np.ones((2, PREFIX + SUFFIX), bool), "shape"),
        (np.ones((1, 4, 3, PREFIX + SUFFIX), bool), "differs between heads"),
        (np.full((3, PREFIX + SUFFIX), -0.5, np.float32), "adds to the logits"),
        (np.arange(3 * (PREFIX + SUFFIX)).reshape(3, -1) % 2 == 0, "middle of the prefix"),
    ],
)
def test_other_masks_are_refused_by_name(mask: Any, why: str) -> None:
    given = mask if isinstance(mask, str) else mx.array(mask)
    with pytest.raises(NotImplementedError, match=f"PionPrefixCache .*{why}"):
        Seen.of(given, 3, PREFIX, SUFFIX)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3])
def test_a_suffix_and_its_sum(heads: int) -> None:
    q, k, v = normal(6, 4, 8, seed=1), normal(6 // heads, 7, 8, seed=2), normal(6 // heads, 7, 8, seed=3)
    seen = np.tri(4, 7, 2, dtype=bool)
    seen[1] = False
    out, lse = suffix_part(*map(mx.array, (q, k, v)), seen)
    of = np.arange(6) // heads
    want = oracle(q, k[of], v[of], seen)
    np.testing.assert_allclose(np.array(out), want[0], atol=1e-6)
    np.testing.assert_allclose(np.array(lse), want[1], atol=1e-6)
    assert np.isneginf(np.array(lse)[:, 1]).all()
    sinks = normal(6, seed=4)
    with_sinks = suffix_part(*map(mx.array, (q, k, v)), seen, mx.array(sinks))
    share = 1 / (1 + np.exp(sinks[:, None] - want[1]))
    np.testing.assert_allclose(np.array(with_sinks[0]), want[0] * share[..., None], atol=1e-6)
    np.testing.assert_allclose(np.array(with_sinks[1]), np.logaddexp(want[1], sinks[:, None]), atol=1e-6)


def test_c14_parts_in_any_split_are_the_whole() -> None:
    """Any split, any order, empty parts among them; logits far below -5e4 too; nothing is NaN."""
    for scale, offset in ((1.0, 0.0), (1.0, -6e4), (300.0, 0.0)):
        q, k, v = normal(2, 3, 8, seed=1) * scale, normal(2, 20, 8, seed=2), normal(2, 20, 8, seed=3)
        seen = np.tri(3, 20, 14, dtype=bool)
        whole = suffix_part(*map(mx.array, (q, k, v)), seen)
        rng = np.random.default_rng(5)
        for _ in range(5):
            cuts = [0, *sorted(rng.integers(0, 21, 3).tolist()), 20]
            parts = [
                suffix_part(mx.array(q), mx.array(k[:, a:b]), mx.array(v[:, a:b]), seen[:, a:b])
                for a, b in itertools.pairwise(cuts)
                if b > a
            ]
            parts = [(out, lse + offset) for out, lse in parts]
            empty = (mx.zeros((2, 3, 8)), mx.full((2, 3), -mx.inf))
            parts = [parts[i] for i in rng.permutation(len(parts))] + [empty]
            out, lse = merge(parts)
            bound = 1e-6 if scale == 1.0 else 8 * 2**-23 * 300 * 30
            np.testing.assert_allclose(np.array(out), np.array(whole[0]), atol=max(bound, 1e-6 if not offset else 1e-2))
            assert np.isfinite(np.array(lse)).all()
    out, lse = merge([empty, empty])
    assert not np.array(out).any()
    assert np.isneginf(np.array(lse)).all()


# --- blocks -----------------------------------------------------------------------------------------------------------


def chosen(q: Any, k: Any, block: int, count: int, selector: str) -> list[int]:
    """The positions of the blocks that fit best and of the last one, by the definition."""
    total = -(-k.shape[1] // block)
    scores = []
    for number in range(total):
        some = k[:, number * block : (number + 1) * block]
        if selector == "quest":
            bound = np.maximum(q * some.min(axis=1)[HEADS], q * some.max(axis=1)[HEADS])
            scores.append(bound.sum(axis=1).mean())
        else:
            scores.append((q * some.mean(axis=1)[HEADS]).sum(axis=1).mean())
    best = sorted(range(total), key=lambda number: (-scores[number], number))[:count]
    return [p for number in sorted({*best, total - 1}) for p in range(number * block, min((number + 1) * block, PRE))]


HEADS = np.arange(6) // 3
PRE = 45


@pytest.mark.parametrize("selector", ["block_mean", "quest"])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_sparse_attention_sees_the_chosen_blocks_the_last_one_and_all_that_follows(selector: str, count: int) -> None:
    q, k, v = normal(6, 1, 16, seed=1), normal(2, PRE + 3, 16, seed=2), normal(2, PRE + 3, 16, seed=3)
    blocks = Blocks.of({"K_block": 8, "K_blocks": count, "selector": selector})
    assert blocks is not None
    got = sparse_attention(*(mx.array(a)[None] for a in (q, k, v)), PRE, blocks, 0.25, None)
    where = [*chosen(q[:, 0], k[:, :PRE], 8, count, selector), *range(PRE, PRE + 3)]
    assert count == 5 or len(where) < PRE + 3
    want, _ = oracle(q * 0.25, k[:, where][HEADS], v[:, where][HEADS], np.ones((1, len(where)), bool))
    np.testing.assert_allclose(np.array(got)[0], want, atol=1e-6)
    assert sparse_attention(*(mx.array(a)[None] for a in (q, k, v)), PRE, Blocks(8, 6, selector), 0.25, None) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"K_block": 0}, "positive"),
        ({"selector": "best"}, "unknown selector 'best'; expected 'block_mean' or 'quest'"),
        ({"blocks": 8}, "a dict of K_block, K_blocks and selector"),
        ([64, 8], "a dict of K_block"),
    ],
)
def test_other_sparse_modes_are_refused(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Blocks.of(given)
    assert Blocks.of(None) is None
    assert Blocks.of({"K_blocks": 3}) == Blocks(64, 3, "block_mean")
