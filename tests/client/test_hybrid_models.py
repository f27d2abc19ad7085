"""Models whose layers keep more than plain K/V: stored here, restored in another process and after a restart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import PionPromptCache
from pion.client import slots
from pion.client.caches import PionMlxCompatError, new_cache, prefill
from pion.errors import MismatchError
from pion.testing import server as start_server
from tests.support import families, in_another_process, models
from tests.support.process import Process

models.need_mlx()
mx = models.mx

SUFFIX = [5, 6, 7]
LENGTHS = (15, 16, 17, 60)  # a block of 16 and its neighbours; beyond every window
_names = itertools.count()


def drawn(count: int) -> list[int]:
    """Ids that no other prefix begins with: a stored one that does would be reused."""
    return families.tokens(count, next(_names) + 1000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def ns() -> str:
    return f"hybrid-{next(_names)}"


@pytest.fixture
def cache_of(server: Any) -> Iterator[Callable[..., PionPromptCache]]:
    """A `PionPromptCache` on the server, lossless unless asked for otherwise, closed at the end."""
    made: list[PionPromptCache] = []

    def make(model: Any = None, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, port=server.port, **{"vquant": "native", **options}))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def shown(cache: list[Any]) -> list[Any]:
    """Everything that counts in a prompt cache, bit for bit."""
    states = [slots.take(leaf) for leaf in slots.leaves(cache)]
    return [
        (s.name, s.numbers, s.absent, {k: (t.dtype, t.words.shape, t.words.tobytes()) for k, t in s.tensors.items()})
        for s in states
    ]


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return bool(np.isfinite(a).all() and a.tobytes() == b.tobytes())


# --- whole prefixes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_d11_a_fetched_cache_answers_exactly_as_the_computed_one(
    cache_of: Callable[..., PionPromptCache], ns: str, family: str
) -> None:
    """At a block of 16 and its neighbours, windows wrapped and not."""
    model, other = families.tiny(family), families.tiny(family)
    first, second = cache_of(model), cache_of(other)
    for count in LENGTHS:
        ids = drawn(count)
        cold, warm = first.get_or_prefill(ids, f"{ns}-{count}"), second.get_or_prefill(ids, f"{ns}-{count}")
        assert shown(cold) == shown(warm)
        alone = prefill(model, ids, None)
        want = families.logits(model, alone, SUFFIX)
        assert same(families.logits(model, cold, SUFFIX), want), count
        assert same(families.logits(other, warm, SUFFIX), want), count
        assert same(families.logits(model, cold, [1]), families.logits(other, warm, [1])), count
        assert second.stats()["last"]["reused"] == count
    assert (first.hits, second.hits, second.misses, second.store_errors) == (0, len(LENGTHS), 0, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["jamba", "gemma3"])
def test_d11_in_sixteen_bits(cache_of: Callable[..., PionPromptCache], ns: str, family: str, dtype: str) -> None:
    model, ids = families.tiny(family, dtype), drawn(33)
    pc = cache_of(model, vquant="fp16")
    cold, warm = pc.get_or_prefill(ids, ns), pc.get_or_prefill(ids, ns)
    assert pc.hits == 1
    assert shown(cold) == shown(warm)
    assert models.greedy(model, cold, SUFFIX, 8) == models.greedy(model, warm, SUFFIX, 8)


@pytest.mark.timeout(400)  # a process that imports mlx-lm, twice
def test_d14_another_process_and_a_restarted_server_give_the_same_answers(tmp_path: Path) -> None:
    """All families, stored here; restored in another process; once more after SIGKILL of the server."""
    with Process(tmp_path / "data") as process:
        jobs, want = [], []
        for family in families.FAMILIES:
            try:
                model = families.tiny(family)
            except pytest.skip.Exception:
                continue
            ids = drawn(50)
            with PionPromptCache(model, vquant="native", port=process.port) as pc:
                want.append(families.logits(model, pc.get_or_prefill(ids, f"ns {family}"), SUFFIX))
                assert (pc.misses, pc.store_errors) == (1, 0), family
            jobs.append({"family": family, "ns": f"ns {family}", "ids": ids})
        quantized = {"kv_bits": 8, "kv_group_size": 32}
        model = families.tiny("qwen2")
        with PionPromptCache(model, vquant="native", port=process.port, **quantized) as pc:
            ids = drawn(50)
            want.append(families.logits(model, pc.get_or_prefill(ids, "quantized"), SUFFIX))
        jobs.append({"family": "qwen2", "ns": "quantized", "ids": ids, "options": quantized})
        for restarted in (False, True):
            if restarted:
                process.restart()
            job = {"port": process.port, "suffix": SUFFIX, "jobs": jobs}
            said, got = in_another_process.ask(tmp_path / "logits.npy", **job)
            assert all((stats["hits"], stats["misses"]) == (1, 0) for stats in said.values()), said
            assert same(got, np.stack(want))


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "gemma3"])
def test_formats_apply_to_rows_and_never_to_states(
    cache_of: Callable[..., PionPromptCache], ns: str, family: str
) -> None:
    model, ids = families.tiny(family, "float16"), drawn(40)
    pc = cache_of(model, vquant="int8")
    cold, warm = pc.get_or_prefill(ids, ns), pc.get_or_prefill(ids, ns)
    assert (pc.hits, pc.store_errors) == (1, 0)
    assert pc.layout is not None
    for place, (a, b) in enumerate(zip(cold, warm, strict=True)):
        assert (shown([a]) == shown([b])) is (place not in pc.layout.rows), place
    exact = cache_of(model, vquant="int8", softmax_bitexact=True)
    name = f"{ns}-exact"
    assert shown(exact.get_or_prefill(ids, name)) == shown(exact.get_or_prefill(ids, name)) == shown(cold)
    with pytest.raises(MismatchError, match="stored as int8, asked for as fp16"):
        exact.get_or_prefill(ids, ns)
    assert shown(pc.get_or_prefill(ids, name)) == shown(cold), "what is exact serves everybody"


@pytest.mark.parametrize("count", [15, 16, 17, 60])
def test_quantized_and_rotating_caches_by_option(cache_of: Callable[..., PionPromptCache], ns: str, count: int) -> None:
    """kv_bits and max_kv_size as mlx-lm's generate takes them; each kind is another prefix."""
    model, ids = families.tiny("qwen2"), drawn(count)
    kinds = {"plain": {}, "8": {"kv_bits": 8, "kv_group_size": 32}, "4": {"kv_bits": 4, "kv_group_size": 32}}
    kinds["window"] = {"max_kv_size": 32}
    for name, options in kinds.items():
        pc = cache_of(model, **options)
        cold, warm = pc.get_or_prefill(ids, f"{ns}-{name}"), pc.get_or_prefill(ids, f"{ns}-{name}")
        assert pc.hits == 1
        assert shown(cold) == shown(warm)
        assert same(families.logits(model, cold, SUFFIX), families.logits(model, warm, SUFFIX))
    with pytest.raises(MismatchError, match="another digest"):
        cache_of(model, kv_bits=8, kv_group_size=32).get_or_prefill(ids, f"{ns}-plain")


