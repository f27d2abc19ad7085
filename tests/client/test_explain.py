"""H9: the receipt of a near miss says what was asked for, what was reused, where it parts and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion import Client, PionPromptCache
from pion.client.explain import BLOCK
from pion.client.namespace import hash_blocks
from pion.errors import MismatchError
from pion.testing import server as start_server
from tests.support import models

IDS = [(11 * i + 3) % 96 for i in range(10 * BLOCK + 5)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models.need_mlx()
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def cache(server: Any, request: pytest.FixtureRequest) -> Iterator[PionPromptCache]:
    with PionPromptCache(models.tiny_llama(), vquant="native", host=server.host, port=server.port) as cache:
        yield cache
        cache.drop("ns")


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 5 * BLOCK + 7, 10 * BLOCK - 1])
def test_h9_a_near_miss_says_where_it_parts(cache: PionPromptCache, at: int) -> None:
    cache.get_or_prefill(IDS, "ns")
    other = [*IDS[:at], (IDS[at] + 1) % 96, *IDS[at + 1 :]]
    with pytest.raises(MismatchError):
        cache.get_or_prefill(other, "ns")
    receipt = cache.explain(other, "ns")
    assert (receipt["tokens"], receipt["stored"], receipt["reused"]) == (len(IDS), len(IDS), 0)
    assert receipt["shared"] == at
    assert receipt["first_difference"] == (at, at)
    assert receipt["differing"] == (IDS[at], other[at])
    assert f"token {at} is {other[at]} and not {IDS[at]}" in receipt["reason"]


def test_h9_a_hit_a_miss_and_other_lengths(cache: PionPromptCache) -> None:
    before = cache.stats()
    receipt = cache.explain(IDS, "ns")
    assert (receipt["stored"], receipt["reused"]) == (0, 0)
    assert receipt["reason"].startswith(("never", "dropped"))
    cache.get_or_prefill(IDS, "ns")
    receipt = cache.explain(IDS, "ns")
    assert (receipt["shared"], receipt["reused"], receipt["first_difference"]) == (len(IDS), len(IDS), None)
    assert receipt["reason"].startswith("hit")
    for other in (IDS[:100], [*IDS, 1, 2, 3]):
        receipt = cache.explain(other, "ns")
        shared = min(len(other), len(IDS))
        assert (receipt["shared"], receipt["first_difference"]) == (shared, (shared, shared))
        assert receipt["differing"] is None
        assert f"{len(other)} tokens are asked for, " in receipt["reason"]
    assert cache.stats()["hits"] == before["hits"], "asking why is not a lookup"
    cache.drop("ns")
    assert cache.explain(IDS, "ns")["reason"].startswith("dropped")


def test_h9_another_model(cache: PionPromptCache, server: Any) -> None:
    cache.get_or_prefill(IDS, "ns")
    with PionPromptCache(models.tiny_llama(seed=1), vquant="native", host=server.host, port=server.port) as other:
        receipt = other.explain(IDS, "ns")
    assert (receipt["shared"], receipt["reused"], receipt["first_difference"]) == (len(IDS), 0, None)
    assert "model" in receipt["reason"]


def by_another_writer(cache: PionPromptCache, **options: Any) -> None:
    """Rows without the tokens they belong to."""
    rows = np.zeros((3, 2, len(IDS), 8), np.float32)
    with Client(host=cache.address.host, port=cache.address.port) as client:
        client.store("ns", rows[:2], rows[:2], digest="ab" * 32, **options)


@pytest.mark.parametrize("at", [BLOCK - 1, 5 * BLOCK + 7])
def test_h9_rows_that_do_not_say_their_tokens_are_compared_by_blocks(cache: PionPromptCache, at: int) -> None:
    by_another_writer(cache, blocks=(BLOCK, np.array(hash_blocks(IDS, BLOCK), np.uint64)))
    other = [*IDS[:at], (IDS[at] + 1) % 96, *IDS[at + 1 :]]
    receipt = cache.explain(other, "ns")
    block = at // BLOCK * BLOCK
    assert (receipt["stored"], receipt["shared"], receipt["reused"]) == (len(IDS), block, 0)
    assert receipt["first_difference"] == (block, block + BLOCK - 1)
    assert receipt["differing"] is None
    assert f"tokens {block} to {block + BLOCK - 1}" in receipt["reason"]


def test_h9_rows_stored_without_hashes(cache: PionPromptCache) -> None:
    by_another_writer(cache)
    receipt = cache.explain(IDS[:-1], "ns")
    assert (receipt["shared"], receipt["first_difference"]) == (0, None)
    assert "without hashes" in receipt["reason"]
