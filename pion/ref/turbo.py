"""turbo4, turbo3, turbo2 rows in numpy: random rotation, Lloyd-Max codes, one gain a block (after TurboQuant, arXiv
2504.19874, without its residual stage). The compiled qturbo.h must agree with this file byte for byte.

Everything is float32 arithmetic with one rounding per operation, in a fixed order; arrays hold one row of a block each.
"""

import numpy as np
from numpy.typing import NDArray

MOST, BLOCK, ODD = 4096, 128, 15
SEEDS = (0xF793A9B9, 0x2B4861EC)  # of many, those that treat constant rows and ramps best at all usual sizes
TINY = np.float32(2.0**-60)
LIMIT = np.float32(65504)
PASSES = 1

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

# Lloyd-Max levels of N(0, 1), positive half; the edges lie half way between two levels (0 for the first).
LEVELS: dict[int, F32] = {
    2: np.array([0.45278004, 1.5104176], np.float32),
    3: np.array([0.24509418, 0.7560053, 1.3439093, 2.1519456], np.float32),
    4: np.array(
        [0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895], np.float32
    ),
}
EDGES: dict[int, F32] = {
    2: np.array([0.9815988], np.float32),
    3: np.array([0.50054973, 1.0499573, 1.7479275], np.float32),
    4: np.array([0.25822166, 0.5224037, 0.79954976, 1.0992858, 1.4371388, 1.8435318, 2.4008033], np.float32),
}