def test_mlx_lm_goes_on_with_what_is_returned(
    cache_of: Callable[..., PionPromptCache], ns: str, tmp_path: Path
) -> None:
    """save and load, trim, quantize; and every call returns an independent copy."""
    lm = pytest.importorskip("mlx_lm.models.cache")
    for family in ("llama", "jamba", "gemma3"):
        model, ids = families.tiny(family), drawn(30)
        pc = cache_of(model)
        kept = shown(pc.get_or_prefill(ids, f"{ns}-{family}"))
        one, two = (pc.get_or_prefill(ids, f"{ns}-{family}") for _ in range(2))
        families.logits(model, one, SUFFIX)
        for leaf in slots.leaves(one):
            for array in leaf.cache if hasattr(leaf, "cache") else (leaf.keys, leaf.values):
                array[...] = 0
        assert shown(two) == kept
        path = str(tmp_path / f"{family}.safetensors")
        lm.save_prompt_cache(path, two)
        loaded = lm.load_prompt_cache(path)
        assert same(families.logits(model, loaded, SUFFIX), families.logits(model, two, SUFFIX))
        three = pc.get_or_prefill(ids, f"{ns}-{family}")
        assert shown(three) == kept
        trimmed = lm.trim_prompt_cache(three, 10)
        assert trimmed == (0 if family == "jamba" else 10)  # its recurrent layers cannot be trimmed
    pc = cache_of(families.tiny("qwen2"))
    cold, warm = pc.get_or_prefill(ids, f"{ns}-wide"), pc.get_or_prefill(ids, f"{ns}-wide")
    assert pc.hits == 1
    assert shown([slot.to_quantized(32, 8) for slot in cold]) == shown([slot.to_quantized(32, 8) for slot in warm])


