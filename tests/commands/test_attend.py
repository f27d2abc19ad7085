"""ATTEND.PREFIX.* on a real server: numbers against the reference, layouts, options."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion.ref import attention as ref
from tests.support import attend
from tests.support.attention import cosine, normal
from tests.support.process import Process
from tests.support.raw import Raw, ReplyError

BACKENDS = ("cpu", "mlx")


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[Process]:
    if request.param == "mlx":
        pytest.importorskip("mlx.core")
    with Process(Path(), "--memory-only", "--attention", request.param) as process:
        yield process


@pytest.fixture
def conn(server: Process) -> Iterator[Raw]:
    with Raw(server.port) as made:
        yield made


def wide(q: Any) -> Any:
    return q.astype(np.float64)


@pytest.mark.parametrize("dim", [8, 64, 72, 128, 512])
@pytest.mark.parametrize("rows", [1, 4])
def test_store_and_query(conn: Raw, dim: int, rows: int) -> None:
    k, v, q = normal(1, 3, 70, dim), normal(2, 3, 70, dim), normal(3, 3, rows, dim)
    assert attend.store(conn, "a", 5, k, v) == "OK"
    assert conn.call("ATTEND.PREFIX.LOOKUP", "a", 5) == "HIT"
    assert conn.call("ATTEND.PREFIX.LOOKUP", "a", 6) == "MISS"
    want = ref.attend(wide(q), k, v)
    got = attend.query(conn, "a", 5, q)
    out = got if rows == 1 else got[0]
    assert cosine(out, want[0]) >= 0.9999
    assert np.abs(out - want[0]).max() <= 2e-6
    again, lse = attend.query(conn, "a", 5, q, "-1", "WITHLSE")
    assert np.array_equal(out, again)
    assert np.abs(lse - want[1]).max() <= 2e-6
    conn.ok("ATTEND.PREFIX.DROP", "a")


def test_halves_merge_to_the_whole(conn: Raw) -> None:
    """The client's rule: two sessions that hold half of a prefix each."""
    k, v, q = normal(1, 2, 100, 32), normal(2, 2, 100, 32), normal(3, 2, 5, 32)
    parts = []
    for sid, part in (("h1", slice(0, 41)), ("h2", slice(41, 100))):
        attend.store(conn, sid, 0, np.ascontiguousarray(k[:, part]), np.ascontiguousarray(v[:, part]))
        parts.append(attend.query(conn, sid, 0, q))
    want = ref.attend(wide(q), k, v)
    out, lse = ref.merge(parts)
    assert np.abs(out - want[0]).max() <= 1e-6
    assert np.abs(lse - want[1]).max() <= 2e-6
    conn.ok("ATTEND.PREFIX.DROP", "h1", "h2")


def test_windows(conn: Raw) -> None:
    k, v, q = normal(1, 2, 300, 64), normal(2, 2, 300, 64), normal(3, 2, 1, 64)
    attend.store(conn, "w", 0, k, v)
    whole = attend.query(conn, "w", 0, q)
    for window, first in ((128, 172), (300, 0), (10**6, 0), (1, 299)):
        want = ref.attend(wide(q), k[:, first:], v[:, first:])[0]
        out = attend.query(conn, "w", 0, q, window)
        assert np.abs(out - want).max() / np.abs(want).max() <= 1e-2 / 1000
    for full in ("0", "-1", "-7"):
        assert np.array_equal(attend.query(conn, "w", 0, q, full), whole)
    conn.ok("ATTEND.PREFIX.DROP", "w")


