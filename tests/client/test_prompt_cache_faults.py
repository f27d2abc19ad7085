"""`PionPromptCache` when something changes under it: the model, the entry, the process, the caller's mind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion import Client, HybridRetrievalCache, PionPromptCache
from pion.client import assembly, caches
from pion.client.caches import PionMlxCompatError, Prefilled, pack_rows, prefill
from pion.testing import server as start_server
from tests.support import families, models
from tests.support.proxy import Proxy, proxy

models.need_mlx()
mx = models.mx

_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def between(server: Any) -> Iterator[Proxy]:
    with proxy(server.port) as running:
        yield running


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with Client(host="127.0.0.1", port=server.port) as made:
        yield made


@pytest.fixture
def ns() -> str:
    return f"faults-{next(_names)}"


@pytest.fixture
def ids(ns: str) -> list[int]:
    """Of each test its own: what others stored under another name would be found by its tokens."""
    return families.tokens(60, int(ns.rpartition("-")[2]) + 5000)


@pytest.fixture
def cache_of(server: Any) -> Iterator[Callable[..., PionPromptCache]]:
    """A `PionPromptCache` on the server, lossless unless asked for otherwise, closed at the end."""
    made: list[PionPromptCache] = []

    def make(model: Any = None, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, **{"vquant": "native", "port": server.port, **options}))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def words(cache: list[Any]) -> list[bytes]:
    """The tokens of every layer-side, bit for bit."""
    return [pack_rows(array, layer.offset).tobytes() for layer in cache for array in (layer.keys, layer.values)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- the model is changed in place ------------------------------------------------------------------------------------


def test_the_layout_follows_a_model_whose_dtype_is_changed_in_place(
    cache_of: Callable[..., PionPromptCache], ns: str, ids: list[int]
) -> None:
    model = models.tiny_llama("float16")
    pc = cache_of(model)
    pc.get_or_prefill(ids, ns)
    for dtype in ("bfloat16", "float32"):
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
        truth = words(prefill(model, ids, None))
        for _ in range(4):  # computed, fetched, and out of this process
            cache = pc.get_or_prefill(ids, f"{ns}-{dtype}")
            assert {str(a.dtype) for c in cache for a in (c.keys, c.values)} == {f"mlx.core.{dtype}"}
            assert words(cache) == truth
        assert pc.layout is not None
        assert pc.layout.dtype == dtype
        assert pc.put(prefill(model, ids, None), ids, f"{ns}-{dtype}-put") is True
        assert words(pc.get_or_prefill(ids, f"{ns}-{dtype}-put")) == truth
    assert (pc.hits, pc.misses, pc.store_errors) == (8, 3, 0)


def test_chunks_follow_a_model_whose_dtype_is_changed_in_place(server: Any) -> None:
    model = models.tiny_llama("float16", max_position_embeddings=2048)
    with HybridRetrievalCache(model, "pion", port=server.port) as held, HybridRetrievalCache(model) as fresh:
        for each in (held, fresh):
            each.set_shared_stub([1, 2, 3])
            each.ingest_pack("x", [5, 6, 7, 8, 9, 10])
            each.prepare_multi(["x"], [1])
        model.set_dtype(mx.bfloat16)
        mx.eval(model.parameters())
        for _ in range(3):
            got, want = (each.prepare_multi(["x"], [1])[0] for each in (held, fresh))
            assert got[0].keys.dtype == mx.bfloat16
            assert words(got) == words(want)


@pytest.mark.parametrize("as_states", [False, True])
def test_packing_refuses_a_cache_that_is_not_of_the_layout(as_states: bool, ids: list[int]) -> None:
    layout = caches.inspect_model(models.tiny_llama("float16"))
    array = np.array(ids, "<u4")
    for other, named in (
        (models.tiny_llama("bfloat16"), "bfloat16"),
        (models.tiny_llama("float16", hidden_size=64), "2 heads x 16"),
        (models.tiny_llama("float16", num_key_value_heads=4), "4 heads x 8"),
    ):
        with pytest.raises(PionMlxCompatError, match=named):
            assembly.planned(Prefilled(prefill(other, ids, None)), layout, array, bytes(32), as_states)
    with pytest.raises(ValueError, match="of 60 tokens in a cache that should hold 59"):
        assembly.planned(
            Prefilled(prefill(models.tiny_llama("float16"), ids, None)), layout, array[:59], bytes(32), as_states
        )
