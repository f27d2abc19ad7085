"""Which format each layer of K and of V is stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pion import limits
from pion.limits import BUILT_FORMATS, FORMATS, MAX_SCHEMA_LAYERS

__all__ = ["KEPT", "Formats", "Sides", "check_name", "described", "registration", "stored_format"]

KEPT: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # the format that keeps the words

_FLOATS: Final = ("native", "fp16", "bf16", "fp32")
_HYBRID: Final = "bf16_rope_fp8_body"
_TURBO: Final = ("turbo4", "turbo3", "turbo2")
_KEY_FORM: Final = 16  # codes of the key forms of turbo stand so far above its own

Sides = tuple[tuple[str, ...], tuple[str, ...]]
"""The formats of the layers of K and of V, by name."""


def check_name(what: str, name: str) -> None:
    """Whether a format can be asked for.

    Raises:
        ValueError: it cannot; the text names those that can.
    """
    allowed = ", ".join(fmt for fmt in BUILT_FORMATS if fmt != _HYBRID)
    if name == _HYBRID:
        raise ValueError(f"{what}={name!r} needs a width for its bf16 part: use KV.PREFIX.REGISTER.SCHEMA with rope=")
    if name in FORMATS and name not in BUILT_FORMATS:
        raise ValueError(f"{what}={name!r} is not in this version of Pion (want {allowed} or native)")
    if name not in BUILT_FORMATS and name != "native":
        raise ValueError(f"unknown {what} {name!r} (want {allowed} or native)")


def stored_format(name: str, dtype: str) -> str:
    """The format K/V of this dtype is stored in: 16-bit models keep their words under ``fp16`` as well."""
    if name == "native" or (name == "fp16" and dtype == "bfloat16"):
        return KEPT[dtype]
    return name


@dataclass(frozen=True)
class Formats:
    """What a user asked for.

    Attributes:
        k, v: formats of the two sides.
        protect: layers at either end that are kept in fp16, where their format is a quantized one.
    """

    k: str
    v: str
    protect: int = 0

    @classmethod
    def of(cls, vquant: str, k_format: str | None, v_format: str | None, boundary_protect: int) -> Formats:
        """From the arguments of `PionPromptCache`.

        Raises:
            ValueError: a format is not offered.
        """
        for what, name in (("vquant", vquant), ("k_format", k_format), ("v_format", v_format)):
            if name is not None:
                check_name(what, name)
        protect = max(0, boundary_protect)
        k, v = k_format or vquant, v_format or vquant
        if protect and k_format is None and k not in _FLOATS:
            k = "fp16"
        return cls(k, v, protect)

    def sides(self, dtype: str, layers: int) -> Sides:
        """The format of each layer, for a model of this dtype."""

        def side(name: str) -> tuple[str, ...]:
            ends = self.protect if name not in _FLOATS else 0
            asked = ("fp16" if i < ends or i >= layers - ends else name for i in range(layers))
            return tuple(stored_format(name, dtype) for name in asked)

        return side(self.k), side(self.v)

    def check(self, dtype: str, layers: int, dim: int) -> None:
        """Whether a model can be stored like this.

        Raises:
            ValueError: too many layers for `boundary_protect`, or a format that does not take rows of `dim` values.
        """
        if self.protect and layers > MAX_SCHEMA_LAYERS:
            raise ValueError(
                f"boundary_protect={self.protect} describes every layer; "
                f"this takes models of at most {MAX_SCHEMA_LAYERS} layers, this one has {layers}"
            )
        for name in {name for side in self.sides(dtype, layers) for name in side}:
            if not limits.row_bytes(FORMATS[name], dim):
                wants = "a multiple of 32 values" if name == "mlx4g32" else "1 to 8192 values"
                raise ValueError(f"format {name} takes rows of {wants}; this model's have {dim}")


def registration(name: str | bytes, dim: int, sides: Sides) -> list[Any]:
    """The command that makes a prefix, without its options: REGISTER where one format is enough."""
    if len({*sides[0], *sides[1]}) == 1:
        return ["KV.PREFIX.REGISTER", name, dim, sides[0][0]]
    specs = (f"fmt={fmt},dim={dim}" for side in sides for fmt in side)
    return ["KV.PREFIX.REGISTER.SCHEMA", name, len(sides[0]), *specs]


def described(lines: dict[str, str]) -> tuple[tuple[int, str], ...]:
    """(values per row, format) of each layer in a V.INFO reply."""
    dim, fmt, layers = int(lines["value_dim"]), lines["v_format"], int(lines["num_layers"])
    return tuple((int(lines.get(f"layer_{i}_dim", dim)), lines.get(f"layer_{i}_fmt", fmt)) for i in range(layers))


def belongs(fmt: int, name: str) -> bool:
    """Whether rows in the stored format `fmt` can be part of a layer of the format `name`."""
    code, wanted = fmt & 255, FORMATS[name]
    if name in _TURBO:  # keys: groups of rows, and the rows of a group that is not full as fp16
        return code in (wanted, wanted + _KEY_FORM, FORMATS["fp16"])
    return code == wanted
