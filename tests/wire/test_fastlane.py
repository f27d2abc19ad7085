"""The binary lane's frames: bytes typed from the wire's description, and every split of every stream."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from pion.wire.fastlane import (
    MAX_BODY,
    Command,
    FusedCall,
    Replies,
    Reply,
    Request,
    Requests,
    Status,
    TooLongError,
    WireError,
    fused_request,
    parse_fused,
    parse_reply_header,
    reply,
    request,
)
from pion.wire.resp import LocalProtocolError, RemoteProtocolError

# H_q 2, M 1, D 2; H_kv 1, S 1: typed by hand.
FUSED = bytes.fromhex(
    "5eca 24 3b000000"  # magic, command, 59 bytes of body
    "0300 6e735f"  # sid "ns_"
    "0700 0200 0200 0100"  # layer 7, H_q 2, D 2, H_kv 1
    "01000000 01000000"  # M 1, S 1
    "0000803f 00000040 00004040 00008040"  # Q: 1 2 | 3 4
    "0000003f 000000bf"  # K: 0.5 -0.5
    "0000c842 00000000"  # V: 100 0
    "0000"  # head_map
    "ffffffff"  # window: -1
)
Q = np.array([[[1, 2]], [[3, 4]]], "<f4")
K, V = np.array([[[0.5, -0.5]]], "<f4"), np.array([[[100, 0]]], "<f4")
MAP = np.zeros(2, np.uint8)

cut_points = st.lists(st.integers(0, 200), max_size=6)


def joined(buffers: list[bytes | memoryview]) -> bytes:
    return b"".join(buffers)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[a:b] for a, b in pairwise(edges)]


def parsed(parser: Requests | Replies, parts: list[bytes]) -> tuple[list[Any], str | None]:
    """Every frame, and the error."""
    got: list[Any] = []
    for part in parts:
        parser.feed(part)
        try:
            while (frame := parser.next()) is not None:
                got.append(frame)
        except WireError as error:
            return got, f"{type(error).__name__}: {error}"
    return got, None


# --- bytes typed by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "sent", "want"),
    [
        ("5eca ff 00000000", request(Command.PING), Request(0xFF, b"")),
        ("5eca ff 02000000 6869", request(Command.PING, b"hi"), Request(0xFF, b"hi")),
        ("5eca 37 02000000 7077", request(Command.AUTH, b"pw"), Request(0x37, b"pw")),
        ("5eca 10 01000000 00", request(0x10, b"\0"), Request(0x10, b"\0")),
    ],
)
def test_requests(frame: str, sent: list[Any], want: Request) -> None:
    data = bytes.fromhex(frame)
    assert joined(sent) == data
    parser = Requests(100)
    parser.feed(data)
    assert parser.next() == want
    assert parser.next() is None
    assert len(parser) == 0


@pytest.mark.parametrize(
    ("frame", "want"),
    [
        ("5eca 00 00000000", Reply(Status.OK, b"")),
        ("5eca 00 04000000 0000803f", Reply(Status.OK, b"\0\0\x80\x3f")),
        ("5eca 01 00000000", Reply(Status.MISS, b"")),
        ("5eca 02 00000000", Reply(Status.ERROR, b"")),
        ("5eca 03 00000000", Reply(Status.COLDMISS, b"")),
    ],
)
def test_responses(frame: str, want: Reply) -> None:
    data = bytes.fromhex(frame)
    assert joined(reply(*want)) == data
    parser = Replies()
    parser.feed(data)
    assert parser.next() == want
    assert parse_reply_header(data[:7]) == (want.status, len(want.body))


def test_a_fused_query() -> None:
    assert joined(fused_request("ns_", 7, Q, K, V, MAP, -1)) == FUSED
    without = bytes.fromhex("5eca 24 37000000") + FUSED[7:-4]
    assert joined(fused_request(b"ns_", 7, Q, K, V, MAP)) == without
    call = parse_fused(FUSED[7:])
    assert call == FusedCall(b"ns_", 7, 2, 2, 1, 1, 1, Q.tobytes(), K.tobytes(), V.tobytes(), b"\0\0", -1)  # type: ignore[arg-type]
    assert parse_fused(without[7:]) == call


@pytest.mark.parametrize(
    ("tail", "window"),
    [
        ("", -1), ("00", -1), ("000000", -1), ("00000000", 0), ("05000000", 5), ("ffffffff", -1), ("0500000009", 5),
        ("ffffff7f", 2**31 - 1), ("00000080", -(2**31)),
    ],
)  # fmt: skip
def test_the_window_is_there_from_four_bytes_on(tail: str, window: int) -> None:
    call = parse_fused(FUSED[7:-4] + bytes.fromhex(tail))
    assert call is not None
    assert call.window == window


def test_large_arrays_are_not_copied() -> None:
    q = np.ones((8, 1, 128), np.float32)
    buffers = fused_request("s", 0, q, np.zeros((2, 0, 128), np.float32), np.zeros((2, 0, 128), np.float32), bytes(8))
    assert len(buffers) == 3, "header and names, Q, head_map"
    assert isinstance(buffers[1], memoryview)
    assert np.shares_memory(np.frombuffer(buffers[1], np.float32), q)
    call = parse_fused(joined(buffers)[7:])
    assert call is not None
    assert (call.rows, call.suffix, len(call.k_suf), len(call.v_suf)) == (1, 0, 0, 0)


# --- what is not a fused query ---------------------------------------------------------------------------------------


def test_every_shortened_body_is_refused() -> None:
    body = FUSED[7:-4]
    assert [at for at in range(len(body)) if parse_fused(body[:at]) is not None] == []


@pytest.mark.parametrize(
    ("at", "field"),
    [
        (7, "0000"),  # H_q 0
        (9, "0000"),  # D 0
        (11, "0000"),  # H_kv 0
        (13, "00000000"),  # M 0
        (11, "0300"),  # 2 query heads, 3 heads of K/V
        (13, "ffffffff"),  # M beyond the body
        (17, "ffffffff"),  # S beyond the body
        (0, "ffff"),  # sid beyond the body
    ],
)
def test_other_bodies_are_refused(at: int, field: str) -> None:
    body = bytearray(FUSED[7:])
    body[at : at + len(field) // 2] = bytes.fromhex(field)
    assert parse_fused(bytes(body)) is None


@given(st.binary(max_size=80))
@example(b"")
@example(b"\0\0" + b"\1\0" * 4 + b"\1\0\0\0" + b"\0\0\0\0")
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    call = parse_fused(body)
    if call is not None:
        assert len(call.q) == 4 * call.q_heads * call.rows * call.dim > 0
        assert len(call.k_suf) == len(call.v_suf) == 4 * call.kv_heads * call.suffix * call.dim
        assert len(call.head_map) == call.q_heads
        assert call.q_heads % call.kv_heads == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": Q.astype(np.float64)}, "q must be fp32"),
        ({"q": Q[0]}, "q must be fp32 of three dimensions"),
        ({"q": np.asfortranarray(np.ones((2, 2, 2), np.float32))}, "q must be C-contiguous"),
        ({"k_suf": np.ones((1, 1, 3), np.float32)}, "k_suf and v_suf"),
        ({"v_suf": np.ones((1, 2, 2), np.float32)}, "k_suf and v_suf"),
        ({"head_map": bytes(3)}, "one byte for each of 2"),
        ({"sid": b"x" * 65_536}, "no room"),
        ({"layer": -1}, "no room"),
        ({"layer": 65_536}, "no room"),
        ({"window": 2**31}, "no room"),
    ],
)
def test_what_cannot_be_said_is_not_sent(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"sid": "s", "layer": 0, "q": Q, "k_suf": K, "v_suf": V, "head_map": MAP} | change
    with pytest.raises(LocalProtocolError, match=text):
        fused_request(**given)


# --- streams ---------------------------------------------------------------------------------------------------------

frames = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=6)


@given(frames, cut_points)
def test_requests_in_any_pieces(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(joined(request(*each)) for each in sent)
    assert parsed(Requests(40), pieces(data, cuts)) == ([Request(*each) for each in sent], None)


@given(st.lists(st.tuples(st.sampled_from(Status), st.binary(max_size=40)), max_size=6), cut_points)
def test_responses_in_any_pieces(sent: list[tuple[Status, bytes]], cuts: list[int]) -> None:
    data = b"".join(joined(reply(*each)) for each in sent)
    assert parsed(Replies(40), pieces(data, cuts)) == ([Reply(*each) for each in sent], None)


@given(frames, st.binary(max_size=60), cut_points)
@example([], b"PING\r\n", [])
@example([(1, b"")], b"\x5e", [])
@example([(1, b"")], b"\x5e\xcb", [8])
def test_garbage_in_any_pieces(sent: list[tuple[int, bytes]], garbage: bytes, cuts: list[int]) -> None:
    """The same frames and the same error for every split, and all frames before the garbage."""
    data = b"".join(joined(request(*each)) for each in sent) + garbage
    for kind in (lambda: Requests(40), lambda: Replies(40)):
        whole = parsed(kind(), [data])
        assert parsed(kind(), pieces(data, cuts)) == whole
    assert parsed(Requests(40), [data])[0][: len(sent)] == [Request(*each) for each in sent]


@pytest.mark.parametrize("start", [b"P", b"\xca\x5e", b"\x5e\x00", b"\0", b"*1\r\n$4\r\nPING\r\n", b"\x16\x03\x01"])
def test_another_protocol_is_known_by_its_first_bytes(start: bytes) -> None:
    for parser in (Requests(100), Replies()):
        parser.feed(start)
        with pytest.raises(RemoteProtocolError, match="a frame begins with"):
            parser.next()
    with pytest.raises(WireError, match="a frame begins with"):
        parse_reply_header(start[:2].ljust(7, b"\0"))


def test_a_body_that_is_too_long_is_refused_when_it_is_announced() -> None:
    parser = Requests(1000)
    parser.feed(struct.pack("<HBI", 0xCA5E, 0x24, 1001))
    with pytest.raises(TooLongError, match="1001 bytes is announced, 1000 are taken"):
        parser.next()
    parser.limit = MAX_BODY
    assert parser.next() is None
    assert len(parser) == 7, "nothing was reserved for what was announced"


def test_a_status_that_does_not_exist() -> None:
    parser = Replies()
    parser.feed(bytes.fromhex("5eca 04 00000000"))
    with pytest.raises(WireError, match="status 4"):
        parser.next()
    with pytest.raises(WireError, match="status 4"):
        parse_reply_header(bytes.fromhex("5eca 04 00000000"))


def test_a_body_beyond_the_field_is_not_sent() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_BODY + 1

    with pytest.raises(LocalProtocolError, match="can be announced"):
        request(Command.PING, Huge())
