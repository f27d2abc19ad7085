"""Attention over stored rows, and its twin, against attention over what the reference decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pion import metal_kernels
from pion.metal_kernels import Rows
from pion.ref import attention as ref
from pion.ref import turbo
from tests.metal import attention_cases as tried
from tests.metal.attention_cases import COUNTS, DIMS, SHARES, Case, stored, to_mx
from tests.metal.emulated import Emulated
from tests.metal.test_attention import emulate, in_process
from tests.support import models

mx = models.mx

# Formats of keys and of values: each of both, among them what `register` stores for a turbo prefix.
PAIRS = (
    ("int8", "int8"),
    ("mlx4g32", "mlx4g32"),
    ("kturbo4", "turbo4"),
    ("kturbo3", "turbo3"),
    ("kturbo2", "turbo2"),
    ("turbo4", "turbo3"),
    ("turbo2", "fp16"),
    ("fp16", "turbo2"),
    ("fp8", "fp32"),
    ("fp32", "fp8"),
    ("bf16", "int8"),
)


def grid(pairs: Sequence[tuple[str, str]], dim: int, counts: Sequence[int]) -> Iterator[Case]:
    """Every number of keys with every ratio of heads; windows, rows and skipped rows take turns."""
    for pair in pairs:
        for turn, (count, share) in enumerate((count, share) for count in counts for share in SHARES):
            yield stored(
                *pair,
                dim,
                count,
                share,
                heads=1 if count > 33 and not ("mlx4g32" in pair and dim % 32) else 2,
                length=2 if count < 1000 and turn % 4 == 0 else 1,
                skip=(0, 30, 63)[turn % 3],
                turned=pair[0].startswith("k") and turn % 4 != 3,
                window=(0, 0, count // 2, 9)[turn % 4],
                sinks=turn % 5 == 0,
            )


def test_emulated_kernels_equal_the_reference() -> None:
    emulate(
        [
            *(stored(*pair, 64, 33, 3) for pair in PAIRS if pair[0][0] != "k"),
            stored("int8", "mlx4g32", 64, 300, 8, length=2, window=50, sinks=True),
            stored("kturbo4", "turbo4", 80, 200, 8, skip=30, turned=True, heads=1),
            stored("kturbo4", "turbo4", 80, 90, 8, skip=63, turned=True, window=41, heads=1),
            stored("kturbo3", "turbo3", 64, 1, 1, skip=7, turned=True),
            stored("kturbo2", "turbo2", 64, 70, 1, skip=1),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_emulated_kernels_equal_the_reference_in_all_sizes(pair: tuple[str, str], dim: int) -> None:
    emulate(list(grid([pair], dim, COUNTS)))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 136, 152, 512])  # 136 and 152 are split into several turbo blocks
def test_emulated_kernels_take_other_head_sizes(dim: int) -> None:
    pairs = [pair for pair in PAIRS if dim % 32 == 0 or "mlx4g32" not in pair]
    emulate(list(grid(pairs, dim, (33,))))


@pytest.mark.parametrize(
    ("dim", "counts"),
    [(80, (1, 33, 100)), *(pytest.param(dim, COUNTS[:-1], marks=pytest.mark.slow) for dim in DIMS)],
)
def test_portable_twins_equal_the_reference(dim: int, counts: Sequence[int]) -> None:
    models.need_mlx()
    for case in grid(PAIRS, dim, counts):
        case.compare(case.call("ops", to_mx))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_kernels_on_a_gpu_equal_the_reference(pair: tuple[str, str]) -> None:
    models.need_mlx()
    if not mx.metal.is_available():
        pytest.skip("no Metal on this machine; the emulated kernels are tested above")
    for dim in DIMS:
        for case in grid([pair], dim, COUNTS):
            case.compare(case.call("metal", to_mx), slack=4)


def test_more_rows_than_the_twin_decodes_at_a_time() -> None:
    models.need_mlx()
    for pair in (("int8", "turbo4"), ("kturbo4", "mlx4g32")):
        case = stored(*pair, 32, 4200, 2, skip=5, turned=pair[0].startswith("k"), window=4150, sinks=True)
        case.compare(case.call("ops", to_mx))


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_segments_of_a_prefix_are_merged(how: str) -> None:
    """Whole groups of turbo keys, then the rows of a group that is not whole, which are fp16."""
    device, convert = in_process(how)
    dim, heads, share = 64, 2, 3
    rng = np.random.default_rng(9)
    q = rng.normal(size=(heads * share, 1, dim)).astype(np.float32) / 8
    parts, wanted = [], []
    for keys, values, count in (("kturbo4", "turbo4", 128), ("fp16", "turbo4", 37)):
        rows = [tried.rows_of(name, dim, heads, count, turned=name[0] == "k") for name in (keys, values)]
        sides = [tried._stored(side, tried.THETA if side.turned else 0.0) for side in rows]
        turns = metal_kernels.block_angles(tried.FIRST, count, tried.THETA, dim)
        given: list[Any] = [convert(q), convert(sides[0][0]), rows[0], convert(sides[1][0]), rows[1]]
        parts.append(metal_kernels.dense_rows(*given, turns=convert(turns), how=device))
        wanted.append([decoded for _, decoded in sides])
    outs, sums = (np.stack([np.array(side) for side in column]) for column in zip(*parts, strict=True))
    out, lse = metal_kernels.merge(convert(outs), convert(sums), how=device)
    keys, values = (np.concatenate(column, axis=1) for column in zip(*wanted, strict=True))
    want = ref.attend(q.astype(np.float64), keys, values)
    np.testing.assert_allclose(np.array(out), want[0], atol=2e-6 * np.abs(values).max())
    np.testing.assert_allclose(np.array(lse), want[1], atol=1e-5)


@pytest.mark.parametrize("dim", [8, 96, 136, 256])
def test_the_rotation_is_that_of_the_turbo_formats(dim: int) -> None:
    from pion.metal_kernels.attention_rows import rotate

    rows = np.random.default_rng(dim).normal(size=(3, dim)).astype(np.float32)
    want, at = np.empty((2, 3, dim), np.float32), 0
    for size in turbo.blocks(dim, dim):
        block = np.ascontiguousarray(rows[:, at : at + size])
        want[:, :, at : at + size] = turbo.rotate(block), turbo.rotate_back(block)
        at += size
    for order in tried.cases.ORDERS:
        for back in (False, True):
            np.testing.assert_array_equal(rotate(Emulated(order), rows, back=back), want[int(back)])


def test_the_two_tables_of_angles_give_each_position() -> None:
    first, count, theta, dim = 130, 300, 1e6, 80
    table = metal_kernels.block_angles(first, count, theta, dim).astype(np.float64)
    assert table.shape == (64 + 5, 2, dim // 2)
    rate = theta ** (-2 * np.arange(dim // 2) / dim)
    for row in (0, 1, 61, 62, 299):
        block, step = divmod(first - 128 + row, 64)
        (c0, s0), (c1, s1) = table[64 + block], table[step]
        np.testing.assert_allclose(c0 * c1 - s0 * s1, np.cos((first + row) * rate), atol=2e-7)
        np.testing.assert_allclose(s0 * c1 + c0 * s1, np.sin((first + row) * rate), atol=2e-7)


def test_what_does_not_fit_is_refused() -> None:
    q, device = np.zeros((2, 1, 64), np.float32), Emulated()

    def dense_rows(keys: Rows, values: Rows, *, turns: Any = None, less: int = 0) -> None:
        sides = []
        for rows in (keys, values):
            try:
                size = metal_kernels.stored_bytes(rows)
            except ValueError:
                size = 0
            sides.append(np.zeros(size - less if size else 0, np.uint8))
        metal_kernels.dense_rows(q, sides[0], keys, sides[1], values, turns=turns, how=device)

    int8, turned = tried.rows_of("int8", 64, 1, 5), tried.rows_of("kturbo4", 64, 1, 5, turned=True)
    with pytest.raises(ValueError, match="rows of format 6: int8, fp8, mlx4g32, turbo4"):
        dense_rows(Rows(6 | 32 << 8, 1, 64, 5, 5), int8)
    with pytest.raises(ValueError, match="registered with HEAD_DIM"):
        dense_rows(Rows(1, 1, 64, 5, 5), int8)
    with pytest.raises(ValueError, match="do not fit"):
        dense_rows(int8, tried.rows_of("int8", 64, 1, 6))
    with pytest.raises(ValueError, match="359 bytes for 5 rows that take 360"):
        dense_rows(int8, int8, less=1)
    with pytest.raises(ValueError, match="not stored in key forms"):
        dense_rows(int8, turned)
    with pytest.raises(ValueError, match=r"turns are None, not \(65, 2, 32\)"):
        dense_rows(turned, int8)
    with pytest.raises(ValueError, match="does not take rows of 80 values"):
        metal_kernels.stored_bytes(tried.rows_of("mlx4g32", 80, 1, 1))
    with pytest.raises(ValueError, match="only key forms skip"):
        metal_kernels.stored_bytes(Rows(0, 1, 64, 5, 5, 3))
