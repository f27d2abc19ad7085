"""Layer by layer: the specs of V.CREATE SCHEMA and KV.PREFIX.REGISTER.SCHEMA (wire.md §1.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pion import limits
from pion.commands import args, kv
from pion.errors import CommandError

Layers = tuple[tuple[int, int], ...]
"""(dim, format) of each layer; a format is a code, its parameter from bit 8 on."""

_INT8: Final = limits.FORMATS["int8"]


def create(argv: list[bytes], default_dim: int) -> tuple[int, int, Layers]:
    """`n spec ...` of V.CREATE: dimension and format of layers beyond the n, and the n layers.

    Raises:
        CommandError: in the published order, naming the layer.
    """
    if not 0 <= default_dim <= limits.MAX_DIM:
        raise CommandError(f"ERR V.CREATE SCHEMA: default_dim must be 0-{limits.MAX_DIM}")
    if not argv:
        raise CommandError("ERR V.CREATE SCHEMA requires N (layer count)")
    count = args.integer(argv[0])
    if count <= 0:
        raise CommandError("ERR V.CREATE SCHEMA: N must be positive")
    if count > limits.MAX_SCHEMA_LAYERS:
        raise CommandError(
            f"ERR V.CREATE SCHEMA: N exceeds {limits.MAX_SCHEMA_LAYERS}; "
            "split into multiple sessions or wait for V.CREATE.SCHEMA.APPEND"
        )
    if len(argv) - 1 < count:
        raise CommandError(f"ERR V.CREATE SCHEMA: not enough layer specs (need {count})")
    layers = tuple(_layer("V.CREATE SCHEMA", f"layer {i}", argv[i + 1], default_dim) for i in range(count))
    return default_dim, _INT8, layers


def register(argv: list[bytes]) -> tuple[Layers, Layers, list[bytes]]:
    """`n kspec ... vspec ... [options]` of REGISTER.SCHEMA: layers of K, layers of V, and what stands behind them.

    A spec that ends in `*m` stands for m layers.
    """
    count = args.integer(argv[0])
    if not 1 <= count <= limits.MAX_LAYERS:
        raise CommandError(f"ERR KV.PREFIX.REGISTER.SCHEMA: N must be 1-{limits.MAX_LAYERS}")
    sides = []
    at = 1
    for side in "KV":
        layers: list[tuple[int, int]] = []
        while len(layers) < count:
            if at == len(argv):
                raise CommandError(
                    f"ERR KV.PREFIX.REGISTER.SCHEMA: not enough layer specs (need {count} for K and {count} for V)"
                )
            spec, _, times = argv[at].partition(b"*")
            repeat = args.integer(times) if b"*" in argv[at] else 1
            if not 1 <= repeat <= count - len(layers):
                raise CommandError(f"ERR KV.PREFIX.REGISTER.SCHEMA: {side} has {count} layers, its specs are more")
            layers += [_layer("KV.PREFIX.REGISTER.SCHEMA", f"{side} layer {len(layers)}", spec, 0)] * repeat
            at += 1
        sides.append(tuple(layers))
    return sides[0], sides[1], argv[at:]


def _layer(command: str, where: str, spec: bytes, default_dim: int) -> tuple[int, int]:
    """`item[,item...]`, an item being fmt=, dim= or rope=; the last of a repeated one wins."""
    fmt, dim, rope = "int8", default_dim, 0

    def wrong(what: str) -> CommandError:
        return CommandError(f"ERR {command}: {where} {what}")

    for item in args.text(spec).split(","):
        key, _, value = item.partition("=")
        key = key.lower()
        if key == "fmt":
            fmt = value.lower()
            if fmt not in limits.FORMATS:
                raise wrong("unknown fmt")
        elif key in ("dim", "rope"):
            number = kv.permissive_int(value.encode("utf-8", "surrogateescape"))
            if not 1 <= number <= limits.MAX_DIM:
                raise wrong(f"{key} must be 1-{limits.MAX_DIM}")
            dim, rope = (number, rope) if key == "dim" else (dim, number)
        elif key == "s":
            raise CommandError(f"ERR {command}: S-tensor reserved (route SSM/SWA-tail state through STATE.*)")
        else:
            raise wrong("unknown key")
    _check(fmt, dim, rope, wrong)
    return dim, limits.FORMATS[fmt] | (rope << 8 if fmt == kv.HYBRID else 0)


def _check(fmt: str, dim: int, rope: int, wrong: Callable[[str], CommandError]) -> None:
    if dim == 0:
        raise wrong("missing dim and no default supplied")
    if fmt == "mlx4g32" and dim % 32:
        raise wrong("mlx4g32 dim must be multiple of 32")
    if fmt == kv.HYBRID:
        if not 0 < rope < dim:
            raise wrong(f"{fmt} needs rope=N (0 < N < dim)")
        if (dim - rope) % 32:
            raise wrong(f"{fmt} body (dim - rope) must be multiple of 32")
