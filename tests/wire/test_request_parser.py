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


def test_a3_before_auth_ten_arguments_of_16_kib() -> None:
    limits = {"unauthenticated": True}
    assert outcome(b"*1000000\r\n$500000000\r\n", [], **limits) == (
        [],
        "Protocol error: unauthenticated multibulk length",
    )
    assert outcome(b"*11\r\n", [], **limits)[1] == "Protocol error: unauthenticated multibulk length"
    assert outcome(b"*2\r\n$16385\r\n", [], **limits)[1] == "Protocol error: unauthenticated bulk length"
    full = b"*10\r\n" + b"$16384\r\n%b\r\n" % (b"x" * 16384) * 10
    assert outcome(full, [], **limits) == ([[b"x" * 16384] * 10], None)
    assert outcome(b"a b c d e f g h i j k\r\n", [], **limits)[1] == "Protocol error: unauthenticated multibulk length"
    assert outcome(b"x" * 16385, [], **limits)[1] == "Protocol error: too big inline request"


def test_a3_authenticating_lifts_the_limits() -> None:
    parser = Parser(unauthenticated=True)
    assert parser.feed(b"*2\r\n$4\r\nAUTH\r\n$1\r\np\r\n") == [[b"AUTH", b"p"]]
    parser.authenticate()
    assert parser.feed(b"*1\r\n$20000\r\n" + b"x" * 20000 + b"\r\n") == [[b"x" * 20000]]


def test_a3_memory_follows_bytes_received_not_promised() -> None:
    parser = Parser()
    assert parser.feed(b"*1048576\r\n$200000000\r\n" + b"x" * 1024) == []
    assert parser.memory < 8192
    parser = Parser()
    parser.feed(b"*1048576\r\n" + b"$1\r\na\r\n" * 1000)
    assert parser.memory < 64 << 10


def test_a3_budget_over_the_whole_command() -> None:
    promised = b"*1048576\r\n$400000000\r\n" + b"x" * 1024
    assert outcome(promised, [])[1] == "Protocol error: command exceeds the query buffer limit"
    head = b"*3\r\n$600\r\n" + b"x" * 600 + b"\r\n$500\r\n"
    for cuts in all_cuts(head):
        assert outcome(head, cuts, max_command=1024)[1] == "Protocol error: command exceeds the query buffer limit"


def test_buffers_are_freed_after_an_error_and_the_error_is_final() -> None:
    parser = Parser()
    parser.feed(b"*2\r\n$100000\r\n" + b"x" * 90000)
    with pytest.raises(RemoteProtocolError, match="invalid bulk length"):
        parser.feed(b"x" * 20000)
    assert parser.buffered == 0
    with pytest.raises(RemoteProtocolError, match="invalid bulk length"):
        parser.feed(b"*1\r\n$4\r\nPING\r\n")
    assert parser.buffered == 0


class Collected:
    """A sink that keeps what it was fed, and counts the pieces."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed(self, view: memoryview) -> None:
        assert len(view)
        self.data += view


def test_a_large_bulk_goes_to_the_sink_and_the_frame_goes_on() -> None:
    body = bytes(range(256)) * 200
    data = b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$51200\r\n" + body + b"\r\n$2\r\nEX\r\n*1\r\n$4\r\nPING\r\n"
    asked = []

    def sink(argv: list[bytes], nbytes: int) -> Collected:
        asked.append((argv, nbytes))
        return Collected()

    for cuts in ([], [40], [1000, 2000], [len(data) - 20], list(range(1, len(data), 911)), list(range(1, len(data)))):
        asked.clear()
        commands, error = outcome(data, cuts, sink=sink, big=1000)
        assert error is None
        assert asked == [([b"SET", b"k"], 51200)]
        assert commands[0][:2] == [b"SET", b"k"]
        assert commands[0][2].data == body  # type: ignore[attr-defined]
        assert commands[0][3:] == [b"EX"]
        assert commands[1] == [b"PING"]


def test_a_refused_sink_leaves_the_bulk_in_the_command() -> None:
    data = b"*1\r\n$2000\r\n" + b"x" * 2000 + b"\r\n"
    for cuts in all_cuts(data):
        assert outcome(data, cuts, sink=lambda argv, n: None, big=1000) == ([[b"x" * 2000]], None)


def test_a_sunk_bulk_without_its_crlf_is_an_error() -> None:
    data = b"*1\r\n$2000\r\n" + b"x" * 2001
    for cuts in all_cuts(data):
        result = outcome(data, cuts, sink=lambda argv, n: Collected(), big=1000)
        assert result == ([], "Protocol error: invalid bulk length")
