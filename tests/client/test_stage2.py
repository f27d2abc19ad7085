"""PionPromptCache(stage2=True) and caches of make_pion_prompt_cache, on every lane; small models of real classes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import (
    Client,
    PionMlxCompatError,
    PionPrefixCache,
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion.client.attend_lanes import VARIABLE
from pion.client.caches import new_cache
from pion.client.errors import LaneError, PrefixMissError
from pion.errors import CommandError, MismatchError
from tests.support import families, models
from tests.support.process import Process

models.need_mlx()
mx = models.mx

LANES = ("process", "binary", "resp")
IDS, SUFFIX = families.tokens(150), families.tokens(7, 2)
ROWS = ("llama", "qwen2", "qwen3_next", "jamba", "llama4", "gpt_oss", "gemma3")


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


def plain_cache(model: Any, ids: list[int]) -> list[Any]:
    cache = new_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    return cache


def client_of(server: Any, model: Any, **options: Any) -> PionPromptCache:
    return PionPromptCache(model, port=server.port, stage2=True, **{"vquant": "native", **options})


def close(got: Any, want: Any) -> None:
    assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max()


def calls(port: int, name: str) -> int:
    with Client(port=port) as client:
        for line in client.call("INFO", "commandstats").decode().split("\r\n"):
            if line.startswith(f"cmdstat_{name.lower()}:"):
                return int(line.partition("calls=")[2].partition(",")[0])
    return 0


# --- the same answers on every lane -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("family", ROWS)
def test_answers_are_those_of_mlx_lm(server: Any, monkeypatch: pytest.MonkeyPatch, family: str, lane: str) -> None:
    """Windows that wrapped, recurrent states, chunks and sinks among them; a prompt, and then token by token."""
    if (family, lane) == ("gpt_oss", "binary"):
        pytest.skip("attention sinks are not spoken of on the binary lane")
    monkeypatch.setenv(VARIABLE, lane)
    model = families.tiny(family)
    want = families.logits(model, plain_cache(model, IDS), SUFFIX)
    tokens = models.greedy(model, plain_cache(model, IDS), SUFFIX, 40)
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, family)
        cache = make_pion_prompt_cache(model, family, pc, len(IDS))
        assert [slot.offset for slot in cache if hasattr(slot, "offset")] == [150] * sum(
            hasattr(slot, "offset") for slot in new_cache(model)
        )
        got = families.logits(model, cache, SUFFIX)
        assert np.array_equal(got, want) if lane == "process" else close(got, want) is None
        assert models.greedy(model, make_pion_prompt_cache(model, family, pc, len(IDS)), SUFFIX, 40) == tokens
        used = pc.stats()["attend"]["lanes"]
        assert used[lane] == 41 * sum(type(slot).__name__ == "KVCache" for slot in new_cache(model)) or (
            lane == "process" and not used["binary"] + used["resp"]
        )


@pytest.mark.parametrize("lane", ["process", "resp"])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4_text"])
def test_layers_that_share_k_and_v(server: Any, monkeypatch: pytest.MonkeyPatch, family: str, lane: str) -> None:
    monkeypatch.setenv(VARIABLE, lane)
    model = shared_kv(family)
    want = families.logits(model, plain_cache(model, IDS), SUFFIX)
    tokens = models.greedy(model, plain_cache(model, IDS), SUFFIX, 30)
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, family)
        close(families.logits(model, make_pion_prompt_cache(model, family, pc, 150), SUFFIX), want)
        assert models.greedy(model, make_pion_prompt_cache(model, family, pc, 150), SUFFIX, 30) == tokens
        assert pc.stats()["attend"]["lanes"][lane]


def shared_kv(family: str) -> Any:
    module: Any = pytest.importorskip(f"mlx_lm.models.{family}")
    options: dict[str, Any] = {
        "model_type": family, "hidden_size": 32, "num_hidden_layers": 6, "intermediate_size": 48,
        "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "vocab_size": families.VOCABULARY, "vocab_size_per_layer_input": families.VOCABULARY, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
    }  # fmt: skip
    if family == "gemma3n":
        options |= {
            "activation_sparsity_pattern": [0.0] * 6, "altup_num_inputs": 2, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8, "rope_local_base_freq": 1e4,
            "rope_theta": 1e6, "max_position_embeddings": 4096, "final_logit_softcapping": 30.0,
            "query_rescale_scalar": 1.0, "intermediate_size": [48] * 6,
        }  # fmt: skip
        kind = module.TextConfig
        model = module.LanguageModel(kind.from_dict(options))
    else:
        model = module.Model(module.ModelArgs.from_dict(options))
    flat = []
    for at, (key, array) in enumerate(sorted(models.tree_flatten(model.parameters()))):
        values = np.random.default_rng(at).standard_normal(array.shape).astype(np.float32) * 0.2
        flat.append((key, mx.array(values)))
    model.update(models.tree_unflatten(flat))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_model(server: Any, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """K/V are kept word for word by the default format; answers differ by the rounding of the model's own dtype."""
    model = families.tiny("llama", dtype)
    want = families.logits(model, plain_cache(model, IDS), SUFFIX)
    for lane in LANES:
        monkeypatch.setenv(VARIABLE, lane)
        with client_of(server, model, vquant="fp16") as pc:
            pc.get_or_prefill(IDS, dtype)
            got = families.logits(model, make_pion_prompt_cache(model, dtype, pc, len(IDS)), SUFFIX)
        assert np.abs(got - want).max() <= (0.05 if dtype == "bfloat16" else 0.01) * np.abs(want).max(), lane


