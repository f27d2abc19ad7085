"""`HybridRetrievalCache`: chunks in this process and on a real server, taken in, put together, lost, changed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import HybridRetrievalCache, PionPromptCache
from pion.client import agreement, caches
from pion.client.caches import PionMlxCompatError, pack_rows
from pion.client.packs import Manifest
from pion.client.restore import ROOM
from pion.client.rotate import verified_ropes
from pion.errors import AuthenticationError
from pion.testing import server as start_server
from tests.support import models

models.need_mlx()
mx = models.mx

STUB, A, B, C = [1, 2, 3], list(range(10, 30)), list(range(40, 71)), list(range(60, 80))
ASK = [5, 6]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def hybrid(request: pytest.FixtureRequest) -> Iterator[Callable[..., HybridRetrievalCache]]:
    """Make `HybridRetrievalCache` objects, of backend "pion" on the server; closed at the end."""
    made: list[HybridRetrievalCache] = []

    def make(model: Any = None, backend: str = "inproc", **options: Any) -> HybridRetrievalCache:
        if backend == "pion":
            running = request.getfixturevalue("server")
            options = {"host": running.host, "port": running.port, "vquant": "native", **options}
        made.append(HybridRetrievalCache(model or models.tiny_llama(), backend, **options))
        return made[-1]

    yield make
    for hr in made:
        hr.close()


@pytest.fixture
def fresh(server: Any) -> None:
    """A server that holds nothing."""
    with PionPromptCache(host=server.host, port=server.port) as pc:
        pc.resp.call("KV.PREFIX.FLUSH")


def words(cache: list[Any], count: int) -> list[bytes]:
    return [pack_rows(array, count).tobytes() for layer in cache for array in (layer.keys, layer.values)]


def packed(hr: HybridRetrievalCache) -> HybridRetrievalCache:
    hr.set_shared_stub(STUB)
    hr.ingest_pack("a", A)
    hr.ingest_pack("b", B)
    return hr


BACKENDS = pytest.mark.parametrize("backend", ["inproc", "pion"])


# --- one chunk --------------------------------------------------------------------------------------------------------


@BACKENDS
def test_hybrid_retrieval_of_one_chunk_is_the_whole_prompt(hybrid: Any, fresh: None, backend: str) -> None:
    hr = hybrid(backend=backend)
    entry = hr.ingest("doc", A)
    assert entry["namespace"] == "chunk_" + hashlib.sha256(b"doc").hexdigest()[:24]
    assert (entry["tokens"], entry["backend"]) == (len(A), backend)
    cache, rest = hr.prepare("doc", ASK)
    whole = caches.prefill(hr.model, A, None)
    assert rest == ASK
    assert words(cache, len(A)) == words(whole, len(A))
    assert models.greedy(hr.model, cache, rest, 20) == models.greedy(hr.model, whole, ASK, 20)
    stats = hr.stats()
    assert (stats["ingest_count"], stats["hydrate_count"], stats["hydrate_miss_count"]) == (1, 1, 0)
    assert (stats["chunks_in_manifest"], stats["chunks_in_inproc"]) == (1, int(backend == "inproc"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [255, 256, 257, 512])
@BACKENDS
def test_d11_greedy_tokens_at_the_borders_of_mlx_blocks(
    hybrid: Any, fresh: None, backend: str, count: int, dtype: str
) -> None:
    model, ids = models.tiny_llama(dtype), [(5 * i + i // 7) % 96 for i in range(count)]
    hr = hybrid(model, backend, vquant="fp16")
    hr.ingest("doc", ids)
    cold = models.greedy(model, caches.prefill(model, ids, None), ASK, 64)
    assert models.greedy(model, *hr.prepare("doc", ASK), 64) == cold


@BACKENDS
def test_each_call_gives_a_cache_of_its_own_with_room(hybrid: Any, fresh: None, backend: str) -> None:
    hr = packed(hybrid(backend=backend))
    hr.ingest("doc", A)
    for prepare in (lambda: hr.prepare("doc", ASK), lambda: hr.prepare_multi(["b", "a"], ASK)):
        (first, _), (second, _) = prepare(), prepare()
        count = first[0].offset
        before = words(second, count)
        assert {a.shape[2] for layer in first for a in (layer.keys, layer.values)} == {count + ROOM}
        models.greedy(hr.model, first, ASK, 30)
        for layer in first:
            layer.keys[..., :count, :] = 0.0
        assert words(second, count) == before
        third, _ = prepare()
        assert words(third, count) == before
        assert first[0].keys.shape[2] == count + ROOM  # nothing was copied while it decoded


# --- several ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ba", "aba", "b", "abab"])
def test_both_backends_compose_the_same(hybrid: Any, fresh: None, order: str) -> None:
    composed = []
    for backend in ("inproc", "pion"):
        hr = packed(hybrid(backend=backend))
        cache, rest = hr.prepare_multi(list(order), ASK)
        assert rest == ASK
        composed.append(cache)
    for one, other in zip(*composed, strict=True):
        assert one.offset == other.offset
        for x, y in ((one.keys, other.keys), (one.values, other.values)):
            assert mx.allclose(x[..., : one.offset, :], y[..., : one.offset, :], atol=1e-5)


@BACKENDS
def test_d15_a_request_of_cached_chunks_alone_goes_on_from_its_last_token(
    hybrid: Any, fresh: None, backend: str
) -> None:
    hr = packed(hybrid(backend=backend))
    cache, rest = hr.prepare_multi(["b", "a"], [])
    assert rest == A[-1:]
    assert cache[0].offset == len(STUB) + len(A) + len(B) - 1
    with_question, _ = hr.prepare_multi(["b", "a"], ASK)
    count = cache[0].offset
    assert words(cache, count) == words(with_question, count)
    for nothing in (hr.prepare_multi(["b", "a"]), hr.prepare_multi(["b", "a"], None)):
        assert (words(nothing[0], count), nothing[1]) == (words(cache, count), rest)
    hr.ingest("doc", A)
    cache, rest = hr.prepare("doc", np.empty(0, np.int32))
    cold = models.greedy(hr.model, caches.prefill(hr.model, A[:-1], None), A[-1:], 8)
    assert models.greedy(hr.model, cache, rest, 8) == cold


def test_packs_need_a_stub_an_id_and_a_bound(hybrid: Any) -> None:
    hr = hybrid()
    with pytest.raises(RuntimeError, match=r"call set_shared_stub\(...\) before ingest_pack\(...\)"):
        hr.ingest_pack("a", A)
    with pytest.raises(RuntimeError, match="set_shared_stub"):
        hr.prepare_multi(["a"], ASK)
    assert hr.set_shared_stub(STUB) == {"stub_tokens": 3}
    assert hr.ingest_pack("a", A)["encoded_at"] == 3
    with pytest.raises(ValueError, match="no chunks"):
        hr.prepare_multi([], ASK)
    with pytest.raises(ValueError, match=r"9 packs are more than max_packs=8: .*15/27.*26/27"):
        hr.prepare_multi(["a"] * 9, ASK)
    assert hr.prepare_multi(["a"] * 9, ASK, allow_fine_grain=True)[0][0].offset == 3 + 9 * len(A)
    assert hr.prepare_multi(["a"] * 9, ASK, max_packs=9)[0][0].offset == 3 + 9 * len(A)
    with pytest.raises(KeyError, match="no pack 'x'"):
        hr.prepare_multi(["a", "x"], ASK)
    hr.ingest("doc", A)
    with pytest.raises(KeyError, match="no pack 'doc'"):
        hr.prepare_multi(["doc"], ASK)
    with pytest.raises(KeyError, match="'a' is a pack"):
        hr.prepare("a", ASK)
    with pytest.raises(KeyError, match="'y' is not in the manifest"):
        hr.prepare("y", ASK)
    for wrong in ([], [96], [-1]):
        with pytest.raises(ValueError, match="token"):
            hr.ingest_pack("z", wrong)
    with pytest.raises(TypeError, match="not text"):
        hr.ingest("z", "text")
    with pytest.raises(ValueError, match="backend must be 'inproc' or 'pion', got 'disk'"):
        HybridRetrievalCache(models.tiny_llama(), "disk")


# --- content ----------------------------------------------------------------------------------------------------------


@BACKENDS
def test_other_content_of_equal_length_under_the_same_id_is_computed_anew(
    hybrid: Any, fresh: None, backend: str
) -> None:
    hr = packed(hybrid(backend=backend))
    hr.ingest("doc", A)
    hr.ingest("doc", A)
    assert hr.stats()["ingest_count"] == 3
    assert len(A) == len(C)
    hr.ingest("doc", C)
    hr.ingest_pack("a", C)
    assert hr.stats()["ingest_count"] == 5
    assert words(hr.prepare("doc", ASK)[0], len(C)) == words(caches.prefill(hr.model, C, None), len(C))
    other = hybrid(hr.model)
    other.set_shared_stub(STUB)
    other.ingest_pack("c", C)
    got, wanted = hr.prepare_multi(["a"], ASK)[0], other.prepare_multi(["c"], ASK)[0]
    for x, y in zip(got, wanted, strict=True):
        assert mx.allclose(x.keys, y.keys, atol=1e-5)
    assert hr.stats()["reencode_count"] == 0


@BACKENDS
def test_another_stub_or_other_weights_make_every_chunk_anew(hybrid: Any, fresh: None, backend: str) -> None:
    model = models.tiny_llama()
    hr = packed(hybrid(model, backend))
    hr.ingest("doc", A)
    hr.set_shared_stub([7, 8, 9])
    cache, _ = hr.prepare_multi(["a"], ASK)
    assert hr.stats()["reencode_count"] == 1
    whole = caches.prefill(model, [7, 8, 9, *A], None)
    assert mx.allclose(cache[1].keys[:, :, :23], whole[1].keys[:, :, :23], atol=1e-5)
    model.update(models.tiny_llama(seed=9).parameters())
    whole = caches.prefill(model, [7, 8, 9, *A], None)
    cache, _ = hr.prepare_multi(["a"], ASK)
    assert mx.allclose(cache[1].keys[:, :, :23], whole[1].keys[:, :, :23], atol=1e-5)
    cache, _ = hr.prepare("doc", ASK)
    assert mx.allclose(cache[1].keys[:, :, :20], caches.prefill(model, A, None)[1].keys[:, :, :20], atol=1e-5)


# --- manifest and server ----------------------------------------------------------------------------------------------


def test_hybrid_retrieval_across_processes_from_the_manifest(
    hybrid: Any, server: Any, fresh: None, tmp_path: Path
) -> None:
    path = tmp_path / "chunks.json"
    first = packed(hybrid(models.tiny_llama(), "pion", manifest_path=path))
    first.ingest("doc", C)
    entries = json.loads(path.read_text())
    assert {name: entry["tokens"] for name, entry in entries.items()} == {"a": 20, "b": 31, "doc": 20}
    assert entries["a"]["encoded_at"] == len(STUB)
    assert "encoded_at" not in entries["doc"]
    assert all({"namespace", "tokens", "backend"} <= set(entry) for entry in entries.values())
    second = hybrid(models.tiny_llama(), "pion", manifest_path=path)  # an equal model, another object
    assert second.has("a")
    second.set_shared_stub(STUB)
    got, wanted = second.prepare_multi(["b", "a"], ASK)[0], first.prepare_multi(["b", "a"], ASK)[0]
    assert words(got, 54) == words(wanted, 54)
    assert words(second.prepare("doc", ASK)[0], 20) == words(first.prepare("doc", ASK)[0], 20)
    stats = second.stats()
    assert (stats["hydrate_count"], stats["hydrate_miss_count"], stats["encode_ms_total"]) == (2, 0, 0)
    assert stats["pion_fetch_ms_total"] > 0
    inproc = hybrid(models.tiny_llama(), manifest_path=path)
    with pytest.raises(KeyError, match="not in this process"):
        inproc.prepare("doc", ASK)


def test_without_a_manifest_the_number_of_tokens_is_enough_and_verified(hybrid: Any, fresh: None) -> None:
    first = hybrid(backend="pion")
    first.ingest("doc", A)
    second = hybrid(backend="pion")
    with pytest.raises(KeyError, match="chunk_token_count="):
        second.prepare("doc", ASK)
    cache, _ = second.prepare("doc", ASK, chunk_token_count=len(A))
    assert words(cache, len(A)) == words(first.prepare("doc", ASK)[0], len(A))
    for hr, name, count in (
        (second, "doc", len(A) - 1),  # another chunk
        (second, "never", len(A)),  # no chunk
        (hybrid(models.tiny_llama(seed=4), "pion"), "doc", len(A)),  # another model's chunk
    ):
        misses = hr.stats()["hydrate_miss_count"]
        with pytest.raises(KeyError, match="not registered on"):
            hr.prepare(name, ASK, chunk_token_count=count)
        assert hr.stats()["hydrate_miss_count"] == misses + 1
    assert words(first.prepare("doc", ASK)[0], len(A)) == words(cache, len(A))


def test_a_pack_lost_on_the_server_is_computed_again_where_its_tokens_are_known(
    hybrid: Any, fresh: None, tmp_path: Path
) -> None:
    path = tmp_path / "chunks.json"
    first = packed(hybrid(backend="pion", manifest_path=path))
    wanted = words(first.prepare_multi(["b", "a"], ASK)[0], 54)
    second = hybrid(backend="pion", manifest_path=path)
    second.set_shared_stub(STUB)
    first._chunks.server.pc.resp.call("KV.PREFIX.FLUSH")
    with pytest.raises(KeyError, match=r"'b' is not registered on .*: it is gone; ingest it again"):
        second.prepare_multi(["b", "a"], ASK)
    assert second.stats()["hydrate_miss_count"] == 1
    assert words(first.prepare_multi(["b", "a"], ASK)[0], 54) == wanted
    stats = first.stats()
    assert (stats["hydrate_miss_count"], stats["reencode_count"]) == (2, 2)
    assert words(second.prepare_multi(["b", "a"], ASK)[0], 54) == wanted  # they are there again, for everybody
    assert second.stats()["reencode_count"] == 0


def test_a_server_that_went_away_costs_only_the_saving(hybrid: Any, tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path / "data") as running:
        hr = hybrid(None, "pion", host=running.host, port=running.port)
        packed(hr)
        wanted = words(hr.prepare_multi(["b", "a"], ASK)[0], 54)
    assert words(hr.prepare_multi(["b", "a"], ASK)[0], 54) == wanted
    hr.ingest_pack("c", C)
    assert hr.prepare_multi(["c"], ASK)[0][0].offset == 23


def test_credentials_are_those_of_the_prompt_cache(hybrid: Any, tmp_path: Path) -> None:
    with start_server("--kvcache", "--requirepass", "secret", dir=tmp_path / "data") as running:
        where = {"host": running.host, "port": running.port}
        with pytest.raises(AuthenticationError):
            hybrid(None, "pion", **where).ingest("doc", A)
        assert hybrid(None, "pion", password="secret", **where).ingest("doc", A)["tokens"] == len(A)
        url = f"pion://:secret@{running.host}:{running.port}"
        assert hybrid(None, "pion", url=url).prepare("doc", ASK, len(A))[0][0].offset == len(A)


def test_evict_forgets_here_and_on_request_on_the_server(hybrid: Any, fresh: None) -> None:
    hr = packed(hybrid(backend="pion"))
    namespace = hr.ingest("doc", A)["namespace"]
    assert hr.evict("doc") is True
    assert hr.evict("doc") is False
    assert hr.has("doc") is False
    assert hr._chunks.server.pc.lookup(namespace) is True
    hr.ingest("doc", A)
    assert hr.evict("doc", server=True) is True
    assert hr._chunks.server.pc.lookup(namespace) is False
    assert hr.stats()["chunks_in_manifest"] == 2


def test_a_manifest_is_shared_and_never_written_over_something_else(hybrid: Any, tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    one, other = (hybrid(manifest_path=str(path)) for _ in range(2))
    one.ingest("x", A)
    other.ingest("y", B)
    assert one.has("y")
    assert set(json.loads(path.read_text())) == {"x", "y"}
    assert not list(tmp_path.glob("*.tmp"))
    for text in ("not json", "[1]", '{"x": {"namespace": "n"}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a manifest of chunks"):
            hybrid(manifest_path=path)
        assert path.read_text() == text


@BACKENDS
def test_the_last_ingest_of_any_process_counts(hybrid: Any, fresh: None, backend: str, tmp_path: Path) -> None:
    """Two objects, as two processes: one replaces and evicts what the other knows."""
    path = tmp_path / "chunks.json"
    one, two = (packed(hybrid(backend=backend, manifest_path=path)) for _ in range(2))
    for hr in (one, two):
        hr.ingest("doc", A)
        hr.prepare_multi(["a"], ASK)
    for tokens in (C, A):  # of equal length
        one.ingest_pack("a", tokens)
        one.ingest("doc", tokens)
        wanted = one.prepare_multi(["a"], ASK)[0], one.prepare("doc", ASK)[0]
        if backend == "inproc":
            for ask in (lambda: two.prepare_multi(["a"], ASK), lambda: two.prepare("doc", ASK)):
                with pytest.raises(KeyError, match="ingested with other tokens by another process"):
                    ask()
            two.ingest_pack("a", tokens)
            two.ingest("doc", tokens)
        got = two.prepare_multi(["a"], ASK)[0], two.prepare("doc", ASK)[0]
        assert [words(cache, 20) for cache in got] == [words(cache, 20) for cache in wanted]
    assert one.evict("a")
    assert not two.has("a")
    assert two.stats()["chunks_in_manifest"] == 2
    with pytest.raises(KeyError, match="no pack 'a'"):
        two.prepare_multi(["a"], ASK)
    assert two.evict("doc")
    assert not one.has("doc")


def test_processes_with_other_stubs_do_not_take_each_others_packs_for_other_tokens(hybrid: Any, tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    one, two = packed(hybrid(manifest_path=path)), hybrid(manifest_path=path)
    two.set_shared_stub([7, 8])
    two.ingest_pack("a", A)
    for hr, stub in ((one, STUB), (two, [7, 8]), (one, STUB)):
        whole = caches.prefill(hr.model, [*stub, *A], None)
        got = hr.prepare_multi(["a"], ASK)[0]
        assert mx.allclose(got[1].keys[:, :, : got[1].offset], whole[1].keys[:, :, : got[1].offset], atol=1e-5)


def test_the_manifest_is_read_again_whatever_replaced_it(tmp_path: Path) -> None:
    """Versions of one size that follow each other at once, while inode numbers come back."""
    path = tmp_path / "chunks.json"
    writer, reader = Manifest(path), Manifest(path)
    for number in range(100):
        for round_ in range(3):
            entry = {"namespace": f"n{number:03}{round_}", "tokens": 1, "backend": "pion"}
            writer.set("x", entry)
            if round_ != 1:
                assert reader.get("x") == entry
    path.unlink()
    assert (reader.get("x"), len(writer)) == (None, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoded_at", "3"), ("encoded_at", None), ("encoded_at", -1), ("encoded_at", 1.5), ("encoded_at", True),
        ("encoded_at", 10**9), ("tokens", True), ("tokens", 0), ("tokens", 10**400), ("namespace", ""),
        ("namespace", "x" * 1000), ("namespace", "\ud800"), ("namespace", 7), ("digest", 5), ("content", None),
        ("backend", "foo"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_refused_by_name(hybrid: Any, tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "chunks.json"
    hr = packed(hybrid(manifest_path=path))
    entries = json.loads(path.read_text())
    entries["b"][field] = value
    path.write_text(json.dumps(entries))
    for look in (lambda: hybrid(manifest_path=path), lambda: hr.has("a"), lambda: hr.prepare_multi(["a"], ASK)):
        with pytest.raises(ValueError, match=rf"chunks\.json is not a manifest .*damaged: 'b' has {field} "):
            look()


def test_a_deep_manifest_is_refused(hybrid: Any, tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    for text in ("[" * 100_000, '{"x":' * 50_000, "", "\x00"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a manifest of chunks"):
            hybrid(manifest_path=path)


def test_threads_share_one_object(hybrid: Any, fresh: None) -> None:
    hr = packed(hybrid(backend="pion"))
    wanted = words(hr.prepare_multi(["b", "a"], ASK)[0], 54)
    got: list[bool] = []

    def ask() -> None:
        got.extend(words(hr.prepare_multi(["b", "a"], ASK)[0], 54) == wanted for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 15


# --- agreement --------------------------------------------------------------------------------------------------------


def test_self_check_measures_and_refuses(hybrid: Any) -> None:
    hr = packed(hybrid())
    alone = hr.self_check(samples=[(STUB, [A], ASK)], least=1.0)  # nothing is moved or unseen: the same computation
    assert (alone.agreement, alone.tokens, alone.samples) == (1.0, 16, 1)
    assert alone.logit_difference < 1e-3
    samples = [(STUB, [A, B, C], ASK), (STUB, [C, B], ASK)]
    blended = hr.self_check(samples=samples, tokens=24, least=0.0)
    assert blended.tokens == 48
    assert blended.agreement < 1.0  # random weights: attention to other packs matters
    assert blended.logit_difference > 0.01
    with pytest.raises(PionMlxCompatError, match=r"of 48 tokens as a full computation, less than 100%"):
        hr.self_check(samples=samples, tokens=24, least=1.0)
    with pytest.raises(PionMlxCompatError, match="less than 100%"):
        hr.prepare_multi(["a"], ASK)
    hr.self_check(samples=samples, least=0.0)
    assert hr.prepare_multi(["a"], ASK)
    with pytest.raises(ValueError, match="tokenizer="):
        hr.self_check()
    with pytest.raises(ValueError, match="a stub, chunks and a question"):
        hr.self_check(samples=[(STUB, [], ASK)])
    other = hr.self_check(models.tiny_llama(seed=3), samples=samples, least=0.0)
    assert other.logit_difference != blended.logit_difference


def test_agreement_falls_when_keys_are_not_moved() -> None:
    model = models.tiny_llama(num_hidden_layers=1)  # one layer: packs need not see each other
    ropes = verified_ropes(model, 1)
    samples = [(STUB, [A, B, C], ASK)]
    moved = agreement.measure(model, ropes, samples, 16)
    assert moved.agreement == 1.0
    assert moved.logit_difference < 1e-4
    assert agreement.measure(model, [None], samples, 16).logit_difference > 0.01


def test_the_name_of_the_published_client() -> None:
    import pion_vllm_mlx

    assert pion_vllm_mlx.HybridRetrievalCache is HybridRetrievalCache


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@BACKENDS
def test_hybrid_retrieval_answers_of_smollm2(hybrid: Any, fresh: None, backend: str) -> None:
    model, tok = models.smollm2_model()

    def ids(text: str) -> list[int]:
        return list(tok.encode(text, add_special_tokens=False))

    hr = hybrid(model, backend)
    result = hr.self_check(tokenizer=tok)
    assert result.agreement >= agreement.LEAST
    hr.set_shared_stub(ids("Answer the question with the help of the notes.\n\n"))
    hr.ingest_pack("ferry", ids("Note: The ferry to Lomvika leaves at half past six and takes forty minutes.\n"))
    hr.ingest_pack("museum", ids("Note: The museum of Lomvika shows 312 clocks and opens at ten.\n"))
    for order in (["ferry", "museum"], ["museum", "ferry"]):
        cache, rest = hr.prepare_multi(order, ids("Question: How many clocks does the museum show?\nAnswer: It shows"))
        assert "312" in tok.decode(models.greedy(model, cache, rest, 6))
