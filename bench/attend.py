"""Attention on the server against attention in this process."""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import Result, bench, interleave, seconds
from bench.peers import pion
from bench.wire import Wire

HEADS, ROWS, DIM = 8, 2048, 128
ROUNDS = 15
CALLS = 20  # a round


def _threads(count: int) -> None:
    """Threads of numpy's BLAS, which mlx uses too."""
    import numpy

    for path in Path(numpy.__file__).parent.parent.glob("numpy.libs/libscipy_openblas64_*.so*"):
        ctypes.CDLL(str(path)).scipy_openblas_set_num_threads64_(count)


def _in_process(q: Any, k: Any, v: Any) -> dict[str, Callable[[], object]]:
    """Attention as one would write it, by numpy and by mlx, with one and with all threads of the BLAS."""
    from pion.demo import blas

    blas.install()
    import mlx.core as mx
    import numpy as np

    scale = np.float32(DIM**-0.5)
    keys, values, queries = (mx.array(array)[None] for array in (k, v, q))
    mx.eval(keys, values, queries)

    def numpy() -> object:
        logits = (q * scale) @ k.swapaxes(1, 2)
        logits -= logits.max(axis=2, keepdims=True)
        np.exp(logits, out=logits)
        return (logits @ v) / logits.sum(axis=2, keepdims=True)

    def mlx() -> object:
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIM**-0.5)
        mx.eval(out)
        return np.array(out)

    def with_threads(count: int, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            _threads(count)
            return call()

        return run

    counts = sorted({1, os.cpu_count() or 1})
    return {
        f"{name}, {count} threads": with_threads(count, call)
        for name, call in (("numpy", numpy), ("mlx", mlx))
        for count in counts
    }


def _each(call: Callable[[], object]) -> Callable[[], float]:
    """Milliseconds of one call, the median of a round."""
    return lambda: statistics.median(seconds(call) for _ in range(CALLS)) * 1e3


@bench("attend_query")
def attend_query() -> Result:
    """QUERY against the best of numpy and mlx here and an ECHO of as many bytes: the price of asking a server."""
    import numpy as np

    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((HEADS, ROWS, DIM), dtype=np.float32) for _ in "kv")
    q = rng.standard_normal((HEADS, 1, DIM), dtype=np.float32)
    blob = q.tobytes()
    with pion(pin=False) as server, Wire(server.host, server.port) as conn:
        conn.call("ATTEND.PREFIX.STORE", "s", 0, HEADS, ROWS, DIM, k.tobytes(), v.tobytes())
        others = _in_process(q, k, v)
        ours, echo, *locals_ = interleave(
            _each(lambda: conn.call("ATTEND.PREFIX.QUERY", "s", 0, HEADS, DIM, ROWS, blob)),
            _each(lambda: conn.call("ECHO", blob)),
            *(_each(call) for call in others.values()),
            rounds=ROUNDS,
        )
    medians = {name: statistics.median(column) for name, column in zip(others, locals_, strict=True)}
    best = min(medians, key=medians.__getitem__)
    value, base = statistics.median(ours), medians[best] + statistics.median(echo)
    note = f"H=8 N=2,048 D=128; best here: {best}, {medians[best]:.2f} ms + ECHO {statistics.median(echo):.3f} ms"
    return Result("attend_query", value, "ms", base, base / value, 1 / 1.3, note=note, rounds=ROUNDS)
