"""Where a prefix ends when it is given as text.

A tokenizer merges across borders: the ids of ``"(Han" + "zi)"`` need not start with the ids of ``"(Han"``. Keyed by
text, a cache would then hold K/V of tokens that are not in the request. So the ids of the whole are what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["BACK_OFF", "split_at_seam"]

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
