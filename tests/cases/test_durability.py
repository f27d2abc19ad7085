"""B1, B5, B7, B12: what a restart must bring back, and what it must not."""

from __future__ import annotations

import random
import re
import resource
import time
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.raw import Raw, ReplyError, frame

RNG = random.Random(20)
DIM = 32
BATCHES = [RNG.randbytes(2 * DIM * 100) for _ in range(3)]
VALUES = [RNG.randbytes(400) for _ in range(3)]
GONE = "ERR session not found"


def _fetch(conn: Raw, sid: str, rows: int) -> object:
    return conn.call("V.FETCH", sid, 0, "RANGE", 0, rows, "FMT", "NATIVE")


def _flip(path: Path, needle: bytes) -> None:
    """Flips one bit in the middle of where `needle` is stored."""
    data = bytearray(path.read_bytes())
    data[bytes(data).index(needle) + len(needle) // 2] ^= 0x10
    path.write_bytes(data)


# --- B1: garbage behind, or inside, what was written ---------------------------------------------------------------


@pytest.fixture
def killed(tmp_path: Path) -> Process:
    """A killed server: one entry of three batches of 100 rows, and three strings."""
    process = Process(tmp_path / "data")
    process.start()
    with Raw(process.port) as conn:
        conn.ok("V.CREATE", "rows", DIM, "VQUANT", "fp16")
        for i, batch in enumerate(BATCHES):
            conn.ok("V.STOREBATCH", "rows", 0, 100 * i, 100, batch, "FMT", "F16")
        for i, value in enumerate(VALUES):
            conn.ok("SET", f"k{i}", value)
    process.kill()
    return process


def _entry(process: Process) -> Path:
    found = sorted((process.directory / "kv").rglob("*.pion"))
    assert len(found) == 1, found
    return found[0]


def _log(process: Process) -> Path:
    found = sorted(process.directory.glob("pion.wal*"))
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("tail", [RNG.randbytes(595), bytes(4096)], ids=["garbage", "zeros"])
def test_b1_bytes_behind_the_last_record(killed: Process, tail: bytes) -> None:
    for path in (_entry(killed), _log(killed)):
        with path.open("ab") as file:
            file.write(tail)
    with killed:
        with Raw(killed.port) as conn:
            assert _fetch(conn, "rows", 300) == b"".join(BATCHES)
            assert [conn.ok("GET", f"k{i}") for i in range(3)] == VALUES
            # later writes stay readable behind the cut
            conn.ok("V.STOREBATCH", "rows", 0, 300, 100, BATCHES[0], "FMT", "F16")
            conn.ok("SET", "k3", "later")
        assert re.search(rf"{len(tail)} bytes", killed.output), killed.output
        killed.restart()
        with Raw(killed.port) as conn:
            assert _fetch(conn, "rows", 400) == b"".join([*BATCHES, BATCHES[0]])
            assert [conn.ok("GET", f"k{i}") for i in range(4)] == [*VALUES, b"later"]
    for copies in ((killed.directory / "quarantine").iterdir(), killed.directory.glob("pion.wal.*.cut.*")):
        assert tail in b"".join(path.read_bytes() for path in copies), "a copy of what was cut is kept"


def test_b1_a_flipped_bit_in_the_last_record(killed: Process) -> None:
    _flip(_entry(killed), BATCHES[2])
    _flip(_log(killed), VALUES[2])
    with killed:
        with Raw(killed.port) as conn:
            assert conn.fields("V.INFO", "rows")["layer_0_tokens"] == "200"
            assert _fetch(conn, "rows", 200) == b"".join(BATCHES[:2])
            assert [conn.ok("GET", f"k{i}") for i in range(3)] == [*VALUES[:2], None]
        assert re.search(r"\d+ bytes", killed.output), killed.output


def test_b1_a_flipped_bit_in_the_middle_is_not_skipped_in_silence(killed: Process) -> None:
    _flip(_entry(killed), BATCHES[1])
    with killed:
        with Raw(killed.port) as conn:
            reply = _fetch(conn, "rows", 300)
            assert isinstance(reply, ReplyError), "neither the flipped rows nor zeros in their place"
            assert [conn.ok("GET", f"k{i}") for i in range(3)] == VALUES
        deadline = time.monotonic() + 20
        while not re.search(r"quarantin", killed.output):
            assert time.monotonic() < deadline, killed.output


@pytest.mark.parametrize("synced", [False, True])
def test_b1_a_flipped_bit_in_the_middle_of_the_log(tmp_path: Path, synced: bool) -> None:
    """What had been on the medium was damaged later: only that is lost. Otherwise it may be a power cut: cut there."""
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            for i, value in enumerate(VALUES):
                conn.ok("SET", f"k{i}", value)
            if synced:
                conn.ok("KV.PREFIX.COMMIT")
            conn.ok("SET", "k3", "last")
        process.kill()
        _flip(_log(process), VALUES[1])
        process.start()
        with Raw(process.port) as conn:
            found = [conn.ok("GET", f"k{i}") for i in range(4)]
            assert found == ([VALUES[0], None, VALUES[2], b"last"] if synced else [VALUES[0], None, None, None])
        assert re.search(r"ERROR .*pion\.wal\S* .*(set aside|are damaged)", process.output), process.output
        kept = b"".join(path.read_bytes() for path in process.directory.glob("pion.wal.*.*"))
        assert VALUES[1][:100] in kept, "nothing is thrown away"
        process.restart()
        with Raw(process.port) as conn:
            assert [conn.ok("GET", f"k{i}") for i in range(4)] == found


# --- B5: deleted stays deleted -------------------------------------------------------------------------------------


def test_b5_deleted_data_stays_away(tmp_path: Path) -> None:
    rows = RNG.randbytes(2 * DIM * 10)
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            conn.ok("FLUSHALL")
            for ns in ("dropped", "again", "kept"):
                conn.ok("KV.PREFIX.REGISTER", ns, DIM, "fp16")
                for side in ("_pk", "_pv"):
                    conn.ok("V.STOREBATCH", ns + side, 0, 0, 10, rows, "FMT", "F16")
            conn.ok("SSM.PREFIX.STORE", "dropped", 3, "state")
            conn.ok("SSM.PREFIX.STORE", "kept", 3, "state")
            conn.ok("SSM.PREFIX.STORE", "kept", 4, "state")
            conn.ok("SSM.PREFIX.DROP", "kept", 4)
            assert conn.ok("KV.PREFIX.DROP", "dropped", "again") == 2
            conn.ok("KV.PREFIX.REGISTER", "again", 2 * DIM, "int8")
            conn.ok("SET", "expires", "v")
            conn.ok("SET", "deleted", "v")
            conn.ok("SET", "unlinked", "v")
            conn.ok("HSET", "hash", "only", "v")
            conn.ok("ZADD", "zset", 1, "only")
            conn.ok("PEXPIRE", "expires", 1)
            conn.ok("DEL", "deleted")
            conn.ok("UNLINK", "unlinked")
            conn.ok("HDEL", "hash", "only")
            conn.ok("ZREM", "zset", "only")
            deadline = time.monotonic() + 10
            while conn.ok("EXISTS", "expires"):
                assert time.monotonic() < deadline
        for _ in range(2):  # the second time from what the first restart wrote
            process.restart()
            with Raw(process.port) as conn:
                assert conn.ok("DBSIZE") == 0
                assert conn.ok("EXISTS", "expires", "deleted", "unlinked", "hash", "zset") == 0
                assert str(_fetch(conn, "dropped_pk", 10)) == GONE
                assert conn.ok("KV.PREFIX.LOOKUP", "dropped") == "MISS"
                assert conn.ok("SSM.PREFIX.FETCH", "dropped", 3) is None
                assert conn.ok("SSM.PREFIX.FETCH", "kept", 3) == b"state"
                assert conn.ok("SSM.PREFIX.FETCH", "kept", 4) is None
                assert _fetch(conn, "again_pk", 10) is None, "the entry made anew has none of the old rows"
                assert conn.fields("V.INFO", "again_pk")["v_format"] == "int8"
                assert _fetch(conn, "kept_pv", 10) == rows


def test_b5_flushall_and_prefix_flush(tmp_path: Path) -> None:
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            for i in range(20):
                conn.ok("SET", f"k{i}", i)
                conn.ok("KV.PREFIX.REGISTER", f"p{i}", DIM, "fp16")
            conn.ok("FLUSHALL")
            assert conn.ok("KV.PREFIX.FLUSH") == 20
            conn.ok("SET", "after", "1")
            conn.ok("KV.PREFIX.REGISTER", "after", DIM, "fp16")
        process.restart()
        with Raw(process.port) as conn:
            assert conn.ok("KEYS", "*") == [b"after"]
            assert conn.fields("KV.PREFIX.INFO")["registered_prefixes"] == "1"
            assert conn.ok("KV.PREFIX.LIST") == [b"0", [b"after"]]
            assert conn.ok("KV.PREFIX.LOOKUP", "p3") == "MISS"


def test_b5_drop_register_in_another_format_save(tmp_path: Path) -> None:
    old, new = RNG.randbytes(2 * DIM * 50), RNG.randbytes(4 * DIM * 5)
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16")
            conn.ok("V.STOREBATCH", "ns_pk", 0, 0, 50, old, "FMT", "F16")
            conn.ok("V.STOREBATCH", "ns_pk", 5, 0, 50, old, "FMT", "F16")
            conn.ok("KV.PREFIX.DROP", "ns")
            conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp32")
            conn.ok("V.STOREBATCH", "ns_pk", 0, 0, 5, new)
            conn.ok("KV.PREFIX.SAVE")
        process.restart()
        with Raw(process.port) as conn:
            info = conn.fields("V.INFO", "ns_pk")
            assert (info["v_format"], info["num_layers"], info["total_tokens"]) == ("fp32", "1", "5")
            assert _fetch(conn, "ns_pk", 5) == new
            assert conn.fields("KV.PREFIX.INFO")["vstore_bytes"] == str(len(new))


def test_b5_lru_eviction(tmp_path: Path) -> None:
    with Process(tmp_path / "data", "--max-sessions", "8") as process:
        with Raw(process.port) as conn:
            for i in range(4):
                conn.ok("KV.PREFIX.REGISTER", f"p{i}", DIM, "fp16")
            assert conn.ok("KV.PREFIX.LOOKUP", "p0") == "HIT"  # now p1 is the oldest
            conn.ok("KV.PREFIX.REGISTER", "p4", DIM, "fp16")
            answers = [conn.ok("KV.PREFIX.LOOKUP", f"p{i}") for i in range(5)]
            assert answers == ["HIT", "MISS", "HIT", "HIT", "HIT"]
            info = conn.fields("KV.PREFIX.INFO")
            assert (info["vstore_sessions"], info["vstore_max_sessions"], info["vstore_evictions"]) == ("8", "8", "2")
            assert conn.ok("KV.PREFIX.WHY", "p1").startswith(b"evicted")
        process.restart()
        with Raw(process.port) as conn:
            assert [conn.ok("KV.PREFIX.LOOKUP", f"p{i}") for i in range(5)] == answers


def test_b5_budget_eviction(tmp_path: Path) -> None:
    rows = RNG.randbytes(1 << 20)
    with Process(tmp_path / "data", "--max-bytes", "8mb") as process:
        with Raw(process.port) as conn:
            for i in range(20):
                conn.ok("KV.PREFIX.REGISTER", f"p{i}", 512, "fp16")
                conn.ok("V.STOREBATCH", f"p{i}_pk", 0, 0, 1024, rows, "FMT", "F16")
            held = [i for i in range(20) if conn.ok("KV.PREFIX.LOOKUP", f"p{i}") == "HIT"]
            assert held == list(range(held[0], 20)), "the oldest go first"
            assert 2 <= len(held) <= 8
            assert int(conn.fields("KV.PREFIX.INFO")["vstore_bytes"]) == len(held) << 20
        process.restart()
        with Raw(process.port) as conn:
            assert [i for i in range(20) if conn.ok("KV.PREFIX.LOOKUP", f"p{i}") == "HIT"] == held
            assert _fetch_rows(conn, f"p{held[0]}_pk") == rows


def _fetch_rows(conn: Raw, sid: str) -> object:
    return conn.ok("V.FETCH", sid, 0, "RANGE", 0, 1024, "FMT", "NATIVE")


# --- B12: found again ----------------------------------------------------------------------------------------------


def test_b12_twenty_prefixes_and_ten_thousand_keys_are_found_after_a_kill(tmp_path: Path) -> None:
    """Without a client's help."""
    keys = {f"key:{i}": f"value {i} {i * i}" for i in range(10_000)}
    stored = {f"app|v1|model|fp16|{i}": RNG.randbytes(2 * DIM * (i + 1)) for i in range(20)}
    digest = "ab" * 32
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            for ns, rows in stored.items():
                count = len(rows) // (2 * DIM)
                conn.ok("KV.PREFIX.REGISTER", ns, DIM, "fp16", "ROWS", count, "LAYERS", 1, "DIGEST", digest)
                for side in ("_pk", "_pv"):
                    conn.ok("V.STOREBATCH", ns + side, 0, 0, count, rows, "FMT", "F16")
            assert set(conn.many([("SET", key, value) for key, value in keys.items()])) == {"OK"}
        process.restart()
        with Raw(process.port) as conn:
            assert conn.ok("DBSIZE") == len(keys)
            assert conn.ok("MGET", *keys) == [value.encode() for value in keys.values()]
            for ns, rows in stored.items():
                assert conn.ok("KV.PREFIX.LOOKUP", ns, "DIGEST", digest) == "HIT"
                assert _fetch(conn, f"{ns}_pv", len(rows) // (2 * DIM)) == rows
                assert str(conn.call("KV.PREFIX.LOOKUP", ns, "DIGEST", "cd" * 32)).startswith("MISMATCH ")
            assert conn.fields("KV.PREFIX.INFO")["registered_prefixes"] == "20"


def test_b12_the_index_is_rebuilt_when_it_is_missing_or_torn(tmp_path: Path) -> None:
    rows = RNG.randbytes(2 * DIM * 10)
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            for i in range(20):
                conn.ok("KV.PREFIX.REGISTER", f"p{i}", DIM, "fp16", "ROWS", 10, "LAYERS", 1)
                conn.ok("V.STOREBATCH", f"p{i}_pk", 0, 0, 10, rows, "FMT", "F16")
                conn.ok("V.STOREBATCH", f"p{i}_pv", 0, 0, 10, rows, "FMT", "F16")
        for damage in ("missing", "torn"):
            process.kill()
            index = process.directory / "pion.index"
            if damage == "missing":
                index.unlink()
            else:
                index.write_bytes(index.read_bytes()[: index.stat().st_size // 2] + b"\xff" * 100)
            process.start()
            with Raw(process.port) as conn:
                assert [conn.ok("KV.PREFIX.LOOKUP", f"p{i}") for i in range(20)] == ["HIT"] * 20
                assert _fetch(conn, "p7_pk", 10) == rows


def test_a_second_server_on_the_directory_refuses_and_names_the_first(tmp_path: Path) -> None:
    with Process(tmp_path / "data") as first:
        with pytest.raises(RuntimeError, match=rf"in use by the process {first.pid}\b"):
            Process(tmp_path / "data").start()
        with Raw(first.port) as conn:
            assert conn.ok("PING") == "PONG"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="a limit of another process")
def test_b7_a_log_that_cannot_be_written_ends_no_connection(tmp_path: Path) -> None:
    """One answer for each command that was pipelined, reads go on, and writes do once there is room."""
    with Process(tmp_path / "data") as process, Raw(process.port) as conn:
        assert conn.ok("SET", "before", "1") == "OK"
        (log,) = (tmp_path / "data").glob("pion.wal.*")
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size + 100, hard))
        try:
            conn.send(frame("SET", "big", b"x" * 4000) + frame("HSET", "h", "f", "v") + frame("LASTSAVE"))
            first, second = conn.read(), conn.read()
            for reply in (first, second):
                assert isinstance(reply, ReplyError)
                assert str(reply).startswith("MISCONF Errors writing to the log: "), reply
            conn.read()
            assert conn.ok("GET", "before") == b"1"
            assert conn.ok("PING") == "PONG"
        finally:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        deadline = time.monotonic() + 20
        while conn.call("SET", "after", "2") != "OK":
            assert time.monotonic() < deadline
        process.restart()
        with Raw(process.port) as again:
            assert again.ok("GET", "after") == b"2"
