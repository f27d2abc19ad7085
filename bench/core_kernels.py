"""The compiled kernels alone: row formats against a plain copy and their numpy twins, membership in microseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import numpy as np

from bench.harness import Result, bench, interleave, seconds
from pion._core import membership, quant
from pion.ref import membership as membership_ref
from pion.ref import quant as quant_ref

DIM = 1024
ROWS = 16_384  # 64 MiB of fp32: nothing of it stays in a cache
TWIN_ROWS = 128  # the int8 twin walks its groups in Python
HEAD = 128
FORMATS = {  # name: format, what its speed may not fall below, as a share of memcpy
    "fp16": (quant.FP16, 0.8),
    "bf16": (quant.BF16, 0.8),
    "int8": (quant.INT8, 0.8),
    "fp8": (quant.FP8, 0.8),
    "mlx4g32": (quant.MLX4G32, 0.5),
    "turbo4": (quant.pack_format(quant.TURBO4, HEAD), 0.15),
    "turbo3": (quant.pack_format(quant.TURBO3, HEAD), 0.15),
    "turbo2": (quant.pack_format(quant.TURBO2, HEAD), 0.15),
}
KERNELS = [f"fmt_{name}_{way}{against}" for name in FORMATS for way in ("enc", "dec") for against in ("", "_twin")]

ROUNDS = 11

HASHES = 1_562
SETS = 64  # different probes each time, or the branch predictor learns the answers


def rate(call: Callable[[], object], size: int) -> float:
    """GB/s of the fp32 side."""
    return size / seconds(call) / 1e9


def kernel(
    name: str,
    way: str,
    share: float,
    ours: Callable[[], object],
    ours_few: Callable[[], object],
    twin_few: Callable[[], object],
) -> Iterator[Result]:
    """64 MiB against a copy of 64 MiB; and the few rows that the twin can do in time, by both.

    The ratio is the median of the rounds' ratios: a clock that changes between rounds changes both sides of each.
    """
    source, target = np.ones(ROWS * DIM, np.float32), np.ones(ROWS * DIM, np.float32)
    big, copy, few, slow = interleave(
        lambda: rate(ours, source.nbytes),
        lambda: rate(lambda: np.copyto(target, source), source.nbytes),
        lambda: max(rate(ours_few, 4 * TWIN_ROWS * DIM) for _ in range(5)),
        lambda: max(rate(twin_few, 4 * TWIN_ROWS * DIM) for _ in range(2)),
        rounds=ROUNDS,
    )
    memcpy = statistics.median(copy)
    for suffix, column, against, note in (
        ("", big, copy, "64 MiB / memcpy of its fp32"),
        ("_twin", few, slow, "512 KiB / numpy twin"),
    ):
        value, baseline = statistics.median(column), statistics.median(against)
        ratio = statistics.median(ours / theirs for ours, theirs in zip(column, against, strict=True))
        bar = share if not suffix else 5.0 if baseline < memcpy else None
        yield Result(
            f"fmt_{name}_{way}{suffix}", value, "GB/s", baseline, ratio, bar, note=note, rounds=ROUNDS,
            spread=[min(column), max(column)],
        )  # fmt: skip


@bench(*KERNELS)
def kernels() -> Iterator[Result]:
    values = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    few = values[:TWIN_ROWS].tobytes()
    wide, narrow = bytearray(values.nbytes), bytearray(len(few))
    for name, (code, share) in FORMATS.items():
        stored = quant.encode(quant.FP32, code, values, DIM)
        short = bytes(stored[: TWIN_ROWS * quant.row_bytes(code, DIM)])
        packed = bytearray(short)
        yield from kernel(
            name,
            "enc",
            share,
            lambda code=code, stored=stored: quant.encode(quant.FP32, code, values, DIM, out=stored),
            lambda code=code, packed=packed: quant.encode(quant.FP32, code, few, DIM, out=packed),
            lambda code=code: quant_ref.encode(quant.FP32, code, few, DIM),
        )
        yield from kernel(
            name,
            "dec",
            share,
            lambda code=code, stored=stored: quant.decode(code, stored, DIM, out=wide),
            lambda code=code, short=short: quant.decode(code, short, DIM, out=narrow),
            lambda code=code, short=short: quant_ref.decode(code, short, DIM),
        )


@bench("membership_core_us")
def membership_core() -> Result:
    rng = np.random.default_rng(2)
    members = rng.integers(0, 2**64, HASHES, np.uint64)
    table = membership.build(members)
    blobs = [
        np.where(
            rng.random(HASHES) < 0.5, rng.choice(members, HASHES), rng.integers(0, 2**64, HASHES, np.uint64)
        ).tobytes()
        for _ in range(SETS)
    ]
    given = members.tobytes()

    def each(probe: Callable[[bytes, bytes], bytes], against: bytes) -> float:
        return statistics.median(seconds(lambda blob=blob: probe(against, blob)) for blob in blobs) * 1e6

    ours, twin = interleave(lambda: each(membership.probe, table), lambda: each(membership_ref.probe, given))
    value, baseline = statistics.median(ours), statistics.median(twin)
    return Result(
        "membership_core_us",
        value,
        "us",
        baseline,
        baseline / value,
        bar=8.0,
        at_most=True,
        note=f"{HASHES} x {HASHES}, half of them members / numpy isin",
        spread=[min(ours), max(ours)],
    )
