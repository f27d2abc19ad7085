"""B11 on the wire: --max-bytes and --max-sessions at any moment, and what PIN, LEASE and EXPIRE have to say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, ReplyError, frame

DIM = 128
WIDTH = 2 * DIM
SECONDS = 4.0


def body(rows: int, seed: int = 1) -> bytes:
    return bytes([seed % 60, 60]) * (rows * DIM)


def on_disk(root: Path) -> int:
    """Bytes of blocks below kv/, what waits for its removal included."""
    total = 0
    for folder, _, names in os.walk(root / "kv"):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_b11_fifty_writers_stay_within_the_caps(tmp_path: Path, memory: bool) -> None:
    """Small and large bodies, own and shared prefixes, while another connection watches what is held."""
    cap, sessions, writers = 48 << 20, 120, 50
    flags = ["--max-bytes", str(cap), "--max-sessions", str(sessions), *(["--memory-only"] if memory else [])]
    with Process(tmp_path / "data", *flags) as process, Raw(process.port) as watcher:
        end = time.monotonic() + SECONDS
        errors: dict[str, int] = {}
        stored = [0] * writers

        def write(number: int) -> None:
            with Raw(process.port) as conn:
                i = 0
                while time.monotonic() < end:
                    i += 1
                    ns = ("shared", f"own{number}", f"new{number}-{i}")[i % 3]
                    rows = (16, 200, 1100)[(i + number) % 3]  # the last is streamed
                    conn.send(frame("KV.PREFIX.REGISTER", ns, DIM, "fp16"))
                    for side in ("_pk", "_pv"):
                        layer = (i + number) % 2
                        conn.send(frame("V.STOREBATCH", ns + side, layer, 0, rows, body(rows, number), "FMT", "F16"))
                    for _ in range(3):
                        reply = conn.read()
                        if isinstance(reply, ReplyError):
                            errors[str(reply)] = errors.get(str(reply), 0) + 1
                        else:
                            stored[number] += 1

        threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
        for thread in threads:
            thread.start()
        most = largest = 0
        while time.monotonic() < end:
            info = watcher.fields("KV.PREFIX.INFO")
            most, largest = max(most, int(info["vstore_file_bytes"])), max(largest, int(info["vstore_sessions"]))
        for thread in threads:
            thread.join()
        info = watcher.fields("KV.PREFIX.INFO")
        assert cap // 2 < most <= cap
        assert sessions // 2 < largest <= sessions
        assert int(info["vstore_evicted"]) > 50
        assert all(text.startswith("ERR session not found") for text in errors), errors  # evicted in between
        assert all(stored)
        if not memory:
            deadline = time.monotonic() + 20
            while on_disk(tmp_path / "data") > cap:
                assert time.monotonic() < deadline, "evicted files stay on the disk"
            process.restart()
            with Raw(process.port) as again:
                after = again.fields("KV.PREFIX.INFO")
                assert int(after["vstore_file_bytes"]) <= cap
                assert int(after["vstore_sessions"]) <= sessions


def test_b11_a_session_overwrites_itself_for_ever(tmp_path: Path) -> None:
    """With small bodies and with streamed ones, which wait with their client for the compaction."""
    cap = 4 << 20
    with Process(tmp_path / "data", "--max-bytes", str(cap)) as process, Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16")
        for i in range(120):
            rows = 600 if i % 2 else 2000  # 150 KB, and 500 KB in one piece
            assert conn.ok("V.STOREBATCH", "ns_pk", i % 2, 0, rows, body(rows, i), "FMT", "F16") == "OK"
            assert int(conn.fields("KV.PREFIX.INFO")["vstore_file_bytes"]) <= cap
        assert conn.ok("V.FETCH", "ns_pk", 0, "RANGE", 0, 2000, "FMT", "NATIVE") == body(2000, 118)
        assert conn.ok("V.FETCH", "ns_pk", 1, "RANGE", 0, 600, "FMT", "NATIVE") == body(600, 119)
        assert conn.fields("KV.PREFIX.INFO")["vstore_evicted"] == "0"


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_b11_a_start_with_more_than_the_caps(tmp_path: Path, index: bool) -> None:
    with Process(tmp_path / "data") as process, Raw(process.port) as conn:
        for i in range(20):
            conn.ok("KV.PREFIX.REGISTER", f"p{i}", DIM, "fp16")
            conn.ok("V.STOREBATCH", f"p{i}_pk", 0, 0, 1000, body(1000), "FMT", "F16")
        assert conn.ok("KV.PREFIX.PIN", "p0", "p5") == 2
    if not index:
        (tmp_path / "data" / "pion.index").unlink()
    cap = 1 << 20
    with Process(tmp_path / "data", "--max-bytes", str(cap)) as process, Raw(process.port) as conn:
        info = conn.fields("KV.PREFIX.INFO")
        assert cap // 2 < int(info["vstore_file_bytes"]) <= cap
        assert int(info["vstore_evicted"]) >= 15
        assert [conn.ok("KV.PREFIX.LOOKUP", ns) for ns in ("p0", "p5")] == ["HIT", "HIT"]
        assert conn.ok("KV.PREFIX.WHY", "p1").startswith(b"evicted: --max-bytes 1048576 was reached")
    with Process(tmp_path / "data", "--max-sessions", "4") as process, Raw(process.port) as conn:
        assert conn.fields("KV.PREFIX.INFO")["vstore_sessions"] == "4"
        assert [conn.ok("KV.PREFIX.LOOKUP", ns) for ns in ("p0", "p5")] == ["HIT", "HIT"]


def test_b5_pin_and_expire_survive_a_kill(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "--max-sessions", "8") as process:
        with Raw(process.port) as conn:
            for ns in ("system", "fleeting", "timed", "other"):
                conn.ok("KV.PREFIX.REGISTER", ns, DIM, "fp16")
            assert conn.ok("KV.PREFIX.PIN", "system") == 1
            assert conn.ok("KV.PREFIX.EXPIRE", "fleeting", 1) == 1
            assert conn.ok("KV.PREFIX.EXPIRE", "timed", 1000) == 1
        process.restart()
        with Raw(process.port) as conn:
            deadline = time.monotonic() + 20
            while not conn.ok("KV.PREFIX.WHY", "fleeting").startswith((b"expired", b"never")):
                assert time.monotonic() < deadline
            assert conn.ok("KV.PREFIX.LOOKUP", "fleeting") == "MISS"
            for i in range(6):
                conn.ok("KV.PREFIX.REGISTER", f"new{i}", DIM, "fp16")
            assert conn.ok("KV.PREFIX.LOOKUP", "system") == "HIT"
            assert conn.ok("KV.PREFIX.LOOKUP", "other") == "MISS"
        process.restart()
        with Raw(process.port) as conn:
            assert conn.ok("KV.PREFIX.LOOKUP", "fleeting") == "MISS"
            assert conn.fields("KV.PREFIX.INFO", "system")["pinned"] == "1"
            assert conn.ok("KV.PREFIX.UNPIN", "system") == 1
        process.restart()
        with Raw(process.port) as conn:
            assert conn.fields("KV.PREFIX.INFO", "system")["pinned"] == "0"


def test_a_lease_lets_the_second_process_wait(tmp_path: Path) -> None:
    with Process(tmp_path / "data") as process, Raw(process.port) as first, Raw(process.port) as second:
        assert first.ok("KV.PREFIX.LEASE", "ns", 60_000) == 1
        assert second.ok("KV.PREFIX.LEASE", "ns", 60_000) == 0
        assert first.ok("KV.PREFIX.LEASE", "ns", 60_000) == 1
        first.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16", "ROWS", 4, "LAYERS", 1)
        first.ok("V.STOREBATCH", "ns_pk", 0, 0, 4, body(4), "FMT", "F16")
        assert second.ok("KV.PREFIX.LEASE", "ns", 60_000) == 0  # half of it is not it
        assert second.ok("KV.PREFIX.LOOKUP", "ns") == "MISS"
        first.ok("V.STOREBATCH", "ns_pv", 0, 0, 4, body(4), "FMT", "F16")
        assert second.ok("KV.PREFIX.LOOKUP", "ns") == "HIT"
        assert second.ok("KV.PREFIX.LEASE", "ns", 60_000) == 1
        assert first.ok("KV.PREFIX.LEASE", "dies", 300) == 1
        begun = time.monotonic()
        while second.ok("KV.PREFIX.LEASE", "dies", 1000) == 0:
            assert time.monotonic() < begun + 20
        assert time.monotonic() > begun + 0.25
        assert first.ok("KV.PREFIX.LEASE", "pool", 60_000, "OWNER", "worker-7") == 1
        assert second.ok("KV.PREFIX.LEASE", "pool", 60_000) == 0
        assert second.ok("KV.PREFIX.LEASE", "pool", 60_000, "OWNER", "worker-7") == 1
        assert second.ok("KV.PREFIX.LEASE", "pool", 0, "OWNER", "worker-7") == 1
        assert second.ok("KV.PREFIX.LEASE", "pool", 1000) == 1


def test_a_probe_answered_by_compiled_code_is_a_use(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "--max-sessions", "6") as process, Raw(process.port) as conn:
        for ns in ("probed", "idle", "third"):
            conn.ok("KV.PREFIX.REGISTER", ns, DIM, "fp16", "BLOCKS", 16, 1, b"8 bytes!")
        for _ in range(3):
            assert conn.ok("KV.PREFIX.MEMBERSHIP", "probed", 1, b"8 bytes!") == b"\x01"
        conn.ok("KV.PREFIX.REGISTER", "new", DIM, "fp16")
        assert [conn.ok("KV.PREFIX.LOOKUP", ns) for ns in ("probed", "idle")] == ["HIT", "MISS"]
        assert conn.ok("KV.PREFIX.EXPIRE", "probed", 1) == 1
        assert conn.ok("KV.PREFIX.MEMBERSHIP", "probed", 1, b"8 bytes!") == b"\x01"
        deadline = time.monotonic() + 20
        while conn.ok("KV.PREFIX.MEMBERSHIP", "probed", 1, b"8 bytes!") != "UNKNOWN":
            assert time.monotonic() < deadline


def test_b11_a_slow_reader_keeps_what_it_reads(tmp_path: Path) -> None:
    """Nothing else can go, so the write is refused and says why; when the reader is done it works."""
    rows, cap = 20_000, 8 << 20  # 5 MB
    with Process(tmp_path / "data", "--max-bytes", str(cap)) as process, Raw(process.port) as conn:
        conn.ok("KV.PREFIX.REGISTER", "read", DIM, "fp16")
        conn.ok("V.STOREBATCH", "read_pk", 0, 0, rows, body(rows, 3), "FMT", "F16")
        slow = Raw(process.port, buffers=4096)
        slow.send(frame("V.FETCH", "read_pk", 0, "RANGE", 0, rows, "FMT", "NATIVE"))
        assert slow.sock.recv(1) == b"$"
        conn.ok("KV.PREFIX.REGISTER", "new", DIM, "fp16")
        refused = conn.call("V.STOREBATCH", "new_pk", 0, 0, rows, body(rows, 4), "FMT", "F16")
        assert str(refused).startswith(f"OOM --max-bytes {cap} is reached and nothing else can be evicted")
        assert conn.ok("KV.PREFIX.DROP", "read") == 1
        refused = conn.call("V.STOREBATCH", "new_pk", 0, 0, rows, body(rows, 4), "FMT", "F16")
        assert str(refused).startswith("OOM"), "what a reader holds of a dropped file counts"
        got = b""
        while len(got) < len(b"%d\r\n" % (rows * WIDTH)) + rows * WIDTH + 2:
            got += slow.sock.recv(1 << 20)
        assert got == b"%d\r\n%b\r\n" % (rows * WIDTH, body(rows, 3))  # all of one generation
        slow.close()
        deadline = time.monotonic() + 20
        while isinstance(conn.call("V.STOREBATCH", "new_pk", 0, 0, rows, body(rows, 4), "FMT", "F16"), ReplyError):
            assert time.monotonic() < deadline
