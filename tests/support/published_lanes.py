"""Runs inside the published client's environment: fused queries of many shapes, a hash of each answer, as JSON.

    python published_lanes.py PORT WARM_SLOTS

The last query is of a layer that has gone cold: the client warms it and asks again.
"""

import hashlib
import json
import sys

import numpy as np

from pion_vllm_mlx import PionPromptCache

SHAPES = [  # H_q, H_kv, M, S, D
    (1, 1, 1, 0, 64), (2, 2, 1, 1, 64), (6, 2, 3, 3, 64), (8, 1, 5, 2, 128), (9, 3, 1, 40, 128), (4, 4, 2, 7, 256),
]  # fmt: skip


def main(port, warm_slots):
    pc = PionPromptCache(None, port=int(port))
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.standard_normal(shape, dtype=np.float32)

    sums = []

    def note(out, shape):
        out = np.ascontiguousarray(out, np.float32)
        assert out.shape == shape, (out.shape, shape)
        sums.append(hashlib.sha256(out.tobytes()).hexdigest())

    for layer, (heads, kv_heads, rows, suffix, dim) in enumerate(SHAPES):
        pc.attend_store_layer("ns", layer, normal(kv_heads, 100, dim), normal(kv_heads, 100, dim))
        heads_of = np.repeat(np.arange(kv_heads, dtype=np.uint8), heads // kv_heads)
        for window in (None, 0, 30):
            q, k, v = normal(heads, rows, dim), normal(kv_heads, suffix, dim), normal(kv_heads, suffix, dim)
            more = {} if window is None else {"fa_window": window}
            note(pc.attend_query_fused("ns", layer, q, k, v, heads_of, **more), q.shape)
    heads, kv_heads, dim, count = 4, 2, 64, 64
    rows = normal(2, count, kv_heads * dim)
    pc.resp.call("KV.PREFIX.REGISTER", "cold", str(kv_heads * dim), "fp16")
    for side, array in zip(("cold_pk", "cold_pv"), rows, strict=True):
        assert pc.resp.call("V.STOREBATCH", side, "0", "0", str(count), array.tobytes()) == b"+OK\r\n"
    by_head = [np.ascontiguousarray(array.reshape(count, kv_heads, dim).swapaxes(0, 1)) for array in rows]
    pc.attend_store_layer("cold", 0, *by_head)
    for layer in range(int(warm_slots)):
        pc.attend_store_layer("other", layer, *by_head)
    assert pc.resp.call("ATTEND.PREFIX.LOOKUP", "cold_attn", "0") == b"+COLD\r\n"
    q, k, v = normal(heads, 1, dim), normal(kv_heads, 1, dim), normal(kv_heads, 1, dim)
    note(pc.attend_query_fused("cold", 0, q, k, v, np.array([0, 0, 1, 1], np.uint8)), q.shape)
    print(json.dumps({"sums": sums, "rehydrated": pc.cold_rehydrates_observed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
