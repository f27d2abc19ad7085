"""The emulator finds what it is there to find."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pion.metal_kernels import KERNELS, Rows
from pion.metal_kernels.table import kernel_of
from tests.metal import cases
from tests.metal.emulator import THREADGROUP_LIMIT, KernelError, Library, threadgroup_bytes

# Sums 256 numbers: SIMD groups first, then through threadgroup memory.
SUM = """
uint t = thread_position_in_threadgroup.x, group = simdgroup_index_in_threadgroup;
threadgroup float partial[32];
float sum = simd_sum(rows[t] + 0.0f);
if (thread_index_in_simdgroup == 0) partial[group] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
float all = 0.0f;
for (uint i = 0; i < threads_per_threadgroup.x / 32; i++) all += partial[i];
out[t] = T(all);
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FLOAT = {"T": "float32"}
NUMBERS = np.arange(256, dtype=np.float32)


@functools.cache
def built(source: str) -> Library:
    return Library(source, "", {"rows": "float32"}, [FLOAT])


def run(source: str, order: int = 0, values: np.ndarray = NUMBERS, threads: int = 256) -> np.ndarray:
    return built(source).run(FLOAT, {"rows": values}, (256,), (256, 1, 1), threads, order)


@pytest.mark.parametrize("order", cases.ORDERS)
def test_a_correct_kernel_gives_the_same_in_every_order(order: int) -> None:
    assert run(SUM, order).tolist() == [NUMBERS.sum()] * 256


def test_a_missing_barrier_shows_in_some_order() -> None:
    broken = SUM.replace(BARRIER, "")
    assert broken != SUM
    assert any(run(broken, order).tolist() != [NUMBERS.sum()] * 256 for order in cases.ORDERS)


def test_a_barrier_that_not_all_threads_reach_is_found() -> None:
    with pytest.raises(KernelError, match=r"threadgroup_barrier in line \d+ for threads that have ended"):
        run(SUM.replace(BARRIER, f"if (t < 64) {BARRIER}"))


def test_threads_at_different_barriers_are_found() -> None:
    two = f"if (t < 64) {{ {BARRIER} }}\nelse {{ {BARRIER} }}"
    with pytest.raises(KernelError, match=r"thread \d+ is at threadgroup_barrier in line \d+, thread \d+ at"):
        run(SUM.replace(BARRIER, two))


def test_a_simd_operation_of_some_lanes_is_found() -> None:
    with pytest.raises(KernelError, match="simd_sum"):
        run(SUM.replace("all += partial[i];", "all += t < 16 ? simd_sum(partial[i]) : 0.0f;"))


def test_a_name_that_is_not_declared_is_found() -> None:
    with pytest.raises(KernelError, match="'total' was not declared"):
        run(SUM.replace("T(all)", "T(total)"))


def test_what_msl_does_not_have_is_found() -> None:
    with pytest.raises(KernelError, match="poisoned"):
        run(SUM.replace("float all = 0.0f;", "double all = 0.0f;"))


@pytest.mark.parametrize(("old", "new", "name"), [("rows[t]", "rows[t + 1]", "rows"), ("out[t]", "out[2 * t]", "out")])
def test_an_index_outside_a_buffer_is_found(old: str, new: str, name: str) -> None:
    with pytest.raises(KernelError, match=rf"{name}\[\d+\], it has 256 elements"):
        run(SUM.replace(old, new))


def test_threadgroup_memory_that_was_never_written_is_nan() -> None:
    assert np.isnan(run(SUM.replace("partial[group] = sum;", "partial[group + 16] = sum;"))).all()


def test_edge_threadgroups_are_smaller() -> None:
    source = "out[thread_position_in_grid.x] = T(threads_per_threadgroup.x) + rows[0];"
    sizes = run(source, values=np.zeros(1, np.float32), threads=96)
    assert sizes.tolist() == [96.0] * 192 + [64.0] * 64


# ---- the package's kernels -------------------------------------------------------------------------------------------


def test_every_kernel_has_its_file_and_its_twin() -> None:
    from pion.metal_kernels import portable

    for name, kernel in KERNELS.items():
        assert (name, kernel.inputs[0]) == (kernel.name, "rows")
        assert callable(getattr(portable, kernel.twin))
        assert "out[" in kernel.source


@pytest.mark.parametrize("code", cases.CODES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 4095, 8192])
def test_threadgroup_memory_stays_below_32_kib(code: int, head_dim: int) -> None:
    for param in {0, head_dim} if code in cases.TURBO else {0}:
        rows = Rows(code | param << 8, 1, head_dim, 1, 1)
        kernel = kernel_of(rows.fmt)
        assert kernel is not None
        assert threadgroup_bytes(kernel.source, kernel.template(rows)) < THREADGROUP_LIMIT
        assert 1 <= kernel.threads(rows) <= 1024


def test_the_threadgroup_memory_counted_in_the_text_is_what_the_kernel_uses() -> None:
    source = SUM.replace(
        "threadgroup float partial[32];", "threadgroup float partial[4 * N];\nthreadgroup half unused[3];"
    )
    source = source.replace("out[t] = T(all);", "out[t] = T(all) + float(unused[0]) * 0.0f;")
    template = {"T": "float32", "N": 9}
    sums = Library(source, "", {"rows": "float32"}, [template])
    sums.run(template, {"rows": NUMBERS}, (256,), (256, 1, 1), 256)
    assert threadgroup_bytes(source, template) == sums.shared_most == 4 * 36 + 6
    assert threadgroup_bytes(source.replace("4 * N", "1024 * N"), template) > THREADGROUP_LIMIT
