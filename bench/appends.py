"""An agent's journal: one row per layer and token at a time, against the same rows in one STOREBATCH."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import Result, bench, compare
from bench.peers import Running, load, pion
from bench.wire import Wire, command

ROWS, LAYERS, DIM = 2_048, 8, 1024
TOTAL = ROWS * LAYERS * DIM * 2


def request_of(folder: Path, sid: str) -> Path:
    path = folder / sid
    path.write_bytes(command("V.FETCH", sid, "BATCH", 0, ROWS, LAYERS, "FMT", "NATIVE"))
    return path


def rate(server: Running, request: Path) -> float:
    each = ROWS * DIM * 2
    reply = len(f"*{LAYERS}\r\n") + LAYERS * (len(f"${each}\r\n") + each + 2)
    return TOTAL / load("xfer", server.host, server.port, request, reply, 5)[0] / 1e9


def file_bytes(server: Running) -> int:
    with Wire(server.host, server.port) as wire:
        text = wire.call("KV.PREFIX.INFO")
    assert isinstance(text, bytes)
    lines = dict(line.split(":", 1) for line in text.decode().splitlines())
    return int(lines["vstore_file_bytes"])


def settled(server: Running, patience_s: float = 30.0) -> int:
    """File bytes once compaction has stopped changing them."""
    deadline, last, since = time.monotonic() + patience_s, -1, 0.0
    while time.monotonic() < deadline:
        now = file_bytes(server)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > 2.0:
            break
        time.sleep(0.1)
    return last


@bench("appends_2048_fetch", "appends_2048_file")
def appends() -> Iterator[Result]:
    block = os.urandom(ROWS * DIM * 2)
    with tempfile.TemporaryDirectory() as name, pion() as server, Wire(server.host, server.port) as wire:
        folder = Path(name)
        wire.call("V.CREATE", "one", DIM, "VQUANT", "fp16")
        for layer in range(LAYERS):
            wire.call("V.STOREBATCH", "one", layer, 0, ROWS, block, "FMT", "F16")
        whole = settled(server)
        wire.call("V.CREATE", "rows", DIM, "VQUANT", "fp16")
        size = DIM * 2
        for row in range(ROWS):
            piece = block[row * size : (row + 1) * size]
            wire.socket.sendall(
                b"".join(command("V.STOREBATCH", "rows", layer, row, 1, piece, "FMT", "F16") for layer in range(LAYERS))
            )
            for _ in range(LAYERS):
                wire.reply()
        rows, one = request_of(folder, "rows"), request_of(folder, "one")
        yield compare(
            "appends_2048_fetch",
            lambda: rate(server, rows),
            lambda: rate(server, one),
            unit="GB/s",
            bar=0.5,
            note="fetch of 2,048 one-row appends per layer / of one STOREBATCH",
        )
        both = settled(server)
        grown = (both - whole) / whole
        yield Result(
            "appends_2048_file",
            grown,
            "x",
            bar=1.1,
            at_most=True,
            rounds=1,
            note="file after compaction / file of one STOREBATCH",
        )
