"""H4: what a restart brings back is used: the model processes the suffix, not the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pion.client.prompt_cache import PionPromptCache
from tests.support import models
from tests.support.process import Process

PREFIX = [(7 * i) % 96 for i in range(700)]
SUFFIX = [3, 1, 4, 1, 5]


def counting(model: Any) -> tuple[Any, list[int]]:
    """The model, and the lengths of all inputs it gets."""
    seen: list[int] = []
    kind = type(model)

    def call(self: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        seen.append(tokens.shape[-1])
        return kind.__call__(self, tokens, *args, **options)

    model.__class__ = type("Counting", (kind,), {"__call__": call})
    return model, seen


@pytest.mark.parametrize("vquant", ["native", "int8", "turbo4"])
def test_h4_restored_means_used(tmp_path: Path, vquant: str) -> None:
    models.need_mlx()
    answers = []
    with Process(tmp_path / "data") as server:
        for restarted in (False, True):
            if restarted:
                server.restart()
            model, seen = counting(models.tiny_llama("float16", hidden_size=128))
            with PionPromptCache(model, host="127.0.0.1", port=server.port, vquant=vquant) as cache:
                layers = cache.get_or_prefill(PREFIX, "h4")
                answers.append(models.greedy(model, layers, SUFFIX, 8))
                assert cache.hits == restarted
            processed = sum(seen) - 7  # tokens generated after the first are inputs too
            if restarted:
                assert processed <= len(SUFFIX) + 8
            else:
                assert processed >= len(PREFIX) + len(SUFFIX)
    if vquant == "native":
        assert answers[0] == answers[1]
