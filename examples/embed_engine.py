"""Without a socket: the store inside your own process.

    python examples/embed_engine.py [directory]

One process may have a directory open; a second one, or a server, is refused and told who has it.
"""

import sys
import tempfile

import numpy as np

from pion import Engine
from pion.limits import FORMATS

LAYERS, DIM, TOKENS = 3, 128, 500
namespace = b"example|v1|none|fp16|embedded"
rows = np.random.default_rng(0).normal(size=(LAYERS, 2, TOKENS, DIM)).astype(np.float16)

with tempfile.TemporaryDirectory() as scratch:
    folder = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/store"
    with Engine(folder) as engine:
        engine.register(namespace, DIM, FORMATS["fp16"], rows=TOKENS, layers=LAYERS, digest="ab" * 32, replace=True)
        print("declared, no rows yet:", engine.lookup(namespace))
        for layer, (keys, values) in enumerate(rows):
            engine.store(namespace, layer, keys, values)
        engine.commit()  # from here on it would survive a power loss
        print("stored:", engine.why(namespace))

    with Engine(folder) as engine:  # as after a restart
        print("found again:", engine.lookup(namespace, digest="ab" * 32))
        fetched = engine.fetch(namespace)
        same = all(np.array_equal(fetched[i][side], rows[i, side]) for i in range(LAYERS) for side in range(2))
        print("every word is equal:", same)
        print("dropped:", engine.drop(namespace))
