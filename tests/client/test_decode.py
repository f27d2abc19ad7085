"""Stored rows to words of a dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion._core import quant, quantkeys
from pion.client.decode import NUMPY, Decoder, most_bytes
from pion.client.formats import belongs
from pion.limits import BUILT_FORMATS, FORMATS
from pion.ref.quant import bf16_of
from pion.wire import raw
from tests.support.stored import answer, decoded, encoded

DTYPES = ("float16", "bfloat16", "float32")
ROW_FORMATS = [FORMATS[name] for name in BUILT_FORMATS if name != "bf16_rope_fp8_body"]
ROW_FORMATS += [FORMATS["turbo4"] | 64 << 8, FORMATS["turbo2"] | 96 << 8, FORMATS["bf16_rope_fp8_body"] | 32 << 8]
KEY_FORMATS = [code | head << 8 for code in (17, 19, 20) for head in (64, 96)]
DIM, THETA = 192, 1e4


def values(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def kind(dtype: str, rows: np.ndarray) -> list[Any]:
    rows = np.ascontiguousarray(rows)
    if dtype == "bfloat16":
        return bf16_of(rows.reshape(-1)).reshape(rows.shape).tolist()
    return rows.astype(dtype).tolist()


def gathered(data: memoryview, dtype: str, dim: int = DIM) -> Any:
    """All rows of an answer, put where the decoder says; every row must come exactly once."""
    stored = raw.parse(data)
    out = np.zeros((stored.rows, dim), NUMPY[dtype])
    reached = 0
    for first, rows in Decoder(dim, dtype).pieces(stored, data):
        assert first == reached
        out[first : first + len(rows)] = rows
        reached += len(rows)
    assert reached == stored.rows
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("count", [1, 5, 341, 342, 1000])  # 341 rows of this size are decoded at a time
def test_rows_of_every_format(fmt: int, dtype: str, count: int) -> None:
    data = encoded(fmt, values(count))
    got = gathered(answer(DIM, 0, count, [(fmt, 0, count, data)]), dtype)
    assert got.tolist() == kind(dtype, decoded(fmt, data, DIM))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", KEY_FORMATS)
@pytest.mark.parametrize("theta", [0.0, THETA])
@pytest.mark.parametrize(("start", "rows"), [(0, 128), (0, 70), (64, 64), (70, 1), (60, 100), (127, 1)])
def test_groups_of_keys_are_cut_to_what_was_asked_for(
    fmt: int, dtype: str, theta: float, start: int, rows: int
) -> None:
    first, last = start // 64 * 64, -(-(start + rows) // 64) * 64
    data = encoded(fmt, values(last - first), first, theta)
    got = gathered(answer(DIM, start, rows, [(fmt, first, last - first, data)], theta), dtype)
    whole = decoded(fmt, data, DIM, first, theta)
    assert got.tolist() == kind(dtype, whole[start - first :][:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_several_kinds(dtype: str) -> None:
    """Keys as they stand in the store: full groups, a gap, the rows of a group that is not full."""
    fmt, half = KEY_FORMATS[0], FORMATS["fp16"]
    keys, rest = encoded(fmt, values(64, 1), 0, THETA), encoded(half, values(7, 2))
    got = gathered(answer(DIM, 3, 71, [(fmt, 0, 64, keys), (half, 64, 3, None), (half, 67, 7, rest)], THETA), dtype)
    want = [*kind(dtype, decoded(fmt, keys, DIM, 0, THETA)[3:]), *np.zeros((3, DIM)).tolist()]
    assert got.tolist() == want + kind(dtype, decoded(half, rest, DIM))


def test_words_of_the_same_kind_pass_bit_for_bit() -> None:
    for dtype in DTYPES:
        size = np.dtype(NUMPY[dtype]).itemsize
        words = np.random.default_rng(5).integers(0, 256, 9 * DIM * size, np.uint8).tobytes()  # NaN payloads as well
        code = {"float16": quant.FP16, "bfloat16": quant.BF16, "float32": quant.FP32}[dtype]
        data = answer(DIM, 2, 6, [(code, 0, 9, words)])
        assert gathered(data, dtype).tobytes() == words[2 * DIM * size : 8 * DIM * size]


def test_keys_that_the_rope_carries_beyond_fp16_are_kept_at_its_end() -> None:
    rows = np.full((64, DIM), 65504, np.float32)
    rows[:, ::2] = 60000
    data = encoded(KEY_FORMATS[0], rows, 0, 0.0)
    turned = decoded(KEY_FORMATS[0], data, DIM, 0, THETA)
    assert np.abs(turned).max() > 65520
    got = gathered(answer(DIM, 0, 64, [(KEY_FORMATS[0], 0, 64, data)], THETA), "float16")
    assert np.isfinite(got).all()
    assert np.abs(got).max() == 65504


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([(FORMATS["int8"], 0, 4, bytes(4 * (DIM + 24) - 1))], "bytes are not 4 rows of 192 values in format 0"),
        ([(FORMATS["fp16"], 0, 4, bytes(8 * DIM + 2))], "bytes are not 4 rows"),
        ([(KEY_FORMATS[0], 0, 64, bytes(64))], "bytes are not 64 rows"),
        ([(KEY_FORMATS[0], 2, 64, bytes(quantkeys.block_bytes(KEY_FORMATS[0], DIM)))], "no whole groups"),
        ([(200, 0, 4, bytes(64))], "200"),
    ],
)
def test_what_is_not_what_it_says_is_refused(segments: list[Any], text: str) -> None:
    _, start, count, _ = segments[0]
    data = answer(DIM, start, count, segments)
    with pytest.raises(ValueError, match=text):
        list(Decoder(DIM, "float32").pieces(raw.parse(data), data))


def test_another_row_size_is_refused() -> None:
    data = answer(DIM, 0, 1, [(FORMATS["fp16"], 0, 1, bytes(2 * DIM))])
    with pytest.raises(ValueError, match="rows of 192 values, not 64"):
        list(Decoder(64, "float16").pieces(raw.parse(data), data))


def test_no_answer_is_longer_than_the_bound() -> None:
    for fmt in (*ROW_FORMATS, quant.FP32):
        assert len(answer(DIM, 0, 100, [(fmt, 0, 100, encoded(fmt, values(100)))])) <= most_bytes(100, DIM)


def test_what_belongs_to_a_format() -> None:
    turbo4, int8, half = (FORMATS[name] for name in ("turbo4", "int8", "fp16"))
    assert all(belongs(fmt, "turbo4") for fmt in (turbo4, turbo4 | 64 << 8, 17 | 64 << 8, half))
    assert not any(belongs(fmt, "turbo4") for fmt in (int8, 19 | 64 << 8, FORMATS["turbo3"]))
    assert belongs(int8, "int8")
    assert not belongs(half, "int8")
    assert not belongs(17, "int8")
