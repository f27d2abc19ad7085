"""What K/V belongs to: a digest over the token ids and the model that computed it.

The server compares digests and refuses a prefix of other tokens, another model or other weights. The digest must be
equal for the same model on every machine and under every supported mlx-lm, and must change when anything changes that
K/V depends on. Hence the choices below.

* Arguments: every field of the model's configuration that is not at its default, and always those about position,
  heads and norms, whose default might change. Fields that a newer mlx-lm adds with a default do not disturb the
  digest.
* Parameters: name, shape, dtype, and 4 x 32 bytes sampled from each array. An adapter, an adapter loaded again with
  other weights, or other quantization changes them. Samples are read in place, in about 2 us per array, on every
  call, because weights may be swapped inside a living model.
* Adapters: their scale is not a parameter, so it is added.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pion._core import sampling
from pion.client.mlx_arrays import mlx_used
from pion.client.namespace import token_array

__all__ = ["cache_identity", "model_identity", "prefix_digest"]

_DIGEST_TAG = b"pion prefix 1\0"  # raise the number when the meaning of the digest changes
_CACHE_TAG = b"pion cache 1\0"
_SAMPLES, _SAMPLE_BYTES = 4, 32
_ALWAYS = ("rope", "theta", "head", "eps", "window", "softcap", "multiplier")


def prefix_digest(identity: bytes, token_ids: Any) -> str:
    """The digest of a prefix, 64 hex digits.

    Args:
        identity: what `model_identity` returned.
        token_ids: the ids of the prefix, see `token_array`.
    """
    ids = token_array(token_ids)
    hasher = hashlib.sha256(_DIGEST_TAG)
    hasher.update(identity)
    hasher.update(len(ids).to_bytes(8, "little"))
    hasher.update(ids.tobytes())
    return hasher.hexdigest()


def model_identity(model: Any) -> bytes:
    """SHA-256 (32 bytes) over a model's arguments, parameter names, shapes, dtypes, sampled weights and adapter
    scales.

    Args:
        model: an mlx-lm model (an ``nn.Module`` with parameters and, usually, ``args``).

    Raises:
        PionMlxCompatError: this is a forked child of a process that had used mlx.
    """
    import mlx.core as mx

    mlx_used()
    named = sampling.parameters(model, mx.array)
    known: dict[tuple[tuple[int, ...], Any], str] = {}
    parts = [_canonical(_arguments(model))]
    for (name, array), sample in zip(named, _samples([array for _, array in named]), strict=True):
        kind = tuple(array.shape), array.dtype
        if kind not in known:
            known[kind] = f"\0{kind[0]}\0{kind[1]}\0"
        parts += [(name + known[kind]).encode(), sample]
        if name.endswith(".lora_a"):  # LoRA, DoRA and their quantized forms keep the scale as a plain number
            parts.append(f"scale\0{float(_module(model, name).scale)!r}\0".encode())
    return hashlib.sha256(b"".join(parts)).digest()


def _module(model: Any, parameter: str) -> Any:
    """The module that owns a parameter, by the parameter's dotted name."""
    node = model
    for key in parameter.split(".")[:-1]:
        node = node[int(key)] if isinstance(node, list | tuple) else node[key]
    return node


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """A JSON value that does not depend on the process: no addresses, and 10000.0 written as 10000."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return f"<{type(value).__qualname__}>"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _fields(args: Any) -> dict[str, Any]:
    kept = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        derived = field.name == "layer_types" and isinstance(value, list) and len(set(value)) == 1
        if value is None or derived:  # newer mlx-lm fills in a list of equal layer types
            continue
        if value != _default(field) or any(word in field.name for word in _ALWAYS):
            kept[field.name] = _plain(value)
    return kept


def _arguments(model: Any) -> dict[str, Any]:
    args = getattr(model, "args", None)
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        return _fields(args)
    if args is not None and hasattr(args, "__dict__"):
        return {name: _plain(value) for name, value in vars(args).items() if not name.startswith("_")}
    return {"model_type": str(getattr(model, "model_type", type(model).__name__))}


def _samples(arrays: list[Any]) -> list[bytes]:
    import mlx.core as mx

    # The buffer protocol knows no bfloat16; a view as u16 is free.
    readable: list[Any] = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    mx.eval(readable)
    try:
        return sampling.samples(readable, _SAMPLES, _SAMPLE_BYTES)
    except (BufferError, ValueError):  # some are not contiguous: a transposed weight, say
        contiguous: Any = mx.contiguous
        return sampling.samples([contiguous(array) for array in readable], _SAMPLES, _SAMPLE_BYTES)


def cache_identity(model: bytes, kind: str) -> bytes:
    """What K/V and state belong to: the model, and how its cache is made.

    Args:
        model: what `model_identity` returned.
        kind: a text that says what the cache is made of; empty for plain K/V, whose identity is the model's.
    """
    return hashlib.sha256(_CACHE_TAG + model + kind.encode()).digest() if kind else model
