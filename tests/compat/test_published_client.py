"""The published client (`pion-vllm-mlx` from PyPI, a black box) with the demo's model against our server."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any

import pytest

import pion_vllm_mlx
from pion import Client, PionPromptCache
from pion.client.caches import pack_rows
from pion.testing import server as start_server
from tests.support import models, published
from tests.support.binary import beside
from tests.support.mlx_lm_versions import mlx_lm_folder
from tests.support.published_signatures import positional

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]
models.need_mlx()
mx = models.mx

PREFIX = "You are the assistant of the Harbour Street Library. Answer in one short sentence. It opens at ten."


def test_our_calls_take_what_its_calls_take() -> None:
    """The same parameters in the same order with the same defaults; what ours take besides stands behind them."""
    script = Path(published.__file__).with_name("published_signatures.py")
    theirs = published.run(script=script)
    assert {"PionPromptCache", "HybridRetrievalCache.prepare_multi", "make_pion_prompt_cache"} <= theirs.keys()
    for name, parameters in theirs.items():
        ours = positional(operator.attrgetter(name)(pion_vllm_mlx))
        for number, (parameter, default) in enumerate(parameters):
            assert (name, ours[number][0]) == (name, parameter)
            assert not default or (name, *ours[number]) == (name, parameter, default)


def fp16_sums(cache: list[Any], count: int) -> list[str]:
    """A hash of every layer-side's first tokens in fp16, (1, H, n, D): what the published client should restore."""
    sums = []
    for layer in cache:
        for array in (layer.keys, layer.values):
            half = mx.contiguous(array[..., :count, :].astype(mx.float16))
            sums.append(hashlib.sha256(bytes(memoryview(half))).hexdigest())
    return sums


def test_cold_warm_and_after_a_kill(tmp_path: Path) -> None:
    _, tokenizer = models.smollm2_model()
    ids = ",".join(map(str, tokenizer.encode(PREFIX, add_special_tokens=False)))
    with start_server("--kvcache", dir=tmp_path) as server:
        cold = published.run(str(server.port), "published|v1", ids, "float32", "8")
        assert (cold["hits"], cold["misses"], cold["commit"]) == (0, 1, "+OK\r\n")
        warm = published.run(str(server.port), "published|v1", ids, "float32", "8")
        server.kill()
        server.restart()
        again = published.run(str(server.port), "published|v1", ids, "float32", "8")
    for seen in (warm, again):
        assert (seen["hits"], seen["misses"], seen["dtype"]) == (1, 0, "mlx.core.float16")
        assert seen["sums"] == cold["sums"], "the rows are those that were stored"
        assert seen["offset"] == cold["offset"] == len(ids.split(","))
        assert seen["answer"] == cold["answer"]


def commandstats(port: int) -> dict[str, dict[str, int]]:
    """Calls and failures by command."""
    with Client(port=port) as client:
        lines = client.call("INFO", "commandstats").decode().split("\r\n")
    out = {}
    for line in lines:
        name, _, figures = line.partition(":")
        if name.startswith("cmdstat_"):
            pairs = dict(pair.split("=") for pair in figures.split(","))
            out[name.removeprefix("cmdstat_")] = {"calls": int(pairs["calls"]), "failed": int(pairs["failed_calls"])}
    return out


