"""B7, B9, B14, C9, H1: an entry is one unit, whole or not there, and moving it is fast."""

from __future__ import annotations

import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, ReplyError, frame

RNG = random.Random(21)
MIB = 1 << 20
GONE = "ERR session not found"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data") as running:
        yield running


def _store(conn: Raw, sid: str, layer: int, start: int, rows: bytes, dim: int) -> object:
    return conn.call("V.STOREBATCH", sid, layer, start, len(rows) // (2 * dim), rows, "FMT", "F16")


# --- B7: a failed store is never a hit -----------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="limits the file size of a running process")
def test_b7_disk_full_in_the_middle_of_a_store(process: Process) -> None:
    dim, rows = 1024, RNG.randbytes(16 * MIB)
    count = len(rows) // (2 * dim)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    with Raw(process.port, timeout=60) as conn:
        conn.ok("KV.PREFIX.REGISTER", "full", dim, "fp16", "ROWS", count, "LAYERS", 1)
        assert _store(conn, "full_pk", 0, 0, rows[: 4 * MIB], dim) == "OK"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8 * MIB, hard))
        reply = _store(conn, "full_pk", 0, 0, rows, dim)
        assert isinstance(reply, ReplyError), reply
        assert isinstance(_store(conn, "full_pv", 0, 0, rows, dim), ReplyError)
        assert conn.ok("KV.PREFIX.LOOKUP", "full") == "MISS"
        assert conn.ok("KV.PREFIX.WHY", "full").startswith(b"incomplete")
        # what was acknowledged before is untouched
        body = conn.ok("V.FETCH", "full_pk", 0, "RANGE", 0, 2048, "FMT", "NATIVE")
        assert body == rows[: 4 * MIB]
        assert conn.fields("V.INFO", "full_pk")["layer_0_tokens"] == "2048"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert _store(conn, "full_pk", 0, 0, rows, dim) == "OK"
        assert _store(conn, "full_pv", 0, 0, rows, dim) == "OK"
        assert conn.ok("KV.PREFIX.LOOKUP", "full") == "HIT"
        assert conn.ok("V.FETCH", "full_pv", 0, "RANGE", 0, count, "FMT", "NATIVE") == rows
    process.restart()
    with Raw(process.port) as conn:
        assert conn.ok("KV.PREFIX.LOOKUP", "full") == "HIT"
        assert conn.ok("V.FETCH", "full_pk", 0, "RANGE", 0, count, "FMT", "NATIVE") == rows


def test_b7_a_store_cut_off_in_the_middle_leaves_no_trace(process: Process) -> None:
    dim, rows = 1024, RNG.randbytes(8 * MIB)
    count = len(rows) // (2 * dim)
    with Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "cut", dim, "fp16", "ROWS", count, "LAYERS", 1)
        assert _store(conn, "cut_pv", 0, 0, rows, dim) == "OK"
        before = conn.fields("KV.PREFIX.INFO")
        with Raw(process.port) as other:
            other.send(frame("V.STOREBATCH", "cut_pk", 0, 0, count, rows, "FMT", "F16")[: 5 * MIB])
        deadline = time.monotonic() + 10
        while conn.fields("INFO", "clients")["connected_clients"] != "1":
            assert time.monotonic() < deadline
        assert conn.ok("KV.PREFIX.LOOKUP", "cut") == "MISS"
        assert conn.ok("V.FETCH", "cut_pk", 0, "RANGE", 0, 4, "FMT", "NATIVE") is None
        assert conn.fields("KV.PREFIX.INFO")["vstore_bytes"] == before["vstore_bytes"]
        assert _store(conn, "cut_pk", 0, 0, rows, dim) == "OK"
        assert conn.ok("KV.PREFIX.LOOKUP", "cut") == "HIT"
    process.restart()
    with Raw(process.port) as conn:
        assert conn.ok("KV.PREFIX.LOOKUP", "cut") == "HIT"
        assert conn.ok("V.FETCH", "cut_pk", 0, "RANGE", 0, count, "FMT", "NATIVE") == rows


def test_b7_a_shortened_file_is_a_miss(process: Process) -> None:
    dim, rows = 64, RNG.randbytes(2 * 64 * 1000)
    with Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "short", dim, "fp16", "ROWS", 1000, "LAYERS", 2)
        for layer in range(2):
            assert _store(conn, "short_pk", layer, 0, rows, dim) == "OK"
            assert _store(conn, "short_pv", layer, 0, rows, dim) == "OK"
        assert conn.ok("KV.PREFIX.LOOKUP", "short") == "HIT"
    for terminate in (False, True):  # an entry that was open at the end, and one that was closed cleanly
        _ = process.terminate() if terminate else process.kill()
        (path,) = (process.directory / "kv").rglob("*.pion")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - len(rows) - 5000)
        process.start()
        with Raw(process.port) as conn:
            assert conn.ok("KV.PREFIX.LOOKUP", "short") == "MISS"
            reply = conn.call("V.FETCH", "short_pv", 1, "RANGE", 0, 1000, "FMT", "NATIVE")
            assert reply is None or isinstance(reply, ReplyError), "never zeros, never a short body"
            conn.call("KV.PREFIX.DROP", "short")
            conn.ok("KV.PREFIX.REGISTER", "short", dim, "fp16", "ROWS", 1000, "LAYERS", 2)
            for layer in range(2):
                assert _store(conn, "short_pk", layer, 0, rows, dim) == "OK"
                assert _store(conn, "short_pv", layer, 0, rows, dim) == "OK"
            assert conn.ok("KV.PREFIX.LOOKUP", "short") == "HIT"


