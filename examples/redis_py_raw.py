"""Without our client: a prefix stored and fetched with redis-py. Any Redis client can do this.

python -m pip install redis numpy
pion-server --kvcache
python examples/redis_py_raw.py [redis://127.0.0.1:1974]
"""

import sys

import numpy as np
import redis

url = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:1974"
server = redis.Redis.from_url(url)
try:
    server.ping()
except redis.ConnectionError as error:
    sys.exit(f"{error}\nStart one first: pion-server --kvcache")

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 2, 64, 100
dim = HEADS * HEAD_DIM
rng = np.random.default_rng(0)
keys, values = rng.normal(size=(2, LAYERS, TOKENS, dim)).astype(np.float16)

namespace = "example|v1|none|fp16|raw"
server.execute_command(
    "KV.PREFIX.REGISTER", namespace, dim, "fp16", "PREFILL_MS", 850,
    "ROWS", TOKENS, "LAYERS", LAYERS, "HEADS", HEADS, "HEAD_DIM", HEAD_DIM, "REPLACE",
)  # fmt: skip
print("declared, no rows yet:", server.execute_command("KV.PREFIX.LOOKUP", namespace))

pipeline = server.pipeline(transaction=False)
for layer in range(LAYERS):
    for side, rows in (("_pk", keys), ("_pv", values)):
        pipeline.execute_command(
            "V.STOREBATCH", namespace + side, layer, 0, TOKENS, rows[layer].tobytes(), "FMT", "F16"
        )
pipeline.execute()
print("all rows stored:", server.execute_command("KV.PREFIX.LOOKUP", namespace))

one = server.execute_command("V.FETCH", namespace + "_pk", 2, "RANGE", 10, 20, "FMT", "NATIVE")
print("ten rows of layer 2 are equal:", np.array_equal(np.frombuffer(one, np.float16).reshape(10, dim), keys[2, 10:20]))
every = server.execute_command("V.FETCH", namespace + "_pv", "BATCH", 0, TOKENS, "FMT", "NATIVE")
print(
    "all V rows are equal:",
    all(np.frombuffer(rows, np.float16).tobytes() == values[i].tobytes() for i, rows in enumerate(every)),
)

print(server.execute_command("KV.PREFIX.WHY", namespace))
stats = server.execute_command("PION.STATS")
print(
    "hits so far:",
    (stats if isinstance(stats, dict) else dict(zip(stats[::2], stats[1::2], strict=True)))[b"kvprefix_hits"],
)
print("dropped:", server.execute_command("KV.PREFIX.DROP", namespace))
