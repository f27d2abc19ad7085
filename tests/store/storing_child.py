"""Stores, streams, drops and compacts at random until it is killed; says `? op` before and `! op` after each."""

from __future__ import annotations

import os
import random
import sys

from pion.store.engine import Engine
from tests.store.model import F16, words

DIM = 64


def say(line: str) -> None:
    """One write, so that the reader sees whole lines."""
    os.write(1, f"{line}\n".encode())


def store(engine: Engine, rng: random.Random, ns: str, streamed: bool, number: int) -> None:
    """Rows of one layer and side, through one of the two doors."""
    side, layer, start = rng.choice(["_pk", "_pv"]), rng.randrange(2), rng.randrange(40)
    count = rng.randrange(1, 400) if streamed else rng.randrange(1, 4)
    sid, blob = (ns + side).encode(), words(number, count, DIM, F16)
    say(f"? store {ns} {side} {layer} {start} {count} {number}")
    if streamed:
        sink = engine.v_store_open(sid, layer, start, count, len(blob))
        for at in range(0, len(blob), 5000):
            sink.feed(blob[at : at + 5000])
        engine.v_store_finish(sink, "F16")
    else:
        engine.v_store(sid, layer, start, count, blob, "F16")
    say(f"! store {ns} {side} {layer} {start} {count} {number}")


def main(root: str, seed: int) -> None:
    """Never returns."""
    rng = random.Random(seed)
    engine = Engine(root)
    number = 0
    while True:
        number += 1
        ns = rng.choice(["a", "b", "c", "d"])
        name = ns.encode()
        what = rng.choices(["register", "store", "stream", "drop", "compact", "state"], [20, 60, 40, 6, 4, 10])[0]
        if what == "register":
            say(f"? register {ns}")
            engine.register(name, DIM, F16)
            say(f"! register {ns}")
        elif what == "drop":
            say(f"? drop {ns}")
            engine.drop(name)
            say(f"! drop {ns}")
        elif what == "state":
            say(f"? state {ns} {number}")
            engine.ssm_store(name, 1, b"%d" % number)
            say(f"! state {ns} {number}")
        elif what == "compact":
            engine.compact(name)
        elif engine.v_exists(name + b"_pk"):
            store(engine, rng, ns, what == "stream", number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
