"""Warm, cold and missing layers; KV.PREFIX.WARM; --attend-autowarm: section 5.8."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import Client
from pion.errors import CommandError
from pion.ref import attention as ref
from tests.support import attend
from tests.support.attention import cosine, normal
from tests.support.process import Process
from tests.support.raw import Raw, frame

COLDMISS = "COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)"


def counters(conn: Raw) -> tuple[int, ...]:
    """warm, cold, demotions, rehydrates."""
    figures = conn.fields("KV.PREFIX.INFO")
    return tuple(int(figures[f"sdpa_{name}"]) for name in ("warm", "cold", "demotions", "rehydrates"))


def test_257_stores_are_256_warm_and_one_cold(tmp_path: Path) -> None:
    k = normal(1, 2, 6, 16)
    with Process(tmp_path) as process, Raw(process.port) as conn:
        kept = attend.prefix(conn, "s0", 1, 6, 2, 16)
        for number in range(257):
            sides = kept[0] if number == 0 else (k, k)
            assert attend.store(conn, f"s{number}_attn", 0, *sides) == "OK"
        assert counters(conn) == (256, 1, 1, 0)
        states = [conn.call("ATTEND.PREFIX.LOOKUP", f"s{number}_attn", 0) for number in range(258)]
        assert states == ["COLD", *["HIT"] * 256, "MISS"]

        q = normal(3, 2, 1, 16)
        assert str(attend.query(conn, "s0_attn", 0, q)) == COLDMISS
        assert conn.ok("KV.PREFIX.WARM", "s0", 2, 16, "s0_attn") == "1"
        out = attend.query(conn, "s0_attn", 0, q)
        assert np.abs(out - ref.attend(q.astype(np.float64), *kept[0])[0]).max() <= 2e-6
        assert counters(conn) == (256, 1, 2, 1)
        assert conn.call("ATTEND.PREFIX.LOOKUP", "s1_attn", 0) == "COLD"  # it went for the warmed one

        process.restart()
    with Process(tmp_path) as process, Raw(process.port) as conn:
        assert counters(conn) == (0, 0, 0, 0)
        assert {conn.call("ATTEND.PREFIX.LOOKUP", f"s{number}_attn", 0) for number in range(257)} == {"MISS"}
        assert conn.ok("KV.PREFIX.LOOKUP", "s0") == "HIT"
        assert conn.ok("KV.PREFIX.WARM", "s0", 2, 16, "s0_attn") == "1"
        assert np.array_equal(attend.query(conn, "s0_attn", 0, q), out)


def test_a_cold_layer_is_told_before_sizes_are_looked_at(tmp_path: Path) -> None:
    """Of QUERY after them. A store of a cold layer makes it warm."""
    k = normal(1, 2, 6, 16)
    flags = "--attend-warm-slots", "1", "--attend-cold-slots", "2"
    with Process(tmp_path, *flags) as process, Raw(process.port) as conn:
        for layer in range(4):
            attend.store(conn, "c", layer, k, k)
        states = [conn.call("ATTEND.PREFIX.LOOKUP", "c", layer) for layer in range(4)]
        assert states == ["MISS", "COLD", "COLD", "HIT"]
        bad = b"not a blob"
        for words in (
            ("QUERY_FUSED", "c", 2, 2, 16, 0, 2, bad, bad, bad, bad),
            ("QUERY_SPARSE", "c", 2, 2, 16, 1, bad, bad, bad),
            ("QUERY_SPARSE_AUTO", "c", 2, 2, 16, 4, 1, 2, bad, bad),
            ("QUERY_SPARSE_AUTO_FUSED", "c", 2, 2, 16, 4, 1, 2, 0, bad, bad, bad, bad),
        ):
            assert str(conn.call(f"ATTEND.PREFIX.{words[0]}", *words[1:])) == COLDMISS
        text = "ERR Q blob size must be a positive multiple of H*D*4"
        assert str(conn.call("ATTEND.PREFIX.QUERY", "c", 2, 2, 16, 1, bad)) == text
        assert str(attend.query(conn, "c", 2, k[:, :1])) == COLDMISS
        before = counters(conn)
        attend.store(conn, "c", 2, k, k)
        assert counters(conn)[3] == before[3] + 1
        assert attend.query(conn, "c", 2, k[:, :1]).shape == (2, 1, 16)


@pytest.mark.parametrize("vquant", ["fp16", "int8", "turbo4", "mlx4g32"])
def test_warm_reads_every_format(tmp_path: Path, vquant: str) -> None:
    floor = 0.9999 if vquant == "fp16" else 0.9
    with Process(tmp_path) as process, Raw(process.port) as conn:
        layers = attend.prefix(conn, "p", 3, 150, 2, 64, vquant)
        assert conn.ok("KV.PREFIX.WARM", "p", 2, 64) == "3"
        q = normal(5, 2, 1, 64)
        for layer, (k, v) in enumerate(layers):
            want = ref.attend(q.astype(np.float64), k, v)[0]
            assert cosine(attend.query(conn, "p", layer, q), want) >= floor
        stored = np.frombuffer(conn.ok("V.FETCH", "p_pk", 0, "RANGE", 0, 150), "<f4").reshape(150, 2, 64)
        keys = np.ascontiguousarray(stored.swapaxes(0, 1))
        values = np.frombuffer(conn.ok("V.FETCH", "p_pv", 0, "RANGE", 0, 150), "<f4").reshape(150, 2, 64)
        want = ref.attend(q.astype(np.float64), keys, values.swapaxes(0, 1))[0]
        assert np.abs(attend.query(conn, "p", 0, q) - want).max() <= 2e-6


def test_what_warm_answers(tmp_path: Path) -> None:
    with Process(tmp_path) as process, Raw(process.port) as conn:
        k, v = attend.prefix(conn, "g", 2, 20, 2, 32)[0]
        served = conn.fields("INFO", "pion")["kvprefix_bytes_served"]
        # H_q instead of H_kv, as published clients send it: as many heads as fit
        assert conn.ok("KV.PREFIX.WARM", "g", 8, 32, "g_attn") == "2"
        q = normal(5, 8, 1, 32)
        nothing = np.zeros((2, 0, 32), np.float32)
        out = attend.fused(conn, "g_attn", 0, q, nothing, nothing, [0] * 4 + [1] * 4)
        assert np.abs(out - ref.attend(q.astype(np.float64), k, v)[0]).max() <= 2e-6
        assert conn.ok("KV.PREFIX.WARM", "g", 2, 24) == "0 skipped_dim=2"  # 64 is no multiple of 24
        assert conn.ok("KV.PREFIX.WARM", "g", 2, 12) == "0"  # no head size
        assert conn.ok("KV.PREFIX.WARM", "g", 2, 32, "") == "2"  # no session: the namespace
        assert conn.call("ATTEND.PREFIX.LOOKUP", "g", 1) == "HIT"
        conn.ok("V.STOREBATCH", "g_pk", 2, 0, 5, np.zeros((5, 64), "<f4").tobytes())
        assert conn.ok("KV.PREFIX.WARM", "g", 2, 32) == "2"  # layer 2 has no values
        assert conn.fields("INFO", "pion")["kvprefix_bytes_served"] == served  # nobody was served anything
        conn.ok("KV.PREFIX.REGISTER", "empty", 64, "fp16")
        assert conn.ok("KV.PREFIX.WARM", "empty", 2, 32) == "0"
        cases: list[tuple[tuple[Any, ...], str]] = [
            (("g", 2), "ERR KV.PREFIX.WARM requires: ns_key H D"),
            (("", 2, 32), "ERR ns_key length must be 1..200"),
            (("g", 0, 32), "ERR invalid H/D (1..256 / 1..512)"),
            (("g", 257, 32), "ERR invalid H/D (1..256 / 1..512)"),
            (("g", 2, 513), "ERR invalid H/D (1..256 / 1..512)"),
            (("g", "x", 32), "ERR value is not an integer or out of range"),
            (("no", 2, 32), "ERR KV.PREFIX.WARM namespace not registered (call KV.PREFIX.REGISTER first)"),
        ]
        for words, text in cases:
            assert str(conn.call("KV.PREFIX.WARM", *words)) == text


def test_autowarm(tmp_path: Path) -> None:
    flags = "--attend-autowarm", "--attend-warm-slots", "2"
    with Process(tmp_path, *flags) as process, Raw(process.port) as conn:
        layers = attend.prefix(conn, "p", 4, 40, 2, 16)
        other = normal(9, 1, 3, 8)
        q = normal(5, 2, 1, 16)
        for sid in ("p_attn", "mine"):  # by the name, and by what WARM was told
            assert conn.ok("KV.PREFIX.WARM", "p", 2, 16, sid) == "4"
            assert conn.call("ATTEND.PREFIX.LOOKUP", sid, 0) == "COLD"
            for layer in (0, 3, 1, 2, 0):
                out = attend.query(conn, sid, layer, q)
                assert np.abs(out - ref.attend(q.astype(np.float64), *layers[layer])[0]).max() <= 2e-6
        assert counters(conn)[3] == 8  # of each session layers 0, 1, 2 and 0 again
        # what is not stored (any more, or not as it was) stays cold
        attend.store(conn, "stranger", 0, other, other)
        attend.store(conn, "p_attn", 0, layers[0][0][:, :7].copy(), layers[0][1][:, :7].copy())
        for layer in (1, 2):
            attend.query(conn, "mine", layer, q)
        assert str(attend.query(conn, "stranger", 0, other[:, :1])) == COLDMISS
        assert str(attend.query(conn, "p_attn", 0, q)) == COLDMISS
        conn.ok("KV.PREFIX.DROP", "p")
        assert conn.call("ATTEND.PREFIX.LOOKUP", "mine", 3) == "MISS"
        assert str(conn.call("ATTEND.PREFIX.QUERY", "nobody", 0, 1, 8, 1, other[0, 0].tobytes())).startswith("ERR")


def test_autowarm_stays_within_the_prefix_of_namespaces(tmp_path: Path) -> None:
    flags = "--attend-autowarm", "--attend-warm-slots", "1", "--ns-prefix", "team|"
    k = normal(1, 2, 8, 16)
    rows = np.ascontiguousarray(k.swapaxes(0, 1)).tobytes()
    with Process(tmp_path, *flags) as process, Raw(process.port) as conn:
        for ns in ("team|mine", "theirs"):
            for side in ("pk", "pv"):
                conn.ok("V.CREATE", f"{ns}_{side}", 32, "VQUANT", "fp16")
                conn.ok("V.STOREBATCH", f"{ns}_{side}", 0, 0, 8, rows)
            attend.store(conn, f"{ns}_attn", 0, k, k)
        attend.store(conn, "other", 0, k, k)
        assert attend.query(conn, "team|mine_attn", 0, k[:, :1]).shape == (2, 1, 16)
        assert str(attend.query(conn, "theirs_attn", 0, k[:, :1])) == COLDMISS


def test_autowarm_leaves_sessions_alone_that_only_have_the_name_of_a_prefix(tmp_path: Path) -> None:
    own, stored = normal(1, 2, 8, 16), normal(2, 2, 8, 16)
    rows = np.ascontiguousarray(stored.swapaxes(0, 1)).tobytes()
    with Process(tmp_path, "--attend-autowarm", "--attend-warm-slots", "1") as process, Raw(process.port) as conn:
        for side in ("pk", "pv"):
            conn.ok("V.CREATE", f"doc_{side}", 32, "VQUANT", "fp16")
            conn.ok("V.STOREBATCH", f"doc_{side}", 0, 0, 8, rows)
        attend.store(conn, "doc", 0, own, own)
        attend.store(conn, "other", 0, own, own)
        assert str(attend.query(conn, "doc", 0, own[:, :1])) == COLDMISS


def test_a_name_never_answers_with_what_it_meant_before(tmp_path: Path) -> None:
    """DROP, FLUSH and REPLACE end what is held of a prefix, warm and cold; sessions of other names stay."""
    k = normal(1, 2, 8, 16)
    with Process(tmp_path, "--attend-warm-slots", "4") as process, Raw(process.port) as conn:

        def hold() -> None:
            conn.ok("ATTEND.PREFIX.DROP", "p_attn", "mine", "q_attn", "free")
            for ns in ("p", "q"):
                attend.prefix(conn, ns, 1, 8, 2, 16)
            for sid in ("p_attn", "q_attn", "free"):
                attend.store(conn, sid, 0, k, k)
            assert conn.ok("KV.PREFIX.WARM", "p", 2, 16, "mine") == "1"
            assert conn.ok("KV.PREFIX.WARM", "q", 2, 16, "q_attn") == "1"
            assert states() == ["HIT"] * 4

        def states() -> list[Any]:
            return [conn.call("ATTEND.PREFIX.LOOKUP", sid, 0) for sid in ("p_attn", "mine", "q_attn", "free")]

        hold()
        conn.ok("KV.PREFIX.DROP", "p")
        assert states() == ["MISS", "MISS", "HIT", "HIT"]
        hold()
        conn.ok("KV.PREFIX.REGISTER", "p", 32, "fp16", "DIGEST", "ab", "REPLACE")
        assert states() == ["MISS", "MISS", "HIT", "HIT"]
        conn.ok("KV.PREFIX.DROP", "p")
        hold()
        attend.store(conn, "fifth", 0, k, k)
        assert "COLD" in states()
        conn.ok("KV.PREFIX.FLUSH")
        assert states() == ["MISS", "MISS", "MISS", "HIT"]


def test_a_prefix_that_is_dropped_while_it_is_warmed_is_not_held(tmp_path: Path) -> None:
    """Whatever comes first, afterwards nothing of it is there."""
    with Process(tmp_path) as process, Raw(process.port) as conn, Raw(process.port) as other:
        for _ in range(6):
            attend.prefix(conn, "p", 6, 400, 2, 64)
            conn.send(frame("KV.PREFIX.WARM", "p", 2, 64, "s"))
            other.ok("KV.PREFIX.DROP", "p")
            conn.read()
            states = {conn.call("ATTEND.PREFIX.LOOKUP", "s", layer) for layer in range(6)}
            assert states == {"MISS"}


def test_what_is_stored_while_it_is_warmed_is_held_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    """Writers that replace a prefix again and again: what is answered is always a whole prefix, never zeros."""
    ones = np.ones((2, 2, 96, 16), np.float32)
    seen: Counter[float] = Counter()
    over = threading.Event()
    with Process(tmp_path) as process:

        def write() -> None:
            with Client(port=process.port) as client:
                for number in range(60):
                    client.store("z", ones, ones, digest=f"{number:064x}", replace=True, vquant="fp32")
            over.set()

        def warm() -> None:
            with Client(port=process.port) as client:
                while not over.is_set():
                    with contextlib.suppress(CommandError):
                        client.call("KV.PREFIX.WARM", "z", 2, 16)

        def ask() -> None:
            with Client(port=process.port) as client:
                while not over.is_set():
                    with contextlib.suppress(CommandError):
                        found = client.call("ATTEND.PREFIX.QUERY", "z", 0, 2, 16, 1, ones[0, :, 0].tobytes())
                        seen[float(np.frombuffer(found, "<f4")[0])] += 1

        threads = [threading.Thread(target=each) for each in (write, warm, warm, ask)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with Client(port=process.port) as client:
            assert client.call("KV.PREFIX.WARM", "z", 2, 16) == "2"
            found = client.call("ATTEND.PREFIX.QUERY", "z", 1, 2, 16, 1, ones[0, :, 0].tobytes())
            assert (np.frombuffer(found, "<f4") == 1).all()
    assert set(seen) <= {1.0}
