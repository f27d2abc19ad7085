"""Record framing: checksum vectors, the readable twin, damage of every kind, scans of real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion._core import framing
from pion.ref import framing as ref

SEED = framing.seed_of(0x0123456789ABCDEF)
OTHER = framing.seed_of(0x0123456789ABCDEE)

fields = st.fixed_dictionaries(
    {
        "kind": st.integers(0, 255),
        "state": st.integers(0, 2),
        "flags": st.integers(0, 255),
        "payload_len": st.integers(0, 1 << 48),
        "payload_crc": st.integers(0, 2**32 - 1),
        "layer": st.integers(0, 2**16 - 1),
        "side": st.integers(0, 255),
        "fmt": st.integers(0, 255),
        "start": st.integers(0, 2**32 - 1),
        "count": st.integers(0, 2**32 - 1),
        "dim": st.integers(0, 2**32 - 1),
        "aux": st.integers(0, 2**32 - 1),
        "token": st.integers(0, 2**64 - 1),
        "attrs": st.binary(max_size=200),
    }
)


def reason_of(data: bytes, seed: int = SEED) -> str:
    with pytest.raises(framing.FramingError) as caught:
        framing.unpack_header(data, seed)
    return caught.value.reason


@pytest.mark.parametrize("crc", [framing.crc32c, framing.crc32c_portable, ref.crc32c])
def test_crc32c_vectors_of_rfc_3720(crc: object) -> None:
    assert callable(crc)
    assert crc(b"123456789") == 0xE3069283
    assert crc(bytes(32)) == 0x8A9136AA
    assert crc(b"\xff" * 32) == 0x62A8AB43
    assert crc(bytes(range(32))) == 0x46DD794E
    assert crc(bytes(range(31, -1, -1))) == 0x113FDB5C


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 767, 768, 769, 4095, 4096, 12287, 12288, 12289, 100_003])
def test_crc32c_hardware_equals_tables_at_every_stream_boundary(size: int) -> None:
    data = os.urandom(size + 3)
    for shift in range(3):  # unaligned starts
        view = memoryview(data)[shift : shift + size]
        assert framing.crc32c(view, 77) == framing.crc32c_portable(view, 77)


@given(st.binary(max_size=3000), st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_crc32c_continues_and_combines(a: bytes, b: bytes, seed: int) -> None:
    whole = framing.crc32c(a + b, seed)
    assert framing.crc32c(b, framing.crc32c(a, seed)) == whole
    assert framing.crc32c_combine(framing.crc32c(a, seed), framing.crc32c(b), len(b)) == whole


@given(fields, st.integers(0, 1000), st.sampled_from([64, 4096, 16384]))
def test_pack_equals_the_twin_and_unpacks(values: dict[str, int | bytes], block: int, align: int) -> None:
    offset = block * 64
    packed = framing.pack_header(seed=SEED, offset=offset, align=align, **values)  # type: ignore[arg-type]
    twin = ref.Header(**values)  # type: ignore[arg-type]
    assert packed == ref.pack_header(twin, SEED, offset=offset, align=align)
    assert (offset + len(packed)) % align == 0
    head = framing.unpack_header(packed + b"payload and more", SEED, offset)
    for name, value in values.items():
        assert getattr(head, name) == value
    assert head.header_len == len(packed)
    assert head.payload_offset == offset + len(packed)
    assert head.total_len == twin.total_len
    assert ref.unpack_header(packed, SEED) == twin


@given(st.binary(max_size=150))
def test_byte_by_byte_needs_more_until_the_last_byte(attrs: bytes) -> None:
    packed = framing.pack_header(kind=3, seed=SEED, attrs=attrs)
    for size in range(len(packed)):
        assert reason_of(packed[:size]) == "short"
        with pytest.raises(ref.FramingError, match="short"):
            ref.unpack_header(packed[:size], SEED)
    assert framing.unpack_header(packed, SEED).attrs == attrs


def test_a_flipped_bit_anywhere_is_detected() -> None:
    packed = framing.pack_header(kind=3, seed=SEED, layer=7, count=512, payload_len=4096, attrs=b"0123456789")
    for bit in range(len(packed) * 8):
        broken = bytearray(packed)
        broken[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(framing.FramingError) as caught:
            framing.unpack_header(broken, SEED)
        with pytest.raises(ref.FramingError, match=caught.value.reason):
            ref.unpack_header(bytes(broken), SEED)


def test_another_generation_never_validates() -> None:
    assert reason_of(framing.pack_header(kind=3, seed=SEED), OTHER) == "checksum"


def test_reasons() -> None:
    assert reason_of(b"") == "short"
    assert reason_of(bytes(64)) == "zeros"
    assert reason_of(b"x" * 64) == "magic"
    newer = bytearray(framing.pack_header(kind=3, seed=SEED))
    newer[4] = 2
    newer[60:64] = framing.crc32c(newer[:60], SEED).to_bytes(4, "little")
    assert reason_of(bytes(newer)) == "version"
    with pytest.raises(ref.FramingError, match="version"):
        ref.unpack_header(bytes(newer), SEED)


@given(st.binary(max_size=400))
def test_any_garbage_is_refused_with_a_reason_the_twin_shares(data: bytes) -> None:
    for prefix in (b"", b"PION\1"):
        with pytest.raises(framing.FramingError) as caught:
            framing.unpack_header(prefix + data, SEED)
        with pytest.raises(ref.FramingError) as twin:
            ref.unpack_header(prefix + data, SEED)
        assert caught.value.reason == twin.value.reason


@pytest.mark.parametrize(
    "wrong",
    [{"offset": 1}, {"align": 0}, {"align": 100}, {"state": 3}, {"payload_len": 1 << 49}, {"attrs": bytes(2 << 20)}],
)
def test_pack_refuses_what_a_reader_would(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        framing.pack_header(kind=3, seed=SEED, **wrong)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 65535), st.binary(max_size=60)), max_size=5))
def test_attributes_round_trip_and_refuse_a_cut(pairs: list[tuple[int, bytes]]) -> None:
    packed = framing.pack_attrs(pairs)
    assert framing.unpack_attrs(packed) == pairs
    if packed:
        with pytest.raises(framing.FramingError):
            framing.unpack_attrs(packed[:-1])


def test_attribute_limits() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        framing.pack_attrs([(70000, b"")])
    with pytest.raises(ValueError, match="16 bits"):
        framing.pack_attrs([(1, bytes(65536))])


def record(offset: int, payload: bytes, *, kind: int = 5, state: int = framing.VALID, align: int = 64) -> bytes:
    head = framing.pack_header(
        kind=kind, seed=SEED, state=state, offset=offset, align=align, payload_len=len(payload),
        payload_crc=framing.crc32c(payload, SEED), attrs=b"n" * (len(payload) % 5),
    )  # fmt: skip
    return head + payload.ljust(framing.align_up(len(payload)), b"\0")


def write_file(path: Path, payloads: list[tuple[bytes, int]], *, align: int = 64) -> tuple[bytes, list[int]]:
    data = framing.pack_file_header(b"TEST", version=1, generation=0x0123456789ABCDEF, attrs=b"hello")
    starts = []
    for payload, state in payloads:
        starts.append(len(data))
        data += record(len(data), payload, state=state, align=align)
    path.write_bytes(data)
    return data, starts


def scan(path: Path) -> tuple[list[framing.Header], framing.Scanner]:
    with path.open("rb") as file:
        head = framing.read_file_header(file.fileno(), type=b"TEST")
        scanner = framing.Scanner(file.fileno(), head.size, head.seed)
        return list(scanner), scanner


@given(payloads=st.lists(st.tuples(st.binary(max_size=9000), st.integers(0, 2)), max_size=6))
def test_scan_finds_every_record_with_its_state(payloads: list[tuple[bytes, int]], tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("scan") / "file"
    data, starts = write_file(path, payloads, align=4096)
    found, scanner = scan(path)
    assert [(h.offset, h.state, h.payload_len) for h in found] == [
        (start, state, len(payload)) for start, (payload, state) in zip(starts, payloads, strict=True)
    ]
    assert scanner.reason == "end"
    assert scanner.offset == len(data)
    first = framing.unpack_file_header(data).size
    twin = list(ref.scan(data, first, SEED))
    assert [offset for offset, _ in twin[:-1]] == starts
    assert twin[-1] == (len(data), "end")
    with path.open("rb") as file:
        for head, (payload, _) in zip(found, payloads, strict=True):
            assert framing.crc_file(file.fileno(), head.payload_offset, len(payload), SEED) == head.payload_crc


@pytest.mark.parametrize(
    ("tail", "reason"),
    [(os.urandom(595), "magic"), (bytes(4096), "zeros"), (b"PION", "short"), (record(0, b"x" * 900)[:-200], "torn")],
)
def test_b1_scan_stops_at_a_bad_tail_and_says_where(tail: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    data, starts = write_file(path, [(b"one", 1), (b"two" * 500, 1)])
    path.write_bytes(data + tail)
    found, scanner = scan(path)
    assert [h.offset for h in found] == starts
    assert (scanner.reason, scanner.offset) == (reason, len(data))
    with path.open("rb") as file:
        assert framing.resync(file.fileno(), scanner.offset, SEED) == -1


def test_b1_damage_in_the_middle_is_told_from_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data, starts = write_file(path, [(b"one" * 100, 1), (b"two" * 100, 1), (b"three" * 100, 1)])
    broken = bytearray(data)
    broken[starts[1] + 30] ^= 4
    path.write_bytes(broken)
    found, scanner = scan(path)
    assert [h.offset for h in found] == starts[:1]
    assert (scanner.reason, scanner.offset) == ("checksum", starts[1])
    with path.open("rb") as file:
        assert framing.resync(file.fileno(), scanner.offset + 1, SEED) == starts[2]


@given(cut=st.integers(0, 2000))
def test_every_cut_keeps_the_whole_records_before_it(cut: int, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("cut") / "file"
    payloads = [(bytes([i]) * 200, 1) for i in range(5)]
    data, starts = write_file(path, payloads)
    first = starts[0]
    cut = min(first + cut, len(data))
    path.write_bytes(data[:cut])
    found, scanner = scan(path)
    # The padding behind a payload may be missing: the record is whole without it.
    expected = [
        s for s, (p, _) in zip(starts, payloads, strict=True) if s + 64 + (64 if len(p) % 5 else 0) + 200 <= cut
    ]
    assert [h.offset for h in found] == expected
    assert scanner.reason in ("end", "short", "torn")


def test_file_header_knows_its_type_and_version(tmp_path: Path) -> None:
    data = framing.pack_file_header(b"ABCD", version=7, generation=9, attrs=b"x" * 9000)
    path = tmp_path / "file"
    path.write_bytes(data + b"behind")
    with path.open("rb") as file:
        head = framing.read_file_header(file.fileno())
        assert (head.type, head.version, head.generation, head.size) == (b"ABCD", 7, 9, len(data))
        assert head.attrs == b"x" * 9000
        with pytest.raises(framing.FramingError, match="magic"):
            framing.read_file_header(file.fileno(), type=b"EFGH")
    with pytest.raises(framing.FramingError, match="magic"):
        framing.unpack_file_header(framing.pack_header(kind=2, seed=0))


def test_read_errors_are_oserrors(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data, _ = write_file(path, [(b"payload", 1)])
    with path.open("rb") as file:
        scanner = framing.Scanner(file.fileno(), 128, SEED, end=len(data) + 640)
        path.write_bytes(data[:100])
        with pytest.raises(OSError):
            list(scanner)
        with pytest.raises(OSError):
            framing.crc_file(file.fileno(), 0, 101, 0)
    with pytest.raises(OSError):
        framing.Scanner(-1, 0, SEED)


@given(
    st.integers(0, 255), st.integers(0, 16), st.binary(max_size=40), st.binary(max_size=300), st.integers(0, 2**64 - 1)
)
def test_log_record_equals_the_twin(kind: int, db: int, key: bytes, value: bytes, expire: int) -> None:
    packed = framing.pack_log(kind, db, key, value, expire, SEED)
    assert packed == ref.pack_log(kind, db, key, value, expire, SEED)
    got = framing.unpack_log(packed + b"more", SEED)
    assert (got.kind, got.db, got.key, got.value, got.expire) == (kind, db, key, value, expire)
    assert got.total == len(packed)
    assert ref.unpack_log(packed, SEED) == (kind, db, key, value, expire, len(packed))
    for size in range(len(packed)):
        with pytest.raises(framing.FramingError, match="short"):
            framing.unpack_log(packed[:size], SEED)


def test_log_record_flipped_bits_and_other_seed() -> None:
    packed = framing.pack_log(1, 0, b"key", b"some value", 12, SEED)
    for bit in range(len(packed) * 8):
        broken = bytearray(packed)
        broken[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(framing.FramingError) as caught:
            framing.unpack_log(bytes(broken), SEED)
        with pytest.raises(ref.FramingError, match=caught.value.reason):
            ref.unpack_log(bytes(broken), SEED)
    with pytest.raises(framing.FramingError, match="checksum"):
        framing.unpack_log(packed, OTHER)
    with pytest.raises(framing.FramingError, match="zeros"):
        framing.unpack_log(bytes(40), SEED)
