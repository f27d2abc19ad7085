"""The real SmolLM2-135M (plain layers) and Gemma3-270M (15 windows of 512, 3 full layers), over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import PionPromptCache
from pion.client.caches import new_cache
from tests.support import families, models
from tests.support.peers import missing
from tests.support.process import Process

models.need_mlx()
mx = models.mx

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TEXT = (
    "The lighthouse keeper wrote down every ship that passed, its flag and the hour, in a book bound in green cloth. "
)


def model_of(name: str) -> tuple[Any, Any]:
    if name == "smollm2":
        return models.smollm2_model()
    try:
        from bench import gemma3

        return gemma3.load()
    except (ImportError, FileNotFoundError) as error:
        missing(f"the wheels of Gemma3-270M ({error})")
        raise


def cold_logits(model: Any, ids: list[int], suffix: list[int]) -> np.ndarray[Any, Any]:
    """Of a computation that knows nothing of us: the prefix in one pass, then the suffix."""
    cache = new_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    return families.logits(model, cache, suffix)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_d11_a_real_model_over_a_restart(name: str, tmp_path: Path) -> None:
    """Block of 16 and its neighbours, and a window that wrapped; A+C after A+B."""
    model, tokenizer = model_of(name)
    text = tokenizer.encode(TEXT * 60, add_special_tokens=False)
    suffix = tokenizer.encode("Which colour is the book?", add_special_tokens=False)
    lengths = (15, 16, 17, 600)
    with Process(tmp_path / "data") as process:
        want = {}
        with PionPromptCache(model, vquant="native", port=process.port) as pc:
            for count in lengths:
                ids = text[count : 2 * count]
                cache = pc.get_or_prefill(ids, f"{name}-{count}", checkpoints=256)
                want[count] = families.logits(model, cache, suffix)
            assert (pc.misses, pc.store_errors) == (len(lengths), 0)
        process.restart()
        with PionPromptCache(model, vquant="native", port=process.port) as pc:
            for count in lengths:
                ids = text[count : 2 * count]
                cache = pc.get_or_prefill(ids, f"{name}-{count}")
                assert families.logits(model, cache, suffix).tobytes() == want[count].tobytes(), count
            assert (pc.hits, pc.misses) == (len(lengths), 0)
            cold = cold_logits(model, text[17:34], suffix)
            np.testing.assert_allclose(want[17], cold, atol=1e-4, rtol=1e-4)

            asked = text[600:1100] + tokenizer.encode(" Nobody came that winter.", add_special_tokens=False)
            cache = pc.get_or_prefill(asked, f"{name}-other")
            last = pc.stats()["last"]
            assert last["shared"] >= 500
            assert last["reused"] == (last["shared"] if name == "smollm2" else 256)
            got = families.logits(model, cache, suffix)
            cold = cold_logits(model, asked, suffix)
            assert np.abs(got - cold).max() <= 1e-4 * np.abs(cold).max()
