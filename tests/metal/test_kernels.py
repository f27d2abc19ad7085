"""The kernels and their portable twins against `pion.ref`: emulated on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from pion import metal_kernels
from pion.metal_kernels import KERNELS, Rows, kernel_of
from pion.ref import quant, quant_keys
from tests.metal import cases
from tests.metal.emulator import Library, library
from tests.support import models

mx = models.mx

# (format, shape) that exist: mlx4g32 takes whole groups only; turbo with and without the size of a head.
ROWS = [
    Rows(code | param << 8, heads, head_dim, count, capacity)
    for code in (*cases.PLAIN, *cases.TURBO)
    for heads, head_dim in cases.SHAPES
    for param in ((0, head_dim) if code in cases.TURBO else (0,))
    for count, capacity in ((5, 7), (1, 1))
    if code != cases.PLAIN[2] or heads * head_dim % 32 == 0
]
KEYS = [
    Rows(code | head_dim << 8, heads, head_dim, count, capacity, skip, turned)
    for code in cases.KEYS
    for heads, head_dim in ((2, 64), (5, 9), (1, 1), (1, 33))
    for count, capacity, skip in ((64, 70, 0), (100, 100, 30), (1, 2, 63))
    for turned in ((False, True) if head_dim > 1 else (False,))
]
FIRST, THETA = 192, 1e4  # the first row wanted stands in the block that begins here


def name_of(rows: Rows) -> str:
    extra = f"-skip{rows.skip}-{'rope' if rows.turned else 'still'}" if rows.fmt & 255 in cases.KEYS else ""
    return f"{rows.fmt & 255}/{rows.fmt >> 8}-{rows.heads}x{rows.head_dim}-{rows.count}of{rows.capacity}{extra}"


def expected(rows: Rows) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Stored bytes, angles (one number when there is no rope), and what the reference decodes."""
    theta = THETA if rows.turned else 0.0
    data, want = cases.stored(rows, FIRST + rows.skip, theta)
    turns = np.zeros(1, np.float32)
    if rows.turned:
        turns = metal_kernels.angles(FIRST + rows.skip, rows.count, THETA, rows.head_dim)
    return np.frombuffer(data, np.uint8), turns, want


def same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: str) -> None:
    """Bit for bit, but for the sign of a zero."""
    wanted = cases.kind(dtype, want)
    if dtype == "bfloat16":
        wanted, got = ((np.asarray(x, np.uint32) << 16).view(np.float32) for x in (wanted, got))
    np.testing.assert_array_equal(got, wanted)


def emulated(built: Library, template: dict[str, Any], rows: Rows, threads: int, order: int) -> np.ndarray[Any, Any]:
    kernel = kernel_of(rows.fmt)
    assert kernel is not None
    data, turns, _ = expected(rows)
    inputs = {"rows": data, "turns": turns.reshape(-1), "extent": np.array(kernel.extent(rows), np.uint32)}
    return built.run(template, inputs, rows.shape, kernel.grid(rows, threads), threads, order)


@functools.cache
def built_for(code: int) -> tuple[Library, list[tuple[Rows, dict[str, Any]]]]:
    """The kernel of a format, compiled once for all its cases."""
    kernel = kernel_of(code)
    assert kernel is not None
    instances: dict[str, dict[str, Any]] = {}
    tried = []
    for rows in [*ROWS, *KEYS]:
        if rows.fmt & 255 == code:
            template = kernel.template(rows)
            # Each set of arguments in one of the types, each type in many of them: every instance is compiled.
            fresh = {"T": cases.DTYPES[len(instances) % 3], **template}
            tried.append((rows, instances.setdefault(str(template), fresh)))
    return library(kernel, list(instances.values())), tried


@pytest.mark.parametrize("code", cases.CODES)
def test_emulated_kernels_equal_the_reference_in_every_order_and_size(code: int) -> None:
    built, tried = built_for(code)
    kernel = kernel_of(code)
    assert kernel is not None
    for rows, template in tried:
        for threads, order in zip((kernel.threads(rows), 32, 96), cases.ORDERS, strict=True):
            try:
                same(emulated(built, template, rows, threads, order), expected(rows)[2], template["T"])
            except Exception as error:
                error.add_note(f"{name_of(rows)} {template['T']} with {threads} threads in order {order}")
                raise
    assert {template["T"] for _, template in tried} == set(cases.DTYPES)


@pytest.mark.parametrize("name", ["rows_turbo"])
def test_each_barrier_of_a_kernel_is_needed(name: str) -> None:
    """Without any one of them some order of the threads gives something else."""
    kernel, barrier = KERNELS[name], "threadgroup_barrier(mem_flags::mem_threadgroup);"
    rows = Rows(cases.TURBO[0] | 96 << 8, 1, 96, 2, 2)
    template = {"T": "float32", **kernel.template(rows)}
    inputs = {"rows": "uint8", "extent": "uint32"}
    parts = kernel.source.split(barrier)
    assert len(parts) > 2
    for left_out in range(1, len(parts)):
        source = barrier.join(parts[:left_out]) + ";" + barrier.join(parts[left_out:])
        built = Library(source, kernel.header, inputs, [template])
        results = [emulated(built, template, rows, 64, order) for order in cases.ORDERS]
        assert any(not np.array_equal(result, expected(rows)[2]) for result in results), f"barrier {left_out}"