def test_another_scale_of_the_logits(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server always divides by the root of the head size; Gemma and Granite do not."""
    monkeypatch.setenv(VARIABLE, "resp")
    model = families.tiny("gemma3")
    for layer in model.layers:
        layer.self_attn.scale = 0.1
    want = families.logits(model, plain_cache(model, IDS), SUFFIX)
    with client_of(server, model, scope="scaled") as pc:
        pc.get_or_prefill(IDS, "scaled")
        close(families.logits(model, make_pion_prompt_cache(model, "scaled", pc, len(IDS)), SUFFIX), want)


@pytest.mark.parametrize("fused", [True, False])
def test_long_suffixes_and_the_merging_here(server: Any, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """What does not travel with each question is merged here, in rows of 256 at a time."""
    monkeypatch.setenv(VARIABLE, "resp")
    if not fused:
        monkeypatch.setenv("PION_DISABLE_FUSED_ATTEND", "1")
    model, long = families.tiny("llama"), families.tokens(600, 5)
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, "llama")
        for suffix in (SUFFIX, long):
            want = families.logits(model, plain_cache(model, IDS), suffix)
            close(families.logits(model, make_pion_prompt_cache(model, "llama", pc, 150), suffix), want)
    asked = calls(server.port, "ATTEND.PREFIX.QUERY")
    monkeypatch.setattr("pion.client.prefix_cache._FUSED_MOST", 8 * 2 * 16 * 100)
    with client_of(server, model) as pc:
        cache = make_pion_prompt_cache(model, "llama", pc, 150)
        close(families.logits(model, cache, long), want)
    assert calls(server.port, "ATTEND.PREFIX.QUERY") == asked + 3 * 3


@pytest.mark.parametrize("window", [30, 100, 153, 1000])
def test_windows_over_plain_slots(server: Any, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """A mask of mlx-lm's with a window, over K/V that the server holds: it moves with each row, out of the prefix."""
    base: Any = importlib.import_module("mlx_lm.models.base")
    model = families.tiny("llama")
    if not hasattr(new_cache(model)[0], "make_mask"):
        pytest.skip("this mlx-lm has no windows over plain caches")
    mask_of = base.create_attention_mask
    monkeypatch.setattr(models.llama, "create_attention_mask", lambda h, cache=None, **more: mask_of(
        h, cache, **{**more, "window_size": window}
    ))  # fmt: skip
    want = families.logits(model, plain_cache(model, IDS), SUFFIX)
    tokens = models.greedy(model, plain_cache(model, IDS), SUFFIX, 30)
    monkeypatch.setenv(VARIABLE, "resp")
    name = f"window-{window}"
    with client_of(server, model, scope=name) as pc:
        pc.get_or_prefill(IDS, name)
        close(families.logits(model, make_pion_prompt_cache(model, name, pc, 150), SUFFIX), want)
        assert models.greedy(model, make_pion_prompt_cache(model, name, pc, 150), SUFFIX, 30) == tokens


def test_the_windows_of_the_server_are_not_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "resp")
    model = families.tiny("llama")
    want = families.logits(model, plain_cache(model, IDS), SUFFIX)
    with Process(tmp_path, "--fa-window", "20") as process, client_of(process, model) as pc:
        pc.get_or_prefill(IDS, "doc")
        close(families.logits(model, make_pion_prompt_cache(model, "doc", pc, 150), SUFFIX), want)


