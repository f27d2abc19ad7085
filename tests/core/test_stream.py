"""Extents and sinks against plain byte arithmetic."""

import errno
import os
import resource
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core import quant, quantkeys, stream
from pion._core.stream import MIXED, RAW, Extents, FdRef, Sink

INT8, FP16, FP32, BF16 = 0, 2, 8, 9


def scratch_file(tmp_path, data=b"", name="f"):
    fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(fd, data, 0)
    return fd


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_fdref_closes_when_the_last_user_is_gone(tmp_path):
    fd = scratch_file(tmp_path, b"hello")
    ref = FdRef(fd)
    body = Extents([(ref, 1, 3)])
    del ref
    assert stream.drain(10)
    assert body.tobytes() == b"ell"
    assert is_open(fd)
    del body
    assert stream.drain(10)
    assert not is_open(fd)


def test_fdref_refuses_a_negative_descriptor():
    with pytest.raises(ValueError):
        FdRef(-1)


def test_unlink_later(tmp_path):
    path = tmp_path / "gone"
    path.write_bytes(b"x")
    stream.unlink_later(path)
    stream.unlink_later(tmp_path / "never there")
    assert stream.drain(10)
    assert not path.exists()
    with pytest.raises(ValueError):
        stream.unlink_later("a\0b")


def test_extents_join_files_and_zeros(tmp_path):
    data = bytes(range(256)) * 8
    one, two = FdRef(scratch_file(tmp_path, data, "1")), FdRef(scratch_file(tmp_path, data[::-1], "2"))
    body = Extents([(one, 10, 20), (None, 0, 5), (two, 0, 0), (two, 7, 100), (one, 0, 2048)])
    expect = data[10:30] + bytes(5) + data[::-1][7:107] + data
    assert len(body) == len(expect) == 20 + 5 + 100 + 2048
    assert body.tobytes() == expect
    out = bytearray(len(expect) + 3)
    assert body.readinto(out) == len(expect)
    assert out == expect + bytes(3)
    with pytest.raises(ValueError):
        body.readinto(bytearray(10))
    with pytest.raises((BufferError, TypeError)):
        body.readinto(bytes(5000))


def test_extents_of_nothing():
    assert len(Extents([])) == 0
    assert Extents([]).tobytes() == b""
    assert Extents([(None, 0, 0)], decode=FP16, dim=4).tobytes() == b""


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_extents_equal_slices(tmp_path_factory, data):
    size = 300_000
    content = np.random.default_rng(7).bytes(size)
    ref = FdRef(scratch_file(tmp_path_factory.mktemp("x"), content))
    pieces, expect, at = [], [], 0
    for _ in range(data.draw(st.integers(0, 700))):
        n = data.draw(st.integers(0, 900))
        if at + n > size:
            break
        pieces.append((ref, at, n))
        expect.append(content[at : at + n])
        at += n + data.draw(st.sampled_from([0, 0, 1, 64, 1023, 1024, 1025, 4096]))
    assert Extents(pieces).tobytes() == b"".join(expect)


def test_extents_report_a_truncated_file(tmp_path):
    fd = scratch_file(tmp_path, bytes(1000))
    body = Extents([(FdRef(fd), 0, 1000)])
    os.ftruncate(fd, 500)
    with pytest.raises(EOFError):
        body.tobytes()


@pytest.mark.parametrize(
    "segments",
    [[(None, -1, 5)], [(None, 0, -5)], [(None, 1 << 62, 1 << 62)], [(None, 0, 1 << 62)] * 4],
)
def test_extents_refuse_numbers_out_of_range(segments):
    with pytest.raises((ValueError, OverflowError)):
        Extents(segments)


def test_extents_refuse_partial_rows_and_unknown_formats():
    with pytest.raises(ValueError, match="whole number of rows"):
        Extents([(None, 0, 7)], decode=FP16, dim=2)
    for decode, dim in [(77, 4), (-5, 4), (FP16, 0), (FP16, -1)]:
        with pytest.raises(ValueError, match="cannot decode"):
            Extents([(None, 0, 8)], decode=decode, dim=dim)
    with pytest.raises(TypeError):
        Extents([("not a descriptor", 0, 8)])


