"""Faults that are planted in the attention kernels are found; their threadgroup memory is counted in their text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion import metal_kernels
from pion.metal_kernels import Stats, attention_ops
from pion.metal_kernels.attention_rows import rotate
from pion.metal_kernels.bodies import BODIES
from pion.metal_kernels.table import text
from tests.metal import attention_cases as tried
from tests.metal import cases
from tests.metal.emulated import Emulated, Recorder
from tests.metal.emulator import THREADGROUP_LIMIT, KernelError, Library, threadgroup_bytes

BARRIER = re.compile(r"threadgroup_barrier\([^;]*\);")


def scores(device: Any) -> Any:
    """Statistics, scores and the choice."""
    rng = np.random.default_rng(1)
    q, mean = rng.normal(size=(2, 64)).astype(np.float32), rng.normal(size=(1, 40, 64)).astype(np.float32)
    return metal_kernels.select(q, Stats(mean, mean, mean), 5, how=device)


def arrays(device: Any) -> Any:
    return tried.attention(64, 100, 3, heads=1).call(device, np.asarray)[0]


def rows(device: Any) -> Any:
    return tried.stored("int8", "int8", 64, 100, 3, heads=1).call(device, np.asarray)[0]


def turning(device: Any) -> Any:
    return rotate(device, np.random.default_rng(2).normal(size=(2, 96)).astype(np.float32))


# Body, or header of a body; what runs it; how many barriers it has.
PLACES: list[tuple[str, Callable[[Any], Any], int]] = [
    ("attend.h", arrays, 3),
    ("rotate", turning, 2),
    ("rotate.h", turning, 2),
    ("block_scores", scores, 1),
    ("block_top", scores, 1),
]
NEEDED = [(name, call, which) for name, call, count in PLACES for which in range(count)]


def without(name: str, which: int, instead: str) -> Callable[[str, str], str]:
    """A change that puts something in the place of one barrier."""

    def change(at: str, written: str) -> str:
        if at != name:
            return written
        found = list(BARRIER.finditer(written))[which]
        return f"{written[: found.start()]}{instead}{written[found.end() :]}"

    return change


def test_all_barriers_are_tried() -> None:
    for name, _, count in PLACES:
        body = BODIES[name.removesuffix(".h")]
        assert len(BARRIER.findall(body.header if name.endswith(".h") else body.source)) == count, name
    names = {name for name, _, _ in PLACES}
    headers = {header for name in names if name.endswith(".h") for header in BODIES[name.removesuffix(".h")].headers}
    for name, body in BODIES.items():
        assert name in names or not BARRIER.search(body.source)
        assert all(header in headers or not BARRIER.search(text(header)) for header in body.headers)


@pytest.mark.parametrize(("name", "call", "which"), NEEDED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_each_barrier_is_needed(name: str, call: Callable[[Any], Any], which: int) -> None:
    """Without any one of them some order of the threads gives something else."""
    want = call(Emulated())
    device = Emulated(change=without(name, which, ";"))
    for device.order in (*cases.ORDERS, 7, 8):
        try:
            if not np.array_equal(call(device), want):
                return
        except KernelError:  # what was read too early led outside a buffer
            return
    pytest.fail("all orders gave the same")


@pytest.mark.parametrize(("name", "call", "which"), [place for place in NEEDED if place[2] != 1])
def test_a_barrier_that_not_all_threads_reach_is_found(name: str, call: Callable[[Any], Any], which: int) -> None:
    index = "group" if name in ("attend.h", "block_scores") else "t / 32"
    device = Emulated(
        change=without(name, which, f"if ({index} == 0) threadgroup_barrier(mem_flags::mem_threadgroup);")
    )
    if call is turning:  # of one SIMD group only
        device = Emulated(change=without(name, which, "if (t < 16) threadgroup_barrier(mem_flags::mem_threadgroup);"))
    with pytest.raises(KernelError, match="threadgroup_barrier"):
        call(device)


def swapped(name: str, old: str, new: str) -> Callable[[str, str], str]:
    def change(at: str, written: str) -> str:
        assert at != name or old in written
        return written.replace(old, new) if at == name else written

    return change


@pytest.mark.parametrize(
    ("name", "old", "new", "call", "buffer"),
    [
        ("attend", "n * key_row", "(n + 1) * key_row", arrays, "k"),
        ("attend", "v[at[i] + d]", "v[at[i] + d + 1]", arrays, "v"),
        ("attend", "kv_of[slot]", "kv_of[slot + 1]", arrays, "kv_of"),
        ("attend", "R, G, E>(sums", "R + 4, G, E>(sums", None, ""),  # does not compile
        ("attend.h", "sums[group * D + d] =", "sums[group * D + d + 1] =", arrays, "sums"),
        ("attend.h", "heights[2 * (group * R + r)] =", "heights[2 * (group * R + r) + 2] =", arrays, "heights"),
        ("attend.h", "parts[(start + r) * D + d]", "parts[(start + r + 1) * D + d]", arrays, "parts"),
        ("attend_rows.h", "bytes[row + i]", "bytes[row + i + 40]", rows, "(keys|values)"),
        ("attend_rows", "- skip) * v_row", "- skip + 1) * v_row", rows, "values"),
        ("merge", "s * all + row) * D", "s * all + row + 1) * D", arrays, "parts"),
        ("rotate", "out[at + i]", "out[at + i + 1]", turning, "out"),
        ("block_scores", "kv_of[i / D] * blocks", "(kv_of[i / D] + 1) * blocks", scores, "low"),
        ("block_top", "out[place]", "out[place + 1]", scores, "out"),
        ("block_top", "chosen[b] =", "chosen[b + 240] =", scores, "chosen"),
    ],
)
def test_an_index_outside_a_buffer_is_found(name: str, old: str, new: str, call: Any, buffer: str) -> None:
    device = Emulated(change=swapped(name, old, new))
    if call is None:
        with pytest.raises(KernelError, match="no matching function"):
            arrays(device)
        return
    with pytest.raises(KernelError, match=rf"{buffer}\[\d+\], it has \d+ elements"):
        call(device)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seen = seen && n >= first && n < stored;", "seen = seen && n >= first;"),
        ("seen = uint(number) < limit", "seen = true"),
        ("place < counts[slot]", "true"),
    ],
)
def test_a_check_of_indices_that_is_left_out_is_found(old: str, new: str) -> None:
    """Some of what picks keys names none."""
    device = Emulated(change=swapped("attend", old, new))
    found = []
    for case in (tried.gathered(64, 30, 1), tried.in_blocks(64, 30, 1)):
        try:
            case.compare(case.call(device, np.asarray))
        except (KernelError, AssertionError) as error:
            found.append(error)
    assert found


# ---- threadgroup memory ----------------------------------------------------------------------------------------------


@functools.cache
def every_template() -> Recorder:
    """Notes what all kinds of calls run, for all head sizes."""
    recorder = Recorder()
    for dim in range(8, 513, 8):
        for length in (1, 2, 4, 8):
            tried.attention(dim, 3, 1, heads=1, length=length, suffix=2).call(recorder, np.asarray)
        for name in ("int8", "turbo4"):
            tried.stored(name, name, dim, 1, 3, heads=1).call(recorder, np.asarray)
    for blocks in (1, 300, 16384):
        stats = Stats(*[np.zeros((1, blocks, 8), np.float32)] * 3)
        metal_kernels.select(np.zeros((1, 8), np.float32), stats, 2, how=recorder)
    metal_kernels.block_stats(np.zeros((1, 2, 8), np.float32), 2, how=recorder)
    return recorder


def test_threadgroup_memory_stays_below_32_kib() -> None:
    seen = every_template().seen
    assert set(seen) == set(BODIES)
    most = 0
    for body, templates in seen.values():
        assert not re.search(r"threadgroup\s+\w+\s+\w+\s*\[", body.header)  # arrays are declared in bodies only
        declared = re.findall(r"\bthreadgroup\s", re.sub(r"//.*", "", body.source))
        assert len(declared) == len(re.findall(r"\bthreadgroup \w+ \w+\[[^\]]+\];", body.source))
        for template in templates.values():
            most = max(most, threadgroup_bytes(body.source, template))
    assert 16 << 10 <= most < THREADGROUP_LIMIT


@pytest.mark.parametrize(
    ("name", "call"), [("attend", arrays), ("attend_rows", rows), ("rotate", turning), ("block_top", scores)]
)
def test_the_memory_counted_is_what_the_kernels_use(name: str, call: Callable[[Any], Any]) -> None:
    device = Emulated(alone=True)
    call(device)
    ((key, library),) = [item for item in device.own.items() if item[0][0] == name]
    assert isinstance(library, Library)
    assert library.shared_most == threadgroup_bytes(BODIES[name].source, dict(key[1:])) > 0


def test_every_kernel_has_a_twin() -> None:
    twins = {
        "attend": attention_ops.attend,
        "attend_rows": metal_kernels.attention_rows._twin,
        "merge": attention_ops.merge,
        "block_stats": attention_ops.block_stats,
        "block_scores": attention_ops.select,
        "block_top": attention_ops.select,
        "rotate": metal_kernels.attention_rows._twin,  # which decodes, so that there is nothing to rotate
    }
    assert set(twins) == set(BODIES)
    assert all(callable(twin) for twin in twins.values())
