"""Which formats are asked for, layer by layer."""

from __future__ import annotations

import pytest

from pion.client import formats
from pion.client.formats import Formats, registration
from pion.limits import BUILT_FORMATS

QUANTIZED = [name for name in BUILT_FORMATS if name not in ("fp16", "bf16", "fp32", "bf16_rope_fp8_body")]


def test_one_format_for_both_sides_is_an_ordinary_registration() -> None:
    sides = Formats.of("int8", None, None, 0).sides("float16", 3)
    assert sides == (("int8",) * 3,) * 2
    assert registration("ns", 64, sides) == ["KV.PREFIX.REGISTER", "ns", 64, "int8"]


def test_formats_apart_are_a_schema() -> None:
    sides = Formats.of("fp16", "int8", None, 0).sides("float16", 2)
    want = ["KV.PREFIX.REGISTER.SCHEMA", "ns", 2, *["fmt=int8,dim=64"] * 2, *["fmt=fp16,dim=64"] * 2]
    assert registration("ns", 64, sides) == want
    assert Formats.of("int8", None, "fp16", 0).sides("float16", 2) == sides


@pytest.mark.parametrize("name", QUANTIZED)
def test_boundary_protect_keeps_all_k_and_the_outer_v(name: str) -> None:
    k, v = Formats.of(name, None, None, 2).sides("float16", 6)
    assert k == ("fp16",) * 6
    assert v == ("fp16", "fp16", name, name, "fp16", "fp16")
    k, v = Formats.of(name, None, None, 2).sides("bfloat16", 3)  # no layer is left in the middle
    assert k == v == ("bf16",) * 3
    k, v = Formats.of("fp16", "int8", name, 1).sides("float16", 4)
    assert (k, v) == (("fp16", "int8", "int8", "fp16"), ("fp16", name, name, "fp16"))
    assert Formats.of(name, None, None, -1).sides("float16", 2) == ((name,) * 2,) * 2


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "native"])
def test_boundary_protect_changes_nothing_where_nothing_is_quantized(name: str) -> None:
    assert Formats.of(name, None, None, 2).sides("float32", 6) == Formats.of(name, None, None, 0).sides("float32", 6)


@pytest.mark.parametrize(
    ("name", "dtype", "stored"),
    [
        ("native", "float32", "fp32"),
        ("native", "bfloat16", "bf16"),
        ("native", "float16", "fp16"),
        ("fp16", "bfloat16", "bf16"),
        ("fp16", "float32", "fp16"),
        ("int8", "bfloat16", "int8"),
    ],
)
def test_words_are_kept_where_the_name_promises_it(name: str, dtype: str, stored: str) -> None:
    assert formats.stored_format(name, dtype) == stored


def test_more_layers_than_a_schema_has_are_refused_for_boundary_protect_only() -> None:
    with pytest.raises(ValueError, match=r"boundary_protect=1 .* at most 59 layers, this one has 60"):
        Formats.of("int8", None, None, 1).check("float16", 60, 64)
    Formats.of("int8", None, None, 1).check("float16", 59, 64)
    Formats.of("int8", "fp16", None, 0).check("float16", 80, 64)


@pytest.mark.skipif("mlx4g32" not in BUILT_FORMATS, reason="mlx4g32 is not built")
def test_rows_a_format_does_not_take_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="format mlx4g32 takes rows of a multiple of 32 values; this model's have 48"):
        Formats.of("fp16", None, "mlx4g32", 0).check("float16", 2, 48)
    Formats.of("fp16", None, "mlx4g32", 0).check("float16", 2, 64)


@pytest.mark.parametrize("what", ["vquant", "k_format", "v_format"])
def test_names_that_are_refused(what: str) -> None:
    asked = {"vquant": "fp16", "k_format": None, "v_format": None}
    with pytest.raises(ValueError, match=f"unknown {what} 'fp17' .*int8, .*native"):
        Formats.of(**{**asked, what: "fp17"}, boundary_protect=0)
    with pytest.raises(ValueError, match=f"{what}='bf16_rope_fp8_body' needs a width"):
        Formats.of(**{**asked, what: "bf16_rope_fp8_body"}, boundary_protect=0)


def test_descriptions_with_and_without_layers_of_their_own() -> None:
    plain = {"value_dim": "64", "v_format": "int8", "num_layers": "2"}
    assert formats.described(plain) == ((64, "int8"),) * 2
    own = {**plain, "layer_1_dim": "32", "layer_1_fmt": "fp16", "layer_0_dim": "64", "layer_0_fmt": "turbo4"}
    assert formats.described(own) == ((64, "turbo4"), (32, "fp16"))
