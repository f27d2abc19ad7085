"""Extent maps against a plain dict, and the records they write and read."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core import framing, vstore

STRIDE = 8
SEED = framing.seed_of(12345)

_spans = st.tuples(st.integers(0, 40), st.integers(1, 12))
_step = st.one_of(st.tuples(st.just("put"), _spans), st.tuples(st.just("trim"), st.integers(0, 45)))
_steps = st.lists(_step, max_size=30)


def _check(rows: vstore.Rows, model: dict[int, int], tokens: int) -> None:
    assert rows.tokens(0, 3) == tokens
    assert rows.live(0, 3) == len(model)
    for start, end in ((0, 60), (5, 17), (tokens, tokens + 2), (0, max(tokens, 1))):
        seen = {}
        at = start
        for ref, offset, nbytes in rows.segments("file", 0, 3, start, end, STRIDE):
            for i in range(nbytes // STRIDE):
                if ref is not None:
                    seen[at] = offset + i * STRIDE
                at += 1
        assert at == end
        assert seen == {row: place for row, place in model.items() if start <= row < end}
        assert rows.covers(0, 3, start, end) == all(row in model for row in range(start, end))


@given(_steps)
@settings(max_examples=200, deadline=None)
def test_map_is_a_dict_of_rows(steps: list[tuple[str, object]]) -> None:
    """The latest put wins, trims forget, whatever the order."""
    rows, model, tokens, dead, put = vstore.Rows(), {}, 0, 0, 0
    for number, (what, value) in enumerate(steps):
        if what == "put":
            start, count = value  # type: ignore[misc]
            offset = 1_000_000 * (number + 1)
            rows.put(0, 3, start, count, offset, 64 * number, STRIDE)
            dead += sum(row in model for row in range(start, start + count))
            model.update({start + i: offset + i * STRIDE for i in range(count)})
            tokens = max(tokens, start + count)
            put += count
        else:
            keep: int = value  # type: ignore[assignment]
            dead += sum(row >= keep for row in model)
            model = {row: place for row, place in model.items() if row < keep}
            tokens = min(tokens, keep)
            rows.trim(0, 3, keep)
        _check(rows, model, tokens)
    assert rows.dead == dead * STRIDE
    assert put == dead + len(model)
    _check(rows.copy(), model, tokens)


def test_neighbours_in_the_file_are_one_segment() -> None:
    rows = vstore.Rows()
    rows.put(1, 0, 0, 4, 1000, 64, STRIDE)
    rows.put(1, 0, 4, 4, 1000 + 4 * STRIDE, 64, STRIDE)
    rows.put(1, 0, 8, 1, 5000, 128, STRIDE)
    assert rows.segments("f", 1, 0, 1, 9, STRIDE) == [("f", 1000 + STRIDE, 7 * STRIDE), ("f", 5000, STRIDE)]


def test_rows_of_another_size_are_refused() -> None:
    rows = vstore.Rows()
    rows.put(0, 0, 0, 1, 64, 64, 8)
    with pytest.raises(ValueError, match="another size"):
        rows.put(0, 0, 1, 1, 64, 64, 16)
    for side, layer in ((2, 0), (0, 80), (0, -1), (-1, 0)):
        with pytest.raises(ValueError, match="range"):
            rows.put(side, layer, 0, 1, 64, 64, 8)


def test_complete_needs_every_row_of_both_sides() -> None:
    rows = vstore.Rows()
    for side in (0, 1):
        for layer in range(2):
            assert not rows.complete(3, 2)
            rows.put(side, layer, 0, 3, 64, 64, STRIDE)
    assert rows.complete(3, 2)
    assert not rows.complete(3, 1)
    assert not rows.complete(2, 2)
    rows.trim(1, 1, 2)
    assert not rows.complete(3, 2)


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def _fill(rows: vstore.Rows, fd: int, at: int = 0) -> int:
    for number in range(20):
        blob = bytes([number]) * (4 * 2 * 3)
        at += rows.append(fd, at, SEED, number % 2, number % 3, number // 3, 3, 2, 8, 8, blob)
    return at


def _read(rows: vstore.Rows, fd: int) -> list[bytes]:
    out = []
    for side in (0, 1):
        for layer in range(rows.layers(side)):
            segments = rows.segments(fd, side, layer, 0, rows.tokens(side, layer), 8)
            out.append(b"".join(bytes(n) if ref is None else os.pread(fd, n, offset) for ref, offset, n in segments))
    return out


def test_scan_finds_what_append_wrote(file: int) -> None:
    rows = vstore.Rows()
    end = _fill(rows, file)
    again = vstore.Rows()
    assert again.scan(file, 0, end, SEED, pytest.fail) == (end, "")
    assert _read(again, file) == _read(rows, file)
    records = again.unchecked(0, 0, 0, 100)
    assert records
    assert vstore.check_records(file, SEED, records) == -1
    again.mark_checked(records)
    assert again.unchecked(0, 0, 0, 100) == []
    assert rows.unchecked(0, 0, 0, 100) == []


def test_check_finds_a_flipped_bit(file: int) -> None:
    rows = vstore.Rows()
    end = _fill(rows, file)
    again = vstore.Rows()
    again.scan(file, 0, end, SEED, pytest.fail)
    records = again.unchecked(1, 1, 0, 100)
    spoiled = records[len(records) // 2]
    byte = os.pread(file, 1, spoiled + 70)
    os.pwrite(file, bytes([byte[0] ^ 16]), spoiled + 70)
    assert vstore.check_records(file, SEED, records) == spoiled


def test_refused_row_writes_nothing(file: int) -> None:
    rows = vstore.Rows()
    import struct

    blob = struct.pack("<4f", 1, 2, 3, 1e6)
    with pytest.raises(vstore.BadRowError) as info:
        rows.append(file, 0, SEED, 0, 0, 0, 2, 2, 8, 2, blob)
    assert info.value.row == 1
    assert os.fstat(file).st_size == 0
    assert rows.tokens(0, 0) == 0


def test_merge_makes_one_record_per_run(file: int, tmp_path) -> None:
    rows = vstore.Rows()
    end = _fill(rows, file)
    other = os.open(tmp_path / "merged", os.O_RDWR | os.O_CREAT)
    try:
        fresh, seed = vstore.Rows(), framing.seed_of(777)
        at = rows.merge_into(fresh, file, other, 0, seed, [[(2, 8)] * 3] * 2)
        assert _read(fresh, other) == _read(rows, file)
        assert at < end
        blob = b"\7" * 8
        more = rows.append(file, end, SEED, 0, 0, 50, 1, 2, 8, 8, blob)
        at = fresh.copy_tail(file, end, end + more, SEED, other, at, seed, pytest.fail)
        assert _read(fresh, other) == _read(rows, file)
        again = vstore.Rows()
        assert again.scan(other, 0, at, seed, pytest.fail) == (at, "")
        assert _read(again, other) == _read(rows, file)
        for side, layer in ((s, n) for s in (0, 1) for n in range(3)):
            assert vstore.check_records(other, seed, again.unchecked(side, layer, 0, 99)) == -1
    finally:
        os.close(other)


def test_copy_of_damaged_tail_is_refused(file: int, tmp_path) -> None:
    rows = vstore.Rows()
    end = _fill(rows, file)
    os.pwrite(file, b"\xff\xff", 70)
    other = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(vstore.DamageError, match="checksum"):
            vstore.Rows().copy_tail(file, 0, end, SEED, other, 0, 1, pytest.fail)
    finally:
        os.close(other)


@pytest.mark.parametrize(("source", "target"), [(9, 0), (2, 0), (9, 8), (2, 8), (9, 2), (2, 9)])
def test_convert_region_equals_one_call(file: int, source: int, target: int) -> None:
    """In place, shrinking and growing, in more than one piece."""
    import numpy as np

    from pion._core import quant

    dim, rows = 96, 9000
    values = np.random.default_rng(1).standard_normal((rows, dim)).astype(np.float32)
    words = values.astype(np.float16) if source == 2 else (values.view(np.uint32) >> 16).astype(np.uint16)
    os.pwrite(file, words.tobytes(), 4096)
    crc = vstore.convert_region(file, 4096, rows, dim, source, target, SEED)
    want = bytes(quant.encode(source, target, words.tobytes(), dim))
    got = os.pread(file, quant.row_bytes(target, dim) * rows, 4096)
    assert got == want
    assert crc == framing.crc32c(got, SEED)
