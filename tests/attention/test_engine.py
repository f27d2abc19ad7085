"""The engine: slots, grouped heads, windows, sinks, sparse queries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion import limits
from pion.attention.engine import AttentionEngine
from pion.errors import AttentionMissError, ColdMissError
from pion.ref import attention as ref
from tests.support.attention import backend, cosine, normal

SELECTORS = (ref.BLOCK_MEAN, ref.QUEST)


@pytest.fixture(
    autouse=True, params=["cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlx", "metal"))]
)
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every engine of this file computes with this backend."""
    name: str = request.param
    backend(name, False)  # skips where it cannot be
    monkeypatch.setattr("pion.attention.engine.make", lambda _, half: backend(name, half))
    return name


def stored(count: int, heads: int = 2, dim: int = 32, **options: Any) -> tuple[AttentionEngine, Any, Any]:
    engine = AttentionEngine(backend="cpu", **options)
    k, v = normal(1, heads, count, dim), normal(2, heads, count, dim)
    engine.store(b"s", 0, k, v)
    return engine, k, v


def wide(q: Any) -> Any:
    return q.astype(np.float64)


# --- slots -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_layer_goes_cold() -> None:
    engine = AttentionEngine(backend="cpu", warm_slots=2)
    k = normal(0, 1, 4, 8)
    for layer in range(2):
        engine.store(b"s", layer, k, k)
    engine.query(b"s", 0, k[:, :1])  # now layer 1 is older
    engine.lookup(b"s", 1)  # asking is no use
    engine.store(b"s", 2, k, k)
    assert [engine.lookup(b"s", layer) for layer in range(4)] == ["HIT", "COLD", "HIT", "MISS"]
    with pytest.raises(ColdMissError, match=r"^COLDMISS session evicted to cold tier"):
        engine.query(b"s", 1, k[:, :1])
    with pytest.raises(AttentionMissError):
        engine.query(b"s", 3, k[:, :1])
    engine.store(b"s", 1, k, k)
    figures = engine.info()
    assert [figures[f"sdpa_{name}"] for name in ("warm", "cold", "demotions", "rehydrates")] == [2, 1, 2, 1]
    assert engine.layers(b"s") == {0: ("COLD", (1, 4, 8)), 1: ("HIT", (1, 4, 8)), 2: ("HIT", (1, 4, 8))}


def test_the_oldest_cold_layer_is_forgotten() -> None:
    engine = AttentionEngine(backend="cpu", warm_slots=1, cold_slots=2)
    k = normal(0, 1, 4, 8)
    for layer in range(5):
        engine.store(b"s", layer, k, k)
    assert [engine.lookup(b"s", layer) for layer in range(5)] == ["MISS", "MISS", "COLD", "COLD", "HIT"]


def test_bytes_are_bounded_and_given_back() -> None:
    k = normal(0, 1, 64, 8)
    each = 2 * k.nbytes
    engine = AttentionEngine(backend="cpu", max_bytes=3 * each)
    for layer in range(5):
        engine.store(b"s", layer, k, k)
        assert engine.info()["sdpa_warm_bytes"] <= 3 * each
    assert engine.info()["sdpa_warm"] == 3
    engine.store(b"s", 4, k, k)  # in place of what was there
    assert engine.info()["sdpa_warm_bytes"] == 3 * each
    with pytest.raises(ValueError, match="--attend-max-bytes"):
        engine.store(b"s", 9, normal(0, 1, 200, 8), normal(0, 1, 200, 8))
    assert engine.drop(b"s") == 5
    assert engine.drop(b"s") == 0
    assert engine.info()["sdpa_warm_bytes"] == 0
    assert engine.lookup(b"s", 0) == "MISS"


def test_block_tables_count_as_memory() -> None:
    engine, k, _ = stored(128)
    before = engine.info()["sdpa_warm_bytes"]
    assert before == 2 * k.nbytes
    q = normal(3, 2, 32)
    head_map = np.arange(2)
    for block in (8, 16, 32):
        engine.query_sparse_auto(b"s", 0, q, block, 1, 2, head_map)
    assert engine.info()["sdpa_warm_bytes"] == before + k.nbytes // 16 + k.nbytes // 32  # two are kept
    engine.drop(b"s")
    assert engine.info()["sdpa_warm_bytes"] == 0


