"""How much a composition of packs agrees with a full computation of the same prompt.

The full computation goes on greedily after the question. The composed cache is then fed the question and those same
tokens, so that one early difference does not count again at every later token; what it would have said at each place
is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pion.client import caches
from pion.client.caches import mlx_modules
from pion.client.packs import assembled, feed, rows_of
from pion.client.rotate import Mover, Rope

__all__ = ["LEAST", "Agreement", "Sample", "compare", "given", "greedy", "measure"]

#: The share of equal tokens below which a model is refused, unless told otherwise.
LEAST: Final = 0.75

Sample = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[int]]
"""Token ids of a stub, of chunks, and of a question."""

_STUB: Final = "Answer the question with the help of the notes.\n\n"
_TEXTS: Final = (
    (
        "Note: The ferry to Lomvika leaves at half past six in the morning and takes forty minutes.\n",
        "Note: The library of Lomvika is closed on Mondays. On other days it opens at ten.\n",
        "Question: How long does the ferry take?\nAnswer: The ferry takes",
    ),
    (
        "Note: The Harrow oven bakes a loaf of rye bread in fifty minutes at 210 degrees.\n",
        "Note: The Harrow oven was first sold in 1961. Its doors were made of green enamel.\n",
        "Question: What were the doors of the oven made of?\nAnswer: The doors were made of",
    ),
    (
        "Note: Ada Brenning keeps bees behind the old railway station and sells the honey on Fridays.\n",
        "Note: Tomas Brenning, her brother, repairs clocks in a shop beside the town hall.\n",
        "Question: What does Tomas Brenning repair?\nAnswer: He repairs",
    ),
)


@dataclass(frozen=True)
class Agreement:
    """What was found.

    Attributes:
        agreement: share of places at which both would say the same token.
        logit_difference: the largest difference between two logits of the same token at the same place.
        tokens: places compared.
        samples: prompts.
    """

    agreement: float
    logit_difference: float
    tokens: int
    samples: int


def given(samples: Sequence[Sample] | None, tokenizer: Any) -> Sequence[Sample]:
    """The samples, or the built-in ones in the ids of a tokenizer, its ``<bos>`` in front.

    Raises:
        ValueError: neither is there, or a sample lacks a part.
    """
    if samples is None:
        if tokenizer is None:
            raise ValueError("self_check needs tokenizer=, for its own texts, or samples= of token ids")

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        bos = getattr(tokenizer, "bos_token_id", None)
        stub = [*([bos] if isinstance(bos, int) else []), *ids(_STUB)]
        samples = [(stub, [ids(chunk) for chunk in chunks], ids(question)) for *chunks, question in _TEXTS]
    if not samples or not all(stub and chunks and all(chunks) and question for stub, chunks, question in samples):
        raise ValueError("a sample is a stub, chunks and a question, each of at least one token")
    return samples


def greedy(model: Any, cache: list[Any], ids: Sequence[int], count: int) -> tuple[list[int], Any]:
    """Decode after `ids`, which are not in the cache yet.

    Returns:
        `count` tokens, and the logits they were chosen from, float32 (count, vocabulary).
    """
    mx, _ = mlx_modules()
    said: list[int] = []
    rows: list[Any] = []
    step = list(ids)
    while len(said) < count:
        rows.append(model(mx.array([step]), cache=cache)[0, -1].astype(mx.float32))
        step = [int(mx.argmax(rows[-1]).item())]
        said += step
    return said, mx.stack(rows)


def compare(
    model: Any, cache: list[Any], question: Sequence[int], said: Sequence[int], logits: Any
) -> tuple[int, float]:
    """Feed a question and an answer to a cache.

    Args:
        cache: holds what stands before the question.
        said, logits: the answer and where it was chosen from, see `greedy`.

    Returns:
        At how many places of the answer the same token would be said, and the largest difference of a logit.
    """
    mx, _ = mlx_modules()
    fed = mx.array([[*question, *said[:-1]]])
    own = model(fed, cache=cache)[0, len(question) - 1 :].astype(mx.float32)
    same = (mx.argmax(own, axis=-1) == mx.array(said)).sum().item()
    return int(same), float(mx.abs(own - logits).max().item())


def measure(model: Any, ropes: Sequence[Rope | None], samples: Sequence[Sample], tokens: int) -> Agreement:
    """Compute every sample in both ways; chunks are encoded behind the stub alone and moved.

    Args:
        ropes: see `pion.client.rotate.verified_ropes`.
        tokens: to decode after each question.
    """
    if tokens < 1:
        raise ValueError("tokens must be at least 1")
    same, most = 0, 0.0
    for stub, chunks, question in samples:
        whole = caches.prefill(model, [*stub, *(token for chunk in chunks for token in chunk)], None)
        said, logits = greedy(model, whole, question, tokens)
        opened = rows_of(caches.prefill(model, list(stub), None), 0, len(stub))
        segments, position = [(opened, 0, 0)], len(stub)
        for chunk in chunks:
            cache = assembled(model, [(opened, 0, 0)])
            feed(model, cache, chunk)
            segments.append((rows_of(cache, len(stub), len(stub) + len(chunk)), len(stub), position))
            position += len(chunk)
        equal, off = compare(model, assembled(model, segments, Mover(ropes)), question, said, logits)
        same, most = same + equal, max(most, off)
    return Agreement(same / (tokens * len(samples)), most, tokens * len(samples), len(samples))