def test_fused(conn: Raw) -> None:
    k, v = normal(1, 2, 90, 64), normal(2, 2, 90, 64)
    attend.store(conn, "f", 0, k, v)
    for rows, suffix in ((1, 0), (1, 6), (4, 4), (3, 9), (9, 3)):
        q, k_suf, v_suf = normal(3, 6, rows, 64), normal(4, 2, suffix, 64), normal(5, 2, suffix, 64)
        out = attend.fused(conn, "f", 0, q, k_suf, v_suf, [0, 0, 0, 1, 1, 1])
        limit = max(suffix - rows, 0) + np.arange(rows)
        seen = np.concatenate([np.ones((rows, 90), bool), np.arange(suffix) <= limit[:, None]], axis=1)
        both = [np.concatenate(pair, axis=1) for pair in ((k, k_suf), (v, v_suf))]
        want = ref.attend(wide(q), *both, seen=seen)[0]
        assert np.abs(out - want).max() <= 2e-6
        sinks = np.arange(6, dtype=np.float32)
        with_sinks = attend.fused(
            conn, "f", 0, q, k_suf, v_suf, [0, 0, 0, 1, 1, 1], "-1", "SINKS", sinks.tobytes()
        )  # fmt: skip
        total = ref.attend(wide(q), *both, seen=seen)
        assert np.abs(with_sinks - ref.with_sinks(total, wide(sinks))[0]).max() <= 2e-6
        assert np.abs(with_sinks - out).max() > 0.01
    conn.ok("ATTEND.PREFIX.DROP", "f")


def test_sparse(conn: Raw) -> None:
    k, v, q = normal(1, 4, 1024, 128), normal(2, 4, 1024, 128), normal(3, 4, 128)
    attend.store(conn, "s", 0, k, v)
    dense = attend.query(conn, "s", 0, q[:, None])[:, 0]
    nothing = np.zeros((4, 0, 128), np.float32)
    for selector in (0, 1):
        out = attend.auto(conn, "s", 0, q, 64, 16, 4, b"", -1, selector)
        assert np.abs(out - dense).max() < 1e-6
        assert np.array_equal(attend.auto_fused(conn, "s", 0, q, 64, 16, nothing, nothing, b"", -1, selector), out)
        some = attend.auto(conn, "s", 0, q, 64, 3, 4, [0, 1, 2, 3], -1, selector)
        fused = attend.auto_fused(conn, "s", 0, q, 64, 3, nothing, nothing, b"", -1, selector)
        assert np.abs(fused - some).max() < 1e-6
        blocks = ref.choose_blocks(ref.block_scores(q, k, 64, np.arange(4), ("block_mean", "quest")[selector]), 3)
        where = np.concatenate([np.arange(64 * b, 64 * b + 64) for b in blocks])
        want = ref.attend_picked(wide(q), k, v, [where] * 4)
        assert np.abs(some - want[0]).max() <= 2e-6
        masses = np.exp(want[1] - ref.attend(wide(q[:, None]), k, v)[1][:, 0])
        again, mass = attend.auto(conn, "s", 0, q, 64, 3, 4, b"", "WITHMASS", -1, selector)
        assert np.array_equal(again, some)
        assert np.abs(mass - masses).max() <= 2e-6
        indices = np.tile(where, (4, 1))
        out, mass = attend.sparse(conn, "s", 0, q, indices, np.full(4, len(where)), "WITHMASS")
        assert np.abs(out - want[0]).max() <= 2e-6
        assert np.abs(mass - masses).max() <= 2e-6
        extra = attend.auto_fused(conn, "s", 0, q, 64, 3, k[:, :5].copy(), v[:, :5].copy(), b"", -1, selector)
        both = [np.concatenate([side[:, where], side[:, :5]], axis=1) for side in (k, v)]
        assert np.abs(extra - ref.attend(wide(q[:, None]), *both)[0][:, 0]).max() <= 2e-6
    conn.ok("ATTEND.PREFIX.DROP", "s")


def test_nothing_picked_is_zero_not_nan(conn: Raw) -> None:
    k = normal(1, 2, 9, 8)
    attend.store(conn, "z", 0, k, k)
    out, mass = attend.sparse(conn, "z", 0, k[:, 0], np.array([[99], [3]]), np.array([1, 0]), "WITHMASS")
    assert (out == 0).all()
    assert (mass == 0).all()
    conn.ok("ATTEND.PREFIX.DROP", "z")


