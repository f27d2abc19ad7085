"""mlx-lm's prompt-cache files: safetensors of what its cache objects hold.

A file is written by the installed mlx-lm, so that the same mlx-lm loads it with ``load_prompt_cache``. Reading knows
both layouts there are: the state's scalars stood in the metadata up to mlx-lm 0.31, and stand among the arrays since.

=====================  =======================  ==========================
                       up to 0.31               from 0.32
=====================  =======================  ==========================
arrays of layer i      ``i.0``, ``i.1``         the same, then the scalars
metadata of layer i    ``0.i`` (meta state)     none
the user's metadata    ``1.<key>``              ``0.<key>``
class of layer i       ``2.i``                  ``1.i``
=====================  =======================  ==========================

Only `KVCache` and `QuantizedKVCache` are read: the state of any other class is not K and V of every token. What a file
says is data; no class is looked up by a name that stands in it.

mlx and mlx-lm are imported inside functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pion.client.caches import mlx_modules, words

__all__ = ["SUFFIX", "CacheFile", "CacheFileError", "Float", "Layer", "Quantized", "checksum", "load", "save"]

SUFFIX: Final = ".safetensors"  # mlx adds it to any other name, and does not read a file without it

_DTYPES: Final = ("float16", "bfloat16", "float32")
_PLACES: Final[dict[str, tuple[tuple[int, ...], ...]]] = {  # what a layer's state consists of
    "KVCache": ((0,), (1,), (2,)),
    "QuantizedKVCache": (*((side, part) for side in (0, 1) for part in (0, 1, 2)), (2,), (3,), (4,)),
}


class CacheFileError(ValueError):
    """A file, or a prefix, that cannot be carried over; the text says what and why."""


@dataclass(frozen=True)
class Float:
    """K and V of one layer, mlx arrays ``(1, heads, tokens, head_dim)``."""

    keys: Any
    values: Any


@dataclass(frozen=True)
class Quantized:
    """K and V of one layer as mlx quantizes them: (codes u32, scales, biases), each ``(1, heads, tokens, ...)``."""

    keys: tuple[Any, Any, Any]
    values: tuple[Any, Any, Any]
    group_size: int
    bits: int

    def decoded(self) -> Float:
        """The values, in the dtype of the scales."""
        mx, _ = mlx_modules()
        how = {"group_size": self.group_size, "bits": self.bits}
        return Float(mx.dequantize(*self.keys, **how), mx.dequantize(*self.values, **how))


Layer = Float | Quantized


@dataclass(frozen=True)
class CacheFile:
    """What a file holds.

    Attributes:
        layers: of the model, in order.
        rows: tokens; every array has exactly so many.
        metadata: what the writer added.
    """

    layers: list[Layer]
    rows: int
    metadata: dict[str, str]


def checksum(layers: Iterable[Layer]) -> str:
    """SHA-256 over the arrays as they are: shapes, dtypes and words."""
    hasher = hashlib.sha256()
    for layer in layers:
        for array in _arrays(layer):
            hasher.update(f"{tuple(array.shape)}{array.dtype}".encode())
            hasher.update(np.ascontiguousarray(words(array)).data.cast("B"))
    return hasher.hexdigest()


def _arrays(layer: Layer) -> list[Any]:
    sides = (layer.keys, layer.values)
    return [array for side in sides for array in (side if isinstance(side, tuple) else (side,))]


# --- writing ---------------------------------------------------------------------------------------------------------


def save(path: Path, layers: Sequence[Layer], rows: int, metadata: Mapping[str, str]) -> None:
    """Write a file that the installed mlx-lm loads.

    Args:
        path: ends with `SUFFIX`.

    Raises:
        CacheFileError: the name.
        OSError: it could not be written.
    """
    if path.suffix != SUFFIX:
        raise CacheFileError(f"{path}: mlx-lm loads a prompt cache from a name that ends with {SUFFIX}")
    _, module = mlx_modules()
    caches = []
    for layer in layers:
        if isinstance(layer, Quantized):
            cache = module.QuantizedKVCache(group_size=layer.group_size, bits=layer.bits)
        else:
            cache = module.KVCache()
        cache.keys, cache.values, cache.offset = layer.keys, layer.values, rows
        caches.append(cache)
    try:
        module.save_prompt_cache(str(path), caches, dict(metadata))
    except RuntimeError as error:  # mlx's only kind; its text holds the cause
        raise OSError(f"{path} could not be written: {error}") from error


# --- reading ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> CacheFile:
    """Read a file that some version of mlx-lm wrote.

    Raises:
        CacheFileError: it is none, or holds what is not K and V of every token; the text names it.
        OSError: it cannot be read.
    """
    mx, _ = mlx_modules()
    path.open("rb").close()  # mlx does not tell a missing file from a broken one
    try:
        arrays, said = mx.load(str(path), format="safetensors", return_metadata=True)
        classes, states, metadata = _parts(arrays, said)
        layers = [_layer(number, name, states[number]) for number, name in enumerate(classes)]
        rows = _rows(layers)
        mx.eval([array for layer in layers for array in _arrays(layer)])
    except CacheFileError as error:
        raise CacheFileError(f"{path}: {error}") from None
    except (RuntimeError, ValueError) as error:
        raise CacheFileError(f"{path} is no whole safetensors file: {error}") from error
    return CacheFile(layers, rows, metadata)


State = dict[tuple[int, ...], Any]  # by the numbers behind the layer's


def _parts(arrays: Mapping[str, Any], said: Mapping[str, str]) -> tuple[list[str], list[State], dict[str, str]]:
    """Class and state of each layer, and the user's metadata."""
    late = said.get("2.0") == ""  # the list of scalars begins with an empty text, the list of classes never
    named, user = ("1.", "0.") if late else ("2.", "1.")
    classes: list[str] = []
    while (name := said.get(f"{named}{len(classes)}")) is not None:
        classes.append(name)
    if not classes:
        raise CacheFileError("no prompt cache of mlx-lm: its metadata names no cache classes")
    strange = sorted({name for name in classes if name not in _PLACES})
    if strange:
        raise CacheFileError(
            f"layers in {', '.join(strange)[:200]}: only {' and '.join(_PLACES)} hold K and V of every token"
        )
    states: list[State] = [{} for _ in classes]
    for key, array in arrays.items():
        number, *rest = (int(part) if part.isascii() and part.isdigit() else -1 for part in key.split("."))
        if not 0 <= number < len(classes) or tuple(rest) not in _PLACES[classes[number]]:
            raise CacheFileError(f"an array that belongs to no layer: {key[:80]!r}")
        states[number][tuple(rest)] = array
    if not late:
        for number, state in enumerate(states):
            _take_scalars(number, classes[number], state, said)
    return classes, states, {key[len(user) :]: text for key, text in said.items() if key.startswith(user)}


