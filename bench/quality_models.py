"""Real models under the quality harness: prefixes, their K/V as rows, caches made of rows, logits, greedy runs."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import quality_metrics as metrics
from bench.quality_codecs import F32, Layer
from pion.demo import blas

MODELS = ("smollm2", "gemma3")
INSTRUCTIONS = (
    "Explain in your own words what the following text is about.",
    "Summarise the following text in a few sentences.",
    "List the most important points of the following text.",
    "Continue the following text.",
)


@dataclass
class Prefix:
    """The unquantized side of one prompt.

    Attributes:
        ids: token ids that are in the cache.
        suffix: token ids of the request, computed after the cache was fetched.
        k, v: one entry a layer.
        answer: the unquantized run's own greedy tokens.
    """

    ids: list[int]
    suffix: list[int]
    k: list[Layer]
    v: list[Layer]
    answer: list[int]


class Subject:
    """A loaded model.

    Attributes:
        name: of `MODELS`.
        title, shape: for people.
        thetas: base of RoPE in each layer.
        never: ids of control tokens, which greedy runs do not choose, so that each has its full length.
    """

    def __init__(self, name: str) -> None:
        slow = blas.install()
        if slow:
            print(slow, file=sys.stderr)
        with warnings.catch_warnings():  # transformers warns about itself while it is imported
            warnings.simplefilter("ignore")
            import mlx.core as mx

            self.mx = mx
            self.name = name
            if name == "smollm2":
                from pion.demo import smollm2

                self.title, self.chat = smollm2.MODEL_ID, True
                self.model, self.tokenizer = smollm2.load("float32")
                self.thetas = [float(self.model.args.rope_theta)] * len(self.model.layers)
            elif name == "gemma3":
                from bench import gemma3

                self.title, self.chat = gemma3.MODEL_ID, False
                self.model, self.tokenizer = gemma3.load()
                args = self.model.args
                self.thetas = [
                    args.rope_local_base_freq if layer.self_attn.is_sliding else args.rope_theta
                    for layer in self.model.layers
                ]
            else:
                raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
        added = self.tokenizer._tokenizer.added_tokens_decoder
        self.never = sorted(i for i, token in added.items() if token.special)
        attention = self.model.layers[0].self_attn
        self.shape = f"{len(self.thetas)} layers, {attention.n_kv_heads} KV heads of {self._head_dim(attention)}"

    @staticmethod
    def _head_dim(attention: Any) -> int:
        return int(attention.k_proj.weight.shape[0]) // int(attention.n_kv_heads)

    # ---- prompts ------------------------------------------------------------------------------------------------

    def cut(self, text: str, number: int, length: int) -> tuple[list[int], list[int]]:
        """A prefix of exactly `length` tokens and the suffix that asks for an answer.

        SmolLM2-Instruct is asked in its chat format, and the suffix is the end of the question; Gemma 3, a base
        model, continues the text, and the suffix is the text's next token.
        """
        encode = self.tokenizer.encode
        if self.chat:
            head = f"<|im_start|>user\n{INSTRUCTIONS[number % len(INSTRUCTIONS)]}\n\n"
            start = encode(head, add_special_tokens=False)
            suffix = encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        else:
            start, suffix = [self.tokenizer.bos_token_id], []
        body = encode(text, add_special_tokens=False)[: length - len(start) + (not suffix)]
        if len(start) + len(body) < length:
            raise ValueError(f"the text has only {len(start) + len(body)} tokens of the {length} that are needed")
        ids = start + body
        return (ids, suffix) if suffix else (ids[:-1], ids[-1:])

    # ---- caches and rows ----------------------------------------------------------------------------------------

    def prefill(self, ids: list[int], suffix: list[int]) -> Prefix:
        """Compute the K/V of a prefix. The answer is still missing."""
        mx = self.mx
        cache = self._cache()
        mx.eval(self.model.model(mx.array([ids]), cache=cache))
        k, v = [], []
        for layer, theta in zip(cache, self.thetas, strict=True):
            window = getattr(layer, "max_size", len(ids))
            first = max(0, len(ids) - window)
            for side, array in ((k, layer.keys), (v, layer.values)):
                # Prefilled in one pass, so in temporal order; a rotating cache still needs its last `window` rows.
                words = np.array(array[0, :, : len(ids)])[:, first:]
                heads, n, dim = words.shape
                rows = np.ascontiguousarray(words.swapaxes(0, 1)).reshape(n, heads * dim)
                side.append(Layer(rows, dim, first, theta))
        return Prefix(ids, suffix, k, v, [])

    def answer(self, prefixes: Sequence[Prefix], tokens: int) -> None:
        """Give prefixes of equal length their greedy answers, computed together: a step reads all weights once."""
        cache = self.restore(prefixes[0], [([x.rows for x in each.k], [x.rows for x in each.v]) for each in prefixes])
        answers = self.greedy(cache, [each.suffix for each in prefixes], tokens)
        for prefix, answer in zip(prefixes, answers, strict=True):
            prefix.answer = answer

    def _cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self.model))

    def restore(self, prefix: Prefix, sides: Sequence[tuple[list[F32], list[F32]]]) -> list[Any]:
        """A cache that holds these rows of K and V in the place of a prefix's own; one batch entry for each pair."""
        mx = self.mx
        cache = self._cache()
        for i, layer in enumerate(cache):
            head = prefix.k[i].head

            def batch(side: int, i: int = i, head: int = head) -> Any:
                rows = np.stack([pair[side][i] for pair in sides])
                return mx.array(rows.reshape(*rows.shape[:2], -1, head).swapaxes(1, 2))

            layer.keys, layer.values = batch(0), batch(1)
            layer.offset = len(prefix.ids)
            if hasattr(layer, "_idx"):
                layer._idx = layer.keys.shape[2]  # full and in temporal order: the next row replaces the oldest
        mx.eval([(layer.keys, layer.values) for layer in cache])
        return cache

    # ---- runs ---------------------------------------------------------------------------------------------------

    def logits(self, cache: list[Any], prefix: Prefix) -> F32:
        """Logits of each token of the answer given all before it: (len(answer), vocabulary), in one pass."""
        forced = prefix.suffix + prefix.answer[:-1]
        out = self.model(self.mx.array([forced]), cache=cache)[0, -len(prefix.answer) :]
        return np.array(out)

    def greedy(self, cache: list[Any], starts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens after `starts`, equally long token ids for each batch entry of the cache."""
        mx = self.mx
        out: list[list[int]] = [[] for _ in starts]
        step = list(starts)
        for _ in range(tokens):
            last = np.array(self.model(mx.array(step), cache=cache)[:, -1])
            for found, token in zip(out, metrics.choices(last, self.never), strict=True):
                found.append(token)
            step = [found[-1:] for found in out]
        return out

    @contextlib.contextmanager
    def queries(self) -> Iterator[list[F32]]:
        """Collects what each layer asks its cache during a run: arrays (query heads, tokens, head size), after RoPE."""
        module: Any = sys.modules[type(self.model).__module__]
        original = module.scaled_dot_product_attention
        seen: list[F32] = []

        def attend(queries: Any, *args: Any, **options: Any) -> Any:
            seen.append(np.array(queries[0]))
            return original(queries, *args, **options)

        module.scaled_dot_product_attention = attend
        try:
            yield seen
        finally:
            module.scaled_dot_product_attention = original


# ---- prefixes are kept, since computing one takes longer than all that is measured on it ------------------------


def save(path: Path, prefix: Prefix) -> None:
    """Write a prefix to an npz file, whole or not at all."""
    sides: dict[str, NDArray[Any]] = {}
    for name, layers in (("k", prefix.k), ("v", prefix.v)):
        sides |= {f"{name}{i}": layer.rows for i, layer in enumerate(layers)}
    facts = {
        "ids": prefix.ids,
        "suffix": prefix.suffix,
        "answer": prefix.answer,
        "layers": [(layer.head, layer.first, layer.theta) for layer in prefix.k],
    }
    part = path.with_suffix(".part.npz")
    np.savez(part, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **sides)
    part.replace(path)


def read(path: Path) -> Prefix:
    """The prefix that `save` wrote."""
    with np.load(path) as held:
        facts = json.loads(held["facts"].tobytes())
        sides = [[Layer(held[f"{name}{i}"], *about) for i, about in enumerate(facts["layers"])] for name in ("k", "v")]
    return Prefix(facts["ids"], facts["suffix"], *sides, facts["answer"])