# --- sparse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["process", "resp"])
@pytest.mark.parametrize("selector", ["block_mean", "quest"])
def test_all_blocks_are_everything_and_few_are_not(
    server: Any, monkeypatch: pytest.MonkeyPatch, lane: str, selector: str
) -> None:
    monkeypatch.setenv(VARIABLE, lane)
    model = families.tiny("gemma3")
    want = models.greedy(model, plain_cache(model, IDS), SUFFIX, 20)
    step = families.logits(model, plain_cache(model, IDS), SUFFIX[:1])
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, "sparse")

        def cache(blocks: int) -> list[Any]:
            mode = {"K_block": 16, "K_blocks": blocks, "selector": selector}
            return make_pion_prompt_cache(model, "sparse", pc, 150, mode)

        assert [slot.sparse_mode is not None for slot in cache(3)] == [False, False, True]
        assert models.greedy(model, cache(10), SUFFIX, 20) == want
        close(families.logits(model, cache(10), SUFFIX[:1]), step)
        some = families.logits(model, cache(2), SUFFIX[:1])
        assert np.abs(some - step).max() > 1e-4 * np.abs(step).max()


def test_both_selectors_choose_alike_here_and_there(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.tiny("llama")
    for selector in ("block_mean", "quest"):
        seen = []
        for lane in ("process", "resp"):
            monkeypatch.setenv(VARIABLE, lane)
            with client_of(server, model) as pc:
                pc.get_or_prefill(IDS, "alike")
                mode = {"K_block": 16, "K_blocks": 3, "selector": selector}
                seen.append(families.logits(model, make_pion_prompt_cache(model, "alike", pc, 150, mode), SUFFIX[:1]))
        close(*seen)


# --- stored, warm, cold, gone -----------------------------------------------------------------------------------------


def test_k_and_v_cross_the_wire_once_and_both_states_are_looked_up(tmp_path: Path) -> None:
    model = families.tiny("llama")
    with Process(tmp_path) as process, client_of(process, model) as pc:
        assert not pc.lookup("doc")
        pc.get_or_prefill(IDS, "doc")
        assert pc.lookup("doc", IDS)
        assert calls(process.port, "ATTEND.PREFIX.STORE") == 0
        assert calls(process.port, "KV.PREFIX.WARM") == 1
        assert pc.attend_drop("doc") == 3
        with PionPromptCache(model, vquant="native", port=process.port) as stage1:
            assert stage1.lookup("doc", IDS)
        assert not pc.lookup("doc", IDS)
        pc.get_or_prefill(IDS, "doc")
        assert pc.lookup("doc", IDS)
        assert (pc.hits, pc.misses, calls(process.port, "KV.PREFIX.WARM")) == (1, 1, 2)
        pc.drop("doc")
        assert not pc.lookup("doc")


def test_put_warms_too_and_so_does_a_store_in_the_background(tmp_path: Path) -> None:
    model = families.tiny("llama")
    with Process(tmp_path) as process, client_of(process, model, background_store=True) as pc:
        assert pc.put(plain_cache(model, IDS), IDS, "put")
        assert pc.lookup("put", IDS)
        pc.get_or_prefill(IDS, "background")
        assert pc.lookup("background", IDS)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_a_restart_nothing_is_prefilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Another process meets a server that was killed: rows and states are on its disk, nothing is in its engine."""
    monkeypatch.setenv(VARIABLE, "resp")
    model = families.tiny(family)
    want = models.greedy(model, plain_cache(model, IDS), SUFFIX, 20)
    with Process(tmp_path) as process:
        with client_of(process, model) as pc:
            pc.get_or_prefill(IDS, "doc")
        process.restart()
        passes: list[int] = []
        monkeypatch.setattr(type(model), "__call__", counted(type(model).__call__, passes))
        with client_of(process, model) as pc:
            assert not pc.lookup("doc", IDS)
            pc.get_or_prefill(IDS, "doc")
            assert (pc.hits, pc.misses, pc.stats()["last"]["reused"]) == (1, 0, 150)
            assert pc.lookup("doc", IDS)
            cache = make_pion_prompt_cache(model, "doc", pc, 150)
            assert sum(passes) <= 2, "single tokens, of which no logits are computed"
            assert models.greedy(model, cache, SUFFIX, 20) == want
            assert sum(passes) <= 2 + len(SUFFIX) + 20


def counted(call: Any, passes: list[int]) -> Any:
    def counting(self: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        passes.append(inputs.shape[1])
        return call(self, inputs, *args, **more)

    return counting


def test_a_cache_is_made_of_what_is_stored_without_get_or_prefill(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a client that has no model, and after the engine let go of it."""
    monkeypatch.setenv(VARIABLE, "resp")
    for family in ("llama", "gemma3"):
        model = families.tiny(family)
        want = models.greedy(model, plain_cache(model, IDS), SUFFIX, 20)
        with client_of(server, model) as pc:
            pc.get_or_prefill(IDS, f"made-{family}")
            pc.attend_drop(f"made-{family}")
        with PionPromptCache(port=server.port) as pc:
            cache = make_pion_prompt_cache(model, f"made-{family}", pc, 150)
            assert models.greedy(model, cache, SUFFIX, 20) == want


def test_layers_that_go_cold_in_the_middle_are_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "resp")
    model = families.tiny("llama")
    want = models.greedy(model, plain_cache(model, IDS), SUFFIX, 20)
    with Process(tmp_path, "--attend-warm-slots", "4") as process, client_of(process, model) as pc:
        pc.get_or_prefill(IDS, "doc")
        cache = make_pion_prompt_cache(model, "doc", pc, 150)
        got = models.greedy(model, cache, SUFFIX, 10)
        assert [pc.explain(IDS, name)["attend"] for name in ("doc", "nobody")] == ["warm", "missing"]
        for layer in range(4):
            pc.attend_store_layer("others", layer, np.ones((2, 3, 8)), np.ones((2, 3, 8)))
        assert pc.explain(IDS, "doc")["attend"] == "cold"
        assert not pc.lookup("doc", IDS)
        got += models.greedy(model, cache, got[-1:], 10)
        assert pc.cold_rehydrates_observed == pc.stats()["attend"]["cold_rehydrates"] == 1
    assert got == want


