"""Bytes typed from the RESP specification, with the section each comes from, and from the Redis protocol pages."""

import math
from typing import Any

import pytest

from pion.wire.resp import (
    NULL_ARRAY,
    OK,
    Err,
    Parser,
    Push,
    Raw,
    ReplyError,
    ReplyParser,
    Simple,
    Verbatim,
    encode,
    encode_command,
)

REPLIES: list[tuple[str, bytes, Any]] = [
    ("simple strings", b"+OK\r\n", "OK"),
    ("simple errors", b"-Error message\r\n", ReplyError("Error message")),
    ("simple errors", b"-ERR unknown command 'asdf'\r\n", ReplyError("ERR unknown command 'asdf'")),
    ("integers", b":0\r\n", 0),
    ("integers", b":1000\r\n", 1000),
    ("integers", b":-5\r\n", -5),
    ("integers", b":+5\r\n", 5),
    ("bulk strings", b"$5\r\nhello\r\n", b"hello"),
    ("bulk strings", b"$0\r\n\r\n", b""),
    ("null bulk strings", b"$-1\r\n", None),
    ("arrays", b"*0\r\n", []),
    ("arrays", b"*2\r\n$5\r\nhello\r\n$5\r\nworld\r\n", [b"hello", b"world"]),
    ("arrays", b"*3\r\n:1\r\n:2\r\n:3\r\n", [1, 2, 3]),
    ("arrays", b"*5\r\n:1\r\n:2\r\n:3\r\n:4\r\n$5\r\nhello\r\n", [1, 2, 3, 4, b"hello"]),
    (
        "arrays",
        b"*2\r\n*3\r\n:1\r\n:2\r\n:3\r\n*2\r\n+Hello\r\n-World\r\n",
        [[1, 2, 3], ["Hello", ReplyError("World")]],
    ),
    ("null arrays", b"*-1\r\n", None),
    ("null elements in arrays", b"*3\r\n$5\r\nhello\r\n$-1\r\n$5\r\nworld\r\n", [b"hello", None, b"world"]),
    ("nulls", b"_\r\n", None),
    ("booleans", b"#t\r\n", True),
    ("booleans", b"#f\r\n", False),
    ("doubles", b",1.23\r\n", 1.23),
    ("doubles", b",10\r\n", 10.0),
    ("doubles", b",inf\r\n", math.inf),
    ("doubles", b",-inf\r\n", -math.inf),
    ("doubles", b",nan\r\n", math.nan),
    ("doubles", b",-1.5e-7\r\n", -1.5e-7),
    (
        "big numbers",
        b"(3492890328409238509324850943850943825024385\r\n",
        3492890328409238509324850943850943825024385,
    ),
    ("bulk errors", b"!21\r\nSYNTAX invalid syntax\r\n", ReplyError("SYNTAX invalid syntax")),
    ("verbatim strings", b"=15\r\ntxt:Some string\r\n", b"Some string"),
    ("maps", b"%2\r\n+first\r\n:1\r\n+second\r\n:2\r\n", {"first": 1, "second": 2}),
    ("maps", b"%1\r\n*1\r\n:1\r\n%0\r\n", {(1,): {}}),
    ("attributes", b"|1\r\n+key-popularity\r\n%1\r\n$1\r\na\r\n,0.1923\r\n*2\r\n:1\r\n:2\r\n", [1, 2]),
    ("attributes", b"*3\r\n:1\r\n:2\r\n|1\r\n+ttl\r\n:3600\r\n:3\r\n", [1, 2, 3]),
    ("sets", b"~3\r\n+a\r\n:7\r\n#t\r\n", {"a", 7, True}),
    ("pushes", b">2\r\n+message\r\n$2\r\nhi\r\n", Push(["message", b"hi"])),
]


@pytest.mark.parametrize(("section", "data", "value"), REPLIES, ids=[f"{s}-{i}" for i, (s, _, _) in enumerate(REPLIES)])
def test_replies_of_the_specification(three_way: Any, section: str, data: bytes, value: Any) -> None:
    three_way(lambda: ReplyParser().feed, data, [value])


REQUESTS: list[tuple[bytes, list[list[bytes]]]] = [
    (b"*2\r\n$4\r\nLLEN\r\n$6\r\nmylist\r\n", [[b"LLEN", b"mylist"]]),  # sending commands
    (b"*1\r\n$4\r\nPING\r\n", [[b"PING"]]),
    (b"*2\r\n$5\r\nhello\r\n$0\r\n\r\n", [[b"hello", b""]]),
    (b"*2\r\n$3\r\nGET\r\n$4\r\n\r\n\r\n\r\n", [[b"GET", b"\r\n\r\n"]]),  # binary safe
    (b"PING\r\n", [[b"PING"]]),  # inline commands
    (b"EXISTS somekey\r\n", [[b"EXISTS", b"somekey"]]),
    (b"*0\r\n*-1\r\n\r\n\n  \r\n*1\r\n$4\r\nPING\r\n", [[b"PING"]]),  # nothing asked, nothing answered
]


