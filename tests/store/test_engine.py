"""The engine as a library: register, store, fetch, lookup, drop, reopen."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion._core import quant
from pion.errors import CommandError, MismatchError, OutOfMemoryError, StartupError, StorageError
from pion.limits import FORMATS
from pion.store.engine import Engine

from .model import BF16, F16, F32, INT8, words

DIM = 64


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path / "data", ticker=False) as made:
        yield made


def fill(engine: Engine, ns: bytes, rows: int = 16, layers: int = 2, fmt: int = F16, **options: object) -> bytes:
    """A complete declared prefix; every layer of both sides holds the same words, which are returned."""
    engine.register(ns, DIM, fmt, rows=rows, layers=layers, **options)  # type: ignore[arg-type]
    blob = words(rows, rows, DIM, fmt)
    word = {F32: "F32", F16: "F16", BF16: "BF16"}[fmt]
    for layer in range(layers):
        for side in (b"_pk", b"_pv"):
            engine.v_store(ns + side, layer, 0, rows, blob, word)
    return blob


def fetched(engine: Engine, sid: bytes, layer: int, end: int, **how: bool) -> bytes:
    body = engine.v_fetch_range(sid, layer, 0, end, **how)
    assert body is not None
    return body.tobytes()


# --- what a prefix is ----------------------------------------------------------------------------------------------


def test_arrays_go_in_and_come_out(engine: Engine) -> None:
    rng = np.random.default_rng(1)
    for fmt, dtype in ((F32, np.float32), (F16, np.float16)):
        engine.register(b"ns", DIM, fmt, rows=10, layers=3, replace=True)
        data = [rng.standard_normal((2, 10, DIM)).astype(dtype) for _ in range(3)]
        for layer, (k, v) in enumerate(data):
            engine.store(b"ns", layer, k, v)
        out = engine.fetch(b"ns")
        assert len(out) == 3
        for (k, v), (want_k, want_v) in zip(out, data, strict=True):
            assert k.dtype == v.dtype == dtype
            assert np.array_equal(k, want_k)
            assert np.array_equal(v, want_v)


def test_an_array_of_another_type_is_refused(engine: Engine) -> None:
    engine.register(b"ns", 4, F32)
    with pytest.raises(ValueError, match="float64"):
        engine.store(b"ns", 0, np.zeros((1, 4)), np.zeros((1, 4)))
    with pytest.raises(ValueError, match="both"):
        engine.store(b"ns", 0, np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32))


def test_an_undeclared_prefix_is_a_hit_at_once(engine: Engine) -> None:
    engine.register(b"ns", DIM, F16)
    assert engine.lookup(b"ns")
    assert engine.v_fetch_range(b"ns_pk", 0, 0, 4) is None
    assert engine.owner(b"ns") == 0
    assert engine.owner(b"other") == -1


def test_one_side_alone_is_a_miss(engine: Engine) -> None:
    engine.v_create(b"ns_pk", DIM, F16)
    assert not engine.lookup(b"ns")
    assert engine.why(b"ns").startswith("incomplete: the V side")
    engine.v_create(b"ns_pv", DIM, F16)
    assert engine.lookup(b"ns")
    assert engine.info()["vstore_sessions"] == 2


def test_a_declared_prefix_is_a_hit_when_whole(engine: Engine) -> None:
    engine.register(b"ns", DIM, F16, rows=8, layers=2)
    blob = words(1, 8, DIM, F16)
    row = len(blob) // 8
    places = [(side, layer) for side in (b"_pk", b"_pv") for layer in (0, 1)]
    for side, layer in places:
        engine.v_store(b"ns" + side, layer, 4, 4, blob[4 * row :], "F16")
    assert not engine.lookup(b"ns")  # the length is right, the first rows are missing
    for side, layer in places:
        assert not engine.lookup(b"ns")
        engine.v_store(b"ns" + side, layer, 0, 4, blob[: 4 * row], "F16")
    assert engine.lookup(b"ns")
    assert engine.why(b"ns").startswith("hit:")
    for side, layer in places:
        assert fetched(engine, b"ns" + side, layer, 8, native=True) == blob
    with pytest.raises(CommandError, match="declared"):
        engine.v_fetch_range(b"ns_pk", 0, 0, 9)
    with pytest.raises(CommandError, match="declared ROWS 8"):
        engine.v_store(b"ns_pk", 0, 5, 4, blob[: 4 * row], "F16")
    with pytest.raises(CommandError, match="declared LAYERS 2"):
        engine.v_store(b"ns_pk", 2, 0, 4, blob[: 4 * row], "F16")


def test_sessions_and_prefixes_are_the_same_thing(engine: Engine) -> None:
    fill(engine, b"ns")
    assert engine.v_info(b"ns_pv").rows == [16, 16]
    indexes = [engine.v_create(sid, DIM, F16) for sid in (b"ns_pk", b"ns_pv", b"other", b"_pk")]
    assert len(set(indexes)) == 4
    assert indexes == [engine.v_create(sid, 1, F32) for sid in (b"ns_pk", b"ns_pv", b"other", b"_pk")]
    assert engine.drop(b"ns", b"other", b"ns") == 1  # a raw session is no prefix
    assert engine.v_exists(b"other")
    for sid in (b"ns_pk", b"ns_pv"):
        with pytest.raises(CommandError, match=r"^ERR session not found$"):
            engine.v_fetch_range(sid, 0, 0, 1)


# --- identity ------------------------------------------------------------------------------------------------------


def test_another_digest_is_a_mismatch(engine: Engine) -> None:
    blob = fill(engine, b"ns", digest="AB01")
    assert engine.lookup(b"ns", digest="ab01")
    assert engine.lookup(b"ns")
    with pytest.raises(MismatchError, match=r"^MISMATCH .*ab01, not ff00"):
        engine.lookup(b"ns", digest="ff00")
    fill(engine, b"plain")
    with pytest.raises(MismatchError, match="none, not ff00"):
        engine.lookup(b"plain", digest="ff00")
    assert engine.ledger.hits == 2
    assert engine.ledger.misses == 0
    assert fetched(engine, b"ns_pk", 0, 16, native=True) == blob


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_dim": 32}, "kv_dim"),
        ({"fmt_code": F32}, "format"),
        ({"digest": "ff"}, "digest"),
        ({"rows": 17}, "rows"),
        ({"layers": 3}, "layers"),
        ({"heads": 4}, "heads"),
        ({"rope": 1e6}, "rope"),
    ],
)
def test_registering_something_else_names_what_differs(engine: Engine, change: dict[str, object], named: str) -> None:
    said: dict[str, object] = {
        "kv_dim": DIM, "fmt_code": F16, "rows": 16, "layers": 2, "digest": "ab", "heads": 8, "rope": 1e4,
    }  # fmt: skip
    blob = fill(engine, b"ns", digest="ab", heads=8, rope=1e4)
    with pytest.raises(MismatchError, match=rf"^MISMATCH .*{named} \("):
        engine.register(b"ns", **{**said, **change})  # type: ignore[arg-type]
    engine.register(b"ns", **said)  # type: ignore[arg-type]
    engine.register(b"ns", DIM, F16)  # says less, contradicts nothing
    assert engine.lookup(b"ns", digest="ab")
    assert fetched(engine, b"ns_pk", 1, 16, native=True) == blob
    engine.register(b"ns", **{**said, **change}, replace=True)  # type: ignore[arg-type]
    assert engine.v_fetch_range(b"ns_pk", 0, 0, 16) is None
    assert not engine.lookup(b"ns")


def test_replace_with_the_same_description_keeps_the_rows(engine: Engine) -> None:
    fill(engine, b"ns", digest="ab")
    engine.register(b"ns", DIM, F16, rows=16, layers=2, digest="ab", replace=True)
    assert engine.lookup(b"ns")


def test_a_description_may_follow_while_there_are_no_rows(engine: Engine, tmp_path: Path) -> None:
    engine.v_create(b"ns_pk", DIM, F16)
    engine.register(b"ns", DIM, F16, rows=4, layers=1, digest="ab", scope=b"s", parent=b"p", heads=8, head_dim=8)
    assert not engine.lookup(b"ns")
    engine.close()
    with Engine(tmp_path / "data", ticker=False) as again:
        assert again.list(scope=b"s") == (0, [b"ns"])
        with pytest.raises(MismatchError):
            again.register(b"ns", DIM, F16, digest="cd")


def test_rows_and_layers_belong_together(engine: Engine) -> None:
    with pytest.raises(CommandError, match="together"):
        engine.register(b"ns", DIM, F16, rows=4)


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("source", [F32, F16, BF16])
@pytest.mark.parametrize("target", [F32, F16, BF16, INT8])
def test_every_way_in(engine: Engine, source: int, target: int, streamed: bool) -> None:
    """Both doors store what the codec says; a large body goes through a sink."""
    rows, dim = 700, 96
    engine.v_create(b"s", dim, target)
    engine.v_create(b"first", dim, target)
    blob = words(3, rows, dim, source)
    word = {F32: "F32", F16: "F16", BF16: "BF16"}[source]
    for start in (0, rows):  # twice: behind another record, and with one behind it
        if streamed:
            sink = engine.v_store_open(b"s", 0, start, rows, len(blob))
            engine.v_store(b"s", 1, start, 1, words(4, 1, dim, source), word)
            for at in range(0, len(blob), 100_001):
                sink.feed(blob[at : at + 100_001])
            assert engine.v_store_heavy(sink, word) == (source != target and source != F32)
            engine.v_store_finish(sink, word)
        else:
            engine.v_store(b"s", 0, start, rows, blob, word)
    stored = bytes(quant.encode(source, target, blob, dim))
    assert fetched(engine, b"s", 0, 2 * rows, raw=True) == stored * 2
    assert fetched(engine, b"s", 0, rows) == bytes(quant.decode(target, stored, dim))
    native = fetched(engine, b"s", 0, rows, native=True)
    assert native == (stored if target == F16 else bytes(quant.decode(target, stored, dim)))
    engine.close()
    root = engine.root
    with Engine(root, ticker=False) as again:
        assert again.v_info(b"s").rows == [2 * rows, rows + 1 if streamed else 0][: 2 if streamed else 1]
        assert fetched(again, b"s", 0, 2 * rows, raw=True) == stored * 2
        assert again.info()["vstore_quarantined"] == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("target", "name"), [(F16, "fp16"), (INT8, "int8")])
@pytest.mark.parametrize("source", ["F32", "BF16"])
def test_c9_what_does_not_fit_is_refused_with_its_row(
    engine: Engine, source: str, target: int, name: str, streamed: bool
) -> None:
    values = np.zeros((50, DIM), np.float32)
    values[37, 5] = 1e5
    blob = values.tobytes() if source == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    engine.v_create(b"s", DIM, target)
    size = engine.info()["vstore_file_bytes"]
    if streamed:
        sink = engine.v_store_open(b"s", 0, 0, 50, len(blob))
        sink.feed(blob)
    with pytest.raises(CommandError, match=rf"row 37 .*{name}"):
        engine.v_store_finish(sink, source) if streamed else engine.v_store(b"s", 0, 0, 50, blob, source)
    assert engine.v_info(b"s").rows in ([], [0])
    assert engine.v_fetch_range(b"s", 0, 0, 50) is None
    assert engine.info()["vstore_file_bytes"] == size


def test_fetch_rules_of_undeclared_sessions(engine: Engine) -> None:
    engine.v_create(b"s", 2, F32)
    row = struct.pack("<2f", 1, 2)
    engine.v_store(b"s", 0, 3, 1, row)
    zero = bytes(8)
    assert fetched(engine, b"s", 0, 6) == zero * 3 + row + zero * 2
    assert engine.v_fetch_range(b"s", 0, 4, 6) is None
    assert engine.v_fetch_range(b"s", 7, 0, 1) is None
    assert engine.v_fetch_range(b"s", 200, 0, 1) is None
    ids = engine.v_fetch_ids(b"s", 0, [3, 9, 0, 3, -1])
    assert ids is not None
    assert ids.tobytes() == row + zero + zero + row + zero
    assert engine.v_fetch_ids(b"s", 0, [4, 9]) is None
    engine.v_store(b"s", 2, 0, 1, row)
    batch = engine.v_fetch_batch(b"s", 0, 1)
    assert [body and body.tobytes() for body in batch] == [zero, None, row]
    assert len(engine.v_fetch_batch(b"s", 0, 1, 2)) == 2
    assert len(engine.v_fetch_batch(b"s", 0, 1, 9)) == 3


def test_what_a_store_must_say(engine: Engine) -> None:
    engine.v_create(b"s", 2, F32)
    for place, text in [
        ((-1, 0, 1, bytes(8)), "ERR invalid layer_id/start_id/count"),
        ((0, -1, 1, bytes(8)), "ERR invalid layer_id/start_id/count"),
        ((0, 0, 0, b""), "ERR invalid layer_id/start_id/count"),
        ((80, 0, 1, bytes(8)), "ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS"),
        ((0, 199_999, 2, bytes(16)), "ERR V.STOREBATCH failed"),
        ((0, 0, 2, bytes(8)), "ERR V.STOREBATCH: blob size 8 != expected 16 (count=2 × per_layer_dim=2 × 4)"),
    ]:
        with pytest.raises(CommandError) as info:
            engine.v_store(b"s", *place)
        assert str(info.value) == text
    with pytest.raises(CommandError, match=r"^ERR session not found$"):
        engine.v_store(b"t", 0, 0, 1, bytes(8))


# --- the receipt ---------------------------------------------------------------------------------------------------


def test_ledger_books_hits_as_published(engine: Engine) -> None:
    ledger = engine.ledger
    engine.lookup(b"nothing")
    assert (ledger.hits, ledger.misses) == (0, 1)
    fill(engine, b"ns", rows=16, prefill_ms=7)
    engine.lookup(b"ns")
    assert (ledger.hits, ledger.hits_measured, ledger.tokens_served, ledger.prefill_us_saved) == (1, 1, 16, 7000)
    engine.lookup(b"ns", tokens=100)
    assert (ledger.hits_measured, ledger.tokens_served, ledger.prefill_us_saved) == (1, 116, 7000 + 100 * 555)
    engine.lookup(b"ns", tokens=1, prefill_ms=3)
    assert (ledger.hits_measured, ledger.prefill_us_measured) == (2, 10_000)
    engine.lookup(b"ns", prefill_ms=0)
    assert ledger.prefill_us_measured == 17_000
    engine.v_fetch_range(b"ns_pk", 0, 0, 16)
    engine.v_fetch_range(b"ns_pk", 0, 0, 16, native=True)
    assert ledger.bytes_served == 16 * DIM * 6
    assert engine.info()["vstore_total_fetches"] == 32
    ledger.reset()
    assert (ledger.hits, ledger.bytes_served, ledger.prefill_us_saved) == (0, 0, 0)


# --- state, blocks, names ------------------------------------------------------------------------------------------


def test_state_is_part_of_the_entry(engine: Engine, tmp_path: Path) -> None:
    engine.ssm_store(b"ns", 3, b"state")
    assert not engine.lookup(b"ns")
    assert engine.info()["vstore_sessions"] == 0
    engine.register(b"ns", DIM, F16)
    assert engine.lookup(b"ns")
    big = bytes(range(256)) * 4096
    sink = engine.ssm_store_open(b"ns", 70, len(big))
    sink.feed(big)
    engine.ssm_store_finish(sink)
    engine.ssm_store(b"ns", 4, b"")
    engine.ssm_store(b"ns", 3, b"later")
    engine.close()
    with Engine(tmp_path / "data", ticker=False) as again:
        bodies = [again.ssm_fetch(b"ns", layer) for layer in (3, 4, 70, 5)]
        assert [body if body is None else body.tobytes() for body in bodies] == [b"later", b"", big, None]
        again.ssm_drop(b"ns", 3)
        assert again.ssm_fetch(b"ns", 3) is None
        assert again.compact(b"ns")
        body = again.ssm_fetch(b"ns", 70)
        assert body is not None
        assert body.tobytes() == big
        assert again.drop(b"ns") == 1
        assert again.ssm_fetch(b"ns", 70) is None


def test_blocks_survive_and_answer_probes(engine: Engine, tmp_path: Path) -> None:
    hashes = np.arange(1000, dtype=np.uint64) * 7919
    engine.register(b"ns", DIM, F16, blocks=(16, hashes.tobytes()))
    engine.register(b"none", DIM, F16, blocks=(16, b""))
    assert engine.blocks(b"none") is None
    assert engine.membership(b"none", bytes(8)) is None
    engine.close()
    with Engine(tmp_path / "data", ticker=False) as again:
        assert again.blocks(b"ns") == struct.pack("<II", 16, 1000) + hashes.tobytes()
        probe = np.array([7919, 5, 0, 7919 * 999], np.uint64).tobytes()
        assert again.membership(b"ns", probe) == bytes([0b1101])
        again.register(b"ns", DIM, F16, blocks=(32, hashes[:1].tobytes()))
        assert again.membership(b"ns", probe) == bytes([0b0100])
        again.register(b"ns", DIM, F16)
        assert again.membership(b"ns", probe) == bytes([0b0100])
        again.drop(b"ns")
        assert again.membership(b"ns", probe) is None


def test_list_walks_every_name_once(engine: Engine) -> None:
    want = {f"p{i}".encode() for i in range(100)}
    for ns in sorted(want):
        engine.register(ns, 8, F16, scope=b"even" if int(ns[1:]) % 2 == 0 else None)
    engine.v_create(b"raw", 8, F16)
    engine.ssm_store(b"only-state", 0, b"x")
    seen: list[bytes] = []
    cursor = 0
    while True:
        cursor, names = engine.list(cursor=cursor, count=7)
        seen += names
        if not cursor:
            break
    assert len(seen) == len(set(seen))
    assert set(seen) == want
    assert set(engine.list(scope=b"even", count=1000)[1]) == {ns for ns in want if int(ns[1:]) % 2 == 0}
    assert sorted(engine.list(match=b"p[0-1]", count=1000)[1]) == [b"p0", b"p1"]
    assert engine.flush() == 101
    assert engine.list() == (0, [])


def test_why_remembers_the_end(engine: Engine) -> None:
    assert engine.why(b"ns").startswith("never")
    fill(engine, b"ns")
    engine.drop(b"ns")
    assert engine.why(b"ns").startswith("dropped")
    fill(engine, b"ns")
    assert engine.why(b"ns").startswith("hit")


# --- rollback ------------------------------------------------------------------------------------------------------


def test_restore_cuts_and_later_rows_replace(engine: Engine, tmp_path: Path) -> None:
    engine.v_create(b"s", 2, F32)
    engine.v_store(b"s", 0, 0, 4, words(1, 4, 2, F32))
    snap = engine.v_snapshot(b"s")
    engine.v_store(b"s", 0, 4, 4, words(2, 4, 2, F32))
    engine.v_store(b"s", 1, 0, 4, words(3, 4, 2, F32))
    engine.v_restore(b"s", snap)
    assert engine.v_info(b"s").rows == [4, 0]
    assert engine.v_fetch_range(b"s", 0, 4, 8) is None
    engine.v_store(b"s", 0, 4, 1, words(4, 1, 2, F32))
    want = words(1, 4, 2, F32) + words(4, 1, 2, F32)
    assert fetched(engine, b"s", 0, 5) == want
    assert engine.v_commit(b"s", snap) == 1
    assert engine.v_commit(b"s", snap) == 0
    with pytest.raises(CommandError, match="unknown snap_id"):
        engine.v_restore(b"s", snap)
    for _ in range(16):
        last = engine.v_snapshot(b"s")
    assert last == snap + 16
    with pytest.raises(CommandError, match=r"no free snapshot slot \(max 16 per session\)"):
        engine.v_snapshot(b"s")
    engine.close()
    with Engine(tmp_path / "data", ticker=False) as again:
        assert again.v_info(b"s").rows == [5, 0]
        assert fetched(again, b"s", 0, 5) == want


# --- caps ----------------------------------------------------------------------------------------------------------


def test_256_sessions_behave_as_published(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=8, ticker=False) as engine:
        for i in range(4):
            engine.register(b"p%d" % i, 8, F16)
        engine.v_fetch_range(b"p0_pv", 0, 0, 1)  # one side is enough to refresh both
        for i in range(4, 8):
            engine.register(b"p%d" % i, 8, F16)
        assert engine.info()["vstore_evictions"] == 8
        assert engine.info()["vstore_sessions"] == 8
        assert [engine.lookup(b"p%d" % i) for i in range(8)] == [False] * 4 + [True] * 4
        engine.v_create(b"raw", 8, F16)
        assert engine.info()["vstore_sessions"] == 7
        assert engine.why(b"p4").startswith("evicted")
    with pytest.raises(CommandError, match="no free V-store slots"), Engine(tmp_path / "e", max_sessions=1) as small:
        small.register(b"ns", 8, F16)


def test_lineage_leaves_go_first(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=6, ticker=False) as engine:
        engine.register(b"root", 8, F16)
        engine.register(b"other", 8, F16)
        engine.register(b"leaf", 8, F16, parent=b"root")
        engine.register(b"new1", 8, F16)
        assert not engine.lookup(b"other")
        engine.register(b"new2", 8, F16)
        assert [engine.lookup(ns) for ns in (b"root", b"leaf")] == [True, False]


def test_b11_bytes_are_capped_and_stay_capped_at_start(tmp_path: Path) -> None:
    cap = 2 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        for i in range(40):
            fill(engine, b"p%d" % i, rows=256, layers=2)
            assert engine.info()["vstore_file_bytes"] <= cap
        on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "d" / "kv" / "_").rglob("*.pion"))
        assert on_disk <= cap
        assert engine.lookup(b"p39")
        assert engine.why(b"p0").startswith("evicted")
    for name in ("README", "kv/_/strange.pion", "kv/_/00/notes.txt"):
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    with Engine(tmp_path / "d", max_bytes=cap // 4, ticker=False) as engine:
        assert engine.info()["vstore_file_bytes"] <= cap // 4
        assert engine.lookup(b"p39")
        for thread in engine._threads:
            thread.join()
        assert engine.info()["vstore_foreign_files"] == 2
        with pytest.raises(OutOfMemoryError, match=r"^OOM --max-bytes"):
            fill(engine, b"large", rows=4096, layers=1)
        assert not engine.lookup(b"large")
    assert (tmp_path / "d" / "kv/_/00/notes.txt").read_bytes() == b"x" * 1000


def test_what_is_being_written_is_not_evicted(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_bytes=1 << 20, ticker=False) as engine:
        engine.register(b"busy", DIM, F16)
        blob = words(1, 2048, DIM, F16)
        sink = engine.v_store_open(b"busy_pk", 0, 0, 2048, len(blob))
        for i in range(20):
            fill(engine, b"p%d" % i, rows=256, layers=1)
        sink.feed(blob)
        engine.v_store_finish(sink, "F16")
        assert fetched(engine, b"busy_pk", 0, 2048, native=True) == blob


def test_a_dropped_file_counts_while_a_reader_holds_it(engine: Engine) -> None:
    blob = fill(engine, b"ns", rows=512)
    body = engine.v_fetch_range(b"ns_pk", 0, 0, 512, native=True)
    before = engine.info()["vstore_file_bytes"]
    engine.drop(b"ns")
    fill(engine, b"ns", rows=4)
    assert engine.info()["vstore_file_bytes"] >= before
    assert body is not None
    assert body.tobytes() == blob  # one generation, whole
    del body
    assert engine.info()["vstore_file_bytes"] < before


def test_h6_the_default_cap_is_finite(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine, Engine(None, memory_only=True, ticker=False) as memory:
        assert 0 < engine.info()["vstore_max_bytes"] < 1 << 50
        assert 0 < memory.info()["vstore_max_bytes"] < 1 << 45


# --- opening -------------------------------------------------------------------------------------------------------


def test_one_engine_per_directory(engine: Engine, tmp_path: Path) -> None:
    import os

    with pytest.raises(StartupError, match=rf"in use by the process {os.getpid()}"):
        Engine(tmp_path / "data", ticker=False)
    engine.close()
    engine.close()
    Engine(tmp_path / "data", ticker=False).close()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="appendfsync"):
        Engine(tmp_path, appendfsync="sometimes")
    with pytest.raises(StartupError, match="path"):
        Engine(None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartupError, match="data directory"):
        Engine(tmp_path / "file")


def test_memory_only_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Engine(None, memory_only=True, ticker=False) as engine:
        blob = fill(engine, b"ns")
        for i in range(100):
            engine.v_store(b"ns_pk", 0, i % 16, 1, blob[: DIM * 2], "F16")
        assert engine.compact(b"ns")
        assert fetched(engine, b"ns_pv", 0, 16, native=True) == blob
        assert engine.info()["wal_enabled"] == 0
        with pytest.raises(CommandError, match="COMMIT: --no-wal"):
            engine.commit()
        engine.drop(b"ns")
        assert not engine.lookup(b"ns")
    assert list(tmp_path.iterdir()) == []


def test_lru_order_survives(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i in range(5):
            engine.register(b"p%d" % i, 8, F16)
        engine.lookup(b"p0")
    with Engine(tmp_path / "d", max_sessions=6, ticker=False) as engine:
        assert [engine.lookup(b"p%d" % i) for i in range(5)] == [True, False, False, True, True]


def test_save_copy_is_a_data_directory(engine: Engine, tmp_path: Path) -> None:
    blob = fill(engine, b"ns", digest="ab")
    engine.ssm_store(b"state", 0, b"s")
    engine.save("backup/monday")
    with pytest.raises(StorageError, match="there already"):
        engine.save("backup/monday")
    engine.v_store(b"ns_pk", 0, 0, 16, words(9, 16, DIM, F16), "F16")
    with Engine(tmp_path / "data/backup/monday", ticker=False) as copy:
        assert copy.lookup(b"ns", digest="ab")
        assert fetched(copy, b"ns_pk", 0, 16, native=True) == blob
        assert copy.ssm_fetch(b"state", 0) is not None


def test_save_and_commit_take_the_bytes_out_of_wal_bytes(engine: Engine) -> None:
    with pytest.raises(StorageError, match="no active sessions"):
        engine.save()
    fill(engine, b"ns")
    assert engine.info()["wal_bytes"] > 0
    engine.commit()
    assert engine.info()["wal_bytes"] == 0
    assert engine.info()["wal_appended"] > 0
    engine.save()
    assert engine.info()["wal_appended"] == 0


# --- many at once --------------------------------------------------------------------------------------------------


def test_writers_of_one_entry_do_not_lose_rows(engine: Engine) -> None:
    """Small and streamed stores, fetches, compactions and commits at the same time; every acknowledged row stays."""
    rows, layers = 400, 8
    engine.register(b"ns", DIM, F32)
    errors: list[BaseException] = []

    def write(layer: int) -> None:
        try:
            blob = words(layer, rows, DIM, F32)
            size = DIM * 4
            at = 0
            while at < rows:
                count = 1 + (at * 7 + layer) % 9
                count = min(count, rows - at)
                piece = blob[at * size : (at + count) * size]
                for sid in (b"ns_pk", b"ns_pv"):
                    if (at + layer) % 3 == 0:
                        sink = engine.v_store_open(sid, layer, at, count, len(piece))
                        sink.feed(piece)
                        engine.v_store_finish(sink, "F32")
                    else:
                        engine.v_store(sid, layer, at, count, piece)
                at += count
                body = engine.v_fetch_range(b"ns_pv", layer, 0, at)
                assert body is not None
                assert body.tobytes() == blob[: at * size]
        except BaseException as error:
            errors.append(error)

    def upkeep() -> None:
        try:
            while any(thread.is_alive() for thread in threads):
                engine.compact(b"ns")
                engine.commit()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(layer,)) for layer in range(layers)]
    for thread in threads:
        thread.start()
    helper = threading.Thread(target=upkeep)
    helper.start()
    for thread in [*threads, helper]:
        thread.join()
    assert not errors
    root = engine.root
    engine.close()
    with Engine(root, ticker=False) as again:
        for layer in range(layers):
            assert fetched(again, b"ns_pk", layer, rows) == words(layer, rows, DIM, F32)


def test_drop_while_others_store_and_fetch(engine: Engine) -> None:
    """Everybody gets whole rows of one generation or a clear error."""
    stop = threading.Event()
    errors: list[BaseException] = []
    blobs = {words(seed, 32, DIM, F16) for seed in range(4)}

    def work(seed: int) -> None:
        blob = words(seed, 32, DIM, F16)
        try:
            while not stop.is_set():
                try:
                    engine.register(b"ns", DIM, F16, rows=32, layers=1)
                    sink = engine.v_store_open(b"ns_pk", 0, 0, 32, len(blob))
                    sink.feed(blob)
                    engine.v_store_finish(sink, "F16")
                    body = engine.v_fetch_range(b"ns_pk", 0, 0, 32, native=True)
                    assert body is None or body.tobytes() in blobs
                except CommandError as error:
                    if not str(error).startswith("ERR session not found"):
                        raise
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        engine.drop(b"ns")
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


assert FORMATS["bf16"] == BF16
