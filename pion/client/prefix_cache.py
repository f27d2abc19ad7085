"""`PionPrefixCache`: a slot of a prompt cache whose prefix somebody else attends to.

    install_pion_attention_patch()
    pc = PionPromptCache(model, stage2=True)
    if not pc.lookup(ns, prefix_ids):
        pc.get_or_prefill(prefix_ids, namespace=ns)
    cache = make_pion_prompt_cache(model, ns, pc, prefix_len=len(prefix_ids))
    text = generate(model, tok, prompt=suffix_ids, prompt_cache=cache)

What this process holds is attended to here, by mlx-lm's own slots. Else a slot keeps the K/V of the suffix only, and
the patched attention asks the server for the rest: with the suffix, for both in one softmax (fused); or for the prefix
alone, merged here with the suffix, where a mask or a long suffix makes that right or cheaper. Windows, and recurrent
states, are bounded: they are fetched, and are mlx-lm's own slots in any case.

mlx and mlx-lm are imported inside functions.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Final

import numpy as np

from pion.client import caches
from pion.client.attend import Fused, as_f32
from pion.client.attention_parts import Blocks, Seen, merge, sparse_attention, suffix_part
from pion.client.mlx_arrays import PionMlxCompatError, mlx_modules

__all__ = ["PionPrefixCache", "make_pion_prompt_cache", "owner_of"]

_FUSED_MOST: Final = 256 << 10  # bytes of a suffix that travel with each question; more is attended to here
_ROWS: Final = 256  # of queries at a time
_INSTALL: Final = "install_pion_attention_patch() first: without it mlx-lm would attend to the suffix alone"

_owners: weakref.WeakValueDictionary[int, PionPrefixCache] = weakref.WeakValueDictionary()


def owner_of(keys: Any) -> PionPrefixCache | None:
    """The slot that handed out these keys in the pass that is under way: layers that share K/V have no slot."""
    owner = _owners.get(id(keys)) if _owners else None
    return owner if owner is not None and owner._given is not None and owner._given[0] is keys else None


class PionPrefixCache:
    """A slot of a prompt cache. One sequence at a time.

    Args:
        layer_idx: its place in the model's prompt cache.
        namespace: of the prefix.
        prompt_cache: the `PionPromptCache` that is asked.
        prefix_len: tokens of the prefix.
        fa_window: positions that a query sees at most, its own included; None: what the model's mask shows.
        sparse_mode: ``{"K_block": 64, "K_blocks": 8, "selector": "block_mean"}``: single rows of queries attend to the
            blocks of the prefix that fit best.
        inner: mlx-lm's own slot, which holds the prefix; None: the server holds it.
        attend_layer: its layer on the server; None: `layer_idx`.
        suffix: an empty slot of mlx-lm for the suffix, when the server holds the prefix.

    Attributes:
        offset: tokens of prefix and suffix: the position of the next one.
    """

    def __init__(
        self, layer_idx: int, namespace: str, prompt_cache: Any, prefix_len: int, fa_window: int | None = None,
        sparse_mode: dict[str, Any] | None = None, *, inner: Any = None, attend_layer: int | None = None,
        suffix: Any = None,
    ) -> None:  # fmt: skip
        self.layer_idx, self.namespace, self.prompt_cache = layer_idx, namespace, prompt_cache
        self.prefix_len, self.fa_window, self.sparse_mode = prefix_len, fa_window, sparse_mode
        self.attend_layer = layer_idx if attend_layer is None else attend_layer
        self._inner = inner
        self._blocks = Blocks.of(sparse_mode)
        self._suffix = suffix if suffix is not None or inner is not None else mlx_modules()[1].KVCache()
        self._given: tuple[Any, Any] | None = None
        self._waiting = False
        self._mx = mlx_modules()[0]

    # --- what mlx-lm asks of a slot ---------------------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The position of the next token."""
        return int(self._inner.offset if self._inner is not None else self.prefix_len + self._suffix.offset)

    @property
    def state(self) -> Any:
        """K and V: of the suffix, ``()`` before there is one; where this process holds the prefix, of both; of a
        window, what it holds. Layers that share K/V read it in some versions of mlx-lm."""
        slot = self._suffix if self._inner is None else self._inner
        if self._given is not None:
            return self._given
        if slot.keys is None or (self._inner is None and not slot.offset):
            return ()
        if self._inner is not None and not self._plain:
            return slot.keys, slot.values
        return slot.keys[..., : slot.offset, :], slot.values[..., : slot.offset, :]

    @state.setter
    def state(self, state: Any) -> None:
        keys, values = state or (None, None)
        self._given, self._waiting = None, False
        if self._inner is not None and (keys is None or not self._plain):
            raise NotImplementedError("the state of a window is not replaced, nor that of a prefix by nothing")
        slot = self._suffix if self._inner is None else self._inner
        slot.keys, slot.values, slot.offset = keys, values, 0 if keys is None else keys.shape[2]

    @property
    def _plain(self) -> bool:
        return type(self._inner).__name__ == "KVCache"

    @property
    def nbytes(self) -> int:
        """Bytes held in this process."""
        slot = self._suffix if self._inner is None else self._inner
        return 0 if slot.keys is None else int(slot.keys.nbytes + slot.values.nbytes)

    def size(self) -> int:
        """Tokens of prefix and suffix."""
        return self.offset

    def empty(self) -> bool:
        """Never: there is a prefix."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Whether tokens of the suffix can be taken back."""
        return self._inner is None or bool(self._inner.is_trimmable())

    def trim(self, n: int) -> int:
        """Take back the last tokens, of the suffix at most; how many that were."""
        n = min(n, self.offset - self.prefix_len)
        self._given, self._waiting = None, False
        return int((self._suffix if self._inner is None else self._inner).trim(n))

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """A quantized slot of prefix and suffix, where this process holds both."""
        if self._inner is None:
            raise NotImplementedError("PionPrefixCache + kv_bits: the server holds the prefix")
        return self._inner.to_quantized(group_size=group_size, bits=bits)

    def keys_and_values(self) -> Any:
        """What was handed out last."""
        if self._inner is not None:
            return self._inner.keys_and_values()
        return self._given if self._given is not None else self._suffix.keys_and_values()

    def __getattr__(self, name: str) -> Any:
        """What this version of mlx-lm asks of its slots besides: masks, and the sizes of windows."""
        inner = self.__dict__.get("_inner")
        if inner is not None and not name.startswith("__"):
            return getattr(inner, name)
        if name == "make_mask" and "_suffix" in self.__dict__:
            module = mlx_modules()[1]
            if hasattr(module.KVCache, "make_mask"):
                plain = module.KVCache()
                plain.offset = self.offset
                return plain.make_mask
        raise AttributeError(f"PionPrefixCache has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PionPrefixCache:
        import copy

        twin = copy.copy(self)
        twin._inner, twin._suffix = copy.deepcopy(self._inner, memo), copy.deepcopy(self._suffix, memo)
        twin._given, twin._waiting = None, False
        return twin

    def __repr__(self) -> str:
        where = "server" if self._inner is None else "process"
        return f"<PionPrefixCache slot {self.layer_idx}, {self.prefix_len} tokens in the {where}, {self.offset} in all>"

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Take over the K/V of new tokens; those of the whole suffix, and of the prefix where this process holds it."""
        if self._inner is not None:
            pair: tuple[Any, Any] = self._inner.update_and_fetch(keys, values)
            return pair
        from pion.client.attention_patch import is_installed

        if not is_installed():
            raise RuntimeError(_INSTALL)
        _check_batch(keys)
        if self._waiting:
            raise PionMlxCompatError(
                f"slot {self.layer_idx}: nobody asked for the attention of the last tokens. Either that pass broke "
                "off, and a new cache is needed, or this model does not attend by mlx_lm.models.base"
            )
        if self._given is not None:
            _owners.pop(id(self._given[0]), None)
            self._given = None  # nobody else may hold what is appended to: it would be copied
        self._given = self._suffix.update_and_fetch(keys, values)
        self._waiting = True
        _owners[id(self._given[0])] = self
        return self._given

    # --- attention ------------------------------------------------------------------------------------------------

    def attend(
        self, original: Any, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        """Attention of queries (1, H_q, M, D) over prefix and suffix; in place of mlx-lm's own.

        Raises:
            NotImplementedError: more than one sequence, or a mask that is none of mlx-lm's, named.
            AttendError, OSError: the server refused, or was lost. The cache cannot be used afterwards.
        """
        _check_batch(queries)
        more = {} if sinks is None else {"sinks": sinks}
        if self._inner is not None:
            self.prompt_cache._attend.count("process")
            if self._blocks is not None and queries.shape[2] == 1 and (mask is None or isinstance(mask, str)):
                out = sparse_attention(queries, keys, values, self.prefix_len, self._blocks, scale, sinks)
                if out is not None:
                    return out
            return original(queries, keys, values, cache=self._inner, scale=scale, mask=mask, **more)
        if self._given is None or keys is not self._given[0] or values is not self._given[1]:
            raise PionMlxCompatError(f"slot {self.layer_idx}: this model changes K/V on their way to the attention")
        self._waiting = False
        if self.prefix_len <= 0:
            return original(queries, keys, values, cache=None, scale=scale, mask=mask, **more)
        return self._remote(queries[0], keys[0], values[0], scale, mask, sinks)[None].astype(queries.dtype)

    def _remote(self, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any) -> Any:
        mx = self._mx
        (heads, rows, dim), (kv_heads, suffix, _) = queries.shape, keys.shape
        if heads % kv_heads:
            raise PionMlxCompatError(f"slot {self.layer_idx}: {heads} query heads over {kv_heads} heads of K/V")
        seen = Seen.of(mask, rows, self.prefix_len, suffix, self.fa_window)
        q, k, v = (array.astype(mx.float32) for array in (queries, keys, values))
        asked = q * (scale * math.sqrt(dim))  # the server divides by the root of the head size
        mx.eval(asked, k, v)
        lanes = self.prompt_cache._attend
        dense = seen.whole and seen.causal
        travels = lanes.forced == "binary" or k.nbytes + v.nbytes <= _FUSED_MOST
        if dense and self._blocks is not None and rows == 1:
            steps = lanes.query_sparse_auto(
                self.namespace, self.attend_layer, asked[:, 0], self._blocks.block, self._blocks.count, kv_heads, None,
                0, self._blocks.selector, (k, v), sinks, False,
            )  # fmt: skip
            return mx.array(lanes.run(steps))[:, None]
        if dense and lanes.fused and travels:
            question = Fused.of(self.attend_layer, asked, k, v, None, 0)
            return mx.array(lanes.ask_fused(self.namespace, question, sinks))
        q = q * scale
        parts = []
        for first in range(0, rows, _ROWS):
            some = slice(first, min(first + _ROWS, rows))
            part = suffix_part(q[:, some], k, v, seen.suffix[some], sinks)
            parts.append(merge([part, self._prefix(asked[:, some], seen.prefix[some], kv_heads)])[0])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def _prefix(self, asked: Any, counts: Any, kv_heads: int) -> tuple[Any, Any]:
        """The part of the prefix: each row of (H_q, M, D) sees its last `counts` positions."""
        mx = self._mx
        heads, rows, dim = asked.shape
        values = as_f32(asked)
        out, lse = np.zeros((heads, rows, dim), np.float32), np.full((heads, rows), -np.inf, np.float32)
        for count in np.unique(counts[counts > 0]):
            where = np.flatnonzero(counts == count)
            # Query heads that share a head of K/V are its rows.
            grouped = values[:, where].reshape(kv_heads, -1, dim)
            window = 0 if count == self.prefix_len else int(count)
            lanes = self.prompt_cache._attend
            found = lanes.run(lanes.query(self.namespace, self.attend_layer, grouped, 0, True, window, None))
            out[:, where], lse[:, where] = found[0].reshape(heads, -1, dim), found[1].reshape(heads, -1)
        return mx.array(out), mx.array(lse)


def _check_batch(array: Any) -> None:
    if array.shape[0] != 1:
        raise NotImplementedError(f"PionPrefixCache assumes B=1; got B={array.shape[0]}")


class _Probe(PionPrefixCache):
    """A slot that only notes how a model attends."""

    attended = False

    def attend(
        self, original: Any, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        if self._given is None or keys is not self._given[0] or values is not self._given[1]:
            raise PionMlxCompatError(f"slot {self.layer_idx}: this model changes K/V on their way to the attention")
        self.attended, self._waiting = True, False
        return self._mx.zeros_like(queries)


def make_pion_prompt_cache(
    model: Any, namespace: str, prompt_cache: Any, prefix_len: int, sparse_full_layers: dict[str, Any] | None = None
) -> list[Any]:
    """A prompt cache of a stored prefix of which this process, or the server, attends to what the prefix has.

    Args:
        model: an mlx-lm model.
        namespace: the key of the prefix.
        prompt_cache: a `PionPromptCache`; best one with this model and ``stage2=True``.
        prefix_len: tokens of the prefix.
        sparse_full_layers: ``{"K_block": 64, "K_blocks": 8, "selector": "block_mean"}`` (or ``"quest"``): single tokens
            attend to so many blocks of the prefix, and its last one, in layers that attend to everything.

    Returns:
        One slot for each of mlx-lm's own: a `PionPrefixCache`, where the model keeps K/V of all tokens or of a window;
        mlx-lm's slot with the state of the prefix, where it keeps something else.

    Raises:
        PionMlxCompatError: the model attends in another way than the patch can answer for.
        RuntimeError: the patch is not installed.
        PrefixMissError: the server does not hold the prefix for attention.
        MismatchError, ValueError: it holds that of another model, or another number of tokens.
        LaneError: ``PION_ATTEND_LANE`` forces a way that cannot be taken.
    """
    from pion.client.attention_patch import is_installed

    Blocks.of(sparse_full_layers)
    if not callable(getattr(prompt_cache, "_built", None)):
        raise TypeError(f"prompt_cache must be a PionPromptCache, not {type(prompt_cache).__name__}")
    if not isinstance(prefix_len, int) or prefix_len < 1:
        raise ValueError(f"prefix_len must be the number of tokens of the prefix, not {prefix_len!r}")
    built = prompt_cache._built(model, namespace, prefix_len)
    if not is_installed() and (built.remote or sparse_full_layers):
        raise RuntimeError(_INSTALL)
    if built.remote:
        _probe(model, prompt_cache, prefix_len, built.remote)
    kinds = _layer_kinds(model)
    made: list[Any] = []
    for place, slot in enumerate(built.cache):
        name = type(slot).__name__
        sparse = sparse_full_layers if place in built.layout.rows and kinds.get(place, "full") == "full" else None
        if place in built.remote:
            slot = PionPrefixCache(place, built.namespace, prompt_cache, prefix_len, None, sparse,
                                   attend_layer=built.remote[place], suffix=slot)  # fmt: skip
        elif name in ("KVCache", "RotatingKVCache"):
            window = slot.max_size if name == "RotatingKVCache" else None
            slot = PionPrefixCache(place, namespace, prompt_cache, prefix_len, window, sparse, inner=slot)
        made.append(slot)
    return made


def _layer_kinds(model: Any) -> dict[int, str]:
    """What the configuration says of layers that attend to a window, by number."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    kinds = getattr(args, "layer_types", None) or (text.get("layer_types") if isinstance(text, dict) else None) or ()
    return {place: str(kind).partition("_")[0] for place, kind in enumerate(kinds)}


def _probe(model: Any, prompt_cache: Any, prefix_len: int, remote: dict[int, int]) -> None:
    """Whether the model attends by the function that is patched, with K/V as they are stored: from the graph of one
    token, which is built but never computed."""
    mx, _ = mlx_modules()
    cache = caches.new_cache(model, prompt_cache._options)
    for place in remote:
        cache[place] = _Probe(place, "", prompt_cache, prefix_len)
    model(mx.array([[0]]), cache=cache)
    others = [place for place in remote if not cache[place].attended]
    if others:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        raise PionMlxCompatError(
            f"{name} does not attend by mlx_lm.models.base.scaled_dot_product_attention in slots {others}, or bound it "
            "where the patch does not reach"
        )
