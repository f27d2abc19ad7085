"""mlx-lm's cache objects taken apart and put together: every class, bit for bit, and unknown ones refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion.client import slots
from pion.client.caches import CacheOptions, PionMlxCompatError, new_cache, prefill
from tests.support import families, models

models.need_mlx()
mx = models.mx
lm = pytest.importorskip("mlx_lm.models.cache")

LENGTHS = (15, 16, 17, 60)  # a block of 16 and its neighbours; beyond every window
DTYPES = ("float32", "float16", "bfloat16")


def made(name: str, *args: Any, **options: Any) -> Any:
    """A cache object; skips where this mlx-lm has no such class."""
    kind = getattr(lm, name, None)
    if kind is None:
        pytest.skip(f"this mlx-lm has no {name}")
    return kind(*args, **options)


def through(cache: list[Any], fresh: list[Any], count: int | None = None, room: int = 0) -> list[Any]:
    """A prompt cache through bytes into a fresh one; `count` cuts every leaf."""
    packed = [bytes(slots.take(leaf, count).pack(leaf=at)) for at, leaf in enumerate(slots.leaves(cache))]
    for at, (leaf, data) in enumerate(zip(slots.leaves(fresh), packed, strict=True)):
        slots.give(leaf, slots.parse(data, leaf=at), room=room)
    return fresh


def shown(cache: list[Any]) -> list[Any]:
    """Everything that counts in a prompt cache: classes, numbers, shapes, dtypes, words."""
    states = [slots.take(leaf) for leaf in slots.leaves(cache)]
    return [
        (s.name, s.numbers, s.absent, {k: (t.dtype, t.words.shape, t.words.tobytes()) for k, t in s.tensors.items()})
        for s in states
    ]


def kv(count: int, seed: int = 0, dtype: str = "float32", size: int = 32) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    drawn = (random.standard_normal((1, 2, count, size)).astype(np.float32) for _ in range(2))
    k, v = (mx.array(array).astype(getattr(mx, dtype)) for array in drawn)
    return k, v


# --- real models of every family --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_d8_a_restored_cache_answers_exactly_as_the_one_it_was_taken_from(family: str) -> None:
    model = families.tiny(family)
    for count in LENGTHS:
        cold = prefill(model, families.tokens(count), None)
        warm = through(cold, new_cache(model), room=256)
        assert shown(warm) == shown(cold)
        assert [type(slot) for slot in warm] == [type(slot) for slot in cold]
        for step in ([5, 6, 7], [8], [9]):
            a, b = families.logits(model, cold, step), families.logits(model, warm, step)
            assert np.isfinite(a).all()
            assert a.tobytes() == b.tobytes(), (count, step)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma3", "jamba"])
def test_dtypes_are_kept(family: str, dtype: str) -> None:
    model = families.tiny(family, dtype)
    cold = prefill(model, families.tokens(20), None)
    warm = through(cold, new_cache(model))
    assert shown(warm) == shown(cold)
    assert dtype in {t.dtype for leaf in slots.leaves(warm) for t in slots.take(leaf).tensors.values()}


# --- every class, with what models of it do not do --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("steps", [(5,), (5, 1, 1), (16,), (17,), (15, 1, 1, 1), (40, 1, 1), (40, 9), (9, 1, 1, 9, 1)])
def test_windows_wrapped_and_not(steps: tuple[int, ...], keep: int, dtype: str) -> None:
    cold = made("RotatingKVCache", max_size=16, keep=keep)
    for at, count in enumerate(steps):
        cold.update_and_fetch(*kv(count, at, dtype))
    (warm,) = through([cold], [made("RotatingKVCache", max_size=16, keep=keep)])
    assert (warm.offset, warm._idx, warm.keep, warm.max_size) == (cold.offset, cold._idx, keep, 16)
    assert shown([warm]) == shown([cold])
    for count in (1, 1, 6, 1):  # and both go on alike
        ours, theirs = warm.update_and_fetch(*kv(count, 99, dtype)), cold.update_and_fetch(*kv(count, 99, dtype))
        assert all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 300])
def test_quantized_caches(bits: int, count: int) -> None:
    cold = made("QuantizedKVCache", group_size=32, bits=bits)
    cold.update_and_fetch(*kv(count))
    (warm,) = through([cold], [made("QuantizedKVCache", group_size=32, bits=bits)], room=256)
    assert (warm.offset, warm.group_size, warm.bits) == (count, 32, bits)
    assert shown([warm]) == shown([cold])
    ours, theirs = warm.update_and_fetch(*kv(2, 5)), cold.update_and_fetch(*kv(2, 5))
    for a, b in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert mx.array_equal(a, b).item()
    assert warm.keys[0].shape[2] == count + 256, "and nothing was copied"


@pytest.mark.parametrize("slots_", [1, 2, 4])
def test_d8_arrays_caches_of_any_size_with_empty_slots(slots_: int) -> None:
    cold, fresh = made("ArraysCache", slots_), made("ArraysCache", slots_)
    cold[0] = mx.arange(6, dtype=mx.float32).reshape(1, 2, 3)  # the others stay None
    warm = through([cold], [fresh])[0]
    assert shown([warm]) == shown([cold])
    assert [array is None for array in warm.cache] == [False, *[True] * (slots_ - 1)]
    empty = through([made("ArraysCache", slots_)], [made("ArraysCache", slots_)])[0]
    assert empty.cache == [None] * slots_
    with pytest.raises(ValueError, match="for one of"):
        through([cold], [made("ArraysCache", slots_ + 1)])


def test_paddings_of_an_arrays_cache() -> None:
    cold = made("ArraysCache", 1, left_padding=[2])
    cold[0] = mx.zeros((1, 2))
    if hasattr(cold, "lengths"):
        cold.lengths = mx.array([7])
    warm = through([cold], [made("ArraysCache", 1)])[0]
    assert shown([warm]) == shown([cold])
    assert warm.left_padding.tolist() == [2]


@pytest.mark.parametrize("steps", [(5,), (16,), (17,), (300,), (200, 100)])
def test_chunked_caches_before_and_after_their_front_is_dropped(steps: tuple[int, ...]) -> None:
    cold = made("ChunkedKVCache", 256)
    for at, count in enumerate(steps):
        cold.update_and_fetch(*kv(count, at))
    cold.maybe_trim_front()
    (warm,) = through([cold], [made("ChunkedKVCache", 256)])
    assert (warm.offset, warm.start_position) == (cold.offset, cold.start_position)
    assert warm.keys.shape == cold.keys.shape
    for count in (1, 20):
        warm.maybe_trim_front()
        cold.maybe_trim_front()
        ours, theirs = warm.update_and_fetch(*kv(count, 9)), cold.update_and_fetch(*kv(count, 9))
        assert all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))


def test_concatenated_caches_and_lists_and_nothing() -> None:
    concatenated, fresh = made("ConcatenateKVCache"), made("ConcatenateKVCache")
    concatenated.update_and_fetch(*kv(9))
    arrays = made("ArraysCache", 2)
    arrays[1] = mx.ones((1, 3), mx.bfloat16)
    plain = made("KVCache")
    plain.update_and_fetch(*kv(9, dtype="bfloat16"))
    cold = [made("CacheList", concatenated, arrays), [plain, None], (made("KVCache"),), None]
    warm = [made("CacheList", fresh, made("ArraysCache", 2)), [made("KVCache"), None], (made("KVCache"),), None]
    assert slots.structure(cold) == slots.structure(warm)
    assert shown(through(cold, warm)) == shown(cold)
    assert warm[2][0].keys is None


# --- cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_d1_a_leaf_is_cut_only_when_it_holds_every_token(family: str) -> None:
    """Cut to 30 of 50 tokens, leaf by leaf: every leaf that says it is whole then equals one of 30 tokens."""
    model, ids = families.tiny(family), families.tokens(50)
    long, short = prefill(model, ids, None), prefill(model, ids[:30], None)
    for leaf, other, fresh in zip(*map(slots.leaves, (long, short, new_cache(model))), strict=True):
        if slots.cuttable(leaf):
            assert slots.whole(leaf)
        if slots.whole(leaf):
            slots.give(fresh, slots.take(leaf), 30)
            mine, its = slots.take(fresh), slots.take(other)
            assert (mine.name, mine.numbers, mine.absent) == (its.name, its.numbers, its.absent)
            for name, tensor in its.tensors.items():
                # K/V of the same tokens computed in passes of other lengths differ in the last bits
                np.testing.assert_allclose(mine.tensors[name].words, tensor.words, rtol=1e-4, atol=1e-5)
        else:
            with pytest.raises(ValueError, match="cannot be cut"):
                slots.take(made("ArraysCache", 1), 30)


def test_d1_a_window_that_dropped_something_is_not_whole() -> None:
    window = made("RotatingKVCache", max_size=16)
    window.update_and_fetch(*kv(10))
    assert slots.whole(window)
    window.update_and_fetch(*kv(10))  # mlx-lm keeps up to 16 + 10 - 1
    window.update_and_fetch(*kv(1))
    assert not slots.whole(window)
    turned = made("RotatingKVCache", max_size=4)
    for _ in range(6):
        turned.update_and_fetch(*kv(1))
    assert not slots.whole(turned)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_d8_unknown_classes_are_refused_by_name() -> None:
    class Made(lm.KVCache):  # type: ignore[misc]
        pass

    for slot, named in ((Made(), "Made"), (object(), "builtins.object"), ([lm.KVCache(), Made()], "Made")):
        for look in (slots.structure, lambda cache: list(slots.leaves(cache))):
            with pytest.raises(PionMlxCompatError, match=f"{named} is not one that is known"):
                look([slot])
    batch = made("BatchKVCache", [0])
    with pytest.raises(PionMlxCompatError, match="BatchKVCache holds a batch"):
        slots.structure([batch])


def test_a_batch_of_two_is_refused() -> None:
    cache = lm.KVCache()
    cache.update_and_fetch(mx.zeros((2, 1, 3, 8)), mx.zeros((2, 1, 3, 8)))
    with pytest.raises(PionMlxCompatError, match="batch"):
        slots.take(cache)


def test_a_state_of_something_else_is_refused() -> None:
    window = made("RotatingKVCache", max_size=16)
    window.update_and_fetch(*kv(10))
    data = bytes(slots.take(window).pack(leaf=1, tokens=10))
    state = slots.parse(data, leaf=1, tokens=10)
    with pytest.raises(ValueError, match="something else"):
        slots.parse(data, leaf=2, tokens=10)
    with pytest.raises(ValueError, match="a RotatingKVCache for a KVCache"):
        slots.give(lm.KVCache(), state)
    with pytest.raises(ValueError, match="other settings"):
        slots.give(made("RotatingKVCache", max_size=17), state)
    torn = slots.State(state.name, state.numbers, {"keys": state.tensors["keys"]}, ())
    with pytest.raises(ValueError, match="other parts"):
        slots.give(made("RotatingKVCache", max_size=16), torn)


# --- mlx-lm goes on with what is restored -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3", "falcon_h1", "deepseek_v32"])
def test_a_restored_cache_is_saved_loaded_and_trimmed_by_mlx_lm(family: str, tmp_path: Path) -> None:
    model = families.tiny(family)
    cold = prefill(model, families.tokens(30), None)
    warm = through(cold, new_cache(model), room=256)
    want = shown(cold)
    path = str(tmp_path / "cache.safetensors")
    try:
        lm.save_prompt_cache(path, cold)
        lm.load_prompt_cache(path)
    except Exception as error:
        pytest.skip(f"this mlx-lm cannot save and load its own {family} cache: {error!r}")
    lm.save_prompt_cache(path, warm)
    loaded = lm.load_prompt_cache(path)
    if family != "falcon_h1" or type(loaded[0]) is type(cold[0]):
        assert families.logits(model, loaded, [5]).tobytes() == families.logits(model, cold, [5]).tobytes()
    cold = through(warm, new_cache(model))
    assert shown(cold) == want
    trimmed = [lm.trim_prompt_cache(cache, 4) for cache in (cold, warm)]
    assert trimmed[0] == trimmed[1]
    assert shown(cold) == shown(warm)


def test_a_restored_cache_is_quantized_by_mlx_lm() -> None:
    model = models.tiny_llama(hidden_size=128)
    cold = prefill(model, families.tokens(30), None)
    warm = through(cold, new_cache(model), room=256)
    both = [[slot.to_quantized(group_size=32, bits=4) for slot in cache] for cache in (cold, warm)]
    assert shown(both[0]) == shown(both[1])


def test_quantized_while_it_is_computed_as_mlx_lm_does() -> None:
    model, options = models.tiny_llama(hidden_size=128), CacheOptions(kv_bits=8, kv_group_size=32)
    ids = families.tokens(30)
    ours = prefill(model, ids, 10, options)
    theirs = [lm.KVCache() for _ in model.layers]
    for start in (0, 10, 20):
        model(mx.array([ids[start : start + 10]]), cache=theirs)
        theirs = [c.to_quantized(group_size=32, bits=8) if type(c) is lm.KVCache else c for c in theirs]
    assert shown(ours) == shown(theirs)
