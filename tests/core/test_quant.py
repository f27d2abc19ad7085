"""The compiled row formats against their numpy twins, and against what their users rely on."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pion import limits
from pion._core import quant
from pion.ref import quant as ref

INT8, FP16, FP32, BF16 = quant.INT8, quant.FP16, quant.FP32, quant.BF16
SOURCES = [FP32, FP16, BF16]
TARGETS = [INT8, FP16, FP32, BF16]
NAMES = {INT8: "int8", FP16: "fp16", FP32: "fp32", BF16: "bf16"}
DIMS = [1, 2, 7, 8, 31, 32, 33, 48, 64, 80, 96, 127, 128, 1000, 1023, 1024, 1025, 2048, 4096]

kernels = pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])
pairs = pytest.mark.parametrize(
    ("src", "dst"),
    [(src, dst) for src in SOURCES for dst in TARGETS],
    ids=[f"{NAMES[src]}-{NAMES[dst]}" for src in SOURCES for dst in TARGETS],
)


def words(code: int, values: np.ndarray) -> bytes:
    """float32 values as the source format `code`, however they round there."""
    if code == FP32:
        return values.astype(np.float32).tobytes()
    with np.errstate(over="ignore"):
        return (ref.half_of if code == FP16 else ref.bf16_of)(values.astype(np.float32)).tobytes()


def compare(src: int, dst: int, data: bytes, dim: int, portable: bool) -> None:
    """The compiled side does what the twin does: the same bytes both ways, or the same refusal."""
    bad_row = -1
    want = b""
    try:
        want = ref.encode(src, dst, data, dim)
    except ref.RefusedRowError as refusal:
        bad_row = refusal.row
    if bad_row >= 0:
        with pytest.raises(quant.RefusedRowError) as caught:
            quant.encode(src, dst, data, dim, portable=portable)
        assert caught.value.row == bad_row
    else:
        assert quant.encode(src, dst, data, dim, portable=portable) == want
        assert quant.decode(dst, want, dim, portable=portable) == ref.decode(dst, want, dim)


def mixed_rows(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """Rows of very different kinds: ordinary, tiny, denormal, constant, zero, with one outlier."""
    values = rng.standard_normal((rows, dim)).astype(np.float32)
    for row in range(rows):
        kind = row % 6
        if kind == 1:
            values[row] *= np.float32(1e-7)
        elif kind == 2:
            values[row] *= np.float32(1e-41)
        elif kind == 3:
            values[row] = values[row, 0]
        elif kind == 4:
            values[row] = 0
        elif kind == 5:
            values[row, rng.integers(dim)] = np.float32(60000)
    return values


@kernels
@pairs
@pytest.mark.parametrize("dim", DIMS)
def test_agrees_with_the_twin(src: int, dst: int, dim: int, portable: bool) -> None:
    values = mixed_rows(np.random.default_rng(dim), 12 if dim < 512 else 6, dim)
    compare(src, dst, words(src, values), dim, portable)


@kernels
@pairs
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_word_agrees_with_the_twin(src: int, dst: int, portable: bool, data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 70))
    rows = data.draw(st.integers(0, 3))
    dtype = np.uint32 if src == FP32 else np.uint16
    bits = data.draw(npst.arrays(dtype, (rows, dim)))
    compare(src, dst, bits.tobytes(), dim, portable)


@kernels
@given(values=npst.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 100)), elements=st.floats(width=32)))
@example(values=np.array([[65504, -65504, 0]], np.float32))
@example(values=np.array([[65504.004, 1, 2]], np.float32))
@example(values=np.array([[-0.0, 0.0]], np.float32))
@example(values=np.array([[-1e-45, 1e-45]], np.float32))
@settings(deadline=None)
def test_any_float_agrees_with_the_twin(values: np.ndarray, portable: bool) -> None:
    for dst in TARGETS:
        compare(FP32, dst, values.tobytes(), values.shape[1], portable)


@kernels
@pytest.mark.parametrize("code", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_16_bit_word_is_kept_verbatim(code: int, portable: bool) -> None:
    every = np.arange(65536, dtype=np.uint16).tobytes()
    assert quant.encode(code, code, every, 256, portable=portable) == every
    assert quant.decode(code, every, 256, portable=portable) == ref.decode(code, every, 256)


@kernels
@pytest.mark.parametrize("code", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_16_bit_number_survives_fp32(code: int, portable: bool) -> None:
    every = np.arange(65536, dtype=np.uint16)
    nan = np.isnan(ref.half_to(every) if code == FP16 else ref.bf16_to(every))
    wide = quant.decode(code, every.tobytes(), 64, portable=portable)
    back = np.frombuffer(quant.encode(FP32, code, wide, 64, portable=portable), np.uint16)
    assert (back[~nan] == every[~nan]).all()
    quiet = 0x200 if code == FP16 else 0x40
    assert (back[nan] == every[nan] | quiet).all()


@kernels
def test_fp32_to_fp16_rounds_to_nearest_even(portable: bool) -> None:
    # 4097, 8193 lie between two halves; 2**-25 between 0 and the smallest subnormal; 2**-14 is the smallest normal.
    values = np.array([2049, 2051, 4098, 2**-25, 3 * 2**-25, 2**-14, 65504, -np.inf, 0.1], np.float32)
    want = np.array([2048, 2052, 4096, 0, 2**-23, 2**-14, 65504, -np.inf, 0.1], np.float16)
    assert quant.encode(FP32, FP16, values.tobytes(), 9, portable=portable) == want.tobytes()


@kernels
@pytest.mark.parametrize("dst", [INT8, FP16], ids=["int8", "fp16"])
@pytest.mark.parametrize("src", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [1e5, -7e4])
@pytest.mark.parametrize("row", [0, 3, 6])
def test_c9_values_beyond_fp16_are_refused_with_their_row(
    src: int, dst: int, value: float, row: int, portable: bool
) -> None:
    for column in (0, 15, 16, 32, 79):
        values = np.full((7, 80), 1e-6, np.float32)
        values[row:, column] = value
        with pytest.raises(quant.RefusedRowError, match=f"row {row} holds a value beyond 65504") as caught:
            quant.encode(src, dst, words(src, values), 80, portable=portable)
        assert caught.value.row == row


@kernels
def test_c9_bf16_rows_stay_bf16(portable: bool) -> None:
    data = words(BF16, np.array([[1e5, -7e4, 1e-6, 3e38]], np.float32))
    assert quant.encode(BF16, BF16, data, 4, portable=portable) == data
    assert np.isfinite(np.frombuffer(quant.decode(BF16, data, 4, portable=portable), np.float32)).all()


@kernels
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_int8_refuses_what_is_not_finite(value: float, portable: bool) -> None:
    for src in SOURCES:
        values = np.zeros((2, 40), np.float32)
        values[1, 33] = value
        with pytest.raises(quant.RefusedRowError) as caught:
            quant.encode(src, INT8, words(src, values), 40, portable=portable)
        assert caught.value.row == 1


@kernels
def test_infinities_pass_into_fp16_and_bf16(portable: bool) -> None:
    values = np.array([[np.inf, -np.inf]], np.float32)
    for dst in (FP16, BF16):
        stored = quant.encode(FP32, dst, values.tobytes(), 2, portable=portable)
        assert quant.decode(dst, stored, 2, portable=portable) == values.tobytes()


@kernels
def test_bf16_refuses_what_would_round_to_infinity(portable: bool) -> None:
    values = np.full((3, 9), np.finfo(np.float32).max, np.float32)
    values[:2] = 1
    with pytest.raises(quant.RefusedRowError, match="beyond finite bf16"):
        quant.encode(FP32, BF16, values.tobytes(), 9, portable=portable)


@settings(deadline=None)
@given(
    values=npst.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 100)), elements=st.floats(-65504, 65504, width=32)
    )
)
def test_int8_error_is_at_most_half_a_step(values: np.ndarray) -> None:
    rows, dim = values.shape
    stored = quant.encode(FP32, INT8, values.tobytes(), dim)
    got = np.frombuffer(quant.decode(INT8, stored, dim), np.float32).reshape(rows, dim).astype(np.float64)
    for start in range(0, dim, 32):
        group = values[:, start : start + 32].astype(np.float64)
        spread = group.max(axis=1) - group.min(axis=1)
        # min may lie one fp16 step below the smallest value, scale one above what is needed
        ulp = np.maximum(np.abs(group).max(axis=1) * 2.0**-10, 2.0**-24)
        bound = ((spread + ulp) / 255 * (1 + 2.0**-9) + 2.0**-24) / 2 + np.abs(group).max(axis=1) * 2.0**-22
        assert (np.abs(got[:, start : start + 32] - group) <= bound[:, None] + 1e-30).all()


@kernels
@pytest.mark.parametrize("dim", [1, 31, 32, 33, 80])
def test_int8_zero_and_constant_groups(dim: int, portable: bool) -> None:
    halves = np.array([0, 1, -1, 0.1, -2.5, 60000, 6e-8, -6e-8], np.float16).astype(np.float32)
    values = np.repeat(halves[:, None], dim, axis=1)
    got = quant.decode(INT8, quant.encode(FP32, INT8, values.tobytes(), dim, portable=portable), dim, portable=portable)
    assert got == values.tobytes()  # an fp16 constant is exact
    thirds = np.full((1, dim), 1 / 3, np.float32)
    stored = quant.encode(FP32, INT8, thirds.tobytes(), dim, portable=portable)
    back = np.frombuffer(quant.decode(INT8, stored, dim, portable=portable), np.float32)
    assert np.abs(back - np.float32(1 / 3)).max() <= np.spacing(np.float16(1 / 3))


def test_int8_layout_is_codes_then_pairs() -> None:
    values = np.zeros((1, 33), np.float32)
    values[0, :32] = np.arange(32) * 255 / 31
    values[0, 32] = -2
    stored = quant.encode(FP32, INT8, values.tobytes(), 33)
    assert len(stored) == quant.row_bytes(INT8, 33) == 33 + 8
    assert stored[0] == 0
    assert stored[31] == 255
    assert np.frombuffer(stored[33:], np.float16).tolist() == [1.0, 0.0, 0.0, -2.0]


@kernels
@pairs
def test_pieces_give_the_bytes_of_the_whole(src: int, dst: int, portable: bool) -> None:
    dim, rows = 48, 24
    data = words(src, mixed_rows(np.random.default_rng(5), rows, dim))
    width = quant.row_bytes(src, dim)
    whole = quant.encode(src, dst, data, dim, portable=portable)
    for step in (1, 5, 7, 23):
        parts = [
            quant.encode(src, dst, data[at * width : (at + step) * width], dim, portable=portable)
            for at in range(0, rows, step)
        ]
        assert b"".join(parts) == whole


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_buffers(offset: int) -> None:
    data = words(FP32, mixed_rows(np.random.default_rng(6), 6, 80))
    shifted = memoryview(bytes(offset) + data)[offset:]
    for dst in TARGETS:
        room = bytearray(offset + 6 * quant.row_bytes(dst, 80))
        out = memoryview(room)[offset:]
        assert quant.encode(FP32, dst, shifted, 80, out=out) is out
        assert bytes(out) == ref.encode(FP32, dst, data, 80)
        back = bytearray(offset + len(data))
        quant.decode(dst, out, 80, out=memoryview(back)[offset:])
        assert bytes(back[offset:]) == ref.decode(dst, bytes(out), 80)


def test_sizes_and_codes_are_checked() -> None:
    assert [quant.row_bytes(code, 33) for code in (INT8, FP16, FP32, BF16)] == [41, 66, 132, 66]
    with pytest.raises(ValueError, match="format 11 is not in this build"):
        quant.row_bytes(11, 32)
    with pytest.raises(ValueError, match="dim 0 is not in"):
        quant.row_bytes(FP16, 0)
    with pytest.raises(ValueError, match="not whole rows of 128"):
        quant.encode(FP32, FP16, bytes(129), 32)
    with pytest.raises(ValueError, match="not whole rows of 36"):
        quant.decode(INT8, bytes(35), 32)
    with pytest.raises(ValueError, match="rows cannot be given as int8"):
        quant.encode(INT8, FP16, bytes(36), 32)
    with pytest.raises(ValueError, match="out holds 63 bytes, 64 are needed"):
        quant.encode(FP32, FP16, bytes(128), 32, out=bytearray(63))
    with pytest.raises(ValueError, match="out holds 127 bytes, 128 are needed"):
        quant.decode(FP16, bytes(64), 32, out=bytearray(127))
    with pytest.raises(BufferError):
        quant.encode(FP32, FP16, bytes(128), 32, out=bytes(64))
    assert quant.encode(FP32, INT8, b"", 32) == b""


def test_formats_carry_a_parameter() -> None:
    assert [quant.pack_format(INT8), quant.pack_format(1, 128)] == [0, 1 | 128 << 8]
    for code, param in ((-1, 0), (256, 0), (0, -1), (0, 65536)):
        with pytest.raises(ValueError, match="no format has"):
            quant.pack_format(code, param)
    for code in TARGETS:
        with pytest.raises(ValueError, match=f"{NAMES[code]} takes no parameter, not 3"):
            quant.row_bytes(quant.pack_format(code, 3), 32)
    with pytest.raises(ValueError, match="format -1 is not"):
        quant.row_bytes(-1, 32)


def test_constants_agree_with_the_twin() -> None:
    assert (quant.INT8, quant.FP16, quant.FP32, quant.BF16) == (ref.INT8, ref.FP16, ref.FP32, ref.BF16)
    assert quant.GROUP == ref.GROUP == 32
    for code in TARGETS:
        for dim in DIMS:
            assert quant.row_bytes(code, dim) == ref.row_bytes(code, dim) == limits.row_bytes(code, dim)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 12), st.randoms(use_true_random=False))
def test_heads_are_split_as_the_twin_splits_them(heads: int, head_bytes: int, rows: int, rng) -> None:
    data = rng.randbytes(heads * head_bytes * rows)
    want = ref.split_heads(data, heads, head_bytes)
    assert quant.split_heads(data, heads, head_bytes) == want
    out = bytearray(len(data) + 3)
    assert quant.split_heads(data, heads, head_bytes, out=out) is out
    assert out == want + bytes(3)


def test_heads_of_no_whole_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes are not whole rows of 2 x 2"):
        quant.split_heads(bytes(7), 2, 2)
    with pytest.raises(ValueError, match="at least 1"):
        quant.split_heads(bytes(8), 0, 2)
    with pytest.raises(ValueError, match="out holds 7 bytes, 8 are needed"):
        quant.split_heads(bytes(8), 2, 2, out=bytearray(7))