def test_extents_decode_fp16_and_zeros(tmp_path):
    dim, rows = 48, 5000
    values = np.random.default_rng(1).standard_normal((rows, dim)).astype(np.float16)
    ref = FdRef(scratch_file(tmp_path, b"pad" + values.tobytes()))
    row = dim * 2
    body = Extents([(ref, 3, 10 * row), (None, 0, 3 * row), (ref, 3 + 10 * row, (rows - 10) * row)], FP16, dim)
    got = np.frombuffer(body.tobytes(), np.float32).reshape(-1, dim)
    expect = np.concatenate([values[:10], np.zeros((3, dim), np.float16), values[10:]]).astype(np.float32)
    np.testing.assert_array_equal(got, expect)
    assert (body.decode, body.dim, body.segments) == (FP16, dim, 3)


def test_extents_with_a_head(tmp_path):
    content = np.random.default_rng(8).bytes(700_000)
    ref = FdRef(scratch_file(tmp_path, content))
    for head in (b"h", bytes(range(64)), b"x" * 100_000):
        body = Extents([(ref, 5, 600_000), (None, 0, 3), (ref, 0, 10)], head=head)
        assert body.tobytes() == head + content[5:600_005] + bytes(3) + content[:10]
        assert len(body) == len(head) + 600_013
    assert Extents([], head=b"alone").tobytes() == b"alone"
    with pytest.raises(ValueError, match="no head"):
        Extents([(None, 0, 8)], FP16, 4, head=b"h")


