"""B14: the space of a dropped entry comes back, whatever was in flight when its connections ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, frame

DIM, ROWS = 256, 4000
BLOB = bytes(2 * DIM * ROWS)
STORE = frame("V.STOREBATCH", "ns_pk", 0, 0, ROWS, BLOB, "FMT", "F16")
STATE = frame("SSM.PREFIX.STORE", "ns", 1, bytes(3_000_000))
FETCH = frame("V.FETCH", "ns_pk", 0, "RANGE", 0, ROWS)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data") as running:
        yield running


def _deleted(process: Process) -> list[str]:
    fds = Path(f"/proc/{process.pid}/fd")
    names = []
    for fd in fds.iterdir():
        try:
            names.append(os.readlink(fd))
        except FileNotFoundError:
            continue
    return [name for name in names if name.endswith("(deleted)")]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "sent",
    [STORE[:100], STORE[:1_500_000], STATE[:900_000], STATE + STATE[:900_000], FETCH * 20],
    ids=["store begun", "half a store", "half a state", "one state and a half", "unread fetches"],
)
@pytest.mark.parametrize("dropped_first", [False, True])
def test_b14_nothing_holds_a_dropped_file(process: Process, sent: bytes, dropped_first: bool) -> None:
    with Raw(process.port) as conn:
        for _ in range(3):
            conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16")
            conn.ok("V.STOREBATCH", "ns_pk", 0, 0, ROWS, BLOB, "FMT", "F16")
            other = Raw(process.port)
            other.send(sent)
            if dropped_first:
                assert conn.ok("KV.PREFIX.DROP", "ns") == 1
            other.close()
        deadline = time.monotonic() + 20
        while _deleted(process) or conn.fields("KV.PREFIX.INFO")["vstore_file_bytes"] != "0":
            assert time.monotonic() < deadline, (_deleted(process), conn.fields("KV.PREFIX.INFO"))
            conn.ok("KV.PREFIX.DROP", "ns")  # a state may have arrived after the drop


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8", "turbo4"])
@pytest.mark.parametrize("source", ["F16", "F32"])
def test_b14_a_store_that_ends_after_its_entry_was_replaced(process: Process, fmt: str, source: str) -> None:
    """Also where the body is converted in a thread: the error that comes back must not hold the file."""
    whole = frame("V.STOREBATCH", "ns_pk", 0, 0, ROWS, bytes(DIM * ROWS * int(source[1:]) // 8), "FMT", source)
    with Raw(process.port) as conn:
        for _ in range(4):
            deadline = time.monotonic() + 20
            while conn.fields("KV.PREFIX.INFO")["vstore_file_bytes"] != "0":  # the last one is being freed
                assert time.monotonic() < deadline
            conn.ok("KV.PREFIX.REGISTER", "ns", DIM, fmt)
            with Raw(process.port) as other:
                other.send(whole[:1_000_000])
                deadline = time.monotonic() + 20
                while int(conn.fields("KV.PREFIX.INFO")["vstore_file_bytes"]) < 100_000:  # the body has not begun
                    assert time.monotonic() < deadline
                conn.ok("KV.PREFIX.DROP", "ns")
                conn.ok("KV.PREFIX.REGISTER", "ns", DIM, fmt)
                other.send(whole[1_000_000:])
                assert "dropped while the body arrived" in str(other.read())
            conn.ok("KV.PREFIX.DROP", "ns")
        deadline = time.monotonic() + 20
        while _deleted(process) or conn.fields("KV.PREFIX.INFO")["vstore_file_bytes"] != "0":
            assert time.monotonic() < deadline, (_deleted(process), conn.fields("KV.PREFIX.INFO"))
            time.sleep(0.05)
