"""The reply parser: planned buffers, direct targets, limits, errors."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pion.wire.resp import LocalProtocolError, RemoteProtocolError, ReplyParser


def receive(parser: ReplyParser, data: bytes, step: int) -> list[Any]:
    """Deliver `data` as recv_into would, at most `step` bytes at a time."""
    out, at = [], 0
    while at < len(data):
        target = parser.get_target()
        n = min(step, len(target), len(data) - at)
        target[:n] = data[at : at + n]
        at += n
        out += parser.commit(n)
    return out


def fetch_reply(layers: int, nbytes: int) -> bytes:
    return b"*%d\r\n" % layers + b"".join(b"$%d\r\n%b\r\n" % (nbytes, bytes([i]) * nbytes) for i in range(layers))


@pytest.mark.parametrize("step", [1, 7, 100, 65536])
@pytest.mark.parametrize("nbytes", [4, 900])
def test_planned_bulks_arrive_in_their_buffers(step: int, nbytes: int) -> None:
    store = np.zeros((3, nbytes), np.uint8)
    parser = ReplyParser()
    parser.expect()
    parser.expect(list(store))
    parser.expect([store[0]])
    replies = receive(parser, b"+OK\r\n" + fetch_reply(3, nbytes) + b"$1\r\nx\r\n:1\r\n", step)
    assert replies[0] == "OK"
    assert [row.base is store for row in replies[1]] == [True] * 3
    assert np.array_equal(store, np.repeat(np.arange(3, dtype=np.uint8), nbytes).reshape(3, nbytes))
    assert replies[2:] == [b"x", 1]
    assert parser.idle


@pytest.mark.parametrize("step", [1, 7, 64, 100_000])
@pytest.mark.parametrize("nbytes", [3, 70_000])
def test_a_bulk_may_be_received_into_several_buffers(step: int, nbytes: int) -> None:
    """The head of an answer apart from its body, which lands where it belongs."""
    heads, bodies = [bytearray(64) for _ in range(3)], [bytearray(nbytes) for _ in range(3)]
    plans = list(zip(heads, bodies, strict=True))
    sent = [bytes([i]) * 64 + bytes([64 + i]) * nbytes for i in range(3)]
    data = b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in sent) + b"$1\r\nx\r\n+OK\r\n"
    parser = ReplyParser()
    parser.expect(plans)
    replies = receive(parser, data, step)
    assert [item is plan for item, plan in zip(replies[0], plans, strict=False)] == [True] * 3
    assert [bytes(head + body) for head, body in plans] == sent
    assert replies[0][3] == b"x"
    assert replies[1] == "OK"
    assert parser.idle
    parser.expect(plans)
    (again,) = parser.feed(data[: data.index(b"+OK")])
    assert again[0] is plans[0]
    parser.expect([(bytearray(64), bytearray(nbytes + 1))])
    ((other,),) = parser.feed(b"*1\r\n$%d\r\n%b\r\n" % (len(sent[0]), sent[0]))
    assert other == sent[0]
    with pytest.raises(LocalProtocolError, match="writable, C-contiguous"):
        parser.expect([(bytearray(64), b"read-only")])


def test_a_large_bulk_is_received_in_place() -> None:
    out = bytearray(200_000)
    parser = ReplyParser()
    parser.expect([out])
    parser.feed(b"*1\r\n$200000\r\nabc")
    target = parser.get_target()
    assert len(target) == 199_997
    target[0] = ord("d")
    assert out[:4] == b"abcd"


def test_an_unplanned_large_bulk_becomes_bytes_without_growing_the_window() -> None:
    parser = ReplyParser()
    data = b"$1000000\r\n" + b"z" * 1_000_000 + b"\r\n+OK\r\n"
    for step in (1000, 65536):
        replies = receive(parser, data, step)
        assert replies == [b"z" * 1_000_000, "OK"]
        assert type(replies[0]) is bytes


def test_nulls_keep_their_place_and_other_sizes_arrive_as_bytes() -> None:
    outs = [bytearray(3) for _ in range(3)]
    parser = ReplyParser()
    parser.expect(outs)
    (reply,) = parser.feed(b"*4\r\n$-1\r\n$2\r\nab\r\n$3\r\nabc\r\n$3\r\nxyz\r\n")
    assert reply == [None, b"ab", bytearray(b"abc"), b"xyz"]
    assert reply[2] is outs[2]


@pytest.mark.parametrize("step", [1, 7, 100, 65536])
@pytest.mark.parametrize("nbytes", [4, 40_000])
def test_a_function_may_give_the_same_buffer_for_every_bulk(step: int, nbytes: int) -> None:
    buffer, seen, asked = bytearray(nbytes), [], []

    def next_buffer(index: int, size: int) -> bytearray | None:
        seen.append(bytes(buffer[:1]))
        asked.append((index, size))
        return buffer if size == nbytes else None

    parser = ReplyParser()
    parser.expect(next_buffer)
    data = fetch_reply(3, nbytes).replace(b"*3", b"*5") + b"$-1\r\n$2\r\nxy\r\n+OK\r\n"
    replies = receive(parser, data, step)
    assert asked == [(0, nbytes), (1, nbytes), (2, nbytes), (3, -1), (4, 2)]
    assert seen[1:4] == [b"\0", b"\1", b"\2"]
    assert [item is buffer for item in replies[0]] == [True] * 3 + [False] * 2
    assert replies[0][3:] == [None, b"xy"]
    assert replies[1] == "OK"
    assert parser.idle


def test_an_error_or_a_push_does_not_shift_the_plans() -> None:
    out = bytearray(2)
    parser = ReplyParser()
    parser.expect([bytearray(2)])
    parser.expect([out])
    replies = parser.feed(b"-ERR no\r\n>1\r\n$2\r\npu\r\n|1\r\n+a\r\n$2\r\nat\r\n$2\r\nhi\r\n")
    assert str(replies[0]) == "ERR no"
    assert replies[0].code == "ERR"
    assert replies[1].items == [b"pu"]
    assert replies[2] is out


def test_a_function_can_give_one_buffer_to_all_bulks_of_a_reply() -> None:
    scratch = bytearray(40_000)
    asked: list[tuple[int, int]] = []
    placed: list[bytes] = []

    def give(index: int, nbytes: int) -> bytearray | None:
        if asked and asked[-1][1] == 40_000:
            placed.append(bytes(scratch[:2]))
        asked.append((index, nbytes))
        return scratch if nbytes == 40_000 else None

    parser = ReplyParser()
    parser.expect(give)
    body = [bytes([i]) * 40_000 for i in range(3)]
    data = b"*5\r\n" + b"".join(b"$40000\r\n%b\r\n" % part for part in body) + b"$-1\r\n$1\r\nx\r\n"
    (reply,) = receive(parser, data, 30_000)
    assert [item is scratch for item in reply] == [True, True, True, False, False]
    assert reply[3:] == [None, b"x"]
    assert asked == [(0, 40_000), (1, 40_000), (2, 40_000), (3, -1), (4, 1)]
    assert placed == [b"\0\0", b"\1\1", b"\2\2"]


@pytest.mark.parametrize("out", [b"read-only", np.zeros((4, 4))[:, ::2]])
def test_a_plan_needs_writable_contiguous_memory(out: Any) -> None:
    with pytest.raises(LocalProtocolError, match="writable, C-contiguous"):
        ReplyParser().expect([out])


BROKEN = [
    b"hello\r\n",
    b"+OK\n",
    b"\r\n",
    b":1.5\r\n",
    b":+-1\r\n",
    b"$-2\r\n",
    b"$?\r\n",
    b"*-2\r\n",
    b"%-1\r\n",
    b"$3\r\nabcd\r\n",
    b"=3\r\nabc\r\n",
    b"#x\r\n",
    b",1_0\r\n",
    b",1e\r\n",
    b"(12a\r\n",
    b"_x\r\n",
    b"*1\r\n>0\r\n",
    b"*1\r\n" * 100,
    b"\xff\r\n",
]


@pytest.mark.parametrize("data", BROKEN)
def test_what_is_not_resp_is_the_peers_fault_for_every_split(data: bytes) -> None:
    texts = set()
    for cuts in ([], *([i] for i in range(1, len(data))), list(range(1, len(data)))):
        parser = ReplyParser()
        pieces = [data[start:end] for start, end in pairwise([0, *cuts, len(data)])]
        with pytest.raises(RemoteProtocolError) as info:
            list(map(parser.feed, pieces))
        texts.add(str(info.value))
        with pytest.raises(RemoteProtocolError):
            parser.feed(b"+OK\r\n")
        with pytest.raises(RemoteProtocolError):
            parser.get_target()
    assert len(texts) == 1


def test_replies_completed_by_the_same_bytes_are_not_lost() -> None:
    with pytest.raises(RemoteProtocolError) as info:
        ReplyParser().feed(b":1\r\n:2\r\n:x\r\n")
    assert info.value.replies == [1, 2]


def test_limits_on_one_bulk_and_one_line() -> None:
    with pytest.raises(RemoteProtocolError, match="invalid bulk length 101"):
        ReplyParser(max_bulk=100).feed(b"$101\r\n")
    with pytest.raises(RemoteProtocolError, match="more than 100 bytes"):
        ReplyParser(max_line=100).feed(b"+" + b"x" * 101)
    assert ReplyParser().feed(b"+" + b"x" * 300_000 + b"\r\n") == ["x" * 300_000]


def test_the_end_of_the_connection() -> None:
    parser = ReplyParser()
    parser.feed(b"+OK\r\n")
    parser.eof()
    parser.feed(b"*2\r\n:1\r\n")
    with pytest.raises(RemoteProtocolError, match="closed in the middle of a reply"):
        parser.eof()


def test_committing_more_than_the_target_holds_is_our_fault() -> None:
    with pytest.raises(LocalProtocolError):
        ReplyParser().commit(65537)
    parser = ReplyParser()
    parser.feed(b"$40000\r\n")
    with pytest.raises(LocalProtocolError):
        parser.commit(40001)
