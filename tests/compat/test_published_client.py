"""The published client (`pion-vllm-mlx` from PyPI, a black box) with the demo's model against our server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pion import PionPromptCache
from pion.client.caches import pack_rows
from pion.testing import server as start_server
from tests.support import models, published

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]
models.need_mlx()
mx = models.mx

PREFIX = "You are the assistant of the Harbour Street Library. Answer in one short sentence. It opens at ten."


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
