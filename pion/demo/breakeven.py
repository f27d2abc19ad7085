"""When a prefix is worth storing: computing against fetching and storing, by length.

    python -m pion.demo.breakeven [--url pion://...]

The figures in README.md are made by this. Without a URL a server is started on a fresh directory.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

from pion import testing
from pion.demo import blas, smollm2

__all__ = ["main"]

LENGTHS: Final = (16, 64, 256, 1024, 2048)


def _median(rounds: int, run: Any) -> float:
    """Milliseconds."""
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        took.append((time.perf_counter() - started) * 1e3)
    return statistics.median(took)


def _file_load(cache: list[Any], folder: str, rounds: int) -> float:
    """mlx-lm's own file of the same cache: load and evaluate, in milliseconds."""
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    path = f"{folder}/cache.safetensors"
    save_prompt_cache(path, cache)

    def load() -> None:
        mx.eval([(layer.keys, layer.values) for layer in load_prompt_cache(path)])

    return _median(rounds, load)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m pion.demo.breakeven", description=__doc__)
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--vquant", default="fp16", help="stored format")
    parser.add_argument("--rounds", type=int, default=7, help="of each warm measurement; the median counts")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N", help="prefix lengths in tokens")
    options = parser.parse_args(argv)
    if slow := blas.install():
        print(slow, file=sys.stderr)
    from pion import PionPromptCache

    model, _ = smollm2.load()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = options.url
        if not url:
            server = stack.enter_context(testing.server("--kvcache", dir=f"{folder}/data"))
            url = f"pion://{server.host}:{server.port}"
        pc = stack.enter_context(PionPromptCache(model, vquant=options.vquant, url=url))
        print(
            f"{'tokens':>7} {'compute ms':>11} {'store ms':>9} {'fetch ms':>9} {'ratio':>6} {'file ms':>8} "
            f"{'pays from':>10}"
        )
        for length in options.lengths:
            ids, namespace = [(7 * i) % 49_000 for i in range(length)], f"breakeven|{length}"
            pc.drop(namespace)
            before = pc.store_ms_total
            cache = pc.get_or_prefill(ids, namespace)
            computed, stored = pc.last_prefill_ms, pc.store_ms_total - before
            fetched = _median(options.rounds, lambda ids=ids, ns=namespace: pc.get_or_prefill(ids, ns))
            file = _file_load(cache, folder, options.rounds)
            # A share h of requests that hit pays when h * (compute - fetch) exceeds (1 - h) * store.
            gain = computed - fetched
            pays = f"{100 * stored / (stored + gain):8.1f} %" if gain > 0 else "     never"
            print(
                f"{length:7,} {computed:11,.1f} {stored:9,.1f} {fetched:9,.1f} {computed / fetched:6,.1f}"
                f" {file:8,.1f} {pays:>10}",
                flush=True,
            )
        if pc.hits != options.rounds * len(options.lengths):
            print(f"only {pc.hits} fetches were hits", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
