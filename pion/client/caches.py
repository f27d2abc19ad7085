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

from pion import metal_kernels
from pion.client.decode import CODES, NUMPY, Decoder, is_keys, wanted_part
from pion.wire.raw import Segment, Stored

__all__ = [
    "Layout",
    "PionMlxCompatError",
    "Restorer",
    "inspect_model",
    "mlx_modules",
    "new_cache",
    "pack_rows",
    "prefill",
    "words",
]

ROOM: Final = 256  # tokens that can be appended without a copy: mlx-lm's own step

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


class Restorer:
    """Builds a prompt cache from rows as they are stored, one layer-side at a time.

    On a GPU the stored bytes go there as they are, small where the format is, and are decoded there; on a CPU by the
    compiled decoders, in pieces that stay in its cache.

    Args:
        model: the model the cache is for.
        layout: what `inspect_model` said.
        count: tokens of the prefix.
        how: decode by ``metal`` kernels, mlx ``ops``, or on the ``cpu``; None: what suits the machine.
    """

    def __init__(self, model: Any, layout: Layout, count: int, how: str | None = None) -> None:
        self._layout, self._count = layout, count
        self._cache = new_cache(model)
        self._arrays: dict[tuple[int, int], Any] = {}
        self._mx, _ = mlx_modules()
        self._dtype = getattr(self._mx, layout.dtype)
        self._how = how or metal_kernels.backend() or "cpu"
        self._decoder = Decoder(layout.kv_dim, layout.dtype)
        self._stage: np.ndarray[Any, Any] | None = None
        self._turns: dict[tuple[int, int, float], Any] = {}

    def place(self, side: int, layer: int, stored: Stored, answer: memoryview) -> None:
        """Decode the rows of a layer into its array.

        Args:
            side: 0 = K, 1 = V.
            layer: from 0.
            stored: what `answer` holds; rows 0 to `count`.
            answer: an answer to FMT RAW; it may be overwritten afterwards.

        Raises:
            ValueError: these are not `count` rows of this model, or of a format this version does not know.
        """
        if (stored.start, stored.rows, stored.dim) != (0, self._count, self._layout.kv_dim):
            got = f"rows {stored.start} to {stored.start + stored.rows} of {stored.dim} values"
            raise ValueError(f"layer {layer}: {got}, not 0 to {self._count} of {self._layout.kv_dim}")
        if any(segment.missing for segment in stored.segments):
            raise ValueError(f"layer {layer}: rows are missing")
        if self._how != "cpu" and all(self._on_gpu(segment, stored.theta) for segment in stored.segments):
            self._arrays[layer, side] = self._gathered(stored, answer)
        else:
            self._arrays[layer, side] = self._laid_out(stored, answer)

    def _laid_out(self, stored: Stored, answer: memoryview) -> Any:
        layout, count = self._layout, self._count
        if self._stage is None:
            # Laid out here, then copied: half as many passes over fresh memory as filling an mlx array in place.
            self._stage = np.zeros((1, layout.n_kv_heads, count + ROOM, layout.head_dim), NUMPY[layout.dtype])
        stage = self._stage[0]
        for first, rows in self._decoder.pieces(stored, answer):
            heads = rows.reshape(len(rows), layout.n_kv_heads, layout.head_dim)
            np.copyto(stage[:, first : first + len(rows)], heads.swapaxes(0, 1))
        return self._mx.array(self._stage)

    # --- on a GPU -------------------------------------------------------------------------------------------------

    def _on_gpu(self, segment: Segment, theta: float) -> bool:
        if theta and is_keys(segment.fmt):  # the kernel turns the heads it writes
            return segment.fmt >> 8 == self._layout.head_dim > 1
        return segment.fmt in CODES.values() or metal_kernels.kernel_of(segment.fmt) is not None

    def _gathered(self, stored: Stored, answer: memoryview) -> Any:
        """The array of a layer, put together of its segments; nothing is computed yet."""
        heads, size = self._layout.n_kv_heads, self._layout.head_dim
        parts = [self._decoded(segment, stored, answer, len(stored.segments) == 1) for segment in stored.segments]
        room = self._count + ROOM - sum(part.shape[2] for part in parts)
        if room:
            parts.append(self._mx.zeros((1, heads, room, size), self._dtype))
        return parts[0] if len(parts) == 1 else self._mx.concatenate(parts, axis=2)

    def _decoded(self, segment: Segment, stored: Stored, answer: memoryview, alone: bool) -> Any:
        mx, layout = self._mx, self._layout
        first, last = wanted_part(segment, stored)
        data = np.frombuffer(answer[segment.offset : segment.offset + segment.nbytes], np.uint8)
        name = next((name for name, code in CODES.items() if code == segment.fmt), None)
        if name is not None:
            words = mx.array(data.view(np.uint16 if name == "bfloat16" else NUMPY[name]))
            words = words.view(mx.bfloat16) if name == "bfloat16" else words
            rows = words.reshape(-1, layout.n_kv_heads, layout.head_dim)[first:last]
            return rows.astype(self._dtype).transpose(1, 0, 2)[None]
        start, turns = segment.start + first, None
        if is_keys(segment.fmt):
            data = data[: len(data) // (segment.rows // 64) * -(-last // 64)]
            if stored.theta:
                turns = self._angles(start, last - first, stored.theta)
        rows = metal_kernels.Rows(
            segment.fmt,
            layout.n_kv_heads,
            layout.head_dim,
            last - first,
            self._count + ROOM if alone else last - first,
            skip=first if is_keys(segment.fmt) else 0,
            turned=turns is not None,
        )
        return metal_kernels.decode(mx.array(data), rows, self._dtype, turns=turns, how=self._how)

    def _angles(self, first: int, count: int, theta: float) -> Any:
        """The same for all layers: computed and sent once."""
        known = self._turns.get((first, count, theta))
        if known is None:
            known = self._mx.array(metal_kernels.angles(first, count, theta, self._layout.head_dim))
            self._turns[first, count, theta] = known
        return known

    def finish(self) -> list[Any]:
        """The cache, ready to decode from.

        Raises:
            ValueError: a layer-side was never placed.
        """
        wanted = [(layer, side) for layer in range(self._layout.cache_len) for side in (0, 1)]
        missing = [place for place in wanted if place not in self._arrays]
        if missing:
            raise ValueError(f"{len(missing)} of {len(wanted)} layer-sides are missing")
        for place in wanted:
            if self._arrays[place].dtype != self._dtype:  # numpy has no bfloat16: u16 until here
                self._arrays[place] = self._arrays[place].view(self._dtype)
        self._mx.eval(list(self._arrays.values()))
        for index, layer in enumerate(self._cache):
            layer.keys, layer.values = self._arrays.pop((index, 0)), self._arrays.pop((index, 1))
            layer.offset = self._count
        return self._cache