def _take_scalars(number: int, name: str, state: State, said: Mapping[str, str]) -> None:
    """What the early layout keeps in the metadata, to where the late one has it."""
    if name != "QuantizedKVCache":
        return
    texts: list[str] = []
    while (text := said.get(f"0.{number}.{len(texts)}")) is not None:
        texts.append(text)
    if len(texts) not in (3, 4):
        raise CacheFileError(f"layer {number}: its quantization is not described")
    for place, text in enumerate(texts[-3:], 2):  # (step,) offset, group size, bits
        state[place,] = int(text)


def _layer(number: int, name: str, state: State) -> Layer:
    def scalar(place: int) -> int:
        found = state.get((place,))
        if found is None:
            raise CacheFileError(f"layer {number}: {name} without its size")
        return int(found.item() if hasattr(found, "item") else found)

    if name == "KVCache":
        try:
            keys, values = state[0,], state[1,]
        except KeyError:
            raise CacheFileError(f"layer {number} is empty") from None
        rows = scalar(2) if (2,) in state else keys.shape[-2]
        return Float(_plain(number, keys, rows), _plain(number, values, rows))
    rows, group_size, bits = scalar(2), scalar(3), scalar(4)
    sides = []
    for side in (0, 1):
        try:
            triple = tuple(state[side, part] for part in range(3))
        except KeyError:
            raise CacheFileError(f"layer {number} is empty") from None
        sides.append(tuple(_cut(number, array, rows) for array in triple))
    return Quantized(sides[0], sides[1], group_size, bits)


def _plain(number: int, array: Any, rows: int) -> Any:
    dtype = str(array.dtype).rpartition(".")[2]
    if dtype not in _DTYPES:
        raise CacheFileError(f"layer {number}: K/V of dtype {dtype} (want {', '.join(_DTYPES)})")
    return _cut(number, array, rows)


def _cut(number: int, array: Any, rows: int) -> Any:
    """The first rows of an array, the rest of which is room for more."""
    if array.ndim != 4 or array.shape[0] != 1:
        raise CacheFileError(f"layer {number}: K/V of shape {tuple(array.shape)}, not (1, heads, tokens, head_dim)")
    if not 0 < rows <= array.shape[2]:
        raise CacheFileError(f"layer {number}: {rows} tokens in an array of {array.shape[2]}")
    return array[:, :, :rows]


def _rows(layers: Sequence[Layer]) -> int:
    """How many tokens all arrays have."""
    lengths = {array.shape[2] for layer in layers for array in _arrays(layer)}
    if len(lengths) != 1:
        raise CacheFileError(f"layers of different length: {sorted(lengths)} tokens")
    return int(lengths.pop())
