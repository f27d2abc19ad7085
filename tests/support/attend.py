"""ATTEND.PREFIX.* over a `Raw` connection, arrays in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.raw import Raw, ReplyError

Array = np.ndarray[Any, Any]


def store(conn: Raw, sid: str, layer: int, k: Array, v: Array) -> Any:
    return conn.call("ATTEND.PREFIX.STORE", sid, layer, *k.shape, k.tobytes(), v.tobytes())


def _floats(raw: Any) -> Any:
    return raw if isinstance(raw, ReplyError) else np.frombuffer(raw, "<f4")


def query(conn: Raw, sid: str, layer: int, q: Array, *more: Any) -> Any:
    """(out, lse) for several queries a head or WITHLSE, else out; an error as it came."""
    heads, rows, dim = q.shape
    flat = _floats(conn.call("ATTEND.PREFIX.QUERY", sid, layer, heads, dim, 1024, q.tobytes(), *more))
    if isinstance(flat, ReplyError):
        return flat
    out = flat[: q.size].reshape(q.shape)
    return out if flat.size == q.size else (out, flat[q.size :].reshape(heads, rows))


def fused(conn: Raw, sid: str, layer: int, q: Array, k: Array, v: Array, head_map: Any, *more: Any) -> Any:
    heads, _, dim = q.shape
    parts = q.tobytes(), k.tobytes(), v.tobytes(), bytes(head_map)
    got = _floats(conn.call("ATTEND.PREFIX.QUERY_FUSED", sid, layer, heads, dim, k.shape[1], k.shape[0], *parts, *more))
    return got if isinstance(got, ReplyError) else got.reshape(q.shape)


def _with_mass(got: Any, q: Array) -> Any:
    if isinstance(got, list):
        return _floats(got[0]).reshape(q.shape), _floats(got[1])
    got = _floats(got)
    return got if isinstance(got, ReplyError) else got.reshape(q.shape)


def sparse(conn: Raw, sid: str, layer: int, q: Array, indices: Array, counts: Array, *more: Any) -> Any:
    parts = q.tobytes(), indices.astype("<i4").tobytes(), counts.astype("<u4").tobytes()
    got = conn.call("ATTEND.PREFIX.QUERY_SPARSE", sid, layer, *q.shape, indices.shape[1], *parts, *more)
    return _with_mass(got, q)


def auto(
    conn: Raw, sid: str, layer: int, q: Array, block: int, k_top: int, kv_heads: int, head_map: Any = b"", *more: Any
) -> Any:
    words = "ATTEND.PREFIX.QUERY_SPARSE_AUTO", sid, layer, *q.shape, block, k_top, kv_heads
    return _with_mass(conn.call(*words, q.tobytes(), bytes(head_map), *more), q)


def auto_fused(
    conn: Raw, sid: str, layer: int, q: Array, block: int, k_top: int, k: Array, v: Array, head_map: Any, *more: Any
) -> Any:
    words = "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", sid, layer, *q.shape, block, k_top, k.shape[0], k.shape[1]
    return _with_mass(conn.call(*words, q.tobytes(), k.tobytes(), v.tobytes(), bytes(head_map), *more), q)


def prefix(conn: Raw, ns: str, layers: int, rows: int, heads: int, dim: int, vquant: str = "fp16") -> list[Any]:
    """Registers and stores a prefix of normal rows; (K, V) of each layer as (heads, rows, dim), as fp16 holds them."""
    rng = np.random.default_rng(rows * heads * dim)
    conn.ok("KV.PREFIX.REGISTER", ns, heads * dim, vquant)
    out = []
    for layer in range(layers):
        sides = []
        for side in ("pk", "pv"):
            flat = rng.standard_normal((rows, heads, dim), dtype=np.float32).astype(np.float16)
            conn.ok("V.STOREBATCH", f"{ns}_{side}", layer, 0, rows, flat.tobytes(), "FMT", "F16")
            sides.append(np.ascontiguousarray(flat.astype(np.float32).swapaxes(0, 1)))
        out.append(tuple(sides))
    return out
