"""The key forms against a plain copy of the fp32 side and against their numpy twin, both with a rope."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import numpy as np

from bench.harness import Result, bench, interleave, seconds
from pion._core import quant, quantkeys
from pion.ref import quant_keys as ref

DIM, HEAD = 1024, 128
ROWS = 16_384  # 64 MiB of fp32: nothing of it stays in a cache
TWIN_ROWS = 256
THETA = 1e6
FORMATS = {"kturbo4": quantkeys.KTURBO4, "kturbo3": quantkeys.KTURBO3, "kturbo2": quantkeys.KTURBO2}
COPY_BAR, TWIN_BAR = 0.15, 5.0
KERNELS = [f"fmt_{name}_{way}{against}" for name in FORMATS for way in ("enc", "dec") for against in ("", "_twin")]


def rate(call: Callable[[], object], size: int) -> float:
    """GB/s of the fp32 side."""
    return size / seconds(call) / 1e9


def kernel(name: str, ours: Callable[[], object], twin: Callable[[], object]) -> Iterator[Result]:
    source, target = np.ones(ROWS * DIM, np.float32), np.ones(ROWS * DIM, np.float32)
    a, copy, slow = interleave(
        lambda: rate(ours, source.nbytes),
        lambda: rate(lambda: np.copyto(target, source), source.nbytes),
        lambda: rate(twin, 4 * TWIN_ROWS * DIM),
    )
    value, spread = statistics.median(a), [min(a), max(a)]
    for suffix, column, bar, note in (
        ("", copy, COPY_BAR, "64 MiB / memcpy of its fp32"),
        ("_twin", slow, TWIN_BAR, "64 MiB / numpy twin"),
    ):
        baseline = statistics.median(column)
        yield Result(f"fmt_{name}{suffix}", value, "GB/s", baseline, value / baseline, bar, note=note, spread=spread)


@bench(*KERNELS)
def key_kernels() -> Iterator[Result]:
    values = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    few = values[:TWIN_ROWS].tobytes()
    wide = bytearray(values.nbytes)
    for name, code in FORMATS.items():
        fmt = quant.pack_format(code, HEAD)
        stored = quantkeys.encode_keys(quant.FP32, fmt, values, DIM, 0, THETA)
        short = bytes(stored[: TWIN_ROWS // quantkeys.ROWS * quantkeys.block_bytes(fmt, DIM)])
        yield from kernel(
            f"{name}_enc",
            lambda fmt=fmt, stored=stored: quantkeys.encode_keys(quant.FP32, fmt, values, DIM, 0, THETA, out=stored),
            lambda fmt=fmt: ref.encode_keys(quant.FP32, fmt, few, DIM, 0, THETA),
        )
        yield from kernel(
            f"{name}_dec",
            lambda fmt=fmt, stored=stored: quantkeys.decode_keys(fmt, stored, DIM, 0, THETA, out=wide),
            lambda fmt=fmt, short=short: ref.decode_keys(fmt, short, DIM, 0, THETA),
        )
