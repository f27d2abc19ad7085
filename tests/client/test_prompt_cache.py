"""`PionPromptCache` against a real server: hits, misses, formats, mismatches, admission, raw commands."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import Client, PionPromptCache
from pion.client.caches import PionMlxCompatError, pack_rows
from pion.errors import ArgumentError, MismatchError
from pion.testing import server as start_server
from tests.support import models

models.need_mlx()
mx = models.mx

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def ns() -> str:
    return f"ns-{next(_names)}"


@pytest.fixture
def cache_of(server: Any) -> Iterator[Callable[..., PionPromptCache]]:
    """A `PionPromptCache` on the server, closed at the end."""
    made: list[PionPromptCache] = []

    def make(model: Any = None, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, host=server.host, port=server.port, **options))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def words(cache: list[Any], count: int) -> list[bytes]:
    """The first tokens of every layer-side, bit for bit."""
    return [pack_rows(array, count).tobytes() for layer in cache for array in (layer.keys, layer.values)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("vquant", ["fp16", "native"])
def test_another_object_fetches_what_the_first_computed(
    cache_of: Callable[..., PionPromptCache], ns: str, dtype: str, vquant: str
) -> None:
    first = cache_of(models.tiny_llama(dtype), vquant=vquant)
    cold = first.get_or_prefill(IDS, ns)
    before = words(cold, len(IDS))
    second = cache_of(models.tiny_llama(dtype), vquant=vquant)
    warm = second.get_or_prefill(np.array(IDS), namespace=ns)
    stats = second.stats()
    assert (stats["hits"], stats["misses"], stats["last_prefill_ms"], stats["hit_rate"]) == (1, 0, 0.0, 1.0)
    assert first.stats()["misses"] == 1
    assert first.stats()["last_prefill_ms"] > 0
    assert first.stats()["store_ms_total"] > 0
    assert stats["fetch_ms_total"] > 0
    if (dtype, vquant) == ("float32", "fp16"):  # rounded, and given back in the model's dtype
        before = [np.frombuffer(raw, "<f4").astype("<f2").astype("<f4").tobytes() for raw in before]
    assert words(warm, len(IDS)) == before
    assert {str(a.dtype) for c in warm for a in (c.keys, c.values)} == {f"mlx.core.{dtype}"}
    assert [layer.offset for layer in warm] == [len(IDS)] * 2
    if vquant == "native":
        assert models.greedy(second.model, warm, [7], 20) == models.greedy(first.model, cold, [7], 20)


def test_int8_is_close_and_a_fourth(cache_of: Callable[..., PionPromptCache], server: Any, ns: str) -> None:
    model = models.tiny_llama("float16", hidden_size=128)  # heads of 32
    pc = cache_of(model, vquant="int8")
    cold, warm = pc.get_or_prefill(IDS, ns), pc.get_or_prefill(IDS, ns)
    assert pc.hits == 1
    for a, b in zip(cold, warm, strict=True):
        exact, close = (x.keys[..., : len(IDS), :].astype(mx.float32) for x in (a, b))
        assert (mx.abs(exact - close).max() / mx.abs(exact).max()).item() < 0.02
    assert b"v_format:int8" in pc.resp.call("V.INFO", f"{ns}_pk")


def test_the_server_is_told_what_a_row_is(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama(rope_theta=5e5), vquant="native")
    pc.get_or_prefill(IDS, ns)
    lines = pc.resp.call("V.INFO", f"{ns}_pv").decode().split("\r\n")
    assert {"value_dim:16", "v_format:fp32", "num_layers:2", "heads:2", "head_dim:8", "rope:500000.0"} <= set(lines)
    assert {f"layer_{i}_tokens:{len(IDS)}" for i in range(2)} <= set(lines)


def test_a_hit_is_booked_with_the_prefill_it_saved(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama())
    pc.resp.call("PION.STATS", "RESET")
    pc.get_or_prefill(IDS, ns)
    pc.get_or_prefill(IDS, ns)
    reply = pc.resp.call_array("PION.STATS")
    stats = dict(zip(reply[::2], reply[1::2], strict=True))
    assert (stats[b"kvprefix_hits"], stats[b"kvprefix_misses"], stats[b"kvprefix_hits_measured"]) == (1, 1, 1)
    assert stats[b"kvprefix_tokens_served"] == len(IDS)
    assert stats[b"kvprefix_prefill_us_saved"] == 1000 * max(1, round(pc.last_prefill_ms))


def test_lookup_asks_for_rows_and_optionally_for_tokens(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama())
    assert pc.lookup(ns) is False
    pc.get_or_prefill(IDS, ns)
    assert pc.lookup(ns) is True
    assert pc.lookup(ns, IDS) is True
    assert pc.lookup(ns, IDS[:-1]) is False
    assert cache_of(models.tiny_llama(seed=1)).lookup(ns, IDS) is False


# --- what does not belong together ------------------------------------------------------------------------------------


def other_tokens(pc: PionPromptCache) -> tuple[Any, list[int]]:
    return pc.model, [*IDS[:-1], 1]


def other_weights(pc: PionPromptCache) -> tuple[Any, list[int]]:
    return models.tiny_llama(seed=5), IDS


def other_dtype(pc: PionPromptCache) -> tuple[Any, list[int]]:
    return models.tiny_llama("bfloat16"), IDS


def shorter(pc: PionPromptCache) -> tuple[Any, list[int]]:
    return pc.model, IDS[:5]


CHANGES = [other_tokens, other_weights, other_dtype, shorter]


@pytest.mark.parametrize("change", CHANGES)
def test_a_namespace_of_something_else_raises(
    cache_of: Callable[..., PionPromptCache], ns: str, change: Callable[..., Any]
) -> None:
    owner = cache_of(models.tiny_llama(), vquant="native")
    kept = words(owner.get_or_prefill(IDS, ns), len(IDS))
    model, ids = change(owner)
    with pytest.raises(MismatchError, match=r"another digest.*on_mismatch='recompute'"):
        cache_of(model, vquant="native").get_or_prefill(ids, ns)
    assert words(owner.get_or_prefill(IDS, ns), len(IDS)) == kept


@pytest.mark.parametrize("change", CHANGES)
def test_or_is_computed_and_left_alone(
    cache_of: Callable[..., PionPromptCache], ns: str, change: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    owner = cache_of(models.tiny_llama(), vquant="native")
    kept = words(owner.get_or_prefill(IDS, ns), len(IDS))
    model, ids = change(owner)
    other = cache_of(model, vquant="native", on_mismatch="recompute")
    cache = other.get_or_prefill(ids, ns)
    assert cache[0].offset == len(ids)
    assert (other.hits, other.misses, other.mismatches) == (0, 1, 1)
    assert "another digest" in caplog.text
    assert "it is not stored; what it does not share" in caplog.text
    assert words(owner.get_or_prefill(IDS, ns), len(IDS)) == kept
    assert owner.hits == 1


@pytest.mark.parametrize("change", CHANGES)
def test_or_is_replaced(cache_of: Callable[..., PionPromptCache], ns: str, change: Callable[..., Any]) -> None:
    owner = cache_of(models.tiny_llama(), vquant="native")
    owner.get_or_prefill(IDS, ns)
    model, ids = change(owner)
    other = cache_of(model, vquant="native", on_mismatch="replace")
    cold = words(other.get_or_prefill(ids, ns), len(ids))
    assert words(other.get_or_prefill(ids, ns), len(ids)) == cold
    assert (other.hits, other.misses) == (1, 1)
    assert owner.lookup(ns, IDS) is False


def test_another_format_is_a_mismatch_unless_it_keeps_every_word(
    cache_of: Callable[..., PionPromptCache], ns: str
) -> None:
    model = models.tiny_llama()
    cache_of(model, vquant="int8").get_or_prefill(IDS, ns)
    with pytest.raises(MismatchError, match="stored as int8, asked for as fp16 or fp32"):
        cache_of(model, vquant="fp16").get_or_prefill(IDS, ns)
    keeper = cache_of(model, vquant="native", on_mismatch="replace")
    keeper.get_or_prefill(IDS, ns)
    assert keeper.get_or_prefill(IDS, ns)
    assert keeper.hits == 1
    easy = cache_of(model, vquant="fp16")
    easy.get_or_prefill(IDS, ns)
    assert easy.hits == 1


def test_an_entry_without_a_digest_is_not_trusted(
    cache_of: Callable[..., PionPromptCache], server: Any, ns: str
) -> None:
    with Client(host=server.host, port=server.port) as client:
        client.store(ns, np.ones((2, 2, len(IDS), 8), np.float32), np.ones((2, 2, len(IDS), 8), np.float32))
    with pytest.raises(MismatchError, match=r"another digest \(none"):
        cache_of(models.tiny_llama(), vquant="native").get_or_prefill(IDS, ns)


# --- admission, copies, threads, processes ----------------------------------------------------------------------------


def test_admission_threshold(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama(), admission_threshold=3)
    for want in ((1, 0, 1), (2, 0, 2), (3, 0, 2), (3, 1, 2)):
        assert pc.get_or_prefill(IDS, ns)[0].offset == len(IDS)
        assert (pc.misses, pc.hits, pc.admission_skips) == want
    assert cache_of(admission_threshold=0).admission_threshold == 1


def test_every_call_returns_a_cache_of_its_own(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama(), vquant="native")
    kept = words(pc.get_or_prefill(IDS, ns), len(IDS))
    one, two = pc.get_or_prefill(IDS, ns), pc.get_or_prefill(IDS, ns)
    models.greedy(pc.model, one, [1], 4)
    one[0].keys[...] = 0
    assert words(two, len(IDS)) == kept
    assert words(pc.get_or_prefill(IDS, ns), len(IDS)) == kept


def test_prefill_in_chunks(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama(), prefill_chunk_size=4)
    cold = pc.get_or_prefill(IDS, ns)
    assert cold[0].offset == pc.get_or_prefill(IDS, ns)[0].offset == len(IDS)
    assert pc.hits == 1


def test_a_background_store_is_waited_for(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama(), vquant="native", background_store=True)
    cold = pc.get_or_prefill(IDS, ns)
    kept = words(cold, len(IDS))
    models.greedy(pc.model, cold, [1], 4)  # the caller appends while the rows travel
    cold[0].keys[...] = 0
    assert pc.lookup(ns) is True
    assert words(pc.get_or_prefill(IDS, ns), len(IDS)) == kept


def test_threads_share_one_object(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama(), vquant="native")
    kept = words(pc.get_or_prefill(IDS, ns), len(IDS))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(words(pc.get_or_prefill(IDS, ns), 13))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [kept] * 6


@pytest.mark.timeout(400)  # three processes that each import mlx-lm
def test_d14_processes_with_other_hash_seeds_hit(server: Any, ns: str) -> None:
    program = (
        "import sys; from tests.support import models; from pion import PionPromptCache\n"
        "pc = PionPromptCache(models.tiny_llama(), port=int(sys.argv[1]))\n"
        "pc.get_or_prefill([1, 2, 3], pc.make_namespace(sys.argv[2], None, 'fp16')); print(pc.hits, pc.misses)"
    )
    said = []
    for seed in ("0", "1", "31337"):
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),
        }
        command = [sys.executable, "-c", program, str(server.port), ns]
        said.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip())
    assert said == ["0 1", "1 0", "1 0"]


# --- other methods ----------------------------------------------------------------------------------------------------


def test_d12_prepare_uses_the_ids_of_the_whole(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    tokenizer = models.smollm2_model()[1]
    model = models.tiny_llama(vocab_size=49152)
    pc = cache_of(model, vquant="native")
    prefix = "A long shared text about the unbeliev"
    for suffix, trimmed in (("able story", True), (" and more", False), ("able story", True)):
        whole = tokenizer.encode(prefix + suffix, add_special_tokens=False)
        cache, rest = pc.prepare(tokenizer, prefix, suffix, ns)
        kept = cache[0].offset
        assert whole[kept:] == rest
        assert (kept < len(tokenizer.encode(prefix, add_special_tokens=False))) is trimmed
        cold = models.greedy(model, _fresh(model), whole, 8)
        assert models.greedy(model, cache, rest, 8) == cold
    assert (pc.hits, pc.misses) == (2, 1)


def _fresh(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def test_drop_commit_and_save(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of(models.tiny_llama())
    pc.get_or_prefill(IDS, ns)
    pc.commit()
    pc.save()
    assert pc.drop(ns, "never-stored") == 1
    assert pc.lookup(ns) is False
    assert pc.drop(ns) == 0


def test_raw_commands_answer_the_bytes_of_the_reply(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    resp = cache_of().resp
    assert resp.call("PING") == b"+PONG\r\n"
    assert resp.call("SET", ns, b"\x00\r\n\xff") == b"+OK\r\n"
    assert resp.call("GET", ns) == b"$4\r\n\x00\r\n\xff\r\n"
    assert resp.call("GET", "no such key") == b"$-1\r\n"
    assert resp.call("STRLEN", ns) == b":4\r\n"
    assert resp.call("MGET", ns, "no such key") == b"*2\r\n$4\r\n\x00\r\n\xff\r\n$-1\r\n"
    assert resp.call("V.INFO", "nobody") == b"-ERR session not found\r\n"
    assert resp.call_array("MGET", ns, "no such key") == [b"\x00\r\n\xff", None]
    with pytest.raises(TypeError, match="'PING' answered str, not an array"):
        resp.call_array("PING")


def test_the_published_attributes(cache_of: Callable[..., PionPromptCache]) -> None:
    pc = cache_of(models.tiny_llama())
    for name in ("hits", "misses", "admission_skips", "fetch_ms_total", "store_ms_total", "last_prefill_ms"):
        assert getattr(pc, name) == 0
    for name in ("attend_query_ms_total", "attend_query_calls", "cold_rehydrates_observed"):
        assert getattr(pc, name) == 0
    layout = pc.layout
    assert layout is not None
    assert (layout.n_layers, layout.n_kv_heads, layout.head_dim, layout.kv_dim) == (2, 2, 8, 16)
    assert (layout.is_hybrid, layout.cache_len) == (False, 2)
    published = {"hits", "misses", "hit_rate", "admission_skips", "admission_threshold"}
    published |= {"fetch_ms_total", "store_ms_total", "last_prefill_ms"}
    assert published <= set(pc.stats())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"checkpoints": 0}, "checkpoints must be a positive number"),
        ({"vquant": "bf16_rope_fp8_body"}, "vquant='bf16_rope_fp8_body' needs a width"),
        ({"v_format": "fp17"}, "unknown v_format 'fp17'"),
        ({"vquant": "fp17"}, "unknown vquant 'fp17'"),
        ({"on_mismatch": "ignore"}, "on_mismatch must be"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size"),
        ({"url": "http://localhost"}, "unknown scheme 'http'"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PionPromptCache(**options)


def test_d8_an_unknown_cache_class_is_refused_before_anything_is_sent(server: Any) -> None:
    from mlx_lm.models.cache import KVCache

    from tests.support.proxy import proxy

    class Made(KVCache):
        pass

    model = models.tiny_llama()
    model.make_cache = lambda: [KVCache(), Made()]
    with proxy(server.port) as between:
        with pytest.raises(PionMlxCompatError, match="1 x KVCache, 1 x Made: "):
            PionPromptCache(model, port=between.port)
        assert between.accepted == 0
        other = PionPromptCache(models.tiny_llama(), port=between.port)
        with pytest.raises(PionMlxCompatError, match="Made is not one that is known"):
            other.put([KVCache(), Made()], IDS, "ns")
        assert between.accepted == 0


def test_without_a_model_there_is_no_prefix(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    pc = cache_of()
    assert pc.layout is None
    with pytest.raises(RuntimeError, match="this method requires a model — "):
        pc.get_or_prefill(IDS, ns)
    with pytest.raises(RuntimeError, match="this method requires a model — "):
        pc.lookup(ns, IDS)
    pc = cache_of(models.tiny_llama())
    with pytest.raises(ValueError, match="no tokens"):
        pc.get_or_prefill([], ns)
    for wrong in ("", "x" * 201, "é" * 101):
        with pytest.raises(ValueError, match="1 to 200 bytes"):
            pc.get_or_prefill(IDS, wrong)


def test_without_mlx_the_wire_works_and_a_model_names_the_command(server: Any) -> None:
    program = """
