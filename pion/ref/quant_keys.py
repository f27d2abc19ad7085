"""The key forms of turbo4, turbo3 and turbo2 in numpy, written to be read.

The compiled `pion._core.quantkeys` must agree with this file byte for byte; `quant_keys.h` describes the block and the
reasons. Rows of keys come in groups of 64. Angles are computed in float64, everything else in float32, one rounding per
operation, and sums run from the first row to the last.
"""

import math

import numpy as np
from numpy.typing import NDArray

from pion.ref import quant

KTURBO4, KTURBO3, KTURBO2 = 17, 19, 20
BITS = {KTURBO4: 4, KTURBO3: 3, KTURBO2: 2}
ROWS = 64
MUCH = np.float32(2)  # how much wider than its partner's a spread must be to take a bit from it
INSET = {4: 0.0, 3: 0.25, 2: 0.5625}  # how far inside minimum and maximum the outer levels lie, in steps
WIDE = np.uint16(0x8000)  # the flag in the scale of a channel that has a bit more

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
Places = NDArray[np.intp]


def block_bytes(fmt: int, dim: int) -> int:
    """Bytes of the block of 64 rows."""
    return -(-(8 * BITS[fmt & 0xFF] + 4) * dim // 64) * 64


# ---- angles ----------------------------------------------------------------------------------------------------------


def log2(value: float) -> float:
    """The binary logarithm from IEEE operations alone, so that every machine has the same."""
    m, exponent = math.frexp(value)
    if m < 0.70710678118654752:
        m, exponent = m + m, exponent - 1
    s = (m - 1) / (m + 1)
    total = 1 / 23
    for k in range(21, 0, -2):
        total = total * (s * s) + 1 / k
    return exponent + 2.0 * s * total * 1.4426950408889634


def exp2(x: F64) -> F64:
    """2 to the x."""
    whole = np.rint(x)
    z = (x - whole) * 0.69314718055994531
    total = np.ones_like(x)
    for k in range(14, 0, -1):
        total = 1.0 + total * (z * (1.0 / k))
    return np.ldexp(total, whole.astype(np.int32))


def cos_sin(turns: F64) -> tuple[F64, F64]:
    """Cosine and sine of full turns: the nearest quarter turn, and Taylor's series for the rest."""
    part = turns - np.rint(turns)
    quarter = np.rint(4.0 * part)
    x = (part - 0.25 * quarter) * 6.2831853071795865
    square = x * x
    s, c = np.full_like(x, 1 / math.factorial(17)), np.full_like(x, 1 / math.factorial(16))
    for k in range(15, 1, -2):
        s = (1.0 if k % 4 == 1 else -1.0) / math.factorial(k) + s * square
        c = (1.0 if k % 4 == 1 else -1.0) / math.factorial(k - 1) + c * square
    s, c = x + x * (s * square), 1.0 + c * square
    odd, back = np.abs(quarter) == 1, np.abs(quarter) == 2
    first, second = np.where(odd, s, c), np.where(odd, c, s)
    return np.where(back | (quarter == 1), -first, first), np.where(back | (quarter == -1), -second, second)


def rope_turns(position: int, theta: float, head: int) -> tuple[F32, F32]:
    """Cosines and sines (64, head // 2) of the rows from `position` on: row by row, a product with the step's angle."""
    pair = np.arange(head // 2, dtype=np.float64)
    turns = exp2(-(2.0 * pair / float(head)) * log2(theta)) * 0.15915494309189535
    step_c, step_s = cos_sin(turns)
    c, s = cos_sin(float(position) * turns)
    cosines, sines = [], []
    for _ in range(ROWS):
        cosines.append(c.astype(np.float32))
        sines.append(s.astype(np.float32))
        c, s = c * step_c - s * step_s, c * step_s + s * step_c
    return np.array(cosines), np.array(sines)


def turn(rows: F32, fmt: int, position: int, theta: float, *, back: bool) -> F32:
    """The 64 rows of a group with their rope applied, or undone."""
    if theta == 0:
        return rows
    head = fmt >> 8
    half = head // 2
    cosine, sine = (table[:, None, :] for table in rope_turns(position, theta, head))
    heads = rows.reshape(ROWS, -1, head)
    lo, hi = heads[:, :, :half], heads[:, :, half : 2 * half]
    turned = heads.copy()
    if back:
        turned[:, :, :half], turned[:, :, half : 2 * half] = lo * cosine + hi * sine, hi * cosine - lo * sine
    else:
        turned[:, :, :half], turned[:, :, half : 2 * half] = lo * cosine - hi * sine, hi * cosine + lo * sine
    flat: F32 = turned.reshape(rows.shape)
    return flat


# ---- levels ----------------------------------------------------------------------------------------------------------


def total(rows: F32) -> F32:
    """The sum of the rows in their order (numpy's own sum would pair them)."""
    sums: F32 = np.zeros_like(rows[0])
    for row in rows:
        sums = sums + row
    return sums


def ratio(above: F32, below: F32) -> F32:
    """above / below, and 0 where below is not positive."""
    good = below > 0
    quotient: F32 = np.where(good, above / np.where(good, below, np.float32(1)), np.float32(0))
    return quotient


def partners(dim: int, head: int) -> Places:
    """The partner (dim) of each channel, itself where it has none: mirrored in its half of the head."""
    value, pairs = np.arange(head), head // 2
    mirror = np.where(value < pairs, pairs - 1 - value, 3 * pairs - 1 - value)
    mirror = np.where(value < 2 * pairs, mirror, value)
    places: Places = (np.arange(0, dim, head)[:, None] + mirror).ravel()
    return places


def levels(x: F32, bits: int, partner: Places) -> tuple[U8, U16, U16]:
    """Codes (64, dim), scales with their flags and biases (dim) of a group that is turned back.

    Equidistant levels from minimum to maximum or a bit inside, then the scale that gives the decoded channel its own
    spread, and codes chosen against what is stored, so that they make up for the rounding of scale and bias.
    """
    f = np.float32
    low = x.min(axis=0) + f(0)
    y = x - low
    height = x.max(axis=0) - low
    wide = height > MUCH * height[partner]
    top = np.ldexp(f(1), bits + wide - wide[partner].astype(np.intc)) - f(1)
    step = height / (top + f(2) * f(INSET[bits]))
    base = f(INSET[bits]) * step
    inverse = ratio(np.ones_like(step), step)
    code = np.rint(np.clip((y - base) * inverse, f(0), top))
    sum_y, sum_yy, sum_c, sum_cc = total(y), total(y * y), total(code), total(code * code)
    spread, wanted = f(64) * sum_cc - sum_c * sum_c, f(64) * sum_yy - sum_y * sum_y
    scale = np.minimum(np.where(wanted > 0, np.sqrt(ratio(np.maximum(wanted, f(0)), spread)), f(0)), f(65504))
    half = scale.astype(np.float16)
    half = np.where((half == 0) & (scale > 0), np.float16(2.0**-24), half)
    kept, mean, middle = half.astype(f), sum_y * f(1 / 64), sum_c * f(1 / 64)
    bias = np.clip((mean - kept * middle) + low, f(-65504), f(65504)).astype(np.float16)
    offset = bias.astype(f) - low
    grow = ratio(scale, kept)
    shift = ratio(mean - offset, kept) - grow * (base * inverse + middle)
    codes = np.rint(np.clip(y * (inverse * grow) + shift, f(0), top)).astype(np.uint8)
    return codes, half.view(np.uint16) | np.where(wide, WIDE, np.uint16(0)), bias.view(np.uint16)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def pack(codes: U8, bits: int, partner: Places) -> U8:
    """Codes (64, dim) as planes (8 * bits, dim)."""
    octets = codes.reshape(8, 8, -1)
    planes = np.zeros((8, bits + 1, codes.shape[1]), np.uint8)
    for plane in range(bits + 1):
        for row in range(8):
            planes[:, plane] |= (octets[:, row] >> plane & 1) << row
    planes[:, bits - 1] |= planes[:, bits, partner]  # where the partner has bits there, the channel has none itself
    return planes[:, :bits].reshape(8 * bits, -1)


def unpack(planes: U8, bits: int, wide: NDArray[np.bool_], partner: Places) -> U8:
    """Planes (8 * bits, dim) as codes (64, dim); `wide` (dim) says which channels have a bit more."""
    octets = planes.reshape(8, bits, -1)
    beyond = np.where(wide, octets[:, bits - 1, partner], 0)
    last = np.where(wide[partner], 0, octets[:, bits - 1])
    codes = np.zeros((8, 8, planes.shape[1]), np.uint8)
    for plane, words in enumerate([*octets[:, : bits - 1].swapaxes(0, 1), last, beyond]):
        for row in range(8):
            codes[:, row] |= (words >> row & 1) << plane
    return codes.reshape(64, -1)


def encode_keys(src_code: int, fmt: int, data: bytes, dim: int, first_row: int, theta: float) -> bytes:
    """Whole groups of 64 rows (fp32, fp16 or bf16) to blocks. Raises quant.RefusedRowError.

    `fmt` carries the head size when theta is not 0; `first_row` is the position of the first row.
    """
    values = quant.widen(src_code, data, dim)
    bits, partner = BITS[fmt & 0xFF], partners(dim, fmt >> 8 if theta else dim)
    blocks = []
    for start in range(0, len(values), ROWS):
        with np.errstate(invalid="ignore", over="ignore"):
            given = values[start : start + ROWS]
            rows = given.astype(np.float16).astype(np.float32)
            x = turn(rows, fmt, first_row + start, theta, back=True)
            bad = (~(np.abs(given) <= quant.LIMIT) | ~(np.abs(x) <= quant.LIMIT)).any(axis=1)
            if bad.any():
                # A bad value spoils its pair only, and pairs stay in their row.
                raise quant.RefusedRowError(start + int(bad.argmax()))
        codes, scales, biases = levels(x, bits, partner)
        block = pack(codes, bits, partner).tobytes() + scales.tobytes() + biases.tobytes()
        blocks.append(block.ljust(block_bytes(fmt, dim), b"\0"))
    return b"".join(blocks)


def decode_keys(fmt: int, data: bytes, dim: int, first_row: int, theta: float) -> bytes:
    """Blocks to fp32 rows; fmt, first_row and theta as they were encoded."""
    bits, size = BITS[fmt & 0xFF], block_bytes(fmt, dim)
    partner = partners(dim, fmt >> 8 if theta else dim)
    groups = []
    for group, start in enumerate(range(0, len(data), size)):
        block = np.frombuffer(data, np.uint8)[start : start + size]
        words = block[8 * bits * dim :][: 4 * dim].copy().view(np.uint16).reshape(2, dim)
        wide = (words[0] >= WIDE) & (partner != np.arange(dim))
        codes = unpack(block[: 8 * bits * dim].reshape(-1, dim), bits, wide, partner)
        scale, bias = quant.half_to(words[0] & ~WIDE), quant.half_to(words[1])
        with np.errstate(invalid="ignore", over="ignore"):  # stored words may be anything
            x = (bias + scale * codes.astype(np.float32)).astype(np.float32)
            groups.append(turn(x, fmt, first_row + ROWS * group, theta, back=False).tobytes())
    return b"".join(groups)
