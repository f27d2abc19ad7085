"""Prefixes given as texts and chats, for `PionPromptCache`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from pion.client import slots
from pion.client.arguments import text_namespace
from pion.client.caches import Layout
from pion.client.identity import prefix_digest
from pion.client.mlx_arrays import mlx_modules
from pion.client.namespace import make_namespace, token_array
from pion.client.seam import BACK_OFF, split_at_seam, split_chat
from pion.client.storing import Storing
from pion.client.work import Checkpoints, Wanted
from pion.errors import utf8
from pion.limits import MAX_NAMESPACE

__all__ = ["Texts"]

_NEEDS_MODEL: Final = "this method requires a model — construct PionPromptCache(model) to use it"


class Texts(Storing):
    """What asks for prefixes of texts, on top of what asks for prefixes of tokens."""

    @abstractmethod
    def get_or_prefill(self, prefix_token_ids: Any, namespace: str, *, checkpoints: Checkpoints = None) -> list[Any]:
        """The prompt cache of a prefix."""

    def prepare(self, tokenizer: Any, prefix: str, suffix: str, namespace: str) -> tuple[list[Any], list[int]]:
        """The same for texts: a cache, and the ids still to be fed to the model.

        The ids of ``prefix + suffix`` need not start with the ids of `prefix`: a tokenizer merges across the border.
        The stored prefix is then cut back, by at most 8 tokens, to where the two agree.

        Args:
            tokenizer: anything with ``encode(text, add_special_tokens=...)``.
            prefix: the shared text.
            suffix: the rest, not empty.
            namespace: the key of the prefix.
        """
        _tokenizer(tokenizer, "encode")
        for what, text in (("prefix", prefix), ("suffix", suffix)):
            if not isinstance(text, str):
                raise TypeError(f"{what} must be a str, not {type(text).__name__}")
        stored, kept, rest = split_at_seam(tokenizer.encode, prefix, suffix)
        layout = self._layout()
        before = max(0, len(stored) - BACK_OFF)  # so that a state that cannot be cut is there to go on from
        cache = self.get_or_prefill(stored, namespace, checkpoints=None if layout.cuttable else [before])
        if kept == len(stored):
            return cache, rest
        if all(slots.whole(leaf) for leaf in slots.leaves(cache)):
            mlx_modules()[1].trim_prompt_cache(cache, len(stored) - kept)
            return cache, rest
        want = self._wanted(stored[:kept], namespace, layout)
        return self._compute(want, layout, [namespace], [], "the seam").cache, rest

    def prepare_chat(
        self, tokenizer: Any, messages: Sequence[dict[str, Any]], namespace: str, **template: Any
    ) -> tuple[list[Any], list[int]]:
        """The same for a chat: a cache of what the next turn will begin with too, and the ids still to be fed.

        What a template adds for this turn only, the generation prompt or an opened ``<think>``, is not stored. Each
        turn stands under a name of its own, made of `namespace` and its tokens; the next one finds it by its tokens and
        computes what is new. Ends of messages are checkpoints.

        Args:
            tokenizer: anything with ``apply_chat_template(messages, tokenize=True, add_generation_prompt=...)``.
            messages: of the chat, the last one the user's.
            namespace: of the chat, or of many with the same model.
            template: further arguments of ``apply_chat_template``.
        """
        _tokenizer(tokenizer, "apply_chat_template")
        stable, rest, ends = split_chat(tokenizer, messages, **template)
        name = make_namespace(namespace, prefix_digest(b"", stable))
        return self.get_or_prefill(stable, name, checkpoints=ends), rest

    def _layout(self) -> Layout:
        if self.layout is None:
            raise RuntimeError(_NEEDS_MODEL)
        return self._measured()

    def _wanted(self, prefix_token_ids: Any, namespace: str, layout: Layout) -> Wanted:
        ids = token_array(prefix_token_ids)
        if not ids.size:
            raise ValueError("the prefix has no tokens")
        vocabulary = getattr(getattr(self.model, "args", None), "vocab_size", None)
        if isinstance(vocabulary, int) and ids.max() >= vocabulary:  # mlx would read beyond the embeddings
            raise ValueError(f"token id {ids.max()} is not in the model's vocabulary of {vocabulary}")
        if not 1 <= len(utf8(text_namespace(namespace), "the namespace")) <= MAX_NAMESPACE:
            raise ValueError(f"a namespace has 1 to {MAX_NAMESPACE} bytes; make_namespace() makes one of 32")
        return self._want(ids, namespace, layout)


def _tokenizer(given: Any, method: str) -> None:
    if isinstance(given, str | bytes) or not callable(getattr(given, method, None)):
        raise TypeError(f"a tokenizer with {method}(...) is needed first, not {type(given).__name__}")
