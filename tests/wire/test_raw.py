"""The answer to FMT RAW: what is packed is parsed, and anything else is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.wire import raw
from pion.wire.raw import Segment

_run = st.tuples(st.integers(0, 20), st.integers(0, 0xFFFF), st.integers(1, 500), st.integers(0, 300), st.booleans())


@given(st.integers(1, 8192), st.integers(0, 200_000), st.floats(0, 1e9), st.lists(_run, min_size=1, max_size=40))
def test_every_header_comes_back(
    dim: int, start: int, theta: float, runs: list[tuple[int, int, int, int, bool]]
) -> None:
    segments, at = [], start
    for code, param, rows, nbytes, missing in runs:
        segments.append(Segment(code | param << 8, at, rows, 0 if missing else nbytes, missing))
        at += rows
    head = raw.pack(dim, start, at - start, theta, segments)
    assert len(head) == raw.header_length(len(segments))
    assert len(head) % 64 == 0
    body = bytes(sum(segment.nbytes for segment in segments))
    for stored in (raw.parse(head + body), raw.parse(memoryview(head), len(body))):
        assert (stored.dim, stored.start, stored.rows, stored.theta) == (dim, start, at - start, theta)
        assert [segment._replace(offset=0) for segment in stored.segments] == segments
        offset = len(head)
        for segment in stored.segments:
            assert segment.offset == offset
            offset += segment.nbytes


def test_groups_may_begin_before_and_end_behind_what_was_asked_for() -> None:
    segments = [Segment(17 | 64 << 8, 64, 128, 4096), Segment(2, 192, 3, 12)]
    stored = raw.parse(raw.pack(2, 100, 95, 1e4, segments) + bytes(4108))
    assert [segment.fmt for segment in stored.segments] == [17 | 64 << 8, 2]
    raw.parse(raw.pack(2, 100, 20, 1e4, segments[:1]) + bytes(4096))


def _spoiled(at: int, fmt: str, value: object) -> bytes:
    out = bytearray(raw.pack(4, 0, 10, 0.0, [Segment(2, 0, 6, 48), Segment(2, 6, 4, 0, missing=True)]) + bytes(48))
    struct.pack_into(fmt, out, at, value)
    return bytes(out)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "not an answer"),
        (bytes(64), "not an answer"),
        (_spoiled(0, "<B", 1), "not an answer"),
        (_spoiled(4, "<H", 2), "version 2"),
        (_spoiled(6, "<H", 64), "header is not whole"),
        (_spoiled(20, "<I", 2000), "header is not whole"),
        (_spoiled(20, "<I", 1), "header is not whole"),
        (_spoiled(16, "<I", 11), "not what its header says"),
        (_spoiled(32 + 24 + 4, "<I", 7), "leave rows out"),
        (_spoiled(32 + 16, "<Q", 47), "not what its header says"),
        (_spoiled(0, "<4s", b"PRAW")[:-1], "not what its header says"),
        (_spoiled(0, "<4s", b"PRAW") + b"x", "not what its header says"),
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        raw.parse(answer)


def test_a_header_has_room_for_so_many_segments() -> None:
    segments = [Segment(2, i, 1, 0, missing=True) for i in range(raw.MAX_SEGMENTS)]
    assert len(raw.parse(raw.pack(1, 0, len(segments), 0.0, segments)).segments) == raw.MAX_SEGMENTS
    with pytest.raises(ValueError, match="segments"):
        raw.pack(1, 0, 1, 0.0, [*segments, segments[0]])


@pytest.mark.parametrize(
    "segments",
    [
        [raw.Segment(2, 0, 10, 20), raw.Segment(2, 10, 5, 10)],
        [raw.Segment(2, 0, 10, 20), raw.Segment(2, 10, 1, 2, missing=True)],
    ],
)
def test_segments_behind_the_rows_asked_for_are_refused(segments: list[raw.Segment]) -> None:
    head = raw.pack(1, 0, 10, 0.0, segments)
    body = b"\0" * sum(0 if segment.missing else segment.nbytes for segment in segments)
    with pytest.raises(ValueError, match="none of the rows asked for"):
        raw.parse(head + body)
