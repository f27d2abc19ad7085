"""Keys at another position: against the model's own rope, for every kind, and against models computed there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from pion.client import caches
from pion.client.caches import PionMlxCompatError
from pion.client.hybrid import HybridRetrievalCache
from pion.client.rotate import Mover, layer_ropes, verified_ropes
from tests.support import models

models.need_mlx()
mx = models.mx

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # as Llama 3.2 has it
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}


def longrope(dims: int) -> dict[str, Any]:
    half = dims // 2
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + i / 4 for i in range(half)],
    }


HEAD = 64
KINDS: dict[str, tuple[int, float, bool, dict[str, Any] | None]] = {  # dims, theta, traditional, scaling
    "plain": (HEAD, 1e4, False, None),
    "large theta": (HEAD, 1e6, False, None),
    "traditional": (HEAD, 1e4, True, None),
    "linear": (HEAD, 1e4, False, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (HEAD, 5e5, False, LLAMA3),
    "llama3 traditional": (HEAD, 5e5, True, LLAMA3),
    "yarn": (HEAD, 1e6, False, YARN),
    "partial": (HEAD // 2, 1e4, False, None),
    "partial traditional": (HEAD // 2, 1e4, True, None),
    "partial yarn": (HEAD // 2, 1e6, False, YARN),
    "longrope": (HEAD, 1e4, False, longrope(HEAD)),
    "proportional": (HEAD, 1e6, False, PROPORTIONAL),
}


def made(make: Callable[[], Any]) -> Any:
    """What `make` gives, unless an old mlx-lm does not have it."""
    import mlx_lm

    try:
        return make()
    except (ImportError, ValueError, AttributeError) as error:
        if tuple(int(part) for part in mlx_lm.__version__.split(".")[:2]) >= (0, 32):
            raise
        pytest.skip(f"mlx-lm {mlx_lm.__version__}: {error}")


class Holder:
    """A model as `layer_ropes` sees it: each layer a rope module of mlx-lm."""

    def __init__(self, *modules: Any) -> None:
        self.layers = modules


def rope_module(kind: str) -> Any:
    """What mlx-lm itself builds for such a configuration."""
    dims, theta, traditional, scaling = KINDS[kind]
    return made(
        lambda: importlib.import_module("mlx_lm.models.rope_utils").initialize_rope(
            dims, theta, traditional, scaling, 32768
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), [(0, 8064), (8064, 0), (37, 5001), (4000, 4001), (2916, 195)])
def test_d15_moved_keys_are_those_of_the_new_position(kind: str, old: int, new: int) -> None:
    module = rope_module(kind)
    mx.random.seed(old)
    keys = mx.random.normal((1, 2, 128, HEAD))
    stored, wanted = (module(mx.array(keys), offset=at) for at in (old, new))
    moved = Mover(layer_ropes(Holder(module))).keys(0, stored, old, new)
    scale = mx.abs(wanted).max()
    assert (mx.abs(moved - wanted).max() / scale).item() <= 1e-5
    assert (mx.abs(stored - wanted).max() / scale).item() > 0.01  # there was something to do


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_d15_sixteen_bit_keys_are_turned_in_float32(dtype: str) -> None:
    module = rope_module("llama3")
    mover = Mover(layer_ropes(Holder(module)))
    keys = module(mx.random.normal((1, 2, 64, HEAD)), offset=10).astype(getattr(mx, dtype))
    moved = mover.keys(0, keys, 10, 7000)
    assert moved.dtype == keys.dtype
    exact = mover.keys(0, keys.astype(mx.float32), 10, 7000)
    assert mx.array_equal(moved, exact.astype(keys.dtype))  # one rounding, at the end


def test_d15_each_layer_has_its_own_theta() -> None:
    gemma3 = made(lambda: importlib.import_module("mlx_lm.models.gemma3_text"))
    args = gemma3.ModelArgs(  # its defaults: theta 1e4 in local layers, 1e6 in global ones
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=3, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=64, sliding_window_pattern=3,
    )  # fmt: skip
    model = gemma3.Model(args)
    ropes = layer_ropes(model)
    assert [dict(pair for pair in rope.key[1:])["base"] for rope in ropes if rope] == [1e4, 1e4, 1e6]
    mover = Mover(ropes)
    keys = mx.random.normal((1, 1, 32, 16))
    for layer in (0, 2):
        module = model.layers[layer].self_attn.rope
        stored, wanted = module(keys, offset=5), module(keys, offset=8000)
        assert mx.abs(mover.keys(layer, stored, 5, 8000) - wanted).max().item() <= 1e-5 * mx.abs(wanted).max().item()


# --- models -----------------------------------------------------------------------------------------------------------


def randomized(model: Any, seed: int = 1) -> Any:
    mx.random.seed(seed)
    weights = [
        (name, mx.random.normal(array.shape) * (0.3 if array.ndim > 1 else 0.1) + (array.ndim == 1))
        for name, array in models.tree_flatten(model.parameters())
    ]
    model.update(models.tree_unflatten(weights))
    model.eval()
    return model


def architecture(name: str, **options: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return randomized(module.Model(module.ModelArgs(model_type=name, **options)))


def phi() -> Any:
    return architecture(
        "phi", vocab_size=96, hidden_size=32, num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=2,
        partial_rotary_factor=0.5, intermediate_size=32, max_position_embeddings=16384,
    )  # fmt: skip


def qwen3() -> Any:
    return architecture(
        "qwen3", hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=4, rms_norm_eps=1e-6,
        vocab_size=96, num_key_value_heads=2, max_position_embeddings=16384, rope_theta=1e6, head_dim=16,
        tie_word_embeddings=False,
    )  # fmt: skip


def two_thetas() -> Any:
    from mlx import nn

    model = models.tiny_llama()
    model.layers[1].self_attn.rope = nn.RoPE(8, base=1e6)
    return model


LONG = {"max_position_embeddings": 32768}
MOVABLE: dict[str, Callable[[], Any]] = {
    "llama": models.tiny_llama,
    "traditional": lambda: models.tiny_llama(rope_traditional=True),
    "linear": lambda: models.tiny_llama(rope_scaling={"type": "linear", "factor": 2.0}),
    "llama3": lambda: models.tiny_llama(rope_scaling={**LLAMA3, "original_max_position_embeddings": 512}, **LONG),
    "yarn": lambda: models.tiny_llama(rope_scaling=YARN, **LONG),
    "longrope": lambda: models.tiny_llama(rope_scaling=longrope(8), **LONG),
    "theta by layer": two_thetas,
    "phi: half of each head": phi,
    "qwen3: norms before the rope": qwen3,
}
STUB, A, B = [1, 2, 3], list(range(10, 30)), list(range(40, 71))
ORDERS = {"swapped": "ba", "repeated": "aba", "single": "b", "in order": "ab"}


def parted(order: str) -> list[int]:
    return [*STUB, *(token for name in order for token in (A if name == "a" else B))]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", MOVABLE)
def test_d15_the_first_layer_of_a_composition_is_that_of_the_whole_prompt(name: str, order: str) -> None:
    """The keys of layer 0 depend on token and position alone, so they must be those of a full computation."""
    model = made(MOVABLE[name])
    hr = HybridRetrievalCache(model)
    hr.set_shared_stub(STUB)
    hr.ingest_pack("a", A)
    hr.ingest_pack("b", B)
    cache, _ = hr.prepare_multi(list(order), [5])
    ids = parted(order)
    whole = caches.prefill(model, ids, None)
    assert {layer.offset for layer in cache} == {len(ids)}
    for got, wanted in ((cache[0].keys, whole[0].keys), (cache[0].values, whole[0].values)):
        got, wanted = got[:, :, : len(ids)], wanted[:, :, : len(ids)]
        assert (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item() <= 1e-5


@pytest.mark.parametrize("options", [{"rope_scaling": LLAMA3}, {"rope_traditional": True}])
def test_d15_up_to_position_8192(options: dict[str, Any]) -> None:
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = models.tiny_llama(**one, **LONG, **options)
    chunk = [(7 * i + i // 5) % 96 for i in range(1023)]
    hr = HybridRetrievalCache(model)
    hr.set_shared_stub([1] * 8)
    hr.ingest_pack("a", chunk)
    cache, _ = hr.prepare_multi(["a"] * 8, [5])
    whole = caches.prefill(model, [1] * 8 + chunk * 8, 512)
    got, wanted = (c[0].keys[:, :, :8192] for c in (cache, whole))
    assert (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item() <= 1e-5


def test_d15_a_pack_that_stays_where_it_was_is_the_whole_computation() -> None:
    model = models.tiny_llama()
    hr = HybridRetrievalCache(model)
    hr.set_shared_stub(STUB)
    hr.ingest_pack("a", A)
    cache, rest = hr.prepare_multi(["a"], [5, 6])
    assert models.greedy(model, cache, rest, 20) == models.greedy(
        model, caches.prefill(model, [*STUB, *A], None), [5, 6], 20
    )


# --- refusals ---------------------------------------------------------------------------------------------------------


def gpt2() -> Any:
    return architecture(
        "gpt2", n_ctx=256, n_embd=32, n_head=2, n_layer=2, n_positions=256, layer_norm_epsilon=1e-5, vocab_size=96
    )


def nanochat() -> Any:
    return architecture(
        "nanochat", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=96,
        max_position_embeddings=2048, intermediate_size=32,
    )  # fmt: skip


def two_ropes() -> Any:
    from mlx import nn

    model = models.tiny_llama()
    model.layers[1].self_attn.index_rope = nn.RoPE(8, base=1e6)
    return model


def turned_twice() -> Any:
    """A layer whose modules look right, and which does more with its keys than they say."""
    model = models.tiny_llama()
    attention = model.layers[1].self_attn

    class Norm(type(attention.rope)):  # type: ignore[misc]
        def __call__(self, x: Any, offset: int = 0) -> Any:
            return super().__call__(x, offset=offset) * (1 + mx.arange(8) / 8)

    Norm.__name__, Norm.__module__ = "RoPE", "mlx.nn.layers.positional_encoding"
    attention.rope = Norm(8)
    return model


def dynamic() -> Any:
    if not hasattr(importlib.import_module("mlx_lm.models.rope_utils"), "DynamicNTKScalingRoPE"):
        raise ImportError("no dynamic NTK scaling, or one that is ignored")
    return models.tiny_llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, **LONG)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "frequencies that depend on the length": (
        dynamic,
        r"layer 0 of mlx_lm\.models\.llama\.Model turns its keys with .*\.DynamicNTKScalingRoPE, .*Llama3RoPE",
    ),
    "learned positions": (gpt2, r"keys of mlx_lm\.models\.gpt2\.Model cannot be moved: .* layer 0 \(no rope among"),
    "a rope that is no module": (
        nanochat,
        r"mlx_lm\.models\.nanochat\.Model cannot be moved: .* layer 0 \(no rope among",
    ),
    "two ropes": (two_ropes, r"layer 1 of .* has 2 different ropes \(.*RoPE and RoPE\)"),
    "more than a rope": (turned_twice, r"keys of .*llama\.Model cannot be moved: .* layer 1 \(RoPE\) has others"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_d15_what_cannot_be_moved_is_refused_by_name(what: str) -> None:
    make, text = REFUSED[what]
    model = made(make)
    hr = HybridRetrievalCache(model)  # one chunk at the start needs no moving
    hr.ingest("a", A)
    assert hr.prepare("a", [5])[0][0].offset == len(A)
    with pytest.raises(PionMlxCompatError, match=text):
        hr.set_shared_stub(STUB)
    with pytest.raises(RuntimeError, match="set_shared_stub"):
        hr.ingest_pack("b", B)


def test_models_with_windows_or_recurrent_layers_are_refused_by_the_name_of_their_caches() -> None:
    gemma3 = made(lambda: importlib.import_module("mlx_lm.models.gemma3_text"))
    args = gemma3.ModelArgs(
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=64, sliding_window_pattern=2,
    )  # fmt: skip
    with pytest.raises(PionMlxCompatError, match="RotatingKVCache"):
        HybridRetrievalCache(gemma3.Model(args))


def test_a_verified_model_is_told_apart_by_every_layer() -> None:
    assert [rope is not None for rope in verified_ropes(models.tiny_llama(num_hidden_layers=3), 3)] == [True] * 3
    with pytest.raises(PionMlxCompatError, match="2 layers and 3 caches"):
        verified_ropes(models.tiny_llama(), 3)
