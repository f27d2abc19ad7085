"""The digest that says what K/V belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import make_dataclass
from typing import Any

import pytest

from tests.support import models

from pion._core import sampling  # isort: skip
from pion.client.identity import _fields, model_identity, prefix_digest  # isort: skip

models.need_mlx()
mx = models.mx


def test_equal_models_have_equal_digests() -> None:
    assert model_identity(models.tiny_llama()) == model_identity(models.tiny_llama())


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"rope_theta": 5e5},
        {"rms_norm_eps": 1e-6},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_a_changed_model_has_another_digest(changes: dict[str, Any]) -> None:
    assert model_identity(models.tiny_llama(**changes)) != model_identity(models.tiny_llama())


def test_g4_adapters_versions_and_scales_are_told_apart() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    def adapted(weights: float, scale: float) -> Any:
        model = models.tiny_llama()
        linear_to_lora_layers(model, 2, {"rank": 4, "scale": scale, "dropout": 0.0})
        names = [(name, array) for name, array in models.tree_flatten(model.parameters()) if name.endswith("lora_a")]
        model.update(models.tree_unflatten([(name, mx.full(array.shape, weights)) for name, array in names]))
        return model

    found = [model_identity(m) for m in (models.tiny_llama(), adapted(0.1, 1.0), adapted(0.2, 1.0), adapted(0.1, 0.5))]
    assert len(set(found)) == 4
    assert model_identity(adapted(0.1, 0.5)) == found[3]


def test_the_names_are_those_of_the_model_s_parameters() -> None:
    model = models.tiny_llama(rope_scaling={"type": "linear", "factor": 2.0})
    model.heads = [model.layers[0].mlp, {"extra": mx.zeros(3)}]
    model._hidden = mx.zeros(2)
    expected = {name: array.shape for name, array in models.tree_flatten(model.parameters())}
    assert {name: array.shape for name, array in sampling.parameters(model, mx.array)} == expected
    assert "heads.1.extra" in expected
    assert "_hidden" not in expected


def test_weights_swapped_inside_a_living_model_are_noticed() -> None:
    model = models.tiny_llama()
    before = model_identity(model)
    weight = model.layers[1].self_attn.k_proj.weight
    model.layers[1].self_attn.k_proj.weight = weight * 1.01
    assert model_identity(model) != before
    model.layers[1].self_attn.k_proj.weight = weight
    assert model_identity(model) == before


def test_fields_a_newer_mlx_lm_adds_with_a_default_change_nothing() -> None:
    old = make_dataclass("Args", [("hidden_size", int), ("rope_theta", float, 10000.0)])
    new = make_dataclass(
        "Args",
        [
            ("hidden_size", int),
            ("rope_theta", float, 10000.0),
            ("extra", str, "x"),
            ("layer_types", list[str] | None, None),
        ],
    )
    filled = new(32, layer_types=["full_attention"] * 4)
    assert _fields(old(32)) == _fields(new(32)) == _fields(filled) == {"hidden_size": 32, "rope_theta": 10000}
    assert _fields(new(32, layer_types=["full_attention", "sliding_attention"])) != _fields(old(32))


def test_the_digest_covers_the_tokens() -> None:
    one = prefix_digest(b"m" * 32, [1, 2, 3])
    assert one == prefix_digest(b"m" * 32, mx.array([1, 2, 3]))
    assert len(one) == 64
    assert len({one, *(prefix_digest(b"m" * 32, ids) for ids in ([1, 2], [1, 2, 4], [1, 2, 3, 0], []))}) == 5
    assert prefix_digest(b"n" * 32, [1, 2, 3]) != one


@pytest.mark.timeout(400)
def test_d14_equal_in_another_process() -> None:
    program = (
        "from tests.support import models; from pion.client.identity import model_identity;"
        "print(model_identity(models.tiny_llama('bfloat16', rope_theta=5e5)).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == model_identity(models.tiny_llama("bfloat16", rope_theta=5e5)).hex()