def test_a_store_replaces_and_a_drop_frees(conn: Raw) -> None:
    k, v = normal(1, 2, 50, 16), normal(2, 2, 9, 16)
    before = int(conn.fields("KV.PREFIX.INFO")["sdpa_warm_bytes"])
    attend.store(conn, "r", 0, k, k)
    attend.store(conn, "r", 0, v, v)
    attend.store(conn, "r", 1, v, v)
    figures = conn.fields("KV.PREFIX.INFO")
    assert int(figures["sdpa_warm_bytes"]) == before + 4 * v.nbytes
    assert conn.fields("ATTEND.PREFIX.INFO", "r") == {
        "layer_0": "HIT,heads=2,rows=9,head_dim=16", "layer_1": "HIT,heads=2,rows=9,head_dim=16"
    }  # fmt: skip
    want = ref.attend(wide(v[:, :1]), v, v)[0]
    assert np.abs(attend.query(conn, "r", 0, v[:, :1]) - want).max() <= 2e-6
    assert conn.ok("ATTEND.PREFIX.DROP", "r", "nobody") == 2
    assert conn.ok("ATTEND.PREFIX.DROP", "r") == 0
    assert int(conn.fields("KV.PREFIX.INFO")["sdpa_warm_bytes"]) == before
    assert conn.call("ATTEND.PREFIX.LOOKUP", "r", 0) == "MISS"
    assert str(conn.call("ATTEND.PREFIX.INFO", "r")) == "ERR session not found"
    failed = "ERR ATTEND.PREFIX.QUERY failed (session not found, or unsupported D)"
    assert str(attend.query(conn, "r", 0, v[:, :1])) == failed


def test_a_pipeline_is_answered_in_order(conn: Raw) -> None:
    big, small = normal(1, 4, 2000, 64), normal(2, 4, 3, 64)
    words: list[tuple[Any, ...]] = []
    for sid, k in (("p1", big), ("p2", small)):
        words.append(("ATTEND.PREFIX.STORE", sid, 0, *k.shape, k.tobytes(), k.tobytes()))
    for sid in ("p1", "p2", "p1"):
        words.append(("ATTEND.PREFIX.QUERY", sid, 0, 4, 64, 1, small[:, :1].tobytes()))
    words.append(("ECHO", "last"))
    got = conn.many(words)
    assert got[:2] == ["OK", "OK"]
    assert got[2] == got[4] != got[3]
    assert got[5] == b"last"
    conn.ok("ATTEND.PREFIX.DROP", "p1", "p2")


def test_resp3_and_options_in_any_place(server: Process, conn: Raw) -> None:
    conn.ok("HELLO", 3)
    k, q = normal(1, 2, 40, 16), normal(3, 2, 16)
    attend.store(conn, "o", 0, k, k)
    sinks = np.zeros(2, np.float32).tobytes()
    a = attend.auto(conn, "o", 0, q, 8, 1, 2, b"", "SINKS", sinks, -1, "withmass", 1)
    b = attend.auto(conn, "o", 0, q, 8, 1, 2, b"", -1, 1, "WITHMASS", "SINKS", sinks)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    conn.ok("ATTEND.PREFIX.DROP", "o")