def test_what_is_not_the_prefix_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = families.tiny("llama"), families.tiny("llama", seed=9)
    for lane in ("process", "resp"):
        monkeypatch.setenv(VARIABLE, lane)
        name = f"refused-{lane}"
        with client_of(server, model) as pc:
            pc.get_or_prefill(IDS, name)
            with pytest.raises(ValueError, match=f"prefix_len=149, but '{name}' holds 150 tokens"):
                make_pion_prompt_cache(model, name, pc, 149)
            with pytest.raises(MismatchError, match="another model"):
                make_pion_prompt_cache(other, name, pc, 150)
            with pytest.raises(LaneError if lane == "process" else PrefixMissError, match="get_or_prefill"):
                make_pion_prompt_cache(model, "nobody", pc, 150)
            with pytest.raises(ValueError, match="prefix_len"):
                make_pion_prompt_cache(model, name, pc, 0)
        with client_of(server, model, on_mismatch="recompute") as pc:
            pc.get_or_prefill(families.tokens(150, 8), name)
            if lane == "resp":
                with pytest.raises(MismatchError, match="other tokens than were asked for here"):
                    make_pion_prompt_cache(model, name, pc, 150)


def test_layers_of_another_shape_are_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "resp")
    model = families.tiny("llama")
    with client_of(server, model) as pc:
        for layer in range(3):
            pc.attend_store_layer("by hand", layer, np.ones((2, 20, 8)), np.ones((2, 20, 8)))
        assert len(make_pion_prompt_cache(model, "by hand", pc, 20)) == 3
        pc.attend_store_layer("by hand", 1, np.ones((2, 19, 8)), np.ones((2, 19, 8)))
        with pytest.raises(PrefixMissError, match="not registered"):
            make_pion_prompt_cache(model, "by hand", pc, 20)