def test_its_export_lane_takes_files_instead_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V.EXPORT, wire 1.7: a hit is one file, which the client opens; and the same K/V as over the wire.

    The client gives the arrays to mlx-lm's caches as mlx-lm took them up to 0.31; beside a later one it opens the file
    and then fetches all the same.
    """
    old = mlx_lm_folder("0.31.3")
    _, tokenizer = models.smollm2_model()
    ids = ",".join(map(str, tokenizer.encode(PREFIX, add_special_tokens=False)))
    with start_server("--kvcache", dir=tmp_path) as server:
        cold = published.run(str(server.port), "exported", ids, "float32", "4", path=old)
        seen = commandstats(server.port)
        warm = published.run(str(server.port), "exported", ids, "float32", "4", path=old)
        again = commandstats(server.port)
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
        wire = published.run(str(server.port), "exported", ids, "float32", "4", path=old)
        last = commandstats(server.port)
    assert seen["v.export"] == {"calls": 1, "failed": 0}
    assert again["v.export"] == last["v.export"] == {"calls": 2, "failed": 0}
    assert "v.fetch" not in again, "no row of the hit came over the wire"
    assert last["v.fetch"]["calls"] > 0
    assert warm["sums"] == wire["sums"] == cold["sums"]
    assert warm["answer"] == wire["answer"] == cold["answer"]


def test_it_reads_a_bf16_entry_of_ours(tmp_path: Path) -> None:
    model, tokenizer = models.smollm2_model("bfloat16")
    tokens = tokenizer.encode(PREFIX, add_special_tokens=False)[:12]  # bf16 is slow on a CPU
    with start_server("--kvcache", dir=tmp_path) as server, PionPromptCache(model, port=server.port) as pc:
        ours = pc.get_or_prefill(tokens, "ours|bf16")
        assert b"v_format:bf16" in pc.resp.call("V.INFO", "ours|bf16_pk")
        theirs = published.run(str(server.port), "ours|bf16", ",".join(map(str, tokens)), "bfloat16", "0")
    assert (theirs["hits"], theirs["misses"]) == (1, 0)
    assert theirs["sums"] == fp16_sums(ours, len(tokens))


def test_we_do_not_trust_an_entry_of_theirs_without_a_digest(tmp_path: Path) -> None:
    from pion.errors import MismatchError

    model, tokenizer = models.smollm2_model()
    tokens = tokenizer.encode(PREFIX, add_special_tokens=False)
    with start_server("--kvcache", dir=tmp_path) as server:
        theirs = published.run(str(server.port), "theirs", ",".join(map(str, tokens)), "float32", "0")
        with PionPromptCache(model, port=server.port) as pc, pytest.raises(MismatchError, match="none"):
            pc.get_or_prefill(tokens, "theirs")
        with PionPromptCache(model, port=server.port, on_mismatch="replace") as pc:
            pc.get_or_prefill(tokens, "theirs")
            ours = pc.get_or_prefill(tokens, "theirs")
            assert pc.hits == 1
    assert fp16_sums(ours, len(tokens)) == theirs["sums"]
    assert [pack_rows(layer.keys, 1).shape for layer in ours] == [(1, 192)] * 30


def test_its_attention_methods(tmp_path: Path) -> None:
    """Queries, fused and sparse ones against fp64; a cold layer is warmed and asked again, with GQA too."""
    script = published.SCRIPT.with_name("published_attention.py")
    with start_server("--kvcache", "--attend-warm-slots", "4") as server:
        seen = published.run(str(server.port), "4", script=script)
    assert len(seen["found"]) == 8
    assert max(seen["found"].values()) <= 2e-6, seen["found"]
    assert set(seen["cold"]) == {"query", "fused", "sparse"}
    assert min(seen["cold"].values()) >= 0.99, seen["cold"]
    assert seen["rehydrated"] == 3


def test_its_fused_queries_take_the_binary_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane 2 is the binary one, its lane 3 RESP: the same bits on both, also of a layer that had gone cold."""
    seen = {}
    for lane in ("binary", "RESP"):
        if lane == "RESP":
            monkeypatch.setenv("PION_PROMPT_CACHE_NO_BINARY", "1")
        with beside("--attend-warm-slots", "8") as server:
            script = published.SCRIPT.with_name("published_lanes.py")
            seen[lane] = published.run(str(server.port), "8", script=script)
            with Client(port=server.port) as client:
                told = dict(line.split(":", 1) for line in client.call("INFO", "attention").decode().splitlines()[1:])
            asked = len(seen[lane]["sums"])
            calls = commandstats(server.port)["attend.prefix.query_fused"]
            if lane == "binary":
                assert (int(told["binary_queries"]), int(told["binary_coldmisses"])) == (asked, 1)
                assert int(told["binary_requests"]) == asked + 2, "a ping, and the query that found the layer cold"
            else:
                assert int(told["binary_requests"]) == 0
            assert calls == {"calls": asked + 1, "failed": 1}
            assert seen[lane]["rehydrated"] == 1
    assert seen["binary"]["sums"] == seen["RESP"]["sums"]
    assert len(set(seen["RESP"]["sums"])) == 19


def test_its_attention_patch_generates_the_same_tokens(tmp_path: Path) -> None:
    """32 greedy tokens of SmolLM2, every layer's prefix attended to on the server."""
    _, tokenizer = models.smollm2_model()
    ids = ",".join(map(str, tokenizer.encode(PREFIX, add_special_tokens=False)))
    with start_server("--kvcache") as server:
        seen = published.run(
            str(server.port), ids, "32", script=published.SCRIPT.with_name("published_patch.py")
        )  # fmt: skip
        calls = commandstats(server.port)["attend.prefix.query_fused"]
    assert seen["patched"] == seen["plain"]
    assert len(set(seen["plain"])) > 10
    assert calls == {"calls": 32 * 30, "failed": 0}