@pytest.mark.parametrize("rows", [*ROWS, *KEYS], ids=name_of)
def test_portable_twins_equal_the_reference(rows: Rows) -> None:
    models.need_mlx()
    data, turns, want = expected(rows)
    given = mx.array(turns) if rows.turned else None
    for dtype in cases.DTYPES:
        got = metal_kernels.decode(mx.array(data), rows, getattr(mx, dtype), turns=given, how="ops")
        assert (str(got.dtype), got.shape) == (f"mlx.core.{dtype}", rows.shape)
        same(np.array(got.view(mx.uint16) if dtype == "bfloat16" else got), want, dtype)


@pytest.mark.parametrize("code", cases.CODES)
def test_kernels_on_a_gpu_are_close_to_the_reference(code: int) -> None:
    """Metal may fuse a product and a sum, which is exact in the row formats and not in sums and turns."""
    models.need_mlx()
    if not mx.metal.is_available():
        pytest.skip("no Metal on this machine; the emulated kernels are tested above")
    for rows in [*ROWS, *KEYS]:
        if rows.fmt & 255 == code:
            data, turns, want = expected(rows)
            given = mx.array(turns) if rows.turned else None
            for dtype, digits in (("float16", 2e-3), ("bfloat16", 1.6e-2), ("float32", 1e-6)):
                got = metal_kernels.decode(mx.array(data), rows, getattr(mx, dtype), turns=given, how="metal")
                close = np.array(got.astype(mx.float32))
                largest = float(np.abs(want).max())
                np.testing.assert_allclose(close, want, rtol=digits, atol=digits * largest, err_msg=name_of(rows))


@pytest.mark.parametrize(
    ("first", "count", "theta", "head_dim"), [(0, 64, 1e4, 64), (100, 130, 1e6, 80), (63, 2, 5e5, 9)]
)
def test_angles_are_those_of_the_reference(first: int, count: int, theta: float, head_dim: int) -> None:
    got = metal_kernels.angles(first, count, theta, head_dim)
    assert got.shape == (count, 2, head_dim // 2)
    for row in range(count):
        start = (first + row) // 64 * 64
        cosine, sine = quant_keys.rope_turns(start, theta, head_dim)
        assert got[row, 0].tolist() == cosine[first + row - start].tolist()
        assert got[row, 1].tolist() == sine[first + row - start].tolist()
    exact = np.outer(first + np.arange(count), theta ** (-2 * np.arange(head_dim // 2) / head_dim))
    np.testing.assert_allclose(got[:, 0], np.cos(exact), atol=1e-6)
    np.testing.assert_allclose(got[:, 1], np.sin(exact), atol=1e-6)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_keys_that_the_rope_carries_beyond_fp16_stay_in_it_where_it_is_asked_for(dtype: str) -> None:
    models.need_mlx()
    rows = Rows(cases.KEYS[0] | 64 << 8, 1, 64, 64, 64, turned=True)
    given = np.full((64, 64), 65504, np.float32)
    given[:, ::2] = 60000
    data = quant_keys.encode_keys(quant.FP32, rows.fmt, given.tobytes(), 64, 0, 0.0)  # as they are, then turned
    flat = np.frombuffer(quant_keys.decode_keys(rows.fmt, data, 64, 0, THETA), np.float32)
    want = flat.reshape(rows.shape)
    assert np.abs(want).max() > 65520
    if dtype == "float16":
        want = want.clip(-65504, 65504)
    turns, stored = metal_kernels.angles(0, 64, THETA, 64), np.frombuffer(data, np.uint8)
    kernel = KERNELS["keys_turbo"]
    template = {"T": dtype, **kernel.template(rows)}
    inputs = {"rows": stored, "turns": turns.reshape(-1), "extent": np.array(kernel.extent(rows), np.uint32)}
    same(library(kernel, [template]).run(template, inputs, rows.shape, kernel.grid(rows, 32), 32), want, dtype)
    got = metal_kernels.decode(mx.array(stored), rows, getattr(mx, dtype), turns=mx.array(turns), how="ops")
    same(np.array(got.view(mx.uint16) if dtype == "bfloat16" else got), want, dtype)


def test_formats_without_a_kernel_are_refused_by_name() -> None:
    models.need_mlx()
    assert kernel_of(2) is None
    with pytest.raises(ValueError, match="no kernel decodes format 2"):
        metal_kernels.decode(mx.zeros((4,), mx.uint8), Rows(2, 1, 2, 1, 1), mx.float16)