# --- B9: K and V go together ---------------------------------------------------------------------------------------


def test_b9_sides_of_different_length_are_a_miss(process: Process) -> None:
    dim = 16
    with Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "uneven", dim, "fp16", "ROWS", 512, "LAYERS", 1)
        assert _store(conn, "uneven_pk", 0, 0, bytes(2 * dim * 512), dim) == "OK"
        assert _store(conn, "uneven_pv", 0, 0, bytes(2 * dim * 448), dim) == "OK"
        assert conn.ok("KV.PREFIX.LOOKUP", "uneven") == "MISS"
        assert isinstance(conn.call("V.FETCH", "uneven_pv", 0, "RANGE", 0, 512), ReplyError)
        assert _store(conn, "uneven_pv", 0, 448, bytes(2 * dim * 64), dim) == "OK"
        assert conn.ok("KV.PREFIX.LOOKUP", "uneven") == "HIT"


def test_b9_eviction_takes_both_sides(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "--max-sessions", "6") as process, Raw(process.port) as conn:
        row = bytes(32)
        for i in range(30):
            conn.ok("KV.PREFIX.REGISTER", f"p{i}", 16, "fp16")
            assert _store(conn, f"p{i}_pk", 0, 0, row, 16) == "OK"
            assert _store(conn, f"p{i}_pv", 0, 0, row, 16) == "OK"
            if i % 3 == 0:
                conn.ok("V.CREATE", f"raw{i}", 16)  # an odd number of sessions: one side alone would be enough room
            conn.call("V.FETCH", f"p{RNG.randrange(i + 1)}_pv", 0, 0)  # only one side is touched
            for j in range(i + 1):
                sides = [not isinstance(conn.call("V.INFO", f"p{j}{side}"), ReplyError) for side in ("_pk", "_pv")]
                assert sides[0] == sides[1], f"p{j} kept one side"


def test_b9_a_fetch_after_eviction_is_an_error_not_zeros(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "--max-sessions", "4") as process, Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "victim", 16, "fp16")
        for side in ("_pk", "_pv"):
            assert _store(conn, f"victim{side}", 0, 0, bytes(32), 16) == "OK"
        assert conn.ok("KV.PREFIX.LOOKUP", "victim") == "HIT"
        for i in range(2):  # between the lookup and the last fetch
            conn.ok("KV.PREFIX.REGISTER", f"other{i}", 16, "fp16")
        for form in (("V.FETCH", "victim_pk", 0, "RANGE", 0, 1), ("V.FETCH", "victim_pv", "BATCH", 0, 1)):
            assert str(conn.call(*form)) == GONE


# --- B14: dropping does not hold anyone up -------------------------------------------------------------------------


