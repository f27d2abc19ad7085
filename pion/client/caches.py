"""Between mlx-lm's prompt caches and rows on the wire.

A layer's K (or V) is an array (1, H, capacity, D) of which the first n tokens count; on the wire it is n rows of H *
D values. This module measures a model's layout without running it, refuses cache classes it could not restore, packs
rows, and puts restored arrays (restore.py) into fresh caches.

mlx and mlx-lm are imported inside functions: importing this module needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = [
    "Layout",
    "PionMlxCompatError",
    "filled",
    "inspect_model",
    "mlx_modules",
    "new_cache",
    "pack_rows",
    "prefill",
    "words",
]

_DTYPES: Final = {"float16": "<u2", "bfloat16": "<u2", "float32": "<f4"}  # how numpy sees the words of each
_INSTALL: Final = (
    "this needs mlx and mlx-lm: python -m pip install 'pion-server[mlx]'. Without them use "
    "PionPromptCache(model=None), or KV.PREFIX.* and V.* through redis-py or pion.Client"
)


class PionMlxCompatError(RuntimeError):
    """mlx-lm, or this model's cache, is not of the shape this version of Pion can store and restore.

    Deliberately not an ImportError: code that makes mlx optional would swallow it.
    """


@dataclass(frozen=True)
class Layout:
    """What one row is: `dtype` is ``float16``, ``bfloat16`` or ``float32``, `rope` the theta or None."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    cache_len: int
    dtype: str
    rope: float | None
    is_hybrid: bool = False

    @property
    def kv_dim(self) -> int:
        """Values of one row: heads times head size."""
        return self.n_kv_heads * self.head_dim


def mlx_modules() -> tuple[Any, Any]:
    """``mlx.core`` and ``mlx_lm.models.cache``.

    Raises:
        ImportError: one is missing; the text names the command that installs them.
    """
    try:
        import mlx.core as mx
        import mlx_lm.models.cache as cache_module
    except ImportError as error:
        raise ImportError(f"{error}; {_INSTALL}") from error
    return mx, cache_module


def new_cache(model: Any) -> list[Any]:
    """A fresh prompt cache of plain ``KVCache`` objects for this model.

    Raises:
        ImportError: mlx or mlx-lm is missing; the text names the command that installs them.
        PionMlxCompatError: the model keeps its state in other classes; the text names them.
    """
    _, module = mlx_modules()
    if not callable(model):
        raise TypeError(f"a loaded mlx-lm model is needed, not {type(model).__name__}: model, tok = mlx_lm.load(...)")
    cache = list(module.make_prompt_cache(model))
    strange = Counter(type(layer).__name__ for layer in cache if type(layer) is not module.KVCache)
    if strange or not cache:
        names = ", ".join(f"{count} x {name}" for name, count in sorted(strange.items())) or "no cache at all"
        raise PionMlxCompatError(
            f"{type(model).__module__}.{type(model).__qualname__} keeps its state in {names}; "
            "this version stores models whose every layer has a plain KVCache"
        )
    missing = [name for name in ("keys", "values", "offset") if not hasattr(cache[0], name)]
    if missing:
        raise PionMlxCompatError(f"this mlx-lm's KVCache has no {' and no '.join(missing)}")
    return cache


def inspect_model(model: Any) -> Layout:
    """Measure shapes and dtype of a model's K/V from a graph of one token, which is built but never computed.

    Raises:
        PionMlxCompatError: K and V, or the layers, differ in shape or dtype, or the dtype is not a 16- or 32-bit
        float.
    """
    mx, _ = mlx_modules()
    cache = new_cache(model)
    model(mx.array([[0]]), cache=cache)
    shapes = {(a.shape[0], a.shape[1], a.shape[3], str(a.dtype)) for c in cache for a in (c.keys, c.values)}
    if len(shapes) > 1:
        shown = ", ".join(f"{heads} heads x {dim} {dtype}" for _, heads, dim, dtype in sorted(shapes))
        raise PionMlxCompatError(f"K and V differ in shape or dtype ({shown}); this version stores equal ones only")
    batch, heads, dim, dtype = shapes.pop()
    dtype = dtype.rpartition(".")[2]
    if batch != 1 or dtype not in _DTYPES:
        raise PionMlxCompatError(
            f"K/V of batch {batch} and dtype {dtype} cannot be stored (want 1 and {list(_DTYPES)})"
        )
    theta = getattr(getattr(model, "args", None), "rope_theta", None)
    return Layout(
        n_layers=len(getattr(model, "layers", cache)),
        n_kv_heads=heads,
        head_dim=dim,
        cache_len=len(cache),
        dtype=dtype,
        rope=float(theta) if isinstance(theta, int | float) else None,
    )


def prefill(model: Any, token_ids: Sequence[int], chunk: int | None) -> list[Any]:
    """Compute the K/V of a prefix and wait for it.

    Args:
        model: an mlx-lm model.
        token_ids: the prefix.
        chunk: tokens per forward pass, so that memory grows with the chunk and not with the prefix; None or 0 = one
        pass.

    Returns:
        A prompt cache that holds exactly the prefix. Only K/V is computed: the logits of the prefix are nobody's
        business.
    """
    mx, _ = mlx_modules()
    cache = new_cache(model)
    step = chunk or len(token_ids)
    for start in range(0, len(token_ids), step):
        model(mx.array(token_ids[start : start + step])[None], cache=cache)
        mx.eval([(layer.keys, layer.values) for layer in cache])
    return cache


def words(array: Any) -> np.ndarray[Any, Any]:
    """The memory of an mlx array, shared; bfloat16, which numpy does not know, as u16."""
    import mlx.core as mx

    return np.asarray(memoryview(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array))


def pack_rows(array: Any, count: int) -> np.ndarray[Any, Any]:
    """The first tokens of a K or V array as rows.

    Args:
        array: mlx array (1, H, capacity, D).
        count: tokens, at most the capacity.

    Returns:
        A copy, numpy (count, H * D), in the array's own words: u16 for the 16-bit floats, f32 otherwise.
    """
    return words(array)[0, :, :count].swapaxes(0, 1).reshape(count, -1)


def filled(model: Any, arrays: Sequence[tuple[Any, Any]], count: int) -> list[Any]:
    """A prompt cache of `count` tokens made of the (K, V) arrays of its layers, which nobody else may hold."""
    cache = new_cache(model)
    for layer, (keys, values) in zip(cache, arrays, strict=True):
        layer.keys, layer.values, layer.offset = keys, values, count
    return cache
