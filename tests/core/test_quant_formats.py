"""fp8, mlx4g32, bf16_rope_fp8_body and turbo rows: the kernels against their twins, and what the formats promise."""

import functools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pion import limits
from pion._core import quant
from pion.ref import quant as ref
from pion.ref import turbo

pack = quant.pack_format
FP32, FP16, BF16, FP8, MLX4 = quant.FP32, quant.FP16, quant.BF16, quant.FP8, quant.MLX4G32
TURBOS = {4: quant.TURBO4, 3: quant.TURBO3, 2: quant.TURBO2}
DIMS = [1, 2, 7, 31, 32, 33, 48, 64, 80, 96, 127, 128, 192, 256, 512, 576, 1000, 1024, 2048, 4096]

kernels = pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])


def formats(dim: int) -> list[int]:
    """The formats with scales that take rows of `dim` values; turbo without a head, and with the row or 64 as one."""
    found = [quant.INT8, FP8] + [MLX4] * (dim % 32 == 0)
    found += [pack(code, head) for code in TURBOS.values() for head in {0, dim, 64}]
    return found + [pack(quant.BF16_ROPE_FP8_BODY, lead) for lead in {1, dim // 2, dim - 1} if 0 < lead < dim]


def rows_of_all_kinds(dim: int) -> np.ndarray:
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((10, dim)).astype(np.float32)
    values[1] *= np.float32(1e-7)
    values[2] *= np.float32(1e-41)
    values[3] = values[3, 0]
    values[4] = 0
    values[5, rng.integers(dim)] = 60000
    values[6] = -65504
    values[7] *= np.float32(1e-4)
    values[8] = np.float32(2.0**-24) * rng.integers(-8, 8, dim).astype(np.float32)
    return values


def words(code: int, values: np.ndarray) -> bytes:
    values = values.astype(np.float32)
    if code == BF16:
        return ref.bf16_of(np.clip(values, -65000, 65000)).tobytes()
    return values.tobytes() if code == FP32 else ref.half_of(values).tobytes()


def decoded(fmt: int, values: np.ndarray) -> np.ndarray:
    """Rows through a format and back, as float64."""
    rows, dim = values.shape
    stored = quant.encode(FP32, fmt, np.ascontiguousarray(values, np.float32), dim)
    return np.frombuffer(quant.decode(fmt, stored, dim), np.float32).reshape(rows, dim).astype(np.float64)


def error(values: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Squared error of each row over its squared norm."""
    values = values.astype(np.float64)
    result: np.ndarray = ((values - got) ** 2).sum(axis=1) / (values**2).sum(axis=1)
    return result


# ---- agreement with the twins ------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("src", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", DIMS)
def test_same_bytes_as_the_twin(dim: int, src: int, portable: bool) -> None:
    data = words(src, rows_of_all_kinds(dim))
    for fmt in formats(dim):
        want = ref.encode(src, fmt, data, dim)
        assert quant.encode(src, fmt, data, dim, portable=portable) == want
        assert quant.decode(fmt, want, dim, portable=portable) == ref.decode(fmt, want, dim)


@kernels
@settings(max_examples=60, deadline=None)
@given(
    values=npst.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 100)), elements=st.floats(-65504, 65504, width=32)
    )
)
@example(values=np.full((1, 32), -5, np.float32))  # the edge of MLX's scale is then a negative value
@example(values=np.full((1, 64), 1e-9, np.float32))
def test_any_finite_row_agrees_with_the_twin(values: np.ndarray, portable: bool) -> None:
    dim = values.shape[1]
    for fmt in formats(dim):
        want = ref.encode(FP32, fmt, values.tobytes(), dim)
        assert quant.encode(FP32, fmt, values.tobytes(), dim, portable=portable) == want
        got = quant.decode(fmt, want, dim, portable=portable)
        assert got == ref.decode(fmt, want, dim)
        if fmt & 255 != quant.BF16_ROPE_FP8_BODY:  # whose bf16 part may round up to 65536
            assert (np.abs(np.frombuffer(got, np.float32)) <= 65504).all()


@kernels
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_stored_byte_decodes_as_in_the_twin(portable: bool, data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 70))
    fmt = data.draw(st.sampled_from(formats(dim)[1:]))  # int8 is compared in test_quant.py
    stored = data.draw(npst.arrays(np.uint8, (2, quant.row_bytes(fmt, dim)))).tobytes()
    got = np.frombuffer(quant.decode(fmt, stored, dim, portable=portable), np.float32)
    with np.errstate(all="ignore"):
        want = np.frombuffer(ref.decode(fmt, stored, dim), np.float32)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("dim", [*range(1, 200), *DIMS, 8192])
def test_one_size_everywhere(dim: int) -> None:
    for fmt in [*formats(dim), FP16, FP32, BF16]:
        size = quant.row_bytes(fmt, dim)
        assert size == ref.row_bytes(fmt, dim) == limits.row_bytes(fmt, dim)
        assert len(quant.encode(FP32, fmt, bytes(4 * dim), dim)) == size
    assert all(turbo.blocks(dim, head) == limits.turbo_blocks(dim, head) for head in (0, dim, 64, 80))
    if dim % 32:
        assert limits.row_bytes(MLX4, dim) == ref.row_bytes(MLX4, dim) == 0
        with pytest.raises(ValueError, match=f"mlx4g32 takes multiples of 32 values, not {dim}"):
            quant.row_bytes(MLX4, dim)


def test_leading_values_must_leave_a_body() -> None:
    for lead in (0, 8, 9):
        fmt = pack(quant.BF16_ROPE_FP8_BODY, lead)
        assert limits.row_bytes(fmt, 8) == ref.row_bytes(fmt, 8) == 0
        with pytest.raises(ValueError, match=f"takes 1 to 7 leading values of 8, not {lead}"):
            quant.row_bytes(fmt, 8)
    for code in (FP8, MLX4, quant.INT8):
        with pytest.raises(ValueError, match="takes no parameter"):
            quant.row_bytes(pack(code, 1), 32)


@pytest.mark.parametrize("fmt", formats(96))
def test_c12_pieces_at_row_boundaries_give_the_same_bytes(fmt: int) -> None:
    values = np.concatenate([rows_of_all_kinds(96)] * 3)[:26]
    whole = quant.encode(FP32, fmt, values, 96)
    for step in (1, 3, 4, 25):
        parts = [quant.encode(FP32, fmt, values[at : at + step], 96) for at in range(0, 26, step)]
        assert b"".join(parts) == whole


@kernels
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 65520.0, 1e5, -7e4])
def test_c9_scaled_formats_refuse_with_the_row(value: float, portable: bool) -> None:
    dim = 96
    for column in (0, 47, 95):
        values = np.full((5, dim), 1e-6, np.float32)
        values[3:, column] = value
        for fmt in formats(dim):
            if fmt & 255 == quant.BF16_ROPE_FP8_BODY and column < fmt >> 8:
                assert np.isnan(decoded(fmt, values)[3, column]) if np.isnan(value) else True
                continue
            for src in (FP32, BF16):
                data = values.tobytes() if src == FP32 else ref.bf16_of(values).tobytes()
                with pytest.raises(quant.RefusedRowError, match="row 3 holds") as caught:
                    quant.encode(src, fmt, data, dim, portable=portable)
                assert caught.value.row == 3


@kernels
def test_leading_values_keep_every_bf16_word(portable: bool) -> None:
    lead = np.arange(65536, dtype=np.uint16).reshape(-1, 64)
    rows = np.concatenate([lead, np.zeros((len(lead), 32), np.uint16)], axis=1)
    fmt = pack(quant.BF16_ROPE_FP8_BODY, 64)
    stored = quant.encode(BF16, fmt, np.ascontiguousarray(rows), 96, portable=portable)
    assert (np.frombuffer(stored, np.uint8).reshape(len(lead), -1)[:, :128].copy().view(np.uint16) == lead).all()


# ---- e4m3 and fp8 ------------------------------------------------------------------------------------------------


def test_c10_every_fp8_code_round_trips() -> None:
    every = bytes(range(256))
    wide = quant.decode_e4m3(every)
    assert np.array_equal(np.frombuffer(wide, np.float32), ref.e4m3_to(np.arange(256, dtype=np.uint8)), equal_nan=True)
    assert quant.encode_e4m3(wide) == every


def test_c10_the_cast_saturates_and_rounds_to_even() -> None:
    given_ = [448, 449, 464, 465, 1e4, np.inf, -np.inf, 2**-9, 2**-10, 3 * 2**-10, 17, 19, 1.0625, 1.1875, -0.0]
    want = [448, 448, 448, 448, 448, 448, -448, 2**-9, 0, 2**-8, 16, 20, 1, 1.25, -0.0]
    codes = quant.encode_e4m3(np.array(given_, np.float32))
    assert np.frombuffer(quant.decode_e4m3(codes), np.float32).tolist() == want
    assert quant.encode_e4m3(np.array([np.nan], np.float32)) == b"\x7f"


def test_the_cast_agrees_with_the_twin_on_random_words() -> None:
    values = np.random.default_rng(8).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert quant.encode_e4m3(np.ascontiguousarray(values)) == ref.e4m3_of(values).tobytes()


def test_the_cast_checks_sizes() -> None:
    with pytest.raises(ValueError, match="5 bytes are not whole fp32 values"):
        quant.encode_e4m3(bytes(5))
    with pytest.raises(ValueError, match="out holds 3 bytes, 4 are needed"):
        quant.decode_e4m3(b"\x00", out=bytearray(3))
    out = bytearray(4)
    assert quant.decode_e4m3(b"\x38", out=out) is out
    assert np.frombuffer(out, np.float32)[0] == 1


@pytest.mark.parametrize("size", [1e-6, 1e-4, 0.01, 1, 1e3])
def test_c10_fp8_rows_keep_values_of_any_size(size: float) -> None:
    values = np.random.default_rng(9).standard_normal((256, 128)).astype(np.float32) * np.float32(size)
    got = decoded(FP8, values)
    assert np.sqrt(error(values, got).mean()) < (0.028 if size >= 1e-4 else 0.07)
    step = np.maximum(np.abs(values) * 2.0**-4 * 1.002, 2.0**-23 * 1.001 + np.abs(values).max() * 2.0**-18)
    assert (np.abs(got - values) <= step).all()


@pytest.mark.parametrize("name", ["int8", "fp8", "mlx4g32"])
def test_c7_zero_denormal_and_constant_groups(name: str) -> None:
    fmt = limits.FORMATS[name]
    halves = np.array([0, 1e-11, 6e-8, -6e-8, 3e-5, 1e-4, 0.1, -2.5, 3, 997, -60000, 65504], np.float32)
    values = np.repeat(halves.astype(np.float16).astype(np.float32)[:, None], 32, axis=1).reshape(1, -1)
    got = decoded(fmt, values)
    assert np.isfinite(got).all()
    assert (got[:, :64] == 0).all()
    near = np.minimum(np.abs(values), 32768).astype(np.float16)  # spacing(65504) would be infinite
    assert (np.abs(got - values) <= np.spacing(near).astype(np.float64)).all()
    denormal = np.full((1, 64), 1e-41, np.float32)
    denormal[:, 32:] = 0
    assert (np.abs(decoded(fmt, denormal)) <= 2.0**-24).all()
    assert (decoded(fmt, denormal)[:, 32:] == 0).all()


# ---- mlx4g32 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_mlx4g32_is_what_mlx_makes_of_the_fp16_row(seed: int) -> None:
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(seed)
    rows = np.concatenate(
        [rows_of_all_kinds(256), rng.standard_normal((500, 256)) * 10.0 ** rng.uniform(-7, 4, (500, 1))]
    )
    halves = np.clip(rows, -65504, 65504).astype(np.float16)
    halves[20] = np.abs(halves[20])
    halves[21] = -np.abs(halves[21])
    halves[22, ::2] = -halves[22, 1::2]  # both edges alike
    parts = mx.quantize(mx.array(halves), group_size=32, bits=4)
    want = np.concatenate([np.array(part).view(np.uint8) for part in parts], axis=1)
    got = np.frombuffer(quant.encode(FP16, MLX4, halves, 256), np.uint8).reshape(len(rows), -1)
    assert (got == want).all()
    assert quant.encode(FP32, MLX4, halves.astype(np.float32), 256) == got.tobytes()


# ---- turbo ---------------------------------------------------------------------------------------------------------


@functools.cache
def lloyd_max(bits: int, dim: int) -> float:
    """The least squared error of a scalar quantizer of the coordinates of a random unit vector in `dim` dimensions."""
    x = np.linspace(0, min(1, 9 / np.sqrt(dim)), 40001)[:-1] + 1e-9
    density = np.exp((dim - 3) / 2 * np.log1p(-np.minimum(x * x, 1 - 1e-15)))
    density /= density.sum()
    level = np.sqrt((x * x * density).sum()) * turbo.LEVELS[bits].astype(np.float64)
    for _ in range(400):
        cell = np.searchsorted((level[1:] + level[:-1]) / 2, x)
        level = np.bincount(cell, x * density, len(level)) / np.bincount(cell, density, len(level))
    cell = np.searchsorted((level[1:] + level[:-1]) / 2, x)
    return float(((x - level[cell]) ** 2 * density).sum() / (x * x * density).sum())


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 128, 192, 256, 512, 576, 1024, 4096])
def test_c4_turbo_error_on_gaussian_rows_is_lloyd_max(dim: int, bits: int) -> None:
    values = np.random.default_rng(dim).standard_normal((max(64, 400_000 // dim), dim)).astype(np.float32)
    mean = error(values, decoded(pack(TURBOS[bits], dim), values)).mean()
    assert mean <= 1.03 * lloyd_max(bits, dim)
    assert mean <= np.sqrt(3) * np.pi / 2 * 4.0**-bits


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("head", [0, 1])
def test_c4_turbo_takes_every_dim(bits: int, head: int) -> None:
    rng = np.random.default_rng(bits)
    for dim in [1, *range(32, 300), 576, 1000, 4096]:
        values = rng.standard_normal((40, dim)).astype(np.float32)
        mean = error(values, decoded(pack(TURBOS[bits], dim * head), values)).mean()
        assert mean <= 1.08 * lloyd_max(bits, 4096), dim  # 40 rows scatter by some per cent


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256, 576, 1024])
def test_c6_turbo_error_does_not_depend_on_the_kind_of_row(dim: int, bits: int) -> None:
    rng = np.random.default_rng(dim)
    fmt, bar = pack(TURBOS[bits], dim), 1.3 * lloyd_max(bits, dim)
    outlier = rng.standard_normal((200, dim)).astype(np.float32)
    outlier[np.arange(200), rng.integers(0, dim, 200)] *= 30
    kinds = {
        "constant": np.full((1, dim), 3, np.float32),
        "ramp": np.linspace(-1, 1, dim, dtype=np.float32)[None],
        "ramp from zero": np.arange(dim, dtype=np.float32)[None],
        "one-hot": np.eye(dim, dtype=np.float32),
        "outlier": outlier,
    }
    for kind, values in kinds.items():
        assert error(values, decoded(fmt, values)).mean() <= bar, kind


@pytest.mark.parametrize("size", [1e-3, 1, 1e3])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_turbo_keeps_the_norm(bits: int, size: float) -> None:
    for dim in (32, 80, 128, 576):
        values = np.random.default_rng(1).standard_normal((200, dim))
        values = (values / np.linalg.norm(values, axis=1, keepdims=True) * size).astype(np.float32)
        ratio = np.linalg.norm(decoded(pack(TURBOS[bits], dim), values), axis=1) / size
        assert (np.abs(ratio - 1) <= 0.01).all()


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_c7_turbo_zero_and_tiny_rows(bits: int) -> None:
    for dim in (1, 33, 128):
        values = np.zeros((3, dim), np.float32)
        values[1] = 1e-41
        values[2] = 1e-11
        got = decoded(pack(TURBOS[bits], dim), values)
        assert (got[:2] == 0).all()
        assert np.isfinite(got).all()
        assert np.abs(np.linalg.norm(got[2]) / np.linalg.norm(values[2]) - 1) < 0.01


def test_turbo_rotation_is_orthogonal() -> None:
    for dim in (1, 2, 7, 24, 80, 96, 120, 128, 192, 576):
        turned = turbo.rotate(np.eye(dim, dtype=np.float32)).astype(np.float64) / dim
        assert np.abs(turned @ turned.T - np.eye(dim)).max() < 1e-5
        back = turbo.rotate_back(turbo.rotate(np.eye(dim, dtype=np.float32))) / np.float32(dim) ** 2
        assert np.abs(back - np.eye(dim)).max() < 1e-5


def test_int8_loses_half_a_percent() -> None:
    """Groups of 32: also two channels of thirty times the others' size cost only their own groups."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((512, 1024)).astype(np.float32)
    outliers = values.copy()
    outliers[:, [100, 700]] *= 30
    for rows, bar in ((values, 0.005), (outliers, 0.008)):
        assert np.linalg.norm(decoded(limits.FORMATS["int8"], rows) - rows) / np.linalg.norm(rows) <= bar