def test_models_without_rows_are_refused_by_name(server: Any) -> None:
    for family, options in (("mamba", {}), ("qwen2", {"kv_bits": 8, "kv_group_size": 32})):
        with pytest.raises(PionMlxCompatError, match="keeps plain K/V"):
            client_of(server, families.tiny(family), **options)
    with pytest.raises(ValueError, match="softmax_bitexact"):
        client_of(server, families.tiny("llama"), softmax_bitexact=True)


def test_heads_of_a_size_that_the_server_does_not_know(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.tiny_llama(hidden_size=48)
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, "twelve")
        assert "heads have 12 values; the server attends to multiples of 8 up to 512" in caplog.text
        want = models.greedy(model, plain_cache(model, IDS), SUFFIX, 5)
        assert models.greedy(model, make_pion_prompt_cache(model, "twelve", pc, 150), SUFFIX, 5) == want  # in process
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    with client_of(server, model) as pc, pytest.raises(PionMlxCompatError, match="heads have 12 values"):
        make_pion_prompt_cache(model, "twelve", pc, 150)


def test_a_server_without_attention_costs_only_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = families.tiny("llama")
    with Process(tmp_path, "--attention", "off") as process, client_of(process, model) as pc:
        pc.get_or_prefill(IDS, "doc")
        assert "the server does not hold it for attention" in caplog.text
        assert (pc.store_errors, pc.lookup("doc", IDS)) == (0, False)
        cache = make_pion_prompt_cache(model, "doc", pc, 150)
        assert models.greedy(model, cache, SUFFIX, 5) == models.greedy(model, plain_cache(model, IDS), SUFFIX, 5)
    with Process(tmp_path / "gone") as process:
        port = process.port
    with PionPromptCache(model, port=port, stage2=True) as pc:
        pc.get_or_prefill(IDS, "down")
        assert len(make_pion_prompt_cache(model, "down", pc, 150)) == 3


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["process", "resp"])
def test_what_mlx_lm_asks_of_a_slot(server: Any, monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

    monkeypatch.setenv(VARIABLE, lane)
    model = families.tiny("llama")
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, "slots")
        cache = make_pion_prompt_cache(model, "slots", pc, 150)
        first = cache[0]
        assert isinstance(first, PionPrefixCache)
        assert (first.offset, first.prefix_len, first.fa_window) == (150, 150, None)
        assert lane == "process" or first.state == ()
        want = families.logits(model, cache, SUFFIX)
        keys, values = first.state
        assert keys.shape == values.shape == (1, 2, 157 if lane == "process" else 7, 8)
        assert (first.offset, first.size(), first.empty()) == (157, 157, False)
        assert first.nbytes > 0
        twin = copy.deepcopy(cache)
        families.logits(model, twin, [5, 6, 7])
        assert (first.offset, twin[0].offset) == (157, 160)
        assert can_trim_prompt_cache(cache)
        assert trim_prompt_cache(twin, 3) == 3
        again = families.logits(model, twin, [5, 6, 7])
        close(families.logits(model, cache, [5, 6, 7]), again)
        assert trim_prompt_cache(cache, 100) == 10, "the suffix at most"
        close(families.logits(model, cache, SUFFIX), want)
        states = [slot.state for slot in cache]
        fresh = make_pion_prompt_cache(model, "slots", pc, 150)
        for slot, state in zip(fresh, states, strict=True):
            slot.state = state
        close(families.logits(model, fresh, [3]), families.logits(model, cache, [3]))
        if lane == "resp":
            with pytest.raises(NotImplementedError, match="kv_bits"):
                first.to_quantized()


