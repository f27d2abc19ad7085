"""Runs inside the published client's environment: its attention patch on SmolLM2 against plain mlx-lm, as JSON.

python published_patch.py PORT TOKENS ANSWER
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "pion" / "demo"


def module(name):
    spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


os.environ["PION_PROMPT_CACHE_NO_INPROC"] = "1"  # the K/V of the prefix are to stay on the server
module("blas").install()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx import (  # noqa: E402
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)


def greedy(model, cache, step, count):
    out = []
    while len(out) < count:
        logits = model(mx.array([step]), cache=cache)[0, -1]
        out.append(int(mx.argmax(logits).item()))
        step = out[-1:]
    return out


def main(port, tokens, answer):
    model, _ = module("smollm2").load("float32")
    ids, count = [int(token) for token in tokens.split(",")], int(answer)
    step = ids[:5]
    plain_cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=plain_cache)
    plain = greedy(model, plain_cache, step, count)
    pc = PionPromptCache(model, port=int(port), stage2=True)
    pc.get_or_prefill(ids, namespace="patched")
    install_pion_attention_patch()
    try:
        cache = make_pion_prompt_cache(model, "patched", pc, len(ids))
        patched = greedy(model, cache, step, count)
    finally:
        uninstall_pion_attention_patch()
    print(json.dumps({"plain": plain, "patched": patched}))


if __name__ == "__main__":
    main(*sys.argv[1:])