def test_mixed_extents_decode_each_segment_by_its_own_format(tmp_path):
    """Rows of three formats, whole groups of keys of which some rows are asked for, and zeros."""
    dim, theta, rows = 64, 1e4, 256
    kturbo4 = 17 | 32 << 8
    words = np.random.default_rng(9).standard_normal((rows, dim)).astype(np.float16)
    blocks = bytes(quantkeys.encode_keys(FP16, kturbo4, words.tobytes(), dim, 64, theta))
    int8 = bytes(quant.encode(FP16, INT8, words.tobytes(), dim))
    ref = FdRef(scratch_file(tmp_path, blocks + words.tobytes() + int8))
    at = len(blocks)
    body = Extents(
        [
            (ref, 0, len(blocks), kturbo4, 10, 200, 64),
            (None, 0, 3 * dim * 2, FP16, 0, 3, 0),
            (ref, at, words.nbytes, FP16, 0, rows, 0),
            (ref, at + words.nbytes, len(int8), INT8, 1, 5, 0),
            (ref, len(blocks) // 2, len(blocks) // 2, kturbo4, 127, 1, 192),
        ],
        MIXED,
        dim,
        theta=theta,
    )
    keys = np.frombuffer(quantkeys.decode_keys(kturbo4, blocks, dim, 64, theta), np.float32).reshape(rows, dim)
    rest = np.frombuffer(quant.decode(INT8, int8, dim), np.float32).reshape(rows, dim)
    want = [keys[10:210], np.zeros((3, dim), np.float32), words.astype(np.float32), rest[1:6], keys[255:]]
    assert np.array_equal(np.frombuffer(body.tobytes(), np.float32).reshape(-1, dim), np.concatenate(want))
    for segment in (
        (None, 0, len(blocks) // 4 - 1, kturbo4, 0, 1, 0),
        (None, 0, len(blocks) // 8, kturbo4, 0, 1, 0),
        (None, 0, len(blocks) // 4, kturbo4, 60, 5, 0),
        (None, 0, 128, 77, 0, 1, 0),
    ):
        with pytest.raises(ValueError, match="whole number of rows"):
            Extents([segment], MIXED, dim)


def test_extents_decode_a_row_larger_than_a_piece(tmp_path):
    dim = 300_000
    values = np.random.default_rng(2).standard_normal((3, dim)).astype(np.float16)
    body = Extents([(FdRef(scratch_file(tmp_path, values.tobytes())), 0, values.nbytes)], FP16, dim)
    np.testing.assert_array_equal(np.frombuffer(body.tobytes(), np.float32).reshape(3, dim), values.astype(np.float32))


def test_sink_writes_and_sums(tmp_path):
    fd = scratch_file(tmp_path)
    sink = Sink(FdRef(fd), 100, 1000)
    data = np.random.default_rng(3).bytes(1200)
    assert sink.feed(data[:300]) == 300
    assert not sink.done
    assert sink.feed(data[300:]) == 700
    assert (sink.done, sink.error, sink.bad_row) == (True, 0, -1)
    assert (sink.received, sink.written, sink.nbytes) == (1000, 1000, 1000)
    assert os.pread(fd, 5000, 0) == bytes(100) + data[:1000]
    assert sink.feed(b"more") == 0
    whole, again = Sink(FdRef(os.dup(fd)), 0, 1000), Sink(FdRef(os.dup(fd)), 0, 700, crc_seed=0)
    whole.feed(data[:1000])
    assert whole.crc == sink.crc != 0
    again.feed(data[:700])
    rest = Sink(FdRef(os.dup(fd)), 0, 300, crc_seed=again.crc)
    rest.feed(data[700:1000])
    assert rest.crc == sink.crc


def test_sink_without_a_file_drains():
    sink = Sink(None, 0, 10)
    assert sink.feed(b"x" * 30) == 10
    assert (sink.done, sink.written, sink.error) == (True, 0, 0)


def test_sink_of_nothing_is_done():
    assert Sink(None, 0, 0).done


@pytest.mark.parametrize("step", [1, 7, 96, 1000, 10**6])
def test_sink_converts_rows_however_they_arrive(tmp_path, step):
    dim, rows = 24, 50
    values = np.random.default_rng(4).standard_normal((rows, dim)).astype(np.float32)
    fd = scratch_file(tmp_path)
    sink = Sink(FdRef(fd), 0, values.nbytes, convert=stream.CONV_F32_F16, dim=dim)
    data = values.tobytes()
    for i in range(0, len(data), step):
        assert sink.feed(data[i : i + step]) == len(data[i : i + step])
    assert sink.done
    assert sink.written == values.nbytes // 2
    assert os.pread(fd, len(data), 0) == values.astype(np.float16).tobytes()


def test_sink_and_extents_agree_on_int8(tmp_path):
    dim, rows = 70, 400
    values = np.random.default_rng(5).standard_normal((rows, dim)).astype(np.float32)
    fd = scratch_file(tmp_path)
    sink = Sink(FdRef(fd), 0, values.nbytes, convert=stream.CONV_F32_INT8, dim=dim)
    sink.feed(values)
    assert sink.written == rows * (dim + 4 * 3)
    body = Extents([(FdRef(os.dup(fd)), 0, sink.written)], INT8, dim)
    back = np.frombuffer(body.tobytes(), np.float32).reshape(rows, dim)
    step = (values.max(1, keepdims=True) - values.min(1, keepdims=True)) / 255
    assert np.all(np.abs(back - values) <= step * 0.51 + 0.01)


def test_c9_sink_names_the_refused_row_and_takes_the_rest(tmp_path):
    dim, rows = 16, 40_000
    values = np.ones((rows, dim), np.float32)
    values[33_333, 5] = 1e6
    sink = Sink(FdRef(scratch_file(tmp_path)), 0, values.nbytes, convert=stream.CONV_F32_F16, dim=dim)
    data = values.tobytes()
    for i in range(0, len(data), 99_999):
        sink.feed(data[i : i + 99_999])
    assert sink.done
    assert sink.bad_row == 33_333


def test_sink_reports_a_failed_write_and_takes_the_rest(tmp_path):
    fd = os.open(scratch_path := tmp_path / "ro", os.O_RDWR | os.O_CREAT, 0o600)
    os.close(fd)
    sink = Sink(FdRef(os.open(scratch_path, os.O_RDONLY)), 0, 2000)
    assert sink.feed(bytes(1500)) == 1500
    assert sink.feed(bytes(1500)) == 500
    assert sink.done
    assert sink.error == errno.EBADF
    assert sink.written == 0


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE is per process: only tried on Linux")
def test_sink_reports_a_full_disk(tmp_path):
    # The kernel stops a write at RLIMIT_FSIZE half way, then refuses it: what a full disk does.
    import signal

    fd = scratch_file(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        sink = Sink(FdRef(fd), 0, 300_000)
        sink.feed(bytes(300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert sink.error == errno.EFBIG
    assert sink.written == 100_000
    assert sink.done


def test_sink_refuses_bad_arguments():
    for kwargs in ({"convert": 77 << 24 | FP16, "dim": 4}, {"convert": FP32 << 24 | 77, "dim": 4}):
        with pytest.raises(ValueError, match="no conversion"):
            Sink(None, 0, 16, **kwargs)
    with pytest.raises(ValueError, match="whole rows"):
        Sink(None, 0, 15, convert=stream.CONV_F32_F16, dim=4)
    with pytest.raises(ValueError, match="values per row"):
        Sink(None, 0, 16, convert=stream.CONV_F32_F16, dim=0)
    with pytest.raises(ValueError, match="out of range"):
        Sink(None, -1, 16)
    with pytest.raises(TypeError):
        Sink("file", 0, 16)


def test_sink_carries_attributes_of_its_opener():
    class Mine(Sink):
        pass

    sink = Mine(None, 0, 1)
    sink.refused = ValueError("no")
    assert sink.on_abort is None
    assert str(sink.refused) == "no"
    assert RAW == stream.CONV_RAW