def test_others_are_served_while_a_query_computes(conn: Raw, server: Process) -> None:
    """A query of a second does not hold up a PING."""
    k, q = normal(1, 8, 8000, 64), normal(3, 8, 512, 64)
    attend.store(conn, "slow", 0, k, k)
    done: list[float] = []

    def ask() -> None:
        with Raw(server.port, timeout=60) as other:
            start = time.perf_counter()
            attend.query(other, "slow", 0, q)
            done.append(time.perf_counter() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    pings = []
    while thread.is_alive():
        start = time.perf_counter()
        conn.ok("PING")
        pings.append(time.perf_counter() - start)
    thread.join()
    assert len(pings) > 20
    assert sorted(pings)[len(pings) // 2] < done[0] / 10
    conn.ok("ATTEND.PREFIX.DROP", "slow")


def test_errors_come_in_order(conn: Raw) -> None:
    """Every check of section 5, with what the later ones would refuse too."""
    k = normal(1, 2, 10, 8)
    attend.store(conn, "e", 0, k, k)
    q = k[:, 0].tobytes()
    kv8 = np.zeros((1, 1, 8), np.float32).tobytes()
    integer = "ERR value is not an integer or out of range"
    layer = "ERR invalid layer_id (must be >= 0)"
    miss = "session not found"
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("STORE", "e", 0, 2, 3, 8, b""), "ERR ATTEND.PREFIX.STORE requires: session_id layer_id H N D K_blob V_blob"),
        (("STORE", "e", "x", 0, 3, 8, b"", b""), integer),
        (("STORE", "e", -1, 2, 3, 8, b"", b""), layer),
        (("STORE", "e", 0, 0, 3, 8, b"", b""), "ERR invalid H/N/D (must be > 0)"),
        (("STORE", "e", 0, 1, 1, 8, kv8, b""), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
        (("STORE", "e", 0, 1, 2, 4, kv8, kv8),
         "ERR ATTEND.PREFIX.STORE failed (unsupported D? supported: multiples of 8 up to 512)"),
        (("LOOKUP", "e"), "ERR ATTEND.PREFIX.LOOKUP requires: session_id layer_id"),
        (("LOOKUP", "e", -1), layer),
        (("QUERY", "e", 0, 2, 8, 1),
         "ERR ATTEND.PREFIX.QUERY requires: session_id layer_id H D top_k Q_blob [fa_window]"),
        (("QUERY", "e", 0, 2, 8, 0, b"x"), "ERR invalid H/D/top_k (must be > 0)"),
        (("QUERY", "e", 0, 2, 8, 1, b""), "ERR Q blob size must be a positive multiple of H*D*4"),
        (("QUERY", "e", 0, 2, 8, 1, q[1:]), "ERR Q blob size must be a positive multiple of H*D*4"),
        (("QUERY", "e", 1, 2, 8, 1, q), f"ERR ATTEND.PREFIX.QUERY failed ({miss}, or unsupported D)"),
        (("QUERY", "e", 0, 1, 16, 1, q),
         f"ERR ATTEND.PREFIX.QUERY failed ({miss}, or unsupported D): layer 0 is held with 2 heads of 8 values"),
        (("QUERY", "e", 0, 2, 8, 1, q, "-1", "WITHMASS"),
         "ERR ATTEND.PREFIX.QUERY unknown option 'WITHMASS' (fa_window, SINKS, WITHLSE)"),
        (("QUERY", "e", 0, 2, 8, 1, q, "all"),
         "ERR ATTEND.PREFIX.QUERY unknown option 'all' (fa_window, SINKS, WITHLSE)"),
        (("QUERY", "e", 0, 2, 8, 1, q, "-1", "1"),
         "ERR ATTEND.PREFIX.QUERY unknown option '1' (fa_window, SINKS, WITHLSE)"),
        (("QUERY", "e", 0, 2, 8, 1, q, "+1"), integer),
        (("QUERY", "e", 0, 2, 8, 1, q, -1, "SINKS"), "ERR SINKS needs a blob of one fp32 logit for each query head"),
        (("QUERY", "e", 0, 2, 8, 1, q, "SINKS", b"xyz"), "ERR SINKS blob size must be H_q*4, or H_q*M*4"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 2, q, b"", b""),
         "ERR ATTEND.PREFIX.QUERY_FUSED requires: session_id layer_id H_q D S_suf H_kv Q K_suf V_suf head_map "
         "[fa_window]"),
        (("QUERY_FUSED", "e", 0, 2, 8, -1, 3, b"x", b"", b"", b""),
         "ERR invalid H_q/D/H_kv (must be > 0) or S_suf (>= 0)"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 0, b"x", b"", b"", b""),
         "ERR invalid H_q/D/H_kv (must be > 0) or S_suf (>= 0)"),
        (("QUERY_FUSED", "e", 0, 3, 8, 0, 2, b"x", b"", b"", b""), "ERR H_q must be a multiple of H_kv (GQA)"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 2, b"x", b"y", b"", b""),
         "ERR Q blob size must be a positive multiple of H_q*D*4"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 2, q, b"y", b"", b""),
         "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 2, q, b"", b"", b"\0"), "ERR head_map size mismatch (expected H_q bytes)"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 2, q, b"", b"", b"\0\2"), "ERR head_map values must be below H_kv (2)"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 2, q, b"", b"", b"\0\1", "w"),
         "ERR ATTEND.PREFIX.QUERY_FUSED unknown option 'w' (fa_window, SINKS)"),
        (("QUERY_FUSED", "e", 0, 2, 8, 0, 1, q, b"", b"", b"\0\0"),
         f"ERR ATTEND.PREFIX.QUERY_FUSED failed ({miss}, GQA mismatch, or unsupported D): layer 0 is held with 2 heads "
         "of 8 values"),
        (("QUERY_SPARSE", "e", 0, 2, 8, 1, q, b"y" * 8, b"\1\0\0\0" * 2, "WITHLSE"),
         "ERR ATTEND.PREFIX.QUERY_SPARSE unknown option 'WITHLSE' (fa_window, SINKS, WITHMASS)"),
        (("QUERY_SPARSE_AUTO", "e", 0, 2, 8, 4, 1, 2, q, b"", "-1", "0", "1"),
         "ERR ATTEND.PREFIX.QUERY_SPARSE_AUTO unknown option '1' (fa_window, selector, SINKS, WITHMASS)"),
        (("QUERY_SPARSE", "e", 0, 2, 8, 1, q, b""),
         "ERR ATTEND.PREFIX.QUERY_SPARSE requires: session_id layer_id H D K_sparse_max Q indices counts [fa_window]"),
        (("QUERY_SPARSE", "e", 0, 2, 8, 0, b"x", b"", b""), "ERR invalid H/D/K_sparse_max (must be > 0)"),
        (("QUERY_SPARSE", "e", 0, 2, 8, 1, b"x", b"y", b""), "ERR Q blob size must be H*D*4"),
        (("QUERY_SPARSE", "e", 0, 2, 8, 1, q, b"y", b""), "ERR indices blob size must be H*K_sparse_max*4"),
        (("QUERY_SPARSE", "e", 0, 2, 8, 1, q, b"y" * 8, b""), "ERR counts blob size must be H*4"),
        (("QUERY_SPARSE", "e", 7, 2, 8, 1, q, b"y" * 8, b"\1\0\0\0" * 2),
         f"ERR ATTEND.PREFIX.QUERY_SPARSE failed ({miss}, K_sparse_max=0, or unsupported D)"),
        (("QUERY_SPARSE_AUTO", "e", 0, 2, 8, 4, 1, 2, q),
         "ERR ATTEND.PREFIX.QUERY_SPARSE_AUTO requires: session_id layer_id H_q D B K_top H_kv Q head_map "
         "[fa_window]"),
        (("QUERY_SPARSE_AUTO", "e", 0, 3, 8, 0, 1, 2, b"x", b""), "ERR invalid H_q/D/B/K_top/H_kv (must be > 0)"),
        (("QUERY_SPARSE_AUTO", "e", 0, 3, 8, 4, 1, 2, b"x", b""), "ERR H_q must be a multiple of H_kv (GQA)"),
        (("QUERY_SPARSE_AUTO", "e", 0, 2, 8, 4, 1, 2, b"x", b"y"), "ERR Q blob size must be H_q*D*4"),
        (("QUERY_SPARSE_AUTO", "e", 0, 2, 8, 4, 1, 2, q, b"\0"),
         "ERR head_map size must be 0 (identity) or H_q bytes"),
        (("QUERY_SPARSE_AUTO", "e", 0, 2, 8, 4, 1, 2, q, b"\0\7"), "ERR head_map values must be below H_kv (2)"),
        (("QUERY_SPARSE_AUTO", "e", 7, 2, 8, 4, 1, 2, q, b""),
         f"ERR ATTEND.PREFIX.QUERY_SPARSE_AUTO failed ({miss}, B=0, K_top=0, or unsupported D)"),
        (("QUERY_SPARSE_AUTO_FUSED", "e", 0, 2, 8, 4, 1, 2, 0, q, b"", b""),
         "ERR ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED requires: sid layer H_q D B K_top H_kv S_suf Q K_suf V_suf "
         "head_map [fa_window]"),
        (("QUERY_SPARSE_AUTO_FUSED", "e", 0, 2, 8, 4, 1, 2, -1, b"x", b"", b"", b""), "ERR S_suf must be >= 0"),
        (("QUERY_SPARSE_AUTO_FUSED", "e", 0, 2, 8, 4, 1, 2, 1, b"x", b"", b"", b""),
         "ERR Q blob size must be H_q*D*4"),
        (("QUERY_SPARSE_AUTO_FUSED", "e", 0, 2, 8, 4, 1, 2, 1, q, b"", b"", b""),
         "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)"),
        (("QUERY_SPARSE_AUTO_FUSED", "e", 7, 2, 8, 4, 1, 2, 0, q, b"", b"", b""),
         f"ERR ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED failed ({miss}, invalid params, or unsupported D)"),
        (("DROP",), "ERR ATTEND.PREFIX.DROP requires: session_id [session_id ...]"),
    ]  # fmt: skip
    for words, text in cases:
        got = conn.call(f"ATTEND.PREFIX.{words[0]}", *words[1:])
        assert isinstance(got, ReplyError), words
        assert str(got) == text, words
    assert np.abs(attend.query(conn, "e", 0, k[:, :1]) - ref.attend(wide(k[:, :1]), k, k)[0]).max() <= 2e-6
    conn.ok("ATTEND.PREFIX.DROP", "e")


