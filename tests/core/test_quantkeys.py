"""The key forms against their numpy twin, and against what attention needs of them."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pion._core import quant, quantkeys
from pion.ref import quant as ref_rows
from pion.ref import quant_keys as ref

FP16, FP32, BF16 = quant.FP16, quant.FP32, quant.BF16
SOURCES = [FP32, FP16, BF16]
FORMS = [quantkeys.KTURBO4, quantkeys.KTURBO3, quantkeys.KTURBO2]
BITS = {quantkeys.KTURBO4: 4, quantkeys.KTURBO3: 3, quantkeys.KTURBO2: 2}
# (dim, head): powers of two, head sizes that are not, odd ones, and heads of one value
SHAPES = [
    *((dim, dim) for dim in (1, 2, 32, 33, 48, 64, 80, 96, 128, 192, 256, 512, 576)),
    *((dim, 64) for dim in (192, 1024, 2048, 4096)),
    *((240, 80), (99, 33), (30, 10), (5, 1), (8192, 128), (1030, 103)),
]

forms = pytest.mark.parametrize("form", FORMS, ids=["turbo4", "turbo3", "turbo2"])


def words(code: int, values: np.ndarray) -> bytes:
    """float32 values as the source format `code`, however they round there."""
    if code == FP32:
        return values.astype(np.float32).tobytes()
    with np.errstate(over="ignore"):
        return (ref_rows.half_of if code == FP16 else ref_rows.bf16_of)(values.astype(np.float32)).tobytes()


def compare(src: int, fmt: int, data: bytes, dim: int, first_row: int, theta: float) -> None:
    """The compiled side does what the twin does: the same bytes both ways, or the same refusal."""
    bad_row = -1
    want = b""
    try:
        want = ref.encode_keys(src, fmt, data, dim, first_row, theta)
    except ref_rows.RefusedRowError as refusal:
        bad_row = refusal.row
    if bad_row >= 0:
        with pytest.raises(quantkeys.RefusedKeyError) as caught:
            quantkeys.encode_keys(src, fmt, data, dim, first_row, theta)
        assert caught.value.row == bad_row
    else:
        assert quantkeys.encode_keys(src, fmt, data, dim, first_row, theta) == want
        got = quantkeys.decode_keys(fmt, want, dim, first_row, theta)
        assert got == ref.decode_keys(fmt, want, dim, first_row, theta)


def trip(values: np.ndarray, fmt: int, first_row: int = 0, theta: float = 0.0) -> np.ndarray:
    """Rows as they come back."""
    dim = values.shape[1]
    stored = quantkeys.encode_keys(FP32, fmt, values.astype(np.float32), dim, first_row, theta)
    back = quantkeys.decode_keys(fmt, stored, dim, first_row, theta)
    return np.frombuffer(back, np.float32).reshape(values.shape)


def rope(values: np.ndarray, head: int, theta: float, start: int = 0, *, back: bool = False) -> np.ndarray:
    """mlx's rope with traditional=False, in double precision, or undone."""
    heads = values.astype(np.float64).reshape(len(values), -1, head)
    angle = (start + np.arange(len(values)))[:, None, None] * theta ** (-2.0 * np.arange(head // 2) / head)
    angle = -angle if back else angle
    lo, hi = heads[..., : head // 2], heads[..., head // 2 :]
    turned = [lo * np.cos(angle) - hi * np.sin(angle), lo * np.sin(angle) + hi * np.cos(angle)]
    return np.concatenate(turned, axis=-1).reshape(values.shape)


def mixed_groups(rng: np.random.Generator, groups: int, dim: int) -> np.ndarray:
    """Groups with channels of very different kinds: offset, tiny, denormal, constant, zero, with one outlier."""
    values = rng.standard_normal((groups, 64, dim))
    for channel in range(dim):
        kind = channel % 8
        if kind == 1:
            values[:, :, channel] += 200
        elif kind == 2:
            values[:, :, channel] *= 1e-7
        elif kind == 3:
            values[:, :, channel] *= 1e-41
        elif kind == 4:
            values[:, :, channel] = values[:, :1, channel]
        elif kind == 5:
            values[:, :, channel] = 0
        elif kind == 6:
            values[:, rng.integers(64), channel] = 40000
    return values.reshape(-1, dim).astype(np.float32)


@forms
@pytest.mark.parametrize(("dim", "head"), SHAPES)
def test_agrees_with_the_twin(dim: int, head: int, form: int) -> None:
    values = mixed_groups(np.random.default_rng(dim), 3 if dim < 512 else 1, dim)
    for src, (first_row, theta) in zip(SOURCES, [(0, 0.0), (64, 1e4), (131_072, 1e6)], strict=True):
        compare(src, quant.pack_format(form, head), words(src, values), dim, first_row, theta)


@forms
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_word_agrees_with_the_twin(form: int, data: st.DataObject) -> None:
    head = data.draw(st.integers(1, 40))
    dim = head * data.draw(st.integers(1, 3))
    src = data.draw(st.sampled_from(SOURCES))
    bits = data.draw(npst.arrays(np.uint32 if src == FP32 else np.uint16, (64, dim)))
    theta = data.draw(st.sampled_from([0.0, 1e-3, 1.0, 1e4, 5e5, 1e12]))
    first_row = data.draw(st.integers(0, 200_000))
    compare(src, quant.pack_format(form, head), bits.tobytes(), dim, first_row, theta)


@forms
@settings(max_examples=50, deadline=None)
@given(
    channels=st.lists(st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=64), min_size=1, max_size=3),
    theta=st.sampled_from([0.0, 1e4]),
)
@example(channels=[[-65504.0, 65504.0]], theta=0.0)
@example(channels=[[2.0**-24, 0.0, 7 * 2.0**-24]], theta=0.0)
@example(channels=[[-0.0]], theta=0.0)
def test_any_number_agrees_with_the_twin_and_stays_in_range(
    form: int, channels: list[list[float]], theta: float
) -> None:
    values = np.stack([np.resize(np.array(channel, np.float32), 64) for channel in channels], axis=1)
    fmt = quant.pack_format(form, len(channels))
    compare(FP32, fmt, values.tobytes(), len(channels), 0, theta)
    if theta == 0:
        got = trip(values, fmt)
        low, high = values.min(axis=0), values.max(axis=0)
        # No value leaves the range by more than a level (scale has 10 bits, 2**-24 at least, and so has bias).
        partner = ref.partners(len(channels), len(channels))
        fewest = BITS[form] - ((high - low)[partner] > 2 * (high - low))
        room = (high - low) / (2.0**fewest - 1) + np.maximum(np.abs(low), np.abs(high)) * 2.0**-9 + 2.0**-23
        assert np.isfinite(got).all()
        assert (got >= low - room).all()
        assert (got <= high + room).all()


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize(("head", "start"), [(64, 0), (80, 0), (128, 4032)])
def test_the_rope_is_the_one_of_mlx(head: int, start: int, theta: float) -> None:
    """Keys that are constant before the rope decode to what mlx makes of that constant."""
    mx = pytest.importorskip("mlx.core")
    fixed = np.random.default_rng(3).standard_normal((1, 1, 1, head)).astype(np.float16).astype(np.float32)
    keys = mx.array(np.repeat(fixed, 64, axis=2))
    turned = np.array(mx.fast.rope(keys, head, traditional=False, base=theta, scale=1.0, offset=start))[0, 0]
    fmt = quant.pack_format(quantkeys.KTURBO2, head)
    # Turned back the channels are constant but for the rounding of 64 keys to fp16: two bits are plenty.
    assert np.abs(trip(turned, fmt, start, theta) - turned).max() < 3e-3
    assert np.abs(trip(turned, fmt, start + 1, theta) - trip(turned, fmt, start, theta)).max() < 1e-2
    assert np.abs(trip(turned, fmt, start, 0.0) - turned).max() > 0.3  # without the rope they are not


@forms
@pytest.mark.parametrize("theta", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("dim", [64, 128])
def test_c1_a_common_offset_does_not_destroy_the_keys(dim: int, theta: float, form: int) -> None:
    rng = np.random.default_rng(11)
    fixed = rng.standard_normal((1, dim))
    fixed *= 200 / np.linalg.norm(fixed)
    offset = np.repeat(fixed, 2048, axis=0)
    keys = offset + 2 * rng.standard_normal((2048, dim))
    if theta:
        offset, keys = rope(offset, dim, theta), rope(keys, dim, theta)
    got = trip(keys, quant.pack_format(form, dim), 0, theta)
    queries = rng.standard_normal((dim, 64))
    want_logits, got_logits = (keys - offset) @ queries, (got - offset) @ queries
    correlation = min(np.corrcoef(a, b)[0, 1] for a, b in zip(want_logits.T, got_logits.T, strict=True))
    assert correlation >= {4: 0.99, 3: 0.98, 2: 0.93}[BITS[form]]


@forms
@pytest.mark.parametrize(("head", "theta", "alone"), [(64, 0.0, 0), (64, 1e4, 0), (66, 1e4, 4), (128, 1e6, 0)])
def test_channels_that_spread_wide_take_a_bit_from_their_partners(
    head: int, theta: float, alone: int, form: int
) -> None:
    """The sign of a scale says so, and errors are those of one bit more and one bit less."""
    dim, bits = 2 * head, BITS[form]
    partner = ref.partners(dim, head if theta else dim)
    paired = partner != np.arange(dim)
    assert (partner[partner] == np.arange(dim)).all()
    assert (~paired).sum() == alone  # the middle pair of an odd number of them
    rng = np.random.default_rng(21)
    wide = rng.random(dim) < 0.3
    wide &= ~(wide[partner] & (partner < np.arange(dim)) & paired)  # one of a couple at most
    values = rng.uniform(-1, 1, (640, dim)) * np.where(wide, 3, 1)
    keys = rope(values, head, theta) if theta else values
    fmt = quant.pack_format(form, head)
    stored = np.frombuffer(bytes(quantkeys.encode_keys(FP32, fmt, keys.astype("f4"), dim, 0, theta)), np.uint8)
    scales = stored.reshape(10, -1)[:, 8 * bits * dim :][:, : 2 * dim].copy().view(np.uint16)
    more = wide & paired
    assert more.any()
    assert (scales >> 15 == more).all()
    got = trip(keys, fmt, 0, theta)
    error = np.abs((rope(got, head, theta, back=True) if theta else got) - values)
    step = np.where(wide, 6, 2) / (2.0 ** (bits + more - more[partner]) - 1)
    assert (error.max(axis=0) < step).all()
    assert (error.mean(axis=0) < 0.36 * step).all()


@pytest.mark.parametrize("form", FORMS[:2], ids=["turbo4", "turbo3"])
@pytest.mark.parametrize("theta", [0.0, 1e4])
@pytest.mark.parametrize("norm", [1e-3, 1, 1e3])
def test_norms_are_kept(norm: float, theta: float, form: int) -> None:
    """The mean over rows: the levels of a channel stand for 64 rows together, so single rows deviate either way."""
    values = np.random.default_rng(12).standard_normal((1024, 128))
    values *= norm / np.linalg.norm(values, axis=1, keepdims=True)
    got = trip(values, quant.pack_format(form, 128), 0, theta)
    ratio = np.linalg.norm(got, axis=1) / norm
    assert abs(ratio.mean() - 1) < 0.01
    assert abs(np.linalg.norm(got) / np.linalg.norm(values) - 1) < 0.01


@forms
@pytest.mark.parametrize("dim", [1, 33, 48, 64, 80, 96, 192, 576, 4096])
def test_mean_square_error_of_gaussian_keys(dim: int, form: int) -> None:
    """Below Lloyd-Max for 4 and 3 bits; for 2 bits near it, and below the bound of sqrt(3) * pi / 2 * 4**-b."""
    values = np.random.default_rng(dim).standard_normal((64 * max(1, 8192 // dim), dim))
    error = np.square(trip(values, form) - values).mean()
    assert error < {4: 0.0095, 3: 0.0345, 2: 0.117 * 1.06}[BITS[form]]


@forms
def test_zero_and_constant_groups(form: int) -> None:
    halves = np.array([0, 1, -1, 0.1, -2.5, 60000, 6e-8, -6e-8, 65504, -65504], np.float16).astype(np.float32)
    constant = np.repeat(halves[None, :], 64, axis=0)
    assert (trip(constant, form) == constant).all()  # an fp16 constant is exact
    zero = np.zeros((128, 34))
    for theta in (0.0, 1e4):
        assert (trip(zero, quant.pack_format(form, 17), 640, theta) == 0).all()
    third = np.full((64, 3), 1 / 3)
    assert np.abs(trip(third, form) - 1 / 3).max() <= np.spacing(np.float16(1 / 3))


@forms
def test_denormal_groups_are_finite_and_near(form: int) -> None:
    least = 2.0**-24
    values = least * np.random.default_rng(4).integers(-9, 10, (128, 6))
    got = trip(values, form)
    assert np.isfinite(got).all()
    assert np.abs(got - values).max() <= 19 * least / 2 ** BITS[form] + least
    few = least * np.random.default_rng(5).integers(-1, 2, (64, 6))  # fits the levels
    assert (trip(few, form) == few).all()
    assert np.isfinite(trip(values * 1e-30, quant.pack_format(form, 6), 7, 1e4)).all()


@forms
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65505.0, -7e4])
@pytest.mark.parametrize("row", [0, 63, 64, 130])
def test_values_beyond_fp16_are_refused_with_their_row(row: int, value: float, form: int) -> None:
    for theta, column in itertools.product((0.0, 1e4), (0, 31, 32, 64, 98)):
        for src in SOURCES[: 1 if value == 65505.0 else 3]:  # 65505 is an infinity in fp16
            values = np.full((192, 99), 1e-3, np.float32)
            values[row:, column] = value
            with pytest.raises(quantkeys.RefusedKeyError, match=f"row {row} holds a value beyond 65504") as caught:
                quantkeys.encode_keys(src, quant.pack_format(form, 33), words(src, values), 99, 0, theta)
            assert caught.value.row == row
            assert isinstance(caught.value, quant.RefusedRowError)


def test_a_pair_that_leaves_the_range_is_refused() -> None:
    values = np.zeros((64, 2))
    values[10] = 60000  # at 10 rad the pair lies near an axis, 84,853 long
    assert np.isfinite(trip(values, quantkeys.KTURBO4)).all()
    with pytest.raises(quantkeys.RefusedKeyError, match="row 10"):
        trip(values, quant.pack_format(quantkeys.KTURBO4, 2), 0, 1e4)


@forms
def test_fp16_rows_give_the_block_of_their_source(form: int) -> None:
    values = mixed_groups(np.random.default_rng(6), 2, 48)
    fmt = quant.pack_format(form, 48)
    for src in (FP32, BF16):
        given = words(src, values)
        waited = quant.encode(src, FP16, given, 48)
        assert quantkeys.encode_keys(FP16, fmt, waited, 48, 64, 1e4) == quantkeys.encode_keys(
            src, fmt, given, 48, 64, 1e4
        )


@forms
@pytest.mark.parametrize("theta", [0.0, 1e4])
def test_pieces_give_the_bytes_of_the_whole(theta: float, form: int) -> None:
    dim, first = 99, 192
    values = mixed_groups(np.random.default_rng(7), 6, dim)
    fmt = quant.pack_format(form, 33)
    whole = bytes(quantkeys.encode_keys(FP32, fmt, values, dim, first, theta))
    size = quantkeys.block_bytes(fmt, dim)
    wide = bytes(quantkeys.decode_keys(fmt, whole, dim, first, theta))
    for step in (1, 2, 5):
        parts, rows = [], []
        for at in range(0, 6, step):
            piece = values[64 * at : 64 * (at + step)]
            parts.append(quantkeys.encode_keys(FP32, fmt, piece, dim, first + 64 * at, theta))
            blocks = whole[size * at : size * (at + step)]
            rows.append(quantkeys.decode_keys(fmt, blocks, dim, first + 64 * at, theta))
        assert b"".join(parts) == whole
        assert b"".join(rows) == wide


def test_layout_of_a_block() -> None:
    """Four channels count up: a narrow one, its partner in steps of 4, and two others, the last of them backwards."""
    row = np.arange(64)
    for form, bits in BITS.items():
        most = 2**bits
        rows = np.stack([row % (most // 2), 4 * (row % (2 * most)), row % most, 3 + most - 1 - row % most], axis=1)
        stored = bytes(quantkeys.encode_keys(FP32, form, rows.astype("f4"), 4, 0, 0.0))
        assert len(stored) == quantkeys.block_bytes(form, 4) == {4: 192, 3: 128, 2: 128}[bits]
        assert np.frombuffer(stored, "<f2", 8, 32 * bits).tolist() == [1.0, -4.0, 1.0, 1.0, 0.0, 0.0, 0.0, 3.0]
        assert not any(stored[32 * bits + 16 :])
        for octet in range(8):
            bit = [0xAA, 0xCC, 0xF0, 255 * (octet & 1), 255 * (octet >> 1 & 1)]
            for plane in range(bits):
                first = bit[plane] if plane < bits - 1 else bit[bits]  # the narrow one's place: the partner's top bit
                want = [first, bit[plane], bit[plane], 255 - bit[plane]]
                assert [*stored[4 * (bits * octet + plane) :][:4]] == want


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_buffers(offset: int) -> None:
    data = words(FP32, mixed_groups(np.random.default_rng(8), 2, 80))
    fmt = quant.pack_format(quantkeys.KTURBO3, 40)
    room = bytearray(offset + 2 * quantkeys.block_bytes(fmt, 80))
    out = memoryview(room)[offset:]
    shifted = memoryview(bytes(offset) + data)[offset:]
    assert quantkeys.encode_keys(FP32, fmt, shifted, 80, 64, 1e4, out=out) is out
    assert bytes(out) == ref.encode_keys(FP32, fmt, data, 80, 64, 1e4)
    back = bytearray(offset + len(data))
    quantkeys.decode_keys(fmt, out, 80, 64, 1e4, out=memoryview(back)[offset:])
    assert bytes(back[offset:]) == ref.decode_keys(fmt, bytes(out), 80, 64, 1e4)


@forms
def test_every_stored_pattern_decodes(form: int) -> None:
    fmt = quant.pack_format(form, 20)
    block = np.random.default_rng(9).integers(0, 256, quantkeys.block_bytes(fmt, 40), np.uint8).tobytes()
    got, want = (side.decode_keys(fmt, block, 40, 64, 1e4) for side in (quantkeys, ref))
    np.testing.assert_array_equal(np.frombuffer(got, "f4"), np.frombuffer(want, "f4"))


def test_sizes_and_formats_are_checked() -> None:
    four = quantkeys.KTURBO4
    with pytest.raises(ValueError, match=r"format 1 is no key form \(want 17, 19 or 20\)"):
        quantkeys.block_bytes(1, 32)
    with pytest.raises(ValueError, match="dim 0 is not in"):
        quantkeys.block_bytes(four, 0)
    with pytest.raises(ValueError, match="the parameter 70000"):
        quant.pack_format(four, 70000)
    with pytest.raises(ValueError, match="format 17 keeps keys in groups of 64 rows"):
        quant.encode(FP32, four, bytes(8192), 32)
    with pytest.raises(ValueError, match="format 17 keeps keys in groups of 64 rows"):
        quant.decode(four, bytes(1152), 32)
    with pytest.raises(ValueError, match="8000 bytes are not whole groups of 8192"):
        quantkeys.encode_keys(FP32, four, bytes(8000), 32, 0, 0.0)
    with pytest.raises(ValueError, match="1000 bytes are not whole blocks of 1152"):
        quantkeys.decode_keys(four, bytes(1000), 32, 0, 0.0)
    with pytest.raises(ValueError, match="keys cannot be given as format 0"):
        quantkeys.encode_keys(quant.INT8, four, bytes(8192), 32, 0, 0.0)
    for head, theta in ((0, 1e4), (24, 1e4), (16, -1.0), (16, np.nan), (16, np.inf)):
        fmt = quant.pack_format(four, head)
        with pytest.raises(ValueError, match="want a base above 0 and a head size that divides the row"):
            quantkeys.encode_keys(FP32, fmt, bytes(8192), 32, 0, theta)
        with pytest.raises(ValueError, match="want a base above 0 and a head size that divides the row"):
            quantkeys.decode_keys(fmt, bytes(1152), 32, 0, theta)
    with pytest.raises(ValueError, match="rows from -1 on are not in"):
        quantkeys.encode_keys(FP32, four, bytes(8192), 32, -1, 0.0)
    with pytest.raises(ValueError, match="out holds 1151 bytes, 1152 are needed"):
        quantkeys.encode_keys(FP32, four, bytes(8192), 32, 0, 0.0, out=bytearray(1151))
    with pytest.raises(ValueError, match="out holds 8191 bytes, 8192 are needed"):
        quantkeys.decode_keys(four, bytes(1152), 32, 0, 0.0, out=bytearray(8191))
    assert quantkeys.encode_keys(FP32, four, b"", 32, 0, 0.0) == b""


def test_sizes_agree_with_the_twin() -> None:
    assert (quantkeys.KTURBO4, quantkeys.KTURBO3, quantkeys.KTURBO2) == (ref.KTURBO4, ref.KTURBO3, ref.KTURBO2)
    for form, dim in itertools.product(FORMS, range(1, 300)):
        size = quantkeys.block_bytes(quant.pack_format(form, 5), dim)
        assert size == ref.block_bytes(form, dim) == 64 * quant.row_bytes(form, dim)
        assert size % 64 == 0
        assert 0 <= size - 64 * dim * (BITS[form] + 0.5) / 8 < 64