_GATE = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int unlink(const char *path) {
    const char *gate = getenv("TEST_GATE");
    while (gate && strstr(path, "/trash/") && access(gate, F_OK) == 0) usleep(1000);
    return (int)syscall(SYS_unlinkat, -100, path, 0);
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layers", [8, pytest.param(64, marks=pytest.mark.slow)], ids=["half a gigabyte", "four gigabytes"]
)
def test_b14_a_drop_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    """The file system may take as long as it likes to free the blocks: here it does not begin before everything else
    has been answered. How long a PING takes meanwhile on this machine says the benchmark `ping_p99_drop`."""
    gate, source, library = tmp_path / "gate", tmp_path / "gate.c", tmp_path / "gate.so"
    gate.touch()
    source.write_text(_GATE)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("TEST_GATE", str(gate))
    rows = bytes(range(256)) * (64 * MIB // 256)
    with Process(tmp_path / "data") as process, Raw(process.port, timeout=60) as conn:
        conn.ok("KV.PREFIX.REGISTER", "huge", 8192, "fp16")
        for layer in range(layers):
            assert _store(conn, "huge_pk", layer, 0, rows, 8192) == "OK"
        trash = tmp_path / "data" / "kv" / "trash"
        assert conn.ok("KV.PREFIX.DROP", "huge") == 1
        assert conn.ok("KV.PREFIX.LOOKUP", "huge") == "MISS"
        with Raw(process.port, timeout=60) as other:
            for number in range(100):
                assert other.call("PING") == "PONG"
                conn.ok("KV.PREFIX.REGISTER", f"small{number}", 64, "fp16")
        assert len(list(trash.iterdir())) == 1, "the drop is still under way"
        gate.unlink()
        deadline = time.monotonic() + 60
        while list(trash.iterdir()):
            assert time.monotonic() < deadline
        process.restart()
        with Raw(process.port) as again:
            assert again.ok("KV.PREFIX.LOOKUP", "huge") == "MISS"


# --- C9: right or refused ------------------------------------------------------------------------------------------


def _bf16(*values: float) -> bytes:
    """Truncated: the test's values are chosen to be exact or to stay large."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


@pytest.mark.parametrize("fmt", ["fp16", "int8"])
@pytest.mark.parametrize("value", [1e5, -7e4])
def test_c9_bf16_values_beyond_fp16_are_refused(process: Process, fmt: str, value: float) -> None:
    with Raw(process.port) as conn:
        conn.ok("V.CREATE", "c9", 4, "VQUANT", fmt)
        good = _bf16(1.0, 0.5, -2.0, 1e-6)
        assert conn.ok("V.STOREBATCH", "c9", 0, 0, 1, good, "FMT", "BF16") == "OK"
        third_row = [
            (good * 2 + _bf16(1.0, value, 0.0, 0.0), "BF16"),
            (struct.pack("<12f", *[0.0] * 9, value, 0.0, 0.0), "F32"),
        ]
        for blob, word in third_row:
            reply = conn.call("V.STOREBATCH", "c9", 0, 1, 3, blob, "FMT", word)
            assert isinstance(reply, ReplyError)
            assert "row 2" in str(reply), reply
        assert conn.fields("V.INFO", "c9")["layer_0_tokens"] == "1"
        body = struct.unpack("<4f", conn.ok("V.FETCH", "c9", 0, "RANGE", 0, 1))
        assert all(abs(got - want) < 0.02 for got, want in zip(body, (1.0, 0.5, -2.0, 1e-6), strict=True))


def test_c9_bf16_is_kept_and_given_back_as_bf16(process: Process) -> None:
    words = _bf16(1e5, -7e4, 1e-6, float("inf"))
    with Raw(process.port) as conn:
        conn.ok("V.CREATE", "c9", 4, "VQUANT", "bf16")
        conn.ok("V.STOREBATCH", "c9", 0, 0, 1, words, "FMT", "BF16")
        assert conn.fields("V.INFO", "c9")["v_format"] == "bf16"
        process.restart()
    with Raw(process.port) as conn:
        assert conn.fields("V.INFO", "c9")["v_format"] == "bf16"
        widened = b"".join(b"\0\0" + words[i : i + 2] for i in range(0, 8, 2))
        assert conn.ok("V.FETCH", "c9", 0, "RANGE", 0, 1) == widened


# --- H1: few round trips, full speed -------------------------------------------------------------------------------


LAYERS, WIDTH = 32, 1024  # an 8B model's shape


def _store_h1(process: Process, tokens: int) -> tuple[bytes, float]:
    """Stores all layers of both sides in one pipeline; (the rows of a layer, median seconds of a PING beside it)."""
    rows = RNG.randbytes(2 * WIDTH) * tokens
    pings: list[float] = []
    stop = threading.Event()

    def ping() -> None:
        with Raw(process.port) as other:
            while not stop.is_set():
                started = time.perf_counter()
                assert other.call("PING") == "PONG"
                pings.append(time.perf_counter() - started)

    watcher = threading.Thread(target=ping)
    with Raw(process.port, timeout=120) as conn:
        conn.ok("KV.PREFIX.REGISTER", "h1", WIDTH, "fp16", "ROWS", tokens, "LAYERS", LAYERS)
        watcher.start()
        try:
            for side in ("_pk", "_pv"):
                for layer in range(LAYERS):
                    conn.send(frame("V.STOREBATCH", f"h1{side}", layer, 0, tokens, rows, "FMT", "F16"))
            assert [conn.read() for _ in range(2 * LAYERS)] == ["OK"] * (2 * LAYERS)
        finally:
            stop.set()
            watcher.join()
    return rows, statistics.median(pings)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tokens", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_h1_a_prefix_comes_back_in_three_commands(process: Process, tokens: int) -> None:
    """One LOOKUP and a BATCH for each side. How fast is measured by the benchmark `fetch_prefix_20k`."""
    rows, ping = _store_h1(process, tokens)
    assert ping < 0.05, "a store does not delay another client's answer"
    body = bytearray(len(rows) + 2)
    with Raw(process.port, timeout=120) as conn:
        before = int(conn.fields("INFO", "stats")["total_commands_processed"])
        assert conn.ok("KV.PREFIX.LOOKUP", "h1") == "HIT"
        for side in ("_pk", "_pv"):
            conn.send(frame("V.FETCH", f"h1{side}", "BATCH", 0, tokens, LAYERS, "FMT", "NATIVE"))
        for _ in range(2):
            assert conn.line() == b"*%d" % LAYERS
            for _ in range(LAYERS):
                assert conn.line() == b"$%d" % len(rows)
                conn.read_into(body)
                assert body == rows + b"\r\n"
        after = int(conn.fields("INFO", "stats")["total_commands_processed"])
    assert after - before - 1 == 3
