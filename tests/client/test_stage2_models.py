"""The real SmolLM2-135M and Gemma3-270M (windows of 512) with the attention patch: the tokens of plain mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pion import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion.client.attend_lanes import VARIABLE
from pion.client.caches import new_cache
from tests.support import models
from tests.support.peers import missing
from tests.support.process import Process

models.need_mlx()
mx = models.mx

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TEXT = (
    "The lighthouse keeper wrote down every ship that passed, its flag and the hour, in a book bound in green cloth. "
)
QUESTION = "In the winter of the great storm he wrote"


def model_of(name: str) -> tuple[Any, Any]:
    if name == "smollm2":
        return models.smollm2_model()
    try:
        from bench import gemma3

        return gemma3.load()
    except (ImportError, FileNotFoundError) as error:
        missing(f"the wheels of Gemma3-270M ({error})")
        raise


@pytest.mark.parametrize(("name", "count"), [("smollm2", 300), ("gemma3", 700)])
def test_64_greedy_tokens_are_those_of_mlx_lm_on_every_lane(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix of Gemma3 is longer than its windows. Over the wire, another process than the one that computed it."""
    model, tokenizer = model_of(name)
    ids = (tokenizer.encode(TEXT * 60, add_special_tokens=False))[:count]
    suffix = tokenizer.encode(QUESTION, add_special_tokens=False)
    cache = new_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    want = models.greedy(model, cache, suffix, 64)
    assert len(set(want)) > 10, "an answer, not one token again and again"
    install_pion_attention_patch()
    try:
        with Process(tmp_path / "data") as process:
            for lane in ("process", "binary", "resp"):
                monkeypatch.setenv(VARIABLE, lane)
                if lane != "process":
                    process.restart()
                with PionPromptCache(model, vquant="native", port=process.port, stage2=True) as pc:
                    pc.get_or_prefill(ids, name)
                    assert pc.misses == (lane == "process")
                    patched = make_pion_prompt_cache(model, name, pc, len(ids))
                    assert models.greedy(model, patched, suffix, 64) == want, lane
                    assert pc.stats()["attend"]["lanes"][lane]
                    if lane != "binary":
                        mode = {"K_block": 64, "K_blocks": 99, "selector": "quest"}
                        sparse = make_pion_prompt_cache(model, name, pc, len(ids), mode)
                        assert models.greedy(model, sparse, suffix, 16) == want[:16], lane
    finally:
        uninstall_pion_attention_patch()