def blocks(dim: int, head: int) -> list[int]:
    """The sizes of the blocks of a row, in order.

    With a head size that divides the row each head is split alone, into blocks of at most 4096 values; else the row is,
    into blocks of at most 128. A piece whose odd factor is at most 15 is one block; of any other piece, or a longer
    one, the largest power of two is split off.
    """
    given = head > 0 and dim % head == 0
    piece, most = (head, MOST) if given else (dim, BLOCK)
    sizes, left = [], piece
    while left:
        odd = left // (left & -left)
        size = left if left <= most and odd <= ODD else min(most, 1 << (left.bit_length() - 1))
        sizes.append(size)
        left -= size
    return sizes * (dim // piece)


def row_bytes(bits: int, head: int, dim: int) -> int:
    """Bytes of a row: the packed codes of its blocks, each rounded up to a byte, then a 16-bit gain for each block."""
    return sum(-(-bits * size // 8) + 2 for size in blocks(dim, head))


def signs(size: int, seed: int) -> F32:
    """+1 and -1: value i is negated where bit i % 32 of MurmurHash3's finalizer of seed + i // 32 is set."""
    word = (np.arange(-(-size // 32), dtype=np.uint64) + np.uint64(seed)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> np.uint64(shift)) * np.uint64(factor) & 0xFFFFFFFF
    word ^= word >> np.uint64(16)
    bits = word[:, None] >> np.arange(32, dtype=np.uint64) & 1
    return np.where(bits.reshape(-1)[:size] == 1, -1, 1).astype(np.float32)


def hartley(odd: int) -> F32:
    """cos + sin of 2 pi t / odd, t = 0, 1, ...: entry (j, k) of the Hartley matrix is number j k mod odd."""
    turn = 2 * np.pi * np.arange(odd) / odd
    return (np.cos(turn) + np.sin(turn)).astype(np.float32)


def spread(values: F32) -> F32:
    """Rows times the symmetric matrix Hartley(m) (x) Hadamard(2^k), m odd, whose square is size * 1."""
    rows, size = values.shape
    odd = size // (size & -size)
    values = values.reshape(rows, odd, -1)
    stride = values.shape[2] // 2
    while stride:
        pairs = values.reshape(rows, odd, -1, 2, stride)
        first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
        values = np.stack([first + second, first - second], axis=3).reshape(rows, odd, -1)
        stride //= 2
    if odd > 1:
        factor = hartley(odd)
        mixed = np.empty_like(values)
        for k in range(odd):
            total = values[:, 0] * factor[0]
            for j in range(1, odd):
                total = total + values[:, j] * factor[j * k % odd]
            mixed[:, k] = total
        values = mixed
    return values.reshape(rows, size)


def rotate(values: F32) -> F32:
    """Rows times an orthogonal matrix times their size: signs, spread, other signs, spread."""
    first, second = (signs(values.shape[1], seed) for seed in SEEDS)
    return spread(spread(values * first) * second)


def rotate_back(values: F32) -> F32:
    """The transpose of `rotate`."""
    first, second = (signs(values.shape[1], seed) for seed in SEEDS)
    return spread(spread(values) * second) * first


def lane_sum(values: F32) -> F32:
    """Sums of rows in the order of eight lanes: lane l adds values l, l + 8, ...; then the lanes are added pairwise."""
    rows, size = values.shape
    padded = np.zeros((rows, -(-size // 8) * 8), np.float32)
    padded[:, :size] = values
    lanes = np.zeros((rows, 8), np.float32)
    for at in range(0, padded.shape[1], 8):
        lanes = lanes + padded[:, at : at + 8]
    four = lanes[:, :4] + lanes[:, 4:]
    two = four[:, :2] + four[:, 2:]
    total: F32 = two[:, 0] + two[:, 1]
    return total


def encode_block(bits: int, values: F32) -> tuple[U8, U16]:
    """Codes (one a byte: index of the magnitude's level, plus 2^(bits - 1) for a negative value) and gains of rows.

    The codes are chosen for the scale at which the levels fit the rotated row best (two rounds of least squares from
    the row's norm on); the gain gives the decoded row the norm of the original, and so does not shrink what attention
    averages: the least-squares gain would, by the relative error itself (12 % at 2 bits). At 2 bits it is 1/128 less.
    """
    size = values.shape[1]
    level, edge = LEVELS[bits], EDGES[bits]
    live = np.abs(values).max(axis=1) >= TINY
    turned = rotate(np.where(live[:, None], values, np.float32(0)))
    energy = lane_sum(turned * turned)
    energy = np.where(live, energy, np.float32(1))
    magnitude = np.abs(turned)
    scale = np.sqrt(np.float32(size) / energy)
    for turn in range(PASSES + 1):
        index = (magnitude * scale[:, None])[:, :, None] > edge
        index = index.sum(axis=2)
        picked = level[index]
        weight = lane_sum(picked * picked)
        if turn < PASSES:
            scale = weight / np.where(live, lane_sum(magnitude * picked), np.float32(1))
    gain = np.sqrt(energy / weight) / np.float32(size)
    if bits == 2:
        gain = gain * np.float32(127 / 128)
    negative = turned.view(np.uint32) >> 31
    codes = (index + negative * len(level)).astype(np.uint8)
    codes[~live] = 0
    words = (gain.view(np.uint32) + 0x4000 >> 15).astype(np.uint16)
    words[~live] = 0
    return codes, words


def decode_block(bits: int, codes: U8, gains: U16) -> F32:
    """Rows from codes and gains, kept within what fp16 holds."""
    table = np.concatenate([LEVELS[bits], -LEVELS[bits]])
    size = codes.shape[1]
    gain = (gains.astype(np.uint32) << 15).view(np.float32) / np.float32(size)
    values = rotate_back(table[codes]) * gain[:, None]
    return np.clip(values, -LIMIT, LIMIT)


def pack(bits: int, codes: U8) -> U8:
    """Code k of a row at bits [bits k, bits k + bits) of the row's little-endian bytes."""
    ones = codes[:, :, None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(ones.reshape(len(codes), -1), axis=1, bitorder="little")


def unpack(bits: int, packed: U8, size: int) -> U8:
    """The inverse of `pack`."""
    ones = np.unpackbits(packed, axis=1, bitorder="little", count=bits * size).reshape(len(packed), size, bits)
    codes: U8 = (ones << np.arange(bits, dtype=np.uint8)).sum(axis=2).astype(np.uint8)
    return codes


def encode(bits: int, head: int, values: F32) -> bytes:
    """Finite rows (rows, dim), |x| <= 65504, to stored rows."""
    codes, gains, at = [], [], 0
    for size in blocks(values.shape[1], head):
        code, gain = encode_block(bits, np.ascontiguousarray(values[:, at : at + size]))
        codes.append(pack(bits, code))
        gains.append(np.ascontiguousarray(gain[:, None]).view(np.uint8))
        at += size
    return np.concatenate(codes + gains, axis=1).tobytes()


def decode(bits: int, head: int, data: bytes, dim: int) -> F32:
    """Stored rows to float32 rows (rows, dim)."""
    sizes = blocks(dim, head)
    rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(bits, head, dim))
    widths = [-(-bits * size // 8) for size in sizes]
    gains = np.ascontiguousarray(rows[:, sum(widths) :]).view(np.uint16)
    parts, at = [], 0
    for number, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        parts.append(decode_block(bits, unpack(bits, rows[:, at : at + width], size), gains[:, number]))
        at += width
    return np.concatenate(parts, axis=1)
