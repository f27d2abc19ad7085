"""The request parser: the same frames and the same error for every way to cut the bytes."""

from itertools import pairwise

import pytest

from pion.wire.resp import Parser, RemoteProtocolError


def outcome(data: bytes, cuts: list[int], **options: object) -> tuple[list[list[bytes]], str | None]:
    """Feed `data` cut at the given offsets; the commands, and the error text if the parser raised."""
    parser = Parser(**options)  # type: ignore[arg-type]
    commands: list[list[bytes]] = []
    edges = [0, *cuts, len(data)]
    for start, end in pairwise(edges):
        try:
            commands += parser.feed(data[start:end])
        except RemoteProtocolError as error:
            return commands + error.commands, str(error)
    return commands, None


def all_cuts(data: bytes) -> list[list[int]]:
    """Whole, byte by byte, and (for short input) every way to cut it in two."""
    n = len(data)
    cuts: list[list[int]] = [[], list(range(1, n)), list(range(7, n, 7))]
    return cuts + ([[i] for i in range(1, n)] if n < 300 else [[1], [n // 2], [n - 1]])


A1 = [
    (b"*2\r\n$3\r\nGET\r\n$-7\r\n", "invalid bulk length"),
    (b"*2\r\n$3\r\nGET\r\n#3\r\n", "expected '$', got '#'"),
    (b"*1\r\n$" + b"7" * 70_000, "too big bulk count string"),
    (b"*1\r\n$" + b"7" * 70_000 + b"\r\n", "too big bulk count string"),
    (b"*" + b"7" * 70_000 + b"\r\n", "too big mbulk count string"),
    (b"x" * 70_000 + b"\r\n", "too big inline request"),
    (b"*1\r\n$07\r\n", "invalid bulk length"),
    (b"*1\r\n$+7\r\n", "invalid bulk length"),
    (b"*1\r\n$ 7\r\n", "invalid bulk length"),
    (b"*1\r\n$\r\n", "invalid bulk length"),
    (b"*1\r\n$536870913\r\n", "invalid bulk length"),
    (b"*1\r\n$99999999999999999999\r\n", "invalid bulk length"),
    (b"*1048577\r\n", "invalid multibulk length"),
    (b"*-0\r\n", "invalid multibulk length"),
    (b"*1x\r\n", "invalid multibulk length"),
    (b"*1\n$4\nPING\n", "invalid multibulk length"),
    (b"*1\r\n$4\nPING\n", "invalid bulk length"),
    (b"*1\r\n$4\r\nPINGPING", "invalid bulk length"),
    (b"*1\r\n\r\n", "expected '$', got ' '"),
]


@pytest.mark.parametrize(("data", "text"), A1)
def test_a1_every_split_gives_the_same_error(data: bytes, text: str) -> None:
    for cuts in all_cuts(data):
        assert outcome(data, cuts) == ([], f"Protocol error: {text}")
