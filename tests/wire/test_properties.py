"""Parsers and encoder against the readable twin, and the reply parser against hiredis."""

import math
from itertools import pairwise
from typing import Any

import hiredis
import hypothesis.strategies as st
from hypothesis import example, given

from pion.ref import resp as twin
from pion.wire.resp import (
    Err,
    Parser,
    Push,
    RemoteProtocolError,
    ReplyError,
    ReplyParser,
    Simple,
    Verbatim,
    encode,
    encode_command,
)

line_text = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    st.binary(max_size=40),
    line_text,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**90), 2**90),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    line_text.map(Simple),
    line_text.map(Err),
    st.text(max_size=20).map(Verbatim),
)
keys = st.one_of(st.binary(max_size=8), st.integers(-9, 9), st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.frozensets(keys, max_size=3),
    ),
    max_leaves=12,
)
cut_points = st.lists(st.integers(0, 400), max_size=6)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[a:b] for a, b in pairwise(edges)]


def requests(data: bytes, cuts: list[int]) -> tuple[list[list[bytes]], str | None]:
    parser, commands = Parser(), []
    for piece in pieces(data, cuts):
        try:
            commands += parser.feed(piece)
        except RemoteProtocolError as error:
            return commands + error.commands, str(error)
    return commands, None


@given(values, st.sampled_from([2, 3]))
def test_encode_equals_the_twin(value: Any, proto: int) -> None:
    assert encode(value, proto) == twin.encode(value, proto)


@given(st.lists(values, min_size=1, max_size=4), st.sampled_from([2, 3]), cut_points)
def test_replies_equal_the_twin_for_every_split(items: list[Any], proto: int, cuts: list[int]) -> None:
    data = b"".join(encode(item, proto) for item in items)
    expected, at = [], 0
    while at < len(data):
        value, at = twin.parse_reply(data, at)
        expected.append(value)
    parser = ReplyParser()
    got = [value for piece in pieces(data, cuts) for value in parser.feed(piece)]
    assert repr(got) == repr(expected)
    assert parser.idle
    parser.eof()


@given(st.lists(values, min_size=1, max_size=4), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_receiving_into_targets_equals_feeding(items: list[Any], sizes: list[int]) -> None:
    data = b"".join(encode(item, 3) for item in items)
    parser, got, at, turn = ReplyParser(), [], 0, 0
    while at < len(data):
        target = parser.get_target()
        n = min(len(target), sizes[turn % len(sizes)], len(data) - at)
        target[:n] = data[at : at + n]
        got += parser.commit(n)
        at, turn = at + n, turn + 1
    assert repr(got) == repr(ReplyParser().feed(data))


def as_hiredis(value: Any) -> Any:
    """Our reply value in the form hiredis gives it (errors and sets keep no type of their own in the comparison)."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, Push | list):
        return [as_hiredis(item) for item in (value.items if isinstance(value, Push) else value)]
    if isinstance(value, dict):
        return [[as_hiredis(key), as_hiredis(item)] for key, item in value.items()]
    return ("error", str(value)) if isinstance(value, ReplyError) else value


def of_hiredis(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [of_hiredis(item) for item in value]
    if isinstance(value, dict):
        return [[of_hiredis(key), of_hiredis(item)] for key, item in value.items()]
    return ("error", str(value)) if isinstance(value, hiredis.ReplyError) else value


# hiredis has its own opinion on big numbers, verbatim strings and sets, and NaN never equals itself.
plain = st.recursive(
    st.one_of(
        st.binary(max_size=40),
        st.integers(-(2**63), 2**63 - 1),
        st.booleans(),
        st.none(),
        st.floats(allow_nan=False),
        line_text.map(Simple),
        line_text.map(Err),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.binary(max_size=8), inner, max_size=3)),
    max_leaves=10,
)


@given(plain, st.sampled_from([2, 3]), cut_points)
def test_replies_equal_hiredis(value: Any, proto: int, cuts: list[int]) -> None:
    data = encode(value, proto)
    reader = hiredis.Reader()
    reader.feed(data)
    ours = ReplyParser()
    got = [item for piece in pieces(data, cuts) for item in ours.feed(piece)]
    assert len(got) == 1
    assert as_hiredis(got[0]) == of_hiredis(reader.gets())


@given(st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=5), min_size=1, max_size=4), cut_points)
def test_requests_round_trip_for_every_split(commands: list[list[bytes]], cuts: list[int]) -> None:
    data = b"".join(bytes(part) for command in commands for part in encode_command(*command))
    assert requests(data, cuts) == (commands, None)
    assert twin.parse_requests(data) == (commands, len(data), None)


REQUEST_ATOMS = [b"\r\n", b"\n", b" ", b"\x00", *b"*1\r\n|*2\r\n|*-1\r\n|*2\n|*1048577\r\n|$3\r\n|$0\r\n".split(b"|")]
REQUEST_ATOMS += b"abc PING ' \" \\x4 $ * - 1 0 $536870912\r\n".split(b" ")
REPLY_ATOMS = [b"\r\n", b"\r\n", b"\n", b"\r", *b"+ - : $ * % ~ | > _ # , ( = ! 0 1 -1 3 t txt: inf . e abc".split()]


def soup(atoms: list[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes that look like RESP often enough to get past the first byte."""
    return st.lists(st.sampled_from(atoms) | st.binary(max_size=3), max_size=14).map(b"".join)


@given(soup(REQUEST_ATOMS), cut_points)
@example(b'SET """k""" v\r\n', [])
@example(b"*1\r\n$4\r\nPING\rX", [16])
def test_a1_garbage_gives_what_the_twin_says_for_every_split(data: bytes, cuts: list[int]) -> None:
    commands, _, error = twin.parse_requests(data)
    assert requests(data, cuts) == (commands, error)
    assert requests(data, list(range(len(data)))) == (commands, error)


@given(soup(REPLY_ATOMS), cut_points)
def test_garbage_replies_give_what_the_twin_says(data: bytes, cuts: list[int]) -> None:
    expected, at, broken = [], 0, False
    while at < len(data):
        try:
            value, at = twin.parse_reply(data, at)
        except twin.Incomplete:
            break
        except twin.Malformed:
            broken = True
            break
        expected.append(value)
    parser, got = ReplyParser(), []
    try:
        for i in range(len(data)):
            got += parser.feed(data[i : i + 1])
        raised = False
    except RemoteProtocolError:
        raised = True
    # The twin reads a nested frame before its parents are known to be whole, so it may complain one frame earlier.
    assert repr(got) == repr(expected)
    assert not raised or broken
    parser = ReplyParser()
    try:
        for piece in pieces(data, cuts):
            parser.feed(piece)
    except RemoteProtocolError:
        assert raised
    else:
        assert not raised


def test_nan_keeps_its_sign_out_of_the_text() -> None:
    assert encode(math.nan, 3) == encode(-math.nan, 3) == b",nan\r\n"
