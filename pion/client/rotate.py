"""Keys at another position: the rotary embedding of stored keys taken back and applied anew, exactly.

A rope turns pairs of a key's values by angles that are proportional to its position. To move a key from position p to q
its pairs are turned by the difference. That difference is not computed from a formula: float32 rounds the product of a
position and a frequency, by up to 5e-4 at position 8,192, and the model's own keys carry that rounding. So the angles
are read off the model's rope module, by letting it turn unit vectors at p and at q. What is moved is then what the
model would have computed at q, to a few roundings of float32, under any scaling whose frequencies are constant (none,
linear, llama3, yarn, longrope, proportional), any base, on all dims of a head or the first ones, in either pairing.

Which rope a layer has is found in its modules, not in the configuration; and since a model may do with its keys what
its modules do not show, a few tokens are computed at two positions without context, and the keys of every layer
compared with moved ones. A model that fails is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pion.client.caches import PionMlxCompatError, mlx_modules, new_cache

__all__ = ["Mover", "Rope", "layer_ropes", "verified_ropes"]

_UTILS: Final = "mlx_lm.models.rope_utils"
_KNOWN: Final = {  # whose frequencies depend on nothing but the configuration; where the class must come from
    "RoPE": "mlx.nn.layers.positional_encoding",
    "Llama3RoPE": _UTILS,
    "YarnRoPE": _UTILS,
    "SuScaledRoPE": _UTILS,
    "ProportionalRoPE": _UTILS,
    "DynamicNTKScalingRoPE": "mlx_lm.models.llama",  # up to mlx-lm 0.20, for none, linear and llama3; never dynamic
    "SuScaledRotaryEmbedding": "mlx_lm.models.su_rope",  # what mlx-lm 0.20 to 0.25 called SuScaledRoPE
}
_PROBE: Final = (3, 5, 7, 5)  # token ids
_SHIFT: Final = 4093
_ALLOWED: Final = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}  # of the keys' rms; a wrong rope gives about 1
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True)
class Rope:
    """The rope of a layer.

    Attributes:
        key: equal for ropes that turn alike.
        dims: leading values of a head that are turned.
        traditional: pairs are neighbours, not a half apart.
        module: mlx-lm's.
    """

    key: tuple[Any, ...]
    dims: int = field(compare=False)
    traditional: bool = field(compare=False)
    module: Any = field(compare=False, repr=False)

    def table(self, first: int, count: int) -> tuple[Any, Any]:
        """What the module turns unit vectors into.

        Returns:
            cos, sin: float32 (count, dims / 2), for positions `first` and on, both times the module's own factor.
        """
        mx, _ = mlx_modules()
        half = self.dims // 2
        ones, zeros = mx.ones((1, 1, count, half)), mx.zeros((1, 1, count, half))
        if self.traditional:
            turned = self.module(mx.stack([ones, zeros], axis=-1).reshape(1, 1, count, self.dims), offset=first)
            return turned[0, 0, :, 0::2], turned[0, 0, :, 1::2]
        turned = self.module(mx.concatenate([ones, zeros], axis=-1), offset=first)
        return turned[0, 0, :, :half], turned[0, 0, :, half:]


def _is_rope(module: Any) -> bool:
    name = type(module).__name__.lower()
    return "rope" in name or "rotary" in name


def _rope(module: Any, where: str) -> Rope:
    mx, _ = mlx_modules()
    kind = type(module)
    if _KNOWN.get(kind.__name__) != kind.__module__:
        raise PionMlxCompatError(
            f"{where} turns its keys with {kind.__module__}.{kind.__name__}, which cannot be moved exactly "
            f"(those that can: {', '.join(f'{home}.{name}' for name, home in _KNOWN.items())})"
        )
    named = getattr(module, "dims", getattr(module, "dim", None))
    dims = 2 * module._freqs.size if named is None else int(named)
    if dims < 2 or dims % 2:
        raise PionMlxCompatError(f"{where} turns {dims} values of a head, which is not a positive even number")
    numbers = sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float) and name not in ("_no_grad", "_training", "training")
    )
    arrays = sorted((name, tuple(value.tolist())) for name, value in module.items() if isinstance(value, mx.array))
    return Rope((kind.__name__, *numbers, *arrays), dims, bool(getattr(module, "traditional", False)), module)


def layer_ropes(model: Any) -> list[Rope | None]:
    """The rope module that each layer of a model owns; None for a layer without one.

    Raises:
        PionMlxCompatError: a layer has a rope that cannot be moved exactly, or two different ones; the text names it.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    found: list[Rope | None] = []
    for index, layer in enumerate(model.layers):
        where = f"layer {index} of {name}"
        ropes = {_rope(module, where) for module in layer.modules() if _is_rope(module)}
        if len(ropes) > 1:
            kinds = " and ".join(sorted(rope.key[0] for rope in ropes))
            raise PionMlxCompatError(
                f"{where} has {len(ropes)} different ropes ({kinds}): which one keys have is unknown"
            )
        found.append(ropes.pop() if ropes else None)
    return found