def test_a_table_that_does_not_fit_is_not_kept() -> None:
    engine, k, _ = stored(128, max_bytes=2 * 2 * 128 * 32 * 4)
    engine.query_sparse_auto(b"s", 0, normal(3, 2, 32), 2, 1, 2, np.arange(2))
    assert engine.info()["sdpa_warm_bytes"] == 2 * k.nbytes
    assert engine.lookup(b"s", 0) == "HIT"


@pytest.mark.parametrize("dim", [0, 4, 12, 520])
def test_head_sizes_that_are_not_supported(dim: int) -> None:
    engine = AttentionEngine(backend="cpu")
    with pytest.raises(ValueError, match=limits.ATTEND_HEAD_DIMS):
        engine.store(b"s", 0, np.zeros((1, 1, dim), np.float32), np.zeros((1, 1, dim), np.float32))
    assert engine.lookup(b"s", 0) == "MISS"


def test_half_precision_refuses_what_it_cannot_hold() -> None:
    engine = AttentionEngine(backend="cpu", half=True)
    k = normal(0, 1, 4, 8)
    for bad in (7e4, -7e4, np.inf, np.nan):
        worse = k.copy()
        worse[0, 1, 2] = bad
        with pytest.raises(ValueError, match="half precision"):
            engine.store(b"s", 0, k, worse)
    engine.store(b"s", 0, k, k)
    want = ref.attend(wide(k[:, :1]), k, k)[0]
    assert cosine(engine.query(b"s", 0, k[:, :1])[0], want) >= 0.99


