"""Fuzz target of the RESP parsers.

Invariant: whatever bytes arrive, in whatever pieces, the parsers return values or raise RemoteProtocolError, never
anything else, and the pieces make no difference.

Run ``python fuzz/resp_fuzz.py [seconds] [seed]``; with atheris installed, ``python fuzz/resp_fuzz.py --atheris``.
"""

import random
import sys
import time
from itertools import pairwise

from pion.wire.resp import Parser, RemoteProtocolError, ReplyParser

ATOMS = b"* $ + - : % ~ > | _ # , ( = ! 0 1 2 3 -1 16 \" ' \\x41 txt: inf PING *1\r\n$4\r\nPING\r\n".split(b" ")
ATOMS += [b"\r\n", b"\r\n", b"\n", b"\r", b" ", b"\x00", b"SET k ", b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"]
ATOMS += [b"*3\r\n", b"$5\r\nhello\r\n", b"%1\r\n+a\r\n:1\r\n"]


def run(parser: Parser | ReplyParser, pieces: list[bytes]) -> tuple[str, str | None]:
    """Everything parsed (as text), and the error."""
    got: list[object] = []
    for piece in pieces:
        try:
            got += parser.feed(piece)
        except RemoteProtocolError as error:
            return repr(got + error.commands + error.replies), str(error)
    return repr(got), None


def check(data: bytes) -> None:
    """The invariant, for one input: its first bytes choose where the rest is cut."""
    cuts, data = data[:4], data[4:]
    edges = sorted({0, len(data), *(cut * len(data) // 256 for cut in cuts)})
    split = [data[a:b] for a, b in pairwise(edges)]
    bytewise = [data[i : i + 1] for i in range(len(data))]
    for kind in (Parser, ReplyParser):
        assert run(kind(), split) == run(kind(), bytewise) == run(kind(), [data])


def one_input(rng: random.Random) -> bytes:
    """Atoms of RESP, now and then with a changed, added or lost byte."""
    data = bytearray(rng.randbytes(4) + b"".join(rng.choices(ATOMS, k=rng.randrange(1, 24))))
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
