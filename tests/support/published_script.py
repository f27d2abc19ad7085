"""Runs inside the published client's environment: one `get_or_prefill` and what came of it, as JSON.

    python published_script.py PORT NAMESPACE TOKENS DTYPE ANSWER

`pion` is not installed there; the model loader is read from its file.
"""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "pion" / "demo"


def module(name):
    spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


module("blas").install()

import mlx.core as mx  # noqa: E402

from pion_vllm_mlx import PionPromptCache  # noqa: E402


def main(port, namespace, tokens, dtype, answer):
    model, _ = module("smollm2").load(dtype)
    ids = [int(token) for token in tokens.split(",")]
    pc = PionPromptCache(model, vquant="fp16", port=int(port))
    cache = pc.get_or_prefill(ids, namespace=namespace)
    sums = []
    for layer in cache:
        for array in (layer.keys, layer.values):
            half = array[..., : len(ids), :].astype(mx.float16)
            sums.append(hashlib.sha256(bytes(memoryview(mx.contiguous(half)))).hexdigest())
    offset, dtype = cache[0].offset, str(cache[0].keys.dtype)
    step, out = [1, *ids[:3]], []
    while len(out) < int(answer):
        logits = model(mx.array([step]), cache=cache)[0, -1]
        out.append(int(mx.argmax(logits).item()))
        step = out[-1:]
    stats = pc.stats()
    print(
        json.dumps(
            {
                "hits": stats["hits"],
                "misses": stats["misses"],
                "offset": offset,
                "dtype": dtype,
                "sums": sums,
                "answer": out,
                "commit": pc.resp.call("KV.PREFIX.COMMIT").decode(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
