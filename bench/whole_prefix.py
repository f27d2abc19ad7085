"""A whole prefix of 20,000 tokens in the shape of an 8B model, 2.6 GB, against a bare socket that sends as many bytes.

The bare socket sends the bytes of one layer again and again from memory. Both are received in the same way, with a
timeout as clients have it.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from bench.harness import Result, bench, compare
from bench.peers import pion, scratch
from bench.wire import Wire, command

TOKENS, LAYERS, WIDTH = 20_000, 32, 1024
TIMEOUT = 120.0  # seconds
EACH = TOKENS * WIDTH * 2


def receive(sock: socket.socket, buffer: memoryview, nbytes: int) -> None:
    """Read exactly `nbytes`, into the same buffer again and again."""
    while nbytes:
        got = sock.recv_into(buffer, min(nbytes, len(buffer)))
        if not got:
            raise RuntimeError("the peer closed")
        nbytes -= got


def bare(rows: bytes, buffer: memoryview) -> float:
    """Seconds for all layers of both sides over a socket from a thread that does nothing but send them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                for _ in range(2 * LAYERS):
                    peer.sendall(rows)

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(listener.getsockname(), timeout=TIMEOUT) as sock:
            since = time.perf_counter()
            receive(sock, buffer, 2 * LAYERS * EACH)
            taken = time.perf_counter() - since
        thread.join()
    return taken


@bench("fetch_prefix_20k")
def whole_prefix() -> Result:
    buffer = memoryview(bytearray(EACH))
    with scratch() as folder, pion(directory=folder, pin=False) as server:
        rows = os.urandom(WIDTH * 2) * TOKENS
        with Wire(server.host, server.port) as wire:
            wire.call("KV.PREFIX.REGISTER", "h1", WIDTH, "fp16", "ROWS", TOKENS, "LAYERS", LAYERS)
            for side in ("pk", "pv"):
                for layer in range(LAYERS):
                    wire.call("V.STOREBATCH", f"h1_{side}", layer, 0, TOKENS, rows, "FMT", "F16")
        asked = command("KV.PREFIX.LOOKUP", "h1") + b"".join(
            command("V.FETCH", f"h1_{side}", "BATCH", 0, TOKENS, LAYERS, "FMT", "NATIVE") for side in ("pk", "pv")
        )
        reply = len(b"+HIT\r\n") + 2 * (len(b"*%d\r\n" % LAYERS) + LAYERS * (len(b"$%d\r\n" % EACH) + EACH + 2))

        def ours() -> float:
            with socket.create_connection((server.host, server.port), timeout=TIMEOUT) as sock:
                since = time.perf_counter()
                sock.sendall(asked)
                receive(sock, buffer, reply)
                return 2 * LAYERS * EACH / (time.perf_counter() - since) / 1e9

        return compare(
            "fetch_prefix_20k",
            ours,
            lambda: 2 * LAYERS * EACH / bare(rows, buffer) / 1e9,
            unit="GB/s",
            bar=0.6,
            rounds=5,
            note="2.6 GB in three commands / a bare socket that sends as many bytes (case H1)",
        )