# --- put --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3", "deepseek_v32"])
def test_put_stores_a_cache_that_the_caller_has(cache_of: Callable[..., PionPromptCache], ns: str, family: str) -> None:
    model, ids = families.tiny(family), drawn(45)
    mine = prefill(model, ids[:40], None)
    model(mx.array([ids[40:]]), cache=mine)  # as a generation goes on
    pc = cache_of(model)
    assert pc.put(mine, ids, ns) is True
    assert pc.put(mine, ids, ns) is True, "it is there already"
    want = shown(mine)
    families.logits(model, mine, SUFFIX)  # the caller goes on with it
    assert shown(cache_of(families.tiny(family)).get_or_prefill(ids, ns)) == want


def test_put_refuses_what_is_not_so(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    model, ids = families.tiny("qwen2"), drawn(20)
    pc = cache_of(model)
    with pytest.raises(ValueError, match="a KVCache of 20 tokens in a cache that should hold 19"):
        pc.put(prefill(model, ids, None), ids[:19], ns)
    with pytest.raises(PionMlxCompatError, match=r"a cache of .*RotatingKVCache.*this model.*has 2 x KVCache"):
        pc.put(new_cache(model, cache_of(model, max_kv_size=8)._options), ids, ns)
    with pytest.raises(PionMlxCompatError, match=r"heads x 32 float16, not this model's"):
        pc.put(prefill(families.tiny("qwen2", "float16"), ids, None), ids, ns)
    pc.get_or_prefill(ids, ns)
    with pytest.raises(MismatchError, match="another digest"):
        pc.put(prefill(model, ids[:9], None), ids[:9], ns)
    keeper = cache_of(model, on_mismatch="recompute")
    assert keeper.put(prefill(model, ids[:9], None), ids[:9], ns) is False
    assert pc.lookup(ns, ids) is True


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blob",
    [b"", b"{}", b"[]", b'{"version":2}', b"\xff\xfe", b'{"version":1,"tokens":"x"}', b"[" * 50_000],
)
def test_d8_a_manifest_that_says_nonsense_is_a_miss(
    cache_of: Callable[..., PionPromptCache], ns: str, blob: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = families.tiny("gemma3"), drawn(20)
    pc = cache_of(model)
    want = shown(pc.get_or_prefill(ids, ns))
    assert pc.resp.call("SSM.PREFIX.STORE", ns, 0, blob) == b"+OK\r\n"
    assert shown(pc.get_or_prefill(ids, ns)) == want
    assert pc.hits == 0
    assert "cannot be used and is computed again" in caplog.text


@pytest.mark.parametrize("number", [2, 3])
def test_a_state_of_another_leaf_is_never_used(
    cache_of: Callable[..., PionPromptCache], ns: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """States of the same shape exchanged, cut off, and of another moment."""
    model, ids = families.tiny("gemma3"), drawn(20)
    pc = cache_of(model)
    want = shown(pc.get_or_prefill(ids, ns))
    cache_of(model, scope="apart").get_or_prefill(ids[:19], f"{ns}-other")
    states = {n: pc.resp.call("SSM.PREFIX.FETCH", ns, n).partition(b"\r\n")[2][:-2] for n in (2, 3)}
    other = pc.resp.call("SSM.PREFIX.FETCH", f"{ns}-other", number).partition(b"\r\n")[2][:-2]
    for wrong in (states[5 - number], states[number][:-1], states[number][:20], b"", other):
        pc.drop(ns)
        pc.get_or_prefill(ids, ns)
        pc.resp.call("SSM.PREFIX.STORE", ns, number, wrong)
        assert shown(pc.get_or_prefill(ids, ns)) == want
        assert pc.hits == 0
    assert "is computed again" in caplog.text
