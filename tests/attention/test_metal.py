"""The backend of Metal kernels, its kernels emulated: as a backend, and under the engine beside the one of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion.attention.backends import Backend
from pion.attention.engine import AttentionEngine
from pion.attention.select import SELECTORS
from tests.attention.test_backends import (  # noqa: F401 - they run here with the fixture of this file
    test_blocks,
    test_over_runs_of_positions,
    test_picked,
    test_what_is_held_is_a_copy,
)
from tests.attention.test_backends import test_dense as dense_of_a_backend
from tests.support.attention import metal, normal


@pytest.fixture(params=[False, True], ids=["float", "half"])
def ops(request: pytest.FixtureRequest) -> Backend:
    return metal(request.param)


@pytest.mark.parametrize(("dim", "rows", "count"), [(24, 1, 300), (80, 3, 33), (256, 7, 128)])
def test_dense(ops: Backend, dim: int, rows: int, count: int) -> None:
    dense_of_a_backend(ops, dim, rows, count)


def engines(count: int, heads: int, dim: int, **options: Any) -> list[AttentionEngine]:
    """The same K/V in an engine that computes with kernels, and in one that computes with numpy."""
    both = []
    for backend in (metal(order=1), None):
        engine = AttentionEngine(backend="cpu", **options)
        engine.backend = backend or engine.backend
        engine.store(b"s", 0, normal(1, heads, count, dim), normal(2, heads, count, dim))
        both.append(engine)
    return both


def equal(answers: list[Any]) -> None:
    for one, other in zip(*answers, strict=True):
        assert np.abs(one - other).max() <= 2e-6


@pytest.mark.parametrize("window", [0, 40])
def test_a_query_is_answered_as_by_numpy(window: int) -> None:
    q, sinks = normal(3, 2, 3, 64), normal(4, 2)
    both = engines(100, 2, 64, window=window)
    equal([engine.query(b"s", 0, q, sinks=sinks) for engine in both])
    equal([engine.query(b"s", 0, q, window=7) for engine in both])


@pytest.mark.parametrize("head_map", [[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 1, 0]])
@pytest.mark.parametrize(("rows", "suffix"), [(1, 9), (4, 9), (4, 2), (2, 0)])
def test_a_fused_query_is_answered_as_by_numpy(head_map: list[int], rows: int, suffix: int) -> None:
    q, k, v = normal(3, 6, rows, 64), normal(4, 2, suffix, 64), normal(5, 2, suffix, 64)
    both = engines(100, 2, 64)
    for options in ({}, {"window": 30}, {"sinks": normal(6, 6)}):
        equal([[engine.query_fused(b"s", 0, q, k, v, np.array(head_map), **options)] for engine in both])


def test_sparse_queries_are_answered_as_by_numpy() -> None:
    both = engines(100, 2, 64)
    rng = np.random.default_rng(7)
    indices, counts = rng.integers(-3, 110, (2, 50)).astype(np.int32), np.array([50, 12], np.uint32)
    equal([engine.query_sparse(b"s", 0, normal(3, 2, 64), indices, counts, window=80) for engine in both])
    q, head_map = normal(3, 6, 64), np.arange(6) // 3
    for selector in SELECTORS:
        for suffix in (None, 5):
            more = {} if suffix is None else {"k_suf": normal(4, 2, suffix, 64), "v_suf": normal(5, 2, suffix, 64)}
            for k_top in (2, 100):
                given: Any = (b"s", 0, q, 16, k_top, 2, head_map)
                equal([engine.query_sparse_auto(*given, selector=selector, **more) for engine in both])
