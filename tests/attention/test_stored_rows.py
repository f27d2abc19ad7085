"""Layers held as their rows are stored, against the same engine over the decoded rows, by numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pion import limits
from pion.attention.engine import AttentionEngine
from pion.attention.metal_ops import MetalBackend
from pion.attention.metal_rows import HeldRows, Run, StoredSide, cuts, rows_at
from pion.attention.select import SELECTORS
from pion.ref import quant, quant_keys
from tests.metal.cases import values_of
from tests.support.attention import metal, normal

HEADS, THETA = 2, 1e4
EPS = float(np.finfo(np.float32).eps)
F16 = limits.FORMATS["fp16"]

#: Formats of keys and of values; "k..." are key forms, turned by a rope or not.
KINDS = (
    ("int8", "int8", 0.0),
    ("fp8", "mlx4g32", 0.0),
    ("turbo4", "turbo2", 0.0),
    ("kturbo4", "turbo4", THETA),
    ("kturbo2", "turbo3", 0.0),
    ("fp16", "turbo3", 0.0),
    ("kturbo3", "bf16", THETA),
)
MORE = pytest.mark.slow
#: With the kernels' twins, and with the kernels, emulated or on a GPU.
HOWS = [True, pytest.param(False, marks=MORE)]


def ids(kind: Any) -> str:
    return "-".join(str(word) for word in kind) if isinstance(kind, tuple) else str(kind)


def code_of(name: str, dim: int) -> int:
    plain = name.removeprefix("k") if name.startswith("kturbo") else name
    code = limits.FORMATS[plain] + (16 if name.startswith("kturbo") else 0)
    return code | dim << 8 if "turbo" in name else code


def side(name: str, dim: int, count: int, theta: float, pieces: tuple[int, ...] = ()) -> tuple[StoredSide, Any]:
    """Stored rows and what they decode to, (H, count, D). Of a key form whole groups, then fp16 rows, as the store has
    them."""
    width, fmt = HEADS * dim, code_of(name, dim)
    given = values_of(count, HEADS, dim)
    runs: list[tuple[Run, bytes]] = []
    decoded: list[Any] = []

    def add(code: int, start: int, rows: Any, own: float) -> None:
        if code & 255 >= 16:
            data = quant_keys.encode_keys(quant.FP32, code, rows.tobytes(), width, start, own)
            flat = quant_keys.decode_keys(code, data, width, start, own)
        else:
            data = quant.encode(quant.FP32, code, rows.tobytes(), width)
            flat = quant.decode(code, data, width)
        runs.append((Run(code, start, len(rows), len(data)), data))
        decoded.append(np.frombuffer(flat, np.float32).reshape(len(rows), HEADS, dim))

    whole = count // 64 * 64 if fmt & 255 >= 16 else count
    edges = [0, *(cut for cut in pieces if cut < whole), whole]
    for start, end in itertools.pairwise(edges):
        if end > start:
            add(fmt, start, given[start:end], theta)
    if whole < count:
        add(F16, whole, given[whole:], 0.0)
    stored = StoredSide(theta, [run for run, _ in runs], lambda: b"".join(data for _, data in runs))
    return stored, np.ascontiguousarray(np.concatenate(decoded).swapaxes(0, 1))


class Pair:
    """The same layer in an engine that holds the stored rows and in one that holds them decoded."""

    def __init__(self, kind: tuple[str, str, float], dim: int, count: int, twins: bool, **options: Any) -> None:
        keys, self.k = side(kind[0], dim, count, kind[2], (64,))
        values, self.v = side(kind[1], dim, count, 0.0, (50,))
        self.stored = AttentionEngine(backend="cpu", **options)
        self.stored.backend = metal(twins=twins, order=1)
        self.plain = AttentionEngine(backend="cpu", **options)
        assert self.stored.store_rows(b"s", 0, HEADS, dim, count, keys, values)
        self.plain.store(b"s", 0, self.k, self.v)
        self.nbytes = sum(run.nbytes for both in (keys, values) for run in both.runs)
        self.dim, self.count = dim, count

    def equal(self, name: str, q: Any, *args: Any, **options: Any) -> None:
        """The bound of the specification: 1e-6 for logits up to 5, else 8 eps |logit| |value|."""
        answers = [getattr(engine, name)(b"s", 0, q, *args, **options) for engine in (self.stored, self.plain)]
        loudest = float(np.abs(q.reshape(-1, self.dim) @ self.k.reshape(-1, self.dim).T).max()) * self.dim**-0.5
        room = max(1e-6, 8 * EPS * loudest) * max(1.0, float(np.abs(self.v).max()))
        for one, other in zip(*answers, strict=True):
            assert one.shape == other.shape
            assert np.abs(one - other).max() <= 2 * room  # both are rounded


@pytest.mark.parametrize("twins", HOWS, ids=["twins", "kernels"])
@pytest.mark.parametrize("kind", KINDS, ids=ids)
@pytest.mark.parametrize("dim", [64, pytest.param(96, marks=MORE), pytest.param(256, marks=MORE)])
def test_answers_are_those_over_decoded_rows(kind: tuple[str, str, float], dim: int, twins: bool) -> None:
    pair = Pair(kind, dim, 150, twins)
    sinks = normal(9, 2)
    q = normal(3, HEADS, 3, dim) / np.float32(8)
    for options in ({}, {"window": 90}, {"window": 10}, {"sinks": sinks}):
        pair.equal("query", q, **options)
    head_map = np.array([0, 0, 0, 1, 1, 1])
    q = normal(3, 6, 2, dim) / np.float32(8)
    for suffix in (0, 5):
        more = [normal(seed, HEADS, suffix, dim) for seed in (4, 5)]
        for options in ({}, {"window": 70}):
            pair.equal("query_fused", q, *more, head_map, **options)
    q = q[:, 0]
    for selector in SELECTORS:
        pair.equal("query_sparse_auto", q, 16, 3, HEADS, head_map, selector=selector)
        pair.equal("query_sparse_auto", q, 16, 3, HEADS, head_map, selector=selector, window=40)
        pair.equal("query_sparse_auto", q, 16, 99, HEADS, head_map, k_suf=more[0], v_suf=more[1], selector=selector)
        pair.equal("query_sparse_auto", q, 7, 2, HEADS, head_map, k_suf=more[0], v_suf=more[1], selector=selector)
    indices = np.random.default_rng(7).integers(-3, 160, (HEADS, 40)).astype(np.int32)
    pair.equal("query_sparse", q[:HEADS], indices, np.array([40, 11], np.uint32), window=120)


def test_the_kernels_themselves_once() -> None:
    """What the slow tests do for all kinds."""
    pair = Pair(KINDS[3], 32, 100, twins=False)
    suffix, heads = normal(4, HEADS, 3, 32), np.arange(2)
    pair.equal("query", normal(3, HEADS, 1, 32) / np.float32(8), window=70)
    pair.equal("query_fused", normal(3, HEADS, 1, 32) / np.float32(8), suffix, suffix, heads)
    pair.equal("query_sparse_auto", normal(3, HEADS, 32) / np.float32(8), 16, 2, HEADS, heads)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 129])
def test_any_number_of_rows(count: int) -> None:
    for kind in (KINDS[0], KINDS[3]):
        pair = Pair(kind, 32, count, twins=True)
        pair.equal("query", normal(3, HEADS, 1, 32) / np.float32(8))
        pair.equal("query_sparse_auto", normal(3, HEADS, 32) / np.float32(8), 16, 1, HEADS, np.arange(2))


def test_rows_take_the_memory_of_their_format() -> None:
    for kind in KINDS[:3]:
        pair = Pair(kind, 64, 128, twins=True)
        assert pair.stored.info()["sdpa_warm_bytes"] == pair.nbytes < pair.k.nbytes // 1.5
        pair.stored.store(b"s", 0, pair.k, pair.v)
        assert pair.stored.info()["sdpa_warm_bytes"] == 2 * pair.k.nbytes
        pair.stored.drop(b"s")
        assert pair.stored.info()["sdpa_warm_bytes"] == 0
    turned = Pair(KINDS[3], 64, 128, twins=True)
    turns = (64 + 2) * 64 * 4 + (64 + 1) * 64 * 4  # of two pieces
    assert turned.nbytes < turned.stored.info()["sdpa_warm_bytes"] <= turned.nbytes + 2 * turns


def test_more_than_all_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="--attend-max-bytes 1000"):
        Pair(KINDS[0], 64, 128, twins=True, max_bytes=1000)


def test_a_cold_layer_comes_back_as_it_is_stored() -> None:
    pair = Pair(KINDS[0], 32, 40, twins=True, warm_slots=1)
    pair.stored.store(b"s", 1, pair.k, pair.v)
    assert pair.stored.lookup(b"s", 0) == "COLD"
    assert pair.stored.shape(b"s", 0) == (HEADS, 40, 32)
    keys, values = side("int8", 32, 40, 0.0)[0], side("int8", 32, 40, 0.0)[0]
    assert pair.stored.store_rows(b"s", 0, HEADS, 32, 40, keys, values)
    assert [pair.stored.lookup(b"s", layer) for layer in (0, 1)] == ["HIT", "COLD"]
    assert pair.stored.info()["sdpa_rehydrates"] == 1


def test_what_is_not_held_so() -> None:
    """Plain words, gaps, turbo rows that know nothing of heads, rotated heads of another size, too many pieces; and
    any rows on backends without these kernels. Then they are decoded."""
    backend, dim, count = metal(twins=True), 64, 64
    good, _ = side("int8", dim, count, 0.0)
    plain, _ = side("fp16", dim, count, 0.0)
    late = good._replace(runs=[good.runs[0]._replace(start=1)])
    no_heads = good._replace(runs=[good.runs[0]._replace(fmt=limits.FORMATS["turbo4"])])
    short = good._replace(runs=[good.runs[0]._replace(nbytes=good.runs[0].nbytes - 1)])
    keys, _ = side("kturbo4", dim, count, THETA)
    other = keys._replace(runs=[keys.runs[0]._replace(fmt=code_of("kturbo4", 32))])
    many, _ = side("int8", dim, count, 0.0, tuple(range(2, 40, 2)))
    for case in ((plain, plain), (late, good), (good, late), (no_heads, good), (short, good), (other, good),
                 (good, keys), (many, good)):  # fmt: skip
        assert backend.hold_rows(HEADS, dim, count, *case) is None, case
    for case in ((good, good), (plain, good), (keys, plain)):
        assert isinstance(backend.hold_rows(HEADS, dim, count, *case), HeldRows)
    assert not AttentionEngine(backend="cpu").store_rows(b"s", 0, HEADS, dim, count, good, good)
    engine = AttentionEngine(backend="cpu")
    engine.backend = backend
    with pytest.raises(ValueError, match="multiples of 8"):
        engine.store_rows(b"s", 0, HEADS, 12, count, good, good)


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_rows_are_decoded_as_the_reference_decodes_them(kind: tuple[str, str, float]) -> None:
    """What sparse queries read, bit for bit but for the rope, whose angles are sums of two."""
    backend = metal(twins=True)
    assert isinstance(backend, MetalBackend)
    keys, k = side(kind[0], 64, 150, kind[2], (64,))
    values, v = side(kind[1], 64, 150, 0.0, (50,))
    held = backend.hold_rows(HEADS, 64, 150, keys, values)
    assert held is not None
    assert len(cuts(HEADS, 64, 150, keys, values)) == len(held.pieces) >= 2
    where = np.array([0, 1, 49, 50, 63, 64, 65, 127, 128, 149])
    got = [np.array(array) for array in rows_at(held, where, "ops")]
    assert np.array_equal(got[1], v[:, where])
    assert np.abs(got[0] - k[:, where]).max() <= (1e-6 * np.abs(k).max() if kind[2] else 0)
