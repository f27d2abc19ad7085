"""Fuzz target of the binary lane's frames.

Invariant: whatever bytes arrive, in whatever pieces, the parsers return frames or raise WireError, never anything else,
and the pieces make no difference. A body is parsed or refused; what is parsed has the sizes that it says.

Run ``python fuzz/fastlane_fuzz.py [seconds] [seed]``; with atheris installed, ``--atheris`` instead of both.
"""

import random
import struct
import sys
import time
from itertools import pairwise

from pion.wire.fastlane import HEADER, MAGIC, Replies, Requests, WireError, parse_fused

LIMIT = 300  # bytes of a body


def fused(rng: random.Random) -> bytes:
    """A body of a fused query, most of them right."""
    heads, rows, kv_heads, suffix, dim = (rng.choice((0, 1, 1, 2, 3)) for _ in range(5))
    sid = rng.randbytes(rng.randrange(5))
    head = struct.pack("<H", len(sid)) + sid + struct.pack("<HHHHII", 0, heads, dim, kv_heads, rows, suffix)
    return head + rng.randbytes(4 * dim * (heads * rows + 2 * kv_heads * suffix) + heads + rng.choice((0, 0, 3, 4, 9)))


def run(parser: Requests | Replies, pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], str | None]:
    """Every frame, and the error."""
    got: list[tuple[int, bytes]] = []
    for piece in pieces:
        parser.feed(piece)
        try:
            while (frame := parser.next()) is not None:
                got.append((int(frame[0]), bytes(frame[1])))
        except WireError as error:
            return got, f"{type(error).__name__}: {error}"
    return got, None


def check(data: bytes) -> None:
    """The invariant, for one input: its first bytes choose where the rest is cut."""
    cuts, data = data[:4], data[4:]
    edges = sorted({0, len(data), *(cut * len(data) // 256 for cut in cuts)})
    split = [data[a:b] for a, b in pairwise(edges)]
    bytewise = [data[i : i + 1] for i in range(len(data))]
    for kind in (Requests, Replies):
        assert run(kind(LIMIT), split) == run(kind(LIMIT), bytewise) == run(kind(LIMIT), [data])
    for body in (data, *(body for _, body in run(Requests(LIMIT), [data])[0])):
        call = parse_fused(body)
        if call is not None:
            assert len(call.q) == 4 * call.q_heads * call.rows * call.dim > 0
            assert len(call.k_suf) == len(call.v_suf) == 4 * call.kv_heads * call.suffix * call.dim
            assert len(call.head_map) == call.q_heads
            assert call.q_heads % call.kv_heads == 0


def one_input(rng: random.Random) -> bytes:
    """Frames, now and then with a changed, added or lost byte."""
    data = bytearray(rng.randbytes(4))
    for _ in range(rng.randrange(6)):
        kind = rng.choice((0xFF, 0x37, 0x24, 0x24, 0x24, 0, 1, 3))
        body = fused(rng) if kind == 0x24 else rng.randbytes(rng.randrange(9))
        data += HEADER.pack(MAGIC, kind, rng.choice((len(body),) * 20 + (LIMIT + 1,))) + body
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(4, len(data) + 1)
        data[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
    return bytes(data)


def campaign(count: int, seed: int) -> None:
    """Check `count` inputs drawn from the seed."""
    rng = random.Random(seed)
    for _ in range(count):
        data = one_input(rng)
        try:
            check(data)
        except Exception:
            print(f"failing input: {data!r}", file=sys.stderr)
            raise


def main(argv: list[str]) -> None:
    """Run for some seconds, or under atheris."""
    if argv[:1] == ["--atheris"]:
        import atheris

        atheris.Setup(sys.argv[:1], check)
        atheris.Fuzz()
    seconds = float(argv[0]) if argv else 60.0
    seed = int(argv[1]) if len(argv) > 1 else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        campaign(1000, seed + rounds)
        rounds += 1
    print(f"{rounds * 1000} inputs, nothing found")


if __name__ == "__main__":
    main(sys.argv[1:])
