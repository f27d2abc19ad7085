"""Statistics of blocks of keys and the choice among them, against numpy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion import metal_kernels
from pion.metal_kernels import SELECTORS, Stats
from pion.metal_kernels.attention_blocks import MOST_BLOCKS
from tests.metal import cases
from tests.metal.attention_cases import COUNTS, DIMS, FEW_DIMS, SHARES, numbers, side
from tests.metal.emulated import Emulated, prepare
from tests.metal.emulator import Array
from tests.metal.test_attention import in_process
from tests.support import models

mx = models.mx


def statistics(keys: Array, block: int) -> tuple[Array, Array, Array]:
    """Mean, least, largest of each block of (H, N, D)."""
    starts = range(0, keys.shape[1], block)
    parts = [keys[:, at : at + block] for at in starts]
    mean, low, high = (np.stack([f(p, axis=1) for p in parts], axis=1) for f in (np.mean, np.min, np.max))
    return mean, low, high


def scores_of(q: Array, stats: tuple[Array, Array, Array], kv_of: Array, selector: str) -> Array:
    """The mean over the heads, in double precision."""
    mean, low, high = (side[kv_of].astype(np.float64) for side in stats)
    rows = q.astype(np.float64)[:, None]
    each = rows * mean if selector == "block_mean" else np.maximum(rows * low, rows * high)
    total: Array = each.sum(axis=2).mean(axis=0) * q.shape[1] ** -0.5
    return total


def best(scores: Array, most: int) -> list[int]:
    """The best blocks and the last one, ascending; of equal ones the lower."""
    chosen = sorted(range(len(scores)), key=lambda b: (-scores[b], b))[:most]
    return sorted({*chosen, len(scores) - 1})


def check_selection(got: Any, scores: Array, most: int) -> None:
    """As `best`, but for scores that differ by rounding alone."""
    picked = np.array(got)
    assert picked.dtype == np.int32
    assert picked.shape == (min(most, len(scores)) + 1,)
    numbers_of = picked[picked >= 0]
    assert (np.diff(numbers_of) > 0).all()
    assert (picked[len(numbers_of) :] == -1).all()
    want = best(scores, most)
    assert len(numbers_of) == len(want)
    for one, other in zip(sorted(set(numbers_of) - set(want)), sorted(set(want) - set(numbers_of)), strict=True):
        assert abs(scores[one] - scores[other]) < 1e-5 * max(1.0, abs(scores[one]))


def try_all(how: Any, convert: Any, dim: int, count: int, share: int, dtype: str, block: int) -> None:
    rng = np.random.default_rng([dim, count, share, block])
    heads = 2
    k = side(rng, (heads, count, dim), dtype)
    q = rng.normal(size=(heads * share, dim)).astype(np.float32)
    stats = metal_kernels.block_stats(convert(k), block, how=how)
    want = statistics(numbers(k), block)
    np.testing.assert_allclose(np.array(stats.mean), want[0], atol=1e-6)
    np.testing.assert_array_equal(np.array(stats.low), want[1])
    np.testing.assert_array_equal(np.array(stats.high), want[2])
    head_map = None if share < 3 else np.roll(np.arange(heads * share) // share, 1)
    kv_of = np.arange(heads * share) // share if head_map is None else head_map
    for selector in SELECTORS:
        for most in (1, 3, 1000):
            got = metal_kernels.select(convert(q), stats, most, selector=selector, head_map=head_map, how=how)
            check_selection(got, scores_of(q, want, kv_of, selector), most)


@pytest.mark.parametrize("dim", [64, 80])
def test_emulated_kernels_equal_the_reference(dim: int) -> None:
    for order in (0, 1):
        for turn, (count, share) in enumerate((count, share) for count in (1, 33, 300) for share in SHARES):
            try_all(Emulated(order), np.asarray, dim, count, share, ("float32", "float16")[turn % 2], (8, 16)[turn % 2])


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
def test_emulated_kernels_equal_the_reference_in_all_sizes(dim: int) -> None:
    for order in (0, 1):
        for turn, (count, share) in enumerate((count, share) for count in COUNTS for share in SHARES):
            try_all(Emulated(order), np.asarray, dim, count, share, cases.DTYPES[turn % 3], (64, 7)[turn % 2])


@pytest.mark.parametrize("dim", FEW_DIMS)
def test_portable_twins_equal_the_reference(dim: int) -> None:
    how, convert = in_process("ops")
    for turn, (count, share) in enumerate((count, share) for count in COUNTS for share in SHARES):
        try_all(how, convert, dim, count, share, cases.DTYPES[turn % 3], (64, 7)[turn % 2])


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_of_equal_blocks_the_lower_are_taken_and_the_last_one_always(how: str) -> None:
    device, convert = in_process(how)
    k = np.zeros((1, 40, 32), np.float32)
    k[0, 8:12] = k[0, 20:24] = k[0, 32:36] = 1  # blocks 2, 5 and 8 of 10 are alike
    stats = metal_kernels.block_stats(convert(k), 4, how=device)
    q = convert(np.ones((1, 32), np.float32))
    for most, want in ((1, [2, 9]), (2, [2, 5, 9]), (3, [2, 5, 8, 9]), (4, [0, 2, 5, 8, 9])):
        assert np.array(metal_kernels.select(q, stats, most, how=device)).tolist() == want
    # The last block is among the best: nothing is left to add.
    assert np.array(metal_kernels.select(q, stats, 10, how=device)).tolist() == [*range(10), -1]
    k[0, 36:] = 2
    stats = metal_kernels.block_stats(convert(k), 4, how=device)
    assert np.array(metal_kernels.select(q, stats, 2, how=device)).tolist() == [2, 9, -1]


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_a_score_that_is_no_number_goes_last(how: str) -> None:
    device, convert = in_process(how)
    k = np.ones((1, 24, 32), np.float32)
    k[0, :8] = np.nan
    mean, low, high = (convert(side.astype(np.float32)) for side in statistics(k, 4))
    q = convert(np.ones((1, 32), np.float32))
    assert np.array(metal_kernels.select(q, Stats(mean, low, high), 2, how=device)).tolist() == [2, 3, 5]


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_quest_finds_a_key_that_the_mean_hides(how: str) -> None:
    device, convert = in_process(how)
    rng = np.random.default_rng(3)
    q = rng.normal(size=(2, 64)).astype(np.float32)
    k = rng.normal(size=(1, 128, 64)).astype(np.float32) * 0.1
    k[0, 40] = 3 * q.mean(axis=0)
    k[0, 41:44] = -k[0, 40] * 1.5  # the mean of block 2 looks away
    stats = metal_kernels.block_stats(convert(k), 16, how=device)
    chosen = {
        selector: np.array(metal_kernels.select(convert(q), stats, 1, selector=selector, how=device)).tolist()
        for selector in SELECTORS
    }
    assert 2 in chosen["quest"]
    assert 2 not in chosen["block_mean"]


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_all_blocks_are_the_whole_prefix(how: str) -> None:
    device, convert = in_process(how)
    rng = np.random.default_rng(4)
    q = rng.normal(size=(8, 128)).astype(np.float32)
    k, v = rng.normal(size=(2, 4, 1000, 128)).astype(np.float32)
    stats = metal_kernels.block_stats(convert(k), 64, how=device)
    blocks = metal_kernels.select(convert(q), stats, 16, how=device)
    sparse = metal_kernels.gather_blocks(*map(convert, (q, k, v)), blocks, 64, how=device)
    whole = metal_kernels.dense(*map(convert, (q[:, None], k, v)), how=device)
    np.testing.assert_allclose(np.array(sparse[0]), np.array(whole[0])[:, 0], atol=1e-6)
    np.testing.assert_allclose(np.array(sparse[1]), np.array(whole[1])[:, 0], atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    device = Emulated()
    q, k = np.zeros((2, 32), np.float32), np.zeros((1, 40, 32), np.float32)
    stats = Stats(*(side.astype(np.float32) for side in statistics(k, 4)))
    with pytest.raises(ValueError, match="selector 'best': one of block_mean, quest"):
        metal_kernels.select(q, stats, 2, selector="best", how=device)
    with pytest.raises(ValueError, match="0 blocks of statistics"):
        metal_kernels.select(q, stats, 0, how=device)
    with pytest.raises(ValueError, match=r"keys \(1, 40, 32\) in blocks of 0"):
        metal_kernels.block_stats(k, 0, how=device)
    wide = Stats(*[np.zeros((1, MOST_BLOCKS + 1, 32), np.float32)] * 3)
    with pytest.raises(ValueError, match=f"{MOST_BLOCKS} are supported"):
        metal_kernels.select(q, wide, 2, how=device)


def test_many_blocks() -> None:
    """As many as one threadgroup can rank, and more than it has threads."""
    device, blocks = Emulated(1), 1500
    rng = np.random.default_rng(11)
    q, mean = rng.normal(size=(1, 32)).astype(np.float32), rng.normal(size=(1, blocks, 32)).astype(np.float32)
    stats = Stats(mean, mean, mean)
    prepare(device, [lambda how: metal_kernels.select(q, stats, 40, how=how)])
    got = metal_kernels.select(q, stats, 40, how=device)
    check_selection(got, scores_of(q, stats, np.zeros(1, np.intp), "block_mean"), 40)
