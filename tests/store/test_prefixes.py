"""Prefixes: when they are a hit, what they are compared with, what belongs to them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pion._core import stream
from pion.errors import CommandError, MismatchError
from pion.store import startup
from pion.store.engine import Engine

from .model import F16, F32, words
from .support import DIM, fetched, fill

# --- what a prefix is ------------------------------------------------------------------------------------------------


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


# --- identity --------------------------------------------------------------------------------------------------------


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


# --- state, blocks, names --------------------------------------------------------------------------------------------


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
    assert engine.why(b"ns") == "dropped by KV.PREFIX.DROP"
    engine.register(b"ns", 8, F16)
    engine.drop(b"ns")
    assert engine.why(b"ns") == "dropped by KV.PREFIX.DROP"  # nothing was declared
    engine.register(b"ns", 8, F16, rows=3, layers=4, states=2)
    for layer, sides in enumerate((b"kv", b"kv", b"k")):
        for side in sides:
            engine.v_store(b"ns_p%c" % side, layer, 0, 3, bytes(3 * 16), "F16")
    engine.ssm_store(b"ns", 1, b"state")
    engine.drop(b"ns")
    wanted = "dropped by KV.PREFIX.DROP before it was complete: 2 of 4 layers and 1 of 2 states were stored"
    assert engine.why(b"ns") == wanted
    fill(engine, b"ns")
    assert engine.why(b"ns").startswith("hit")


# --- the receipt -----------------------------------------------------------------------------------------------------


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


def test_h5_dropping_one_model_leaves_the_others(engine: Engine) -> None:
    kept = {b"b|%d" % i: fill(engine, b"b|%d" % i, rows=i + 1, scope=b"b") for i in range(10)}
    for i in range(10):
        fill(engine, b"a|%d" % i, scope=b"a")
    assert engine.drop(*engine.list(scope=b"a", count=100)[1]) == 10
    assert engine.list(scope=b"a") == (0, [])
    for ns, blob in kept.items():
        assert engine.lookup(ns)
        assert fetched(engine, ns + b"_pk", 1, int(ns[2:]) + 1, native=True) == blob


def test_what_is_found_after_a_flush_stays_dropped(tmp_path: Path) -> None:
    """Not by a listing that began before it: the file of a REGISTER that was killed before the index was told, say."""
    with Engine(tmp_path / "data", ticker=False) as engine:
        fill(engine, b"known")
        fill(engine, b"unknown")
        engine.commit()
        path = tmp_path / "data" / engine._store.entries[b"punknown"].path
        kept = path.read_bytes()
        engine.drop(b"unknown")
        stream.drain()
        for thread in engine._threads:
            thread.join()
        path.write_bytes(kept)
        store = engine._store
        before = store.flushes
        engine.flush()
        assert store.flushes == before + 1
        relative = str(path.relative_to(tmp_path / "data"))
        assert startup._adopt(store, engine._files, relative, before) is None  # type: ignore[arg-type]
        assert store.entries == {}
        assert not path.exists()
