"""DROP, replacement, eviction, overwriting and compaction under a reader that takes its time.

It gets all of its rows, from one generation, or one clear error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, frame

DIM, ROWS, LAYERS = 512, 2048, 4  # 2 MiB a layer and side
RNG = random.Random(9)
OLD, NEW = (RNG.randbytes(2 * DIM) * ROWS for _ in range(2))


def store(conn: Raw, ns: str, rows: bytes) -> None:
    for side in ("_pk", "_pv"):
        for layer in range(LAYERS):
            conn.ok("V.STOREBATCH", ns + side, layer, 0, ROWS, rows, "FMT", "F16")


def drop(conn: Raw) -> None:
    assert conn.ok("KV.PREFIX.DROP", "ns") == 1


def replace(conn: Raw) -> None:
    drop(conn)
    conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16", "ROWS", ROWS, "LAYERS", LAYERS)  # half of it is not served
    store(conn, "ns", NEW)


def overwrite(conn: Raw) -> None:
    """Far more than a compaction waits for."""
    for _ in range(2):
        store(conn, "ns", NEW)


def flush(conn: Raw) -> None:
    conn.ok("KV.PREFIX.FLUSH")


def evict(conn: Raw) -> None:
    """Others take all the room there is, or are refused: what is being read stays where it is."""
    for number in range(6):
        conn.ok("KV.PREFIX.REGISTER", f"other{number}", DIM, "fp16")
        store(conn, f"other{number}", NEW)


@pytest.mark.parametrize("what", [drop, replace, overwrite, flush, evict])
def test_b9_a_slow_reader_gets_one_generation(tmp_path: Path, what: Callable[[Raw], None]) -> None:
    room = 64 << 20 if what is evict else 256 << 20
    with Process(tmp_path / "data", "--max-bytes", str(room)) as process, Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16")
        store(conn, "ns", OLD)
        with Raw(process.port, buffers=16_384) as slow:
            slow.send(frame("V.FETCH", "ns_pk", "BATCH", 0, ROWS, LAYERS, "FMT", "NATIVE"))
            slow.send(frame("V.FETCH", "ns_pv", "BATCH", 0, ROWS, LAYERS, "FMT", "NATIVE"))
            assert slow.line() == b"*%d" % LAYERS
            assert slow.line() == b"$%d" % len(OLD)
            body = bytearray(len(OLD) + 2)
            view = memoryview(body)
            slow.read_into(view[:1000])
            what(conn)
            slow.read_into(view[1000:])
            assert body[:-2] == OLD
            for _ in range(LAYERS - 1):
                assert slow.read() == OLD
            # The second command may not have begun when its entry went; then it is one answer of another kind.
            second = slow.read()
            if isinstance(second, list):
                assert len(second) == LAYERS
                assert len(set(second)) == 1
                assert second[0] in (OLD, NEW)
            else:
                fine = [
                    "session not found",
                    *(["no stored layers", "does not hold all rows"] if what is replace else []),
                ]
                assert any(text in str(second) for text in fine), second
        if what is drop:
            assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "MISS"