@pytest.mark.parametrize(("data", "commands"), REQUESTS)
def test_requests_of_the_specification(three_way: Any, data: bytes, commands: list[list[bytes]]) -> None:
    three_way(lambda: Parser().feed, data, commands)


INLINE: list[tuple[bytes, list[bytes]]] = [
    (b"PING\n", [b"PING"]),
    (b"RPUSH l 'lorem ipsum'\r\n", [b"RPUSH", b"l", b"lorem ipsum"]),
    (b'SET k "a\\x41b"\r\n', [b"SET", b"k", b"aAb"]),
    (b'SET k ""\r\n', [b"SET", b"k", b""]),
    (b'ECHO "\\n\\r\\t\\b\\a\\\\\\"\\q\\xzz"\r\n', [b"ECHO", b'\n\r\t\b\a\\"qxzz']),
    (b"ECHO 'it\\'s \\n'\r\n", [b"ECHO", b"it's \\n"]),
    (b'ECHO pre"quoted part"\r\n', [b"ECHO", b"prequoted part"]),
    (b"  GET\t k \r\n", [b"GET", b"k"]),
    (b"GET \xff\x00\r\n", [b"GET", b"\xff\x00"]),
]


@pytest.mark.parametrize(("data", "argv"), INLINE)
def test_a7_inline_commands(three_way: Any, data: bytes, argv: list[bytes]) -> None:
    three_way(lambda: Parser().feed, data, [argv])


ENCODED: list[tuple[Any, bytes, bytes]] = [
    (OK, b"+OK\r\n", b"+OK\r\n"),
    (Simple("HIT"), b"+HIT\r\n", b"+HIT\r\n"),
    (Err("ERR no\r\nsuch"), b"-ERR no  such\r\n", b"-ERR no  such\r\n"),
    (b"hello", b"$5\r\nhello\r\n", b"$5\r\nhello\r\n"),
    (bytearray(b"ab"), b"$2\r\nab\r\n", b"$2\r\nab\r\n"),
    (memoryview(b"abcd")[::1], b"$4\r\nabcd\r\n", b"$4\r\nabcd\r\n"),
    ("×", b"$2\r\n\xc3\x97\r\n", b"$2\r\n\xc3\x97\r\n"),
    (-(2**63), b":-9223372036854775808\r\n", b":-9223372036854775808\r\n"),
    (2**63, b"$19\r\n9223372036854775808\r\n", b"(9223372036854775808\r\n"),
    (True, b":1\r\n", b"#t\r\n"),
    (False, b":0\r\n", b"#f\r\n"),
    (1.5, b"$3\r\n1.5\r\n", b",1.5\r\n"),
    (3.0, b"$1\r\n3\r\n", b",3\r\n"),
    (math.inf, b"$3\r\ninf\r\n", b",inf\r\n"),
    (None, b"$-1\r\n", b"_\r\n"),
    (NULL_ARRAY, b"*-1\r\n", b"_\r\n"),
    ([1, [None]], b"*2\r\n:1\r\n*1\r\n$-1\r\n", b"*2\r\n:1\r\n*1\r\n_\r\n"),
    ({b"a": 1}, b"*2\r\n$1\r\na\r\n:1\r\n", b"%1\r\n$1\r\na\r\n:1\r\n"),
    ({7}, b"*1\r\n:7\r\n", b"~1\r\n:7\r\n"),
    (Verbatim("Some string"), b"$11\r\nSome string\r\n", b"=15\r\ntxt:Some string\r\n"),
    (Push([b"m"]), b"*1\r\n$1\r\nm\r\n", b">1\r\n$1\r\nm\r\n"),
    (Raw(b":1\r\n"), b":1\r\n", b":1\r\n"),
]


@pytest.mark.parametrize(("value", "resp2", "resp3"), ENCODED)
def test_encoding_of_each_reply_value(value: Any, resp2: bytes, resp3: bytes) -> None:
    assert encode(value, 2) == resp2
    assert encode(value, 3) == resp3


def test_encode_command() -> None:
    assert encode_command("SET", b"k", 7, 1.5) == [b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\n7\r\n$3\r\n1.5\r\n"]
    blob = memoryview(bytearray(20_000))
    parts = encode_command("SET", "k", blob)
    assert parts == [b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$20000\r\n", blob, b"\r\n"]
