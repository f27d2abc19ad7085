"""Quantized prefixes on the real server, by `PionPromptCache` and `pion.Client`: all formats, K, V and layers apart."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion import Client, PionPromptCache
from pion.client.async_ import AsyncClient
from pion.errors import CommandError, MismatchError
from pion.limits import BUILT_FORMATS, FORMATS
from pion.testing import Server
from pion.testing import server as start_server
from tests.support import models
from tests.support.proxy import proxy

models.need_mlx()
mx = models.mx

QUANTIZED = [name for name in BUILT_FORMATS if name not in ("fp16", "bf16", "fp32", "bf16_rope_fp8_body")]
LOSS = {"int8": 0.006, "fp8": 0.04, "mlx4g32": 0.11, "turbo4": 0.12, "turbo3": 0.23, "turbo2": 0.42}  # relative error
COUNT = 150  # two groups of keys and 22 loose rows
IDS = [(7 * i) % 90 for i in range(COUNT)]
_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def ns() -> str:
    return f"q-{next(_names)}"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(host=server.host, port=server.port, timeout=30) as client:
        yield client


@pytest.fixture
def cache_of(server: Server) -> Iterator[Callable[..., PionPromptCache]]:
    made: list[PionPromptCache] = []

    def make(model: Any = None, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, host=server.host, port=server.port, **options))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def model_of(dtype: str = "float32", **options: Any) -> Any:
    return models.tiny_llama(dtype, hidden_size=256, **options)  # 2 key heads of 64


def info(client: Client, sid: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in client.call("V.INFO", sid).decode().split("\r\n") if ":" in line)


def layer_formats(client: Client, sid: str, layers: int) -> list[str]:
    lines = info(client, sid)
    return [lines.get(f"layer_{i}_fmt", lines["v_format"]) for i in range(layers)]


def error_of(a: Any, b: Any) -> float:
    """Relative error of the second array of a cache."""
    exact, close = (x[..., :COUNT, :].astype(mx.float32) for x in (a, b))
    return float((mx.linalg.norm((exact - close).reshape(-1)) / mx.linalg.norm(exact.reshape(-1))).item())


def normal(seed: int, shape: tuple[int, ...] = (2, 2, COUNT, 64)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


# --- the prompt cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_format_comes_back_close_and_in_the_model_s_dtype(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, name: str, dtype: str
) -> None:
    first = cache_of(model_of(dtype), vquant=name)
    cold = first.get_or_prefill(IDS, ns)
    second = cache_of(model_of(dtype), vquant=name)
    warm = second.get_or_prefill(IDS, ns)
    assert (first.store_errors, second.hits, second.misses) == (0, 1, 0)
    for a, b in zip(cold, warm, strict=True):
        assert (b.offset, b.keys.dtype, b.keys.shape[2]) == (COUNT, a.keys.dtype, COUNT + 256)
        assert 0 < error_of(a.keys, b.keys) < LOSS[name]
        assert 0 < error_of(a.values, b.values) < LOSS[name]
    assert {layer for sid in ("_pk", "_pv") for layer in layer_formats(client, ns + sid, 2)} == {name}
    assert len(models.greedy(second.model, warm, [7], 3)) == 3


def test_what_two_clients_fetch_is_the_same_bit_for_bit(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    for name in QUANTIZED:
        pc = cache_of(model_of(), vquant=name)
        pc.get_or_prefill(IDS, f"{ns}-{name}")
        one, other = (pc.get_or_prefill(IDS, f"{ns}-{name}") for _ in range(2))
        assert all(mx.array_equal(a.keys, b.keys).item() for a, b in zip(one, other, strict=True))
        assert pc.hits == 2


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_prefix_crosses_the_wire_as_small_as_it_is_stored(
    server: Server, cache_of: Callable[..., PionPromptCache], ns: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_LANE", "tcp")
    cache_of(model_of("float16"), vquant=name).get_or_prefill(IDS, ns)
    with proxy(server.port) as between, PionPromptCache(model_of("float16"), vquant=name, port=between.port) as pc:
        before = between.answered
        pc.get_or_prefill(IDS, ns)
        assert pc.hits == 1
        fetched = between.answered - before
    plain = 2 * 2 * COUNT * 128 * 2  # layers, sides, rows, values, bytes of fp16
    loose = 2 * (COUNT % 64) * 128 * 2 if name.startswith("turbo") else 0  # keys of the group that is not full
    share = {"int8": 0.57, "fp8": 0.54, "mlx4g32": 0.32, "turbo4": 0.29, "turbo3": 0.23, "turbo2": 0.17}[name]
    assert 0.5 * share * plain < fetched < share * plain + loose + 4096


def test_k_and_v_apart(cache_of: Callable[..., PionPromptCache], client: Client, ns: str) -> None:
    v_format = "turbo4" if "turbo4" in QUANTIZED else "int8"
    options = {"k_format": "fp16", "v_format": v_format}
    cold = cache_of(model_of("float16"), **options).get_or_prefill(IDS, ns)
    pc = cache_of(model_of("float16"), **options)
    warm = pc.get_or_prefill(IDS, ns)
    assert pc.hits == 1
    assert layer_formats(client, ns + "_pk", 2) == ["fp16"] * 2
    assert layer_formats(client, ns + "_pv", 2) == [v_format] * 2
    for a, b in zip(cold, warm, strict=True):
        assert error_of(a.keys, b.keys) == 0
        assert 0 < error_of(a.values, b.values) < LOSS[v_format]


@pytest.mark.parametrize("name", QUANTIZED)
def test_boundary_protect_keeps_k_and_the_outer_layers_of_v(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, name: str
) -> None:
    options = {"vquant": name, "boundary_protect": 1}
    cold = cache_of(model_of("float16", num_hidden_layers=4), **options).get_or_prefill(IDS, ns)
    pc = cache_of(model_of("float16", num_hidden_layers=4), **options)
    warm = pc.get_or_prefill(IDS, ns)
    assert pc.hits == 1
    assert layer_formats(client, ns + "_pk", 4) == ["fp16"] * 4
    assert layer_formats(client, ns + "_pv", 4) == ["fp16", name, name, "fp16"]
    lost = [error_of(a.values, b.values) for a, b in zip(cold, warm, strict=True)]
    assert [error_of(a.keys, b.keys) for a, b in zip(cold, warm, strict=True)] == [0] * 4
    assert (lost[0], lost[3]) == (0, 0)
    assert 0 < min(lost[1:3]) <= max(lost[1:3]) < LOSS[name]


def test_boundary_protect_refuses_what_it_cannot_describe() -> None:
    with pytest.raises(ValueError, match=r"boundary_protect=2 .*at most 59 layers, this one has 60"):
        PionPromptCache(models.tiny_llama(num_hidden_layers=60), vquant="int8", boundary_protect=2)


@pytest.mark.skipif("mlx4g32" not in QUANTIZED, reason="mlx4g32 is not built")
def test_rows_that_a_format_does_not_take_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="format mlx4g32 takes rows of a multiple of 32 values; this model's have 16"):
        PionPromptCache(models.tiny_llama(), vquant="mlx4g32")


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"vquant": "int8"}, 31),
        ({"k_format": "int8", "v_format": "turbo4"}, 30),
        ({"vquant": "turbo4", "boundary_protect": 2}, 30),
    ],
)
def test_a_real_model_answers_as_it_would_have(
    cache_of: Callable[..., PionPromptCache], ns: str, options: dict[str, Any], least: int
) -> None:
    """32 tokens that SmolLM2 chose by itself, predicted again from a fetched prefix of 150 tokens."""
    model, tokenizer = models.smollm2_model()
    text = (
        "The sea was calm that morning, and the keeper of the lighthouse went down to the shore to look for driftwood. "
    )
    prefix = tokenizer.encode(text * 10)[:COUNT]
    assert len(prefix) == COUNT
    question = tokenizer.encode(" When he came back, he")
    pc = cache_of(model, **options)
    own = models.greedy(model, pc.get_or_prefill(prefix, ns), question, 32)
    warm = pc.get_or_prefill(prefix, ns)
    assert (pc.store_errors, pc.hits) == (0, 1)
    logits = model(mx.array([[*question, *own[:-1]]]), cache=warm)[0, len(question) - 1 :]
    again = mx.argmax(logits, axis=-1).tolist()
    assert sum(a == b for a, b in zip(own, again, strict=True)) >= least


# --- what does not belong together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [{"vquant": "int8"}, {"vquant": "fp16", "v_format": "int8"}])
@pytest.mark.parametrize("asked", [{"vquant": "fp16"}, {"k_format": "int8"}, {"vquant": "int8", "boundary_protect": 1}])
def test_another_format_is_never_read_as_the_one_asked_for(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, stored: dict[str, Any], asked: dict[str, Any]
) -> None:
    model = model_of("float32", num_hidden_layers=3)
    cache_of(model, **stored).get_or_prefill(IDS, ns)
    held = [client.call("V.FETCH", ns + sid, 1, "RANGE", 0, 5) for sid in ("_pk", "_pv")]
    with pytest.raises(MismatchError, match=r"format: stored as int8, asked for as fp16|as fp16, asked for as .*int8"):
        cache_of(model, **asked).get_or_prefill(IDS, ns)
    patient = cache_of(model, on_mismatch="recompute", **asked)
    patient.get_or_prefill(IDS, ns)
    assert (patient.hits, patient.misses, patient.mismatches) == (0, 1, 1)
    assert [client.call("V.FETCH", ns + sid, 1, "RANGE", 0, 5) for sid in ("_pk", "_pv")] == held
    owner = cache_of(model, on_mismatch="replace", **asked)
    owner.get_or_prefill(IDS, ns)
    owner.get_or_prefill(IDS, ns)
    assert (owner.hits, owner.misses) == (1, 1)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7e4])
def test_c9_values_a_format_does_not_hold_cost_the_store_only(
    cache_of: Callable[..., PionPromptCache],
    client: Client,
    ns: str,
    name: str,
    value: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of()
    weight = model.layers[1].self_attn.v_proj.weight
    weight[5, :] = value if value != 7e4 else 1e9  # one channel of V, in the second layer
    model.layers[1].self_attn.v_proj.weight = weight
    pc = cache_of(model, vquant=name, scope=ns)  # the digest sees samples of the weights, and this row may be in none
    with caplog.at_level(logging.WARNING, "pion.client"):
        cache = pc.get_or_prefill(IDS, ns)
    assert (cache[0].offset, pc.store_errors, pc.misses) == (COUNT, 1, 1)
    assert "was computed but not stored" in caplog.text
    assert "row" in caplog.text
    assert client.lookup(ns) is False
    with pytest.raises(CommandError, match="session not found"):
        client.call("V.INFO", ns + "_pk")


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("name", QUANTIZED)
def test_arrays_of_every_format(client: Client, ns: str, name: str, kind: Any) -> None:
    k, v = normal(1).astype(kind), normal(2).astype(kind)
    client.store(ns, k, v, vquant=name, rope=1e4)
    got = client.fetch(ns)
    assert (got.dtype, got.k.dtype, got.k.shape) == ("float32", np.float32, k.shape)
    assert 0 < distance(k.astype(np.float32), got.k) < LOSS[name]
    assert 0 < distance(v.astype(np.float32), got.v) < LOSS[name]
    for layout in (np.zeros_like(got.k), np.zeros((2, COUNT, 2, 64), np.float32).transpose(0, 2, 1, 3)):
        out = layout, list(np.zeros_like(layout))
        assert client.fetch(ns, out=out).k is layout
        assert np.array_equal(layout, got.k)
        assert np.array_equal(np.stack(out[1]), got.v)
    # What the server decodes itself, for clients that know no stored rows, is the same.
    for sid, side in ((ns + "_pk", got.k), (ns + "_pv", got.v)):
        rows = np.frombuffer(client.call("V.FETCH", sid, 1, "RANGE", 0, COUNT), np.float32).reshape(COUNT, 2, 64)
        assert np.array_equal(rows.swapaxes(0, 1), side[1])
    with pytest.raises(MismatchError, match=r"float32, out is .* float16"):
        client.fetch(ns, out=(np.zeros(k.shape, np.float16), np.zeros(k.shape, np.float16)))


async def test_arrays_with_trio(server: Server, client: Client, ns: str) -> None:
    k, v = normal(3), normal(4)
    async with AsyncClient(host=server.host, port=server.port, timeout=30) as there:
        await there.store(ns, k, v, k_format="int8", v_format=QUANTIZED[-1])
        got = await there.fetch(ns)
    here = client.fetch(ns)
    assert np.array_equal(got.k, here.k)
    assert np.array_equal(got.v, here.v)
    assert layer_formats(client, ns + "_pk", 2) == ["int8"] * 2
    assert layer_formats(client, ns + "_pv", 2) == [QUANTIZED[-1]] * 2


@pytest.mark.parametrize(
    ("kind", "k_format", "v_format", "dtype"),
    [
        (np.float32, "fp32", "fp32", "float32"),
        (np.float16, None, "fp16", "float16"),
        (np.float16, None, "int8", "float32"),
        (np.float32, "fp16", None, "float32"),
        (np.float32, "bf16", "fp16", "float32"),
    ],
)
def test_formats_apart_for_arrays(
    client: Client, ns: str, kind: Any, k_format: str | None, v_format: str | None, dtype: str
) -> None:
    k, v = normal(5).astype(kind), normal(6).astype(kind)
    client.store(ns, k, v, k_format=k_format, v_format=v_format)
    got = client.fetch(ns)
    assert got.dtype == dtype
    kept = {"bf16": 2**-8, "fp16": 2**-11, "int8": LOSS["int8"], "fp32": 0, None: 0}
    assert distance(k.astype(np.float32), got.k.astype(np.float32)) <= kept[k_format]
    assert distance(v.astype(np.float32), got.v.astype(np.float32)) <= kept[v_format]
    out = tuple(np.zeros(k.shape, dtype) for _ in range(2))
    client.fetch(ns, out=out)
    assert np.array_equal(out[0], got.k)
    assert np.array_equal(out[1], got.v)


def test_refused_rows_leave_nothing_behind(client: Client, ns: str) -> None:
    k = normal(7)
    bad = k.copy()
    bad[1, 1, 9, 3] = np.inf
    with pytest.raises(CommandError, match="row 9"):
        client.store(ns, k, bad, vquant="int8")
    with pytest.raises(CommandError, match="session not found"):
        client.call("V.INFO", ns + "_pk")
    client.store(ns, k, k, vquant="int8", digest="ab" * 32)
    with pytest.raises(CommandError, match="row 9"):
        client.store(ns, k, bad, vquant="int8", digest="ab" * 32)  # what is whole stays
    assert client.lookup(ns, digest="ab" * 32)


@pytest.mark.parametrize("name", ["fp17", "bf16_rope_fp8_body"])
def test_names_that_are_no_formats_are_refused_here(client: Client, ns: str, name: str) -> None:
    for what in ("vquant", "k_format", "v_format"):
        with pytest.raises(ValueError, match=what):
            client.store(ns, normal(8), normal(8), **{what: name})


def test_every_name_stands_for_a_code() -> None:
    assert set(QUANTIZED) <= set(FORMATS)
    assert set(QUANTIZED) <= set(LOSS)