def test_without_an_engine(tmp_path: Path) -> None:
    both = {
        "attention engine not available (start with --metal-attention or --cuda-attention)":
            ("STORE", "QUERY", "QUERY_SPARSE_AUTO"),
        "Metal attention not available (start with --metal-attention)":
            ("LOOKUP", "QUERY_FUSED", "QUERY_SPARSE", "QUERY_SPARSE_AUTO_FUSED", "DROP", "INFO"),
    }  # fmt: skip
    with Process(tmp_path, "--attention", "off") as process, Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "ns", 16, "fp16")
        for text, names in both.items():
            for name in names:
                assert str(conn.call(f"ATTEND.PREFIX.{name}", "s", 0)) == f"ERR {text}"
        text = "ERR Metal attention not available (start with --metal-attention)"
        assert str(conn.call("KV.PREFIX.WARM", "ns", 2, 8)) == text
        assert conn.fields("INFO", "attention")["sdpa_backend"] == "off"


def test_kv_prefix_info_is_numbers(tmp_path: Path) -> None:
    """Its readers take every line for one, before and after the first use."""
    with Process(tmp_path) as process, Raw(process.port) as conn:
        for _ in range(2):
            assert {name for name, value in conn.fields("KV.PREFIX.INFO").items() if not value.isdecimal()} == set()
            zeros = bytes(4 * 8)
            conn.ok("ATTEND.PREFIX.STORE", "s", 0, 1, 1, 8, zeros, zeros)
        assert conn.fields("KV.PREFIX.INFO")["sdpa_warm"] == "1"
