"""Attention on the server against attention in this process."""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
from collections.abc import Callable, Iterator
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


def _each(call: Callable[[], object], calls: int = CALLS) -> Callable[[], float]:
    """Milliseconds of one call, the median of a round."""
    return lambda: statistics.median(seconds(call) for _ in range(calls)) * 1e3


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


@bench("attend_fused")
def attend_fused() -> Result:
    """One fused query of 8 rows against sending the K/V again: how many times the bytes, and the time, it saves."""
    import numpy as np

    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((HEADS, ROWS, DIM), dtype=np.float32).tobytes() for _ in "kv")
    rows = 8
    q, k_suf, v_suf = (rng.standard_normal((HEADS, rows, DIM), dtype=np.float32).tobytes() for _ in range(3))
    query = (HEADS, DIM, rows, HEADS, q, k_suf, v_suf, bytes(range(HEADS)))
    with pion(pin=False) as server, Wire(server.host, server.port) as conn:
        store = ("ATTEND.PREFIX.STORE", "s", 0, HEADS, ROWS, DIM, k, v)

        def ask() -> object:
            return conn.call("ATTEND.PREFIX.QUERY_FUSED", "s", 0, *query)

        def send_again() -> object:
            conn.call(*store)
            return ask()

        conn.call(*store)
        ours, again = interleave(_each(ask), _each(send_again, 3))
    value, base = statistics.median(ours), statistics.median(again)
    note = "8 rows over 2,048 + 8 keys, H=8 D=128 / the same behind the K/V (16 MB)"
    return Result("attend_fused", value, "ms", base, base / value, note=note)


@bench("attend_binary")
def attend_binary() -> Result:
    """One fused query of a decoded token over the binary lane against the same over RESP."""
    import numpy as np

    from pion.wire.fastlane import Status, fused_request, parse_reply_header

    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((HEADS, ROWS, DIM), dtype=np.float32).tobytes() for _ in "kv")
    q, k_suf, v_suf = (rng.standard_normal((HEADS, 1, DIM), dtype=np.float32) for _ in range(3))
    heads = bytes(range(HEADS))
    with pion(pin=False) as server, Wire(server.host, server.port) as conn:
        conn.call("ATTEND.PREFIX.STORE", "s", 0, HEADS, ROWS, DIM, k, v)
        port = int(conn.info("server")["binary_port"])
        with socket.create_connection((server.host, port), 120) as lane:
            lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def binary() -> bytes:
                lane.sendmsg(fused_request("s", 0, q, k_suf, v_suf, heads))
                status, nbytes = parse_reply_header(lane.recv(7, socket.MSG_WAITALL))
                assert status is Status.OK, status
                return lane.recv(nbytes, socket.MSG_WAITALL)

            def resp() -> bytes:
                arrays = q.tobytes(), k_suf.tobytes(), v_suf.tobytes(), heads
                return _bytes(conn.call("ATTEND.PREFIX.QUERY_FUSED", "s", 0, HEADS, DIM, 1, HEADS, *arrays))

            assert binary() == resp()
            ours, base = interleave(_each(binary), _each(resp), rounds=ROUNDS)
    value, resp_ms = statistics.median(ours), statistics.median(base)
    note = "1 row over 2,048 + 1 keys, H=8 D=128, binary lane / RESP"
    return Result("attend_binary", value, "ms", resp_ms, resp_ms / value, note=note, rounds=ROUNDS)


@bench("attend_needle", "attend_needle_recall")
def attend_needle() -> Iterator[Result]:
    """A needle at each of 16 depths of 8,192 tokens: does the sparse answer find it, and in which part of the time?

    Keys are noise around a common offset, as models' are; the needle's 4 keys stand out for one query by what trained
    heads give a match. The answer is right when it is that of dense attention to a cosine of 0.99.
    """
    import numpy as np

    count, block, top = 8192, 64, 8
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((HEADS, count, DIM), dtype=np.float32) * np.float32(0.5)
    noise += rng.standard_normal((HEADS, 1, DIM), dtype=np.float32)
    v = rng.standard_normal((HEADS, count, DIM), dtype=np.float32)
    found = {"block mean": 0, "quest": 0}
    depths = range(0, count, count // 16)
    with pion(pin=False) as server, Wire(server.host, server.port) as conn:
        for depth in depths:
            q = rng.standard_normal((HEADS, DIM), dtype=np.float32)
            k = noise.copy()
            at = depth + int(rng.integers(0, count // 16 - 4))
            k[:, at : at + 4] += q[:, None] * np.float32(1.5)
            conn.call("ATTEND.PREFIX.STORE", "n", 0, HEADS, count, DIM, k.tobytes(), v.tobytes())
            blob = q.tobytes()
            dense = np.frombuffer(_bytes(conn.call("ATTEND.PREFIX.QUERY", "n", 0, HEADS, DIM, 1, blob)), "<f4")
            sparse = ("ATTEND.PREFIX.QUERY_SPARSE_AUTO", "n", 0, HEADS, DIM, block, top, HEADS, blob, b"", -1)
            for selector, name in enumerate(found):
                out = np.frombuffer(_bytes(conn.call(*sparse, selector)), "<f4")
                cosine = float(out @ dense / np.sqrt((out @ out) * (dense @ dense)))
                found[name] += cosine >= 0.99
        ours, base = interleave(
            _each(lambda: conn.call(*sparse)),
            _each(lambda: conn.call("ATTEND.PREFIX.QUERY", "n", 0, HEADS, DIM, 1, blob)),
        )
    value, dense_ms = statistics.median(ours), statistics.median(base)
    note = f"8,192 tokens, 8 of 128 blocks by block mean / dense; H={HEADS} D={DIM}"
    yield Result("attend_needle", value, "ms", dense_ms, dense_ms / value, note=note)
    parts = ", ".join(f"{name} {hits} of {len(depths)}" for name, hits in found.items())
    yield Result("attend_needle_recall", found["quest"] / len(depths), "share", note=f"needles found: {parts}")


def _bytes(reply: object) -> bytes:
    assert isinstance(reply, bytes), reply
    return reply
