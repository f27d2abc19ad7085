"""Prefixes given as text: the border between tokens."""

from __future__ import annotations

from typing import Any

import pytest

from pion.client.seam import split_at_seam, split_chat
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


def test_d13_the_stored_key_ends_before_the_generation_prompt(tokenizer: Any) -> None:
    """By the template of the real model, which opens the answer's turn for the turn to be answered only."""
    chat = [
        {"role": "system", "content": "You are a support agent for Acme."},
        {"role": "user", "content": "How do I reset my password?"},
    ]
    stable, rest, ends = split_chat(tokenizer, chat)
    assert tokenizer.decode(rest) == "<|im_start|>assistant\n"
    assert tokenizer.decode(stable).endswith("How do I reset my password?<|im_end|>\n")
    assert [tokenizer.decode(stable[:end]) for end in ends] == [
        "<|im_start|>system\nYou are a support agent for Acme.<|im_end|>\n"
    ]
    later = [*chat, {"role": "assistant", "content": "By mail."}, {"role": "user", "content": "Thanks"}]
    again, _, ends = split_chat(tokenizer, later)
    assert again[: len(stable)] == stable
    assert len(stable) in ends


def test_d13_a_template_that_begins_with_something_new_each_time_is_refused() -> None:
    class Clock:
        ticks = 0

        def apply_chat_template(self, messages: Any, **_options: Any) -> list[int]:
            self.ticks += 1
            return [self.ticks, *range(10, 10 + len(messages))]

    with pytest.raises(ValueError, match="begins with something that is another in each turn"):
        split_chat(Clock(), [{"role": "user", "content": "x"}])
