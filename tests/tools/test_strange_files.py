"""Any bytes are a prompt cache, or refused in one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pion.client.cache_files import CacheFileError, load
from tests.support import models

models.need_mlx()
mx = models.mx

import mlx_lm.models.cache as mlx_cache  # noqa: E402


def cache(quantized: bool) -> list[object]:
    layers = []
    for number in range(2):
        layer = mlx_cache.KVCache()
        layer.update_and_fetch(mx.random.normal((1, 2, 5, 32)), mx.random.normal((1, 2, 5, 32)))
        layers.append(layer.to_quantized(group_size=32, bits=4) if quantized and number else layer)
    return layers


def loads(path: Path) -> bool:
    try:
        found = load(path)
    except CacheFileError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
        return False
    assert found.rows >= 1
    return True


@pytest.mark.parametrize("quantized", [False, True])
def test_b1_flipped_bytes(tmp_path: Path, quantized: bool) -> None:
    good = tmp_path / "good.safetensors"
    mlx_cache.save_prompt_cache(str(good), cache(quantized))
    data = good.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    rng, path = random.Random(3), tmp_path / "bad.safetensors"
    assert loads(good)
    refused = 0
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            bad[rng.randrange(head)] = rng.randrange(256)
        path.write_bytes(bad[: rng.choice((len(bad), len(bad), rng.randrange(len(bad))))])
        refused += not loads(path)
    assert refused > 200


def test_strange_descriptions(tmp_path: Path) -> None:
    """Headers that are JSON and say nonsense."""
    good, path = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    mlx_cache.save_prompt_cache(str(good), cache(True))
    data = good.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    quantized = {name: about for name, about in head.items() if name.startswith("1.")}
    changes: list[dict[str, object]] = [
        {"__metadata__": {"1.0": "KVCache"}},
        {"__metadata__": {"2.0": "", "1.0": "KVCache", "1.1": "__import__"}},
        {
            "__metadata__": {
                "2.0": "QuantizedKVCache",
                "2.1": "QuantizedKVCache",
                "0.1.0": "x",
                "0.1.1": "1",
                "0.1.2": "1",
            }
        },
        {"__metadata__": {}},
        {"0.0": {**head["0.1"], "shape": [1, 2, 5, 1 << 40]}},
        {"0.0": {**head["0.1"], "dtype": "I64"}},
        {"0.0": {**head["0.1"], "dtype": "U8", "shape": [1, 2, 20, 32]}},
        {"9.0": head["0.1"]},
        {"-1.0": head["0.1"]},
        {"0.0.0.0": head["0.1"]},
        {"name": head["0.1"]},
        {"1.2": head["0.0"]},  # the offset is an array of many
        dict.fromkeys(quantized, head["0.0"]),
    ]
    for change in changes:
        text = json.dumps({**head, **change}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        assert not loads(path), change
