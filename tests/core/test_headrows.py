"""Stored rows into the arrays of models, against the twin in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core import headrows
from pion.ref import headrows as ref

sizes = st.sampled_from([1, 2, 6, 64, 128, 256, 512, 520])


def some_rows(count: int, heads: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, (count, heads, size), np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 5), size=sizes, lengths=st.lists(st.integers(0, 40), max_size=4),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5), arrays=st.integers(0, 5), threads=st.integers(1, 3),
    fresh=st.booleans(),
)  # fmt: skip
def test_fills_like_the_twin(
    heads: int, size: int, lengths: list[int], gaps: list[int], arrays: int, threads: int, fresh: bool
) -> None:
    jobs, expected = [], []
    capacity = sum(lengths) + sum(gaps)
    for number in range(arrays):
        pieces, at = [], 0
        for gap, length in zip(gaps, lengths, strict=False):
            at += gap
            pieces.append((at, some_rows(length, heads, size, number)))
            at += length
        out = np.full((heads, capacity, size), 0xAA, np.uint8)
        twin = out.copy()
        ref.fill(twin, pieces)
        jobs.append((out, pieces))
        expected.append(twin)
    headrows.fill(jobs, heads, size, threads=threads, fresh=fresh)
    for (out, _), twin in zip(jobs, expected, strict=True):
        np.testing.assert_array_equal(out, twin)


def test_puts_and_clears() -> None:
    out = np.full((3, 10, 8), 7, np.uint8)
    twin = out.copy()
    rows = some_rows(4, 3, 8, 1)
    headrows.put(out, 5, rows, 3, 8)
    ref.put(twin, 5, rows)
    np.testing.assert_array_equal(out, twin)
    headrows.clear(out, 0, 2, 3, 8)
    twin[:, :2] = 0
    np.testing.assert_array_equal(out, twin)


def test_large_fresh_arrays_side_by_side() -> None:
    """Longer than huge pages, in every order of memory, touched by several threads for the first time."""
    heads, count, capacity, size, arrays = 3, 2100, 2304, 128, 24
    memory = np.empty(arrays * (heads * capacity * size + 64), np.uint8)
    each = heads * capacity * size
    outs = [memory[i * (each + 64) : i * (each + 64) + each].reshape(heads, capacity, size) for i in range(arrays)]
    rows = [some_rows(count, heads, size, number) for number in range(arrays)]
    order = np.random.default_rng(0).permutation(arrays)
    headrows.fill([(outs[i], [(0, rows[i])]) for i in order], heads, size, threads=3, fresh=True)
    for out, given_rows in zip(outs, rows, strict=True):
        np.testing.assert_array_equal(out[:, :count], given_rows.swapaxes(0, 1))
        assert not out[:, count:].any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda out, rows: headrows.put(out, 8, rows, 2, 4), "do not fit"),
        (lambda out, rows: headrows.put(out, -1, rows, 2, 4), "do not fit"),
        (lambda out, rows: headrows.put(out, 0, rows[:, :1, :3].copy(), 2, 4), "whole rows"),
        (lambda out, rows: headrows.put(out, 0, rows, 3, 4), "whole rows"),
        (lambda out, rows: headrows.put(out, 0, rows, 0, 4), "at least 1"),
        (lambda out, _: headrows.clear(out, 3, 2, 2, 4), "do not fit"),
        (lambda out, _: headrows.clear(out, 3, 11, 2, 4), "do not fit"),
        (lambda out, rows: headrows.fill([(out, [(0, rows), (3, rows)])], 2, 4), "overlap"),
        (lambda out, rows: headrows.fill([(out, [(7, rows)])], 2, 4), "do not fit"),
        (lambda out, rows: headrows.fill([(out, [(0, rows)])], 2, 4, threads=0), "threads"),
    ],
)
def test_refuses_what_does_not_fit(call: object, text: str) -> None:
    out, rows = np.zeros((2, 10, 4), np.uint8), some_rows(4, 2, 4, 0)
    with pytest.raises(ValueError, match=text):
        call(out, rows)  # type: ignore[operator]
    assert not out.any()


def test_reserving_changes_nothing() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)
    before = memory.copy()
    headrows.reserve([])
    headrows.reserve([memory[5 << 20 :], memory[: 5 << 20], np.empty(0, np.uint8)])
    np.testing.assert_array_equal(memory, before)


def test_a_buffer_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(BufferError):
        headrows.put(bytes(80), 0, bytes(8), 2, 4)
