"""Prefixes of prefixes: what a stored one shares with what is asked for is fetched, only the rest is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion import Client, PionPromptCache
from pion.client import slots
from pion.client.caches import prefill
from pion.testing import server as start_server
from tests.support import families, models

models.need_mlx()
mx = models.mx

A, B, C = families.tokens(40, 1), families.tokens(14, 2), families.tokens(20, 3)
SUFFIX = [5, 6, 7]
STEP = 16  # of checkpoints
_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server("--kvcache", dir=tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def ns() -> str:
    return f"reuse-{next(_names)}"


@pytest.fixture
def cache_of(server: Any) -> Iterator[Callable[..., PionPromptCache]]:
    """A `PionPromptCache` on the server, lossless unless asked for otherwise, closed at the end."""
    made: list[PionPromptCache] = []

    def make(model: Any = None, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, port=server.port, **{"vquant": "native", **options}))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def counted(model: Any) -> tuple[Any, list[int]]:
    """The model, and the lengths of all inputs it gets."""
    seen: list[int] = []
    kind = type(model)

    def call(self: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        seen.append(tokens.shape[-1])
        return kind.__call__(self, tokens, *args, **options)

    model.__class__ = type("Counting", (kind,), {"__call__": call})
    return model, seen


def fresh(family: str) -> Any:
    """A model of this test alone: what other tests stored is not of its kind."""
    return families.tiny(family, seed=next(_names) + 100)


def near(model: Any, cache: list[Any], ids: list[int]) -> float:
    """The largest difference of the next logits to those computed from nothing."""
    cold = families.logits(model, prefill(model, ids, None), SUFFIX)
    got = families.logits(model, cache, SUFFIX)
    assert np.isfinite(got).all()
    return float(np.abs(got - cold).max())


# --- A+C where A+B is stored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("under", ["another name", "the same name"])
def test_d5_a_plus_c_is_never_computed_from_the_state_of_a_plus_b(
    cache_of: Callable[..., PionPromptCache], ns: str, family: str, under: str
) -> None:
    model, seen = counted(fresh(family))
    pc = cache_of(model, on_mismatch="recompute", checkpoints=STEP)
    held = pc.get_or_prefill(A + B, ns)
    cut = all(slots.whole(leaf) for leaf in slots.leaves(held))
    asked = A + C
    name = ns if under == "the same name" else f"{ns}-c"
    told = pc.explain(asked, name)
    del seen[:]
    cache = pc.get_or_prefill(asked, name)
    computed = sum(seen)
    last = pc.stats()["last"]
    want = len(A) if cut else len(A) // STEP * STEP
    assert (last["tokens"], last["reused"], computed) == (len(asked), want, len(asked) - want)
    assert (last["shared"], last["first_difference"], last["differing"]) == (len(A), (len(A),) * 2, (B[0], C[0]))
    assert (pc.partial_hits, pc.tokens_reused, last["source"]) == (1, want, ns)
    assert (told["reused"], told["source"]) == (want, ns)
    if not cut:
        assert "is valid at" in last["reason"]
    assert near(model, cache, asked) < 1e-4
    # And what was stored of it is right as well; what was there is as it was.
    other = cache_of(model)
    if name != ns:
        assert near(model, other.get_or_prefill(asked, name), asked) < 1e-4
        assert other.hits == 1
    assert near(model, other.get_or_prefill(A + B, ns), A + B) < 1e-4
    assert other.misses == 0


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_longer_and_a_shorter_prompt_of_the_same_tokens(
    cache_of: Callable[..., PionPromptCache], ns: str, family: str
) -> None:
    model, seen = counted(fresh(family))
    pc = cache_of(model)
    pc.get_or_prefill(A, ns)
    del seen[:]
    assert near(model, pc.get_or_prefill(A + C, f"{ns}-longer"), A + C) < 1e-4
    assert seen[0] == len(C), "the stored end is a boundary of every family"
    assert pc.stats()["last"]["reused"] == len(A)
    del seen[:]
    assert near(model, pc.get_or_prefill(A[:33], f"{ns}-shorter"), A[:33]) < 1e-4
    last = pc.stats()["last"]
    if family in families.CUTTABLE or last["reused"]:
        assert last["reused"] == 33
        assert seen[0] == 33, "only by the comparison"
    else:
        assert "is valid at 40" in last["reason"]


def test_d4_a_hybrid_model_is_hit_at_the_last_stored_boundary(
    cache_of: Callable[..., PionPromptCache], ns: str
) -> None:
    """Three recurrent layers and one of attention; the second turn shares 1,932 of 1,934 tokens."""
    model, seen = counted(fresh("qwen3_next"))
    first = families.tokens(1934, 7)
    second = [*first[:1932], *families.tokens(30, 8)]
    pc = cache_of(model, checkpoints=256, prefill_chunk_size=512)
    pc.get_or_prefill(first, ns)
    del seen[:]
    cache = pc.get_or_prefill(second, f"{ns}-2")
    last = pc.stats()["last"]
    assert (last["shared"], last["reused"], last["differing"]) == (1932, 1792, (first[1932], second[1932]))
    assert sum(seen) == len(second) - 1792
    assert near(model, cache, second) < 1e-4
    without = cache_of(fresh("qwen3_next"))
    without.get_or_prefill(first, f"{ns}-without")
    without.get_or_prefill(second, f"{ns}-without-2")
    last = without.stats()["last"]
    assert (last["shared"], last["reused"]) == (1932, 0)
    assert "the state in ArraysCache is valid at 1934 tokens only (see checkpoints=)" in last["reason"]


def test_d1_a_window_is_not_reused_when_only_other_layers_can_be_cut(
    cache_of: Callable[..., PionPromptCache], ns: str
) -> None:
    """Full and windowed layers of 50 tokens, window 40: a prompt of the first 30 is computed; one within is cut."""
    model, seen = counted(fresh("gemma3"))
    ids = families.tokens(50, 4)
    pc = cache_of(model, prefill_chunk_size=10)
    pc.get_or_prefill(ids, ns)
    del seen[:]
    cache = pc.get_or_prefill(ids[:30], f"{ns}-30")
    assert sum(seen) == 30
    assert {slots.length(leaf) for leaf in slots.leaves(cache)} == {30}
    assert pc.stats()["last"]["reused"] == 0
    assert near(model, cache, ids[:30]) < 1e-4
    del seen[:]
    cache = pc.get_or_prefill(ids[:20], f"{ns}-20")  # of the 30 that are stored now, nothing has left the window
    assert (sum(seen), pc.stats()["last"]["reused"]) == (0, 20)
    assert {slots.length(leaf) for leaf in slots.leaves(cache)} == {20}
    assert near(model, cache, ids[:20]) < 1e-4


# --- who is reused, and who is not ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_mismatch", ["recompute", "replace"])
def test_a_short_request_never_replaces_a_long_good_prefix(
    cache_of: Callable[..., PionPromptCache], ns: str, on_mismatch: str
) -> None:
    model = fresh("llama")
    long = families.tokens(600, 5)
    cache_of(model).get_or_prefill(long, ns)
    short = [*long[:10], 1, 2, 3]
    pc = cache_of(model, on_mismatch=on_mismatch)
    assert near(model, pc.get_or_prefill(short, f"{ns}-short"), short) < 1e-4
    assert cache_of(model).lookup(ns, long) is True
    if on_mismatch == "recompute":
        assert near(model, pc.get_or_prefill(short, ns), short) < 1e-4
        assert cache_of(model).lookup(ns, long) is True
        assert pc.stats()["last"]["reused"] in (0, 13)


def test_three_sessions_that_share_600_tokens_get_three_right_answers(
    cache_of: Callable[..., PionPromptCache], ns: str
) -> None:
    shared = families.tokens(600, 6)
    for family in ("llama", "jamba"):
        model, seen = counted(fresh(family))
        pc = cache_of(model)
        pc.get_or_prefill(shared, f"{ns}-{family}")
        for turn in range(2):
            for session in range(3):
                ids = shared + families.tokens(25, 20 + session) + families.tokens(9, 30 + session) * turn
                del seen[:]
                cache = pc.get_or_prefill(ids, f"{ns}-{family}-{session}-{turn}")
                assert sum(seen) == len(ids) - pc.stats()["last"]["reused"] == (9 if turn else 25)
                assert near(model, cache, ids) < 1e-4


def test_another_model_s_prefix_is_not_reused(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    cache_of(fresh("jamba")).get_or_prefill(A + B, ns)
    model, seen = counted(fresh("jamba"))
    pc = cache_of(model, on_mismatch="recompute")
    for name in (ns, f"{ns}-2"):
        del seen[:]
        assert near(model, pc.get_or_prefill(A + C, name), A + C) < 1e-4
        assert seen[0] == len(A + C)
        assert pc.stats()["last"]["reused"] == 0
    assert "another model" in pc.explain(A + C, ns)["reason"]


def test_another_scope_is_not_reused(cache_of: Callable[..., PionPromptCache], ns: str) -> None:
    model = fresh("llama")
    cache_of(model, scope="one").get_or_prefill(A + B, ns)
    for scope, reused in (("other", 0), ("", 0), ("one", len(A))):
        pc = cache_of(model, scope=scope)
        pc.get_or_prefill(A + C, f"{ns}-{scope}")
        assert pc.stats()["last"]["reused"] == reused
        pc.drop(f"{ns}-{scope}")


@pytest.mark.parametrize("lie", ["tokens", "manifest", "digest"])
def test_an_entry_that_lies_about_its_tokens_is_not_reused(
    cache_of: Callable[..., PionPromptCache], server: Any, ns: str, lie: str
) -> None:
    model, seen = counted(fresh("llama"))
    pc = cache_of(model, on_mismatch="recompute")
    pc.get_or_prefill(A + B, ns)
    with Client(port=server.port) as client:
        if lie == "tokens":
            client.call("SSM.PREFIX.STORE", ns, 1, np.array(A + C, "<u4").tobytes()[: 4 * len(A + B)])
        elif lie == "manifest":
            client.call("SSM.PREFIX.STORE", ns, 0, b"{}")
        else:
            held = client.call("SSM.PREFIX.FETCH", ns, 0)
            client.call(
                "SSM.PREFIX.STORE",
                ns,
                0,
                held.replace(pc._want(np.array(A, "<u4"), ns, pc._layout()).identity.hex().encode(), b"0" * 64),
            )
    del seen[:]
    assert near(model, pc.get_or_prefill(A + C, f"{ns}-2"), A + C) < 1e-4
    assert seen[0] == len(A + C)


@pytest.mark.parametrize("vquant", ["fp16", "int8", "turbo4"])
def test_rows_in_any_format_are_cut(cache_of: Callable[..., PionPromptCache], ns: str, vquant: str) -> None:
    """200 tokens, of which 150 are of use: inside a group of the key forms."""
    model = models.tiny_llama("float16", hidden_size=128, seed=next(_names) + 100)
    ids = families.tokens(200, 9)
    pc = cache_of(model, vquant=vquant)
    pc.get_or_prefill(ids, ns)
    whole = pc.get_or_prefill(ids, ns)
    other = [*ids[:150], 1, 2, 3]
    cache = pc.get_or_prefill(other, f"{ns}-2")
    assert (pc.stats()["last"]["reused"], pc.partial_hits) == (150, 1)
    for a, b in zip(whole, cache, strict=True):
        assert mx.array_equal(a.keys[:, :, :150], b.keys[:, :, :150]).item()
        assert mx.array_equal(a.values[:, :, :150], b.values[:, :, :150]).item()
        assert b.offset == 153


@pytest.mark.parametrize("checkpoints", [[5, 20, 39, 99], 13, 1])
def test_boundaries_are_where_they_were_asked_for(
    cache_of: Callable[..., PionPromptCache], ns: str, checkpoints: Any
) -> None:
    model = fresh("mamba2")
    pc = cache_of(model, checkpoints=checkpoints)
    pc.get_or_prefill(A, ns)
    asked = [*A[:38], 1, 2]
    assert near(model, pc.get_or_prefill(asked, f"{ns}-2", checkpoints=[]), asked) < 1e-4
    assert (
        pc.stats()["last"]["reused"]
        == {5: 20, 13: 26, 1: 38}[checkpoints[0] if isinstance(checkpoints, list) else checkpoints]
    )
    with pytest.raises(ValueError, match="at most 1024"):
        pc.get_or_prefill(families.tokens(2000), f"{ns}-3", checkpoints=1)


def test_a_store_that_broke_off_is_replaced_by_one_with_other_boundaries(
    cache_of: Callable[..., PionPromptCache], ns: str
) -> None:
    model = fresh("jamba")
    many = cache_of(model, checkpoints=10)
    many.get_or_prefill(A, ns)
    assert many.resp.call("SSM.PREFIX.DROP", ns, 4) == b"+OK\r\n"
    few = cache_of(model)
    assert few.lookup(ns, A) is False
    few.get_or_prefill(A, ns)
    assert few.store_errors == few.mismatches == 0
    assert near(model, few.get_or_prefill(A, ns), A) < 1e-4
    assert few.hits == 1


# --- texts and chats --------------------------------------------------------------------------------------------------


class Template:
    """A chat template of the kind that is trouble: ids of words, and what it does to the last turn only.

    It opens ``<think>`` for the turn to be answered and drops it later, and moves system messages to the front.
    """

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for word in text.split()]

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = True, add_generation_prompt: bool = False
    ) -> list[int]:
        first = [m for m in messages if m["role"] == "system"]
        text = " ".join(
            f"<{m['role']}> {m['content']} <end>" for m in [*first, *(m for m in messages if m not in first)]
        )
        return self.encode(text + (" <assistant> <think>" if add_generation_prompt else ""))


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3"])
def test_d13_the_second_turn_is_hit_up_to_the_last_stable_message(
    cache_of: Callable[..., PionPromptCache], ns: str, family: str
) -> None:
    template, model = Template(), fresh(family)
    pc = cache_of(model)
    words = [f"w{i}" for i in range(24)]
    chat = [
        {"role": "system", "content": "be brief and kind " + " ".join(words)},
        {"role": "user", "content": "what is it " + " ".join(words[:9])},
    ]
    cache, rest = pc.prepare_chat(template, chat, ns)
    whole = template.apply_chat_template(chat, add_generation_prompt=True)
    stable = len(whole) - len(rest)
    assert template.encode("<think>") == rest[-1:]
    assert template.encode("<assistant> <think>")[-len(rest) :] == rest, "the key ends before the generation prompt"
    assert {slots.length(leaf) for leaf in slots.leaves(cache)} <= {stable, None}

    chat += [{"role": "assistant", "content": "this " + " ".join(words[3:8])}, {"role": "user", "content": "and now"}]
    cache, rest = pc.prepare_chat(template, chat, ns)
    whole = template.apply_chat_template(chat, add_generation_prompt=True)
    last = pc.stats()["last"]
    assert (last["reused"], last["shared"], last["differing"]) == (stable, stable, None)
    cold = families.logits(model, prefill(model, whole, None), [1])
    model(mx.array([rest]), cache=cache)
    assert np.abs(families.logits(model, cache, [1]) - cold).max() < 1e-4

    # A system message in the middle goes to the front: what follows it is new, and the difference is named.
    chat.insert(2, {"role": "system", "content": "be loud"})
    cache, rest = pc.prepare_chat(template, chat, ns)
    whole = template.apply_chat_template(chat, add_generation_prompt=True)
    last = pc.stats()["last"]
    first = len(template.apply_chat_template(chat[:1]))
    assert last["shared"] >= first
    assert last["differing"] == (whole_of(template, chat, 2)[last["shared"]], whole[last["shared"]])
    assert f"token {last['shared']} is " in last["reason"]
    assert last["reused"] == (last["shared"] if family == "llama" else first)
    cold = families.logits(model, prefill(model, whole, None), [1])
    model(mx.array([rest]), cache=cache)
    assert np.abs(families.logits(model, cache, [1]) - cold).max() < 1e-4


def whole_of(template: Template, chat: list[dict[str, str]], without: int) -> list[int]:
    return template.apply_chat_template([m for at, m in enumerate(chat) if at != without])


class Merging:
    """A tokenizer that joins the last two letters of a word in ``ab``."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        out: list[int] = []
        for letter in text:
            if letter == "b" and out and out[-1] == 1:
                out[-1] = 90
            else:
                out.append(ord(letter) % 32)
        return out


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3"])
def test_d12_a_text_whose_border_is_merged(cache_of: Callable[..., PionPromptCache], ns: str, family: str) -> None:
    model, seen = counted(fresh(family))
    pc, tokenizer = cache_of(model), Merging()
    prefix = "the quick brown fox jumps over the lazy dog and a"
    for suffix in ("b and more", " plain"):
        whole = tokenizer.encode(prefix + suffix)
        cache, rest = pc.prepare(tokenizer, prefix, suffix, ns)
        assert {slots.length(leaf) for leaf in slots.leaves(cache)} <= {len(whole) - len(rest), None}
        model(mx.array([rest]), cache=cache)
        cold = families.logits(model, prefill(model, whole, None), [1])
        assert np.abs(families.logits(model, cache, [1]) - cold).max() < 1e-4
    del seen[:]
    pc.prepare(tokenizer, prefix, "b and more", ns)
    assert sum(seen) <= 8, "from the checkpoint before the seam"
