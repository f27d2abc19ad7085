"""The prompt cache of a model: what it consists of, which of it is stored as rows, and how it is computed.

A layer whose slot is a plain ``KVCache`` is *rows*: of K and of V one row of H * D values for each token. All others,
recurrent states, windows, quantized caches, are *states* (slots.py), bytes that are stored as they are.

mlx and mlx-lm are imported inside functions: importing this module needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pion.client import slots
from pion.client.identity import model_identity
from pion.client.mlx_arrays import PionMlxCompatError, mlx_modules, pack_rows, words

__all__ = [
    "CacheOptions",
    "Layout",
    "PionMlxCompatError",
    "Prefilled",
    "filled",
    "inspect_model",
    "mlx_modules",
    "new_cache",
    "pack_rows",
    "prefill",
    "prefill_from",
    "snapshot",
    "words",
]

_DTYPES: Final = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class CacheOptions:
    """How mlx-lm is to keep K/V, as its own ``generate`` takes it.

    Attributes:
        kv_bits: bits of a quantized cache; None: not quantized.
        kv_group_size: values that share a scale.
        max_kv_size: tokens of a rotating cache, for models that do not make their own.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    max_kv_size: int | None = None


@dataclass(frozen=True)
class Layout:
    """What the cache of a model is made of.

    Attributes:
        n_layers: of the model.
        n_kv_heads, head_dim: of the layers that are rows; 0 when there are none.
        cache_len: slots of the prompt cache, or layers of rows: see `of_rows`.
        dtype: of the rows, ``float16``, ``bfloat16`` or ``float32``; without rows, of what there is.
        rope: theta, or None.
        is_hybrid: whether something else than rows is kept.
        rows: the slots that are rows, in order; a slot's place in it is its layer number in the store.
        trees: the structure of the cache, see `slots.structure`.
        shapes: of each leaf, the dtypes and shapes of its arrays behind one token, see `slots.shapes`.
        identity: of the model when this was measured, see `identity.model_identity`.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    cache_len: int
    dtype: str
    rope: float | None
    is_hybrid: bool = False
    rows: tuple[int, ...] = ()
    trees: list[dict[str, Any]] = field(default_factory=list)
    shapes: tuple[slots.Shapes, ...] = field(default=(), compare=False, repr=False)
    identity: bytes = field(default=b"", compare=False, repr=False)

    @property
    def kv_dim(self) -> int:
        """Values of one row: heads times head size."""
        return self.n_kv_heads * self.head_dim

    @property
    def cuttable(self) -> bool:
        """Whether every leaf keeps every token, so that a stored prefix can be cut anywhere."""
        return slots.all_cuttable(self.trees)

    def of_rows(self, count: int) -> Layout:
        """The layout of `count` layers of such rows and nothing else."""
        return Layout(count, self.n_kv_heads, self.head_dim, count, self.dtype, self.rope)


def new_cache(model: Any, options: CacheOptions | None = None) -> list[Any]:
    """A fresh prompt cache for this model, of classes that can be stored.

    Raises:
        ImportError: mlx or mlx-lm is missing; the text names the command that installs them.
        PionMlxCompatError: the model keeps its state in other classes; the text names them.
    """
    _, module = mlx_modules()
    if not callable(model):
        raise TypeError(f"a loaded mlx-lm model is needed, not {type(model).__name__}: model, tok = mlx_lm.load(...)")
    size = options.max_kv_size if options else None
    cache = list(module.make_prompt_cache(model, size) if size else module.make_prompt_cache(model))
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if not cache:
        raise PionMlxCompatError(f"{name} makes no cache at all")
    try:
        slots.structure(cache)
    except PionMlxCompatError as error:
        found = Counter(type(slot).__name__ for slot in cache)
        made = ", ".join(f"{count} x {kind}" for kind, count in sorted(found.items()))
        raise PionMlxCompatError(f"{name} keeps its state in {made}: {error}") from error
    return cache


def _quantize(cache: list[Any], options: CacheOptions) -> None:
    """Turn plain caches into quantized ones, as mlx-lm does between two steps of a prefill."""
    _, module = mlx_modules()
    if options.kv_bits is None:
        return
    for place, slot in enumerate(cache):
        if type(slot) is module.KVCache and slot.keys is not None:
            cache[place] = slot.to_quantized(group_size=options.kv_group_size, bits=options.kv_bits)


def inspect_model(model: Any, options: CacheOptions | None = None) -> Layout:
    """Measure shapes and dtype of a model's K/V from a graph of one token, which is built but never computed.

    Layers whose K and V have the same shape and dtype as those of most others are rows.

    Raises:
        PionMlxCompatError: a cache class that is not known how to store, named; or one that `options` cannot have.
    """
    mx, module = mlx_modules()
    options = options or CacheOptions()
    cache = new_cache(model, options)
    identity = model_identity(model) if isinstance(model, dict) else b""
    if options.kv_bits is not None:
        windows = sum(type(slot) is module.RotatingKVCache for slot in cache)
        if windows:
            raise PionMlxCompatError(f"kv_bits={options.kv_bits}: mlx-lm cannot quantize {windows} x RotatingKVCache")
    model(mx.array([[0]]), cache=cache)
    try:
        _quantize(cache, options)
    except (ValueError, RuntimeError) as error:
        raise PionMlxCompatError(f"kv_bits={options.kv_bits}: mlx cannot quantize this model's K/V: {error}") from error
    shapes = {place: shape for place, slot in enumerate(cache) if (shape := _row_shape(slot, module)) is not None}
    chosen = Counter(shapes.values()).most_common(1)[0][0] if shapes else None
    rows = tuple(place for place, shape in shapes.items() if shape == chosen)
    heads, dim, dtype = chosen if chosen is not None else (0, 0, _dtype(cache))
    args = getattr(model, "args", None)
    theta = getattr(args, "rope_theta", None)
    if theta is None and isinstance(text := getattr(args, "text_config", None), dict):
        theta = text.get("rope_theta")
    return Layout(
        n_layers=len(getattr(model, "layers", cache)),
        n_kv_heads=heads,
        head_dim=dim,
        cache_len=len(cache),
        dtype=dtype,
        rope=float(theta) if isinstance(theta, int | float) else None,
        is_hybrid=len(rows) < len(cache),
        rows=rows,
        trees=slots.structure(cache),
        shapes=tuple(slots.shapes(leaf) for leaf in slots.leaves(cache)),
        identity=identity,
    )


def _row_shape(slot: Any, module: Any) -> tuple[int, int, str] | None:
    """(heads, head size, dtype) of a plain cache whose K and V are alike."""
    if type(slot) is not module.KVCache or slot.keys is None:
        return None
    found = {(a.shape[0], a.shape[1], a.shape[3], str(a.dtype).rpartition(".")[2]) for a in (slot.keys, slot.values)}
    batch, heads, dim, dtype = next(iter(found))
    return (heads, dim, dtype) if len(found) == 1 and batch == 1 and heads * dim and dtype in _DTYPES else None


def _dtype(cache: Sequence[Any]) -> str:
    for leaf in slots.leaves(cache):
        for array in leaf.cache if hasattr(leaf, "cache") else (leaf.keys,):
            name = str(getattr(array, "dtype", "")).rpartition(".")[2]
            if name in _DTYPES:
                return name
    return "float32"


@dataclass
class Prefilled:
    """A computed prefix.

    Attributes:
        cache: holds exactly the prefix.
        snapshots: by number of tokens, the state of each leaf that cannot be cut back to it, packed, by its number.
    """

    cache: list[Any]
    snapshots: dict[int, dict[int, bytearray]] = field(default_factory=dict)


def prefill_from(
    model: Any,
    cache: list[Any],
    token_ids: Sequence[int],
    done: int,
    *,
    chunk: int | None = None,
    options: CacheOptions | None = None,
    boundaries: Sequence[int] = (),
    progress: Callable[[int, int], Any] | None = None,
) -> Prefilled:
    """Go on with a prefix and wait for it. Only K/V is computed: the logits of the prefix are nobody's business.

    Args:
        model: an mlx-lm model.
        cache: holds the first `done` tokens; it is used up.
        token_ids: the whole prefix.
        done: tokens that the cache holds.
        chunk: tokens per forward pass, so that memory grows with the chunk and not with the prefix; None or 0 = one
            pass.
        options: how K/V is to be kept.
        boundaries: numbers of tokens at which the states that cannot be cut are to be taken down.
        progress: called with (tokens done, tokens in all) after each pass.
    """
    mx, _ = mlx_modules()
    out = Prefilled(cache)
    total = len(token_ids)
    stops = sorted({stop for stop in boundaries if done < stop < total} | {total})
    for stop in stops:
        while done < stop:
            end = min(stop, done + (chunk or total))
            model(mx.array(token_ids[done:end])[None], cache=cache)
            if options is not None:
                _quantize(cache, options)
            mx.eval(_arrays(cache))
            done = end
            if progress is not None:
                progress(done, total)
        if stop < total:
            out.snapshots[stop] = snapshot(cache, stop)
    return out


def snapshot(cache: Sequence[Any], tokens: int) -> dict[int, bytearray]:
    """The state of each leaf of a class that does not keep every token, packed, by its number."""
    return {
        number: slots.take(leaf).pack(leaf=number, tokens=tokens)
        for number, leaf in enumerate(slots.leaves(cache))
        if not slots.cuttable(leaf)
    }


def _arrays(cache: Sequence[Any]) -> list[Any]:
    found = []
    for leaf in slots.leaves(cache):
        held = leaf.cache if hasattr(leaf, "cache") else (leaf.keys, leaf.values)
        for part in held:
            found += [array for array in (part if isinstance(part, tuple | list) else [part]) if array is not None]
    return found


def prefill(model: Any, token_ids: Sequence[int], chunk: int | None, options: CacheOptions | None = None) -> list[Any]:
    """Compute a prefix from nothing, see `prefill_from`."""
    return prefill_from(model, new_cache(model, options), token_ids, 0, chunk=chunk, options=options).cache


def filled(model: Any, arrays: Sequence[tuple[Any, Any]], count: int) -> list[Any]:
    """A prompt cache of `count` tokens made of the (K, V) arrays of its layers, which nobody else may hold.

    Raises:
        PionMlxCompatError: the model's layers are not all plain ones.
    """
    _, module = mlx_modules()
    cache = new_cache(model)
    if any(type(slot) is not module.KVCache for slot in cache):
        raise PionMlxCompatError("a cache with other slots than plain ones is not made of K and V alone")
    for layer, (keys, values) in zip(cache, arrays, strict=True):
        layer.keys, layer.values, layer.offset = keys, values, count
    return cache
