"""Runs inside the published client's environment: its attention methods against the same attention in numpy, as JSON.

    python published_attention.py PORT WARM_SLOTS

Prints the largest difference of each call, and how often the client recovered from a cold layer.
"""

import json
import sys

import numpy as np

from pion_vllm_mlx import PionPromptCache


def attend(q, k, v, seen=None):
    share = len(q) // len(k)
    k, v = (np.repeat(side, share, axis=0).astype(np.float64) for side in (k, v))
    logits = q.astype(np.float64) @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
    if seen is not None:
        logits = np.where(seen, logits, -np.inf)
    top = logits.max(axis=2, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=2, keepdims=True)
    return weights @ v / total, (top + np.log(total))[:, :, 0]


def off(got, want):
    return float(np.abs(np.asarray(got) - want).max())


def main(port, warm_slots):
    pc = PionPromptCache(None, port=int(port))
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.standard_normal(shape, dtype=np.float32)

    heads, kv_heads, count, dim = 6, 2, 256, 64
    k, v, q = normal(kv_heads, count, dim), normal(kv_heads, count, dim), normal(heads, dim)
    flat = k.swapaxes(0, 1).reshape(count, -1), v.swapaxes(0, 1).reshape(count, -1)
    pc.resp.call("KV.PREFIX.REGISTER", "ns", str(kv_heads * dim), "fp16")
    for side, rows in zip(("ns_pk", "ns_pv"), flat, strict=True):
        reply = pc.resp.call("V.STOREBATCH", side, "0", "0", str(count), rows.tobytes())
        assert reply == b"+OK\r\n", reply
    pc.attend_store_layer("ns", 0, k, v)
    found = {}
    own = normal(kv_heads, dim)
    found["query"] = off(pc.attend_query("ns", 0, own), attend(own[:, None], k, v)[0][:, 0])
    many = normal(kv_heads, 5, dim)
    out, lse = pc.attend_query("ns", 0, many, with_lse=True)
    want = attend(many, k, v)
    found["batched"], found["lse"] = off(out, want[0]), off(lse, want[1])
    want = attend(own[:, None], k[:, 156:], v[:, 156:])[0][:, 0]
    found["window"] = off(pc.attend_query("ns", 0, own, fa_window=100), want)
    heads_of = np.repeat(np.arange(kv_heads, dtype=np.uint8), heads // kv_heads)
    fused_q, k_suf, v_suf = normal(heads, 3, dim), normal(kv_heads, 3, dim), normal(kv_heads, 3, dim)
    both = [np.concatenate(pair, axis=1) for pair in ((k, k_suf), (v, v_suf))]
    seen = np.concatenate([np.ones((3, count), bool), np.tri(3, dtype=bool)], axis=1)
    want = attend(fused_q, *both, seen)[0]
    found["fused"] = off(pc.attend_query_fused("ns", 0, fused_q, k_suf, v_suf, heads_of), want)
    dense = attend(q[:, None], k, v)[0][:, 0]
    for selector in ("block_mean", "quest"):
        got = pc.attend_query_sparse_auto("ns", 0, q, 64, 4, H_kv=kv_heads, selector=selector)
        found[f"all blocks, {selector}"] = off(got, dense)
    got = pc.attend_query_sparse_auto_fused("ns", 0, q, K_suf=k_suf, V_suf=v_suf, B=64, K_top=4, H_kv=kv_heads)
    found["all blocks, fused"] = off(got, attend(q[:, None], *both)[0][:, 0])
    # Push the layer out: the client warms it, also where it sends its number of query heads, and asks again.
    cold = {}
    for name, call, right in (
        ("query", lambda: pc.attend_query("ns", 0, own), attend(own[:, None], k, v)[0][:, 0]),
        ("fused", lambda: pc.attend_query_fused("ns", 0, fused_q, k_suf, v_suf, heads_of), want),
        ("sparse", lambda: pc.attend_query_sparse_auto("ns", 0, q, 64, 4, H_kv=kv_heads), dense),
    ):
        for layer in range(1, int(warm_slots) + 1):
            pc.attend_store_layer("other", layer, k, v)
        assert pc.resp.call("ATTEND.PREFIX.LOOKUP", "ns_attn", "0") == b"+COLD\r\n"
        got = np.asarray(call(), np.float64).ravel()
        cold[name] = float(got @ right.ravel() / np.sqrt((got @ got) * (right.ravel() @ right.ravel())))
    print(json.dumps({"found": found, "cold": cold, "rehydrated": pc.cold_rehydrates_observed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
