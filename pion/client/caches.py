"""Between mlx-lm's prompt caches and rows on the wire.

A layer's K (or V) is an array (1, H, capacity, D) of which the first n tokens count; on the wire it is n rows of H *
D values. This module measures a model's layout without running it, refuses cache classes it could not restore, packs
rows, and builds caches that decode at native speed:

* arrays are as long as the prefix plus `ROOM` tokens. One of exactly n tokens would be copied as a whole at the first
  decoded token (57 to 118 ms for 2,048 tokens of a small model);
* nothing else refers to their buffers when they are handed out, for the same reason.

mlx and mlx-lm are imported inside functions: importing this module needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pion._core import quant, quantkeys
from pion.wire import raw

__all__ = ["Layout", "PionMlxCompatError", "Restorer", "inspect_model", "new_cache", "pack_rows", "prefill"]

ROOM: Final = 256  # tokens that can be appended without a copy: mlx-lm's own step

_DTYPES: Final = {"float16": "<u2", "bfloat16": "<u2", "float32": "<f4"}  # how numpy sees the words of each
WORDS: Final = {"float16": quant.FP16, "bfloat16": quant.BF16, "float32": quant.FP32}
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


def _mlx() -> Any:
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
    _, module = _mlx()
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
    mx, _ = _mlx()
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
    mx, _ = _mlx()
    cache = new_cache(model)
    step = chunk or len(token_ids)
    for start in range(0, len(token_ids), step):
        model(mx.array(token_ids[start : start + step])[None], cache=cache)
        mx.eval([(layer.keys, layer.values) for layer in cache])
    return cache


def _words(array: Any) -> np.ndarray[Any, Any]:
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
    return _words(array)[0, :, :count].swapaxes(0, 1).reshape(count, -1)


def decoded(stored: raw.Stored, answer: memoryview, out: bytearray) -> bytearray:
    """The rows of an answer to FMT RAW as fp32.

    Args:
        stored: what its header says.
        answer: all of it.
        out: 4 * rows * dim bytes.
    """
    dim, view = stored.dim, memoryview(out)
    row = 4 * dim
    for segment in stored.segments:
        data = answer[segment.offset : segment.offset + segment.nbytes]
        skip = max(0, stored.start - segment.start)
        count = min(segment.start + segment.rows, stored.start + stored.rows) - segment.start - skip
        at = (segment.start + skip - stored.start) * row
        place = view[at : at + count * row]
        if segment.missing:
            place[:] = bytes(len(place))
        elif count == segment.rows and segment.is_keys:
            quantkeys.decode_keys(segment.fmt, data, dim, segment.start, stored.theta, out=place)
        elif segment.is_keys:
            whole = quantkeys.decode_keys(segment.fmt, data, dim, segment.start, stored.theta)
            place[:] = memoryview(whole)[skip * row : (skip + count) * row]
        else:
            quant.decode(segment.fmt, data, dim, out=place)
    return out


class Restorer:
    """Builds a prompt cache from rows, one layer-side at a time.

    Args:
        model: the model the cache is for.
        layout: what `inspect_model` said.
        count: tokens of the prefix.
    """

    def __init__(self, model: Any, layout: Layout, count: int) -> None:
        self._layout, self._count = layout, count
        self._cache = new_cache(model)
        self._arrays: dict[tuple[int, int], Any] = {}
        self._wide: bytearray | None = None
        self._mx, _ = _mlx()
        # Laid out here, then copied: half as many passes over fresh memory as filling an mlx array in place.
        self._stage = np.zeros((1, layout.n_kv_heads, count + ROOM, layout.head_dim), _DTYPES[layout.dtype])

    @property
    def most_bytes(self) -> int:
        """More than one layer-side ever takes in an answer to FMT RAW."""
        return self._count * (4 * self._layout.kv_dim + 64) + (1 << 20)

    def place(self, layer: int, side: int, answer: memoryview) -> None:
        """Copy rows into a layer.

        Args:
            layer: from 0.
            side: 0 = K, 1 = V.
            answer: to FMT RAW, of exactly `count` rows from the first one on.

        Raises:
            ValueError: `answer` is something else.
        """
        layout, dim, wanted = self._layout, self._layout.kv_dim, WORDS[self._layout.dtype]
        stored = raw.parse(answer)
        if (stored.dim, stored.start, stored.rows) != (dim, 0, self._count):
            raise ValueError(
                f"layer {layer}: rows {stored.start}..{stored.start + stored.rows} of {stored.dim} values, "
                f"not {self._count} rows of {dim}"
            )
        if any(segment.missing for segment in stored.segments):
            raise ValueError(f"layer {layer}: rows are missing")
        first = stored.segments[0]
        if len(stored.segments) == 1 and first.fmt == wanted:
            data = answer[first.offset :]
        else:
            if self._wide is None:  # one for all layers: fresh memory costs more than the conversion
                self._wide = bytearray(4 * self._count * dim)
            data = memoryview(decoded(stored, answer, self._wide))
            if wanted != quant.FP32:
                data = memoryview(quant.encode(quant.FP32, wanted, data, dim))
        rows = np.frombuffer(data, _DTYPES[layout.dtype]).reshape(self._count, layout.n_kv_heads, layout.head_dim)
        np.copyto(self._stage[0, :, : self._count], rows.swapaxes(0, 1))
        self._arrays[layer, side] = self._mx.array(self._stage)

    def finish(self) -> list[Any]:
        """The cache, ready to decode from.

        Raises:
            ValueError: a layer-side was never placed.
        """
        wanted = [(layer, side) for layer in range(self._layout.cache_len) for side in (0, 1)]
        missing = [place for place in wanted if place not in self._arrays]
        if missing:
            raise ValueError(f"{len(missing)} of {len(wanted)} layer-sides are missing")
        if self._layout.dtype != "float32":
            dtype = getattr(self._mx, self._layout.dtype)  # numpy has no bfloat16: u16 until here
            for place in wanted:
                self._arrays[place] = self._arrays[place].view(dtype)
            self._mx.eval(list(self._arrays.values()))
        for index, layer in enumerate(self._cache):
            layer.keys, layer.values = self._arrays.pop((index, 0)), self._arrays.pop((index, 1))
            layer.offset = self._count
        return self._cache
