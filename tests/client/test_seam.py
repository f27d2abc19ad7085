"""Prefixes given as text: the border between tokens."""

from __future__ import annotations

from typing import Any

import pytest

from pion.client.seam import split_at_seam
from tests.support import models


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.smollm2_model()[1]


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("The Chinese characters _(Hanzi", "hua) are old."),
        ("Options are [(", "hu, 1), (mo, 2)]"),
        ("Answer in one word.", " How far is it?"),
        ("unbeliev", "able"),
        ("line\n", "\nnext"),
    ],
)
def test_d12_the_whole_decides(tokenizer: Any, prefix: str, suffix: str) -> None:
    stored, kept, rest = split_at_seam(tokenizer.encode, prefix, suffix)
    assert stored == tokenizer.encode(prefix, add_special_tokens=False)
    assert stored[:kept] + rest == tokenizer.encode(prefix + suffix, add_special_tokens=False)
    assert len(stored) - kept <= 8
    assert rest


def test_d12_some_of_these_seams_do_merge(tokenizer: Any) -> None:
    stored, kept, _ = split_at_seam(tokenizer.encode, "unbeliev", "able")
    assert kept < len(stored)


def letters(text: str, *, add_special_tokens: bool) -> list[int]:
    """One token per letter, but a text with "!" is read from the other end: the worst a tokenizer can do."""
    return [ord(c) for c in (reversed(text) if "!" in text else text)]


def test_d12_a_difference_further_back_is_refused() -> None:
    with pytest.raises(ValueError, match="differs from the whole at token 0 of 9, more than 8"):
        split_at_seam(letters, "abcdefghi", "!")


def test_something_must_be_left_to_feed() -> None:
    assert split_at_seam(letters, "abc", "") == ([97, 98, 99], 2, [99])
    with pytest.raises(ValueError, match="at least one token each"):
        split_at_seam(letters, "a", "")
    with pytest.raises(ValueError, match="at least one token each"):
        split_at_seam(letters, "", "b")
