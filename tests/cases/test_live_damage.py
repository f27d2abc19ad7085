"""B1, B7: entry files that are cut, removed or exchanged under a running server."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion.store import layout
from tests.support.process import Process
from tests.support.raw import Closed, Raw, ReplyError, frame

RNG = random.Random(7)
DIM, ROWS = 64, 3000  # 384 KiB a layer: sent by sendfile
BODY = RNG.randbytes(2 * DIM * ROWS)
OTHER = RNG.randbytes(2 * DIM * ROWS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            for ns, body in (("ns", BODY), ("other", OTHER)):
                conn.ok("KV.PREFIX.REGISTER", ns, DIM, "fp16", "ROWS", ROWS, "LAYERS", 1)
                for side in ("_pk", "_pv"):
                    conn.ok("V.STOREBATCH", ns + side, 0, 0, ROWS, body, "FMT", "F16")
        yield process


def _file(process: Process, ns: str) -> Path:
    return process.directory / layout.entry_path(layout.PREFIX + ns.encode())


def _fetch(conn: Raw, ns: str) -> object:
    return conn.call("V.FETCH", f"{ns}_pv", 0, "RANGE", 0, ROWS, "FMT", "NATIVE")


def _said(process: Process, text: str) -> None:
    end = time.monotonic() + 20
    while not re.search(text, process.output):
        assert time.monotonic() < end, process.output


@pytest.mark.parametrize("after", ["fetch", "restart"])
@pytest.mark.parametrize("what", ["cut", "emptied", "removed", "replaced"])
def test_b1_a_file_is_changed_under_the_server(server: Process, what: str, after: str) -> None:
    """One clear error, the reason in the log and in WHY, then a miss; others are served, the name can be used again."""
    if after == "restart":  # nothing of it is open, nothing has been read
        server.restart()
    path, other = _file(server, "ns"), _file(server, "other")
    with Raw(server.port) as conn:
        if after == "fetch":
            assert _fetch(conn, "ns") == BODY
        if what == "cut":
            os.truncate(path, 5000)
        elif what == "emptied":
            os.truncate(path, 0)
        elif what == "removed":
            path.unlink()
        else:
            path.with_name("copy").write_bytes(other.read_bytes())
            path.with_name("copy").rename(path)
        reply = _fetch(conn, "ns")
        if reply is not None:  # rows that are gone
            assert isinstance(reply, ReplyError), "never other bytes"
        assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "MISS"
        why = conn.ok("KV.PREFIX.WHY", "ns")
        assert isinstance(why, bytes)
        assert re.search(rb"removed|damaged|incomplete", why), why
        assert conn.ok("PING") == "PONG"
        assert _fetch(conn, "other") == OTHER
        _said(server, "(?s)ns'.*(cut|gone|damaged|removed|place)")
        conn.ok("KV.PREFIX.REGISTER", "ns", DIM, "fp16", "ROWS", ROWS, "LAYERS", 1)
        for side in ("_pk", "_pv"):
            conn.ok("V.STOREBATCH", f"ns{side}", 0, 0, ROWS, OTHER, "FMT", "F16")
        assert _fetch(conn, "ns") == OTHER
    server.restart()
    with Raw(server.port) as conn:
        assert _fetch(conn, "ns") == OTHER
        assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "HIT"


def test_b1_another_file_is_written_over_one_in_place(server: Process) -> None:
    """Before its rows were read: nothing in it is a record of this entry any more."""
    server.restart()
    data = _file(server, "other").read_bytes()
    with Raw(server.port) as conn:
        assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "HIT"  # the file is open from here on
        with _file(server, "ns").open("r+b") as file:
            file.write(data)
        reply = _fetch(conn, "ns")
        assert isinstance(reply, ReplyError), "never other bytes"
        assert "out of service" in str(reply)
        assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "MISS"
        assert _fetch(conn, "other") == OTHER
    assert "Traceback" not in server.output


@pytest.mark.parametrize("what", ["cut", "removed"])
def test_a_store_into_a_changed_file_is_refused(server: Process, what: str) -> None:
    """What would be acknowledged could not be found again."""
    path = _file(server, "ns")
    with Raw(server.port) as conn:
        if what == "cut":
            os.truncate(path, 5000)
        else:
            path.unlink()
        reply = conn.call("V.STOREBATCH", "ns_pk", 0, 0, 10, BODY[: 2 * DIM * 10], "FMT", "F16")
        assert isinstance(reply, ReplyError)
        assert "out of service" in str(reply)
        assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "MISS"


def test_b7_a_file_is_cut_while_it_is_sent(tmp_path: Path) -> None:
    """Something was sent already, so the connection ends; that is logged and the entry goes out of service."""
    rows = 60_000
    body = RNG.randbytes(2 * DIM * rows)
    with Process(tmp_path / "data") as process:
        with Raw(process.port) as conn:
            conn.ok("V.CREATE", "ns", DIM, "VQUANT", "fp16")
            conn.ok("V.STOREBATCH", "ns", 0, 0, rows, body, "FMT", "F16")
            path = next((process.directory / "kv").rglob("*.pion"))
            many = 8  # more than the buffers of a socket take
            for _ in range(many):
                conn.send(frame("V.FETCH", "ns", 0, "RANGE", 0, rows, "FMT", "NATIVE"))
            assert conn.read() == body
            os.truncate(path, 5000)
            with pytest.raises((OSError, Closed)):
                for _ in range(many - 1):
                    assert conn.read() == body
        with Raw(process.port) as conn:
            _said(process, "damaged .*could not be read|damaged .*cut")
            assert isinstance(conn.call("V.FETCH", "ns", 0, "RANGE", 0, 5, "FMT", "NATIVE"), ReplyError)
            assert conn.fields("KV.PREFIX.INFO")["vstore_quarantined"] == "1"
            text = conn.ok("INFO", "persistence")
            assert "set_aside_files:1" in str(text)
            assert "quarantine/" in str(text)


@pytest.mark.parametrize("what", ["cut", "removed"])
def test_b1_the_log_and_the_index_are_changed_under_the_server(server: Process, what: str) -> None:
    """Memory still has what they held: both are written anew within two seconds."""
    with Raw(server.port) as conn:
        for i in range(50):
            conn.ok("SET", f"k{i}", f"v{i}")
        for name in ("pion.wal.1", "pion.index"):
            if what == "cut":
                os.truncate(server.directory / name, 70)
            else:
                (server.directory / name).unlink()
        conn.ok("SET", "later", "v")
        conn.ok("KV.PREFIX.DROP", "other")
        _said(server, r"pion.wal.1 was .* under the running server")
        _said(server, r"pion.index was .* under the running server")
        end = time.monotonic() + 20
        while not list(server.directory.glob("pion.snapshot.*[0-9]")):
            assert time.monotonic() < end
    server.restart()
    with Raw(server.port) as conn:
        assert conn.ok("DBSIZE") == 51
        assert conn.ok("GET", "k7") == b"v7"
        assert conn.ok("KV.PREFIX.LOOKUP", "ns") == "HIT"
        assert conn.ok("KV.PREFIX.LOOKUP", "other") == "MISS"
        assert _fetch(conn, "ns") == BODY


# --- directories and the lock are removed under the server -----------------------------------------------------------


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_b14_a_removed_trash_keeps_no_dropped_file(server: Process) -> None:
    """Without kv/trash there was nowhere to move a file: it must not stay, uncounted."""
    path = _file(server, "ns")
    shutil.rmtree(server.directory / "kv/trash")
    with Raw(server.port) as conn:
        assert conn.ok("KV.PREFIX.DROP", "ns") == 1
        assert not path.exists()
        assert _fetch(conn, "other") == OTHER
        _said(server, "kv/trash was removed under the running server")


def test_b1_a_removed_quarantine_is_made_again(server: Process) -> None:
    """Somebody moves away what was set aside, with its directory: the next damaged entry is kept all the same."""
    server.restart()
    path = _file(server, "ns")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    path.write_bytes(damaged)
    shutil.rmtree(server.directory / "quarantine")
    with Raw(server.port) as conn:
        fetches = [conn.call("V.FETCH", f"ns{side}", 0, "RANGE", 0, ROWS, "FMT", "NATIVE") for side in ("_pk", "_pv")]
        assert any(isinstance(reply, ReplyError) for reply in fetches)
    for _ in range(2):
        assert len(_names(server.directory / "quarantine")) == 1
        server.restart()


def test_b1_everything_is_removed_under_the_server(server: Process) -> None:
    """What was there is gone; what is stored from then on is kept, and called durable."""
    shutil.rmtree(server.directory / "kv")
    with Raw(server.port) as conn:
        assert isinstance(_fetch(conn, "ns"), ReplyError)
        for side in ("_pk", "_pv"):
            conn.ok("KV.PREFIX.REGISTER", "new", DIM, "fp16", "ROWS", ROWS, "LAYERS", 1)
            conn.ok("V.STOREBATCH", "new" + side, 0, 0, ROWS, BODY, "FMT", "F16")
        conn.ok("KV.PREFIX.COMMIT")
    server.restart()
    with Raw(server.port) as conn:
        assert _fetch(conn, "new") == BODY
        assert conn.ok("KV.PREFIX.LOOKUP", "other") == "MISS"


def test_a_removed_lock_lets_no_second_server_in(server: Process) -> None:
    (server.directory / "pion.lock").unlink()
    with pytest.raises(RuntimeError, match="is in use by another process"):
        Process(server.directory).start()
    with Raw(server.port) as conn:
        assert _fetch(conn, "ns") == BODY
    server.restart()