def test_values_near_the_end_of_fp32(computed_by: str) -> None:
    """A sum of them overflows, their mean does not. The kernels sum: they refuse."""
    engine = AttentionEngine(backend="cpu")
    k, v = normal(0, 2, 300, 16), np.full((2, 300, 16), 3e38, np.float32)
    engine.store(b"s", 0, k, v)
    q, heads = normal(1, 2, 16), np.arange(2)
    calls: list[Callable[[], Any]] = [
        lambda: engine.query(b"s", 0, q[:, None])[0],
        lambda: engine.query_fused(b"s", 0, q[:, None], k[:, :3], v[:, :3], heads),
        lambda: engine.query_sparse(b"s", 0, q, np.arange(20).reshape(2, 10), np.full(2, 10))[0],
        lambda: engine.query_sparse_auto(b"s", 0, q, 16, 2, 2, heads)[0],
    ]
    for call in calls:
        if computed_by == "metal":
            with pytest.raises(ValueError, match="no answer in fp32"):
                call()
        else:
            np.testing.assert_allclose(call(), 3e38, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_has_no_answer_is_refused(bad: float) -> None:
    engine = AttentionEngine(backend="cpu")
    k, v = normal(0, 2, 40, 16), normal(1, 2, 40, 16)
    k[1, 7] = bad
    engine.store(b"s", 0, k, v)
    q, heads = np.full((2, 16), 9, np.float32), np.arange(2)
    everything = np.tile(np.arange(40), (2, 1))
    calls: list[Callable[[], Any]] = [
        lambda: engine.query(b"s", 0, q[:, None]),
        lambda: engine.query_fused(b"s", 0, q[:, None], k, v, heads),
        lambda: engine.query_sparse(b"s", 0, q, everything, np.full(2, 40)),
        lambda: engine.query_sparse_auto(b"s", 0, q, 16, 9, 2, heads),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no answer in fp32"):
            call()


def test_keys_that_all_overflow_downwards_are_not_taken_for_none() -> None:
    """-inf says that nothing was seen; here all was."""
    engine = AttentionEngine(backend="cpu")
    k, v = np.full((2, 20, 16), -3e38, np.float32), normal(1, 2, 20, 16)
    engine.store(b"s", 0, k, v)
    q, heads, picks = np.full((2, 16), 9, np.float32), np.arange(2), np.arange(4).reshape(2, 2)
    sinks = np.zeros(2, np.float32)
    calls: list[Callable[[], Any]] = [
        lambda: engine.query(b"s", 0, q[:, None]),
        lambda: engine.query(b"s", 0, q[:, None], sinks=sinks),
        lambda: engine.query_fused(b"s", 0, q[:, None], k[:, :0], v[:, :0], heads),
        lambda: engine.query_sparse(b"s", 0, q, picks, np.array([0, 2]), with_mass=False),
        lambda: engine.query_sparse_auto(b"s", 0, q, 4, 9, 2, heads, with_mass=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no answer in fp32"):
            call()
    none = np.zeros(2, np.int32)
    for sink in (None, np.full(2, -np.inf, np.float32), sinks):
        out, _ = engine.query_sparse(b"s", 0, q, picks, none, sinks=sink, with_mass=False)
        assert not out.any()  # nothing was picked


def test_the_mass_of_keys_beside_one_that_is_no_number_is_refused() -> None:
    engine, k, v = stored(40, 2, 16)
    k = k.copy()
    k[1, 33] = np.nan
    engine.store(b"s", 0, k, v)
    q, picks = normal(5, 2, 16), np.arange(4).reshape(2, 2)
    assert np.isfinite(engine.query_sparse(b"s", 0, q, picks, np.full(2, 2), with_mass=False)[0]).all()
    with pytest.raises(ValueError, match="no answer in fp32"):
        engine.query_sparse(b"s", 0, q, picks, np.full(2, 2))


def test_queries_go_on_while_layers_come_and_go() -> None:
    engine = AttentionEngine(backend="cpu", warm_slots=2)
    k, v = normal(1, 2, 50, 16), normal(2, 2, 50, 16)
    want = ref.attend(wide(k[:, :2]), k, v)[0]
    wrong: list[Any] = []

    def ask() -> None:
        for _ in range(150):
            for call in (
                lambda: engine.query(b"s", 0, k[:, :2])[0],
                lambda: engine.query_sparse_auto(b"s", 0, k[:, 0], 8, 99, 2, np.arange(2))[0][:, None],
            ):
                try:
                    out = call()
                except (ColdMissError, AttentionMissError):
                    continue
                if np.abs(out - want[:, : out.shape[1]]).max() > 1e-5:
                    wrong.append(out)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(300):
        engine.store(b"s", turn % 4, k, v)
        if turn % 50 == 49:
            engine.drop(b"s")
    for thread in threads:
        thread.join()
    assert not wrong
    held = engine.info()
    assert held["sdpa_warm_bytes"] == held["sdpa_warm"] * 2 * k.nbytes  # no table: all blocks were asked for


# --- dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "own", "first"), [(-1, 0, 0), (0, 7, 0), (-1, 7, 23), (7, 0, 23), (99, 7, 0)])
def test_windows(window: int, own: int, first: int) -> None:
    engine, k, v = stored(30, window=own)
    q = normal(3, 2, 4, 32)
    out, lse = engine.query(b"s", 0, q, window=window)
    want = ref.attend(wide(q), k[:, first:], v[:, first:])
    assert np.abs(out - want[0]).max() <= 1e-6
    assert np.abs(lse - want[1]).max() <= 1e-6
    suffix = normal(4, 2, 4, 32)
    out = engine.query_fused(b"s", 0, q, suffix, suffix, np.arange(2), window=window)
    seen = np.concatenate([np.ones((4, 30 - first), bool), np.tri(4, dtype=bool)], axis=1)
    both = [np.concatenate([side[:, first:], suffix], axis=1) for side in (k, v)]
    assert np.abs(out - ref.attend(wide(q), *both, seen=seen)[0]).max() <= 1e-6


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("suffix", [0, 1, 3, 8])
@pytest.mark.parametrize("head_map", [[0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0]])
def test_fused(rows: int, suffix: int, head_map: list[int]) -> None:
    """Row m sees the suffix up to max(S - M, 0) + m; any head map, also one that is uneven."""
    engine, k, v = stored(40)
    q, k_suf, v_suf = normal(3, 6, rows, 32), normal(4, 2, suffix, 32), normal(5, 2, suffix, 32)
    out = engine.query_fused(b"s", 0, q, k_suf, v_suf, np.array(head_map, np.uint8))
    limit = max(suffix - rows, 0) + np.arange(rows)
    seen = np.concatenate([np.ones((rows, 40), bool), np.arange(suffix) <= limit[:, None]], axis=1)
    for head, own in enumerate(head_map):
        both = [np.concatenate(pair, axis=0)[None] for pair in ((k[own], k_suf[own]), (v[own], v_suf[own]))]
        want = ref.attend(wide(q[head : head + 1]), *both, seen=seen)[0]
        assert np.abs(out[head] - want[0]).max() <= 1e-6


def test_sinks() -> None:
    engine, k, v = stored(20)
    q, sinks = normal(3, 2, 3, 32), np.array([1.5, -2.0], np.float32)
    want = ref.with_sinks(ref.attend(wide(q), k, v), sinks.astype(np.float64))
    for given in (sinks, np.repeat(sinks[:, None], 3, axis=1)):
        out, lse = engine.query(b"s", 0, q, sinks=given)
        assert np.abs(out - want[0]).max() <= 1e-6
        assert np.abs(lse - want[1]).max() <= 1e-6
    nothing = np.zeros((2, 0, 32), np.float32)
    assert np.abs(engine.query_fused(b"s", 0, q, nothing, nothing, np.arange(2), sinks=sinks) - want[0]).max() <= 1e-6
    out, _ = engine.query_sparse_auto(b"s", 0, q[:, 0], 8, 9, 2, np.arange(2), sinks=sinks)
    assert np.abs(out - want[0][:, 0]).max() <= 1e-6
    with pytest.raises(ValueError, match="sinks"):
        engine.query(b"s", 0, q, sinks=np.zeros(3, np.float32))


def test_a_layer_of_another_shape_is_missing() -> None:
    engine, _, _ = stored(10)
    for shape in ((3, 1, 32), (2, 1, 24)):
        with pytest.raises(AttentionMissError):
            engine.query(b"s", 0, normal(0, *shape))
    with pytest.raises(ValueError, match="head_map"):
        engine.query_sparse_auto(b"s", 0, normal(0, 2, 32), 8, 1, 2, np.array([0, 2]))


# --- sparse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("count", [1024, 1000])
def test_all_blocks_are_dense_attention(selector: str, count: int) -> None:
    engine, _, _ = stored(count, heads=4, dim=128)
    q = normal(3, 4, 128)
    dense = engine.query(b"s", 0, q[:, None])[0][:, 0]
    for k_top in (count // 64 + 1, 10**6):
        out, mass = engine.query_sparse_auto(b"s", 0, q, 64, k_top, 4, np.arange(4), selector=selector)
        assert np.abs(out - dense).max() < 1e-6
        assert (mass == 1).all()
    everything = np.tile(np.arange(count, dtype=np.int32), (4, 1))
    out, mass = engine.query_sparse(b"s", 0, q, everything, np.full(4, count, np.uint32))
    assert np.abs(out - dense).max() < 1e-6
    assert np.abs(mass - 1).max() < 1e-5


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("window", [-1, 20, 3])
@pytest.mark.parametrize("suffix", [0, 5])
def test_blocks_of_the_reference(selector: str, window: int, suffix: int) -> None:
    engine, k, v = stored(100)
    head_map = np.array([0, 0, 0, 1, 1, 1])
    for seed in range(8):
        q = normal(10 + seed, 6, 32)
        more = {"k_suf": normal(8, 2, suffix, 32), "v_suf": normal(9, 2, suffix, 32)} if suffix else {}
        out, mass = engine.query_sparse_auto(
            b"s", 0, q, 16, 2, 2, head_map, window=window, selector=selector, **more
        )  # fmt: skip
        blocks = ref.choose_blocks(ref.block_scores(q, k, 16, head_map, selector), 2)
        first = 100 - window if window > 0 else 0
        where = np.concatenate([np.arange(16 * b, min(16 * b + 16, 100)) for b in blocks])
        where = [where[where >= first]] * 6
        part, full = ref.attend_picked(wide(q), k, v, where), ref.attend(wide(q[:, None]), k[:, first:], v[:, first:])
        whole = full[0][:, 0], full[1][:, 0]
        if suffix:
            extra = ref.attend(wide(q[:, None]), more["k_suf"], more["v_suf"])
            extra = extra[0][:, 0], extra[1][:, 0]
            part, whole = ref.merge([part, extra]), ref.merge([whole, extra])
        assert np.abs(out - part[0]).max() <= 1e-6
        assert np.abs(mass - np.exp(part[1] - whole[1])).max() <= 1e-6


def test_equal_blocks_keep_the_earlier() -> None:
    engine = AttentionEngine(backend="cpu")
    k = np.tile(normal(1, 1, 8, 16), (1, 5, 1))
    v = np.arange(5, dtype=np.float32).repeat(8)[None, :, None] * np.ones((1, 1, 16), np.float32)
    engine.store(b"s", 0, k, v)
    for selector in SELECTORS:
        out, _ = engine.query_sparse_auto(b"s", 0, normal(3, 1, 16), 8, 2, 1, np.zeros(1), selector=selector)
        assert np.abs(out - (0 + 1 + 4) / 3).max() < 1e-5


def test_the_needle_is_found() -> None:
    """One block holds what the query looks for: two blocks and the last one are as good as all."""
    k, v = normal(1, 2, 1024, 64) * np.float32(0.1), normal(2, 2, 1024, 64)
    q = normal(3, 2, 64)
    k[:, 448:512] += 3 * q[:, None]
    engine = AttentionEngine(backend="cpu")
    engine.store(b"s", 0, k, v)
    dense = engine.query(b"s", 0, q[:, None])[0][:, 0]
    for selector in SELECTORS:
        out, mass = engine.query_sparse_auto(b"s", 0, q, 64, 2, 2, np.arange(2), selector=selector)
        assert cosine(out, dense) >= 0.99
        assert mass.min() > 0.99


def test_the_selectors_differ_where_they_should() -> None:
    """One key that stands out in a block of opposite ones: its mean hides it, its bound does not."""
    q = np.ones((1, 16), np.float32)
    k = np.full((1, 64, 16), 0.01, np.float32)
    k[0, 16:32] = -2.0
    k[0, 20] = 8.0
    v = normal(2, 1, 64, 16)
    engine = AttentionEngine(backend="cpu")
    engine.store(b"s", 0, k, v)
    outs = [engine.query_sparse_auto(b"s", 0, q, 16, 1, 1, np.zeros(1), selector=selector)[0] for selector in SELECTORS]
    assert cosine(*outs) < 0.9999
    dense = engine.query(b"s", 0, q[:, None])[0][:, 0]
    assert cosine(outs[1], dense) > 0.999


def test_indices_of_the_caller() -> None:
    engine, k, v = stored(50, heads=3)
    q = normal(3, 3, 32)
    indices = np.array([[4, 9, -1, 50, 7], [4, 4, 8, 0, 0], [1, 2, 3, 4, 5]], np.int32)
    counts = np.array([4, 3, 0], np.uint32)
    out, mass = engine.query_sparse(b"s", 0, q, indices, counts)
    want = ref.attend_picked(wide(q), k, v, [np.array([4, 9]), np.array([4, 4, 8]), np.array([], np.int64)])
    assert np.abs(out - want[0]).max() <= 1e-6
    assert (out[2] == 0).all()
    full = ref.attend(wide(q[:, None]), k, v)[1][:, 0]
    once = ref.attend_picked(wide(q), k, v, [np.array([4, 9]), np.array([4, 8]), np.array([], np.int64)])[1]
    assert np.abs(mass - np.exp(once - full)).max() <= 1e-6
    assert mass[2] == 0
    windowed, _ = engine.query_sparse(b"s", 0, q, indices, counts, window=43)  # from position 7 on
    want = ref.attend_picked(wide(q), k, v, [np.array([9]), np.array([8]), np.array([], np.int64)])
    assert np.abs(windowed - want[0]).max() <= 1e-6
