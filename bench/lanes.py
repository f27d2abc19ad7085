"""From a server on the same machine to the arrays of a prompt cache, by each lane, against mlx-lm's own cache file; and
to numpy, against memory.

The cache is one of 2,048 tokens of SmolLM2-135M. What its rows hold does not matter here and is random. Every figure is
taken in a fresh process that has loaded the model and has done nothing with a cache yet: what costs most is memory that
is touched for the first time.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROUNDS, Result, bench, compare, interleave
from bench.peers import load, pion, scratch
from pion import Client

TOKENS = 2048
NAMES = {16: "float16", 32: "float32"}
FRESH_LANES = ("map", "tcp", "export")
BARS = {"map": 1 / 1.2, "tcp": 1 / 1.5}
HUGE = 64 << 20
SHAPE = (8, 16, 2048, 64)  # 32 MiB of fp16 for K, as much for V


def child() -> None:
    """`python -m bench.lanes {store|file|LANE} DTYPE PORT FOLDER`: one sample, in ms, as JSON."""
    what, dtype, port, folder = sys.argv[1:5]
    from pion.demo import smollm2

    model, _ = smollm2.load(dtype)
    import mlx.core as mx
    from mlx_lm.models import cache as module

    from pion import PionPromptCache
    from pion.client import caches

    ids = [(7 * i) % 40_000 for i in range(TOKENS)]
    file = str(Path(folder) / f"{dtype}.safetensors")
    mx.eval(model.parameters())
    mx.clear_cache()
    gc.collect()  # what importing all this left behind is nobody's lane
    if what == "file":
        print(json.dumps(timed(lambda: mx.eval([layer.state for layer in module.load_prompt_cache(file)]))))
        return
    with PionPromptCache(model, vquant="native", port=int(port)) as pc:
        if what == "store":
            layout = pc.layout
            assert layout is not None
            shape = (1, layout.n_kv_heads, TOKENS, layout.head_dim)
            made = caches.new_cache(model)
            for layer in made:
                layer.update_and_fetch(*(mx.random.normal(shape).astype(getattr(mx, dtype)) for _ in "kv"))
            mx.eval([layer.state for layer in made])
            if not pc.put(made, ids, dtype):
                raise RuntimeError("the prefix was not stored")
            module.save_prompt_cache(file, made)
            return
        for _ in range(3 if what == "process" else 0):
            pc.get_or_prefill(ids, dtype)
            mx.clear_cache()
        taken = timed(lambda: pc.get_or_prefill(ids, dtype))
        if pc.misses or pc.lanes.used[what] < 1:
            raise RuntimeError(f"not by {what}: {pc.stats()}")
        print(json.dumps(taken))


def timed(call: Callable[[], Any]) -> float:
    since = time.perf_counter()
    kept = call()
    taken = (time.perf_counter() - since) * 1e3
    del kept
    return taken


def sample(what: str, dtype: str, port: int, folder: Path) -> float:
    command = [sys.executable, "-m", "bench.lanes", what, dtype, str(port), str(folder)]
    lane = {} if what in ("store", "file", "process") else {"PION_LANE": what}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | lane)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(json.loads(done.stdout)) if done.stdout else 0.0


def loads(bits: int) -> Iterator[Result]:
    dtype = NAMES[bits]
    lanes = [lane for lane in (*FRESH_LANES, "process") if lane != "export" or bits == 16]
    with scratch() as folder, pion(directory=folder, pin=False) as server:
        sample("store", dtype, server.port, folder)
        file, *columns = interleave(
            *(lambda what=what: sample(what, dtype, server.port, folder) for what in ("file", *lanes)), rounds=ROUNDS
        )
        base = statistics.median(file)
        for lane, column in zip(lanes, columns, strict=True):
            value = statistics.median(column)
            yield Result(
                f"lane_load_{bits}" if lane == "map" else f"lane_load_{bits}_{lane}", value, "ms", base, base / value,
                BARS.get(lane), note=f"get_or_prefill by {lane} / load_prompt_cache + eval, fresh process",
                spread=[min(column), max(column)],
            )  # fmt: skip


@bench("lane_load_16", "lane_load_16_tcp", "lane_load_16_export", "lane_load_16_process")
def loads_16() -> Iterator[Result]:
    return loads(16)


@bench("lane_load_32", "lane_load_32_tcp", "lane_load_32_process")
def loads_32() -> Iterator[Result]:
    return loads(32)


@bench("lane_map_hold", "lane_map_read")
def map_read() -> Iterator[Result]:
    k = np.random.default_rng(0).integers(0, 1 << 15, SHAPE, np.uint16).view(np.float16)
    warm = np.random.default_rng(1).integers(0, 256, HUGE, np.uint8)
    with (
        scratch() as folder,
        pion(directory=folder, pin=False) as server,
        Client(host=server.host, port=server.port) as client,
    ):
        client.store("64m", k, k)
        holds: list[float] = []

        def ours() -> float:
            since = time.perf_counter()
            with client.map("64m") as found:
                rows = [found.rows(side, layer) for side in (0, 1) for layer in range(found.layers)]
                holds.append((time.perf_counter() - since) * 1e3)
                assert sum(layer.nbytes for layer in rows) == HUGE
                for layer in rows:
                    layer.view(np.uint64).sum()
                return (time.perf_counter() - since) * 1e3

        def theirs() -> float:
            since = time.perf_counter()
            for part in np.split(warm, 2 * SHAPE[0]):
                part.view(np.uint64).sum()
            return (time.perf_counter() - since) * 1e3

        read = compare(
            "lane_map_read", ours, theirs, unit="ms", higher_is_better=False, bar=1 / 1.5,
            note="64 MiB mapped and summed / the same of warm memory",
        )  # fmt: skip
        yield Result(
            "lane_map_hold", statistics.median(holds), "ms", bar=2.0, at_most=True, spread=[min(holds), max(holds)],
            note="Client.map of 64 MiB until numpy views are held",
        )  # fmt: skip
        yield read


@bench("fetch_out_c", "fetch_fresh")
def fetch_out() -> Iterator[Result]:
    k = np.random.default_rng(0).integers(0, 1 << 15, SHAPE, np.uint16).view(np.float16)
    with (
        tempfile.TemporaryDirectory(),
        scratch() as folder,
        pion(directory=folder) as server,
        Client(host=server.host, port=server.port) as client,
    ):
        client.store("64m", k, k)
        out = client.fetch("64m")

        def into_out() -> float:
            since = time.perf_counter()
            client.fetch("64m", out=(out.k, out.v))
            return HUGE / (time.perf_counter() - since) / 1e9

        def fresh() -> float:
            with Client(host=server.host, port=server.port) as other:
                other.ping()
                since = time.perf_counter()
                other.fetch("64m")
                return HUGE / (time.perf_counter() - since) / 1e9

        def bare() -> float:
            return HUGE / load("copy", HUGE, 3)[0] / 1e9

        yield compare(
            "fetch_out_c", into_out, bare, unit="GB/s", bar=0.8,
            note="Client.fetch(out=) of 64 MiB over TCP / a bare C socket copy into a reused buffer",
        )  # fmt: skip
        yield compare("fetch_fresh", fresh, bare, unit="GB/s", note="the same into fresh arrays")


if __name__ == "__main__":
    child()
