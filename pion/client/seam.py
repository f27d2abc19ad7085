"""Where a prefix ends when it is given as text.

A tokenizer merges across borders: the ids of ``"(Han" + "zi)"`` need not start with the ids of ``"(Han"``. Keyed by
text, a cache would then hold K/V of tokens that are not in the request. So the ids of the whole are what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["BACK_OFF", "split_at_seam", "split_chat"]

BACK_OFF: Final = 8  # tokens; a merge reaches back over one word, and few words have more


def split_at_seam(
    encode: Callable[..., Sequence[int]], prefix: str, suffix: str, *, back_off: int = BACK_OFF
) -> tuple[list[int], int, list[int]]:
    """Tokenize ``prefix + suffix`` so that a stored prefix can be used for it.

    Args:
        encode: a tokenizer's ``encode``; it is called with ``add_special_tokens=False``.
        prefix: the shared text.
        suffix: what follows.
        back_off: how many tokens of the prefix may be given up.

    Returns:
        ``(stored, kept, rest)``: the ids of the prefix alone, which are what is stored and fetched; how many of them
        the whole starts with; and the ids of the whole behind those. ``stored[:kept] + rest`` are the ids of the
        whole.

    Raises:
        ValueError: nothing would be left to feed to the model, or the two differ further back than `back_off`.
    """
    stored = list(encode(prefix, add_special_tokens=False))
    whole = list(encode(prefix + suffix, add_special_tokens=False))
    kept = 0
    for mine, theirs in zip(stored, whole, strict=False):
        if mine != theirs:
            break
        kept += 1
    if len(stored) - kept > back_off:
        raise ValueError(
            f"the prefix differs from the whole at token {kept} of {len(stored)}, "
            f"more than {back_off} tokens from its end"
        )
    kept = min(kept, len(whole) - 1)
    if kept < 1:
        raise ValueError("the prefix and the suffix must have at least one token each")
    return stored, kept, whole[kept:]


_PROBE: Final = (
    {"role": "assistant", "content": "."},
    {"role": "user", "content": "."},
)  # what a next turn may look like


def split_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any
) -> tuple[list[int], list[int], list[int]]:
    """Tokenize a chat so that what is stored of it is what its next turn begins with.

    Templates add to the last turn what is gone in the next one: a generation prompt, an opened ``<think>``. So the chat
    is written down three times: to be answered, as it stands, and one turn later. What all begin with is stable.

    Args:
        tokenizer: anything with ``apply_chat_template(messages, tokenize=True, add_generation_prompt=...)``.
        messages: of the chat.
        template: further arguments of ``apply_chat_template``.

    Returns:
        ``(stable, rest, ends)``: ids to be stored; the ids to be fed behind them, at least one; and how many of the
        stable ids the chat without its last, its last two, ... messages shares, ascending.

    Raises:
        ValueError: nothing is stable.
    """

    def ids(chat: Sequence[Mapping[str, Any]], prompt: bool) -> list[int]:
        found = tokenizer.apply_chat_template(list(chat), tokenize=True, add_generation_prompt=prompt, **template)
        if isinstance(found, Mapping):
            found = found["input_ids"]
        return [int(token) for token in found]

    whole = ids(messages, True)
    kept = len(whole) - 1
    for other in (ids(messages, False), ids([*messages, *_PROBE], False)):
        kept = min(kept, _common(whole, other))
    if kept < 1:
        raise ValueError("the template begins with something that is another in each turn")
    ends = set()
    for count in range(1, len(messages)):
        try:
            end = _common(whole, ids(messages[:count], False))
        except Exception:  # templates refuse chats that do not end as they expect
            continue
        if 0 < end < kept:
            ends.add(end)
    return whole[:kept], whole[kept:], sorted(ends)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    same = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        same += 1
    return same
