"""The attention kernels over arrays, and their twins, against the reference; on a GPU where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pion import metal_kernels
from pion.ref import attention as ref
from tests.metal import attention_cases as tried
from tests.metal.attention_cases import COUNTS, DIMS, FEW_DIMS, ORDERS, SHARES, Case, to_mx
from tests.metal.emulated import Emulated, prepare
from tests.metal.emulator import KernelError
from tests.support import models

mx = models.mx

DTYPES = ("float32", "float16", "bfloat16")


def grid(dim: int, counts: Sequence[int]) -> Iterator[Case]:
    """Every number of keys with every ratio of heads; dtypes, windows, rows and suffixes take turns."""
    for turn, (count, share) in enumerate((count, share) for count in counts for share in SHARES):
        dtype = DTYPES[turn % 3 if turn % 2 else 0]
        heads = 2 if count <= 33 else 1
        yield tried.attention(dim, count, share, heads=heads, dtype=dtype)
        yield tried.attention(
            dim,
            count,
            share,
            heads=1,
            dtype="float32",
            length=1 if count > 1000 else 3,
            window=(0, count // 2, 7, count)[turn % 4],
            suffix=(5, 40, 0, 2)[turn % 4],
            sinks=turn % 3 == 0,
        )


def sparse(dim: int, counts: Sequence[int]) -> Iterator[Case]:
    for turn, (count, share) in enumerate((count, share) for count in counts for share in SHARES):
        yield tried.gathered(dim, count, share, heads=1, window=(0, count // 2)[turn % 2], sinks=turn % 3 == 0)
        yield tried.in_blocks(
            dim, count, share, heads=1, window=(0, count // 2)[turn % 2], suffix=(None, 9)[turn // 2 % 2]
        )


def emulate(cases: Sequence[Case]) -> None:
    """In both orders, and equal in both."""
    device = Emulated()
    prepare(device, [lambda how, case=case: case.call(how, np.asarray) for case in cases])
    for case in cases:
        outs = []
        for order in ORDERS:
            device.order = order
            try:
                outs.append(case.call(device, np.asarray))
            except KernelError as error:
                error.add_note(case.name)
                raise
            case.compare(outs[-1])
        for forward, reverse in zip(*outs, strict=True):
            np.testing.assert_array_equal(forward, reverse, err_msg=case.name)


@pytest.mark.parametrize("dim", [64, 80])
def test_emulated_kernels_equal_the_reference(dim: int) -> None:
    emulate([*grid(dim, (1, 31, 33, 300)), *sparse(dim, (1, 33, 300))])


def test_a_long_prefix_is_split_among_threadgroups() -> None:
    emulate([tried.attention(128, 4097, 1, heads=1), tried.attention(256, 1000, 8, heads=1, length=2)])


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
def test_emulated_kernels_equal_the_reference_in_all_sizes(dim: int) -> None:
    emulate([*grid(dim, COUNTS), *sparse(dim, COUNTS)])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 40, 160, 192, 320, 512])
def test_emulated_kernels_take_other_head_sizes(dim: int) -> None:
    emulate([*grid(dim, (1, 33, 300)), *sparse(dim, (33,))])


def odd_cases() -> list[Case]:
    """What the grids leave out."""
    return [
        tried.attention(64, 0, 2),  # no prefix
        tried.attention(64, 0, 2, length=3, suffix=2, sinks=True),  # more rows than suffix, no prefix
        tried.attention(64, 0, 2, suffix=0, sinks=True),  # sinks alone
        tried.attention(64, 20, 2, length=5, suffix=3, window=4),
        tried.attention(64, 100, 2, length=9, dtype="bfloat16"),  # several chunks of rows
        tried.attention(64, 50, 2, head_map=[1, 0, 0, 0], length=2),  # heads in any order
        tried.attention(64, 50, 2, head_map=[1, 1, 1, 1], suffix=3, dtype="float16"),
        tried.attention(64, 300, 1, loud=40.0),  # logits of hundreds
        tried.attention(64, 300, 1, loud=4e4, suffix=4, length=2),  # of hundred thousands
        tried.in_blocks(64, 100, 2, block=7),
        tried.in_blocks(64, 100, 2, block=128, suffix=0),
        tried.gathered(64, 100, 2, dtype="float16"),
    ]


def test_emulated_kernels_at_the_edges() -> None:
    emulate(odd_cases())


@pytest.mark.parametrize("dim", FEW_DIMS)
def test_portable_twins_equal_the_reference(dim: int) -> None:
    models.need_mlx()
    for case in [*grid(dim, COUNTS), *sparse(dim, COUNTS), *odd_cases()]:
        case.compare(case.call("ops", to_mx))


@pytest.mark.parametrize("dim", DIMS)
def test_kernels_on_a_gpu_equal_the_reference(dim: int) -> None:
    models.need_mlx()
    if not mx.metal.is_available():
        pytest.skip("no Metal on this machine; the emulated kernels are tested above")
    for case in [*grid(dim, COUNTS), *sparse(dim, COUNTS), *odd_cases()]:
        case.compare(case.call("metal", to_mx), slack=4)


# ---- merging ---------------------------------------------------------------------------------------------------------


def in_process(how: str) -> tuple[Any, Any]:
    """(how, convert) for a name."""
    if how == "ops":
        models.need_mlx()
        return "ops", to_mx
    return Emulated(), np.asarray


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_c14_merging_parts(how: str) -> None:
    device, convert = in_process(how)
    rng = np.random.default_rng(5)
    heads, length, dim = 3, 2, 40
    q = rng.normal(size=(heads, length, dim))
    k, v = rng.normal(size=(2, heads, 90, dim))
    cuts = [0, 0, 20, 21, 90]
    parts = [ref.attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    whole = ref.attend(q, k, v)
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [2, 3, 1, 0]):
        outs, sums = (np.stack([parts[i][side] for i in order]).astype(np.float32) for side in (0, 1))
        out, lse = metal_kernels.merge(convert(outs), convert(sums), how=device)
        np.testing.assert_allclose(np.array(out), whole[0], atol=1e-6)
        np.testing.assert_allclose(np.array(lse), whole[1], atol=1e-6)
    # The identity changes nothing, and is itself.
    empty = np.zeros((1, heads, length, dim), np.float32), np.full((1, heads, length), -np.inf, np.float32)
    lone = (
        rng.normal(size=(heads, length, dim)).astype(np.float32),
        np.float32(-1e6) * np.ones((heads, length), np.float32),
    )
    outs, sums = (np.concatenate([none, one[None], none]) for none, one in zip(empty, lone, strict=True))
    out, lse = metal_kernels.merge(convert(outs), convert(sums), how=device)
    np.testing.assert_array_equal(np.array(out), lone[0])
    np.testing.assert_array_equal(np.array(lse), lone[1])
    outs, sums = (np.concatenate([none, none]) for none in empty)
    out, lse = metal_kernels.merge(convert(outs), convert(sums), how=device)
    assert not np.array(out).any()
    assert (np.array(lse) == -np.inf).all()


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_a_value_that_a_row_does_not_see_does_not_reach_it(how: str) -> None:
    device, convert = in_process(how)
    rng = np.random.default_rng(6)
    q = rng.normal(size=(1, 2, 32)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 10, 32)).astype(np.float32)
    k_suf, v_suf = rng.normal(size=(2, 1, 2, 32)).astype(np.float32)
    k_suf[0, 1] = v_suf[0, 1] = np.inf if how == "emulated" else 1e30  # 0 * inf is for the twin what it is for numpy
    out, lse = metal_kernels.fused(*map(convert, (q, k, v, k_suf, v_suf)), how=device)
    keys, values = (np.concatenate([a, b[:, :1]], axis=1) for a, b in ((k, k_suf), (v, v_suf)))
    want = ref.attend(q[:, :1].astype(np.float64), keys, values)
    np.testing.assert_allclose(np.array(out)[:, :1], want[0], atol=1e-6)
    np.testing.assert_allclose(np.array(lse)[:, :1], want[1], atol=1e-6)


@pytest.mark.parametrize("how", ["emulated", "ops"])
def test_the_mass_that_a_sparse_answer_kept(how: str) -> None:
    device, convert = in_process(how)
    rng = np.random.default_rng(7)
    q = rng.normal(size=(6, 64)).astype(np.float32) * 3
    k, v = rng.normal(size=(2, 2, 200, 64)).astype(np.float32)
    blocks = np.array([1, 4, 12], np.int32)
    _, kept = metal_kernels.gather_blocks(*map(convert, (q, k, v, blocks)), 16, how=device)
    every = metal_kernels.logsum(convert(q[:, None]), convert(k), how=device)
    logits = q.reshape(2, 3, 64).astype(np.float64) @ k.swapaxes(1, 2) / 8
    weights = np.exp(logits).reshape(6, 200)
    want = (weights[:, 16:32].sum(1) + weights[:, 64:80].sum(1) + weights[:, 192:].sum(1)) / weights.sum(1)
    np.testing.assert_allclose(np.exp(np.array(kept) - np.array(every)[:, 0]), want, rtol=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    def zeros(*shape: int) -> np.ndarray[Any, Any]:
        return np.zeros(shape, np.float32)

    q, k = zeros(4, 1, 64), zeros(2, 9, 64)
    dense, device = metal_kernels.dense, Emulated()
    with pytest.raises(ValueError, match=r"queries \(4, 1, 64\), keys \(2, 9, 32\)"):
        dense(q, zeros(2, 9, 32), zeros(2, 9, 32), how=device)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        dense(q, zeros(3, 9, 64), zeros(3, 9, 64), how=device)
    with pytest.raises(ValueError, match="1 to 512 are supported"):
        dense(zeros(1, 1, 520), zeros(1, 9, 520), zeros(1, 9, 520), how=device)
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        dense(q, k, k, head_map=bytes([0, 1, 2, 1]), how=device)
    with pytest.raises(ValueError, match=r"shape \(3,\), not \(4,\)"):
        dense(q, k, k, head_map=[0, 1, 1], how=device)
    with pytest.raises(ValueError, match="a suffix of 1 heads behind a prefix of 2"):
        metal_kernels.fused(q, k, k, zeros(1, 2, 64), zeros(1, 2, 64), how=device)
    with pytest.raises(ValueError, match="float16 behind a prefix of float32"):
        half = np.zeros((2, 2, 64), np.float16)
        metal_kernels.fused(q, k, k, half, half, how=device)
    with pytest.raises(ValueError, match="how is 'cuda', not 'metal' or 'ops'"):
        dense(q, k, k, how="cuda")


def test_metal_is_refused_where_there_is_none() -> None:
    models.need_mlx()
    if mx.metal.is_available():
        pytest.skip("there is Metal")
    with pytest.raises(RuntimeError, match="no Metal on this machine: use how='ops'"):
        metal_kernels.dense(mx.zeros((1, 1, 64)), mx.zeros((1, 1, 64)), mx.zeros((1, 1, 64)))