import json, sys
sys.modules["mlx"] = sys.modules["mlx_lm"] = None
from pion import PionPromptCache
pc = PionPromptCache(port=int(sys.argv[1]))
out = [pc.lookup("nobody"), pc.drop("nobody"), pc.resp.call("PING").decode(), pc.stats()["hits"]]
try:
    PionPromptCache(object())
except ImportError as error:
    out.append(str(error))
print(json.dumps(out))
"""
    command = [sys.executable, "-c", program, str(server.port)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    said = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert said[:4] == [False, 0, "+PONG\r\n", 0]
    assert "pip install 'pion-server[mlx]'" in said[4]


def test_the_seeds_name_exports_the_same_class() -> None:
    import pion_vllm_mlx

    assert pion_vllm_mlx.PionPromptCache is PionPromptCache
    done = subprocess.run([sys.executable, "-m", "pion_vllm_mlx", "serve"], capture_output=True, text=True, check=False)
    assert (done.returncode, "'serve' is not in this version" in done.stderr) == (2, True)
    assert Path(pion_vllm_mlx.__file__).parent.name == "pion_vllm_mlx"


def test_a_namespace_without_utf8_is_refused_by_name(cache_of: Callable[..., PionPromptCache]) -> None:
    pc = cache_of(models.tiny_llama())
    lone = "a\ud800b"
    for call in (
        lambda: pc.get_or_prefill(IDS, lone),
        lambda: pc.lookup(lone),
        lambda: pc.explain(IDS, lone),
        lambda: pc.drop(lone),
    ):
        with pytest.raises(ArgumentError, match=r"^the namespace has no UTF-8: .*lone surrogate"):
            call()
