"""Between mlx-lm's caches and rows: layout, refusals, packing, restoring."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from pion._core import quant
from pion.client import caches
from pion.client.caches import PionMlxCompatError, filled, inspect_model, new_cache, pack_rows, prefill
from pion.client.decode import CODES, is_keys
from pion.client.restore import ROOM, Restorer
from pion.limits import BUILT_FORMATS, FORMATS
from pion.wire import raw
from tests.support import families, models
from tests.support.stored import answer, encoded

models.need_mlx()
mx = models.mx

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
DTYPES = ("float32", "float16", "bfloat16")
THETA = 1e4


def restored(model: Any, cache: list[Any], count: int, fmt: int | None = None, how: str | None = None) -> list[Any]:
    """The first `count` tokens of a cache through stored rows and back; key forms are followed by fp16 rows."""
    layout = inspect_model(model)
    wanted, dim = CODES[layout.dtype], layout.kv_dim
    restorer = Restorer(layout, count, how)
    for index, layer in enumerate(cache):
        for side, array in enumerate((layer.keys, layer.values)):
            words = pack_rows(array, count).tobytes()
            if fmt is None or fmt == wanted:
                parts = [(wanted, 0, count, words)]
            else:
                rows = np.frombuffer(quant.decode(wanted, words, dim), np.float32).reshape(count, dim)
                full = count // 64 * 64 if is_keys(fmt) else count
                parts = [(fmt, 0, full, encoded(fmt, rows[:full], 0, THETA))] if full else []
                parts += [(FORMATS["fp16"], full, count - full, encoded(FORMATS["fp16"], rows[full:]))][: count - full]
            data = answer(dim, 0, count, parts, THETA)
            restorer.place(side, index, raw.parse(data), data)
            data[:] = b"\xff" * len(data)  # the memory is used for the next layer
    return filled(model, restorer.finish(), count)


def words(array: Any, count: int) -> bytes:
    return pack_rows(array, count).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout(dtype: str) -> None:
    layout = inspect_model(models.tiny_llama(dtype))
    assert (layout.n_layers, layout.n_kv_heads, layout.head_dim, layout.cache_len, layout.kv_dim) == (2, 2, 8, 2, 16)
    assert (layout.dtype, layout.rope, layout.is_hybrid) == (dtype, 10000.0, False)


def test_rows_are_token_major_and_head_major_inside() -> None:
    array = mx.arange(2 * 5 * 3, dtype=mx.float32).reshape(1, 2, 5, 3)  # heads 2, capacity 5, size 3
    assert pack_rows(array, 2).tolist() == [[0, 1, 2, 15, 16, 17], [3, 4, 5, 18, 19, 20]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 12, 13])
def test_the_restored_cache_is_the_stored_one_word_for_word(dtype: str, count: int) -> None:
    model = models.tiny_llama(dtype)
    cold = prefill(model, IDS, None)
    warm = restored(model, cold, count)
    for old, new in zip(cold, warm, strict=True):
        assert type(new) is type(old)
        assert new.offset == count
        assert new.keys.dtype == old.keys.dtype
        assert words(new.keys, count) == words(old.keys, count)
        assert words(new.values, count) == words(old.values, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_from_a_restored_cache_equals_decoding_from_the_cold_one(dtype: str) -> None:
    model = models.tiny_llama(dtype)
    cold = prefill(model, IDS, None)
    warm = restored(model, cold, len(IDS))
    for step in ([5, 6, 7], [8], [9]):
        a, b = model(mx.array([step]), cache=cold), model(mx.array([step]), cache=warm)
        assert mx.array_equal(a, b).item()


def test_c9_bf16_values_beyond_fp16_come_back_exactly() -> None:
    model = models.tiny_llama("bfloat16")
    cold = prefill(model, IDS, None)
    cold[0].keys[0, 0, 0, :3] = mx.array([1e5, -7e4, 1e-6], mx.bfloat16)
    want = [float(value) for value in mx.array([1e5, -7e4, 1e-6], mx.bfloat16).astype(mx.float32)]
    for code in (FORMATS["bf16"], FORMATS["fp32"]):
        warm = restored(model, cold, len(IDS), code)
        assert warm[0].keys.dtype == mx.bfloat16
        assert warm[0].keys[0, 0, 0, :3].astype(mx.float32).tolist() == want
        assert words(warm[1].values, len(IDS)) == words(cold[1].values, len(IDS))


@pytest.mark.parametrize(
    ("dtype", "fmt", "bound"), [("float32", "fp16", 1e-3), ("float16", "int8", 2e-2), ("bfloat16", "int8", 2e-2)]
)
def test_lossy_formats_come_back_in_the_model_s_dtype(dtype: str, fmt: str, bound: float) -> None:
    model = models.tiny_llama(dtype)
    cold = prefill(model, IDS, None)
    warm = restored(model, cold, len(IDS), FORMATS[fmt])
    a, b = (layer[0].keys[..., : len(IDS), :].astype(mx.float32) for layer in (cold, warm))
    assert warm[0].keys.dtype == cold[0].keys.dtype
    assert (mx.abs(a - b).max() / mx.abs(a).max()).item() < bound


QUANTIZED = [
    FORMATS[name] for name in ("int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2") if name in BUILT_FORMATS
]
QUANTIZED += [FORMATS["turbo3"] | 32 << 8, 17 | 32 << 8, 19 | 32 << 8, 20 | 32 << 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [*QUANTIZED, FORMATS["fp16"], FORMATS["fp32"]])
@pytest.mark.parametrize("count", [13, 128, 150])
def test_a_gpu_gets_the_stored_bytes_and_makes_the_same_arrays(dtype: str, fmt: int, count: int) -> None:
    """By mlx's operations, which any device has; Metal's kernels are tested beside them in tests/metal."""
    model = models.tiny_llama(dtype, hidden_size=128)  # heads of 32
    cold = prefill(model, [token % 90 for token in range(count)], None)
    one, other = (restored(model, cold, count, fmt, how) for how in ("cpu", "ops"))
    for a, b in zip(one, other, strict=True):
        assert (a.offset, a.keys.shape, a.keys.dtype) == (b.offset, b.keys.shape, b.keys.dtype)
        assert mx.array_equal(a.keys, b.keys).item()
        assert mx.array_equal(a.values, b.values).item()
    assert models.greedy(model, one, [7], 3) == models.greedy(model, other, [7], 3)


def test_every_call_gives_a_cache_of_its_own() -> None:
    model = models.tiny_llama()
    cold = prefill(model, IDS, None)
    one, two = restored(model, cold, len(IDS)), restored(model, cold, len(IDS))
    before = words(two[0].keys, len(IDS))
    one[0].keys[0, 0, 0] = 0
    models.greedy(model, one, [1], 3)
    assert words(two[0].keys, len(IDS)) == before
    assert two[0].offset == len(IDS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_256_tokens_fit_without_a_new_array(dtype: str) -> None:
    model = models.tiny_llama(dtype)
    warm = restored(model, prefill(model, IDS, None), len(IDS))
    capacity = warm[0].keys.shape[2]
    assert capacity == len(IDS) + ROOM
    models.greedy(model, warm, [1], ROOM)
    assert warm[0].offset == len(IDS) + ROOM
    assert warm[0].keys.shape[2] == capacity


@pytest.mark.parametrize("dtype", DTYPES)
def test_appending_does_not_copy(dtype: str) -> None:
    layout = caches.Layout(n_layers=1, n_kv_heads=8, head_dim=128, cache_len=1, dtype=dtype, rope=None)
    model = models.tiny_llama(dtype, num_hidden_layers=1)

    def built(count: int) -> Any:
        rows = np.zeros((count, layout.kv_dim), np.float32 if dtype == "float32" else np.uint16)
        restorer = Restorer(layout, count)
        data = answer(layout.kv_dim, 0, count, [(CODES[dtype], 0, count, rows.tobytes())])
        for side in (0, 1):
            restorer.place(side, 0, raw.parse(data), data)
        return filled(model, restorer.finish(), count)[0]

    def append(layer: Any) -> float:
        started = time.perf_counter()
        layer.update_and_fetch(new, new)
        mx.eval(layer.keys, layer.values)
        return time.perf_counter() - started

    new = mx.ones((1, 8, 1, 128), getattr(mx, dtype))
    mx.eval(new)
    append(built(4))  # the first use of an operation costs more
    layers = [built(8192) for _ in range(3)]
    first = min(append(layer) for layer in layers)
    held = [array[..., :1, :] for layer in layers for array in (layer.keys, layer.values)]
    mx.eval(held)  # a second reference forces the copy that must not happen otherwise
    copied = min(append(layer) for layer in layers)
    assert first < copied / 4


def test_wrong_sizes_and_gaps_never_build_a_cache() -> None:
    model = models.tiny_llama()
    layout = inspect_model(model)
    restorer = Restorer(layout, 4)

    def rows(count: int) -> memoryview:
        return answer(layout.kv_dim, 0, count, [(FORMATS["fp32"], 0, count, bytes(4 * layout.kv_dim * count))])

    with pytest.raises(ValueError, match="layer 1: rows 0 to 3 of 16 values, not 0 to 4 of 16"):
        restorer.place(0, 1, raw.parse(rows(3)), rows(3))
    for layer, side in ((0, 0), (0, 1), (1, 1)):
        restorer.place(side, layer, raw.parse(rows(4)), rows(4))
    with pytest.raises(ValueError, match="1 of 4 layer-sides are missing"):
        restorer.finish()


def test_prefill_in_chunks_gives_the_same_cache() -> None:
    model = models.tiny_llama()
    whole, chunked = prefill(model, IDS, None), prefill(model, IDS, 5)
    assert [layer.offset for layer in chunked] == [len(IDS)] * 2
    for a, b in zip(whole, chunked, strict=True):
        assert mx.allclose(a.keys[..., : len(IDS), :], b.keys[..., : len(IDS), :], atol=1e-5).item()


def test_d8_other_cache_classes_are_refused_by_name() -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    class Strange(KVCache):
        pass

    class Window(RotatingKVCache):
        pass

    model = models.tiny_llama()
    for made, named in (
        ([KVCache(), Window(max_size=8)], "1 x KVCache, 1 x Window: .*Window is not one"),
        ([Strange(), Strange()], "2 x Strange"),
        ([KVCache(), {}], "1 x dict"),
        ([], "no cache at all"),
    ):
        model.make_cache = lambda made=made: made
        with pytest.raises(PionMlxCompatError, match=named):
            new_cache(model)
        with pytest.raises(PionMlxCompatError, match=named):
            inspect_model(model)


class Lopsided:
    """Layers whose K and V have the given head sizes."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.layers = [None] * len(sizes)

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        for layer, (k, v) in zip(cache, self.sizes, strict=True):
            layer.update_and_fetch(mx.zeros((1, 1, tokens.shape[1], k)), mx.zeros((1, 1, tokens.shape[1], v)))


def test_layers_of_the_most_common_shape_are_rows_and_the_others_states() -> None:
    layout = inspect_model(Lopsided((16, 16), (8, 8), (16, 16), (16, 8)))
    assert (layout.rows, layout.head_dim, layout.is_hybrid, layout.cache_len) == ((0, 2), 16, True, 4)
    layout = inspect_model(Lopsided((16, 8), (16, 8)))
    assert (layout.rows, layout.kv_dim, layout.is_hybrid) == ((), 0, True)


def test_options_of_mlx_lm_are_checked_when_the_model_is_inspected() -> None:
    assert inspect_model(families.tiny("qwen2"), caches.CacheOptions(kv_bits=4, kv_group_size=32)).rows == ()
    with pytest.raises(PionMlxCompatError, match="kv_bits=4: mlx cannot quantize"):
        inspect_model(models.tiny_llama(), caches.CacheOptions(kv_bits=4))  # heads of 8
    with pytest.raises(PionMlxCompatError, match="kv_bits=4: mlx-lm cannot quantize 2 x RotatingKVCache"):
        inspect_model(families.tiny("qwen2"), caches.CacheOptions(kv_bits=4, kv_group_size=32, max_kv_size=32))
