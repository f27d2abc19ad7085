"""One client process of the demo: load the model, get the prefix, answer the question.

It writes one JSON object per line to standard output: ``{"step": name, ...}``; the last one is the result.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from pion.demo import blas

__all__ = ["main"]


def _say(step: str, **facts: Any) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)


def _answer(model: Any, cache: list[Any], tokens: list[int], end: int, count: int) -> tuple[list[int], float]:
    """Greedy decoding: the ids, and the milliseconds to the first one."""
    import mlx.core as mx

    started, first = time.perf_counter(), 0.0
    out: list[int] = []
    while len(out) < count and (not out or out[-1] != end):
        logits = model(mx.array([out[-1:] or tokens]), cache=cache)[0, -1]
        best: Any = mx.argmax(logits).item()
        out.append(int(best))
        first = first or (time.perf_counter() - started) * 1e3
    return out, first


def main(argv: Sequence[str] | None = None) -> int:
    """Play one act; the exit status is 0 unless something broke."""
    parser = argparse.ArgumentParser(prog="python -m pion.demo.worker", description=__doc__)
    parser.add_argument("--url", required=True, help="the server")
    parser.add_argument("--dtype", default="float32", help="of the model's weights")
    parser.add_argument("--tokens", type=int, default=41, help="longest answer")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")

    slow = blas.install()  # before mlx is imported
    if slow:
        _say("slow", reason=slow)
    from pion import PionPromptCache
    from pion.demo import prompt, smollm2

    started = time.perf_counter()
    model, tokenizer = smollm2.load(options.dtype)
    prefix, suffix = prompt.token_ids(tokenizer)
    _say("model", seconds=time.perf_counter() - started, prefix=len(prefix), suffix=len(suffix))

    with PionPromptCache(model, vquant="native", url=options.url) as pc:
        namespace = pc.make_namespace(smollm2.MODEL_ID, options.dtype, "native", prompt.SYSTEM)
        started = time.perf_counter()
        cache = pc.get_or_prefill(prefix, namespace)
        loaded = (time.perf_counter() - started) * 1e3
        stats = pc.stats()
        _say("prefix", hit=bool(stats["hits"]), milliseconds=loaded)
        size = sum(2 * len(prefix) * layer.keys.nbytes // layer.keys.shape[2] for layer in cache)
        tokens, first = _answer(model, cache, suffix, tokenizer.eos_token_id, options.tokens)
        stored = pc.lookup(namespace, prefix)
    _say(
        "done",
        hit=bool(stats["hits"]),
        stored=stored,
        prefill_ms=stats["last_prefill_ms"],
        load_ms=loaded,
        first_ms=first,
        bytes=size,
        tokens=tokens,
        answer=tokenizer.decode(tokens, skip_special_tokens=True).strip(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