class Mover:
    """Moves keys of the layers of a model. Tables are kept as long as the object, since layers share ropes.

    Args:
        ropes: of each layer, see `layer_ropes`.
    """

    def __init__(self, ropes: Sequence[Rope | None]) -> None:
        self._ropes = ropes
        self._difference = functools.cache(self._computed)

    @staticmethod
    def _computed(rope: Rope, old: int, new: int, count: int) -> tuple[Any, Any]:
        (cos_old, sin_old), (cos_new, sin_new) = rope.table(old, count), rope.table(new, count)
        square = cos_old * cos_old + sin_old * sin_old  # the square of yarn's or longrope's factor on all keys
        cos = (cos_new * cos_old + sin_new * sin_old) / square
        sin = (sin_new * cos_old - cos_new * sin_old) / square
        return cos, sin

    def keys(self, layer: int, keys: Any, old: int, new: int) -> Any:
        """The keys of consecutive tokens as if the first one stood elsewhere.

        Args:
            layer: from 0.
            keys: (1, H, T, D), as the layer put them into its cache.
            old, new: position of the first token, where it was computed and where it shall be.

        Returns:
            An array of the same shape and dtype. Computed in float32; nothing is evaluated yet.
        """
        rope = self._ropes[layer]
        if rope is None or old == new:
            return keys
        mx, _ = mlx_modules()
        cos, sin = self._difference(rope, old, new, keys.shape[2])
        head = keys[..., : rope.dims].astype(mx.float32)
        half = rope.dims // 2
        a, b = (head[..., 0::2], head[..., 1::2]) if rope.traditional else (head[..., :half], head[..., half:])
        a, b = a * cos - b * sin, a * sin + b * cos
        if rope.traditional:
            turned = mx.stack([a, b], axis=-1).reshape(head.shape)
        else:
            turned = mx.concatenate([a, b], axis=-1)
        turned = turned.astype(keys.dtype)
        return turned if rope.dims == keys.shape[-1] else mx.concatenate([turned, keys[..., rope.dims :]], axis=-1)


def _shifted_cache(position: int) -> Any:
    """A layer's cache whose first token stands at `position`, with nothing before it. Feed it token by token."""
    mx, module = mlx_modules()

    base: Any = module.KVCache

    class Shifted(base):  # type: ignore[misc]  # mlx-lm is untyped
        def update_and_fetch(self: Any, keys: Any, values: Any) -> tuple[Any, Any]:
            if self.keys is not None:
                keys = mx.concatenate([self.keys, keys], axis=2)
                values = mx.concatenate([self.values, values], axis=2)
            self.keys, self.values = keys, values
            self.offset = position + keys.shape[2]
            return keys, values

        def make_mask(self: Any, *_args: Any, **_options: Any) -> None:
            return None  # one query, which sees all there is

    cache = Shifted()
    cache.offset = position
    return cache


def _probed(model: Any, cache: list[Any], step: int) -> list[Any]:
    """The keys of each layer for a few tokens, so many in each pass."""
    mx, _ = mlx_modules()
    for first in range(0, len(_PROBE), step):
        model(mx.array([_PROBE[first : first + step]]), cache=cache)
        mx.eval([layer.keys for layer in cache])
    return [layer.keys[:, :, : len(_PROBE)] for layer in cache]


def verified_ropes(model: Any, layers: int) -> list[Rope | None]:
    """`layer_ropes`, once it is certain that keys turned by them are keys of this model in every layer.

    Args:
        model: an mlx-lm model with one plain ``KVCache`` for each layer.
        layers: how many caches it has.

    Raises:
        PionMlxCompatError: keys of this model cannot be moved; the text says in which layer, and why.
    """
    mx, _ = mlx_modules()
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    ropes = layer_ropes(model)
    if len(ropes) != layers:
        raise PionMlxCompatError(f"{name} has {len(ropes)} layers and {layers} caches: whose rope is whose is unknown")
    args = getattr(model, "args", None)
    known = [value for value in (getattr(args, length, None) for length in _LENGTHS) if isinstance(value, int)]
    shift = min(_SHIFT, (min(known) if known else 512) - len(_PROBE))
    try:
        if shift < 1:
            raise ValueError(f"it has only {min(known)} positions")
        here = _probed(model, new_cache(model), len(_PROBE))
        # Alone at a distance, and token by token: a model that numbers positions by pass is found out too.
        there = _probed(model, [_shifted_cache(shift) for _ in range(layers)], 1)
    except Exception as error:
        raise PionMlxCompatError(f"whether keys of {name} can be moved cannot be found out: {error}") from error
    mover = Mover(ropes)
    for layer, (first, second) in enumerate(zip(here, there, strict=True)):
        moved = mover.keys(layer, first, 0, shift).astype(mx.float32)
        off = moved - second.astype(mx.float32)
        size = mx.sqrt(mx.mean(mx.square(moved)))
        share = (mx.sqrt(mx.mean(mx.square(off))) / mx.maximum(size, 1e-30)).item()
        if not share <= _ALLOWED[str(first.dtype).rpartition(".")[2]]:
            rope = ropes[layer]
            what = "no rope among its modules" if rope is None else rope.key[0]
            raise PionMlxCompatError(
                f"keys of {name} cannot be moved: {shift} tokens further on, layer {layer} ({what}) has others than "
                f"moved ones, by {share:.0%}"
            )
    return ropes
