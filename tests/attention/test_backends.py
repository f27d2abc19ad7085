"""Every backend of this machine against the reference in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion.attention import choice, numpy_ops
from pion.attention.backends import Backend, make
from pion.attention.metal_ops import MetalBackend
from pion.ref import attention as ref
from tests.support.attention import BACKENDS, backend, cosine, normal

DIMS = (8, 24, 64, 80, 256, 512)


@pytest.fixture(params=BACKENDS, ids=lambda pair: pair[0] + ("-half" if pair[1] else ""))
def ops(request: pytest.FixtureRequest) -> Backend:
    return backend(*request.param)


def bound(ops: Backend) -> float:
    """The most an answer may be off: normal values, scaled queries."""
    return 2e-3 if "float16" in str(getattr(ops, "kind", "")) else 2e-6


def case(heads: int, rows: int, count: int, dim: int) -> tuple[Any, Any, Any, Any]:
    q, k, v = normal(1, heads, rows, dim), normal(2, heads, count, dim), normal(3, heads, count, dim)
    return q, q * np.float32(dim**-0.5), k, v


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 300), (3, 33), (7, 128)])
def test_dense(ops: Backend, dim: int, rows: int, count: int) -> None:
    q, scaled, k, v = case(3, rows, count, dim)
    for first in {0, count // 2}:
        out, lse = ops.dense(ops.hold(k, v), scaled, first)
        want = ref.attend(q.astype(np.float64), k[:, first:], v[:, first:])
        assert out.dtype == lse.dtype == np.float32
        assert np.abs(out - want[0]).max() <= bound(ops)
        assert np.abs(lse - want[1]).max() <= bound(ops)
        assert cosine(out, want[0]) >= 0.9999
        assert np.abs(ops.sums(ops.hold(k, v), scaled, first) - want[1]).max() <= bound(ops)


def test_every_multiple_of_8_up_to_512_is_a_head_size(ops: Backend) -> None:
    # Each size is another kernel; the emulator takes seconds to compile three of them.
    emulated = isinstance(ops, MetalBackend) and not isinstance(ops.how, str)
    for dim in range(8, 513, 72 if emulated else 8):
        q, scaled, k, v = case(2, 1, 20, dim)
        held, want = ops.hold(k, v), ref.attend(q.astype(np.float64), k, v)
        assert np.abs(ops.dense(held, scaled)[0] - want[0]).max() <= bound(ops), dim
        assert ops.table(held, 8, "quest")[1].shape == (2, 3, dim)


def test_many_queries_are_computed_piece_by_piece(ops: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    q, scaled, k, v = case(2, 9, 50, 16)
    monkeypatch.setattr("pion.attention.numpy_ops._TILE", 2 * 50 * 2)
    monkeypatch.setattr("pion.attention.mlx_ops._TILE", 2 * 50 * 2)
    want = ref.attend(q.astype(np.float64), k, v)
    out, lse = ops.dense(ops.hold(k, v), scaled)
    assert np.abs(out - want[0]).max() <= bound(ops)
    visible = np.array([1, 2, 3, 50, 49, 48, 7, 7, 7])
    out, lse = ops.suffix(k, v, scaled, visible)
    want = ref.attend(q.astype(np.float64), k, v, seen=np.arange(50) < visible[:, None])
    assert np.abs(out - want[0]).max() <= bound(ops)
    assert np.abs(lse - want[1]).max() <= bound(ops)


def test_what_is_held_is_a_copy(ops: Backend) -> None:
    _, scaled, k, v = case(1, 1, 20, 8)
    held = ops.hold(k, v)
    before = ops.dense(held, scaled)[0]
    k[:], v[:] = 0, 0
    assert np.array_equal(ops.dense(held, scaled)[0], before)


@pytest.mark.parametrize(
    "runs", [[(0, 3), (9, 10), (20, 40), (63, 64)], [(0, 64)], [(start, start + 1) for start in range(0, 256, 3)]]
)
def test_over_runs_of_positions(ops: Backend, runs: list[tuple[int, int]]) -> None:
    q, scaled, k, v = case(2, 2, 256, 16)
    where = np.concatenate([np.arange(*run) for run in runs])
    out, lse = ops.over(ops.hold(k, v), scaled, runs)
    want = ref.attend(q.astype(np.float64), k[:, where], v[:, where])
    assert np.abs(out - want[0]).max() <= bound(ops)
    assert np.abs(lse - want[1]).max() <= bound(ops)


def test_picked(ops: Backend) -> None:
    q, scaled, k, v = case(3, 1, 40, 16)
    positions = [np.array([3, 3, 39]), np.array([], np.int64), np.arange(40)]
    out, lse = ops.picked(ops.hold(k, v), scaled[:, 0], positions)
    want = ref.attend_picked(q[:, 0].astype(np.float64), k, v, positions)
    assert np.abs(out - want[0]).max() <= bound(ops)
    assert (out[1] == 0).all()
    assert lse[1] == -np.inf
    assert np.abs(lse[[0, 2]] - want[1][[0, 2]]).max() <= bound(ops)
    none = ops.picked(ops.hold(k, v), scaled[:, 0], [np.array([], np.int64)] * 3)
    assert (none[0] == 0).all()
    assert (none[1] == -np.inf).all()


@pytest.mark.parametrize(("count", "block"), [(64, 16), (65, 16), (5, 16), (33, 1)])
def test_blocks(ops: Backend, count: int, block: int) -> None:
    _, _, k, v = case(2, 1, count, 24)
    held = ops.hold(k, v)
    pieces = [k[:, start : start + block] for start in range(0, count, block)]
    means = np.stack([piece.mean(axis=1) for piece in pieces], axis=1)
    low, high = (np.stack([of(piece, axis=1) for piece in pieces], axis=1) for of in (np.min, np.max))
    assert np.abs(ops.means(held, block) - means).max() <= bound(ops)
    found = ops.extremes(held, block)
    assert np.abs(found[0] - low).max() <= bound(ops)
    assert np.abs(found[1] - high).max() <= bound(ops)


def test_a_suffix_that_half_precision_does_not_hold(ops: Backend) -> None:
    """It comes in fp32, and is computed with as it is."""
    q, scaled, k, v = case(2, 3, 20, 16)
    more_k, more_v = normal(7, 2, 4, 16), normal(8, 2, 4, 16) * np.float32(1e6)
    held, visible = ops.hold(k, v), np.array([2, 3, 4])
    part = ops.suffix(more_k, more_v, scaled, visible)
    want = ref.attend(q.astype(np.float64), more_k, more_v, seen=np.arange(4) < visible[:, None])
    assert np.abs(part[0] - want[0]).max() <= 2e-6 * 1e6
    if isinstance(ops, MetalBackend):
        whole = ref.merge([ref.attend(q.astype(np.float64), k, v), want])
        assert np.abs(ops.fused(held, scaled, more_k, more_v, 3)[0] - whole[0]).max() <= bound(ops) * 1e6
        table = ops.table(held, 4, "quest")
        first = ops.sparse(held, scaled[:, 0], np.arange(2), table, 4, 4, "quest", (more_k, more_v), 0)
        again = ops.sparse(held, scaled[:, 0], np.arange(2), table, 4, 4, "quest", None, 0)
        all_of_it = ref.attend(q[:, :1].astype(np.float64), more_k, more_v)
        both = ref.merge([(again[0][:, None], again[1][:, None]), all_of_it])
        assert np.abs(first[0] - both[0][:, 0]).max() <= 2e-6 * 1e6


def test_half_precision_takes_half_the_memory() -> None:
    k = normal(0, 2, 100, 64)
    assert 2 * make("cpu", True).hold(k, k).nbytes == make("cpu", False).hold(k, k).nbytes == 2 * k.nbytes


def test_a_cpu_computes_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "may_have_gpu", lambda: False)
    assert isinstance(make("auto", False), numpy_ops.NumpyBackend)


def test_what_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_mlx", lambda: False)
    for mode, why in (("metal", "no Metal here"), ("mlx", "mlx is not installed"), ("cuda", "want auto, metal")):
        with pytest.raises(ValueError, match=why):
            make(mode, False)
