"""Attention on a real server: case C14."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from pion.ref import attention as ref
from tests.support import attend
from tests.support.attention import normal
from tests.support.process import Process
from tests.support.raw import Raw


def test_c14_parts_from_the_server_join_in_every_order(tmp_path: Path) -> None:
    """Three sessions that hold a part of a prefix each, and two empty parts."""
    k, v, q = normal(1, 2, 30, 16), normal(2, 2, 30, 16), normal(3, 2, 3, 16)
    whole = ref.attend(q.astype(np.float64), k, v)
    empty = np.zeros_like(q), np.full(q.shape[:2], -np.inf, np.float32)
    with Process(tmp_path, "--memory-only") as process, Raw(process.port) as conn:
        parts = [empty, empty]
        for number, (start, end) in enumerate(((0, 7), (7, 8), (8, 30))):
            own = [np.ascontiguousarray(side[:, start:end]) for side in (k, v)]
            assert attend.store(conn, f"p{number}", 0, *own) == "OK"
            parts.append(attend.query(conn, f"p{number}", 0, q))
    for order in itertools.permutations(parts):
        out, lse = ref.merge(order)
        assert np.abs(out - whole[0]).max() < 1e-6
        assert np.abs(lse - whole[1]).max() < 1e-6


def test_c14_logits_of_minus_a_million_are_answered_exactly(tmp_path: Path) -> None:
    k = np.full((1, 8, 16), -1e6 / 4e3, np.float32)  # times 1e3, 16 channels, scale 1/4
    v, q = normal(2, 1, 8, 16), np.full((1, 2, 16), 1e3, np.float32)
    low = q, np.zeros((1, 0, 16), np.float32)
    with Process(tmp_path, "--memory-only") as process, Raw(process.port) as conn:
        attend.store(conn, "low", 0, k, v)
        out, lse = attend.query(conn, "low", 0, q)
        assert np.abs(out - v.mean(axis=1)[:, None]).max() < 1e-6
        assert np.allclose(lse, -1e6 + np.log(8), rtol=1e-7)
        fused = attend.fused(conn, "low", 0, low[0], low[1], low[1], [0])
        assert np.array_equal(fused, out)  # an empty suffix changes no bit


def test_c14_more_queries_than_suffix_keys(tmp_path: Path) -> None:
    """Row m sees the suffix up to max(S - M, 0) + m: with M > S nothing is negative, nothing is NaN."""
    k, v = normal(1, 1, 4, 8), normal(2, 1, 4, 8)
    q, extra = normal(3, 1, 5, 8), normal(4, 1, 2, 8)
    with Process(tmp_path, "--memory-only") as process, Raw(process.port) as conn:
        attend.store(conn, "s", 0, k, v)
        out = attend.fused(conn, "s", 0, q, extra, extra, [0])
    seen = np.concatenate([np.ones((5, 4), bool), np.arange(2) <= np.arange(5)[:, None]], axis=1)
    both = [np.concatenate([side, extra], axis=1) for side in (k, v)]
    assert np.abs(out - ref.attend(q.astype(np.float64), *both, seen=seen)[0]).max() < 1e-6