@pytest.mark.parametrize("lane", ["process", "resp"])
def test_mlx_lms_own_generate(server: Any, monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    module: Any = importlib.import_module("mlx_lm.generate")
    if not hasattr(module, "generate_step"):
        module = importlib.import_module("mlx_lm.utils")  # up to 0.21

    monkeypatch.setenv(VARIABLE, lane)
    model = families.tiny("gemma3")
    want = models.greedy(model, plain_cache(model, IDS), SUFFIX, 20)
    with client_of(server, model) as pc:
        pc.get_or_prefill(IDS, "generate")
        cache = make_pion_prompt_cache(model, "generate", pc, 150)
        steps = module.generate_step(mx.array(SUFFIX), model, max_tokens=20, prompt_cache=cache)
        assert [int(token) for token, _ in steps] == want


def test_what_this_process_holds_is_bounded_and_its_own(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.tiny("llama")
    nbytes = 2 * 3 * 2 * 150 * 8 * 4
    with client_of(server, model, local_bytes=2 * nbytes) as pc:
        for number in range(3):
            returned = pc.get_or_prefill(families.tokens(150, number), f"bound-{number}")
            models.greedy(model, returned, SUFFIX, 3)  # the caller goes on with it
        assert pc._residents.nbytes == 2 * nbytes
        caches = [make_pion_prompt_cache(model, f"bound-{number}", pc, 150) for number in range(3)]
        assert ["server" in repr(cache[0]) for cache in caches] == [True, False, False]
        want = models.greedy(model, plain_cache(model, families.tokens(150, 2)), SUFFIX, 10)
        assert models.greedy(model, caches[2], SUFFIX, 10) == want
        assert models.greedy(model, make_pion_prompt_cache(model, "bound-2", pc, 150), SUFFIX, 10) == want
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    with client_of(server, model) as pc:
        pc.get_or_prefill(families.tokens(150, 2), "bound-2")
        assert pc._residents.nbytes == 0
        assert "server" in repr(make_pion_prompt_cache(model, "bound-2", pc, 150)[0])


@pytest.mark.parametrize("lane", ["binary", "resp"])
@pytest.mark.parametrize("how", ["replace", "drop"])
def test_a_cache_never_goes_on_with_what_its_name_means_since(
    server: Any, monkeypatch: pytest.MonkeyPatch, lane: str, how: str
) -> None:
    """Another client gives the name to other tokens of the same length, and has them held for attention."""
    monkeypatch.setenv(VARIABLE, lane)
    model, ns = families.tiny("llama"), f"means-{lane}-{how}"
    other = [*IDS[:-1], IDS[-1] + 1]
    with client_of(server, model) as pc, client_of(server, model, on_mismatch="replace") as rival:
        pc.get_or_prefill(IDS, ns)
        cache = make_pion_prompt_cache(model, ns, pc, len(IDS))
        mx.eval(model(mx.array([SUFFIX]), cache=cache))
        if how == "drop":
            rival.drop(ns)
        rival.get_or_prefill(other, ns)
        assert rival.lookup(ns, other)
        with pytest.raises((CommandError, LaneError)):
            mx.eval(model(mx.array([[1]]), cache=cache))
        fresh = make_pion_prompt_cache(model, ns, rival, len(other))
        want = families.logits(model, plain_cache(model, other), SUFFIX)
        close(families.logits(model, fresh, SUFFIX), want)
        assert rival.attend_drop(ns) == len(rival.layout.rows)
        assert not rival.lookup(ns)
